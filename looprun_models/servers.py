"""The servers of this user: their records, and the ways to get, share and stop one.

A server belongs to its supervisor; whoever uses it holds a `Lease`, a connection that the operating system closes when
the holder ends in whatever way. One lock guards "look, then start", so any number of processes end up on one server.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from looprun_models import system
from looprun_models.errors import (
    EngineDied,
    LooprunError,
    NotOurServer,
    PortInUse,
    ServerInUse,
    ServerStopped,
    StartFailed,
    StartTimeout,
)
from looprun_models.failure import explain, log_tail
from looprun_models.launch import LaunchPlan
from looprun_models.progress import OnProgress, Progress
from looprun_models.settings import Settings, private_dir
from looprun_models.wire import LOOPBACK, Channel, Record, dial_host, identify, proves, stop_process

START_TIMEOUT = 240.0
"""Seconds to wait for a model: 17 GB from a slow disk take minutes, and a dead engine ends the wait anyway."""
LOCK_TIMEOUT = 60.0
ANSWER_TIMEOUT = 5.0
PROGRESS_EVERY = 0.25
STOPPING_TIMEOUT = 15.0

_open_leases: weakref.WeakSet[Lease] = weakref.WeakSet()
_started_here: list[int] = []


class Lease:
    """The right to use a running server, for as long as this object is open. Also the handle that callers see.

    already_running: somebody else had started it. base_url ends in /v1. api_key is None when the server asks for none.
    """

    def __init__(self, record: Record, channel: Channel, *, already_running: bool, state: str) -> None:
        self.record, self.already_running = record, already_running
        self._channel, self._state = channel, state
        self._asking = threading.Lock()
        self._gone: LooprunError | None = None
        _open_leases.add(self)

    @property
    def base_url(self) -> str:
        return self.record.base_url

    @property
    def api_key(self) -> str | None:
        return self.record.api_key

    def wait_ready(self, timeout: float | None = None, on_progress: OnProgress | None = None) -> None:
        """Return when the server proves that it is ready.

        timeout: seconds, START_TIMEOUT by default. on_progress gets bytes resident of bytes to load. Raises EngineDied
        with the cause and the end of the log, StartTimeout, PortInUse, or NotOurServer.
        """
        patience = START_TIMEOUT if timeout is None else timeout
        deadline = time.monotonic() + patience
        self._channel.sock.settimeout(PROGRESS_EVERY)
        while self._state == "loading":
            try:
                self._take(self._channel.receive())
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise self._too_slow(patience) from None
            if on_progress and self._state == "loading":
                on_progress(Progress("loading", self._resident(), self.record.model_size))
        record = self.record
        if not proves(identify(record.host, record.port, record.api_key, ANSWER_TIMEOUT), record):
            self._check_alive()
            raise NotOurServer(
                f"what answers on port {record.port} does not prove to be {record.alias} (pid {record.child_pid}).",
                hint=f"looprun models stop {record.alias} --force",
            )

    def why_gone(self, wait: float = 0.0) -> LooprunError | None:
        """The reason when the server has ended, or ends within `wait` seconds; None while it lives."""
        with self._asking:
            try:
                if self._gone is None:
                    self._channel.sock.settimeout(wait)
                    self._take(self._channel.receive())
            except OSError:  # nothing was said, or this lease is closed
                return None
            except LooprunError as gone:
                self._gone = gone  # it is told once, and every thread that asks should hear the same
            return self._gone

    def stop(self, *, force: bool = False) -> bool:
        """Stop the server; returns when the port is free, and whether it took force. Idempotent.

        Raises ServerInUse when others use it and force is not set.
        """
        forced = stop_server(self.record, force=force, channel=self._channel)
        self.close()
        return forced

    def abandon(self) -> None:
        """Give up a start; returns when the engine is gone, unless others wait for it too."""
        if self._state == "loading":
            with contextlib.suppress(LooprunError):
                self.stop()
        self.close()

    def close(self) -> None:
        """Give the server up; it ends by itself when nobody else uses it and its keep-alive is over. Idempotent."""
        self._channel.close()
        _open_leases.discard(self)
        reap_children()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, message: dict[str, Any] | None) -> None:
        if message is None:
            raise EngineDied(
                f"the supervisor of {self.record.alias} (pid {self.record.supervisor_pid}) ended, its server with it.",
                hint=f"looprun models serve {self.record.alias}",
                log=Path(self.record.log),
                tail=log_tail(self.record.log),
            )
        self._state = str(message.get("state", self._state))
        if self._state == "died":
            raise explain(self.record, message.get("code"), str(message.get("why", "")))
        if self._state in ("stopped", "stopping"):
            raise ServerStopped(
                f"{self.record.alias} was stopped by somebody else.", hint=f"looprun models serve {self.record.alias}"
            )

    def _check_alive(self) -> None:
        gone = self.why_gone()
        if gone:
            raise gone

    def _resident(self) -> int:
        import psutil

        try:
            return min(psutil.Process(self.record.child_pid).memory_info().rss, self.record.model_size)
        except psutil.Error:
            return 0

    def _too_slow(self, patience: float) -> StartTimeout:
        last = log_tail(self.record.log, 1)
        return StartTimeout(
            f"{self.record.alias} was not ready after {patience:g} s; the engine (pid {self.record.child_pid}) still "
            f"lives. Its last line: {last[0].strip() if last else '(no output)'}",
            hint=f"wait longer: looprun models serve {self.record.alias} --timeout {patience * 3:g}   "
            f"(from code: timeout={patience * 3:g})",
        )


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a caller wants served. plan is only asked for when nothing that runs will do.

    fingerprint: of everything that makes two servers the same. port: the one to start on; strict: that one or none.
    plan gets the port and the servers that run (for the memory check). api_key None takes whatever key the server has.
    """

    alias: str
    fingerprint: str
    port: int
    strict: bool
    host: str
    api_key: str | None
    plan: Callable[[int, list[Record]], LaunchPlan]


