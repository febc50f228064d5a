"""`looprun trunks list | show | bake | rm | clean`: agents' fixed prompts, kept on the disk."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from looprun_models.errors import Declined, LooprunError, UsageError
from looprun_models.registry import resolve_alias
from looprun_models.settings import Settings, load_settings
from looprun_models.trunkentry import Entry
from looprun_models.trunkmisses import Misses
from looprun_models.trunkstore import TrunkStore, line_of

from .options import Agreed, Json, Timeout
from .output import agree, harmless, note, progress_shown, say, say_json, size, table
from .serving import note_stay
from .trunkfile import read_prompt

LONGEST = 48
"""Characters of a label in a table; `show` and --json have all of it."""
SHOWN_ELSEWHERE = ("engine", "weights", "flags", "tokens", "key", "file")
BAKE = "looprun trunks bake ALIAS LABEL FILE"

Label = Annotated[str, typer.Argument(metavar="LABEL", help="The trunk's label, as `list` shows it.")]
OfAlias = Annotated[str | None, typer.Argument(metavar="ALIAS", help="Only trunks of this profile.")]


def list_trunks(alias: OfAlias = None, json: Json = False) -> None:
    """The trunks on the disk, the last used first. Needs no server and starts none."""
    settings = load_settings()
    store = _store(settings)
    everything = store.entries()
    entries = _of_alias(everything, alias, settings)
    newest = _newest(everything)
    if json:
        told = {"folder": store.folder, "total": store.total(), "budget": store.limit()}
        say_json({**told, "trunks": [_plain(entry, store, newest) for entry in entries]})
    else:
        _say_table(entries, newest)
        kept = f"{len(everything)} trunk{'' if len(everything) == 1 else 's'}" if everything else "no trunks"
        say(f"in all   {kept}, {size(store.total())} of at most {size(store.limit())}, in {store.folder}")
        if not everything:
            note(f"  next: {BAKE}")
    _warn(store, settings)


def show(label: Label, alias: OfAlias = None, json: Json = False) -> None:
    """Everything that is known of a trunk: what it was made for, whether it can still be used, and its proof."""
    from looprun_models.obsolete import Surroundings

    settings = load_settings()
    store = _store(settings)
    everything = store.entries()
    entries = _find(store, label, alias, settings)
    newest = _newest(everything)
    here = Surroundings(settings)
    if json:
        told = [{**_plain(entry, store, newest), "unusable": here.why_unusable(entry)} for entry in entries]
        say_json({"folder": store.folder, "trunks": told})
        return
    for entry in entries:
        _say_all(entry, store, newest, here.why_unusable(entry))


def bake(
    alias: Annotated[str, typer.Argument(metavar="ALIAS", help="The profile, such as ram16.")],
    label: Annotated[str, typer.Argument(metavar="LABEL", help="What to call it: any text.")],
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="JSON: a list of messages, or {messages, tools, template_args}; or -.")
    ],
    timeout: Timeout = None,
) -> None:
    """Read a fixed prompt into the profile's server once, and save it. Starts the server, or shares the one that runs.

    Exit 1 when it could be read and not saved.
    """
    prompt = read_prompt(file)  # before a server is started for it
    from looprun_models.client import local_model

    settings = load_settings()
    with progress_shown() as show_progress:
        model = local_model(alias, timeout=timeout, on_progress=show_progress)
    with model:
        note(f"{model.spec.alias} is ready; reading {_name(label)}")
        trunk = model.trunk(label, messages=prompt.messages, tools=prompt.tools, template_args=prompt.template_args)
        told = f"{trunk.state}, {trunk.tokens} tokens in {trunk.seconds:.2f} s"
        if trunk.bytes:
            say(f"{told}, {size(trunk.bytes)}")
            if trunk.note:
                note(f"note: {trunk.note}")
            _note_other_label(model, trunk.key, label)
    note_stay(model, settings)
    if not trunk.bytes:
        why = trunk.note or "not saved: the server has it in memory, from before"
        raise LooprunError(
            f"{_name(label)}: {told}, {why}.", hint="looprun trunks list   (has the folder and the budget)"
        )


def rm(label: Label, alias: OfAlias = None, yes: Agreed = False) -> None:
    """Remove a trunk and its older versions, after asking. The next `bake` or `trunk()` reads it anew."""
    settings = load_settings()
    store = _store(settings)
    entries = _find(store, label, alias, settings)
    aliases = sorted({entry.meta.alias for entry in entries})
    named = shlex.quote(harmless(label))
    if len(aliases) > 1:
        raise UsageError(
            f"{_name(label)} is a trunk of {' and of '.join(map(harmless, aliases))}.",
            hint=f"looprun trunks rm {named} {harmless(aliases[0])}",
        )
    versions = f" in {len(entries)} versions" if len(entries) > 1 else ""
    of = harmless(aliases[0])
    if not agree(f"Remove the trunk {_name(label)} of {of}{versions} ({_sum(entries)})?", yes=yes):
        raise Declined("nothing was removed.", hint=f"looprun trunks rm {named} {of} --yes")
    say(f"{size(_drop(store, entries))} freed")


def clean(
    everything: Annotated[bool, typer.Option("--all", help="Every trunk, also those that can be used.")] = False,
    yes: Agreed = False,
) -> None:
    """Remove trunks that nothing uses any more, after asking.

    Those that a newer one has replaced, what killed programs left, and those whose engine or weights are not here now.
    Where restoring did not help, it is tried again from now on.
    """
    from looprun_models.obsolete import find_obsolete, leftover_bytes

    settings = load_settings()
    store = _store(settings)
    obsolete = [] if everything else find_obsolete(store, settings)
    entries = store.entries() if everything else [found.entry for found in obsolete]
    left = leftover_bytes(store)
    for found in obsolete:
        meta = found.entry.meta
        note(f"{_name(meta.label)} of {harmless(meta.alias)}, {size(found.entry.size)}: {harmless(found.why)}")
    parts = [f"{len(entries)} trunk{'' if len(entries) == 1 else 's'} ({_sum(entries)})"] if entries else []
    parts += [f"what interrupted saves left ({size(left)})"] if left else []
    if not parts:
        note(f"nothing to clean in {store.folder}{_unreadable(store)}.")
        _forget_misses(settings)
        return
    if not agree(f"Remove {' and '.join(parts)}?", yes=yes):
        raise Declined("nothing was removed.", hint=f"looprun trunks clean{' --all' if everything else ''} --yes")
    freed = _drop(store, entries)
    say(f"{size(freed + store.sweep())} freed")
    _forget_misses(settings)


def _store(settings: Settings) -> TrunkStore:
    return TrunkStore(settings.slots_dir, settings.trunk_budget)


def _of_alias(entries: Iterable[Entry], alias: str | None, settings: Settings) -> list[Entry]:
    """alias: a profile's name in any form, or that of a profile which is no more but has trunks."""
    found = list(entries)
    if alias is None:
        return found
    full = alias if any(entry.meta.alias == alias for entry in found) else resolve_alias(alias, settings).alias
    return [entry for entry in found if entry.meta.alias == full]


