"""Install an official engine beside those that are there: fetched, unpacked and proved before it gets its name."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from looprun_models.download import DISK_MARGIN, Words, fetch
from looprun_models.engine import EMBEDDED, Engine, Skipped
from looprun_models.errors import (
    DownloadFailed,
    FolderUnwritable,
    InstallFailed,
    LooprunError,
    NotEnoughDisk,
)
from looprun_models.hub import OnNote
from looprun_models.progress import OnProgress
from looprun_models.receipts import receipt_path, write_whole
from looprun_models.releases import Asset, Release, find_build, find_latest, parse_wanted
from looprun_models.settings import Settings, private_dir
from looprun_models.staging import (
    MARKER,
    PREFIX,
    alone,
    downloads_dir,
    engines_home,
    first_engine,
    is_ours,
    staged,
    sync,
)
from looprun_models.unpack import unpack
from looprun_models.variants import PLAIN, choose_variant, find_drivers, system_root, this_platform

UNPACKED = 4
"""An engine takes about three times the bytes of its archive."""


class Proof(Protocol):
    """Whether an engine serves; ok is None where that could not be decided."""

    @property
    def ok(self) -> bool | None: ...

    @property
    def why(self) -> str: ...


Prove = Callable[[Engine], Proof]


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be installed. The first asset has the engine, the others belong beside it.

    reason says why this variant; asked: because it was asked for. replaces says what is wrong with what has the name
    now, "" without anything.
    """

    release: Release
    assets: tuple[Asset, ...]
    variant: str
    asked: bool
    reason: str
    target: Path
    replaces: str = ""

    @property
    def size(self) -> int:
        return sum(asset.size for asset in self.assets)

    @property
    def command(self) -> str:
        asked = f" --variant {self.variant}" if self.asked else ""
        return f"looprun engine install {self.release.tag}{asked}"


@dataclass(frozen=True, slots=True)
class Installed:
    """An engine in its place. proof: None when it was there before."""

    engine: Engine
    proof: Proof | None


def place_order(
    wanted: str,
    settings: Settings,
    prove: Prove,
    *,
    variant: str | None = None,
    allow_unverified: bool = False,
    on_note: OnNote | None = None,
) -> Order | Engine:
    """Ask the index what there is, and fetch nothing. An Engine: it is installed already, and serves.

    wanted is a tag or "latest". Raises UsageError, EngineMissing, DownloadFailed, BadSetting, and what stands in the
    way of the install itself: FolderUnwritable, NotEnoughDisk.
    """
    build = parse_wanted(wanted)
    home = engines_home(settings)
    here = this_platform()
    drivers = find_drivers(here, settings, system_root(settings))
    asked, (variant, reason) = variant is not None, choose_variant(here, drivers, variant)
    if build is None:
        release, assets = find_latest(here, variant, settings, on_note or (lambda _: None))
    elif isinstance(stands := standing_engine(build, variant, settings, prove), Engine):
        return stands  # the index need not be asked
    else:
        release, assets = find_build(build, here, variant, settings)
    stands = standing_engine(release.build, variant, settings, prove)
    if isinstance(stands, Engine):
        return stands
    target = home / folder_name(release.build, variant)
    order = Order(release, assets, variant, asked, reason, target, stands)
    for asset in assets:
        if asset.sha256 is None and not allow_unverified:
            raise DownloadFailed(
                f"the release index gives no sha256 for {asset.name}, so nothing would show whether it is right.",
                hint=f"another build, or: {order.command} --allow-unverified",
            )
    _check_room(order, settings)
    return order


def folder_name(build: int, variant: str) -> str:
    """ "llamacpp-b11434" for the ordinary build of a platform, with the variant behind it for the others.

    >>> folder_name(11434, "cpu"), folder_name(11434, "vulkan")
    ('llamacpp-b11434', 'llamacpp-b11434-vulkan')
    """
    return f"{PREFIX}b{build}" + ("" if variant in PLAIN else f"-{variant}")


def standing_engine(build: int, variant: str, settings: Settings, prove: Prove) -> Engine | str:
    """The engine that has the name of a build, if it is one and serves; else why not, "" when nothing has the name."""
    folder = engines_home(settings) / folder_name(build, variant)
    if not os.path.lexists(folder):
        return ""
    if not folder.is_dir():
        return "it is no folder" if folder.exists() else "it is a link to nothing"
    found = first_engine(folder, settings)
    if isinstance(found, Skipped):
        return found.why
    if found.build not in (None, build):
        return f"the engine in it says that it is b{found.build}"
    proof = prove(found)
    return proof.why if proof.ok is False else found


def install_engine(
    order: Order,
    settings: Settings,
    prove: Prove,
    *,
    on_progress: OnProgress | None = None,
    on_note: OnNote | None = None,
) -> Installed:
    """Fetch, unpack, prove, and only then give the engine its name. Consent is the caller's business, before it.

    An engine of that name that serves is kept; one that does not is replaced, or moved aside if somebody else put it
    there. Another install is waited for. Raises DownloadFailed, InstallFailed, NotEnoughDisk, FolderUnwritable.
    """
    note = on_note or (lambda _: None)
    home = engines_home(settings)
    with _explained(order, home), alone(home, note):
        stands = standing_engine(order.release.build, order.variant, settings, prove)
        if isinstance(stands, Engine):
            return Installed(stands, None)
        archives = _fetch(order, settings, on_progress, note)
        try:
            with staged(home) as staging:
                content, proof = _prepare(order, archives, staging, settings, prove, on_progress)
                _put(content, order.target, staging, note)
        except (LooprunError, OSError):  # an interrupt leaves them for the next try, as a kill does
            _forget(archives)
            raise
        shutil.rmtree(downloads_dir(settings), ignore_errors=True)  # with what interrupted installs left
    engine = first_engine(order.target, settings)
    if isinstance(engine, Skipped):
        raise InstallFailed(f"{order.target} was changed by another program: {engine.why}.", hint=order.command)
    return Installed(engine, proof)


