"""Where engines are looked for, in which order, and why each candidate before the one that is used will not do.

To look in another place, add it to `search_engines`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from looprun_models.engine import EMBEDDED, FLOOR, Engine, Skipped, learn
from looprun_models.errors import EngineMissing
from looprun_models.settings import Settings

PROGRAM = "llama-server.exe" if os.name == "nt" else "llama-server"
INSTALL_HINT = f"{EMBEDDED}   (or set LLAMA_BIN to a llama-server of build b{FLOOR} or later)"


def find_engine(settings: Settings) -> Engine:
    """The first usable engine in the search order. Raises EngineMissing with the reason for every candidate.

    LLAMA_BIN, when set, is the only candidate: a broken one is an error, never a silent fallback.
    """
    skipped: list[Skipped] = []
    for verdict in search_engines(settings):
        if isinstance(verdict, Engine):
            return verdict
        skipped.append(verdict)
    if settings.llama_bin is not None:
        why = skipped[0]
        raise EngineMissing(
            f"LLAMA_BIN={settings.llama_bin} cannot be used: {why.why}.",
            hint="point LLAMA_BIN at a llama-server, or unset it",
        )
    raise EngineMissing("no usable llama-server was found.", hint=INSTALL_HINT, skipped=map(str, skipped))


def search_engines(settings: Settings) -> Iterator[Engine | Skipped]:
    """The verdict on each candidate, in search order, each probed only when it is asked for."""
    if settings.llama_bin is not None:
        yield examine(settings.expand(settings.llama_bin), "LLAMA_BIN", settings)
        return
    for folder in _install_folders(settings):
        yield from _examine_folder(folder, settings)
    on_path = shutil.which("llama-server", path=settings.environ.get("PATH"))
    if on_path:
        yield examine(Path(on_path), "PATH", settings)
    else:
        yield Skipped("llama-server", "PATH", "not found there")
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
        inside = next((p for p in _programs_in(path) if p.is_file()), None)
        return skip("a folder, not a program" + (f" (did you mean {inside}?)" if inside else ""))
    if not os.access(path, os.X_OK):
        return skip(f"not executable (chmod +x {path})")
    real = path.resolve()
    return learn((str(real),), real, source, settings)


def _install_folders(settings: Settings) -> list[Path]:
    """`~/llamacpp-*/`, highest build first; a folder whose name proves none is asked through its program."""
    if settings.home is None:
        return []

    def build(folder: Path) -> int:
        named = re.search(r"(?<!\d)(\d{4,6})(?!\d)", folder.name)
        if named:
            return int(named[1])
        verdicts = (verdict for verdict in _examine_folder(folder, settings) if isinstance(verdict, Engine))
        return next((verdict.build or 0 for verdict in verdicts), 0)

    with contextlib.suppress(OSError):
        return sorted((p for p in settings.home.glob("llamacpp-*") if p.is_dir()), key=build, reverse=True)
    return []


def _examine_folder(folder: Path, settings: Settings) -> Iterator[Engine | Skipped]:
    source = f"~/{folder.name}"
    programs = [program for program in _programs_in(folder) if program.is_symlink() or program.exists()]
    if not programs:
        yield Skipped(str(folder), source, f"no {PROGRAM} in it, its bin/ or its build/bin/")
    for program in programs:
        yield examine(program, source, settings)


def _programs_in(folder: Path) -> list[Path]:
    return [folder / "bin" / PROGRAM, folder / "build" / "bin" / PROGRAM, folder / PROGRAM]


def _examine_embedded(settings: Settings) -> Engine | Skipped:
    found = importlib.util.find_spec("xllamacpp")
    if found is None or found.origin is None:
        return Skipped("looprun_models.embedded", "embedded", 'not installed (pip install "looprun-models[embedded]")')
    command = (sys.executable, "-P", "-m", "looprun_models.embedded")
    wrapper = Path(__file__).with_name("embedded.py")
    return learn(command, Path(found.origin).resolve(), "embedded", settings, wrapper)