def ensure_server(settings: Settings, wanted: Wanted, *, keep_alive: float | None, may_start: bool = True) -> Lease:
    """Attach to the server that is wanted, or start it; the lease may still be loading, see `Lease.wait_ready`.

    keep_alive: seconds that the server stays after this lease, None for ever. Raises PortInUse, NotEnoughMemory and
    whatever `wanted.plan` raises; NotOurServer when a supervisor does not answer; StartFailed when may_start is off.
    """
    with _locked(settings):
        alive = _reap_dead(settings)
        for record in alive:
            if record.fingerprint == wanted.fingerprint and wanted.api_key in (None, record.api_key):
                lease = attach(record, keep_alive)
                if lease is not None:
                    return lease
        if not may_start:
            raise StartFailed(f"no server for {wanted.alias} is running.", hint=f"looprun models serve {wanted.alias}")
        alive = _reap_dead(settings)
        port = _free_port(wanted, alive)
        return _start(settings, wanted.plan(port, alive), keep_alive)


def attach(record: Record, keep_alive: float | None) -> Lease | None:
    """A lease on a recorded server; None when it is just ending (returns after it has). Raises NotOurServer."""
    try:
        channel = _call(record)
    except ConnectionRefusedError:
        _await_end(record)
        return None
    except TimeoutError:
        raise _mute(record) from None
    channel.send(token=record.token, op="lease", name=_my_name(), keep_alive=keep_alive)
    try:
        answer = channel.receive()
    except TimeoutError:
        channel.close()
        raise _mute(record) from None
    if answer is None or answer["state"] not in ("loading", "ready"):
        channel.close()
        _await_end(record)
        return None
    return Lease(record, channel, already_running=True, state=answer["state"])


def list_servers(settings: Settings) -> list[Record]:
    """Every server whose supervisor lives. Dead records are cleaned up when the folder can be written."""
    records = _read_records(settings)
    if all(_supervised(record) for record in records):
        return records
    try:
        with _locked(settings):
            return _reap_dead(settings)
    except LooprunError:
        return [record for record in records if _supervised(record)]


def server_status(record: Record) -> dict[str, Any] | None:
    """What the supervisor says: state, leases (who), stops_in (seconds or None), uptime; None when it is silent."""
    try:
        channel = _call(record)
        channel.send(token=record.token, op="status")
        answer = channel.receive()
        channel.close()
    except OSError:
        return None
    return answer


def stop_server(record: Record, *, force: bool = False, channel: Channel | None = None) -> bool:
    """Stop a server and wait until it is gone; returns whether it took force. Idempotent.

    channel: the caller's own lease, which does not count as somebody else. Raises ServerInUse.
    """
    if not _supervised(record):
        return False
    answer = _ask_to_stop(record, force, channel)
    if answer and answer.get("ok") is False:
        holders = ", ".join(answer["holders"])
        raise ServerInUse(f"{record.alias} is used by {holders}.", hint=f"looprun models stop {record.alias} --force")
    if answer is None and not _ended(record, 1.0):
        if not force:
            raise _mute(record)
        system.kill(record.supervisor_pid)
        _ended(record, ANSWER_TIMEOUT)
        stop_process(record.child_pid, lambda: _child_ended(record))
        return True
    _ended(record, STOPPING_TIMEOUT)
    return bool(answer and answer.get("forced"))


