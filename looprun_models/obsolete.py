"""Saved trunks that nothing can use any more: baked anew since, or of an engine or weights that are not here now."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from looprun_models.engine import identity_of
from looprun_models.provenance import weights_identity
from looprun_models.records import list_servers
from looprun_models.registry import load_profiles
from looprun_models.settings import Settings
from looprun_models.trunkentry import Entry
from looprun_models.trunkfiles import KEPT, TEMPORARY, abandoned, names_in, size_of
from looprun_models.trunkstore import TrunkStore
from looprun_models.weights import weights_path


@dataclass(frozen=True, slots=True)
class Obsolete:
    """A trunk that can go, and why."""

    entry: Entry
    why: str


class Surroundings:
    """The engines and weights that are here now. Looks only, and starts nothing."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._running = list_servers(settings)

    def why_unusable(self, entry: Entry) -> str:
        """Why no server can restore it, "" when one may. What an entry does not tell is not held against it."""
        engine, weights = entry.meta.facts.get("engine"), entry.meta.facts.get("weights")
        if engine and engine not in self._running_engines:
            program = Path(engine.rpartition(":")[0])
            now = identity_of(program)
            if now != engine:
                return f"its engine has changed since: {program}" if now else f"its engine is gone: {program}"
        if weights and self._weights is not None and weights not in self._weights:
            return "no profile finds its weights now (or the variable that names them is not set here)"
        return ""

    @functools.cached_property
    def _running_engines(self) -> set[str]:
        """A server runs on with the program that it was started with."""
        return {record.engine_identity for record in self._running}

    @functools.cached_property
    def _weights(self) -> set[str] | None:
        """None when some are here that cannot be read: then nothing is known to be gone."""
        found = set()
        for path in set(self._weight_files()):
            try:
                found.add(weights_identity(path, self._settings))
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError:
                return None
        return found

    def _weight_files(self) -> Iterator[Path]:
        for spec in load_profiles(self._settings).values():
            yield weights_path(spec, self._settings)[0]
        yield from (Path(record.model_path) for record in self._running if record.model_path)


def find_obsolete(store: TrunkStore, settings: Settings) -> list[Obsolete]:
    """All of them, the last used first."""
    here = Surroundings(settings)
    superseded = {entry.key for entry in store.superseded()}
    judged = (
        Obsolete(entry, "not used since a newer one was baked" if entry.key in superseded else here.why_unusable(entry))
        for entry in store.entries()
    )
    return [found for found in judged if found.why]


def leftover_bytes(store: TrunkStore) -> int:
    """What killed programs left, as `store.sweep` would remove it: temporaries, and halves of trunks."""
    whole = {entry.key for entry in store.entries()}
    left = 0
    for name in names_in(store.folder):
        kept = KEPT.fullmatch(name)
        path = store.folder / name
        if (kept and kept["key"] not in whole) or (TEMPORARY.fullmatch(name) and abandoned(path)):
            left += size_of(path)
    return left
