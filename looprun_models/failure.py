"""Why an engine ended: an exit code and its last lines, turned into the class of cause and the command that mends it.

Engines have no exit codes of their own (nearly everything is 1), so the text decides; it comes before a generic tail,
so the first match in the order below wins. The texts were collected from b10434 and b11434.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from looprun_models import system
from looprun_models.errors import EngineDied, LooprunError, PortInUse
from looprun_models.wire import Record

TAIL_LINES = 20
TAIL_BYTES = 1 << 16

NEWER_ENGINE = 'use a newer llama-server (set LLAMA_BIN), or: pip install "looprun-models[embedded]"'

_CAUSES: tuple[tuple[str, str, str], ...] = (
    (
        r"error: invalid argument: (?P<what>\S+)",
        "the engine {engine} does not know the flag {what}",
        "leave the flag out, or use an engine that has it (LLAMA_BIN)",
    ),
    (
        r"error while handling (?P<what>(?:argument|environment variable) [^\n]*)",
        "the engine {engine} refused a value: {what}",
        "looprun models show {alias}",
    ),
    (
        r"unknown model architecture: '?(?P<what>[\w.-]+)",
        "the engine {engine} is too old for this model's architecture ({what})",
        NEWER_ENGINE,
    ),
    (
        r"(?:error while loading shared libraries|Library not loaded): (?P<what>[^:\s]+)",
        "the engine {engine} cannot load the library {what}",
        "keep the library beside the program, or install the package that brings it (libgomp.so.1: libgomp1)",
    ),
    (
        r"model doesn't contain MTP layers",
        "draft-mtp was asked for and {model} has no MTP head",
        "LLAMA_SPEC_TYPE='' looprun models serve {alias}",
    ),
    (
        r"(?P<what>failed to open GGUF file[^\n]*)",
        "the engine could not open {model}",
        "looprun models pull {alias}",
    ),
    (
        r"(?P<what>not within the file bounds|invalid magic|failed to read magic|exceeds remaining file size|"
        r"failed to read key-value pairs)",
        "{model} is damaged or cut short ({what})",
        "move the file away, then: looprun models pull {alias}",
    ),
    (
        r"(?P<what>failed to allocate[^\n]*|out of memory[^\n]*|cudaMalloc failed[^\n]*|ErrorOutOfDeviceMemory)",
        "not enough memory: {what}",
        "try LLAMA_CTX=8192, LLAMA_KV=q8_0, or a smaller tier: looprun models list",
    ),
    (
        r"Remote RPC server crashed",
        "a remote (RPC) part of the engine went away",
        "start it again, then: looprun models serve {alias}",
    ),
    (r"(?P<what>GGML_ASSERT\([^\n]*\) failed)", "the engine stopped on an internal check: {what}", NEWER_ENGINE),
)

_SIGNALS = {
    "SIGILL": (
        "the engine {engine} is built for another CPU (killed by SIGILL)",
        'looprun engine install   (or pip install "looprun-models[embedded]", or set LLAMA_BIN to a build for it)',
    ),
    "SIGKILL": (
        "the engine was killed (SIGKILL), most likely because memory ran out",
        "free some memory, or take a smaller tier: looprun models list",
    ),
    "SIGTERM": ("the engine was stopped from outside (SIGTERM)", "looprun models serve {alias}"),
}
_QUARANTINED = (
    "macOS killed {engine} at once: it is quarantined or not signed",
    "xattr -d com.apple.quarantine {engine}",
)


def log_tail(path: str | Path, lines: int = TAIL_LINES) -> list[str]:
    """The last lines of a log; empty when there is none."""
    try:
        with open(path, "rb") as log:
            log.seek(0, 2)
            log.seek(max(0, log.tell() - TAIL_BYTES))
            text = log.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-lines:]


def explain(record: Record, code: int | None, why: str = "") -> LooprunError:
    """The error for an engine that ended with this code (None: it could not be started at all, `why` says)."""
    tail = [line for line in log_tail(record.log, 200) if not line.startswith("looprun: ")]
    text = "\n".join(tail)
    names = {"engine": record.engine, "model": record.model_path, "alias": record.alias}
    if "couldn't bind HTTP server socket" in text:
        return PortInUse(record.port, "another program", hint=f"looprun models serve {record.alias} --port PORT")
    cause, hint = _cause(text, code, why, names)
    return EngineDied(cause.format(**names), hint=hint.format(**names), log=Path(record.log), tail=tail[-TAIL_LINES:])


def _cause(text: str, code: int | None, why: str, names: dict[str, str]) -> tuple[str, str]:
    if code is None:
        names["what"] = why
        return "the engine {engine} could not be started: {what}", "looprun models status"
    ended = system.describe_exit(code)
    for name, (cause, hint) in _SIGNALS.items():
        if name in ended:
            early_on_mac = name == "SIGKILL" and sys.platform == "darwin" and not text
            return _QUARANTINED if early_on_mac else (cause, hint)
    for pattern, cause, hint in _CAUSES:
        match = re.search(pattern, text)
        if match:
            names["what"] = (match.groupdict().get("what") or "").strip()
            return cause, hint
    first_error = next((line.strip() for line in text.splitlines() if re.search(r"(^|\s)(E|error:)\s", line)), "")
    names["what"] = first_error
    return f"the engine ended by itself ({ended})" + (": {what}" if first_error else ""), "looprun models logs {alias}"
