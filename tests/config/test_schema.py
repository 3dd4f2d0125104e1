"""The schema: wrong keys and values are errors that name the key, its values and the nearest known key."""

import math
import os
import re
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest
from pydantic.fields import FieldInfo

from tamis.config import Config, ConfigError, build_config, known_keys, load_config
from tamis.config.load import allowed_values
from tamis.config.schema import OPERATION
from tamis.config.size import parameter_count

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def refusal(*overrides: str, path: Path | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(path, list(overrides))
    return str(error.value)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def field_of(dotted: str) -> FieldInfo:
    section, key = dotted.split(".")
    return type(getattr(Config(), section)).model_fields[key]


TIED: dict[str, Any] = {
    "data.tokenizer": "byte",
    "data.vocab_size": 50257,
    "data.mixture": {"sample": 1.0},
    "copy.to": "file:///backup",
    "train.length_schedule": [512, 2048],
}  # the values that fit the other defaults


def another_value(dotted: str) -> Any:
    """A valid value that differs from the default."""
    section, key = dotted.split(".")
    if dotted in TIED:
        return TIED[dotted]
    value = getattr(getattr(Config(), section), key)
    options = typing.get_args(field_of(dotted).annotation)
    choices = [word for option in options for word in (option, *typing.get_args(option)) if isinstance(word, str)]
    if choices:
        word = choices[-1] if choices[-1] != value else choices[0]
        return [word] if isinstance(value, list) else word
    if value is None and "text" not in allowed_values(field_of(dotted)):
        return 7
    if isinstance(value, bool):
        return not value
    if value is None and (int in options or float in options):
        return 1
    if isinstance(value, int):
        return value * 2 or 1
    if isinstance(value, list):
        return ["json://…", "https://example.com/…"]  # as an address is stored; valid words of a command too
    return (value * 0.9 or 1.0) if isinstance(value, float) else f"{value}x"


@pytest.mark.parametrize(
    ("override", "suggestion"),
    [
        ("train.stpes=3", "train.steps"),
        ("train.batchsize=3", "train.batch_size"),
        ("model.n_head=3", "model.n_heads"),
        ("model.seq_len=3", "train.seq_len"),
        ("train.precision=bf16", "runtime.precision"),
    ],
)
def test_an_unknown_key_is_an_error_with_the_nearest_known_one(override: str, suggestion: str) -> None:
    message = refusal(override)
    assert f"unknown key {override.partition('=')[0]}; did you mean {suggestion}?" in message


def test_an_unknown_key_like_no_other_lists_the_known_ones_alone() -> None:
    message = refusal("nsa.zzzz=1")
    assert message == "unknown key nsa.zzzz; known: l, d, l_sel, n_sel, w, phi, layers"


def test_an_unknown_section_is_an_error_with_the_nearest_known_one() -> None:
    known = "model, nsa, data, runtime, train, log, notify, cost, copy"
    assert refusal("trian.steps=3") == f"unknown section 'trian'; did you mean train?; known: {known}"


@pytest.mark.parametrize(
    "override",
    [
        "train.lr=fast",
        "train.lr=true",
        "train.lr=.nan",
        "train.lr=.inf",
        "train.lr=0",
        "train.steps=2.5",
        "train.steps=true",
        "train.steps='100'",
        "train.steps=1e3",
        "train.batch_size=0",
        "train.seed=-1",
        "train.out_dir=",
        "train.beta2=1.0",
        "runtime.compile=1",
        "runtime.compile=maybe",
        "runtime.precision=fp8",
        "model.attention=sparse",
        "nsa.n_sel=2",
        "data.epochs=0",
        "data.local_path=5",
    ],
)
def test_a_wrong_type_or_value_is_an_error_that_names_the_key(override: str) -> None:
    message = refusal(override)
    assert message.startswith(f"{override.partition('=')[0]} is ")
    assert "\n" not in message


def test_a_choice_that_does_not_exist_is_answered_with_those_that_do() -> None:
    assert "(allowed: bf16, fp16, fp32)" in refusal("runtime.precision=bf8")
    assert "(allowed: nsa, dense)" in refusal("model.attention=Dense")


def test_every_wrong_value_is_named_at_once() -> None:
    lines = refusal("train.lr=fast", "train.batch_size=0").splitlines()
    assert [line.split(" is ")[0] for line in lines] == ["train.batch_size", "train.lr"]


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["model.n_heads=12", "model.n_kv_groups=5"], ["model.n_heads", "model.n_kv_groups", "12", "5"]),
        (["model.d_k=33"], ["model.d_k", "even", "33"]),
        (["nsa.l=40"], ["nsa.l ", "nsa.d", "40", "16"]),
        (["nsa.l_sel=40"], ["nsa.l_sel", "nsa.d", "40", "16"]),
        (["data.dataset=fineweb_edu_local"], ["data.local_path", "fineweb_edu_local"]),
        (["data.dataset=shards"], ["data.local_path", "shards"]),
        (["runtime.production=true", "data.synthetic_on_fail=true"], ["data.synthetic_on_fail", "runtime.production"]),
        (["runtime.sdpa=flash_only", "runtime.use_flash=false"], ["runtime.sdpa", "runtime.use_flash"]),
    ],
)
def test_an_impossible_combination_is_an_error_that_names_the_keys(overrides: list[str], named: list[str]) -> None:
    message = refusal(*overrides)
    assert [part for part in named if part not in message] == []


