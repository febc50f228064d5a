"""What the machine offers: the tightest of machine, cgroup and quota, on faked trees of files."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from looprun_models import machine as machine_module
from looprun_models.machine import Machine, disk_free, inspect_machine, recommend
from looprun_models.registry import LocalModelSpec

GB, GIB, MIB = 10**9, 1 << 30, 1 << 20
CGROUP = "sys/fs/cgroup"
UNLIMITED_V1 = "9223372036854771712"

PLAIN = Machine(
    system="Linux",
    os_name="Some Linux",
    arch="x86_64",
    cores=8,
    cpu_quota=None,
    ram_total=16 * GB,
    ram_available=12 * GB,
    ram_limited_by="machine",
    memlock_limit=None,
)

Tree = Callable[[Mapping[str, str]], Path]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    """A root folder with these files, on a machine of 32 GiB with 20 GiB available and 8 cores."""
    memory = SimpleNamespace(total=32 * GIB, available=20 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(machine_module, "_cores", lambda: 8)

    def write(files: Mapping[str, str]) -> Path:
        for name, content in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content + "\n", encoding="utf-8")
        return tmp_path

    return write


def version2(group: str, **files: str) -> dict[str, str]:
    """Files of one cgroup; `memory_max` is memory.max."""
    folder = f"{CGROUP}/{group}".rstrip("/")
    return {f"{folder}/{name.replace('_', '.')}": content for name, content in files.items()}


def test_this_machine() -> None:
    machine = inspect_machine()

    assert 0 < machine.ram_available <= machine.ram_total <= psutil.virtual_memory().total
    assert 1 <= machine.cores <= (os.cpu_count() or 1)
    assert machine.ram_limited_by in ("machine", "cgroup")
    assert machine.system
    assert machine.os_name
    assert machine.arch


def test_without_cgroup_files_the_machine_counts(tree: Tree) -> None:
    machine = inspect_machine(tree({}))

    assert (machine.ram_total, machine.ram_available) == (32 * GIB, 20 * GIB)
    assert (machine.ram_limited_by, machine.cpu_quota, machine.threads) == ("machine", None, None)


def test_container_of_version_2(tree: Tree) -> None:
    files = version2(
        "",
        memory_max=str(8 * GIB),
        memory_current=str(6 * GIB),
        memory_stat=f"anon 1\ninactive_file {2 * GIB}\nactive_file {GIB}",
        cpu_max="250000 100000",
    )
    machine = inspect_machine(tree({"proc/self/cgroup": "0::/"} | files))

    assert machine.ram_total == 8 * GIB
    assert machine.ram_available == 4 * GIB
    assert machine.ram_limited_by == "cgroup"
    assert machine.cpu_quota == 2.5
    assert machine.threads == 2


def test_every_level_above_the_process_counts(tree: Tree) -> None:
    files = (
        version2("a", memory_max=str(4 * GIB), memory_current=str(GIB), cpu_max="max 100000")
        | version2("a/b", memory_max="max", memory_current="5", cpu_max="150000 100000")
        | version2("a/b/c", memory_max=str(6 * GIB), memory_current=str(5 * GIB), cpu_max="400000 100000")
    )
    machine = inspect_machine(tree({"proc/self/cgroup": "0::/a/b/c"} | files))

    assert machine.ram_total == 4 * GIB
    assert machine.ram_available == GIB
    assert machine.cpu_quota == 1.5


def test_memory_high_limits_below_memory_max(tree: Tree) -> None:
    files = version2("", memory_max=str(8 * GIB), memory_high=str(3 * GIB), memory_current="0")

    assert inspect_machine(tree({"proc/self/cgroup": "0::/"} | files)).ram_total == 3 * GIB


def test_group_named_as_the_host_sees_it(tree: Tree) -> None:
    """In a container without its own cgroup namespace only the top folder is there."""
    files = version2("", memory_max=str(5 * GIB), memory_current="0")

    assert inspect_machine(tree({"proc/self/cgroup": "0::/docker/4f2a"} | files)).ram_total == 5 * GIB


def test_group_outside_the_namespace_does_not_leave_the_tree(tree: Tree) -> None:
    files = version2("a", memory_max=str(5 * GIB), memory_current="0")

    assert inspect_machine(tree({"proc/self/cgroup": "0::/../../../a"} | files)).ram_total == 5 * GIB


def test_limit_that_is_used_up_leaves_nothing(tree: Tree) -> None:
    files = version2("", memory_max=str(GIB), memory_current=str(GIB + MIB))

    assert inspect_machine(tree({"proc/self/cgroup": "0::/"} | files)).ram_available == 0


def test_limit_above_the_machine_is_none(tree: Tree) -> None:
    files = version2("", memory_max=str(64 * GIB), memory_current=str(GIB))
    machine = inspect_machine(tree({"proc/self/cgroup": "0::/"} | files))

    assert (machine.ram_total, machine.ram_available) == (32 * GIB, 20 * GIB)
    assert machine.ram_limited_by == "machine"


def test_container_of_version_1(tree: Tree) -> None:
    group = "docker/4f2a"
    files = {
        "proc/self/cgroup": f"5:memory:/{group}\n4:cpu,cpuacct:/{group}\n1:name=systemd:/{group}",
        f"{CGROUP}/memory/{group}/memory.limit_in_bytes": str(4 * GIB),
        f"{CGROUP}/memory/{group}/memory.usage_in_bytes": str(3 * GIB),
        f"{CGROUP}/memory/{group}/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB}",
        f"{CGROUP}/memory/memory.limit_in_bytes": UNLIMITED_V1,
        f"{CGROUP}/memory/memory.usage_in_bytes": str(9 * GIB),
        f"{CGROUP}/cpu,cpuacct/{group}/cpu.cfs_quota_us": "50000",
        f"{CGROUP}/cpu,cpuacct/{group}/cpu.cfs_period_us": "100000",
        f"{CGROUP}/cpu,cpuacct/cpu.cfs_quota_us": "-1",
        f"{CGROUP}/cpu,cpuacct/cpu.cfs_period_us": "100000",
    }
    machine = inspect_machine(tree(files))

    assert (machine.ram_total, machine.ram_available) == (4 * GIB, 2 * GIB)
    assert (machine.cpu_quota, machine.threads) == (0.5, 1)


def test_version_1_controllers_mounted_one_by_one(tree: Tree) -> None:
    files = {
        "proc/self/cgroup": "4:cpu,cpuacct:/",
        f"{CGROUP}/cpu/cpu.cfs_quota_us": "300000",
        f"{CGROUP}/cpu/cpu.cfs_period_us": "100000",
    }

    assert inspect_machine(tree(files)).cpu_quota == 3


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("memory.max", "lots"),
        ("memory.max", ""),
        ("memory.max", "-1"),
        ("memory.max", "0"),
        ("cpu.max", "100000"),
        ("cpu.max", "100000 0"),
        ("cpu.max", "fast slow"),
        ("memory.max/file", "a folder where a file should be"),
    ],
)
def test_odd_files_limit_nothing(tree: Tree, name: str, content: str) -> None:
    odd = {f"{CGROUP}/{name}": content, f"{CGROUP}/memory.stat": "inactive_file\n\ninactive_file many"}
    machine = inspect_machine(tree({"proc/self/cgroup": "nonsense\n0::/"} | odd))

    assert (machine.ram_total, machine.cpu_quota) == (32 * GIB, None)


@pytest.mark.parametrize(("quota", "threads"), [(None, None), (8.0, None), (9.5, None), (7.9, 7), (1.0, 1), (0.2, 1)])
def test_threads_follow_the_quota(quota: float | None, threads: int | None) -> None:
    assert replace(PLAIN, cpu_quota=quota).threads == threads


@pytest.mark.parametrize(
    ("system", "arch", "expected"),
    [("Darwin", "arm64", True), ("Darwin", "x86_64", False), ("Linux", "arm64", False)],
)
def test_apple_silicon(system: str, arch: str, expected: bool) -> None:
    assert replace(PLAIN, system=system, arch=arch).apple_silicon is expected


@pytest.mark.skipif(sys.platform != "linux", reason="affinity is a Linux matter")
def test_cores_are_those_this_process_may_use() -> None:
    program = (
        "import os; from looprun_models.machine import inspect_machine;"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); print(inspect_machine().cores)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert result.stdout.strip() == "1"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
@pytest.mark.parametrize(
    ("user", "capabilities", "limit"),
    [
        (1000, "CapEff:\t000001ffffffffff", 64 * 1024),
        (0, "CapEff:\t000001ffffffffff", None),
        (0, "CapEff:\t00000000a80425fb", 64 * 1024),
        (0, "nothing known", None),
        (0, "CapEff:\tnonsense", None),
    ],
    ids=["user", "root", "root of a container", "root without /proc", "odd"],
)
def test_memlock_limit(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, user: int, capabilities: str, limit: int | None
) -> None:
    import resource

    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64 * 1024, 128 * 1024) if which else None)

    assert inspect_machine(tree({"proc/self/status": f"Name:\tx\n{capabilities}"})).memlock_limit == limit


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
def test_memlock_without_limit(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    infinity = resource.RLIM_INFINITY
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (infinity, infinity))

    assert inspect_machine(tree({})).memlock_limit is None


@pytest.mark.parametrize(
    ("release", "expected"),
    [
        ('ID=x\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"', "Debian GNU/Linux 12 (bookworm)"),
        ("PRETTY_NAME=Alpine", "Alpine"),
        ("PRETTY_NAME=\"It's Linux", "It's Linux"),
        ('PRETTY_NAME=""', "Linux 6.1"),
        ("ID=x", "Linux 6.1"),
    ],
)
def test_linux_by_its_own_name(tree: Tree, monkeypatch: pytest.MonkeyPatch, release: str, expected: str) -> None:
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr("platform.release", lambda: "6.1")

    assert inspect_machine(tree({"etc/os-release": release})).os_name == expected


@pytest.mark.parametrize(("system", "expected"), [("Darwin", "macOS 15.1"), ("Windows", "Windows 11")])
def test_other_systems_by_their_names(tree: Tree, monkeypatch: pytest.MonkeyPatch, system: str, expected: str) -> None:
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("platform.release", lambda: "11")
    monkeypatch.setattr("platform.mac_ver", lambda: ("15.1", ("", "", ""), "arm64"))

    assert inspect_machine(tree({})).os_name == expected


def spec(alias: str, min_ram_gb: float, *, tier: bool = True) -> LocalModelSpec:
    given: dict[str, Any] = dict.fromkeys(("note", "default_dir", "env_var", "hf_repo"), "x")
    return LocalModelSpec(
        alias=alias,
        file="x.gguf",
        approx_size_gb=1,
        kv="f16",
        ctx=4096,
        cache_ram_mib=512,
        served_id=alias,
        min_ram_gb=min_ram_gb,
        tier=tier,
        **given,
    )


SPECS = [spec("ram24", 24), spec("ram8", 8), spec("ram32", 32), spec("ram16", 16), spec("plain", 12, tier=False)]


@pytest.mark.parametrize(
    ("ram", "alias"),
    [
        (25.2 * GB, "ram24"),
        (15.3 * GIB, "ram16"),
        (15.21 * GB, "ram16"),
        (15.19 * GB, "ram8"),
        (14 * GB, "ram8"),
        (31 * GIB, "ram32"),
        (512 * GIB, "ram32"),
        (7.6 * GB, "ram8"),
    ],
)
def test_largest_tier_that_fits(ram: float, alias: str) -> None:
    chosen, _ = recommend(SPECS, replace(PLAIN, ram_total=int(ram)))

    assert chosen is not None
    assert chosen.alias == alias


def test_reason_is_a_sentence_with_both_numbers() -> None:
    machine = replace(PLAIN, ram_total=int(25.2 * GB))

    assert recommend(SPECS, machine)[1] == "24 GB tier: this machine has 25.2 GB"
    limited = replace(machine, ram_limited_by="cgroup")
    assert recommend(SPECS, limited)[1] == "24 GB tier: this process may use 25.2 GB"


def test_machine_below_every_tier() -> None:
    assert recommend(SPECS, replace(PLAIN, ram_total=4 * GB)) == (
        None,
        "the smallest tier is for 8 GB and this machine has 4.0 GB",
    )
    assert recommend([spec("plain", 1, tier=False)], PLAIN) == (None, "no profile is a tier")


def test_disk_free_where_a_folder_will_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def usage(path: Path) -> SimpleNamespace:
        asked.append(path)
        if not path.exists():
            raise FileNotFoundError(path)
        return SimpleNamespace(free=123)

    monkeypatch.setattr("shutil.disk_usage", usage)

    assert disk_free(tmp_path / "models" / "new") == 123
    assert asked == [tmp_path / "models" / "new", tmp_path / "models", tmp_path]


def test_disk_free_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def usage(path: Path) -> None:
        raise FileNotFoundError(path)

    monkeypatch.setattr("shutil.disk_usage", usage)

    assert disk_free(Path("models")) == 0


def test_disk_free_is_a_real_number(tmp_path: Path) -> None:
    assert disk_free(tmp_path / "none" / "none") > 0


def test_psutil_is_loaded_only_to_look() -> None:
    program = "import sys, looprun_models.machine; print('psutil' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert result.stdout.strip() == "False"
