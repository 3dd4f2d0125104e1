"""A launch tells the operator what happens, once each, and is not disturbed by what becomes of its messages."""

import sys
from pathlib import Path

import pytest

from tamis.config import ConfigError, load_config
from tamis.run import launch
from tamis.run.checks.evidence import read_evidence
from tamis.run.cost import CostMeter
from tamis.run.files.directory import RunDirectory
from tamis.run.files.events import EventLog, read_events
from tamis.run.files.lock import RunLock, RunLocked
from tamis.run.handover.redaction import redactor
from tamis.run.handover.report import report_page
from tamis.run.notify import delivery
from tamis.run.notify import notifier as notifier_module
from tamis.run.notify.notifier import Notifier, addresses_for, notified, send_test
from tests.run.notify.launches import config_for, launch_fake, supervise_fake

SECRETS = ("pa55word", "t0kenInThePath", "an0therToken")


@pytest.fixture(autouse=True)
def fake_trainer(monkeypatch, tmp_path):
    monkeypatch.setattr(launch, "supervise", supervise_fake)
    monkeypatch.setattr(launch, "LAUNCH_LOGS", tmp_path / "train_runs")


def test_a_run_with_a_crash_leads_to_messages_from_start_to_end_and_no_secret_is_stored(
    tmp_path: Path, receiving, monkeypatch, capfd
) -> None:
    one, other = receiving(), receiving()
    address = f"http://ann:{SECRETS[0]}@{one.place}/{SECRETS[1]}"
    monkeypatch.setenv("TAMIS_NOTIFY", f"http://{other.place}/{SECRETS[2]}, http://{other.place}/{SECRETS[2]}")
    monkeypatch.setenv("FAKE_FAULT", '{"kind": "crash", "step": 7}')
    monkeypatch.setattr(sys, "argv", ["tamis", "launch", f"notify.to={address}"])
    config = config_for(tmp_path / "out", notify={"to": address}, cost={"per_hour": 3600.0})
    assert launch_fake(config) == 0
    for receiver in (one, other):
        assert sorted(receiver.events()) == ["done", "first_checkpoint", "restart", "start"]
    done = next(message for message in one.accepted if message["event"] == "done")
    assert done["run"] == str(tmp_path / "out") and (done["step"], done["steps"], done["loss"]) == (10, 10, 3.0)
    assert done["message"].endswith("The machine still costs 3,600.00 $ an hour") and done["cost_so_far"] > 0.1
    assert "tamis handoff" in done["what_to_do"] and done["eta"] is None
    restart = next(message for message in one.accepted if message["event"] == "restart")
    assert "it ended with exit code 1 (crash) at step 6" in restart["message"] and ", in 0:0" in restart["eta"]

    out = RunDirectory(tmp_path / "out")
    stored = report_page(read_evidence(out), {}) + "".join(
        path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file()
    )
    stored += "".join(capfd.readouterr()) + repr(config)
    assert [secret for secret in SECRETS if secret in stored] == []
    assert f"messages go to http://{one.place}/…" in stored
    assert load_config(out.config_yaml).notify.to == f"http://{one.place}/…"


def test_a_launch_at_its_limit_writes_the_report_and_names_the_key(tmp_path: Path, receiving) -> None:
    receiver = receiving()
    config = config_for(tmp_path / "out", notify={"to": f"http://{receiver.place}/"}, cost={"max_hours": 1e-9})
    assert launch_fake(config) == 7
    (message,) = receiver.accepted
    assert message["event"] == "cost_limit" and message["message"].startswith("cost.max_hours=1e-09 is reached")
    assert (tmp_path / "out" / "report.html").is_file()


def test_a_service_that_never_answers_does_not_hold_up_the_run(tmp_path: Path, receiving, monkeypatch) -> None:
    monkeypatch.setattr(notifier_module, "FLUSH_S", 0.1)
    monkeypatch.setattr(delivery, "TIMEOUT_S", 0.3)
    receiver = receiving(*[0] * 99)
    assert launch_fake(config_for(tmp_path / "out", notify={"to": [f"http://{receiver.place}/secret"]})) == 0
    assert not receiver.release.is_set() and receiver.accepted == []
    failure = next(event for event in read_events(RunDirectory(tmp_path / "out")) if event["event"] == "notify_failed")
    assert failure["reason"].startswith(f"http://{receiver.place}/…: no answer within")


