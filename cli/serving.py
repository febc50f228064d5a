"""`looprun models serve | stop | ask | logs`: running servers."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import secrets
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from looprun_models.errors import LooprunError, ServerInUse, ServerStopped, UsageError
from looprun_models.lease import Lease, server_status, stop_server
from looprun_models.records import list_servers, newest_log
from looprun_models.registry import LocalModelSpec, load_profiles, resolve_alias
from looprun_models.request import Options
from looprun_models.runtime import LlamaCppRuntime, load_runtime
from looprun_models.settings import DEFAULT_KEEP_ALIVE, Settings, load_settings
from looprun_models.system import LOOPBACK
from looprun_models.wire import Record, get_json

from .options import Alias, AsQuoted, EngineFlags, Force, Port, RuntimeName, Timeout, split_words
from .output import live_line, note, progress_shown, say

if TYPE_CHECKING:
    from looprun_models.client import LocalModel

LIVE_EVERY = 2.0
"""Seconds between looks at the slots: more often would keep the engine from noticing that a client has left."""
LOG_EVERY = 0.2


def serve(
    alias: Alias = None,
    engine_flags: EngineFlags = None,
    port: Port = None,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where to listen; other than loopback only with --api-key.")
    ] = LOOPBACK,
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="A key that clients must send, or `auto` to make one.")
    ] = None,
    keep_alive: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0, max=1e9, help="How long to stay after the last user (0).")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return when ready; it runs until it is stopped.")] = False,
    timeout: Timeout = None,
    as_quoted: AsQuoted = False,
    force: Annotated[bool, typer.Option("--force", help="Start even though the memory check says no.")] = False,
) -> None:
    """Run the server of a profile until Ctrl-C."""
    settings = load_settings()
    alias, flags = split_words(alias, engine_flags)
    spec = resolve_alias(alias, settings)
    if not _is_loopback(host) and api_key is None:
        raise UsageError(
            f"--host {host} would open the model to everybody who can reach this machine.",
            hint=f"looprun models serve {spec.alias} --host {host} --api-key auto",
        )
    options = Options(
        port=port,
        host=LOOPBACK if host == "localhost" else host,
        api_key=secrets.token_urlsafe(24) if api_key == "auto" else api_key,
        engine_flags=flags,
        as_quoted=as_quoted,
        force=force,
    )
    stays = keep_alive if keep_alive is not None else None if detach else settings.keep_alive or 0.0
    runtime = LlamaCppRuntime(settings, options, strict_port=True, keep_alive=stays)
    with progress_shown() as show:
        lease = runtime.ensure_server(spec, timeout=timeout, on_progress=show)
    if not detach:
        _run_until_ctrl_c(lease, spec, options)
        return
    with lease:
        _say_how_to_use(spec, lease, options)
        until = "it is stopped" if stays is None else f"{stays:g} s after its last user"
        note(f"It runs until {until}: looprun models stop {spec.alias}")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name: whoever it leads to
        return False


def _say_how_to_use(spec: LocalModelSpec, lease: Lease, options: Options) -> None:
    record = lease.record
    again = "already running" if lease.already_running else "ready"
    note(f"{again}: {spec.alias} (pid {record.child_pid}), {record.summary}")
    for text in record.notes:
        note(f"note: {text}")
    say(lease.base_url)
    if not _is_loopback(options.host):
        note(f"from other machines and containers: the address of this one instead, port {record.port}")
    note(f"\n{_curl(spec, lease)}\n\n{_python(spec, lease, options)}\n")


def _curl(spec: LocalModelSpec, lease: Lease) -> str:
    auth = f"  -H {shlex.quote(f'Authorization: Bearer {lease.api_key}')} \\\n" if lease.api_key else ""
    body = {"model": lease.record.served_id, "max_tokens": 200, "messages": [{"role": "user", "content": "Hello"}]}
    if spec.template_args:  # without these it would spend its tokens on thinking
        body["chat_template_kwargs"] = dict(spec.template_args)
    first = f"curl {lease.base_url}/chat/completions -H 'Content-Type: application/json' \\\n"
    return f"{first}{auth}  -d {shlex.quote(json.dumps(body))}"


def _python(spec: LocalModelSpec, lease: Lease, options: Options) -> str:
    """Through `local_model` where that finds this very server; with flags of its own it would start another."""
    if not options.engine_flags and not options.as_quoted:
        return f"""from looprun_models import local_model
