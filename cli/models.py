"""`looprun models list | status | show | pull`: what there is, what is missing, and what would be started."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from looprun_models.errors import Declined, Missing, NotEnoughDisk
from looprun_models.launch import LaunchPlan, Options
from looprun_models.registry import DEFAULT_ALIAS, LocalModelSpec, chosen_alias, load_profiles, resolve_alias
from looprun_models.runtime import (
    BinaryStatus,
    LlamaCppRuntime,
    ModelFileStatus,
    RuntimeStatus,
    ServerStatus,
    binary_status,
    load_runtime,
    model_file_status,
    server_status_of,
)
from looprun_models.servers import last_end, list_servers, server_status
from looprun_models.settings import Settings, load_settings
from looprun_models.weights import OK
from looprun_models.wire import Record

from .options import Alias, AsQuoted, Json, Port, RuntimeName, Yes
from .output import agree, note, progress_shown, say, say_json, size, table


def list_profiles(json: Json = False) -> None:
    """List every profile: what it takes, and whether its weights are here."""
    settings = load_settings()
    specs = load_profiles(settings)
    chosen = chosen_alias(settings) or DEFAULT_ALIAS
    if json:
        say_json([_spec_json(spec, settings, chosen) for spec in specs.values()])
        return
    rows = [("alias", "short", "download", "RAM", "context", "KV", "drafts", "weights", "")]
    for spec in specs.values():
        rows.append(
            (
                ("* " if chosen in (spec.alias, *spec.short) else "  ") + spec.alias,
                ", ".join(spec.short) or "-",
                f"{spec.approx_size_gb:g} GB",
                f"{spec.min_ram_gb:g} GB",
                str(spec.ctx),
                spec.kv,
                spec.spec_type or "-",
                model_file_status(spec, settings).state,
                spec.note,
            )
        )
    table(rows)
    note("* is used when no alias is given; looprun init chooses it.")


def status(
    alias: Alias = None,
    json: Json = False,
    check: Annotated[bool, typer.Option("--check", help="Exit 4 when something needed is missing.")] = False,
    runtime: RuntimeName = None,
) -> None:
    """Tell engine, weights and server apart, each with the command that mends it."""
    settings = load_settings()
    if alias is None and runtime is None:
        ready = _status_of_all(settings, json)
    else:
        spec = resolve_alias(alias, settings)
        ready = _status_of_one(spec, settings, json, runtime)
    if check and not ready:
        raise typer.Exit(Missing.exit_code)


def _status_of_one(spec: LocalModelSpec, settings: Settings, json: bool, runtime: str | None) -> bool:
    port = LlamaCppRuntime(settings) if runtime in (None, LlamaCppRuntime.id) else load_runtime(runtime)
    state = port.status(spec)
    if json:
        say_json({"alias": spec.alias, "ready": state.ready_to_start, **_status_json(state)})
        return state.ready_to_start
    say(f"{spec.alias} ({state.runtime})")
    if state.binary:
        _say_binary(state.binary)
    if state.model_file:
        _say_model_file(state.model_file)
    ours = state.runtime == LlamaCppRuntime.id
    ended = last_end(settings, spec.alias) if ours and not state.server.up else None
    _say_server(state.server, ended, _record_of(spec, settings) if ours else None)
    return state.ready_to_start


def _status_of_all(settings: Settings, json: bool) -> bool:
    specs = load_profiles(settings)
    running = list_servers(settings)
    binary = binary_status(settings)
    files = {spec.alias: model_file_status(spec, settings) for spec in specs.values()}
    servers = {spec.alias: server_status_of(spec, running) for spec in specs.values()}
    chosen = resolve_alias(None, settings).alias
    ready = binary.ok and files[chosen].state == OK
    if json:
        models = [{"alias": name, "model_file": files[name], "server": servers[name]} for name in specs]
        say_json({"chosen": chosen, "ready": ready, "binary": binary, "models": models})
        return ready
    _say_binary(binary)
    say()
    rows = [("alias", "weights", "server")]
    for name in specs:
        server = servers[name]
        died = None if server.up else last_end(settings, name)
        down = f"down: {died}" if died else "down" if not server.base_url else f"not ready: {server.note}"
        rows.append(
            (
                ("* " if name == chosen else "  ") + name,
                _weights_cell(files[name]),
                f"up at {server.base_url}" if server.up else down,
            )
        )
    table(rows)
    fixes = [binary.fix, files[chosen].fix] + ([] if servers[chosen].up else [servers[chosen].fix])
    following = next((fix for fix in fixes if fix), f'looprun models ask {chosen} "Hello?"')
    say(f"\nnext: {following}")
    return ready


def show(
    alias: Alias = None,
    engine_flags: Annotated[
        list[str] | None, typer.Argument(help="Engine flags, after --.", metavar="-- FLAGS")
    ] = None,
    json: Json = False,
    as_quoted: AsQuoted = False,
    port: Port = None,
) -> None:
    """Show what would be started: every flag, its value, what decided it, and why; and the memory it takes."""
    settings = load_settings()
    spec = resolve_alias(alias, settings)
    options = Options(port=port, as_quoted=as_quoted, engine_flags=tuple(engine_flags or ()))
    plan = LlamaCppRuntime(settings, options).plan(spec)
    if json:
        say_json(_plan_json(plan))
        return
    say(f"{spec.alias}: {spec.note}")
    say(f"engine   {plan.engine.label} from {plan.engine.source}")
    say(f"weights  {plan.model}")
    if plan.fit:
        say(f"memory   {plan.fit.arithmetic()}")
    say()
    rows = [("flag", "value", "from", "why")]
    rows += [(flag.words[0], " ".join(flag.words[1:]), flag.origin, flag.reason) for flag in plan.flags]
    table(rows)
    for row in spec.measured:
        where = f" on {row.machine}, {row.build}, {row.date}" if row.source == "here" else ""
        say(f"\n{row.source}: {row.name} {row.value}{where}")
    for text in plan.notes:
        say(f"\nnote: {text}")
    say(f"\n{plan.command_line}")


def pull(alias: Alias = None, yes: Yes = False) -> None:
    """Fetch a profile's weights, after asking. The file appears under its name only when it is whole and verified."""
    settings = load_settings()
    spec = resolve_alias(alias, settings)
    fetch_weights(spec, settings, yes=yes)


