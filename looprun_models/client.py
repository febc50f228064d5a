"""From code: `with local_model("ram16") as model: model.chat.completions.create(model=model.model, ...)`.

What comes back is an OpenAI client that talks to the local server and to nothing else: no proxy, no OPENAI_* variable,
no retry (a retry repeats a long prefill), no read limit shorter than the work.
"""

from __future__ import annotations

import asyncio
import functools
import math
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

import openai
from openai.resources.chat import Chat as _Chat  # noqa: F401 (loaded now: the first `.chat` would otherwise pay for it)

from looprun_models.errors import ContextOverflow, LooprunError, ServerUnavailable, UsageError
from looprun_models.prefix import check_label
from looprun_models.progress import OnProgress, Progress
from looprun_models.registry import LocalModelSpec, resolve_alias
from looprun_models.request import Options
from looprun_models.resident import AsyncTrunk, Trunk
from looprun_models.runtime import (
    LLAMA_CPP,
    LlamaCppRuntime,
    ModelRuntimePort,
    RuntimeStatus,
    ServerHandle,
    load_runtime,
)
from looprun_models.runtimes.external import http_library, http_options
from looprun_models.settings import load_settings
from looprun_models.slot import SlotRefused
from looprun_models.trunks import Keeper

CONNECT_TIMEOUT = 5.0
"""Seconds; a loopback server accepts at once or not at all. There is no read limit: a long prefill is not a failure."""
AnyTrunk = TypeVar("AnyTrunk", Trunk, AsyncTrunk)
NO_KEY = "none"
REASON_TIMEOUT = 3.0
"""Seconds to wait for the reason of a broken connection: the supervisor hears of an engine's end after its client."""

_http = http_library()  # openai 2 lets its errors out of a stream, openai 3 wraps them
openai.DefaultHttpxClient(trust_env=False, verify=False).close()  # loads its transport now, for the same reason


class ContextOverflowError(ContextOverflow, openai.BadRequestError):
    """`except ContextOverflow` and `except openai.BadRequestError` both catch it."""

    def __init__(self, prompt_tokens: int, context: int, *, response: Any, body: object) -> None:
        message = f"the prompt has {prompt_tokens} tokens and the context holds {context}."
        openai.BadRequestError.__init__(self, message, response=response, body=body)
        self.prompt_tokens, self.context = prompt_tokens, context
        self.hint = f"shorten the prompt, or serve a longer context: LLAMA_CTX={_next_context(prompt_tokens)}"


class NotReadyError(ServerUnavailable, openai.InternalServerError):
    """The server answers that it is loading."""

    def __init__(self, message: str, *, hint: str, response: Any, body: object) -> None:
        openai.InternalServerError.__init__(self, message, response=response, body=body)
        self.hint = hint


class ServerGoneError(ServerUnavailable, openai.APIConnectionError):
    """Nobody answers any more; the message says why, as far as it is known."""

    def __init__(self, message: str, *, hint: str, request: Any) -> None:
        openai.APIConnectionError.__init__(self, message=message, request=request)
        self.hint = hint