with local_model("{spec.alias}") as model:
    print(model.chat.completions.create(
        model=model.model, messages=[{{"role": "user", "content": "Hello"}}], **model.pinned(max_tokens=200)
    ).choices[0].message.content)"""
    return f"""from openai import OpenAI
client = OpenAI(base_url="{lease.base_url}", api_key="{lease.api_key or "none"}")
print(client.chat.completions.create(
    model="{lease.record.served_id}", messages=[{{"role": "user", "content": "Hello"}}], max_tokens=200
).choices[0].message.content)"""


def _run_until_ctrl_c(lease: Lease, spec: LocalModelSpec, options: Options) -> None:
    """Say how to use it and show its state. The first Ctrl-C spares other users, the second does not."""
    pressed = 0
    with lease:
        while True:
            try:
                if pressed == 0:
                    _say_how_to_use(spec, lease, options)
                elif _stop_ours(lease, force=pressed > 1):
                    return
                _watch(lease)
                return
            except KeyboardInterrupt:  # only counted here: one that comes while another is obeyed is not lost
                pressed += 1


def _stop_ours(lease: Lease, *, force: bool) -> bool:
    """Whether it is stopped; otherwise it is said who uses it."""
    try:
        forced = lease.stop(force=force)
    except ServerInUse as others:
        note(f"\n{others.message} Ctrl-C again stops it all the same.")
        return False
    note(f"\n{_stopped(lease.record, forced)}")
    return True


def _watch(lease: Lease) -> None:
    """Returns when somebody has stopped the server; raises the cause when it died."""
    with live_line() as show:
        show(lambda: _state_of(lease.record))
        while not (gone := lease.why_gone(wait=LIVE_EVERY)):
            show(lambda: _state_of(lease.record))
    if not isinstance(gone, ServerStopped):
        raise gone
    note(gone.message)


def _stopped(record: Record, forced: bool) -> str:
    return f"{record.alias} (pid {record.child_pid}) is stopped" + (" (it took force)." if forced else ".")


def _state_of(record: Record) -> str:
    told = server_status(record)
    try:
        _, slots = get_json(record.host, record.port, "/slots", record.api_key, 1.0)
    except (OSError, ValueError):
        slots = None
    busy = any(slot.get("is_processing") for slot in slots) if isinstance(slots, list) else False
    users = len(told["leases"]) if told else 0
    state = "not answering" if slots is None else "busy" if busy else "idle"
    return f"{record.alias} on port {record.port}: {state}, {users} user{'' if users == 1 else 's'}. Ctrl-C stops it."


def stop(
    alias: Annotated[str | None, typer.Argument(metavar="ALIAS", help="The profile whose server to stop.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Stop every server of yours.")] = False,
    force: Force = False,
) -> None:
    """Stop a server; returns when it is gone and its port is free."""
    settings = load_settings(lenient=True)  # a bad variable must not keep anybody from stopping a server
    running = list_servers(settings)
    if (alias is None) != everything:
        names = ", ".join(record.alias for record in running) or "none"
        raise UsageError(f"which server? Running: {names}.", hint="looprun models stop ALIAS, or --all")
    found = [record for record in running if alias is None or alias in (record.names or [record.alias])]
    if not found:
        wanted = alias and resolve_alias(alias, settings).alias
        note(f"no server of {wanted} is running." if wanted else "no server is running.")
    refused: list[ServerInUse] = []
    for record in found:
        try:
            forced = stop_server(record, force=force)
        except ServerInUse as in_use:
            refused.append(in_use)
            continue
        list_servers(settings)  # drops the record of a supervisor that had to be killed
        note(_stopped(record, forced))
    if refused:
        hint = refused[0].hint if alias else "looprun models stop --all --force"
        raise ServerInUse(" ".join(error.message for error in refused), hint=hint)


def ask(
    alias: Annotated[
        str | None, typer.Argument(metavar="ALIAS", help="A profile; may be left out, as elsewhere.")
    ] = None,
    question: Annotated[str | None, typer.Argument(metavar="QUESTION", help="What to ask.")] = None,
    max_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="The longest answer, in tokens.")] = 200,
    timeout: Timeout = None,
    runtime: RuntimeName = None,
) -> None:
    """Ask one question and print the answer: the proof that it works."""
    from looprun_models.client import local_model

    settings = load_settings()
    name, text = _alias_and_question(alias, question, settings)
    began = time.monotonic()
    with progress_shown() as show:
        model = local_model(name, runtime=runtime and load_runtime(runtime), timeout=timeout, on_progress=show)
    with model:
        ready = f"ready after {time.monotonic() - began:.1f} s"
        told = _print_answer(model, text, max_tokens)
    note(f"[{model.model}: {ready}, {told}]")
    note_stay(model, settings)


def note_stay(model: LocalModel, settings: Settings) -> None:
    """Say how long a server that was started for this command stays, if it does."""
    stays = DEFAULT_KEEP_ALIVE if settings.keep_alive is None else settings.keep_alive
    if isinstance(model.server, Lease) and not model.server.already_running and stays:
        note(f"[it stays loaded for {stays:g} s: looprun models stop {model.spec.alias}]")


def _print_answer(model: LocalModel, question: str, max_tokens: int) -> str:
    """The answer on standard output as it comes; returns how fast it was."""
    sent, first, end = time.monotonic(), None, ""
    timings: dict[str, float] = {}
    stream = model.chat.completions.create(
        model=model.model,
        messages=[{"role": "user", "content": question}],
        stream=True,
        **model.pinned(max_tokens=max_tokens),
    )
    for chunk in stream:
        timings = (chunk.model_extra or {}).get("timings") or timings
        for choice in chunk.choices:
            end = getattr(choice, "finish_reason", None) or end
            if choice.delta.content:
                first = first or time.monotonic()
                sys.stdout.write(choice.delta.content)
                sys.stdout.flush()
    say()
    speed = f", {timings['predicted_per_second']:.0f} tok/s" if timings.get("predicted_per_second") else ""
    reused = f", {timings['cache_n']} prompt tokens reused" if timings.get("cache_n") else ""
    cut = ", cut short by --max-tokens" if end == "length" else ""
    return f"first token after {(first or time.monotonic()) - sent:.2f} s{speed}{reused}{cut}"


def _alias_and_question(alias: str | None, question: str | None, settings: Settings) -> tuple[str | None, str]:
    """One word alone is the question, for the chosen model."""
    if question is not None:
        return alias, question
    if alias is not None and all(alias not in (s.alias, *s.short) for s in load_profiles(settings).values()):
        return None, alias
    who = alias or "the model"
    raise UsageError(f"what should {who} be asked?", hint=f'looprun models ask {alias or "ALIAS"} "Hello?"')


def logs(
    alias: Alias = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on printing until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("-n", metavar="N", min=1, help="How many lines from the end.")] = 50,
) -> None:
    """Print the end of the log of a profile's newest server."""
    from looprun_models.failure import log_tail

    settings = load_settings()
    spec = resolve_alias(alias, settings)
    path = newest_log(settings, spec.alias)
    if path is None:
        raise LooprunError(f"{spec.alias} has no log: it was never started.", hint=f"looprun models serve {spec.alias}")
    note(f"{path}:")
    end = path.stat().st_size
    for line in log_tail(path, lines):
        say(line)
    if follow:
        _follow(path, end)


def _follow(path: Path, position: int) -> None:
    """Print what is written from `position` on, through cuts to the log's cap and new files of that name."""
    while True:
        with contextlib.suppress(FileNotFoundError), path.open(encoding="utf-8", errors="replace") as log:
            log.seek(position)
            while path.exists() and os.path.samestat(os.fstat(log.fileno()), path.stat()):
                if os.fstat(log.fileno()).st_size < log.tell():
                    log.seek(0)
                sys.stdout.write(log.read())
                sys.stdout.flush()
                time.sleep(LOG_EVERY)
        position = 0
