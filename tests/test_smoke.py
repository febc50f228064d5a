"""The smoke check: which engines serve, what is said of the others, and that nothing is started twice or left."""

from __future__ import annotations

import itertools
import json
import os
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import make_tiny_gguf
import pytest
from looprun_models.cli.app import app
from typer.testing import CliRunner

from looprun_models import smoke, verdicts
from looprun_models.engine import Engine
from looprun_models.search import examine, find_engine
from looprun_models.settings import Settings, load_settings
from looprun_models.smoke import MODEL, prove
from looprun_models.verdicts import Verdict, known_verdict
from tests.engines import Behaviour, calls_of, make_engine

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the fake engines are scripts with a shebang")


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where checks have their temporary files; empty again after each test."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture(autouse=True)
def nothing_left(scratch: Path) -> object:
    yield
    assert list(scratch.iterdir()) == []


def usable(path: Path, settings: Settings | None = None) -> Engine:
    found = examine(path, "test", settings or load_settings())
    assert isinstance(found, Engine), found
    return found


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(words))
    return done.exit_code, done.output


def test_the_model_is_what_the_script_writes_and_is_small(tmp_path: Path) -> None:
    assert make_tiny_gguf.write("smoke", tmp_path).read_bytes() == MODEL.read_bytes()
    assert MODEL.stat().st_size < 100_000


@pytest.mark.engine
def test_a_good_engine_serves_and_drafts() -> None:
    settings = load_settings()
    verdict = prove(find_engine(settings), settings, fresh=True)
    assert verdict.ok, verdict
    assert verdict.drafted
    assert verdict.seconds > 0
    assert str(verdict).startswith("serves (drafts; answered ")


BAD: list[tuple[Behaviour, str]] = [
    ({"check_exit": -4}, "it is built for another CPU (killed by SIGILL)"),
    ({"check_exit": -11}, "it ended by itself (killed by SIGSEGV)"),
    (
        {"check_exit": 127, "check_text": "llama-server: error while loading shared libraries: libx.so: cannot open"},
        "libx.so",
    ),
    ({"check_says": "!!!!!!!!"}, "it computes wrongly: it said '!!!!!!!!' instead of 'cdefghij'"),
    ({"check_drafts": 0}, "it lists draft-mtp and drafted no token"),
    ({"help_drop": ["--cache-ram"]}, "it lacks --cache-ram, which the recipe needs"),
]


@pytest.mark.parametrize(("faults", "why"), BAD)
def test_an_engine_that_cannot_serve_is_told_apart_and_remembered(tmp_path: Path, faults: Behaviour, why: str) -> None:
    settings, calls = load_settings(), tmp_path / "calls"
    behaviour: Behaviour = {**faults, "calls": str(calls)}
    engine = usable(make_engine(tmp_path / "e", **behaviour))
    assert known_verdict(engine, settings) is None
    verdict = prove(engine, settings)
    assert verdict.ok is False
    assert why in verdict.why
    assert str(engine.path) not in verdict.why
    before = len(calls_of(calls, checks=True))
    assert prove(engine, settings) == known_verdict(engine, settings) == verdict
    assert len(calls_of(calls, checks=True)) == before


def test_an_engine_without_drafts_is_not_asked_for_any(tmp_path: Path) -> None:
    engine = usable(make_engine(tmp_path / "e", calls=str(tmp_path / "calls"), help_removed=["--spec-type"]))
    verdict = prove(engine, load_settings())
    assert verdict.ok, verdict
    assert verdict.drafted is None
    assert str(verdict).startswith("serves (no drafts")


@pytest.mark.parametrize(("code", "text"), [(-9, ""), (-15, ""), (1, "E cudaMalloc failed: out of memory")])
def test_what_the_machine_did_is_not_held_against_the_engine(tmp_path: Path, code: int, text: str) -> None:
    settings = load_settings()
    engine = usable(make_engine(tmp_path / "e", check_exit=code, check_text=text))
    verdict = prove(engine, settings)
    assert verdict.ok is None
    assert str(verdict).startswith("not decided: ")
    known = known_verdict(engine, settings)
    assert known is not None
    assert known.ok is None