def _find(store: TrunkStore, label: str, alias: str | None, settings: Settings) -> list[Entry]:
    """Those with this label, or with one that is shown like this; the newest first. Raises UsageError for none."""
    among = _of_alias(store.entries(), alias, settings)
    found = [entry for entry in among if entry.meta.label == label]
    found = found or [entry for entry in among if _name(entry.meta.label) == label]
    if not found:
        of = f" of {alias}" if alias else ""
        hint = f"looprun trunks list   (or make it: {BAKE})"
        if among:
            hint += "; a prompt that was saved before keeps its first label"
        raise UsageError(f"there is no trunk {_name(label)}{of} in {store.folder}{_unreadable(store)}.", hint=hint)
    return sorted(found, key=lambda entry: (entry.meta.alias, -entry.created))


def _newest(entries: Iterable[Entry]) -> set[str]:
    """The keys of those that no later one of their line stands before."""
    newest = {line_of(entry): entry.key for entry in sorted(entries, key=lambda entry: entry.created)}
    return set(newest.values())


def _drop(store: TrunkStore, entries: Sequence[Entry]) -> int:
    freed = sum(store.drop(entry.key) for entry in entries)
    stayed = [entry for entry in entries if os.path.lexists(store.folder / entry.file)]
    if stayed:
        why = f"{len(stayed)} of {len(entries)} trunks could not be removed from {store.folder}."
        raise LooprunError(why, hint="see who owns it, and whether it can be written")
    return freed