@pytest.mark.parametrize(
    "override", ["train.steps", "steps=3", "train=3", "train.=3", ".steps=3", "=3", "", "train.lr=[1", "train.lr={a"]
)
def test_an_override_that_cannot_be_read_shows_itself(override: str) -> None:
    message = refusal(override)
    assert repr(override) in message


def test_overrides_win_over_the_file_and_the_last_over_the_first(tmp_path: Path) -> None:
    path = written(tmp_path, "train:\n  steps: 3000\n  seed: 5\n")
    config = load_config(path, ["train.steps=4000", "train.steps=5000", "data.epochs=null"])
    assert (config.train.steps, config.train.seed, config.data.epochs) == (5000, 5, None)
    assert config.train.lr == Config().train.lr


@pytest.mark.parametrize("text", ["2e-4", "2.0e-4", "0.0002", "2E-4", "+2e-4", ".2e-3"])
def test_a_number_in_scientific_notation_is_a_number(tmp_path: Path, text: str) -> None:
    assert load_config(None, [f"train.lr={text}"]).train.lr == 2e-4
    assert load_config(written(tmp_path, f"train: {{lr: {text}}}")).train.lr == 2e-4


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("train:\n  lr: 1.0\n  lr: 2.0\n", "the key 'lr' appears twice"),
        ("train: {steps: 3}\nmodel: {}\ntrain: {steps: 4}\n", "the key 'train' appears twice"),
        ("train: [", "not valid YAML"),
        ("\x00", "not valid YAML"),
        ("!!python/object/apply:os.system ['true']", "not valid YAML"),
        ("- train\n", "must hold sections (model, nsa, data, runtime, train, …)"),
        ("? [a]\n: 1\n", "not valid YAML"),
    ],
)
def test_a_file_that_is_not_a_configuration_is_named_with_the_reason(tmp_path: Path, text: str, named: str) -> None:
    path = written(tmp_path, text)
    message = refusal(path=path)
    assert str(path) in message and named in message


@pytest.mark.parametrize(("text", "named"), [("train:\n", "train"), ("model: 3\n", "model"), ("1: 2\n", "1")])
def test_a_section_without_keys_is_named(tmp_path: Path, text: str, named: str) -> None:
    assert named in refusal(path=written(tmp_path, text))


def test_a_key_without_a_value_is_empty() -> None:
    assert refusal("train.steps=").startswith("train.steps is empty (null): input should be an integer from 1")


def test_a_file_that_cannot_be_read_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("train: {steps: 3}\n")
    folder = refusal(path=tmp_path)
    assert (
        folder == f"config file {tmp_path} cannot be read: it is a directory; name a file of it: {tmp_path}/mine.yaml"
    )
    (tmp_path / "latin").write_bytes(b"train: {out_dir: \xff}")
    assert "cannot be read: it is not a text file; a config is YAML like configs/" in refusal(path=tmp_path / "latin")
    (tmp_path / "checkpoint_step3.pt").write_bytes(b"PK\x03\x04\xff\xfe")
    assert "it is a checkpoint, which --resume takes" in refusal(path=tmp_path / "checkpoint_step3.pt")
    (tmp_path / "empty.yaml").write_text("\n")
    assert "empty.yaml is empty: write at least one section" in refusal(path=tmp_path / "empty.yaml")
    for message in (folder, refusal(path=tmp_path / "latin"), refusal(path=tmp_path / "mine.yaml" / "x")):
        assert "Errno" not in message and "\n" not in message


