"""What one server has seen in its life: which trunk is in its slot, and which are in its RAM cache.

The engine cannot be asked, so its cache is followed: it puts the slot's state at the end when another prompt comes,
drops the oldest until all fit, and takes a state out when it loads it. The ledger is shared by all processes that use
the server, and is believed only until a reply shows otherwise.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from looprun_models.errors import FolderUnwritable
from looprun_models.settings import Settings, private_dir
from looprun_models.system import try_lock
from looprun_models.wire import Record

LOCK_PATIENCE = 60.0
"""Seconds; whoever holds it may be reading a prompt, which on a slow machine takes half of that."""
LOOK = 0.003


FOREIGN = ""
"""Stands for a prompt that is no trunk's."""


class Held(NamedTuple):
    """A prompt: the key of the trunk that it begins with; of all of it the bytes, the tokens, and in how many readings
    it came about."""

    key: str
    size: int
    tokens: int
    readings: int = 1


@dataclass(slots=True)
class Ledger:
    """slot: the prompt in it, None when it is empty. cached: those in the RAM cache, the oldest first. capacity: its
    bytes. counted: tokens that the engine had read in its life when it was last looked at."""

    capacity: int
    slot: Held | None = None
    cached: list[Held] = field(default_factory=list)
    counted: int | None = None

    def holds(self, key: str) -> bool:
        """Whether a prompt of it would find it: the slot's state is put away first, which may cost it its place."""
        then = replace(self, cached=list(self.cached))
        then.wake(key)
        return then.slot is not None and then.slot.key == key

    def park(self) -> None:
        """The slot's state goes into the RAM cache, and the oldest out of it until all fit."""
        held, self.slot = self.slot, None
        if held is None or held.size > self.capacity:
            return
        self.lose(held.key)
        while self.cached and sum(other.size for other in self.cached) + held.size > self.capacity:
            self.cached.pop(0)
        self.cached.append(held)

    def wake(self, key: str) -> None:
        """A prompt of this trunk comes: what is in the slot makes room for it, and it leaves the RAM cache."""
        if self.slot is None or self.slot.key != key:
            self.park()
            self.slot = next((held for held in self.cached if held.key == key), None)
            self.lose(key, slot=False)

    def use(self, held: Held) -> None:
        """This is in the slot now."""
        self.wake(held.key)
        self.slot = held

    def lose(self, key: str, *, slot: bool = True) -> None:
        """It is not there any more. One that stands for other prompts stays: it may be several."""
        if slot and self.slot and self.slot.key == key:
            self.slot = None
        if key != FOREIGN:
            self.cached = [held for held in self.cached if held.key != key]

    def notice(self, counted: int | None, foreign: Callable[[int], Held]) -> None:
        """The engine has read so many tokens by now: those that nobody of us told of were other prompts."""
        if counted is not None and self.counted is not None and counted > self.counted:
            self.use(foreign(counted - self.counted))
        self.counted = counted

    def tell(self, read: int) -> None:
        """One of us had the engine read so many tokens."""
        if self.counted is not None:
            self.counted += read


@contextlib.contextmanager
def open_ledger(record: Record, settings: Settings) -> Iterator[Ledger]:
    """The ledger of a server's life, alone until the block ends (which should be soon), then written back.

    Where it cannot be kept nothing is known of the server, and every trunk is restored before it is used.
    """
    life = f"{record.child_pid}:{record.child_start}"
    try:
        folder = private_dir(settings.state_dir / "ledgers", "LOOPRUN_STATE_DIR")
        file = (folder / f"{record.port}.json").open("a+", encoding="utf-8")
    except (OSError, FolderUnwritable):
        yield Ledger(record.cache_bytes or 0)
        return
    with file, _not_inherited(file.fileno()):
        _lock(file.fileno())
        file.seek(0)
        ledger = _read(file.read(), life) or Ledger(record.cache_bytes or 0)
        try:
            yield ledger
        finally:
            _write(folder / f"{record.port}.json", file, ledger, life)


@contextlib.contextmanager
def alone(record: Record, settings: Settings, what: str = "lock") -> Iterator[bool]:
    """Nobody else of us does the same to this server until the block ends; False when that could not be had in time.

    what: "lock" to read, save or restore a trunk; "turn" for that and a chat, where the two must not mix.
    """
    try:
        folder = private_dir(settings.state_dir / "ledgers", "LOOPRUN_STATE_DIR")
        file = (folder / f"{record.port}.{what}").open("a+b")
    except (OSError, FolderUnwritable):
        yield False
        return
    with file, _not_inherited(file.fileno()):
        yield _lock(file.fileno())


def _lock(handle: int) -> bool:
    """Whoever holds it may have been stopped: after a while one goes on without, and does not restore then where chats
    must not come in between."""
    deadline = time.monotonic() + LOCK_PATIENCE
    while time.monotonic() < deadline:
        try:
            if try_lock(handle):
                return True
        except OSError:  # a file system without locks
            return False
        time.sleep(LOOK)
    return False


@contextlib.contextmanager
def _not_inherited(handle: int) -> Iterator[None]:
    """A child that is forked meanwhile shares the lock, and would keep it for its life."""
    _open_here.add(handle)
    try:
        yield
    finally:
        _open_here.discard(handle)


def _let_go_in_child() -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    for handle in _open_here:
        os.dup2(nothing, handle, inheritable=False)
    os.close(nothing)
    _open_here.clear()


_open_here: set[int] = set()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_child)


def _read(text: str, life: str) -> Ledger | None:
    """None for another life's, and for what nobody of us wrote."""
    try:
        told = json.loads(text)
        if told["life"] != life:
            return None
        slot, counted = told["slot"], told["counted"]
        return Ledger(
            int(told["capacity"]),
            None if slot is None else _held(slot),
            [_held(each) for each in told["cached"]],
            None if counted is None else int(counted),
        )
    except (ValueError, TypeError, KeyError):
        return None


def _held(told: Any) -> Held:
    key, size, tokens, readings = told
    return Held(str(key), int(size), int(tokens), int(readings))


def _write(path: Path, file: Any, ledger: Ledger, life: str) -> None:
    """In place, because the lock is on this very file; a torn one is read as "nothing is known"."""
    told = {"life": life, "capacity": ledger.capacity, "slot": ledger.slot, "cached": ledger.cached}
    with contextlib.suppress(OSError):
        file.seek(0)
        file.truncate()
        file.write(json.dumps({**told, "counted": ledger.counted}))
        file.flush()
        if os.name != "nt":
            path.chmod(0o600)
