"""An S3-compatible server on loopback, in memory: as much of the protocol as a real client of copies uses."""

from __future__ import annotations

import re
import threading
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

ACCESS_KEY = "TESTACCESSKEY"


class ObjectStore(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}  # bucket/key → content
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.is_full = False
        self.cuts = 0  # so many uploads break off in the middle of their body
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: ObjectStore
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        parts = urlsplit(self.path)
        self.key = unquote(parts.path).strip("/")
        self.query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        if f"Credential={ACCESS_KEY}/" not in self.headers.get("Authorization", ""):
            self._error(403, "InvalidAccessKeyId", "The AWS Access Key Id you provided does not exist")
            return False
        return True

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if "list-type" in self.query:
            self._list()
        elif self.key not in self.server.objects:
            self._error(404, "NoSuchKey", "The specified key does not exist")
        else:
            content = self.server.objects[self.key]
            first, last = 0, len(content) - 1
            if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
                first, last = int(match[1]), min(last, int(match[2] or last))
            self._answer(206 if "Range" in self.headers else 200, content[first : last + 1], "binary/octet-stream")

    def do_PUT(self) -> None:
        if self.server.cuts:
            self.server.cuts -= 1
            self.rfile.read(1)
            self.connection.close()
            return
        content = self._body()
        if self.server.is_full:
            self._error(400, "QuotaExceeded", "Your quota is used up")
        elif "uploadId" in self.query:
            self.server.uploads[self.query["uploadId"]][int(self.query["partNumber"])] = content
            self._answer(200, b"", etag=md5(content).hexdigest())
        else:
            self.server.objects[self.key] = content
            self._answer(200, b"", etag=md5(content).hexdigest())

    def do_POST(self) -> None:
        body = self._body().decode()
        if "delete" in self.query:
            bucket = self.key.partition("/")[0]
            for key in re.findall(r"<Key>(.*?)</Key>", body):
                self.server.objects.pop(f"{bucket}/{key}", None)
            self._answer(200, b"<DeleteResult/>")
        elif "uploads" in self.query:
            name = str(len(self.server.uploads))
            self.server.uploads[name] = {}
            self._answer(200, f"<R><UploadId>{name}</UploadId></R>".encode())
        else:
            parts = self.server.uploads.pop(self.query["uploadId"])
            self.server.objects[self.key] = b"".join(parts[number] for number in sorted(parts))
            self._answer(200, b"<CompleteMultipartUploadResult/>")

    def do_DELETE(self) -> None:
        self.server.objects.pop(self.key, None)
        self._answer(204, b"")

    def _list(self) -> None:
        bucket, prefix, delimiter = self.key, self.query.get("prefix", ""), self.query.get("delimiter")
        keys = sorted(name.removeprefix(f"{bucket}/") for name in self.server.objects)
        folders, files = set(), []
        for key in (key for key in keys if key.startswith(prefix)):
            rest = key[len(prefix) :]
            if delimiter and delimiter in rest:
                folders.add(prefix + rest.partition(delimiter)[0] + delimiter)
            else:
                files.append(key)
        sizes = {key: len(self.server.objects[f"{bucket}/{key}"]) for key in files}
        content = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{size}</Size><ETag>x</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for key, size in sizes.items()
        )
        content += "".join(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in folders)
        found = f"<KeyCount>{len(files) + len(folders)}</KeyCount><IsTruncated>false</IsTruncated>{content}"
        self._answer(200, f"<ListBucketResult>{found}</ListBucketResult>".encode())

    def _body(self) -> bytes:
        """The content of a request, which newer clients send in chunks with a checksum after them."""
        if "aws-chunked" not in self.headers.get("Content-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        content = b""
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():
            continue
        return content

    def _error(self, status: int, code: str, message: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode())

    def _answer(self, status: int, body: bytes, kind: str = "application/xml", etag: str = "x") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{etag}"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
