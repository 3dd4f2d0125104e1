"""What a person sees: stages, one line per logged step in a log, a rewritten line on a terminal, a measured ETA."""

import pytest

from tamis.run.files.console import LIVE_VARIABLE, REWRITE, LogFilter
from tamis.train.console import Console, Pace, ZScore, duration, unusual


def test_in_a_log_only_logged_steps_get_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console()
    console.step("step 1", is_logged=True)
    console.step("step 2", is_logged=False)
    assert capsys.readouterr().out == "step 1\n"


def test_on_a_terminal_other_steps_rewrite_one_line_and_a_message_does_not_land_in_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIVE_VARIABLE, "1")
    monkeypatch.setenv("NO_COLOR", "1")
    console = Console()
    console.step("step 1", is_logged=False)
    console.step("step 2", is_logged=False)
    console.say("saved")
    assert capsys.readouterr().out == f"{REWRITE}step 1{REWRITE}step 2\n[tamis] saved\n"


def test_other_ranks_stay_silent(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(rank=1)
    console.step("step 1", is_logged=True)
    with console.stage("building"):
        console.say("anything")
    assert capsys.readouterr().out == ""


def test_a_stage_is_announced_before_it_runs_and_timed_after(capsys: pytest.CaptureFixture[str]) -> None:
    with Console().stage("opening the data"):
        assert capsys.readouterr().out == "[tamis] opening the data …\n"
    assert capsys.readouterr().out.startswith("[tamis] opening the data: ")


def test_a_z_score_counts_standard_deviations_from_the_values_before() -> None:
    score = ZScore()
    assert [score.of(value) for value in (1.0, 3.0) * 5] == [None] * 10  # too few to compare with
    assert score.of(5.0) == pytest.approx(3.0)  # mean 2, deviation 1


def test_the_eta_is_the_median_step_and_unknown_before_the_first() -> None:
    pace = Pace()
    assert pace.eta(10) == "?"
    for seconds in (1.0, 1.0, 60.0):  # one slow step does not move it
        pace.add(seconds)
    assert pace.eta(90) == "1m30s"


@pytest.mark.parametrize(("seconds", "text"), [(0.2, "0m00s"), (59.6, "1m00s"), (3599, "59m59s"), (7261, "2h01m")])
def test_durations_are_formatted_as_minutes_or_hours(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_terminal_gets_colours_unless_no_color_is_set(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIVE_VARIABLE, "12")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    console, line = Console(), f"step 20/30 | loss  9.9000{unusual(5.04)} | norm  1.200{unusual(3.9)}"
    console.step(line, is_logged=True)
    console.error("the data failed")
    shown = capsys.readouterr()
    assert shown.out == f"{REWRITE}step 20/30 | \x1b[33mloss  9.9000 (+5.0σ)\x1b[0m | norm  1.200\n"
    assert shown.err == "\x1b[31merror:\x1b[0m the data failed\n"
    assert LogFilter().feed(shown.out.encode()).decode() == f"{line}\n"
    monkeypatch.setenv("NO_COLOR", "1")
    console.step(line, is_logged=True)
    assert capsys.readouterr().out == f"{REWRITE}{line}\n"
