"""The wiring of `looprun`: which command lives where, and how an error becomes an exit code."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
import typer.core

from looprun_models.errors import LooprunError

from . import engines, installing, models, serving, status, trunks, weights
from .init import init
from .output import note, say

INTERRUPTED = 130
TAIL_LINES = 10

TIERS = """\b
Tiers (looprun models list has all profiles):
  ram8   Qwen3.5-4B         2.5 GB download    8 GB machine
  ram16  Qwen3.6-35B-A3B   11.8 GB download   16 GB machine
  ram24  Qwen3.6-35B-A3B   11.8 GB download   24 GB machine (default)
  ram32  Qwen3.6-35B-A3B   17.2 GB download   32 GB machine
  smoke  SmolLM2-135M       0.1 GB download   any machine, for a first try

\b
Examples:
  looprun init                     what fits this machine, and what is missing
  looprun models pull ram16        fetch the weights, after asking
  looprun models serve ram16       run the server until Ctrl-C
  looprun models ask ram16 "Hi?"   one question, one answer
"""


class Group(typer.core.TyperGroup):
    """The one place where our errors become exit codes. Anything else is a bug and keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except LooprunError as error:
            _explain(error)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            note("\ninterrupted" if sys.stderr.isatty() else "interrupted")  # after the ^C that a terminal shows
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:  # `looprun ... | head`: the reader has enough, and exit must not try again to write
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None


def _explain(error: LooprunError) -> None:
    """The cause, the end of the engine's log where there is one, and what to do next."""
    lines = [f"error: {error.message}"]
    if log := getattr(error, "log", None):
        lines += [*(f"  | {line}" for line in getattr(error, "tail", ())[-TAIL_LINES:]), f"  log:  {log}"]
    if error.hint:
        lines.append(f"  next: {error.hint}")
    note("\n".join(lines))


app = typer.Typer(
    cls=Group,
    help=f"Local models for agents, with measured settings and no cloud key.\n\n{TIERS}",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
models_app = typer.Typer(
    help="Profiles, their weights, and their servers.", rich_markup_mode=None, no_args_is_help=True
)
app.add_typer(models_app, name="models")
engine_app = typer.Typer(help="The llama-server programs of this machine.", rich_markup_mode=None, no_args_is_help=True)
app.add_typer(engine_app, name="engine")
app.command()(init)
engine_app.command("list")(engines.list_engines)
engine_app.command()(engines.check)
engine_app.command()(installing.install)
engine_app.command()(installing.rm)
trunks_app = typer.Typer(
    help="Agents' fixed prompts, kept on the disk to be warm after a restart.",
    rich_markup_mode=None,
    no_args_is_help=True,
)
app.add_typer(trunks_app, name="trunks")
trunks_app.command("list")(trunks.list_trunks)
trunks_app.command()(trunks.show)
trunks_app.command()(trunks.bake)
trunks_app.command()(trunks.rm)
trunks_app.command()(trunks.clean)
models_app.command("list")(models.list_profiles)
models_app.command()(status.status)
models_app.command()(models.show)
models_app.command()(models.pull)
models_app.command()(weights.verify)
models_app.command()(weights.adopt)
models_app.command()(weights.disk)
models_app.command()(weights.rm)
models_app.command()(serving.serve)
models_app.command()(serving.stop)
models_app.command()(serving.ask)
models_app.command()(serving.logs)


def _version(wanted: bool) -> None:
    if wanted:
        from looprun_models import __version__

        say(f"looprun-models {__version__}")
        raise typer.Exit


@app.callback()
def looprun(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """The console script."""
    app(prog_name="looprun")
