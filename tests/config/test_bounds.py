"""A config that no machine can hold is refused quickly, with the key or file and what it may hold."""

import os
from pathlib import Path

import pytest

from tamis.config import ConfigError, known_keys, load_config
from tamis.config.load import sections
from tamis.config.yaml_file import MOST_BYTES


def refusal(*overrides: str, path: Path | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(path, list(overrides))
    return str(error.value)


def written(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "run.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def is_number(dotted: str) -> bool:
    section, key = dotted.split(".")
    field = sections()[section].model_fields[key]
    return isinstance(field.default, (int, float)) and not isinstance(field.default, bool)


@pytest.mark.parametrize("dotted", [key for key in known_keys() if is_number(key)])
def test_every_number_has_an_upper_bound_that_its_refusal_names(dotted: str) -> None:
    for huge in ("1" + 40 * "0", "1e300", ".inf", "-1"):
        assert refusal(f"{dotted}={huge}").startswith(f"{dotted} is ")
    message = refusal(f"{dotted}=1e300")
    assert " to " in message or "at most" in message or "below" in message


def test_a_step_that_no_machine_holds_is_refused_by_its_keys() -> None:
    message = refusal("train.batch_size=1048576", "train.seq_len=16777216")
    assert "train.batch_size · train.accumulate_grad_batches · train.seq_len must be at most" in message


@pytest.mark.parametrize("text", ["0x" + 5000 * "f", 5000 * "9", "2001-99-99", "!!int many", "!!float x"])
def test_a_scalar_that_python_cannot_convert_is_one_message(text: str) -> None:
    message = refusal(f"train.steps={text}")
    assert "train.steps" in message and "\n" not in message and len(message) < 400


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("-rf", "must not begin with -: write ./-rf"),
        ("~/runs", "must not begin with ~"),
        ('"a\\nb"', "printable characters on one line"),
        ('"a\\x1b[2J"', "printable characters on one line"),
        ("''", "printable characters on one line"),
        (2000 * "x", "1 to 1000 printable"),
    ],
)
def test_a_directory_name_that_would_harm_is_refused(name: str, problem: str) -> None:
    message = refusal(f"train.out_dir={name}")
    assert message.startswith("train.out_dir is ") and problem in message and "\n" not in message
    assert "\x1b" not in message


def bomb(levels: int) -> str:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (bomb(9), "more than 2,000 keys and values"),
        ("train: &a {steps: 3, more: *a}", "an alias that holds itself"),
        (50_000 * "[", "nested more than 20 levels deep"),
        (10_000 * "a: {", "nested more than 20 levels deep"),
        ("\n".join(f"k{i}: {i}" for i in range(3000)), "more than 2,000 keys and values"),
        ((MOST_BYTES + 1) * "#", "larger than 256 KiB"),
        (b"\0" * (MOST_BYTES + 1), "not valid YAML"),
    ],
    ids=["bomb", "cycle", "brackets", "mappings", "keys", "bytes", "zeros"],
)
def test_a_file_that_would_grow_is_refused_with_its_name(tmp_path: Path, text: str | bytes, problem: str) -> None:
    path = written(tmp_path, text)
    message = refusal(path=path)
    assert str(path) in message and problem in message and len(message) < 500


def test_an_alias_that_stays_small_is_used(tmp_path: Path) -> None:
    path = written(tmp_path, "train: &t {steps: 30, log_every: 3}\n")
    assert load_config(path).train.steps == 30


def test_a_fifo_or_device_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.yaml")
    for path in (tmp_path / "fifo.yaml", Path("/dev/zero")):
        assert f"config file {path} cannot be read: it is no regular file" in refusal(path=path)


def test_a_wrong_value_names_the_file_that_holds_it_and_not_the_file_that_does_not(tmp_path: Path) -> None:
    path = written(tmp_path, "train: {lr: 0, steps: 3}\n")
    lines = refusal("train.batch_size=0", path=path).splitlines()
    assert lines == [
        "train.batch_size is 0: input should be an integer from 1 to 1,048,576",
        f"train.lr is 0: input should be a number above 0, at most 1,000 (in config file {path})",
    ]


@pytest.mark.parametrize(
    ("override", "guess"),
    [
        ("nsa.window=64", "nsa.w"),
        ("train.learning_rate=1", "train.lr"),
        ("model.hidden_size=64", "model.dim"),
        ("train.max_steps=3", "train.steps"),
        ("steps=10", "train.steps=10"),
        ("learning_rate=1", "train.lr=1"),
    ],
)
def test_other_names_of_our_keys_are_answered_with_ours(override: str, guess: str) -> None:
    assert f"did you mean {guess}?" in refusal(override)


@pytest.mark.parametrize("override", ["train.nesterov=true", "model.activation=gelu", "data.url=x"])
def test_no_suggestion_is_made_where_none_is_similar(override: str) -> None:
    message = refusal(override)
    assert "did you mean" not in message and "; known: " in message
