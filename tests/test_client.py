"""What an agent's program sees: the client of a real engine on tiny models, and of servers that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import looprun_models
from looprun_models import LocalModel, async_local_model, local_model, local_model_status
from looprun_models.client import AsyncLocalModel, ContextOverflowError
from looprun_models.errors import (
    ContextOverflow,
    LooprunError,
    ServerUnavailable,
    StartFailed,
    UnknownAlias,
    UsageError,
    WeightsMissing,
)
from looprun_models.lease import stop_server
from looprun_models.progress import Progress
from looprun_models.records import list_servers
from looprun_models.registry import resolve_alias
from looprun_models.runtimes.external import ExternalRuntime, http_options
from looprun_models.settings import load_settings
from looprun_models.testing import Asked, LoopbackServer, Reply
from tests.helpers import free_port, gone, wait_for
from tests.hub_server import HubServer

HELLO = "Hello from the tiny hybrid model."
CTX = 512
LONG = "x" * 2 * CTX  # about a token a letter
Profile = Callable[..., str]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """State and cache of the servers that these tests share; all are stopped at the end."""
    folder = tmp_path_factory.mktemp("client")
    yield folder
    settings = load_settings({"LOOPRUN_STATE_DIR": str(folder / "state"), "PATH": os.environ["PATH"]})
    for record in list_servers(settings):
        stop_server(record, force=True)
    assert list_servers(settings) == []


@pytest.fixture(autouse=True)
def known_engine(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines are examined once, not in every test."""
    monkeypatch.setenv("LOOPRUN_CACHE_DIR", str(folders / "cache"))


@pytest.fixture
def shared(folders: Path, profile: Profile, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LocalModel]:
    """`shared("tiny-qwen35-mtp")` is a client of a server that stays for the next test. It is the caller's to close."""
    monkeypatch.setenv("LOOPRUN_STATE_DIR", str(folders / "state"))

    def start(name: str = "tiny-qwen35-mtp", **options: Any) -> LocalModel:
        return local_model(profile(name, ctx=CTX, port=free_port()), keep_alive=600, **options)

    return start


@pytest.fixture
def model(shared: Callable[..., LocalModel]) -> Iterator[LocalModel]:
    with shared() as model:
        yield model


@pytest.fixture
def own(profile: Profile) -> Callable[..., str]:
    """An alias whose server ends with the test."""
    return lambda name="tiny-qwen35-mtp", **changed: profile(name, **{"ctx": CTX, "port": free_port(), **changed})


@pytest.fixture
def fake(profile: Profile) -> Iterator[Callable[..., tuple[LocalModel, LoopbackServer]]]:
    """A client of a server that lists the model and answers everything else as it is told."""
    with contextlib.ExitStack() as stack:

        def start(reply: Reply, **changed: Any) -> tuple[LocalModel, LoopbackServer]:
            def answer(asked: Asked) -> Reply:
                return Reply({"data": [{"id": "fake"}]}) if asked.path == "/v1/models" else reply

            server = stack.enter_context(LoopbackServer(answer))
            alias = profile("tiny-qwen35", served_id="fake", **changed)
            return stack.enter_context(local_model(alias, runtime=ExternalRuntime(server.url))), server

        yield start


