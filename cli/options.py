"""Option types that several commands share, and the runtime they choose."""

from __future__ import annotations

from typing import Annotated

import typer

Alias = Annotated[
    str | None,
    typer.Argument(help="A profile, such as ram16; by default the one that `looprun init` chose, else ram24."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Agree to the download.")]
Force = Annotated[bool, typer.Option("--force", help="Do it even though it is advised against.")]
Port = Annotated[int | None, typer.Option(min=1, max=65535, help="Port; LLAMA_PORT or the profile's by default.")]
Timeout = Annotated[float | None, typer.Option(min=0.1, help="Seconds to wait for readiness (240).")]
RuntimeName = Annotated[str | None, typer.Option("--runtime", help="Another runtime than llama-cpp, by name.")]
AsQuoted = Annotated[bool, typer.Option("--as-quoted", help="Keep the profile's quoted values; fit nothing.")]
