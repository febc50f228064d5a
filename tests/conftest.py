"""Every test starts from a clean environment in an empty home, and must leave no process behind."""

from __future__ import annotations

import importlib.util
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

REPO = Path(__file__).parent.parent
sys.path.insert(0, str(REPO / "scripts"))

import make_tiny_gguf  # noqa: E402  (a script, not a package)

from looprun_models.search import find_engine  # noqa: E402
from looprun_models.settings import load_settings  # noqa: E402
from looprun_models.smoke import prove  # noqa: E402
from tests.helpers import free_port  # noqa: E402

SCRIPT = Path(make_tiny_gguf.__file__)
TINY = REPO / ".cache" / f"tiny-{zlib.crc32(SCRIPT.read_bytes()):08x}"
OURS = ("LLAMA_", "LOOPRUN_", "OPENAI_", "HF_", "XDG_", "AIP_", "HUGGING", "QWEN", "SMOLLM2")
ENGINE = os.environ.get("LOOPRUN_TEST_ENGINE")
"""A llama-server to run the real-engine tests on, instead of the embedded engine."""
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


@pytest.fixture(scope="session")
def probed_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is learned of the embedded engine, once: asking it again in every empty home would be most of the time."""
    folder = tmp_path_factory.mktemp("known")
    settings = load_settings({"HOME": str(folder), "LOOPRUN_CACHE_DIR": str(folder), "PATH": ""})
    assert prove(find_engine(settings), settings).ok
    return folder


@pytest.fixture(autouse=True)
def home(tmp_path: Path, probed_engine: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty home; servers end with their last user unless a test says otherwise."""
    for name in list(os.environ):
        if name.startswith(OURS) or name.upper() in PROXIES:
            monkeypatch.delenv(name)
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    cache = folder / ".cache" / "looprun"
    cache.mkdir(parents=True)
    for known in ("engines.json", "verdicts.json"):
        (cache / known).write_bytes((probed_engine / known).read_bytes())
    monkeypatch.setenv("LOOPRUN_KEEP_ALIVE", "0")
    if ENGINE:
        monkeypatch.setenv("LLAMA_BIN", ENGINE)
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")  # spinning threads starve each other when engines share two cores
    yield folder
    _, left = psutil.wait_procs(processes_of(folder), timeout=15)  # a server ends a moment after its last user
    for process in left:
        process.kill()
    assert not left, f"the test left processes behind: {left}"


def processes_of(home: Path) -> list[psutil.Process]:
    """Supervisors and engines that run in a home (both have its state folder as working directory)."""
    found = []
    for process in psutil.process_iter():
        try:
            if (
                process.cwd().startswith(str(home))
                and process.status() != psutil.STATUS_ZOMBIE
                and process.pid != os.getpid()
            ):
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No engine on PATH and no embedded one, unless a test puts it into the folder `path`."""
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: find_spec(name, *more) if name != "xllamacpp" else None
    )


@pytest.fixture(scope="session")
def tiny_gguf() -> Callable[[str], Path]:
    """`tiny_gguf("tiny-qwen35-mtp")` is the path of that file, written once into the repo's cache folder."""

    def path(name: str) -> Path:
        return make_tiny_gguf.write(name, TINY)

    return path


@pytest.fixture
def profile(home: Path, tiny_gguf: Callable[[str], Path]) -> Callable[..., str]:
    """`profile("tiny-qwen35-mtp", kv="q8_0")` adds a user profile for that file and gives its alias."""

    def add(name: str = "tiny-qwen35-mtp", *, alias: str | None = None, **changed: object) -> str:
        file = tiny_gguf(name)
        values: dict[str, object] = {
            "alias": alias or name,
            "note": "for tests",
            "file": file.name,
            "default_dir": str(file.parent),
            "env_var": "TINY_GGUF",
            "hf_repo": "nobody/tiny",
            "approx_size_gb": 0.003,
            "kv": "q8_0",
            "ctx": 4096,
            "cache_ram_mib": 384,
            "served_id": f"{name}-gguf",
            "port": free_port(),
            "engine_flags": ["-t", "1", "-tb", "1"],  # two engines with two threads each starve each other here
            **({"spec_type": "draft-mtp"} if "mtp" in name else {}),
            **changed,
        }
        folder = home / ".config" / "looprun" / "profiles"
        folder.mkdir(parents=True, exist_ok=True)
        lines = [f"{key} = {_toml(value)}" for key, value in values.items()]
        (folder / f"{values['alias']}.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")
        return str(values["alias"])

    return add


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)
