"""The state of a run at one moment, read from its directory for every view of the monitor. Reads only.

It works at any time: before the directory exists, before the first step, while the run trains, and long after.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tamis.config import Config
from tamis.config.size import parameter_count
from tamis.run.checks.evidence import TrainingRow, ValidationRow, read_config
from tamis.run.copies.state import read_copies
from tamis.run.cost import Spent, read_spent
from tamis.run.eta import TokenProgress, measure_progress
from tamis.run.files.directory import RunDirectory
from tamis.run.files.events import read_events
from tamis.run.files.hardware import MIB, Gpu, GpuLost, read_gpus
from tamis.run.files.heartbeat import Heartbeat
from tamis.run.files.info import read_info
from tamis.run.files.manifest import read_manifest
from tamis.run.files.records import Sample, SampleLog, utc
from tamis.run.locate import runs_near
from tamis.run.monitor.alerts import Alert, find_alerts
from tamis.run.monitor.growing import GrowingFiles
from tamis.run.monitor.ranks import RankView, State, rank_view, state_of

RECENT_EVENTS, RECENT_SAVES = 8, 6
WORDS_OF_PHASE = {"checkpoint": "save", "eval": "evaluation"}
MOST_SAMPLES = 64


@dataclass(frozen=True)
class GateView:
    layer: int
    compressed: float
    selected: float
    window: float
    entropy: float | None
    distinct: float | None = None  # selection health, see Heartbeat
    distance: float | None = None
    likeness: float | None = None


@dataclass(frozen=True)
class CheckpointView:
    step: int
    mib: float
    time: str


@dataclass(frozen=True)
class CopiesView:
    """What `copy.to` holds of the run."""

    newest_step: int | None
    copying_step: int | None
    age_s: float | None  # since something was copied last


@dataclass(frozen=True)
class StepTimes:
    """Seconds; the last step's, and medians over the recent ones."""

    step_s: float | None = None
    fetch_s: float | None = None
    compute_s: float | None = None  # step without fetch
    fetch_p50_s: float | None = None
    fetch_p95_s: float | None = None


@dataclass(frozen=True)
class Snapshot:
    run_dir: str
    taken_at: str
    state: State
    headline: str  # one sentence
    launch_phase: int | None = None  # 0 to 2 during the phases before production
    model: str | None = None
    parameters: int | None = None
    dataset: str | None = None
    processes: int | None = None
    step: int = 0
    steps: int | None = None
    phase: str | None = None
    progress: TokenProgress = field(default_factory=TokenProgress)
    loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    toks_per_s: float | None = None
    mfu: float | None = None
    times: StepTimes = field(default_factory=StepTimes)
    training: list[TrainingRow] = field(default_factory=list)
    validation: list[ValidationRow] = field(default_factory=list)
    ranks: list[RankView] = field(default_factory=list)
    gates: list[GateView] = field(default_factory=list)
    gate_entropy_mean: float | None = None
    gate_collapse_fraction: float | None = None
    gpus: list[Gpu] = field(default_factory=list)
    checkpoints: list[CheckpointView] = field(default_factory=list)
    copies: CopiesView | None = None
    alerts: list[Alert] = field(default_factory=list)
    cost: Spent | None = None  # by all launches so far
    events: list[dict[str, Any]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)  # of the last evaluation


def read_snapshot(
    run_dir: str | Path,
    *,
    now: float | None = None,
    gpus: Sequence[Gpu] | None = None,
    files: GrowingFiles | None = None,
) -> Snapshot:
    """Read everything the monitor shows. `now` and `gpus` default to the machine's own.

    With the same `files`, a later call reads only what was added to heartbeats and CSV files.
    """
    now = time.time() if now is None else now
    alerts: list[Alert] = []
    if gpus is None:
        try:
            gpus = read_gpus()
        except GpuLost as error:
            gpus, alerts = [], [Alert("problem", str(error))]
    directory = active_directory(RunDirectory(run_dir))
    if directory.path.is_dir():
        snapshot = _read(directory, now, list(gpus), files or GrowingFiles())
        return replace(snapshot, alerts=alerts + snapshot.alerts, cost=read_spent(RunDirectory(run_dir)))
    sentence = f"the run directory does not exist yet{_others(directory.path)}"
    return Snapshot(str(directory.path), utc(now), "missing", sentence, gpus=[*gpus], alerts=alerts)


def _others(path: Path) -> str:
    """Name the existing runs, in case the path is mistyped."""
    runs = runs_near(path)
    return f"; runs here: {', '.join(map(str, runs))}" if runs else ""


def active_directory(out: RunDirectory) -> RunDirectory:
    """The directory written last: that of a phase under OUT/phases, or OUT itself."""
    candidates = [out, *map(RunDirectory, sorted((out.path / "phases").glob("phase*_*")))]
    return max(candidates, key=_last_written)


def _launch_phase(directory: RunDirectory) -> int | None:
    match = re.match(r"phase(\d)_", directory.path.name)
    return int(match[1]) if match and directory.path.parent.name == "phases" else None


def _last_written(directory: RunDirectory) -> float:
    files = [*directory.heartbeats().values(), directory.run_info]
    times = [0.0]
    for path in files:
        with suppress(OSError):
            times.append(path.lstat().st_mtime)
    return max(times)