def fetch_weights(spec: LocalModelSpec, settings: Settings, *, yes: bool) -> None:
    """Ask, check the disk, download. Raises Declined, NotEnoughDisk or DownloadFailed."""
    from looprun_models.download import DISK_MARGIN, fetch, resolve
    from looprun_models.machine import disk_free
    from looprun_models.weights import inspect_weights

    found = inspect_weights(spec, settings)
    if found.state == OK:
        note(f"{spec.alias} is already here.")
        say(str(found.path))
        return
    expected = int(spec.size_bytes or spec.approx_size_gb * 1e9)
    free = disk_free(found.path)
    if free < expected + DISK_MARGIN:
        raise NotEnoughDisk(
            f"{spec.file} takes {size(expected)} and {found.path.parent} has {size(free)} free.",
            hint=f"free some space, or set {spec.env_var} to a path on another disk",
        )
    licence = f", licence {spec.licence}" if spec.licence else ""
    question = f"Fetch {spec.file} ({size(expected)}) from {spec.hf_repo}{licence} to {found.path.parent}?"
    if not agree(question, yes=yes):
        raise Declined("nothing was fetched.", hint=f"looprun models pull {spec.alias} --yes")
    with progress_shown() as show_progress:
        path = fetch(resolve(spec, settings), found.path, on_progress=show_progress)
    note(f"{spec.alias} is whole and verified. Next: looprun models serve {spec.alias}")
    say(str(path))


def _say_binary(binary: BinaryStatus) -> None:
    build = "build unknown" if binary.build is None else f"b{binary.build}"
    if binary.ok:
        say(f"  engine   ok       {build}, {binary.path} ({binary.note})")
        return
    say(f"  engine   missing  {binary.note}")
    say(f"                    next: {binary.fix}")


def _say_model_file(found: ModelFileStatus) -> None:
    say(f"  weights  {found.state:<8} {found.path}" + (f": {found.note}" if found.note else ""))
    if found.fix:
        say(f"                    next: {found.fix}")


def _say_server(server: ServerStatus, ended: str | None, record: Record | None) -> None:
    if server.up:
        told = server_status(record) if record else None
        say(
            f"  server   up       {server.base_url} serves {server.serves}"
            + (f" ({server.note})" if server.note else "")
        )
        if told:
            users = ", ".join(told["leases"]) or "nobody"
            stops = "" if told["stops_in"] is None else f"; stops in {told['stops_in']:.0f} s unless it is used"
            say(f"                    used by {users}{stops}")
    else:
        why = f"died: {ended}" if ended else server.note
        say("  server   down" + (f"     {why}" if why else ""))
    if server.fix:
        say(f"                    next: {server.fix}")


def _record_of(spec: LocalModelSpec, settings: Settings) -> Record | None:
    return next((record for record in list_servers(settings) if record.alias == spec.alias), None)


def _weights_cell(found: ModelFileStatus) -> str:
    return found.state if found.state == OK else f"{found.state} ({found.note})"


def _status_json(state: RuntimeStatus) -> dict[str, Any]:
    return {
        "runtime": state.runtime,
        "binary": state.binary,
        "model_file": state.model_file,
        "server": state.server,
    }


def _spec_json(spec: LocalModelSpec, settings: Settings, chosen: str) -> dict[str, Any]:
    from dataclasses import fields

    values = {f.name: getattr(spec, f.name) for f in fields(spec)}
    return {**values, "chosen": chosen in (spec.alias, *spec.short), "state": model_file_status(spec, settings).state}


def _plan_json(plan: LaunchPlan) -> dict[str, Any]:
    return {
        "alias": plan.spec.alias,
        "engine": {"path": plan.engine.path, "build": plan.engine.build, "source": plan.engine.source},
        "model": plan.model,
        "host": plan.host,
        "port": plan.port,
        "fingerprint": plan.fingerprint,
        "flags": [
            {"flag": flag.words[0], "value": " ".join(flag.words[1:]), "from": flag.origin, "why": flag.reason}
            for flag in plan.flags
        ],
        "memory": plan.fit
        and {
            "verdict": plan.fit.verdict,
            "total": plan.fit.total,
            "arithmetic": plan.fit.arithmetic(),
            "parts": plan.fit,
        },
        "notes": plan.notes,
        "measured": plan.spec.measured,
        "command": plan.argv,
    }
