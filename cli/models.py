"""`looprun models list | show | pull`: what there is, what would be started, and fetching it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from looprun_models.errors import Declined, FolderUnwritable, NotEnoughDisk
from looprun_models.launch import LaunchPlan
from looprun_models.registry import DEFAULT_ALIAS, LocalModelSpec, chosen_alias, load_profiles, resolve_alias
from looprun_models.request import Options
from looprun_models.runtime import LlamaCppRuntime, model_file_status
from looprun_models.settings import Settings, load_settings
from looprun_models.weights import OK

from .options import Alias, AsQuoted, EngineFlags, Json, Port, Yes, split_words
from .output import agree, note, progress_shown, say, say_json, size, table


def list_profiles(json: Json = False) -> None:
    """List the profiles: what each takes, and which are here."""
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


def show(
    alias: Alias = None,
    engine_flags: EngineFlags = None,
    json: Json = False,
    as_quoted: AsQuoted = False,
    port: Port = None,
) -> None:
    """Show what would be started: each flag, its origin and why.

    And how much memory it takes, and the command line to paste. Works without the weights, as far as it goes.
    """
    settings = load_settings()
    alias, flags = split_words(alias, engine_flags)
    spec = resolve_alias(alias, settings)
    plan = LlamaCppRuntime(settings, Options(port=port, as_quoted=as_quoted, engine_flags=flags)).plan(spec)
    if json:
        say_json(_plan_json(plan))
    else:
        _say_plan(plan)


def _say_plan(plan: LaunchPlan) -> None:
    say(f"{plan.spec.alias}: {plan.spec.note}")
    say(f"engine   {plan.engine.label} from {plan.engine.source}")
    say(f"weights  {plan.model}{'' if plan.fit else '   (not here yet)'}")
    if plan.fit:
        say(f"memory   {plan.fit.arithmetic()}")
    say()
    rows = [("flag", "value", "from", "why")]
    rows += [(flag.words[0], " ".join(flag.words[1:]), flag.origin, flag.reason) for flag in plan.flags]
    table(rows)
    for row in plan.spec.measured:
        where = f" on {row.machine}, {row.build}, {row.date}" if row.source == "here" else ""
        say(f"\n{row.source}: {row.name} {row.value}{where}")
    for text in plan.notes:
        say(f"\nnote: {text}")
    say(f"\n{plan.command_line}")


def pull(alias: Alias = None, yes: Yes = False) -> None:
    """Fetch a profile's weights, after asking.

    The file appears under its name only when it is whole and verified.
    """
    settings = load_settings()
    spec = resolve_alias(alias, settings)
    fetch_weights(spec, settings, yes=yes)
    note(f"  next: looprun models serve {spec.alias}")


def fetch_weights(spec: LocalModelSpec, settings: Settings, *, yes: bool) -> None:
    """Ask, check the disk, download. Raises Declined, NotEnoughDisk or DownloadFailed."""
    from looprun_models.download import bytes_kept, pull, upstream_news
    from looprun_models.weights import ADOPTED, check_pullable, inspect_weights

    found = inspect_weights(spec, settings)
    if found.state == OK:
        note(f"{spec.alias} is already here.")
        if found.origin != ADOPTED and (news := upstream_news(spec, settings, found.path)):
            note(news)
        say(str(found.path))
        return
    if not found.path.is_absolute():
        raise FolderUnwritable(found.path.parent, spec.env_var, "there is no home folder")
    check_pullable(spec, found)
    kept = sum(bytes_kept(path) for path in found.paths)
    _check_room(spec, found.path, kept)
    if not agree(_question(spec, found.path, kept), yes=yes):
        raise Declined("nothing was fetched.", hint=f"looprun models pull {spec.alias} --yes")
    try:
        with progress_shown() as show_progress:
            path = pull(spec, settings, found.path, on_progress=show_progress, on_note=note)
    except KeyboardInterrupt:
        if came := sum(bytes_kept(path) for path in found.paths):
            note(f"\n{size(came)} are kept: looprun models pull {spec.alias} takes it up from there.")
        raise
    arrived = inspect_weights(spec, settings)
    note(f"{spec.alias} is whole and verified.")
    if arrived.state != OK:
        note(f"It is what {spec.hf_repo} has, and it cannot be used: {arrived.why}\n  next: correct {spec.origin}")
    say(str(path))


def _check_room(spec: LocalModelSpec, path: Path, kept: int) -> None:
    """Before asking, by the profile's size: a question about what cannot be done would be a bad one."""
    from looprun_models.download import DISK_MARGIN
    from looprun_models.machine import disk_free

    expected = int(spec.size_bytes or spec.approx_size_gb * 1e9)
    free = disk_free(path)
    if free < expected - kept + DISK_MARGIN:
        here = f" ({size(kept)} of it are here)" if kept else ""
        partial = f", or free that part with `looprun models rm {spec.alias} --partial`" if kept else ""
        raise NotEnoughDisk(
            f"{spec.file} takes {size(expected)}{here} and should leave {size(DISK_MARGIN)} over; "
            f"{path.parent} has {size(free)} free.",
            hint=f"free some space, or set {spec.env_var} to a path on another disk{partial}",
        )


def _question(spec: LocalModelSpec, path: Path, kept: int) -> str:
    expected = int(spec.size_bytes or spec.approx_size_gb * 1e9)
    here = f", {size(kept)} of it are here already" if kept else ""
    licence = f", licence {spec.licence}" if spec.licence else ""
    over = f", replacing the {path.name} that is there" if path.exists() else ""
    return f"Fetch {spec.file} ({size(expected)}{here}) from {spec.hf_repo}{licence} to {path.parent}{over}?"


def _spec_json(spec: LocalModelSpec, settings: Settings, chosen: str) -> dict[str, Any]:
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
