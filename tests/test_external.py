"""A server that somebody else runs: found by the address as people write it, used, and left alone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator

import openai
import pytest

from looprun_models import local_model
from looprun_models.errors import BadSetting, LooprunError, NotOurServer, ServerUnavailable
from looprun_models.registry import LocalModelSpec, resolve_alias
from looprun_models.runtime import load_runtime
from looprun_models.runtimes.external import ExternalRuntime, normalise_url
from looprun_models.testing import Asked, LoopbackServer, Reply
from tests.helpers import free_port

KEY = "sesame"
ANSWER = {"choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Hi."}}]}


def somebody(asked: Asked) -> Reply:
    """A server with two models and a key."""
    if asked.headers["Authorization"] != f"Bearer {KEY}":
        return Reply({"error": {"message": "Invalid API Key", "type": "authentication_error"}}, 401)
    if asked.path == "/v1/models":
        return Reply({"data": [{"id": "theirs", "aliases": ["nick"]}, {"id": "other"}]})
    return Reply(ANSWER)


@pytest.fixture
def server() -> Iterator[LoopbackServer]:
    with LoopbackServer(somebody) as server:
        yield server


@pytest.fixture
def spec(profile: Callable[..., str]) -> LocalModelSpec:
    return resolve_alias(profile("tiny-qwen35", served_id="theirs"))


def looprun(*words: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-P", "-c", "from looprun_models.cli.app import main; main()"]
    return subprocess.run([*program, *words], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("written", "dialled"),
    [
        ("http://127.0.0.1:8080/v1", "http://127.0.0.1:8080/v1"),
        ("http://h:1/", "http://h:1/v1"),
        ("http://h:1/v1/", "http://h:1/v1"),
        ("h", "http://h/v1"),
        ("h:1", "http://h:1/v1"),
        (":11434", "http://127.0.0.1:11434/v1"),
        ("0.0.0.0", "http://127.0.0.1/v1"),
        ("0.0.0.0:11434", "http://127.0.0.1:11434/v1"),
        ("http://0.0.0.0:11434/v1", "http://127.0.0.1:11434/v1"),
        ("localhost:8080", "http://127.0.0.1:8080/v1"),
        ("http://[::]:8080", "http://[::1]:8080/v1"),
        ("[fe80::1]:8080", "http://[fe80::1]:8080/v1"),
        ("HTTP://Host:1", "http://host:1/v1"),
        ("https://llm.example.org/", "https://llm.example.org/v1"),
        ("https://example.org/openai/v1/", "https://example.org/openai/v1"),
        ("  http://h:1/v1 ", "http://h:1/v1"),
    ],
)
def test_an_address_is_taken_as_people_write_it(written: str, dialled: str) -> None:
    assert normalise_url(written) == dialled
    assert normalise_url(dialled) == dialled


@pytest.mark.parametrize(
    "written",
    ["", "  ", "http://h:port", "h:70000", "h:0", "::1", "ftp://h/v1", "http://u:p@h", "http://h?x=1", "my server"],
)
def test_what_is_no_address_is_refused(written: str) -> None:
    with pytest.raises(BadSetting, match=r"LOOPRUN_EXTERNAL_URL=.*cannot be used: it takes the address") as caught:
        ExternalRuntime(written)
    assert "LOOPRUN_EXTERNAL_URL" in caught.value.hint


def test_without_an_address_the_variable_is_named() -> None:
    with pytest.raises(BadSetting) as caught:
        load_runtime("external")
    assert caught.value.hint == "set LOOPRUN_EXTERNAL_URL, or pass base_url"
    done = looprun("models", "status", "smoke", "--runtime", "external")
    assert (done.returncode, done.stdout) == (2, "")
    assert "LOOPRUN_EXTERNAL_URL" in done.stderr


def test_the_variables_say_where_how_and_what(
    server: LoopbackServer, spec: LocalModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOOPRUN_EXTERNAL_URL", server.url.removeprefix("http://"))
    monkeypatch.setenv("LOOPRUN_EXTERNAL_KEY", f" {KEY}\r")
    monkeypatch.setenv("LOOPRUN_EXTERNAL_MODEL", '"other"')
    with local_model(spec.alias, runtime="external") as model:
        assert (model.model, model.api_key, str(model.base_url)) == ("other", KEY, f"{server.url}/v1/")
        assert model.server.already_running
        completion = model.chat.completions.create(model=model.model, messages=[], **model.pinned(max_tokens=5))
    assert completion.choices[0].message.content == "Hi."
    assert server.asked[-1].body["model"] == "other"
    assert {asked.headers["Authorization"] for asked in server.asked} == {f"Bearer {KEY}"}


def test_arguments_come_before_the_variables(
    server: LoopbackServer, spec: LocalModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOOPRUN_EXTERNAL_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("LOOPRUN_EXTERNAL_KEY", "wrong")
    monkeypatch.setenv("LOOPRUN_EXTERNAL_MODEL", "wrong")
    with ExternalRuntime(server.url, api_key=KEY, model="nick").ensure_server(spec) as handle:
        assert (handle.base_url, handle.api_key, handle.served_id) == (f"{server.url}/v1", KEY, "nick")


def test_a_model_that_is_not_served_is_refused_with_those_that_are(
    server: LoopbackServer, spec: LocalModelSpec
) -> None:
    runtime = ExternalRuntime(server.url, api_key=KEY, model="mine")
    with pytest.raises(NotOurServer, match="serves theirs, nick, other, not mine") as caught:
        local_model(spec.alias, runtime=runtime)
    assert caught.value.hint == "set LOOPRUN_EXTERNAL_MODEL to one of them"
    status = runtime.status(spec)
    assert (status.server.up, status.server.serves) == (True, "theirs, nick, other")
    assert (status.server.note, status.server.fix) == (caught.value.message, caught.value.hint)


@pytest.mark.parametrize("key", [None, "open"])
def test_a_wrong_key_is_named(server: LoopbackServer, spec: LocalModelSpec, key: str | None) -> None:
    runtime = ExternalRuntime(server.url, api_key=key)
    with pytest.raises(ServerUnavailable, match=f"{server.url}/v1 cannot be used: it answered 401") as caught:
        runtime.ensure_server(spec)
    assert caught.value.hint == "check LOOPRUN_EXTERNAL_KEY"
    assert len(server.asked) == 1
    assert runtime.status(spec).server.fix == caught.value.hint


def test_a_key_that_became_wrong_is_openais_error(server: LoopbackServer, spec: LocalModelSpec) -> None:
    with local_model(spec.alias, runtime=ExternalRuntime(server.url, api_key=KEY)) as model:
        model.api_key = "changed"
        with pytest.raises(openai.AuthenticationError, match="Invalid API Key"):
            model.chat.completions.create(model=model.model, messages=[])


def test_it_is_never_stopped(server: LoopbackServer, spec: LocalModelSpec) -> None:
    runtime = ExternalRuntime(server.url, api_key=KEY)
    with runtime.ensure_server(spec) as handle:
        handle.stop()
    handle.stop()
    with local_model(spec.alias, runtime=runtime) as model:
        model.server.stop()
    assert runtime.status(spec).server.up
    assert set(server.paths("GET")) == {"/v1/models"}, "nothing but the list was asked for"
    assert server.paths("POST") == []


def test_a_server_that_is_down_is_said_to_be(spec: LocalModelSpec) -> None:
    url = f"http://127.0.0.1:{free_port()}/v1"
    runtime = ExternalRuntime(url)
    status = runtime.status(spec)
    assert (status.server.up, status.server.base_url, status.ready_to_start) == (False, url, False)
    assert "refused" in status.server.note
    assert status.server.fix == "check LOOPRUN_EXTERNAL_URL, and that the server runs"
    with pytest.raises(ServerUnavailable, match=f"the external server at {url} cannot be used") as caught:
        local_model(spec.alias, runtime=runtime)
    assert (caught.value.message, caught.value.hint) == (status.server.note, status.server.fix)


@pytest.mark.parametrize(
    ("reply", "why", "hint"),
    [
        (Reply("<html>welcome</html>", content_type="text/html"), "does not list models", "LOOPRUN_EXTERNAL_URL"),
        (Reply(["a", "b"]), "does not list models", "LOOPRUN_EXTERNAL_URL"),
        (Reply({"data": [{"name": "x"}]}), "does not list models", "LOOPRUN_EXTERNAL_URL"),
        (Reply({"object": "list", "data": None}), "serves no model, not theirs", "load a model"),
        (Reply({"error": "x"}, 404), "it answered 404", "LOOPRUN_EXTERNAL_URL"),
        (Reply({"error": {"message": "Loading model"}}, 503), "it answered 503", "wait"),
        (Reply(None), "disconnected", "LOOPRUN_EXTERNAL_URL"),
    ],
)
def test_whatever_answers_there_the_error_says_what_to_check(
    spec: LocalModelSpec, reply: Reply, why: str, hint: str
) -> None:
    with LoopbackServer(lambda asked: reply) as other:
        runtime = ExternalRuntime(other.url)
        with pytest.raises(LooprunError, match=re.escape(why)) as caught:
            runtime.ensure_server(spec)
        assert hint in caught.value.hint
        assert runtime.status(spec).server.fix == caught.value.hint


def test_on_this_machine_no_proxy_is_asked(
    server: LoopbackServer, spec: LocalModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LoopbackServer() as proxy:
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        runtime = ExternalRuntime(server.url, api_key=KEY)
        with local_model(spec.alias, runtime=runtime) as model:
            model.chat.completions.create(model=model.model, messages=[])
        assert runtime.status(spec).server.up
        assert proxy.connections == 0


def test_elsewhere_the_users_proxy_is_asked(spec: LocalModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    with LoopbackServer(somebody) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        ExternalRuntime("http://llm.invalid:8080", api_key=KEY).status(spec)
        assert proxy.paths("GET") == ["http://llm.invalid:8080/v1/models"]


def test_the_command_shows_it(server: LoopbackServer, spec: LocalModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOPRUN_EXTERNAL_URL", server.url)
    monkeypatch.setenv("LOOPRUN_EXTERNAL_KEY", KEY)
    monkeypatch.setenv("LOOPRUN_EXTERNAL_MODEL", "mine")
    done = looprun("models", "status", spec.alias, "--runtime", "external")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == f"{spec.alias} (external)"
    assert f"{server.url}/v1 serves theirs, nick, other" in done.stdout
    assert "next: set LOOPRUN_EXTERNAL_MODEL to one of them" in done.stdout
    told = json.loads(looprun("models", "status", spec.alias, "--runtime", "external", "--json").stdout)
    assert (told["ready"], told["binary"], told["model_file"]) == (True, None, None)
    server.close()
    down = looprun("models", "status", spec.alias, "--runtime", "external", "--check")
    assert down.returncode == 4
    assert "server   down" in down.stdout
    assert "next: check LOOPRUN_EXTERNAL_URL" in down.stdout
