"""Remove an installed engine: out of the search's sight first, in one step, and then from the disk."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from looprun_models.engine import Engine
from looprun_models.errors import EngineMissing, LooprunError, ServerInUse, UsageError
from looprun_models.hub import OnNote
from looprun_models.records import locked, reap_dead
from looprun_models.search import examine_folder
from looprun_models.settings import Settings
from looprun_models.staging import PREFIX, alone, downloads_dir, engines_home, staged, sync
from looprun_models.wire import Record


def find_folder(name: str, settings: Settings) -> Path:
    """The folder of an installed engine: by its name, with or without the prefix, else by its build.

    Raises EngineMissing when there is none, UsageError when several have that build.
    """
    there = [path for path in sorted(engines_home(settings).glob(f"{PREFIX}*")) if path.is_dir()]
    found = [path for path in there if path.name in (name, PREFIX + name)]
    found = found or [path for path in there if _is_build(path, name)]
    found = found or [path for path in there if name in _builds_in(path, settings)]
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise UsageError(f"{name} is the build of {names}.", hint=f"name one of them: looprun engine rm {names}")
    if not found:
        raise EngineMissing(f"no engine {name} is installed in {engines_home(settings)}.", hint="looprun engine list")
    if not _builds_in(found[0], settings):
        raise UsageError(f"{found[0]} holds no engine and is left alone.", hint="remove it yourself")
    return found[0]


def bytes_in(folder: Path) -> int:
    """What its removal frees: nothing for a link to a folder."""
    if folder.is_symlink():
        return 0
    return sum(path.lstat().st_size for path in folder.rglob("*"))


def check_unused(folder: Path, running: Iterable[Record]) -> None:
    """Raises ServerInUse while one of these servers runs from the folder."""
    real = folder.resolve()
    for record in running:
        if Path(record.engine).resolve().is_relative_to(real):
            raise ServerInUse(
                f"{folder} is in use: the server of {record.alias} (pid {record.child_pid}) runs from it.",
                hint=f"looprun models stop {record.alias}",
            )


def remove_engine(folder: Path, settings: Settings, on_note: OnNote | None = None) -> int:
    """Delete an engine's folder; returns the bytes that became free. Raises ServerInUse, LooprunError."""
    home = engines_home(settings)
    freed = bytes_in(folder)
    try:
        with alone(home, on_note or (lambda _: None)), staged(home) as staging:
            with locked(settings):  # no server of ours can start from it meanwhile
                check_unused(folder, reap_dead(settings))
                folder.rename(staging / "old")  # out of the search's sight in one step
            sync(home)
    except OSError as error:
        why = f"{folder} could not be removed: {error.strerror}."
        raise LooprunError(why, hint="see who owns it, or uses it") from error
    return freed


def bytes_fetched(name: str, settings: Settings) -> int:
    """What interrupted installs of a build have left in the cache."""
    return sum(_blocks(path) for path in _fetched(name, settings))


def drop_fetched(name: str, settings: Settings) -> None:
    """Remove that, once no install is running."""
    with alone(engines_home(settings), lambda _: None):
        for path in _fetched(name, settings):
            path.unlink(missing_ok=True)


def _fetched(name: str, settings: Settings) -> list[Path]:
    named = re.fullmatch(r"b?(\d+)(-\w+)?", name, re.ASCII)
    return list(downloads_dir(settings).glob(f"llama-b{named[1]}-*")) if named else []


def _is_build(folder: Path, name: str) -> bool:
    return folder.name.removeprefix(PREFIX).removeprefix("b").split("-")[0] == name.removeprefix("b")


def _builds_in(folder: Path, settings: Settings) -> set[str]:
    """The builds of the programs in a folder, as they may be named; of a broken one its path; nothing without any."""
    found: set[str] = set()
    for verdict in examine_folder(folder, settings):
        if isinstance(verdict, Engine):
            found |= {f"b{verdict.build}", str(verdict.build)}
        elif verdict.path != str(folder):
            found.add(verdict.path)
    return found


def _blocks(path: Path) -> int:
    """Bytes on the disk: an unfinished file has holes."""
    stat = path.lstat()
    return min(stat.st_size, getattr(stat, "st_blocks", stat.st_size) * 512)
