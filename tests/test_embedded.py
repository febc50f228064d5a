"""The embedded engine as a manager meets it: a child program with llama-server's flags."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from looprun_models import embedded

xllamacpp = pytest.importorskip("xllamacpp")

LOAD_S = 90  # a tiny model loads in a second; the machine may be busy
STOP_S = 10  # the hang it tells from a stop lasts 30 seconds or for ever
COMMAND = [sys.executable, "-m", "looprun_models.embedded"]
RECIPE = """
    -m --host --port --alias --jinja -fa -ngl --load-mode -np -c -ctk -ctv -ctxcp --cache-ram --slot-save-path
    --spec-type --metrics --slots --cors-origins --api-key
"""
posix = pytest.mark.skipif(sys.platform == "win32", reason="signals and fifos")


def environment(**extra: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_")}
    # spinning OpenMP threads take ten seconds for a warm-up on a busy machine, waiting ones half a second
    return kept | {"OMP_WAIT_POLICY": "passive"} | extra


def run(*flags: str, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *flags], capture_output=True, text=True, timeout=LOAD_S, env=environment(**extra))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Child:
    """A started engine; its log is a file, because nobody drains a pipe here."""

    def __init__(self, log: Path, flags: list[str], **extra: str) -> None:
        self.port = free_port()
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [*COMMAND, *flags, "--host", "127.0.0.1", "--port", str(self.port)],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=out, env=environment(**extra),
            )  # fmt: skip

    def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], str]:
        """Status, headers and text of one request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LOAD_S)
        try:
            data = None if body is None else json.dumps(body)
            connection.request("GET" if body is None else "POST", path, data, headers)
            reply = connection.getresponse()
            return reply.status, dict(reply.getheaders()), reply.read().decode()
        finally:
            connection.close()

    def json(self, path: str, body: Any = None, **headers: str) -> Any:
        status, _, text = self.ask(path, body, **headers)
        assert status == 200, text
        return json.loads(text)

    def wait_for_health(self, wanted: int = 200) -> None:
        deadline = time.monotonic() + LOAD_S
        while True:
            try:
                if self.ask("/health")[0] == wanted:
                    return
            except OSError:
                pass
            assert time.monotonic() < deadline, self.log.read_text()
            try:
                self.process.wait(0.02)
            except subprocess.TimeoutExpired:
                continue
            pytest.fail(f"ended with {self.process.returncode}: {self.log.read_text()}")

    def end(self) -> None:
        self.process.kill()
        self.process.wait(LOAD_S)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Child]]:
    children: list[Child] = []

    def start_one(*flags: str, **extra: str) -> Child:
        children.append(Child(tmp_path / f"log{len(children)}", list(flags), **extra))
        return children[-1]

    yield start_one
    for child in children:
        child.end()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, tiny_gguf: Callable[[str], Path]) -> Iterator[Any]:
    """One engine with the whole measured recipe, its model and its slot folder."""
    folder = tmp_path_factory.mktemp("embedded")
    slots = folder / "slots"
    slots.mkdir()
    model = tiny_gguf("tiny-qwen35-mtp")
    rest = (
        "--alias smoke,smoke@abc --jinja -fa on -ngl 99 --load-mode mlock -np 1 -c 1024 -ctk q8_0 -ctv q8_0 "
        "-ctxcp 64 --cache-ram 384 --spec-type draft-mtp --metrics --slots --cors-origins http://127.0.0.1:1"
    )
    child = Child(folder / "log", ["-m", str(model), "--slot-save-path", str(slots), *rest.split()])
    try:
        child.wait_for_health()
        yield SimpleNamespace(child=child, model=model, slots=slots)
    finally:
        child.end()


def listed(help_text: str) -> list[str]:
    names = []
    for line in help_text.splitlines():
        if found := re.match(r"-[^\s,]+(?:, +-[^\s,]+)*", line):
            names += re.split(r", +", found.group())
    return names


