"""`looprun engine list | check`: the engines of this machine, and whether they serve."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import typer

from looprun_models.engine import Device, Engine, Skipped, devices
from looprun_models.errors import Missing, StartFailed
from looprun_models.search import examine, search_engines, way_to_an_engine
from looprun_models.settings import Settings, load_settings
from looprun_models.smoke import prove
from looprun_models.verdicts import Verdict, known_verdict

from .options import Json
from .output import note, say, say_json, size


@dataclass(frozen=True, slots=True)
class Candidate:
    """One place where an engine was looked for. used: it is what `serve` would start."""

    path: str
    source: str
    build: int | None
    build_from: str
    devices: tuple[Device, ...]
    verdict: Verdict
    used: bool = False
    why: str = ""


def list_engines(json: Json = False) -> None:
    """Every engine found, in search order, and which one would be used.

    One that was not checked on this machine yet is checked now.
    """
    settings = load_settings()
    candidates = _chosen([_look_at(found, settings) for found in search_engines(settings)])
    if json:
        say_json(candidates)
        return
    for number, candidate in enumerate(candidates, 1):
        _say_candidate(f"{'*' if candidate.used else ' '} {number}. ", candidate)
    if not any(candidate.used for candidate in candidates):
        say(f"\nnone of them can be used\n  next: {way_to_an_engine(settings)}")


def check(
    path: Annotated[
        str | None, typer.Argument(metavar="PATH", help="A llama-server; by default those of the search, in order.")
    ] = None,
    json: Json = False,
) -> None:
    """Start engines on a tiny model with the recipe's flags until one answers rightly, whatever is known of them.

    Exit 4 when none can serve, 3 when that could not be decided.
    """
    settings = load_settings()
    named = None if path is None else [examine(settings.expand(path), "the command line", settings)]
    checked: list[Candidate] = []
    for found in named or search_engines(settings):
        checked.append(_look_at(found, settings, fresh=True))
        if not json:
            _say_candidate("", checked[-1])
        if checked[-1].verdict.ok:
            break
    if json:
        say_json(checked)
    verdicts = [candidate.verdict.ok for candidate in checked]
    if True not in verdicts:
        note(f"  next: {way_to_an_engine(settings)}")
        raise typer.Exit(StartFailed.exit_code if None in verdicts else Missing.exit_code)


def _look_at(found: Engine | Skipped, settings: Settings, *, fresh: bool = False) -> Candidate:
    if isinstance(found, Skipped):
        return Candidate(found.path, found.source, None, "", (), Verdict(False, found.why))
    if fresh or known_verdict(found, settings) is None:
        note(f"checking {found.path} ...")
    verdict = prove(found, settings, fresh=fresh)
    known = "its --version" if found.build is not None else "unknown; its flags were checked instead"
    if found.embedded:
        known = "the version of its wheel"
    return Candidate(str(found.path), found.source, found.build, known, devices(found, settings), verdict)


def _chosen(candidates: list[Candidate]) -> list[Candidate]:
    """The same, with what becomes of each: the first that serves is used, else the first that was not decided."""
    best = next((c for ok in (True, None) for c in candidates if c.verdict.ok is ok), None)

    def why(candidate: Candidate) -> str:
        if candidate is best:
            return "used: the first that serves" if candidate.verdict.ok else "used: none is known to serve"
        if candidate.verdict.ok is False:
            return "skipped"
        return "not used: one before it serves" if candidate.verdict.ok else "not used: another one serves"

    return [replace(candidate, used=candidate is best, why=why(candidate)) for candidate in candidates]


def _say_candidate(mark: str, candidate: Candidate) -> None:
    say(f"{mark}{candidate.path}   (from {candidate.source})")
    if candidate.build_from:
        build = f"b{candidate.build}, by {candidate.build_from}" if candidate.build else candidate.build_from
        gpus = ", ".join(f"{device.name} {size(device.total)}" for device in candidate.devices)
        lacks = ", ".join(candidate.verdict.missing) or "nothing"
        say(f"       build     {build}")
        say(f"       backend   {gpus or 'CPU'}")
        say(f"       lacks     {lacks} of the recipe")
    say(f"       check     {candidate.verdict}")
    if candidate.why:
        say(f"       {candidate.why}")
