"""The records of this user's servers, the one lock that guards them, and the logs beside them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from looprun_models import system
from looprun_models.errors import LooprunError, StartFailed
from looprun_models.failure import log_tail
from looprun_models.settings import Settings, private_dir
from looprun_models.wire import Record, stop_process

LOCK_TIMEOUT = 60.0
started_here: list[int] = []


def list_servers(settings: Settings) -> list[Record]:
    """Every server whose supervisor lives. Dead records are cleaned up when the folder can be written."""
    records = read_records(settings)
    if all(supervised(record) for record in records):
        return records
    try:
        with locked(settings):
            return reap_dead(settings)
    except LooprunError:
        return [record for record in records if supervised(record)]


def last_end(settings: Settings, alias: str) -> str | None:
    """How the newest server of this alias ended, if it died by itself: the last line of its log."""
    log = newest_log(settings, alias)
    last = log_tail(log, 1) if log else []
    note = "looprun: the engine ended: "
    return last[0].removeprefix(note) if last and last[0].startswith(note) else None


def newest_log(settings: Settings, alias: str) -> Path | None:
    """The log of the server of this alias that was started last."""
    logs = _files(settings.logs_dir, f"{alias}-[0-9]*.log")
    return max(logs, key=lambda path: path.stat().st_mtime, default=None)


def reap_children() -> None:
    """Collect supervisors that this process started and that have ended, so that none stays as a zombie."""
    started_here[:] = [pid for pid in started_here if not system.reap(pid)]


@contextlib.contextmanager
def locked(settings: Settings) -> Iterator[None]:
    """The one lock for all records, held from looking to having started. Raises FolderUnwritable or StartFailed."""
    folder = private_dir(settings.state_dir, "LOOPRUN_STATE_DIR")
    path = folder / "servers.lock"
    with open(path, "a+", encoding="utf-8") as file:
        deadline = time.monotonic() + LOCK_TIMEOUT
        while not system.try_lock(file.fileno()):
            if time.monotonic() > deadline:
                raise StartFailed(
                    f"another looprun process has held {path} for {LOCK_TIMEOUT:g} s.",
                    hint=f"find it with: fuser {path}",
                )
            time.sleep(0.005)
        yield


def read_records(settings: Settings) -> list[Record]:
    """Every record there is, of living and of dead servers."""
    found = (Record.read(str(path)) for path in _files(settings.servers_dir, "*.json"))
    return [record for record in found if record is not None]


def _files(folder: Path, pattern: str) -> list[Path]:
    """None in a folder that is not there or is somebody else's: what lies in it is no server of this user."""
    try:
        return sorted(folder.glob(pattern))
    except OSError:
        return []


def supervised(record: Record) -> bool:
    """Whether the very supervisor that wrote the record still runs."""
    return system.start_of(record.supervisor_pid) == record.supervisor_start is not None


def child_ended(record: Record) -> bool:
    """Whether the very engine of the record has ended; another process under its pid does not count."""
    return system.start_of(record.child_pid) != record.child_start


def reap_dead(settings: Settings) -> list[Record]:
    """Under the lock: end servers whose supervisor was killed and drop their records; returns those that live."""
    alive = []
    for path in _files(settings.servers_dir, "*.json"):
        record = Record.read(str(path))
        if record is not None and supervised(record):
            alive.append(record)
            continue
        if record is not None:
            stop_process(record.child_pid, lambda record=record: child_ended(record))  # type: ignore[misc]
        path.unlink(missing_ok=True)
    reap_children()
    return alive
