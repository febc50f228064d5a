"""The official releases of llama.cpp: what an index says there is, and which files of it suit a machine.

The index is the releases API of a repository, or a mirror that answers in its shape (LOOPRUN_ENGINE_INDEX).
"""

from __future__ import annotations

import http.client
import json
import re
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, replace
from datetime import datetime
from email.message import Message
from typing import Any
from urllib.parse import urlsplit

from looprun_models.engine import EMBEDDED, FLOOR
from looprun_models.errors import BadSetting, DownloadFailed, EngineMissing, LooprunError, UsageError
from looprun_models.hub import ADDRESS, ORIGIN, OnNote, RemoteFile, Site
from looprun_models.settings import Settings
from looprun_models.source import USER_AGENT, first_line, open_url, proxies_of
from looprun_models.variants import Platform

INDEX = "https://api.github.com/repos/ggml-org/llama.cpp"
VARIABLE = "LOOPRUN_ENGINE_INDEX"
SITE = Site(
    "the release host",
    VARIABLE,
    "archive",
    (b"\x1f\x8b", b"PK\x03\x04"),
    another="name another build: looprun engine install bNNNN",
)
LISTED = 30
"""Releases that are looked at for the newest: about a week of them."""
LONGEST_ANSWER = 32 * 2**20
"""Bytes; a list of 30 releases has about half a megabyte."""
DAY = 86400.0
"""Seconds; no limit of an index lasts longer."""


@dataclass(frozen=True, slots=True)
class Asset:
    """One file of a release. size is bytes; sha256 is None where the index gives none."""

    name: str
    size: int
    url: str
    sha256: str | None

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""


@dataclass(frozen=True, slots=True)
class Release:
    """One build. Only files whose upload has ended are among its assets; the others are coming."""

    build: int
    assets: tuple[Asset, ...]
    coming: tuple[Asset, ...] = ()

    @property
    def tag(self) -> str:
        return f"b{self.build}"

    def remote(self, asset: Asset) -> RemoteFile:
        """An asset as the downloader takes it."""
        return RemoteFile("llama.cpp", self.tag, asset.name, asset.size, asset.sha256, asset.url, site=SITE)


def parse_wanted(wanted: str) -> int | None:
    """The build number of "b11434" or "11434", None for "latest". Raises UsageError for others and for old builds."""
    named = re.fullmatch(r"b?(\d{1,9})", wanted, re.ASCII | re.IGNORECASE)
    if wanted.lower() != "latest" and not named:
        raise UsageError(
            f"{wanted!r} is no build of llama.cpp.", hint="looprun engine install latest   (or a tag such as b11434)"
        )
    build = int(named[1]) if named else None
    if build is not None and build < FLOOR:
        raise UsageError(
            f"b{build} is older than b{FLOOR}, the first that can run the profiles.",
            hint="looprun engine install latest",
        )
    return build


def pick(release: Release, here: Platform, variant: str) -> tuple[Asset, ...]:
    """The archive of a release for a machine, then what has to lie beside it; nothing when the release lacks one.

    Of several CUDA versions the lowest, as it needs the oldest driver.
    """
    part = here.builds[variant]
    found = [
        (asset, named) for asset in release.assets if (named := _named(rf"llama-{release.tag}-bin-{part}", asset.name))
    ]
    if variant != "cuda":
        return (found[0][0],) if found else ()
    for asset, named in sorted(found, key=lambda each: [int(number) for number in each[1][1].split(".")]):
        own = part.replace(r"(\d+\.\d+)", re.escape(named[1]))
        libraries = [other for other in release.assets if _named(rf"cudart-[\w.-]*-{own}", other.name)]
        if libraries or here.system != "windows":
            return (asset, *libraries[:1])
    return ()


def find_build(build: int, here: Platform, variant: str, settings: Settings) -> tuple[Release, tuple[Asset, ...]]:
    """A release by its number, and its files for this machine. Raises EngineMissing, DownloadFailed, BadSetting."""
    index = _index(settings)
    answer = _ask(f"{index}/releases/tags/b{build}", settings)
    if answer is None:
        raise EngineMissing(f"there is no release b{build} at {index}.", hint="looprun engine install latest")
    release = _release(answer, index)
    if release is None or release.build != build:
        raise _malformed(index, "it tells of another release than the one asked for")
    if assets := pick(release, here, variant):
        return release, assets
    raise _lacking(release, here, variant, settings)


