"""Makes programs that pose as llama-server (see fake_engine.py), each with its own faults."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from looprun_models.engine import Engine, Skipped
from looprun_models.search import examine
from looprun_models.settings import Settings, load_settings

TESTS = Path(__file__).parent


class Behaviour(TypedDict, total=False):
    """What a fake engine does otherwise than a good b11434. Codes below zero are signals. Paths are texts.

    calls: file that gets one JSON line (program, argv, env, cwd) for each start.
    version, version_stream, version_exit: the answer to --version. help_exit: the code after --help.
    dialect: how its help says "locked in RAM". help_add: further lines of help; help_drop, help_removed: flags it does
    not list, or lists as removed. devices: lines of --list-devices, "CUDA0: name (8192 MiB, 8000 MiB free)".
    single: it is the single program `llama`, a server when its first word is `serve`.
    needs_library_path: folder without which in LD_LIBRARY_PATH the loader fails.
    load_exit, load_text: it ends while loading. loading_until: file that ends the load when it appears.
    wrong_model: path that /props tells instead of its own. router: /props says that it is one, without a model.
    ignore_term: only KILL ends it. spawn_child: it starts a helper in its group and writes its pid to this file.
    exit_when: named pipe (made by make_engine); `end_engine(pipe)` makes it say exit_text and end with exit_code.
    says: what it answers in a chat.
    check_exit, check_text, check_says, check_drafts: as load_exit, load_text and says, and how many tokens it drafts,
    in the smoke check. The faults above do not act there: an engine may pass it and fail on a real model.
    """

    calls: str
    version: str
    version_stream: Literal["stdout", "stderr"]
    version_exit: int
    help_exit: int
    dialect: Literal["old", "deprecated", "new"]
    help_add: list[str]
    help_drop: list[str]
    help_removed: list[str]
    devices: list[str]
    single: bool
    needs_library_path: str
    load_exit: int
    load_text: str
    loading_until: str
    wrong_model: str
    router: bool
    ignore_term: bool
    spawn_child: str
    exit_when: str
    exit_text: str
    exit_code: int
    says: str
    check_exit: int
    check_text: str
    check_says: str
    check_drafts: int


def make_engine(folder: Path, name: str = "llama-server", **behaviour: Unpack[Behaviour]) -> Path:
    """An executable script in `folder` (made if missing) with this behaviour baked in."""
    folder.mkdir(parents=True, exist_ok=True)
    if "exit_when" in behaviour:
        os.mkfifo(behaviour["exit_when"])
    path = folder / name
    path.write_text(
        f"#!{sys.executable} -IS\n"
        f"import sys\nsys.path.insert(0, {str(TESTS)!r})\nsys.dont_write_bytecode = True\nimport fake_engine\n"
        f"fake_engine.main({dict(behaviour)!r}, sys.argv[1:])\n",
        encoding="utf-8",
    )
    path.chmod(0o755)
    return path


def settings_with(**variables: str) -> Settings:
    """This test's settings, with these variables."""
    return load_settings({**os.environ, **variables})


def good(path: Path, **variables: str) -> Engine:
    """What a program is as an engine, which it must be."""
    found = examine(path, "LLAMA_BIN", settings_with(**variables))
    assert isinstance(found, Engine), found
    return found


def why_not(path: Path) -> str:
    """Why a program is no engine, which it must not be."""
    found = examine(path, "LLAMA_BIN", settings_with())
    assert isinstance(found, Skipped), found
    return found.why


def end_engine(pipe: str) -> None:
    """Make the engine that waits on this pipe (its `exit_when`) end; returns when it has heard."""
    with open(pipe, "w", encoding="utf-8"):
        pass


def calls_of(path: Path, *, checks: bool = False) -> list[dict[str, Any]]:
    """What the engine with `calls=path` was started with, oldest first; without its smoke checks unless asked."""
    calls = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    return [call for call in calls if checks or not call["check"]]
