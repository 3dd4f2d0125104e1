"""Upload to a loopback stand-in of the hub's HTTP interface: every byte arrives, and failures keep the folder."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tamis.generate.upload import upload_folder


class Hub(ThreadingHTTPServer):
    """Takes the calls of an upload and keeps the files of the last commit."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.created: list[dict] = []
        self.tokens: set[str | None] = set()
        self.refuses = False

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.tokens.add(self.headers.get("Authorization"))
        if self.server.refuses:
            return self._json({"error": "no write access"}, 401)
        if self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            return self._json({"url": f"{self.server.endpoint}/me/model"})
        if "/preupload/" in self.path:
            paths = [file["path"] for file in json.loads(body)["files"]]
            return self._json({"files": [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in paths]})
        if "/commit/" in self.path:
            lines = [json.loads(line) for line in body.splitlines()]
            files = [line["value"] for line in lines if line["key"] == "file"]
            self.server.files = {file["path"]: base64.b64decode(file["content"]) for file in files}
            commit = f"{self.server.endpoint}/me/model/commit/{'0' * 40}"
            return self._json({"commitUrl": commit, "commitOid": "0" * 40, "success": True})
        self._json({"errors": [], "warnings": []})

    def do_GET(self) -> None:
        answer = {"id": "me/model", "sha": "0" * 40, "siblings": []}
        self._json(answer, 401 if self.server.refuses else 200)

    def _json(self, value: object, status: int = 200) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_test")
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_folder_is_uploaded_whole_and_privately_with_the_token(hub: Hub, tmp_path: Path) -> None:
    files = {"config.json": b"{}", "README.md": b"# model\n", "model.safetensors": bytes(range(256)) * 50}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert upload_folder(tmp_path, "me/model", endpoint=hub.endpoint).endswith("/me/model")
    assert hub.files == files
    [created] = hub.created
    assert created["name"] == "model" and created.get("private", created.get("visibility") == "private")
    assert hub.tokens == {"Bearer hf_of_the_test"}
    hub.refuses = True
    with pytest.raises(ValueError, match=r"me/model cannot be uploaded \(.*401.*\): .* is complete"):
        upload_folder(tmp_path, "me/model", endpoint=hub.endpoint)


def test_a_bad_name_and_a_missing_token_are_refused(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("model", "a/b/c", "../x", "me/"):
        with pytest.raises(ValueError, match="--upload must be OWNER/NAME"):
            upload_folder(tmp_path, name, endpoint=hub.endpoint)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ValueError, match="needs a token with write access: set HF_TOKEN"):
        upload_folder(tmp_path, "me/model", endpoint=hub.endpoint)
    assert hub.tokens == set()
