"""One training session: everything the loop needs, opened in announced stages and closed in order."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import torch

from tamis.attention.ranges import marked
from tamis.checkpoint.file import load_checkpoint, save_checkpoint
from tamis.config import Config, ConfigError
from tamis.data import DataError, merge_states, open_loader, validation_batches
from tamis.data.loader import Batch
from tamis.model import Decoder
from tamis.run.files.directory import RunDirectory
from tamis.run.files.lock import RunLock, require_no_launch
from tamis.run.files.timeline import set_aside_later
from tamis.run.worker.signals import StopReason, StopSignals, is_supervised
from tamis.train import metrics as step_numbers
from tamis.train.agreement import fingerprint, raise_difference, require_agreement, together
from tamis.train.console import Progress
from tamis.train.distributed import Workers, device_name, is_sharded, model_config
from tamis.train.evaluation import validation_loss
from tamis.train.guards import Guard
from tamis.train.mailbox import Mailbox
from tamis.train.memory import MemoryDumps
from tamis.train.optimizer import learning_rate
from tamis.train.step import TrainStep
from tamis.train.telemetry import StepNote, StepReport, Telemetry
from tamis.train.tools.selfcheck import require_right_attention

STOP_REASONS: tuple[StopReason, ...] = get_args(StopReason)


class Session:
    def __init__(self, config: Config, workers: Workers) -> None:
        self.config, self.workers = config, workers
        self.run = RunDirectory(config.train.out_dir).create()
        self.lock = RunLock(self.run.trainer_lock)
        together(workers, self._lock_directory)
        self.signals = StopSignals(self.run, workers.rank)
        self.progress = Progress(speaks=workers.is_main)
        self.telemetry = Telemetry(config, self.run, workers, self.progress)
        self.mailbox: Mailbox[StepNote] = Mailbox(workers.device)
        self.memory_dumps = MemoryDumps(config.runtime.mem_dump_every, self.run, workers)
        self.step = self.saved_step = 0  # optimizer steps done, and those in the newest checkpoint of this session
        self.data_error: DataError | None = None
        self.telemetry.beat("boot", 0)

    def _lock_directory(self) -> None:
        """Never two trainers in one directory, nor one in the pause before a launch starts its own."""
        if self.workers.is_main:
            if not is_supervised():
                require_no_launch(self.run)
            self.lock.acquire("trainer")

    def open(self, checkpoint: str | None) -> None:
        """Open the data, build the model, and resume from the checkpoint if there is one."""
        config, workers, stage = self.config, self.workers, self.progress.stage
        with stage("opening the data"):
            self.loader = together(
                workers, lambda: open_loader(config, rank=workers.rank, world_size=workers.world_size)
            )
        self.progress.say(f"[tamis] data: {self.loader.description}")
        self.telemetry.beat("loader_ready", 0)
        require_agreement(workers, fingerprint(config, self.loader.fingerprint, device_name(workers.device)))
        with stage("building the model"):
            torch.manual_seed(config.train.seed)
            with workers.device:  # weights are drawn where they will be: for a GPU's a processor takes seconds
                decoder = Decoder(model_config(config, workers))
            self.train_step = TrainStep(decoder, config, workers)
        self.guard = Guard(config, self.loader.is_synthetic)
        with stage("proving the attention that will train"):
            require_right_attention(config, workers.device)
        if checkpoint is not None:
            with stage(f"resuming from {checkpoint}"):
                together(workers, lambda: self.restore(Path(checkpoint)))
            self._require_something_to_do(checkpoint)
        self.position = self.loader.state()
        if workers.is_main and (folder := set_aside_later(self.run, self.step)):
            self.progress.say(f"[tamis] checkpoints beyond step {self.step} are of another run: set aside in {folder}")
        self.telemetry.resume_at(self.step)
        self.telemetry.beat("compile", self.step)

    def leave(self) -> None:
        """Finish the curves, and give the directory and the signals back, however the training ended."""
        self.telemetry.close()
        self.signals.close()
        self.lock.release()

    def train_once(self) -> None:
        """Fetch a batch and launch one optimizer step; its numbers arrive in the mailbox."""
        number = self.step + 1
        self.telemetry.beat("step_start", number)
        batch = self._fetch()
        fetch_s = batch.fetch_s if batch else 0.0
        self.telemetry.beat("progress", number, dt_fetch_s=round(fetch_s, 5))
        asked = self.signals.stop_requested
        flags = [asked == reason for reason in STOP_REASONS]
        with self.memory_dumps.around(number):
            numbers = self.train_step(batch.tokens if batch else None, number, flags)
        rate, forward_s = learning_rate(number, self.config.train), self.train_step.forward_seconds()
        self.mailbox.post(StepNote(number, rate, fetch_s, self.position, forward_s), numbers)
        self.step, self.position = number, self.loader.state()

    def _fetch(self) -> Batch | None:
        """The next batch; None when the data failed, which the other ranks then learn with this step's numbers."""
        try:
            with marked("fetch"):
                return self.loader.next()
        except DataError as error:
            self.data_error = error
            return None

    def settle(self, keep: int | None = None) -> StopReason | None:
        """Record the steps the device has finished; the reason to stop, when the ranks have agreed on one."""
        asked: list[StopReason] = []
        for note, values in self.mailbox.collect(self.mailbox.lag if keep is None else keep):
            numbers = step_numbers.read(values, len(STOP_REASONS), self.config.model.n_layers)
            if numbers.lacks_data:
                self._end_without_data(note)
            self.guard.check(note.step, numbers.loss, numbers.grad_norm)
            if numbers.weights_differ:
                raise_difference(self.train_step.decoder, self.workers, note.step)
            self.telemetry.finished(StepReport(note, numbers.loss, numbers.grad_norm, numbers.gates))
            asked += [reason for reason, flag in zip(STOP_REASONS, numbers.flags, strict=True) if flag]
        return asked[0] if asked else None

    def _end_without_data(self, note: StepNote) -> None:
        """From `note`'s step on no rank has updated its weights: save what was trained, then all raise the error."""
        self.step, self.position = note.step - 1, note.position
        self.save_if_new()
        together(self.workers, self._raise_data_error)

    def _raise_data_error(self) -> None:
        if self.data_error is not None:
            raise self.data_error

    def save_if_new(self) -> None:
        if self.step != self.saved_step:
            self.save()

    def save(self) -> None:
        """Write a checkpoint of this step; a full disk loses nothing that was there, and does not end the run."""
        self.telemetry.beat("checkpoint", self.step)
        data = merge_states(self.workers.gather(self.position))
        try:
            path = together(
                self.workers, lambda: save_checkpoint(self.run, self._state(data), self.config, self.workers)
            )
            self.saved_step = self.step
            self.progress.say(f"[tamis] step {self.step}: saved {path}")
        except OSError as error:
            self.progress.say(f"[tamis] step {self.step}: NO checkpoint, {error}: free space under {self.run.path}")
        self.telemetry.pause()

    def evaluate(self) -> None:
        self.telemetry.beat("eval", self.step)
        rank, world_size = self.workers.rank, self.workers.world_size
        batches = together(self.workers, lambda: validation_batches(self.config, rank=rank, world_size=world_size))
        loss = validation_loss(self.train_step, batches, self.workers)
        if loss is not None:
            self.telemetry.validated(self.step, loss)
        self.telemetry.pause()

    def restore(self, path: Path) -> None:
        """Weights, optimizer, data position and step of a checkpoint, of either kind and any number of processes."""
        decoder, stepper = self.train_step.decoder, self.train_step.stepper
        sharded = None
        if is_sharded(self.config, self.workers):
            rng = torch.get_rng_state()
            sharded = {"model": decoder.state_dict(), "optimizer": stepper.blank_moments(), "rng": rng}
        state = load_checkpoint(path, self.config, self.workers.device, sharded)
        decoder.load_state_dict(state["model"])
        stepper.load_state_dict(state)
        self.loader.restore(state["data"])
        torch.set_rng_state(state["rng"].cpu())
        self.step = self.saved_step = state["step"]

    def owes_evaluation(self) -> bool:
        """Killed between a save and the evaluation of the same step, a run resumes with that evaluation still to do."""
        every, steps = self.config.train.eval_every, self.config.train.steps
        is_due = self.step == steps or (every > 0 and self.step > 0 and self.step % every == 0)
        return is_due and self.step not in self.workers.gather(self.telemetry.val_csv.steps())[0]

    def _require_something_to_do(self, checkpoint: str) -> None:
        steps = self.config.train.steps
        if self.step > steps or (self.step == steps and not self.owes_evaluation()):
            raise ConfigError(f"{checkpoint} is at step {self.step}, and train.steps is {steps}: nothing to do")

    def _state(self, data: dict[str, Any]) -> dict[str, Any]:
        return {
            "step": self.step,
            "config": self.config.model_dump(),
            "model": self.train_step.decoder.state_dict(),
            **self.train_step.stepper.state_dict(),
            "data": data,
            "rng": torch.get_rng_state(),
            "world_size": self.workers.world_size,
        }
