"""The live page: read-only, on loopback or behind a token, safe to open, right while a run is killed."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tamis.run.files.events import EventLog
from tamis.run.files.lock import RunLock
from tamis.run.monitor.growing import GrowingFiles
from tamis.run.monitor.snapshot import read_snapshot
from tamis.run.monitor.web.page import page_state, render_page
from tamis.run.monitor.web.renewal import renewed_page, write_live_page
from tamis.run.monitor.web.server import PageServer, is_loopback, serve_page
from tests.browser import browser_window, needs_chromium
from tests.faults.launched import Launched, tiny_config
from tests.run.fabricate import Story, fabricate

NASTY = "</script><script>alert(1)</script>"


@contextmanager
def served(folder: Path, host: str = "127.0.0.1") -> Iterator[PageServer]:
    server = PageServer(folder, host, 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join()


def ask(server: PageServer, path: str, method: str = "GET", host: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    connection.request(method, path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    status, text = answer.status, answer.read().decode()
    connection.close()
    return status, text


def first_events(server: PageServer, path: str, count: int) -> list[tuple[str, dict]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    connection.request("GET", path)
    answer = connection.getresponse()
    found = []
    while len(found) < count:
        name = answer.readline().decode().removeprefix("event: ").strip()
        found.append((name, json.loads(answer.readline().decode().removeprefix("data: "))))
        answer.readline()
    connection.close()
    return found


def test_the_page_has_the_lowest_priority_so_that_it_delays_no_step(tmp_path: Path, monkeypatch) -> None:
    priorities: list[int] = []

    def stop(server: PageServer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "nice", priorities.append)
    monkeypatch.setattr(PageServer, "serve_forever", stop)
    assert serve_page(tmp_path, port=0) == 0
    assert priorities == [19]


def test_the_page_and_its_states_are_served_and_nothing_else(tmp_path: Path) -> None:
    fabricate(tmp_path / "first", steps=3)
    fabricate(tmp_path / "second", steps=30)
    os.utime(tmp_path / "second", (2e9, 2e9))
    with served(tmp_path) as server:
        assert ask(server, "/")[0] == 200
        (kind, listed), (_, state), (_, again) = first_events(server, "/events", 3)
        assert kind == "runs" and [run["name"] for run in listed["runs"]] == ["second", "first"]
        assert (listed["chosen"], state["name"], state["state"]) == ("second", "second", "done")
        assert [chart["title"] for chart in state["charts"]][:2] == ["Loss", "Throughput"]
        assert "charts" not in again  # unchanged, so not sent again
        assert first_events(server, "/events?run=first", 2)[1][1]["name"] == "first"
        for path in ("/events?run=../first", "/?run=unknown", "/config.yaml", "/../x"):
            assert ask(server, path) == (404, "there is no such page or run")
        for method in ("POST", "PUT", "DELETE"):
            assert ask(server, "/", method)[0] == 501


def test_a_page_of_another_name_cannot_read_through_loopback(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        assert server.token is None
        assert ask(server, "/", host="evil.example")[0] == 403
        assert ask(server, "/", host="localhost:1")[0] == 200


def test_beyond_loopback_every_request_needs_the_token(tmp_path: Path) -> None:
    with served(tmp_path, "0.0.0.0") as server:
        for path in ("/", "/events", "/?token=wrong", "/?token="):
            assert ask(server, path)[0] == 403
        assert ask(server, f"/?{urlsplit(server.url).query}")[0] == 200
    with pytest.raises(ValueError, match="--host takes an IP address"):
        is_loopback("gpubox")
    with pytest.raises(ValueError, match="give another --port"):
        PageServer(tmp_path, "203.0.113.1", 0)


def test_the_page_works_before_the_run_exists(tmp_path: Path) -> None:
    with served(tmp_path / "later") as server:
        assert first_events(server, "/events", 2)[1][1]["state"] == "missing"


def test_the_file_holds_no_markup_secret_or_path_from_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_TOKEN", "swordfish-swordfish")
    run = fabricate(tmp_path / "home-of-someone" / "run", steps=3)
    EventLog(run, by="supervisor").record("start", f"{NASTY} swordfish-swordfish me@gpubox")
    text = write_live_page(run, GrowingFiles()).read_text()
    assert "alert(1)" in text and NASTY not in text
    for hidden in ("swordfish", "gpubox", "home-of-someone"):
        assert hidden not in text


def test_the_file_is_renewed_at_the_end_of_a_run_and_of_a_phase_but_not_after_a_refusal(tmp_path: Path) -> None:
    run = fabricate(tmp_path / "out", steps=3)
    with pytest.raises(ValueError), renewed_page(run):
        raise ValueError("refused")
    assert not run.live_html.exists()
    with renewed_page(run):
        pass
    assert not run.live_html.exists()  # nothing happened
    phase = fabricate(tmp_path / "out" / "phases" / "phase1_20260101", steps=5)
    with renewed_page(phase):
        EventLog(phase, by="supervisor").record("end", "done")
    assert run.live_html.is_file()
    with pytest.MonkeyPatch.context() as patch, renewed_page(run):  # a page that fails is no error of the run
        patch.setattr("tamis.run.monitor.web.renewal.page_state", lambda *_: 1 / 0)
        EventLog(run, by="supervisor").record("end", "done")


def test_a_run_that_was_given_up_is_not_shown_as_restarting(tmp_path: Path) -> None:
    run = fabricate(tmp_path, steps=3, ending=None)
    with RunLock(run.launch_lock) as lock:
        lock.acquire("launch")
        assert read_snapshot(tmp_path, gpus=[]).state == "restarting"
        EventLog(run, by="supervisor").record("end", "3 restarts without progress")
        assert read_snapshot(tmp_path, gpus=[]).state == "crashed"


def test_values_that_json_lacks_become_text(tmp_path: Path) -> None:
    run = fabricate(tmp_path, steps=3)
    run.training_csv.write_text("step,loss,lr,toks_per_s\n1,nan,0.1,inf\n2,3,0.1,5\n")
    state = page_state(tmp_path, GrowingFiles(), gpus=[])
    json.loads(json.dumps(state, allow_nan=False))
    assert "<script>" in render_page(state, "run")


@needs_chromium
def test_a_browser_follows_a_run_that_is_killed_restarts_and_ends(tmp_path: Path) -> None:
    launched = Launched(tiny_config(tmp_path / "runs" / "tiny", steps=30), FAKE_HOLD="12")
    problems: list[str] = []
    requests: list[str] = []
    fabricate(tmp_path / "runs" / "other", Story(steps=40))
    try:
        with served(tmp_path / "runs") as server, browser_window(problems, requests) as window:
            launched.until_step(11)
            window.set_viewport_size({"width": 390, "height": 844})  # a phone
            window.goto(f"{server.url}?run=tiny")
            window.wait_for_selector("#state:text-is('RUNNING')")
            window.wait_for_selector(".chart polyline", state="attached")  # a flat line has no height
            assert window.locator("nav a").count() == 2
            assert window.evaluate("document.documentElement.scrollWidth") <= 390
            first = launched.worker_pid()
            os.kill(first, signal.SIGKILL)
            window.wait_for_selector("text=/supervisor restart: /")
            launched.until(lambda: launched.worker_pid() != first)
            launched.let_go_on()
            window.wait_for_selector("#state:text-is('DONE')")
            assert launched.wait() == 0
            window.click("nav a:has-text('other')")
            window.wait_for_selector(".gate >> nth=3")
            assert window.locator(".chart polyline").count() >= 9
            drawn = "[...document.querySelectorAll('.chart polyline')].map(line => line.getAttribute('points')).join()"
            plain = window.evaluate(drawn)
            window.check("#log")
            in_log = window.evaluate(drawn)
            window.fill("#smoothing", "0.9")
            assert len({plain, in_log, window.evaluate(drawn)}) == 3
            stored = write_live_page(launched.run, GrowingFiles())
            window.goto(stored.as_uri())
            assert window.inner_text("#state") == "DONE"
    finally:
        launched.end()
    assert problems == []
    assert {urlsplit(url).netloc for url in requests} == {urlsplit(server.url).netloc, ""}
