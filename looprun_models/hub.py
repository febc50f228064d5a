"""Ask the Hub what a profile's file is: `resolve` says commit, size, sha256 and address, and fetches no content.

HF_TOKEN, HF_HOME and HF_HUB_OFFLINE mean what they mean to huggingface_hub, which reads them itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from looprun_models._version import __version__
from looprun_models.errors import BadSetting, DownloadFailed
from looprun_models.registry import LocalModelSpec
from looprun_models.settings import Settings

OnNote = Callable[[str], None]
"""Hears one sentence about something that was worked around."""

_TOKEN = "set HF_TOKEN to a token that may read it"  # noqa: S105
_REFUSALS: dict[str | int, tuple[str, str]] = {
    "GatedRepo": ("is gated: its owner wants terms accepted", f"accept them at {{page}}, then {_TOKEN}"),
    "RepoNotFound": ("is in no public repository", f"check {{page}}; if it is private, {_TOKEN}"),
    401: ("was refused: the Hub does not accept the token", "correct or unset HF_TOKEN"),
    403: ("was refused to this account", f"visit {{page}}, then {_TOKEN}"),
    404: ("is not there at this revision", "see {page}, then correct file or revision in the profile"),
    429: ("was refused: too many requests", "wait a few minutes; the limit is higher with HF_TOKEN set"),
    "other": ("was not given by the Hub", "try again later"),
}
ORIGIN = r"https?://([\w.-]+|\[[\da-f:]+\])(:(?!0)[1-5]?\d{1,4}|:6[0-4]\d{3}|:65[0-4]\d\d|:655[0-2]\d|:6553[0-5])?"
ADDRESS = rf"{ORIGIN}(/[\w./~%-]*)?"


@dataclass(frozen=True, slots=True)
class Site:
    """Whose files they are, in the words of messages, and what they are: magic is how such a file may begin.

    variable is the setting that points at another address in its place. another: the command that fetches another file
    in place of one that is not given.
    """

    name: str
    variable: str
    kind: str
    magic: tuple[bytes, ...]
    another: str = ""


HUB = Site("the Hub", "HF_ENDPOINT", "GGUF", (b"GGUF",))
"""The only site that is given the token."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of one commit on the Hub, or of one release on another site.

    revision is the commit or the tag, size is in bytes, sha256 is None where nobody knows it. url is on the site,
    which redirects to wherever the bytes are. anonymous: the token is left out, as the Hub refuses it.
    """

    repo: str
    revision: str
    file: str
    size: int
    sha256: str | None
    url: str
    anonymous: bool = False
    site: Site = HUB

    @property
    def name(self) -> str:
        return f"{self.repo}/{self.file}"

    @property
    def page(self) -> str:
        """The repository's page, for people."""
        return self.url.partition("/resolve/")[0]


def resolve(
    spec: LocalModelSpec, settings: Settings, *, file: str | None = None, on_note: OnNote | None = None
) -> RemoteFile:
    """Ask the Hub for the profile's file (or another of its repository), at the profile's revision or else at main.

    The profile's size and sha256 are held against the profile's own file only. Raises BadSetting for an HF_ENDPOINT
    that is no address; DownloadFailed when the Hub is not reached, will not give the file, or has another than the one
    that the profile pins.
    """
    wanted = file or spec.file
    endpoint, name = _endpoint(settings.environ.get("HF_ENDPOINT", "")), f"{spec.hf_repo}/{wanted}"
    from huggingface_hub import get_hf_file_metadata, hf_hub_url  # after the check: it fails on a bad address

    if settings.environ.get("HF_HUB_OFFLINE", "").strip().upper() in ("1", "ON", "YES", "TRUE"):
        raise _offline(name)
    anonymous = False
    with explained(name, page=f"{endpoint}/{spec.hf_repo}"):
        url = hf_hub_url(spec.hf_repo, wanted, revision=spec.revision, endpoint=endpoint)
        try:
            found = get_hf_file_metadata(url, endpoint=endpoint)
        except Exception as error:
            # A token that the Hub does not know is refused even for what everybody may read.
            if not (_is_plain_401(error) and authorization()):
                raise
            try:
                found, anonymous = get_hf_file_metadata(url, endpoint=endpoint, token=False), True
            except Exception:  # noqa: BLE001  (the first answer is the one that helps)
                raise error from None
            if on_note:
                on_note("The Hub does not accept the token in use (HTTP 401); fetched without it.")
    if not found.commit_hash or found.size is None:
        hint = "check HF_ENDPOINT, and whether a proxy or a log-in page stands in between"
        raise DownloadFailed(f"{endpoint} does not answer like a Hub when asked for {name}.", hint=hint)
    # For large files the Hub's etag is the content's sha256; for small ones a git hash, which proves less.
    etag = found.etag if re.fullmatch(r"[0-9a-f]{64}", found.etag or "") else None
    pins = (spec.size_bytes, spec.sha256) if wanted == spec.file else (None, None)
    _check_pins(spec, name, (("size_bytes", pins[0], found.size), ("sha256", pins[1], etag)))
    url = hf_hub_url(spec.hf_repo, wanted, revision=found.commit_hash, endpoint=endpoint)
    return RemoteFile(spec.hf_repo, found.commit_hash, wanted, found.size, pins[1] or etag, url, anonymous)


