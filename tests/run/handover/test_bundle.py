"""The bundle is complete, verified, allow-listed and free of secrets."""

import html
import json
import os
import tarfile
from pathlib import Path
from urllib.parse import quote, quote_plus

import markupsafe
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tamis.checkpoint.file import save_file
from tamis.config import build_config
from tamis.run.checks import runbooks
from tamis.run.files.directory import RunDirectory
from tamis.run.files.environment import describe_environment
from tamis.run.files.info import read_info, write_info
from tamis.run.files.records import write_json_atomic
from tamis.run.handover import bundle
from tamis.run.handover.bundle import verify_bundle, write_bundle
from tamis.run.handover.redaction import redactor
from tamis.run.locate import NoSuchRun
from tests.run.fabricate import DEAD_PID, fabricate

SECRETS = {
    "HF_TOKEN": "planted0one0secret",
    "AWS_SECRET_ACCESS_KEY": "planted0two0secret",
    "WANDB_API_KEY": "planted0three0secret",
    "DB_PASSWORD": "planted0four\nsecret0of0two0lines",
    "NSA_ACCESS_KEY": "planted0five0secret",
}
WRITE_WEIGHTS = bundle._write_weights
SHAPED = ("hf_planted0sixsecretsecret", "https://me:planted0seven@hub.invalid/x", "Bearer planted0eightsecret")


@pytest.fixture(autouse=True)
def no_torch_needed(monkeypatch):
    """Replace loading and conversion of checkpoints, which need torch and have their own tests."""
    monkeypatch.setattr(bundle, "_write_weights", lambda checkpoint, target: target.write_bytes(b"w") and None)
    books = [
        runbooks.Runbook(book.title, tuple(c for c in book.criteria if "loaded" not in c.name))
        for book in runbooks.RUNBOOKS
    ]
    monkeypatch.setattr(runbooks, "RUNBOOKS", books)


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    """A finished run, launched as `tamis run` does: its log next to others under train_runs."""
    run = fabricate(tmp_path / "out", steps=45)
    write_json_atomic(run.env_json, describe_environment([], os.environ | SECRETS))
    write_json_atomic(run.metrics_json, {"loss": 2.2})
    launches = tmp_path / "train_runs"
    for name, out in (("m7c_1", run.path), ("m7c_2", run.path), ("m7c_other", tmp_path / "another")):
        (launches / name).mkdir(parents=True)
        (launches / name / "train.log").write_text(f"log of {name}\n" + "\n".join([*SECRETS.values(), *SHAPED]) + "\n")
        write_info(launches / name / "run.info", {"run_dir": str(launches / name), "out_dir": str(out)})
    write_info(run.run_info, read_info(run.run_info) | {"run_dir": str(launches / "m7c_2"), "out_dir": str(run.path)})
    return run


def bundle_of(run: RunDirectory, tmp_path: Path, **options) -> tuple[int, Path, list[str]]:
    said: list[str] = []
    output = tmp_path / "bundle.tar"
    options = {"environment": SECRETS, "repository": tmp_path} | options
    return write_bundle(run.path, output=output, say=said.append, **options), output, said


