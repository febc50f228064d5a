"""The program that owns one server: starts it, logs it, counts who uses it, and stops it when nobody does.

Run as `python -m looprun_models.supervisor` with a job (JSON) on standard input; imported by nobody. One thread, one
loop: the engine is tied to that thread's life on Linux, and nothing here may block for longer than a probe.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time

from looprun_models import system
from looprun_models.system import LOOPBACK
from looprun_models.wire import Channel, Record, identify, proves, stop_process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

LOG_CAP = 8 << 20
"""Bytes of log kept, twice: the current file, and the one before it as `.1`."""
POLL_LOADING = 0.02
POLL_WITHOUT_SIGNALS = 0.25


class Lease:
    """One connection. It counts as a user once it has said so; keep_alive None means for ever."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.name = ""
        self.keep_alive: float | None = 0.0
        self.counts = False


class Supervisor:
    """States: loading -> ready -> stopping, or died from either of the first two."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.state = "loading"
        self.leases: dict[int, Lease] = {}
        self.stay_until: float | None = 0.0
        self.born = time.monotonic()
        self.next_probe = self.next_log_check = self.born
        self.selector = selectors.DefaultSelector()
        self.asked_to_stop: list[Lease] = []
        self.signalled = False

    def run(self) -> None:
        self._listen_for_signals()
        self.listener = socket.create_server((LOOPBACK, 0), backlog=128)
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.log = open(self.job["record"]["log"], "ab", buffering=0)  # noqa: SIM115 (open as long as this program)
        os.dup2(self.log.fileno(), 2)  # a bug of ours must not vanish
        try:
            if self._start():
                while self.state in ("loading", "ready"):
                    self._wait()
                    self._watch_child()
                    self._watch_readiness()
                    self._watch_users()
                    self._watch_log()
        finally:
            self._finish()

    def _listen_for_signals(self) -> None:
        self.wake, wake_writer = socket.socketpair()
        self.wake.setblocking(False)
        wake_writer.setblocking(False)
        self._wake_writer = wake_writer
        signal.set_wakeup_fd(wake_writer.fileno(), warn_on_full_buffer=False)
        for name in ("SIGTERM", "SIGINT", "SIGHUP"):
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), self._note_signal)
        if hasattr(signal, "SIGCHLD"):
            signal.signal(signal.SIGCHLD, lambda *_: None)
        self.selector.register(self.wake, selectors.EVENT_READ)

    def _note_signal(self, *_: object) -> None:
        self.signalled = True

    def _start(self) -> bool:
        job = self.job
        starter = Channel(socket.create_connection((LOOPBACK, job["starter_port"]), timeout=5))
        lease = self._add(starter, name=job["starter_name"], keep_alive=job["keep_alive"])
        try:
            self.child = system.start_tied(
                job["argv"],
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=self.log,
                env=job["env"],
                cwd=job["cwd"],
            )
        except OSError as error:
            starter.send(token=job["token"], state="died", code=None, why=str(error))
            self._drop(lease)
            return False
        self.record = Record(
            **job["record"],
            started=time.time(),
            lease_port=self.listener.getsockname()[1],
            token=os.urandom(16).hex(),
            supervisor_pid=os.getpid(),
            supervisor_start=system.start_of(os.getpid()),
            child_pid=self.child.pid,
            child_start=system.start_of(self.child.pid),
        )
        self.record.write(job["record_path"])
        starter.send(token=job["token"], state="loading", record=self.record.as_dict())
        return True

    def _add(self, channel: Channel, *, name: str = "", keep_alive: float | None = 0.0) -> Lease:
        lease = Lease(channel)
        lease.name, lease.keep_alive, lease.counts = name, keep_alive, bool(name)
        channel.sock.settimeout(2)
        self.leases[channel.fileno()] = lease
        self.selector.register(channel.sock, selectors.EVENT_READ, lease)
        return lease

    def _drop(self, lease: Lease) -> None:
        self.selector.unregister(lease.channel.sock)
        del self.leases[lease.channel.fileno()]
        lease.channel.close()
        if not lease.counts or self.state != "ready":
            return
        if lease.keep_alive is None or self.stay_until is None:
            self.stay_until = None
        else:
            self.stay_until = max(self.stay_until, time.monotonic() + lease.keep_alive)

    def _wait(self) -> None:
        for key, _ in self.selector.select(self._patience()):
            if key.fileobj is self.listener:
                self._add(Channel(self.listener.accept()[0]))
            elif key.fileobj is self.wake:
                self.wake.recv(4096)
            elif isinstance(key.data, Lease) and key.data.channel.fileno() in self.leases:
                self._hear(key.data)
        if self.signalled:
            self._log("asked to stop by a signal")
            self.state = "stopping"

    def _patience(self) -> float:
        """Seconds until something is due without anybody speaking."""
        if self.state == "loading":
            return POLL_LOADING
        due = [self.next_log_check - time.monotonic()]
        if self.stay_until is not None and not self._users():
            due.append(self.stay_until - time.monotonic())
        if not hasattr(signal, "SIGCHLD"):
            due.append(POLL_WITHOUT_SIGNALS)
        return max(0.0, min(due))

    def _hear(self, lease: Lease) -> None:
        messages, alive = lease.channel.drain()
        for message in messages:
            if message.get("token") != self.record.token:
                alive = False
                break
            self._obey(lease, message)
        if not alive:
            self._drop(lease)

    def _obey(self, lease: Lease, message: dict[str, Any]) -> None:
        op = message.get("op")
        if op == "lease":
            lease.name, lease.keep_alive = str(message["name"]), message["keep_alive"]
            lease.counts = True
            lease.channel.send(state=self.state)
        elif op == "status":
            lease.channel.send(**self._status())
        elif op == "stop":
            others = [other.name for other in self._users() if other is not lease]
            if others and not message.get("force"):
                lease.channel.send(ok=False, holders=others)
            else:
                self.asked_to_stop.append(lease)
                self._log("asked to stop")
                self.state = "stopping"

    def _status(self) -> dict[str, Any]:
        now = time.monotonic()
        stays = None if self._users() or self.stay_until is None else max(0.0, self.stay_until - now)
        names = [lease.name for lease in self._users()]
        return {"state": self.state, "leases": names, "stops_in": stays, "uptime": now - self.born}

    def _users(self) -> list[Lease]:
        return [lease for lease in self.leases.values() if lease.counts]

    def _tell_users(self, **message: Any) -> None:
        for lease in self._users():
            lease.channel.send(**message)

    def _watch_child(self) -> None:
        code = self.child.poll()
        if code is None or self.state not in ("loading", "ready"):
            return
        self._log(f"the engine ended: {system.describe_exit(code)} while {self.state}")
        self.state = "died"
        self.exit_code = code

    def _watch_readiness(self) -> None:
        now = time.monotonic()
        if self.state != "loading" or now < self.next_probe:
            return
        self.next_probe = now + POLL_LOADING
        record = self.record
        if proves(identify(record.host, record.port, record.api_key), record):
            self.state = "ready"
            self._log(f"ready after {time.monotonic() - self.born:.1f} s")
            self._tell_users(state="ready")

    def _watch_users(self) -> None:
        """A load that nobody waits for any more is cancelled; a ready server stays as long as it was asked to."""
        if self._users() or self.state not in ("loading", "ready"):
            return
        if self.state == "loading" or (self.stay_until is not None and self.stay_until <= time.monotonic()):
            self._log("nobody uses it")
            self.state = "stopping"

    def _watch_log(self) -> None:
        """The engine appends, so cutting the file to nothing under it is safe."""
        if time.monotonic() < self.next_log_check:
            return
        self.next_log_check = time.monotonic() + 30
        path = self.record.log
        if os.path.getsize(path) > LOG_CAP:
            with open(path, "rb") as source, open(f"{path}.1", "wb") as kept:
                source.seek(-LOG_CAP, os.SEEK_END)
                kept.write(source.read(LOG_CAP))
            os.truncate(path, 0)

    def _log(self, text: str) -> None:
        self.log.write(f"looprun: {text}\n".encode())

    def _finish(self) -> None:
        forced = False
        child = getattr(self, "child", None)
        if child is not None:
            if child.poll() is None:
                forced = stop_process(child.pid, lambda: child.poll() is not None)
                self._log(f"stopped{' by force' if forced else ''}: {system.describe_exit(child.wait())}")
            system.kill_leftovers(child.pid)
        if hasattr(self, "record"):
            os.unlink(self.job["record_path"])
        end: dict[str, Any] = {"state": "stopped"}
        if self.state == "died":
            end = {"state": "died", "code": self.exit_code}
        self._tell_users(**end)
        for lease in self.asked_to_stop:
            lease.channel.send(ok=True, forced=forced)


if __name__ == "__main__":
    Supervisor(json.load(sys.stdin)).run()
