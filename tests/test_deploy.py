"""Files for schedulers: each restarts what a restart helps, passes signals on, and never starts a run over."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tamis.run.files.exit_codes import ExitCode
from tests.checkout import ROOT

FOR_A_PERSON = {code for code in ExitCode if code not in (ExitCode.DONE, ExitCode.PREEMPTED)}
# In place of Tamis: notes its words, then ends with CODE, or waits for TERM as a run does.
FAKE = """#!/bin/sh
echo "$@" >>words
[ -n "$CODE" ] && exit "$CODE"
trap 'exit 4' TERM
touch started
while :; do sleep 0.05; done
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy")
    programs = {".venv/bin/python": FAKE, "bin/scontrol": '#!/bin/sh\necho "$@" >>requeued\n'}
    for name, text in programs.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
        path.chmod(0o755)
    return tmp_path


def start(checkout: Path, script: str, code: int | None, **variables: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PATH": f"{checkout}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "7"} | variables
    environment |= {"CODE": "" if code is None else str(code)}
    command = ["bash", f"deploy/{script}", "my.yaml"]
    return subprocess.Popen(command, cwd=checkout, env=environment, stderr=subprocess.PIPE, text=True)


def until_started(checkout: Path) -> None:
    deadline = time.monotonic() + 60
    while not (checkout / "started").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("code", [*ExitCode, 137])
def test_slurm_queues_a_run_again_only_after_a_signal(checkout: Path, code: int) -> None:
    ended = start(checkout, "slurm.sbatch", code).wait(60)
    assert (checkout / "requeued").exists() == (code == ExitCode.PREEMPTED)
    assert ended == (0 if code == ExitCode.PREEMPTED else code)
    assert (checkout / "words").read_text() == "-u -m tamis run my.yaml\n"


@pytest.mark.parametrize("code", [*ExitCode, 137])
def test_docker_restarts_only_what_a_restart_helps(checkout: Path, code: int) -> None:
    process = start(checkout, "docker_entry.sh", code)
    _, message = process.communicate(timeout=60)
    assert process.returncode == (0 if code in FOR_A_PERSON else code)
    assert (f"code {code}" in message) == (code in FOR_A_PERSON)


@pytest.mark.parametrize("script", ["slurm.sbatch", "docker_entry.sh"])
def test_a_signal_reaches_the_run_and_its_end_is_waited_for(checkout: Path, script: str) -> None:
    process = start(checkout, script, None)
    until_started(checkout)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == (0 if script == "slurm.sbatch" else ExitCode.PREEMPTED)
    assert (checkout / "requeued").exists() == (script == "slurm.sbatch")


def test_every_exit_code_has_a_rule() -> None:
    sky = yaml.safe_load((ROOT / "deploy" / "skypilot.yaml").read_text())["resources"]["job_recovery"]
    assert sky == {"max_restarts_on_errors": 0, "recover_on_exit_codes": [ExitCode.PREEMPTED]}
    assert "error" not in yaml.safe_load((ROOT / "deploy" / "dstack.yml").read_text())["retry"]["on_events"]
    compose = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]["tamis"]
    assert compose["restart"].startswith("on-failure")
    documented = re.findall(r"^\| (\d) \|", (ROOT / "docs" / "deploy.md").read_text(), flags=re.M)
    assert sorted(map(int, documented)) == sorted(ExitCode)


def test_a_run_with_an_unreadable_store_is_not_started_over(tmp_path: Path, checkout: Path) -> None:
    real = f'#!/bin/sh\n[ "$1" = - ] && PYTHONPATH="{ROOT}" exec "{sys.executable}" "$@"\necho "$@" >>words\n'
    (checkout / ".venv" / "bin" / "python").write_text(real)
    (tmp_path / "empty").mkdir()
    assert start(checkout, "start.sh", None, COPY_TO=f"file://{tmp_path}/empty").wait(60) == 0
    assert f"copy.to=file://{tmp_path}/empty" in (checkout / "words").read_text()
    (checkout / "words").unlink()
    assert start(checkout, "start.sh", None, COPY_TO="nonsense://x").wait(60) != 0
    assert not (checkout / "words").exists()


def test_skypilot_and_dstack_accept_their_files() -> None:
    """With the tools' own parsers, where they are installed."""
    configurations = pytest.importorskip(
        "dstack._internal.core.models.configurations", reason="dstack is not installed"
    )
    task = configurations.parse_apply_configuration(yaml.safe_load((ROOT / "deploy" / "dstack.yml").read_text()))
    assert task.type == "task" and task.stop_duration == 120
    sky = pytest.importorskip("sky", reason="SkyPilot is not installed")
    tree = yaml.safe_load((ROOT / "deploy" / "skypilot.yaml").read_text())
    tree["envs"]["COPY_TO"] = "s3://bucket/runs/first"
    assert sky.Task.from_yaml_config(tree).name == "tamis"
