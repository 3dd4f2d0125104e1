"""One training session: everything the loop needs, opened in announced stages and closed in order."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from tamis.config import Config, ConfigError
from tamis.data import merge_states, open_loader, validation_batches
from tamis.model import Decoder
from tamis.run.directory import RunDirectory
from tamis.run.lock import RunLock
from tamis.run.signals import StopReason, StopSignals
from tamis.train.checkpoint import load_checkpoint, save_checkpoint
from tamis.train.distributed import Workers
from tamis.train.evaluation import validation_loss
from tamis.train.guards import Guard
from tamis.train.mailbox import Mailbox
from tamis.train.optimizer import learning_rate
from tamis.train.progress import Progress
from tamis.train.step import StepResult, TrainStep
from tamis.train.telemetry import StepNote, StepReport, Telemetry

STOP_REASONS: tuple[StopReason, ...] = get_args(StopReason)


class Session:
    def __init__(self, config: Config, workers: Workers) -> None:
        self.config, self.workers = config, workers
        self.run = RunDirectory(config.train.out_dir).create()
        self.lock = RunLock(self.run.trainer_lock)
        if workers.is_main:
            self.lock.acquire("trainer")  # never two trainers in one directory
        self.signals = StopSignals(self.run, workers.rank)
        self.progress = Progress(speaks=workers.is_main)
        self.telemetry = Telemetry(config, self.run, workers, self.progress)
        self.mailbox: Mailbox[StepNote] = Mailbox(workers.device)
        self.step = 0  # optimizer steps done
        self.telemetry.beat("boot", 0)

    def open(self, checkpoint: Path | None) -> None:
        """Open the data, build the model, and resume from the checkpoint if there is one."""
        config, workers, stage = self.config, self.workers, self.progress.stage
        with stage("opening the data"):
            self.loader = open_loader(config, rank=workers.rank, world_size=workers.world_size)
        self.progress.say(f"[tamis] data: {self.loader.description}")
        self.telemetry.beat("loader_ready", 0)
        with stage("building the model"):
            torch.manual_seed(config.train.seed)
            self.train_step = TrainStep(Decoder(config).to(workers.device), config, workers)
        self.guard = Guard(config, self.loader.is_synthetic)
        if checkpoint is not None:
            with stage(f"resuming from {checkpoint}"):
                self.restore(checkpoint)
        self.telemetry.resume_at(self.step)
        self.telemetry.beat("compile", self.step)

    def close(self) -> None:
        self.loader.close()
        self.telemetry.close()

    def leave(self) -> None:
        """Give the directory and the signals back, however the training ended."""
        self.signals.close()
        self.lock.release()

    def train_once(self) -> None:
        """Fetch a batch and launch one optimizer step; its numbers arrive in the mailbox."""
        number = self.step + 1
        self.telemetry.beat("step_start", number)
        batch = self.loader.next()
        self.telemetry.beat("progress", number, dt_fetch_s=round(batch.fetch_s, 5))
        note = StepNote(number, learning_rate(number, self.config.train), batch.fetch_s)
        result = self.train_step(batch.tokens, number)
        self.mailbox.post(note, self._numbers(result))
        self.step = number

    def settle(self, keep: int | None = None) -> StopReason | None:
        """Record the steps the device has finished; the reason to stop, when the ranks have agreed on one."""
        reason = None
        for note, numbers in self.mailbox.collect(self.mailbox.lag if keep is None else keep):
            report, reason = self._read(note, numbers)
            self.guard.check(note.step, report.loss, report.grad_norm)
            self.telemetry.finished(report)
        return reason

    def save(self) -> None:
        """Write a checkpoint of this step; a full disk loses nothing that was there, and does not end the run."""
        data = merge_states(self.workers.gather(self.loader.state()))
        if self.workers.is_main:
            self.telemetry.beat("checkpoint", self.step)
            try:
                path = save_checkpoint(self.run, self._state(data), self.config)
                self.progress.say(f"[tamis] step {self.step}: saved {path}")
            except OSError as error:
                self.progress.say(f"[tamis] step {self.step}: NO checkpoint, {error}: free space under {self.run.path}")
        self.workers.barrier()
        self.telemetry.pause()

    def evaluate(self) -> None:
        self.telemetry.beat("eval", self.step)
        batches = validation_batches(self.config, rank=self.workers.rank, world_size=self.workers.world_size)
        self.telemetry.validated(self.step, validation_loss(self.train_step, batches, self.workers))
        self.telemetry.pause()

    def restore(self, path: Path) -> None:
        state = load_checkpoint(path, self.config, self.workers.device)
        self.train_step.decoder.load_state_dict(state["model"])
        self.train_step.stepper.load_state_dict(state["stepper"])
        self.loader.restore(state["data"])
        torch.set_rng_state(state["rng"].cpu())
        self.step = state["step"]
        if self.step >= self.config.train.steps:
            raise ConfigError(
                f"{path} is at step {self.step}, and train.steps is {self.config.train.steps}: nothing to do"
            )

    def _numbers(self, result: StepResult) -> Tensor:
        """Loss, stop flags and gate statistics averaged over the ranks, and the gradient norm, in one vector."""
        asked = self.signals.stop_requested
        flags = torch.tensor([float(asked == reason) for reason in STOP_REASONS])
        parts = [result.loss.reshape(1).float(), flags.to(self.workers.device, non_blocking=True)]
        if result.gates is not None:
            parts.append(result.gates.flatten())
        return torch.cat([self.workers.mean_(torch.cat(parts)), result.grad_norm.reshape(1)])

    def _read(self, note: StepNote, numbers: list[float]) -> tuple[StepReport, StopReason | None]:
        loss, norm = numbers[0], numbers[-1]
        flags, gates = numbers[1 : 1 + len(STOP_REASONS)], numbers[1 + len(STOP_REASONS) : -1]
        layers = self.config.model.n_layers
        width = len(gates) // layers
        per_layer = [gates[i * width : (i + 1) * width] for i in range(layers)] if width else None
        asked = [reason for reason, flag in zip(STOP_REASONS, flags, strict=True) if flag > 0]
        return StepReport(note, loss, norm, per_layer), asked[0] if asked else None

    def _state(self, data: dict[str, Any]) -> dict[str, Any]:
        return {
            "step": self.step,
            "config": self.config.model_dump(),
            "model": self.train_step.decoder.state_dict(),
            "stepper": self.train_step.stepper.state_dict(),
            "data": data,
            "rng": torch.get_rng_state(),
            "world_size": self.workers.world_size,
        }