def _check_room(order: Order, settings: Settings) -> None:
    home = order.target.parent
    need = UNPACKED * order.size + DISK_MARGIN
    cache = next(path for path in (settings.cache_dir, *settings.cache_dir.parents) if path.exists())
    if cache.stat().st_dev == home.stat().st_dev:
        need += order.size
    free = shutil.disk_usage(home).free
    if free < need:
        raise NotEnoughDisk(
            f"{order.release.tag} needs {need / 1e9:.2f} GB for a while, and {home} has {free / 1e9:.2f} GB free.",
            hint=f"free some space there, then `{order.command}`",
        )


def _fetch(order: Order, settings: Settings, on_progress: OnProgress | None, note: OnNote) -> list[Path]:
    private_dir(settings.cache_dir, "LOOPRUN_CACHE_DIR")
    downloads = private_dir(downloads_dir(settings), "LOOPRUN_CACHE_DIR")
    words = Words(
        again=order.command,
        drop=f"looprun engine rm {order.release.tag}",
        elsewhere="set LOOPRUN_CACHE_DIR to a folder on another disk",
    )
    return [
        fetch(
            order.release.remote(asset),
            downloads / asset.name,
            settings,
            words,
            on_progress=on_progress,
            on_note=note,
        )
        for asset in order.assets
    ]


def _prepare(
    order: Order,
    archives: list[Path],
    staging: Path,
    settings: Settings,
    prove: Prove,
    on_progress: OnProgress | None,
) -> tuple[Path, Proof]:
    """The folder that is to be renamed, unpacked and proved."""
    content, *beside = [
        _unpacked(archive, staging / str(number), on_progress) for number, archive in enumerate(archives)
    ]
    for folder in beside:
        for path in folder.iterdir():
            if not os.path.lexists(content / path.name):
                path.rename(content / path.name)
    if os.path.lexists(content / MARKER):
        raise _unfit(order, f"it brings a {MARKER}, which is what looprun marks its own installs with")
    found = first_engine(content, settings)
    if isinstance(found, Skipped):
        raise _unfit(order, found.why.replace(f"{content}{os.sep}", ""))
    if found.build is not None and found.build != order.release.build:
        raise _unfit(order, f"the engine in it says that it is b{found.build}")
    proof = prove(found)
    if not proof.ok:
        raise _unfit(order, proof.why.replace(f"{content}{os.sep}", ""))
    date = datetime.now(UTC).isoformat(timespec="seconds")
    told = {"build": order.release.build, "variant": order.variant, "date": date}
    files = {asset.name: asset.sha256 for asset in order.assets}
    write_whole(content / MARKER, json.dumps({**told, "files": files}, indent=1) + "\n")
    content.chmod(0o755)
    for folder in [content, *(path for path in content.rglob("*") if path.is_dir() and not path.is_symlink())]:
        sync(folder)
    return content, proof


def _unpacked(archive: Path, folder: Path, on_progress: OnProgress | None) -> Path:
    """Without the one folder that archives have around everything."""
    unpack(archive, folder, on_progress)
    inside = list(folder.iterdir())
    return inside[0] if len(inside) == 1 and inside[0].is_dir() and not inside[0].is_symlink() else folder


def _unfit(order: Order, why: str) -> InstallFailed:
    cpu = "" if order.variant in PLAIN else f"{order.command.partition(' --')[0]} --variant cpu, or "
    return InstallFailed(
        f"{order.assets[0].name} was not installed: {why}.",
        hint=f"{cpu}another build, or another engine: {EMBEDDED}",
    )


def _put(content: Path, target: Path, staging: Path, note: OnNote) -> None:
    """Give the proved folder its name; what has it and does not serve goes out of the way first."""
    moved: Path | None = None
    if os.path.lexists(target):
        moved = staging / "old" if is_ours(target) else _free_name(target.with_name(f"was-{target.name}"))
        target.rename(moved)
    try:
        content.rename(target)
    except OSError:
        if moved:
            moved.rename(target)
        raise
    sync(target.parent)
    if moved and moved.parent == target.parent:
        note(f"what was in {target} is in {moved} now: looprun had not put it there.")


def _free_name(path: Path) -> Path:
    tries = (path.with_name(f"{path.name}-{number}") for number in range(2, 1000))
    return path if not os.path.lexists(path) else next(free for free in tries if not os.path.lexists(free))


def _forget(archives: list[Path]) -> None:
    for archive in archives:
        for path in (archive, receipt_path(archive)):
            path.unlink(missing_ok=True)


@contextmanager
def _explained(order: Order, home: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        said = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(home).free / 1e6
            raise NotEnoughDisk(
                f"{home} became full ({free:,.1f} MB are free): {order.release.tag} was not installed.",
                hint=f"free some space there, then `{order.command}`",
            ) from error
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise FolderUnwritable(home, "HOME", said) from error
        what = f" ({error.filename})" if error.filename else ""
        raise InstallFailed(
            f"{order.release.tag} was not installed: {said}{what}.", hint=f"try again: `{order.command}`"
        ) from error
