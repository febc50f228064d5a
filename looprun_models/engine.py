"""Learn what a llama-server is: build, flags, devices, or why it will not do.

An engine is trusted by what its own `--help` lists, never by its number: vendors ship builds that call themselves 0.
What was learned is kept in the user cache folder by path, size and time of change.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from looprun_models import system
from looprun_models.settings import Settings

FLOOR = 9780
"""The first build with every part of the recipe (draft-mtp, context checkpoints)."""
UNKNOWN_BELOW = 1000
"""A smaller number is a vendor's 0 or 1, which says nothing."""
PROBE_TIMEOUT = 20.0
EMBEDDED = 'pip install "looprun-models[embedded]"'


@dataclass(frozen=True, slots=True)
class Engine:
    """A usable engine.

    command: what to execute, directly. path: its real file. build: None when the engine does not know (note says).
    flags: every name its --help lists. identity changes when the file does. library_path: it only starts with its own
    folder on the loader's path.
    """

    path: Path
    command: tuple[str, ...]
    source: str
    build: int | None
    version: str
    flags: frozenset[str]
    help_text: str
    identity: str
    library_path: bool = False
    embedded: bool = False
    note: str = ""

    @property
    def label(self) -> str:
        """How messages call it: "b11434 (/opt/llama/llama-server)"."""
        return f"{'build unknown' if self.build is None else f'b{self.build}'} ({self.path})"

    def has(self, *names: str) -> bool:
        return any(name in self.flags for name in names)


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU that the engine itself reports; memory in bytes."""

    name: str
    total: int
    free: int


@dataclass(frozen=True, slots=True)
class Skipped:
    """A candidate that will not do, and why."""

    path: str
    source: str
    why: str

    def __str__(self) -> str:
        return f"{self.path} ({self.source}): {self.why}"


def devices(engine: Engine, settings: Settings) -> tuple[Device, ...]:
    """The GPUs the engine would use, from its own --list-devices; empty for a CPU build. Asked afresh each time."""
    if not engine.has("--list-devices"):
        return ()
    out = _probe(engine.command, "--list-devices", settings, engine.library_path)
    if isinstance(out, str):
        return ()
    found = re.findall(r"^\s+(\S+: .+) \((\d+) MiB, (\d+) MiB free\)", out.stdout + out.stderr, re.MULTILINE)
    return tuple(
        Device(name, int(total) << 20, int(free) << 20) for name, total, free in found if not name.startswith("CPU")
    )


def child_environ(settings: Settings, *, library_path: Path | None = None) -> tuple[dict[str, str], tuple[str, ...]]:
    """The environment of an engine, and the names of the variables that were kept from it.

    library_path: the program's own folder, put before the loader's other places.
    """
    banned = ("LLAMA_ARG_", "LLAMA_SERVER_", "AIP_")
    dropped = sorted(name for name in settings.environ if name.startswith(banned) or name == "LLAMA_API_KEY")
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


def system_config(settings: Settings) -> Path | None:
    """The machine-wide engine config, which no flag or variable can keep out; None when there is none."""
    folder = settings.environ.get("PROGRAMDATA", "C:/ProgramData") if os.name == "nt" else "/etc"
    path = Path(folder) / "llama.cpp" / "config.ini"
    return path if path.exists() else None


def parse_build(text: str) -> int | None:
    """The build number in any known form of version line; None when there is none, or it is a vendor's 0 or 1.

    >>> [parse_build(v) for v in ("version: 9439 (47f)", "version: 0.6.0-dev (build 11434, commit x)", "b10217-ddd4")]
    [9439, 11434, 10217]
    """
    for pattern in (r"\bbuild\W{0,2}b?(\d+)", r"version:\s+b?(\d+)\s*\(", r"\bb(\d{4,6})(?:\b|-)", r"^(\d{4,6})$"):
        match = re.search(pattern, text, re.MULTILINE)
        if match:
            number = int(match[1])
            return number if number >= UNKNOWN_BELOW else None
    return None


def parse_flags(help_text: str) -> frozenset[str]:
    """Every flag that a --help lists, without those it lists as removed."""
    flags: set[str] = set()
    for entry in re.split(r"\n(?=-)", "\n" + help_text):
        names = re.match(r"--?[A-Za-z][^\s,]*(?:,\s+--?[A-Za-z][^\s,]*)*", entry)
        if names and not re.search(r"has\s+been\s+removed", entry):
            flags.update(re.split(r",\s+", names[0]))
    return frozenset(flags)


def learn(command: tuple[str, ...], real: Path, source: str, settings: Settings, *more: Path) -> Engine | Skipped:
    """What a program is, as an engine. real: its file; more: others that it is made of."""
    stats = [path.stat() for path in (real, *more)]
    identity = f"{real}:" + ":".join(f"{stat.st_size}:{stat.st_mtime_ns}" for stat in stats)
    learned = _recall(settings, identity) or _ask(command, settings, real)
    if isinstance(learned, str):
        return Skipped(str(real), source, learned)
    _remember(settings, identity, learned)
    build = parse_build(learned.version)
    if build is not None and build < FLOOR:
        return Skipped(str(real), source, f"build b{build} is older than b{FLOOR}, the first that can run the profiles")
    return Engine(
        path=real,
        command=command,
        source=source,
        build=build,
        version=learned.version,
        flags=parse_flags(learned.help_text),
        help_text=learned.help_text,
        identity=identity,
        library_path=learned.library_path,
        embedded=source == "embedded",
        note="" if build is not None else "its build number is unknown; its flags were checked instead",
    )


@dataclass(frozen=True, slots=True)
class _Learned:
    version: str
    help_text: str
    library_path: bool


def _ask(command: tuple[str, ...], settings: Settings, real: Path) -> _Learned | str:
    """What the program says of itself, or why it cannot be used."""
    library_path = False
    version = _probe(command, "--version", settings, library_path)
    if isinstance(version, str) and "librar" in version and os.name != "nt":
        library_path = True
        alone, version = version, _probe(command, "--version", settings, library_path)
        if isinstance(version, str):
            return alone
    if isinstance(version, str):
        return version
    help_page = _probe(command, "--help", settings, library_path)
    if isinstance(help_page, str):
        return help_page
    line = _version_line(version.stderr + "\n" + version.stdout)
    if not {"--model", "--ctx-size"} <= parse_flags(help_page.stdout):
        return "it does not answer --help as llama-server does"
    return _Learned(line, help_page.stdout, library_path)


def _version_line(said: str) -> str:
    """GPU and backend libraries talk first, and the paths they name may have another build's number in them."""
    for shape in (r"^\W*version:", r"\bversion\b.*\d", r"\bb\d{4}", r"^\d{4,6}$"):
        for line in map(str.strip, said.splitlines()):
            if re.search(shape, line):
                return line
    return ""


