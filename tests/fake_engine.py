"""A program that poses as llama-server, with faults to order. `engines.make_engine` writes scripts that run it.

Standard library only, and nothing waits for a clock: a load goes on until a file is there, an end comes when somebody
opens a pipe. What it answers has the shape of b11434 (facts were collected from the real one).
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from typing import Any, NoReturn

LOAD_MODE = """\
-lm,   --load-mode MODE                 model loading mode (default: auto)
                                        - mlock: force system to keep model in RAM rather than swapping
                                        - mmap+mlock: mmap + force system to keep model in RAM
"""
LOCKS = """\
--mlock                                 force system to keep model in RAM rather than swapping or compressing
                                        (env: LLAMA_ARG_MLOCK)
--mmap, --no-mmap                       whether to memory-map model. (if mmap disabled, slower load but may
                                        reduce pageouts if not using mlock) (default: enabled)
"""
DIALECTS = {"old": LOCKS, "deprecated": LOCKS + LOAD_MODE, "new": LOAD_MODE}
"""How "locked in RAM" is said: before b10108, up to b10882, and since."""

HELP = """\
----- common params -----

-h,    --help, --usage                  print usage and exit
--version                               show version and build info
--list-devices                          print list of available devices and exit
-t,    --threads N                      number of CPU threads to use during generation (default: -1)
                                        (env: LLAMA_ARG_THREADS)
-tb,   --threads-batch N                number of threads to use during batch and prompt processing
-c,    --ctx-size N                     size of the prompt context (default: 0, 0 = loaded from model)
-b,    --batch-size N                   logical maximum batch size (default: 2048)
-fa,   --flash-attn [on|off|auto]       set Flash Attention use ('on', 'off', or 'auto', default: 'auto')
-ctk,  --cache-type-k TYPE              KV cache data type for K
                                        allowed values: f32, f16, bf16, q8_0, q4_0, q4_1, iq4_nl, q5_0, q5_1
-ctv,  --cache-type-v TYPE              KV cache data type for V
                                        allowed values: f32, f16, bf16, q8_0, q4_0, q4_1, iq4_nl, q5_0, q5_1
--rpc SERVERS                           comma-separated list of RPC servers (host:port)
-ncmoe, --n-cpu-moe N                   keep the Mixture of Experts (MoE) weights of the first N layers in the
                                        CPU
-ngl,  --gpu-layers, --n-gpu-layers N   max. number of layers to store in VRAM (default: auto)
-m,    --model FNAME                    model path to load

----- speculative params -----

--draft, --draft-n, --draft-max N       the argument has been removed. use --spec-draft-n-max or
                                        --spec-ngram-mod-n-max
--spec-type none,draft-simple,draft-eagle3,draft-mtp,ngram-simple,ngram-mod
                                        comma-separated list of types of speculative decoding to use
                                        (default: none)

----- example-specific params -----

-ctxcp, --ctx-checkpoints, --swa-checkpoints N
                                        max number of context checkpoints to create per slot (default: 32)
-cram, --cache-ram N                    set the maximum cache size in MiB (default: 8192, -1 - no limit, 0 -
                                        disable)
-np,   --parallel N                     number of server slots (default: -1, -1 = auto)
-a,    --alias STRING                   set model name aliases, comma-separated (to be used by API)
--host HOST                             ip address to listen (default: 127.0.0.1)
--port PORT                             port to listen (default: 8080)
--cors-origins ORIGINS                  comma-separated list of allowed origins for CORS (default: *)
--api-key KEY                           API key to use for authentication (env: LLAMA_API_KEY)
--metrics                               enable prometheus compatible metrics endpoint (default: disabled)
--slots, --no-slots                     expose slots monitoring endpoint (default: enabled)
--slot-save-path PATH                   path to save slot kv cache (default: disabled)
--jinja, --no-jinja                     whether to use jinja template engine for chat (default: enabled)
"""
UNAVAILABLE = {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}}
UNAUTHORISED = {"error": {"message": "Invalid API Key", "type": "authentication_error", "code": 401}}
NOT_FOUND = {"error": {"message": "File Not Found", "type": "not_found_error", "code": 404}}


def main(behaviour: dict[str, Any], argv: list[str]) -> None:
    """Do what a llama-server with these flags would do, but for the faults in `behaviour` (see engines.Behaviour)."""
    if "calls" in behaviour:
        note_call(behaviour["calls"], argv)
    folder = behaviour.get("needs_library_path")
    if folder and folder not in os.environ.get("LD_LIBRARY_PATH", "").split(":"):
        say("llama-server: error while loading shared libraries: libllama.so: cannot open shared object file")
        end(127)
    if behaviour.get("single") or argv[:1] == ["serve"]:
        if not behaviour.get("single") or argv[:1] != ["serve"]:
            say(f"error: unknown command '{argv[0] if argv else 'help'}'")
            end(1)
        argv = argv[1:]
    if "--version" in argv:
        default = "version: 0.6.0-dev (build 11434, commit unknown)\nbuilt with GNU 12.2.0 for Linux x86_64"
        say(
            behaviour.get("version", default), sys.stdout if behaviour.get("version_stream") == "stdout" else sys.stderr
        )
        end(behaviour.get("version_exit", 0))
    if "--help" in argv:
        print(help_page(behaviour))
        end(behaviour.get("help_exit", 0))
    if "--list-devices" in argv:
        print("Available devices:")
        print("\n".join(f"  {device}" for device in behaviour.get("devices", ["(none)"])))
        end(0)
    flags = read_flags(behaviour, argv)
    serve(faults_in_check(behaviour) if is_check(argv) else behaviour, flags)


def is_check(argv: list[str]) -> bool:
    """Whether this is the smoke check, which has faults of its own: an engine may pass it and fail on a real model."""
    return any(word.startswith("engine-check,") for word in argv)


def faults_in_check(behaviour: dict[str, Any]) -> dict[str, Any]:
    names = {"check_exit": "load_exit", "check_text": "load_text", "check_says": "says", "check_drafts": "drafts"}
    return {name: behaviour[given] for given, name in names.items() if given in behaviour}


def note_call(path: str, argv: list[str]) -> None:
    """Append what this program was started with, for a test to look at."""
    call = {
        "check": is_check(argv),
        "program": os.path.abspath(sys.argv[0]),
        "argv": argv,
        "env": dict(os.environ),
        "cwd": os.getcwd(),
    }
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(call) + "\n")


def say(text: str, stream: Any = None) -> None:
    print(text, file=stream or sys.stderr, flush=True)


def end(code: int) -> NoReturn:
    """Leave with an exit code, or by a signal when it is negative."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code < 0:
        if -code != signal.SIGKILL and threading.current_thread() is threading.main_thread():
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        threading.Event().wait()  # another thread may be the one that gets it
    os._exit(code)


