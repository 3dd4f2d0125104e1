"""A real HTTP receiver on loopback that keeps what it is sent, and can be slow, broken or silent."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PATIENCE_S = 60.0


class Receiver:
    """`answers` are the status codes of the next requests, then 200; 0: no answer, until `release` at the earliest."""

    def __init__(self, *answers: int) -> None:
        self.answers = list(answers)
        self.requests = 0
        self.accepted: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.release = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.requests += 1
                code = receiver.answers.pop(0) if receiver.answers else 200
                if code == 0:
                    receiver.release.wait(PATIENCE_S)
                    return
                if code == 200:
                    receiver.headers.append(dict(self.headers))
                    receiver.accepted.append(json.loads(body))
                self.send_response(code)
                self.end_headers()

            def log_message(self, *arguments: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True, args=(0.05,)).start()

    @property
    def place(self) -> str:
        return f"127.0.0.1:{self.server.server_address[1]}"

    def events(self) -> list[str]:
        return [message["event"] for message in self.accepted]

    def until(self, count: int) -> list[dict[str, Any]]:
        """The accepted messages, once there are so many."""
        self._wait(lambda: len(self.accepted) >= count)
        return self.accepted

    def until_told(self, event: str, ending: str) -> None:
        """Wait for a message of this event that ends so."""
        self._wait(lambda: any(m["event"] == event and m["message"].endswith(ending) for m in list(self.accepted)))

    def _wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, self.accepted
            time.sleep(0.01)

    def close(self) -> None:
        self.release.set()
        self.server.shutdown()
        self.server.server_close()
