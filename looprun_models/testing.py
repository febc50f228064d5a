"""For the tests of other runtimes: what `ModelRuntimePort` promises, as a test class. Needs pytest.

class TestMyRuntime(RuntimeContract):
    @pytest.fixture
    def runtime(self, network):
        return MyRuntime()

    @pytest.fixture
    def spec(self):
        return resolve_alias("smoke")  # a model that it can serve here and now, without a download
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, Self

import openai
import psutil
import pytest

from looprun_models.errors import LooprunError
from looprun_models.progress import Progress
from looprun_models.registry import LocalModelSpec
from looprun_models.runtime import ModelRuntimePort, RuntimeStatus, ServerHandle
from looprun_models.runtimes.external import http_options
from looprun_models.system import LOOPBACK

PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


@dataclasses.dataclass(frozen=True)
class Asked:
    """One request as it came in; body is the JSON that was sent, if any."""

    method: str
    path: str
    headers: Message
    body: Any = None


@dataclasses.dataclass(frozen=True)
class Reply:
    """body: a text as it is, anything else as JSON; None hangs up without an answer."""

    body: Any = None
    status: int = 200
    content_type: str = "application/json"


class LoopbackServer:
    """Answers on a free loopback port and keeps what it was asked.

    connections counts whatever connects, also what does not speak HTTP. A trap is a server that should not be asked.
    """

    def __init__(self, answer: Callable[[Asked], Reply] = lambda asked: Reply({"error": "a trap"}, 502)) -> None:
        self.answer = answer
        self.asked: list[Asked] = []
        self.connections = 0
        self._server = _Server((LOOPBACK, 0), _Handler)
        self._server.owner = self
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self._server.server_address[1]}"

    def paths(self, method: str = "POST") -> list[str]:
        return [asked.path for asked in self.asked if asked.method == method]

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    owner: LoopbackServer

    def verify_request(self, request: Any, client_address: Any) -> bool:
        self.owner.connections += 1
        return True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no error of the server."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def _answer(self) -> None:
        sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        asked = Asked(self.command, self.path, self.headers, json.loads(sent) if sent else None)
        self.server.owner.asked.append(asked)
        reply = self.server.owner.answer(asked)
        if reply.body is None:
            return
        text = reply.body if isinstance(reply.body, str) else json.dumps(reply.body)
        self.send_response(reply.status)
        self.send_header("Content-Type", reply.content_type)
        self.end_headers()
        self.wfile.write(text.encode())

    do_GET = do_POST = do_HEAD = do_CONNECT = _answer

    def log_message(self, format: str, *args: Any) -> None:
        pass


class RuntimeContract:
    """Inherit, and override the fixtures `runtime` and `spec`.

    starts: whether ensure_server starts servers (and stop ends them), or uses one that somebody else runs.
    """

    starts: ClassVar[bool] = True

    @pytest.fixture
    def runtime(self, network: LoopbackServer) -> ModelRuntimePort:
        raise NotImplementedError("override this fixture with one that gives your runtime")

    @pytest.fixture
    def spec(self) -> LocalModelSpec:
        raise NotImplementedError("override this fixture with a profile that your runtime can serve at once")

    @pytest.fixture
    def absent(self, spec: LocalModelSpec, tmp_path: Path) -> LocalModelSpec:
        """A profile whose model nobody has."""
        name = "contract-absent"
        return dataclasses.replace(
            spec,
            alias=name,
            served_id=name,
            file=f"{name}.gguf",
            default_dir=str(tmp_path),
            env_var="CONTRACT_ABSENT_GGUF",
            size_bytes=None,
            sha256=None,
        )

    @pytest.fixture
    def network(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackServer]:
        """A trap, in place of every proxy and of the Hub."""
        monkeypatch.setenv("LOOPRUN_KEEP_ALIVE", "0")
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        with LoopbackServer() as trap:
            for name in PROXIES:
                monkeypatch.setenv(name, trap.url)
                monkeypatch.setenv(name.lower(), trap.url)
            monkeypatch.setenv("HF_ENDPOINT", trap.url)
            yield trap

    @pytest.fixture
    def handle(self, runtime: ModelRuntimePort, spec: LocalModelSpec) -> Iterator[ServerHandle]:
        """A server in use, stopped at the end."""
        with runtime.ensure_server(spec) as handle:
            yield handle
            handle.stop()

    def test_has_every_part_of_the_port(self, runtime: ModelRuntimePort) -> None:
        assert isinstance(runtime, ModelRuntimePort)
        assert isinstance(runtime.id, str)
        assert runtime.id

    def test_status_looks_and_changes_nothing(
        self, runtime: ModelRuntimePort, spec: LocalModelSpec, network: LoopbackServer
    ) -> None:
        children = set(psutil.Process().children(recursive=True))
        first, second = runtime.status(spec), runtime.status(spec)
        assert isinstance(first, RuntimeStatus)
        assert first.runtime == runtime.id
        assert (
            (first.server.up, first.ready_to_start)
            == (second.server.up, second.ready_to_start)
            == (not self.starts, True)
        )
        assert set(psutil.Process().children(recursive=True)) == children
        assert network.connections == 0

    def test_status_of_an_absent_model_raises_nothing_and_says_what_to_do(
        self, runtime: ModelRuntimePort, absent: LocalModelSpec, network: LoopbackServer
    ) -> None:
        state = runtime.status(absent)
        parts = [part for part in (state.binary, state.model_file, state.server) if part is not None]
        assert any(part.fix for part in parts)
        if state.model_file:
            assert state.model_file.state in ("missing", "partial", "bad")
            assert not state.ready_to_start
        assert network.connections == 0

    def test_ensure_model_says_where_it_is(self, runtime: ModelRuntimePort, spec: LocalModelSpec) -> None:
        where = runtime.ensure_model(spec)
        assert where.exists() if isinstance(where, Path) else where

    def test_ensure_model_without_download_fetches_nothing(
        self, runtime: ModelRuntimePort, absent: LocalModelSpec, network: LoopbackServer, tmp_path: Path
    ) -> None:
        where: Path | str | None = None
        refused: LooprunError | None = None
        try:
            where = runtime.ensure_model(absent)
        except LooprunError as error:
            refused = error
        assert refused.hint if refused else isinstance(where, str), "a file that is not there has no path"
        assert network.connections == 0
        assert not list(tmp_path.glob("*.gguf"))

    def test_an_absent_model_is_refused_with_the_next_step(
        self, runtime: ModelRuntimePort, absent: LocalModelSpec, network: LoopbackServer
    ) -> None:
        with pytest.raises(LooprunError) as caught:
            runtime.ensure_server(absent)
        assert caught.value.hint
        assert network.connections == 0

    def test_auto_start_off_starts_nothing(self, runtime: ModelRuntimePort, spec: LocalModelSpec) -> None:
        if not self.starts:
            with runtime.ensure_server(spec, auto_start=False) as handle:
                assert handle.already_running
            return
        with pytest.raises(LooprunError) as caught:
            runtime.ensure_server(spec, auto_start=False)
        assert caught.value.hint
        assert not runtime.status(spec).server.up

    def test_the_server_is_ready_and_serves_the_model(
        self, runtime: ModelRuntimePort, spec: LocalModelSpec, handle: ServerHandle, network: LoopbackServer
    ) -> None:
        assert isinstance(handle, ServerHandle)
        assert handle.already_running is not self.starts
        assert handle.base_url.startswith(("http://", "https://"))
        assert handle.base_url.endswith("/v1")
        served_id = getattr(handle, "served_id", spec.served_id)
        assert served_id in [model["id"] for model in ask(handle, "/models")["data"]]
        question = {"model": served_id, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
        assert ask(handle, "/chat/completions", question)["choices"][0]["message"]
        server = runtime.status(spec).server
        assert (server.up, server.base_url, server.fix) == (True, handle.base_url, "")
        assert network.connections == 0

    def test_a_second_user_shares_the_server(
        self, runtime: ModelRuntimePort, spec: LocalModelSpec, handle: ServerHandle
    ) -> None:
        with runtime.ensure_server(spec, auto_start=False) as second:
            assert second.already_running
            assert second.base_url == handle.base_url
        assert ask(handle, "/models"), "the one that leaves must not end it for the other"

    def test_a_handle_can_be_left_and_stopped_more_than_once(
        self, runtime: ModelRuntimePort, spec: LocalModelSpec
    ) -> None:
        handle = runtime.ensure_server(spec)
        with handle as entered:
            assert entered.base_url == handle.base_url
            handle.stop()
            assert runtime.status(spec).server.up is not self.starts
            handle.stop()
        handle.__exit__(None, None, None)
        handle.stop()

    def test_progress_is_told_in_the_common_form(self, runtime: ModelRuntimePort, spec: LocalModelSpec) -> None:
        told: list[Progress] = []
        with runtime.ensure_server(spec, timeout=240, on_progress=told.append) as handle:
            handle.stop()
        assert all(isinstance(progress, Progress) and 0 <= progress.done <= progress.total for progress in told)


def ask(handle: ServerHandle, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """The JSON that a server answers under its base_url: GET, or POST when there is a body."""
    headers = {"Authorization": f"Bearer {handle.api_key}"} if handle.api_key else {}
    with openai.DefaultHttpxClient(**http_options(handle.base_url)) as http:
        url = handle.base_url + path
        answer = http.get(url, headers=headers) if body is None else http.post(url, headers=headers, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()