def help_page(behaviour: dict[str, Any]) -> str:
    kept = []
    for entry in re.split(r"\n(?=-)", HELP + DIALECTS[behaviour.get("dialect", "new")]):
        flags, placeholder = head_of(entry)
        if flags & set(behaviour.get("help_drop", ())):
            continue
        if flags & set(behaviour.get("help_removed", ())):
            entry = (", ".join(sorted(flags)) + placeholder).ljust(39) + " the argument has been removed"
        kept.append(entry)
    return "\n".join([*kept, *behaviour.get("help_add", ())])


def head_of(entry: str) -> tuple[set[str], str]:
    """The names of one entry of a help page, and the placeholder of its value ("" for a switch)."""
    match = re.match(r"(--?[A-Za-z][^\s,]*(?:,\s+--?[A-Za-z][^\s,]*)*)( \S+)?", entry)
    return (set(re.split(r",\s+", match[1])), match[2] or "") if match else (set(), "")


def flag_names(page: str) -> dict[str, bool]:
    """Each flag of a help page, and whether a value follows it."""
    names: dict[str, bool] = {}
    for entry in re.split(r"\n(?=-)", page):
        flags, placeholder = head_of(entry)
        if "has been removed" not in entry:
            names.update(dict.fromkeys(flags, bool(placeholder)))
    return names


def read_flags(behaviour: dict[str, Any], argv: list[str]) -> dict[str, str]:
    """The command line as a mapping. A flag that the help does not list ends the program as the real one does."""
    known = flag_names(help_page(behaviour))
    flags: dict[str, str] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        if word not in known:
            say(f"error: invalid argument: {word}")
            end(1)
        flags[word] = words.pop(0) if known[word] and words else ""
    return flags


def serve(behaviour: dict[str, Any], flags: dict[str, str]) -> None:
    """Listen, load, answer until a signal. The port is open before the model is loaded, as in the real one."""
    if "load_exit" in behaviour:
        say(behaviour.get("load_text", ""))
        end(behaviour["load_exit"])
    import http.server

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True

    host, port = flags.get("--host", "127.0.0.1"), int(flags.get("--port", "8080"))
    try:
        server = Server((host, port), handler_class(behaviour, flags))
    except OSError:
        say(f"0.00.012.345 E srv start: couldn't bind HTTP server socket, hostname: {host}, port: {port}")
        say("0.00.012.400 E srv llama_server: exiting due to HTTP server error")
        end(1)
    obey_signals(ignore=bool(behaviour.get("ignore_term")))
    if "spawn_child" in behaviour:
        spawn_child(behaviour["spawn_child"])
    if "exit_when" in behaviour:
        threading.Thread(target=wait_to_exit, args=(behaviour,), daemon=True).start()
    say(f"0.00.020.000 I main: server is listening on http://{host}:{port}")
    server.serve_forever()


def handler_class(behaviour: dict[str, Any], flags: dict[str, str]) -> Any:
    """What answers requests; made here because a fake that is only asked for its version need not import HTTP."""
    from http.server import BaseHTTPRequestHandler

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(*get(behaviour, flags, self.path, self.key_is_good()))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
            status, reply = post(behaviour, flags, self.path, body, self.key_is_good())
            if body.get("stream") and status == 200:
                self.stream(reply)
            else:
                self.answer(status, reply)

        def key_is_good(self) -> bool:
            key = flags.get("--api-key") or os.environ.get("LLAMA_API_KEY")
            return not key or self.headers.get("Authorization") == f"Bearer {key}"

        def answer(self, status: int, reply: Any) -> None:
            data = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def stream(self, reply: dict[str, Any]) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            for chunk in chunks(reply):
                self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, *args: Any) -> None:
            pass

    return Handler


