"""Everything a run writes about its steps: heartbeats, training.csv, val.csv, TensorBoard and the console line."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any

import torch

from tamis.config import Config
from tamis.config.size import GIB
from tamis.run.files.directory import RunDirectory
from tamis.run.files.heartbeat import HeartbeatWriter, Phase
from tamis.run.files.records import TRAINING_HEADER, VAL_HEADER, CsvLog, Sample
from tamis.train.console import Console, Pace, ZScore, unusual
from tamis.train.distributed import Ranks
from tamis.train.loggers import CurveLogger, open_loggers
from tamis.train.mfu import Utilisation
from tamis.train.selection import SELECTION_STATISTICS

FETCH_WINDOW = 200  # steps whose fetch times give p50 and p95


@dataclass(frozen=True)
class LaunchedStep:
    """What is known on the host when a step is launched."""

    step: int
    lr: float
    fetch_s: float  # time spent waiting for its batch
    position: dict[str, Any] = field(default_factory=dict)  # of the loader, before that batch
    selection_values: int = 0  # at the end of the metrics vector
    lengths: Sequence[int] = ()  # of its sequences or packed documents, on this rank; empty: `train.seq_len`
    forward_s: Callable[[], float | None] = lambda: None  # known once the step has finished; None inside a CUDA graph


@dataclass(frozen=True)
class FinishedStep:
    """A step the device has finished."""

    launched: LaunchedStep
    loss: float
    grad_norm: float
    gates: list[list[float]] | None  # per NSA layer, see model.decoder.GATE_STATISTICS
    selection: list[list[float]] | None = None  # per NSA layer, see selection.SELECTION_STATISTICS


class Telemetry:
    """The writers of one rank; only rank 0 writes curves and prints."""

    def __init__(self, config: Config, run: RunDirectory, ranks: Ranks, console: Console) -> None:
        self.config, self.run, self.ranks, self.console = config, run, ranks, console
        self.tokens_per_step = config.tokens_per_step(ranks.world_size)
        self.heartbeat = HeartbeatWriter(run.heartbeat(ranks.rank), ranks.rank)
        self.training_csv = CsvLog(run.training_csv, TRAINING_HEADER)
        self.val_csv = CsvLog(run.val_csv, VAL_HEADER)
        self.loggers: list[CurveLogger] = []
        self.nsa_layers = [layer for layer, kind in enumerate(config.layer_kinds) if kind == "nsa"]
        self.utilisation = Utilisation(config, ranks.device)
        self.z_loss, self.z_norm, self.pace = ZScore(), ZScore(), Pace()
        self.fetches: deque[float] = deque(maxlen=FETCH_WINDOW)
        self.last_finish = self.last_log_time = time.monotonic()
        self.last_log_step = 0
        self.final: dict[str, Any] = {}

    def open(self) -> None:
        """Open the loggers of `log.to`; a ConfigError names one that cannot be opened."""
        if self.ranks.is_main:
            self.loggers = open_loggers(self.config, self.run, self.console)

    def resume_at(self, step: int) -> None:
        """Drop the rows an interrupted run wrote beyond the checkpoint it resumes from. The rows of that step stay the
        final figures of a run that has no step left."""
        self.last_log_step = step
        if self.ranks.is_main and self.config.train.csv:
            self.training_csv.resume_at(step)
            self.val_csv.resume_at(step)
            if row := self.training_csv.row(step):
                self.final = {"step": step, "loss": row[1], "toks_per_s": row[3]}
            if row := self.val_csv.row(step):
                self.final["val_loss"] = row[1]
        self.last_finish = self.last_log_time = time.monotonic()

    def beat(self, phase: Phase, step: int, **fields: Any) -> None:
        self.heartbeat.beat(phase, step, **fields)

    def finished(self, finished: FinishedStep) -> None:
        """Record a step the device has finished."""
        now, step = time.monotonic(), finished.launched.step
        seconds, self.last_finish = now - self.last_finish, now
        self.pace.add(seconds)
        self.fetches.append(finished.launched.fetch_s)
        is_logged = step % self.config.train.log_every == 0 or step in (1, self.config.train.steps)
        rate = self.tokens_per_step / seconds
        mfu = self.utilisation.at(rate / self.ranks.world_size, finished.launched.lengths)
        percentiles = _percentiles(self.fetches) if is_logged else {}
        self.beat("step_end", step, **self._step_fields(finished, seconds, rate, mfu), **percentiles)
        if self.ranks.is_main:
            # Steps before a save or an evaluation are read together: their own times say nothing, the mean does.
            rate = self._rate_since_log(step, now) if is_logged else rate
            self.console.step(self._line(finished, rate), is_logged)
            if is_logged:
                self._log(finished, rate, mfu)

    def _rate_since_log(self, step: int, now: float) -> float:
        tokens = self.tokens_per_step * (step - self.last_log_step)
        rate = tokens / max(now - self.last_log_time, 1e-9)
        self.last_log_step, self.last_log_time = step, now
        return rate

    def _log(self, finished: FinishedStep, rate: float, mfu: float | None) -> None:
        step = finished.launched.step
        self.final = {"step": step, "loss": finished.loss, "toks_per_s": rate}
        if self.config.train.csv:
            self.training_csv.append(step, finished.loss, finished.launched.lr, rate)
        scalars = {"train/loss": finished.loss, "train/lr": finished.launched.lr, "train/grad_norm": finished.grad_norm}
        scalars |= {"speed/toks_per_s": rate, "data/fetch_s": finished.launched.fetch_s}
        scalars |= {"speed/mfu": mfu} if mfu is not None else {}
        scalars |= {f"memory/{name}": value for name, value in _memory(self.ranks.device).items()}
        for layer, gates in zip(self.nsa_layers, finished.gates or [], strict=False):
            compressed, selected, window, entropy, _ = gates
            scalars[f"gates/entropy_layer{layer:02d}"] = entropy
            scalars[f"gates/compressed_layer{layer:02d}"] = compressed
            scalars[f"gates/selected_layer{layer:02d}"] = selected
            scalars[f"gates/window_layer{layer:02d}"] = window
        for layer, figures in zip(self.nsa_layers, finished.selection or [], strict=False):
            for name, figure in zip(SELECTION_STATISTICS, figures, strict=True):
                scalars[f"selection/{name}_layer{layer:02d}"] = figure
        self.scalars(scalars, step)

    def _step_fields(self, finished: FinishedStep, seconds: float, rate: float, mfu: float | None) -> dict[str, Any]:
        fields = {
            "loss": finished.loss,
            "lr": finished.launched.lr,
            "grad_norm": finished.grad_norm,
            "toks_per_s": round(rate, 1),
        }
        fields |= {"dt_step_s": round(seconds, 5), "dt_fetch_s": round(finished.launched.fetch_s, 5)}
        forward_s = finished.launched.forward_s()
        fields |= {"dt_forward_s": round(forward_s, 5)} if forward_s is not None else {}
        fields |= {"mfu": round(mfu, 4)} if mfu is not None else {}
        fields |= {f"gpu_mem_{name}": value for name, value in _memory(self.ranks.device).items()}
        return fields | _gate_fields(finished.gates) | _selection_fields(finished.selection)

    def _line(self, finished: FinishedStep, rate: float) -> str:
        launched, steps = finished.launched, self.config.train.steps
        z_loss, z_norm = unusual(self.z_loss.of(finished.loss)), unusual(self.z_norm.of(finished.grad_norm))
        return (
            f"step {launched.step:>{len(str(steps))}}/{steps} | loss {finished.loss:7.4f}{z_loss} | "
            f"norm {finished.grad_norm:6.3f}{z_norm} | lr {launched.lr:.2e} | {rate:7,.0f} tok/s | "
            f"ETA {self.pace.eta(steps - launched.step)}"
        )

    def validated(self, step: int, loss: float) -> None:
        if not self.ranks.is_main:
            return
        self.run.require_held()
        perplexity = math.exp(min(loss, 700.0))
        self.final["val_loss"] = loss
        if self.config.train.csv:
            self.val_csv.append(step, loss, perplexity)
        self.scalars({"val/loss": loss, "val/ppl": perplexity}, step)
        self.console.say(f"step {step}: validation loss {loss:.4f}, perplexity {perplexity:,.2f}")

    def sampled(self, step: int, samples: list[Sample]) -> None:
        """Print and log how the model continued held-out openings."""
        for number, sample in enumerate(samples, 1):
            if number == 1:
                self.console.say(f"step {step}: {sample.prompt!r} … {sample.text!r}")
            text = f"{sample.prompt}▶{sample.text}"
            self._to_loggers(methodcaller("log_text", f"samples/{number}", text, step))

    def scalars(self, values: dict[str, float], step: int) -> None:
        """Write numbers to the loggers."""
        self._to_loggers(lambda logger: logger.log(values, step))

    def _to_loggers(self, write: Callable[[CurveLogger], None]) -> None:
        """Write to each logger. One that fails is reported once and turned off; it never ends a run."""
        for logger in list(self.loggers):
            try:
                write(logger)
            except Exception as error:  # the packages raise anything: a full disk, a lost network, an expired key
                self.console.say(f"{logger.name} cannot be written any more ({error}); training continues without it")
                self.loggers.remove(logger)

    def pause(self) -> None:
        """Exclude the time since the last step (evaluation, saving) from the next step's time and throughput."""
        now = time.monotonic()
        self.last_log_time += now - self.last_finish
        self.last_finish = now

    def close(self) -> None:
        """Flush the loggers: a process that exits after a failure does not wait for their threads."""
        for logger in self.loggers:
            try:
                logger.close()
            except Exception as error:
                self.console.say(f"the last points of {logger.name} are lost ({error})")


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


def _selection_fields(selection: list[list[float]] | None) -> dict[str, list[float]]:
    """Return one list over the NSA layers per figure; empty when no layer has a choice, as in short sequences."""
    if not selection or not all(math.isfinite(figure) for layer in selection for figure in layer):
        return {}
    columns = zip(*selection, strict=True)
    return {
        f"selection_{name}": [round(figure, 4) for figure in column]
        for name, column in zip(SELECTION_STATISTICS, columns, strict=True)
    }
