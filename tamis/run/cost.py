"""What the machine has cost a run, over all its launches, and the limits on it. OUT/cost.json keeps the sums."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass

from tamis.config import Config
from tamis.run.background import repeated
from tamis.run.eta import duration_text
from tamis.run.files.directory import RunDirectory
from tamis.run.files.reading import read_json
from tamis.run.files.records import write_json_atomic

SAVE_EVERY_S = 15.0  # lost at most when a launch is killed


@dataclass(frozen=True)
class Spent:
    """Hours under a launch, and their price in $; 0 where cost.per_hour is not set."""

    hours: float = 0.0
    cost: float = 0.0
    per_hour: float = 0.0

    def __str__(self) -> str:
        time_spent = duration_text(self.hours * 3600)
        return f"{money(self.cost)} for {time_spent} at {money(self.per_hour)} an hour" if self.per_hour else time_spent


def money(amount: float) -> str:
    return f"{amount:,.2f} $"


def read_spent(run: RunDirectory) -> Spent | None:
    """The sums that the launches of a run have kept; None when there are none."""
    try:
        stored = read_json(run.cost_json)
        spent = Spent(*(float(stored[name]) for name in ("hours", "cost", "per_hour")))
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return spent if all(math.isfinite(value) and value >= 0 for value in asdict(spent).values()) else None


class CostMeter:
    """Adds the time of this launch to what earlier launches of the run have spent."""

    def __init__(self, config: Config, run: RunDirectory) -> None:
        self.settings, self.run = config.cost, run
        self._before = read_spent(run) or Spent()
        self._began = time.monotonic()
        self._is_used = False  # a launch that finds nothing to do leaves no trace

    def spent(self) -> Spent:
        hours = (time.monotonic() - self._began) / 3600
        per_hour = self.settings.per_hour
        return Spent(self._before.hours + hours, self._before.cost + hours * per_hour, per_hour)

    def limit_reached(self) -> str | None:
        """The limit that is reached, in words with its key; None below it."""
        self._is_used = True
        spent, most, most_hours = self.spent(), self.settings.max, self.settings.max_hours
        if most is not None and spent.cost >= most:
            return f"cost.max={most:g} is reached ({spent}): raise it to continue"
        if most_hours is not None and spent.hours >= most_hours:
            return f"cost.max_hours={most_hours:g} is reached ({spent}): raise it to continue"
        return None

    def save(self) -> None:
        if self._is_used and (self.settings.per_hour or self.settings.max_hours) and self.run.is_still_held():
            with suppress(OSError):  # a full disk must not end the run
                write_json_atomic(self.run.cost_json, asdict(self.spent()))


@contextmanager
def metered(config: Config, run: RunDirectory) -> Iterator[CostMeter]:
    """Measure what a launch costs while the block runs."""
    meter = CostMeter(config, run)
    try:
        with repeated(SAVE_EVERY_S, meter.save):
            yield meter
    finally:
        meter.save()


def cost_banner(config: Config, meter: CostMeter) -> str | None:
    """The price, the limits and what was spent before, in one line before the launch; None where nothing is set."""
    cost = config.cost
    limits = [f"{name}={value:g}" for name, value in (("max", cost.max), ("max_hours", cost.max_hours)) if value]
    if not cost.per_hour and not limits:
        return None
    price = f"{money(cost.per_hour)} an hour" if cost.per_hour else "cost.per_hour is not set"
    return f"cost: {price}, limits: {', '.join(limits) or 'none'}; spent before: {meter.spent()}"
