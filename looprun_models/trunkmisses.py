"""Where restoring a trunk did not help: remembered for each engine and architecture until a restore there does."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from looprun_models.trunkfiles import JSON_LIMIT, locked, read_json, write_private

FILE_NAME = "trunk-misses.json"
ENGINES_KEPT = 32
"""An engine's identity changes with every build: those not heard of for longest are forgotten."""
NO_KEY = "0" * 64
Table = dict[str, dict[str, int]]


class Misses:
    """How often in a row a restore changed nothing, by engine identity and model architecture.

    Nothing here raises for a disk problem: what cannot be written is not remembered.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / FILE_NAME

    def count(self, engine: str, architecture: str) -> int:
        return self._read().get(engine, {}).get(architecture, 0)

    def note_miss(self, engine: str, architecture: str) -> int:
        """One more; returns how many that makes."""
        with locked(self.folder):
            table = self._read()
            counts = table.pop(engine, {})
            counts[architecture] = counts.get(architecture, 0) + 1
            table[engine] = counts  # at the end: heard of last
            self._write(table)
            return counts[architecture]

    def note_hit(self, engine: str, architecture: str) -> None:
        """A restore helped: what was held against this pair is forgotten."""
        if not self.count(engine, architecture):
            return
        with locked(self.folder):
            table = self._read()
            table.get(engine, {}).pop(architecture, None)
            self._write(table)

    def forget(self) -> list[tuple[str, str]]:
        """Try again everywhere; the engine identities and architectures that something was held against."""
        if not self._read():
            return []
        with locked(self.folder):
            told = [(engine, name) for engine, counts in self._read().items() for name in counts]
            self._write({})
        return [] if self._read() else told

    def _read(self) -> Table:
        try:
            data, _ = read_json(self._path)
        except OSError:
            return {}
        return {engine: _counts(told) for engine, told in data.items() if isinstance(told, dict)}

    def _write(self, table: Table) -> None:
        kept = dict([(engine, counts) for engine, counts in table.items() if counts][-ENGINES_KEPT:])
        content = json.dumps(kept).encode()
        if len(content) <= JSON_LIMIT:
            with contextlib.suppress(OSError):
                write_private(self._path, content, NO_KEY)


def _counts(told: dict[str, Any]) -> dict[str, int]:
    return {architecture: count for architecture, count in told.items() if type(count) is int and 0 < count < 1 << 31}
