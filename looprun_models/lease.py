"""A lease: the right to use a running server, as a connection that the operating system closes when its holder ends.

Also what can be asked of a server's supervisor: its state, and its end.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from looprun_models import system
from looprun_models.errors import (
    EngineDied,
    LooprunError,
    NotOurServer,
    ServerInUse,
    ServerStopped,
    StartTimeout,
)
from looprun_models.failure import explain, log_tail
from looprun_models.progress import OnProgress, Progress
from looprun_models.records import child_ended, reap_children, started_here, supervised
from looprun_models.system import LOOPBACK
from looprun_models.wire import Channel, Record, identify, proves, stop_process

START_TIMEOUT = 240.0
"""Seconds to wait for a model: 17 GB from a slow disk take minutes, and a dead engine ends the wait anyway."""
ANSWER_TIMEOUT = 5.0
PROGRESS_EVERY = 0.25
STOPPING_TIMEOUT = 15.0

_open_leases: weakref.WeakSet[Lease] = weakref.WeakSet()


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


def attach(record: Record, keep_alive: float | None) -> Lease | None:
    """A lease on a recorded server; None when it is just ending (returns after it has). Raises NotOurServer."""
    try:
        channel = _call(record)
    except ConnectionRefusedError:
        _await_end(record)
        return None
    except TimeoutError:
        raise _mute(record) from None
    channel.send(token=record.token, op="lease", name=my_name(), keep_alive=keep_alive)
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
    if not supervised(record):
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
        stop_process(record.child_pid, lambda: child_ended(record))
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


def _call(record: Record) -> Channel:
    return Channel(socket.create_connection((LOOPBACK, record.lease_port), timeout=ANSWER_TIMEOUT))


def _ended(record: Record, patience: float) -> bool:
    deadline = time.monotonic() + patience
    while supervised(record):
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


def my_name() -> str:
    program = Path(sys.argv[0]).name if sys.argv and sys.argv[0] not in ("", "-c") else "python"
    return f"{program} (pid {os.getpid()})"


def _forget_leases() -> None:
    """In a forked child: these are the parent's. Closing our copies ends nothing; a shutdown would."""
    for lease in list(_open_leases):
        lease.close()
    started_here.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_leases)