def _ask_to_stop(record: Record, force: bool, channel: Channel | None) -> dict[str, Any] | None:
    """The supervisor's answer, skipping what else it says meanwhile; None when there is none."""
    with contextlib.ExitStack() as ours, contextlib.suppress(OSError):
        if channel is None:
            channel = _call(record)
            ours.callback(channel.close)
        channel.sock.settimeout(STOPPING_TIMEOUT)
        channel.send(token=record.token, op="stop", force=force)
        while (answer := channel.receive()) is not None:
            if "ok" in answer:
                return answer
    return None


def last_end(settings: Settings, alias: str) -> str | None:
    """How the newest server of this alias ended, if it died by itself: the last line of its log."""
    log = newest_log(settings, alias)
    last = log_tail(log, 1) if log else []
    note = "looprun: the engine ended: "
    return last[0].removeprefix(note) if last and last[0].startswith(note) else None


def newest_log(settings: Settings, alias: str) -> Path | None:
    """The log of the server of this alias that was started last."""
    logs = list(settings.logs_dir.glob(f"{alias}-[0-9]*.log"))
    return max(logs, key=lambda path: path.stat().st_mtime, default=None)


def reap_children() -> None:
    """Collect supervisors that this process started and that have ended, so that none stays as a zombie."""
    _started_here[:] = [pid for pid in _started_here if not system.reap(pid)]


def port_holder(port: int) -> str:
    """Who listens on a port, as far as this user may see: "python3 (pid 123)", or "another program"."""
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr[1:2] == (port,) and connection.pid:
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except (psutil.Error, OSError):
        return "another program"
    return "another program"


@contextlib.contextmanager
def _locked(settings: Settings) -> Iterator[None]:
    folder = private_dir(settings.state_dir, "LOOPRUN_STATE_DIR")
    path = folder / "servers.lock"
    with open(path, "a+", encoding="utf-8") as file:
        deadline = time.monotonic() + LOCK_TIMEOUT
        while not system.try_lock(file.fileno()):
            if time.monotonic() > deadline:
                raise StartFailed(
                    f"another looprun process has held {path} for {LOCK_TIMEOUT:g} s.",
                    hint=f"find it with: fuser {path}",
                )
            time.sleep(0.005)
        yield


def _read_records(settings: Settings) -> list[Record]:
    found = (Record.read(str(path)) for path in sorted(settings.servers_dir.glob("*.json")))
    return [record for record in found if record is not None]


def _record_path(settings: Settings, port: int) -> Path:
    return settings.servers_dir / f"{port}.json"


def _supervised(record: Record) -> bool:
    return system.start_of(record.supervisor_pid) == record.supervisor_start is not None


def _child_ended(record: Record) -> bool:
    return system.start_of(record.child_pid) != record.child_start


def _reap_dead(settings: Settings) -> list[Record]:
    """Under the lock: end servers whose supervisor was killed and drop their records; returns those that live."""
    alive = []
    for path in sorted(settings.servers_dir.glob("*.json")):
        record = Record.read(str(path))
        if record is not None and _supervised(record):
            alive.append(record)
            continue
        if record is not None:
            stop_process(record.child_pid, lambda record=record: _child_ended(record))  # type: ignore[misc]
        path.unlink(missing_ok=True)
    reap_children()
    return alive


def _call(record: Record) -> Channel:
    return Channel(socket.create_connection((LOOPBACK, record.lease_port), timeout=ANSWER_TIMEOUT))


def _ended(record: Record, patience: float) -> bool:
    deadline = time.monotonic() + patience
    while _supervised(record):
        if time.monotonic() > deadline:
            return False
        reap_children()
        time.sleep(0.01)
    return True


def _await_end(record: Record) -> None:
    if not _ended(record, STOPPING_TIMEOUT):
        raise _mute(record)


def _mute(record: Record) -> NotOurServer:
    return NotOurServer(
        f"the supervisor of {record.alias} on port {record.port} (pid {record.supervisor_pid}) does not answer.",
        hint=f"looprun models stop {record.alias} --force",
    )


