"""Follows docs/runbooks/ line by line, as an operator would, in a scratch checkout on a machine without a GPU.

The commands come from the documents. What a test adds to one is only what an operator could type too: keys that make
model and step counts small, and texts of this machine, which stand for the hub where a stream is followed. Two GPUs are
two processes here.
"""

from __future__ import annotations

import csv
import json
import re
import shlex
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

from tamis.cli.main import app
from tamis.config import build_config, load_config
from tamis.train.main import train_config
from tests.checkout import HUB, LOCAL, MINIATURE, ROOT, TIMEOUT_S, Checkout, Done, make_checkout

RUNBOOKS = sorted((ROOT / "docs" / "runbooks").glob("[0-9]-*.md"))
NOT_OURS = (
    ". .venv/bin/activate",
    "ssh ",
    "tmux ",
    "git clone ",
    "watch ",
    "nvidia-smi",
    "tensorboard ",
    "python -c ",
    "ls ",
)
SMALL = " ".join([*MINIATURE, *LOCAL])
pytestmark = pytest.mark.timeout(900)  # up to a dozen processes that load torch, one after the other
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")


def blocks(runbook: Path) -> list[str]:
    return re.findall(r"^```bash\n(.*?)^```", runbook.read_text(), flags=re.M | re.S)


def commands(runbook: Path) -> list[str]:
    lines = "".join(blocks(runbook)).replace("\\\n", "").splitlines()
    return [re.sub(r"\s+", " ", line.partition(" #")[0]).strip() for line in lines if line.strip()]


def command(runbook: int, *words: str) -> str:
    """The one command of a runbook that holds all these words."""
    found = {line for line in commands(RUNBOOKS[runbook]) if all(word in line for word in words)}
    assert len(found) == 1, f"{words}: {found}"
    return found.pop()


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Checkout]:
    made = make_checkout(tmp_path / "tamis-checkout")
    yield made
    made.end()


def ok(done: Done) -> Done:
    assert done.code == 0, done
    return done


def write_config(checkout: Checkout, name: str, source: str, *overrides: str, texts: list[str] = LOCAL) -> str:
    """A config file of the operator's own, made from a shipped one."""
    config = load_config(ROOT / "configs" / source, [*MINIATURE, *texts, *overrides])
    (checkout.path / name).write_text(yaml.safe_dump(config.model_dump()))
    return name


def test_every_command_is_followed_here_or_belongs_to_other_programs() -> None:
    files = [Path(__file__), Path(__file__).with_name("test_production_runbooks.py")]
    source = "".join(path.read_text() for path in files)
    followed = re.findall(r"command\(\s*(\d), ([^)]*)\)", source)
    wanted = [(int(number), re.findall(r'"([^"]*)"', words)) for number, words in followed]
    for number, runbook in enumerate(RUNBOOKS):
        for line in commands(runbook):
            is_followed = any(n == number and all(word in line for word in words) for n, words in wanted)
            assert is_followed or line.startswith((*NOT_OURS, "export ")), f"{runbook.name}: {line}"


def test_every_command_of_the_contract_is_in_a_runbook() -> None:
    everything = "\n".join(line for runbook in RUNBOOKS for line in commands(runbook))
    for name in [
        "prime_bootstrap.sh",
        "datasets/check_fwe_stream.py",
        "datasets/fineweb_edu_loader.py",
        "train_m7c_prime.sh",
        "run_tensorboard.sh",
        "train_showcase.py",
        "profiler_comparison.py",
        "demo_64k.py",
        "run_gpu_causality_test.sh --full",
        "production_50k_launch.sh",
        "run_2xa100_production.sh",
        "run_m7c_2xa100_production.sh",
        "monitor_production_50k.sh",
        "_watchdog.py",
        "touch artifacts/m7c_125m_2xa100_prod/.HALT",
        "kill -USR1",
        "pkill -f train_showcase.py",
    ]:
        assert name in everything, name


def test_every_file_a_runbook_names_is_there() -> None:
    for runbook in RUNBOOKS:
        for name in re.findall(r"(?:configs|scripts)/[\w/.]+\.(?:yaml|sh|py)", runbook.read_text()):
            assert (ROOT / name).is_file(), f"{runbook.name}: {name}"


def test_pilot_prepares_starts_and_leaves_the_documented_files(checkout: Checkout) -> None:
    assert "[bootstrap] .venv is up to date" in ok(checkout.run(command(0, "prime_bootstrap.sh")))
    config = write_config(checkout, "mine.yaml", "m7c_125m_80g.yaml", texts=HUB)
    assert command(0, "run_tensorboard.sh") in command(3, "run_tensorboard.sh")
    stream = ok(checkout.run(command(0, "check_fwe_stream.py"), CONFIG=config))
    assert "ok batch[0] lens: [33, 33, 33, 33]" in stream
    start = command(0, "train_m7c_prime.sh") + " train.steps=4 train.eval_batches=1 model.n_layers=1"
    done = ok(checkout.run(start))
    assert "no GPU found" in done
    assert "showcase" in done
    assert "parameters: " in done
    (logs,) = (checkout.path / "artifacts" / "train_runs").glob("m7c_*")
    info = yaml.safe_load((logs / "run.info").read_text())
    changed = {change.partition(":")[0] for change in info["config_changes"]}
    assert changed == {"train.steps", "train.eval_batches", "model.n_layers"}
    assert {
        "config_hash",
        "parameters",
        "gpus",
        "torch",
        "launch_command",
        "git_commit",
        "tokens_per_step",
        "eta",
    } <= info.keys()
    assert "step 4/4" in (logs / "train.log").read_text()
    assert_serves_curves(checkout, command(3, "run_tensorboard.sh"))


