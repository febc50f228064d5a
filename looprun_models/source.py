"""One ranged request for bytes: where they come from, and every way in which the answer may not be what was asked for.

Over the standard library: the Hub client's own HTTP library takes several times as long for each byte.
"""

from __future__ import annotations

import base64
import contextlib
import email.utils
import http.client
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from email.message import Message
from typing import Any
from urllib.parse import unquote, urlsplit

from looprun_models._version import __version__
from looprun_models.errors import DownloadFailed
from looprun_models.hub import HUB, RemoteFile, refusal, request_headers
from looprun_models.settings import Settings

TIMEOUT = 30.0
"""Seconds to wait for a connection, an answer, or the next byte."""
LONGEST_WAIT = 120.0
"""The most seconds of a Retry-After that are waited."""
USER_AGENT = f"looprun-models/{__version__}"
_BROKEN = (OSError, http.client.HTTPException, ValueError)


class Dropped(Exception):
    """The connection gave less than was asked for; to be tried again, after `wait` seconds where the server says so."""

    def __init__(self, why: str, *, wait: float = 0.0, failure: DownloadFailed | None = None) -> None:
        super().__init__(why)
        self.why, self.wait, self.failure = why, wait, failure


class RangesUnusable(Exception):
    """The server answers ranged requests in a way that cannot be used."""


class Changed(Exception):
    """The bytes' server has another file than the one that was begun."""


class Stream:
    """The bytes from `start` on. `abort` may be called from another thread and ends a read that waits."""

    def __init__(self, response: http.client.HTTPResponse, start: int, etag: str, opened: list[socket.socket]) -> None:
        self.start, self.etag = start, etag
        self._response, self._opened = response, opened

    def read_into(self, view: memoryview) -> int:
        """What has arrived, at most as much as fits; 0 at the end. Raises Dropped."""
        try:
            # Not response.readinto, which waits until the view is full and so hides how slow a line is.
            if self._response.chunked:
                data = self._response.read1(len(view))
                view[: len(data)] = data
                return len(data)
            return self._response.fp.readinto1(view)
        except TimeoutError:
            raise Dropped(f"nothing arrived for {TIMEOUT:g} seconds") from None
        except (*_BROKEN, AttributeError) as error:  # AttributeError: fp is None once the answer is read to its end
            raise Dropped(f"the connection broke ({first_line(error)})") from None

    def abort(self) -> None:
        for opened in self._opened:
            with contextlib.suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._response.close()


