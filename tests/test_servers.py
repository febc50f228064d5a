"""Servers under stress: who shares one, who outlives whom, what stops it, and what is found on a port. Real engines."""

from __future__ import annotations

import http.server
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from looprun_models import local_model
from looprun_models.errors import EngineDied, NotOurServer, PortInUse, ServerInUse, StartFailed, StartTimeout
from looprun_models.lease import Lease, server_status, stop_server
from looprun_models.records import list_servers
from looprun_models.registry import resolve_alias
from looprun_models.request import Options
from looprun_models.runtime import LlamaCppRuntime
from looprun_models.settings import load_settings
from looprun_models.wire import Record
from tests.engines import make_engine
from tests.helpers import agents, gone, port_is_free, wait_for

HELLO = "Hello from the tiny hybrid model."
pytestmark = pytest.mark.engine


def records() -> list[Record]:
    return list_servers(load_settings())


def start(alias: str, keep_alive: float | None = 0.0, **options: object) -> Lease:
    runtime = LlamaCppRuntime(options=Options(**options), keep_alive=keep_alive)  # type: ignore[arg-type]
    return runtime.ensure_server(resolve_alias(alias))


def state_files(home: Path) -> set[str]:
    """Everything in the state folder but logs and lock files."""
    folder = home / ".local" / "state" / "looprun"
    return {p.name for p in folder.rglob("*") if p.is_file() and p.suffix != ".lock" and ".log" not in p.name}


# --- engines that misbehave: the real one, with something done to it before it serves -------------------------------

Wrap = Callable[[str], Path]


@pytest.fixture
def wrapped_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Wrap:
    """Makes LLAMA_BIN a program that runs some Python and then becomes the embedded engine."""

    def wrap(before_serving: str) -> Path:
        path = tmp_path / "llama-server"
        path.write_text(
            f"#!{sys.executable}\n"
            "import ctypes, os, pathlib, signal, sys, time\n"
            "if '-m' in sys.argv and 'engine-check' not in str(sys.argv):\n"
            + textwrap.indent(before_serving, "    ")
            + "\nos.execv(sys.executable, [sys.executable, '-P', '-m', 'looprun_models.embedded', *sys.argv[1:]])\n"
        )
        path.chmod(0o755)
        monkeypatch.setenv("LLAMA_BIN", str(path))
        return path

    return wrap


class SlowEngine:
    """Does not serve before it is let go."""

    def __init__(self, gate: Path) -> None:
        self.gate = gate

    def let_it_load(self) -> None:
        self.gate.touch()


@pytest.fixture
def slow_engine(wrapped_engine: Wrap, tmp_path: Path) -> SlowEngine:
    gate = tmp_path / "gate"
    wrapped_engine(f"while not pathlib.Path({str(gate)!r}).exists(): time.sleep(0.01)")
    return SlowEngine(gate)


@pytest.fixture
def stubborn_engine(wrapped_engine: Wrap) -> Path:
    """Undoes PR_SET_PDEATHSIG, as the kernel does for a program with file capabilities."""
    return wrapped_engine("ctypes.CDLL(None).prctl(1, 0)")


@pytest.fixture
def deaf_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_BIN", str(make_engine(tmp_path, ignore_term=True)))


@pytest.fixture
def dying_engine(wrapped_engine: Wrap) -> Path:
    return wrapped_engine("sys.exit(\"error: loading model: unknown model architecture: 'qwen99'\")")


# --- sharing ---------------------------------------------------------------------------------------------------------


