"""Follows the production runbooks, 1 and 2, as tests/test_runbooks.py follows the others. Two files run in parallel."""

from __future__ import annotations

import json
import re
import tarfile
from pathlib import Path

import pytest
import torch

from tamis.run.files.manifest import latest_valid_checkpoint
from tests.checkout import HUB, MINIATURE, TIMEOUT_S, Checkout
from tests.test_runbooks import RUNBOOKS, SMALL, checkout, command, commands, ok, steps_logged, write_config

__all__ = ["checkout"]
pytestmark = pytest.mark.timeout(900)  # up to a dozen processes that load torch, one after the other
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without a GPU prints")


@no_gpu
def test_production_scripts_refuse_at_once_without_a_gpu(checkout: Checkout) -> None:
    for script in [
        command(1, "production_50k_launch.sh"),
        command(1, "run_2xa100_production.sh"),
        command(2, "run_m7c_2xa100_production.sh"),
    ]:
        refused = checkout.run(script)
        assert refused.code == 1
        assert "no GPU found, but runtime.production is true" in refused
        assert "not launched" in refused
        assert not list(checkout.path.glob("artifacts/*/checkpoint_*"))
    check = checkout.run(command(2, "tamis check") + " --quick")
    assert check.code == 1
    assert "NO-GO" in check
    watched = checkout.run(command(1, "monitor_production_50k.sh") + " --once")
    assert watched.code == 1  # something is wrong
    assert "artifacts/m7c_125m_2xa100_prod" in watched and "NO-GO" in watched
    nothing = checkout.run("bash -c 'pkill -f train_showcase.py'")
    assert nothing.code == 1
    ok(checkout.run(command(1, "pkill", "|| true")))


def test_production_launch_in_miniature(checkout: Checkout) -> None:
    """Preflight, causality, phases, stacks, a halt, a relaunch that continues exactly, summary and bundle.

    One process: `test_a_phase_by_hand` has two, and tests/cli/test_launch.py a launch of two.
    """
    out = "artifacts/m7c_125m_2xa100_prod"
    keys = ["runtime.precision=fp32", "train.log_every=1", "train.save_every=40", "train.eval_every=0"]
    config = write_config(checkout, "mine.yaml", "m7c_125m_2xa100_production.yaml", *keys)
    words = "--phase-steps 1,12,14,400"  # enough that the halt comes before the last step
    exports = [line for line in commands(RUNBOOKS[1]) if line.startswith("export ")]
    settings = dict(line.removeprefix("export ").split("=", 1) for line in exports) | {"CONFIG": config}
    launch = checkout.start(f"{command(1, 'production_50k_launch.sh')} {words}", **settings)
    checkout.until(lambda: checkout.step_of(out) >= 20, launch)
    assert "Causality test: 3/3 passed" in checkout.pane
    assert checkout.pane.count("GO (") == 3  # the quick preflight, the whole one, and phase 0
    assert checkout.pane.count("OPEN (") == 2  # phases 1 and 2 in miniature cannot measure every criterion
    ok(checkout.run(command(2, "pgrep", "kill -USR1")))
    ok(checkout.run(command(1, "touch")))
    assert launch.wait(TIMEOUT_S) == 3, checkout.pane
    assert '"step_end"' in checkout.run("timeout 3 " + command(1, "tail -f", "heartbeat"))
    assert "stackdump_rank0" in ok(checkout.run(command(1, "ls artifacts")))
    halted_at = latest_valid_checkpoint(checkout.path / out)
    assert halted_at == steps_logged(checkout, out)[-1] < 400

    last = halted_at + 10
    words = words.replace("400", str(last))
    relaunch = ok(checkout.run(f"{command(1, 'run_2xa100_production.sh')} {words}", **settings))
    assert relaunch.count("unchanged since") == 3
    assert "NSA_DDP_COMPRESS=bf16: runtime.ddp_compress=bf16" in relaunch
    assert_went_on(checkout, out, halted_at, last)
    assert "resume from a checkpoint succeeded" in relaunch
    _, bundle = sorted((checkout.path / "artifacts").glob("*_handoff_*.tar"))  # of the halt, and of the end
    with tarfile.open(bundle) as packed:
        names = {Path(name).name for name in packed.getnames()}
    assert {
        "run.info",
        "training.csv",
        f"checkpoint_step{last}.pt",
        "report.html",
        "go_no_go.txt",
        "SHA256SUMS",
    } <= names
    assert command(1, "tamis judge") == command(2, "tamis judge") == f"tamis judge {out}"
    judged = checkout.run(command(0, "tamis judge").replace("artifacts/m7c_125m", out))
    assert "NOT APPLICABLE trains for at least two hours" in judged  # which is asked of a pilot on GPUs
    assert (judged.code == 0) == (" FAIL " not in judged)


