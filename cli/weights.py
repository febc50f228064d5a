"""`looprun models verify | adopt | disk | rm`: the files themselves, checked, found elsewhere, counted, removed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from looprun_models.adoption import Adopted, Candidate, find_candidates, same_file
from looprun_models.adoption import adopt as adopt_file
from looprun_models.errors import Declined, UsageError, WeightsBad, WeightsMissing
from looprun_models.progress import OnProgress
from looprun_models.registry import LocalModelSpec, resolve_alias
from looprun_models.settings import Settings, load_settings
from looprun_models.storage import Share, account, bytes_of, check_removable, partials_of, remove, sharers
from looprun_models.weights import ADOPTED, OK, inspect_weights
from looprun_models.weights import verify as verify_files

from .options import Agreed, Alias, Json
from .output import agree, note, progress_shown, say, say_json, size, table


def verify(alias: Alias = None) -> None:
    """Read every byte of the weights again and compare the sha256.

    With the profile's pin, or with the receipt of the pull or the adoption.
    """
    settings = load_settings()
    spec = resolve_alias(alias, settings)
    with progress_shown() as show_progress:
        verdicts = verify_files(spec, settings, show_progress)
    for verdict in verdicts:
        if verdict.ok is False:
            told = f"{verdict.against} says sha256 {verdict.expected}, its content has {verdict.sha256}"
            raise WeightsBad(
                f"{verdict.path} is damaged: {told}.",
                hint=f"looprun models rm {spec.alias}, then: looprun models pull {spec.alias}",
            )
        say(f"{verdict.sha256}  {verdict.path}")
    unknown = [verdict for verdict in verdicts if verdict.ok is None]
    if unknown:
        note(f"nothing to compare with: {spec.alias} has no pin, and no receipt was kept. The sha256 is as shown.")
        note(f"  next: compare it with the one at https://huggingface.co/{spec.hf_repo}")
    else:
        note(f"{spec.alias} is whole: the sha256 is that of {verdicts[0].against}.")


def adopt(
    alias: Alias = None,
    source: Annotated[
        Path | None, typer.Option("--from", metavar="PATH", help="Look at this file or in this folder only.")
    ] = None,
    link: Annotated[bool, typer.Option("--link", help="Hard-link it into the profile's own folder.")] = False,
    yes: Agreed = False,
) -> None:
    """Use weights that another tool has already fetched.

    Looks in the caches of Hugging Face, llama.cpp, LM Studio and Ollama. The file is used where it lies and never
    copied or changed.
    """
    settings = load_settings()
    spec = resolve_alias(alias, settings)
    found = inspect_weights(spec, settings)
    if found.state == OK:
        note(f"{spec.alias} is already here.")
        say(str(found.path))
        return
    if source is not None and not source.exists():
        raise UsageError(f"{source} is not there.", hint="name a file or a folder after --from")
    chosen = say_candidates(spec, settings, source)
    if chosen is None:
        where = f"in {source}" if source else "in the caches of Hugging Face, llama.cpp, LM Studio and Ollama"
        raise WeightsMissing(f"nothing that fits {spec.alias} was found {where}.", hint=_otherwise(spec, source))
    how = f"link it to {spec.default_path(settings)}" if link else "use it where it lies"
    if not agree(f"Read {chosen.path} ({size(chosen.size)}) once and {how}?", yes=yes):
        raise Declined("nothing was adopted.", hint=f"looprun models adopt {spec.alias} --yes")
    with progress_shown() as show_progress:
        done = _adopt_first_good(spec, settings, source, link, show_progress)
    note(f"{', '.join(done.aliases)} now use{'s' if len(done.aliases) == 1 else ''} it; {done.proof}.")
    say(str(done.path))
    note(f"  next: looprun models serve {spec.alias}")


def _adopt_first_good(
    spec: LocalModelSpec, settings: Settings, source: Path | None, link: bool, on_progress: OnProgress
) -> Adopted:
    """The surest candidate; where its content is wrong, the next one."""
    *others, last = find_candidates(spec, settings, source)
    for candidate in others:
        try:
            return adopt_file(spec, candidate, settings, link=link, on_progress=on_progress)
        except WeightsBad as bad:
            note(f"{bad.message} Trying the next one.")
    return adopt_file(spec, last, settings, link=link, on_progress=on_progress)


def disk(json: Json = False) -> None:
    """Show what the weights take on the disk, and what rm would free."""
    told = account(load_settings())
    if json:
        say_json(told)
        return
    rows: list[tuple[str, ...]] = [("alias", "state", "weights", "partial", "logs", "rm frees", "")]
    for share in told.profiles:
        counted = (share.weights, share.partials, share.logs, share.frees)
        sizes = [size(count) if count else "-" for count in counted]
        rows.append((share.alias, share.state, *sizes, _remark(share)))
    table(rows)
    say(f"\nin all   {size(told.weights)} weights (a shared file counted once), {size(told.partials)} partials,")
    say(f"         {size(told.slot_states)} trunk states (looprun trunks list), {size(told.logs)} logs")


def rm(
    alias: Annotated[str, typer.Argument(metavar="ALIAS", help="A profile, such as ram16.")],
    partial: Annotated[bool, typer.Option("--partial", help="Only what an interrupted download left.")] = False,
    yes: Agreed = False,
) -> None:
    """Remove a profile's weights, after asking.

    A file of another tool is never removed: its profile only stops using it.
    """
    settings = load_settings()
    spec = resolve_alias(alias, settings)
    if not partial:
        check_removable(spec, settings)
    question = _question(spec, settings, partial)
    if question is None:
        note(f"nothing to remove: {spec.alias} has no {'partial download' if partial else 'weights here'}.")
        return
    if not agree(question, yes=yes):
        words = " --partial" if partial else ""
        raise Declined("nothing was removed.", hint=f"looprun models rm {spec.alias}{words} --yes")
    freed = remove(spec, settings, partial=partial)
    say(f"{size(freed)} freed")
    note(f"  next: looprun models pull {spec.alias}   (fetches it again)")


def say_candidates(spec: LocalModelSpec, settings: Settings, source: Path | None = None) -> Candidate | None:
    """Show what other tools have for this profile, and return the surest."""
    found = find_candidates(spec, settings, source)
    for candidate in found:
        say(f"found    {candidate.path} ({candidate.tool}, {size(candidate.size)}): {candidate.evidence}")
    if found:
        names = ", ".join(other.alias for other in same_file(spec, settings))
        say(f"saves    a download of {size(found[0].size)}, and as much disk, for {names}")
    return found[0] if found else None


def _otherwise(spec: LocalModelSpec, source: Path | None) -> str:
    elsewhere = "" if source else f", or look elsewhere: looprun models adopt {spec.alias} --from FOLDER"
    return f"looprun models pull {spec.alias}{elsewhere}"


def _question(spec: LocalModelSpec, settings: Settings, partial: bool) -> str | None:
    """What is about to go, in words; None when there is nothing."""
    parts = bytes_of(partials_of(spec, settings))  # an empty lock file is none
    left = f"the partial download of {spec.file} ({size(parts)})"
    found = inspect_weights(spec, settings)
    if partial or not (found.size or found.origin == ADOPTED):
        return f"Remove {left}?" if parts else None
    if found.origin == ADOPTED:
        return f"Stop using {found.path} for {spec.alias}? The file stays: it belongs to another tool."
    shared = sharers(spec, settings)
    warning = f" {', '.join(shared)} use{'s' if len(shared) == 1 else ''} the same file." if shared else ""
    return f"Remove {found.path} ({size(found.size)}){' and ' + left if parts else ''}?{warning}"


def _remark(share: Share) -> str:
    shared = f"the same file as {', '.join(share.shared_with)}" if share.shared_with and share.weights else ""
    return "; ".join(text for text in (shared, share.kept_by) if text)
