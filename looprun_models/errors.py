"""Every failure a user can meet, as one tree.

    LooprunError                    exit 1   anything that is not a bug
    ├── UsageError                  exit 2   what was typed or set is wrong
    │   ├── UnknownAlias, BadSetting, BadProfile, BadChoice, BadPaths, ReservedFlag, UnknownRuntime, TrunkRefused
    ├── StartFailed                 exit 3   the server did not come up, or went down while it was needed
    │   ├── EngineDied, StartTimeout, NotOurServer, ServerStopped
    ├── Missing                     exit 4   something needed is not there
    │   ├── EngineMissing, EngineTooLittle, WeightsMissing, WeightsBad, NotEnoughMemory, NotEnoughDisk
    ├── PortInUse                   exit 5   the port belongs to someone else
    ├── Declined, DownloadFailed, InstallFailed, FolderUnwritable, ServerInUse, RuntimeBroken
    └── ContextOverflow, ServerUnavailable   raised by the client while it is used

The command line prints `str(error)` and exits with `exit_code`; nothing else maps errors to exit codes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar


class LooprunError(Exception):
    """The root. message: the cause in plain words. hint: the next command or action, "" when there is none.

    `str(error)` is both, so that a traceback of the caller's program shows the way out too.
    """

    exit_code: ClassVar[int] = 1
    message: str
    hint: str

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message, self.hint = message, hint

    def __str__(self) -> str:
        return f"{self.message}\n  next: {self.hint}" if self.hint else self.message


class UsageError(LooprunError):
    """What was typed, set or written in a profile cannot be used."""

    exit_code = 2


class UnknownAlias(UsageError):
    """No profile has this name."""

    def __init__(self, alias: str, known: Sequence[str], nearest: Sequence[str]) -> None:
        near = f" Did you mean {' or '.join(nearest)}?" if nearest else ""
        super().__init__(f"unknown model alias {alias!r}.{near} Known: {', '.join(known)}.", hint="looprun models list")
        self.alias, self.known, self.nearest = alias, tuple(known), tuple(nearest)


class BadSetting(UsageError):
    """A variable or an option has a value outside its range."""

    def __init__(self, name: str, value: str, accepted: str, *, hint: str = "") -> None:
        super().__init__(
            f"{name}={value!r} cannot be used: it takes {accepted}.", hint=hint or f"change or unset {name}"
        )
        self.name, self.value, self.accepted = name, value, accepted


class BadProfile(UsageError):
    """A profile file does not follow the schema, or two files claim one name."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"profile {path}: {why}", hint=f"edit or remove {path}")
        self.path, self.why = path, why


class BadChoice(BadProfile):
    """The file in which `looprun init` writes the chosen alias cannot be read."""

    def __init__(self, path: Path, why: str) -> None:
        UsageError.__init__(self, f"{path}: {why}", hint="looprun init   (writes the choice anew)")
        self.path, self.why = path, why


class BadPaths(BadProfile):
    """The file that names the adopted weights cannot be read."""

    def __init__(self, path: Path, why: str) -> None:
        UsageError.__init__(self, f"{path}: {why}", hint=f"edit or remove {path}")
        self.path, self.why = path, why


class ReservedFlag(UsageError):
    """An engine flag after `--` that the manager itself decides."""

    def __init__(self, flag: str, instead: str) -> None:
        super().__init__(f"engine flag {flag} is decided by looprun and cannot be passed on.", hint=instead)
        self.flag = flag


class UnknownRuntime(UsageError):
    """No runtime is registered under this name."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        super().__init__(
            f"unknown runtime {name!r}. Installed: {', '.join(known)}.",
            hint="install the package that provides it, or leave --runtime out",
        )
        self.name, self.known = name, tuple(known)


class TrunkRefused(UsageError):
    """These messages and tools are no beginning that chats could share; the message says where they part."""


class StartFailed(LooprunError):
    """The server did not become ready, or ended while it was needed."""

    exit_code = 3


class EngineDied(StartFailed):
    """The engine program ended by itself.

    cause: one line, the class of cause. log: where its output is. tail: its last lines.
    """

    def __init__(self, cause: str, *, hint: str, log: Path | None = None, tail: Sequence[str] = ()) -> None:
        super().__init__(cause, hint=hint)
        self.log, self.tail = log, tuple(tail)


class StartTimeout(StartFailed):
    """The engine lives but was not ready in time."""


class ServerStopped(StartFailed):
    """Somebody stopped the server on purpose."""


class NotOurServer(StartFailed):
    """What answers on the port does not prove to be the server that was asked for."""


class Missing(LooprunError):
    """Something needed is not on this machine."""

    exit_code = 4


class EngineMissing(Missing):
    """No usable engine was found; `skipped` says why each candidate was passed over."""

    def __init__(self, message: str, *, hint: str, skipped: Iterable[str] = ()) -> None:
        self.skipped = tuple(skipped)
        super().__init__("\n".join([message, *(f"  skipped {reason}" for reason in self.skipped)]), hint=hint)


class EngineTooLittle(Missing):
    """The engine lacks a flag or a value that the profile needs."""


class WeightsMissing(Missing):
    """The GGUF is not on the disk."""


class WeightsBad(Missing):
    """The file is there and is not the GGUF it should be."""


class NotEnoughMemory(Missing):
    """The plan does not fit the memory there is."""


class NotEnoughDisk(Missing):
    """The target file system is too full for the download."""


class PortInUse(LooprunError):
    """The port is held by another program, or by another of our models."""

    exit_code = 5

    def __init__(self, port: int, holder: str, *, hint: str) -> None:
        super().__init__(f"port {port} is in use by {holder}.", hint=hint)
        self.port, self.holder = port, holder


class Declined(LooprunError):
    """A download was not agreed to; nothing was fetched."""


class DownloadFailed(LooprunError):
    """A file could not be fetched whole."""


class InstallFailed(LooprunError):
    """An engine was not installed; the engines that were there are as they were."""


class FolderUnwritable(LooprunError):
    """A folder of ours cannot be made or written."""

    def __init__(self, path: Path, variable: str, why: str) -> None:
        super().__init__(f"cannot write to {path}: {why}.", hint=f"set {variable} to a folder that you may write to")
        self.path, self.variable = path, variable


class ServerInUse(LooprunError):
    """Others are using the server that was to be stopped."""


class RuntimeBroken(LooprunError):
    """A plugged-in runtime could not be loaded."""


class ContextOverflow(LooprunError):
    """The prompt does not fit the context. Both numbers are tokens."""

    def __init__(self, prompt_tokens: int, context: int, *, hint: str) -> None:
        super().__init__(f"the prompt has {prompt_tokens} tokens and the context holds {context}.", hint=hint)
        self.prompt_tokens, self.context = prompt_tokens, context


class ServerUnavailable(LooprunError):
    """The server is loading, crashed or gone while a client used it."""