def test_a_launch_that_fails_leads_to_a_message_and_one_that_is_refused_to_none(
    tmp_path: Path, receiving, monkeypatch
) -> None:
    receiver = receiving()
    config = config_for(tmp_path / "out", notify={"to": f"http://{receiver.place}/"})
    with RunLock(RunDirectory(tmp_path / "out").create().launch_lock) as lock:
        lock.acquire("launch")
        with pytest.raises(RunLocked):
            launch_fake(config)

    def fail(*_: object, **__: object) -> int:
        raise OSError("the disk is gone")

    monkeypatch.setattr(launch, "supervise", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        launch_fake(config)
    monkeypatch.setattr(launch, "supervise", lambda *_, **__: 6)
    assert launch_fake(config) == 6
    texts = [message["message"] for message in receiver.accepted]
    assert texts == ["the launch failed: the disk is gone", "the launch ended with exit code 6"]
    assert receiver.events() == ["failed", "failed"]


def test_each_kind_of_event_is_sent_once_and_the_end_counts_the_rest(tmp_path: Path, receiving) -> None:
    receiver = receiving()
    config, out = config_for(tmp_path / "out"), RunDirectory(tmp_path / "out").create()
    events = EventLog(out, by="supervisor")
    events.record("end", "of the launch before", exit_code=0)
    watcher = Notifier(config, out, CostMeter(config, out), [f"http://{receiver.place}/"])
    for number in range(4):
        events.record("start", "1 worker")
        events.record("stuck_in_compute", "rank 0 is silent", severity="stall")
        events.record("slow", f"slow {number}", severity="note")
        events.record("stackdump", "not for the operator")
        events.record("restart", f"restart {number}")
        events.record("phase_verdict", f"phase {number}: GO", phase=number, go=True)
    watcher.look()
    events.record("loss_too_good", "a leak", severity="halt")
    events.record("end", "all restarts are used up", exit_code=1, budget_spent=True)
    watcher.look()
    watcher.end(1)
    watcher.flush()
    watcher.close()
    assert receiver.events() == ["start", "stall", "note", "restart", *["phase"] * 4, "anomaly", "budget_spent"]
    assert receiver.accepted[-1]["message"] == (
        "all restarts are used up (not sent one by one: note × 3, restart × 3, stall × 3)"
    )


def test_alarms_of_a_phase_are_sent_and_its_start_and_end_are_not(tmp_path: Path, receiving) -> None:
    receiver = receiving()
    config, out = config_for(tmp_path / "out"), RunDirectory(tmp_path / "out").create()
    phases = [RunDirectory(out.path / "phases" / f"phase{number}_x").create() for number in (0, 1)]
    current = out.path / "phases" / "current"
    current.symlink_to("phase0_x")
    EventLog(phases[0], by="watchdog").record("dead_rank", "of an earlier launch", severity="stall")
    watcher = Notifier(config, out, CostMeter(config, out), [f"http://{receiver.place}/"])
    watcher.look()
    current.unlink()
    current.symlink_to("phase1_x")
    for name, evidence in (("start", {}), ("stuck_in_compute", {"severity": "stall"}), ("end", {"exit_code": 5})):
        EventLog(phases[1], by="supervisor").record(name, "in phase 1", **evidence)
    watcher.look()
    watcher.flush()
    watcher.close()
    assert receiver.events() == ["stall"]


def test_messages_are_limited_per_hour_but_the_end_always_comes(tmp_path: Path, receiving, monkeypatch) -> None:
    monkeypatch.setattr(notifier_module, "MOST_PER_HOUR", 3)
    receiver = receiving()
    config, out = config_for(tmp_path / "out"), RunDirectory(tmp_path / "out").create()
    watcher = Notifier(config, out, CostMeter(config, out), [f"http://{receiver.place}/"])
    for number in range(9):
        watcher.tell("note", f"note {number}", about=str(number))
    watcher.end(3)
    watcher.flush()
    watcher.close()
    assert receiver.events() == ["note", "note", "note", "halt"]


def test_a_digest_comes_when_its_time_has_come(tmp_path: Path, receiving, monkeypatch) -> None:
    monkeypatch.setattr(notifier_module, "MOST_PER_HOUR", 10**6)
    receiver, out = receiving(), RunDirectory(tmp_path / "out").create()
    config = config_for(tmp_path / "out", notify={"digest_hours": 1e-5})
    with notified(config, out, CostMeter(config, out), [f"http://{receiver.place}/"]):
        assert receiver.until(1)[0]["message"] == "the last 1e-05 hours: nothing to report"
        EventLog(out, by="supervisor").record("restart", "it crashed")
        receiver.until_told("digest", "hours: restart × 1")


def test_a_secret_of_the_environment_in_a_reason_is_not_sent(tmp_path: Path, receiving, monkeypatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "a-secret-of-the-environment")
    receiver, out = receiving(), RunDirectory(tmp_path / "out").create()
    config = config_for(tmp_path / "out")
    watcher = Notifier(config, out, CostMeter(config, out), [f"http://{receiver.place}/"])
    watcher.tell("note", "refused: a-secret-of-the-environment")
    watcher.close()
    assert receiver.accepted[0]["message"] == "refused: [redacted]"


def test_an_error_while_a_message_is_written_does_not_reach_the_launch(tmp_path: Path, receiving, monkeypatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise PermissionError("not allowed to read")

    monkeypatch.setattr(notifier_module, "compose", fail)
    config, out = config_for(tmp_path / "out"), RunDirectory(tmp_path / "out").create()
    with notified(config, out, CostMeter(config, out), [f"http://{receiving().place}/"]) as watcher:
        EventLog(out, by="supervisor").record("restart", "it crashed")
        watcher.look()
        watcher.end(1)


def test_addresses_come_from_the_config_and_the_variable_and_a_stored_one_is_skipped(tmp_path: Path, capsys) -> None:
    config = config_for(tmp_path, notify={"to": ["https://a.example/x", "https://b.example/…"]})
    found = addresses_for(config, {"TAMIS_NOTIFY": "https://c.example/y,https://a.example/x\nhttp://d.example"})
    assert found == ["https://a.example/x", "https://c.example/y", "http://d.example"]
    assert "no messages to https://b.example/…: a stored configuration lacks the secret part" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="TAMIS_NOTIFY: it must look like https://host/path"):
        addresses_for(config, {"TAMIS_NOTIFY": "secret"})


@pytest.mark.parametrize("wrong", ["s3cret", "https://", "https:///s3cret", "https://s3cret:port/", "mailto:s3cret"])
def test_a_wrong_address_is_refused_without_being_shown(wrong: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, [f"notify.to={wrong}"])
    assert str(error.value).startswith("notify.to is not shown here: it must ") and "s3cret" not in str(error.value)


def test_each_address_of_the_variable_is_redacted_in_a_bundle() -> None:
    redact = redactor({"TAMIS_NOTIFY": "https://a.example/first https://b.example/second"})
    assert redact("to https://b.example/second now") == "to [redacted] now"


def test_the_verb_prints_each_result_without_secrets(tmp_path: Path, receiving, capsys) -> None:
    good, bad = receiving(), receiving(401)
    places = [f"http://{receiver.place}" for receiver in (good, bad)]
    assert send_test(config_for(tmp_path / "new", notify={"to": [f"{place}/secret" for place in places]})) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"[tamis] {places[0]}/…: sent",
        f"[tamis] {places[1]}/…: it answered 401",
    ]
    assert good.accepted[0]["event"] == "test" and not (tmp_path / "new").exists()
    with pytest.raises(ConfigError, match=r"set notify\.to=https://…, or TAMIS_NOTIFY"):
        send_test(config_for(tmp_path))