def test_twenty_processes_share_one_server_and_nobody_is_hurt_by_a_kill(
    profile: Callable[..., str], home: Path
) -> None:
    alias = profile()
    with agents(*[alias] * 20) as crowd:
        said = [agent.hear() for agent in crowd]
        assert len({s["engine"] for s in said}) == 1
        assert len(records()) == 1
        assert {agent.ask() for agent in crowd} == {HELLO}
        for victim in crowd[:7]:
            victim.kill()
        assert {agent.ask() for agent in crowd[7:]} == {HELLO}
        assert [agent.leave() for agent in crowd[7:]] == [0] * 13
        engine, supervisor = said[0]["engine"], said[0]["supervisor"]
        wait_for(lambda: gone(engine) and gone(supervisor), "the server ends with its last user")
    assert records() == []
    assert state_files(home) == set()


def test_killing_the_starter_leaves_the_server_to_the_others(profile: Callable[..., str]) -> None:
    alias = profile()
    with agents(alias) as (starter,):
        starter.hear()
        with agents(alias) as (other,):
            other.hear()
            starter.kill()
            assert other.ask() == HELLO


def test_killing_the_starter_while_it_loads_cancels_the_load(
    slow_engine: SlowEngine, profile: Callable[..., str]
) -> None:
    with agents(profile()) as (starter,):
        wait_for(lambda: len(records()) == 1, "the record of the loading server")
        record = records()[0]
        starter.kill()
        wait_for(lambda: gone(record.child_pid) and gone(record.supervisor_pid), "the load is cancelled")
    assert records() == []


def test_a_second_user_waits_with_a_server_that_is_loading(
    slow_engine: SlowEngine, profile: Callable[..., str]
) -> None:
    alias = profile()
    with agents(alias) as (first,):
        wait_for(lambda: len(records()) == 1, "the record of the loading server")
        with agents(alias) as (second,):
            wait_for(lambda: len((server_status(records()[0]) or {"leases": []})["leases"]) == 2, "the second lease")
            slow_engine.let_it_load()
            assert first.hear()["engine"] == second.hear()["engine"]


