"""Fetch a file: it comes whole and verified under its name, or what came is kept for the next try.

`pull` brings a profile's GGUF, `fetch` any file of which it is known what it is.

Consent is the caller's business, before it. The final name appears by a rename of a new file, never by writing into
one that is there: a running server may have that mapped.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from looprun_models.errors import DownloadFailed, NotEnoughDisk
from looprun_models.hub import HUB, OnNote, RemoteFile, resolve
from looprun_models.journal import Content, Journal, held, journal_path, lock_path, part_path, read_progress
from looprun_models.progress import OnProgress, Progress
from looprun_models.receipts import read_receipt, receipt_path, write_receipt
from looprun_models.registry import LocalModelSpec
from looprun_models.settings import Settings
from looprun_models.source import Changed, Dropped, RangesUnusable, Source
from looprun_models.transfer import Transfer
from looprun_models.weights import shard_paths

DISK_MARGIN = 64 * 2**20
"""Bytes that a download leaves free: a file system filled to the last byte breaks other programs."""
RESTARTS = 2
"""How often one call begins again because the file upstream is another one than the one begun."""

Parts = list[tuple[RemoteFile, Path]]
"""Files and where they go; the last one is what was asked for."""


@dataclass(frozen=True, slots=True)
class Words:
    """What a download's messages name. again: the command that takes it up; drop: the one that removes what has
    arrived; elsewhere: how it comes to lie on another disk."""

    again: str
    drop: str
    elsewhere: str


def pull(
    spec: LocalModelSpec,
    settings: Settings,
    target: Path,
    *,
    on_progress: OnProgress | None = None,
    on_note: OnNote | None = None,
) -> Path:
    """Download to `target`, making its folder, or take up where an earlier call stopped.

    Of a split GGUF all parts are fetched and the first, which is what `target` names, appears last. A pull of the same
    file in another process is waited for. on_progress hears "downloading" and "hashing", in bytes; on_note hears what
    was worked around; both on this thread. An interrupt keeps what has arrived.
    Raises NotEnoughDisk and DownloadFailed; what has arrived is kept wherever it can be right.
    """
    words = Words(
        again=f"looprun models pull {spec.alias}",
        drop=f"looprun models rm {spec.alias} --partial",
        elsewhere=f"set {spec.env_var} to a path on another disk",
    )
    report, note = on_progress or (lambda _: None), on_note or (lambda _: None)
    _bring(lambda: _resolve_parts(spec, settings, target, note), settings, words, report, note)
    return target


def fetch(
    remote: RemoteFile,
    target: Path,
    settings: Settings,
    words: Words,
    *,
    on_progress: OnProgress | None = None,
    on_note: OnNote | None = None,
) -> Path:
    """Download one file to `target`, as `pull` does."""
    _bring(lambda: [(remote, target)], settings, words, on_progress or (lambda _: None), on_note or (lambda _: None))
    return target


def _bring(
    resolve_parts: Callable[[], Parts], settings: Settings, words: Words, report: OnProgress, note: OnNote
) -> None:
    begun: Parts = []
    for _ in range(RESTARTS + 1):
        parts = resolve_parts()
        last = parts[-1][0]
        # The site still names the same content, so only its etag was another: from here on the hash alone decides.
        compare = parts != begun or not all(remote.sha256 for remote, _ in parts)
        try:
            _check_disk(parts, words)
            before, total = 0, sum(remote.size for remote, _ in parts)
            for remote, path in parts:
                source = Source(remote, settings, compare=compare)
                _Pull(words, source, path, _shifted(report, before, total), note).run()
                before += remote.size
        except Changed as change:
            note(f"{last.file} has changed upstream: {change}; starting again from the beginning.")
            begun = parts
        else:
            return
    raise DownloadFailed(
        f"{last.name} is another file each time it is asked for.",
        hint=f"try again later, or check {last.site.variable}: the mirror may be in the middle of an update",
    )


def upstream_news(spec: LocalModelSpec, settings: Settings, target: Path) -> str | None:
    """What has changed upstream since `target` was fetched, in one sentence; None when nothing has or none can say.

    Only a profile without a pin is asked about. Nothing is fetched, and the file stays as it is.
    """
    receipt = None if spec.sha256 or spec.revision else read_receipt(target)
    if receipt is None or not receipt.repo:
        return None
    try:
        now = resolve(spec, settings)
    except DownloadFailed:
        return None
    if now.sha256 in (None, receipt.sha256) and (now.sha256 or now.revision == receipt.revision):
        return None
    return (
        f"{spec.hf_repo} has another {spec.file} now (commit {now.revision[:8]}; yours is {receipt.revision[:8]}, "
        f"fetched {receipt.date[:10]}). Yours stays; move it away and pull again to have the new one."
    )


def bytes_kept(target: Path) -> int:
    """How much of an unfinished download is there."""
    found = read_progress(target)
    return found[0] if found else 0


def _resolve_parts(spec: LocalModelSpec, settings: Settings, target: Path, note: OnNote) -> Parts:
    first = resolve(spec, settings, on_note=note)
    same_commit = replace(spec, revision=first.revision)
    others = [path.name for path in shard_paths(Path(spec.file))[1:]]
    parts = [(resolve(same_commit, settings, file=name), target.with_name(name)) for name in others]
    return [*parts, (first, target)]


def _check_disk(parts: Parts, words: Words) -> None:
    folder = parts[0][1].parent
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    missing = sum(remote.size - bytes_kept(path) for remote, path in parts if not _is_whole(remote, path))
    free = shutil.disk_usage(there).free
    if missing and free < missing + DISK_MARGIN:
        need, kept = f"{(missing + DISK_MARGIN) / 1e9:.2f} GB", any(bytes_kept(path) for _, path in parts)
        raise NotEnoughDisk(
            f"{parts[-1][0].file} needs {need}{' more' if kept else ''}, and {folder} has {free / 1e9:.2f} GB free.",
            hint=_room(words, kept=kept),
        )


def _room(words: Words, *, kept: bool) -> str:
    if kept:
        return f"free some space there, then `{words.again}`; `{words.drop}` frees what has arrived"
    return f"free some space there, or {words.elsewhere}, then `{words.again}`"


def _is_whole(remote: RemoteFile, target: Path) -> bool:
    """Whether the very file is there already, by its receipt."""
    receipt = read_receipt(target)
    try:
        found = target.stat()
    except OSError:
        return False
    if not receipt or (receipt.size, receipt.mtime_ns) != (found.st_size, found.st_mtime_ns):
        return False
    return receipt.sha256 == remote.sha256 if remote.sha256 else receipt.revision == remote.revision


def _shifted(report: OnProgress, before: int, total: int) -> OnProgress:
    return lambda step: report(Progress(step.phase, before + step.done, total))


class _Pull:
    """One file to one path."""

    def __init__(self, words: Words, source: Source, target: Path, report: OnProgress, note: OnNote) -> None:
        self.words, self.source, self.target, self.report, self.note = words, source, target, report, note
        self.remote = source.remote

    def run(self) -> None:
        with self._disk_explained():
            self.target.parent.mkdir(parents=True, exist_ok=True)
            with held(lock_path(self.target), self._wait):
                if _is_whole(self.remote, self.target):
                    return
                while not self._finish(self._fetched()):
                    self.note(f"{self.target.name}: another program took the unfinished file; looking again.")

    def _fetched(self) -> tuple[int, str]:
        """The part file is whole and right: its inode and sha256."""
        remote, ranged = self.remote, True
        content = Content(remote.repo, remote.revision, remote.size, remote.sha256)
        while True:
            kept = bytes_kept(self.target)
            with Journal.open(self.target, content) as journal:
                if kept and not journal.resumed:
                    self.note(f"{remote.file} has changed upstream since it was begun; starting from the beginning.")
                try:
                    digest = Transfer(self.source, journal, ranged=ranged).run(self.report, self.note)
                except RangesUnusable as why:
                    if not ranged:
                        raise DownloadFailed(f"{remote.name}: its server {why}.", hint="try again later") from None
                    self.note(f"The server of {remote.file} {why}: fetched in one stream from the beginning.")
                    ranged = False
                    continue
                except Dropped as drop_:
                    raise self._gave_up(drop_, journal.bytes_done) from None
                except (Changed, DownloadFailed) as error:
                    if isinstance(error, Changed) or not journal.bytes_done:
                        _drop_part(self.target)
                    raise
            if remote.sha256 in (None, digest):
                if not remote.sha256:
                    what = f"{remote.file}: only its size and first bytes were checked."
                    self.note(f"T{remote.site.name[1:]} gives no sha256 for {what}")
                return journal.inode, digest
            _drop_part(self.target)
            if not journal.resumed:
                raise self._mismatch(digest)
            self.note(f"{remote.file}: what an earlier pull had kept is not right; fetching it again from the start.")

    def _mismatch(self, digest: str) -> DownloadFailed:
        hashes = f"sha256 expected {self.remote.sha256}, got {digest}"
        again = "pull again" if self.remote.site == HUB else f"try again: `{self.words.again}`"
        return DownloadFailed(
            f"{self.remote.file} did not arrive as it is on {self.remote.site.name}: {hashes}.",
            hint=f"{again}; if that does not help, a proxy or a mirror may be changing the file",
        )

    def _gave_up(self, drop_: Dropped, done: int) -> DownloadFailed:
        kept = f" {done / 1e6:,.1f} of {self.remote.size / 1e6:,.1f} MB are kept." if done else ""
        if drop_.failure:
            return DownloadFailed(f"{drop_.failure.message}{kept}", hint=drop_.failure.hint)
        hint = f"check the network, then `{self.words.again}`" + (", which takes it up from there" if done else "")
        return DownloadFailed(f"{self.remote.name}: {drop_.why}, again and again.{kept}", hint=hint)

    def _finish(self, fetched: tuple[int, str]) -> bool:
        """Give the part its name; False when the part is another program's by now, which no lock prevented."""
        inode, digest = fetched
        part, remote = part_path(self.target), self.remote
        try:
            with part.open("r+b") as file:
                if os.fstat(file.fileno()).st_ino != inode:
                    return False
                os.fsync(file.fileno())  # without it, the new name can outlive a power cut that the content does not
            # The receipt first: a kill in between leaves one that fits nothing yet, instead of a file without any.
            write_receipt(
                part,
                repo=remote.repo,
                revision=remote.revision,
                size=remote.size,
                sha256=digest,
                at=receipt_path(self.target),
            )
            part.replace(self.target)
        except FileNotFoundError:
            return _is_whole(remote, self.target)
        journal_path(self.target).unlink(missing_ok=True)
        return True

    def _wait(self, first: bool) -> None:
        """While another has the lock: tell how far that one is."""
        if first:
            self.note(f"Another pull of {self.target.name} is running; waiting for it.")
        if found := read_progress(self.target):
            self.report(Progress("downloading", *found))

    @contextmanager
    def _disk_explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            folder = self.target.parent
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                why = f"{self.remote.name} was not fetched: {error}"
                raise DownloadFailed(why, hint=f"check that you may write to {folder}") from error
            kept = bytes_kept(self.target)
            need, free = self.remote.size - kept, shutil.disk_usage(folder).free
            why = f"{folder} became full: {need / 1e6:,.1f} MB more are needed and {free / 1e6:,.1f} MB are free."
            raise NotEnoughDisk(
                f"{why} What has arrived ({kept / 1e6:,.1f} MB) is kept.", hint=_room(self.words, kept=True)
            ) from error


def _drop_part(target: Path) -> None:
    """Remove an unfinished download that cannot be right; the lock, which is ours, stays."""
    part_path(target).unlink(missing_ok=True)
    journal_path(target).unlink(missing_ok=True)