def find_latest(here: Platform, variant: str, settings: Settings, on_note: OnNote) -> tuple[Release, tuple[Asset, ...]]:
    """The newest release that has the files for this machine; those passed over are told. Raises as find_build."""
    releases = _list(settings)
    if not releases:
        raise EngineMissing(
            f"{_index(settings)} lists no build of llama.cpp.", hint=f"check {VARIABLE}, or: {EMBEDDED}"
        )
    passed: list[str] = []
    for release in releases:
        if release.build >= FLOOR and (assets := pick(release, here, variant)):
            if passed:
                missing = f"{'have' if len(passed) > 1 else 'has'} no {variant} build for {here} (yet)"
                on_note(f"{', '.join(passed)} {missing}: {release.tag} is the newest that does.")
            return release, assets
        passed.append(release.tag)
    coming = [each.tag for each in releases if each.build >= FLOOR and _is_coming(each, here, variant)]
    but = f", and {coming[0]} is still being uploaded" if coming else ""
    wait = "try again in some minutes, or " if coming else ""
    raise EngineMissing(
        f"none of the {len(releases)} newest releases has a {variant} build for {here}{but}.",
        hint=f"{wait}name an older one: looprun engine install bNNNN   (or {EMBEDDED})",
    )


def _is_coming(release: Release, here: Platform, variant: str) -> bool:
    """Whether a release lacks the files for a machine only because their upload has not ended."""
    whole = replace(release, assets=release.assets + release.coming)
    return not pick(release, here, variant) and bool(pick(whole, here, variant) or not release.assets)


def _named(pattern: str, name: str) -> re.Match[str] | None:
    return re.fullmatch(rf"{pattern}\.(?:tar\.gz|zip)", name, re.ASCII)


def _lacking(release: Release, here: Platform, variant: str, settings: Settings) -> LooprunError:
    has = [other for other in here.builds if pick(release, here, other)]
    coming = _is_coming(release, here, variant)
    there = f"it has {', '.join(has)} for it" if has else f"it has none for it (of {len(release.assets)} files in all)"
    there = "it is still being uploaded" if coming else there
    try:
        having = [other.build for other in _list(settings) if pick(other, here, variant)]
    except LooprunError:  # the list only helps
        having = []
    newer = min((build for build in having if build > release.build), default=None)
    older = max((build for build in having if FLOOR <= build < release.build), default=None)
    near = [f"b{build} ({word})" for build, word in ((newer, "newer"), (older, "older")) if build]
    nearest = f" Nearest with one: {', '.join(near)}." if near else ""
    hint = f"looprun engine install b{newer or older}"
    if not near:
        again = f"try again in some minutes: looprun engine install {release.tag}"
        other = f"looprun engine install {release.tag} --variant {has[0]}" if has else f"{SITE.another}; or: {EMBEDDED}"
        hint = again if coming else other
    return EngineMissing(f"{release.tag} has no {variant} build for {here}: {there}.{nearest}", hint=hint)


def _index(settings: Settings) -> str:
    named = (settings.engine_index or INDEX).rstrip("/")
    if not (re.fullmatch(ADDRESS, named, re.IGNORECASE) and _is_address(named)):
        raise BadSetting(VARIABLE, re.sub(r"//[^/@]*@", "//...@", named), "an http:// or https:// address")
    return named


def _list(settings: Settings) -> list[Release]:
    """The newest builds, highest first."""
    index = _index(settings)
    answer = _ask(f"{index}/releases?per_page={LISTED}", settings)
    if answer is None:
        raise DownloadFailed(f"{index} has no releases (HTTP 404).", hint=f"check {VARIABLE}")
    if not isinstance(answer, list):
        raise _malformed(index, "it is no list of releases")
    found = [release for raw in answer if (release := _release(raw, index))]
    return sorted(found, key=lambda release: release.build, reverse=True)


