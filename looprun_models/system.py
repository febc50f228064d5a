"""The functions of this operating system: `_posix` or `_windows`, under one name. Standard library only."""

from __future__ import annotations

import os

if os.name == "nt":
    from looprun_models._windows import (
        describe_exit,
        detached,
        kill,
        kill_leftovers,
        reap,
        start_of,
        start_tied,
        terminate,
        try_lock,
    )
else:
    from looprun_models._posix import (
        describe_exit,
        detached,
        kill,
        kill_leftovers,
        reap,
        start_of,
        start_tied,
        terminate,
        try_lock,
    )

LOOPBACK = "127.0.0.1"

__all__ = [
    "LOOPBACK",
    "describe_exit",
    "detached",
    "kill",
    "kill_leftovers",
    "reap",
    "start_of",
    "start_tied",
    "terminate",
    "try_lock",
]