def _probe(
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
        if isinstance(error, PermissionError):
            return "it, or a program it needs, may not be run by this user (Permission denied)"
        return f"it cannot be run on this machine ({error.strerror}): wrong architecture, or not a program"
    if done.returncode == 0:
        return done
    return _why_failed(done.returncode, done.stderr, question)


def _why_failed(code: int, said: str, question: str) -> str:
    missing = re.search(r"(?:loading shared libraries|Library not loaded): ([^:\s]+)", said)
    if missing:
        need = " (Debian: apt-get install libgomp1)" if "libgomp" in missing[1] else ""
        return f"the loader cannot find the library {missing[1]}{need}"
    ended = system.describe_exit(code)
    if "SIGILL" in ended:
        return "built for another CPU (killed by SIGILL)"
    last = said.strip().splitlines()[-1:] or [""]
    return f"it ended ({ended}) when asked for {question}" + (f": {last[0]}" if last[0] else "")


@functools.lru_cache(maxsize=4)
def _memory(path: Path) -> dict[str, dict[str, object]]:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _recall(settings: Settings, identity: str) -> _Learned | None:
    """None for what is not known, and for what another version wrote in another form."""
    match _memory(settings.cache_dir / "engines.json").get(identity):
        case {"version": str(version), "help_text": str(help_text), "library_path": bool(library_path)}:
            return _Learned(version, help_text, library_path)
    return None


def _remember(settings: Settings, identity: str, learned: _Learned) -> None:
    """A cache: when it cannot be written, the next command asks again."""
    path = settings.cache_dir / "engines.json"
    memory = _memory(path)
    if memory.get(identity) == asdict(learned):
        return
    memory[identity] = asdict(learned)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(memory), encoding="utf-8")
        os.replace(temporary, path)
