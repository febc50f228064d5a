"""Move one file's missing pieces onto the disk over several connections, hashing what is there meanwhile.

Each connection streams one span of pieces; a free one takes the next span and, when none is left, half of the largest
rest of another's. Spans are taken from the front and grow smaller, so that the hash, which must go from front to back,
is ready soon after the last byte.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from looprun_models.errors import DownloadFailed
from looprun_models.hub import OnNote
from looprun_models.journal import PIECE, Journal, part_path
from looprun_models.progress import OnProgress, Progress
from looprun_models.source import Changed, Dropped, Source, Stream, not_the_kind
from looprun_models.spans import Plan, Span

CONNECTIONS = 4
TRIES = 8
"""Connections in a row without a new byte after which one gives up; the last one to do so ends the download."""
BACKOFF = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Seconds between them."""
STALL, SLOWEST = 30.0, 1024
"""A connection that brings less than SLOWEST bytes a second over STALL seconds is given up for a new one."""
REPORT = 0.1
HASH_AT_ONCE = 4 * PIECE
LONGEST_FAREWELL = 5.0
"""Seconds that threads are waited for after an interrupt; one that is still connecting ends by itself."""


class Transfer:
    """One attempt at making a journal whole. ranged: False for a server that sends the whole file whatever is asked."""

    def __init__(self, source: Source, journal: Journal, *, ranged: bool = True) -> None:
        self._source, self._journal, self._ranged = source, journal, ranged
        self._part: Path = part_path(journal.target)
        self._connections = CONNECTIONS if ranged else 1
        self._plan = Plan(journal.done, self._connections, ranged=ranged)
        self._stop = threading.Event()
        self._moved = threading.Condition()
        self._streams: set[Stream] = set()
        self._error: BaseException | None = None
        self._given_up: Dropped | None = None
        self._notes: list[str] = []
        self._said: set[str] = set()
        self._hashed = 0
        self._digest = hashlib.sha256()

    def run(self, report: OnProgress, note: OnNote) -> str:
        """Fetch what is missing; the sha256 of the whole. Both callbacks are called on this thread.

        Raises Dropped when no connection brings anything any more, RangesUnusable, Changed, DownloadFailed, OSError.
        """
        jobs = [self._hash] if self._journal.is_whole else [self._hash, *[self._work] * self._connections]
        threads = [threading.Thread(target=self._guarded, args=(job,), daemon=True) for job in jobs]
        try:
            for thread in threads:
                thread.start()
            while alive := [thread for thread in threads if thread.is_alive()]:
                self._tell(report, note)
                if alive == threads[:1] and not self._journal.is_whole:
                    self._end()  # every connection gave up: the hasher waits for nothing
                alive[-1].join(REPORT)
        finally:
            self._end()
            deadline = time.monotonic() + LONGEST_FAREWELL
            for thread in threads:
                if thread.ident is not None:  # Ctrl-C can come before all of them are started
                    thread.join(max(0.0, deadline - time.monotonic()))
        if self._error:
            raise self._error
        if not self._journal.is_whole:
            raise self._given_up or Dropped("nothing arrived")
        self._tell(report, note)
        return self._digest.hexdigest()

    def _tell(self, report: OnProgress, note: OnNote) -> None:
        while self._notes:
            note(self._notes.pop(0))
        size = self._journal.content.size
        report(Progress("downloading", self._journal.bytes_done, size))
        if self._journal.is_whole:
            report(Progress("hashing", self._hashed, size))

    def _guarded(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:  # noqa: BLE001  (raised again by run)
            self._error = self._error or error
            self._end()

    def _end(self) -> None:
        self._stop.set()
        for stream in list(self._streams):
            stream.abort()
        with self._moved:
            self._moved.notify_all()

    def _work(self) -> None:
        """One connection after another, span after span."""
        view = memoryview(bytearray(PIECE))
        with self._part.open("r+b", buffering=0) as file:
            while not self._stop.is_set() and (span := self._plan.take()):
                try:
                    if not self._bring(span, file, view):
                        return
                finally:
                    self._plan.give_back(span)

    def _bring(self, span: Span, file: BinaryIO, view: memoryview) -> bool:
        """A whole span, over as many connections as it takes; False when they bring nothing any more."""
        failures = 0
        while not self._stop.is_set():
            before = self._place(span)
            try:
                self._fetch(span, file, view)
            except Dropped as drop:
                failures = 1 if self._place(span) > before else failures + 1
                if failures >= TRIES:
                    self._given_up = drop
                    return False
                if not self._stop.is_set():
                    self._say(drop.why)
                if not self._ranged:
                    self._plan.rewind(span)
                self._stop.wait(max(drop.wait, BACKOFF[min(failures, len(BACKOFF)) - 1]))
            else:
                return True
        return False

    def _place(self, span: Span) -> int:
        return span.position * PIECE + span.filled if self._ranged else self._journal.bytes_done

    def _say(self, why: str) -> None:
        kind = why.partition("(")[0]
        if kind not in self._said:
            self._said.add(kind)
            self._notes.append(f"{self._source.remote.file}: {why}; trying again.")

    def _fetch(self, span: Span, file: BinaryIO, view: memoryview) -> None:
        journal = self._journal
        start, end = span.position * PIECE + span.filled, min(self._plan.end_of(span) * PIECE, journal.content.size)
        stream = self._source.open(start, end, etag=journal.content.etag, ranged=self._ranged)
        self._streams.add(stream)
        try:
            journal.keep_etag(stream.etag)
            if stream.etag and stream.etag != journal.content.etag:
                raise Changed("its server has another version")
            pace, more = _Pace(), True
            while more and not self._stop.is_set():
                length = journal.length_of(span.position)
                self._fill(span, stream, view[:length], pace)
                self._keep(span.position, file, view[:length])
                more = self._plan.advance(span)
        finally:
            self._streams.discard(stream)
            stream.close()

    def _fill(self, span: Span, stream: Stream, view: memoryview, pace: _Pace) -> None:
        while span.filled < len(view):
            count = stream.read_into(view[span.filled :])
            if not count:
                raise Dropped("the connection ended early")
            span.filled += count
            pace.count(count)

    def _keep(self, piece: int, file: BinaryIO, view: memoryview) -> None:
        if self._journal.done[piece]:
            return
        remote = self._source.remote
        if piece == 0 and not bytes(view[:8]).startswith(remote.site.magic):
            raise not_the_kind(remote, _what_it_is(bytes(view[:24]), remote.site.magic[0]))
        file.seek(piece * PIECE)
        rest = view
        while rest:
            rest = rest[file.write(rest) :]
        with self._moved:
            self._journal.mark(piece)
            self._moved.notify()

    def _hash(self) -> None:
        """Follow the front of what is there without a hole."""
        done, buffer = self._journal.done, memoryview(bytearray(HASH_AT_ONCE))
        size = self._journal.content.size
        with self._part.open("rb", buffering=0) as file:
            while self._hashed < size and not self._stop.is_set():
                with self._moved:
                    self._moved.wait_for(lambda: done[self._hashed // PIECE] or self._stop.is_set())
                hole = done.find(0, self._hashed // PIECE)
                front = size if hole < 0 else hole * PIECE
                while self._hashed < front and not self._stop.is_set():
                    count = file.readinto(buffer[: min(HASH_AT_ONCE, front - self._hashed)])
                    if not count:
                        raise DownloadFailed(f"{self._part} was cut short by another program.", hint="pull again")
                    self._digest.update(buffer[:count])
                    self._hashed += count


class _Pace:
    """Bytes a second over the last while, so that a line which only drips is noticed."""

    def __init__(self) -> None:
        self._since, self._bytes = time.monotonic(), 0

    def count(self, arrived: int) -> None:
        self._bytes += arrived
        if (took := time.monotonic() - self._since) >= STALL:
            if self._bytes < SLOWEST * took:
                raise Dropped(f"less than {SLOWEST} bytes a second arrived for {STALL:g} seconds")
            self._since, self._bytes = time.monotonic(), 0


def _what_it_is(first: bytes, instead: bytes) -> str:
    if first.lstrip().startswith(b"<"):
        return "a web page"
    if first.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the content"
    return f"something that begins with {first[:4]!r} instead of {instead!r}"
