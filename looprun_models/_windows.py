"""Processes and locks on Windows: the same few functions as `_posix`. Written from the documentation, never run.

A child whose supervisor was killed is found by its record; a job object, which would end it at once, is still to come.
"""

from __future__ import annotations

import ctypes
import os
import subprocess

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

CREATE_NEW_PROCESS_GROUP = 0x200
CREATE_NO_WINDOW = 0x08000000
QUERY, STILL_ACTIVE = 0x1000, 259


def detached() -> dict[str, Any]:
    """Popen options for a program without our console and its Ctrl-C."""
    return {"creationflags": CREATE_NEW_PROCESS_GROUP | CREATE_NO_WINDOW}


def tied_to_me() -> dict[str, Any]:
    """Popen options for a child; the record finds it when its supervisor was killed."""
    return {"creationflags": CREATE_NEW_PROCESS_GROUP | CREATE_NO_WINDOW}


def start_of(pid: int) -> str | None:
    """What tells this process from a later one with the same pid; None when it has ended."""
    kernel = ctypes.WinDLL("kernel32", use_last_error=True)  # type: ignore[attr-defined,unused-ignore]
    handle = kernel.OpenProcess(QUERY, False, pid)
    if not handle:
        return None
    try:
        code = ctypes.c_ulong()
        kernel.GetExitCodeProcess(handle, ctypes.byref(code))
        times = [ctypes.c_ulonglong() for _ in range(4)]
        kernel.GetProcessTimes(handle, *map(ctypes.byref, times))
        return str(times[0].value) if code.value == STILL_ACTIVE else None
    finally:
        kernel.CloseHandle(handle)


def terminate(pid: int) -> None:
    """There is no polite signal for a program without a window: this ends it with its children."""
    kill(pid)


def kill(pid: int) -> None:
    """End the process and its children; no error when it has."""
    subprocess.run(["taskkill", "/T", "/F", "/PID", str(pid)], capture_output=True, check=False)


def kill_leftovers(leader: int) -> None:
    """Nothing: `kill` already ends the whole tree."""


def reap(pid: int) -> bool:
    """Nothing to collect: ended programs leave no entry behind."""
    return start_of(pid) is None


def try_lock(fd: int) -> bool:
    """Take the exclusive lock of an open file without waiting; the system drops it when the holder ends."""
    import msvcrt

    try:
        os.lseek(fd, 0, os.SEEK_SET)
        msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]
    except OSError:
        return False
    return True


def describe_exit(code: int) -> str:
    """A return code as people say it."""
    return f"exit code {code:#x}" if code > 255 else f"exit code {code}"
