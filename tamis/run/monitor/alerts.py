"""Alerts of the monitor, from the same rules that the watchdog applies."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from tamis.config import Config
from tamis.config.size import CHECKPOINT_BYTES_PER_PARAMETER, parameter_count
from tamis.run.copies.state import read_copies
from tamis.run.file_problems import file_problems
from tamis.run.files.directory import RunDirectory
from tamis.run.files.halt import HaltFile
from tamis.run.files.hardware import MIB, free_disk_mib
from tamis.run.files.heartbeat import Heartbeat
from tamis.run.files.reading import OddFile, read_text
from tamis.run.limits import Limits, limits_for
from tamis.run.monitor.ranks import RankView, State, activity
from tamis.run.supervise.health_rules import health_alarms, save_alarms
from tamis.run.supervise.history import RunHistory
from tamis.run.supervise.stall_rules import patience, stall_alarms
from tamis.run.supervise.usage import read_recent_usage, slowed_gpus

MOST_ANOMALY_BYTES = 64 << 10


@dataclass(frozen=True)
class Alert:
    level: Literal["problem", "note"]
    text: str


def find_alerts(
    directory: RunDirectory,
    config: Config | None,
    beats: dict[int, list[Heartbeat]],
    ranks: list[RankView],
    state: State,
    now: float,
) -> list[Alert]:
    """Return alerts, problems first."""
    limits = limits_for(config) if config else Limits()
    history = RunHistory()
    history.add(beat for of_rank in beats.values() for beat in of_rank)
    alerts = [*_from_files(directory), *_from_numbers(history, limits), *_failed_saves(history), *_copies(directory)]
    if state == "running":
        alerts += _silent_ranks(history, ranks, limits)
        alerts += [Alert("note", alarm.reason) for alarm in slowed_gpus(read_recent_usage(directory), now)]
    if config and state in ("running", "starting", "restarting"):
        alerts += _disk(directory, config)
    return sorted(alerts, key=lambda alert: alert.level != "problem")


def _from_files(directory: RunDirectory) -> list[Alert]:
    alerts = []
    with suppress(FileNotFoundError):
        try:
            anomaly = read_text(directory.anomaly, MOST_ANOMALY_BYTES).strip()
        except OddFile as error:
            anomaly = str(error)
        alerts.append(Alert("problem", f"anomaly on record: {anomaly}"))
    if HaltFile(directory.halt).requested():
        alerts.append(Alert("note", f"halt requested: {HaltFile(directory.halt).reason()}"))
    alerts += [Alert("problem", f"unreadable file: {problem}") for problem in file_problems(directory)]
    unfinished = set(directory.checkpoint_traces()) - set(directory.checkpoints())
    alerts += [Alert("note", f"checkpoint of step {step} is unfinished; it is never used") for step in unfinished]
    return alerts


def _failed_saves(history: RunHistory) -> list[Alert]:
    return [Alert("problem", alarm.reason) for alarm in save_alarms(history)]


def _copies(directory: RunDirectory) -> list[Alert]:
    state = read_copies(directory)
    return [Alert("problem", f"nothing is copied to copy.to: {state.problem}")] if state and state.problem else []


def _from_numbers(history: RunHistory, limits: Limits) -> list[Alert]:
    """Judge loss, gradient, gates, memory and speed. The history's clock never ticked, so no rank counts as silent."""
    alarms = [*health_alarms(history, limits), *stall_alarms(history, {}, limits)]
    return [Alert("note" if alarm.severity == "note" else "problem", alarm.reason) for alarm in alarms]


def _silent_ranks(history: RunHistory, ranks: list[RankView], limits: Limits) -> list[Alert]:
    alerts = []
    for view in ranks:
        last = activity(view.phase, view.step)
        limit = patience(history.ranks[view.rank], limits)
        if not view.is_alive and view.phase not in ("done", "halted", "failed"):
            alerts.append(Alert("problem", f"rank {view.rank} (pid {view.pid}) is dead; its last heartbeat: {last}"))
        elif view.age_s > limit:
            silence = f"silent for {view.age_s:.0f} s (limit {limit:.0f} s); its last heartbeat: {last}"
            alerts.append(Alert("problem", f"rank {view.rank} is {silence}"))
    return alerts


def _disk(directory: RunDirectory, config: Config) -> list[Alert]:
    needed = parameter_count(config) * CHECKPOINT_BYTES_PER_PARAMETER // MIB
    free = free_disk_mib(directory.path)
    if free >= needed:
        return []
    return [Alert("problem", f"{free} MiB of disk left, the next checkpoint needs {needed} MiB")]
