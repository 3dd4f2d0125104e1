"""Recipes: which keys they set, and what comes before them."""

from pathlib import Path

import pytest

from tamis.config import Config, ConfigError, build_config, known_keys, load_config
from tamis.config.recipes import RECIPES


def test_the_runbook_recipe_is_the_default_and_changes_nothing() -> None:
    assert load_config(None, ["train.recipe=runbook"]) == Config()


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_sets_known_keys_and_survives_storing(name: str) -> None:
    assert RECIPES[name].keys() <= {*known_keys()}
    config = load_config(None, [f"train.recipe={name}"])
    tree = config.model_dump()
    assert {dotted: tree[dotted.split(".")[0]][dotted.split(".")[1]] for dotted in RECIPES[name]} == RECIPES[name]
    assert build_config(config.with_steps(1).model_dump()) == config.with_steps(1)


def test_keys_of_the_place_that_names_the_recipe_win(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("train: {recipe: speedrun, lr: 0.5}\n")
    from_file = load_config(path, ["train.muon_lr=0.25"])
    assert (from_file.train.lr, from_file.train.muon_lr, from_file.train.optimizer) == (0.5, 0.25, "muon")
    path.write_text("train: {lr: 0.5, optimizer: adamw}\n")
    from_words = load_config(path, ["train.recipe=speedrun", "train.muon_lr=0.25"])
    assert (from_words.train.lr, from_words.train.muon_lr, from_words.train.optimizer) == (2e-3, 0.25, "muon")


def test_tokens_per_step_give_the_micro_batches_and_then_the_steps() -> None:
    given = ["train.batch_tokens=100000", "train.tokens=1e6", "train.batch_size=4", "train.seq_len=1024"]
    train = load_config(None, given).with_steps(2).train
    assert train.accumulate_grad_batches == 13  # 8,192 tokens each
    assert train.steps == 10 and train.batch_tokens is None


def test_muon_refuses_half_precision_with_a_loss_scale() -> None:
    with pytest.raises(ConfigError, match=r"train\.optimizer: muon needs runtime\.precision"):
        load_config(None, ["train.optimizer=muon", "runtime.precision=fp16"])


def test_the_command_line_replaces_steps_and_tokens_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("train: {steps: 500, tokens: 1.0e+9, recipe: speedrun}\n")
    steps = load_config(file, ["train.steps=3", "train.accumulate_grad_batches=2"]).with_steps(1).train
    assert (steps.steps, steps.accumulate_grad_batches) == (3, 2)
    assert load_config(file, ["train.tokens=1e4"]).with_steps(1).train.steps == 1


def test_the_command_line_replaces_what_variables_set(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("train: {seq_len: 64, batch_size: 2, batch_tokens: 1024}\n")
    variable = ["train.accumulate_grad_batches=3"]
    assert load_config(file, [], variable).with_steps(1).train.accumulate_grad_batches == 3
    assert load_config(file, ["train.batch_tokens=512"], variable).with_steps(1).train.accumulate_grad_batches == 4
    assert load_config(file, ["train.accumulate_grad_batches=5"], variable).train.accumulate_grad_batches == 5
