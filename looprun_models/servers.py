"""Get a server: attach to the one that runs, or start one.

A server belongs to its supervisor; whoever uses it holds a `Lease`. One lock guards "look, then start", so any number
of processes end up on one server.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from looprun_models import system
from looprun_models.errors import BadSetting, NotEnoughDisk, PortInUse, StartFailed
from looprun_models.failure import explain, log_tail
from looprun_models.launch import LaunchPlan
from looprun_models.lease import Lease, attach, my_name
from looprun_models.records import locked, reap_children, reap_dead, started_here
from looprun_models.settings import Settings, private_dir
from looprun_models.system import LOOPBACK
from looprun_models.wire import Channel, Record

NEEDED_FOR_A_RECORD = 64 << 10
"""Bytes."""


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
    with locked(settings):
        alive = reap_dead(settings)
        for record in alive:
            if record.fingerprint == wanted.fingerprint and wanted.api_key in (None, record.api_key):
                lease = attach(record, keep_alive)
                if lease is not None:
                    return lease
        if not may_start:
            raise StartFailed(f"no server for {wanted.alias} is running.", hint=f"looprun models serve {wanted.alias}")
        alive = reap_dead(settings)
        port = _free_port(wanted, alive)
        return _start(settings, wanted.plan(port, alive), keep_alive)


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


def _record_path(settings: Settings, port: int) -> Path:
    return settings.servers_dir / f"{port}.json"


def _free_port(wanted: Wanted, alive: list[Record]) -> int:
    ours = {record.port: record for record in alive}
    for port in range(wanted.port, 65536):
        why = _port_problem(wanted.host, port)
        if why is None and port not in ours:
            return port
        if wanted.strict:
            holder = _described(ours[port], wanted) if port in ours else why or port_holder(port)
            stop = f"stop it: looprun models stop {ours[port].alias}; or " if port in ours else ""
            raise PortInUse(
                port, holder, hint=f"{stop}take another port: looprun models serve {wanted.alias} --port {port + 1}"
            )
    raise PortInUse(wanted.port, "other programs, and every port above it too", hint="LLAMA_PORT=20000 looprun ...")


def _described(record: Record, wanted: Wanted) -> str:
    same = " with other settings, or on another engine" if record.alias == wanted.alias else ""
    return f"{record.alias}{same} (pid {record.child_pid}; {record.summary})"


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
        except OSError as error:
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                raise BadSetting("--host", host, "an address of this machine") from error
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
        "starter_name": my_name(),
        "token": token,
        "keep_alive": keep_alive,
    }
    with listener:
        supervisor = _spawn_supervisor(settings, json.dumps(job).encode(), log)
        channel = _expect(listener, supervisor, log)
    channel.sock.settimeout(30)
    first = channel.receive()
    if first is None or first.get("token") != token:
        channel.close()
        if shutil.disk_usage(settings.state_dir).free < NEEDED_FOR_A_RECORD:
            raise NotEnoughDisk(
                f"the disk of {settings.state_dir} is full: a server needs its record and its log there.",
                hint="free some space, or set LOOPRUN_STATE_DIR to a folder on another disk",
            )
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
    started_here.append(supervisor.pid)
    supervisor.returncode = 0  # it outlives this object on purpose; reap_children() collects it
    return supervisor.pid


def _expect(listener: socket.socket, supervisor: int, log: Path) -> Channel:
    listener.settimeout(0.1)
    while True:
        try:
            return Channel(listener.accept()[0])
        except TimeoutError:
            reap_children()
            if supervisor not in started_here:
                said = " ".join(log_tail(log, 3))
                lost = f"install looprun-models for {sys.executable}" if "No module named 'looprun" in said else ""
                raise StartFailed(f"the supervisor could not start: {said}", hint=lost or f"see {log}") from None


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
