"""Fetch one GGUF from the Hub: `resolve` says what it is, `fetch` brings it whole and verified or not at all.

Consent is the caller's business, between the two. HF_TOKEN, HF_HOME and HF_HUB_OFFLINE mean what they mean to
huggingface_hub, which reads them itself.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from looprun_models._version import __version__
from looprun_models.errors import BadSetting, DownloadFailed, NotEnoughDisk
from looprun_models.progress import OnProgress, Progress
from looprun_models.registry import LocalModelSpec
from looprun_models.settings import Settings

DISK_MARGIN = 64 * 2**20
"""Bytes that a download leaves free: a file system filled to the last byte breaks other programs."""

_ROOM = "free some space there, or let the profile's path variable name another place"
_TOKEN = "set HF_TOKEN to a token that may read it"  # noqa: S105
_REFUSALS: dict[str | int, tuple[str, str]] = {
    "GatedRepoError": ("is gated: its owner wants terms accepted", f"accept them at {{page}}, then {_TOKEN}"),
    "RepositoryNotFoundError": ("is in no public repository", f"check {{page}}; if it is private, {_TOKEN}"),
    401: ("was refused: the Hub does not accept the token", "correct or unset HF_TOKEN"),
    403: ("was refused to this account", f"visit {{page}}, then {_TOKEN}"),
    404: ("is not there at this revision", "see {page}, then correct file or revision in the profile"),
    429: ("was refused: too many requests", "wait a few minutes; the limit is higher with HF_TOKEN set"),
    "other": ("was not given by the Hub", "try again later"),
}


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of one commit on the Hub.

    revision is the commit, size is in bytes, sha256 is None where neither profile nor Hub knows it. url is on
    the Hub, which redirects to wherever the bytes are.
    """

    repo: str
    revision: str
    file: str
    size: int
    sha256: str | None
    url: str


