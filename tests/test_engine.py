"""Finding a llama-server: the search order, why each candidate is passed over, and what is learned of the rest."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from looprun_models import engine as engine_module
from looprun_models.engine import Engine, Skipped, child_environ, devices, parse_build, parse_flags, system_config
from looprun_models.errors import EngineMissing
from looprun_models.search import examine, find_engine, search_engines
from looprun_models.settings import Settings, load_settings
from tests.engines import calls_of, make_engine

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the fake engines are scripts with a shebang")

RECIPE = {
    "-m", "--host", "--port", "--alias", "--jinja", "-fa", "-ngl", "-np", "-c", "-ctk", "-ctv", "-ctxcp", "--cache-ram",
    "--slot-save-path", "--spec-type", "--metrics", "--slots", "--cors-origins",
}  # fmt: skip
LEAKS = {
    "LLAMA_ARG_HOST": "0.0.0.0", "LLAMA_ARG_THREADS": "", "LLAMA_API_KEY": "x", "AIP_MODE": "PREDICTION",
    "LLAMA_SERVER_ROUTER_PORT": "1",
}  # fmt: skip
FIND_SPEC = importlib.util.find_spec


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No engine on PATH and no embedded one, unless a test puts it there."""
    monkeypatch.setenv("PATH", str(tmp_path / "path"))

    def find_spec(name: str, package: str | None = None) -> object:
        return None if name == "xllamacpp" else FIND_SPEC(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


def settings(**variables: str) -> Settings:
    return load_settings({**os.environ, **variables})


def good(path: Path, source: str = "LLAMA_BIN") -> Engine:
    verdict = examine(path, source, settings())
    assert isinstance(verdict, Engine), verdict
    return verdict


def why_not(path: Path) -> str:
    verdict = examine(path, "LLAMA_BIN", settings())
    assert isinstance(verdict, Skipped), verdict
    return verdict.why


class TestSearch:
    def test_llama_bin_comes_before_every_other_place(self, home: Path, tmp_path: Path) -> None:
        make_engine(home / "llamacpp-b11434")
        make_engine(tmp_path / "path")
        named = make_engine(tmp_path / "mine")
        found = find_engine(settings(LLAMA_BIN=str(named)))
        assert (found.path, found.source) == (named, "LLAMA_BIN")

    def test_a_folder_in_the_home_comes_before_path(self, home: Path, tmp_path: Path) -> None:
        on_path = make_engine(tmp_path / "path")
        at_home = make_engine(home / "llamacpp-b11434")
        found = [v for v in search_engines(settings()) if isinstance(v, Engine)]
        assert [(e.path, e.source) for e in found] == [(at_home, "~/llamacpp-b11434"), (on_path, "PATH")]

    @pytest.mark.parametrize("layout", ["bin", "build/bin", "."])
    def test_each_layout_of_a_folder_is_known(self, home: Path, layout: str) -> None:
        path = make_engine(home / "llamacpp-b10016" / layout)
        assert find_engine(settings()).path == path

    def test_bin_comes_before_build_bin_before_the_folder_itself(self, home: Path) -> None:
        folder = home / "llamacpp-b10016"
        paths = [make_engine(folder / layout) for layout in (".", "build/bin", "bin")]
        found = [v.path for v in search_engines(settings()) if isinstance(v, Engine)]
        assert found == paths[::-1]

    def test_folders_are_ordered_by_number_not_by_letters(self, home: Path) -> None:
        for name in ("llamacpp-9780", "llamacpp-b10016", "llamacpp-b9999"):
            make_engine(home / name)
        make_engine(home / "llamacpp-old", version="version: 9800 (abc)")
        make_engine(home / "llamacpp-new", version="version: 11000 (abc)")
        make_engine(home / "llamacpp-vendor", version="version: 0 (unknown)")
        found = [v.source for v in search_engines(settings()) if isinstance(v, Engine)]
        assert found == [
            "~/llamacpp-new", "~/llamacpp-b10016", "~/llamacpp-b9999", "~/llamacpp-old", "~/llamacpp-9780",
            "~/llamacpp-vendor",
        ]  # fmt: skip

    def test_a_broken_newest_folder_is_skipped_with_its_reason(self, home: Path) -> None:
        (home / "llamacpp-b12000").mkdir()
        make_engine(home / "llamacpp-b11000", version="version: 11000 (a)", version_exit=-signal.SIGILL)
        works = make_engine(home / "llamacpp-b10016")
        verdicts = list(search_engines(settings()))
        assert [str(v) for v in verdicts[:2]] == [
            f"{home}/llamacpp-b12000 (~/llamacpp-b12000): no llama-server in it, its bin/ or its build/bin/",
            f"{home}/llamacpp-b11000/llama-server (~/llamacpp-b11000): built for another CPU (killed by SIGILL)",
        ]
        assert find_engine(settings()).path == works

    def test_a_file_named_like_a_folder_is_not_looked_into(self, home: Path) -> None:
        (home / "llamacpp-b11434.tar.gz").write_bytes(b"")
        with pytest.raises(EngineMissing) as raised:
            find_engine(settings())
        assert "tar.gz" not in str(raised.value)

    def test_the_embedded_engine_is_the_last_one(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("xllamacpp")
        monkeypatch.setattr(importlib.util, "find_spec", FIND_SPEC)
        make_engine(home / "llamacpp-b10016")
        sources = [verdict.source for verdict in search_engines(settings())]
        assert sources == ["~/llamacpp-b10016", "PATH", "embedded"]
        embedded = list(search_engines(settings()))[-1]
        assert isinstance(embedded, Engine)
        assert embedded.command == (sys.executable, "-P", "-m", "looprun_models.embedded")
        assert embedded.embedded
        assert embedded.build is not None
        assert embedded.build >= 9780
        assert embedded.flags >= RECIPE
        assert embedded.has("--load-mode")

    def test_when_nothing_is_found_every_place_is_named_and_the_way_to_get_one(self, home: Path) -> None:
        make_engine(home / "llamacpp-b9000", version="version: 9000 (abc)")
        with pytest.raises(EngineMissing) as raised:
            find_engine(settings())
        old = home / "llamacpp-b9000" / "llama-server"
        assert str(raised.value).splitlines() == [
            "no usable llama-server was found.",
            f"  skipped {old} (~/llamacpp-b9000): build b9000 is older than b9780, the first that can run the profiles",
            "  skipped llama-server (PATH): not found there",
            '  skipped looprun_models.embedded (embedded): not installed (pip install "looprun-models[embedded]")',
            '  next: pip install "looprun-models[embedded]"   (or set LLAMA_BIN to a llama-server of build b9780 or '
            "later)",
        ]
        assert raised.value.exit_code == 4

    def test_a_bad_llama_bin_is_an_error_even_when_others_would_do(self, home: Path, tmp_path: Path) -> None:
        make_engine(home / "llamacpp-b11434")
        make_engine(tmp_path / "path")
        with pytest.raises(EngineMissing) as raised:
            find_engine(settings(LLAMA_BIN=str(tmp_path / "gone")))
        assert str(raised.value) == (
            f"LLAMA_BIN={tmp_path}/gone cannot be used: there is no such file.\n"
            "  next: point LLAMA_BIN at a llama-server, or unset it"
        )

    @pytest.mark.parametrize("form", ["~/my engine", '"~/my engine"', "'~/my engine'\r", "  ~/my engine \r\n"])
    def test_llama_bin_may_be_quoted_and_start_with_a_tilde(self, home: Path, form: str) -> None:
        path = make_engine(home, "my engine")
        assert find_engine(settings(LLAMA_BIN=form)).path == path

    def test_without_a_home_the_other_places_are_still_searched(self, tmp_path: Path) -> None:
        on_path = make_engine(tmp_path / "path")
        homeless = dataclasses.replace(settings(), home=None)
        assert find_engine(homeless).path == on_path


class TestSkipped:
    def test_missing(self, tmp_path: Path) -> None:
        assert why_not(tmp_path / "gone") == "there is no such file"

    def test_below_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        assert why_not(tmp_path / "file" / "llama-server") == "there is no such file"

    def test_a_dangling_link(self, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(tmp_path / "gone")
        assert why_not(tmp_path / "link") == "a link to nothing"

    def test_a_path_that_the_system_will_not_look_at(self, tmp_path: Path) -> None:
        assert why_not(tmp_path / ("x" * 5000)) == "it cannot be looked at (File name too long)"

    def test_a_folder_names_the_program_in_it(self, tmp_path: Path) -> None:
        assert why_not(tmp_path) == "a folder, not a program"
        inside = make_engine(tmp_path / "bin")
        assert why_not(tmp_path) == f"a folder, not a program (did you mean {inside}?)"

    def test_not_executable(self, tmp_path: Path) -> None:
        path = make_engine(tmp_path)
        path.chmod(0o644)
        assert why_not(path) == f"not executable (chmod +x {path})"

    @pytest.mark.parametrize("content", [b"\xcf\xfa\xed\xfe" + b"\0" * 60, b"garbage", b""])
    def test_another_architecture_or_no_program(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "llama-server"
        path.write_bytes(content)
        path.chmod(0o755)
        said = why_not(path)
        assert said.startswith("it cannot be run on this machine (Exec format error): wrong architecture")

    @pytest.mark.parametrize("build", [1000, 4321, 9779])
    def test_a_build_before_the_floor_is_refused_by_number(self, tmp_path: Path, build: int) -> None:
        path = make_engine(tmp_path, version=f"version: {build} (abc1234)")
        assert why_not(path) == f"build b{build} is older than b9780, the first that can run the profiles"

    @pytest.mark.parametrize(
        ("text", "library"),
        [
            ("x: error while loading shared libraries: libllama.so.1: cannot open shared object file", "libllama.so.1"),
            ("dyld[1]: Library not loaded: @rpath/libmtmd.dylib\n  Referenced from: x", "@rpath/libmtmd.dylib"),
        ],
    )
    def test_a_library_that_the_loader_misses_is_named(self, tmp_path: Path, text: str, library: str) -> None:
        path = make_engine(tmp_path, version=text, version_exit=127)
        assert why_not(path) == f"the loader cannot find the library {library}"

    def test_the_package_that_brings_libgomp_is_named(self, tmp_path: Path) -> None:
        text = "x: error while loading shared libraries: libgomp.so.1: cannot open shared object file"
        path = make_engine(tmp_path, version=text, version_exit=127)
        assert why_not(path) == ("the loader cannot find the library libgomp.so.1 (Debian: apt-get install libgomp1)")

    def test_a_build_for_another_cpu(self, tmp_path: Path) -> None:
        path = make_engine(tmp_path, version_exit=-signal.SIGILL)
        assert why_not(path) == "built for another CPU (killed by SIGILL)"

    def test_a_crash_says_how_and_when(self, tmp_path: Path) -> None:
        path = make_engine(tmp_path, version="first\nlast words", version_exit=-signal.SIGSEGV)
        assert why_not(path) == "it ended (killed by SIGSEGV) when asked for --version: last words"
        other = make_engine(tmp_path, "other", help_exit=3)
        assert why_not(other).startswith("it ended (exit code 3) when asked for --help")

    def test_a_program_that_is_something_else(self, tmp_path: Path) -> None:
        path = make_engine(tmp_path, help_drop=["-m", "-c"])
        assert why_not(path) == "it does not answer --help as llama-server does"

    def test_a_program_that_does_not_answer(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(engine_module, "PROBE_TIMEOUT", 0.2)
        path = tmp_path / "llama-server"
        path.write_text(f"#!{sys.executable} -IS\nimport signal\nsignal.pause()\n")
        path.chmod(0o755)
        assert why_not(path) == "it did not answer --version within 0.2 s"


class TestVersion:
    @pytest.mark.parametrize(
        ("line", "build"),
        [
            ("version: 9780 (abc1234)", 9780),
            ("version: 10005 (d)", 10005),
            ("version: b10217-ddd4ec", 10217),
            ("b10217-ddd4ec", 10217),
            ("version: 0.6.0-dev (build 11434, commit unknown)", 11434),
            ("version: xllamacpp 2026.10.11434 (build 11434, commit 1234567)", 11434),
            ("llama-server version: build b11434", 11434),
            ("11434", 11434),
            ("version: 0.1.0-dev (build 1, commit 7e4c0a9)", None),
            ("version: 0 (unknown)", None),
            ("version: 1 (9999999)", None),
            ("version: 0.6.0", None),
            ("", None),
        ],
    )
    def test_every_known_form(self, line: str, build: int | None) -> None:
        assert parse_build(line) == build

    @pytest.mark.parametrize("stream", ["stdout", "stderr"])
    @pytest.mark.parametrize("text", ["version: 11434 (a)\nbuilt with GNU 12.2.0 for Linux", "version: b11434-abc"])
    def test_either_stream(self, tmp_path: Path, stream: str, text: str) -> None:
        path = make_engine(tmp_path, version=text, version_stream="stdout" if stream == "stdout" else "stderr")
        assert good(path).build == 11434

    def test_what_libraries_say_first_is_not_taken_for_the_version(self, tmp_path: Path) -> None:
        path = make_engine(
            tmp_path,
            version="Device 0: NVIDIA, compute capability 8.9, VMM: yes, driver version 535.104\n"
            "load_backend: loaded CPU backend from /opt/llamacpp-b9000/libggml-cpu.so\n"
            "version: 11434 (abc1234)\nbuilt with GNU 12.2.0",
        )
        found = good(path)
        assert (found.version, found.build) == ("version: 11434 (abc1234)", 11434)

    @pytest.mark.parametrize("text", ["version: 0 (unknown)", "version: 0.1.0-dev (build 1, commit a)", "hello"])
    def test_a_vendors_build_without_a_number_is_allowed_with_a_note(self, tmp_path: Path, text: str) -> None:
        found = good(make_engine(tmp_path, version=text))
        assert found.build is None
        assert found.note == "its build number is unknown; its flags were checked instead"
        assert found.label == f"build unknown ({found.path})"

    def test_a_numbered_build_needs_no_note(self, tmp_path: Path) -> None:
        found = good(make_engine(tmp_path, version="version: 9780 (abc)"))
        assert (found.label, found.note) == (f"b9780 ({found.path})", "")


class TestHelp:
    def test_all_names_of_the_recipe_are_read(self, tmp_path: Path) -> None:
        found = good(make_engine(tmp_path))
        assert RECIPE | {"--ctx-checkpoints", "-cram", "--no-jinja", "--n-cpu-moe"} <= found.flags

    @pytest.mark.parametrize(
        ("dialect", "mlock", "load_mode"), [("old", True, False), ("deprecated", True, True), ("new", False, True)]
    )
    def test_each_dialect_of_locking(self, tmp_path: Path, dialect: str, mlock: bool, load_mode: bool) -> None:
        found = good(make_engine(tmp_path, dialect=dialect))  # type: ignore[arg-type]
        assert (found.has("--mlock"), found.has("--load-mode")) == (mlock, load_mode)

    def test_a_removed_flag_is_not_a_flag(self, tmp_path: Path) -> None:
        found = good(make_engine(tmp_path, help_removed=["--cors-origins"]))
        assert not found.flags & {"--draft", "--draft-max", "--cors-origins"}
        assert found.has("--spec-type")

    def test_words_of_a_description_are_not_flags(self) -> None:
        flags = parse_flags(
            "----- common params -----\n\n-a,    --alias STRING                   names, see --id\n"
            "                                        --not-a-flag\n--old, --older N                        the "
            "argument has\n                                        been removed. use --new\n-x\n"
        )
        assert flags == {"-a", "--alias", "-x"}

    def test_added_flags_are_seen(self, tmp_path: Path) -> None:
        found = good(make_engine(tmp_path, help_add=["-zz,   --zebra N                        stripes"]))
        assert found.has("--zebra", "--none")
        assert not found.has("--none")


class TestMemory:
    def test_a_program_is_asked_once_for_each_version_of_its_file(self, tmp_path: Path) -> None:
        calls = tmp_path / "calls"
        path = make_engine(tmp_path / "bin", calls=str(calls))
        first = good(path)
        engine_module._memory.cache_clear()  # as the next process
        assert good(path) == first
        assert [call["argv"] for call in calls_of(calls)] == [["--version"], ["--help"]]

    def test_a_changed_file_is_asked_again(self, tmp_path: Path) -> None:
        path = make_engine(tmp_path, version="version: 10000 (a)")
        before = good(path)
        make_engine(tmp_path, version="version: 11000 (ab)")
        after = good(path)
        assert (before.build, after.build) == (10000, 11000)
        assert before.identity != after.identity

    def test_a_touched_file_is_asked_again(self, tmp_path: Path) -> None:
        path = make_engine(tmp_path)
        before = good(path)
        os.utime(path, ns=(1, 1))
        assert good(path).identity != before.identity

    def test_a_candidate_that_was_broken_gets_another_chance(self, tmp_path: Path) -> None:
        path = make_engine(tmp_path, version_exit=1)
        why_not(path)
        stat = path.stat()
        make_engine(tmp_path, version_exit=0)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert path.stat().st_size == stat.st_size
        assert good(path).build == 11434

    def test_a_cache_that_cannot_be_written_costs_only_time(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        path = make_engine(tmp_path / "bin")
        for _ in range(2):
            found = find_engine(settings(LLAMA_BIN=str(path), LOOPRUN_CACHE_DIR=str(tmp_path / "file" / "cache")))
            assert found.path == path

    @pytest.mark.parametrize("content", ["{", "[]", '{"IDENTITY": {"version": 3}}', '{"IDENTITY": null}'])
    def test_a_damaged_cache_is_as_good_as_none(self, tmp_path: Path, content: str) -> None:
        path = make_engine(tmp_path)
        identity = good(path).identity
        cache = settings().cache_dir / "engines.json"
        assert identity in json.loads(cache.read_text())
        cache.write_text(content.replace("IDENTITY", identity))
        engine_module._memory.cache_clear()
        assert good(path).build == 11434


class TestChild:
    def test_variables_that_change_an_engine_do_not_reach_the_probes(self, tmp_path: Path) -> None:
        calls = tmp_path / "calls"
        path = make_engine(tmp_path / "bin", calls=str(calls))
        verdict = examine(path, "LLAMA_BIN", settings(**LEAKS, GGML_VULKAN_DEVICE="1"))
        assert isinstance(verdict, Engine)
        assert len(calls_of(calls)) == 2
        for call in calls_of(calls):
            assert not [name for name in call["env"] if name.startswith(("LLAMA_ARG_", "LLAMA_SERVER_", "AIP_"))]
            assert "LLAMA_API_KEY" not in call["env"]
            assert call["env"]["GGML_VULKAN_DEVICE"] == "1"
            assert call["cwd"] == "/"

    def test_what_was_kept_back_is_told(self) -> None:
        env, dropped = child_environ(settings(**LEAKS, LLAMA_CTX="4096"))
        assert dropped == tuple(sorted(LEAKS))
        assert env["LLAMA_CTX"] == "4096"
        assert env["GGML_NO_BACKTRACE"] == "1"

    def test_the_users_own_engine_config_is_out_of_reach(self, home: Path) -> None:
        env, _ = child_environ(settings(XDG_CONFIG_HOME=str(home / ".config")))
        assert not (Path(env["XDG_CONFIG_HOME"]) / "llama.cpp").exists()
        assert Path(env["XDG_CONFIG_HOME"]) != home / ".config"

    def test_a_machine_wide_engine_config_is_detected(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        exists: Callable[[Path], bool] = Path.exists
        monkeypatch.setattr(Path, "exists", lambda p: str(p) == "/etc/llama.cpp/config.ini" or exists(p))
        assert system_config(settings()) == Path("/etc/llama.cpp/config.ini")

    def test_a_link_is_executed_by_its_real_path(self, tmp_path: Path) -> None:
        calls = tmp_path / "calls"
        real = make_engine(tmp_path / "opt" / "llama", calls=str(calls))
        link = tmp_path / "llama-server"
        link.symlink_to(real)
        found = good(link)
        assert (found.path, found.command) == (real, (str(real),))
        assert {call["program"] for call in calls_of(calls)} == {str(real)}

    def test_the_programs_own_folder_helps_the_loader_only_when_it_must(self, tmp_path: Path) -> None:
        folder = tmp_path / "moved"
        path = make_engine(folder, needs_library_path=str(folder))
        found = good(path)
        assert found.library_path
        plain = good(make_engine(tmp_path / "plain"))
        assert not plain.library_path
        env, _ = child_environ(settings(LD_LIBRARY_PATH="/usr/local/cuda/lib64"), library_path=folder)
        if sys.platform == "linux":
            assert env["LD_LIBRARY_PATH"] == f"{folder}:/usr/local/cuda/lib64"
        env, _ = child_environ(settings())
        assert "LD_LIBRARY_PATH" not in env

    @pytest.mark.parametrize(
        ("before", "expected"),
        [("", "/opt/llama:/usr/local/lib:/usr/lib"), ("/mine", "/opt/llama:/mine:/usr/local/lib:/usr/lib")],
    )
    def test_macos_looks_in_the_programs_folder_then_in_the_others(
        self, monkeypatch: pytest.MonkeyPatch, before: str, expected: str
    ) -> None:
        monkeypatch.setattr(sys, "platform", "darwin")
        made = settings(DYLD_FALLBACK_LIBRARY_PATH=before)
        env, _ = child_environ(made, library_path=Path("/opt/llama"))
        assert env["DYLD_FALLBACK_LIBRARY_PATH"] == expected
        assert "LD_LIBRARY_PATH" not in env
        unchanged, _ = child_environ(made)
        assert unchanged["DYLD_FALLBACK_LIBRARY_PATH"] == before


class TestDevices:
    def test_gpus_are_read_and_processors_are_not(self, tmp_path: Path) -> None:
        lines = ["CUDA0: NVIDIA RTX 4060 (8188 MiB, 7900 MiB free)", "CPU: AMD EPYC (16000 MiB, 9000 MiB free)"]
        found = devices(good(make_engine(tmp_path, devices=lines)), settings())
        assert [(d.name, d.total, d.free) for d in found] == [("CUDA0: NVIDIA RTX 4060", 8188 << 20, 7900 << 20)]

    def test_a_processor_build_has_none(self, tmp_path: Path) -> None:
        assert devices(good(make_engine(tmp_path)), settings()) == ()

    def test_an_engine_that_cannot_say_has_none(self, tmp_path: Path) -> None:
        assert devices(good(make_engine(tmp_path, help_drop=["--list-devices"])), settings()) == ()