def _check_pins(
    spec: LocalModelSpec, name: str, pins: Iterable[tuple[str, int | str | None, int | str | None]]
) -> None:
    for field, pinned, there in pins:
        if pinned and there and pinned != there:
            values = f"{field} is {there} on the Hub and {pinned} in the profile"
            why = f"{name} is not the file that the profile {spec.alias} pins: {values}."
            raise DownloadFailed(why, hint=f"correct {spec.origin}, or pin a revision there")


def request_headers(*, anonymous: bool) -> dict[str, str]:
    """User agent and, unless anonymous or none is set, the token, which is for the Hub's own host only."""
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    headers: dict[str, str] = build_hf_headers(
        token=False if anonymous else None, library_name="looprun-models", library_version=__version__
    )
    return headers


def authorization() -> str | None:
    """The header value with the token in use; None when there is none."""
    return request_headers(anonymous=False).get("authorization")


def refusal(name: str, status: int, *, page: str, code: str = "") -> DownloadFailed:
    """What an HTTP refusal of the Hub means, and the next step. code is the Hub's own (X-Error-Code)."""
    why, hint = next(_REFUSALS[kind] for kind in (code, status, "other") if kind in _REFUSALS)
    return DownloadFailed(f"{name} {why} (HTTP {status}).", hint=hint.format(page=page))


@contextmanager
def explained(name: str, *, page: str) -> Iterator[None]:
    """Turn what huggingface_hub and its HTTP library raise into one message and one next step."""
    try:
        from huggingface_hub import errors
    except ValueError as error:  # it reads its variables while it is imported
        raise _unusable_setting(name, error) from error
    try:
        yield
    except errors.OfflineModeIsEnabled as error:
        raise _offline(name) from error
    except errors.HFValidationError as error:
        raise DownloadFailed(f"{name} is no name on the Hub: {error}", hint="correct hf_repo") from error
    except errors.HfHubHTTPError as error:
        code = {"GatedRepoError": "GatedRepo", "RepositoryNotFoundError": "RepoNotFound"}.get(type(error).__name__, "")
        raise refusal(name, error.response.status_code, page=page, code=code) from error
    # By this name because the HTTP library behind it differs between versions of huggingface_hub.
    except errors.HTTPError as error:  # type: ignore[attr-defined]
        why = f"{name}: the connection to {page} failed: {error or type(error).__name__}."
        hint = "check the network, the proxy variables and HF_ENDPOINT, then pull again"
        raise DownloadFailed(why, hint=hint) from error
    except (ImportError, ValueError) as error:  # an address or a proxy that no library can use
        raise _unusable_setting(name, error) from error
    except OSError as error:
        why = f"{name} was not fetched: {str(error).splitlines()[0]}"
        raise DownloadFailed(why, hint="check the network and HF_ENDPOINT") from error


def _unusable_setting(name: str, error: Exception) -> DownloadFailed:
    said = re.sub(r"//[^/@\s]*@", "//", str(error).splitlines()[0] if str(error) else type(error).__name__)
    if isinstance(error, UnicodeError):
        said = "a token or a name in it is not plain ASCII"
    return DownloadFailed(
        f"{name} was not fetched: {said}.",
        hint="correct HF_ENDPOINT, HF_TOKEN or the proxy variables (SOCKS proxies are not supported)",
    )


def _offline(name: str) -> DownloadFailed:
    return DownloadFailed(f"{name} was not fetched: huggingface_hub is in offline mode.", hint="unset HF_HUB_OFFLINE")


def _is_plain_401(error: Exception) -> bool:
    response = getattr(error, "response", None)
    return getattr(response, "status_code", None) == 401 and type(error).__name__ != "GatedRepoError"


def _endpoint(variable: str) -> str:
    # Always passed on: huggingface_hub reads it once, at import, and takes a blank one for an address.
    if not (named := variable.strip().rstrip("/")):
        from huggingface_hub import constants

        return constants.ENDPOINT.strip() or constants.HUGGINGFACE_CO_URL_HOME.rstrip("/")
    # What is no address makes the HTTP library raise something that is no HTTPError.
    if not re.fullmatch(ADDRESS, named, re.IGNORECASE):
        raise BadSetting("HF_ENDPOINT", re.sub(r"//[^/@]*@", "//...@", named), "an http:// or https:// address")
    return named
