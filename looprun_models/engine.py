"""Learn what a llama-server is: build, flags, devices, or why it will not do.

An engine is trusted by what its own `--help` lists, never by its number: vendors ship builds that call themselves 0.
What was learned is kept in the user cache folder for as long as its files stay what they were.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from looprun_models.probe import ask
from looprun_models.settings import Settings

FLOOR = 9780
"""The first build with every part of the recipe (draft-mtp, context checkpoints)."""
UNKNOWN_BELOW = 1000
"""A smaller number is a vendor's 0 or 1, which says nothing."""
SEMANTIC_SINCE = 10381
"""Versions have three numbers from here on: a lower build beside them was counted in somebody else's repository."""
WRAPPER = Path(__file__).with_name("embedded.py")
_LIBRARY = re.compile(r"\.(so|dylib|dll|pyd)(\.|$)")
_ENGINE_LIBRARY = re.compile(r"^(lib)?(llama|ggml|mtmd).*\.(so|dylib|dll)(\.|$)")
"""What to look for in a folder that is full of others."""
EMBEDDED = 'pip install "looprun-models[embedded]"'


@dataclass(frozen=True, slots=True)
class Engine:
    """A usable engine.

    command: what to execute, directly. path: its real file. build: None when the engine does not know (note says).
    flags: every name its --help lists. identity: see `identity_of`. library_path: it only starts with its own folder on
    the loader's path.
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
    out = ask(engine.command, "--list-devices", settings, engine.library_path)
    if isinstance(out, str):
        return ()
    found = re.findall(r"^\s+(\S+: .+) \((\d+) MiB, (\d+) MiB free\)", out.stdout + out.stderr, re.MULTILINE)
    return tuple(
        Device(name, int(total) << 20, int(free) << 20) for name, total, free in found if not name.startswith("CPU")
    )


def system_config(settings: Settings) -> Path | None:
    """The machine-wide engine config, which no flag or variable can keep out; None when there is none."""
    folder = settings.environ.get("PROGRAMDATA", "C:/ProgramData") if os.name == "nt" else "/etc"
    path = Path(folder) / "llama.cpp" / "config.ini"
    return path if path.exists() else None


def parse_build(text: str) -> int | None:
    """The build number in any known form of version line; None when there is none, or it says nothing.

    >>> [parse_build(v) for v in ("version: 9439 (47f)", "version: 0.6.0-dev (build 11434, commit x)", "b10217-ddd4")]
    [9439, 11434, 10217]
    """
    least = SEMANTIC_SINCE if re.search(r"version:\s+v?\d+\.\d+\.\d+\S*\s+\(build", text) else UNKNOWN_BELOW
    shapes = (
        r"\bbuild\W{0,2}b?(\d+)",
        r"version:\s+(\d+)(?=[\s(-]|$)",
        r"\b[bv](\d{4,6})(?:\b|-)",
        r"^(\d{4,6})$",
    )
    for shape in shapes:
        match = re.search(shape, text, re.MULTILINE)
        if match:
            number = int(match[1])
            return number if number >= least else None
    return None


def parse_flags(help_text: str) -> frozenset[str]:
    """Every flag that a --help lists, without those it lists as removed."""
    flags: set[str] = set()
    for entry in re.split(r"\n(?=-)", "\n" + help_text):
        names = re.match(r"--?[A-Za-z][^\s,]*(?:,\s+--?[A-Za-z][^\s,]*)*", entry)
        if names and not re.search(r"has\s+been\s+removed", entry):
            flags.update(re.split(r",\s+", names[0]))
    return frozenset(flags)


def identity_of(program: Path) -> str | None:
    """A short text that changes when the program's file does, or a library beside it; None when it is gone.

    Official builds are a stub of a few kilobytes: the engine is in the libraries. It starts with the real path.
    """
    real = program.resolve()
    try:
        stamps = [_stamp(real.name, real.stat())]
    except OSError:
        return None
    stamps += _stamps_in(real.parent, _LIBRARY)
    if real.parent.name == "bin":
        stamps += _stamps_in(real.parent.parent / "lib", _ENGINE_LIBRARY)
    if real.name == "__init__.py":  # a package, which our wrapper makes a server of
        stamps.append(_stamp(WRAPPER.name, WRAPPER.stat()))
    return f"{real}:{hashlib.sha256('/'.join(stamps).encode()).hexdigest()[:16]}"


def _stamps_in(folder: Path, names: re.Pattern[str]) -> list[str]:
    found: list[str] = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if names.search(entry.name) and entry.is_file():
                found.append(_stamp(entry.name, entry.stat()))
    return sorted(found)


def _stamp(name: str, stat: os.stat_result) -> str:
    return f"{name} {stat.st_size} {stat.st_mtime_ns}"


def learn(command: tuple[str, ...], real: Path, source: str, settings: Settings) -> Engine | Skipped:
    """What a program is, as an engine. command: how its server is started. real: its file."""
    identity = identity_of(real)
    if identity is None:
        return Skipped(str(real), source, "there is no such file")
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
    version = ask(command, "--version", settings, library_path)
    if isinstance(version, str) and "librar" in version and os.name != "nt":
        library_path = True
        version = ask(command, "--version", settings, library_path)
    if isinstance(version, str):
        return version
    help_page = ask(command, "--help", settings, library_path)
    if isinstance(help_page, str):
        return help_page
    line = _version_line(version.stderr + "\n" + version.stdout)
    if not {"--model", "--ctx-size", "--port"} <= parse_flags(help_page.stdout):
        return "it does not answer --help as llama-server does"
    return _Learned(line, help_page.stdout, library_path)


def _version_line(said: str) -> str:
    """GPU and backend libraries talk first, and the paths they name may have another build's number in them."""
    lines = [line.strip() for line in said.splitlines()]
    for shape in (r"^\W*version:", r"\bversion\b.*\d", r"\b[bv]\d{4}", r"^\d{4,6}$"):
        found = [line for line in lines if re.search(shape, line)]
        if found:
            return next((line for line in found if parse_build(line) is not None), found[0])
    return ""


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
    program = identity.rpartition(":")[0]
    programs = {known: known.rpartition(":")[0] for known in memory}
    for old in [known for known, other in programs.items() if other == program or not os.path.exists(other)]:
        del memory[old]
    memory[identity] = asdict(learned)
    write_cache(path, memory)


def write_cache(path: Path, content: Mapping[str, object]) -> None:
    """Write JSON whole or not at all; where it cannot be written, the next command finds out anew."""
    temporary = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(json.dumps(content), encoding="utf-8")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