def resolve(spec: LocalModelSpec, settings: Settings) -> RemoteFile:
    """Ask the Hub for the profile's file, at the profile's revision or else at main. Fetches no content.

    Raises BadSetting for an HF_ENDPOINT that is no address; DownloadFailed when the Hub is not reached, will
    not give the file, or has another than the one that the profile pins.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    endpoint, name = _endpoint(settings.environ.get("HF_ENDPOINT", "")), f"{spec.hf_repo}/{spec.file}"
    with _explained(name, page=f"{endpoint}/{spec.hf_repo}"):
        url = hf_hub_url(spec.hf_repo, spec.file, revision=spec.revision, endpoint=endpoint)
        found = get_hf_file_metadata(url, endpoint=endpoint)
    if not found.commit_hash or found.size is None:
        hint = "check HF_ENDPOINT, and whether a proxy or a log-in page stands in between"
        raise DownloadFailed(f"{endpoint} does not answer like a Hub when asked for {name}.", hint=hint)
    # For large files the Hub's etag is the content's sha256; for small ones a git hash, which proves less.
    etag = found.etag if re.fullmatch(r"[0-9a-f]{64}", found.etag or "") else None
    for field, pinned, there in (("size_bytes", spec.size_bytes, found.size), ("sha256", spec.sha256, etag)):
        if pinned and there and pinned != there:
            values = f"{field} is {there} on the Hub and {pinned} in the profile"
            why = f"{name} is not the file that the profile {spec.alias} pins: {values}."
            raise DownloadFailed(why, hint=f"correct {spec.origin}, or pin a revision there")
    url = hf_hub_url(spec.hf_repo, spec.file, revision=found.commit_hash, endpoint=endpoint)
    return RemoteFile(spec.hf_repo, found.commit_hash, spec.file, found.size, spec.sha256 or etag, url)


def fetch(remote: RemoteFile, target: Path, *, on_progress: OnProgress | None = None) -> Path:
    """Download to `target`, making its folder; only the whole verified file gets that name.

    on_progress hears the phases "downloading" and "hashing", in bytes, on this thread. A broken connection is
    taken up again within one call; nothing is kept for a later one, whatever ends it, KeyboardInterrupt too.
    Raises NotEnoughDisk, before the first byte where that can be known, and DownloadFailed.
    """
    report, folder = on_progress or (lambda _: None), target.parent
    page = remote.url.partition("/resolve/")[0]
    with _explained(f"{remote.repo}/{remote.file}", page=page, folder=folder):
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        free, need = shutil.disk_usage(there).free, remote.size + DISK_MARGIN
        if free < need:
            have = f"{folder} has {free / 1e9:.2f} GB free"
            raise NotEnoughDisk(f"{remote.file} needs {need / 1e9:.2f} GB, and {have}.", hint=_ROOM)
        folder.mkdir(parents=True, exist_ok=True)
        # Beside the target, so that the rename is atomic; a folder each, so that no two pulls share a file.
        prefix = f".looprun-pull-{os.getpid()}-"
        with tempfile.TemporaryDirectory(prefix=prefix, dir=folder, ignore_cleanup_errors=True) as staging:
            staged = Path(staging) / target.name
            _download(remote, staged, report)
            _verify(remote, staged, report)
            staged.replace(target)
    return target


def _endpoint(variable: str) -> str:
    from huggingface_hub import constants

    # Always passed on: huggingface_hub reads it once, at import, and takes a blank one for an address.
    if not (named := variable.strip().rstrip("/")):
        return constants.ENDPOINT.strip() or constants.HUGGINGFACE_CO_URL_HOME.rstrip("/")
    # What is no address makes the HTTP library raise something that is no HTTPError.
    if not re.fullmatch(r"https?://([\w.-]+|\[[\da-f:]+\])(:\d{1,5})?(/[\w./~%-]*)?", named, re.IGNORECASE):
        raise BadSetting("HF_ENDPOINT", named, "an http:// or https:// address")
    return named


def _download(remote: RemoteFile, staged: Path, report: OnProgress) -> None:
    # Not hf_hub_download: it goes through Xet, which can stall without an error, has its own exceptions, and
    # is turned off by a variable only. Without Xet it keeps to one signed address, which expires.
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    class Bar:
        # As much of tqdm as http_get uses.
        def __init__(self, *, initial: int = 0, **_: Any) -> None:
            self.done = 0
            self.update(initial)

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def update(self, count: int) -> None:
            self.done += count
            report(Progress("downloading", self.done, remote.size))

    headers = build_hf_headers(library_name="looprun-models", library_version=__version__)
    # With a compressed body, the offset at which a broken download is taken up would mean something else.
    headers["Accept-Encoding"] = "identity"
    with staged.open("wb") as file:
        http_get(remote.url, file, headers=headers, tqdm_class=Bar)


def _verify(remote: RemoteFile, staged: Path, report: OnProgress) -> None:
    def expect(what: str, expected: object, got: object) -> None:
        if got != expected:
            why = f"{remote.file} did not arrive as it is on the Hub: {what} expected {expected}, got {got}."
            hint = "pull again; if that does not help, a proxy or a mirror may be changing the file"
            raise DownloadFailed(why, hint=hint)

    expect("size in bytes", remote.size, staged.stat().st_size)
    with staged.open("rb+") as file:
        expect("first bytes", b"GGUF", file.read(4))
        if remote.sha256:
            digest = hashlib.sha256()
            file.seek(0)
            while chunk := file.read(8 * 2**20):
                digest.update(chunk)
                report(Progress("hashing", file.tell(), remote.size))
            expect("sha256", remote.sha256, digest.hexdigest())
        # Without it, the new name can outlive a power cut that the content does not.
        os.fsync(file.fileno())


@contextmanager
def _explained(name: str, *, page: str, folder: Path | None = None) -> Iterator[None]:
    """Turn what huggingface_hub, its HTTP library and the disk raise into one message and one next step."""
    from huggingface_hub import errors

    try:
        yield
    except errors.OfflineModeIsEnabled as error:
        why = f"{name} was not fetched: huggingface_hub is in offline mode."
        raise DownloadFailed(why, hint="unset HF_HUB_OFFLINE") from error
    except errors.HFValidationError as error:
        raise DownloadFailed(f"{name} is no name on the Hub: {error}", hint="correct hf_repo") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        kinds = (type(error).__name__, status, "other")
        why, hint = next(_REFUSALS[kind] for kind in kinds if kind in _REFUSALS)
        raise DownloadFailed(f"{name} {why} (HTTP {status}).", hint=hint.format(page=page)) from error
    # By this name because the HTTP library behind it differs between versions of huggingface_hub.
    except errors.HTTPError as error:  # type: ignore[attr-defined]
        why = f"{name}: the connection to {page} failed: {error or type(error).__name__}."
        hint = "check the network, the proxy variables and HF_ENDPOINT, then pull again"
        raise DownloadFailed(why, hint=hint) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NotEnoughDisk(f"{folder} became full while {name} was fetched.", hint=_ROOM) from error
        hint = f"check that you may write to {folder}" if folder else "check the network and HF_ENDPOINT"
        raise DownloadFailed(f"{name} was not fetched: {str(error).splitlines()[0]}", hint=hint) from error
