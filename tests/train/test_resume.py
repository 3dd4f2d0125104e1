"""Exact resume: a run that is killed again and again, or moved to other processes, ends as if nothing had happened."""

import os
import random
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tamis.checkpoint.file import read_checkpoint, require_whole_state, save_file
from tamis.config import Config, ConfigError
from tamis.data.loader import Batch, Loader
from tamis.run.files.directory import RunDirectory
from tamis.run.files.events import read_events
from tamis.run.files.manifest import DamagedCheckpoint
from tamis.train import main
from tamis.train.trainer import Trainer
from tests.train.processes import ranks, run_ranks, tiny_config, train_rank

KILLS = 10
STEPS = 66


def killed_config(out: Path) -> Config:
    save = ["train.save_every=4", "train.eval_every=16", "train.keep_checkpoints=2"]
    return tiny_config(out, f"train.steps={STEPS}", "train.accumulate_grad_batches=2", *save)


def tensors(run: RunDirectory, step: int) -> dict[str, Tensor]:
    from tamis.checkpoint.sharded import flatten  # here, because every test process loads this file

    return flatten(read_checkpoint(run.checkpoint(step), torch.device("cpu")))


def assert_same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different


def rows(path: Path, measured_columns: int = 0) -> list[list[str]]:
    """Of a CSV file, without its last columns that are measured times."""
    cells = [line.split(",") for line in path.read_text().splitlines()]
    return [row[: len(row) - measured_columns] for row in cells]


def killed_at(config: Config, step: int, delay_s: float) -> int:
    """Killed some time after that step has begun, wherever it is then; it never gets much further than that."""
    launch_step = Trainer.launch_step

    def watched(trainer: Trainer) -> None:
        if trainer.step + 1 == step:
            threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        if trainer.step + 1 == step + 4:
            time.sleep(600)
        launch_step(trainer)

    Trainer.launch_step = watched  # type: ignore[method-assign]
    return main.train_config(config, "auto")


def test_a_run_killed_ten_times_ends_bit_identical_to_an_uninterrupted_one(tmp_path: Path) -> None:
    unbroken, broken = killed_config(tmp_path / "unbroken"), killed_config(tmp_path / "broken")
    run_ranks(tmp_path / "logs", 1, train_rank, unbroken)
    run, dice = RunDirectory(broken.train.out_dir), random.Random(7)
    for kill in range(KILLS):
        at, delay_s = kill * 6 + dice.randint(4, 6), dice.uniform(0, 0.04)
        with ranks(tmp_path / f"kill{kill}", 1, killed_at, broken, at, delay_s) as running:
            assert running.wait() == [-signal.SIGKILL], running.output()
    run_ranks(tmp_path / "last", 1, train_rank, broken, "auto")
    whole = RunDirectory(unbroken.train.out_dir)
    assert_same_bits(tensors(run, STEPS), tensors(whole, STEPS))
    assert rows(run.training_csv, measured_columns=1) == rows(whole.training_csv, measured_columns=1)
    assert [int(row[0]) for row in rows(run.training_csv)[1:]] == list(range(1, STEPS + 1))
    assert rows(run.val_csv) == rows(whole.val_csv) and len(rows(run.val_csv)) > 3


# Other numbers of processes


def noting_samples(config: Config, resume: str | None, note: str) -> int:
    """Train, and write down every sample this rank was given, in order."""
    deliver, given = Loader.next, []

    def watched(loader: Loader) -> Batch:
        batch = deliver(loader)
        given.append(batch.tokens.copy())
        np.save(f"{note}_{loader.rank}of{loader.world_size}.npy", np.stack(given))
        return batch

    Loader.next = watched  # type: ignore[method-assign]
    return main.train_config(config, resume)


def in_global_order(note: Path, world_size: int) -> np.ndarray:
    """The samples of all ranks as one sequence: the ranks take turns."""
    of_rank = [np.load(f"{note}_{rank}of{world_size}.npy") for rank in range(world_size)]
    flat = [given.reshape(-1, given.shape[-1]) for given in of_rank]
    return np.stack(flat, axis=1).reshape(-1, flat[0].shape[-1])


def sized_config(out: Path, world_size: int, steps: int, parallel: str) -> Config:
    share = [f"train.batch_size={4 // world_size}", f"train.steps={steps}", "train.save_every=4"]
    schedule = ["train.lr_min_ratio=1.0", "train.warmup_steps=2"]  # so that it does not depend on `steps`
    return tiny_config(out, *share, *schedule, f"runtime.parallel={parallel}")


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_run_moved_from_one_process_to_two_and_back_sees_the_same_samples(tmp_path: Path, parallel: str) -> None:
    unbroken, moved = tmp_path / "unbroken", tmp_path / "moved"
    config = sized_config(unbroken, 1, 12, parallel)
    run_ranks(tmp_path / "alone", 1, noting_samples, config, None, str(tmp_path / "alone"))
    parts = []
    for part, (world_size, steps) in enumerate([(1, 4), (2, 8), (1, 12)]):
        config = sized_config(moved, world_size, steps, parallel)
        note = tmp_path / f"part{part}"
        run_ranks(tmp_path / f"logs{part}", world_size, noting_samples, config, "auto", str(note))
        parts.append(in_global_order(note, world_size))
    assert np.array_equal(np.concatenate(parts), in_global_order(tmp_path / "alone", 1))
    assert RunDirectory(moved).checkpoint(8).is_dir() == (parallel == "fsdp")
    found, expected = (np.array(losses(RunDirectory(path))) for path in (moved, unbroken))
    assert len(found) == 12 and np.allclose(found, expected, rtol=1e-5)