@pytest.fixture
def gated_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], object]:
    """The engine loads nothing until the function that this gives is called."""
    gate, program = tmp_path / "gate", tmp_path / "llama-server"
    program.write_text(
        f"#!{sys.executable}\nimport os, sys, time\n"
        f"while '-m' in sys.argv and 'engine-check' not in str(sys.argv) and not os.path.exists({str(gate)!r}):\n"
        "    time.sleep(0.01)\n"
        f"os.execv({sys.executable!r}, [{sys.executable!r}, '-m', 'looprun_models.embedded', *sys.argv[1:]])\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("LLAMA_BIN", str(program))
    return gate.touch


def chat(model: Any, content: str = "Hello?", *, system: str = "", max_tokens: int = 60, **options: Any) -> Any:
    """The completion, the stream, or (from an async model) something to await."""
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": content})
    pinned = model.pinned(max_tokens=max_tokens, **{k: options.pop(k) for k in ("thinking", "seed") if k in options})
    return model.chat.completions.create(model=model.model, messages=messages, **pinned, **options)


def text(completion: Any) -> str:
    return str(completion.choices[0].message.content)


def kill_engine(model: LocalModel | AsyncLocalModel) -> None:
    os.kill(model.server.record.child_pid, signal.SIGKILL)  # type: ignore[attr-defined]


# --- a model that works ----------------------------------------------------------------------------------------------


@pytest.mark.engine
def test_it_answers_and_says_what_it_is(model: LocalModel) -> None:
    assert isinstance(model, openai.OpenAI)
    assert text(chat(model)) == HELLO
    assert model.model == "tiny-qwen35-mtp-gguf"
    assert model.spec == resolve_alias("tiny-qwen35-mtp")
    assert model.server.base_url == f"http://127.0.0.1:{model.server.record.port}/v1"  # type: ignore[attr-defined]
    assert [listed.id for listed in model.models.list()] == [model.model]
    assert looprun_models.localModel is local_model


@pytest.mark.engine
def test_drafts_are_accepted_and_change_no_byte(
    shared: Callable[..., LocalModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    with shared("tiny-qwen35-mtp-state") as drafting:
        with_drafts = chat(drafting, "Count, please.", max_tokens=80)
    monkeypatch.setenv("LLAMA_SPEC_TYPE", "")
    with shared("tiny-qwen35-mtp-state") as plain:
        without = chat(plain, "Count, please.", max_tokens=80)
    assert 0 < with_drafts.timings["draft_n_accepted"] <= with_drafts.timings["draft_n"]
    assert "draft_n" not in without.timings
    assert text(with_drafts) == text(without)
    assert len(text(without)) > 80


@pytest.mark.engine
def test_a_system_prompt_is_read_once(model: LocalModel) -> None:
    system = "You keep the books of a small bakery. " * 6
    first = chat(model, "Cold?", system=system)
    second = chat(model, "And now?", system=system)
    assert first.timings["prompt_n"] > 150 > 50 > second.timings["prompt_n"]
    assert second.timings["cache_n"] + second.timings["prompt_n"] == second.usage.prompt_tokens
    assert text(second) == HELLO


@pytest.mark.engine
def test_tool_calls_arrive_as_openai_has_them(shared: Callable[..., LocalModel]) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
    with shared("tiny-qwen35-mtp-tool") as model:
        choice = chat(model, "Weather in Paris?", max_tokens=120, tools=[tool]).choices[0]
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls
    assert (call.function.name, call.function.arguments.replace(" ", "")) == ("get_weather", '{"city":"Paris"}')


@pytest.mark.engine
def test_streams_arrive_in_pieces(model: LocalModel) -> None:
    chunks = list(chat(model, stream=True))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == HELLO
    assert len(pieces) > 2
    with model.chat.completions.stream(
        model=model.model, messages=[{"role": "user", "content": "Hello?"}], **model.pinned(max_tokens=60)
    ) as stream:
        assert text(stream.get_final_completion()) == HELLO


@pytest.mark.engine
def test_pinned_turns_thinking_off_unless_it_is_wanted(model: LocalModel) -> None:
    assert "reasoning_content" not in (chat(model).choices[0].message.model_extra or {})
    assert chat(model, thinking=True).choices[0].message.reasoning_content.strip() == "Okay."


@pytest.mark.engine
def test_pinned_caps_a_model_that_never_stops(shared: Callable[..., LocalModel]) -> None:
    with shared("tiny-qwen35-mtp-loop") as model:
        capped = chat(model, max_tokens=17)
        full = chat(model, max_tokens=10 * CTX)
    assert (capped.choices[0].finish_reason, capped.usage.completion_tokens) == ("length", 17)
    assert full.choices[0].finish_reason == "length", "a full context ends the answer"
    assert CTX - 2 <= full.usage.total_tokens <= CTX


def test_pinned_reaches_the_server(fake: Callable[..., tuple[LocalModel, LoopbackServer]]) -> None:
    model, server = fake(Reply({"choices": []}))
    chat(model, max_tokens=7, seed=5)
    chat(model, thinking=True)
    first, second = (asked.body for asked in server.asked if asked.method == "POST")
    assert {name: first[name] for name in ("model", "temperature", "max_tokens", "seed", "chat_template_kwargs")} == {
        "model": "fake",
        "temperature": 0,
        "max_tokens": 7,
        "seed": 5,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert (second["seed"], second["chat_template_kwargs"]) == (0, {"enable_thinking": True})


def test_pinned_keeps_the_template_arguments_of_the_profile(
    fake: Callable[..., tuple[LocalModel, LoopbackServer]], home: Path
) -> None:
    model, _ = fake(Reply({"choices": []}))
    path = home / ".config" / "looprun" / "profiles" / f"{model.spec.alias}.toml"
    path.write_text(path.read_text() + "[template_args]\nlanguage = 'fr'\nenable_thinking = true\n")
    with local_model(model.spec.alias, runtime=ExternalRuntime(model.server.base_url)) as again:
        pinned = again.pinned(max_tokens=1)
    assert pinned["extra_body"] == {"chat_template_kwargs": {"language": "fr", "enable_thinking": False}}


# --- copies and ends -------------------------------------------------------------------------------------------------


@pytest.mark.engine
def test_a_copy_is_a_local_model_too_and_ends_nothing(own: Callable[..., str]) -> None:
    with local_model(own()) as model:
        for copied in (model.with_options(timeout=30), model.copy(), model.with_options().with_options()):
            assert type(copied) is LocalModel
            assert (copied.model, copied.spec, copied.server) == (model.model, model.spec, model.server)
            assert copied.max_retries == 0
            with copied:
                assert text(chat(copied)) == HELLO
            copied.close()
        assert text(chat(model)) == HELLO
        pid = model.server.record.child_pid  # type: ignore[attr-defined]
        assert not gone(pid)
    wait_for(lambda: gone(pid), "the server ends with its only user")


@pytest.mark.engine
def test_closing_twice_is_closing_once(own: Callable[..., str]) -> None:
    alias = own()
    first, second = local_model(alias), local_model(alias)
    assert (first.server.already_running, second.server.already_running) == (False, True)
    first.close()
    first.close()
    assert text(chat(second)) == HELLO
    second.close()
    with second:
        pass
    wait_for(lambda: gone(second.server.record.child_pid), "the server ends")  # type: ignore[attr-defined]


# --- async -----------------------------------------------------------------------------------------------------------


@pytest.mark.engine
def test_the_async_twin(own: Callable[..., str]) -> None:
    alias = own()

    async def agent() -> None:
        async with async_local_model(alias) as model:
            assert isinstance(model, openai.AsyncOpenAI)
            assert text(await chat(model)) == HELLO
            awaited = await async_local_model(alias)
            assert awaited.server.already_running
            copied = awaited.with_options(timeout=30)
            assert (type(copied), copied.model) == (AsyncLocalModel, model.model)
            await copied.close()
            assert text(await chat(copied)) == HELLO
            chunks = [chunk async for chunk in await chat(awaited, stream=True)]
            assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == HELLO
            with pytest.raises(ContextOverflow):
                await chat(awaited, LONG)
            with pytest.raises(ContextOverflow):
                await chat(awaited, LONG, stream=True)
            await awaited.close()
            await awaited.close()
            assert text(await chat(model)) == HELLO
            pid = model.server.record.child_pid  # type: ignore[attr-defined]
        await asyncio.to_thread(wait_for, lambda: gone(pid), "the server ends")

    asyncio.run(agent())


@pytest.mark.engine
def test_the_event_loop_goes_on_during_the_start(own: Callable[..., str], gated_engine: Callable[[], object]) -> None:
    """The engine only loads once the loop has turned a hundred times: a start that blocked it would never end."""
    alias = own()

    async def agent() -> None:
        starting = asyncio.ensure_future(async_local_model(alias, timeout=60).__aenter__())
        for _ in range(100):
            await asyncio.sleep(0)
            assert not starting.done()
        gated_engine()
        async with await starting as model:
            assert text(await chat(model)) == HELLO

    asyncio.run(agent())


@pytest.mark.engine
def test_a_cancelled_start_leaves_no_server(own: Callable[..., str], gated_engine: Callable[[], object]) -> None:
    alias = own()

    async def agent() -> None:
        loading = asyncio.Event()
        loop = asyncio.get_running_loop()

        def on_progress(_: Progress) -> None:
            loop.call_soon_threadsafe(loading.set)

        async def use() -> None:
            async with async_local_model(alias, timeout=90, on_progress=on_progress):
                pytest.fail("the gate was never opened")

        task = asyncio.create_task(use())
        await loading.wait()
        [record] = list_servers(load_settings())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(wait_for, lambda: gone(record.child_pid), "the engine ends though it never loaded")
        await asyncio.to_thread(wait_for, lambda: not list_servers(load_settings()), "the record goes")

    asyncio.run(agent())


def test_a_start_that_was_ready_too_late_is_given_up(profile: Profile) -> None:
    """Cancelled in the moment between readiness and the caller's getting it: nobody else could close the handle."""
    alias, given_up = profile("tiny-qwen35"), threading.Event()
    may_return, entered = threading.Event(), threading.Event()

    class Handle:
        base_url, api_key, already_running = "http://127.0.0.1:9/v1", None, False

        def __exit__(self, *_: object) -> None:
            given_up.set()

    class Slow:
        id = "slow"

        def ensure_server(self, *_: object, **__: object) -> Handle:
            entered.set()
            may_return.wait()
            return Handle()

    async def agent() -> None:
        task = asyncio.create_task(async_local_model(alias, runtime=Slow()).__aenter__())  # type: ignore[arg-type]
        await asyncio.to_thread(entered.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not given_up.is_set()
        may_return.set()
        assert await asyncio.to_thread(given_up.wait, 30)

    asyncio.run(agent())


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.engine
@pytest.mark.parametrize("kind", [ContextOverflow, LooprunError, openai.BadRequestError])
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(
    model: LocalModel, kind: type[Exception], stream: bool
) -> None:
    with pytest.raises(kind) as caught:
        chat(model, LONG, stream=stream)
    error = caught.value
    assert isinstance(error, ContextOverflowError)
    assert error.context == CTX
    assert error.prompt_tokens > len(LONG)
    assert f"{error.prompt_tokens} tokens" in str(error)
    assert str(CTX) in str(error)
    assert error.hint.endswith("LLAMA_CTX=4096")
    assert error.status_code == 400


def test_an_overflow_told_inside_a_stream_is_the_same_error(
    fake: Callable[..., tuple[LocalModel, LoopbackServer]],
) -> None:
    said = '{"type": "exceed_context_size_error", "message": "too long", "n_prompt_tokens": 900, "n_ctx": 512}'
    model, _ = fake(Reply(f'data: {{"error": {said}}}\n\n', content_type="text/event-stream"))
    with pytest.raises(ContextOverflow) as caught:
        list(chat(model, stream=True))
    assert (caught.value.prompt_tokens, caught.value.context) == (900, 512)


@pytest.mark.parametrize(
    ("said", "message", "kind"),
    [
        (
            '{"error": {"code": 500, "message": "slot 0 failed", "type": "server_error"}}',
            "slot 0 failed",
            "server_error",
        ),
        ('{"error": "the GPU is lost"}', "the GPU is lost", None),
    ],
)
def test_an_error_inside_a_stream_keeps_its_message_and_type(
    fake: Callable[..., tuple[LocalModel, LoopbackServer]], said: str, message: str, kind: str | None
) -> None:
    piece = '{"choices": [{"index": 0, "delta": {"content": "Hel"}}]}'
    model, server = fake(Reply(f"data: {piece}\n\ndata: {said}\n\n", content_type="text/event-stream"))
    stream = iter(chat(model, stream=True))
    assert next(stream).choices[0].delta.content == "Hel"
    with pytest.raises(openai.APIError) as caught:
        next(stream)
    assert (str(caught.value), caught.value.type) == (message, kind)

    async def agent() -> None:
        async with async_local_model(model.spec.alias, runtime=ExternalRuntime(server.url)) as twin:
            with pytest.raises(openai.APIError, match=message):
                _ = [chunk async for chunk in await chat(twin, stream=True)]

    asyncio.run(agent())


def test_a_server_that_is_loading_is_unavailable(fake: Callable[..., tuple[LocalModel, LoopbackServer]]) -> None:
    loading = {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}
    model, _ = fake(Reply(loading, 503))
    for stream in (False, True):
        with pytest.raises(ServerUnavailable, match="tiny-qwen35 is not ready: Loading model") as caught:
            chat(model, stream=stream)
        assert caught.value.hint == "looprun models status tiny-qwen35"
        assert isinstance(caught.value, openai.InternalServerError)


@pytest.mark.engine
def test_a_killed_engine_is_named_as_the_cause(own: Callable[..., str]) -> None:
    with local_model(own("tiny-qwen35-mtp-loop", ctx=65536)) as model:
        stream = iter(chat(model, stream=True, max_tokens=60000))
        next(stream)
        kill_engine(model)
        caught = []
        with pytest.raises(ServerUnavailable) as cut:
            list(stream)
        caught.append(cut.value)
        for _ in range(2):
            with pytest.raises(ServerUnavailable) as call:
                chat(model)
            caught.append(call.value)
    log = model.server.record.log  # type: ignore[attr-defined]
    for error in caught:
        assert "SIGKILL" in str(error)
        assert f"(log: {log})" in str(error)
        assert "looprun models" in error.hint
        assert str(error).count("next: ") == 1
        assert isinstance(error, openai.APIConnectionError)
    assert Path(log).is_file()


@pytest.mark.engine
def test_a_killed_engine_is_named_to_async_callers_too(own: Callable[..., str]) -> None:
    alias = own("tiny-qwen35-mtp-loop", ctx=65536)

    async def agent() -> None:
        async with async_local_model(alias) as model:
            stream = await chat(model, stream=True, max_tokens=60000)
            await anext(aiter(stream))
            kill_engine(model)
            with pytest.raises(ServerUnavailable, match="SIGKILL"):
                _ = [chunk async for chunk in stream]
            with pytest.raises(ServerUnavailable, match="SIGKILL"):
                await chat(model)

    asyncio.run(agent())


def test_a_server_nobody_can_explain_is_unavailable_at_its_address(
    fake: Callable[..., tuple[LocalModel, LoopbackServer]],
) -> None:
    model, server = fake(Reply(None))
    with pytest.raises(ServerUnavailable, match=f"the server at {server.url}/v1 does not answer") as caught:
        chat(model)
    assert caught.value.hint == "looprun models status tiny-qwen35"
    assert server.paths() == ["/v1/chat/completions"], "a call that hung up is not sent again"


def test_a_limit_of_the_callers_own_stays_a_timeout(profile: Profile) -> None:
    release = threading.Event()

    def answer(asked: Asked) -> Reply:
        if asked.path != "/v1/models":
            release.wait(60)
        return Reply({"data": [{"id": "fake"}]})

    with LoopbackServer(answer) as server:
        alias = profile("tiny-qwen35", served_id="fake")
        with local_model(alias, runtime=ExternalRuntime(server.url)) as model:
            assert (model.timeout.read, model.timeout.connect) == (None, 5.0)  # type: ignore[union-attr]
            with pytest.raises(openai.APITimeoutError):
                chat(model.with_options(timeout=0.2))
            assert len(server.paths()) == 1
        release.set()


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 504])
def test_nothing_is_asked_twice(fake: Callable[..., tuple[LocalModel, LoopbackServer]], status: int) -> None:
    model, server = fake(Reply({"error": {"message": "no"}}, status))
    with pytest.raises(openai.APIStatusError):
        chat(model)
    with pytest.raises(openai.APIStatusError):
        chat(model.with_options(timeout=60))
    assert server.paths() == ["/v1/chat/completions"] * 2


# --- what must stay on this machine ----------------------------------------------------------------------------------


@pytest.mark.engine
def test_no_proxy_sees_a_request(own: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    with LoopbackServer() as proxy:
        for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        with local_model(own()) as model:
            assert text(chat(model)) == HELLO
            assert text(chat(model.with_options(timeout=60))) == HELLO
            assert local_model_status(model.spec.alias).server.up
        assert proxy.connections == 0


def test_nothing_of_the_cloud_reaches_the_server(
    fake: Callable[..., tuple[LocalModel, LoopbackServer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LoopbackServer() as cloud:
        secrets = {
            "OPENAI_API_KEY": "sk-secret",
            "OPENAI_ADMIN_KEY": "sk-admin-secret",
            "OPENAI_ORG_ID": "org-secret",
            "OPENAI_PROJECT_ID": "proj-secret",
            "OPENAI_WEBHOOK_SECRET": "hook-secret",
            "OPENAI_CUSTOM_HEADERS": "X-Tenant: secret\nAuthorization: Bearer sk-header-secret",
            "OPENAI_BASE_URL": f"{cloud.url}/secret",
        }
        for name, value in secrets.items():
            monkeypatch.setenv(name, value)
        model, server = fake(Reply({"choices": []}))
        chat(model)
        chat(model.with_options(timeout=60))
        chat(model.copy().with_options(default_headers={"X-Mine": "kept"}))
        chat(model.with_options(default_headers={"X-Mine": "kept"}).with_options(set_default_headers={"X-Other": "1"}))

        async def agent() -> None:
            async with async_local_model(model.spec.alias, runtime=ExternalRuntime(server.url)) as twin:
                await chat(twin)
                await chat(twin.with_options(timeout=60))

        asyncio.run(agent())
        assert cloud.connections == 0
    posts = [asked.headers for asked in server.asked if asked.method == "POST"]
    assert len(posts) == 6
    for headers in posts:
        assert "secret" not in str(headers)
        assert headers["Authorization"] == "Bearer none"
        assert not [name for name in headers if name.lower().startswith("openai-")]
    assert [headers["X-Mine"] for headers in posts] == [None, None, "kept", None, None, None]
    assert posts[3]["X-Other"] == "1"


def test_only_servers_elsewhere_use_proxies_and_certificates() -> None:
    def trusts(url: str) -> tuple[bool, bool]:
        options = http_options(url)
        return options["trust_env"], options["verify"]

    assert trusts("http://127.0.0.1:8081/v1") == trusts("http://[::1]:8081/v1") == (False, False)
    assert trusts("https://127.0.0.1:8081/v1") == (False, True)
    assert trusts("https://llm.example.org/v1") == trusts("http://llm.example.org/v1") == (True, True)


# --- what is asked for -----------------------------------------------------------------------------------------------


def test_without_auto_start_nothing_starts(own: Callable[..., str]) -> None:
    alias = own()
    with pytest.raises(StartFailed, match=f"no server for {alias} is running") as caught:
        local_model(alias, auto_start=False)
    assert caught.value.hint == f"looprun models serve {alias}"
    assert list_servers(load_settings()) == []


def test_a_name_that_is_no_profile_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownAlias, match=r"unknown model alias 'ram61'. Did you mean .*ram16") as caught:
        local_model("ram61")
    assert caught.value.hint == "looprun models list"
    with pytest.raises(UnknownAlias):
        asyncio.run(async_local_model("ram61").__aenter__())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": 0}, "port=0 cannot be used"),
        ({"port": 65536}, "port=65536 cannot be used"),
        ({"keep_alive": -1.0}, "keep_alive=-1.0 cannot be used"),
        ({"keep_alive": float("nan")}, "keep_alive=nan cannot be used"),
        ({"engine_flags": ["--port", "1"]}, "--port is decided by looprun"),
        ({"runtime": "external", "port": 8081}, "are for the llama-cpp runtime"),
        ({"runtime": "external", "engine_flags": ["-v"]}, "are for the llama-cpp runtime"),
    ],
)
def test_an_option_that_cannot_be_used_is_refused_before_anything_starts(
    own: Callable[..., str], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        local_model(own(), **options)
    assert caught.value.hint
    assert list_servers(load_settings()) == []


@pytest.mark.engine
def test_progress_is_told_while_it_loads(own: Callable[..., str], gated_engine: Callable[[], object]) -> None:
    told: list[Progress] = []

    def on_progress(progress: Progress) -> None:
        told.append(progress)
        gated_engine()

    with local_model(own(), on_progress=on_progress) as model:
        size = Path(model.server.record.model_path).stat().st_size  # type: ignore[attr-defined]
    assert {progress.phase for progress in told} == {"loading"}
    assert all(0 <= progress.done <= progress.total == size for progress in told)


@pytest.mark.engine
def test_a_missing_model_is_only_fetched_when_that_was_asked_for(
    own: Callable[..., str], tiny_gguf: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, folder = tiny_gguf("tiny-qwen35-mtp"), tmp_path / "weights"
    content = source.read_bytes()
    with HubServer({f"nobody/tiny/{source.name}": content}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        alias = own(default_dir=str(folder), sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content))
        with pytest.raises(WeightsMissing) as caught:
            local_model(alias)
        assert caught.value.hint == f"looprun models pull {alias}"
        assert local_model_status(alias).model_file.state == "missing"  # type: ignore[union-attr]
        assert hub.requests == []
        assert not folder.exists()

        phases: list[str] = []
        with local_model(alias, auto_download=True, on_progress=lambda told: phases.append(told.phase)) as model:
            assert text(chat(model)) == HELLO
        assert {"downloading", "hashing"} <= set(phases)
        assert sorted(path.name for path in folder.iterdir()) == [source.name, f"{source.name}.receipt.json"]
        asked = len(hub.requests)
        assert asked > 0
        with local_model(alias, auto_download=True):
            pass
        assert len(hub.requests) == asked, "what is there is not asked for again"
