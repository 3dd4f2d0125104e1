"""Faults of single ranks: whatever happens to one, all end together, with the same code, and nothing is lost."""

import json
import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter

from tamis.config import Config
from tamis.data import DataError
from tamis.data.loader import Batch, Loader
from tamis.run.files.directory import RunDirectory
from tamis.run.files.heartbeat import read_heartbeats
from tamis.run.files.manifest import latest_valid_checkpoint
from tamis.train import guards, main, trainer
from tamis.train.step import TrainStep
from tests.train.processes import RankProcesses, ranks, run_ranks, tiny_config, train_rank, wait_until

ODD = 1  # the rank that misbehaves


def is_odd() -> bool:
    return os.environ["RANK"] == str(ODD)


def config_of(tmp_path: Path, *overrides: str) -> Config:
    return tiny_config(tmp_path / "run", "train.steps=12", "train.save_every=5", *overrides)


def last_beats(config: Config) -> list[Any]:
    return [read_heartbeats(RunDirectory(config.train.out_dir).heartbeat(rank), tail=1)[-1] for rank in (0, 1)]


def expect(tmp_path: Path, codes: list[int], body: Callable[..., int], *arguments: Any) -> RankProcesses:
    with ranks(tmp_path / "ranks", 2, body, *arguments) as running:
        assert running.wait() == codes, running.output()
        return running


# A rank that is not like the others


def with_other_code(config: Config) -> int:
    if is_odd():
        guards.code_hash = lambda: "0123456789ab"  # type: ignore[assignment]
    return main.train_config(config)


def with_other_config(config: Config, other: Config) -> int:
    return main.train_config(other if is_odd() else config)


def without_data_at_start(config: Config) -> int:
    def fail(*_: Any, **__: Any) -> Any:
        raise DataError("this machine does not see the files")

    if is_odd():
        trainer.open_loader = fail  # type: ignore[assignment]
    return main.train_config(config)