def test_it_runs_the_recipe_whatever_the_variables_say(tmp_path: Path) -> None:
    settings = load_settings(
        {**os.environ, "LLAMA_KV": "f16", "LLAMA_CTX": "9999", "LLAMA_SPEC_TYPE": "", "LLAMA_PORT": "1"}
    )
    engine = usable(make_engine(tmp_path / "e", calls=str(tmp_path / "calls")), settings)
    assert prove(engine, settings).ok
    argv = calls_of(tmp_path / "calls", checks=True)[-1]["argv"]
    flags = dict(itertools.pairwise(argv))
    assert (flags["-ctk"], flags["-ctv"], flags["--spec-type"], flags["-fa"]) == ("q8_0", "q8_0", "draft-mtp", "on")
    assert {"-ctxcp", "--cache-ram", "--slot-save-path", "--load-mode", "--metrics", "--slots"} <= set(argv)
    assert flags["-c"] == "512"
    assert int(flags["--port"]) > 1024


def test_another_program_or_another_cpu_is_checked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings()
    engine = usable(make_engine(tmp_path / "e", check_exit=-4))
    assert prove(engine, settings).ok is False
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(verdicts, "cpu_identity", lambda: "another")
        assert known_verdict(engine, settings) is None
    make_engine(tmp_path / "e", says="replaced by a good one")
    assert prove(usable(engine.path), settings).ok


def test_a_fresh_check_replaces_what_was_known(tmp_path: Path) -> None:
    settings = load_settings()
    engine = usable(make_engine(tmp_path / "e"))
    verdicts.keep_verdict(engine, settings, Verdict(False, "it was broken", checked=time.time()))
    assert prove(engine, settings).ok is False
    assert prove(engine, settings, fresh=True).ok
    verdicts._found_here.clear()  # as the next process
    assert prove(engine, settings).ok


@pytest.mark.parametrize("content", ["", "[]", "{", '{"%s": {"ok": false}}', '{"%s": 7}'])
def test_a_damaged_cache_means_nothing_is_known(tmp_path: Path, content: str) -> None:
    settings = load_settings()
    engine = usable(make_engine(tmp_path / "e"))
    settings.cache_dir.mkdir(parents=True, exist_ok=True)
    (settings.cache_dir / "verdicts.json").write_text(content.replace("%s", verdicts._key(engine)))
    assert known_verdict(engine, settings) is None
    assert prove(engine, settings).ok


def test_without_room_for_temporary_files_nothing_is_decided(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(scratch / "missing"))
    verdict = prove(usable(make_engine(tmp_path / "e")), load_settings())
    assert verdict.ok is None
    assert "No such file" in verdict.why


def test_a_check_that_meets_a_taken_port_takes_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(smoke, "PORTS", range(port, port + 1))
        assert prove(usable(make_engine(tmp_path / "e")), load_settings()).ok


# --- what a user sees -------------------------------------------------------------------------------------------------


@pytest.fixture
def two_engines(home: Path) -> tuple[Path, Path]:
    """In ~/llamacpp-b9967 one that answers --version and dies of SIGILL on load; in ~/llamacpp-b9800 a good one."""
    bad = make_engine(home / "llamacpp-b9967", version="version: 9967 (abc1234)", check_exit=-4, load_exit=-4)
    return bad, make_engine(home / "llamacpp-b9800", version="version: 9800 (abc1234)", says="from the good one")


def test_engine_list_says_why_the_first_is_not_used(two_engines: tuple[Path, Path]) -> None:
    bad, good = two_engines
    done = CliRunner().invoke(app, ["engine", "list"])
    assert done.exit_code == 0
    told = done.stdout
    first, second = told.index(str(bad)), told.index(str(good))
    assert first < second
    assert "built for another CPU (killed by SIGILL)" in told[first:second]
    assert f"* 2. {good}" in told
    assert "used: the first that serves" in told[second:]
    found = json.loads(run("engine", "list", "--json")[1])
    assert [entry["used"] for entry in found][:2] == [False, True]
    assert [entry["build"] for entry in found][:2] == [9967, 9800]
    assert found[0]["verdict"]["ok"] is False


@pytest.mark.parametrize("writable", [True, False])
def test_serve_takes_the_engine_that_serves(
    two_engines: tuple[Path, Path], profile: object, monkeypatch: pytest.MonkeyPatch, home: Path, writable: bool
) -> None:
    monkeypatch.delenv("LLAMA_BIN", raising=False)
    alias = profile("tiny-qwen35")  # type: ignore[operator]
    if not writable:
        cache = home / ".cache" / "looprun"
        for path in cache.iterdir():
            path.unlink()
        cache.rmdir()
        cache.write_text("a file where the folder should be")
    code, told = run("models", "ask", alias, "hello")
    assert code == 0, told
    assert "from the good one" in told