class _Local:
    """What both clients have besides OpenAI's methods.

    model: the served id, for `model=`. spec: the profile. server: the handle of the running server.
    """

    model: str
    spec: LocalModelSpec
    server: ServerHandle
    _owner: bool

    def pinned(self, *, max_tokens: int, thinking: bool = False, seed: int = 0) -> dict[str, Any]:
        """Decoding arguments for an agent's call: temperature 0, a cap, a seed, and thinking off.

        An uncapped local generation was measured at 8.7k tokens over 302 s; this family thinks by default and spends
        max_tokens on it. Use as `create(model=..., messages=..., **model.pinned(max_tokens=200))`.
        """
        template_args = {**self.spec.template_args, "enable_thinking": thinking}
        return {
            "temperature": 0,
            "max_tokens": max_tokens,
            "seed": seed,
            "extra_body": {"chat_template_kwargs": template_args},
        }

    def _keeper(self) -> Keeper:
        record = getattr(self.server, "record", None)
        if record is None:
            raise UsageError(
                f"trunks need a server that looprun runs; {self.spec.alias} is served by {type(self.server).__name__}.",
                hint="use model.chat.completions.create(...) there, or leave runtime= out",
            )
        return Keeper(record, load_settings())

    def _make_trunk(
        self, kind: Callable[..., AnyTrunk], label: str, messages: Iterable[Any], tools: Any, template_args: Any
    ) -> AnyTrunk:
        check_label(label)
        keeper = self._keeper()
        try:
            prefix = keeper.prefix(messages, tools, self.spec.template_args if template_args is None else template_args)
            with keeper.turn() as may_restore:
                ready = keeper.bring(prefix, label, save=True, may_restore=may_restore)
        except SlotRefused as refused:
            raise self._refused(refused) from refused
        return kind(self, keeper, label, prefix, ready)

    def _refused(self, refused: SlotRefused) -> LooprunError:
        if refused.status:
            return ServerUnavailable(
                f"the engine refused: {refused.why}", hint=f"looprun models logs {self.spec.alias}"
            )
        return self._gone(_http.Request("POST", self.server.base_url))

    def _adopt(self, source: Self, headers: Mapping[str, str]) -> Self:
        """Make a copy by `with_options()` a local model as well; only the original gives the server up."""
        self.model, self.spec, self.server, self._owner = source.model, source.spec, source.server, False
        _forget_cloud(self, headers)
        return self

    def _status_error(self, standard: openai.APIStatusError) -> openai.APIStatusError:
        body = standard.body if isinstance(standard.body, dict) else {}
        if body.get("type") == "exceed_context_size_error":
            return _overflow(body, standard.response) or standard
        if standard.status_code == 503:
            return NotReadyError(
                f"{self.spec.alias} is not ready: {body.get('message', standard.message)}",
                hint=f"looprun models status {self.spec.alias}",
                response=standard.response,
                body=body,
            )
        return standard

    def _check_server(self) -> None:
        """After its server's end, its port may be another's, with another model."""
        if getattr(self.server, "why_gone", None) and self.server.why_gone(0):  # type: ignore[attr-defined]
            raise self._gone(_http.Request("POST", self.server.base_url))

    def _gone(self, request: Any) -> ServerGoneError:
        """Waits up to REASON_TIMEOUT for the reason."""
        ask = getattr(self.server, "why_gone", None)
        reason = ask(REASON_TIMEOUT) if ask else None
        message = reason.message if reason else f"the server at {self.server.base_url} does not answer."
        log = getattr(reason, "log", None)
        return ServerGoneError(
            f"{message} (log: {log})" if log else message,
            hint=(reason and reason.hint) or f"looprun models status {self.spec.alias}",
            request=request,
        )


