"""Where engines are installed and removed: the home's `llamacpp-*` folders, and the staging folder beside them.

No search looks into `~/.looprun-engine-*`: a folder moves between there and its name by one rename, so that a kill at
any moment leaves whole engines only. One install or removal runs at a time; what a killed one left, the next removes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from looprun_models.engine import Engine, Skipped
from looprun_models.errors import FolderUnwritable
from looprun_models.hub import OnNote
from looprun_models.journal import held
from looprun_models.search import examine_folder
from looprun_models.settings import Settings

PREFIX = "llamacpp-"
"""How the folders begin that the search looks into."""
STAGING, LOCK = ".looprun-engine-", ".looprun-engine.lock"
MARKER = ".looprun-install.json"
"""In an engine's folder: that it was installed from here, and from which file."""


def engines_home(settings: Settings) -> Path:
    """Raises FolderUnwritable."""
    if settings.home is None:
        raise FolderUnwritable(Path("~"), "HOME", "there is no home folder")
    if not settings.home.is_dir():
        raise FolderUnwritable(settings.home, "HOME", "there is no such folder")
    if not os.access(settings.home, os.W_OK | os.X_OK):
        raise FolderUnwritable(settings.home, "HOME", os.strerror(errno.EACCES))
    return settings.home


def is_ours(folder: Path) -> bool:
    """Whether `install` put it there."""
    return (folder / MARKER).is_file()


def downloads_dir(settings: Settings) -> Path:
    return settings.cache_dir / "downloads"


def first_engine(folder: Path, settings: Settings) -> Engine | Skipped:
    """What a search would take from a folder, or why it would take nothing."""
    verdicts = list(examine_folder(folder, settings))
    return next((verdict for verdict in verdicts if isinstance(verdict, Engine)), verdicts[0])


@contextmanager
def alone(home: Path, note: OnNote) -> Iterator[None]:
    """Hold the lock of a home's engines, and clear away what a killed holder left."""

    def wait(first: bool) -> None:
        if first:
            note("another install or removal of an engine is running; waiting for it.")

    with held(home / LOCK, wait):
        for left in home.glob(f"{STAGING}*"):  # its owner has no lock any more: it was killed
            shutil.rmtree(left, ignore_errors=True)
        yield


@contextmanager
def staged(home: Path) -> Iterator[Path]:
    """A folder for its owner only, on the file system of the engines, that goes with the block."""
    folder = Path(tempfile.mkdtemp(prefix=STAGING, dir=home))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sync(folder: Path) -> None:
    """Make the names in a folder last; some systems cannot."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