def _release(raw: Any, index: str) -> Release | None:
    """None for a release that is no build: a draft, or a tag of another form."""
    match raw:
        case {"tag_name": str(tag), "assets": list(assets)}:
            named = re.fullmatch(r"b(\d{1,9})", tag, re.ASCII)
            if not named or raw.get("draft"):
                return None
            whole: dict[bool, list[Asset]] = {True: [], False: []}
            for told in assets:
                asset = _asset(told, index)
                whole[told.get("state", "uploaded") == "uploaded" and asset.size > 0].append(asset)
            return Release(int(named[1]), tuple(whole[True]), tuple(whole[False]))
    raise _malformed(index, "a release in it has no tag or no list of files")


def _asset(raw: Any, index: str) -> Asset:
    match raw:
        case {"name": str(name), "size": int(size), "browser_download_url": str(url)} if _is_address(url):
            if index.lower().startswith("https:") and not url.lower().startswith("https:"):
                raise _malformed(index, f"{name} would be fetched without encryption")
            digest = re.fullmatch(r"sha256:([0-9a-f]{64})", str(raw.get("digest")).lower())
            return Asset(name, size, url, digest[1] if digest else None)
    raise _malformed(index, "a file in it has no name, size or address")


def _is_address(text: str) -> bool:
    """Whether urllib can ask for it: what is in brackets has to be an IP address too."""
    try:
        urlsplit(text)
    except ValueError:
        return False
    return bool(re.fullmatch(rf"{ORIGIN}([/?][!-~]*)?", text, re.ASCII | re.IGNORECASE))


def _ask(address: str, settings: Settings) -> Any:
    """The answer's content; None for HTTP 404. No token goes along, and no variable of the Hub counts."""
    headers = {"User-Agent": USER_AGENT, "Accept": "application/vnd.github+json"}
    request = urllib.request.Request(address, headers=headers)  # noqa: S310  (_index checked the scheme)
    host = urlsplit(address).netloc
    try:
        with open_url(request, proxies_of(settings.environ), []) as answer:
            kind, body = answer.headers.get_content_type(), answer.read(LONGEST_ANSWER)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 404:
                return None
            raise _refused(host, error.code, error.headers) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise DownloadFailed(
            f"the release index at {host} was not reached: {first_line(getattr(error, 'reason', error))}.",
            hint=f"check the network, the proxy variables and {VARIABLE}, then try again; or: {EMBEDDED}",
        ) from error
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        page = kind == "text/html" or body.lstrip().startswith(b"<")
        raise _malformed(host, "it is a web page" if page else "it is no JSON") from None


def _refused(host: str, status: int, headers: Message) -> DownloadFailed:
    left, reset = headers.get("x-ratelimit-remaining", "").strip(), headers.get("x-ratelimit-reset", "").strip()
    after = headers.get("retry-after", "").strip()
    if 300 <= status < 400:
        return DownloadFailed(
            f"the release index at {host} leads to {headers.get('location', 'nowhere')}, which cannot be followed "
            f"(HTTP {status}).",
            hint=f"check {VARIABLE}, and whether a proxy or a log-in page stands in between",
        )
    if status not in (403, 429) or (status == 403 and left != "0" and not after):
        return DownloadFailed(f"the release index at {host} answered HTTP {status}.", hint="try again later")
    now = time.time()
    at = float(reset) if reset.isdecimal() else now + float(after) if after.isdecimal() else now + DAY
    known = abs(at - now) < DAY
    when = "for now"
    if known:
        when = f"until {datetime.fromtimestamp(at).astimezone():%H:%M} (in {max(1, round((at - now) / 60))} min)"
    return DownloadFailed(
        f"{host} answers no more questions from this network address {when}: its hourly limit is used up.",
        hint=f"try again {'then' if known else 'in an hour'}, or set {VARIABLE} to a mirror",
    )


def _malformed(where: str, why: str) -> DownloadFailed:
    return DownloadFailed(
        f"{where} does not answer as a release index does: {why}.",
        hint=f"check {VARIABLE}, and whether a proxy or a log-in page stands in between",
    )
