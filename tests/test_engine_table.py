"""The table of scripts/test-engines, made of what pytest wrote about each engine, and what the script itself says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_table import table

SCRIPTS = Path(__file__).parent.parent / "scripts"
PROPERTIES = """
import os, pytest
broken = os.environ.get("BROKEN")

def test_stop_while_a_stream_is_read(record_property):
    record_property("value", "3.0 s")
    assert not broken

@pytest.mark.parametrize("model", ["dense", "hybrid"])
def test_drafts_are_accepted(model):
    pass

@pytest.mark.skipif(bool(broken), reason="not here")
def test_locked_in_RAM():
    pass
"""
SUITE = """
import os, pytest

@pytest.fixture
def home():
    yield
    assert not os.environ.get("BROKEN")

class TestOne:
    def test_a(self, home):
        assert not os.environ.get("BROKEN")

class TestTwo:
    def test_a(self):
        pass
"""


@pytest.fixture
def results(tmp_path: Path) -> Callable[..., str]:
    """`results("b1")` is the file of a run on an engine; `broken=True` of one where tests fail."""
    (tmp_path / "tests" / "real").mkdir(parents=True)
    (tmp_path / "tests" / "real" / "test_properties.py").write_text(PROPERTIES)
    (tmp_path / "tests" / "test_servers.py").write_text(SUITE)

    def run(name: str, *, broken: bool = False) -> str:
        file = tmp_path / f"{name}.xml"
        words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "junit_family=xunit1", f"--junitxml={file}"]
        environ = {**os.environ, "BROKEN": "yes" * broken}
        done = subprocess.run([sys.executable, *words, "tests"], cwd=tmp_path, env=environ, capture_output=True)
        assert done.returncode == broken
        return str(file)

    return run


def test_each_property_is_a_row_and_each_suite_is_one(results: Callable[..., str]) -> None:
    assert table({"b1": results("b1"), "b2": results("b2", broken=True), "b3": ""}).splitlines() == [
        "|  | b1 | b2 | b3 |",
        "| --- | --- | --- | --- |",
        "| stop while a stream is read | 3.0 s | FAILED | MISSING |",
        "| drafts are accepted (dense) | yes | yes | MISSING |",
        "| drafts are accepted (hybrid) | yes | yes | MISSING |",
        "| locked in RAM | yes | skipped | MISSING |",
        "| `tests/test_servers.py` | 2 passed | 1 FAILED, 1 passed | MISSING |",
    ]


def test_a_run_that_ended_before_its_results_has_failed(results: Callable[..., str], tmp_path: Path) -> None:
    cut = tmp_path / "cut.xml"
    cut.write_bytes(Path(results("b1")).read_bytes()[:-20])
    for file in (str(cut), str(tmp_path / "none.xml")):
        assert "| stop while a stream is read | 3.0 s | FAILED |" in table({"b1": results("b1"), "b2": file})


def run_script(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "LOOPRUN_ENGINES_DIR": str(folder)}
    return subprocess.run([SCRIPTS / "test-engines", *words], env=environ, capture_output=True, text=True, check=False)


@pytest.mark.skipif(os.name == "nt", reason="a bash script")
@pytest.mark.parametrize("stamp", ["", "of another CPU"])
def test_an_engine_that_is_not_there_is_missing_and_no_pass(tmp_path: Path, stamp: str) -> None:
    if stamp:
        program = tmp_path / "b9780" / "bin" / "llama-server"
        program.parent.mkdir(parents=True)
        program.touch(mode=0o755)
        (tmp_path / "b9780" / "cpu").write_text(stamp)
    done = run_script(tmp_path, "--no-build", "b9780")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "| every property | MISSING |"
    assert ("built for another CPU" if stamp else "no ") in done.stderr
    assert str(tmp_path / "b9780") in done.stderr


@pytest.mark.skipif(os.name == "nt", reason="a bash script")
def test_a_build_that_cannot_be_made_is_a_failure_and_touches_nothing(tmp_path: Path) -> None:
    theirs = tmp_path / "b9780"
    theirs.mkdir()
    done = run_script(tmp_path, "b9780")
    assert done.returncode == 1
    assert f"{theirs} is there, but has no bin/llama-server" in done.stderr
    assert done.stdout.splitlines()[-1] == "| every property | MISSING |"
    assert not [*theirs.iterdir(), *tmp_path.glob(".*")]


@pytest.mark.skipif(os.name == "nt", reason="a bash script")
def test_an_unknown_word_is_refused(tmp_path: Path) -> None:
    assert run_script(tmp_path, "9780").returncode == 2
