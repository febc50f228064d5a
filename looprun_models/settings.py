"""The one reader of the environment: `load_settings()` gives a frozen `Settings`, which everything else is handed.

A blank variable means unset, except where the table in the README says that blank means "off". Values lose surrounding
spaces, quotes and carriage returns, so a line copied from a Windows `.env` file works.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import platformdirs

from looprun_models.errors import BadSetting, FolderUnwritable

T = TypeVar("T")

KV_TYPES = ("q8_0", "f16")
DEFAULT_KEEP_ALIVE = 300.0
"""Seconds a server stays after its last `local_model` user: a script run again finds its model loaded."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment says. None is "unset"; an empty string is "explicitly off" where that exists.

    ctx is in tokens, cache_ram in MiB, trunk_budget in bytes, keep_alive in seconds. environ is the whole environment
    as it was read, the base of what child programs get. home is None when there is no usable home folder.
    """

    environ: Mapping[str, str]
    home: Path | None
    config_dir: Path
    state_dir: Path
    cache_dir: Path
    llama_bin: str | None = None
    engine_index: str | None = None
    port: int | None = None
    kv: str | None = None
    ctx: int | None = None
    cache_ram: int | None = None
    slot_save_path: str | None = None
    trunk_budget: int | None = None
    spec_type: str | None = None
    keep_alive: float | None = None
    external_url: str | None = None
    external_key: str | None = None
    external_model: str | None = None

    def model_path(self, variable: str) -> Path | None:
        """The GGUF that a profile's path variable names, `~` expanded; None when it is not set."""
        value = _clean(self.environ.get(variable, ""))
        return self.expand(value) if value else None

    def expand(self, path: str) -> Path:
        """`~` is this environment's home, not whatever the process was started with."""
        return _expand(path, self.home)

    @property
    def servers_dir(self) -> Path:
        return self.state_dir / "servers"

    @property
    def logs_dir(self) -> Path:
        return self.state_dir / "logs"

    @property
    def slots_dir(self) -> Path:
        """Where saved slot states are looked for: the folder that is named, else ours, also while saving is off."""
        return self.expand(self.slot_save_path).absolute() if self.slot_save_path else self.cache_dir / "slot-states"

    @property
    def user_profiles_dir(self) -> Path:
        return self.config_dir / "profiles"

    @property
    def choice_file(self) -> Path:
        """Where `init` writes the chosen alias."""
        return self.config_dir / "config.toml"

    @property
    def paths_file(self) -> Path:
        """Where `adopt` writes down whose file a profile uses."""
        return self.config_dir / "paths.toml"


def load_settings(environ: Mapping[str, str] | None = None, *, lenient: bool = False) -> Settings:
    """Read and check every variable. Raises BadSetting, naming the variable and what it takes."""
    env = dict(os.environ if environ is None else environ)

    def text(name: str) -> str | None:
        return _clean(env.get(name, "")) or None

    def number(name: str, kind: Callable[[str], T], valid: Callable[[T], bool], accepted: str) -> T | None:
        given = text(name)
        if given is None:
            return None
        try:
            value = kind(given if given.isascii() and "_" not in given else "")
        except ValueError:
            value = None
        if value is not None and valid(value):
            return value
        if lenient:
            return None
        raise BadSetting(name, given, accepted)

    kv = text("LLAMA_KV")
    if kv is not None and kv not in KV_TYPES and not lenient:
        raise BadSetting("LLAMA_KV", kv, " or ".join(KV_TYPES))
    budget = number("LOOPRUN_TRUNK_BUDGET", float, lambda gb: 0 <= gb < 1e9, "a number of GB, 0 or more")
    home = _home(env)
    return Settings(
        environ=env,
        home=home,
        config_dir=_user_folder(platformdirs.user_config_path),
        state_dir=_folder(env, home, "LOOPRUN_STATE_DIR", _user_folder(platformdirs.user_state_path)),
        cache_dir=_folder(env, home, "LOOPRUN_CACHE_DIR", _user_folder(platformdirs.user_cache_path)),
        llama_bin=text("LLAMA_BIN"),
        engine_index=text("LOOPRUN_ENGINE_INDEX"),
        port=number("LLAMA_PORT", int, lambda port: 1 <= port <= 65535, "a port from 1 to 65535"),
        kv=kv,
        ctx=number("LLAMA_CTX", int, lambda ctx: ctx > 0, "a number of tokens above 0"),
        cache_ram=number("LLAMA_CACHE_RAM", int, lambda mib: mib >= 0, "a number of MiB, 0 or more"),
        slot_save_path=_clean(env["LLAMA_SLOT_SAVE_PATH"]) if "LLAMA_SLOT_SAVE_PATH" in env else None,
        trunk_budget=None if budget is None else round(budget * 1e9),
        spec_type=_clean(env["LLAMA_SPEC_TYPE"]) if "LLAMA_SPEC_TYPE" in env else None,
        keep_alive=number(
            "LOOPRUN_KEEP_ALIVE", float, lambda s: 0 <= s < float("inf"), "a number of seconds, 0 or more"
        ),
        external_url=text("LOOPRUN_EXTERNAL_URL"),
        external_key=text("LOOPRUN_EXTERNAL_KEY"),
        external_model=text("LOOPRUN_EXTERNAL_MODEL"),
    )


def private_dir(path: Path, variable: str) -> Path:
    """Make a folder that only its owner may enter (mode 0700), with its parents.

    Raises FolderUnwritable naming the path and the variable that moves it.
    """
    if not path.is_absolute():
        raise FolderUnwritable(path, variable, "there is no home folder")
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.stat().st_mode & 0o077:
            path.chmod(0o700)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise FolderUnwritable(path, variable, error.strerror or str(error)) from error
    return path


def _clean(value: str) -> str:
    return value.strip().strip("\"'").strip()


def _home(env: Mapping[str, str]) -> Path | None:
    """HOME when it is a full path, else what the system knows of this user, which may be nothing."""
    named = env.get("HOME", "")
    if not os.path.isabs(named):
        named = _registered_home()
    return Path(named) if os.path.isabs(named) else None


def _registered_home() -> str:
    if sys.platform == "win32":
        return os.path.expanduser("~")
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return ""


def _user_folder(find: Callable[..., Path]) -> Path:
    try:
        return find("looprun", appauthor=False)
    except RuntimeError:  # no home: reading must work, and writing says what is wrong
        return Path("~")


def _expand(path: str, home: Path | None) -> Path:
    return home / path[2:] if home and (path == "~" or path.startswith(("~/", "~\\"))) else Path(path)


def _folder(env: Mapping[str, str], home: Path | None, variable: str, default: Path) -> Path:
    """A `~` that stands for nothing stays, so that `private_dir` says so instead of making a folder of that name."""
    value = _clean(env.get(variable, ""))
    path = _expand(value, home) if value else default
    return path if path.parts[:1] == ("~",) else path.absolute()
