"""Who fetches which pieces: from the front, in spans that grow smaller, and at last out of each other's hands."""

from __future__ import annotations

import threading
from dataclasses import dataclass

LEAST_SPAN, MOST_SPAN = 32, 512
"""Pieces that a connection asks for at once: 8 to 128 MiB."""
LEAST_STEAL = 8
"""Pieces below which the rest of another connection is left to it."""


@dataclass(eq=False)
class Span:
    """Pieces from position up to end, in one connection's hands, which has `filled` bytes of the first one.

    position and end change under the plan's lock only.
    """

    position: int
    end: int
    filled: int = 0


class Plan:
    """Who fetches what."""

    def __init__(self, done: bytearray, connections: int, *, ranged: bool) -> None:
        self._lock = threading.Lock()
        self._connections = connections
        self._ranged = ranged
        self._active: list[Span] = []
        self._free = _missing(done) if ranged else [Span(0, len(done))]

    def take(self) -> Span | None:
        """The next span for a free connection; None when the others have all that is left."""
        with self._lock:
            span = self._next_free() or self._half_of_largest()
            if span:
                self._active.append(span)
            return span

    def _next_free(self) -> Span | None:
        if not self._free:
            return None
        first = self._free[0]
        left = sum(span.end - span.position for span in self._free)
        length = min(max(left // (2 * self._connections), LEAST_SPAN), MOST_SPAN) if self._ranged else left
        end = first.position + length
        taken = Span(first.position, first.end if first.end - end < LEAST_SPAN else end)  # no crumbs
        first.position = taken.end
        if first.position == first.end:
            del self._free[0]
        return taken

    def _half_of_largest(self) -> Span | None:
        victim = max(self._active, key=lambda span: span.end - span.position, default=None)
        if not (victim and self._ranged) or victim.end - victim.position < 2 * LEAST_STEAL:
            return None
        middle = (victim.position + victim.end + 1) // 2
        taken, victim.end = Span(middle, victim.end), middle
        return taken

    def end_of(self, span: Span) -> int:
        with self._lock:
            return span.end

    def advance(self, span: Span) -> bool:
        """One piece of the span is done; whether there are more."""
        with self._lock:
            span.position, span.filled = span.position + 1, 0
            return span.position < span.end

    def rewind(self, span: Span) -> None:
        """For a server that can only begin at the beginning."""
        with self._lock:
            span.position = span.filled = 0

    def give_back(self, span: Span) -> None:
        """Out of its connection's hands; what is left of it is anybody's again."""
        with self._lock:
            self._active.remove(span)
            if span.position < span.end:
                self._free = sorted([*self._free, Span(span.position, span.end)], key=lambda each: each.position)


def _missing(done: bytearray) -> list[Span]:
    spans: list[Span] = []
    start = done.find(0)
    while start >= 0:
        end = done.find(1, start)
        end = end if end >= 0 else len(done)
        spans.append(Span(start, end))
        start = done.find(0, end)
    return spans