def test_threads_share_one_server(profile: Callable[..., str]) -> None:
    alias, pids = profile(), []

    def use() -> None:
        with local_model(alias) as model:
            pids.append(model.server.record.child_pid)  # type: ignore[attr-defined]
            barrier.wait()

    barrier = threading.Barrier(5)
    threads = [threading.Thread(target=use) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(pids) == 5
    assert len(set(pids)) == 1
    wait_for(lambda: gone(pids[0]), "the server ends with its last user")


def test_a_fork_that_ends_does_not_end_its_parents_server(profile: Callable[..., str]) -> None:
    with local_model(profile()) as model:
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        assert server_status(records()[0])["state"] == "ready"  # type: ignore[index]
        assert ask(model) == HELLO


def test_a_fork_that_stays_does_not_keep_its_parents_server(profile: Callable[..., str]) -> None:
    read, write = os.pipe()
    with local_model(profile()) as model:
        engine = model.server.record.child_pid  # type: ignore[attr-defined]
        child = os.fork()
        if child == 0:
            os.close(write)
            os.read(read, 1)
            os._exit(0)
    wait_for(lambda: gone(engine), "the server ends though the fork lives")
    os.close(write)
    os.close(read)
    os.waitpid(child, 0)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_pool_changes_nothing(profile: Callable[..., str], method: str) -> None:
    with local_model(profile()) as model:
        with multiprocessing.get_context(method).Pool(2) as pool:
            assert pool.map(abs, [-1, -2]) == [1, 2]
        assert ask(model) == HELLO


def ask(model: object) -> str:
    reply = model.chat.completions.create(  # type: ignore[attr-defined]
        model=model.model,  # type: ignore[attr-defined]
        messages=[{"role": "user", "content": "hi"}],
        **model.pinned(max_tokens=20),  # type: ignore[attr-defined]
    )
    return str(reply.choices[0].message.content)


# --- the end ---------------------------------------------------------------------------------------------------------


def test_killing_the_supervisor_ends_the_engine_and_the_next_call_starts_clean(profile: Callable[..., str]) -> None:
    alias = profile()
    with start(alias) as lease:
        record = lease.record
        os.kill(record.supervisor_pid, signal.SIGKILL)
        wait_for(lambda: gone(record.child_pid), "the engine dies with its supervisor")
        assert "supervisor" in str(lease.why_gone(wait=10))
    with start(alias) as again:
        assert again.record.child_pid != record.child_pid
        assert not again.already_running


def test_an_engine_that_survives_its_supervisor_is_reaped_by_the_next_command(
    profile: Callable[..., str], stubborn_engine: Path
) -> None:
    """A binary with file capabilities loses the tie to its supervisor; the engine here drops it by itself."""
    alias = profile()
    with start(alias) as lease:
        record = lease.record
        os.kill(record.supervisor_pid, signal.SIGKILL)
        wait_for(lambda: gone(record.supervisor_pid), "the supervisor is dead")
        assert not gone(record.child_pid)
    assert records() == []
    assert gone(record.child_pid)
    assert port_is_free(record.port)


def test_keep_alive_lets_the_next_user_find_it_loaded(profile: Callable[..., str]) -> None:
    alias = profile()
    with start(alias, keep_alive=30) as lease:
        engine = lease.record.child_pid
    stops_in = server_status(records()[0])["stops_in"]  # type: ignore[index]
    assert 0 < stops_in <= 30
    with start(alias) as again:
        assert again.already_running
        assert again.record.child_pid == engine
        again.stop()


def test_stop_of_a_busy_server_is_quick_and_frees_the_port(profile: Callable[..., str]) -> None:
    alias = profile("tiny-qwen35-mtp-loop")
    with local_model(alias) as model:
        stream = model.chat.completions.create(
            model=model.model,
            messages=[{"role": "user", "content": "count"}],
            stream=True,
            **model.pinned(max_tokens=4000),
        )
        next(iter(stream))
        record = model.server.record  # type: ignore[attr-defined]
        model.server.stop()
        assert gone(record.child_pid)
        assert gone(record.supervisor_pid)
        assert port_is_free(record.port)
        stream.close()
    assert model.server.stop() is False, "stop is idempotent"


@pytest.mark.usefixtures("deaf_engine")
def test_an_engine_that_ignores_term_is_killed_and_that_is_said(profile: Callable[..., str]) -> None:
    with start(profile()) as lease:
        assert lease.stop() is True
        assert gone(lease.record.child_pid)


def test_stop_spares_other_users_unless_forced(profile: Callable[..., str]) -> None:
    alias = profile()
    with agents(alias) as (other,):
        said = other.hear()
        with start(alias) as lease:
            with pytest.raises(ServerInUse, match=str(said["pid"])):
                lease.stop()
            assert other.ask() == HELLO
            lease.stop(force=True)
        assert gone(said["engine"])


def test_ten_starts_and_stops_leave_nothing(profile: Callable[..., str], home: Path) -> None:
    alias = profile()
    me = psutil.Process()
    start(alias).stop()
    before, files = me.memory_info().rss, me.num_fds()
    for _ in range(10):
        with start(alias) as lease:
            lease.stop()
    assert [child for child in me.children(recursive=True) if child.status() == psutil.STATUS_ZOMBIE] == []
    assert me.num_fds() == files
    assert me.memory_info().rss < before + (4 << 20)
    assert state_files(home) == set()


def test_a_crash_is_told_by_the_lease_and_by_the_log(profile: Callable[..., str]) -> None:
    alias = profile()
    with start(alias) as lease:
        os.kill(lease.record.child_pid, signal.SIGKILL)
        reason = lease.why_gone(wait=10)
        assert isinstance(reason, EngineDied)
        assert "SIGKILL" in str(reason)
        assert str(reason.log) in str(reason.log)
        with start(alias) as again:
            assert again.record.child_pid != lease.record.child_pid


def test_a_terminals_ctrl_c_does_not_reach_the_server(profile: Callable[..., str]) -> None:
    """Ctrl-C goes to the whole foreground group of the terminal: a REPL must find its server alive afterwards."""
    alias = profile()
    program = (
        "import signal, sys; from looprun_models import local_model\n"
        f"model = local_model({alias!r})\n"
        "try:\n print('ready', flush=True); signal.pause()\n"
        "except KeyboardInterrupt: pass\n"
        "print(model.chat.completions.create(model=model.model, messages=[{'role': 'user', 'content': 'hi'}], "
        "**model.pinned(max_tokens=20)).choices[0].message.content); model.close()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as repl:
        assert repl.stdout
        assert repl.stdout.readline() == "ready\n"
        os.killpg(repl.pid, signal.SIGINT)
        assert repl.stdout.read() == f"{HELLO}\n"


# --- what is on the port ---------------------------------------------------------------------------------------------


@pytest.fixture
def stranger() -> Iterator[int]:
    """Another program: answers 200 and {"status": "ok"} to everything."""

    class Yes(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"status": "ok"}')

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Yes)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def test_another_program_on_an_asked_port_is_named(profile: Callable[..., str], stranger: int) -> None:
    with pytest.raises(PortInUse, match=rf"port {stranger} is in use by .*pid {os.getpid()}") as caught:
        start(profile(), port=stranger)
    assert "--port" in caught.value.hint
    assert caught.value.exit_code == 5


def test_another_program_on_the_profiles_port_is_stepped_around(profile: Callable[..., str], stranger: int) -> None:
    with local_model(profile(port=stranger)) as model:
        assert model.server.record.port > stranger  # type: ignore[attr-defined]
        assert ask(model) == HELLO


def test_llama_port_asks_for_that_port(
    profile: Callable[..., str], stranger: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_PORT", str(stranger))
    with pytest.raises(PortInUse):
        local_model(profile())


def test_another_of_our_models_on_an_asked_port_is_named(profile: Callable[..., str]) -> None:
    first, second = profile(), profile("tiny-qwen35")
    with start(first) as lease:
        with pytest.raises(PortInUse, match=first) as caught:
            start(second, port=lease.record.port)
        assert f"looprun models stop {first}" in caught.value.hint


def test_two_models_get_two_ports(profile: Callable[..., str]) -> None:
    with start(profile()) as one, start(profile("tiny-qwen35")) as two:
        assert one.record.port != two.record.port
        assert len(records()) == 2


def test_other_settings_are_another_server(profile: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    alias = profile()
    with start(alias) as one:
        monkeypatch.setenv("LLAMA_CTX", "2048")
        with start(alias) as two:
            assert two.record.child_pid != one.record.child_pid
            assert two.record.ctx == 2048


def test_a_dead_record_is_cleaned_up(profile: Callable[..., str], home: Path) -> None:
    alias = profile()
    with start(alias) as lease:
        path = home / ".local/state/looprun/servers" / f"{lease.record.port}.json"
        left_over = path.read_text()
        lease.stop()
    path.write_text(left_over)
    assert records() == []
    assert not path.exists()


def test_a_recycled_pid_is_not_taken_for_ours_and_not_killed(profile: Callable[..., str], home: Path) -> None:
    alias = profile()
    with start(alias) as lease:
        path = home / ".local/state/looprun/servers" / f"{lease.record.port}.json"
        values = json.loads(path.read_text())
        lease.stop()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as innocent:
        values |= {"supervisor_pid": innocent.pid, "child_pid": innocent.pid}
        path.write_text(json.dumps(values))
        assert records() == []
        with start(alias) as again:
            assert not again.already_running
        assert innocent.poll() is None
        assert innocent.stdin
        innocent.stdin.close()


def test_a_supervisor_that_does_not_answer_is_named_and_can_be_forced(profile: Callable[..., str]) -> None:
    alias = profile()
    with start(alias) as lease:
        record = lease.record
        os.kill(record.supervisor_pid, signal.SIGSTOP)
        with pytest.raises(NotOurServer, match=str(record.supervisor_pid)) as caught:
            start(alias)
        assert "--force" in caught.value.hint
    assert stop_server(record, force=True) is True
    assert gone(record.child_pid)
    assert records() == []


def test_an_engine_that_hangs_is_not_handed_out(profile: Callable[..., str]) -> None:
    alias = profile()
    with start(alias) as lease:
        os.kill(lease.record.child_pid, signal.SIGSTOP)
        with pytest.raises(NotOurServer, match=str(lease.record.child_pid)):
            start(alias)
        os.kill(lease.record.child_pid, signal.SIGCONT)
        with start(alias) as again:
            assert again.record.child_pid == lease.record.child_pid


# --- a start that fails ----------------------------------------------------------------------------------------------


def test_a_start_that_takes_too_long_says_how_to_wait_longer(
    slow_engine: SlowEngine, profile: Callable[..., str]
) -> None:
    with pytest.raises(StartTimeout, match=r"not ready after 0.5 s") as caught:
        local_model(profile(), timeout=0.5)
    assert "--timeout" in caught.value.hint
    assert records() == []


def test_an_engine_that_dies_at_once_fails_at_once_with_its_words(
    profile: Callable[..., str], dying_engine: Path
) -> None:
    with pytest.raises(EngineDied, match=r"too old for this model's architecture .qwen99") as caught:
        local_model(profile())
    assert caught.value.log
    assert caught.value.exit_code == 3
    assert records() == []


def test_no_start_when_not_wanted(profile: Callable[..., str]) -> None:
    with pytest.raises(StartFailed, match="no server"):
        local_model(profile(), auto_start=False)


# --- what surrounds it -----------------------------------------------------------------------------------------------


def test_the_environment_does_not_change_the_server(
    profile: Callable[..., str], monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    """Each of these was seen to open, break or redirect a llama-server behind its manager's back."""
    for name, value in {
        "LLAMA_ARG_HOST": "0.0.0.0",
        "LLAMA_ARG_CTX_SIZE": "abc",
        "LLAMA_ARG_API_PREFIX": "/x",
        "LLAMA_ARG_ENDPOINT_SLOTS": "0",
        "LLAMA_API_KEY": "secret",
        "AIP_MODE": "PREDICTION",
        "AIP_HTTP_PORT": "9",
        "HTTP_PROXY": "http://127.0.0.1:9",
        "ALL_PROXY": "http://127.0.0.1:9",
        "OPENAI_BASE_URL": "http://127.0.0.1:9",
    }.items():
        monkeypatch.setenv(name, value)
    config = home / ".config" / "llama.cpp"
    config.mkdir(parents=True)
    (config / "config.ini").write_text("api-key = secret\nctx-size = nonsense\n")
    with local_model(profile()) as model:
        assert ask(model) == HELLO
        record = model.server.record  # type: ignore[attr-defined]
        listening = {c.laddr.ip for c in psutil.Process(record.child_pid).net_connections() if c.status == "LISTEN"}
        assert listening == {"127.0.0.1"}


def test_records_and_logs_are_for_their_owner_only(profile: Callable[..., str], home: Path) -> None:
    state = home / ".local/state/looprun"
    with start(profile()) as lease:
        assert (state / "servers").stat().st_mode & 0o777 == 0o700
        assert (state / "servers" / f"{lease.record.port}.json").stat().st_mode & 0o777 == 0o600
        assert Path(lease.record.log).stat().st_mode & 0o777 == 0o600


def test_a_lease_needs_the_token(profile: Callable[..., str]) -> None:
    with start(profile()) as lease:
        with socket.create_connection(("127.0.0.1", lease.record.lease_port), timeout=10) as guess:
            guess.sendall(b'{"token": "guess", "op": "stop", "force": true}\n')
            assert guess.recv(1) == b""
        assert lease.why_gone() is None
