"""A stand-in for a release index and the host of its files, on loopback.

    with ReleaseServer() as server:
        server.release(11434, {"llama-b11434-bin-ubuntu-x64.tar.gz": content})
        ... LOOPRUN_ENGINE_INDEX = server.index ...

Like the real one it answers `/repos/OWNER/NAME/releases/tags/TAG` and `/releases?per_page=N` in JSON; the address of a
file redirects to another host name, where the bytes are. What can go wrong with bytes: `faults`, as of hub_server.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from tests.hub_server import BYTES_HOST, HubServer, _Handler

REPOSITORY = "/repos/ggml-org/llama.cpp"


class ReleaseServer(HubServer):
    """Serves what `release` was called with, the last call first, as the API does."""

    def __init__(self) -> None:
        super().__init__({}, handler=_Releases)
        self.releases: list[dict[str, Any]] = []
        self.answer: tuple[int, Mapping[str, str], bytes] | None = None
        """Status, headers and body of every answer of the API, in place of what is right."""

    @property
    def index(self) -> str:
        """What LOOPRUN_ENGINE_INDEX should be."""
        return f"{self.url}{REPOSITORY}"

    def release(self, build: int, files: Mapping[str, bytes], **changed: Any) -> None:
        """Publish a build. changed: other values of each of its files, such as digest=None."""
        tag = f"b{build}"
        assets = []
        for name, content in files.items():
            self.files[f"{tag}/{name}"] = content
            assets.append(
                {
                    "name": name,
                    "size": len(content),
                    "state": "uploaded",
                    "browser_download_url": f"{self.url}/download/{tag}/{name}",
                    "digest": f"sha256:{self.sha256(content)}",
                    **changed,
                }
            )
        self.releases.insert(0, {"tag_name": tag, "draft": False, "prerelease": True, "assets": assets})

    def asked(self) -> list[str]:
        """What the API was asked, as the path behind the repository."""
        paths = (request.path for request in self.requests)
        return [path.removeprefix(REPOSITORY) for path in paths if path.startswith(REPOSITORY)]

    def fetched(self) -> list[str]:
        """The files of which bytes were asked for."""
        return [request.path.removeprefix("/bytes/") for request in self.seen("GET", BYTES_HOST)]


class _Releases(_Handler):
    def _resolve(self, path: str) -> None:
        server = self.server.hub
        assert isinstance(server, ReleaseServer)
        path = urlsplit(path).path
        if path.startswith("/download/"):
            self._reply(302, {"Location": f"http://{BYTES_HOST}:{server.port}/bytes/{path.removeprefix('/download/')}"})
        elif server.answer:
            self._reply(*server.answer)
        elif path == f"{REPOSITORY}/releases":
            self._json(200, server.releases)
        else:
            tag = path.removeprefix(f"{REPOSITORY}/releases/tags/")
            found = next((each for each in server.releases if each["tag_name"] == tag), None)
            self._json(200 if found else 404, found or {"message": "Not Found", "status": "404"})

    def _json(self, status: int, value: Any) -> None:
        self._reply(status, {"Content-Type": "application/json; charset=utf-8"}, json.dumps(value).encode())
