"""What the supervisor and its clients share: the record, the messages, the HTTP probe, identity, and the stop sequence.

Standard library only, and little of that: the supervisor stays resident beside every server, so each import counts.
Messages are JSON objects, one a line, over loopback TCP; the first one carries the token from the 0600 record.

    client                                             supervisor
    {"token", "op": "lease", "name", "keep_alive"}  -> {"state": "loading" | "ready"}, later {"state": "ready"},
                                                       {"state": "died", "code"} or {"state": "stopped"}
    {"token", "op": "status"}                       -> {"state", "leases", "stops_in", "uptime"}
    {"token", "op": "stop", "force"}                -> {"ok": true, "forced"} when all is gone,
                                                       or {"ok": false, "holders"}
"""

from __future__ import annotations

import json
import os
import socket
import time

from looprun_models import system
from looprun_models.system import LOOPBACK

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = [
    "Channel",
    "Identity",
    "Record",
    "dial_host",
    "get_json",
    "get_text",
    "identify",
    "post_json",
    "proves",
    "stop_process",
]

ANSWER_CAP = 4 << 20
"""Bytes of an answer that are read: a stranger may send for ever."""
STOP_GRACE = 3.0
"""Seconds after TERM, and again after the second TERM: an engine with an open request ignores the first one."""


class Record:
    """One running server, as its supervisor wrote it down. Times are seconds since the epoch; sizes are bytes.

    supervisor_start and child_start tell these processes from later ones with the same pid.
    """

    alias: str
    names: list[str]
    served_id: str
    fingerprint: str
    host: str
    port: int
    api_key: str | None
    model_path: str
    model_size: int
    ctx: int
    parallel: int
    engine: str
    engine_identity: str
    build: int | None
    summary: str
    notes: list[str]
    architecture: str
    weights: str
    slot_dir: str | None
    slot_note: str
    state_flags: str
    cache_bytes: int
    token_bytes: int
    checkpoint_bytes: int
    checkpoint_token_bytes: int
    checkpoints: int
    log: str
    started: float
    lease_port: int
    token: str
    supervisor_pid: int
    supervisor_start: str | None
    child_pid: int
    child_start: str | None

    def __init__(self, **values: Any) -> None:
        for name in self.__annotations__:
            setattr(self, name, values[name])

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__annotations__}

    @property
    def base_url(self) -> str:
        return f"http://{bracketed(dial_host(self.host))}:{self.port}/v1"

    @property
    def unique_alias(self) -> str:
        """The second name of the model, which only a server of this very plan has."""
        return f"{self.served_id}@{self.fingerprint}"

    def write(self, path: str) -> None:
        """Appear whole under the final name, readable by the owner only."""
        temporary = f"{path}.{os.getpid()}"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump(self.as_dict(), file)
        os.replace(temporary, path)

    @classmethod
    def read(cls, path: str) -> Record | None:
        """None when there is no record. One of another version lacks what this one does not know: that is None in it,
        so that its server can still be found and stopped."""
        try:
            with open(path, encoding="utf-8") as file:
                found = json.load(file)
        except (OSError, ValueError):
            return None
        if not isinstance(found, dict) or not {"supervisor_pid", "child_pid", "lease_port", "token"} <= found.keys():
            return None
        return cls(**{name: found.get(name) for name in cls.__annotations__})


class Channel:
    """A line-of-JSON connection. EOF and a reset both mean that the other side ended."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._pending = b""

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, **message: Any) -> bool:
        """False when the other side is gone."""
        try:
            self.sock.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self) -> dict[str, Any] | None:
        """The next message, waiting as long as the socket's timeout. None at the end.

        Raises TimeoutError, or BlockingIOError with a timeout of 0.
        """
        while b"\n" not in self._pending:
            if not self._read():
                return None
        line, self._pending = self._pending.split(b"\n", 1)
        return _message(line)

    def drain(self) -> tuple[list[dict[str, Any]], bool]:
        """What has arrived, for a readable socket: whole messages, and whether the other side still is there."""
        alive = self._read()
        *lines, self._pending = self._pending.split(b"\n")
        messages = [_message(line) for line in lines]
        return [message for message in messages if message is not None], alive

    def _read(self) -> bool:
        try:
            data = self.sock.recv(65536)
        except (TimeoutError, BlockingIOError):  # the second when the timeout is 0
            raise TimeoutError from None
        except OSError:
            return False
        self._pending += data
        return bool(data) and len(self._pending) < 1 << 20

    def close(self) -> None:
        """Close, never shutdown: a shutdown by a forked copy would end its parent's connection too."""
        self.sock.close()


