"""Remove an installed engine: out of the search's sight first, in one step, and then from the disk."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from looprun_models.errors import EngineMissing, LooprunError, ServerInUse, UsageError
from looprun_models.hub import OnNote
from looprun_models.records import locked, reap_dead
from looprun_models.search import examine_folder
from looprun_models.settings import Settings
from looprun_models.staging import PREFIX, alone, downloads_dir, engines_home, is_ours, staged, sync
from looprun_models.wire import Record

_BUILD = r"b?(\d{1,9})(-.+)?"


def find_folder(name: str, settings: Settings) -> Path:
    """The folder of an installed engine: by its whole name, or by the build that its name says if it is one of ours.

    Raises EngineMissing when there is none, UsageError when a build names several, or one that is not ours.
    """
    home = engines_home(settings)
    there = [path for path in sorted(home.glob(f"{PREFIX}*")) if path.is_dir()]
    found = [path for path in there if path.name == name]
    found = found or [path for path in there if _says(path.name, name, variant="")]
    found = found or [path for path in there if _says(path.name, name)]
    if not found:
        raise EngineMissing(f"no engine {name} is installed in {home}.", hint="looprun engine list")
    folder, *others = found
    command = f"looprun engine rm {folder.name}"
    if others:
        either = " or ".join(path.name for path in others)
        raise UsageError(
            f"{name} is the build of {', '.join(path.name for path in found)}.", hint=f"{command}   (or {either})"
        )
    if not is_ours(folder) and not any(verdict.path != str(folder) for verdict in examine_folder(folder, settings)):
        raise UsageError(f"{folder} holds no engine and is left alone.", hint="remove it yourself")
    if not is_ours(folder) and folder.name != name:
        raise UsageError(f"looprun did not put {folder} there, so it goes by its whole name only.", hint=command)
    return folder


def bytes_in(folder: Path) -> int:
    """What its removal frees: nothing for a link to a folder."""
    found = 0
    for place, _, names in () if folder.is_symlink() else os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # another removal may be faster
                found += os.lstat(os.path.join(place, name)).st_size
    return found


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
    """Delete an engine's folder; returns the bytes that became free.

    Raises ServerInUse, LooprunError, EngineMissing when it is gone already.
    """
    home = engines_home(settings)
    try:
        with alone(home, on_note or (lambda _: None)), staged(home) as staging:
            freed = bytes_in(folder)
            with locked(settings):  # no server of ours can start from it meanwhile
                check_unused(folder, reap_dead(settings))
                folder.rename(staging / "old")  # out of the search's sight in one step
            sync(home)
    except OSError as error:
        if not os.path.lexists(folder):
            raise EngineMissing(
                f"{folder} is gone already: something else removed it.", hint="looprun engine list"
            ) from None
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
    named = re.fullmatch(_BUILD, name, re.ASCII | re.IGNORECASE)
    return list(downloads_dir(settings).glob(f"llama-b{named[1]}-*")) if named else []


def _says(folder: str, name: str, *, variant: str | None = None) -> bool:
    """Whether a folder's name says the build that was named. variant: "" for a folder without one, None for any."""
    has, wanted = (re.fullmatch(_BUILD, text, re.ASCII | re.IGNORECASE) for text in (folder.removeprefix(PREFIX), name))
    if not has or not wanted or int(has[1]) != int(wanted[1]):
        return False
    return (has[2] or "") == wanted[2] if wanted[2] else variant is None or not has[2]


def _blocks(path: Path) -> int:
    """Bytes on the disk: an unfinished file has holes."""
    stat = path.lstat()
    return min(stat.st_size, getattr(stat, "st_blocks", stat.st_size) * 512)