class Source:
    """Where the bytes of one remote file come from. Each `open` asks its site anew, as signed addresses expire.

    compare: whether an etag other than the first means another file. Behind some mirrors each machine has its own.
    """

    def __init__(self, remote: RemoteFile, settings: Settings, *, compare: bool = True) -> None:
        self.remote, self._compare = remote, compare
        ours = {"User-Agent": USER_AGENT}  # no token: that is for the Hub
        self._headers = request_headers(anonymous=remote.anonymous) if remote.site == HUB else ours
        self._proxies = proxies_of(settings.environ)

    def open(self, start: int, end: int, *, etag: str = "", ranged: bool = True) -> Stream:
        """Ask for the bytes from start up to end; not ranged: for the whole file, whatever start and end are.

        Raises Dropped, RangesUnusable, Changed; DownloadFailed for what no second try mends.
        """
        etag = etag if self._compare else ""
        request = urllib.request.Request(self.remote.url, method="GET")  # noqa: S310  (resolve checked the scheme)
        for name, value in self._headers.items():
            if name.lower() == "authorization":
                request.add_unredirected_header("Authorization", value)
            else:
                request.add_header(name, value)
        request.add_header("Accept-Encoding", "identity")  # an offset into a compressed body means something else
        if ranged:
            request.add_header("Range", f"bytes={start}-{end - 1}")
            if etag and not etag.startswith("W/"):
                request.add_header("If-Range", etag)
        opened: list[socket.socket] = []
        response = self._send(request, opened)
        try:
            return self._judge(response, start, etag, opened, ranged)
        except BaseException:
            response.close()
            raise

    def _send(self, request: urllib.request.Request, opened: list[socket.socket]) -> http.client.HTTPResponse:
        try:
            return open_url(request, self._proxies, opened)
        except urllib.error.HTTPError as error:
            with error:
                raise self._refused(error) from None
        except urllib.error.URLError as error:
            raise Dropped(f"no connection ({first_line(error.reason)})") from None
        except TimeoutError:
            raise Dropped(f"no answer for {TIMEOUT:g} seconds") from None
        except _BROKEN as error:
            raise Dropped(f"the connection broke ({first_line(error)})") from None

    def _refused(self, error: urllib.error.HTTPError) -> Exception:
        status, site = error.code, self.remote.site
        failure = _refusal(self.remote, status, error.headers.get("X-Error-Code", ""))
        if status == 416:
            total = re.fullmatch(r"bytes \*/(\d+)", error.headers.get("Content-Range", ""))
            if total and int(total[1]) != self.remote.size:
                return self._of_another_size(int(total[1]))
            return RangesUnusable("refuses a range inside the file (HTTP 416)")
        asked_the_site = _origin(error.geturl() or "") == _origin(self.remote.url)
        if 300 <= status < 400:
            where = error.headers.get("Location", "nowhere")
            return DownloadFailed(
                f"{self.remote.name}: {site.name} leads to {where}, which cannot be followed (HTTP {status}).",
                hint=f"check {site.variable}, and whether a proxy stands in between",
            )
        # Behind the Hub an address expires while it is used; other sites' addresses are asked for anew each time.
        if (status in (401, 403, 404, 410) and asked_the_site) or (_is_final(status) and site != HUB):
            return failure
        return Dropped(f"it answered HTTP {status}", wait=_retry_after(error.headers), failure=failure)

    def _judge(
        self, response: http.client.HTTPResponse, start: int, etag: str, opened: list[socket.socket], ranged: bool
    ) -> Stream:
        kind, there = response.headers.get_content_type(), response.headers.get("ETag", "") if self._compare else ""
        if kind == "text/html":
            raise not_the_kind(self.remote, "a web page")
        if etag and there and there != etag:
            raise Changed("its server has another version")
        if response.status == 200:
            length = response.headers.get("Content-Length", "")
            if length.isdigit() and int(length) != self.remote.size:
                raise self._of_another_size(int(length))
            if ranged and start:
                raise RangesUnusable("ignores ranges (HTTP 200)")
            return Stream(response, 0, there, opened)
        given = response.headers.get("Content-Range", "")
        found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", given)
        if found and found[2] not in ("*", str(self.remote.size)):
            raise self._of_another_size(int(found[2]))
        if not found or int(found[1]) != start:
            raise RangesUnusable(f"answers another range than the one asked for ({given or 'none'})")
        return Stream(response, start, there, opened)

    def _of_another_size(self, there: int) -> Exception:
        """The Hub may know better when it is asked again; another site's answer is not asked for twice."""
        remote, site = self.remote, self.remote.site
        if site == HUB:
            return Changed(f"its server has {there:,} bytes")
        return DownloadFailed(
            f"{remote.file}: the index says {remote.size:,} bytes, and the host of the file has {there:,}.",
            hint=f"{site.another}; or check {site.variable}: a mirror may be in the middle of an update",
        )


def not_the_kind(remote: RemoteFile, what: str) -> DownloadFailed:
    return DownloadFailed(
        f"{remote.file} is no {remote.site.kind} where it was fetched from: the answer is {what}.",
        hint=f"check {remote.site.variable}, and whether a proxy or a log-in page stands in between",
    )


def _refusal(remote: RemoteFile, status: int, code: str) -> DownloadFailed:
    if remote.site == HUB:
        return refusal(remote.name, status, page=remote.page, code=code)
    site = remote.site
    hint = f"{site.another}; or check {site.variable}" if _is_final(status) else "try again later"
    return DownloadFailed(f"{remote.file} was not given by {site.name} (HTTP {status}).", hint=hint)


def _is_final(status: int) -> bool:
    """Whether a refusal stays one however often it is asked."""
    return 400 <= status < 500 and status not in (408, 425, 429)


def open_url(
    request: urllib.request.Request, proxies: dict[str, str], opened: list[socket.socket]
) -> http.client.HTTPResponse:
    """Send a request over these proxies (`proxies_of`); `opened` gets the sockets, for another thread to shut.

    Raises what urllib raises: HTTPError, URLError, TimeoutError, other OSErrors, HTTPException, ValueError.
    """
    handlers = [_Proxies(proxies), _Http(opened), _Https(opened), _SameHostOnly()]
    response: http.client.HTTPResponse = urllib.request.build_opener(*handlers).open(request, timeout=TIMEOUT)
    return response


