"""The seam: what status says in every state, and runtimes that other packages bring."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from looprun_models import local_model, local_model_status
from looprun_models.errors import RuntimeBroken, UnknownRuntime
from looprun_models.records import list_servers
from looprun_models.registry import resolve_alias
from looprun_models.runtime import LlamaCppRuntime, ModelRuntimePort, RuntimeStatus, ServerStatus, load_runtime
from looprun_models.runtimes.external import ExternalHandle
from looprun_models.settings import load_settings
from looprun_models.testing import Asked, LoopbackServer, Reply
from tests.helpers import free_port, wait_for

Profile = Callable[..., str]


def looprun(*words: str, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", "from looprun_models.cli.app import main; main()", *words],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **extra},
    )


# --- status ----------------------------------------------------------------------------------------------------------


def test_status_of_a_machine_with_everything_but_a_server(profile: Profile, home: Path) -> None:
    alias = profile("tiny-qwen35")
    before = sorted(home.rglob("*"))
    status = local_model_status(alias)
    assert status.runtime == "llama-cpp"
    assert status.binary is not None
    assert (status.binary.ok, status.binary.fix) == (True, "")
    assert status.binary.build
    assert status.model_file is not None
    assert (status.model_file.state, status.model_file.fix) == ("ok", "")
    assert status.server == ServerStatus(False, fix=f"looprun models serve {alias}")
    assert status.ready_to_start
    assert sorted(home.rglob("*")) == before, "status changes nothing"


def test_status_of_an_engine_that_is_missing(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_BIN", "/no/such/llama-server")
    status = local_model_status(profile("tiny-qwen35"))
    assert status.binary is not None
    assert (status.binary.ok, status.binary.path) == (False, "/no/such/llama-server")
    assert "LLAMA_BIN=/no/such/llama-server cannot be used" in status.binary.note
    assert status.binary.fix == "point LLAMA_BIN at a llama-server, or unset it"
    assert status.model_file is not None
    assert status.model_file.state == "ok", "one thing missing hides nothing else"
    assert not status.ready_to_start


def test_status_of_weights_that_are_missing(profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alias = profile("tiny-qwen35")
    monkeypatch.setenv("TINY_GGUF", str(tmp_path / "gone.gguf"))
    found = local_model_status(alias).model_file
    assert found is not None
    assert (found.state, found.path, found.note) == ("missing", str(tmp_path / "gone.gguf"), "0.003 GB to download")
    assert found.fix == f"looprun models pull {alias}   (or correct TINY_GGUF)"
    monkeypatch.delenv("TINY_GGUF")
    moved = profile("tiny-qwen35", default_dir=str(tmp_path))
    status = local_model_status(moved)
    assert status.model_file is not None
    assert status.model_file.fix == f"looprun models pull {moved}"
    assert not status.ready_to_start


@pytest.mark.parametrize("damage", ["cut", "html", "empty", "folder"])
def test_status_of_weights_that_are_bad(
    profile: Profile, tiny_gguf: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    alias, path = profile("tiny-qwen35"), tmp_path / "bad.gguf"
    content = tiny_gguf("tiny-qwen35").read_bytes()
    if damage == "folder":
        path.mkdir()
    else:
        path.write_bytes({"cut": content[: len(content) // 2], "html": b"<html>" * 99, "empty": b""}[damage])
    monkeypatch.setenv("TINY_GGUF", str(path))
    status = local_model_status(alias)
    assert status.model_file is not None
    assert (status.model_file.state, status.model_file.path) == ("bad", str(path))
    assert str(path) in status.model_file.note
    assert status.model_file.fix == "correct or unset TINY_GGUF, which names this file"
    assert not status.ready_to_start


@pytest.mark.engine
def test_status_of_a_server_that_loads_then_serves_then_dies(
    profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, program = tmp_path / "gate", tmp_path / "llama-server"
    program.write_text(
        f"#!{sys.executable}\nimport os, sys, time\n"
        f"while '-m' in sys.argv and 'engine-check' not in str(sys.argv) and not os.path.exists({str(gate)!r}):\n"
        "    time.sleep(0.01)\n"
        f"os.execv({sys.executable!r}, [{sys.executable!r}, '-m', 'looprun_models.embedded', *sys.argv[1:]])\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("LLAMA_BIN", str(program))
    alias, loading, ready, leave = profile("tiny-qwen35", port=free_port()), *(threading.Event() for _ in range(3))

    def use() -> None:
        with LlamaCppRuntime().ensure_server(resolve_alias(alias), on_progress=lambda _: loading.set()):
            ready.set()
            leave.wait(60)

    with ThreadPoolExecutor() as pool:
        user = pool.submit(use)
        try:
            wait_for(lambda: loading.is_set() or user.done(), "it is loading")
            [record] = list_servers(load_settings())
            server = local_model_status(alias).server
            assert (server.up, server.base_url, server.serves) == (False, record.base_url, None)
            assert server.note == f"pid {record.child_pid} is loading or does not answer"
            assert server.fix == f"looprun models logs {alias}"

            gate.touch()
            wait_for(lambda: ready.is_set() or user.done(), "it is ready")
            server = local_model_status(alias).server
            assert (server.up, server.base_url, server.serves) == (True, record.base_url, "tiny-qwen35-gguf")
            assert (server.note, server.fix) == (record.summary, "")

            os.kill(record.child_pid, signal.SIGKILL)
            wait_for(lambda: not list_servers(load_settings()), "the supervisor ends too")
            assert local_model_status(alias).server == ServerStatus(False, fix=f"looprun models serve {alias}")
            shown = looprun("models", "status", alias).stdout
            assert "server   down     died: " in shown
            assert "SIGKILL" in shown
            assert f"next: looprun models serve {alias}" in shown
        finally:
            gate.touch()
            leave.set()
            user.result(60)


# --- runtimes of other packages --------------------------------------------------------------------------------------


class Canned:
    """A whole runtime, for a server that is already there."""

    id = "canned"

    def __init__(self, url: str) -> None:
        self.url = url

    def status(self, spec: object) -> RuntimeStatus:
        return RuntimeStatus(self.id, None, None, ServerStatus(True, f"{self.url}/v1", "canned"))

    def ensure_model(self, spec: object, *, download: bool = False, on_progress: object = None) -> str:
        return "downloaded" if download else "canned"

    def ensure_server(
        self, spec: object, *, auto_start: bool = True, timeout: object = None, on_progress: object = None
    ) -> ExternalHandle:
        return ExternalHandle(f"{self.url}/v1", "key", "canned")


def test_an_instance_is_used_as_it_is(profile: Profile) -> None:
    reply = {"choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Hi."}}]}

    def answer(asked: Asked) -> Reply:
        return Reply(reply)

    alias = profile("tiny-qwen35")
    with LoopbackServer(answer) as server:
        runtime = Canned(server.url)
        assert isinstance(runtime, ModelRuntimePort)
        assert local_model_status(alias, runtime=runtime).server.serves == "canned"
        with local_model(alias, runtime=runtime, auto_download=True) as model:
            completion = model.chat.completions.create(model=model.model, messages=[])
    assert completion.choices[0].message.content == "Hi."
    assert [(asked.path, asked.headers["Authorization"]) for asked in server.asked] == [
        ("/v1/chat/completions", "Bearer key")
    ]
    assert list_servers(load_settings()) == []


def test_an_unknown_runtime_is_refused_with_those_that_are_there(profile: Profile) -> None:
    with pytest.raises(UnknownRuntime, match=r"unknown runtime 'olama'. Installed: external, llama-cpp.") as caught:
        local_model(profile("tiny-qwen35"), runtime="olama")
    assert "--runtime" in caught.value.hint
    done = looprun("models", "ask", "smoke", "Hi?", "--runtime", "olama")
    assert (done.returncode, done.stdout) == (2, "")
    assert "unknown runtime 'olama'" in done.stderr


def test_the_registered_names_load() -> None:
    assert isinstance(load_runtime("llama-cpp"), LlamaCppRuntime)


BROKEN = {
    "no-module": ("not_there:Runtime", "No module named 'not_there'"),
    "no-name": ("broken_plugin:Missing", "has no attribute 'Missing'"),
    "raises": ("broken_at_import:Runtime", "RuntimeError: no GPU here"),
    "raises-made": ("broken_plugin:Raises", "ValueError: not today"),
    "wants-more": ("broken_plugin:WantsMore", "missing 1 required positional argument"),
    "wrong-type": ("broken_plugin:Nothing", "lacks a part of ModelRuntimePort"),
    "a-number": ("broken_plugin:NUMBER", "lacks a part of ModelRuntimePort"),
}


@pytest.fixture
def broken_package(tmp_path: Path) -> Path:
    """A folder with an installed package whose every runtime is broken in its own way."""
    folder = tmp_path / "site"
    info = folder / "broken_plugin-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-plugin\nVersion: 1.0\n")
    lines = "".join(f"{name} = {target}\n" for name, (target, _) in BROKEN.items())
    (info / "entry_points.txt").write_text(f"[looprun_models.runtimes]\n{lines}")
    (folder / "broken_at_import.py").write_text("raise RuntimeError('no GPU here')\n")
    (folder / "broken_plugin.py").write_text(
        textwrap.dedent(
            """
            NUMBER = 5
            class Nothing:
                pass
            class Raises:
                def __init__(self):
                    raise ValueError("not today")
            class WantsMore:
                def __init__(self, url):
                    pass
            """
        )
    )
    return folder


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_runtime_is_reported_with_its_package(
    broken_package: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.syspath_prepend(broken_package)
    with pytest.raises(RuntimeBroken) as caught:
        load_runtime(name)
    assert f"the runtime {name!r} of broken-plugin " in caught.value.message
    assert BROKEN[name][1] in caught.value.message
    assert caught.value.hint == "update or remove broken-plugin, or leave --runtime out"
    assert isinstance(load_runtime("llama-cpp"), LlamaCppRuntime)


def test_a_broken_runtime_breaks_no_other_command(broken_package: Path, profile: Profile) -> None:
    alias = profile("tiny-qwen35")
    path = {"PYTHONPATH": str(broken_package)}
    assert looprun("models", "status", alias, "--check", **path).returncode == 0
    done = looprun("models", "status", alias, "--runtime", "raises", **path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "the runtime 'raises' of broken-plugin could not be loaded: RuntimeError: no GPU here" in done.stderr
    assert "next: update or remove broken-plugin" in done.stderr
    assert "Traceback" not in done.stderr


PLUGIN = '''
"""A runtime as somebody else would write it: it brings its own server, which repeats what it is asked."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from looprun_models.runtime import RuntimeStatus, ServerStatus


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        content = f"{asked['model']} repeats: {asked['messages'][-1]['content']}"
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream" if asked.get("stream") else "application/json")
        self.end_headers()
        if asked.get("stream"):
            pieces = [{"choices": [{"index": 0, "delta": {"content": word}}]} for word in (content[:3], content[3:])]
            lines = "".join(f"data: {json.dumps(piece)}\\n\\n" for piece in pieces) + "data: [DONE]\\n\\n"
        else:
            message = {"role": "assistant", "content": content}
            lines = json.dumps({"choices": [{"index": 0, "finish_reason": "stop", "message": message}]})
        self.wfile.write(lines.encode())

    def log_message(self, *args):
        pass


