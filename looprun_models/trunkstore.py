"""The states of trunks on the disk: whole and verified, or not used; within a budget, the least recently used go first.

The engine writes and reads the states itself, by bare file name in its slot folder. There a trunk with key K is
`K.trunk` (the state) with `K.json` beside it: what it is, its size and its sha256.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import time
from dataclasses import replace
from pathlib import Path

from looprun_models.trunkentry import Entry, NotSaved, Proof, TrunkMeta, decoded, encoded
from looprun_models.trunkfiles import (
    KEPT,
    KEY,
    TEMPORARY,
    abandoned,
    clear_way,
    create_private,
    discard,
    locked,
    names_in,
    open_regular,
    read_json,
    sha256_of,
    size_of,
    stamp,
    temporary_name,
    why_unwritten,
    write_private,
)

DEFAULT_BUDGET = 8 << 30
"""Bytes, or a tenth of the free disk where that is less; LOOPRUN_TRUNK_BUDGET says otherwise."""


class _Damaged(Exception):
    """A state is not what was saved."""


class TrunkStore:
    """The trunks in one slot folder. budget: bytes of all of them, None for the default; 0 keeps nothing.

    Only `commit` raises for a problem of the disk (NotSaved): elsewhere what cannot be read is not there, and what
    cannot be written stays as it was. Any number of processes and threads may use one folder.
    """

    def __init__(self, folder: Path, budget: int | None = None) -> None:
        self.folder, self.budget = folder, budget

    # --- saving ---

    def reserve(self, key: str) -> str:
        """A bare file name of this call alone, for the engine to save under; then `commit` or `discard` it.

        The file is made, empty and private, because the engine would make it readable to all.
        """
        if not KEY.fullmatch(key):
            raise ValueError(f"not a sha256 in hex: {key!r}")
        name = temporary_name(key)
        with contextlib.suppress(OSError):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            create_private(self.folder / name)
        return name

    def discard(self, temporary: str) -> None:
        """Remove what was saved under a reserved name, if anything was."""
        if TEMPORARY.fullmatch(temporary):
            discard(self.folder / temporary)

    def commit(self, temporary: str, meta: TrunkMeta, n_written: int) -> Entry:
        """Take what the engine saved under a reserved name into the store, and make room for it.

        n_written: bytes that the engine says it wrote, 0 when it could not. A trunk under the same key is replaced; one
        with the same label and another key stays until it is the least recently used. Raises NotSaved; the temporary
        is gone either way. Whenever this process is killed, the store has the old trunk, the new one, or none.
        """
        named = TEMPORARY.fullmatch(temporary)
        if named is None or named["key"] != meta.key:
            raise ValueError(f"{temporary!r} was not reserved for {meta.key}")
        part = self.folder / temporary
        try:
            size, sha256 = self._received(part, n_written)
            now = time.time()
            entry = Entry(meta, size, sha256, created=now, last_used=now)
            self._check_budget(size + len(encoded(entry)))
            with locked(self.folder):
                self._publish(part, entry)
                self._sweep()
                self._evict(keep=meta.key)
        except OSError as error:
            raise NotSaved(why_unwritten(self.folder, error)) from error
        finally:
            discard(part)
        return entry

    def limit(self) -> int:
        """Bytes that the trunks may take now."""
        if self.budget is not None:
            return self.budget
        try:
            free = shutil.disk_usage(self.folder).free
        except OSError:
            return DEFAULT_BUDGET
        return min(DEFAULT_BUDGET, (free + self.total()) // 10)

    # --- using ---

    def find(self, key: str) -> Entry | None:
        """The trunk of this key, by its size, not by its bytes: `check` it right before a restore."""
        return self._judge(key, every_byte=False)[0]

    def check(self, key: str) -> tuple[Entry | None, str]:
        """The trunk of this key with every byte as it was saved; else None and what is wrong, "" if there is none.

        A damaged one is removed; nothing is said of one that stays nevertheless, since it is in the way of the next
        save, and said then. About 0.6 s per GB where the processor has SHA instructions.
        """
        return self._judge(key, every_byte=True)

    def touch(self, key: str) -> None:
        """It was used."""
        if KEY.fullmatch(key):
            with contextlib.suppress(OSError):
                stamp(self._sidecar(key))

    def proved(self, key: str, reused: int, tokens: int) -> None:
        """It was used, and `reused` of its `tokens` did not have to be read again."""
        with locked(self.folder) as held:
            entry = self._judge_now(key) if held else None
            if entry is not None:
                with contextlib.suppress(OSError):
                    told = encoded(replace(entry, proof=Proof(reused, tokens, time.time())))
                    write_private(self._sidecar(key), told, key)

    # --- looking and clearing ---

    def entries(self) -> list[Entry]:
        """All of them, the last used first."""
        keys = {match["key"] for match in map(KEPT.fullmatch, names_in(self.folder)) if match}
        found = [entry for entry in map(self._judge_now, keys) if entry]
        return sorted(found, key=lambda entry: entry.last_used, reverse=True)

    def superseded(self) -> list[Entry]:
        """Those that were not used since a newer one of their line was baked."""
        newest: dict[tuple[str, ...], float] = {}
        entries = self.entries()
        for entry in entries:
            newest[line_of(entry)] = max(newest.get(line_of(entry), 0.0), entry.created)
        return [entry for entry in entries if max(entry.created, entry.last_used) < newest[line_of(entry)]]

    def drop(self, key: str) -> int:
        """Remove a trunk; the bytes that became free."""
        if not KEY.fullmatch(key):
            return 0
        with locked(self.folder):
            return self._remove(key)

    def sweep(self) -> int:
        """Remove what killed processes left: temporaries, and halves of trunks. The bytes that became free."""
        with locked(self.folder):
            return self._sweep()

    def total(self) -> int:
        """Bytes of all that is ours, temporaries included."""
        ours = [name for name in names_in(self.folder) if KEPT.fullmatch(name) or TEMPORARY.fullmatch(name)]
        return sum(size_of(self.folder / name) for name in ours)

    def exposed(self) -> str:
        """A warning when other users can enter the folder, which holds prompts; "" when they cannot."""
        try:
            status = self.folder.stat()
        except OSError:
            return ""
        mode = stat.S_IMODE(status.st_mode)
        if os.name == "nt" or not stat.S_ISDIR(status.st_mode) or not mode & 0o077:
            return ""
        return f"other users can look into {self.folder} (mode {mode:o}), where prompts are kept: chmod 700 it"

    # --- inside ---

    def _state(self, key: str) -> Path:
        return self.folder / f"{key}.trunk"

    def _sidecar(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def _received(self, part: Path, n_written: int) -> tuple[int, str]:
        if n_written <= 0:
            raise NotSaved(why_unwritten(self.folder))
        with open_regular(part, os.O_RDWR) as file:
            size = os.fstat(file.fileno()).st_size
            if size != n_written:
                raise NotSaved(f"the engine says that it wrote {n_written} bytes, and there are {size}")
            sha256 = sha256_of(file)
            os.fsync(file.fileno())
        with contextlib.suppress(OSError):  # a file system without modes
            part.chmod(0o600)
        return size, sha256

    def _check_budget(self, size: int) -> None:
        limit = self.limit()
        if size <= limit:
            return
        if self.budget == 0:
            raise NotSaved("LOOPRUN_TRUNK_BUDGET is 0: nothing is kept")
        why = f"its {_in_words(size)} are more than the {_in_words(limit)} that all trunks may take"
        if self.budget is not None:
            raise NotSaved(f"{why} (LOOPRUN_TRUNK_BUDGET)")
        share = "by default" if limit == DEFAULT_BUDGET else f"a tenth of what is free on the disk of {self.folder}"
        raise NotSaved(f"{why}: {share}")

    def _publish(self, part: Path, entry: Entry) -> None:
        """No moment has a state beside the sidecar of another: the old state goes first, the new one comes last."""
        for path in (self._state(entry.key), self._sidecar(entry.key)):
            if in_the_way := clear_way(path):
                raise NotSaved(in_the_way)
        sidecar = self.folder / temporary_name(entry.key)
        create_private(sidecar, encoded(entry))
        try:
            self._state(entry.key).unlink(missing_ok=True)
            sidecar.replace(self._sidecar(entry.key))
            part.replace(self._state(entry.key))
        finally:
            discard(sidecar)

    def _judge(self, key: str, *, every_byte: bool, settled: bool = False) -> tuple[Entry | None, str]:
        """The entry, or why not. What looks damaged is looked at again under the lock, and removed if it still does."""
        try:
            return self._read(key, every_byte=every_byte), ""
        except OSError as error:
            return None, f"it cannot be read: {error.strerror}"
        except _Damaged as damage:
            if settled:
                self._remove(key)
                stays = os.path.lexists(self._state(key)) or os.path.lexists(self._sidecar(key))
                return None, "" if stays else str(damage)
        with locked(self.folder):
            return self._judge(key, every_byte=every_byte, settled=True)

    def _judge_now(self, key: str) -> Entry | None:
        with contextlib.suppress(OSError, _Damaged):
            return self._read(key)
        return None

    def _read(self, key: str, *, every_byte: bool = False) -> Entry | None:
        """The entry; None when it is not there. Raises _Damaged, and OSError for what cannot be read."""
        if not KEY.fullmatch(key):
            return None
        try:
            entry = decoded(*read_json(self._sidecar(key)))
            if entry is None or entry.key != key:
                return None
            with open_regular(self._state(key)) as file:
                size = os.fstat(file.fileno()).st_size
                if size != entry.size:
                    raise _Damaged(f"it has {size} bytes instead of {entry.size}")
                if every_byte and sha256_of(file) != entry.sha256:
                    raise _Damaged("its bytes are not those that were saved")
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise _Damaged("it is a link, or no file") from error
        return entry

    def _worthless(self, key: str) -> bool:
        try:
            return self._read(key) is None
        except _Damaged:
            return True
        except OSError:
            return False

    def _remove(self, key: str) -> int:
        return discard(self._state(key)) + discard(self._sidecar(key))

    def _sweep(self) -> int:
        names = names_in(self.folder)
        left = sum(discard(self.folder / name) for name in names if abandoned(self.folder / name))
        keys = {match["key"] for match in map(KEPT.fullmatch, names) if match}
        return left + sum(self._remove(key) for key in keys if self._worthless(key))

    def _evict(self, keep: str) -> None:
        entries, limit = self.entries(), self.limit()
        taken = sum(self._bytes_of(entry.key) for entry in entries)
        for entry in reversed(entries):
            if taken <= limit:
                return
            if entry.key != keep:
                taken -= self._remove(entry.key)

    def _bytes_of(self, key: str) -> int:
        return size_of(self._state(key)) + size_of(self._sidecar(key))


def line_of(entry: Entry) -> tuple[str, ...]:
    """What versions of a trunk share: two engines, or servers with other flags, do not replace each other's."""
    meta = entry.meta
    return meta.alias, meta.label, meta.facts.get("engine", ""), meta.facts.get("flags", "")


def _in_words(size: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} B"
