"""The log of decisions about a run."""

from pathlib import Path

from tamis.run.files.directory import RunDirectory
from tamis.run.files.events import EventLog, read_events


def test_no_event_reaches_a_directory_that_took_the_place_of_the_run_s(tmp_path: Path) -> None:
    run, told = RunDirectory(tmp_path / "out").create(), []
    run.hold()
    events = EventLog(run, by="supervisor", say=told.append)
    events.record("start", "1 worker from the beginning")
    run.path.rename(tmp_path / "moved")
    run.path.mkdir()
    events.record("restart", "a worker was killed")
    assert list(run.path.iterdir()) == []
    assert [event["event"] for event in read_events(RunDirectory(tmp_path / "moved"))] == ["start"]
    assert "a worker was killed (not recorded: " in told[-1] and "was moved or deleted" in told[-1]