class LocalModel(_Local, openai.OpenAI):
    """An `openai.OpenAI` on a local server. Closing it, or leaving its `with` block, gives the server up."""

    def copy(self, **options: Any) -> Self:
        """As OpenAI's; the copy talks to the same server and does not end its use."""
        copied = super().copy(**options)
        return copied._adopt(self, _copied_headers(self, options))

    with_options = copy

    def trunk(
        self,
        label: str,
        *,
        messages: Sequence[Any],
        tools: Sequence[Any] | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> Trunk:
        """Make an agent's fixed beginning resident in the server, and keep it so over turns, switches and restarts.

        label: any text; only a name. messages: what every chat of the agent begins with. template_args: arguments of
        the chat template, the profile's by default. Raises TrunkRefused when chats that begin so share no prefix.
        """
        return self._make_trunk(Trunk, label, messages, tools, template_args)

    def close(self) -> None:
        """Give the server up; it ends when nobody uses it and its keep-alive is over. Idempotent."""
        if self._owner:
            super().close()
            self.server.__exit__(None, None, None)

    def request(self, *args: Any, **options: Any) -> Any:
        self._check_server()
        try:
            answer = super().request(*args, **options)
        except openai.APITimeoutError:
            raise
        except openai.APIConnectionError as error:
            raise self._gone(error.request) from error
        if isinstance(answer, openai.Stream):
            answer._iterator = self._explained(answer._iterator, answer.response)
        return answer

    def _explained(self, items: Iterator[Any], response: Any) -> Iterator[Any]:
        try:
            yield from items
        except (openai.APITimeoutError, _http.TimeoutException):
            raise
        except (openai.APIConnectionError, _http.TransportError) as error:
            raise self._gone(response.request) from error
        except openai.APIError as error:
            raise _told_in_stream(error, response) from None

    def _make_status_error(self, err_msg: str, *, body: object, response: Any) -> openai.APIStatusError:
        return self._status_error(super()._make_status_error(err_msg, body=body, response=response))


class AsyncLocalModel(_Local, openai.AsyncOpenAI):
    """The same for `async` code."""

    def copy(self, **options: Any) -> Self:
        """As OpenAI's; the copy talks to the same server and does not end its use."""
        copied = super().copy(**options)
        return copied._adopt(self, _copied_headers(self, options))

    with_options = copy

    async def trunk(
        self,
        label: str,
        *,
        messages: Sequence[Any],
        tools: Sequence[Any] | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> AsyncTrunk:
        """As `LocalModel.trunk`; the loop is not blocked meanwhile."""
        return await asyncio.to_thread(self._make_trunk, AsyncTrunk, label, messages, tools, template_args)

    async def close(self) -> None:
        """Give the server up; it ends when nobody uses it and its keep-alive is over. Idempotent."""
        if self._owner:
            await super().close()
            self.server.__exit__(None, None, None)

    async def request(self, *args: Any, **options: Any) -> Any:
        self._check_server()
        try:
            answer = await super().request(*args, **options)
        except openai.APITimeoutError:
            raise
        except openai.APIConnectionError as error:
            raise await asyncio.to_thread(self._gone, error.request) from error
        if isinstance(answer, openai.AsyncStream):
            answer._iterator = self._explained(answer._iterator, answer.response)
        return answer

    async def _explained(self, items: AsyncIterator[Any], response: Any) -> AsyncIterator[Any]:
        try:
            async for item in items:
                yield item
        except (openai.APITimeoutError, _http.TimeoutException):
            raise
        except (openai.APIConnectionError, _http.TransportError) as error:
            raise await asyncio.to_thread(self._gone, response.request) from error
        except openai.APIError as error:
            raise _told_in_stream(error, response) from None

    def _make_status_error(self, err_msg: str, *, body: object, response: Any) -> openai.APIStatusError:
        return self._status_error(super()._make_status_error(err_msg, body=body, response=response))


Client = TypeVar("Client", LocalModel, AsyncLocalModel)


class _Starting:
    """What `async_local_model` returns: `async with` it, or await it. The start runs in a thread."""

    def __init__(self, start: Callable[[OnProgress], AsyncLocalModel], on_progress: OnProgress | None) -> None:
        self._start, self._on_progress = start, on_progress
        self._given_up = threading.Event()
        self._model: AsyncLocalModel | None = None

    def __await__(self) -> Generator[Any, None, AsyncLocalModel]:
        return self._run().__await__()

    async def __aenter__(self) -> AsyncLocalModel:
        self._model = await self._run()
        return self._model

    async def __aexit__(self, *exc: object) -> None:
        if self._model is not None:
            await self._model.close()

    async def _run(self) -> AsyncLocalModel:
        starting = asyncio.get_running_loop().run_in_executor(None, self._start, self._progress)
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            self._given_up.set()
            starting.add_done_callback(_give_up_late_start)
            raise

    def _progress(self, progress: Progress) -> None:
        """Called in the thread, many times a second: also the place where a start that nobody awaits ends."""
        if self._given_up.is_set():
            raise _GivenUp
        if self._on_progress:
            self._on_progress(progress)


class _GivenUp(Exception):
    """Ends a start in its thread; nobody sees it."""


def _give_up_late_start(starting: asyncio.Future[AsyncLocalModel]) -> None:
    """The caller was cancelled just before the model was ready: nobody else will ever close it."""
    if not starting.cancelled() and starting.exception() is None:
        starting.result().server.__exit__(None, None, None)


def local_model(
    alias: str | None = None,
    *,
    runtime: str | ModelRuntimePort | None = None,
    auto_start: bool = True,
    auto_download: bool = False,
    timeout: float | None = None,
    on_progress: OnProgress | None = None,
    port: int | None = None,
    keep_alive: float | None = None,
    engine_flags: Sequence[str] = (),
) -> LocalModel:
    """An OpenAI client on a ready local server of this profile; starts one, or shares the one that runs.

    alias: a profile's alias or short name; None is the one that `looprun init` chose, else ram24. Never downloads
    unless auto_download. timeout: seconds to wait for readiness (240 by default). keep_alive: seconds that the server
    stays after its last user (LOOPRUN_KEEP_ALIVE, else 300). engine_flags: extra llama-server flags. Raises
    LooprunError: each names the cause and, as `hint`, the next command.
    """
    spec, handle = _start(
        alias, runtime, auto_start, auto_download, timeout, on_progress, port, keep_alive, _flags(engine_flags)
    )
    return _client(LocalModel, openai.DefaultHttpxClient, spec, handle)


def async_local_model(
    alias: str | None = None,
    *,
    runtime: str | ModelRuntimePort | None = None,
    auto_start: bool = True,
    auto_download: bool = False,
    timeout: float | None = None,
    on_progress: OnProgress | None = None,
    port: int | None = None,
    keep_alive: float | None = None,
    engine_flags: Sequence[str] = (),
) -> _Starting:
    """`async with async_local_model(...) as model`, or `model = await async_local_model(...)`; as `local_model`.

    The start does not block the event loop; on_progress is called from another thread.
    """

    def start(progress: OnProgress) -> AsyncLocalModel:
        spec, handle = _start(
            alias, runtime, auto_start, auto_download, timeout, progress, port, keep_alive, _flags(engine_flags)
        )
        return _client(AsyncLocalModel, openai.DefaultAsyncHttpxClient, spec, handle)

    return _Starting(start, on_progress)


localModel = local_model


def local_model_status(alias: str | None = None, *, runtime: str | ModelRuntimePort | None = None) -> RuntimeStatus:
    """Which of engine, weights and server is missing for a profile; looks, and changes nothing."""
    return pick_runtime(runtime).status(resolve_alias(alias))


def pick_runtime(
    runtime: str | ModelRuntimePort | None,
    *,
    port: int | None = None,
    keep_alive: float | None = None,
    engine_flags: tuple[str, ...] = (),
) -> ModelRuntimePort:
    """The runtime to use; port, keep_alive and engine_flags belong to llama.cpp and are refused with any other."""
    if runtime is None or runtime == LLAMA_CPP:
        settings = load_settings()
        _check_number("port", port, 1, 65535, "a port from 1 to 65535")
        _check_number("keep_alive", keep_alive, 0, math.inf, "a number of seconds, 0 or more")
        options = Options(port=port, engine_flags=engine_flags)
        return LlamaCppRuntime(settings, options, keep_alive=-1.0 if keep_alive is None else keep_alive)
    if port is not None or keep_alive is not None or engine_flags:
        raise UsageError(
            "port, keep_alive and engine_flags are for the llama-cpp runtime.", hint="leave them out with runtime="
        )
    return load_runtime(runtime) if isinstance(runtime, str) else runtime


def _start(
    alias: str | None,
    runtime: str | ModelRuntimePort | None,
    auto_start: bool,
    auto_download: bool,
    timeout: float | None,
    on_progress: OnProgress | None,
    port: int | None,
    keep_alive: float | None,
    engine_flags: tuple[str, ...],
) -> tuple[LocalModelSpec, ServerHandle]:
    _check_number("timeout", timeout, 0.001, math.inf, "a number of seconds above 0")
    spec = resolve_alias(alias)
    port_to_model = pick_runtime(runtime, port=port, keep_alive=keep_alive, engine_flags=engine_flags)
    if auto_download:
        port_to_model.ensure_model(spec, download=True, on_progress=on_progress)
    handle = port_to_model.ensure_server(spec, auto_start=auto_start, timeout=timeout, on_progress=on_progress)
    return spec, handle


def _client(kind: type[Client], http: Callable[..., Any], spec: LocalModelSpec, handle: ServerHandle) -> Client:
    client = kind(
        base_url=handle.base_url,
        api_key=handle.api_key or NO_KEY,
        max_retries=0,
        timeout=_timeout(),
        http_client=http(**http_options(handle.base_url), timeout=_timeout(), limits=_limits()),
    )
    client.model, client.spec, client.server = getattr(handle, "served_id", spec.served_id), spec, handle
    client._owner = True
    _forget_cloud(client, {})
    return client


def _forget_cloud(client: Any, headers: Mapping[str, str]) -> None:
    """OpenAI's constructor reads OPENAI_ORG_ID and its like for what was not given; none of it concerns this server."""
    client.organization = client.project = client.admin_api_key = client.webhook_secret = None
    client._custom_headers = dict(headers)


def _copied_headers(client: Any, options: Mapping[str, Any]) -> dict[str, str]:
    if options.get("set_default_headers") is not None:
        return dict(options["set_default_headers"])
    return {**client._custom_headers, **(options.get("default_headers") or {})}


def _check_number(name: str, value: object, least: float, most: float, accepted: str) -> None:
    """Arguments that come out of somebody's configuration are often texts, and True is a number to Python."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (number and least <= value <= most):  # type: ignore[operator]
        raise UsageError(f"{name}={value!r} cannot be used: it takes {accepted}.", hint=f"change or leave out {name}=")


def _flags(flags: Sequence[str] | None) -> tuple[str, ...]:
    if isinstance(flags, str) or not all(isinstance(flag, str) for flag in flags or ()):
        raise UsageError(
            f"engine_flags={flags!r} cannot be used: it takes a list of texts.", hint='such as engine_flags=["-t", "4"]'
        )
    return tuple(flags or ())


def _overflow(body: Mapping[str, Any], response: Any) -> ContextOverflowError | None:
    prompt, context = body.get("n_prompt_tokens"), body.get("n_ctx")
    if isinstance(prompt, int) and isinstance(context, int):
        return ContextOverflowError(prompt, context, response=response, body=body)
    return None


def _told_in_stream(error: openai.APIError, response: Any) -> openai.APIError:
    """What the server said in the middle of a stream, where OpenAI's own message may be only that it said something."""
    body = error.body if type(error) is openai.APIError else None
    if isinstance(body, dict) and body.get("type") == "exceed_context_size_error":
        return _overflow(body, response) or error
    return openai.APIError(body, response.request, body=body) if isinstance(body, str) else error


@functools.cache
def _limits() -> Any:
    """No connection is used twice: some engines close one after a stream just as the next request comes on it, and a
    new one on this machine costs nothing."""
    return _http.Limits(max_connections=None, max_keepalive_connections=0)


@functools.cache
def _timeout() -> openai.Timeout:
    return openai.Timeout(None, connect=CONNECT_TIMEOUT)


def _next_context(tokens: int) -> int:
    """The next round context above a prompt, with room for an answer."""
    return (tokens + 2048 + 4095) // 4096 * 4096


__all__ = [
    "AsyncLocalModel",
    "LocalModel",
    "async_local_model",
    "localModel",
    "local_model",
    "local_model_status",
]
