"""An engine that is replaced or removed while its server runs: the server goes on, and `status` says what it runs."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from looprun_models.cli import app
from typer.testing import CliRunner

from looprun_models import engine as engine_module
from looprun_models.records import list_servers
from looprun_models.registry import resolve_alias
from looprun_models.runtime import LlamaCppRuntime
from looprun_models.settings import load_settings
from tests.engines import make_engine
from tests.helpers import free_port

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the fake engines are scripts with a shebang")

Profile = Callable[..., str]


def said(*words: str) -> str:
    """What a command prints; it must succeed."""
    done = CliRunner().invoke(app.app, words, prog_name="looprun")
    assert done.exit_code == 0, done.output
    return done.stdout


def renamed_over(path: Path) -> None:
    os.replace(make_engine(path.parent / "new", version="version: 12000 (a)"), path)


def removed_and_new(path: Path) -> None:
    path.unlink()
    make_engine(path.parent, version="version: 12000 (a)")


def library_replaced(path: Path) -> None:
    library = path.with_name("libllama.so.0")
    library.unlink()
    library.write_bytes(b"the new one")


def folder_removed(path: Path) -> None:
    shutil.rmtree(path.parent)


CHANGED = "runs an older program than the one on disk"
GONE = "runs a program that is no longer on the disk"


@pytest.mark.parametrize(
    ("change", "told", "fate"),
    [
        (renamed_over, CHANGED, ", or a library beside it, has changed"),
        (removed_and_new, CHANGED, ", or a library beside it, has changed"),
        (library_replaced, CHANGED, ", or a library beside it, has changed"),
        (folder_removed, GONE, " is gone"),
    ],
)
def test_a_server_goes_on_and_status_says_what_it_runs(
    profile: Profile, home: Path, change: Callable[[Path], None], told: str, fate: str
) -> None:
    engine = make_engine(home / "llamacpp-b11434", version="version: 11434 (a)")
    engine.with_name("libllama.so.0").write_bytes(b"engine")
    alias = profile()
    said("models", "serve", alias, "--detach", "--keep-alive", "900")
    (record,) = list_servers(load_settings())
    assert "on disk" not in said("models", "status") + said("models", "status", alias)
    assert json.loads(said("models", "status", alias, "--json"))["server"]["outdated"] == ""

    change(engine)
    outdated = f"{told}: b11434, as it was started; {engine}{fate}"
    fix = f"looprun models stop {alias}, then looprun models serve {alias}"
    lines = said("models", "status", alias).splitlines()
    assert lines[-4].startswith(f"  server   up       {record.base_url} serves {record.served_id}")
    assert lines[-2:] == [f"{' ' * 20}{outdated}", f"{' ' * 20}next: {fix}"]
    (row,) = [line for line in said("models", "status").splitlines() if record.base_url in line]
    assert row.endswith(f"; {told}")
    server = json.loads(said("models", "status", alias, "--json"))["server"]
    assert (server["up"], server["outdated"], server["fix"]) == (True, outdated, fix)

    assert [server.child_pid for server in list_servers(load_settings())] == [record.child_pid]
    said("models", "stop", alias)
    assert "on disk" not in said("models", "status", alias)


def test_the_embedded_engine_too(
    profile: Profile, tmp_path: Path, probed_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("xllamacpp")
    wrapper = Path(shutil.copy2(engine_module.WRAPPER, tmp_path / "embedded.py"))
    monkeypatch.setattr(engine_module, "WRAPPER", wrapper)
    alias = profile()
    said("models", "serve", alias, "--detach", "--keep-alive", "900")
    (record,) = list_servers(load_settings())
    assert "on disk" not in said("models", "status", alias)
    os.utime(wrapper, ns=(1, 1))
    assert f"{CHANGED}: b{record.build}, as it was started; {record.engine}, or a library" in said(
        "models", "status", alias
    )
    said("models", "stop", alias)


def test_a_newer_engine_beside_the_one_that_runs(profile: Profile, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLAMA_BIN", raising=False)
    old = make_engine(home / "llamacpp-b9800", version="version: 9800 (a)")
    alias = profile("tiny-qwen35", port=free_port())
    with LlamaCppRuntime().ensure_server(resolve_alias(alias)):
        assert "runs on" not in said("models", "status", alias)
        make_engine(home / "llamacpp-b11434", version="version: 11434 (a)")
        told = said("models", "status", alias)
        assert f"runs on b9800, while b11434 would be started now: {old}" in told
        assert f"next: looprun models stop {alias}, then looprun models serve {alias}" in told
        assert f"next: looprun models stop {alias}, then looprun models serve {alias}" in said("models", "status")
