"""What is known of whether an engine can serve: the outcome of `smoke.prove`, kept by engine and by CPU.

A home folder may be shared by machines, and a program that serves on one of them may die at once on another.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from looprun_models.engine import Engine, write_cache
from looprun_models.machine import cpu_identity
from looprun_models.settings import Settings


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether an engine serves a tiny model with the recipe's flags.

    ok: None when it could not be decided; why says what went wrong. missing: flags of the recipe that it does not list.
    drafted: draft tokens that it proposed, None when it was not asked for any. seconds: from start to answer, as
    measured when it was `checked` (seconds since the epoch).
    """

    ok: bool | None
    why: str = ""
    missing: tuple[str, ...] = ()
    drafted: int | None = None
    seconds: float = 0.0
    checked: float = 0.0

    def __str__(self) -> str:
        if self.ok:
            drafts = "drafts" if self.drafted else "no drafts"
            return f"serves ({drafts}; answered {self.seconds:.1f} s after its start)"
        return self.why if self.ok is False else f"not decided: {self.why}"


LASTS = {True: float("inf"), False: 3600.0, None: 600.0}
"""Seconds: what speaks against an engine may have been a limit, or a busy machine, and asking again costs little."""
_found_here: dict[str, Verdict] = {}
"""Verdicts of this process, which hold where the cache cannot be written too."""


def known_verdict(engine: Engine, settings: Settings) -> Verdict | None:
    """The kept verdict on this very program on this very CPU; None when there is none, or it is too old."""
    key = _key(engine)
    found = [verdict for verdict in (_found_here.get(key), _kept(settings, key)) if verdict]
    newest = max(found, key=lambda verdict: verdict.checked, default=None)
    return newest if newest and time.time() - newest.checked < LASTS[newest.ok] else None


def keep_verdict(engine: Engine, settings: Settings, verdict: Verdict) -> None:
    """Remember it for as long as it holds; what is remembered of programs that are gone is dropped."""
    key, path = _key(engine), _path(settings)
    _found_here[key] = verdict
    there = {known: told for known, told in _read(path).items() if Path(known.rpartition(":")[0]).exists()}
    write_cache(path, there | {key: asdict(verdict)})


def _kept(settings: Settings, key: str) -> Verdict | None:
    match _read(_path(settings)).get(key):
        case {
            "ok": True | False | None as ok,
            "why": str(why),
            "missing": [*missing],
            "drafted": int() | None as drafted,
            "seconds": float(seconds),
            "checked": float(checked),
        }:
            return Verdict(ok, why, tuple(map(str, missing)), drafted, seconds, checked)
    return None  # also for what another version wrote in another form


def _key(engine: Engine) -> str:
    return f"{engine.identity}|{cpu_identity()}"


def _path(settings: Settings) -> Path:
    return settings.cache_dir / "verdicts.json"


def _read(path: Path) -> dict[str, Any]:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}
