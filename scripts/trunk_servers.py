"""The servers that scripts/bench_trunks asks: the product's with trunks, and plain ones beside it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import statistics
import subprocess
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import openai
import psutil
from bench_overhead import free_port
from trunk_figures import TRUNKS, Turn, instructions

from looprun_models import LocalModel, Trunk, Warmth, local_model, warmth
from looprun_models.launch import LaunchPlan
from looprun_models.probe import child_environ
from looprun_models.registry import resolve_alias
from looprun_models.reply import counted
from looprun_models.runtime import LlamaCppRuntime
from looprun_models.settings import load_settings

ALIAS = "smoke"
SHORT: dict[str, Any] = {"max_tokens": 4, "temperature": 0}
READY_TIMEOUT = 120.0


class Variant(Protocol):
    """A server, and how a turn is had on it."""

    name: str

    def start(self) -> None: ...
    def kill(self) -> None: ...
    def close(self) -> None: ...
    def turn(self, agent: int, words: str, kind: str) -> Turn: ...


class Trunks:
    """The product: `local_model`, `model.trunk` for each agent of a server's life, `trunk.create`."""

    name = TRUNKS

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.trunks: dict[int, Trunk] = {}
        self.model: LocalModel

    def start(self) -> None:
        self.trunks.clear()
        self.model = local_model(ALIAS, keep_alive=0)

    def kill(self) -> None:
        record = self._record()
        os.kill(record.child_pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        self.model.close()
        with contextlib.suppress(psutil.Error):
            psutil.Process(self._record().supervisor_pid).wait(20)

    def size(self) -> int:
        """Tokens of a trunk, median."""
        return round(statistics.median(trunk.tokens for trunk in self.trunks.values()))

    def turn(self, agent: int, words: str, kind: str) -> Turn:
        before = self._tokens_read()
        began = time.perf_counter()
        state = "" if agent in self.trunks else self.hold(agent).state
        stream = self.trunks[agent].create(messages=[user(words)], stream=True, **SHORT)
        seconds, _ = first_words(stream, began)
        found, read = warmth(stream), self._tokens_read() - before
        return Turn(self.name, kind, seconds, found.prompt, read, state or found.state)

    def hold(self, agent: int) -> Trunk:
        trunk = self.model.trunk(f"agent {agent}", messages=[system(instructions(agent, self.tokens))])
        self.trunks[agent] = trunk
        return trunk

    def _tokens_read(self) -> int:
        """Prompt tokens that the engine has read in its life: those of a trunk that was read again are in no reply."""
        told = fetch(str(self.model.base_url).rstrip("/").removesuffix("/v1") + "/metrics", self.model.api_key)
        counted = re.search(r"^llamacpp:prompt_tokens_total (\d+)", told, re.MULTILINE)
        if counted is None:
            raise SystemExit("the engine does not count the tokens that it reads")
        return int(counted[1])

    def _record(self) -> Any:
        return getattr(self.model.server, "record")  # noqa: B009 (a handle need not have one)


class Plain:
    """A llama-server started here, and chats that begin with the agent's instructions."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], tokens: int, log: Path) -> None:
        self.name, self.tokens = name, tokens
        self._command, self._env, self._log = command, env, log
        self._process: subprocess.Popen[bytes]
        self._client: openai.OpenAI

    def start(self) -> None:
        port = free_port()
        key = self._env.get("LLAMA_API_KEY", "none")
        command = [*self._command, "--host", "127.0.0.1", "--port", str(port)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, env=self._env, cwd=os.sep, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self._client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1",
            api_key=key,
            max_retries=0,
            timeout=None,
            http_client=openai.DefaultHttpxClient(trust_env=False),
        )
        self._wait_ready(f"http://127.0.0.1:{port}/health")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._client.close()

    close = kill

    def turn(self, agent: int, words: str, kind: str) -> Turn:
        began = time.perf_counter()
        messages: Any = [system(instructions(agent, self.tokens)), user(words)]
        stream = self._client.chat.completions.create(model=ALIAS, messages=messages, stream=True, **SHORT)
        seconds, found = first_words(stream, began)
        return Turn(self.name, kind, seconds, found.prompt, found.read)

    def _wait_ready(self, url: str) -> None:
        deadline = time.monotonic() + READY_TIMEOUT
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(OSError):
                fetch(url)
                return
            time.sleep(0.02)
        self.kill()
        raise SystemExit(f"{self.name} did not start: {self._log.read_text(encoding='utf-8')[-2000:]}")


@contextlib.contextmanager
def running(variants: Sequence[Variant]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for variant in variants:
            variant.start()
            stack.callback(variant.close)
        yield


def bare(folder: Path, tokens: int, *flags: str) -> Plain:
    settings, plan = load_settings(), recipe_plan()
    needs_path = not plan.engine.embedded and plan.engine.library_path
    env, _ = child_environ(settings, library_path=plan.engine.path.parent if needs_path else None)
    command = [*plan.engine.command, "-m", str(plan.model), *flags]
    return Plain(f"the bare engine, {' '.join(flags) or 'default flags'}", command, env, tokens, folder / "bare.log")


def recipe(folder: Path, tokens: int) -> Plain:
    plan = recipe_plan()
    own = ("--host", "--port", "--cors-origins")  # the port is another one
    words = [word for flag in plan.flags if flag.words[0] not in own for word in flag.words]
    return Plain("the recipe, no trunks", [*plan.engine.command, *words], plan.env, tokens, folder / "recipe.log")


def recipe_plan() -> LaunchPlan:
    return LlamaCppRuntime(load_settings()).plan(resolve_alias(ALIAS))


def engine_name() -> str:
    engine = recipe_plan().engine
    build = "of unknown build" if engine.build is None else f"b{engine.build}"
    return f"{build}, embedded" if engine.embedded else build


def first_words(stream: Iterable[Any], began: float) -> tuple[float, Warmth]:
    """Seconds from `began` to the first chunk with text, and the engine's counts; reads the stream to its end."""
    first, found = None, None
    for chunk in stream:
        if first is None and chunk.choices and chunk.choices[0].delta.content:
            first = time.perf_counter() - began
        found = counted(chunk) or found
    if first is None or found is None:
        raise SystemExit("an answer had no words or no counts")
    return first, found


def fetch(url: str, key: str = "none") -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"}), timeout=60) as answer:
        return str(answer.read().decode())


def system(content: str) -> Any:
    return {"role": "system", "content": content}


def user(content: str) -> Any:
    return {"role": "user", "content": content}