class Handle:
    api_key = None
    already_running = False

    def __init__(self):
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()
        self.base_url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"

    def stop(self):
        if self.server:
            self.server.shutdown()
            self.server.server_close()
            self.server = None

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.stop()


class Parrot:
    id = "parrot"

    def status(self, spec):
        return RuntimeStatus(self.id, None, None, ServerStatus(False, note="it sleeps", fix="whistle"))

    def ensure_model(self, spec, *, download=False, on_progress=None):
        return spec.served_id

    def ensure_server(self, spec, *, auto_start=True, timeout=None, on_progress=None):
        return Handle()
'''


@pytest.fixture(scope="module")
def installed_plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where pip has installed the package `looprun-parrot`."""
    source, target = tmp_path_factory.mktemp("parrot"), tmp_path_factory.mktemp("installed")
    (source / "looprun_parrot.py").write_text(PLUGIN)
    (source / "pyproject.toml").write_text(
        textwrap.dedent(
            """
            [build-system]
            requires = ["setuptools"]
            build-backend = "setuptools.build_meta"
            [project]
            name = "looprun-parrot"
            version = "1.0"
            [project.entry-points."looprun_models.runtimes"]
            parrot = "looprun_parrot:Parrot"
            [tool.setuptools]
            py-modules = ["looprun_parrot"]
            """
        )
    )
    offline = ["--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--no-cache-dir"]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", *offline, "--target", str(target), str(source)]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return target


def test_a_program_uses_an_installed_runtime_by_its_name(installed_plugin: Path, profile: Profile) -> None:
    program = """
        import sys
        from looprun_models import local_model, local_model_status
        with local_model(sys.argv[1], runtime="parrot") as model:
            answer = model.chat.completions.create(
                model=model.model, messages=[{"role": "user", "content": "Hello"}], **model.pinned(max_tokens=5)
            )
        print(answer.choices[0].message.content)
        print(local_model_status(sys.argv[1], runtime="parrot").server.fix)
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program), profile("tiny-qwen35")],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(installed_plugin)},
    )
    assert (done.stdout, done.stderr) == ("tiny-qwen35-gguf repeats: Hello\nwhistle\n", "")


def test_the_commands_use_an_installed_runtime_by_its_name(installed_plugin: Path, profile: Profile) -> None:
    alias, path = profile("tiny-qwen35"), {"PYTHONPATH": str(installed_plugin)}
    asked = looprun("models", "ask", alias, "Hello there", "--runtime", "parrot", **path)
    assert (asked.returncode, asked.stdout) == (0, "tiny-qwen35-gguf repeats: Hello there\n"), asked.stderr
    shown = looprun("models", "status", alias, "--runtime", "parrot", **path)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.splitlines()[0] == f"{alias} (parrot)"
    assert "server   down     it sleeps" in shown.stdout
    assert "next: whistle" in shown.stdout
    told = json.loads(looprun("models", "status", alias, "--runtime", "parrot", "--json", **path).stdout)
    assert (told["runtime"], told["ready"], told["server"]["fix"]) == ("parrot", False, "whistle")
    assert "parrot" in looprun("models", "status", alias, "--runtime", "olama", **path).stderr
