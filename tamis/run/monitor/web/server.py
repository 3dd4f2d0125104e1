"""`tamis monitor --web`: the page over HTTP, with a new state every second as server-sent events. Reads only.

It listens on loopback. On any other address each request needs the token that is part of the printed URL.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tamis.run.files.console import say
from tamis.run.monitor.growing import GrowingFiles
from tamis.run.monitor.listing import list_records
from tamis.run.monitor.web.page import page_state, render_page

EVERY_S = 1.0
LIST_EVERY_S = 5.0
MOST_FOLLOWERS = 32
STUCK_CLIENT_S = 20.0
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
}


class WatchedRuns:
    """The runs in a folder, each read at most once a second however many browsers look."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = GrowingFiles()
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[float, Any]] = {}  # key → when and what

    def records(self) -> list[dict[str, Any]]:
        """Name, state and step of each run, the newest first."""
        return self._fresh("runs", LIST_EVERY_S, self._read_records)

    def path(self, name: str | None) -> Path | None:
        """Where a run is; the newest without a name, the folder itself before there is a run, None for another name."""
        paths = {record["name"]: self.folder / record["below"] for record in self.records()}
        return next(iter(paths.values()), self.folder) if name is None else paths.get(name)

    def state(self, path: Path) -> dict[str, Any]:
        return self._fresh(str(path), EVERY_S, lambda: page_state(path, self._files))

    def _read_records(self) -> list[dict[str, Any]]:
        root = self.folder.resolve()
        records = list_records(self.folder)[::-1]
        for record in records:
            path = Path(record.pop("run"))
            record["below"] = "" if path.resolve() == root else path.name
            record["name"] = record["below"] or root.name
        return records

    def _fresh(self, key: str, age_s: float, read: Callable[[], Any]) -> Any:
        with self._lock:
            when, value = self._kept.get(key, (-math.inf, None))
            if time.monotonic() - when >= age_s:
                value = read()
                self._kept[key] = (time.monotonic(), value)
            return value


class PageServer(ThreadingHTTPServer):
    """Serves the page of the runs in a folder until `stop` is called."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, folder: Path, host: str, port: int) -> None:
        self.runs = WatchedRuns(folder)
        self.token = None if is_loopback(host) else secrets.token_urlsafe(24)
        self.followers = threading.BoundedSemaphore(MOST_FOLLOWERS)
        self.stopping = threading.Event()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), PageHandler)
        except OSError as error:
            why = f"cannot listen on {host} port {port} ({error.strerror})"
            raise ValueError(f"{why}: give another --port, or --host with an address of this machine") from None

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        name = f"[{host!s}]" if ":" in str(host) else str(host)
        return f"http://{name}:{port}/" + (f"?token={self.token}" if self.token else "")

    def stop(self) -> None:
        self.stopping.set()
        self.shutdown()
        self.server_close()


class PageHandler(BaseHTTPRequestHandler):
    """GET / is the page, GET /events its states. There is nothing else, and nothing that changes a run."""

    server: PageServer
    server_version, sys_version = "tamis", ""
    timeout = STUCK_CLIENT_S  # of a client that takes nothing

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        asked = {name: values[0] for name, values in parse_qs(url.query).items()}
        if problem := self._refusal(asked.get("token", "")):
            return self._answer(HTTPStatus.FORBIDDEN, problem)
        path = self.server.runs.path(asked.get("run"))
        if url.path not in ("/", "/events") or path is None:
            return self._answer(HTTPStatus.NOT_FOUND, "there is no such page or run")
        if url.path == "/":
            return self._answer(HTTPStatus.OK, render_page(None, "tamis monitor"), "text/html")
        if not self.server.followers.acquire(blocking=False):
            return self._answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{MOST_FOLLOWERS} pages are open already: close one")
        try:
            self._send_events(path)
        finally:
            self.server.followers.release()

    def _refusal(self, token: str) -> str | None:
        if self.server.token is not None:
            right = hmac.compare_digest(token.encode(), self.server.token.encode())
            return None if right else "the token is missing or wrong: open the URL that tamis monitor printed"
        name = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        # A page from elsewhere could have its own name resolve to loopback, and then read this one.
        return None if name in LOOPBACK_NAMES else "open it as http://127.0.0.1, not under another name"

    def _send_events(self, path: Path) -> None:
        self._send_head(HTTPStatus.OK, "text/event-stream")
        with suppress(OSError):  # the browser is gone
            for event, value in self._events(path):
                self.wfile.write(f"event: {event}\ndata: {json.dumps(value)}\n\n".encode())
                self.wfile.flush()

    def _events(self, path: Path) -> Iterator[tuple[str, Any]]:
        """A state each second, with charts when they changed, and the list of runs when it changed."""
        listed: list[dict[str, Any]] | None = None
        charts, runs = None, self.server.runs
        while not self.server.stopping.is_set():
            if (records := runs.records()) != listed:
                listed = records
                chosen = next(
                    (record["name"] for record in records if self.server.runs.path(record["name"]) == path), ""
                )
                yield "runs", {"runs": records, "chosen": chosen}
            state = runs.state(path)
            yield "state", {key: value for key, value in state.items() if key != "charts" or value != charts}
            charts = state["charts"]
            self.server.stopping.wait(EVERY_S)

    def _answer(self, status: HTTPStatus, text: str, kind: str = "text/plain") -> None:
        body = text.encode()
        self._send_head(status, kind, len(body))
        self.wfile.write(body)

    def _send_head(self, status: HTTPStatus, kind: str, length: int | None = None) -> None:
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Log no requests: their URLs may hold the token."""


def serve_page(folder: Path, host: str = "127.0.0.1", port: int = 8765) -> int:
    """Serve the page until Ctrl-C, at the lowest priority: training on the same cores comes first."""
    server = PageServer(folder, host, port)
    os.nice(19)
    say(f"live page: {server.url} (Ctrl-C ends it; the runs go on)")
    if server.token is not None:
        say("who has this URL can look, over plain HTTP: prefer ssh -L, or tamis remote HOST tunnel")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        say("page closed")
    finally:
        server.stopping.set()
        server.server_close()
    return 0


def is_loopback(host: str) -> bool:
    """True for an address that only this machine reaches; a ValueError for a name, which could become any address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        raise ValueError(f"--host takes an IP address, got {host}: 127.0.0.1, or 0.0.0.0 for every address") from None
