"""Ask a program one question in the environment of an engine, and say in words why it did not answer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from looprun_models import system
from looprun_models.settings import Settings

PROBE_TIMEOUT = 20.0
SERVE = ("serve",)
"""What makes the single program `llama` a llama-server."""
_COLOURS = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")
_PROGRAMS = (b"\x7fELF", b"MZ", b"\xca\xfe\xba\xbe", b"\xcf\xfa\xed\xfe", b"\xce\xfa\xed\xfe")
"""What the programs of Linux, Windows and macOS begin with."""


def child_environ(settings: Settings, *, library_path: Path | None = None) -> tuple[dict[str, str], tuple[str, ...]]:
    """The environment of an engine, and the names of the variables that were kept from it.

    library_path: the program's own folder, put before the loader's other places.
    """
    banned = ("LLAMA_ARG_", "LLAMA_SERVER_", "AIP_")
    named = ("LLAMA_API_KEY", "LLAMA_APP_CMD")
    dropped = sorted(name for name in settings.environ if name.startswith(banned) or name in named)
    env = {name: value for name, value in settings.environ.items() if name not in dropped}
    env["GGML_NO_BACKTRACE"] = "1"  # its crash handler forks a debugger, which was seen to hang
    env["XDG_CONFIG_HOME"] = str(settings.state_dir / "no-config")  # the user's llama.cpp/config.ini changes the recipe
    if sys.platform == "darwin" and library_path:
        # after the normal search, so it can only help; setting it drops the defaults, hence they are named
        ours = [str(library_path), env.get("DYLD_FALLBACK_LIBRARY_PATH", ""), "/usr/local/lib", "/usr/lib"]
        env["DYLD_FALLBACK_LIBRARY_PATH"] = ":".join(filter(None, ours))
    elif library_path and os.name != "nt":
        env["LD_LIBRARY_PATH"] = ":".join(filter(None, [str(library_path), env.get("LD_LIBRARY_PATH", "")]))
    return env, tuple(dropped)


def ask(
    command: tuple[str, ...], question: str, settings: Settings, library_path: bool
) -> subprocess.CompletedProcess[str] | str:
    """Run a program with one question, in the environment it would serve in; a text is the reason it did not answer."""
    env, _ = child_environ(settings, library_path=Path(command[0]).parent if library_path else None)
    try:
        done = subprocess.run(
            [*command, question],
            env=env,
            cwd=os.sep,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=PROBE_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it did not answer {question} within {PROBE_TIMEOUT:g} s"
    except OSError as error:
        return _why_not_started(Path(command[0]), error)
    done.stdout, done.stderr = (_COLOURS.sub("", said) for said in (done.stdout, done.stderr))
    return done if done.returncode == 0 else _why_failed(command, done, question)


def _why_not_started(program: Path, error: OSError) -> str:
    if isinstance(error, PermissionError):
        return "it, or a program it needs, may not be run by this user (Permission denied)"
    if isinstance(error, FileNotFoundError):
        return "the interpreter or loader that it names is not on this machine"
    try:
        with program.open("rb") as file:
            is_program = file.read(4).startswith(_PROGRAMS)
    except OSError:
        is_program = False
    kind = "wrong architecture" if is_program else "not a program"
    return f"it cannot be run on this machine ({error.strerror}): {kind}"


def _why_failed(command: tuple[str, ...], done: subprocess.CompletedProcess[str], question: str) -> str:
    said = done.stderr.strip() or done.stdout.strip()
    missing = re.search(r"(?:loading shared libraries|Library not loaded): ([^:\s]+)", said)
    if missing:
        need = " (Debian: apt-get install libgomp1)" if "libgomp" in missing[1] else ""
        return f"the loader cannot find the library {missing[1]}{need}"
    ended = system.describe_exit(done.returncode)
    if "SIGILL" in ended:
        return f"built for another CPU ({ended})"
    if "SIGKILL" in ended and sys.platform == "darwin":
        return f"macOS does not let it run ({ended}): xattr -d com.apple.quarantine {command[0]}"
    last = f": {said.splitlines()[-1]}" if said else ""
    other = "; another program of that name?" if command[1:] == SERVE and done.returncode > 0 else ""
    return f"it ended ({ended}) when asked for {question}{last}{other}"
