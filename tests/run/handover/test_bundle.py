"""The bundle is complete, verified, allow-listed and free of secrets."""

import json
import os
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tamis.run.checks import runbooks
from tamis.run.files.directory import RunDirectory
from tamis.run.files.environment import describe_environment
from tamis.run.files.info import read_info, write_info
from tamis.run.files.records import write_json_atomic
from tamis.run.find import NoSuchRun
from tamis.run.handover import bundle
from tamis.run.handover.bundle import verify_bundle, write_bundle
from tamis.run.handover.redaction import redactor
from tests.run.fabricate import fabricate

SECRETS = {
    "HF_TOKEN": "planted0one0secret",
    "AWS_SECRET_ACCESS_KEY": "planted0two0secret",
    "WANDB_API_KEY": "planted0three0secret",
    "DB_PASSWORD": "planted0four\nsecret0of0two0lines",
    "NSA_ACCESS_KEY": "planted0five0secret",
}
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
    _, output, _ = bundle_of(run, tmp_path)
    assert b"planted0" not in output.read_bytes()
    assert b"log of m7c_1\n[redacted]" in contents(output)["logs/m7c_1/train.log"]


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
    assert {finding["status"] for finding in criteria["findings"]} == {"pass", "fail", "not measured"}


def test_no_user_name_of_this_machine_is_in_the_bundle(run, tmp_path):
    _, output, _ = bundle_of(run, tmp_path)
    with tarfile.open(output) as tar:
        assert {(member.uname, member.uid) for member in tar} == {("", 0)}


def test_writing_a_bundle_leaves_the_run_unchanged(run, tmp_path):
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    bundle_of(run, tmp_path)
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before
    assert not list(tmp_path.glob(".handoff_*"))


def test_a_missing_run_is_refused(tmp_path):
    with pytest.raises(NoSuchRun, match="does not exist"):
        write_bundle(tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []


@given(st.text(max_size=300), st.text(min_size=8, max_size=40))
def test_a_secret_value_never_survives_redaction(text, secret):
    assert secret not in redactor({"API_TOKEN": secret})(text[:100] + secret + text[100:]).replace("[redacted]", "")


def test_redaction_leaves_ordinary_text_unchanged():
    text = "step 5/10 | loss 2.2 | norm 1.1, see https://pytorch.org/docs and task-with-a-long-hyphenated-name\n"
    assert redactor({"HOME": "step 5/10 text", "MY_KEY": "short"})(text) == text