def contents(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        return {m.name.partition("/")[2]: tar.extractfile(m).read() for m in tar if m.isfile()}


def test_the_bundle_holds_what_a_successor_needs(run, tmp_path):
    code, output, said = bundle_of(run, tmp_path)
    assert code == 0, said
    files = contents(output)
    for name in (
        "README.txt",
        "report.html",
        "run.info",
        "config.yaml",
        "env.json",
        "metrics.json",
        "training.csv",
        "val.csv",
        "events.jsonl",
        "heartbeat_rank1.jsonl",
        "criteria.json",
        "checkpoint_step40.pt",
        "checkpoint_step40.json",
        "weights.safetensors",
        "logs/m7c_1/train.log",
        "logs/m7c_2/train.log",
    ):
        assert name in files, name
    assert files["checkpoint_step40.pt"] == run.checkpoint(40).read_bytes()
    assert not any("m7c_other" in name for name in files)


def test_planted_secrets_are_nowhere_in_the_bundle(run, tmp_path):
    run.events.write_text(
        json.dumps({"ts": 1.0, "by": "supervisor", "event": "x", "reason": SECRETS["HF_TOKEN"]}) + "\n"
    )
    (tmp_path / "out" / "notes.txt").write_text("planted0nine: not on the list of files")
    write_info(run.run_info, read_info(run.run_info) | {"model": f"model of {SECRETS['WANDB_API_KEY']}"})
    _, output, _ = bundle_of(run, tmp_path)
    assert b"planted0" not in output.read_bytes()
    assert b"log of m7c_1\n[redacted]" in contents(output)["logs/m7c_1/train.log"]


def test_secrets_in_the_configuration_of_the_checkpoint_and_the_weights_are_redacted(run, tmp_path, monkeypatch):
    monkeypatch.setattr(bundle, "_write_weights", WRITE_WEIGHTS)
    secret = SECRETS["HF_TOKEN"]
    config = build_config({"data": {"dataset": "fineweb_edu_local", "local_path": f"/data/{secret}/shards"}})
    save_file(run, {"step": 60, "config": config.model_dump(), "model": {"w": torch.ones(2)}}, config)
    _, output, said = bundle_of(run, tmp_path)
    files = contents(output)
    assert b"planted0" not in output.read_bytes()
    assert b"/data/[redacted]/shards" in files["checkpoint_step60.pt"]
    assert b"/data/[redacted]/shards" in files["weights.safetensors"], said
    assert json.loads(files["checkpoint_step60.json"])["bytes"] == len(files["checkpoint_step60.pt"])


def test_bytes_of_a_checkpoint_that_look_like_a_host_do_not_make_a_copy_of_it(run, tmp_path, monkeypatch):
    monkeypatch.setattr(bundle, "_convert", None)
    config = build_config({"data": {"dataset": "fineweb_edu_local", "local_path": "/data/shards"}})
    save_file(run, {"step": 60, "config": config.model_dump(), "model": {"w": torch.ones(64, 64)}}, config)
    saved = run.checkpoint(60).read_bytes()
    assert redactor({})(saved.decode(errors="replace")) != saved.decode(errors="replace")
    _, output, _ = bundle_of(run, tmp_path)
    assert contents(output)["checkpoint_step60.pt"] == saved


def test_every_file_is_listed_with_its_sum_and_the_bundle_with_its_own(run, tmp_path):
    _, output, _ = bundle_of(run, tmp_path)
    sums = contents(output)["SHA256SUMS"].decode().splitlines()
    assert len(sums) == len(contents(output)) - 1
    assert verify_bundle(output) == []
    assert output.name in (tmp_path / "bundle.tar.sha256").read_text()


def test_a_changed_byte_in_the_bundle_is_found(run, tmp_path):
    _, output, _ = bundle_of(run, tmp_path)
    damaged = output.read_bytes().replace(b"weights of step 40", b"weightz of step 40", 1)
    output.write_bytes(damaged)
    assert verify_bundle(output) == ["damaged: checkpoint_step40.pt"]


def test_a_damaged_newest_checkpoint_is_skipped_and_named(run, tmp_path):
    run.checkpoint(40).write_bytes(b"damaged")
    code, output, said = bundle_of(run, tmp_path)
    assert code == 0
    assert "checkpoint_step20.pt" in contents(output)
    assert "checkpoint_step40.pt" not in contents(output)
    assert any("checkpoint_step40.pt is not used" in line for line in said)


def test_missing_files_are_named_on_screen_and_in_the_readme_with_exit_code_one(run, tmp_path, monkeypatch):
    run.env_json.unlink()
    monkeypatch.setattr(bundle, "_write_weights", lambda checkpoint, target: "the converter is not there")
    code, output, said = bundle_of(run, tmp_path)
    assert code == 1
    readme = contents(output)["README.txt"].decode()
    for missing in ("env.json", "the converter is not there"):
        assert missing in readme
        assert any(missing in line for line in said)


def test_criteria_carry_evidence_and_the_time_of_judging(run, tmp_path):
    _, output, _ = bundle_of(run, tmp_path)
    criteria = json.loads(contents(output)["criteria.json"])
    assert criteria["judged_at"].endswith("Z")
    assert {finding["status"] for finding in criteria["findings"]} == {"pass", "fail", "not measured", "not applicable"}


def test_no_user_name_of_this_machine_is_in_the_bundle(run, tmp_path):
    _, output, _ = bundle_of(run, tmp_path)
    with tarfile.open(output) as tar:
        assert {(member.uname, member.uid) for member in tar} == {("", 0)}


def test_writing_a_bundle_leaves_the_run_unchanged(run, tmp_path):
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    bundle_of(run, tmp_path)
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before
    assert not list(tmp_path.glob(".handoff_*"))


def test_scratch_folders_of_killed_handoffs_are_removed_and_no_scratch_name_is_predictable(run, tmp_path):
    killed, running = tmp_path / f".handoff_{DEAD_PID}_x", tmp_path / f".handoff_{os.getpid()}_x"
    for folder in (killed, running):
        folder.mkdir()
        (folder / "half.tar").write_text("half")
    outside = tmp_path / "outside"
    outside.write_text("keep")
    (tmp_path / "bundle.tar.part").symlink_to(outside)
    bundle_of(run, tmp_path)
    assert (killed.exists(), running.exists(), outside.read_text()) == (False, True, "keep")


def test_a_missing_run_is_refused(tmp_path):
    with pytest.raises(NoSuchRun, match="does not exist"):
        write_bundle(tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []


NASTY = "pl4nted \"quoted\" <b>&'tick' /path\\back é\nline two=%+"
FORMS = {
    "plain": NASTY,
    "json": json.dumps(NASTY)[1:-1],
    "json, unicode": json.dumps(NASTY, ensure_ascii=False)[1:-1],
    "json in json": json.dumps(json.dumps(NASTY))[1:-1],
    "html": html.escape(NASTY),
    "html of the report": str(markupsafe.escape(NASTY)),
    "url": quote(NASTY, safe=""),
    "url path": quote(NASTY),
    "url form": quote_plus(NASTY),
    "url, small letters": quote(NASTY, safe="").lower(),
    "yaml": yaml.safe_dump({"a": {"b": NASTY}}),
    "yaml, unicode": yaml.safe_dump({"a": {"b": NASTY}}, allow_unicode=True, width=1000),
    "yaml, narrow": yaml.safe_dump({"a": {"b": NASTY}}, width=20),
    "yaml, single quotes": yaml.safe_dump({"a": NASTY}, default_style="'", allow_unicode=True),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_secret_is_redacted_in_every_escaped_form(form):
    redacted = redactor({"DB_PWD": NASTY})(FORMS[form])
    assert "[redacted]" in redacted
    assert "pl4nted" not in redacted
    assert "two" not in redacted


@pytest.mark.parametrize("name", ["DB_PWD", "db_password", "MY_TOKEN_2", "SIGNING_KEY", "SLACK_WEBHOOK", "PWD_ROOT"])
def test_values_of_variables_with_secret_names_are_redacted(name):
    assert redactor({name: "planted value"})("say planted value") == "say [redacted]"


@pytest.mark.parametrize(
    "secret",
    [
        "https://hooks.slack.com/services/T0/B0/planted",
        "https://discord.com/api/webhooks/1/planted",
        "tgram://planted/chat",
        "planted@gpu-7.cluster.example",
        "root@10.0.0.7",
        "DB_PWD=planted",
        "HF_TOKEN=planted",
    ],
)
def test_webhooks_ssh_hosts_and_assigned_secrets_are_redacted(secret):
    redacted = redactor({})(f"notify {secret} now")
    assert "planted" not in redacted
    assert "10.0.0.7" not in redacted
    assert redacted.startswith("notify ") and redacted.endswith(" now")


def test_the_working_directory_is_not_a_secret():
    assert (
        redactor({"PWD": "/home/me/project", "OLDPWD": "/home/me/other"})("in /home/me/project")
        == "in /home/me/project"
    )


@given(st.text(max_size=300), st.text(min_size=8, max_size=40))
def test_a_secret_value_never_survives_redaction(text, secret):
    assert secret not in redactor({"API_TOKEN": secret})(text[:100] + secret + text[100:]).replace("[redacted]", "")


def test_redaction_leaves_ordinary_text_unchanged():
    text = "step 5/10 | loss 2.2 | norm 1.1, see https://pytorch.org/docs and task-with-a-long-hyphenated-name\n"
    assert redactor({"HOME": "step 5/10 text", "MY_KEY": "short"})(text) == text
