"""Everything a run writes about its steps: heartbeats, training.csv, val.csv, TensorBoard, and the progress line."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tamis.config import Config
from tamis.run.files.directory import RunDirectory
from tamis.run.files.heartbeat import HeartbeatWriter, Phase
from tamis.run.files.records import TRAINING_HEADER, VAL_HEADER, CsvLog
from tamis.train.console import Pace, Progress, ZScore
from tamis.train.distributed import Workers
from tamis.train.mfu import Utilisation

GIB = 1 << 30
FETCH_WINDOW = 200  # steps whose fetch times give p50 and p95


@dataclass(frozen=True)
class StepNote:
    """What the host knows of a step when it is launched."""

    step: int
    lr: float
    fetch_s: float  # how long it waited for its batch
    position: dict[str, Any] = field(default_factory=dict)  # in the data, before that batch
    forward_s: Callable[[], float | None] = lambda: None  # known once the step has finished; None inside a CUDA graph


@dataclass(frozen=True)
class StepReport:
    """A finished step."""

    note: StepNote
    loss: float
    grad_norm: float
    gates: list[list[float]] | None  # per layer, see model.nsa.GATE_STATISTICS


class Telemetry:
    def __init__(self, config: Config, run: RunDirectory, workers: Workers, progress: Progress) -> None:
        self.config, self.run, self.workers, self.progress = config, run, workers, progress
        self.tokens_per_step = config.tokens_per_step(workers.world_size)
        self.heartbeat = HeartbeatWriter(run.heartbeat(workers.rank), workers.rank)
        self.training_csv = CsvLog(run.training_csv, TRAINING_HEADER)
        self.val_csv = CsvLog(run.val_csv, VAL_HEADER)
        self.board = _open_tensorboard(config, run, progress) if workers.is_main else None
        self.utilisation = Utilisation(config, workers.device)
        self.z_loss, self.z_norm, self.pace = ZScore(), ZScore(), Pace()
        self.fetches: deque[float] = deque(maxlen=FETCH_WINDOW)
        self.last_finish = self.last_log_time = time.monotonic()
        self.last_log_step = 0
        self.final: dict[str, Any] = {}

    def resume_at(self, step: int) -> None:
        """Forget what an interrupted run wrote beyond the checkpoint it resumes from."""
        self.last_log_step = step
        if self.workers.is_main and self.config.train.csv:
            self.training_csv.resume_at(step)
            self.val_csv.resume_at(step)
        self.last_finish = self.last_log_time = time.monotonic()

    def beat(self, phase: Phase, step: int, **fields: Any) -> None:
        self.heartbeat.beat(phase, step, **fields)

    def finished(self, report: StepReport) -> None:
        """Record a step the device has finished."""
        now, step = time.monotonic(), report.note.step
        seconds, self.last_finish = now - self.last_finish, now
        self.pace.add(seconds)
        self.fetches.append(report.note.fetch_s)
        is_logged = step % self.config.train.log_every == 0 or step in (1, self.config.train.steps)
        rate = self.tokens_per_step / seconds
        mfu = self.utilisation.at(rate / self.workers.world_size)
        percentiles = _percentiles(self.fetches) if is_logged else {}
        self.beat("step_end", step, **self._step_fields(report, seconds, rate, mfu), **percentiles)
        if self.workers.is_main:
            self.progress.step(self._line(report, rate), is_logged)
            if is_logged:
                self._log(report, now, mfu)

    def _log(self, report: StepReport, now: float, mfu: float | None) -> None:
        step = report.note.step
        tokens = self.tokens_per_step * (step - self.last_log_step)
        rate = tokens / max(now - self.last_log_time, 1e-9)
        self.last_log_step, self.last_log_time = step, now
        self.final = {"step": step, "loss": report.loss, "toks_per_s": rate}
        if self.config.train.csv:
            self.training_csv.append(step, report.loss, report.note.lr, rate)
        scalars = {"train/loss": report.loss, "train/lr": report.note.lr, "train/grad_norm": report.grad_norm}
        scalars |= {"speed/toks_per_s": rate, "data/fetch_s": report.note.fetch_s}
        scalars |= {"speed/mfu": mfu} if mfu is not None else {}
        scalars |= {f"memory/{name}": value for name, value in _memory(self.workers.device).items()}
        for layer, (compressed, selected, window, entropy, _) in enumerate(report.gates or []):
            scalars[f"gates/entropy_layer{layer:02d}"] = entropy
            scalars[f"gates/compressed_layer{layer:02d}"] = compressed
            scalars[f"gates/selected_layer{layer:02d}"] = selected
            scalars[f"gates/window_layer{layer:02d}"] = window
        self.scalars(scalars, step)

    def _step_fields(self, report: StepReport, seconds: float, rate: float, mfu: float | None) -> dict[str, Any]:
        fields = {
            "loss": report.loss,
            "lr": report.note.lr,
            "grad_norm": report.grad_norm,
            "toks_per_s": round(rate, 1),
        }
        fields |= {"dt_step_s": round(seconds, 5), "dt_fetch_s": round(report.note.fetch_s, 5)}
        forward_s = report.note.forward_s()
        fields |= {"dt_forward_s": round(forward_s, 5)} if forward_s is not None else {}
        fields |= {"mfu": round(mfu, 4)} if mfu is not None else {}
        fields |= {f"gpu_mem_{name}": value for name, value in _memory(self.workers.device).items()}
        return fields | _gate_fields(report.gates)

    def _line(self, report: StepReport, rate: float) -> str:
        note, steps = report.note, self.config.train.steps
        z_loss, z_norm = self.z_loss.of(report.loss), self.z_norm.of(report.grad_norm)
        return (
            f"step {note.step:>{len(str(steps))}}/{steps} | loss {report.loss:.4f} ({z_loss:+.2f}z) | "
            f"norm {report.grad_norm:.3f} ({z_norm:+.2f}z) | lr {note.lr:.2e} | {rate:,.0f} tok/s | "
            f"ETA {self.pace.eta(steps - note.step)}"
        )

    def validated(self, step: int, loss: float) -> None:
        if not self.workers.is_main:
            return
        perplexity = math.exp(min(loss, 700.0))
        self.final["val_loss"] = loss
        if self.config.train.csv:
            self.val_csv.append(step, loss, perplexity)
        self.scalars({"val/loss": loss, "val/ppl": perplexity}, step)
        self.progress.say(f"[tamis] step {step}: validation loss {loss:.4f}, perplexity {perplexity:,.2f}")

    def scalars(self, values: dict[str, float], step: int) -> None:
        """To TensorBoard, which must never end a run: a full disk there is reported once and the board closed."""
        if self.board is None:
            return
        try:
            for name, value in values.items():
                self.board.add_scalar(name, value, step)
        except OSError as error:
            self.progress.say(f"[tamis] TensorBoard cannot be written any more ({error}); training goes on without it")
            self.board = None

    def pause(self) -> None:
        """Time spent on evaluation or saving since the last step is not the step's, nor the throughput's."""
        now = time.monotonic()
        self.last_log_time += now - self.last_finish
        self.last_finish = now

    def close(self) -> None:
        """Write what TensorBoard's own thread still holds: a process that failed does not wait for it."""
        if self.board is None:
            return
        try:
            self.board.close()
        except OSError as error:
            self.progress.say(f"[tamis] the last points of TensorBoard are lost ({error})")