def test_help_lists_every_flag_of_the_recipe_once() -> None:
    done = run("--help")
    assert (done.returncode, done.stderr) == (0, "")
    names = listed(done.stdout)
    assert not set(RECIPE.split()) - set(names)
    assert len(names) == len(set(names))
    assert names == [name for row in embedded.FLAGS for name in row[0].split(", ")]


def test_help_names_the_values_that_are_words() -> None:
    text = run("--help").stdout
    assert "\n--spec-type none,draft-simple," in text
    assert "allowed values: f32, f16, bf16, q8_0," in text
    assert "- mlock: " in text
    assert "--flash-attn [on|off|auto]  " in text


def test_version_is_told_on_stderr_with_the_build() -> None:
    done = run("--version", LLAMA_ARG_CTX_SIZE="abc")
    assert (done.returncode, done.stdout) == (0, "")
    first, second = done.stderr.splitlines()
    found = re.fullmatch(r"version: xllamacpp (\S+) \(build (\d+), commit \w+\)", first)
    assert found
    assert found[1].split(".")[2] == found[2]
    assert re.fullmatch(r"built with .+ for .+", second)


def test_devices_are_listed_as_llama_server_lists_them() -> None:
    done = run("--list-devices")
    assert (done.returncode, done.stderr) == (0, "")
    first, *devices = done.stdout.splitlines()
    assert first == "Available devices:"
    assert devices
    for device in devices:
        assert re.fullmatch(r"  (\(none\)|.+: .+ \(\d+ MiB, \d+ MiB free\))", device)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--mlock", "error: invalid argument: --mlock"),
        ("--help --mlock", "error: invalid argument: --mlock"),
        ("stray", "error: invalid argument: stray"),
        ("--ctx 5", "error: invalid argument: --ctx"),
        ("--port 8080", "error: --model is required and must not be empty"),
        ("-c abc", "not a whole number: abc"),
        ("-c", "expected value for argument"),
        ("-c 99999999999", "invalid value: 99999999999"),
        ("-ctk q9", "invalid value: q9 (allowed: f32, f16, bf16, q8_0, q4_0, q4_1, iq4_nl, q5_0, q5_1)"),
        ("-ctv q4_k", "invalid value: q4_k (allowed: f32, f16, bf16, q8_0, q4_0, q4_1, iq4_nl, q5_0, q5_1)"),
        ("--port 99999", "invalid value: 99999"),
        ("--port -1", "invalid value: -1"),
        ("-np 0", "invalid value: 0"),
        ("-fa --jinja", "invalid value: --jinja (allowed: on, off, auto)"),
        ("-lm direct_io", "invalid value: direct_io (allowed: auto, none, mmap, mlock, mmap+mlock, dio)"),
        ("--spec-type draft-mtp,mtp", f"invalid value: mtp (allowed: {embedded.SPEC_TYPES})"),
        ("--chat-template-kwargs [1]", "not a JSON object: 'list' object has no attribute 'items'"),
        ("--slot-save-path /no/such", "not a directory: /no/such"),
        ("--sleep-idle-seconds 0", "invalid value: 0"),
    ],
)
def test_a_mistake_is_refused_as_llama_server_refuses_it(flags: str, message: str) -> None:
    done = run(*flags.split())
    assert (done.returncode, done.stdout) == (1, "")
    if not message.startswith("error: "):
        flag = flags.split()[0]
        message = f'error while handling argument "{flag}": {message}'
        assert re.search(rf"^usage:\n.*{flag}\b", done.stderr, re.MULTILINE)
    assert done.stderr.splitlines()[0] == message


def test_an_underscore_in_a_long_name_is_a_dash() -> None:
    done = run("--ctx_size", "abc")
    assert done.stderr.startswith('error while handling argument "--ctx-size": ')


def test_an_empty_model_is_not_a_router() -> None:
    done = run("-m", "")
    assert (done.returncode, done.stderr) == (1, "error: --model is required and must not be empty\n")


def test_a_flag_that_this_xllamacpp_lacks_does_not_exist() -> None:
    def old_params() -> Any:
        return SimpleNamespace(model=SimpleNamespace(path=""), port=0, n_parallel=1)

    old: Any = SimpleNamespace(CommonParams=old_params)
    names = [name for row in embedded.known(old_params()) for name in row[0].split(", ")]
    assert "--port" in names
    assert "--slots" not in names
    with pytest.raises(embedded.Mistake, match=r"^error: invalid argument: --slots$"):
        embedded.parse(["--slots"], old)


