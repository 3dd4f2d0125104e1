"""The trainer: `train` is the loop (fetch, step, collect, save, evaluate, stop), the rest opens and closes a run."""

from __future__ import annotations

import contextlib
import errno
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from tamis.checkpoint.background import BackgroundSave
from tamis.checkpoint.file import load_checkpoint, require_whole_state, save_checkpoint
from tamis.checkpoint.weights import load_weights, read_weights
from tamis.config import Config, ConfigError
from tamis.data import DataError, merge_states, open_loader, validation_batches
from tamis.data.loader import Batch
from tamis.model import Decoder
from tamis.run.files.directory import RunDirectory
from tamis.run.files.earlier import set_aside_later
from tamis.run.files.events import EventLog
from tamis.run.files.exit_codes import ExitCode
from tamis.run.files.halt import HaltFile
from tamis.run.files.heartbeat import Phase
from tamis.run.files.identity import config_changes, is_finished, record_changes
from tamis.run.files.lock import RunLock, require_no_launch
from tamis.run.worker.signals import EXIT_CODE_OF, StopReason, StopSignals, is_supervised
from tamis.train.console import Console
from tamis.train.distributed import Ranks, device_name, is_sharded, model_config
from tamis.train.guards import Anomaly, Guard, fingerprint, raise_difference, require_agreement
from tamis.train.memory import MemoryDumps
from tamis.train.metrics import AsyncReadback, rows_of, unpack_step
from tamis.train.optimizer import learning_rate
from tamis.train.selection import SELECTION_STATISTICS
from tamis.train.step import TrainStep, length_of_step
from tamis.train.telemetry import FinishedStep, LaunchedStep, Telemetry
from tamis.train.tools.early_compile import is_compiling, start_inductor, wait_until_compiled
from tamis.train.tools.samples import SampleWriter
from tamis.train.tools.selfcheck import require_right_attention

MANY_PASSES = 5  # over the data: up to four cost little, more are memorised (arXiv 2305.16264)
SELECTION_EVERY = 50  # logged steps between measurements of selection health: each costs a forward pass
STOP_REASONS: tuple[StopReason, ...] = get_args(StopReason)


