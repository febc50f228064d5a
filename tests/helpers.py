"""What several tests need: agents in processes of their own, waiting for an event, free ports."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from looprun_models.trunkentry import Entry
from looprun_models.trunkstore import TrunkStore

AGENT = Path(__file__).with_name("agent.py")
PATIENCE = 60.0


class Agent:
    """tests/agent.py in a process of its own."""

    def __init__(self, alias: str, options: Mapping[str, Any] | None = None, program: Path = AGENT) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(program), alias, json.dumps(options or {})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            assert self.process.stderr
            raise AssertionError(f"the agent ended: {self.process.stderr.read()}")
        said: dict[str, Any] = json.loads(line)
        return said

    def ask(self) -> str:
        assert self.process.stdin
        self.process.stdin.write("ask\n")
        self.process.stdin.flush()
        return str(self.hear()["text"])

    def leave(self) -> int:
        """End of input: the agent ends as a program does."""
        self.process.communicate(timeout=PATIENCE)
        return self.process.returncode

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def agents(*aliases: str, **options: Any) -> Iterator[list[Agent]]:
    """Agents that are ended with the block, however it ends."""
    started = [Agent(alias, options) for alias in aliases]
    try:
        yield started
    finally:
        for agent in started:
            if agent.process.poll() is None:
                agent.kill()
            agent.process.communicate()


def wait_for(event: Callable[[], bool], what: str) -> None:
    """Look until it is so; for what has no handle to wait on (another process's child, a file)."""
    deadline = time.monotonic() + PATIENCE
    while not event():
        assert time.monotonic() < deadline, f"did not happen: {what}"
        time.sleep(0.005)


def gone(pid: int) -> bool:
    """Ended and collected, or a zombie that somebody else has to collect."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def labelled(store: TrunkStore, alias: str, label: str) -> list[Entry]:
    """The trunks that bear this very label, the newest first."""
    found = [entry for entry in store.entries() if (entry.meta.alias, entry.meta.label) == (alias, label)]
    return sorted(found, key=lambda entry: entry.created, reverse=True)
