"""A llama-server out of the xllamacpp wheel: ``python -m looprun_models.embedded FLAGS``.

It takes llama-server's flags and answers ``--help``, ``--version`` and mistakes as llama-server does, so that
whoever starts and probes a llama-server starts and probes this one unchanged. It needs only xllamacpp.

It is a program and not a function because of two things that xllamacpp does: it holds the GIL for as long as
the model loads, so no other thread of the process runs; and its teardown waits for clients that stream, so
only a signal's default action ends it at once. A child can live with both, somebody's program cannot.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

Convert = Callable[[Any, str], Any]  # (the xllamacpp module, the word given) -> the attribute's value
Row = tuple[str, str, str, Convert, str]

MISSING = 'error: the embedded engine is not installed: pip install "looprun-models[embedded]"'
INT_MAX = 2**31 - 1
SWITCH = dict.fromkeys(("on", "enabled", "true", "1"), "ENABLED")
SWITCH |= dict.fromkeys(("off", "disabled", "false", "0"), "DISABLED")
LOAD_MODES = "auto, none, mmap, mlock, mmap+mlock, dio"
KV_TYPES = "f32, f16, bf16, q8_0, q4_0, q4_1, iq4_nl, q5_0, q5_1"
SPEC_TYPES = (
    "none,draft-simple,draft-eagle3,draft-mtp,draft-dflash,draft-dspark,"
    "ngram-simple,ngram-map-k,ngram-map-k4v,ngram-mod,ngram-cache"
)


class Mistake(Exception):
    """A command line that llama-server would refuse; the text is what the user reads."""


def text(_: Any, word: str) -> str:
    """The word as it stands."""
    return word


def words(_: Any, word: str) -> list[str]:
    """A comma-separated list of at least one."""
    if not (found := [part.strip() for part in word.split(",") if part.strip()]):
        raise Mistake("a value is needed")
    return found


def number(low: int = -INT_MAX, high: int = INT_MAX, but: int | None = None, **named: int) -> Convert:
    """A whole number from `low` to `high`, except `but`, or one of the `named` ones."""

    def convert(_: Any, word: str) -> int:
        try:
            value = named[word] if word in named else int(word)
        except ValueError:
            raise Mistake(f"not a whole number: {word}") from None
        if not low <= value <= high or value == but:
            raise Mistake(f"invalid value: {word}")
        return value

    return convert


def threads(x: Any, word: str) -> int:
    """A number of threads, where less than one means all cores."""
    value: int = number()(x, word)
    return value if value > 0 else os.cpu_count() or 1


def fraction(_: Any, word: str) -> float:
    """A number with a decimal point."""
    try:
        return float(word)
    except ValueError:
        raise Mistake(f"not a number: {word}") from None


def on_off(_: Any, word: str) -> bool:
    """One of llama-server's words for yes and no."""
    if word not in SWITCH:
        raise Mistake(f"invalid value: {word} (allowed: on, off)")
    return SWITCH[word] == "ENABLED"


def one_of(enum: str, prefix: str, allowed: str, **spelled: str) -> Convert:
    """A member of an xllamacpp enum; `spelled` are the allowed words that it spells in a way of its own."""

    def convert(x: Any, word: str) -> Any:
        member = spelled.get(word) or word.upper().replace("-", "_").replace("+", "_")
        try:
            if word in spelled or word in allowed.replace(" ", "").split(","):
                return getattr(x, enum)[prefix + member]
        except KeyError:
            pass  # a word of llama-server that this xllamacpp is too old or too new for
        raise Mistake(f"invalid value: {word} (allowed: {allowed})")

    return convert


def spec_types(x: Any, word: str) -> list[Any]:
    """A comma-separated list of kinds of speculative decoding."""
    convert = one_of("common_speculative_type", "COMMON_SPECULATIVE_TYPE_", SPEC_TYPES)
    return [convert(x, name) for name in words(x, word)]


def directory(_: Any, word: str) -> str:
    """A directory that exists."""
    if not os.path.isdir(word):
        raise Mistake(f"not a directory: {word}")
    return os.path.join(word, "")  # the engine appends file names to it as it stands


def template_kwargs(_: Any, word: str) -> dict[str, str]:
    """A JSON object, its values as JSON again: so the engine keeps them."""
    try:
        return {key: json.dumps(value) for key, value in json.loads(word).items()}
    except (ValueError, AttributeError) as error:
        raise Mistake(f"not a JSON object: {error}") from None


