"""Option types that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from looprun_models.errors import UsageError

Alias = Annotated[
    str | None,
    typer.Argument(
        metavar="ALIAS", help="A profile, such as ram16; by default the one that `looprun init` chose, else ram24."
    ),
]
EngineFlags = Annotated[
    list[str] | None, typer.Argument(metavar="-- FLAGS", help="Flags for the engine itself, after a `--`.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Agree to the download.")]
Agreed = Annotated[bool, typer.Option("--yes", "-y", help="Agree without being asked.")]
Force = Annotated[bool, typer.Option("--force", help="Stop it even though others use it.")]
Port = Annotated[
    int | None,
    typer.Option(metavar="PORT", min=1, max=65535, help="Port; LLAMA_PORT or the profile's by default."),
]
Timeout = Annotated[
    float | None, typer.Option(metavar="SECONDS", min=0.1, help="How long to wait for readiness (240).")
]
RuntimeName = Annotated[
    str | None, typer.Option("--runtime", metavar="NAME", help="Another runtime than llama-cpp, by name.")
]
AsQuoted = Annotated[bool, typer.Option("--as-quoted", help="Keep the profile's quoted values; fit nothing.")]


def split_words(alias: str | None, engine_flags: list[str] | None) -> tuple[str | None, tuple[str, ...]]:
    """The alias and the engine's flags; the parser takes the first flag for the alias when none is given.

    Raises UsageError for a second word that is no flag.
    """
    flags = tuple(engine_flags or ())
    if alias is not None and alias.startswith("-"):
        return None, (alias, *flags)
    if flags and not flags[0].startswith("-"):
        raise UsageError(f"unexpected word {flags[0]!r} after the alias.", hint="engine flags come after a `--`")
    return alias, flags
