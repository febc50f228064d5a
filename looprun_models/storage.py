"""What the weights take on the disk, and giving it back: `account` adds up, `remove` deletes what is ours to delete.

Ours is what lies in a profile's own folder, and what a variable names if we fetched it (its receipt lies beside it).
An adopted file is never removed: its profile only stops using it.
"""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from looprun_models import journal
from looprun_models.errors import LooprunError, ServerInUse, UsageError
from looprun_models.paths import drop_path, read_paths
from looprun_models.receipts import kept_receipt_path, read_receipt, receipt_path
from looprun_models.records import list_servers, locked, reap_dead
from looprun_models.registry import LocalModelSpec, load_profiles
from looprun_models.settings import Settings
from looprun_models.weights import ADOPTED, Weights, inspect_weights, shard_paths, weights_path
from looprun_models.wire import Record


@dataclass(frozen=True, slots=True)
class Share:
    """What one profile takes, in bytes. shared_with: profiles that use the same file. frees: what `rm` would free.

    kept_by: why `rm` leaves the weights alone, "" when it removes them.
    """

    alias: str
    path: Path
    origin: str
    state: str
    weights: int
    partials: int
    logs: int
    shared_with: tuple[str, ...]
    frees: int
    kept_by: str


@dataclass(frozen=True, slots=True)
class Account:
    """All of it. weights and partials count a shared file once; slot_states are of all profiles together."""

    profiles: tuple[Share, ...]
    weights: int
    partials: int
    logs: int
    slot_states: int


def account(settings: Settings) -> Account:
    """Add up what is there. Looks only."""
    specs = list(load_profiles(settings).values())
    shares = tuple(_share(spec, settings, specs) for spec in specs)
    whole = {path.resolve() for share in shares for path in shard_paths(share.path)}
    parts = {part for spec in specs for part in partials_of(spec, settings)}
    logs = settings.logs_dir.glob("*.log")
    return Account(shares, _bytes(whole), bytes_of(parts), _bytes(logs), _folder_bytes(settings.slots_dir))


def sharers(spec: LocalModelSpec, settings: Settings) -> tuple[str, ...]:
    """The other profiles whose weights are the very file of this one."""
    return _sharers(spec, settings, load_profiles(settings).values())


def partials_of(spec: LocalModelSpec, settings: Settings) -> list[Path]:
    """The files of a download of this profile that has not ended."""
    return [part for target in _targets(spec, settings) for part in journal.part_files(target)]


def bytes_of(partials: Iterable[Path]) -> int:
    """What partial downloads take on the disk: their files have holes, and more length than bytes."""
    stats = [path.stat() for path in partials if path.is_file()]
    return sum(min(stat.st_size, getattr(stat, "st_blocks", stat.st_size) * 512) for stat in stats)


def kept_by(spec: LocalModelSpec, found: Weights) -> str:
    """Why the file is not removed, "" when it is ours to remove."""
    if found.origin == ADOPTED:
        return "adopted: it belongs to another tool"
    if found.origin != "profile" and read_receipt(found.path) is None:
        return f"{spec.env_var} names it, and it was not fetched by looprun"
    return ""


def check_removable(spec: LocalModelSpec, settings: Settings) -> None:
    """Raises what `remove` would raise, before anybody is asked."""
    found = inspect_weights(spec, settings)
    if found.origin == ADOPTED:
        return
    why = kept_by(spec, found)
    if why and found.path.exists():
        raise UsageError(
            f"{found.path} is left alone: {why}.", hint=f"remove it yourself, or unset {spec.env_var} to stop using it"
        )
    _refuse_in_use(found, list_servers(settings))


def remove(spec: LocalModelSpec, settings: Settings, *, partial: bool = False) -> int:
    """Delete a profile's weights, or only what an interrupted download left; returns the bytes that became free.

    Raises ServerInUse while a server of ours uses the file, UsageError for a file that is not ours to remove,
    LooprunError for one that the system does not let go.
    """
    if partial:
        return _drop_partials(spec, settings)
    found = inspect_weights(spec, settings)
    if found.origin == ADOPTED:
        _forget(spec, found, settings)
        return _drop_partials(spec, settings)
    check_removable(spec, settings)
    with locked(settings):  # no server of ours can start on it meanwhile
        _refuse_in_use(found, reap_dead(settings))
        freed = _freed(found)
        for path in found.paths:
            _unlink(path)
            _unlink(receipt_path(path))
    return freed + _drop_partials(spec, settings)


def _share(spec: LocalModelSpec, settings: Settings, specs: list[LocalModelSpec]) -> Share:
    found = inspect_weights(spec, settings)
    partials = bytes_of(partials_of(spec, settings))
    kept = kept_by(spec, found) if found.size else ""
    return Share(
        alias=spec.alias,
        path=found.path,
        origin=found.origin,
        state=found.state,
        weights=found.size,
        partials=partials,
        logs=_bytes(settings.logs_dir.glob(f"{spec.alias}-[0-9]*.log")),
        shared_with=_sharers(spec, settings, specs),
        frees=partials + (0 if kept else _freed(found)),
        kept_by=kept,
    )


def _sharers(spec: LocalModelSpec, settings: Settings, specs: Iterable[LocalModelSpec]) -> tuple[str, ...]:
    def real(of: LocalModelSpec) -> Path:
        return weights_path(of, settings)[0].resolve()

    return tuple(other.alias for other in specs if other.alias != spec.alias and real(other) == real(spec))


def _targets(spec: LocalModelSpec, settings: Settings) -> tuple[Path, ...]:
    """Where a pull of this profile writes; never among an adopted file's neighbours."""
    path, origin = weights_path(spec, settings)
    return shard_paths(spec.default_path(settings) if origin == ADOPTED else path)


def _drop_partials(spec: LocalModelSpec, settings: Settings) -> int:
    freed = bytes_of(partials_of(spec, settings))
    for target in _targets(spec, settings):
        if not journal.drop(target):
            raise ServerInUse(f"{target.name} is being pulled right now.", hint="stop that pull first (Ctrl-C there)")
    return freed - bytes_of(partials_of(spec, settings))


def _forget(spec: LocalModelSpec, found: Weights, settings: Settings) -> None:
    for name in (spec.alias, *spec.short):
        drop_path(settings, name)
    if found.path not in read_paths(settings).values():
        for path in found.paths:
            _unlink(kept_receipt_path(path, settings))


def _refuse_in_use(found: Weights, running: Iterable[Record]) -> None:
    ours = {path.resolve() for path in found.paths}
    for record in running:
        if Path(record.model_path).resolve() in ours:
            raise ServerInUse(
                f"{found.path} is in use: the server of {record.alias} (pid {record.child_pid}) runs on it.",
                hint=f"looprun models stop {record.alias}",
            )


def _freed(found: Weights) -> int:
    """Bytes that go with the last name of a file: none where it is a link, or has another name elsewhere."""
    files = [path.lstat() for path in found.paths if path.is_file() and not path.is_symlink()]
    return sum(stat.st_size for stat in files if stat.st_nlink == 1)


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        why = f"{path} could not be removed: {error.strerror}."
        raise LooprunError(why, hint="see who owns it, or uses it") from error


def _bytes(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file())


def _folder_bytes(folder: Path) -> int:
    """Of the files in it: a link counts nothing, nor does one that goes meanwhile to make room for another."""
    total = 0
    for path in folder.glob("*") if folder.is_dir() else ():
        with contextlib.suppress(OSError):
            seen = path.lstat()
            total += seen.st_size if stat.S_ISREG(seen.st_mode) else 0
    return total