# names; placeholder; attribute of CommonParams; conversion; help, where {} becomes the attribute's default.
# A row without a placeholder is a switch, and its names in --no-... mean False. A row without an attribute is
# an action. Spellings and aliases are llama-server's own.
FLAGS: list[Row] = [
    ("-h, --help, --usage", "", "", text, "print usage and exit"),
    ("--version", "", "", text, "show version and build info"),
    ("--list-devices", "", "", text, "print list of available devices and exit"),
    ("-m, --model", "FNAME", "model.path", text, "model path to load"),
    ("-a, --alias", "STRING", "model_alias", words, "set model name aliases, comma-separated"),
    ("--host", "HOST", "hostnames", words, "IP addresses to listen on, comma-separated (default: {})"),
    ("--port", "PORT", "port", number(0, 65535), "port to listen, 0 = any free one (default: {})"),
    ("--api-key", "KEY", "api_keys", words,
     "API key to use for authentication, multiple keys can be provided\n"
     "as a comma-separated list (default: none)\n(env: LLAMA_API_KEY)"),
    ("--cors-origins", "ORIGINS", "cors_origins", text,
     "comma-separated list of allowed origins for CORS (default: {})\n"
     "if set to special value 'localhost', reflect the Origin header only\nif it is localhost"),
    ("-np, --parallel", "N", "n_parallel", number(but=0), "number of server slots (default: {}, -1 = auto)"),
    ("-c, --ctx-size", "N", "n_ctx", number(0), "size of the prompt context (default: {}, 0 = the model's)"),
    ("-b, --batch-size", "N", "n_batch", number(), "logical maximum batch size (default: {})"),
    ("-ub, --ubatch-size", "N", "n_ubatch", number(), "physical maximum batch size (default: {})"),
    ("-t, --threads", "N", "cpuparams.n_threads", threads,
     "number of CPU threads to use during generation (default: {})"),
    ("-tb, --threads-batch", "N", "cpuparams_batch.n_threads", threads,
     "number of threads to use during batch and prompt processing\n(default: same as --threads)"),
    ("-ngl, --gpu-layers, --n-gpu-layers", "N", "n_gpu_layers", number(auto=-1, all=-2),
     "max. number of layers to store in VRAM, either an exact number,\n'auto', or 'all' (default: auto)"),
    ("-fa, --flash-attn", "[on|off|auto]", "flash_attn_type",
     one_of("llama_flash_attn_type", "LLAMA_FLASH_ATTN_TYPE_", "on, off, auto", **SWITCH),
     "set Flash Attention use ('on', 'off', or 'auto', default: 'auto')"),
    ("-lm, --load-mode", "MODE", "load_mode",
     one_of("llama_load_mode", "LLAMA_LOAD_MODE_", LOAD_MODES, dio="DIRECT_IO"),
     "model loading mode (default: auto)\n"
     "- auto: mmap, unless a device does not support it\n"
     "- none: no special loading mode\n"
     "- mmap: memory-map model\n"
     "- mlock: force system to keep model in RAM rather than swapping\n"
     "- mmap+mlock: mmap + force system to keep model in RAM\n"
     "- dio: use DirectIO if available"),
    ("-fit, --fit", "[on|off]", "fit_params", on_off,
     "whether to adjust unset arguments to fit in device memory\n('on' or 'off', default: 'on')"),
    ("--warmup, --no-warmup", "", "warmup", text,
     "whether to perform warmup with an empty run (default: {})"),
    ("-ctk, --cache-type-k", "TYPE", "cache_type_k", one_of("ggml_type", "GGML_TYPE_", KV_TYPES),
     f"KV cache data type for K\nallowed values: {KV_TYPES}\n(default: f16)"),
    ("-ctv, --cache-type-v", "TYPE", "cache_type_v", one_of("ggml_type", "GGML_TYPE_", KV_TYPES),
     f"KV cache data type for V\nallowed values: {KV_TYPES}\n(default: f16)"),
    ("-ctxcp, --ctx-checkpoints, --swa-checkpoints", "N", "n_ctx_checkpoints", number(),
     "max number of context checkpoints to create per slot (default: {})"),
    ("-cram, --cache-ram", "N", "cache_ram_mib", number(),
     "set the maximum cache size in MiB (default: {}, -1 - no limit,\n0 - disable)"),
    ("--slot-save-path", "PATH", "slot_save_path", directory, "path to save slot kv cache (default: none)"),
    ("--spec-type", SPEC_TYPES, "speculative.types", spec_types,
     "comma-separated list of types of speculative decoding to use\n(default: none)"),
    ("--spec-draft-n-max", "N", "speculative.draft.n_max", number(0),
     "number of tokens to draft for speculative decoding (default: {})"),
    ("--spec-draft-n-min", "N", "speculative.draft.n_min", number(),
     "minimum number of draft tokens to use for speculative decoding\n(default: {})"),
    ("--spec-draft-p-min, --draft-p-min", "P", "speculative.draft.p_min", fraction,
     "minimum speculative decoding probability (greedy) (default: {})"),
    ("--jinja, --no-jinja", "", "use_jinja", text,
     "whether to use jinja template engine for chat (default: {})"),
    ("--chat-template", "JINJA_TEMPLATE", "chat_template", text,
     "set custom jinja chat template (default: template taken from model's\nmetadata)"),
    ("--chat-template-kwargs", "STRING", "default_template_kwargs", template_kwargs,
     "sets additional params for the json template parser, must be a valid\n"
     "json object string, e.g. '{{\"key1\":\"value1\",\"key2\":\"value2\"}}'"),
    ("--reasoning-format", "FORMAT", "reasoning_format",
     one_of("common_reasoning_format", "COMMON_REASONING_FORMAT_", "none, auto, deepseek, deepseek-legacy"),
     "controls whether thought tags are allowed and/or extracted from the\n"
     "response, and in which format they're returned; one of:\n"
     "- none: leaves thoughts unparsed in `message.content`\n"
     "- deepseek: puts thoughts in `message.reasoning_content`\n"
     "- deepseek-legacy: keeps `<think>` tags in `message.content` while\n"
     "  also populating `message.reasoning_content`\n(default: auto)"),
    ("--metrics", "", "endpoint_metrics", text,
     "enable prometheus compatible metrics endpoint (default: {})"),
    ("--props", "", "endpoint_props", text,
     "enable changing global properties via POST /props (default: {})"),
    ("--slots, --no-slots", "", "endpoint_slots", text, "expose slots monitoring endpoint (default: {})"),
    ("--ui, --webui, --no-ui, --no-webui", "", "ui", text, "whether to enable the Web UI (default: {})"),
    ("--sse-ping-interval", "N", "sse_ping_interval", number(),
     "server SSE ping interval in seconds (-1 = disabled, default: {})"),
    ("--sleep-idle-seconds", "SECONDS", "sleep_idle_seconds", number(-1, but=0),
     "number of seconds of idleness after which the server will sleep\n(default: {}; -1 = disabled)"),
    ("-v, --verbose, --log-verbose", "", "verbosity", text,
     "Set verbosity level to infinity (i.e. log all messages, useful for\ndebugging)"),
    ("-lv, --verbosity, --log-verbosity", "N", "verbosity", number(),
     "Set the verbosity threshold. Messages with a higher verbosity will\n"
     "be ignored. 0: generic output, 1: error, 2: warning, 3: info,\n4: trace, 5: debug (default: {})"),
]  # fmt: skip

