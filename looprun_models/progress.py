"""What a long step tells whoever waits for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one phase is; handed to `on_progress`.

    phase is "downloading", "hashing", "unpacking" or "loading". done and total are bytes. done may fall back: a broken
    connection can cost bytes that were already counted.
    """

    phase: str
    done: int
    total: int


OnProgress = Callable[[Progress], None]
