"""Processes and locks on Linux and macOS: the same few functions as `_windows`. Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

PR_SET_PDEATHSIG = 1
LINUX = sys.platform.startswith("linux")


def detached() -> dict[str, Any]:
    """Popen options for a program that must outlive the terminal and its Ctrl-C: a session of its own."""
    return {"start_new_session": True}


def start_tied(argv: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a child in a session of its own that dies with the calling thread (Linux). options: as Popen's.

    macOS has no such request, and a program with file capabilities clears it: there the record finds the orphan.
    Raises OSError.
    """
    before_exec = _arm(os.getpid()) if LINUX else None
    return subprocess.Popen(argv, start_new_session=True, preexec_fn=before_exec, **options)


def _arm(parent: int) -> Callable[[], None]:
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def before_exec() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died between fork and the line above: nobody is left to tell us
            os._exit(127)

    return before_exec


def start_of(pid: int) -> str | None:
    """What tells this process from a later one with the same pid; None when it has ended.

    A zombie has ended, unless other threads of it still are: those hold its port and its memory.
    """
    if LINUX:
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
                after_name = stat.read().rpartition(")")[2].split()
            with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot:
                ended = after_name[0] in "ZX" and len(os.listdir(f"/proc/{pid}/task")) <= 1
                return None if ended else f"{boot.read(8)}:{after_name[19]}"
        except OSError:
            return None
    shown = subprocess.run(
        ["/bin/ps", "-o", "stat=,lstart=", "-p", str(pid)],
        env={"LC_ALL": "C", "TZ": "UTC0"},  # the same text whoever asks, and after the clocks were changed
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split()
    return None if not shown or shown[0].startswith("Z") else " ".join(shown[1:])


def terminate(pid: int) -> None:
    """Ask the process and its group to end; no error when it has."""
    _signal(pid, signal.SIGTERM)


def kill(pid: int) -> None:
    """End the process and its group; no error when it has."""
    _signal(pid, signal.SIGKILL)


def kill_leftovers(leader: int) -> None:
    """End what an ended leader left in its group (a helper it forked, a debugger)."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _signal(pid: int, number: int) -> None:
    try:
        if os.getpgid(pid) == pid:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def reap(pid: int) -> bool:
    """Collect a child of this process without waiting; True when it has ended (or is no child of ours)."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def try_lock(fd: int) -> bool:
    """Take the exclusive lock of an open file without waiting; the system drops it when the holder ends."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def describe_exit(code: int) -> str:
    """A return code as people say it: "exit code 1", "killed by SIGILL"."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