def test_llama_bin_is_never_passed_over(
    two_engines: tuple[Path, Path], profile: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_BIN", str(two_engines[0]))
    alias = profile("tiny-qwen35")  # type: ignore[operator]
    code, told = run("models", "serve", alias)
    assert code == 4
    assert f"LLAMA_BIN={two_engines[0]} cannot be used: it is built for another CPU (killed by SIGILL)." in told
    assert "next: " in told


def test_status_starts_nothing_and_says_what_was_not_checked(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = tmp_path / "calls"
    monkeypatch.setenv("LLAMA_BIN", str(make_engine(tmp_path / "e", calls=str(calls), check_exit=-4)))
    assert "not checked yet" in run("models", "status")[1]
    assert not [call for call in calls_of(calls, checks=True) if call["check"]]
    assert run("engine", "check")[0] == 4
    told = run("models", "status")[1]
    assert "built for another CPU" in told
    assert "not checked yet" not in told


def test_a_verdict_against_an_engine_does_not_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings()
    engine = usable(make_engine(tmp_path / "e"))
    verdicts.keep_verdict(engine, settings, Verdict(False, "a limit", checked=time.time() - 3500))
    assert prove(engine, settings).ok is False
    verdicts.keep_verdict(engine, settings, Verdict(False, "a limit", checked=time.time() - 3700))
    assert known_verdict(engine, settings) is None
    assert prove(engine, settings).ok


def test_one_that_serves_is_preferred_to_one_that_was_not_decided(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unclear = make_engine(home / "llamacpp-b9967", version="version: 9967 (abc1234)", check_exit=-9)
    good = make_engine(home / "llamacpp-b9800", version="version: 9800 (abc1234)")
    settings = load_settings()
    assert find_engine(settings).path == unclear, "nothing is known yet"
    assert find_engine(settings, prove).path == good
    assert find_engine(settings).path == good, "what was found out is remembered"
    told = run("engine", "list")[1]
    assert f"* 2. {good}" in told
    assert "not decided: it was killed" in told
    assert "not used: another one serves" in told
    monkeypatch.setenv("LLAMA_BIN", str(unclear))
    assert find_engine(load_settings(), prove).path == unclear, "there is no other"


def test_check_runs_again_whatever_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_BIN", str(make_engine(tmp_path / "e")))
    settings = load_settings()
    verdicts.keep_verdict(usable(tmp_path / "e" / "llama-server"), settings, Verdict(False, "x", checked=time.time()))
    assert "LLAMA_BIN" in run("models", "status")[1]
    assert run("engine", "check")[0] == 0
    assert "engine   ok" in run("models", "status")[1]


def test_what_killed_checks_left_is_removed(tmp_path: Path, scratch: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (scratch / f"looprun-check-{dead.pid}-x").mkdir()
    assert prove(usable(make_engine(tmp_path / "e")), load_settings()).ok


def test_caches_forget_programs_that_are_gone(tmp_path: Path) -> None:
    settings = load_settings()
    gone = usable(make_engine(tmp_path / "gone"))
    prove(gone, settings)
    gone.path.unlink()
    here = usable(make_engine(tmp_path / "here"))
    prove(here, settings)
    for cache in ("engines.json", "verdicts.json"):
        known = json.loads((settings.cache_dir / cache).read_text())
        assert not [name for name in known if name.startswith(str(gone.path))], cache
        assert [name for name in known if name.startswith(str(here.path))], cache


def test_engine_check_of_a_path(tmp_path: Path) -> None:
    code, told = run("engine", "check", str(make_engine(tmp_path / "e")))
    assert code == 0
    assert "serves (drafts" in told
    code, told = run("engine", "check", str(make_engine(tmp_path / "f", check_says="x")))
    assert code == 4
    assert "computes wrongly" in told
    assert "next: looprun engine install" in told
    code, told = run("engine", "check", str(make_engine(tmp_path / "g", check_exit=-9)))
    assert code == 3
    assert "not decided: it was killed" in told
    code, told = run("engine", "check", str(tmp_path / "none"))
    assert code == 4
    assert "there is no such file" in told


def test_the_model_is_readable_by_everybody() -> None:
    assert stat.S_IMODE(MODEL.stat().st_mode) & 0o444 == 0o444
