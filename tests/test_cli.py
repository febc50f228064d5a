"""The `looprun` command as its user meets it: what is printed where, which exit code, and what is left running.

Parsing and printing are tested in this process; signals, terminals and pasted commands in processes of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import pty
import re
import select
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Unpack

import pytest
from looprun_models.cli import app, output
from typer.testing import CliRunner, Result

import looprun_models
from looprun_models import errors
from looprun_models.errors import EngineDied, LooprunError
from looprun_models.progress import Progress
from looprun_models.records import list_servers
from looprun_models.settings import load_settings
from looprun_models.wire import Record, get_json, identify, proves
from tests.engines import Behaviour, end_engine, make_engine
from tests.helpers import agents, free_port, gone, port_is_free, wait_for
from tests.hub_server import HubServer

LOOPRUN = Path(sys.executable).with_name("looprun")
HELLO = "Hello from the tiny hybrid model."
FAKE = "Hello from the fake engine."
TIERS = ("ram8", "ram16", "ram24", "ram32", "smoke")
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f]")
Profile = Callable[..., str]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cli")


@pytest.fixture(autouse=True)
def surroundings(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Engines are examined once; and Ctrl-C is heard even when a shell started the tests in the background."""
    monkeypatch.setenv("LOOPRUN_CACHE_DIR", str(cache))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """`fake(load_exit=1)` makes LLAMA_BIN an engine that behaves so."""

    def make(**behaviour: Unpack[Behaviour]) -> Path:
        behaviour["help_add"] = ["-tb, --threads-batch N  which the profiles of tests use"]
        path = make_engine(tmp_path / "engine", **behaviour)
        monkeypatch.setenv("LLAMA_BIN", str(path))
        return path

    return make


def run(*words: str) -> Result:
    """The command in this process, without a terminal."""
    return CliRunner().invoke(app.app, words, prog_name="looprun")


def failed(done: Result, code: int) -> str:
    """What a failed command said: one message on standard error, nothing on standard output, no traceback."""
    assert (done.exit_code, done.stdout) == (code, ""), done.output
    assert isinstance(done.exception, SystemExit), done.exception
    lines = [line.partition(": ")[0] for line in done.stderr.splitlines()]
    assert (lines.count("error"), lines.count("  next")) == (1, 1), done.stderr
    assert "Traceback" not in done.stderr
    return str(done.stderr)


def records() -> list[Record]:
    return list_servers(load_settings())


class Command:
    """The command in a process of its own, heard as it speaks."""

    def __init__(self, *words: str, **extra: str) -> None:
        self.process = subprocess.Popen(
            [LOOPRUN, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **extra},
        )
        self.out = self.err = ""

    def hear(self, text: str) -> str:
        """Standard error up to the line with this text."""
        self.err += _until(self.process.stderr, text)
        return self.err

    def hear_result(self, text: str) -> str:
        self.out += _until(self.process.stdout, text)
        return self.out

    def ctrl_c(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def end(self) -> int:
        out, err = self.process.communicate(timeout=60)
        self.out, self.err = self.out + (out or ""), self.err + err
        return self.process.returncode

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


def _until(stream: IO[str] | None, text: str) -> str:
    assert stream
    said = ""
    for line in stream:
        said += line
        if text in line:
            return said
    raise AssertionError(f"it ended without {text!r}: {said}")


def serving(*words: str, **extra: str) -> Command:
    """`looprun models serve` in the foreground, ready and with its last line of help said."""
    command = Command("models", "serve", *words, **extra)
    command.hear(").choices[0].message.content)")
    command.hear_result("http://")
    return command


class Terminal:
    """The command on a terminal of its own, 100 columns wide."""

    TRAMPOLINE = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""

    def __init__(self, *words: str, **extra: str) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-ISc", self.TRAMPOLINE, LOOPRUN, *words],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "xterm", **extra},
        )
        os.close(slave)
        self.shown = ""

    def until(self, text: str) -> str:
        while text not in self.shown:
            assert self._read(), f"it ended without {text!r}: {self.shown}"
        return self.shown

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def end(self) -> int:
        while self._read():
            pass
        return self.process.wait(timeout=60)

    def _read(self) -> bool:
        assert select.select([self.master], [], [], 60)[0], f"silent for a minute: {self.shown}"
        try:
            data = os.read(self.master, 65536)
        except OSError:  # how Linux says that nobody holds the other side any more
            return False
        self.shown += data.decode()
        return bool(data)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)


# --- help and the shape of the command -------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [("--help",), ("-h",), ()])
def test_help_shows_tiers_and_examples_as_plain_text(words: tuple[str, ...]) -> None:
    shown = run(*words).output
    for word in (*TIERS, "Examples:", "looprun models serve ram16", "--install-completion", "--version"):
        assert word in shown
    assert not CONTROL.search(shown)
    assert max(map(len, shown.splitlines())) <= 80


def test_every_command_has_help_that_is_not_cut_off() -> None:
    shown = run("models", "-h").stdout
    assert "..." not in shown.partition("Commands:")[2]
    for name in ("list", "status", "show", "pull", "verify", "adopt", "disk", "rm", "serve", "stop", "ask", "logs"):
        assert re.search(rf"^  {name} ", shown, re.MULTILINE)
        page = run("models", name, "-h")
        assert page.exit_code == 0
        assert page.stdout.startswith(f"Usage: looprun models {name} ")