def _free_port(wanted: Wanted, alive: list[Record]) -> int:
    ours = {record.port: record for record in alive}
    for port in range(wanted.port, 65536):
        why = _port_problem(wanted.host, port)
        if why is None and port not in ours:
            return port
        if wanted.strict:
            holder = f"{ours[port].alias} (pid {ours[port].child_pid})" if port in ours else why or port_holder(port)
            stop = f"stop it: looprun models stop {ours[port].alias}; or " if port in ours else ""
            raise PortInUse(
                port, holder, hint=f"{stop}take another port: looprun models serve {wanted.alias} --port {port + 1}"
            )
    raise PortInUse(wanted.port, "other programs, and every port above it too", hint="LLAMA_PORT=20000 looprun ...")


def _port_problem(host: str, port: int) -> str | None:
    """None when the engine can have the port; "" when it is taken; a text when the system keeps it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        if os.name != "nt":  # there, this option would share the port instead of skipping old connections
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen()
        except PermissionError:
            return "the operating system (it is reserved)"
        except OSError:
            return ""
    return None


def _start(settings: Settings, plan: LaunchPlan, keep_alive: float | None) -> Lease:
    """Start a supervisor for the plan. It connects back with our lease before it starts the engine, so that there is
    no moment in which nobody would notice our end."""
    private_dir(settings.servers_dir, "LOOPRUN_STATE_DIR")
    log = _fresh_log(settings, plan)
    listener = socket.create_server((LOOPBACK, 0), backlog=1)
    token = secrets.token_hex(16)
    job = {
        "argv": list(plan.argv),
        "env": dict(plan.env),
        "cwd": str(settings.servers_dir),
        "record": {**plan.record_fields(), "log": str(log)},
        "record_path": str(_record_path(settings, plan.port)),
        "starter_port": listener.getsockname()[1],
        "starter_name": _my_name(),
        "token": token,
        "keep_alive": keep_alive,
    }
    with listener:
        supervisor = _spawn_supervisor(settings, json.dumps(job).encode(), log)
        channel = _expect(listener, supervisor, log)
    channel.sock.settimeout(30)
    first = channel.receive()
    if first is None or first.get("token") != token:
        raise StartFailed("the supervisor ended before it started the engine.", hint=f"see {log}")
    if first["state"] == "died":
        channel.close()
        raise explain(_failed_record(plan, log), None, str(first.get("why", "")))
    return Lease(Record(**first["record"]), channel, already_running=False, state="loading")


def _spawn_supervisor(settings: Settings, job: bytes, log: Path) -> int:
    with log.open("ab") as errors:
        supervisor = subprocess.Popen(
            [sys.executable, "-P", "-m", "looprun_models.supervisor"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            cwd=settings.servers_dir,
            env=dict(settings.environ),
            **system.detached(),
        )
    assert supervisor.stdin is not None
    with contextlib.suppress(BrokenPipeError), supervisor.stdin as stdin:
        stdin.write(job)
    _started_here.append(supervisor.pid)
    supervisor.returncode = 0  # it outlives this object on purpose; reap_children() collects it
    return supervisor.pid


def _expect(listener: socket.socket, supervisor: int, log: Path) -> Channel:
    listener.settimeout(0.1)
    while True:
        try:
            return Channel(listener.accept()[0])
        except TimeoutError:
            reap_children()
            if supervisor not in _started_here:
                raise StartFailed(
                    "the supervisor could not start: " + " ".join(log_tail(log, 3)), hint=f"see {log}"
                ) from None


def _fresh_log(settings: Settings, plan: LaunchPlan) -> Path:
    folder = private_dir(settings.logs_dir, "LOOPRUN_STATE_DIR")
    log = folder / f"{plan.spec.alias}-{plan.port}.log"
    if log.exists():
        os.replace(log, f"{log}.1")
    log.touch(mode=0o600)
    return log


def _failed_record(plan: LaunchPlan, log: Path) -> Record:
    nobody = {"started": 0.0, "lease_port": 0, "token": "", "supervisor_pid": 0, "supervisor_start": None}
    return Record(**plan.record_fields(), log=str(log), **nobody, child_pid=0, child_start=None)


def _my_name() -> str:
    program = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
    return f"{program} (pid {os.getpid()})"


def _forget_leases() -> None:
    """In a forked child: these are the parent's. Closing our copies ends nothing; a shutdown would."""
    for lease in list(_open_leases):
        lease.close()
    _started_here.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_leases)

__all__ = ["Lease", "Wanted", "attach", "dial_host", "ensure_server", "list_servers", "server_status", "stop_server"]
