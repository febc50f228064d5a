"""The profiles, as data: what each alias serves and with which measured values.

`resolve_alias("ram16")` gives the frozen `LocalModelSpec`. Built-in profiles are the TOML files of `profiles/`; those
of a user lie in the `profiles` folder of the user config folder and follow the same schema (see profiles/README.md).
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import looprun_models.profiles
from looprun_models.errors import BadChoice, BadProfile, UnknownAlias
from looprun_models.settings import KV_TYPES, Settings, load_settings

DEFAULT_ALIAS = "qwen3.6-35b-ram24"
BUILT_IN = Path(looprun_models.profiles.__path__[0])


@dataclass(frozen=True, slots=True)
class Measurement:
    """One number and where it comes from; `source` is "quoted" (the profile's author) or "here" (a machine of ours)."""

    name: str
    value: str
    source: str
    machine: str = ""
    build: str = ""
    date: str = ""


@dataclass(frozen=True, slots=True)
class LocalModelSpec:
    """A measured profile.

    approx_size_gb is decimal gigabytes of the GGUF; size_bytes and sha256 are those of `file`, set where it is pinned;
    architecture is what its header must say. ctx is tokens. cache_ram_mib is the RAM prompt cache in MiB. min_ram_gb is
    the machine (decimal GB) that the tier is meant for. template_args reach the chat template with every request of
    `pinned()`. engine_flags are extra flags.
    """

    alias: str
    note: str
    file: str
    default_dir: str
    env_var: str
    hf_repo: str
    approx_size_gb: float
    kv: str
    ctx: int
    cache_ram_mib: int
    served_id: str
    port: int = 8081
    spec_type: str | None = None
    short: tuple[str, ...] = ()
    revision: str | None = None
    size_bytes: int | None = None
    sha256: str | None = None
    architecture: str | None = None
    licence: str = ""
    min_ram_gb: float = 0
    tier: bool = False
    ctx_checkpoints: int = 64
    parallel: int = 1
    engine_flags: tuple[str, ...] = ()
    template_args: Mapping[str, Any] = field(default_factory=dict)
    measured: tuple[Measurement, ...] = ()
    origin: Path = field(default=BUILT_IN, compare=False)

    def default_path(self, settings: Settings) -> Path:
        """Where the GGUF lies when no variable says otherwise."""
        return settings.expand(self.default_dir) / self.file


def load_profiles(settings: Settings) -> dict[str, LocalModelSpec]:
    """Every profile by alias, built-in first, in tier order. Raises BadProfile for a bad file or a clash of names."""
    specs: dict[str, LocalModelSpec] = {}
    owner: dict[str, Path] = {}
    for folder in (BUILT_IN, settings.user_profiles_dir):
        found = [_load(path) for path in sorted(folder.glob("*.toml"))]
        for spec in sorted(found, key=lambda s: (not s.tier, s.min_ram_gb, s.alias)):
            for name in (spec.alias, *spec.short):
                if name in owner:
                    raise BadProfile(spec.origin, f"the name {name!r} is already taken by {owner[name]}")
                owner[name] = spec.origin
            specs[spec.alias] = spec
    return specs


def resolve_alias(alias: str | None = None, settings: Settings | None = None) -> LocalModelSpec:
    """The profile with exactly this alias or short name; None means the one `init` chose, else ram24.

    Raises UnknownAlias with the known names and the nearest.
    """
    settings = settings or load_settings()
    specs = load_profiles(settings)
    wanted = alias if alias is not None else chosen_alias(settings) or DEFAULT_ALIAS
    names = {name: spec for spec in specs.values() for name in (spec.alias, *spec.short)}
    if wanted in names:
        return names[wanted]
    known = [spec.alias + (f" ({', '.join(spec.short)})" if spec.short else "") for spec in specs.values()]
    unknown = UnknownAlias(wanted, known, difflib.get_close_matches(wanted, names, n=2, cutoff=0.5))
    if alias is None:
        unknown.hint = f"looprun init   (chooses anew: {settings.choice_file} names it)"
    raise unknown


def chosen_alias(settings: Settings) -> str | None:
    """The alias that `looprun init` wrote down, if any. Raises BadChoice when the file is not readable TOML."""
    path = settings.choice_file
    try:
        chosen = tomllib.loads(path.read_text(encoding="utf-8")).get("alias")
    except OSError:
        return None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadChoice(path, f"not readable as TOML: {error}") from error
    if chosen is not None and not isinstance(chosen, str):
        raise BadChoice(path, "`alias` must be a text")
    return chosen


NAME = r"[a-z0-9][a-z0-9._-]*"
_TEXT = {"alias", "note", "file", "default_dir", "env_var", "hf_repo", "kv", "served_id", "licence"}
_WHOLE = {"ctx", "cache_ram_mib", "port", "size_bytes", "ctx_checkpoints", "parallel"}
_DECIMAL = {"approx_size_gb", "min_ram_gb"}
_OPTIONAL_TEXT = {"spec_type", "revision", "sha256", "architecture"}
_TEXTS = {"short", "engine_flags"}
_REQUIRED = _TEXT - {"licence"} | {"approx_size_gb", "ctx", "cache_ram_mib"}
_KNOWN = {f.name for f in fields(LocalModelSpec)} - {"origin"}


def _load(path: Path) -> LocalModelSpec:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise BadProfile(path, f"not readable as TOML: {error}") from error
    unknown = sorted(set(data) - _KNOWN)
    if unknown:
        raise BadProfile(path, f"unknown keys: {', '.join(unknown)}; known: {', '.join(sorted(_KNOWN))}")
    missing = sorted(_REQUIRED - set(data))
    if missing:
        raise BadProfile(path, f"missing keys: {', '.join(missing)}")
    values = {key: _checked(path, key, value) for key, value in data.items()}
    spec = LocalModelSpec(**values, origin=path)
    _check_ranges(path, spec)
    return spec


def _checked(path: Path, key: str, value: Any) -> Any:
    if key in _TEXT | _OPTIONAL_TEXT:
        if not isinstance(value, str) or not (value.strip() or key == "licence"):
            raise BadProfile(path, f"`{key}` must be a text that is not empty")
        return value
    if key in _WHOLE or key in _DECIMAL:
        kinds = (int,) if key in _WHOLE else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise BadProfile(path, f"`{key}` must be a {'whole number' if key in _WHOLE else 'number'}")
        return value
    if key in _TEXTS:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise BadProfile(path, f"`{key}` must be a list of texts")
        return tuple(value)
    if key == "tier":
        if not isinstance(value, bool):
            raise BadProfile(path, "`tier` must be true or false")
        return value
    if key == "template_args":
        if not isinstance(value, dict):
            raise BadProfile(path, "`template_args` must be a table")
        return MappingProxyType(value)
    return _measurements(path, value)


def _measurements(path: Path, value: Any) -> tuple[Measurement, ...]:
    known = {f.name for f in fields(Measurement)}
    try:
        measured = tuple(Measurement(**row) for row in value)
    except TypeError:
        raise BadProfile(path, f"each `[[measured]]` takes {', '.join(sorted(known))}") from None
    for row in measured:
        if row.source not in ("quoted", "here"):
            raise BadProfile(path, f"`measured.source` is {row.source!r}; it takes 'quoted' or 'here'")
    return measured


def _check_ranges(path: Path, spec: LocalModelSpec) -> None:
    """The shape of each value; what an engine can do with it is the launch plan's business."""
    problems = [
        (not re.fullmatch(NAME, spec.alias), "`alias` takes a-z, 0-9, '.', '_' and '-'"),
        (not all(re.fullmatch(NAME, name) for name in spec.short), "`short` takes names like `alias` does"),
        (not spec.default_dir.startswith(("~", "/")) and ":" not in spec.default_dir, "`default_dir` is a whole path"),
        (not (spec.file + spec.default_dir).isprintable(), "`file` and `default_dir` take no control characters"),
        ("," in spec.served_id or "@" in spec.served_id, "`served_id` takes no ',' and no '@'"),
        ("/" in spec.file or "\\" in spec.file or not spec.file.endswith(".gguf"), "`file` names one .gguf"),
        (not re.fullmatch(r"[A-Z_][A-Z0-9_]*", spec.env_var), "`env_var` takes A-Z, 0-9 and '_'"),
        (spec.env_var.startswith(("LLAMA_", "LOOPRUN_", "HF_")), "`env_var` starts like a variable of ours"),
        (spec.kv not in KV_TYPES, f"`kv` takes {' or '.join(KV_TYPES)}"),
        (not 0 < spec.ctx < 1 << 31, "`ctx` must be above 0 and below 2^31"),
        (spec.cache_ram_mib < 0, "`cache_ram_mib` must be 0 or more"),
        (not 1 <= spec.port <= 65535, "`port` must be 1 to 65535"),
        (spec.ctx_checkpoints < 0, "`ctx_checkpoints` must be 0 or more"),
        (spec.parallel < 1, "`parallel` must be 1 or more"),
        (not 0 < spec.approx_size_gb < math.inf, "`approx_size_gb` must be above 0"),
        (not 0 <= spec.min_ram_gb < math.inf, "`min_ram_gb` must be 0 or more"),
        (spec.sha256 is not None and not re.fullmatch(r"[0-9a-f]{64}", spec.sha256), "`sha256` is 64 hex"),
        (spec.size_bytes is not None and spec.size_bytes <= 0, "`size_bytes` must be above 0"),
    ]
    for wrong, why in problems:
        if wrong:
            raise BadProfile(path, why)
