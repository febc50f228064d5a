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
from collections.abc import Mapping
from dataclasses import dataclass
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"
HUB_HOST, BYTES_HOST = "127.0.0.1", "localhost"
LOGIN_PAGE = b"<html><body>Please log in to the network.</body></html>"


@dataclass(frozen=True)
class Faults:
    """How to misbehave. Offsets are bytes of the file, whatever range is asked for.

    cut_at: the connection closes there. flip_byte: that byte arrives inverted. ignore_ranges: every answer is
    the whole file. status: refuse with it, and with error_code as the Hub's own code. stall_after: no more is
    sent, and the connection stays open. html: a log-in page with status 200.
    """

    cut_at: int | None = None
    flip_byte: int | None = None
    ignore_ranges: bool = False
    status: int | None = None
    error_code: str = ""
    stall_after: int | None = None
    html: bool = False


@dataclass(frozen=True)
class Request:
    """One request as it came in; host is the name before the port."""

    method: str
    host: str
    path: str
    headers: Message


class HubServer:
    """Serves `files` ("owner/name/file" -> content) at the revisions "main" and COMMIT until `close`."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = dict(files)
        self.faults = Faults()
        """Met by every request that comes in from now on."""
        self.requests: list[Request] = []
        self.closing = threading.Event()
        self._server = _Server((HUB_HOST, 0), _Handler)
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

    def close(self) -> None:
        self.closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> HubServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    hub: HubServer
    daemon_threads = True

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
        elif host == BYTES_HOST:
            self._bytes(self.server.hub.files[path.removeprefix("/bytes/")], faults)
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
                "X-Linked-Etag": f'"{hashlib.sha256(content).hexdigest()}"',
                "X-Linked-Size": str(len(content)),
                "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
                "Location": f"http://{BYTES_HOST}:{self.server.hub.port}/bytes/{repo}/{file}",
            }
            self._reply(302, facts)

    def _bytes(self, content: bytes, faults: Faults) -> None:
        start, end, size = 0, len(content), len(content)
        asked = self.headers.get("Range")
        partial = bool(asked) and not faults.ignore_ranges
        if asked and partial:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end = int(first), int(last) + 1 if last else size
        if start >= size:
            self._reply(416, {"Content-Range": f"bytes */{size}"})
            return
        self.send_response(206 if partial else 200)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
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
        stop = min(at for at in (end, faults.cut_at, faults.stall_after) if at is not None)
        self.wfile.write(content[start:stop])
        if stop < end:
            if stop == faults.stall_after:
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
