"""A loopback stand-in for the Hugging Face hub: serves one dataset's files by the calls `datasets` makes, with faults.

Only what a streaming read of parquet files needs: the listing, path information, and ranged reads.
"""

import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlparse

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(ThreadingHTTPServer):
    """Serves the files of `folder` as dataset `name` on a free port."""

    daemon_threads = True

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.name = folder, name
        self.requests: list[str] = []
        self.reads = 0  # of parquet content, so far
        self.dropped_reads = range(0)  # numbers of those that are cut off in the middle
        self.stall = threading.Event()  # when set, reads of parquet content never answer

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> "FakeHub":
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def entry(self, path: Path) -> dict:
        return {
            "type": "directory" if path.is_dir() else "file",
            "path": path.relative_to(self.folder).as_posix(),
            "size": path.stat().st_size,
            "oid": COMMIT,
        }


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        self.server.requests.append(f"POST {self.path}")
        if "/paths-info/" not in self.path:
            return self._json({"error": "not found"}, 404)
        paths = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body)["paths"]
        found = [self.server.folder / path for path in paths]
        self._json([self.server.entry(path) for path in found if path.exists()])

    def _answer(self, with_body: bool) -> None:
        url = urlparse(self.path)
        path = unquote(url.path)
        self.server.requests.append(f"{self.command} {path} {self.headers.get('Range', '')}")
        api = f"/api/datasets/{self.server.name}"
        if match := re.fullmatch(rf"{api}/tree/[^/]+/?(.*)", path):
            return self._tree(self.server.folder / match[1])
        if path == api or path.startswith(f"{api}/revision/"):
            return self._json(self._info())
        if match := re.fullmatch(rf"/datasets/{self.server.name}/resolve/[^/]+/(.*)", path):
            return self._file(self.server.folder / match[1], with_body)
        self._json({"error": f"no {path}"}, 404)

    def _info(self) -> dict:
        files = [path for path in sorted(self.server.folder.rglob("*")) if path.is_file()]
        names = [{"rfilename": path.relative_to(self.server.folder).as_posix()} for path in files]
        return {
            "id": self.server.name, "sha": COMMIT, "siblings": names, "tags": [], "private": False, "gated": False,
            "disabled": False, "downloads": 0, "likes": 0, "lastModified": "2026-01-01T00:00:00.000Z",
        }  # fmt: skip

    def _tree(self, folder: Path) -> None:
        if not folder.is_dir():
            return self._json({"error": "not found"}, 404)
        self._json([self.server.entry(path) for path in sorted(folder.rglob("*"))])

    def _file(self, path: Path, with_body: bool) -> None:
        if not path.is_file():
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        content = path.read_bytes()
        size = len(content)
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if match:
            content = content[int(match[1]) : int(match[2]) + 1 if match[2] else None]
        self._send_file(
            content, with_body, f"bytes {match[1]}-{int(match[1]) + len(content) - 1}/{size}" if match else ""
        )

    def _send_file(self, content: bytes, with_body: bool, content_range: str) -> None:
        self.send_response(206 if content_range else 200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{COMMIT}"')
        self.send_header("Accept-Ranges", "bytes")
        if content_range:
            self.send_header("Content-Range", content_range)
        self.end_headers()
        if with_body:
            self._send_body(content, parquet=bool(content_range))

    def _send_body(self, content: bytes, parquet: bool) -> None:
        while parquet and self.server.stall.is_set():
            time.sleep(0.05)
        self.server.reads += parquet
        if parquet and self.server.reads in self.server.dropped_reads:
            content = content[: len(content) // 2]
            self.close_connection = True
        self.wfile.write(content)

    def _json(self, value: object, status: int = 200) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None: ...