def proxies_of(environ: Mapping[str, str]) -> dict[str, str]:
    """ "http", "https", "no" -> value of the proxy variables; the lower-case ones win, all_proxy stands for both."""
    found: dict[str, str] = {}
    for name in sorted(environ):  # upper case sorts first
        if name.lower().endswith("_proxy"):
            found[name.lower().removesuffix("_proxy")] = environ[name].strip()
    everywhere = found.pop("all", "")
    named = {"http": everywhere, "https": everywhere} | {name: value for name, value in found.items() if value}
    return {name: named[name] for name in ("http", "https", "no") if named.get(name)}


def bypasses(host: str, rule: str) -> bool:
    """Whether NO_PROXY covers a host ("name" or "name:port"): by suffix, or everything by "*"."""
    bare = host.rpartition(":")[0] if re.search(r":\d+$", host) else host
    names = [name.strip().lstrip(".").lower() for name in rule.split(",") if name.strip()]
    hosts = (host.lower(), bare.lower())
    return "*" in names or any(each == name or each.endswith(f".{name}") for name in names for each in hosts)


class _Proxies(urllib.request.ProxyHandler):
    def __init__(self, proxies: dict[str, str]) -> None:
        super().__init__({name: value for name, value in proxies.items() if name != "no"})
        self._rule = proxies.get("no", "")

    def proxy_open(self, req: urllib.request.Request, proxy: str, type: str) -> Any:
        # Not super().proxy_open, which looks at this process's own NO_PROXY.
        if bypasses(req.host, self._rule):
            return None
        scheme = req.type
        named = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        if named.username is not None:
            words = f"{unquote(named.username)}:{unquote(named.password or '')}"
            req.add_header("Proxy-Authorization", f"Basic {base64.b64encode(words.encode()).decode()}")
        req.set_proxy(named.netloc.rpartition("@")[2], named.scheme)
        return None if scheme in (named.scheme, "https") else self.parent.open(req, timeout=req.timeout)


class _SameHostOnly(urllib.request.HTTPRedirectHandler):
    """Follows redirects; the token goes along on the same scheme, host and port only."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Message, newurl: str
    ) -> urllib.request.Request | None:
        if urlsplit(newurl).scheme not in ("http", "https"):
            raise urllib.error.HTTPError(req.full_url, code, "a redirect to no web address", headers, fp)
        follow = super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]
        token = req.unredirected_hdrs.get("Authorization")
        if follow and token and _origin(newurl) == _origin(req.full_url):
            follow.add_unredirected_header("Authorization", token)
        return follow


class _Http(urllib.request.HTTPHandler):
    def __init__(self, opened: list[socket.socket]) -> None:
        super().__init__()
        self._opened = opened

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_remembering(http.client.HTTPConnection, self._opened), req)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, opened: list[socket.socket]) -> None:
        super().__init__()
        self._opened = opened

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_remembering(http.client.HTTPSConnection, self._opened), req)


def _remembering(kind: type[http.client.HTTPConnection], opened: list[socket.socket]) -> Callable[..., Any]:
    """Connections that put their socket in a list, so that another thread can shut it."""

    class Remembered(kind):  # type: ignore[misc, valid-type]
        def connect(self) -> None:
            super().connect()
            opened.append(self.sock)

    return Remembered


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port


def _retry_after(headers: Message) -> float:
    given = headers.get("Retry-After", "").strip()
    if given.isdigit():
        return min(float(given), LONGEST_WAIT)
    with contextlib.suppress(TypeError, ValueError):
        return min(max(email.utils.parsedate_to_datetime(given).timestamp() - time.time(), 0.0), LONGEST_WAIT)
    return 0.0


def first_line(error: object) -> str:
    """What an error says, without the number of the system's."""
    said = error.strerror if isinstance(error, OSError) and error.strerror else error
    return next(_lines(str(said)), type(error).__name__)


def _lines(text: str) -> Iterator[str]:
    return (line for line in text.splitlines() if line.strip())
