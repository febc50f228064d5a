"""The user's `paths.toml`: which profile uses a file that lies elsewhere, one line each: `"alias" = "/path/to.gguf"`.

Lines are set and dropped one by one, so that comments and the lines of others stay as their owner wrote them.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from looprun_models.errors import BadPaths, FolderUnwritable
from looprun_models.receipts import write_whole
from looprun_models.settings import Settings

HEAD = "# Weights that lie elsewhere, by alias; written by `looprun models adopt`.\n"


def read_paths(settings: Settings) -> dict[str, Path]:
    """The file of each alias that has a line. Raises BadPaths, naming the file, for what is not such a list."""
    path = settings.paths_file
    found = {}
    for alias, value in _flat(_parsed(path, _text_of(path))):
        if not isinstance(value, str) or not value.strip():
            raise BadPaths(path, f"`{alias}` must be the path of a file, in quotes")
        file = settings.expand(value.strip())
        if not file.is_absolute():
            raise BadPaths(path, f"`{alias}` must be a full path, not {value!r}")
        found[alias] = file
    return found


def set_path(settings: Settings, alias: str, file: Path) -> None:
    """Let this alias use this file; a line that it had is changed, and every other one stays."""
    _rewrite(settings, alias, f'"{alias}" = {_quoted(str(file))}')


def drop_path(settings: Settings, alias: str) -> None:
    """Forget the line of this alias, if it has one."""
    if settings.paths_file.exists():
        _rewrite(settings, alias, None)


def _rewrite(settings: Settings, alias: str, line: str | None) -> None:
    path = settings.paths_file
    text = _text_of(path)
    _parsed(path, text)  # a broken file is not made worse
    text = text or HEAD
    own = re.compile(
        rf"""^[ \t]*(?:"{re.escape(alias)}"|'{re.escape(alias)}'|{re.escape(alias)})[ \t]*=[^\n]*\n?""", re.M
    )
    kept = own.sub("", text)
    if line is not None:
        at = own.search(text)
        where = at.start() if at else len(kept)
        before = kept[:where]
        kept = before + ("" if before.endswith("\n") or not before else "\n") + line + "\n" + kept[where:]
    written = {name: value for name, value in _flat(_parsed(path, kept))}
    if (alias in written) != (line is not None):
        raise BadPaths(path, f"the line of `{alias}` has a form that is not changed here")
    try:
        write_whole(path, kept)
    except OSError as error:
        raise FolderUnwritable(path.parent, "XDG_CONFIG_HOME", error.strerror or str(error)) from error


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise BadPaths(path, f"cannot be read: {error}") from error


def _parsed(path: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadPaths(path, f"not readable as TOML: {error}") from error


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """An alias without quotes, such as qwen3.5-4b, is a table in a table to TOML: the name is put together again."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _quoted(text: str) -> str:
    """A TOML basic string."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + re.sub(r"[\x00-\x1f\x7f]", lambda match: f"\\u{ord(match[0]):04x}", escaped) + '"'
