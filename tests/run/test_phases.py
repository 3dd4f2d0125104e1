"""A launch by phases: in order, each in its own directory, stopped by the first that does not pass."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tamis.config import Config, ConfigError, build_config
from tamis.run import phases
from tamis.run.files.directory import RunDirectory
from tamis.run.files.events import read_events
from tamis.run.files.exit_codes import ExitCode
from tamis.run.phases import PHASES, launch_by_phases, parse_phase_steps, read_go_no_go
from tests.run.fabricate import GPUS, Story, fabricate

STEPS = {0: 1, 1: 30, 2: 40, 3: 60}


class Launcher:
    """Stands in for the supervisor: leaves the directory a run of that config would leave."""

    def __init__(self, stories: dict[int, Story] | None = None, codes: dict[int, int] | None = None) -> None:
        self.stories, self.codes, self.configs = stories or {}, codes or {}, []

    def __call__(self, config: Config) -> int:
        number = len(self.configs)
        self.configs.append(config)
        story = replace(self.stories.get(number, Story()), steps=config.train.steps)
        fabricate(Path(config.train.out_dir), story, config)
        return self.codes.get(number, 0)


@pytest.fixture(autouse=True)
def no_torch_needed(monkeypatch):
    """Loading a checkpoint with torch is tested with the judge; the checkpoints here are not real ones."""
    production = replace(PHASES[3], criteria=tuple(c for c in PHASES[3].criteria if "loads" not in c.name))
    monkeypatch.setattr(phases, "PHASES", (*PHASES[:3], production))


@pytest.fixture
def config(tmp_path) -> Config:
    return build_config(
        {
            "model": {"dim": 64, "n_layers": 4, "n_heads": 4, "n_kv_groups": 2, "d_k": 16, "d_ff": 128},
            "data": {"dataset": "sample", "tokenizer": "byte"},
            "runtime": {"production": True},
            "train": {
                "steps": 60,
                "warmup_steps": 50,
                "log_every": 1,
                "save_every": 20,
                "out_dir": str(tmp_path / "out"),
            },
        }
    )


def launch(config: Config, launcher: Launcher, **options) -> tuple[int, str]:
    screen = io.StringIO()
    code = launch_by_phases(
        config,
        launcher,
        config_path="m7c.yaml",
        gpus=GPUS,
        processes=2,
        steps=STEPS,
        console=Console(file=screen, width=200),
        **options,
    )
    return code, screen.getvalue()


def test_a_healthy_machine_goes_through_all_phases(config):
    launcher = Launcher()
    code, screen = launch(config, launcher)
    assert code == 0
    assert [c.train.steps for c in launcher.configs] == [1, 30, 40, 60]
    assert [c.data.dataset for c in launcher.configs] == ["synthetic", "sample", "sample", "sample"]
    assert "NO-GO" not in screen
    assert screen.count("OPEN (") == 2  # in miniature, phases 1 and 2 cannot measure every criterion


def test_each_rehearsal_has_a_directory_of_its_own_and_production_has_out_dir(config):
    launcher = Launcher()
    launch(config, launcher)
    directories = [c.train.out_dir for c in launcher.configs]
    assert len(set(directories)) == 4
    assert directories[3] == config.train.out_dir
    assert all(d.startswith(f"{config.train.out_dir}/phases/phase{n}_") for n, d in enumerate(directories[:3]))


def test_the_warm_up_is_shortened_to_fit_a_short_phase(config):
    launcher = Launcher()
    launch(config, launcher)
    assert [c.train.warmup_steps for c in launcher.configs] == [1, 30, 40, 50]


def test_a_failed_phase_stops_the_launch_with_reason_and_remedy(config):
    launcher = Launcher({2: Story(entropy=0.2)})
    code, screen = launch(config, launcher)
    assert code != 0
    assert len(launcher.configs) == 3
    assert "NO-GO (1 failed" in screen
    assert "0.2000" in screen
    assert "train.lr" in screen
    verdicts = [event for event in read_events(RunDirectory(config.train.out_dir)) if event["event"] == "phase_verdict"]
    assert [event["evidence"]["phase"] for event in verdicts] == [0, 1, 2]
    assert verdicts[2]["reason"].startswith("phase 2 (extended smoke): NO-GO (1 failed")


def test_the_phase_under_way_and_then_the_run_are_found_from_out(config):
    seen = []

    def launcher(run_config):
        link = Path(config.train.out_dir) / "phases" / "current"
        seen.append(link.resolve() == Path(run_config.train.out_dir).resolve())
        return 3 if len(seen) == 4 else Launcher.__call__(stand_in, run_config)

    stand_in = Launcher()
    code, screen = launch(config, launcher)
    assert (code, seen) == (3, [True] * 4)
    assert "launch again to start over: there is no checkpoint" in screen


def test_a_crash_of_the_workers_is_a_no_go_with_their_exit_code(config):
    code, screen = launch(config, Launcher(codes={1: ExitCode.ANOMALY}))
    assert code == ExitCode.ANOMALY
    assert "exit code 5 (anomaly)" in screen


@pytest.mark.parametrize("stop", [ExitCode.HALTED, ExitCode.PREEMPTED, ExitCode.COST_LIMIT])
def test_a_requested_stop_is_passed_on_and_is_no_verdict(config, stop):
    code, screen = launch(config, Launcher(codes={1: stop}))
    assert code == stop
    assert "stopped on request" in screen
    assert [record["phase"] for record in read_go_no_go(RunDirectory(config.train.out_dir))] == [0]


def test_the_evidence_of_every_line_is_stored(config):
    launch(config, Launcher())
    out = Path(config.train.out_dir)
    records = json.loads((out / "go_no_go.json").read_text())["phases"]
    assert [record["go"] for record in records] == [True, False, False, True]
    assert all(finding["evidence"] for record in records for finding in record["findings"])
    assert "Phase 3: production" in (out / "go_no_go.txt").read_text()


def test_a_relaunch_does_not_repeat_phases_that_passed_unchanged(config):
    launch(config, Launcher())
    again = Launcher()
    code, screen = launch(config, again)
    assert code == 0
    assert [c.train.out_dir for c in again.configs] == [config.train.out_dir]
    assert screen.count("unchanged since") == 3


def test_a_changed_config_or_an_explicit_wish_repeats_the_phases(config):
    launch(config, Launcher())
    changed = config.model_copy(update={"train": config.train.model_copy(update={"lr": 1e-4})})
    other, repeated = Launcher(), Launcher()
    launch(changed, other)
    launch(config, repeated, repeat=True)
    assert len(other.configs) == len(repeated.configs) == 4


def test_a_failed_phase_is_run_again_on_the_next_launch(config):
    launch(config, Launcher({1: Story(ending=None)}, codes={1: 1}))
    again = Launcher()
    code, _ = launch(config, again)
    assert code == 0
    assert [c.train.steps for c in again.configs] == [30, 40, 60]


def test_nothing_that_was_there_is_deleted(config):
    run = fabricate(Path(config.train.out_dir), steps=40)
    before = {path: path.read_bytes() for path in run.path.glob("checkpoint_*")}
    launch(config, Launcher({1: Story(ending=None)}, codes={1: 1}))
    assert before
    assert {path: path.read_bytes() for path in before} == before


def test_the_estimate_is_held_against_phase_one(config):
    code, screen = launch(config, Launcher(), estimate_toks_per_s=1_000_000.0)
    assert code != 0
    assert "of the estimate 1,000,000" in screen


@pytest.mark.parametrize("text", ["", "1,2,3", "1,2,3,x", "1,2,3,0", "1,2,3,4,5", "1,2,-3,4"])
def test_step_counts_that_make_no_sense_are_refused(text):
    with pytest.raises(ConfigError, match="--phase-steps"):
        parse_phase_steps(text)


def test_step_counts_for_a_rehearsal_in_miniature_are_read():
    assert parse_phase_steps("1, 12,20,30") == {0: 1, 1: 12, 2: 20, 3: 30}
