"""`looprun engine install | rm`: an official engine, fetched, proved and put beside the others; and one removed."""

from __future__ import annotations

import enum
import functools
from typing import Annotated

import typer

from looprun_models.engine import Engine
from looprun_models.errors import Declined, EngineMissing
from looprun_models.install import Order, install_engine, place_order
from looprun_models.records import list_servers
from looprun_models.removal import bytes_fetched, bytes_in, check_unused, drop_fetched, find_folder, remove_engine
from looprun_models.search import find_engine
from looprun_models.settings import Settings, load_settings
from looprun_models.smoke import prove
from looprun_models.staging import PREFIX, is_ours
from looprun_models.verdicts import Verdict, keep_verdict

from .options import Agreed, Yes
from .output import agree, note, progress_shown, say, size


class Variant(enum.StrEnum):
    """What an engine computes on."""

    CPU = "cpu"
    METAL = "metal"
    VULKAN = "vulkan"
    CUDA = "cuda"


def install(
    build: Annotated[str, typer.Argument(metavar="BUILD", help="A tag such as b11434, or latest.")] = "latest",
    variant: Annotated[
        Variant | None, typer.Option("--variant", help="What it computes on; by default what this machine has.")
    ] = None,
    yes: Yes = False,
    allow_unverified: Annotated[
        bool, typer.Option("--allow-unverified", help="Also install a file of which the index gives no sha256.")
    ] = False,
) -> None:
    """Fetch an official build of llama.cpp, after asking, and prove that it serves before it gets its name.

    It goes to ~/llamacpp-bNNNN (ordinary builds) or ~/llamacpp-bNNNN-VARIANT. Engines that are there stay.
    """
    settings = load_settings()
    proving = functools.partial(prove, settings=settings)
    order = place_order(
        build,
        settings,
        proving,
        variant=variant.value if variant else None,
        allow_unverified=allow_unverified,
        on_note=note,
    )
    if isinstance(order, Engine):
        note(f"{order.label} is already installed.")
        say(str(order.path))
        _say_used(order, settings)
        _say_running(settings)
        return
    before = _used(settings)
    _ask(order, yes=yes)
    try:
        with progress_shown() as show_progress:
            done = install_engine(order, settings, proving, on_progress=show_progress, on_note=note)
    except KeyboardInterrupt:
        note(f"\nnothing was changed; {order.command} takes it up from there.")
        raise
    if isinstance(done.proof, Verdict):
        keep_verdict(done.engine, settings, done.proof)  # the very program that was proved, under its new name
    note(f"{done.engine.label} is installed: {done.proof or 'another looprun has just done that'}.")
    say(str(done.engine.path))
    _say_used(done.engine, settings)
    if before and before.path != done.engine.path and (folder := _folder_of(before, settings)):
        note(f"{before.label} stays until: looprun engine rm {folder}")
    _say_running(settings)


def rm(
    engine: Annotated[
        str,
        typer.Argument(
            metavar="BUILD",
            help="b11434: what looprun has put into ~/llamacpp-b11434, or with a variant behind it. "
            "The whole name of a folder, llamacpp-...: that one, whoever has put it there.",
        ),
    ],
    yes: Agreed = False,
) -> None:
    """Remove an installed engine, after asking."""
    settings = load_settings()
    try:
        folder = find_folder(engine, settings)
    except EngineMissing:
        if not (fetched := bytes_fetched(engine, settings)):
            raise
        _agree_to_remove(f"what an interrupted install has fetched of {engine} ({size(fetched)})", engine, yes=yes)
        drop_fetched(engine, settings)
        say(f"{size(fetched)} freed")
        return
    check_unused(folder, list_servers(settings))
    origin = "" if is_ours(folder) else ", which looprun did not put there"
    _agree_to_remove(f"{folder} ({size(bytes_in(folder))}){origin}", engine, yes=yes)
    freed = remove_engine(folder, settings, note)
    say(f"{folder} removed, {size(freed)} freed")
    _say_used(None, settings)


def _agree_to_remove(what: str, engine: str, *, yes: bool) -> None:
    if not agree(f"Remove {what}?", yes=yes):
        raise Declined("nothing was removed.", hint=f"looprun engine rm {engine} --yes")


def _ask(order: Order, *, yes: bool) -> None:
    note(f"variant {order.variant}: {order.reason}")
    if order.replaces:
        fate = "replaced" if is_ours(order.target) else "moved aside"
        note(f"{order.target} is no {order.release.tag} that serves ({order.replaces}): it is {fate}.")
    files = " and ".join(f"{asset.name} ({size(asset.size)})" for asset in order.assets)
    host = order.assets[0].host
    if not agree(f"Fetch {files} from {host} and install it in {order.target}?", yes=yes):
        raise Declined("nothing was fetched.", hint=f"{order.command} --yes")
    unverified = [asset.name for asset in order.assets if asset.sha256 is None]
    if unverified:
        note(f"not verified, as you allowed: the index gives no sha256 for {' and '.join(unverified)}.")


def _used(settings: Settings) -> Engine | None:
    try:
        return find_engine(settings)
    except EngineMissing:
        return None


def _say_used(asked: Engine | None, settings: Settings) -> None:
    try:
        used = find_engine(settings)
    except EngineMissing as error:
        why = "no engine can be used now" if settings.llama_bin is None else error.message
        note(f"{why}\n  next: {error.hint}")
        return
    if asked and used.path != asked.path:
        note(f"{used.label}, from {used.source}, comes before it and is used: looprun engine list")
    else:
        note(f"used now: {used.label}, from {used.source}")


def _say_running(settings: Settings) -> None:
    """Servers go on with the program that they were started with."""
    used = _used(settings)
    for server in list_servers(settings):
        if used and server.engine_identity != used.identity:
            build = server.engine if server.build is None else f"b{server.build}"
            stop = f"looprun models stop {server.alias}, then serve it again"
            note(f"{server.alias} still runs on {build} (pid {server.child_pid}): {stop}")


def _folder_of(engine: Engine, settings: Settings) -> str:
    """The name of an engine's folder, "" where `rm` does not look."""
    if settings.home is None:
        return ""
    home = settings.home.resolve()
    if not engine.path.is_relative_to(home):
        return ""
    first = engine.path.relative_to(home).parts[0]
    return first if first.startswith(PREFIX) else ""