ADDING = ("model_alias", "api_keys", "speculative.types")  # given twice, llama-server takes both


def holder(params: Any, attribute: str) -> tuple[Any, str]:
    """The object and the name that a dotted attribute stands for; AttributeError if there is none."""
    *path, name = attribute.split(".")
    for part in path:
        params = getattr(params, part)
    getattr(params, name)
    return params, name


def known(params: Any) -> list[Row]:
    """The flags that the installed xllamacpp can honour."""
    rows = []
    for row in FLAGS:
        try:
            holder(params, row[2] or "model")
        except AttributeError:
            continue
        rows.append(row)
    return rows


def usage(row: Row, params: Any) -> str:
    """One flag in the layout of llama-server's help, which other programs parse."""
    names, placeholder, attribute, _, help_text = row
    first, *rest = names.split(", ")
    head = (first + ", ").ljust(7) + ", ".join(rest) if rest else first
    head = f"{head} {placeholder}".rstrip()
    default = getattr(*holder(params, attribute)) if attribute else None
    if isinstance(default, bool):
        default = "enabled" if default else "disabled"
    elif isinstance(default, list):
        default = ",".join(map(str, default))
    indent = "\n" + " " * 40
    head = head + indent if len(head) > 37 else head.ljust(40)
    return head + help_text.format(default).replace("\n", indent)


def print_version(x: Any) -> None:
    """The two lines of llama-server's ``--version``, and on stderr as there."""
    parts = [*str(x.__version__).split("."), "0", "0"]
    # the engine calls itself build 0; since 2026 the wheel's version has llama.cpp's build in the third place
    build = parts[2] if parts[0].isdigit() and int(parts[0]) >= 2026 else "0"
    info = x.BUILD_INFO
    print(f"version: xllamacpp {x.__version__} (build {build}, commit {info['commit']})", file=sys.stderr)
    print(f"built with {info['compiler']} for {info['build_target']}", file=sys.stderr)


