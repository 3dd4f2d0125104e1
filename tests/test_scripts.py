"""The scripts are a few lines over one command line, end with true exit codes, and harm nothing."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkout import ROOT, make_checkout

SHELL = sorted((ROOT / "scripts").glob("*.sh"))
PYTHON = sorted((ROOT / "scripts").rglob("*.py"))
THIN = [path for path in SHELL if path.name != "prime_bootstrap.sh"]  # it runs before there is anything to call
TOOLS = ("bash", "dirname", "cat", "sha256sum", "cut", "grep", "mktemp", "rm", "cp", "mkdir", "env", "chmod")


@pytest.mark.parametrize("script", SHELL, ids=lambda path: path.name)
def test_a_shell_script_stops_at_the_first_error_and_runs_from_anywhere(script: Path) -> None:
    text = script.read_text()
    assert text.startswith("#!/usr/bin/env bash\n# ")
    assert "set -euo pipefail\n" in text
    assert 'cd "$(dirname "$0")/.."\n' in text
    assert script.stat().st_mode & stat.S_IXUSR
    subprocess.run(["bash", "-n", script], check=True)


@pytest.mark.parametrize("script", THIN, ids=lambda path: path.name)
def test_a_shell_script_is_a_few_lines_that_call_the_command_line(script: Path) -> None:
    lines = [line for line in script.read_text().splitlines() if line.strip() and not line.startswith("#")]
    assert len(lines) <= 14
    assert any(".venv/bin/" in line for line in lines)
    assert all("--from-script" in line for line in lines if "prime_bootstrap.sh" in line)


@pytest.mark.parametrize("script", [*SHELL, *PYTHON], ids=lambda path: path.name)
def test_no_script_deletes_hides_an_exit_code_or_touches_git(script: Path) -> None:
    text = script.read_text()
    assert not re.search(r"rm -r|shutil\.rmtree|\bgit (checkout|reset|stash|clean|pull|add|commit)", text)
    assert "| tee" not in text
    assert "shell=True" not in text


@pytest.mark.parametrize("script", PYTHON, ids=lambda path: path.name)
def test_a_python_script_has_a_docstring_and_holds_no_logic(script: Path) -> None:
    text = script.read_text()
    assert re.match(r'(#!.*\n)?"""', text)
    assert len(text.splitlines()) <= 45


@pytest.fixture
def bare_machine(tmp_path: Path) -> Path:
    """A checkout without .venv, and a PATH that holds a few tools and a python3 of the test's own."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "prime_bootstrap.sh", tmp_path / "scripts")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "path").mkdir()
    for tool in TOOLS:
        (tmp_path / "path" / tool).symlink_to(shutil.which(tool) or tool)
    return tmp_path


def write_script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{shutil.which('bash')}\n{text}")
    path.chmod(0o755)


def bootstrap(machine: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(machine / "scripts" / "prime_bootstrap.sh"), *words],
        env={"PATH": str(machine / "path"), "HOME": os.environ.get("HOME", "/")},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_bootstrap_without_a_new_enough_python_names_what_to_install(bare_machine: Path) -> None:
    write_script(bare_machine / "path" / "python3", "exit 1\n")
    done = bootstrap(bare_machine)
    assert done.returncode == 1
    assert "no Python 3.11 or newer with venv found: install python3.11-venv or newer" in done.stderr


MAKES_A_VENV = """
case "$*" in
  --version) echo "Python 3.12.0" ;;
  "-m venv"*) mkdir -p .venv/bin && cp "$(dirname "$0")/venv_python" .venv/bin/python ;;
  -) exit 1 ;;
