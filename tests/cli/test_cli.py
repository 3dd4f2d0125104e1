"""The command line: every verb works and teaches by example; every error is one message with a true exit code."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from tamis import __version__
from tamis.cli.main import app, guarded, main
from tamis.config import ConfigError, load_config
from tamis.data import DataError
from tamis.run.files.directory import RunDirectory
from tamis.run.files.hardware import read_gpus
from tamis.run.files.lock import RunLocked
from tamis.run.files.records import FULL
from tamis.run.handover import bundle
from tamis.run.plan import choose_config
from tests.cli.typed import command_line, ok, tamis, typed
from tests.run.fabricate import fabricate

VERBS = {
    "run", "train", "launch", "halt", "restore",
    "list", "status", "logs", "monitor", "remote", "notify test", "judge", "report", "compare",
    "handoff",
    "check", "verify", "verify-checkpoint", "causality", "estimate", "config show", "config validate",
    "config twin",
    "generate", "serve", "eval", "export", "convert", "data prepare", "data check",
    "profile", "tune", "bench attention", "bench peers", "bench paths", "bench train", "bench decode", "bench needle",
    "bench positions",
}  # fmt: skip


def verbs() -> dict[str, str]:
    """Name → help text."""
    found: dict[str, str] = {}
    for name, command in get_command(app).commands.items():
        parts = getattr(command, "commands", None)
        found |= {f"{name} {sub}": c.help for sub, c in parts.items()} if parts else {name: command.help}
    return found


def test_the_verbs_are_the_documented_ones() -> None:
    assert set(verbs()) == VERBS


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_every_verb_teaches_by_an_example_of_itself(verb: str) -> None:
    text = verbs()[verb]
    assert "Example" in text
    assert f"tamis {verb}" in text


def test_a_longest_sequence_below_one_token_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("generate", "serve", "eval"):
        assert typed(verb, str(tmp_path), "--max-len", "0") == 2
        assert "Invalid value for '--max-len'" in capsys.readouterr().err


def test_every_group_teaches_by_an_example_of_its_verbs() -> None:
    groups = {name: c for name, c in get_command(app).commands.items() if getattr(c, "commands", None)}
    assert set(groups) == {verb.split()[0] for verb in VERBS if " " in verb}
    for name, group in groups.items():
        shown = [verb for verb in VERBS if verb.startswith(f"{name} ") and f"tamis {verb}" in group.help]
        assert "Example" in group.help
        assert shown


def test_a_small_model_is_trained_used_and_packed(here: Path) -> None:
    assert "step 3/3" in ok(tamis("train", "mine.yaml"))
    assert "Fellow" in ok(
        tamis("generate", "out", "--prompt", "Fellow", "--max-new-tokens", "2", "--temperature", "0", "--device", "cpu")
    )
    ok(tamis("export", "out", "exported"))
    assert (here / "exported" / "model.safetensors").is_file()
    assert "m.safetensors" in ok(tamis("convert", "out/checkpoint_step3.pt", "m.safetensors"))
    assert "newest.safetensors" in ok(tamis("convert", "out", "newest.safetensors"))
    assert "DONE" in ok(tamis("monitor", "out", "--once"))
    assert json.loads(ok(tamis("monitor", "out", "--json")))["state"] == "done"
    heading, row = ok(tamis("list", ".")).splitlines()
    assert heading.split() == ["state", "step", "loss", "tok/s", "size", "run"]
    assert row.startswith("done   3/3") and row.endswith(" out")
    assert "no runs in exported: tamis run starts one" in ok(tamis("list", "exported"))
    assert ok(tamis("status", "out")).startswith("DONE")


def test_checks_prove_the_model_on_this_device(here: Path) -> None:
    assert "Causality test: 3/3 passed" in ok(tamis("causality", "mine.yaml"))
    assert "ok   causality" in ok(tamis("verify", "mine.yaml"))
    assert "preflight: GO" in ok(tamis("check", "mine.yaml", "--quick"))


def test_measurements_end_in_one_json_document(here: Path) -> None:
    def last(*words: str) -> dict:
        return json.loads(ok(tamis(*words)).splitlines()[-1])

    assert last("estimate", "mine.yaml", "--json")["toks_per_s"] > 0
    assert all(check["passed"] for check in last("verify", "mine.yaml", "--json")["checks"])
    assert set(last("profile", "mine.yaml", "--steps", "1")["host_ms_per_step"]) >= {"fetch", "forward", "backward"}
    assert (here / "out" / "profile" / "trace.json").stat().st_size > 0
    rows = last("bench", "train", "mine.yaml", "--length", "32", "--tokens", "64", "--steps", "1", "--warmup", "0")[
        "rows"
    ]
    assert [row["attention"] for row in rows] == ["dense", "nsa"]
    assert last("bench", "paths", "mine.yaml", "--steps", "1", "--warmup", "0")["rows"][0]["path"] == "reference"
    assert list((here / "artifacts" / "bench").glob("paths_*.json"))


@pytest.mark.parametrize(
    "words", ["attention --length 0", "peers --length -5", "train --length 0", "decode --batch 0", "needle --length 0"]
)
def test_a_bench_without_tokens_or_sequences_is_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert typed("bench", *words.split()) == 2
    assert "greater than or equal to 1" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_bench_that_is_interrupted_while_torch_loads_ends_with_a_message(number: int) -> None:
    words = [sys.executable, "-m", "tamis", "bench", "needle"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as bench:
        assert bench.stdout is not None
        assert "loading torch" in bench.stdout.readline()
        bench.send_signal(number)
        _, errors = bench.communicate(timeout=60)
    assert (bench.returncode, errors.splitlines()[-1]) == (130, "interrupted")


@pytest.mark.parametrize("bench", ["attention", "peers", "decode", "needle"])
def test_a_bench_on_a_missing_gpu_is_refused(
    bench: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert typed("bench", bench, "--device", "cuda") == 2
    assert "device cuda was asked for, but PyTorch sees no GPU: use --device cpu" in capsys.readouterr().err


def test_data_is_prepared_and_checked(here: Path) -> None:
    prepared = ok(tamis("data", "prepare", "shards", "mine.yaml", "data.dataset=sample"))
    assert "0 records unreadable, 0 empty; train on it: tamis run --data shards" in prepared
    told = ok(tamis("data", "check", "mine.yaml", "data.dataset=shards", "data.local_path=shards", "--batches", "1"))
    assert "ok batch[0]" in told


def test_without_a_config_a_verb_means_what_run_would_train_here(here: Path) -> None:
    shown = ok(tamis("config", "show"))
    assert f"# hash {load_config(choose_config(read_gpus())).hash}" in shown


def test_config_is_shown_with_its_true_size_and_validated(here: Path) -> None:
    assert "# hash " in ok(tamis("config", "show", "mine.yaml", "train.steps=9"))
    (here / "bad.yaml").write_text("train: {setps: 3, lr: 0}\nruntime: {precision: fp8}\n")
    bad = tamis("config", "validate", "mine.yaml", "bad.yaml", "none.yaml")
    assert bad.exit_code == 2
    assert "unknown key train.setps; did you mean train.steps?" in bad.output
    assert "train.lr is 0" in bad.output
    assert "(allowed: bf16, fp16, fp32)" in bad.output
    assert "config file none.yaml does not exist" in bad.output


def test_an_error_is_one_message_and_debug_shows_where(here: Path) -> None:
    short = command_line("config", "show", "train.setps=3")
    assert short.returncode == 2
    assert short.stderr.startswith("error: unknown key train.setps; did you mean train.steps?")
    assert len(short.stderr.splitlines()) == 1
    long = command_line("config", "show", "train.setps=3", "--debug")
    assert long.returncode == 1
    assert "Traceback" in long.stderr


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ConfigError("train.steps is 0"), 2, "error: train.steps is 0\n"),
        (DataError("the data ended"), 6, "error: the data ended\n"),
        (RunLocked("belongs to a running launch"), 2, "error: belongs to a running launch\n"),
        (FileNotFoundError(2, "No such file", "x.pt"), 2, "error: x.pt: No such file\n"),
        (OSError(28, "No space left on device"), 1, f"error: No space left on device; {FULL}\n"),
        (KeyError("a fault of ours"), 1, "error: KeyError: 'a fault of ours' (--debug shows where)\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_each_kind_of_error_has_its_exit_code(error: BaseException, code: int, message: str, capsys) -> None:
    def work() -> None:
        raise error

    assert guarded(work, debug=False) == code
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(
    "words",
    [("judge",), ("report",), ("handoff",), ("halt",), ("monitor", "--once"), ("monitor", "--json")],
    ids=" ".join,
)
def test_every_verb_refuses_a_missing_run_in_the_same_way_and_names_the_others(
    words: tuple[str, ...], here: Path, capsys
) -> None:
    RunDirectory(here / "artifacts" / "train_showcase").create().config_yaml.touch()
    assert typed(words[0], "artifacts/showcase", *words[1:]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: artifacts/showcase does not exist; give the directory that train.out_dir names")
    assert "(runs here: artifacts/train_showcase)" in told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lunch"], "No such command 'lunch'. Did you mean 'launch'"),
        (["train.steps=10"], "No such command 'train.steps=10'. Did you mean 'run train.steps=10'?"),
        (["stop", "out"], "No such command 'stop'. Did you mean 'halt'? (tamis --help"),
        (["run", "--steps", "10"], "No such option: --steps; to set a key of the config, write train.steps=VALUE"),
        (["run", "mine.yaml", "steps=10"], "must look like section.key=value; did you mean train.steps=10?"),
        (["launch", "--phase-step", "3"], "No such option: --phase-step"),
        (["launch", "--restarts", "many"], "Invalid value for '--restarts'"),
        (["judge"], "Missing argument 'RUN'. (tamis judge --help shows what there is)"),
        (["train", "train.steps"], "train.steps is a key of the config: write train.steps=VALUE"),
        (["check", "mien.yaml"], "config file mien.yaml does not exist; did you mean mine.yaml?"),
    ],
)
def test_a_mistyped_word_gets_one_line_with_the_probable_intention(
    words: list[str], message: str, here: Path, capsys
) -> None:
    assert typed(*words) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and len(told.splitlines()) == 1
    assert message.removesuffix("'") in told


def test_version_and_help_are_where_other_tools_have_them(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    assert ok(tamis("--version")) == f"tamis {__version__}\n"
    assert ok(tamis("run", "-h")) == ok(tamis("run", "--help"))
    monkeypatch.setattr(sys, "argv", ["tamis", "help", "config", "show"])
    with pytest.raises(SystemExit, match="0"):
        main()
    assert "Usage: tamis config show" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["", *sorted(VERBS)])
def test_help_shows_what_a_person_types_and_no_types_of_the_program(verb: str) -> None:
    text = ok(tamis(*verb.split(), "--help"))
    assert "<bool>" not in text and "<list" not in text and "--no-" not in text


def test_no_verb_prints_the_escapes_of_a_name(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    name = "run\x1b[2J"
    fabricate(tmp_path / "plain", steps=25).path.rename(name)
    (tmp_path / name / "checkpoint_step99.pt").touch()  # unfinished, and named by those who look for the newest
    monkeypatch.setattr(bundle, "_write_weights", lambda checkpoint, target: "not here")
    for words in (["halt", name], ["handoff", name], ["status", name], ["config", "validate", f"{name}.yaml"]):
        typed(*words)
        printed = "".join(capsys.readouterr())
        assert "run\\x1b[2J" in printed and "\x1b" not in printed, words