def test_help_names_the_tiers_as_the_profiles_are() -> None:
    """The sizes in the help are typed by hand: they follow the profiles."""
    for spec in json.loads(run("models", "list", "--json").stdout):
        for short in spec["short"]:
            line = next(line for line in app.TIERS.splitlines() if line.startswith(f"  {short} "))
            assert f"{spec['approx_size_gb']:.1f} GB download" in line
            assert f"{spec['min_ram_gb']} GB machine" in line or not spec["tier"]


def test_version() -> None:
    done = run("--version")
    assert (done.exit_code, done.stdout) == (0, f"looprun-models {looprun_models.__version__}\n")


@pytest.mark.parametrize("words", [("bogus",), ("models", "bogus"), ("models", "list", "--bogus")])
def test_what_is_no_command_is_a_usage_error(words: tuple[str, ...]) -> None:
    done = run(*words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "Error: " in done.stderr
    assert "-h' for help" in done.stderr


# --- errors ----------------------------------------------------------------------------------------------------------

EXIT_CODES = {
    1: "LooprunError Declined DownloadFailed InstallFailed FolderUnwritable ServerInUse RuntimeBroken ContextOverflow "
    "ServerUnavailable",
    2: "UsageError UnknownAlias BadSetting BadProfile BadChoice BadPaths ReservedFlag UnknownRuntime TrunkRefused",
    3: "StartFailed EngineDied StartTimeout NotOurServer ServerStopped",
    4: "Missing EngineMissing EngineTooLittle WeightsMissing WeightsBad NotEnoughMemory NotEnoughDisk",
    5: "PortInUse",
}
CLASSES = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, LooprunError)]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_has_its_exit_code_and_one_message(
    kind: type[LooprunError], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = kind.__new__(kind)
    LooprunError.__init__(error, "the cause.", hint="the way out")

    def fail() -> None:
        raise error

    monkeypatch.setattr("looprun_models.cli.models.load_settings", fail)
    expected = next(code for code, names in EXIT_CODES.items() if kind.__name__ in names.split())
    assert failed(run("models", "list"), expected) == "error: the cause.\n  next: the way out\n"


def test_a_dead_engine_is_shown_with_the_end_of_its_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail() -> None:
        raise EngineDied("it died.", hint="start it", log=tmp_path / "x.log", tail=[f"line {n}" for n in range(30)])

    monkeypatch.setattr("looprun_models.cli.models.load_settings", fail)
    told = failed(run("models", "list"), 3).splitlines()
    assert told[0] == "error: it died."
    assert told[1:-2] == [f"  | line {n}" for n in range(20, 30)]
    assert told[-2:] == [f"  log:  {tmp_path / 'x.log'}", "  next: start it"]


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("looprun_models.cli.models.load_settings", fail)
    assert isinstance(run("models", "list").exception, ZeroDivisionError)


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("looprun_models.cli.models.load_settings", fail)
    done = run("models", "list")
    assert (done.exit_code, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_a_reader_that_has_enough_is_no_error() -> None:
    with Command("models", "list") as command:
        assert command.process.stdout
        command.process.stdout.close()
        assert command.end() == 0
    assert command.err == ""


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("LLAMA_PORT", "http"),
        ("LLAMA_PORT", "0"),
        ("LLAMA_PORT", "65536"),
        ("LLAMA_KV", "q4_0"),
        ("LLAMA_CTX", "0"),
        ("LLAMA_CTX", "8k"),
        ("LLAMA_CACHE_RAM", "-1"),
        ("LLAMA_CACHE_RAM", "1.5"),
        ("LOOPRUN_KEEP_ALIVE", "-1"),
        ("LOOPRUN_KEEP_ALIVE", "nan"),
        ("LOOPRUN_KEEP_ALIVE", "inf"),
    ],
)
@pytest.mark.parametrize("command", ["status", "serve"])
def test_a_bad_variable_is_named(variable: str, value: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)
    told = failed(run("models", command, "smoke"), 2)
    assert f"{variable}={value!r} cannot be used: it takes " in told
    assert f"next: change or unset {variable}" in told


