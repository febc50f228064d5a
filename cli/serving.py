"""`looprun models serve | stop | ask | logs`: running servers."""

from __future__ import annotations

import contextlib
import http.client
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from looprun_models.errors import ServerInUse, StartFailed, UsageError
from looprun_models.launch import Options
from looprun_models.registry import LocalModelSpec, resolve_alias
from looprun_models.runtime import LlamaCppRuntime, load_runtime
from looprun_models.servers import Lease, list_servers, newest_log, server_status, stop_server
from looprun_models.settings import load_settings
from looprun_models.wire import LOOPBACK, Record, get_json

from .options import Alias, AsQuoted, Force, Port, RuntimeName, Timeout
from .output import note, progress_shown, say

LIVE_EVERY = 2.0
"""Seconds between looks at the slots: more often would keep the engine from noticing that a client has left."""


def serve(
    alias: Alias = None,
    engine_flags: Annotated[
        list[str] | None, typer.Argument(help="Flags for the engine itself, after --.", metavar="-- FLAGS")
    ] = None,
    port: Port = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; other than loopback only with --api-key.")
    ] = LOOPBACK,
    api_key: Annotated[str | None, typer.Option(help="A key that clients must send, or `auto` to make one.")] = None,
    keep_alive: Annotated[float | None, typer.Option(min=0, help="Seconds to stay after the last user (0).")] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return when it is ready; it runs until it is stopped.")
    ] = False,
    timeout: Timeout = None,
    as_quoted: AsQuoted = False,
    force: Annotated[bool, typer.Option("--force", help="Start even though the memory check says no.")] = False,
) -> None:
    """Run the server of a profile until Ctrl-C."""
    settings = load_settings()
    spec = resolve_alias(alias, settings)
    if host not in (LOOPBACK, "localhost", "::1") and not api_key:
        raise UsageError(
            f"--host {host} would open the model to everybody who can reach this machine.",
            hint=f"looprun models serve {spec.alias} --host {host} --api-key auto",
        )
    options = Options(
        port=port,
        host=LOOPBACK if host == "localhost" else host,
        api_key=secrets.token_urlsafe(24) if api_key == "auto" else api_key,
        engine_flags=tuple(engine_flags or ()),
        as_quoted=as_quoted,
        force=force,
    )
    stays = keep_alive if keep_alive is not None else settings.keep_alive or 0.0
    runtime = LlamaCppRuntime(
        settings, options, strict_port=True, keep_alive=None if detach and keep_alive is None else stays
    )
    note(f"starting {spec.alias} ...")
    with progress_shown() as show:
        lease = runtime.ensure_server(spec, timeout=timeout, on_progress=show)
    _say_how_to_use(spec, lease)
    if detach:
        note(f"It runs until: looprun models stop {spec.alias}")
        lease.close()
        return
    _watch(lease, spec)


def _say_how_to_use(spec: LocalModelSpec, lease: Lease) -> None:
    record = lease.record
    again = "already running" if lease.already_running else "ready"
    note(f"{again}: {spec.alias} (pid {record.child_pid}), {record.summary}")
    for text in record.notes:
        note(f"note: {text}")
    say(lease.base_url)
    key = f"  -H 'Authorization: Bearer {lease.api_key}' \\\n" if lease.api_key else ""
    note(
        f"""
curl {lease.base_url}/chat/completions -H 'Content-Type: application/json' \\
{key}  -d '{{"model": "{record.served_id}", "max_tokens": 200, "messages": [{{"role": "user", "content": "Hello"}}]}}'

from looprun_models import local_model
with local_model("{spec.alias}") as model:
    print(model.chat.completions.create(
        model=model.model, messages=[{{"role": "user", "content": "Hello"}}], **model.pinned(max_tokens=200)
    ).choices[0].message.content)
"""
    )


def _watch(lease: Lease, spec: LocalModelSpec) -> None:
    """Show the state until the server ends or Ctrl-C. The first Ctrl-C spares other users, the second does not."""
    force = False
    with lease, _live_line() as show:
        while True:
            try:
                gone = lease.why_gone(wait=LIVE_EVERY)
                if gone:
                    raise gone
                show(_state_of(lease.record))
            except KeyboardInterrupt:
                try:
                    forced = lease.stop(force=force)
                except ServerInUse as others:
                    force = True
                    note(f"\n{others.message} Ctrl-C again stops it all the same.")
                    continue
                note(f"\n{spec.alias} is stopped" + (" (it took force)." if forced else "."))
                return