esac
"""


def test_bootstrap_that_cannot_install_stops_with_the_reason(bare_machine: Path) -> None:
    write_script(bare_machine / "path" / "python3", MAKES_A_VENV)
    write_script(bare_machine / "path" / "venv_python", 'echo "ERROR: No space left on device" >&2; exit 1\n')
    done = bootstrap(bare_machine)
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert "installing failed: read the lines above" in done.stderr
    assert not (bare_machine / ".venv" / ".tamis-stamp").exists()


RECORDS_PINS = """
echo "$@" >> .venv/calls
while [ $# -gt 0 ]; do if [ "$1" = --constraint ]; then cp "$2" .venv/pins; fi; shift; done
"""


def write_gpu(machine: Path, driver: str) -> None:
    answers = f'case $1 in *driver_version) echo {driver} ;; *) echo "0, NVIDIA A100 80GB PCIe, 81920 MiB" ;; esac\n'
    write_script(machine / "path" / "nvidia-smi", answers)


def test_bootstrap_shows_each_gpu_and_installs_once(bare_machine: Path) -> None:
    write_script(bare_machine / "path" / "python3", MAKES_A_VENV)
    write_script(bare_machine / "path" / "venv_python", 'echo "$@" >> .venv/calls; cp "$0" .venv/bin/tamis\n')
    write_gpu(bare_machine, driver="580.65.06")
    first, again = bootstrap(bare_machine), bootstrap(bare_machine)
    assert first.returncode == again.returncode == 0, first.stderr
    assert "[bootstrap] GPU 0, NVIDIA A100 80GB PCIe, 81920 MiB" in first.stdout
    assert "up to date" in again.stdout
    for done in (first, again):
        assert done.stdout.splitlines()[-1].startswith("[bootstrap] next: bash scripts/train_m7c_prime.sh")
    assert bootstrap(bare_machine, "--from-script").stdout.splitlines()[-1].startswith("[bootstrap] GPU 0")
    calls = (bare_machine / ".venv" / "calls").read_text()
    assert calls.count("--editable") == 1
    assert "download.pytorch.org" not in calls


def test_bootstrap_installs_a_torch_for_cuda_12_where_the_driver_is_older_than_cuda_13_needs(
    bare_machine: Path,
) -> None:
    write_script(bare_machine / "path" / "python3", MAKES_A_VENV)
    write_script(bare_machine / "path" / "venv_python", RECORDS_PINS)
    write_gpu(bare_machine, driver="535.183.01")
    done = bootstrap(bare_machine)
    assert done.returncode == 0, done.stderr
    assert "driver 535.183.01 is older than CUDA 13 needs (580.65.06)" in done.stdout
    assert "--extra-index-url https://download.pytorch.org/whl/cu126" in (bare_machine / ".venv" / "calls").read_text()
    pins = (bare_machine / ".venv" / "pins").read_text().splitlines()
    assert [pin for pin in pins if pin.startswith("torch==")] == ["torch==2.11.0+cu126"]


def test_bootstrap_stops_where_no_torch_runs_with_the_driver(bare_machine: Path) -> None:
    write_script(bare_machine / "path" / "python3", MAKES_A_VENV)
    write_gpu(bare_machine, driver="470.82.01")
    refused = bootstrap(bare_machine)
    assert refused.returncode == 1
    assert "NVIDIA driver 470.82.01 is too old for PyTorch: install driver 525.60.13 or newer" in refused.stderr
    write_script(bare_machine / "path" / "venv_python", "case $* in *cuda.is_available*) exit 1 ;; esac\n")
    write_gpu(bare_machine, driver="580.65.06")
    unusable = bootstrap(bare_machine)
    assert unusable.returncode == 1
    assert "the installed torch cannot use the GPUs with driver 580.65.06" in unusable.stderr
    assert not (bare_machine / ".venv" / ".tamis-stamp").exists()


HAS_TORCH_IN_AN_ENVIRONMENT = r"""
case "$*" in
  --version) echo "Python 3.12.0" ;;
  "-m venv"*) mkdir -p .venv/bin .venv/site && cp "$(dirname "$0")/venv_python" .venv/bin/python ;;
  -|-\ cu130) echo 2.15.0 3.9.0 ;;
  *torch.__file__*) echo /opt/other/site-packages ;;
esac
"""
SEES_TORCH_ONLY_BY_A_PTH_FILE = """
case "$*" in
  *purelib*) echo .venv/site ;;
  "-c import torch") test -f .venv/site/machine_torch.pth ;;
  *) cp "$0" .venv/bin/tamis ;;