def test_a_variable_that_only_this_model_refuses(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_CACHE_RAM", "0")
    assert "LLAMA_CACHE_RAM='0' cannot be used: it takes 1 MiB or more" in failed(run("models", "serve", profile()), 2)


def test_a_speculative_type_that_the_engine_lacks(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_SPEC_TYPE", "psychic")
    assert "does not know --spec-type psychic (variable LLAMA_SPEC_TYPE)" in failed(
        run("models", "serve", profile()), 4
    )


def test_a_path_variable_to_nowhere(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINY_GGUF", "/no/such.gguf")
    told = failed(run("models", "serve", profile()), 4)
    assert "are not at /no/such.gguf (from variable TINY_GGUF)" in told
    assert "or correct TINY_GGUF" in told


def test_llama_bin_that_is_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are missing as well; what was named explicitly is judged before a download is proposed."""
    monkeypatch.setenv("LLAMA_BIN", "/bin/ls")
    told = failed(run("models", "serve", "smoke"), 4)
    assert "/ls cannot be used: it does not answer --help as llama-server does." in told
    assert "next: point LLAMA_BIN at a llama-server, or unset it" in told


def test_missing_weights_name_the_command_that_fetches_them() -> None:
    told = failed(run("models", "serve", "smoke"), 4)
    assert "the weights of smollm2-135m are not at " in told
    assert told.endswith("next: looprun models pull smollm2-135m\n")


@pytest.mark.parametrize("command", ["status", "show", "pull", "serve", "stop", "logs"])
def test_an_unknown_alias_lists_the_known_and_the_nearest(command: str) -> None:
    told = failed(run("models", command, "ram18"), 2)
    assert "unknown model alias 'ram18'. Did you mean ram8 or ram16?" in told
    assert "qwen3.6-35b-ram24 (ram24)" in told


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--port", "9"], "engine flag --port is decided by looprun"),
        (["--model=x"], "engine flag --model is decided by looprun"),
        (["-hf", "a/b"], "engine flag -hf is decided by looprun"),
        (["-c", "many"], "-c='many' cannot be used: it takes a whole number"),
        (["-ctk", "q4_0"], "-ctk='q4_0' cannot be used: it takes q8_0 or f16"),
        (["-c"], "-c='' cannot be used"),
        (["--frobnicate"], "does not know the flag --frobnicate"),
    ],
)
@pytest.mark.parametrize("command", ["serve", "show"])
def test_engine_flags_that_cannot_be(profile: Profile, command: str, flags: list[str], told: str) -> None:
    assert told in failed(run("models", command, profile(), "--", *flags), 2)


@pytest.mark.parametrize("option", [("--port", "0"), ("--port", "x"), ("--keep-alive", "-1"), ("--timeout", "0")])
def test_option_values_out_of_range(option: tuple[str, str]) -> None:
    done = run("models", "serve", "smoke", *option)
    assert (done.exit_code, done.stdout) == (2, "")
    assert option[0] in done.stderr


def test_two_aliases_are_one_too_many() -> None:
    assert "unexpected word 'ram8' after the alias" in failed(run("models", "serve", "ram16", "ram8"), 2)


def test_flags_without_an_alias_are_not_taken_for_one(profile: Profile) -> None:
    run("init", "--local", profile())
    plan = json.loads(run("models", "show", "--json", "--", "-c", "2048").stdout)
    assert (plan["alias"], flag(plan, "-c")["value"]) == ("tiny-qwen35-mtp", "2048")


# --- list, show ------------------------------------------------------------------------------------------------------


def test_list_marks_the_default_and_says_what_is_here(profile: Profile) -> None:
    alias = profile()
    done = run("models", "list")
    assert done.exit_code == 0
    rows = {line.removeprefix("*").split()[0]: line for line in done.stdout.splitlines()[1:]}
    assert [name for name, line in rows.items() if line.startswith("* ")] == ["qwen3.6-35b-ram24"]
    assert " ok " in rows[alias]
    assert " missing " in rows["smollm2-135m"]


def test_list_json_is_data_only() -> None:
    done = run("models", "list", "--json")
    listed = json.loads(done.stdout)
    assert done.stderr == ""
    assert [spec["alias"] for spec in listed if spec["chosen"]] == ["qwen3.6-35b-ram24"]
    assert {spec["state"] for spec in listed} == {"missing"}


def flag(plan: dict[str, Any], name: str) -> dict[str, str]:
    found: dict[str, str] = next(flag for flag in plan["flags"] if flag["flag"] == name)
    return found


def test_show_works_without_weights() -> None:
    done = run("models", "show", "ram16", "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    plan = json.loads(done.stdout)
    assert plan["alias"] == "qwen3.6-35b-ram16"
    assert (flag(plan, "-c")["value"], flag(plan, "-c")["from"]) == ("24576", "profile")
    assert plan["memory"] is None
    assert any("the weights are not here yet" in note for note in plan["notes"])
    shown = run("models", "show", "ram16").stdout
    assert "(not here yet)" in shown
    assert "quoted: resident memory" in shown


def test_show_explains_each_flag_and_what_decided_it(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_CTX", "2048")
    monkeypatch.setenv("LLAMA_ARG_HOST", "0.0.0.0")
    words = ("models", "show", profile(), "--port", "9999", "--", "-ctxcp", "7", "-b", "128")
    done = run(*words)
    assert (done.exit_code, done.stderr) == (0, "")
    for row in (
        r"-c +2048 +variable LLAMA_CTX +context, in tokens",
        r"-ctxcp +7 +option +context checkpoints",
        r"--port +9999 +option +where clients find it",
        r"-ctk +q8_0 +profile +type of the K cache",
        r"-b +128 +option +passed through",
        r"--host +127\.0\.0\.1 +looprun +who can reach it",
    ):
        assert re.search(f"^{row}", done.stdout, re.MULTILINE), row
    assert "memory   weights 2.2 MiB + KV" in done.stdout
    assert "kept from the engine: LLAMA_ARG_HOST" in done.stdout
    plan = json.loads(run(*words[:3], "--json", *words[3:]).stdout)
    assert done.stdout.splitlines()[-1] == shlex.join(plan["command"])


def test_as_quoted_keeps_the_quoted_values(profile: Profile) -> None:
    alias = profile("wide-qwen35-mtp", ctx=24576, cache_ram_mib=512)
    fitted = json.loads(run("models", "show", alias, "--json").stdout)
    quoted = json.loads(run("models", "show", alias, "--json", "--as-quoted").stdout)
    assert flag(fitted, "-ctxcp")["from"] == "fitted (quoted 64)"
    assert int(flag(fitted, "-ctxcp")["value"]) < 64
    assert flag(quoted, "-ctxcp") == {**flag(fitted, "-ctxcp"), "value": "64", "from": "profile"}


@pytest.mark.engine
def test_the_shown_command_line_starts_the_server(profile: Profile) -> None:
    alias = profile()
    plan = json.loads(run("models", "show", alias, "--json").stdout)
    line = run("models", "show", alias).stdout.splitlines()[-1]
    with subprocess.Popen(["sh", "-c", f"exec {line}"], stderr=subprocess.DEVNULL) as engine:
        try:
            wait_for(lambda: identify("127.0.0.1", plan["port"], None) is not None, "the pasted line serves")
            found = identify("127.0.0.1", plan["port"], None)
            assert found is not None
            assert any(name.endswith(plan["fingerprint"]) for name in found.aliases)
        finally:
            engine.terminate()


# --- status ----------------------------------------------------------------------------------------------------------


def test_status_of_a_fresh_machine_names_the_next_command() -> None:
    done = run("models", "status")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.count("missing (") == 6
    assert "up at" not in done.stdout
    assert "engine   ok" in done.stdout
    assert "next: looprun init" in done.stdout


def test_status_of_one_profile_tells_three_things_apart(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_BIN", "/no/such")
    here = run("models", "status", profile()).stdout
    assert re.search(r"engine   missing .*\n +next: point LLAMA_BIN", here)
    assert re.search(r"weights  ok .*\n  server   down\n +next: looprun models serve tiny", here)
    monkeypatch.delenv("LLAMA_BIN")
    away = run("models", "status", "smoke").stdout
    assert re.search(r"engine   ok .*\n  weights  missing .*\n +next: looprun models pull smollm2-135m", away)


def test_check_turns_what_is_missing_into_exit_4(profile: Profile) -> None:
    assert run("models", "status", "--check").exit_code == 4
    assert run("models", "status", "smoke", "--check").exit_code == 4
    assert run("models", "status", "smoke").exit_code == 0
    assert run("models", "status", profile(), "--check").exit_code == 0


def test_status_json_is_data_only(profile: Profile) -> None:
    every = run("models", "status", "--json")
    assert every.stderr == ""
    assert {model["server"]["up"] for model in json.loads(every.stdout)["models"]} == {False}
    one = json.loads(run("models", "status", profile(), "--json").stdout)
    assert (one["ready"], one["binary"]["ok"], one["model_file"]["state"]) == (True, True, "ok")
    assert (one["server"]["up"], one["users"], one["stops_in"], one["died"]) == (False, [], None, None)


def test_status_of_a_running_server(profile: Profile, fake: Callable[..., Path]) -> None:
    """One server that runs is one row that says "up", and its users and its end are told."""
    fake()
    alias = profile()
    assert run("models", "serve", alias, "--detach", "--keep-alive", "100").exit_code == 0
    (record,) = records()
    every = run("models", "status").stdout
    assert every.count("up at") == 1
    assert re.search(rf"{alias} +ok +up at {record.base_url}, 0 users; stops in (100|99) s unless", every)
    assert f'next: looprun models ask {alias} "Hello?"' in every
    with agents(alias) as (agent,):
        pid = agent.hear()["pid"]
        shown = run("models", "status", alias).stdout
        assert re.search(rf"server   up       {record.base_url} serves {record.served_id} \(ctx 4096, KV q8_0", shown)
        assert f"used by agent.py (pid {pid})\n" in shown
        told = json.loads(run("models", "status", alias, "--json").stdout)
        assert (told["server"]["up"], told["users"]) == (True, [f"agent.py (pid {pid})"])
    assert run("models", "stop", alias).exit_code == 0


def test_status_of_a_loading_server(profile: Profile, fake: Callable[..., Path], tmp_path: Path) -> None:
    fake(loading_until=str(tmp_path / "gate"))
    alias = profile()
    with Command("models", "serve", alias) as serve:
        wait_for(lambda: len(records()) == 1, "the record of the loading server")
        assert f"server   loading  {records()[0].base_url}" in run("models", "status", alias).stdout
        assert f"loading at {records()[0].base_url}" in run("models", "status").stdout
        serve.ctrl_c()
        assert serve.end() == 130


def test_status_after_a_crash_says_how_it_died(profile: Profile, fake: Callable[..., Path]) -> None:
    fake()
    alias = profile()
    run("models", "serve", alias, "--detach")
    os.kill(records()[0].child_pid, signal.SIGKILL)
    wait_for(lambda: not records(), "the supervisor has heard of it")
    assert "server   down     died: killed by SIGKILL while ready" in run("models", "status", alias).stdout
    assert "down: died, killed by SIGKILL" in run("models", "status").stdout
    assert "killed by SIGKILL" in json.loads(run("models", "status", alias, "--json").stdout)["died"]


def without_override() -> None:
    """root may write anywhere; without this capability it is a user like any other (no effect on those)."""
    ctypes.CDLL(None).prctl(24, 1, 0, 0, 0)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("kind", ["missing", "read-only"])
def test_a_home_that_cannot_be_written(profile: Profile, tmp_path: Path, home: Path, kind: str) -> None:
    """Looking works; what has to write says which folder, and which variable moves it."""
    alias = profile()
    place = tmp_path / "a-file" / "home" if kind == "missing" else tmp_path / "fixed"
    if kind == "missing":
        place.parent.touch()
    else:
        place.mkdir(mode=0o555)
    environ = {**os.environ, "HOME": str(place), "XDG_CONFIG_HOME": str(home / ".config")}
    del environ["LOOPRUN_CACHE_DIR"]

    def looprun(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [LOOPRUN, *words], capture_output=True, text=True, env=environ, preexec_fn=without_override, timeout=60
        )

    status = looprun("models", "status", alias)
    assert (status.returncode, status.stderr) == (0, "")
    assert "engine   ok" in status.stdout
    serve = looprun("models", "serve", alias)
    assert (serve.returncode, serve.stdout) == (1, "")
    assert f"error: cannot write to {place}/.local/state/looprun: " in serve.stderr
    assert "next: set LOOPRUN_STATE_DIR to a folder that you may write to" in serve.stderr
    assert "Traceback" not in serve.stderr


# --- pull ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(tiny_gguf: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    file = tiny_gguf("tiny-qwen35")
    with HubServer({f"nobody/tiny/{file.name}": file.read_bytes()}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.fixture
def absent(profile: Profile, tmp_path: Path) -> tuple[str, Path]:
    """A profile whose weights are on the hub only, and the path that they will have."""
    return profile("tiny-qwen35", default_dir=str(tmp_path / "w"), licence="mit"), tmp_path / "w" / "tiny-qwen35.gguf"


def test_pull_without_a_terminal_is_declined_and_asks_nobody(hub: HubServer, absent: tuple[str, Path]) -> None:
    alias, path = absent
    told = failed(run("models", "pull", alias), 1)
    assert "No terminal to ask on: taken as no." in told
    assert f"next: looprun models pull {alias} --yes" in told
    assert hub.requests == []
    assert not path.parent.exists()


def test_pull_with_yes_fetches_and_prints_the_path_only(hub: HubServer, absent: tuple[str, Path]) -> None:
    alias, path = absent
    done = run("models", "pull", alias, "--yes")
    assert (done.exit_code, done.stdout) == (0, f"{path}\n"), done.stderr
    assert path.read_bytes() == hub.files["nobody/tiny/tiny-qwen35.gguf"]
    assert not CONTROL.search(done.stderr)
    assert done.stderr.count("downloading: ") <= 1, "a line every ten seconds at most"
    assert f"next: looprun models serve {alias}" in done.stderr
    sent = hub.sent
    again = run("models", "pull", alias)
    assert (again.exit_code, again.stdout) == (0, f"{path}\n")
    assert "already here" in again.stderr
    assert hub.sent == sent


@pytest.mark.parametrize(("answer", "agreed"), [("y", True), ("YES", True), ("n", False), ("", False), ("yep", False)])
def test_pull_asks_on_a_terminal(hub: HubServer, absent: tuple[str, Path], answer: str, agreed: bool) -> None:
    alias, path = absent
    with Terminal("models", "pull", alias) as terminal:
        question = terminal.until("[y/N] ")
        for part in (path.name, "3.0 MB", "nobody/tiny", "licence mit", str(path.parent)):
            assert part in question.replace("\r\n", "")
        assert hub.requests == [], "asked first"
        terminal.type(f"{answer}\r")
        assert terminal.end() == (0 if agreed else 1), terminal.shown
    assert path.exists() == agreed
    assert bool(hub.requests) == agreed


def test_ctrl_c_at_the_question_is_no(hub: HubServer, absent: tuple[str, Path]) -> None:
    with Terminal("models", "pull", absent[0]) as terminal:
        terminal.until("[y/N] ")
        terminal.type("\x03")
        assert terminal.end() == 130
    assert "Traceback" not in terminal.shown
    assert hub.requests == []


def test_pull_onto_a_full_disk(hub: HubServer, absent: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("looprun_models.machine.disk_free", lambda path: 1_000_000)
    told = failed(run("models", "pull", absent[0], "--yes"), 4)
    assert "takes 3.0 MB and" in told
    assert "has 1.0 MB free" in told
    assert "TINY_GGUF" in told
    assert hub.requests == []


def test_pull_from_what_is_no_address(absent: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "the hub")
    assert "HF_ENDPOINT='the hub' cannot be used" in failed(run("models", "pull", absent[0], "--yes"), 2)


# --- serve -----------------------------------------------------------------------------------------------------------


def snippets(said: str) -> tuple[str, str]:
    """The curl command and the Python program out of what `serve` said."""
    _, curl, python, *_ = said.split("\n\n")
    return curl, python


def paste_curl(command: str) -> dict[str, Any]:
    """Run it as it stands; where there is no curl, send what it would send."""
    if shutil.which("curl"):
        said = subprocess.run(["sh", "-c", command], capture_output=True, check=True, timeout=60).stdout
    else:
        _, url, *rest = shlex.split(command.replace("\\\n", " "))
        given = dict(zip(rest[::2], rest[1::2], strict=True))
        headers = dict(line.split(": ") for name, line in zip(rest[::2], rest[1::2], strict=True) if name == "-H")
        request = urllib.request.Request(url, data=given["-d"].encode(), headers=headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            said = answer.read()
    reply: dict[str, Any] = json.loads(said)
    return reply


def paste_python(program: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    ).stdout


@pytest.mark.engine
def test_serve_says_how_to_use_it_and_ctrl_c_stops_it(profile: Profile) -> None:
    alias = profile()
    with serving(alias) as serve:
        (record,) = records()
        assert serve.out == f"{record.base_url}\n"
        assert f"ready: {alias} (pid {record.child_pid}), ctx 4096, KV q8_0" in serve.err
        curl, python = snippets(serve.err)
        assert paste_curl(curl)["choices"][0]["message"]["content"] == HELLO
        assert paste_python(python) == f"{HELLO}\n"
        assert len(records()) == 1, "the pasted program used this very server"
        serve.ctrl_c()
        assert serve.end() == 0, serve.err
    assert f"{alias} (pid {record.child_pid}) is stopped." in serve.err
    assert gone(record.child_pid)
    assert port_is_free(record.port)
    assert not CONTROL.search(serve.out + serve.err)
    assert serve.out == f"{record.base_url}\n"


@pytest.mark.engine
def test_pasted_python_finds_a_server_with_flags_of_its_own(profile: Profile) -> None:
    with serving(profile(), "--", "-c", "2048") as serve:
        assert paste_python(snippets(serve.err)[1]) == f"{HELLO}\n"
        assert [record.ctx for record in records()] == [2048]
        serve.ctrl_c()
        assert serve.end() == 0


def test_pasted_curl_turns_thinking_off_where_the_profile_does(
    tiny_gguf: Callable[[str], Path], fake: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This family thinks by default: the pasted question would get an empty answer."""
    fake()
    monkeypatch.setenv("QWEN35_RAM8_GGUF", str(tiny_gguf("tiny-qwen35-mtp")))
    done = run("models", "serve", "ram8", "--detach", "--port", str(free_port()))
    assert '"chat_template_kwargs": {"enable_thinking": false}' in snippets(done.stderr)[0]
    assert "note: " in done.stderr
    run("models", "stop", "ram8")


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_serve_on_a_terminal_shows_a_live_line_and_obeys_ctrl_c(
    profile: Profile, fake: Callable[..., Path], term: str
) -> None:
    fake()
    alias = profile()
    with Terminal("models", "serve", alias, TERM=term) as terminal:
        terminal.until(").choices[0].message.content)")
        if term == "xterm":
            terminal.until("idle, 1 user. Ctrl-C stops it.")
        terminal.type("\x03")
        assert terminal.end() == 0, terminal.shown
    assert "is stopped." in terminal.shown
    assert ("\x1b" in terminal.shown) == (term == "xterm")


def test_ctrl_c_while_it_loads(profile: Profile, fake: Callable[..., Path], tmp_path: Path) -> None:
    fake(loading_until=str(tmp_path / "gate"))
    with Command("models", "serve", profile()) as serve:
        serve.hear("loading: ")
        (record,) = records()
        serve.ctrl_c()
        assert serve.end() == 130
    assert (serve.out, serve.err.splitlines()[-1]) == ("", "interrupted")
    assert "Traceback" not in serve.err
    assert gone(record.child_pid)
    assert records() == []
    assert port_is_free(record.port)


def test_a_dead_engine_ends_serve_with_the_cause(profile: Profile, fake: Callable[..., Path], tmp_path: Path) -> None:
    pipe = str(tmp_path / "pipe")
    fake(exit_when=pipe, exit_text="ggml.c:1: GGML_ASSERT(x > 0) failed", exit_code=-6)
    alias = profile()
    with serving(alias) as serve:
        end_engine(pipe)
        assert serve.end() == 3
    last = serve.err.split("error: ")[1]
    assert last.startswith("the engine stopped on an internal check: GGML_ASSERT(x > 0) failed\n")
    assert "  | ggml.c:1: GGML_ASSERT" in last
    assert f"  log:  {os.environ['HOME']}/.local/state/looprun/logs/{alias}-" in last
    assert "  next: " in last
    assert "Traceback" not in serve.err


def test_an_engine_that_dies_while_it_loads(profile: Profile, fake: Callable[..., Path]) -> None:
    fake(load_exit=1, load_text="error: loading model: unknown model architecture: 'qwen99'")
    told = failed(run("models", "serve", profile()), 3)
    assert "is too old for this model's architecture (qwen99)" in told
    assert "  | error: loading model: unknown model architecture" in told


def test_serve_spares_other_users_at_the_first_ctrl_c(profile: Profile, fake: Callable[..., Path]) -> None:
    fake()
    alias = profile()
    with serving(alias) as serve, agents(alias) as (agent,):
        pid = agent.hear()["pid"]
        serve.ctrl_c()
        assert f"{alias} is used by agent.py (pid {pid})." in serve.hear("Ctrl-C again stops it")
        assert agent.ask() == FAKE
        serve.ctrl_c()
        assert serve.end() == 0
    assert records() == []


def test_a_second_serve_shares_the_server_and_both_end_well(profile: Profile, fake: Callable[..., Path]) -> None:
    fake()
    alias = profile()
    with serving(alias) as first, serving(alias) as second:
        assert "already running: " in second.err
        assert first.out == second.out
        second.ctrl_c()
        assert f"is used by looprun (pid {first.process.pid})" in second.hear("Ctrl-C again")
        second.ctrl_c()
        assert second.end() == 0
        assert first.end() == 0
    assert first.err.endswith(f"{alias} was stopped by somebody else.\n")


def test_detach_leaves_the_server_until_it_is_stopped(profile: Profile, fake: Callable[..., Path]) -> None:
    fake()
    alias = profile()
    done = run("models", "serve", alias, "--detach")
    (record,) = records()
    assert (done.exit_code, done.stdout) == (0, f"{record.base_url}\n")
    assert f"It runs until it is stopped: looprun models stop {alias}" in done.stderr
    assert not CONTROL.search(done.output)
    again = run("models", "serve", alias, "--detach")
    assert (again.exit_code, again.stdout) == (0, done.stdout)
    assert "already running" in again.stderr
    assert not gone(record.child_pid)
    stopped = run("models", "stop", alias)
    assert (stopped.exit_code, stopped.stdout) == (0, "")
    assert stopped.stderr == f"{alias} (pid {record.child_pid}) is stopped.\n"
    assert gone(record.child_pid)
    assert port_is_free(record.port)


def test_an_automatic_key_is_shown_and_needed(profile: Profile, fake: Callable[..., Path]) -> None:
    fake()
    alias = profile()
    done = run("models", "serve", alias, "--detach", "--api-key", "auto")
    curl, python = snippets(done.stderr)
    key = re.search(r"Authorization: Bearer ([\w-]{20,})'", curl)
    assert key
    port = records()[0].port
    assert get_json("127.0.0.1", port, "/props", None, 10)[0] == 401
    assert get_json("127.0.0.1", port, "/props", key[1], 10)[0] == 200
    assert paste_curl(curl)["choices"][0]["message"]["content"] == FAKE
    assert paste_python(python) == f"{FAKE}\n"
    run("models", "stop", alias)


def test_the_network_is_for_those_with_a_key(profile: Profile, fake: Callable[..., Path]) -> None:
    fake()
    alias = profile()
    told = failed(run("models", "serve", alias, "--detach", "--host", "0.0.0.0"), 2)
    assert f"next: looprun models serve {alias} --host 0.0.0.0 --api-key auto" in told
    done = run("models", "serve", alias, "--detach", "--host", "0.0.0.0", "--api-key", "sesame")
    (record,) = records()
    assert done.stdout == f"http://127.0.0.1:{record.port}/v1\n"
    assert proves(identify("127.0.0.1", record.port, "sesame"), record)
    assert f"from other machines and containers: the address of this one instead, port {record.port}" in done.stderr
    run("models", "stop", alias)


def test_a_port_in_use_is_named_with_its_holder(profile: Profile, fake: Callable[..., Path]) -> None:
    fake()
    alias = profile()
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        told = failed(run("models", "serve", alias, "--port", str(port)), 5)
    assert re.search(rf"error: port {port} is in use by .+ \(pid {os.getpid()}\)\.", told)
    assert f"looprun models serve {alias} --port {port + 1}" in told


# --- stop, ask, logs -------------------------------------------------------------------------------------------------


def test_stop_wants_to_know_which(profile: Profile, fake: Callable[..., Path]) -> None:
    fake()
    assert "which server? Running: none." in failed(run("models", "stop"), 2)
    alias, other = profile(), profile("tiny-qwen35")
    run("models", "serve", alias, "--detach")
    assert f"which server? Running: {alias}." in failed(run("models", "stop"), 2)
    assert f"no server of {other} is running." in run("models", "stop", other).stderr
    assert failed(run("models", "stop", alias, "--all"), 2)
    run("models", "serve", other, "--detach")
    done = run("models", "stop", "--all")
    assert (done.exit_code, done.stdout, done.stderr.count("is stopped.")) == (0, "", 2)
    assert records() == []
    assert run("models", "stop", "--all").stderr == "no server is running.\n"


def test_stop_spares_users_unless_forced(profile: Profile, fake: Callable[..., Path]) -> None:
    fake()
    alias = profile()
    with agents(alias) as (agent,):
        pid = agent.hear()["pid"]
        told = failed(run("models", "stop", alias), 1)
        assert f"{alias} is used by agent.py (pid {pid})." in told
        assert f"next: looprun models stop {alias} --force" in told
        assert agent.ask() == FAKE
        assert "next: looprun models stop --all --force" in failed(run("models", "stop", "--all"), 1)
        assert run("models", "stop", alias, "--force").exit_code == 0
        assert records() == []


@pytest.mark.engine
def test_ask_prints_the_answer_and_tells_the_rest_on_the_side(
    profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOOPRUN_KEEP_ALIVE", "100")
    alias = profile()
    done = run("models", "ask", alias, "Hi?")
    assert (done.exit_code, done.stdout) == (0, f"{HELLO}\n"), done.stderr
    told = r"\[tiny-qwen35-mtp-gguf: ready after [\d.]+ s, first token after [\d.]+ s, \d+ tok/s.*\]\n"
    assert re.search(told, done.stderr)
    assert f"[it stays loaded for 100 s: looprun models stop {alias}]" in done.stderr
    run("init", "--local", alias)
    again = run("models", "ask", "Hi?", "--max-tokens", "2")
    assert again.stdout.rstrip() in HELLO
    assert "cut short by --max-tokens" in again.stderr
    assert "stays loaded" not in again.stderr
    run("models", "stop", alias)


def test_ask_without_a_question() -> None:
    assert "what should ram16 be asked?" in failed(run("models", "ask", "ram16"), 2)
    assert "what should the model be asked?" in failed(run("models", "ask"), 2)


def test_logs_end_and_follow(profile: Profile, fake: Callable[..., Path]) -> None:
    fake()
    alias = profile()
    told = failed(run("models", "logs", alias), 1)
    assert f"{alias} has no log: it was never started." in told
    run("models", "serve", alias, "--detach")
    log = Path(records()[0].log)
    with log.open("a") as file:
        file.writelines(f"line {n}\n" for n in range(100))
    done = run("models", "logs", alias, "-n", "3")
    assert (done.stdout, done.stderr) == ("line 97\nline 98\nline 99\n", f"{log}:\n")
    assert len(run("models", "logs", alias).stdout.splitlines()) == 50
    with Command("models", "logs", alias, "-f", "-n", "1") as follow:
        follow.hear_result("line 99")
        with log.open("a") as file:
            file.write("something new\n")
        assert follow.hear_result("new") == "line 99\nsomething new\n"
        run("models", "stop", alias)
        follow.hear_result("looprun: stopped")
        run("models", "serve", alias, "--detach")
        assert follow.hear_result("ready").count("line 99") == 1, (
            "a new log of that name is read, the old one not again"
        )
        os.truncate(log, 0)
        with log.open("a") as file:
            file.write("cut\n")
        follow.hear_result("cut")
        follow.ctrl_c()
        assert follow.end() == 130
    assert "Traceback" not in follow.err
    run("models", "stop", alias)


# --- init ------------------------------------------------------------------------------------------------------------


def test_init_without_a_terminal_looks_chooses_and_fetches_nothing(
    hub: HubServer, absent: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    alias, path = absent
    done = run("init", "--local", alias)
    assert done.exit_code == 0, done.output
    for line in (
        r"machine  .+, \d+ cores",
        r"memory   [\d.]+ GB.*, [\d.]+ GB available",
        r"disk     [\d.]+ GB free in the home folder",
        r"engine   skipped llama-server \(PATH\): not found there",
        r"engine   b\d+ \(.*\), from embedded",
        r"gpu      ",
        r"tier     \S+: .*GB",
        rf"chosen   {alias}: for tests$",
        rf"weights  {alias}: missing, {path}$",
        rf"next: looprun models pull {alias}$",
    ):
        assert re.search(f"^{line}", done.stdout, re.MULTILINE), line
    assert "No terminal to ask on: taken as no." in done.stderr
    assert hub.requests == []


def test_init_fetches_when_told_to(hub: HubServer, absent: tuple[str, Path]) -> None:
    alias, path = absent
    done = run("init", "--local", alias, "--yes")
    assert done.exit_code == 0, done.output
    assert path.exists()
    assert done.stdout.endswith(f"next: looprun models serve {alias}\n")


def test_the_choice_of_init_is_used_when_no_alias_is_given(profile: Profile, fake: Callable[..., Path]) -> None:
    fake()
    alias = profile()
    assert run("init", "--local", alias).stdout.endswith(f"next: looprun models serve {alias}\n")
    assert f"* {alias} " in run("models", "list").stdout
    assert f"next: looprun models serve {alias}" in run("models", "status").stdout
    assert run("models", "status", "--check").exit_code == 0
    assert run("models", "serve", "--detach").exit_code == 0
    assert [record.alias for record in records()] == [alias]
    assert f'next: looprun models ask {alias} "Hello?"' in run("models", "status").stdout
    run("models", "stop", alias)


def test_init_recommends_the_tier_of_the_machine() -> None:
    done = run("init")
    tier = re.search(
        r"^tier     (\S+): (\d+) GB tier: this (?:machine has|process may use) ([\d.]+) GB$", done.stdout, re.M
    )
    assert tier
    assert int(tier[2]) <= float(tier[3]) * 1.06
    assert done.stdout.endswith(f"next: looprun models pull {tier[1]}\n")
    assert json.loads(run("models", "status", "--json").stdout)["chosen"] == tier[1]


def test_init_of_what_is_too_large_says_so(profile: Profile) -> None:
    done = run("init", "--local", profile("tiny-qwen35", tier=True, min_ram_gb=100000))
    assert "(meant for 100000 GB: more than this machine has)" in done.stdout


def test_init_of_an_unknown_profile_chooses_nothing() -> None:
    assert "unknown model alias 'unknown'" in failed(run("init", "--local", "unknown"), 2)
    assert not load_settings().choice_file.exists()


def test_a_choice_that_cannot_be_read(profile: Profile) -> None:
    choice = load_settings().choice_file
    choice.parent.mkdir(parents=True, exist_ok=True)
    choice.write_text("alias = [")
    told = failed(run("models", "status"), 2)
    assert f"error: {choice}: not readable as TOML" in told
    assert "next: looprun init" in told
    assert run("init", "--local", profile()).exit_code == 0
    assert run("models", "status").exit_code == 0


def test_a_choice_that_is_gone_leads_back_to_init() -> None:
    choice = load_settings().choice_file
    choice.parent.mkdir(parents=True, exist_ok=True)
    choice.write_text('alias = "removed"')
    told = failed(run("models", "status"), 2)
    assert f"next: looprun init   (chooses anew: {choice} names it)" in told


def test_init_without_an_engine_names_both_ways_to_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("looprun_models.search.importlib.util.find_spec", lambda name: None)
    done = run("init", "--local", "smoke")
    assert done.exit_code == 0, done.output
    assert "engine   none found" in done.stdout
    assert "looprun engine install                   an official llama.cpp build" in done.stdout
    assert "No terminal to ask on: taken as no." in done.stderr
    assert 'next: looprun engine install   (or pip install "looprun-models[embedded]", or set LLAMA_BIN ' in done.stdout
    assert "and then looprun init --local smollm2-135m" in done.stdout
    monkeypatch.setenv("LLAMA_BIN", "/no/such")
    assert "next: point LLAMA_BIN at a llama-server, or unset it" in run("init", "--local", "smoke").stdout


# --- how it speaks ---------------------------------------------------------------------------------------------------


def test_progress_without_a_terminal_is_a_line_at_most_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr("looprun_models.cli.output.time.monotonic", lambda: now[0])
    with output.progress_shown() as show:
        for second in range(25):
            now[0] = 100.0 + second
            show(Progress("downloading", second * 10**6, 25 * 10**6))
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "downloading: 0 B of 25.0 MB (0 %)",
        "downloading: 10.0 MB of 25.0 MB (40 %)",
        "downloading: 20.0 MB of 25.0 MB (80 %)",
    ]


def test_tables_wrap_their_last_column_on_a_terminal(profile: Profile) -> None:
    with Terminal("models", "show", profile()) as terminal:
        assert terminal.end() == 0
    table = terminal.shown.split("\r\n\r\n")[1]
    assert max(map(len, table.splitlines())) <= 100
    assert " ".join(table.split()).count("the second name") == 0
    assert "proves which plan is serving" in " ".join(table.split())


def test_a_question_that_nobody_sees_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    with contextlib.suppress(AttributeError):
        monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    assert output.agree("Fetch it?", yes=False) is False
    assert "No terminal to ask on" in capsys.readouterr().err
