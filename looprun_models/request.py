"""What is asked for, before the machine is looked at: option over variable over profile, each with its origin.

To make a flag of the recipe settable after `--`, add a line to `OVERRIDES`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from looprun_models.errors import BadSetting, ReservedFlag
from looprun_models.registry import LocalModelSpec
from looprun_models.settings import KV_TYPES, Settings
from looprun_models.system import LOOPBACK

OVERRIDES = {
    "-c": "ctx",
    "--ctx-size": "ctx",
    "-ctk": "kv_k",
    "--cache-type-k": "kv_k",
    "-ctv": "kv_v",
    "--cache-type-v": "kv_v",
    "-ctxcp": "ctx_checkpoints",
    "--ctx-checkpoints": "ctx_checkpoints",
    "--swa-checkpoints": "ctx_checkpoints",
    "-cram": "cache_ram",
    "--cache-ram": "cache_ram",
    "--spec-type": "spec_type",
    "-ngl": "gpu_layers",
    "--gpu-layers": "gpu_layers",
    "--n-gpu-layers": "gpu_layers",
    "-fa": "flash_attn",
    "--flash-attn": "flash_attn",
    "-np": "parallel",
    "--parallel": "parallel",
    "-t": "threads",
    "--threads": "threads",
}
"""Recipe flags that may be given after `--`; their values enter the plan: memory check and identity stay true."""

RESERVED = {
    "--host": "use --host before the `--`",
    "--port": "use --port before the `--`",
    "-m": "set the profile's path variable (looprun models show ALIAS names it)",
    "--model": "set the profile's path variable (looprun models show ALIAS names it)",
    "-a": "the served id is the profile's `served_id`",
    "--alias": "the served id is the profile's `served_id`",
    "--slot-save-path": "set LLAMA_SLOT_SAVE_PATH",
    "--api-key": "use --api-key before the `--`",
    "--api-key-file": "use --api-key before the `--`",
    "--api-prefix": "clients find the API under /v1",
    "--ssl-key-file": "clients talk plain HTTP to it",
    "--ssl-cert-file": "clients talk plain HTTP to it",
    "-hf": "looprun models pull fetches the weights",
    "-hfr": "looprun models pull fetches the weights",
    "--hf-repo": "looprun models pull fetches the weights",
    "-mu": "looprun models pull fetches the weights",
    "--model-url": "looprun models pull fetches the weights",
    "-dr": "looprun models pull fetches the weights",
    "--docker-repo": "looprun models pull fetches the weights",
    "--reuse-port": "one server has one port",
    "-h": "run the engine itself: looprun models show ALIAS names it",
    "--help": "run the engine itself: looprun models show ALIAS names it",
    "--usage": "run the engine itself: looprun models show ALIAS names it",
    "--version": "run the engine itself: looprun models show ALIAS names it",
    "--": "give engine flags after one `--`",
}
LEAST_CONTEXT = 256
"""Tokens; engines round up to it, and some end on an internal check below."""
_WHOLE_NUMBERS = {
    "ctx": LEAST_CONTEXT,
    "ctx_checkpoints": 0,
    "cache_ram": 0,
    "parallel": 1,
    "threads": 1,
    "gpu_layers": 0,
}


@dataclass(frozen=True, slots=True)
class Options:
    """What the caller chose, over variables and profile. api_key: a key the server must ask for; spare_key: one to use
    when the engine cannot close itself to web pages otherwise. engine_flags: what stood after `--`."""

    port: int | None = None
    host: str = LOOPBACK
    api_key: str | None = None
    spare_key: str = ""
    engine_flags: tuple[str, ...] = ()
    as_quoted: bool = False
    force: bool = False


@dataclass(frozen=True, slots=True)
class Value:
    """A value of the recipe and what decided it: "profile", "variable NAME", "option"."""

    value: Any
    origin: str


@dataclass(frozen=True, slots=True)
class Request:
    """The recipe's values before the machine is looked at: what makes two servers the same.

    extra: engine flags passed through as they are; the first ones are the profile's, `profile_extra` many. weights:
    what tells these files from others at their place.
    """

    values: Mapping[str, Value]
    extra: tuple[str, ...]
    profile_extra: int = 0
    fingerprint: str = ""
    weights: str = ""

    def __getitem__(self, name: str) -> Any:
        return self.values[name].value


def read_request(
    spec: LocalModelSpec,
    settings: Settings,
    options: Options,
    *,
    engine_identity: str,
    weights_identity: str,
    slot_dir: Path | None,
) -> Request:
    """Merge option over variable over profile. Raises BadSetting or ReservedFlag before anything else is looked at."""
    if options.api_key is not None and not re.fullmatch(r"[!-+\--~]+", options.api_key):
        raise BadSetting("--api-key", "...", "printable ASCII without blanks and commas, or `auto`")
    if settings.ctx is not None and settings.ctx < LEAST_CONTEXT:
        raise BadSetting("LLAMA_CTX", str(settings.ctx), f"{LEAST_CONTEXT} tokens or more; engines end below that")
    of_profile, profile_extra = split_engine_flags(spec.engine_flags)
    overrides, extra = split_engine_flags(options.engine_flags)
    extra = profile_extra + extra

    def pick(name: str, profile: Any, variable: str = "", value: Any = None) -> Value:
        if name in overrides:
            return Value(overrides[name], "option")
        if value is not None:
            return Value(value, f"variable {variable}")
        return Value(of_profile.get(name, profile), "profile")

    spec_type = pick("spec_type", spec.spec_type or "", "LLAMA_SPEC_TYPE", settings.spec_type)
    values = {
        "ctx": pick("ctx", spec.ctx, "LLAMA_CTX", settings.ctx),
        "kv_k": pick("kv_k", spec.kv, "LLAMA_KV", settings.kv),
        "kv_v": pick("kv_v", spec.kv, "LLAMA_KV", settings.kv),
        "ctx_checkpoints": pick("ctx_checkpoints", spec.ctx_checkpoints),
        "cache_ram": pick("cache_ram", spec.cache_ram_mib, "LLAMA_CACHE_RAM", settings.cache_ram),
        "spec_type": spec_type if spec_type.value != "none" else Value("", spec_type.origin),
        "gpu_layers": pick("gpu_layers", 99),
        "flash_attn": pick("flash_attn", "on"),
        "parallel": pick("parallel", spec.parallel),
        "threads": pick("threads", None),
    }
    same = {name: value.value for name, value in values.items()}
    same |= {"extra": extra, "engine": engine_identity, "weights": weights_identity, "id": spec.served_id}
    same |= {"slots": str(slot_dir), "as_quoted": options.as_quoted, "ncp": spec.parallel}
    digest = hashlib.sha256(json.dumps(same, sort_keys=True, default=str).encode()).hexdigest()
    return Request(values, extra, len(profile_extra), digest[:12], weights_identity)


def split_engine_flags(flags: Sequence[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Recipe values and the rest. Raises ReservedFlag for what the manager decides, BadSetting for a bad value."""
    overrides: dict[str, Any] = {}
    extra: list[str] = []
    words = list(flags)
    while words:
        word = words.pop(0)
        name, joined, value = word.partition("=") if word.startswith("--") else (word, "", "")
        if name in RESERVED:
            raise ReservedFlag(name, RESERVED[name])
        if name not in OVERRIDES:
            extra.append(word)
            continue
        if not joined:
            if not words:
                raise BadSetting(name, "", "a value after it", hint=f"give {name} a value, or leave it out")
            value = words.pop(0)
        overrides[OVERRIDES[name]] = _override(name, OVERRIDES[name], value)
    return overrides, tuple(extra)


def _override(flag: str, name: str, text: str) -> Any:
    hint = f"change or leave out {flag}"
    if name == "gpu_layers" and text in ("auto", "all"):
        return text
    if name in _WHOLE_NUMBERS:
        least = _WHOLE_NUMBERS[name]
        if not re.fullmatch(r"[0-9]+", text) or int(text) < least:
            raise BadSetting(flag, text, f"a whole number, {least} or more", hint=hint)
        return int(text)
    if name in ("kv_k", "kv_v") and text not in KV_TYPES:
        raise BadSetting(flag, text, " or ".join(KV_TYPES), hint=hint)
    return text