def obey_signals(*, ignore: bool) -> None:
    def leave(*_: object) -> None:
        say("0.01.000.000 I srv operator(): cleaning up before exit...")
        end(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN if ignore else leave)


def spawn_child(pid_file: str) -> None:
    """A helper in our process group that does not end by itself."""
    import subprocess

    child = subprocess.Popen([sys.executable, "-ISc", "import signal; signal.pause()"])
    temporary = f"{pid_file}.new"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(str(child.pid))
    os.replace(temporary, pid_file)


def wait_to_exit(behaviour: dict[str, Any]) -> None:
    with open(behaviour["exit_when"], encoding="utf-8") as pipe:  # opens when somebody opens it for writing
        pipe.read()
    say(behaviour.get("exit_text", ""))
    end(behaviour.get("exit_code", 1))


def get(behaviour: dict[str, Any], flags: dict[str, str], path: str, key_is_good: bool) -> tuple[int, Any]:
    path = path.partition("?")[0]
    if "loading_until" in behaviour and not os.path.exists(behaviour["loading_until"]):
        return 503, UNAVAILABLE
    if path in ("/health", "/v1/health"):
        return 200, {"status": "ok"}
    if not key_is_good:
        return 401, UNAUTHORISED
    if path == "/props":
        return 200, props(behaviour, flags)
    if path in ("/v1/models", "/models"):
        names = aliases(flags)
        meta = {"n_ctx": context(flags), "n_params": 1, "size": 1}
        return 200, {"object": "list", "data": [{"id": names[0], "aliases": names, "object": "model", "meta": meta}]}
    if path == "/slots":
        return 200, [{"id": i, "n_ctx": context(flags), "is_processing": False} for i in range(slots(flags))]
    return 404, NOT_FOUND


def post(
    behaviour: dict[str, Any], flags: dict[str, str], path: str, body: dict[str, Any], key_is_good: bool
) -> tuple[int, Any]:
    if "loading_until" in behaviour and not os.path.exists(behaviour["loading_until"]):
        return 503, UNAVAILABLE
    if not key_is_good:
        return 401, UNAUTHORISED
    if path == "/completion":
        timings = {"draft_n": behaviour.get("drafts", 5), "draft_n_accepted": 5}
        return 200, {"content": behaviour.get("says", "cdefghij"), "timings": timings}
    if path not in ("/v1/chat/completions", "/chat/completions"):
        return 404, NOT_FOUND
    prompt = sum(len(str(message.get("content", "")).split()) for message in body.get("messages", []))
    if prompt > context(flags):
        message = f"request ({prompt} tokens) exceeds the available context size ({context(flags)} tokens)"
        wrong = {"code": 400, "message": message, "type": "exceed_context_size_error"}
        return 400, {"error": wrong | {"n_prompt_tokens": prompt, "n_ctx": context(flags)}}
    said = {"role": "assistant", "content": behaviour.get("says", "Hello from the fake engine.")}
    return 200, {
        "id": "chatcmpl-fake",
        "object": "chat.completion",
        "created": 1,
        "model": aliases(flags)[0],
        "system_fingerprint": "b11434-unknown",
        "choices": [{"index": 0, "finish_reason": "stop", "message": said}],
        "usage": {"prompt_tokens": prompt, "completion_tokens": 5, "total_tokens": prompt + 5},
        "timings": {"cache_n": 0, "prompt_n": prompt, "predicted_n": 5, "predicted_per_second": 100.0},
    }


def chunks(reply: dict[str, Any]) -> list[dict[str, Any]]:
    """The same reply as a stream: a role, a word at a time, an end with the timings."""
    base = {key: reply[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    words = reply["choices"][0]["message"]["content"].split(" ")
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": None}]
    deltas += [{"content": word if i == 0 else f" {word}"} for i, word in enumerate(words)]
    parts = [base | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "timings": reply["timings"]}
    return [*parts, base | last]


def props(behaviour: dict[str, Any], flags: dict[str, str]) -> dict[str, Any]:
    router = behaviour.get("router", False)
    return {
        "default_generation_settings": {"n_ctx": 0 if router else context(flags)},
        "total_slots": slots(flags),
        "model_alias": aliases(flags)[0],
        "model_path": "none" if router else behaviour.get("wrong_model") or flags.get("-m", ""),
        "build_info": "b11434-unknown",
        "is_sleeping": False,
        **({"role": "router"} if router else {}),
    }


def aliases(flags: dict[str, str]) -> list[str]:
    """A sorted set: the first one is the id."""
    return sorted(set(flags.get("--alias", flags.get("-m", "none")).split(",")))


def context(flags: dict[str, str]) -> int:
    """The engine rounds up to 256 tokens."""
    return -(-int(flags.get("-c", "4096")) // 256) * 256


def slots(flags: dict[str, str]) -> int:
    return int(flags.get("-np", "4"))