esac
"""


def test_bootstrap_reuses_a_torch_that_lives_in_another_environment(bare_machine: Path) -> None:
    write_script(bare_machine / "path" / "python3", HAS_TORCH_IN_AN_ENVIRONMENT)
    write_script(bare_machine / "path" / "venv_python", SEES_TORCH_ONLY_BY_A_PTH_FILE)
    done = bootstrap(bare_machine)
    assert done.returncode == 0, done.stderr
    assert "reusing the machine's torch 2.15.0" in done.stdout
    assert "measured with triton 3.6.0, not 3.9.0, and may be slower here" in done.stdout
    assert (bare_machine / ".venv" / "site" / "machine_torch.pth").read_text() == "/opt/other/site-packages\n"


def test_bootstrap_can_replace_the_torch_of_the_machine_by_the_one_that_was_measured(bare_machine: Path) -> None:
    write_script(bare_machine / "path" / "python3", HAS_TORCH_IN_AN_ENVIRONMENT)
    write_script(bare_machine / "path" / "venv_python", SEES_TORCH_ONLY_BY_A_PTH_FILE + RECORDS_PINS)
    write_gpu(bare_machine, driver="580.65.06")
    pins = bare_machine / ".venv" / "pins"
    bootstrap(bare_machine)
    assert "\ntriton==" not in pins.read_text()
    replaced = bootstrap(bare_machine, "--own-torch")
    assert replaced.returncode == 0, replaced.stderr
    assert "reusing" not in replaced.stdout and "up to date" not in replaced.stdout
    assert {"torch==2.11.0", "triton==3.6.0"} <= {*pins.read_text().splitlines()}
    assert not (bare_machine / ".venv" / "site" / "machine_torch.pth").exists()
    assert "up to date" in bootstrap(bare_machine).stdout


def test_bootstrap_is_silent_about_a_triton_that_was_measured(bare_machine: Path) -> None:
    write_script(bare_machine / "path" / "python3", HAS_TORCH_IN_AN_ENVIRONMENT.replace("3.9.0", "3.6.0"))
    write_script(bare_machine / "path" / "venv_python", SEES_TORCH_ONLY_BY_A_PTH_FILE)
    assert "may be slower" not in bootstrap(bare_machine).stdout


def test_bootstrap_refuses_words_it_does_not_know(bare_machine: Path) -> None:
    done = bootstrap(bare_machine, "--tests")
    assert done.returncode == 1
    assert "unknown argument --tests" in done.stderr


def test_tensorboard_refuses_a_directory_that_is_not_there_and_names_those_with_curves(tmp_path: Path) -> None:
    checkout = make_checkout(tmp_path / "checkout")
    board = checkout.path / "artifacts" / "train_showcase" / "tb"
    board.mkdir(parents=True)
    (board / "events.out.tfevents.1").touch()
    refused = checkout.run("bash scripts/run_tensorboard.sh artifacts/showcase/tb")
    assert refused.code == 2
    assert (
        refused
        == "error: artifacts/showcase/tb is not a directory; there are curves in: artifacts/train_showcase/tb \n"
    )
    assert checkout.run("bash scripts/run_tensorboard.sh artifacts/train_showcase/tb six").code == 2


def test_tensorboard_takes_no_flag_for_a_directory_and_deletes_nothing(tmp_path: Path) -> None:
    checkout = make_checkout(tmp_path / "checkout")
    events = checkout.path / "artifacts" / "mine" / "tb" / "events.out.tfevents.1"
    events.parent.mkdir(parents=True)
    events.touch()
    refused = checkout.run("bash scripts/run_tensorboard.sh -delete")
    assert refused.code == 2 and "error: -delete is not a directory; usage: " in refused
    assert events.exists()
    for flag in ("-h", "--help"):
        shown = checkout.run(f"bash scripts/run_tensorboard.sh {flag}")
        assert shown.code == 0 and shown.startswith("usage: bash scripts/run_tensorboard.sh [LOGDIR] [PORT]")


def test_tensorboard_may_be_started_before_the_run_begins_and_tells_only_then(tmp_path: Path) -> None:
    checkout = make_checkout(tmp_path / "checkout")
    board = checkout.path / ".venv" / "bin"
    board.unlink()
    write_script(board / "tensorboard", 'echo "started with $*"\n')
    write_script(board / "tamis", "")
    printed = checkout.run("bash scripts/run_tensorboard.sh")
    assert printed.code == 0
    assert "no event files in artifacts/m7c_125m/tb yet" in printed
    assert "started with --logdir artifacts/m7c_125m/tb --host 127.0.0.1 --port 6006" in printed
    (checkout.path / "artifacts" / "mine" / "tb").mkdir(parents=True)
    (checkout.path / "artifacts" / "mine" / "tb" / "events.out.tfevents.1").touch()
    for name in ("artifacts/mine/tb", "artifacts/mine/tb/"):  # as a shell completes it
        assert "no event files" not in checkout.run(f"bash scripts/run_tensorboard.sh {name}")


def test_a_mistyped_flag_of_the_launch_fails_before_anything_is_tested(tmp_path: Path) -> None:
    checkout = make_checkout(tmp_path / "checkout")
    refused = checkout.run("bash scripts/production_50k_launch.sh --detahc")
    assert refused.code == 2
    assert "No such option: --detahc" in refused
    assert "preflight" not in refused
    shown = checkout.run("bash scripts/production_50k_launch.sh --help")
    assert shown.code == 0
    assert "--phase-steps" in shown and "preflight: " not in shown


def test_a_python_script_finds_the_project_environment_by_itself(tmp_path: Path) -> None:
    checkout = make_checkout(tmp_path / "checkout")
    bare = f"{Path(sys.executable).resolve()} -S"  # a Python without packages, as a machine's own
    for script in ("_watchdog.py", "datasets/fineweb_edu_loader.py"):
        shown = checkout.run(f"{bare} scripts/{script} --help")
        assert shown.code == 0 and "usage: " in shown, shown
    (checkout.path / ".venv").rename(tmp_path / "elsewhere")
    refused = checkout.run(f"{bare} scripts/train_showcase.py --dataset synthetic", PATH=os.environ["PATH"])
    assert refused.code == 1
    assert re.fullmatch(r"error: \S+ lacks torch, .*: run bash scripts/prime_bootstrap.sh first\n", refused)


def test_the_watchdog_refuses_an_interval_that_is_no_time(tmp_path: Path) -> None:
    checkout = make_checkout(tmp_path / "checkout")
    for flag in ("--interval -1", "--stall-floor nan"):
        refused = checkout.run(f"python scripts/_watchdog.py --dir artifacts/m7c_125m {flag}")
        assert refused.code == 2
        assert f"argument {flag.split()[0]}: {flag.split()[1]} is not a number of seconds above 0" in refused
