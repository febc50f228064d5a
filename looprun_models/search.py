"""Where engines are looked for, in which order, and why each candidate before the one that is used will not do.

To look in another place, add it to `search_engines`.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from looprun_models.engine import EMBEDDED, FLOOR, Engine, Skipped, learn
from looprun_models.errors import EngineMissing
from looprun_models.probe import SERVE
from looprun_models.settings import Settings
from looprun_models.verdicts import Verdict, known_verdict

SUFFIX = ".exe" if os.name == "nt" else ""
PROGRAM, SINGLE = f"llama-server{SUFFIX}", f"llama{SUFFIX}"
"""SINGLE is newer installs' one program for everything: `llama serve` is the server."""
INSTALL_HINT = f"looprun engine install   (or {EMBEDDED}, or set LLAMA_BIN to a llama-server from b{FLOOR} on)"


Judge = Callable[[Engine, Settings], Verdict | None]


def find_engine(settings: Settings, judge: Judge = known_verdict) -> Engine:
    """The first usable engine in the search order. Raises EngineMissing with the reason for every candidate.

    judge says whether an engine serves: by default by what is known, without starting anything; `smoke.prove` finds
    out. One of which that could not be decided is taken when none serves. LLAMA_BIN, when set, is the only candidate: a
    broken one is an error, never a silent fallback.
    """
    skipped: list[Skipped] = []
    undecided: list[Engine] = []
    for found in search_engines(settings):
        if isinstance(found, Skipped):
            skipped.append(found)
            continue
        verdict = judge(found, settings)
        if verdict is None or verdict.ok:
            return found
        if verdict.ok is None:
            undecided.append(found)
        skipped.append(Skipped(str(found.path), found.source, verdict.why))
    if undecided:
        return undecided[0]
    if settings.llama_bin is not None:
        message = f"LLAMA_BIN={settings.llama_bin} cannot be used: {skipped[0].why}."
        raise EngineMissing(message, hint=way_to_an_engine(settings))
    raise EngineMissing("no usable llama-server was found.", hint=way_to_an_engine(settings), skipped=map(str, skipped))


def way_to_an_engine(settings: Settings) -> str:
    """The next command where no engine can be used."""
    return INSTALL_HINT if settings.llama_bin is None else "point LLAMA_BIN at a llama-server, or unset it"


def search_engines(settings: Settings) -> Iterator[Engine | Skipped]:
    """The verdict on each candidate, in search order, each probed only when it is asked for.

    LLAMA_BIN alone, when set; else `~/llamacpp-*/`, highest build first; `~/llama.cpp`; the PATH; the embedded engine.
    In a folder: its bin/, build/bin/, build/bin/Release/, itself, then the `llama-b*/` of an official archive that was
    unpacked in it. In each place `llama-server`, or without one the single program `llama`.
    """
    if settings.llama_bin is not None:
        yield examine(settings.expand(settings.llama_bin), "LLAMA_BIN", settings)
        return
    for folder in _install_folders(settings):
        yield from examine_folder(folder, settings)
    yield from _examine_path(settings)
    yield _examine_embedded(settings)


def examine(path: Path, source: str, settings: Settings) -> Engine | Skipped:
    """What a file is, as an engine."""

    def skip(why: str) -> Skipped:
        return Skipped(str(path), source, why)

    try:
        path.stat()
    except (OSError, ValueError) as error:
        gone = isinstance(error, (FileNotFoundError, NotADirectoryError))
        why = "there is no such file" if gone else f"it cannot be looked at ({getattr(error, 'strerror', error)})"
        return skip("a link to nothing" if gone and path.is_symlink() else why)
    if path.is_dir():
        inside = next(iter(_programs_in(path)), None)
        return skip("a folder, not a program" + (f" (did you mean {inside}?)" if inside else ""))
    if not os.access(path, os.X_OK):
        return skip(f"not executable (chmod +x {path})")
    real = path.resolve()
    single = real.stem == "llama" or (path.stem == "llama" and not real.stem.startswith("llama-server"))
    return learn((str(real), *SERVE) if single else (str(real),), real, source, settings)


def _install_folders(settings: Settings) -> list[Path]:
    """`~/llamacpp-*/`, highest build first, and a source build. A name that proves no build is no proof: its program is
    asked."""
    if settings.home is None:
        return []

    def build(folder: Path) -> tuple[int, str]:
        named = _build_in_name(folder)
        if named >= FLOOR:
            return named, folder.name
        verdicts = (verdict for verdict in examine_folder(folder, settings) if isinstance(verdict, Engine))
        return next((verdict.build or 0 for verdict in verdicts), 0), folder.name

    installed = sorted(filter(os.path.isdir, settings.home.glob("llamacpp-*")), key=build, reverse=True)
    return [*installed, *filter(os.path.isdir, [settings.home / "llama.cpp"])]


def _build_in_name(folder: Path) -> int:
    named = re.search(r"(?<!\d)\d{4,5}(?!\d)", folder.name)
    return int(named[0]) if named else 0


def examine_folder(folder: Path, settings: Settings) -> Iterator[Engine | Skipped]:
    """The verdict on each program in a folder; one on the folder itself when there is none in it."""
    source = f"~/{folder.name}"
    programs = _programs_in(folder)
    if not programs:
        readable = os.access(folder, os.R_OK | os.X_OK)
        why = f"no {PROGRAM} in it, its bin/ or its build/bin/" if readable else "it cannot be looked into"
        yield Skipped(str(folder), source, why)
    for program in programs:
        yield examine(program, source, settings)


def _programs_in(folder: Path) -> list[Path]:
    """What may be an engine in a folder, the likeliest place first."""
    unpacked = sorted(folder.glob("llama-b*"), key=_build_in_name, reverse=True)
    places = [folder / "bin", folder / "build/bin", folder / "build/bin/Release", folder, *unpacked]
    found: list[Path] = []
    for place in places:
        both = (place / PROGRAM, place / SINGLE)
        found += [program for program in both if os.path.lexists(program) and not os.path.isdir(program)][:1]
    return found


def _examine_path(settings: Settings) -> Iterator[Engine | Skipped]:
    path = settings.environ.get("PATH")
    server, single = (shutil.which(name, path=path) for name in ("llama-server", "llama"))
    if server:
        yield examine(Path(server), "PATH", settings)
    if single and not (server and Path(server).parent == Path(single).parent):
        yield examine(Path(single), "PATH", settings)
    if not server and not single:
        yield Skipped("llama-server", "PATH", "not found there")


def _examine_embedded(settings: Settings) -> Engine | Skipped:
    found = importlib.util.find_spec("xllamacpp")
    if found is None or found.origin is None:
        return Skipped("looprun_models.embedded", "embedded", 'not installed (pip install "looprun-models[embedded]")')
    command = (sys.executable, "-P", "-m", "looprun_models.embedded")
    return learn(command, Path(found.origin).resolve(), "embedded", settings)
