"""`looprun engine list | check`: the engines of this machine, and whether they serve."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from looprun_models.engine import Device, Engine, Skipped, devices
from looprun_models.errors import EngineMissing, Missing
from looprun_models.search import INSTALL_HINT, examine, find_engine, search_engines
from looprun_models.settings import Settings, load_settings
from looprun_models.smoke import prove
from looprun_models.verdicts import Verdict

from .options import Json
from .output import note, progress_shown, say, say_json, size


@dataclass(frozen=True, slots=True)
class Candidate:
    """One place where an engine was looked for. used: it is what `serve` would start."""

    path: str
    source: str
    build: int | None
    build_from: str
    devices: tuple[Device, ...]
    verdict: Verdict
    used: bool
    why: str


def list_engines(json: Json = False) -> None:
    """Every engine found, in search order, and which one would be used.

    One that was never checked on this machine is checked now.
    """
    settings = load_settings()
    candidates: list[Candidate] = []
    for found in search_engines(settings):
        taken = any(candidate.used for candidate in candidates)
        candidates.append(_candidate(found, settings, taken=taken))
    if json:
        say_json(candidates)
        return
    for number, candidate in enumerate(candidates, 1):
        _say_candidate(number, candidate)
    if not any(candidate.used for candidate in candidates):
        say(f"\nnone of them can be used\n  next: {INSTALL_HINT}")


def check(
    path: Annotated[
        Path | None, typer.Argument(metavar="PATH", help="A llama-server; by default the one that would be used.")
    ] = None,
    json: Json = False,
) -> None:
    """Start an engine on a tiny model with the recipe's flags, and see whether it answers rightly.

    The outcome is kept for this program on this CPU; a check runs again. Exit 4 when the engine cannot serve.
    """
    settings = load_settings()
    engine = _named(path, settings) if path else find_engine(settings)
    with progress_shown() as show:
        verdict = prove(engine, settings, fresh=True, on_progress=show)
    if json:
        say_json({"path": engine.path, "build": engine.build, "source": engine.source, "verdict": verdict})
    else:
        say(f"{engine.label}, from {engine.source}")
        say(f"  {verdict}")
    if verdict.ok is False:
        if not json:
            note(f"  next: {INSTALL_HINT}")
        raise typer.Exit(Missing.exit_code)


def _named(path: Path, settings: Settings) -> Engine:
    found = examine(settings.expand(str(path)), "named", settings)
    if isinstance(found, Skipped):
        raise EngineMissing(f"{found.path} cannot be used: {found.why}.", hint="looprun engine list")
    return found


def _candidate(found: Engine | Skipped, settings: Settings, *, taken: bool) -> Candidate:
    if isinstance(found, Skipped):
        verdict = Verdict(False, found.why)
        return Candidate(found.path, found.source, None, "", (), verdict, False, f"skipped: {found.why}")
    verdict = prove(found, settings)
    used = not taken and verdict.ok is not False
    why = (
        "used: the first in the search order that serves"
        if used
        else f"skipped: {verdict.why}"
        if verdict.ok is False
        else "not used: one before it serves"
    )
    known = "its --version" if found.build is not None else "unknown; its flags were checked instead"
    if found.embedded:
        known = "the version of its wheel"
    return Candidate(str(found.path), found.source, found.build, known, devices(found, settings), verdict, used, why)


def _say_candidate(number: int, candidate: Candidate) -> None:
    mark = "*" if candidate.used else " "
    say(f"{mark} {number}. {candidate.path}   (from {candidate.source})")
    if candidate.build_from:
        build = f"b{candidate.build}, by {candidate.build_from}" if candidate.build else candidate.build_from
        gpus = ", ".join(f"{device.name} {size(device.total)}" for device in candidate.devices)
        lacks = ", ".join(candidate.verdict.missing) or "nothing"
        say(f"       build     {build}")
        say(f"       backend   {gpus or 'CPU'}")
        say(f"       lacks     {lacks} of the recipe")
        say(f"       check     {candidate.verdict}")
    say(f"       {candidate.why}")