def _state_of(record: Record) -> str:
    told = server_status(record)
    try:
        _, slots = get_json(record.host, record.port, "/slots", record.api_key, 1.0)
    except (OSError, http.client.HTTPException):
        slots = None
    busy = any(slot.get("is_processing") for slot in slots) if isinstance(slots, list) else None
    users = len(told["leases"]) if told else 0
    state = "not answering" if busy is None else "busy" if busy else "idle"
    return f"{record.alias} on port {record.port}: {state}, {users} user{'' if users == 1 else 's'}. Ctrl-C stops it."


@contextlib.contextmanager
def _live_line() -> Iterator[Callable[[str], None]]:
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console

    with Console(stderr=True).status("") as line:
        yield lambda text: line.update(text)


def stop(
    alias: Annotated[str | None, typer.Argument(help="The profile whose server to stop.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Stop every server of yours.")] = False,
    force: Force = False,
) -> None:
    """Stop a server; returns when it is gone and its port is free."""
    settings = load_settings()
    if alias is None and not everything:
        running = ", ".join(record.alias for record in list_servers(settings)) or "none"
        raise UsageError(f"which server? Running: {running}.", hint="looprun models stop ALIAS, or --all")
    wanted = None if everything or alias is None else resolve_alias(alias, settings).alias
    found = [record for record in list_servers(settings) if wanted in (None, record.alias)]
    if not found:
        note("no such server is running." if wanted else "no server is running.")
    refused: ServerInUse | None = None
    for record in found:
        try:
            forced = stop_server(record, force=force)
        except ServerInUse as in_use:
            refused = in_use
            continue
        list_servers(settings)  # drops the record of a supervisor that had to be killed
        note(f"{record.alias} (pid {record.child_pid}) is stopped" + (" (it took force)." if forced else "."))
    if refused:
        raise refused


def ask(
    alias: Annotated[str, typer.Argument(help="A profile, such as smoke.")],
    question: Annotated[str, typer.Argument(help="What to ask.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="The longest answer, in tokens.")] = 200,
    timeout: Timeout = None,
    runtime: RuntimeName = None,
) -> None:
    """Ask one question and print the answer: the proof that all of it works."""
    from looprun_models.client import local_model

    began = time.monotonic()
    with progress_shown() as show:
        model = local_model(alias, runtime=runtime and load_runtime(runtime), timeout=timeout, on_progress=show)
    with model:
        sent, first = time.monotonic(), None
        timings: dict[str, float] = {}
        stream = model.chat.completions.create(
            model=model.model,
            messages=[{"role": "user", "content": question}],
            stream=True,
            **model.pinned(max_tokens=max_tokens),
        )
        for chunk in stream:
            timings = (chunk.model_extra or {}).get("timings") or timings
            text = chunk.choices[0].delta.content if chunk.choices else None
            if text:
                first = first or time.monotonic()
                sys.stdout.write(text)
                sys.stdout.flush()
    say()
    ready = f"ready after {sent - began:.1f} s, first token after {(first or time.monotonic()) - sent:.2f} s"
    speed = f", {timings['predicted_per_second']:.0f} tok/s" if timings.get("predicted_per_second") else ""
    reused = f", {timings['cache_n']} prompt tokens reused" if timings.get("cache_n") else ""
    note(f"[{model.model}: {ready}{speed}{reused}]")


def logs(
    alias: Alias = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on printing until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("-n", min=1, help="How many lines from the end.")] = 50,
) -> None:
    """Print the end of the log of a profile's newest server."""
    from looprun_models.failure import log_tail

    settings = load_settings()
    spec = resolve_alias(alias, settings)
    path = newest_log(settings, spec.alias)
    if path is None:
        raise StartFailed(f"{spec.alias} has no log yet.", hint=f"looprun models serve {spec.alias}")
    note(f"{path}:")
    for line in log_tail(path, lines):
        say(line)
    if follow:
        _follow(path)


def _follow(path: Path) -> None:
    with path.open(encoding="utf-8", errors="replace") as log:
        log.seek(0, 2)
        while True:
            text = log.read()
            if text:
                sys.stdout.write(text)
                sys.stdout.flush()
            elif path.stat().st_size < log.tell():
                log.seek(0)  # it was cut to its cap
            else:
                time.sleep(0.2)