def test_a_file_without_permission_is_named_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path, flags: int) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", denied)  # chmod does not stop a superuser
    assert refusal(path=tmp_path / "x.yaml").endswith(f"no permission; try chmod u+r {tmp_path / 'x.yaml'}")


@pytest.mark.parametrize(
    ("wrong", "suggested"),
    [
        ("configs/m7c_125m_80.yaml", "configs/m7c_125m_80g.yaml"),
        ("m7c_125m_80g", "configs/m7c_125m_80g.yaml"),
        ("configs/showcase.yaml", "configs/train_showcase.yaml"),
        ("nowhere/configs/train_showcase.yml", "configs/train_showcase.yaml"),
    ],
)
def test_a_file_that_is_not_there_is_answered_with_the_nearest_that_is(
    wrong: str, suggested: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "configs").symlink_to(CONFIGS[0].parent)
    monkeypatch.chdir(tmp_path)
    message = refusal(path=Path(wrong))
    assert message.startswith(f"config file {wrong} does not exist; did you mean {suggested}")


def test_a_file_like_no_other_is_answered_with_all_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(CONFIGS[0].parent)
    assert "there are configs/m7c_125m_24g.yaml, configs/" in refusal(path=Path("zzz"))
    (tmp_path / "configs").unlink()
    assert refusal(path=Path("configs/m7c_125m_80.yaml")).endswith("did you mean configs/m7c_125m_80g.yaml?")
    (tmp_path / "mine.yaml").write_text("train: {}\n")
    assert refusal(path=Path("mien.yaml")).endswith("did you mean mine.yaml?")


def test_the_shipped_files_are_found_in_any_folder_and_a_file_there_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in CONFIGS:
        assert load_config(f"configs/{path.name}") == load_config(path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "train_showcase.yaml").write_text("train: {steps: 7}\n")
    assert load_config("configs/train_showcase.yaml").train.steps == 7


def test_a_file_of_comments_alone_means_the_defaults(tmp_path: Path) -> None:
    assert load_config(written(tmp_path, "# nothing\n")) == Config()


def test_all_that_is_wrong_with_a_file_is_named_at_once(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "trian: {steps: 3}\nmodel: {n_head: 3, n_heads: 7, d_k: 33}\nnsa: 4\n"
        "train: {setps: 3, lr: fast, batch_size: 0}\nruntime: {precision: fp8}\n",
    )
    lines = refusal(path=path).splitlines()
    assert [line[:28] for line in lines] == [
        "unknown section 'trian'; did",
        "unknown key model.n_head; di",
        "nsa must be a section with k",
        "unknown key train.setps; did",
        "runtime.precision is 'fp8', ",
        "train.batch_size is 0: input",
        "train.lr is 'fast': input sh",
        "model.n_heads must be a mult",
        "model.d_k must be even for r",
    ]


def test_a_combination_is_not_blamed_when_one_of_its_keys_is_wrong_anyway() -> None:
    assert refusal("nsa.l=many", "nsa.d=7", "nsa.l_sel=70").startswith("nsa.l is 'many'")
    assert len(refusal("nsa.l=many", "nsa.d=7", "nsa.l_sel=70").splitlines()) == 1


@pytest.mark.parametrize("dotted", known_keys())
def test_every_key_can_be_set_survives_the_round_trip_and_changes_the_hash(tmp_path: Path, dotted: str) -> None:
    section, key = dotted.split(".")
    tree = {section: {key: another_value(dotted)}}
    if dotted == "cost.max":
        tree["cost"]["per_hour"] = 1.0
    if dotted in ("data.mixture", "data.dataset"):
        tree["data"] = {"dataset": "mixture", "mixture": {"sample": 1.0}} if key == "mixture" else {key: "synthetic"}
    config = build_config(tree)
    assert (config.hash == Config().hash) == (section in OPERATION)  # those change nothing that is trained
    again = load_config(written(tmp_path, config.to_yaml()))
    assert again == config and again.hash == config.hash


def test_the_hash_ignores_how_a_value_was_written(tmp_path: Path) -> None:
    path = written(tmp_path, "train: {lr: 0.0003, steps: 70}\nmodel: {rope_base: 20000}\n")
    same = load_config(None, ["model.rope_base=2e4", "train.steps=70", "train.lr=3e-4"])
    assert load_config(path).hash == same.hash
    assert re.fullmatch("[0-9a-f]{12}", same.hash)


