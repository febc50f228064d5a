"""Unpack an archive whose content is not trusted: nothing is written outside the folder, and no more than was expected.

Each entry is judged by its name before anything is written for it; no entry is written through a link.
"""

from __future__ import annotations

import gzip
import os
import posixpath
import re
import stat
import tarfile
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO

from looprun_models.errors import InstallFailed
from looprun_models.progress import OnProgress, Progress

MOST_BYTES = 8 * 2**30
MOST_ENTRIES = 20_000
BLOCK = 1 << 20
FOLDER, FILE, LINK, TWIN, OTHER = "folder", "file", "link", "hard link", "device"
_FORBIDDEN = re.compile(r'[\x00-\x1f<>:"|?*\\]|[. ]$')
"""In a part of a name: what some system takes for something else than a name."""
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)
_DAMAGED = (
    tarfile.TarError,
    zipfile.BadZipFile,
    gzip.BadGzipFile,
    zlib.error,
    EOFError,
    NotImplementedError,
    ValueError,
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of an archive: what it claims to be. to: where a link leads."""

    name: str
    kind: str
    mode: int
    to: str = ""


class _Refused(Exception):
    """Why an entry is not unpacked."""


def unpack(
    archive: Path,
    folder: Path,
    on_progress: OnProgress | None = None,
    *,
    most_bytes: int = MOST_BYTES,
    most_entries: int = MOST_ENTRIES,
) -> None:
    """Unpack a .tar.gz or .zip into a new folder; links that stay inside and the right to be run are kept.

    on_progress hears "unpacking", in bytes of the archive. Raises InstallFailed naming the entry that is not as it
    should be, and OSError; what had been unpacked is left to the caller, who gives the folder up.
    """
    folder.mkdir(mode=0o700)
    writer, size = _Writer(folder, most_bytes), archive.stat().st_size
    name = ""
    try:
        with archive.open("rb") as file:
            entries = _zip_entries if file.read(2) == b"PK" else _tar_entries
            file.seek(0)
            for number, (entry, open_content) in enumerate(entries(file, most_bytes)):
                name = entry.name
                if number >= most_entries:
                    raise _Refused(f"is one too many: more than {most_entries:,}")
                writer.write(entry, open_content)
                if on_progress:
                    on_progress(Progress("unpacking", min(file.tell(), size), size))
        name = writer.first_escape() or ""
        if name:
            raise _Refused("is a link that leads outside")
    except _Refused as refused:
        raise InstallFailed(
            f"{archive.name} was not unpacked: its entry {name!r} {refused}.",
            hint="do not use this archive; if it came from a mirror, unset LOOPRUN_ENGINE_INDEX",
        ) from None
    except _DAMAGED as error:
        where = f" after {name!r}" if name else ""
        said = str(error) or type(error).__name__
        raise InstallFailed(
            f"{archive.name} is cut short or damaged{where}: {said}.", hint="install it again, which fetches it anew"
        ) from error


class _Writer:
    """Writes entries into a folder, and knows what it has written."""

    def __init__(self, root: Path, most_bytes: int) -> None:
        self._root, self._left, self._most = root, most_bytes, most_bytes
        self._known: dict[str, tuple[str, str]] = {}
        """Folded name -> the name as it was spelt, and its kind."""
        self._links: list[str] = []

    def write(self, entry: Entry, open_content: Callable[[], IO[bytes]]) -> None:
        parts = _parts(entry.name)
        if not parts and entry.kind == FOLDER:
            return
        if not parts:
            raise _Refused("has no name")
        for depth in range(1, len(parts)):
            self._folder("/".join(parts[:depth]))
        name = "/".join(parts)
        if entry.kind == FOLDER:
            self._folder(name)
            return
        if entry.kind == FILE:
            if entry.mode & (stat.S_ISUID | stat.S_ISGID):
                raise _Refused("would run with the rights of another user (setuid)")
            self._register(name, FILE)
            self._file(self._root / name, open_content, 0o755 if entry.mode & 0o111 else 0o644)
        elif entry.kind == LINK:
            self._register(name, LINK)
            self._link(parts, entry.to)
        elif entry.kind == TWIN:
            self._register(name, FILE)
            self._twin(name, entry.to)
        else:
            raise _Refused("is no file, folder or link, but a device or a pipe")

    def first_escape(self) -> str | None:
        """A link that, through other links, ends outside: names alone do not show that."""
        root = self._root.resolve()
        for name in self._links:
            try:
                inside = (self._root / name).resolve().is_relative_to(root)
            except (OSError, RuntimeError):  # a circle of links leads nowhere
                inside = True
            if not inside:
                return name
        return None

    def _folder(self, name: str) -> None:
        known = self._known.get(_folded(name))
        if known and known != (name, FOLDER):
            raise _Refused(f"clashes with {known[0]!r}, which is a {known[1]}")
        if not known:
            self._register(name, FOLDER)
            (self._root / name).mkdir(mode=0o755)

    def _register(self, name: str, kind: str) -> None:
        known = self._known.get(_folded(name))
        if known:
            raise _Refused(f"clashes with {known[0]!r}: on some systems the two are one file")
        self._known[_folded(name)] = (name, kind)

    def _file(self, path: Path, open_content: Callable[[], IO[bytes]], mode: int) -> None:
        with path.open("xb") as file, open_content() as content:
            while block := content.read(BLOCK):
                self._left -= len(block)
                if self._left < 0:
                    raise _Refused(f"is too much: more than {self._most:,} bytes in all")
                file.write(block)
            file.flush()
            os.fsync(
                file.fileno()
            )  # the folder is renamed soon: its name must not outlive a power cut that this does not
        path.chmod(mode)

    def _link(self, parts: list[str], to: str) -> None:
        outside = posixpath.normpath(posixpath.join(*parts[:-1], to)).split("/")[0] == ".."
        if not to or to.startswith("/") or outside or any(map(_FORBIDDEN.search, _words(to))):
            raise _Refused(f"is a link that leads outside (to {to!r})")
        self._links.append("/".join(parts))
        (self._root / self._links[-1]).symlink_to(to)

    def _twin(self, name: str, to: str) -> None:
        of = "/".join(_parts(to))
        if self._known.get(_folded(of)) != (of, FILE):
            raise _Refused(f"is a hard link to {to!r}, which is no file of the archive before it")
        os.link(self._root / of, self._root / name, follow_symlinks=False)


def _parts(name: str) -> list[str]:
    if name.startswith("/"):
        raise _Refused("has an absolute name")
    parts = [part for part in name.rstrip("/").split("/") if part not in ("", ".")]
    if ".." in parts:
        raise _Refused("has a name that leads outside")
    if any(_FORBIDDEN.search(part) or _RESERVED.fullmatch(part) for part in parts):
        raise _Refused("has a name that is none on every system")
    return parts


def _words(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".", "..")]


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()


Entries = Iterator[tuple[Entry, Callable[[], IO[bytes]]]]


def _tar_entries(file: BinaryIO, most_bytes: int) -> Entries:
    with gzip.open(file) as plain, tarfile.open(fileobj=plain, mode="r|") as archive:
        for member in archive:
            kind = OTHER
            for is_it, what in (("isreg", FILE), ("isdir", FOLDER), ("issym", LINK), ("islnk", TWIN)):
                if getattr(member, is_it)():
                    kind = what

            def content(member: tarfile.TarInfo = member) -> IO[bytes]:
                found = archive.extractfile(member)
                assert found is not None, "a regular file has content"
                return found

            yield Entry(member.name, kind, member.mode, member.linkname), content
        rest = most_bytes
        while rest > 0 and (block := plain.read(BLOCK)):  # to its end, where the checksum is
            rest -= len(block)


def _zip_entries(file: BinaryIO, most_bytes: int) -> Entries:
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            mode = info.external_attr >> 16
            if info.flag_bits & 1:
                raise zipfile.BadZipFile(f"{info.filename!r} is encrypted")
            kinds = {0: FILE, stat.S_IFREG: FILE, stat.S_IFDIR: FOLDER, stat.S_IFLNK: LINK}
            kind = FOLDER if info.is_dir() else kinds.get(stat.S_IFMT(mode), OTHER)
            to = ""
            if kind == LINK:
                with archive.open(info) as target:
                    to = target.read(4096).decode("utf-8")
            yield Entry(info.orig_filename, kind, mode, to), lambda info=info: archive.open(info)  # type: ignore[misc]
