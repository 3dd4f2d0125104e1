"""Everything a run left behind, read once for phases, judge, report and handoff. Reads only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from tamis.config import Config, ConfigError, build_config
from tamis.config.yaml_file import read_value
from tamis.run.files.directory import RunDirectory
from tamis.run.files.events import read_events
from tamis.run.files.heartbeat import Heartbeat, read_heartbeats
from tamis.run.files.info import read_info
from tamis.run.files.reading import is_regular, read_last_lines, read_text
from tamis.run.files.records import utc
from tamis.run.supervise.usage import UsageSample, read_usage, usage_csv

MOST_CSV_BYTES = 256 << 20
LOGS = ("launch.log", "smoke.log", "train.log")


@dataclass(frozen=True)
class TrainingRow:
    step: int
    loss: float
    lr: float
    toks_per_s: float

    @classmethod
    def of(cls, row: list[float]) -> TrainingRow:
        return cls(int(row[0]), *row[1:])


@dataclass(frozen=True)
class ValidationRow:
    step: int
    loss: float
    ppl: float

    @classmethod
    def of(cls, row: list[float]) -> ValidationRow:
        return cls(int(row[0]), *row[1:])


@dataclass(frozen=True)
class Evidence:
    directory: RunDirectory
    config: Config | None  # None: config.yaml is missing or cannot be read
    info: dict[str, Any]  # run.info; empty when there is none
    training: list[TrainingRow]
    validation: list[ValidationRow]
    beats: dict[int, list[Heartbeat]]  # by rank, oldest first
    events: list[dict[str, Any]]  # ts, by, event, reason and maybe evidence
    usage: list[UsageSample]

    @property
    def processes(self) -> int | None:
        """Number of ranks that run.info names; None without it."""
        count = self.info.get("processes")
        return count if isinstance(count, int) else None

    @property
    def logs(self) -> list[Path]:
        """Logs of every launch into this directory, oldest first."""
        folders = [self.directory.path, *launch_folders(self.info)]
        return [path for folder in folders for name in LOGS if is_regular(path := folder / name)]

    @cached_property
    def step_ends(self) -> dict[int, list[Heartbeat]]:
        return {rank: [beat for beat in beats if beat.phase == "step_end"] for rank, beats in self.beats.items()}

    @cached_property
    def hours_by_step(self) -> list[tuple[int, float]]:
        """Steps of rank 0 → hours of training until their end, without the pauses between two processes."""
        ends = self.step_ends.get(0, [])
        hours, points = 0.0, [(end.step, 0.0) for end in ends[:1]]
        for before, after in pairwise(ends):
            hours += (after.ts - before.ts) / 3600 if after.pid == before.pid else 0.0
            points.append((after.step, hours))
        return points

    @property
    def uses_gpus(self) -> bool:
        """True if the heartbeats hold GPU memory or, before the first step, if run.info names GPUs."""
        ends = [beat for beats in self.step_ends.values() for beat in beats]
        if ends:
            return any(beat.gpu_mem_alloc_gib is not None for beat in ends)
        return bool(self.info.get("gpu_count"))

    @property
    def last_beat(self) -> Heartbeat | None:
        """The latest beat of any rank."""
        lasts = [beats[-1] for beats in self.beats.values() if beats]
        return max(lasts, key=lambda beat: beat.ts, default=None)

    @property
    def last_step(self) -> int:
        """The last step every rank with heartbeats has finished."""
        return min((ends[-1].step if ends else 0 for ends in self.step_ends.values()), default=0)

    @property
    def span(self) -> str:
        """When the heartbeats began and ended."""
        times = [beat.ts for beats in self.beats.values() for beat in (beats[:1] + beats[-1:])]
        return f"{utc(min(times))} to {utc(max(times))}" if times else "no heartbeat"

    @property
    def is_showcase(self) -> bool:
        """True for a run on the CPU that is not production: what runbooks ask of a run on GPUs does not apply."""
        return not self.uses_gpus and not (self.config and self.config.runtime.production)

    @property
    def planned_steps(self) -> int | None:
        return self.config.train.steps if self.config else None

    def until(self, step: int) -> Evidence:
        """The run as it was when `step` was finished."""
        ends = [beat.ts for beats in self.step_ends.values() for beat in beats if beat.step <= step]
        moment = max(ends, default=float("-inf"))
        return replace(
            self,
            training=[row for row in self.training if row.step <= step],
            validation=[row for row in self.validation if row.step <= step],
            beats={rank: [beat for beat in beats if beat.ts <= moment] for rank, beats in self.beats.items()},
            events=[event for event in self.events if event["ts"] <= moment],
            usage=[sample for sample in self.usage if sample.ts <= moment],
        )


def read_evidence(run_dir: str | Path | RunDirectory) -> Evidence:
    directory = run_dir if isinstance(run_dir, RunDirectory) else RunDirectory(run_dir)
    return Evidence(
        directory=directory,
        config=read_config(directory),
        info=read_info(directory.run_info),
        training=[TrainingRow.of(row) for row in _number_rows(directory.training_csv, columns=4)],
        validation=[ValidationRow.of(row) for row in _number_rows(directory.val_csv, columns=3)],
        beats={rank: read_heartbeats(path) for rank, path in directory.heartbeats().items()},
        events=read_events(directory),
        usage=read_usage(usage_csv(directory)),
    )


def launch_folders(info: dict[str, Any]) -> list[Path]:
    """Log folder (artifacts/train_runs/m7c_<timestamp>) of each launch into the same out_dir, oldest first."""
    run_dir = info.get("run_dir")
    if not isinstance(run_dir, str) or run_dir == info.get("out_dir"):
        return []
    siblings = sorted(path.parent for path in Path(run_dir).parent.glob("*/run.info"))
    return [folder for folder in siblings if read_info(folder / "run.info").get("out_dir") == info.get("out_dir")]


def read_config(directory: RunDirectory) -> Config | None:
    """The configuration in OUT/config.yaml; None when it is missing or cannot be read."""
    try:
        return parse_config(read_text(directory.config_yaml))
    except (OSError, ValueError):
        return None


@lru_cache(maxsize=8)  # the monitor reads the same text every two seconds, and YAML is slow
def parse_config(text: str) -> Config:
    try:
        tree = read_value(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"not valid YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError("not a YAML mapping")
    return build_config(tree)


def _number_rows(path: Path, columns: int) -> list[list[float]]:
    """Complete rows of numbers, without the header and without a line cut short by a kill."""
    return [row for line in read_last_lines(path, MOST_CSV_BYTES) if (row := parse_row(line, columns)) is not None]


def parse_row(line: bytes, columns: int) -> list[float] | None:
    """The numbers of one row, the first of them a step; None for the header and anything else."""
    try:
        row = [float(cell) for cell in line.split(b",")]
    except ValueError:
        return None
    return row if len(row) == columns and 0 <= row[0] < 2**53 else None
