"""Phases 0 to 3 of a launch as data: how many steps on which data, and the criteria that each must meet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tamis.config import ConfigError
from tamis.run.checks.criteria import checkpoints, gates, gpu, operation, training
from tamis.run.checks.findings import Criterion

FASTER_DATA = (
    "check the network, HF_DATASETS_CACHE and data.prefetch_batches; data.dataset: synthetic tells data from compute"
)
LESS_MEMORY = "lower train.batch_size and raise train.accumulate_grad_batches, or set runtime.gradient_checkpointing"
LOOK_AT_LOSS = "look at training.csv and the gradient norm; lower train.lr or lengthen train.warmup_steps"
COMPLETED = Criterion("all steps were done", training.completed, "read the end of train.log and events.jsonl")
NO_STALL = Criterion("no stall", operation.no_alarms, "read stackdump_*.txt and events.jsonl")
LOSS_FINITE = Criterion("loss is finite", training.loss_finite, LOOK_AT_LOSS)


@dataclass(frozen=True)
class Phase:
    number: int
    title: str
    steps: int | None  # None: as the config says
    dataset: Literal["synthetic"] | None  # None: as the config says
    criteria: tuple[Criterion, ...]


PHASES = (
    Phase(
        0,
        "wiring: one step on synthetic data",
        steps=1,
        dataset="synthetic",
        criteria=(
            COMPLETED,
            Criterion(
                "heartbeats on every rank",
                training.heartbeats_on_every_rank,
                "a rank did not start: read train.log, then run tamis check for the collectives",
            ),
        ),
    ),
    Phase(
        1,
        "smoke on the dataset",
        steps=300,
        dataset=None,
        criteria=(
            COMPLETED,
            NO_STALL,
            LOSS_FINITE,
            Criterion("loss is falling", training.loss_falling, LOOK_AT_LOSS),
            Criterion("step times are steady", training.step_times_steady, FASTER_DATA),
            Criterion("data keeps up", training.data_keeps_up, FASTER_DATA),
            Criterion(
                "GPUs busy and balanced",
                gpu.gpus_busy_and_balanced,
                "raise train.batch_size or train.accumulate_grad_batches; " + FASTER_DATA,
            ),
            Criterion(
                "throughput near the estimate",
                training.throughput_near_estimate,
                "make the estimate again (tamis estimate), and look for other processes on the GPUs",
            ),
        ),
    ),
    Phase(
        2,
        "extended smoke",
        steps=1000,
        dataset=None,
        criteria=(
            COMPLETED,
            NO_STALL,
            LOSS_FINITE,
            Criterion("memory is flat", gpu.memory_flat, "compare two snapshots of NSA_MEM_DUMP_EVERY=100"),
            Criterion("memory is under the limit", gpu.memory_under_limit, LESS_MEMORY),
            Criterion("gate entropy", gates.gate_entropy_healthy, LOOK_AT_LOSS),
            Criterion("gates not collapsed", gates.gates_not_collapsed, LOOK_AT_LOSS),
            Criterion("gates have learned", gates.gates_have_learned, LOOK_AT_LOSS),
        ),
    ),
    Phase(
        3,
        "production",
        steps=None,
        dataset=None,
        criteria=(
            COMPLETED,
            NO_STALL,
            LOSS_FINITE,
            Criterion("loss is falling", training.loss_falling, LOOK_AT_LOSS),
            Criterion("checkpoint at save_every", checkpoints.first_checkpoint_was_saved, "check the disk's space"),
            Criterion("checkpoints are intact", checkpoints.checkpoints_intact, "remove the damaged one and resume"),
            Criterion("newest checkpoint loads", checkpoints.newest_checkpoint_loads, "resume from an older one"),
            Criterion("watchdog is on", operation.watchdog_was_on, "start through tamis launch"),
            Criterion(
                "TensorBoard and CSV are on", operation.logs_are_on, "unset NSA_TB_DISABLE, NSA_DISABLE_CSV_LOGS"
            ),
        ),
    ),
)


def parse_phase_steps(text: str) -> dict[int, int]:
    """`1,12,20,30`: step counts of phases 0 to 3, for a rehearsal in miniature."""
    counts = text.split(",")
    if len(counts) != len(PHASES) or not all(count.strip().isdecimal() and int(count) > 0 for count in counts):
        raise ConfigError(f"--phase-steps must be {len(PHASES)} counts like 1,300,1000,50000, got {text!r}")
    return {phase.number: int(count) for phase, count in zip(PHASES, counts, strict=True)}
