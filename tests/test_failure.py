"""Why an engine ended: each class of cause has its own message and its own next command."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from looprun_models.errors import EngineDied, PortInUse
from looprun_models.failure import TAIL_LINES, explain, log_tail
from looprun_models.wire import Record

ENGINE, MODEL = "/opt/llama/llama-server", "/models/tiny.gguf"
PREFIX = "0.00.060.314 E "
GENERIC_TAIL = (
    f"{PREFIX}common_init_from_params: failed to load model '{MODEL}'\n"
    f"{PREFIX}srv    load_model: failed to load model, '{MODEL}'\n"
    "0.00.060.400 I srv    operator(): operator(): cleaning up before exit...\n"
    f"{PREFIX}srv  llama_server: exiting due to model loading error\n"
)
PULL_AGAIN = "move the file away, then: looprun models pull tiny"
EMBEDDED = 'pip install "looprun-models[embedded]"'
NEWER = f"use a newer llama-server (set LLAMA_BIN), or: {EMBEDDED}"

# name: what the engine says before the generic tail, its code, what the user reads, the next command
LOADING = {
    "flag": (
        "error: invalid argument: --mlock", 1,
        f"the engine {ENGINE} does not know the flag --mlock",
        "leave the flag out, or use an engine that has it (LLAMA_BIN)",
    ),
    "value": (
        'error while handling argument "-c": stoi\n\nusage:\n-c,    --ctx-size N   size', 1,
        f'the engine {ENGINE} refused a value: argument "-c": stoi',
        "looprun models show tiny",
    ),
    "slot folder": (
        'error while handling argument "--slot-save-path": not a directory: /x', 1,
        f'the engine {ENGINE} refused a value: argument "--slot-save-path": not a directory: /x',
        "looprun models show tiny",
    ),
    "architecture": (
        f"{PREFIX}llama_model_load: error loading model: unknown model architecture: 'zzama'", 1,
        f"the engine {ENGINE} is too old for this model's architecture (zzama)",
        NEWER,
    ),
    "loader": (
        "llama-server: error while loading shared libraries: libllama-server-impl.so: cannot open shared object", 127,
        f"the engine {ENGINE} cannot load the library libllama-server-impl.so",
        "keep the library beside the program, or install the package that brings it (libgomp.so.1: libgomp1)",
    ),
    "loader on macOS": (
        "dyld[812]: Library not loaded: @rpath/libllama.dylib\n  Referenced from: x", -signal.SIGABRT,
        f"the engine {ENGINE} cannot load the library @rpath/libllama.dylib",
        "keep the library beside the program, or install the package that brings it (libgomp.so.1: libgomp1)",
    ),
    "no draft head": (
        f"{PREFIX}llama_init_from_model: context type MTP requested but model doesn't contain MTP layers", 1,
        f"draft-mtp was asked for and {MODEL} has no MTP head",
        "LLAMA_SPEC_TYPE='' looprun models serve tiny",
    ),
    "missing": (
        f"{PREFIX}gguf_init_from_file: failed to open GGUF file '{MODEL}' (No such file or directory)", 1,
        f"the engine could not open {MODEL}",
        "looprun models pull tiny",
    ),
    "truncated": (
        f"{PREFIX}gguf_init: tensor 'blk.15.x' data is not within the file bounds, model is corrupted or incomplete", 1,
        f"{MODEL} is damaged or cut short (not within the file bounds)",
        PULL_AGAIN,
    ),
    "header cut": (
        f"{PREFIX}gguf_init: string length 20 exceeds remaining file size\n{PREFIX}failed to read key-value pairs", 1,
        f"{MODEL} is damaged or cut short (exceeds remaining file size)",
        PULL_AGAIN,
    ),
    "garbage": (
        f"{PREFIX}gguf_init_from_reader: invalid magic characters: 'garb', expected 'GGUF'", 1,
        f"{MODEL} is damaged or cut short (invalid magic)",
        PULL_AGAIN,
    ),
    "empty": (
        f"{PREFIX}gguf_init_from_reader: failed to read magic", 1,
        f"{MODEL} is damaged or cut short (failed to read magic)",
        PULL_AGAIN,
    ),
    "memory": (
        f"{PREFIX}llama_kv_cache: failed to allocate buffer for kv cache", 1,
        "not enough memory: failed to allocate buffer for kv cache",
        "try LLAMA_CTX=8192, LLAMA_KV=q8_0, or a smaller tier: looprun models list",
    ),
    "GPU memory": (
        f"{PREFIX}ggml_cuda: cudaMalloc failed: out of memory", 1,
        "not enough memory: cudaMalloc failed: out of memory",
        "try LLAMA_CTX=8192, LLAMA_KV=q8_0, or a smaller tier: looprun models list",
    ),
    "rpc": (
        "Remote RPC server crashed or returned malformed response", -signal.SIGABRT,
        "a remote (RPC) part of the engine went away",
        "start it again, then: looprun models serve tiny",
    ),
    "assert": (
        "/src/llama-context.cpp:3373: GGML_ASSERT(nread <= state_size) failed", -signal.SIGABRT,
        "the engine stopped on an internal check: GGML_ASSERT(nread <= state_size) failed",
        NEWER,
    ),
    "another error": (
        f"{PREFIX}llama_init_from_model: quantized V cache requires flash_attn to be enabled", 1,
        f"the engine ended by itself (exit code 1): {PREFIX}llama_init_from_model: quantized V cache requires "
        "flash_attn to be enabled",
        "looprun models logs tiny",
    ),
}  # fmt: skip
SIGNALS = {
    signal.SIGILL: (
        f"the engine {ENGINE} is built for another CPU (killed by SIGILL)",
        f"looprun engine install   (or {EMBEDDED}, or set LLAMA_BIN to a build for it)",
    ),
    signal.SIGTERM: ("the engine was stopped from outside (SIGTERM)", "looprun models serve tiny"),
    signal.SIGSEGV: ("the engine ended by itself (killed by SIGSEGV)", "looprun models logs tiny"),
}
KILLED = (
    "the engine was killed (SIGKILL), most likely because memory ran out",
    "free some memory, or take a smaller tier: looprun models list",
)
Say = Callable[..., Record]
posix = pytest.mark.skipif(sys.platform == "win32", reason="signals")


@pytest.fixture
def said(tmp_path: Path) -> Say:
    """`said("text")` is the record of an engine whose log has this text."""

    def record(text: str, **changed: object) -> Record:
        log = tmp_path / "tiny-8081.log"
        log.write_text(text, encoding="utf-8")
        values: dict[str, object] = {name: 0 for name in Record.__annotations__}
        values |= {"engine": ENGINE, "model_path": MODEL, "alias": "tiny", "log": str(log), "port": 8081}
        return Record(**{**values, **changed})

    return record


@pytest.mark.parametrize("case", LOADING)
def test_each_class_of_cause_has_its_own_message_and_next_command(said: Say, case: str) -> None:
    text, code, cause, hint = LOADING[case]
    if code < 0 and sys.platform == "win32":
        pytest.skip("signals")
    error = explain(said(f"0.00.001.000 I build 11434\n{text}\n{GENERIC_TAIL}"), code)
    assert isinstance(error, EngineDied)
    assert (error.message, error.hint) == (cause, hint)
    assert str(error) == f"{cause}\n  next: {hint}"
    assert error.exit_code == 3


def test_the_classes_do_not_share_messages() -> None:
    causes = [cause for _, _, cause, _ in LOADING.values()] + [cause for cause, _ in (*SIGNALS.values(), KILLED)]
    assert len(set(causes)) == len(causes)


@posix
@pytest.mark.parametrize("number", SIGNALS)
def test_each_signal_has_its_own_message(said: Say, number: signal.Signals) -> None:
    error = explain(said("0.00.060.000 I llama threadpool init, n_threads = 2\n"), -number)
    assert (error.message, error.hint) == SIGNALS[number]


@posix
@pytest.mark.parametrize("text", ["", "0.00.060.000 I loading\n"])
def test_a_kill_is_put_down_to_memory(said: Say, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    error = explain(said(text), -signal.SIGKILL)
    assert (error.message, error.hint) == KILLED


@posix
def test_on_macos_a_kill_before_the_first_word_is_quarantine(said: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    error = explain(said("looprun: starting\n"), -signal.SIGKILL)
    assert error.message == f"macOS killed {ENGINE} at once: it is quarantined or not signed"
    assert error.hint == f"xattr -d com.apple.quarantine {ENGINE}"
    later = explain(said("0.00.060.000 I loading\n"), -signal.SIGKILL)
    assert (later.message, later.hint) == KILLED


def test_a_port_that_was_taken_is_not_an_engine_that_died(said: Say) -> None:
    text = f"{PREFIX}start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 8081\n{GENERIC_TAIL}"
    error = explain(said(text), 1)
    assert isinstance(error, PortInUse)
    assert error.message == "port 8081 is in use by another program."
    assert error.hint == "looprun models serve tiny --port PORT"
    assert error.exit_code == 5


@pytest.mark.parametrize("why", ["[Errno 8] Exec format error: '/opt/llama'", "{odd} name}"])
def test_a_program_that_could_not_be_started_says_why(said: Say, why: str) -> None:
    error = explain(said(""), None, why)
    assert error.message == f"the engine {ENGINE} could not be started: {why}"
    assert error.hint == "looprun models status"


def test_an_end_without_a_word_gives_the_code(said: Say) -> None:
    error = explain(said(""), 0)
    assert error.message == "the engine ended by itself (exit code 0)"


def test_paths_with_braces_are_shown_as_they_are(said: Say) -> None:
    record = said(f"{PREFIX}gguf_init_from_reader: failed to read magic {{what}}", model_path="/m/{engine}.gguf")
    assert explain(record, 1).message == "/m/{engine}.gguf is damaged or cut short (failed to read magic)"


def test_the_error_brings_the_end_of_the_log_and_its_path(said: Say) -> None:
    lines = [f"line {n}" for n in range(100)]
    record = said("\n".join([*lines, "looprun: the engine ended: exit code 1"]))
    error = explain(record, 1)
    assert isinstance(error, EngineDied)
    assert error.tail == tuple(lines[-TAIL_LINES:])
    assert str(error.log) == record.log


def test_the_cause_may_stand_far_above_the_end(said: Say) -> None:
    noise = "0.00.070.000 I unloading\n" * 100
    error = explain(said(f"{PREFIX}unknown model architecture: 'zzama'\n{noise}"), 1)
    assert "zzama" in error.message


def test_a_log_that_is_gone_has_no_end(tmp_path: Path) -> None:
    assert log_tail(tmp_path / "gone") == []


def test_only_the_end_of_a_large_log_is_read_and_bad_bytes_do_no_harm(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x" * 200_000 + b"\n\n  \n\xff one\n\ntwo\n")
    assert log_tail(log, 2) == ["\ufffd one", "two"]
