"""Fabricate a run directory with the real writers and a simulated clock."""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from tamis.config import Config, build_config
from tamis.run.files import heartbeat
from tamis.run.files.directory import RunDirectory
from tamis.run.files.events import EventLog
from tamis.run.files.hardware import Gpu
from tamis.run.files.heartbeat import HeartbeatWriter
from tamis.run.files.info import describe_run, write_info
from tamis.run.files.manifest import write_manifest
from tamis.run.files.records import TRAINING_HEADER, VAL_HEADER, CsvLog

DEAD_PID = 2**22 + 1  # above the largest pid Linux gives
GPUS = [Gpu(i, "NVIDIA A100 80GB PCIe", 81_920, 60_000, 96 - i, "570.1") for i in range(2)]


@dataclass
class Story:
    """What happens in the run; the defaults are a healthy, finished run."""

    steps: int = 60
    planned_steps: int | None = None  # more than steps: still running, or cut off
    processes: int = 2
    step_s: float = 0.5
    save_every: int = 20
    ending: str | None = "done"  # done, halted, failed, or None: no final beat
    pid: int = DEAD_PID
    starts_at: float = 1_780_000_000.0
    entropy: float = 0.9
    collapse: float = 0.0
    distinct: float = 0.8
    memory_growth_gib: float = 0.0  # per step
    first_step: int = 1
    attention: str = "nsa"
    on_gpus: bool = True
    ends_now: bool = False  # shift the story so that its last beat is a second old


def fabricate(out: Path, story: Story | None = None, config: Config | None = None, **changes) -> RunDirectory:
    """Make the directory of a run that follows the story; `config` replaces the story's small one."""
    story = story or Story(**changes)
    run, config = RunDirectory(out).create(), config or config_of(out, story)
    clock = story.starts_at
    if story.ends_now:
        clock = time.time() - 1 - 20 - (story.steps - story.first_step + 1) * story.step_s
    run.config_yaml.write_text(config.to_yaml())
    if not run.run_info.exists():
        write_info(run.run_info, info_of(config, run, story))
    run.train_log.write_text("[tamis] starting\n")
    (run.tensorboard).mkdir(exist_ok=True)
    (run.tensorboard / "events.out.tfevents.1").write_bytes(b"x" * 64)
    ticking = SimpleNamespace(time=lambda: clock, monotonic=lambda: clock - story.starts_at + 1000)
    with mock.patch.object(heartbeat, "time", ticking), mock.patch("tamis.run.files.events.time", ticking):
        EventLog(run, by="supervisor").record("start", f"started {story.processes} workers", watch=True)
        writers = [_writer(run, rank, story) for rank in range(story.processes)]
        for phase in ("boot", "loader_ready", "compile"):
            clock += 5
            _beat_all(writers, phase, story.first_step - 1)
        for step in range(story.first_step, story.steps + 1):
            clock += story.step_s
            _one_step(run, config, story, writers, step)
        clock += 5
        if story.ending:
            _beat_all(writers, story.ending, story.steps, detail=f"{story.ending} by the story")
    return run


def config_of(out: Path, story: Story) -> Config:
    steps = story.planned_steps or story.steps
    return build_config(
        {
            "model": {"dim": 64, "n_layers": 4, "n_heads": 4, "n_kv_groups": 2, "d_k": 16, "d_ff": 128}
            | {"attention": story.attention},
            "data": {"dataset": "sample", "tokenizer": "byte"},
            "train": {
                "steps": steps,
                "warmup_steps": 1,
                "seq_len": 256,
                "log_every": 1 if steps < 200 else 10,
                "save_every": story.save_every,
                "out_dir": str(out),
            },
        }
    )


def info_of(config: Config, run: RunDirectory, story: Story) -> dict:
    return describe_run(
        config,
        config_path=run.config_yaml,
        run_dir=run.path,
        gpus=GPUS if story.on_gpus else [],
        processes=story.processes,
        command=["torchrun", f"--nproc_per_node={story.processes}"],
        repository=run.path,
    )


def loss_at(step: int) -> float:
    return 2.2 + 3.3 * math.exp(-step / 40) + 0.05 * math.sin(step * 1.7)


def _writer(run: RunDirectory, rank: int, story: Story) -> HeartbeatWriter:
    writer = HeartbeatWriter(run.heartbeat(rank), rank)
    writer._pid = story.pid + rank if story.pid == DEAD_PID else story.pid
    return writer


def _one_step(run: RunDirectory, config: Config, story: Story, writers: list[HeartbeatWriter], step: int) -> None:
    _beat_all(writers, "step_start", step)
    _beat_all(writers, "progress", step)
    rate = config.tokens_per_step(story.processes) / story.step_s
    gates = {}
    if story.attention == "nsa":
        shift = 0.1 * math.tanh(step / 50)
        gates = {
            "gate_shares": [[0.33 + shift / (n + 1), 0.34, 0.33 - shift / (n + 1)] for n in range(4)],
            "gate_entropy": [story.entropy - 0.01 * n for n in range(4)],
            "gate_entropy_mean": story.entropy,
            "gate_entropy_min": story.entropy - 0.03,
            "gate_collapse_fraction": story.collapse,
            "selection_distinct": [story.distinct] * 4,
            "selection_distance": [0.4] * 4,
            "selection_likeness": [0.6] * 4,
        }
    used = 18.0 + story.memory_growth_gib * step
    memory = {"gpu_mem_alloc_gib": used, "gpu_mem_reserved_gib": used + 2} if story.on_gpus else {}
    _beat_all(
        writers,
        "step_end",
        step,
        loss=loss_at(step),
        lr=2e-4,
        toks_per_s=rate,
        grad_norm=1.1,
        dt_step_s=story.step_s,
        dt_fetch_s=0.01,
        dt_fetch_p50_s=0.01,
        dt_fetch_p95_s=0.02,
        mfu=0.41,
        **memory,
        **gates,
    )
    _log(run, config, step, rate)


def _log(run: RunDirectory, config: Config, step: int, rate: float) -> None:
    training, validation = CsvLog(run.training_csv, TRAINING_HEADER), CsvLog(run.val_csv, VAL_HEADER)
    if not run.training_csv.exists():
        training.resume_at(0)
        validation.resume_at(0)
    if step % config.train.log_every == 0 or step == 1:
        training.append(step, loss_at(step), 2e-4, rate)
    if step % config.train.save_every == 0:
        validation.append(step, loss_at(step) + 0.1, math.exp(loss_at(step) + 0.1))
        run.checkpoint(step).write_bytes(f"weights of step {step}".encode() * 1000)
        write_manifest(run, step, config_hash=config.hash)


def _beat_all(writers: list[HeartbeatWriter], phase, step: int, **fields) -> None:
    for writer in writers:
        writer.beat(phase, step, **fields)