@pytest.mark.parametrize(
    ("flags", "attribute", "value"),
    [
        ("", "port", 8080),
        ("", "n_parallel", -1),
        ("", "cors_origins_explicit", False),
        ("", "default_template_kwargs", {"preserve_reasoning": "true"}),
        (
            '--chat-template-kwargs {"a":[1]}',
            "default_template_kwargs",
            {"preserve_reasoning": "true", "a": "[1]"},
        ),
        ("-a x,y -a z", "model_alias", {"x", "y", "z"}),
        ("--host 127.0.0.1,::1", "hostnames", ["127.0.0.1", "::1"]),
        ("--api-key a --api-key b", "api_keys", ["a", "b"]),
        ("--spec-type draft-mtp,ngram-mod", "speculative.types", [0, 3, 9]),
        ("--spec-draft-n-max 5", "speculative.draft.n_max", 5),
        ("--draft-p-min 0.5", "speculative.draft.p_min", 0.5),
        ("-c 0", "fit_params_min_ctx", -1),
        ("-c 512", "fit_params_min_ctx", 4096),
        ("-c 512 -c 256", "n_ctx", 256),
        ("-t 0", "cpuparams.n_threads", os.cpu_count()),
        ("-tb 3", "cpuparams_batch.n_threads", 3),
        ("-ngl all", "n_gpu_layers", -2),
        ("-fa 1", "flash_attn_type", 1),
        ("-fa auto", "flash_attn_type", -1),
        ("-lm mmap+mlock", "load_mode", 3),
        ("-lm dio", "load_mode", 4),
        ("--fit off", "fit_params", False),
        ("--no-jinja", "use_jinja", False),
        ("--no-webui", "ui", False),
        ("--no-slots --slots", "endpoint_slots", True),
        ("-v", "verbosity", 2**31 - 1),
        ("--reasoning-format deepseek-legacy", "reasoning_format", 2),
    ],
)
def test_a_flag_sets_what_it_sets_in_llama_server(flags: str, attribute: str, value: object) -> None:
    params = embedded.parse(["-m", "x", *flags.split()], xllamacpp)
    assert getattr(*embedded.holder(params, attribute)) == value