def print_devices(x: Any) -> None:
    """llama-server's list of what can take layers; the CPU is not in it."""
    cpu = x.ggml_backend_dev_type.GGML_BACKEND_DEVICE_TYPE_CPU
    print("Available devices:")
    found = [device for device in x.get_device_info() if device["type"] != cpu]
    for device in found:
        total, free = device["memory_total"] >> 20, device["memory_free"] >> 20
        print(f"  {device['name']}: {device['description']} ({total} MiB, {free} MiB free)")
    if not found:
        print("  (none)")


def defaults(x: Any) -> Any:
    """CommonParams with llama-server's defaults where xllamacpp has others."""
    params = x.CommonParams()
    params.port = 8080
    params.n_parallel = -1
    return params


def store(row: Row, flag: str, rest: Iterator[str], x: Any, params: Any) -> None:
    """Put one flag into `params`, taking its value from `rest` if it has one."""
    _, placeholder, attribute, convert, _ = row
    owner, name = holder(params, attribute)
    if placeholder:
        if (word := next(rest, None)) is None:
            raise Mistake("expected value for argument")
        value = convert(x, word)
    else:
        value = INT_MAX if attribute == "verbosity" else not flag.startswith("--no-")
    if attribute in ADDING:
        value = [*getattr(owner, name), *value]
    setattr(owner, name, value)


def parse(argv: list[str], x: Any) -> Any:
    """The finished CommonParams, or None if the flags asked for something that has been printed instead."""
    params = defaults(x)
    rows = {name: row for row in known(params) for name in row[0].split(", ")}
    given, rest, want_help = set(), iter(argv), False
    for word in rest:
        flag = "--" + word[2:].replace("_", "-") if word.startswith("--") else word
        if flag not in rows:
            raise Mistake(f"error: invalid argument: {flag}")
        if flag in ("--version", "--list-devices"):
            print_version(x) if flag == "--version" else print_devices(x)
            return None
        if not rows[flag][2]:
            want_help = True  # llama-server reads on: a mistake after --help is still one
            continue
        given.add(rows[flag][2])
        try:
            store(rows[flag], flag, rest, x, params)
        except Mistake as mistake:
            raise Mistake(
                f'error while handling argument "{flag}": {mistake}\n\n'
                f"usage:\n{usage(rows[flag], defaults(x))}\n\nto show complete usage, run with -h"
            ) from None
    if want_help:
        print("\n".join(usage(row, defaults(x)) for row in known(params)))
        return None
    finish(params, given)
    return params


def finish(params: Any, given: set[str]) -> None:
    """What llama-server does with its flags besides storing them."""
    if not params.model.path:
        # without a model llama-server is a router, which the wheel does not have
        raise Mistake("error: --model is required and must not be empty")
    if "api_keys" not in given and (key := os.environ.get("LLAMA_API_KEY")):
        params.api_keys = words(None, key)
    if "cors_origins" in given:
        params.cors_origins_explicit = True
    if "n_ctx" in given and params.n_ctx == 0:
        params.fit_params_min_ctx = -1  # all of the model's context was asked for: fitting must not reduce it
    params.default_template_kwargs = {"preserve_reasoning": "true"} | params.default_template_kwargs


def serve(params: Any, x: Any) -> int:
    """Load, then serve until a signal's default action ends the process; the exit code if that fails."""
    try:
        server = x.Server(params)
    except (RuntimeError, ValueError, MemoryError) as error:
        # the engine's log thread may be in the middle of a line: start a new one
        why = f"or port {params.port} could not be opened; the log says which: {error}"
        print(f"\nerror: the model could not be loaded: {params.model.path} ({why})", file=sys.stderr)
        return 1
    while server.listening_address:  # the threads of `server` do the work for as long as it is referred to
        if sys.platform == "win32":
            time.sleep(3600)
        else:
            signal.pause()
    return 0


def main(argv: list[str]) -> int:
    """Do what the flags say; the exit code."""
    # Python's own SIGINT handler would wait for the load to end; a parent may have left either signal ignored
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        import xllamacpp as x
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "xllamacpp":
            print(MISSING, file=sys.stderr)
            return 1
        print(f"error while loading shared libraries: {error}", file=sys.stderr)
        if "libgomp" in str(error):
            print("install it, on Debian and Ubuntu: apt-get install libgomp1", file=sys.stderr)
        return 127
    try:
        params = parse(argv, x)
    except Mistake as mistake:
        print(mistake, file=sys.stderr)
        return 1
    return serve(params, x) if params else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
