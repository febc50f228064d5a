"""What of a download is already on the disk, in a form that survives every way a program can end.

Beside the target lie `<name>.part` (the content at its full length, with holes) and `<name>.part.journal`: a line of
JSON saying what is being fetched, then one byte for each piece of 256 KiB, set once the piece is in the part file. Both
writes reach the system before the next piece is asked for, so kill -9 costs one unfinished piece per connection.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from looprun_models.system import try_lock

PIECE = 256 * 1024
HEADER = 4096
"""Bytes that the JSON line is padded to; the piece bytes follow."""
WHOLE = 1
LOOK = 0.1
"""Seconds between looks at whether the holder of a lock has ended."""


@dataclass(frozen=True, slots=True)
class Content:
    """What a part file is a part of. etag is the one that the bytes' server gave, "" before it did."""

    repo: str
    commit: str
    size: int
    sha256: str | None
    etag: str = ""
    piece: int = PIECE

    def same_as(self, other: Content) -> bool:
        """Whether bytes of one are bytes of the other: by hash where both have one, else by commit."""
        if (self.size, self.piece) != (other.size, other.piece):
            return False
        if self.sha256 and other.sha256:
            return self.sha256 == other.sha256
        return (self.repo, self.commit) == (other.repo, other.commit)


def part_path(target: Path) -> Path:
    return target.with_name(f"{target.name}.part")


def journal_path(target: Path) -> Path:
    return target.with_name(f"{target.name}.part.journal")


def lock_path(target: Path) -> Path:
    return target.with_name(f"{target.name}.part.lock")


def part_files(target: Path) -> list[Path]:
    """What an unfinished download has left beside the target."""
    return [path for path in (part_path(target), journal_path(target), lock_path(target)) if path.exists()]


def drop(target: Path) -> bool:
    """Remove what an unfinished download has left; False when a download is running, whose files they are."""
    lock = lock_path(target)
    if lock.exists():
        with lock.open("a+b") as file:
            if not try_lock(file.fileno()):
                return False
            _drop_files(target)
            return True
    _drop_files(target)
    return True


def _drop_files(target: Path) -> None:
    """The part file first: a journal alone claims nothing."""
    for path in part_files(target):
        with contextlib.suppress(OSError):
            path.unlink()


@contextmanager
def held(path: Path, on_wait: Callable[[bool], None]) -> Iterator[None]:
    """Hold the lock of a file that is there for it only; the system drops it with its holder.

    on_wait is called at each look while another holds it, the first time with True.
    """
    first = True
    while True:
        file = path.open("a+b")
        try:
            while not _locked(file.fileno()):
                on_wait(first)
                first = False
                time.sleep(LOOK)
            if _same_file(file.fileno(), path):  # else its holder removed it when it was done
                break
        except BaseException:
            file.close()
            raise
        file.close()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # Windows keeps files that are open; the next one uses it again
            path.unlink()
        file.close()


def _locked(handle: int) -> bool:
    """Also true where the file system knows no locks: what follows is right without one, only not thrifty."""
    try:
        return try_lock(handle)
    except OSError:
        return True


def _same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def read_progress(target: Path) -> tuple[int, int] | None:
    """Bytes there and bytes in all, of an unfinished download; None when there is none that could be taken up."""
    found = _read(target)
    if not found:
        return None
    content, done = found
    return _count(content.size, done), content.size


class Journal:
    """The part file and its journal, in use by one download. `mark` may be called from several threads."""

    def __init__(self, target: Path, content: Content, done: bytearray, *, resumed: bool) -> None:
        self.target, self.content, self.done, self.resumed = target, content, done, resumed
        self._lock = threading.Lock()
        self._file = journal_path(target).open("r+b", buffering=0)
        self.inode = part_path(target).stat().st_ino
        self._bytes = _count(content.size, done)

    @classmethod
    def open(cls, target: Path, content: Content) -> Self:
        """Take up what is there if it is a part of this very content, else start anew, in new files."""
        found = _read(target)
        if found and found[0].same_as(content):
            _unmark_holes(part_path(target), content, found[1])
            return cls(target, replace(content, etag=found[0].etag), found[1], resumed=any(found[1]))
        for path in (journal_path(target), part_path(target)):
            path.unlink(missing_ok=True)
        with part_path(target).open("xb") as part:
            part.truncate(content.size)
        done = bytearray(-(-content.size // content.piece))
        journal_path(target).write_bytes(_header(content) + done)
        return cls(target, content, done, resumed=False)

    @property
    def bytes_done(self) -> int:
        return self._bytes

    @property
    def is_whole(self) -> bool:
        return self._bytes == self.content.size

    def length_of(self, piece: int) -> int:
        return min(self.content.piece, self.content.size - piece * self.content.piece)

    def mark(self, piece: int) -> None:
        """The piece is in the part file."""
        with self._lock:
            if not self.done[piece]:
                self._file.seek(HEADER + piece)
                self._file.write(bytes([WHOLE]))
                self.done[piece] = WHOLE
                self._bytes += self.length_of(piece)

    def keep_etag(self, etag: str) -> None:
        """The etag that later requests are compared with; the first one counts."""
        with self._lock:
            if etag and not self.content.etag:
                self.content = replace(self.content, etag=etag)
                self._file.seek(0)
                self._file.write(_header(self.content))

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _header(content: Content) -> bytes:
    line = json.dumps(asdict(content)).encode() + b"\n"
    if len(line) > HEADER:
        line = json.dumps(asdict(replace(content, etag=""))).encode() + b"\n"
    return line.ljust(HEADER)


def _read(target: Path) -> tuple[Content, bytearray] | None:
    try:
        data = journal_path(target).read_bytes()
        content = Content(**json.loads(data[:HEADER]))
        if not all(
            isinstance(name, str) and name.isprintable() for name in (content.repo, content.commit, content.etag)
        ):
            return None
        done = bytearray(data[HEADER:])
        fits = part_path(target).stat().st_size == content.size and len(done) == -(-content.size // content.piece)
    except (OSError, ValueError, TypeError, ZeroDivisionError, RecursionError):
        return None
    return (content, done) if fits else None


def _unmark_holes(part: Path, content: Content, done: bytearray) -> None:
    """After a power cut the journal can know of pieces that never reached the disk: where the file has holes."""
    if not hasattr(os, "SEEK_HOLE"):
        return
    at = 0
    with part.open("rb", buffering=0) as file, contextlib.suppress(OSError):
        while at < content.size:
            hole = min(os.lseek(file.fileno(), at, os.SEEK_HOLE), content.size)
            try:
                at = os.lseek(file.fileno(), hole, os.SEEK_DATA)
            except OSError:  # no data after this
                at = content.size
            first, end = hole // content.piece, -(-at // content.piece)
            done[first:end] = bytes(end - first)


def _count(size: int, done: bytearray) -> int:
    whole = len(done) - done.count(0)
    missing_of_last = len(done) * PIECE - size
    return whole * PIECE - (missing_of_last if done and done[-1] else 0)
