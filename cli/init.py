"""`looprun init`: what this machine is, which engine and tier suit it, what is missing, and the next command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from looprun_models.engine import EMBEDDED, Engine, devices
from looprun_models.errors import Declined
from looprun_models.machine import Machine, disk_free, inspect_machine, recommend
from looprun_models.registry import LocalModelSpec, load_profiles, resolve_alias
from looprun_models.runtime import binary_status
from looprun_models.search import search_engines
from looprun_models.settings import Settings, load_settings
from looprun_models.smoke import prove
from looprun_models.weights import MISSING, OK, inspect_weights

from .installing import install
from .models import fetch_weights
from .options import Yes
from .output import agree, note, say, size
from .weights import say_candidates

ENGINE_WAYS = f"""\
         looprun engine install                   an official llama.cpp build, 11 to 35 MB; on the GPU if it can
         {EMBEDDED}   the same server as a wheel, 9 to 34 MB; on Linux and Windows on
                                                  the CPU only, and there at 0.76 of a native build's speed"""


def init(
    local: Annotated[
        str | None, typer.Option("--local", metavar="ALIAS", help="Choose this profile instead of the recommended one.")
    ] = None,
    yes: Yes = False,
) -> None:
    """Look at this machine, choose a profile, and say what is missing.

    Installs an engine, and fetches the profile's weights, only after asking.
    """
    settings = load_settings()
    chosen = resolve_alias(local, settings) if local else None
    machine = inspect_machine()
    _say_machine(machine, settings)
    engine = _say_engines(settings)
    tier, reason = recommend(load_profiles(settings).values(), machine)
    say(f"tier     {tier.alias if tier else 'none'}: {reason}")
    spec = chosen or tier
    if spec is None:
        say("\nnext: looprun init --local smoke   (a model of 98 MB, to see that everything works)")
        return
    if chosen:
        say(f"chosen   {spec.alias}: {spec.note}{_too_large(spec, machine)}")
    have_weights = _say_weights(settings, spec)
    _write_choice(settings, spec)
    if engine is None and settings.llama_bin is None:
        engine = _offer_engine(settings, yes)
    if engine is None:
        say(f"\nnext: {binary_status(settings).fix}\n      and then looprun init --local {spec.alias}")
        return
    if not have_weights and say_candidates(spec, settings):
        say(f"\nnext: looprun models adopt {spec.alias}   (or fetch it all the same: looprun models pull {spec.alias})")
        return
    have_weights = have_weights or _fetch(spec, settings, yes)
    say(f"\nnext: looprun models {'serve' if have_weights else 'pull'} {spec.alias}")


def _fetch(spec: LocalModelSpec, settings: Settings, yes: bool) -> bool:
    """Whether the weights are here now; "no" is an answer like any other."""
    try:
        fetch_weights(spec, settings, yes=yes)
    except Declined as declined:
        note(declined.message)
        return False
    return True


def _too_large(spec: LocalModelSpec, machine: Machine) -> str:
    fits = not spec.tier or recommend([spec], machine)[0]
    return "" if fits else f" (meant for {spec.min_ram_gb:g} GB: more than this machine has)"


def _say_machine(machine: Machine, settings: Settings) -> None:
    quota = f", CPU quota {machine.cpu_quota:g}" if machine.cpu_quota else ""
    limit = " (the limit of this container)" if machine.ram_limited_by == "cgroup" else ""
    say(f"machine  {machine.os_name}, {machine.arch}, {machine.cores} cores{quota}")
    say(f"memory   {size(machine.ram_total)}{limit}, {size(machine.ram_available)} available")
    say(f"disk     {size(disk_free(settings.home or Path.cwd()))} free in the home folder")


def _say_engines(settings: Settings) -> Engine | None:
    """Every candidate up to the one that is used, each with its reason."""
    for found in search_engines(settings):
        if not isinstance(found, Engine):
            say(f"engine   skipped {found}")
            continue
        verdict = prove(found, settings)
        if verdict.ok is False:
            say(f"engine   skipped {found.path} ({found.source}): {verdict.why}")
            continue
        gpu = ", ".join(f"{device.name} {size(device.total)}" for device in devices(found, settings))
        say(f"engine   {found.label}, from {found.source}" + (f"; {found.note}" if found.note else ""))
        say(f"check    {verdict}")
        say(f"gpu      {gpu or 'none that this engine can use: models run on the CPU'}")
        return found
    say("engine   none found")
    return None


def _offer_engine(settings: Settings, yes: bool) -> Engine | None:
    """Say both ways to an engine and what each costs, and go the first if that is agreed to."""
    say(ENGINE_WAYS)
    if not agree("Look for an official build now? Its size is shown before it is fetched.", yes=yes):
        return None
    try:
        install("latest", None, yes=yes, allow_unverified=False)
    except Declined as declined:
        note(declined.message)
        return None
    return _say_engines(settings)


def _say_weights(settings: Settings, spec: LocalModelSpec) -> bool:
    ok = False
    for profile in load_profiles(settings).values():
        found = inspect_weights(profile, settings)
        if found.state != MISSING or profile.alias == spec.alias:
            why = f" ({found.why})" if found.why else ""
            say(f"weights  {profile.alias}: {found.state}{why}, {found.path}")
        if profile.alias == spec.alias:
            ok = found.state == OK
    return ok


def _write_choice(settings: Settings, spec: LocalModelSpec) -> None:
    """Remember the alias for commands that are given none; a home that cannot be written only loses this."""
    path = settings.choice_file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'# written by `looprun init`\nalias = "{spec.alias}"\n', encoding="utf-8")
    except OSError as error:
        note(f"the choice could not be written to {path}: {error.strerror}; name {spec.alias} in each command")