def assert_went_on(checkout: Checkout, out: str, halted_at: int, last: int) -> None:
    events = [json.loads(line) for line in (checkout.path / out / "events.jsonl").read_text().splitlines()]
    starts = [event["reason"] for event in events if event["event"] == "start"]
    assert starts == ["1 worker from the beginning", f"1 worker from checkpoint_step{halted_at}.pt"]
    assert steps_logged(checkout, out) == list(range(1, last + 1))
    assert not (checkout.path / out / ".HALT").exists()


def test_causality_passes_in_full_and_never_touches_git(checkout: Checkout) -> None:
    ok(checkout.run("git init -q . && git add configs && git -c user.name=t -c user.email=t@t commit -qm one"))
    before = checkout.run("git rev-parse HEAD && git status --porcelain -- configs && git stash list")
    config = write_config(checkout, "mine.yaml", "m7c_125m_2xa100_production.yaml", "runtime.precision=fp32")
    done = ok(checkout.run(command(1, "run_gpu_causality_test.sh --full"), CONFIG=config))
    assert "Causality test: 3/3 passed" in done
    assert re.search(r"Extended tests: (\d+)/\1 passed", done)
    (log,) = (checkout.path / "artifacts" / "test-reports").glob("causality_*.log")
    assert "Causality test: 3/3 passed" in log.read_text()
    assert checkout.run("git rev-parse HEAD && git status --porcelain -- configs && git stash list") == before


PHASE_BY_HAND = [
    (command(2, "NSA_TB_DISABLE=1"), "artifacts/m7c_125m_2xa100_prod", {"tb": False, "training.csv": False}),
    (command(2, "tuned.yaml"), "artifacts/m7c_125m_2xa100_prod_tuned", {"tb": True, "training.csv": True}),
    (command(2, "NSA_TB_DISABLE=0"), "artifacts/train_showcase", {"tb": True, "training.csv": False}),
]


@pytest.mark.parametrize(("smoke", "out", "written"), PHASE_BY_HAND, ids=["smoke", "tuned", "tensorboard"])
def test_a_phase_by_hand(checkout: Checkout, smoke: str, out: str, written: dict[str, bool]) -> None:
    """With NSA_TB_DISABLE=1 on two processes, which read the stream and get USR1; once is enough for that."""
    ranks, steps = (2, 120) if "NSA_TB_DISABLE=1" in smoke else (1, 3)  # 120: still training when USR1 comes
    small = " ".join([*MINIATURE, *HUB]) if ranks == 2 else SMALL
    run = checkout.start(f"env {smoke} {small} train.steps={steps}".replace("node=2", f"node={ranks}"))
    if ranks == 2:
        checkout.until(lambda: checkout.step_of(out) >= 3, run)
        ok(checkout.run(command(2, "pgrep", "kill -USR1")))  # also reaches torchrun, which must ignore it
    assert run.wait(TIMEOUT_S) == 0, checkout.pane
    assert ranks == 1 or len(list((checkout.path / out).glob("stackdump_rank*"))) >= 2
    assert f"{ranks} × CPU" in checkout.pane
    assert "bf16 compute" in checkout.pane
    assert f"step {steps}/{steps}" in checkout.pane
    for name, is_there in written.items():
        assert (checkout.path / out / name).exists() == is_there, name
    if "NSA_DISABLE_AUX_STATS" in smoke:
        assert "gate_shares" not in (checkout.path / out / f"heartbeat_rank{ranks - 1}.jsonl").read_text()
