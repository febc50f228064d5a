"""What this machine can give a model: memory, cores, disk, as this process may use them; which tier fits.

In a container the machine's own numbers are not what counts: the cgroup's memory limit and CPU quota are read
as well, of every level above this process, and the tightest wins.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from looprun_models.registry import LocalModelSpec

GB = 10**9
SLACK = 0.05
"""Share of a tier's memory that may be missing: firmware and graphics take some of what was sold."""

_CAP_IPC_LOCK = 1 << 14


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine as this process sees it. Sizes are bytes.

    cores are those this process may run on, cpu_quota the share of them a cgroup grants (None: all).
    ram_total and ram_available are within the cgroup's limit; ram_limited_by says whether that limit
    ("cgroup") or the machine ("machine") sets ram_total. memlock_limit is how much may be locked in RAM
    (None: no limit).
    """

    system: str
    os_name: str
    arch: str
    cores: int
    cpu_quota: float | None
    ram_total: int
    ram_available: int
    ram_limited_by: str
    memlock_limit: int | None

    @property
    def apple_silicon(self) -> bool:
        return self.system == "Darwin" and self.arch == "arm64"

    @property
    def threads(self) -> int | None:
        """How many threads an engine should be told to use; None when its own count is right.

        Engines count cores, not quotas: with more threads than the quota, all of them wait for the slowest.
        """
        if self.cpu_quota is None or self.cpu_quota >= self.cores:
            return None
        return max(1, math.floor(self.cpu_quota))


def inspect_machine(root: Path = Path("/")) -> Machine:
    """Look at this machine; its /proc, /sys and /etc are under `root`. Odd or missing files limit nothing."""
    import psutil  # costs 10-20 ms, and most commands never come here

    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    for limit, used in _memory_limits(root):
        total, available = min(total, limit), min(available, max(0, limit - used))
    quotas = list(_cpu_quotas(root))
    return Machine(
        system=platform.system(),
        os_name=_os_name(root),
        arch=platform.machine(),
        cores=_cores(),
        cpu_quota=min(quotas, default=None),
        ram_total=total,
        ram_available=available,
        ram_limited_by="cgroup" if total < memory.total else "machine",
        memlock_limit=_memlock_limit(root),
    )


def recommend(specs: Iterable[LocalModelSpec], machine: Machine) -> tuple[LocalModelSpec | None, str]:
    """The largest tier whose machine this is, and why; None, and why, when even the smallest is too large."""
    tiers = sorted((spec for spec in specs if spec.tier), key=lambda spec: spec.min_ram_gb)
    may_use = "this process may use" if machine.ram_limited_by == "cgroup" else "this machine has"
    ram = f"{may_use} {machine.ram_total / GB:.1f} GB"
    if not tiers:
        return None, "no profile is a tier"
    fitting = [spec for spec in tiers if spec.min_ram_gb * GB * (1 - SLACK) <= machine.ram_total]
    if not fitting:
        return None, f"the smallest tier is for {tiers[0].min_ram_gb:g} GB and {ram}"
    return fitting[-1], f"{fitting[-1].min_ram_gb:g} GB tier: {ram}"


def disk_free(path: Path) -> int:
    """Bytes free for this user where `path` is or will be: at the nearest folder that exists, else 0."""
    path = path.absolute()
    for place in (path, *path.parents):
        try:
            return shutil.disk_usage(place).free
        except OSError:
            continue
    return 0


def cpu_identity(root: Path = Path("/")) -> str:
    """What tells this CPU from one on which a program built for this one might not run: a digest of its features."""
    told = _text(root / "proc/cpuinfo")
    features = [line for line in told.splitlines() if re.match(r"(flags|Features|model name)\s*:", line)]
    known = "\n".join(sorted(set(features))) or f"{platform.machine()} {platform.processor()}"
    return hashlib.sha256(known.encode()).hexdigest()[:12]


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes in use) of each level with a limit; file cache that the kernel can drop is left out."""
    for level in _levels(root, ""):
        limits = [limit for name in ("memory.max", "memory.high") if (limit := _number(level / name))]
        if limits:
            yield min(limits), _in_use(level, "memory.current", "inactive_file")
    for level in _levels(root, "memory"):
        limit = _number(level / "memory.limit_in_bytes")
        if limit is not None:
            yield limit, _in_use(level, "memory.usage_in_bytes", "total_inactive_file")


def _in_use(level: Path, usage: str, cache: str) -> int:
    return max(0, (_number(level / usage) or 0) - _statistic(level / "memory.stat", cache))


def _cpu_quotas(root: Path) -> Iterator[float]:
    """The number of cores that each limiting level grants."""
    for level in _levels(root, ""):
        quota, _, period = _text(level / "cpu.max").partition(" ")
        yield from _share(quota, period)
    for level in _levels(root, "cpu"):
        yield from _share(_text(level / "cpu.cfs_quota_us"), _text(level / "cpu.cfs_period_us"))


def _share(quota: str, period: str) -> Iterator[float]:
    if quota.isdecimal() and period.isdecimal() and int(quota) and int(period):
        yield int(quota) / int(period)


def _levels(root: Path, controller: str) -> Iterator[Path]:
    """The cgroup folder of this process and those above it; controller "" is the one tree of version 2.

    A container often sees the host's name of its group and only its own group's files, at the top: folders
    that are not there are passed over on the way up.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controller not in controllers.split(","):
            continue
        # Version 1 mounts "cpu,cpuacct" under that name, sometimes under "cpu" alone.
        mounts = [root / "sys/fs/cgroup" / name for name in (controllers, controller)]
        mount = next((mount for mount in mounts if mount.is_dir()), mounts[0])
        parts = [part for part in PurePosixPath(group).parts if part not in ("/", "..")]
        yield from (mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1))


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdecimal() and int(text) > 0 else None


def _statistic(path: Path, name: str) -> int:
    rows = (line.split() for line in _text(path).splitlines())
    return next((int(row[1]) for row in rows if len(row) == 2 and row[0] == name and row[1].isdecimal()), 0)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _cores() -> int:
    if sys.platform == "linux":
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return cores


def _memlock_limit(root: Path) -> int | None:
    if sys.platform != "win32":
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if limit != resource.RLIM_INFINITY and not (os.geteuid() == 0 and _root_may_lock(root)):
            return limit
    return None


def _root_may_lock(root: Path) -> bool:
    """Root is above the limit by CAP_IPC_LOCK, which most containers take away."""
    rows = (line.split() for line in _text(root / "proc/self/status").splitlines())
    held = next((row[1] for row in rows if len(row) == 2 and row[0] == "CapEff:"), "")
    try:
        return bool(int(held, 16) & _CAP_IPC_LOCK)
    except ValueError:
        return True


def _os_name(root: Path) -> str:
    system, release = platform.system(), platform.release()
    if system == "Darwin":
        return f"macOS {platform.mac_ver()[0]}".strip()
    for line in _text(root / "etc/os-release").splitlines() if system == "Linux" else ():
        name, _, value = line.partition("=")
        if name == "PRETTY_NAME":
            return _unquoted(value) or f"{system} {release}"
    return f"{system} {release}".strip()


def _unquoted(value: str) -> str:
    try:
        return " ".join(shlex.split(value))
    except ValueError:
        return value.strip("\"' ")