class Trainer:
    """One rank of one training run: construct it, `open` it, `train`, `close` it."""

    def __init__(self, config: Config, ranks: Ranks) -> None:
        self.config, self.ranks = config, ranks
        self.run = RunDirectory(config.train.out_dir).create()
        self.lock = RunLock(self.run.trainer_lock)
        ranks.together(self._lock_directory)
        self.run.hold()
        self.signals = StopSignals(self.run, ranks.rank)
        self.console = Console(ranks.rank, ranks.world_size)
        self.telemetry = Telemetry(config, self.run, ranks, self.console)
        self.readback: AsyncReadback[LaunchedStep] = AsyncReadback(ranks.device)
        self.memory_dumps = MemoryDumps(config.runtime.mem_dump_every, self.run, ranks)
        self.step = self.saved_step = 0  # optimizer steps launched, and the step of the newest checkpoint
        self.background = BackgroundSave(self._write) if ranks.is_main else None
        self.saving: int | None = None  # the step that rank 0 writes in the background
        self.data_error: DataError | None = None
        self.telemetry.beat("boot", 0)

    def _lock_directory(self) -> None:
        """Exclude a second trainer, and a supervisor that is about to start its own."""
        if self.ranks.is_main:
            if not is_supervised():
                require_no_launch(self.run)
            self.lock.acquire("trainer")

    def open(self, checkpoint: str | None) -> None:
        """Open the data, build the model, and resume from the checkpoint if there is one."""
        config, ranks, stage = self.config, self.ranks, self.console.stage
        ranks.together(self.telemetry.open)
        start_inductor(config, ranks.device)
        with stage("opening the data"):
            self.loader = ranks.together(lambda: open_loader(config, rank=ranks.rank, world_size=ranks.world_size))
        self.console.say(f"data: {self.loader.description}")
        self._warn_about_passes()
        self.telemetry.beat("loader_ready", 0)
        require_agreement(ranks, fingerprint(config, self.loader.fingerprint, device_name(ranks.device)))
        with stage("building the model"):
            torch.manual_seed(config.train.seed)
            with ranks.device:  # weights are initialised on the GPU: on the CPU that takes seconds
                decoder = Decoder(model_config(config, ranks))
            if checkpoint is None and config.train.init_from is not None:
                ranks.together(lambda: self._start_from(decoder, str(config.train.init_from)))
            self.train_step = TrainStep(decoder, config, ranks)
        self.guard = Guard(config, self.loader.is_synthetic)
        if is_compiling():
            with stage("waiting for the kernels that other processes compile"):
                wait_until_compiled()
        with stage("checking the attention kernels against the reference"):
            require_right_attention(config, ranks.device)
        if checkpoint is not None:
            with stage(f"resuming from {checkpoint}"):
                ranks.together(lambda: self.restore(Path(checkpoint)))
            self._require_something_to_do(checkpoint)
        self.position = self.loader.state()
        if ranks.is_main and (folder := set_aside_later(self.run, self.step)):
            self.console.say(f"checkpoints beyond step {self.step} are of another run: set aside in {folder}")
        self.telemetry.resume_at(self.step)
        self.samples = SampleWriter(config, self.run, self.train_step.decoder, self._why_no_samples())
        self.samples.resume_at(self.step)
        self.telemetry.beat("compile", self.step)

    def _start_from(self, decoder: Decoder, path: str) -> None:
        """Fill the model with the weights of `train.init_from`; step, optimizer and data start at their beginning."""
        try:
            source, weights, saved, step = read_weights(Path(path))
        except ValueError as error:
            raise ConfigError(f"train.init_from: {error}") from None
        load_weights(decoder, weights, source, "set the model.* and nsa.* keys of those weights, or train.init_from")
        self.console.say(f"weights from {source}, step {step}; optimizer, data and step start at their beginning")
        before, now = saved.get("data", {}).get("tokenizer", "gpt2"), self.config.data.tokenizer
        if before != now:
            self.console.say(f"warning: those weights were trained with data.tokenizer={before}, this run has {now}")

    def _warn_about_passes(self) -> None:
        """Print how often this run reads its data, if often enough to memorise it."""
        tokens = self.config.train.steps * self.config.tokens_per_step(self.ranks.world_size)
        passes = tokens / (self.loader.tokens_per_pass or math.inf)
        if passes >= MANY_PASSES:
            self.console.say(
                f"warning: this run reads its data about {passes:,.0f} times and may memorise it; "
                "val.csv shows what it learns, and train.min_loss=0 lets it train to any loss"
            )

    def close(self) -> None:
        """Flush the curves and release signals and directory, however the training ended."""
        self.telemetry.close()
        self.signals.close()
        self.lock.release()

    def train(self) -> ExitCode:
        """Train until the last step or until all ranks agree to stop; the exit code distinguishes them."""
        try:
            return self._train()
        except BaseException:
            if self.saving is not None and self.background is not None:  # it counts, whatever ended the training
                with contextlib.suppress(Exception):
                    self._report_save(self.saving, self.background.result)
            raise

    def _train(self) -> ExitCode:
        train, reason = self.config.train, None
        if self.step < train.steps and self.owes_evaluation():
            self.evaluate()
        while self.step < train.steps and reason is None:
            self.launch_step()
            reason = self.collect()
            if _is_due(self.step, train.save_every):
                reason = self.collect(keep=0) or reason  # a step is saved only after its metrics have passed the guard
                self.save()
            if _is_due(self.step, train.eval_every) and self.step < train.steps:
                reason = self.collect(keep=0) or reason
                self.evaluate()
        reason = self.collect(keep=0) or reason
        return self._stop(reason) if self.step < train.steps else self._finish()

    def launch_step(self) -> None:
        """Fetch a batch and launch one optimizer step; `collect` reads its metrics later."""
        number = self.step + 1
        self.telemetry.beat("step_start", number)
        self.loader.length = length_of_step(number, self.config.train)
        batch = self._fetch()
        fetch_s = batch.fetch_s if batch else 0.0
        self.telemetry.beat("progress", number, dt_fetch_s=round(fetch_s, 5))
        requested = self.signals.stop_requested
        has_saved = self.background is not None and self.background.has_ended
        flags = [*(requested == reason for reason in STOP_REASONS), has_saved]
        tokens, offsets = (batch.tokens, batch.cu_seqlens) if batch else (None, None)
        with self.memory_dumps.around(number):
            metrics = self.train_step(tokens, number, flags, offsets)
        rate, forward_s = learning_rate(number, self.config.train), self.train_step.forward_seconds()
        selection = self._measure_selection(number, batch)
        lengths = batch.lengths() if batch else ()
        launched = LaunchedStep(number, rate, fetch_s, self.position, selection.numel(), lengths, forward_s)
        self.readback.push(launched, torch.cat([metrics, selection]))
        self.step, self.position = number, self.loader.state()

    def _measure_selection(self, number: int, batch: Batch | None) -> Tensor:
        """Return the selection statistics of every NSA layer, flat, on the device; empty at most steps."""
        train, sharded = self.config.train, is_sharded(self.config, self.ranks)
        is_due = number == train.steps or _is_due(number, SELECTION_EVERY * train.log_every)
        is_measured = train.aux_stats and "nsa" in self.config.layer_kinds and self.ranks.is_main and not sharded
        if not (is_due and is_measured and batch):
            return torch.empty(0, device=self.ranks.device)
        return self.train_step.selection_statistics(batch.tokens).flatten()

    def _fetch(self) -> Batch | None:
        """Return the next batch, or None when the data failed: the other ranks see that in this step's metrics."""
        try:
            with torch.profiler.record_function("fetch"):
                return self.loader.next()
        except DataError as error:
            self.data_error = error
            return None

    def collect(self, keep: int | None = None) -> StopReason | None:
        """Check and record the steps the device has finished; returns the reason to stop that the ranks agreed on."""
        self.run.require_held()  # before any file is written by its path
        requested: list[StopReason] = []
        for launched, values in self.readback.pop(self.readback.lag if keep is None else keep):
            end = len(values) - launched.selection_values
            metrics = unpack_step(values[:end], len(STOP_REASONS) + 1)
            selection = rows_of(values[end:], len(SELECTION_STATISTICS))
            if metrics.lacks_data:
                self._end_without_data(launched)
            self.guard.check(launched.step, metrics.loss, metrics.grad_norm)
            if metrics.weights_differ:
                raise_difference(self.train_step.decoder, self.ranks, launched.step)
            self.telemetry.finished(FinishedStep(launched, metrics.loss, metrics.grad_norm, metrics.gates, selection))
            *stops, has_saved = metrics.flags
            requested += [reason for reason, flag in zip(STOP_REASONS, stops, strict=True) if flag]
            if has_saved:
                self.collect_save()
        return requested[0] if requested else None

    def _end_without_data(self, launched: LaunchedStep) -> None:
        """Save what was trained before this step, which updated nothing; then raise the data's error on all ranks."""
        self.step, self.position = launched.step - 1, launched.position
        self.save_if_new()
        self.ranks.together(self._raise_data_error)

    def _raise_data_error(self) -> None:
        if self.data_error is not None:
            raise self.data_error

    def _stop(self, reason: StopReason | None) -> ExitCode:
        assert reason is not None
        self.save_if_new()
        if reason == "halt" and self.ranks.is_main:
            self.console.say(f"halted at step {self.step}: {HaltFile(self.run.halt).consume()}")
            self.console.say("launch again, or pass --resume auto, to go on from here")
        return self._end("halted", EXIT_CODE_OF[reason], reason)

    def _finish(self) -> ExitCode:
        self.save_if_new()
        if self.owes_evaluation():  # a run killed after it has only its last records to write
            self.evaluate()
        return self._end("done", ExitCode.DONE)

    def _end(self, phase: Phase, code: ExitCode, detail: str | None = None) -> ExitCode:
        """Write the last heartbeat. A run whose last step is not saved has failed: that work exists nowhere."""
        if self.saved_step != self.step:
            phase, code, detail = "failed", ExitCode.CRASH, "the last step is not saved"
        self.telemetry.beat(phase, self.step, exit_code=int(code), detail=detail)
        return code

    def evaluate(self) -> None:
        """Measure the validation loss on held-out documents, on the same batches every time."""
        self.telemetry.beat("eval", self.step)
        rank, world_size = self.ranks.rank, self.ranks.world_size
        batches = self.ranks.together(lambda: validation_batches(self.config, rank=rank, world_size=world_size))
        loss = self.train_step.validation_loss(batches)
        if loss is not None:
            self.telemetry.validated(self.step, loss)
        self.telemetry.sampled(self.step, self.samples.write(self.step, batches))
        self.telemetry.pause()

    def _why_no_samples(self) -> str | None:
        """Return why this rank continues no held-out text; None if it does."""
        if not self.ranks.is_main:
            return "rank 0 does"
        if is_sharded(self.config, self.ranks):
            return "no rank holds all weights"
        return "the data is random" if self.loader.is_synthetic else None

    def owes_evaluation(self) -> bool:
        """Return whether this step's evaluation is missing: a run killed between a save and its evaluation."""
        every, steps = self.config.train.eval_every, self.config.train.steps
        is_due = self.step == steps or (self.step > 0 and _is_due(self.step, every))
        return is_due and self.step not in self.ranks.gather(self.telemetry.val_csv.steps())[0]

    def save_if_new(self) -> None:
        """Save this step unless it is saved, and wait until the checkpoint is written."""
        self.collect_save()
        if self.step != self.saved_step:
            self.save()
            self.collect_save()

    def save(self) -> None:
        """Write a checkpoint of this step. A failed save loses no earlier one; too many unsaved steps end the run.

        On GPUs a thread of rank 0 writes it while training goes on, and `collect_save` reports the result.
        """
        self.collect_save()
        state = self._state()
        has_room = self.background is None or self.background.has_room(state)
        if saves_in_background(self.config, self.ranks) and all(self.ranks.gather(has_room)):
            self.saving = self.step
            if self.background is not None:
                self.background.start(state)
        else:
            self.telemetry.beat("checkpoint", self.step)
            self._report_save(self.step, lambda: self.ranks.together(lambda: self._write(state)))
        self.telemetry.pause()

    def _write(self, state: dict[str, Any]) -> Path:
        sharded = is_sharded(self.config, self.ranks)
        return save_checkpoint(self.run, state, self.config, sharded, self.ranks.is_main, self.ranks.together)

    def collect_save(self) -> None:
        """Wait for the save in the background, if there is one, and report its result on all ranks."""
        if self.saving is None:
            return
        step, self.saving = self.saving, None
        self.telemetry.beat("checkpoint", step)
        path, background = self.run.checkpoint(step), self.background
        self._report_save(step, lambda: self.ranks.together(lambda: background.result() if background else path))

    def _report_save(self, step: int, write: Callable[[], Path]) -> None:
        try:
            path = write()
            self.saved_step = step
            self.console.say(f"step {step}: saved {path}")
        except OSError as error:
            self._report_failed_save(step, f"{error}: {_remedy_for_save(error, self.run)}")

    def _report_failed_save(self, step: int, reason: str) -> None:
        self.telemetry.beat("checkpoint", step, save_error=reason)
        if self.ranks.is_main:
            self.console.say(f"step {step}: NO checkpoint, {reason}")
            evidence = {"step": step, "saved_step": self.saved_step}
            EventLog(self.run, by="trainer").record("save_failed", reason, **evidence)
        unsaved, limit = step - self.saved_step, self.config.train.unsaved_steps_limit
        if 0 < limit < unsaved:
            raise Anomaly("cannot_save", f"{unsaved} steps are not saved, train.max_unsaved_steps is {limit}: {reason}")

    def _state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "config": self.config.model_dump(),
            "model": self.train_step.decoder.state_dict(),
            **self.train_step.optimizer.state_dict(),
            "data": merge_states(self.ranks.gather(self.position)),
            "rng": torch.get_rng_state(),
            "world_size": self.ranks.world_size,
        }

    def restore(self, path: Path) -> None:
        """Load weights, optimizer, data position and step from a checkpoint of either kind and any world size."""
        decoder, optimizer = self.train_step.decoder, self.train_step.optimizer
        sharded = None
        if is_sharded(self.config, self.ranks):
            rng = torch.get_rng_state()
            sharded = {"model": decoder.state_dict(), "optimizer": optimizer.blank_moments(), "rng": rng}
        state = load_checkpoint(path, self.config, self.ranks.device, sharded)
        require_whole_state(path, state, decoder.state_dict(), optimizer.named)
        decoder.load_state_dict(state["model"])
        optimizer.load_state_dict(state)
        self.loader.restore(state["data"])
        torch.set_rng_state(state["rng"].cpu())
        self.step = self.saved_step = state["step"]
        self._report_changes(state["config"])

    def _report_changes(self, saved: dict[str, Any]) -> None:
        """Print and record the hyperparameters that differ from the checkpoint's. A supervisor records them itself."""
        changes = config_changes(saved, self.config)
        for change in changes:
            self.console.say(f"changed since the checkpoint: {change}")
        if self.ranks.is_main and not is_supervised():
            record_changes(EventLog(self.run, by="trainer"), changes, self.step)

    def _require_something_to_do(self, checkpoint: str) -> None:
        steps = self.config.train.steps
        if self.step > steps or (self.step == steps and self.ranks.gather(is_finished(self.run, steps))[0]):
            raise ConfigError(f"{checkpoint} is at step {self.step}, and train.steps is {steps}: nothing to do")


def saves_in_background(config: Config, ranks: Ranks) -> bool:
    """Whether a thread writes checkpoints. A CPU that trains has no time to spare, and all ranks write shards."""
    return ranks.device.type == "cuda" and not is_sharded(config, ranks)


def _remedy_for_save(error: OSError, run: RunDirectory) -> str:
    """Return what to do about a failed save. By its text: an error of another rank or of a writer has no errno."""
    remedies = {
        f"free space under {run.path}": (errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
        f"make {run.path} writable": (errno.EACCES, errno.EPERM, errno.EROFS),
        "move it out of the way": (errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.EEXIST),
    }
    fitting = (remedy for remedy, codes in remedies.items() if any(os.strerror(c) in str(error) for c in codes))
    return next(fitting, f"check the disk of {run.path}")


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
