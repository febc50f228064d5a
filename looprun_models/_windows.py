"""Processes and locks on Windows: the same few functions as `_posix`.

Experimental: written from the documentation and never run on Windows; tests/test_windows.py runs it with the system's
functions patched.
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
EXTENDED_LIMITS = 9
KILL_ON_JOB_CLOSE = 0x2000
ENDS = {0xC0000005: "killed by SIGSEGV", 0xC000001D: "killed by SIGILL", 0xC0000135: "a DLL that it needs is missing"}
"""How Windows' own exit codes are called where a signal tells the same elsewhere."""

DWORD, HANDLE, SIZE = ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t


class JobLimits(ctypes.Structure):
    """JOBOBJECT_EXTENDED_LIMIT_INFORMATION; the members that are not used have no name."""

    _fields_ = [
        ("times", ctypes.c_int64 * 2),
        ("flags", DWORD),
        ("working_set", SIZE * 2),
        ("processes", DWORD),
        ("affinity", SIZE),
        ("classes", DWORD * 2),
        ("io_counters", ctypes.c_uint64 * 6),
        ("memory", SIZE * 4),
    ]


_job: list[int] = []
"""The job of this process. Its handle is never closed by us: the system does when we end, and ends our children."""


def detached() -> dict[str, Any]:
    """Popen options for a program without our console and its Ctrl-C."""
    return {"creationflags": CREATE_NEW_PROCESS_GROUP | CREATE_NO_WINDOW}


def start_tied(argv: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a child, without a window, that dies with this process. options: as Popen's. Raises OSError.

    This process enters the job, not the child: what is started in a job is in it from its first instruction. Where a
    job is refused, the record finds the orphan.
    """
    if not _job:
        _job.append(_enter_job())
    return subprocess.Popen(argv, **detached(), **options)


def _enter_job() -> int:
    """The handle of a new job with this process in it; 0 when the system refuses."""
    kernel = _kernel()
    job = kernel.CreateJobObjectW(None, None)
    limits = JobLimits(flags=KILL_ON_JOB_CLOSE)
    if not job or not kernel.SetInformationJobObject(job, EXTENDED_LIMITS, ctypes.byref(limits), ctypes.sizeof(limits)):
        return 0
    return int(job) if kernel.AssignProcessToJobObject(job, kernel.GetCurrentProcess()) else 0


def _kernel() -> Any:
    """kernel32; without these types ctypes would cut handles to 32 bits."""
    kernel = ctypes.WinDLL("kernel32", use_last_error=True)  # type: ignore[attr-defined,unused-ignore]
    kernel.CreateJobObjectW.argtypes = [HANDLE, ctypes.c_wchar_p]
    kernel.SetInformationJobObject.argtypes = [HANDLE, ctypes.c_int, HANDLE, DWORD]
    kernel.AssignProcessToJobObject.argtypes = [HANDLE, HANDLE]
    kernel.OpenProcess.argtypes = [DWORD, ctypes.c_int, DWORD]
    kernel.GetExitCodeProcess.argtypes = [HANDLE, HANDLE]
    kernel.GetProcessTimes.argtypes = [HANDLE] * 5
    kernel.CloseHandle.argtypes = [HANDLE]
    for function in (kernel.CreateJobObjectW, kernel.OpenProcess, kernel.GetCurrentProcess):
        function.restype = HANDLE
    return kernel


def start_of(pid: int) -> str | None:
    """What tells this process from a later one with the same pid; None when it has ended."""
    kernel = _kernel()
    handle = kernel.OpenProcess(QUERY, False, pid)
    if not handle:
        return None
    try:
        code = DWORD()
        kernel.GetExitCodeProcess(handle, ctypes.byref(code))
        times = [ctypes.c_uint64() for _ in range(4)]
        kernel.GetProcessTimes(handle, *map(ctypes.byref, times))
        return str(times[0].value) if code.value == STILL_ACTIVE else None
    finally:
        kernel.CloseHandle(handle)


def terminate(pid: int) -> None:
    """End it with its children at once: there is no polite way.

    Ctrl-C does not reach a process group of its own, and llama-server hears nothing else: Ctrl-Break ends it as this
    does, and only from a process on the same console.
    """
    kill(pid)


def kill(pid: int) -> None:
    """End the process and its children; no error when it has."""
    words = ["taskkill", "/T", "/F", "/PID", str(pid)]
    subprocess.run(words, capture_output=True, check=False, creationflags=CREATE_NO_WINDOW)


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
    """A return code as people say it: "exit code 1", "killed by SIGILL (0xc000001d)"."""
    if code in ENDS:
        return f"{ENDS[code]} ({code:#x})"
    return f"exit code {code:#x}" if code > 255 else f"exit code {code}"