def _note_other_label(model: Any, key: str, label: str) -> None:
    """The label is only a name: what was saved under one is found under another too."""
    entry = TrunkStore(Path(model.server.record.slot_dir or "")).find(key)
    if entry and entry.meta.label != label:
        first = shlex.quote(_name(entry.meta.label))
        note(f"this very prompt was saved before under another label, and keeps it: looprun trunks show {first}")


def _forget_misses(settings: Settings) -> None:
    for engine, architecture in Misses(settings.cache_dir).forget():
        where = harmless(f"{engine.rpartition(':')[0] or engine}, {architecture or 'a model of no known kind'}")
        note(f"forgotten: that restoring trunks did not help ({where}); it is tried again")


def _warn(store: TrunkStore, settings: Settings) -> None:
    if unreadable := _unreadable(store):
        note(f"note: {store.folder}{unreadable}")
    if exposed := store.exposed():
        note(f"note: {exposed}")
    if settings.slot_save_path == "":
        note("note: LLAMA_SLOT_SAVE_PATH is empty: servers that are started so save nothing")


def _unreadable(store: TrunkStore) -> str:
    try:
        os.listdir(store.folder)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f", which cannot be read: {error.strerror}"
    return ""


def _say_table(entries: Sequence[Entry], newest: set[str]) -> None:
    if not entries:
        return
    rows: list[tuple[str, ...]] = [("label", "alias", "tokens", "size", "age", "used", "last proof")]
    for entry in entries:
        meta = entry.meta
        name = _name(meta.label)
        name = name if len(name) <= LONGEST else f"{name[: LONGEST - 3]}..."
        age = _age(entry.created) + ("" if entry.key in newest else ", older")
        used = f"{_age(entry.last_used)} ago"
        rows.append((name, harmless(meta.alias), str(meta.tokens), size(entry.size), age, used, _proof(entry)))
    table(rows)
    say()


def _say_all(entry: Entry, store: TrunkStore, newest: set[str], unusable: str) -> None:
    meta, facts = entry.meta, entry.meta.facts
    older = "" if entry.key in newest else ", an older version"
    cold = "not known" if meta.read_seconds is None else f"{meta.read_seconds:.1f} s, when it was baked"
    known = {
        "tokens": str(meta.tokens),
        "read cold": cold,
        "size": size(entry.size),
        "baked": f"{_age(entry.created)} ago, last used {_age(entry.last_used)} ago",
        "proof": _proof(entry),
        "usable": f"no: {unusable}" if unusable else "yes, with the engine, weights and flags below",
        "engine": f"{meta.engine}, {facts.get('engine', 'not known which')}",
        "weights": facts.get("weights", "not known"),
        "flags": facts.get("flags", "not known"),
        **{name: text for name, text in facts.items() if name not in SHOWN_ELSEWHERE and text},
        "key": entry.key,
        "file": str(store.folder / entry.file),
    }
    say(f"{_name(meta.label)} ({harmless(meta.alias)}){older}")
    for name, text in known.items():
        say(f"  {harmless(name):<10} {harmless(text)}")


def _plain(entry: Entry, store: TrunkStore, newest: set[str]) -> dict[str, Any]:
    """For --json: sizes in bytes, times in seconds since the epoch."""
    meta = entry.meta
    told = {
        name: getattr(meta, name) for name in ("label", "alias", "tokens", "engine", "read_seconds", "key", "facts")
    }
    times = {"created": entry.created, "last_used": entry.last_used, "proof": entry.proof}
    return {**told, "size": entry.size, **times, "older": entry.key not in newest, "file": store.folder / entry.file}


def _proof(entry: Entry) -> str:
    proof = entry.proof
    if proof is None:
        return "not proved yet"
    return f"{min(proof.reused, proof.tokens)} of {proof.tokens} reused, {_age(proof.at)} ago"


def _name(label: str) -> str:
    return harmless(label) if label.strip() else f'"{harmless(label)}"'


def _sum(entries: Iterable[Entry]) -> str:
    return size(sum(entry.size for entry in entries))


def _age(moment: float) -> str:
    passed = max(0.0, time.time() - moment)
    for unit, seconds in (("d", 86400), ("h", 3600), ("min", 60)):
        if passed >= seconds:
            return f"{passed // seconds:.0f} {unit}"
    return f"{passed:.0f} s"