def test_without_the_wheel_it_says_how_to_get_it() -> None:
    program = """if True:
        import sys
        sys.modules["xllamacpp"] = None
        from looprun_models.embedded import main
        sys.exit(main(["--version"]))
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LOAD_S)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: the embedded engine is not installed: ")
    assert done.stderr.endswith(' pip install "looprun-models[embedded]"\n')


def test_a_missing_system_library_is_named_with_its_package(tmp_path: Path) -> None:
    reason = "libgomp.so.1: cannot open shared object file: No such file or directory"
    (tmp_path / "xllamacpp.py").write_text(f"raise ImportError({reason!r})\n")
    done = run("--version", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (127, "")
    assert done.stderr.startswith(f"error while loading shared libraries: {reason}\n")
    assert "apt-get install libgomp1" in done.stderr


@pytest.mark.engine
def test_a_missing_model_is_an_error_with_its_path(tmp_path: Path) -> None:
    model = str(tmp_path / "none.gguf")
    done = run("-m", model, "--port", "0")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"\nerror: the model could not be loaded: {model} (" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.engine
def test_a_taken_port_is_an_error(tiny_gguf: Callable[[str], Path]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run("-m", str(tiny_gguf("tiny-qwen35")), "--host", "127.0.0.1", "--port", str(port))
    assert done.returncode == 1
    assert f"or port {port} could not be opened" in done.stderr


@pytest.mark.engine
def test_the_recipe_is_served_as_given(served: Any) -> None:
    assert served.child.json("/health") == {"status": "ok"}
    props = served.child.json("/props")
    assert props["default_generation_settings"]["n_ctx"] == 1024
    assert props["model_path"] == str(served.model)
    assert props["model_alias"] == "smoke"
    assert props["total_slots"] == 1
    [model] = served.child.json("/v1/models")["data"]
    assert (model["id"], model["aliases"]) == ("smoke", ["smoke", "smoke@abc"])
    [slot] = served.child.json("/slots")
    assert slot["speculative"] is True
    assert served.child.ask("/metrics")[0] == 200


@pytest.mark.engine
def test_the_recipe_answers_with_drafts(served: Any) -> None:
    question = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 16, "temperature": 0}
    answer = served.child.json("/v1/chat/completions", question)
    message = answer["choices"][0]["message"]
    assert message["content"] or message["reasoning_content"]
    assert answer["model"] == "smoke"
    assert answer["timings"]["draft_n_accepted"] > 0


@pytest.mark.engine
def test_slots_are_saved_inside_the_folder(served: Any) -> None:
    served.child.json("/completion", {"prompt": "one two three", "n_predict": 2})
    saved = served.child.json("/slots/0?action=save", {"filename": "a.bin"})
    assert (served.slots / "a.bin").stat().st_size == saved["n_written"] > 0


@pytest.mark.engine
def test_a_foreign_origin_is_not_allowed(served: Any) -> None:
    _, headers, _ = served.child.ask("/health", Origin="http://evil.example")
    assert headers.get("Access-Control-Allow-Origin") not in ("*", "http://evil.example")


@pytest.mark.engine
@pytest.mark.parametrize(
    ("flags", "good", "bad"),
    [("", "from-env", "x"), ("--api-key a,b", "b", "from-env")],
    ids=["environment", "flag"],
)
def test_keys_come_from_the_flag_or_else_the_environment(
    start: Callable[..., Child], tiny_gguf: Callable[[str], Path], flags: str, good: str, bad: str
) -> None:
    child = start("-m", str(tiny_gguf("tiny-qwen35")), "-c", "512", *flags.split(), LLAMA_API_KEY="from-env")
    child.wait_for_health()
    assert child.ask("/props")[0] == 401
    assert child.ask("/props", Authorization=f"Bearer {bad}")[0] == 401
    assert child.ask("/props", Authorization=f"Bearer {good}")[0] == 200


@pytest.mark.engine
@posix
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_while_idle(
    start: Callable[..., Child], tiny_gguf: Callable[[str], Path], number: int
) -> None:
    child = start("-m", str(tiny_gguf("tiny-qwen35")), "-c", "512")
    child.wait_for_health()
    child.process.send_signal(number)
    assert child.process.wait(STOP_S) == -number


@pytest.mark.engine
@posix
def test_a_signal_ends_it_while_it_streams(start: Callable[..., Child], tiny_gguf: Callable[[str], Path]) -> None:
    child = start("-m", str(tiny_gguf("tiny-qwen35-mtp-loop")), "-c", "4096", "-np", "1")
    child.wait_for_health()
    connection = http.client.HTTPConnection("127.0.0.1", child.port, timeout=LOAD_S)
    try:
        body = {"prompt": "Count:", "stream": True, "n_predict": -1, "ignore_eos": True}
        connection.request("POST", "/completion", json.dumps(body))
        reply = connection.getresponse()
        assert reply.readline().startswith(b"data: ")
        child.process.send_signal(signal.SIGTERM)
        assert child.process.wait(STOP_S) == -signal.SIGTERM
        assert b'"stop":true' not in rest_of(reply)
    finally:
        connection.close()


def rest_of(reply: http.client.HTTPResponse) -> bytes:
    try:
        return reply.read()
    except http.client.IncompleteRead as cut:
        return cut.partial
    except ConnectionResetError:
        return b""


@pytest.mark.engine
@posix
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_while_it_loads(start: Callable[..., Child], tmp_path: Path, number: int) -> None:
    model = tmp_path / "endless.gguf"
    os.mkfifo(model)  # nobody writes to it, so that the load does not end
    child = start("-m", str(model))
    child.wait_for_health(503)
    child.process.send_signal(number)
    assert child.process.wait(STOP_S) == -number