def test_the_hash_is_the_same_in_another_process() -> None:
    command = [sys.executable, "-c", "from tamis.config import Config; print(Config().hash)"]
    environment = os.environ | {"PYTHONHASHSEED": "12345"}
    assert subprocess.check_output(command, text=True, env=environment).strip() == Config().hash


def test_a_configuration_cannot_be_changed_once_made() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().train.steps = 3  # type: ignore[misc]


def test_derived_values() -> None:
    assert (Config().vocab_size, Config().padded_vocab_size) == (50257, 50304)
    byte = load_config(None, ["data.tokenizer=byte", "train.batch_size=4", "train.accumulate_grad_batches=3"])
    assert (byte.vocab_size, byte.padded_vocab_size) == (257, 384)
    assert byte.tokens_per_step(world_size=2) == 4 * 3 * 2048 * 2


def test_the_seven_files_of_the_runbooks_are_there() -> None:
    sizes = ["24g", "2xa100_production", "2xa100_production_tuned", "40g", "80g", "fast_log"]
    assert {*(f"m7c_125m_{size}" for size in sizes), "train_showcase"} <= {path.stem for path in CONFIGS}


@pytest.mark.parametrize(
    ("name", "parameters"), [("nsa_30m", 30e6), ("nsa_125m_32k", 125e6), ("nsa_350m", 350e6), ("nsa_760m", 760e6)]
)
def test_the_files_of_other_sizes_hold_the_model_they_name(name: str, parameters: float) -> None:
    config = load_config(f"configs/{name}.yaml")
    assert parameter_count(config) == pytest.approx(parameters, rel=0.02)
    assert config.model.name == name and config.train.out_dir == f"artifacts/{name}"
    assert config.train.seq_len == (32768 if "32k" in name else 2048)
    steps = config.with_steps(world_size=8).train.steps
    assert config.train.tokens is None or 0 <= steps * config.tokens_per_step(8) - config.train.tokens < 2**21


def test_tokens_give_the_steps_of_the_processes_that_train() -> None:
    config = load_config(None, ["train.tokens=1e6", "train.batch_size=4"])
    assert config.with_steps(1).train.steps == math.ceil(1e6 / 8192)
    assert config.with_steps(8).train.steps == math.ceil(1e6 / 65536)
    assert config.with_steps(8).train.tokens is None
    assert config.with_steps(8).with_steps(1) == config.with_steps(8)
    assert "train.tokens is 0" in refusal("train.tokens=0")


def test_steps_and_tokens_of_the_command_line_are_not_both_taken(tmp_path: Path) -> None:
    for words in (["train.steps=3", "train.tokens=1e4"], ["train.tokens=1e4", "train.steps=3"]):
        assert refusal(*words) == "train.steps and train.tokens set the same, and only one counts: give one of them"
    assert "train.batch_tokens" in refusal("train.accumulate_grad_batches=3", "train.batch_tokens=1e6")
    assert load_config(None, ["train.tokens=null", "train.steps=3"]).train.steps == 3


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_key_of_a_shipped_file_is_accepted_and_commented(path: Path) -> None:
    load_config(path)
    keys = [line for line in path.read_text().splitlines() if re.match(r"\s+\w+:", line)]
    assert keys and [line for line in keys if not re.search(r"\S\s+# \S", line)] == []


@pytest.mark.parametrize("path", [p for p in CONFIGS if p.stem.startswith("m7c")], ids=lambda path: path.stem)
def test_the_m7c_files_hold_the_same_model(path: Path) -> None:
    config, standard = load_config(path), Config()
    assert (config.model, config.nsa) == (standard.model, standard.nsa)
    assert (config.train.lr, config.train.warmup_steps, config.train.seed) == (2e-4, 2000, 1337)
    assert (config.data.dataset, config.data.tokenizer) == ("fineweb_edu", "gpt2")


def test_the_production_files_hold_the_runbooks_values() -> None:
    plain, tuned = (load_config(path) for path in CONFIGS if "production" in path.stem)
    for config in (plain, tuned):
        train = config.train
        assert (train.steps, train.seq_len, train.save_every) == (50000, 2048, 5000)
        assert config.runtime.precision == "bf16" and config.runtime.production
    assert (plain.train.batch_size, tuned.train.batch_size) == (1, 4)
    assert plain.train.out_dir == "artifacts/m7c_125m_2xa100_prod" != tuned.train.out_dir