def assert_serves_curves(checkout: Checkout, start: str) -> None:
    """On the loopback address alone."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    board = checkout.start(f"{start} {port}")

    def answers() -> bool:
        try:
            return b"train/loss" in urllib.request.urlopen(f"http://127.0.0.1:{port}/data/plugin/scalars/tags").read()
        except OSError:
            return False

    checkout.until(answers, board)
    assert f"ssh -L {port}:localhost:{port}" in checkout.pane
    listening = Path("/proc/net/tcp").read_text().splitlines()
    addresses = {line.split()[1].split(":")[0] for line in listening if f":{port:04X} 00000000:0000 0A" in line}
    assert addresses == {"0100007F"}


def test_pilot_resumes_by_hand_on_two_processes_and_hands_over(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = "artifacts/m7c_125m"
    start = command(0, "train_showcase.py", "--resume")
    small = ["runtime.precision=fp32", "train.log_every=1", "train.save_every=3"]
    monkeypatch.chdir(checkout.path)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # the trainer of this process has torch loaded already
    first = load_config(ROOT / "configs" / "m7c_125m_80g.yaml", [*MINIATURE, *LOCAL, *small, "train.steps=3"])
    assert train_config(first) == 0
    resumed = ok(checkout.run(f"{start.replace('{N}', '3')} {SMALL} {' '.join(small)} train.steps=6"))
    assert "2 × CPU" in resumed
    assert steps_logged(checkout, out) == [1, 2, 3, 4, 5, 6]
    assert "step,loss,lr,toks_per_s" in checkout.run("timeout 3 " + command(0, "tail -f"))
    assert "DONE" in ok(checkout.run(command(0, "tamis monitor")))
    assert "report.html" in ok(checkout.run(command(0, "tamis report")))
    bundle = checkout.run(command(0, "tamis handoff"))
    assert bundle.code == 1
    assert "missing: run.info" in bundle  # nothing launched this run, and the bundle lists that
    assert "damaged" not in bundle


def steps_logged(checkout: Checkout, out: str) -> list[int]:
    with open(checkout.path / out / "training.csv") as file:
        return [int(row["step"]) for row in csv.DictReader(file)]


def test_pilot_measures(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_config(checkout, "mine.yaml", "m7c_125m_80g.yaml", "runtime.precision=fp32")
    compare = command(0, "profiler_comparison.py").replace("100", "2").replace("10", "1")
    rows = json.loads(ok(checkout.run(compare, CONFIG=config)).splitlines()[-1])["rows"]
    assert [row["path"] for row in rows] == ["reference", "dense twin"]
    assert all(row["toks_per_s"] > 0 for row in rows)
    marked = ok(checkout.run(command(0, "NSA_NVTX=1") + f" {SMALL} train.steps=2 runtime.precision=fp32"))
    assert "NSA_SEL_RANGES_V2=1: has nothing left to choose" in marked
    assert "NVTX ranges are on, but there is no GPU for a profiler" in marked
    assert "step 2/2" in marked
    monkeypatch.chdir(checkout.path)
    words = shlex.split(command(0, "tamis estimate").replace("configs/m7c_125m_80g.yaml", config))
    assert "tok/s" in CliRunner().invoke(app, words[1:]).output  # here, where torch is loaded already
    demo = command(0, "demo_64k.py").replace("65536", "96").replace("4096", "32")
    assert "reads_total" in ok(checkout.run(f"{demo} --decode_tokens 2 {SMALL}"))


def test_what_to_do_when_it_seems_stuck(checkout: Checkout) -> None:
    out = "train.out_dir=artifacts/m7c_125m"
    config = write_config(checkout, "mine.yaml", "m7c_125m_fast_log.yaml", out, texts=HUB)
    loader = command(3, "fineweb_edu_loader.py").replace("configs/m7c_125m_fast_log.yaml", config)
    assert "ok batch[19] lens: [33, 33]" in ok(checkout.run(loader))
    steps = 4000
    trainer = command(3, "train_showcase.py", "--dataset synthetic").replace("--steps 20", f"--steps {steps}")
    run = checkout.start(trainer.replace("configs/m7c_125m_fast_log.yaml", config).replace("CONFIG", "env CONFIG"))
    checkout.until(lambda: checkout.step_of("artifacts/m7c_125m") >= 3, run)
    assert "RUNNING" in ok(checkout.run(command(3, "tamis monitor")))
    pid = str(run.pid)
    ok(checkout.run(command(3, "kill -USR1").replace("<PID>", pid)))
    checkout.until(lambda: bool(list(checkout.path.glob("artifacts/*/stackdump_rank0_*"))), run)
    watchdog = command(2, "_watchdog.py").replace("m7c_125m_2xa100_prod", "m7c_125m")
    watching = checkout.start(watchdog)
    ok(checkout.run("kill " + pid))
    assert run.wait(TIMEOUT_S) == 4
    assert watching.wait(TIMEOUT_S) == 0
    assert steps_logged(checkout, "artifacts/m7c_125m")[-1] < steps


def test_settings_of_the_production_run_are_what_they_add_up_to(checkout: Checkout) -> None:
    exports = "; ".join(line for line in commands(RUNBOOKS[4]) if line.startswith("export "))
    shown = ok(checkout.run(f"{exports}; {command(4, 'tamis config show')}"))
    assert "125,446,320 parameters" in shown
    tree = yaml.safe_load(shown[shown.index("model:") :])
    assert build_config(tree).runtime.ddp_compress == "bf16"
    assert build_config(tree).train.out_dir == "artifacts/m7c_125m_2xa100_prod"