def _message(line: bytes) -> dict[str, Any] | None:
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


class Identity:
    """What a server says of itself: the first thing to compare before it is trusted with a prompt."""

    def __init__(self, *, model_path: str, ctx: int, slots: int, aliases: tuple[str, ...], build: str) -> None:
        self.model_path, self.ctx, self.slots, self.aliases, self.build = model_path, ctx, slots, aliases, build


def dial_host(host: str) -> str:
    """The address to connect to for an address that was bound: a wildcard answers on loopback."""
    return {"0.0.0.0": LOOPBACK, "": LOOPBACK, "::": "::1", "localhost": LOOPBACK}.get(host, host)  # noqa: S104


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def get_json(host: str, port: int, path: str, key: str | None, timeout: float) -> tuple[int, Any]:
    """GET over a direct connection (no proxy is ever asked): status, and the body if it is JSON, else None.

    timeout: seconds for all of it. Raises OSError when nothing answers in time, ValueError when what answers is not
    HTTP.
    """
    status, body = _exchange("GET", host, port, path, key, timeout, b"")
    return status, _parsed(body)


def get_text(host: str, port: int, path: str, key: str | None, timeout: float) -> tuple[int, str]:
    """As `get_json`, for what is no JSON."""
    status, body = _exchange("GET", host, port, path, key, timeout, b"")
    return status, body.decode("utf-8", "replace")


def post_json(host: str, port: int, path: str, key: str | None, timeout: float, body: Any) -> tuple[int, Any]:
    """POST of a JSON body; as `get_json` in all else."""
    status, answer = _exchange("POST", host, port, path, key, timeout, json.dumps(body).encode())
    return status, _parsed(answer)


def _exchange(
    method: str, host: str, port: int, path: str, key: str | None, timeout: float, body: bytes
) -> tuple[int, bytes]:
    """Written out because http.client brings e-mail and TLS with it, 6 MB in every supervisor; HTTP/1.0 has neither
    chunks nor a connection that stays open."""
    deadline = time.monotonic() + timeout
    head = f"{method} {path} HTTP/1.0\r\nHost: {bracketed(host)}:{port}\r\n"
    if key:
        head += f"Authorization: Bearer {key}\r\n"
    if body:
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection((dial_host(host), port), timeout) as connection:
        connection.sendall(f"{head}\r\n".encode() + body)
        answer = b""
        while len(answer) < ANSWER_CAP:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            piece = connection.recv(65536)
            if not piece:
                break
            answer += piece
    top, _, said = answer.partition(b"\r\n\r\n")
    protocol, _, rest = top.partition(b" ")
    if not protocol.startswith(b"HTTP/"):
        raise ValueError(f"port {port} does not speak HTTP")
    return int(rest[:3]), said


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None


def identify(host: str, port: int, key: str | None, timeout: float = 2.0) -> Identity | None:
    """Who answers on a port, from /health, /props and /v1/models; None when it is not a llama-server that is ready.

    A 200 on /health proves nothing (a router, another model, any web server), so it only saves the other questions
    while the model is loading. Raises nothing: whatever cannot say who it is, is nobody.
    """
    try:
        if get_json(host, port, "/health", key, timeout)[0] != 200:
            return None
        status, props = get_json(host, port, "/props", key, timeout)
        listed, models = get_json(host, port, "/v1/models", key, timeout)
        if status != 200 or listed != 200 or props.get("role") == "router":
            return None
        model = models["data"][0]
        return Identity(
            model_path=str(props["model_path"]),
            ctx=int(props["default_generation_settings"]["n_ctx"]),
            slots=int(props["total_slots"]),
            aliases=(str(model["id"]), *map(str, model.get("aliases", ()))),
            build=str(props.get("build_info", "")),
        )
    except (OSError, AttributeError, KeyError, IndexError, TypeError, ValueError):
        return None


def proves(identity: Identity | None, record: Record) -> bool:
    """Whether the server that answered is the one in the record."""
    return (
        identity is not None
        and record.unique_alias in identity.aliases
        and os.path.realpath(identity.model_path) == os.path.realpath(record.model_path)
        and identity.slots == record.parallel
    )


def stop_process(pid: int, ended: Callable[[], bool], *, grace: float = STOP_GRACE) -> bool:
    """TERM, a grace period in seconds, TERM again, KILL; returns whether it took the KILL. Idempotent."""
    for attempt in (system.terminate, system.terminate, system.kill):
        if ended():
            return False
        attempt(pid)
        deadline = time.monotonic() + grace
        while time.monotonic() < deadline:
            if ended():
                return attempt is system.kill
            time.sleep(0.01)
    return True