def losses(run: RunDirectory) -> list[float]:
    return [float(row[1]) for row in rows(run.training_csv)[1:]]


def test_resuming_a_finished_run_is_refused_and_changes_no_byte(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run_ranks(tmp_path / "first", 1, train_rank, tiny_config(run.path, "train.steps=3"))
    before = files(run.path)
    for steps, resume in ((3, "auto"), (2, "auto"), (3, str(run.checkpoint(3)))):
        config = tiny_config(run.path, f"train.steps={steps}")
        with ranks(tmp_path / "again", 1, train_rank, config, resume) as running:
            assert running.wait() == [2], running.output()
            assert f"train.steps is {steps}: nothing to do" in running.log(0)
        assert files(run.path) == before


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_start_with_another_model_or_seed_is_refused_with_the_key_and_changes_no_byte(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run_ranks(tmp_path / "first", 1, train_rank, tiny_config(run.path, "train.steps=3"))
    before = files(run.path)
    explicit = str(run.checkpoint(3))
    cases: list[tuple[str, Path, str | None, str]] = [
        ("nsa.w=32", run.path, "auto", "nsa.w=64 (asked for: 32)"),
        ("train.seed=2", run.path, None, "train.seed=1337 (asked for: 2)"),
        ("nsa.w=32", tmp_path / "new", explicit, "nsa.w=64, but the configuration has 32"),
    ]
    for number, (key, out, resume, said) in enumerate(cases):
        other = tiny_config(out, "train.steps=9", key)
        with ranks(tmp_path / f"again{number}", 1, refused_rank, other, resume) as running:
            assert running.wait() == [2], running.output()
            assert said in running.log(0)
    assert files(run.path) == before and not (tmp_path / "new").exists()


def refused_rank(config: Config, resume: str | None) -> int:
    try:
        return main.train_config(config, resume)
    except ConfigError as error:
        print(error)
        return 2


def test_a_resume_with_other_hyperparameters_prints_and_records_what_changed(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run_ranks(tmp_path / "first", 1, train_rank, tiny_config(run.path, "train.steps=3", "train.lr=0.001"))
    said = run_ranks(
        tmp_path / "again", 1, train_rank, tiny_config(run.path, "train.steps=4", "train.lr=0.002"), "auto"
    )
    assert "[tamis] changed since the checkpoint: train.lr: 0.001 → 0.002" in said
    (event,) = [event for event in read_events(run) if event["event"] == "config_changed"]
    changes = {"train.lr": [0.001, 0.002], "train.steps": [3, 4]}
    assert event["evidence"] == {"step": 3, "changes": changes}


def break_shape(state: dict) -> None:
    moments = next(iter(state["optimizer"].values()))
    moments["exp_avg"] = moments["exp_avg"][..., :1]


def break_dtype(state: dict) -> None:
    name = next(iter(state["model"]))
    state["model"][name] = state["model"][name].half()


def break_value(state: dict) -> None:
    next(iter(state["optimizer"].values()))["exp_avg_sq"].view(-1)[0] = float("nan")


def break_step(state: dict) -> None:
    next(iter(state["optimizer"].values()))["step"].fill_(-1)


def lose_moments(state: dict) -> None:
    state["optimizer"].popitem()


def lose_a_moment(state: dict) -> None:
    del next(iter(state["optimizer"].values()))["exp_avg_sq"]


def lose_a_weight(state: dict) -> None:
    state["model"].popitem()


def add_moments(state: dict) -> None:
    state["optimizer"]["another"] = {}


DAMAGE = {
    break_shape: r"exp_avg of \S+ has shape",
    break_dtype: r"weight \S+ is torch.float16, the model is torch.float32",
    break_value: r"exp_avg_sq of \S+ holds values that are not finite",
    break_step: r"the optimizer step of \S+ is -1",
    lose_moments: r"the moments of \S+ are missing",
    lose_a_moment: r"the moments of \S+ are exp_avg, step",
    lose_a_weight: r"weight \S+ is missing",
    add_moments: r"the model does not train another",
}


def test_a_state_that_does_not_fit_the_model_is_refused_with_the_name_of_the_tensor(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "run", "train.steps=3")
    run_ranks(tmp_path / "first", 1, train_rank, config)
    run, cpu = RunDirectory(config.train.out_dir), torch.device("cpu")
    path = run.checkpoint(3)
    model = {name: tensor.clone() for name, tensor in read_checkpoint(path, cpu)["model"].items()}
    trained = set(read_checkpoint(path, cpu)["optimizer"])
    require_whole_state(path, read_checkpoint(path, cpu), model, trained)
    for damage, said in DAMAGE.items():
        state = read_checkpoint(path, cpu)
        damage(state)
        with pytest.raises(DamagedCheckpoint, match=said):
            require_whole_state(path, state, model, trained)
    state = read_checkpoint(path, cpu)
    break_shape(state)
    save_file(run, state, config)  # its manifest is right: only the shape is wrong
    longer = tiny_config(run.path, "train.steps=9")
    with ranks(tmp_path / "again", 1, train_rank, longer, "auto") as running:
        assert running.wait() == [2], running.output()
        assert "checkpoint_step3.pt cannot be used: exp_avg of" in running.log(0)
