"""The runtimes of this package keep what the shipped contract asks of everybody's."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from looprun_models.registry import LocalModelSpec
from looprun_models.runtime import LlamaCppRuntime, ModelRuntimePort
from looprun_models.runtimes.external import ExternalRuntime
from looprun_models.settings import Settings, load_settings
from looprun_models.testing import LoopbackServer, RuntimeContract
from tests.helpers import free_port

THEIRS = "their-model"  # another served id, or the other runtime would find this server and share it
pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Of a user with a home of its own, where engines are only examined once."""
    folder = tmp_path_factory.mktemp("contract")
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "SYSTEMROOT") if name in os.environ}
    folders = {"LOOPRUN_STATE_DIR": str(folder / "state"), "LOOPRUN_CACHE_DIR": str(folder / "cache")}
    return load_settings({**kept, **folders, "HOME": str(folder), "OMP_WAIT_POLICY": "passive"})


@pytest.fixture(scope="module")
def tiny(tiny_gguf: Callable[[str], Path]) -> LocalModelSpec:
    file = tiny_gguf("tiny-qwen35")
    return LocalModelSpec(
        alias="contract-tiny",
        note="for tests",
        file=file.name,
        default_dir=str(file.parent),
        env_var="CONTRACT_TINY_GGUF",
        hf_repo="nobody/tiny",
        approx_size_gb=0.003,
        kv="q8_0",
        ctx=512,
        cache_ram_mib=64,
        served_id="contract-tiny-gguf",
    )


@pytest.fixture(scope="module")
def somebody_elses(settings: Settings, tiny: LocalModelSpec) -> Iterator[str]:
    """The address of a server that is used by others too."""
    spec = dataclasses.replace(tiny, port=free_port(), served_id=THEIRS)
    with LlamaCppRuntime(settings, keep_alive=0).ensure_server(spec) as lease:
        yield lease.base_url
        lease.stop()


class TestLlamaCpp(RuntimeContract):
    @pytest.fixture
    def spec(self, tiny: LocalModelSpec) -> LocalModelSpec:
        return dataclasses.replace(tiny, port=free_port())

    @pytest.fixture
    def runtime(self, settings: Settings, network: LoopbackServer) -> ModelRuntimePort:
        trapped = {name: value for name, value in os.environ.items() if value == network.url}
        return LlamaCppRuntime(dataclasses.replace(settings, environ={**settings.environ, **trapped}), keep_alive=0)


class TestExternal(RuntimeContract):
    starts = False

    @pytest.fixture
    def spec(self, tiny: LocalModelSpec) -> LocalModelSpec:
        return dataclasses.replace(tiny, served_id=THEIRS)

    @pytest.fixture
    def runtime(self, network: LoopbackServer, somebody_elses: str) -> ModelRuntimePort:
        return ExternalRuntime(somebody_elses)