def _read(directory: RunDirectory, now: float, gpus: list[Gpu], files: GrowingFiles) -> Snapshot:
    config, info = read_config(directory), read_info(directory.run_info)
    beats = files.beats(directory)
    ranks = [rank_view(rank, of_rank, now) for rank, of_rank in beats.items() if of_rank]
    state, headline = state_of(directory, ranks)
    ends = [beat for beat in beats.get(0, []) if beat.phase == "step_end"]
    last = ends[-1] if ends else None
    processes = info.get("processes") or len(beats) or None
    training = [TrainingRow.of(row) for row in files.rows(directory.training_csv, columns=4)]
    return Snapshot(
        run_dir=str(directory.path),
        taken_at=utc(now),
        state=state,
        headline=headline,
        launch_phase=_launch_phase(directory),
        model=config.model.name if config else info.get("model"),
        parameters=parameter_count(config) if config else info.get("parameters"),
        dataset=config.data.dataset if config else info.get("dataset"),
        processes=processes,
        step=last.step if last else (training[-1].step if training else 0),
        steps=config.train.steps if config else info.get("steps"),
        phase=beats[0][-1].phase if beats.get(0) else None,
        progress=_progress(config, processes, ends, state),
        loss=_latest(ends, "loss"),
        lr=_latest(ends, "lr"),
        grad_norm=_latest(ends, "grad_norm"),
        toks_per_s=_latest(ends, "toks_per_s"),
        mfu=_latest(ends, "mfu"),
        times=_step_times(ends),
        training=training if len(training) > 1 else _rows_of_beats(ends),
        validation=[ValidationRow.of(row) for row in files.rows(directory.val_csv, columns=3)],
        ranks=ranks,
        gates=_gate_views(ends),
        gate_entropy_mean=_latest(ends, "gate_entropy_mean"),
        gate_collapse_fraction=_latest(ends, "gate_collapse_fraction"),
        gpus=gpus,
        checkpoints=_checkpoint_views(directory),
        copies=_copies_view(directory, now),
        alerts=find_alerts(directory, config, beats, ranks, state, now),
        events=_recent_events(directory, beats.get(0, [])),
        samples=_last_samples(directory),
    )


def _last_samples(directory: RunDirectory) -> list[Sample]:
    newest = SampleLog(directory.samples).read(MOST_SAMPLES)
    return [sample for sample in newest if sample.step == newest[-1].step]


def _recent_events(directory: RunDirectory, beats: list[Heartbeat]) -> list[dict[str, Any]]:
    """The newest recorded events, with the newest saves and evaluations among them."""
    done = [beat for beat in beats if beat.phase in WORDS_OF_PHASE and beat.save_error is None][-RECENT_SAVES:]
    from_beats = [
        {"ts": beat.ts, "by": "trainer", "event": WORDS_OF_PHASE[beat.phase], "reason": f"at step {beat.step}"}
        for beat in done
    ]
    return sorted([*read_events(directory, RECENT_EVENTS), *from_beats], key=lambda event: event["ts"])


def _progress(config: Config | None, processes: int | None, ends: list[Heartbeat], state: State) -> TokenProgress:
    if config is None or processes is None or not ends:
        return TokenProgress()
    return measure_progress(ends, config.tokens_per_step(processes), config.train.steps, is_running=state == "running")


def _step_times(ends: list[Heartbeat]) -> StepTimes:
    step, fetch = _latest(ends, "dt_step_s"), _latest(ends, "dt_fetch_s")
    compute = step - fetch if step is not None and fetch is not None else None
    return StepTimes(step, fetch, compute, _latest(ends, "dt_fetch_p50_s"), _latest(ends, "dt_fetch_p95_s"))


def _latest(ends: list[Heartbeat], name: str) -> float | None:
    """Newest value of a field that not every beat has."""
    return next((value for beat in reversed(ends) if (value := getattr(beat, name)) is not None), None)


def _rows_of_beats(ends: list[Heartbeat]) -> list[TrainingRow]:
    """Rows from the heartbeats, which hold every step, for the time before the second logged row."""
    return [
        TrainingRow(beat.step, beat.loss, beat.lr or 0.0, beat.toks_per_s or 0.0)
        for beat in ends
        if beat.loss is not None and math.isfinite(beat.loss)
    ]


def _gate_views(ends: list[Heartbeat]) -> list[GateView]:
    beat = next((beat for beat in reversed(ends) if beat.gate_shares), None)
    if beat is None or beat.gate_shares is None:
        return []
    entropies = dict(enumerate(beat.gate_entropy or []))
    selection = _selection_by_layer(ends)
    return [
        GateView(layer, compressed, selected, window, entropies.get(layer), *selection.get(layer, ()))
        for layer, (compressed, selected, window) in enumerate(beat.gate_shares)
    ]


def _selection_by_layer(ends: list[Heartbeat]) -> dict[int, tuple[float, float, float]]:
    """The newest distinct, distance and likeness of each NSA layer."""
    beat = next((beat for beat in reversed(ends) if beat.selection_distinct), None)
    if beat is None:
        return {}
    columns = (beat.selection_distinct or [], beat.selection_distance or [], beat.selection_likeness or [])
    return dict(enumerate(zip(*columns, strict=False)))


def _checkpoint_views(directory: RunDirectory) -> list[CheckpointView]:
    views = []
    for step in directory.checkpoints():
        try:
            manifest = read_manifest(directory.manifest(step))
        except ValueError:
            continue  # listed by the alerts
        views.append(CheckpointView(step, manifest["bytes"] / MIB, str(manifest.get("time", ""))))
    return views


def _copies_view(directory: RunDirectory, now: float) -> CopiesView | None:
    """The state that the copying process wrote; None where nothing is copied."""
    state = read_copies(directory)
    if state is None:
        return None
    return CopiesView(state.newest_step, state.copying_step, state.last_success and max(0.0, now - state.last_success))
