"""A stand-in for the Hugging Face Hub on loopback: what huggingface_hub asks for, and ways to answer badly.

    with HubServer({"owner/name/model.gguf": content}) as hub:
        hub.faults = Faults(cut_at=1000)
        ... HF_ENDPOINT = hub.url ...
        hub.requests  # what came in

Like the real one it answers `/{repo}/resolve/{revision}/{file}` with the facts in headers and a redirect to a
second host name, where the bytes are; only the hub host may see the token.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"
BLOCK = 128 * 1024
HUB_HOST, BYTES_HOST = "127.0.0.1", "localhost"
LOGIN_PAGE = b"<html><body>Please log in to the network.</body></html>"


@dataclass(frozen=True)
class Faults:
    """How to misbehave. Offsets are bytes of the file, whatever range is asked for.

    cut_at: the connection closes there. cut_after: each connection closes after so many bytes. flip_byte: that byte
    arrives inverted. ignore_ranges: every answer is the whole file. status: refuse with it, and with error_code as the
    Hub's own code; bytes_status: the host of the bytes does so (416: for a range only), with retry_after as the header.
    stall_after: no more is sent, and the connection stays open. html: a log-in page with status 200; bytes_html: in
    place of the bytes. etag: what the host of the bytes says. shift: ranges are answered so many bytes further on.
    no_token: any token is refused. rate: bytes a second of each connection. times: how many requests for bytes meet
    this; later ones meet no faults.
    """

    cut_at: int | None = None
    flip_byte: int | None = None
    ignore_ranges: bool = False
    status: int | None = None
    error_code: str = ""
    stall_after: int | None = None
    html: bool = False
    cut_after: int | None = None
    bytes_status: int | None = None
    retry_after: str = ""
    bytes_html: bool = False
    etag: str = ""
    shift: int = 0
    no_token: bool = False
    rate: float = 0
    times: int | None = None


@dataclass(frozen=True)
class Request:
    """One request as it came in; host is the name before the port."""

    method: str
    host: str
    path: str
    headers: Message


class HubServer:
    """Serves `files` ("owner/name/file" -> content) at the revisions "main" and COMMIT until `close`."""

    def __init__(self, files: Mapping[str, bytes], handler: type[_Handler] | None = None) -> None:
        self.files = dict(files)
        self.faults = Faults()
        """Met by every request that comes in from now on."""
        self.requests: list[Request] = []
        self.sent = 0
        """Bytes of files given to the network so far, over all requests."""
        self._hashes: dict[bytes, str] = {}
        self._lock = threading.Lock()
        self.closing = threading.Event()
        self._server = _Server((HUB_HOST, 0), handler or _Handler)
        self._server.hub = self
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """What HF_ENDPOINT should be."""
        return f"http://{HUB_HOST}:{self.port}"

    def seen(self, method: str, host: str) -> list[Request]:
        return [request for request in self.requests if (request.method, request.host) == (method, host)]

    def count(self, sent: int) -> None:
        with self._lock:
            self.sent += sent

    def faults_for_bytes(self) -> Faults:
        """What a request for bytes meets; uses up one of `times`."""
        with self._lock:
            faults = self.faults
            if faults.times is None:
                return faults
            if faults.times == 0:
                return Faults()
            self.faults = replace(faults, times=faults.times - 1)
            return faults

    def sha256(self, content: bytes) -> str:
        """Computed once for each file, which may be large."""
        with self._lock:
            if content not in self._hashes:
                self._hashes[content] = hashlib.sha256(content).hexdigest()
            return self._hashes[content]

    def close(self) -> None:
        self.closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    hub: HubServer
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away in the middle is what many tests are about, and no error of the server."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self) -> None:
        host = self.headers.get("Host", "").rpartition(":")[0]
        path = unquote(self.path)
        self.server.hub.requests.append(Request(self.command, host, path, self.headers))
        faults = self.server.hub.faults
        if faults.status is not None:
            self._reply(faults.status, {"X-Error-Code": faults.error_code} if faults.error_code else {})
        elif faults.html:
            self._reply(200, {"Content-Type": "text/html"}, LOGIN_PAGE)
        elif faults.no_token and host == HUB_HOST and self.headers.get("Authorization"):
            self._reply(401, {})
        elif host == BYTES_HOST:
            self._bytes(self.server.hub.files[path.removeprefix("/bytes/")], self.server.hub.faults_for_bytes())
        else:
            self._resolve(path)

    def _resolve(self, path: str) -> None:
        repo, _, rest = path.lstrip("/").partition("/resolve/")
        revision, _, file = rest.partition("/")
        files = self.server.hub.files
        if not any(name.startswith(f"{repo}/") for name in files):
            self._reply(401, {"X-Error-Code": "RepoNotFound"})
        elif revision not in ("main", COMMIT):
            self._reply(404, {"X-Error-Code": "RevisionNotFound"})
        elif f"{repo}/{file}" not in files:
            self._reply(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        else:
            content = files[f"{repo}/{file}"]
            facts = {
                "X-Repo-Commit": COMMIT,
                "X-Linked-Etag": f'"{self.server.hub.sha256(content)}"',
                "X-Linked-Size": str(len(content)),
                "ETag": f'"git-{self.server.hub.sha256(content)[:40]}"',
                "Location": f"http://{BYTES_HOST}:{self.server.hub.port}/bytes/{repo}/{file}",
            }
            self._reply(302, facts)

    def _bytes(self, content: bytes, faults: Faults) -> None:
        start, end, size = 0, len(content), len(content)
        etag = f'"{faults.etag or self.server.hub.sha256(content)}"'
        if faults.bytes_status is not None and (faults.bytes_status != 416 or self.headers.get("Range")):
            extra = {"Retry-After": faults.retry_after} if faults.retry_after else {}
            self._reply(faults.bytes_status, {**extra, "Content-Range": f"bytes */{size}"})
            return
        if faults.bytes_html:
            self._reply(200, {"Content-Type": "text/html"}, LOGIN_PAGE)
            return
        asked = self.headers.get("Range")
        partial = bool(asked) and not faults.ignore_ranges and self.headers.get("If-Range", etag) == etag
        if asked and partial:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last) + 1, size) if last else size
            start, end = start + faults.shift, min(end + faults.shift, size)
        if start >= size:
            self._reply(416, {"Content-Range": f"bytes */{size}"})
            return
        self.send_response(206 if partial else 200)
        self.send_header("ETag", etag)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(end - start))
        if partial:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
        self.end_headers()
        if self.command == "GET":
            self._send(content, start, end, faults)

    def _send(self, content: bytes, start: int, end: int, faults: Faults) -> None:
        if faults.flip_byte is not None:
            flipped = bytearray(content)
            flipped[faults.flip_byte] ^= 0xFF
            content = bytes(flipped)
        limit = None if faults.cut_after is None else start + faults.cut_after
        stop = min(max(at, start) for at in (end, faults.cut_at, limit, faults.stall_after) if at is not None)
        began, at = time.monotonic(), start
        while at < stop:
            block = memoryview(content)[at : min(at + BLOCK, stop)]
            self.wfile.write(block)
            self.server.hub.count(len(block))
            at += len(block)
            if faults.rate:
                self.server.hub.closing.wait(max(0.0, began + (at - start) / faults.rate - time.monotonic()))
        if stop < end:
            if faults.stall_after is not None and stop == max(faults.stall_after, start):
                self.server.hub.closing.wait()
            self.close_connection = True

    def _reply(self, status: int, headers: Mapping[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