def _open_tensorboard(config: Config, run: RunDirectory, progress: Progress) -> Any:
    if not config.train.tensorboard:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(run.tensorboard))  # type: ignore[no-untyped-call]
    except (ImportError, OSError) as error:
        progress.say(f"[tamis] TensorBoard is off: {error}")
        return None


def _percentiles(fetches: deque[float]) -> dict[str, float]:
    ordered = sorted(fetches)
    return {f"dt_fetch_p{p}_s": round(ordered[len(ordered) * p // 100], 5) for p in (50, 95)}


def _memory(device: torch.device) -> dict[str, float]:
    if device.type != "cuda":
        return {}
    return {
        "alloc_gib": round(torch.cuda.memory_allocated(device) / GIB, 4),
        "reserved_gib": round(torch.cuda.memory_reserved(device) / GIB, 4),
    }


def _gate_fields(gates: list[list[float]] | None) -> dict[str, Any]:
    if not gates:
        return {}
    entropy = [round(layer[3], 5) for layer in gates]
    return {
        "gate_entropy_mean": round(sum(entropy) / len(entropy), 5),
        "gate_entropy_min": min(entropy),
        "gate_collapse_fraction": round(sum(layer[4] for layer in gates) / len(gates), 5),
        "gate_shares": [[round(share, 4) for share in layer[:3]] for layer in gates],
        "gate_entropy": entropy,
    }
