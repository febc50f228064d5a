"""Files in a folder that several processes share, and that may be the user's: private, whole or not there, no links.

Every name of ours is a sha256 in hex with a suffix; whatever else lies in the folder is somebody else's.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import itertools
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from looprun_models import system

KEY = re.compile(r"[0-9a-f]{64}")
KEPT = re.compile(rf"(?P<key>{KEY.pattern})\.(?:trunk|json)")
TEMPORARY = re.compile(rf"(?P<key>{KEY.pattern})\.(?P<pid>\d{{1,10}})-(?P<start>[0-9a-f]{{8}})-\d+\.part")
JSON_LIMIT = 1 << 18
"""Bytes of JSON that are read, and written, at most."""
FULL = 1 << 20
"""Free bytes below which an engine that could not write is put down to a full disk."""
LOCK_NAME = "trunks.lock"
LOCK_PATIENCE = 5.0
"""Seconds. It is held for renames; whoever gives up waiting may go on, since bytes are verified before use."""
FORGOTTEN_AFTER = 86400.0
"""Seconds after which a temporary is nobody's, whatever its process does now."""

_counter = itertools.count()


def temporary_name(key: str) -> str:
    """A new bare file name for this process, which `abandoned` knows when the process has ended."""
    pid = os.getpid()
    return f"{key}.{pid}-{_mark(pid)}-{next(_counter)}.part"


def abandoned(path: Path) -> bool:
    """Whether the process that named this temporary has ended, or the file is a day old."""
    named = TEMPORARY.fullmatch(path.name)
    if named is None:
        return False
    with contextlib.suppress(OSError):
        if time.time() - path.lstat().st_mtime > FORGOTTEN_AFTER:
            return True
    return _mark(int(named["pid"])) != named["start"]


def _mark(pid: int) -> str:
    """A later process under the same pid has another one; a dead pid has that of no start."""
    return hashlib.sha256((system.start_of(pid) or "").encode()).hexdigest()[:8]


def names_in(folder: Path) -> list[str]:
    """All names; none where the folder cannot be read."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def open_regular(path: Path, flags: int = os.O_RDONLY) -> io.FileIO:
    """Open what is a regular file itself. Raises OSError, with ELOOP for a link, a pipe or a folder."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise OSError(errno.ELOOP, "not a regular file", str(path))
    never_elsewhere = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    return open(os.open(path, flags | never_elsewhere), "rb" if flags == os.O_RDONLY else "r+b", buffering=0)


def sha256_of(file: io.FileIO) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path) -> tuple[dict[str, Any], float]:
    """A small JSON object ({} for anything else) and when the file was changed. Raises OSError."""
    with open_regular(path) as file:
        changed = os.fstat(file.fileno()).st_mtime_ns / 1e9
        raw = file.read(JSON_LIMIT + 1) or b""
    try:
        data = json.loads(raw) if len(raw) <= JSON_LIMIT else None
    except (ValueError, RecursionError):
        data = None
    return (data if isinstance(data, dict) else {}), changed


def create_private(path: Path, content: bytes = b"") -> None:
    """A new file of mode 0600, on the disk when this returns. Raises OSError; then nothing is left of it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    handle = os.open(path, flags, 0o600)
    try:
        with open(handle, "wb") as file:
            file.write(content)
            file.flush()
            if content:
                os.fsync(file.fileno())
        stamp(path)
    except BaseException:
        discard(path)
        raise


def write_private(path: Path, content: bytes, key: str) -> None:
    """Let a small file have this content, in one step. key: whose temporary it is meanwhile. Raises OSError."""
    new = path.with_name(temporary_name(key))
    create_private(new, content)
    try:
        new.replace(path)
    finally:
        discard(new)


def stamp(path: Path) -> None:
    """Changed now, finer than the file system's own clock: what is used in turn keeps its order. Raises OSError."""
    now = time.time_ns()
    os.utime(path, ns=(now, now))


def discard(path: Path) -> int:
    """Remove a file, or a link but not what it points to; the bytes that became free, 0 when it stays."""
    try:
        size = path.lstat().st_size
        path.unlink()
    except OSError:
        return 0
    return size


def clear_way(path: Path) -> str:
    """Remove an empty folder that stands where a file is to be; why one stays, "" when none is there."""
    try:
        if _is_folder(path):
            path.rmdir()
    except OSError as error:
        return f"{path} is a folder in the way, and stays: {error.strerror}"
    return ""


def size_of(path: Path) -> int:
    """Bytes; 0 for a folder, and for what cannot be seen."""
    with contextlib.suppress(OSError):
        return 0 if _is_folder(path) else path.lstat().st_size
    return 0


def _is_folder(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISDIR(path.lstat().st_mode)
    return False


def why_unwritten(folder: Path, error: OSError | None = None) -> str:
    """What kept a file from being written, by us (error) or by an engine, which does not say."""
    full = False
    if error is None:
        try:
            full = shutil.disk_usage(folder).free < FULL
        except OSError as seen:
            error = seen
    if error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    elif not os.access(folder, os.W_OK | os.X_OK):
        return f"{folder} cannot be written"
    if full:
        return f"the disk of {folder} is full"
    return f"{folder} cannot be written: {error.strerror}" if error else f"the engine could not write to {folder}"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """The lock of a folder for a moment; False when another process kept it for LOCK_PATIENCE.

    Where locks cannot be had (a read-only folder, a file system without them) nobody can hold one: True.
    """
    with contextlib.ExitStack() as stack:
        yield _acquired(folder, stack)


def _acquired(folder: Path, stack: contextlib.ExitStack) -> bool:
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    deadline = time.monotonic() + LOCK_PATIENCE
    try:
        handle = os.open(folder / LOCK_NAME, flags, 0o600)
        stack.callback(os.close, handle)
        while not system.try_lock(handle):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
    except OSError:
        return True
    return True
