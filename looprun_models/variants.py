"""What kinds of official llama.cpp builds there are for a machine, and which one suits it.

Asks files only: a program that looks at GPUs can hang on a broken driver.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from looprun_models.engine import EMBEDDED
from looprun_models.errors import EngineMissing, UsageError
from looprun_models.settings import Settings

PLAIN = ("cpu", "metal")
"""Variants that a platform's ordinary build is; the folders of the others have them in their names."""
BUILDS: dict[tuple[str, str], dict[str, str]] = {
    ("linux", "x64"): {
        "cpu": r"ubuntu-x64",
        "vulkan": r"ubuntu-vulkan-x64",
        "cuda": r"ubuntu-cuda-(\d+\.\d+)-x64",
    },
    ("linux", "arm64"): {
        "cpu": r"ubuntu-arm64",
        "vulkan": r"ubuntu-vulkan-arm64",
        "cuda": r"ubuntu-cuda-(\d+\.\d+)-arm64",
    },
    ("macos", "arm64"): {"metal": r"macos-arm64"},
    ("macos", "x64"): {"cpu": r"macos-x64"},
    ("windows", "x64"): {"cpu": r"win-cpu-x64", "vulkan": r"win-vulkan-x64", "cuda": r"win-cuda-(\d+\.\d+)-x64"},
    ("windows", "arm64"): {"cpu": r"win-cpu-arm64"},
}
"""System and processor -> variant -> how its assets are called, as a pattern; a group is a CUDA version."""
NO_BUILD = f"build llama.cpp from source and set LLAMA_BIN to its llama-server, or try: {EMBEDDED}"

_SYSTEMS = {"linux": "linux", "darwin": "macos", "win32": "windows"}
_ARCHS = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64", "arm64": "arm64"}
_MANIFESTS = ("usr/share", "usr/local/share", "etc", "run/opengl-driver/share")
_LOADERS = ("usr/lib", "usr/lib64", "usr/lib/*-linux-gnu", "usr/local/lib", "lib", "lib64", "lib/*-linux-gnu")
_GPU_NODES = ("dev/dri/renderD*", "dev/nvidiactl", "dev/dxg")
_SOFTWARE = ("lvp_", "vk_swiftshader", "libvk_swiftshader")
"""Vulkan drivers that compute on the CPU, more slowly than the CPU build does."""


@dataclass(frozen=True, slots=True)
class Platform:
    """system is linux, macos or windows, arch x64 or arm64."""

    system: str
    arch: str

    @property
    def builds(self) -> dict[str, str]:
        return BUILDS[self.system, self.arch]

    def __str__(self) -> str:
        return f"{self.system} {self.arch}"


@dataclass(frozen=True, slots=True)
class Drivers:
    """Files that show what the machine can use; "" where there is none."""

    vulkan: str = ""
    loader: str = ""
    nvidia: str = ""


def this_platform() -> Platform:
    """Raises EngineMissing where there are no official builds."""
    found = _SYSTEMS.get(sys.platform, sys.platform), _ARCHS.get(platform.machine().lower(), platform.machine())
    if found not in BUILDS:
        raise EngineMissing(f"there is no official llama.cpp build for {' '.join(found)}.", hint=NO_BUILD)
    if found[0] == "linux" and not _has_glibc():
        raise EngineMissing(
            "the official llama.cpp builds need glibc, and this system has another C library (musl).", hint=NO_BUILD
        )
    return Platform(*found)


def find_drivers(here: Platform, settings: Settings, root: Path = Path("/")) -> Drivers:
    """What this machine has; on Windows root is the folder of the system, on others that of everything."""
    if here.system == "windows":
        folder = root / "System32"
        return Drivers(
            vulkan=_first(folder.glob("DriverStore/FileRepository/*/*v*k*.json")),
            loader=_first([folder / "vulkan-1.dll"]),
            nvidia=_first([folder / "nvcuda.dll"]),
        )
    if here.system != "linux" or not _first(node for pattern in _GPU_NODES for node in root.glob(pattern)):
        return Drivers()  # distributions install every Vulkan driver on machines without a GPU too
    folders = [root / place / "vulkan" / "icd.d" for place in _MANIFESTS]
    if settings.home:
        folders.append(settings.home / ".local" / "share" / "vulkan" / "icd.d")
    manifests = (path for folder in folders for path in sorted(folder.glob("*.json")))
    searched = [Path(path) for path in settings.environ.get("LD_LIBRARY_PATH", "").split(":") if path]
    places = [*searched, *(found for pattern in _LOADERS for found in root.glob(pattern))]
    return Drivers(
        vulkan=_first(path for path in manifests if not path.name.startswith(_SOFTWARE)),
        loader=_first(place / "libvulkan.so.1" for place in places),
        nvidia=_first([root / "proc/driver/nvidia/version", root / "dev/nvidiactl"]),
    )


def choose_variant(here: Platform, drivers: Drivers, asked: str | None = None) -> tuple[str, str]:
    """The variant and the reason for it, in words. Raises UsageError for one that there are no builds of."""
    if asked:
        if asked not in here.builds:
            has = ", ".join(here.builds)
            raise UsageError(
                f"there is no {asked} build of llama.cpp for {here}: there is {has}.", hint="leave --variant out"
            )
        unsure = ", which nobody of this project has run: experimental" if asked == "cuda" else ""
        return asked, f"you asked for it{unsure}"
    if "metal" in here.builds:
        return "metal", "Apple silicon has Metal"
    if "vulkan" in here.builds and drivers.vulkan and drivers.loader:
        return "vulkan", f"a Vulkan driver is here ({drivers.vulkan})"
    if "cuda" in here.builds and drivers.nvidia and not drivers.loader:
        return "cpu", (
            "an NVIDIA driver is here but no Vulkan loader; for the GPU install the loader (Debian: libvulkan1), "
            "or try the experimental --variant cuda"
        )
    return "cpu", "no GPU driver was found that the other builds could use" if len(here.builds) > 1 else "the only one"


def system_root(settings: Settings) -> Path:
    return Path(settings.environ.get("SYSTEMROOT", "C:/Windows")) if os.name == "nt" else Path("/")


def _has_glibc() -> bool:
    try:
        return bool(os.confstr("CS_GNU_LIBC_VERSION"))
    except (ValueError, OSError):
        return False


def _first(paths: Iterable[Path]) -> str:
    return next((str(path) for path in paths if path.exists()), "")
