"""`looprun models status`: engine, weights and server told apart, each with the command that mends it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from looprun_models.errors import Missing
from looprun_models.lease import server_status
from looprun_models.records import last_end, list_servers
from looprun_models.registry import LocalModelSpec, chosen_alias, load_profiles, resolve_alias
from looprun_models.runtime import (
    BinaryStatus,
    LlamaCppRuntime,
    ModelFileStatus,
    ServerStatus,
    binary_status,
    load_runtime,
    model_file_status,
    server_status_of,
)
from looprun_models.settings import Settings, load_settings
from looprun_models.weights import OK, PARTIAL
from looprun_models.wire import Record

from .options import Alias, Json, RuntimeName
from .output import say, say_json, table

NEXT = " " * 20 + "next: "


def status(
    alias: Alias = None,
    json: Json = False,
    check: Annotated[bool, typer.Option("--check", help="Exit 4 when engine or weights are missing.")] = False,
    runtime: RuntimeName = None,
) -> None:
    """Engine, weights, server: what is missing, and what mends it.

    Without an alias, a table of all profiles.
    """
    settings = load_settings()
    if alias is None and runtime is None:
        ready = _status_of_all(settings, json)
    else:
        ready = _status_of_one(resolve_alias(alias, settings), settings, json, runtime)
    if check and not ready:
        raise typer.Exit(Missing.exit_code)


def _status_of_one(spec: LocalModelSpec, settings: Settings, json: bool, runtime: str | None) -> bool:
    ours = runtime in (None, LlamaCppRuntime.id)
    port = LlamaCppRuntime(settings) if ours else load_runtime(str(runtime))
    state = port.status(spec)
    use = _use_of(spec.alias, settings, list_servers(settings)) if ours else {}
    if json:
        parts = {"binary": state.binary, "model_file": state.model_file, "server": state.server}
        say_json({"alias": spec.alias, "ready": state.ready_to_start, "runtime": state.runtime, **parts, **use})
        return state.ready_to_start
    say(f"{spec.alias} ({state.runtime})")
    if state.binary:
        _say_binary(state.binary)
    if state.model_file:
        _say_model_file(state.model_file)
    _say_server(state.server, use)
    return state.ready_to_start


def _status_of_all(settings: Settings, json: bool) -> bool:
    specs = load_profiles(settings)
    running = list_servers(settings)
    binary = binary_status(settings)
    files = {name: model_file_status(spec, settings) for name, spec in specs.items()}
    servers = {name: server_status_of(spec, running, binary) for name, spec in specs.items()}
    uses = {name: _use_of(name, settings, running) for name in specs}
    chosen = resolve_alias(None, settings).alias
    ready = binary.ok and files[chosen].state == OK
    if json:
        models = [{"alias": n, "model_file": files[n], "server": servers[n], **uses[n]} for n in specs]
        say_json({"chosen": chosen, "ready": ready, "binary": binary, "models": models})
        return ready
    _say_binary(binary)
    say()
    rows = [("alias", "weights", "server")]
    for name in specs:
        mark = "* " if name == chosen else "  "
        rows.append((mark + name, _weights_cell(files[name]), _server_cell(servers[name], uses[name])))
    table(rows)
    say(f"\nnext: {_next_step(settings, chosen, binary, files[chosen], servers)}")
    return ready


def _next_step(
    settings: Settings, chosen: str, binary: BinaryStatus, file: ModelFileStatus, servers: dict[str, ServerStatus]
) -> str:
    """The chosen model comes first; without a choice, what runs, and then the command that chooses."""
    if not binary.ok:
        return binary.fix
    if file.fix and chosen_alias(settings) is None:
        up = next((name for name, server in servers.items() if server.up), None)
        if up is None:
            return "looprun init   (chooses what fits this machine)"
        return servers[up].fix or f'looprun models ask {up} "Hello?"'
    return file.fix or servers[chosen].fix or f'looprun models ask {chosen} "Hello?"'


def _use_of(alias: str, settings: Settings, running: list[Record]) -> dict[str, Any]:
    """What its supervisor knows of a server: state, users, seconds until it stops; or how the last one died."""
    record = next((record for record in running if record.alias == alias), None)
    told = server_status(record) if record else None
    if told:
        return {"state": told["state"], "users": told["leases"], "stops_in": told["stops_in"], "died": None}
    return {"state": None, "users": [], "stops_in": None, "died": None if record else last_end(settings, alias)}


def _say_binary(binary: BinaryStatus) -> None:
    build = "build unknown" if binary.build is None else f"b{binary.build}"
    if binary.ok:
        say(f"  engine   ok       {build}, {binary.path} ({binary.note})")
        return
    say(f"  engine   missing  {binary.note}")
    say(f"{NEXT}{binary.fix}")


def _say_model_file(found: ModelFileStatus) -> None:
    if found.state == PARTIAL:
        say(f"  weights  {_weights_cell(found)}  {found.path}")
    else:
        say(f"  weights  {found.state:<8} {found.path}" + (f": {found.note}" if found.note else ""))
    if found.fix:
        say(f"{NEXT}{found.fix}")


def _say_server(server: ServerStatus, use: dict[str, Any]) -> None:
    if server.up:
        more = f" ({server.note})" if server.note else ""
        say(f"  server   up       {server.base_url} serves {server.serves}{more}")
        if use:
            say(f"{' ' * 20}used by {', '.join(use['users']) or 'nobody'}{_countdown(use)}")
    else:
        loading = use.get("state") == "loading"
        why = f"died: {use['died']}" if use.get("died") else server.note
        say(f"  server   {'loading  ' + str(server.base_url) if loading else f'down     {why}'}".rstrip())
    if server.outdated:
        say(f"{' ' * 20}{server.outdated}")
    if server.fix:
        say(f"{NEXT}{server.fix}")


def _countdown(use: dict[str, Any]) -> str:
    return "" if use["stops_in"] is None else f"; stops in {use['stops_in']:.0f} s unless it is used"


def _weights_cell(found: ModelFileStatus) -> str:
    return found.state if found.state == OK else f"{found.state} ({found.note})"


def _server_cell(server: ServerStatus, use: dict[str, Any]) -> str:
    if server.up:
        users = f"{len(use['users'])} user{'' if len(use['users']) == 1 else 's'}"
        older = server.outdated.partition(":")[0]
        return "; ".join(filter(None, [f"up at {server.base_url}, {users}{_countdown(use)}", older]))
    if use["state"] == "loading":
        return f"loading at {server.base_url}"
    if use["died"]:
        return f"down: died, {use['died']}"
    return f"not ready: {server.note}" if server.base_url else "down"
