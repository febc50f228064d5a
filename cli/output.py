"""How commands speak: data on stdout, everything else on stderr, colour and bars only on a terminal."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from looprun_models.errors import LooprunError
from looprun_models.progress import OnProgress, Progress

QUIET_INTERVAL = 10.0
"""Seconds between progress lines when nobody watches a terminal."""
LEAST_WRAP = 30
"""A last column narrower than this goes on a line of its own."""


def say(text: str = "") -> None:
    """A result, on stdout. Raises LooprunError when it cannot be written (a full disk)."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        sys.stdout = None  # or the interpreter tries once more at its end
        raise LooprunError(f"the output cannot be written: {error.strerror}.", hint="free some space") from error


def note(text: str) -> None:
    """Everything that is not the result, on stderr."""
    print(text, file=sys.stderr, flush=True)


def say_json(value: Any) -> None:
    """Dataclasses, mappings and paths as JSON, on stdout."""
    say(json.dumps(value, indent=2, default=_plain))


def table(rows: Sequence[Sequence[str]]) -> None:
    """Rows in columns, the first row being the head. On a narrow terminal the last column wraps, or goes below."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    indent = sum(widths) + 2 * len(widths)
    room = shutil.get_terminal_size().columns if sys.stdout and sys.stdout.isatty() else sys.maxsize
    below = room < indent + min(LEAST_WRAP, max(len(row[-1]) for row in rows))
    for row in rows:
        line = "".join(f"{cell.ljust(width)}  " for cell, width in zip(row, widths, strict=False))
        if not below:
            wrapped = textwrap.wrap(row[-1], room - indent)
            say((line + f"\n{' ' * indent}".join(wrapped)).rstrip())
            continue
        say(line.rstrip())
        if row[-1] and row is not rows[0]:
            say(textwrap.fill(row[-1], room, initial_indent="    ", subsequent_indent="    "))


def size(count: float) -> str:
    """Bytes as people read them, decimal, as disks and the Hub count."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count:.0f} B"


def harmless(text: str) -> str:
    """Any text as one that a terminal only shows: what would steer it, or cannot be written, is escaped."""
    told = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return told.encode(encoding, "backslashreplace").decode(encoding)


def agree(question: str, *, yes: bool) -> bool:
    """Consent: `--yes`, or a terminal and the answer y or yes. No terminal and no `--yes` means no."""
    if yes:
        return True
    if not (sys.stdin.isatty() and sys.stderr.isatty()):  # a question that nobody sees would hang
        note(f"{question} No terminal to ask on: taken as no. Say --yes to agree.")
        return False
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def watched() -> bool:
    """Whether standard error is a terminal that can move its cursor."""
    if not (sys.stderr and sys.stderr.isatty()):
        return False
    from rich.console import Console

    return not Console(stderr=True).is_dumb_terminal


@contextlib.contextmanager
def progress_shown() -> Iterator[OnProgress]:
    """A bar on a terminal; otherwise a line at once and then every ten seconds. Both on stderr."""
    if watched():
        with _bar() as show:
            yield show
    else:
        yield _line_every(QUIET_INTERVAL)


@contextlib.contextmanager
def live_line() -> Iterator[Callable[[Callable[[], str]], None]]:
    """One line that changes in place. Where that cannot be, what would make its text is not even asked."""
    if not watched():
        yield lambda make_text: None
        return
    from rich.console import Console

    with Console(stderr=True).status("", refresh_per_second=2) as line:
        yield lambda make_text: line.update(make_text())


@contextlib.contextmanager
def _bar() -> Iterator[OnProgress]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, Any] = {}

        def show(progress: Progress) -> None:
            if progress.phase not in tasks:
                tasks[progress.phase] = bars.add_task(progress.phase, total=progress.total or None)
            bars.update(tasks[progress.phase], completed=progress.done)

        yield show


def _line_every(interval: float) -> OnProgress:
    due = time.monotonic()

    def show(progress: Progress) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + interval
            share = f" ({100 * progress.done // progress.total} %)" if progress.total else ""
            note(f"{progress.phase}: {size(progress.done)} of {size(progress.total)}{share}")

    return show


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (Path, frozenset)):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")