def test_a_rank_with_other_code_is_named_and_nothing_is_trained(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    running = expect(tmp_path, [2, 2], with_other_code, config)
    for rank in (0, 1):
        assert "rank 1 has code '0123456789ab', the others have" in running.log(rank)
    assert [beat.exit_code for beat in last_beats(config)] == [2, 2]
    assert not (tmp_path / "run" / "training.csv").exists()


def test_a_rank_with_another_configuration_is_named(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    running = expect(tmp_path, [2, 2], with_other_config, config, config_of(tmp_path, "train.lr=0.5"))
    assert "rank 1 has configuration" in running.log(0)


def test_data_that_one_rank_cannot_open_ends_all_with_6(tmp_path: Path) -> None:
    running = expect(tmp_path, [6, 6], without_data_at_start, config_of(tmp_path))
    assert "rank 1: this machine does not see the files" in running.log(0)


# A rank whose step fails


def with_nan_at_step_7(config: Config) -> int:
    """The odd rank's loss is NaN in step 7; every rank notes its weights after each step."""
    whole_step, plain_loss, sums = TrainStep.__call__, TrainStep.loss, []

    def watched(step: TrainStep, tokens: Any, number: int, *rest: Any) -> Any:
        step.number = number  # type: ignore[attr-defined]
        result = whole_step(step, tokens, number, *rest)
        sums.append([float(p.detach().double().sum()) for p in map(whole, step.decoder.parameters())])
        Path(config.train.out_dir, f"sums{os.environ['RANK']}.json").write_text(json.dumps(sums))
        return result

    def poisoned(step: TrainStep, *inputs: Any) -> Any:
        loss, gates = plain_loss(step, *inputs)
        return (loss * math.nan if is_odd() and step.number == 7 else loss), gates  # type: ignore[attr-defined]

    TrainStep.__call__, TrainStep.loss = watched, poisoned  # type: ignore[method-assign, assignment]
    return main.train_config(config)


def whole(p: Any) -> Any:
    return p.full_tensor() if hasattr(p, "full_tensor") else p


def with_other_weights(config: Config) -> int:
    whole_step = TrainStep.__call__

    def drifting(step: TrainStep, tokens: Any, number: int, *rest: Any) -> Any:
        if is_odd() and number == 3:
            with torch.no_grad():
                step.decoder.blocks[1].feed_forward.down.weight[2, 3] += 1e-6
        return whole_step(step, tokens, number, *rest)

    TrainStep.__call__ = drifting  # type: ignore[method-assign, assignment]
    return main.train_config(config)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_nan_on_one_rank_stops_all_with_5_before_it_touches_a_weight(tmp_path: Path, parallel: str) -> None:
    config = config_of(tmp_path, f"runtime.parallel={parallel}")
    running = expect(tmp_path, [5, 5], with_nan_at_step_7, config)
    assert "Last good checkpoint: " in running.log(0) and "checkpoint_step5.pt" in running.log(0)
    run = RunDirectory(config.train.out_dir)
    assert run.anomaly.read_text().startswith("non_finite_loss")
    for rank in (0, 1):
        *_, before, good, vetoed = json.loads((run.path / f"sums{rank}.json").read_text())
        assert good == vetoed and good != before
    assert latest_valid_checkpoint(run) == 5


def test_a_rank_whose_weights_differ_is_named_at_the_next_check(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    running = expect(tmp_path, [5, 5], with_other_weights, config)
    for rank in (0, 1):
        assert "at step 3 the ranks no longer hold the same weights: rank 1 in" in running.log(rank)
    assert RunDirectory(config.train.out_dir).anomaly.read_text().startswith("weights_differ")


def with_an_error_and_a_stuck_peer(config: Config, kind: str) -> int:
    """The odd rank fails in step 3 with a collective under way that its peer, stuck, never joins."""

    def failing(step: TrainStep, tokens: Any, number: int, *rest: Any) -> Any:
        if number == 3 and not is_odd():
            time.sleep(600)
        if number == 3:
            step.under_way = dist.all_reduce(torch.ones(1 << 20), async_op=True)  # type: ignore[attr-defined]
            raise torch.OutOfMemoryError("no room") if kind == "handled" else RuntimeError("an illegal memory access")
        return whole_step(step, tokens, number, *rest)

    whole_step, TrainStep.__call__ = TrainStep.__call__, failing  # type: ignore[method-assign, assignment]
    return main.train_config(config)


@pytest.mark.parametrize(
    ("kind", "said"), [("handled", "error on rank 1: "), ("unhandled", "an illegal memory access")]
)
def test_a_rank_that_fails_exits_without_waiting_for_its_peers(tmp_path: Path, kind: str, said: str) -> None:
    with ranks(tmp_path / "ranks", 2, with_an_error_and_a_stuck_peer, config_of(tmp_path), kind) as running:
        wait_until(lambda: not running.processes[ODD].is_alive(), "the rank that failed is gone")
        assert running.processes[ODD].exitcode == 1, running.output()
        assert running.processes[0].is_alive(), "its peer is still stuck"
        assert said in running.log(ODD)


def with_nan_and_slow_curves(config: Config) -> int:
    write = RecordWriter.write

    def slow(writer: RecordWriter, data: bytes) -> None:
        time.sleep(0.05)
        write(writer, data)

    RecordWriter.write = slow
    return with_nan_at_step_7(config)


def test_the_curves_of_a_run_that_failed_reach_its_last_good_step(tmp_path: Path) -> None:
    config = config_of(tmp_path, "train.tensorboard=true", "train.log_every=1")
    expect(tmp_path, [5, 5], with_nan_and_slow_curves, config)
    curves = EventAccumulator(str(RunDirectory(config.train.out_dir).tensorboard)).Reload()
    ends = {tag: curves.Scalars(tag)[-1].step for tag in curves.Tags()["scalars"] if not tag.startswith("val/")}
    assert len(ends) > 5 and set(ends.values()) == {6}, ends


# A rank whose data fails


def with_data_lost_at_step_8(config: Config) -> int:
    deliver, delivered = Loader.next, []

    def failing(loader: Loader) -> Batch:
        if is_odd() and len(delivered) == 7:
            raise DataError("the network is gone")
        delivered.append(1)
        return deliver(loader)

    Loader.next = failing  # type: ignore[method-assign]
    return main.train_config(config)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_data_lost_on_one_rank_ends_all_with_6_and_the_resumed_run_equals_an_uninterrupted_one(
    tmp_path: Path, parallel: str
) -> None:
    config = config_of(tmp_path, f"runtime.parallel={parallel}")
    running = expect(tmp_path, [6, 6], with_data_lost_at_step_8, config)
    for rank in (0, 1):
        assert "the data failed: rank 1: the network is gone" in running.log(rank)
    run = RunDirectory(config.train.out_dir)
    assert latest_valid_checkpoint(run) == 7, "what was trained before the data failed is saved"
    run_ranks(tmp_path / "again", 2, train_rank, config, "auto")
    unbroken = config_of(tmp_path / "unbroken", f"runtime.parallel={parallel}")
    run_ranks(tmp_path / "unbroken", 2, train_rank, unbroken)
    assert losses(run) == losses(RunDirectory(unbroken.train.out_dir))


def test_the_end_of_the_data_is_saved_and_marked_as_lasting_on_every_rank(tmp_path: Path) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text((json.dumps({"text": "A few words, and no more. " * 20}) + "\n") * 8)
    finite = [f"data.local_path={few}", "data.dataset=fineweb_edu_local", "data.epochs=1", "data.val_fraction=0"]
    config = config_of(tmp_path, *finite, "train.steps=1000")
    running = expect(tmp_path, [6, 6], train_rank, config)
    assert "the data ended after" in running.log(0)
    beats = last_beats(config)
    assert [beat.lasting for beat in beats] == [True, True]
    assert latest_valid_checkpoint(RunDirectory(config.train.out_dir)) == beats[0].step > 0


def losses(run: RunDirectory) -> list[str]:
    """The rows of training.csv without the measured speed."""
    return [line.rsplit(",", 1)[0] for line in run.training_csv.read_text().splitlines()]


# A rank that gets a signal, or is killed


def endless(tmp_path: Path) -> Config:
    return tiny_config(tmp_path / "run", "train.steps=100000", "train.warmup_steps=2", "train.save_every=20")


@pytest.mark.parametrize(("told", "code"), [("halt", 3), ("term", 4)])
def test_halt_and_term_stop_all_ranks_at_the_same_step_with_a_checkpoint(tmp_path: Path, told: str, code: int) -> None:
    config = endless(tmp_path)
    run = RunDirectory(config.train.out_dir)
    with ranks(tmp_path / "ranks", 2, train_rank, config) as running:
        wait_until(lambda: latest_step(run) >= 3, "training is under way")
        if told == "halt":
            run.halt.touch()
        else:
            running.signal(ODD, signal.SIGTERM)
        assert running.wait() == [code, code], running.output()
    first, second = last_beats(config)
    assert first.phase == second.phase == "halted" and first.step == second.step
    assert (first.exit_code, second.exit_code) == (code, code)
    assert latest_valid_checkpoint(run) == first.step and not run.halt.exists()
    goes_on = config.model_copy(update={"train": config.train.model_copy(update={"steps": first.step + 2})})
    run_ranks(tmp_path / "again", 2, train_rank, goes_on, "auto")
    steps = [int(row.split(",")[0]) for row in losses(run)[1:]]
    assert steps == list(range(1, first.step + 3)), "no step is missing and none is there twice"


def test_a_killed_rank_ends_the_others_and_the_run_resumes(tmp_path: Path) -> None:
    config = endless(tmp_path)
    run = RunDirectory(config.train.out_dir)
    with ranks(tmp_path / "ranks", 2, train_rank, config) as running:
        wait_until(lambda: 20 in run.checkpoints(), "the first checkpoint is there")
        running.signal(ODD, signal.SIGKILL)
        survivor, killed = running.wait()
    assert killed == -signal.SIGKILL and survivor not in (0, None)
    saved = latest_valid_checkpoint(run)
    assert saved is not None and saved % 20 == 0
    goes_on = config.model_copy(update={"train": config.train.model_copy(update={"steps": saved + 2})})
    assert f"resuming from {run.checkpoint(saved)}" in run_ranks(tmp_path / "again", 2, train_rank, goes_on, "auto")


def latest_step(run: RunDirectory) -> int:
    beats = read_heartbeats(run.heartbeat(0), tail=1)
    return beats[-1].step if beats else 0


def test_a_second_trainer_in_the_same_directory_is_refused_on_every_rank(tmp_path: Path) -> None:
    config = endless(tmp_path)
    run = RunDirectory(config.train.out_dir)
    with ranks(tmp_path / "first", 1, train_rank, config):
        wait_until(lambda: latest_step(run) >= 1, "the first trainer is under way")
        with ranks(tmp_path / "second", 2, _main, config) as second:
            assert second.wait() == [2, 2], second.output()


def _main(config: Config) -> int:
    path = Path(config.train.out_dir).parent / f"second{os.environ['RANK']}.yaml"
    path.write_text(config.to_yaml())
    return main.main(["--config", str(path)])
