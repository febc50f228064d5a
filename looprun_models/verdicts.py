"""What is known of whether an engine can serve: the outcome of `smoke.prove`, kept by engine and by CPU.

A home folder may be shared by machines, and a program that serves on one of them may die at once on another.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from looprun_models.engine import Engine
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


_found_here: dict[str, Verdict] = {}
"""Verdicts of this process, which hold where the cache cannot be written too."""


def known_verdict(engine: Engine, settings: Settings) -> Verdict | None:
    """The kept verdict on this very program on this very CPU; None when there is none."""
    key = _key(engine)
    found = [verdict for verdict in (_found_here.get(key), _kept(settings, key)) if verdict]
    return max(found, key=lambda verdict: verdict.checked, default=None)


def keep_verdict(engine: Engine, settings: Settings, verdict: Verdict) -> None:
    """Remember what was decided; the undecided is tried again."""
    if verdict.ok is None:
        return
    key, path = _key(engine), _path(settings)
    _found_here[key] = verdict
    kept = _read(path) | {key: asdict(verdict)}
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(kept), encoding="utf-8")
        os.replace(temporary, path)


def _kept(settings: Settings, key: str) -> Verdict | None:
    kept = _read(_path(settings)).get(key)
    try:
        return Verdict(**{**kept, "missing": tuple(kept["missing"])}) if kept else None
    except (TypeError, KeyError):  # another version wrote it in another form
        return None


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
