"""Finding a llama-server: the search order, every layout, and the reason why a candidate is passed over."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from looprun_models import probe
from looprun_models.engine import Engine
from looprun_models.errors import EngineMissing
from looprun_models.search import INSTALL_HINT, find_engine, search_engines
from tests.engines import good, make_engine, settings_with, why_not

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="the fake engines are scripts with a shebang"),
    pytest.mark.usefixtures("nothing_installed"),
]
FIND_SPEC = importlib.util.find_spec
PATH = os.environ["PATH"]
COMPILER = shutil.which("cc")
UNKNOWN = "its build number is unknown; its flags were checked instead"
LAYOUTS = ("bin", "build/bin", "build/bin/Release", ".", "llama-b10016", "llama-b9780")


def engines() -> list[Engine]:
    """Every usable engine, in search order."""
    return [found for found in search_engines(settings_with()) if isinstance(found, Engine)]


class TestSingleProgram:
    """`llama serve` is the server."""

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_it_is_found_in_a_folder(self, home: Path, layout: str) -> None:
        path = make_engine(home / "llamacpp-b11434" / layout, "llama", single=True)
        found = find_engine(settings_with())
        assert (found.path, found.command, found.build) == (path, (str(path), "serve"), 11434)
        assert found.has("--model")

    def test_llama_server_wins_in_the_same_place_only(self, home: Path, tmp_path: Path) -> None:
        for folder in (home / "llamacpp-b11434", tmp_path / "path"):
            make_engine(folder, "llama", single=True)
            make_engine(folder)
        other = make_engine(home / "llamacpp-b11434" / "bin", "llama", single=True)
        beside = home / "llamacpp-b11434" / "llama-server"
        assert [engine.path for engine in engines()] == [other, beside, tmp_path / "path" / "llama-server"]

    def test_on_path(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        single = make_engine(tmp_path / "path", "llama", single=True)
        found = find_engine(settings_with())
        assert (found.source, found.command) == ("PATH", (str(single), "serve"))
        old = make_engine(tmp_path / "old", version="version: 9000 (abc)")
        monkeypatch.setenv("PATH", f"{old.parent}:{single.parent}")
        assert find_engine(settings_with()).path == single, "in another folder than the llama-server that will not do"

    @pytest.mark.parametrize(("link", "real"), [("llama", "llama-b1"), ("llama-server", "llama"), ("x", "llama")])
    def test_as_llama_bin_and_through_links(self, tmp_path: Path, link: str, real: str) -> None:
        path = make_engine(tmp_path / "opt", real, single=True)
        (tmp_path / link).symlink_to(path)
        assert good(tmp_path / link).command == (str(path), "serve")

    def test_a_link_of_that_name_to_a_llama_server_is_a_llama_server(self, tmp_path: Path) -> None:
        path = make_engine(tmp_path / "opt")
        (tmp_path / "llama").symlink_to(path)
        assert good(tmp_path / "llama").command == (str(path),)

    def test_another_program_of_that_name_is_passed_over_with_its_own_words(self, home: Path, tmp_path: Path) -> None:
        """An old `main` of llama.cpp; a script with commands of its own; one that takes everything."""
        old = make_engine(home / "llamacpp-old", "llama")
        script = home / "llamacpp-x" / "llama"
        script.parent.mkdir()
        script.write_text(
            "#!/bin/sh\necho \"usage: llama [-h] {model,download}\nllama: error: invalid choice: '$1'\" >&2; exit 2"
        )
        script.chmod(0o755)
        polite = tmp_path / "path" / "llama"
        polite.parent.mkdir()
        polite.write_text("#!/bin/sh\necho hello")
        polite.chmod(0o755)
        with pytest.raises(EngineMissing) as raised:
            find_engine(settings_with())
        assert str(raised.value).splitlines()[1:4] == [
            f"  skipped {script} (~/llamacpp-x): it ended (exit code 2) when asked for --version: "
            "llama: error: invalid choice: 'serve'; another program of that name?",
            f"  skipped {old} (~/llamacpp-old): it ended (exit code 1) when asked for --version: "
            "error: unknown command 'serve'; another program of that name?",
            f"  skipped {polite} (PATH): it does not answer --help as llama-server does",
        ]

    def test_a_broken_one_is_told_from_another_program(self, tmp_path: Path) -> None:
        path = make_engine(tmp_path, "llama", single=True, version_exit=-signal.SIGILL)
        assert why_not(path) == "built for another CPU (killed by SIGILL)"


class TestSearch:
    def test_llama_bin_comes_before_every_other_place(self, home: Path, tmp_path: Path) -> None:
        make_engine(home / "llamacpp-b11434")
        make_engine(tmp_path / "path")
        named = make_engine(tmp_path / "mine")
        found = find_engine(settings_with(LLAMA_BIN=str(named)))
        assert (found.path, found.source) == (named, "LLAMA_BIN")

    def test_a_folder_in_the_home_comes_before_path(self, home: Path, tmp_path: Path) -> None:
        on_path = make_engine(tmp_path / "path")
        at_home = make_engine(home / "llamacpp-b11434")
        found = engines()
        assert [(e.path, e.source) for e in found] == [(at_home, "~/llamacpp-b11434"), (on_path, "PATH")]

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("folder", ["llamacpp-b10016", "llama.cpp"])
    def test_each_layout_of_a_folder_is_known(self, home: Path, folder: str, layout: str) -> None:
        path = make_engine(home / folder / layout)
        found = find_engine(settings_with())
        assert (found.path, found.source, found.command) == (path, f"~/{folder}", (str(path),))

    def test_the_layouts_of_a_folder_have_an_order(self, home: Path) -> None:
        folder = home / "llamacpp-b10016"
        paths = [make_engine(folder / layout) for layout in reversed(LAYOUTS)]
        assert [engine.path for engine in engines()] == paths[::-1]

    def test_a_source_build_comes_after_the_installed_folders_and_before_path(self, home: Path, tmp_path: Path) -> None:
        for place in (tmp_path / "path", home / "llama.cpp" / "build" / "bin", home / "llamacpp-vendor"):
            make_engine(place, version="version: 0 (unknown)")
        assert [engine.source for engine in engines()] == ["~/llamacpp-vendor", "~/llama.cpp", "PATH"]

    def test_a_folder_that_is_named_by_a_date_is_asked_for_its_build(self, home: Path) -> None:
        make_engine(home / "llamacpp-2026-10-01", version="version: 11434 (abc)")
        make_engine(home / "llamacpp-20261002", version="version: 11433 (abc)")
        make_engine(home / "llamacpp-b11000")
        assert [engine.source[-5:] for engine in engines()] == ["10-01", "61002", "11000"]

    def test_a_folder_that_cannot_be_entered_hides_no_other(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        works = make_engine(home / "llamacpp-b10016")
        (home / "llamacpp-b12000").mkdir()
        (home / "llamacpp-loop").symlink_to(home / "llamacpp-loop")
        may = os.access
        monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith("b12000") and may(path, mode))
        first = next(iter(search_engines(settings_with())))
        assert str(first) == f"{home}/llamacpp-b12000 (~/llamacpp-b12000): it cannot be looked into"
        assert find_engine(settings_with()).path == works

    def test_folders_are_ordered_by_number_not_by_letters(self, home: Path) -> None:
        for name in ("llamacpp-9780", "llamacpp-b10016", "llamacpp-b9999"):
            make_engine(home / name)
        make_engine(home / "llamacpp-old", version="version: 9800 (abc)")
        make_engine(home / "llamacpp-new", version="version: 11000 (abc)")
        make_engine(home / "llamacpp-vendor", version="version: 0 (unknown)")
        found = [v.source for v in search_engines(settings_with()) if isinstance(v, Engine)]
        assert found == [
            "~/llamacpp-new", "~/llamacpp-b10016", "~/llamacpp-b9999", "~/llamacpp-old", "~/llamacpp-9780",
            "~/llamacpp-vendor",
        ]  # fmt: skip

    def test_a_broken_newest_folder_is_skipped_with_its_reason(self, home: Path) -> None:
        (home / "llamacpp-b12000").mkdir()
        make_engine(home / "llamacpp-b11000", version="version: 11000 (a)", version_exit=-signal.SIGILL)
        works = make_engine(home / "llamacpp-b10016")
        verdicts = list(search_engines(settings_with()))
        assert [str(v) for v in verdicts[:2]] == [
            f"{home}/llamacpp-b12000 (~/llamacpp-b12000): no llama-server in it, its bin/ or its build/bin/",
            f"{home}/llamacpp-b11000/llama-server (~/llamacpp-b11000): built for another CPU (killed by SIGILL)",
        ]
        assert find_engine(settings_with()).path == works

    def test_a_file_named_like_a_folder_is_not_looked_into(self, home: Path) -> None:
        (home / "llamacpp-b11434.tar.gz").write_bytes(b"")
        with pytest.raises(EngineMissing) as raised:
            find_engine(settings_with())
        assert "tar.gz" not in str(raised.value)

    def test_the_embedded_engine_is_the_last_one(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("xllamacpp")
        monkeypatch.setattr(importlib.util, "find_spec", FIND_SPEC)
        make_engine(home / "llamacpp-b10016")
        sources = [verdict.source for verdict in search_engines(settings_with())]
        assert sources == ["~/llamacpp-b10016", "PATH", "embedded"]
        embedded = list(search_engines(settings_with()))[-1]
        assert isinstance(embedded, Engine)
        assert embedded.command == (sys.executable, "-P", "-m", "looprun_models.embedded")
        assert embedded.embedded
        assert embedded.build is not None
        assert embedded.build >= 9780
        assert embedded.has("--spec-type", "-ctxcp")
        assert embedded.has("--load-mode")

    def test_when_nothing_is_found_every_place_is_named_and_the_way_to_get_one(self, home: Path) -> None:
        make_engine(home / "llamacpp-b9000", version="version: 9000 (abc)")
        with pytest.raises(EngineMissing) as raised:
            find_engine(settings_with())
        old = home / "llamacpp-b9000" / "llama-server"
        assert str(raised.value).splitlines() == [
            "no usable llama-server was found.",
            f"  skipped {old} (~/llamacpp-b9000): build b9000 is older than b9780, the first that can run the profiles",
            "  skipped llama-server (PATH): not found there",
            '  skipped looprun_models.embedded (embedded): not installed (pip install "looprun-models[embedded]")',
            f"  next: {INSTALL_HINT}",
        ]
        assert raised.value.exit_code == 4

    def test_a_bad_llama_bin_is_an_error_even_when_others_would_do(self, home: Path, tmp_path: Path) -> None:
        make_engine(home / "llamacpp-b11434")
        make_engine(tmp_path / "path")
        with pytest.raises(EngineMissing) as raised:
            find_engine(settings_with(LLAMA_BIN=str(tmp_path / "gone")))
        assert str(raised.value) == (
            f"LLAMA_BIN={tmp_path}/gone cannot be used: there is no such file.\n"
            "  next: point LLAMA_BIN at a llama-server, or unset it"
        )

    @pytest.mark.parametrize("form", ["~/my engine", '"~/my engine"', "'~/my engine'\r", "  ~/my engine \r\n"])
    def test_llama_bin_may_be_quoted_and_start_with_a_tilde(self, home: Path, form: str) -> None:
        path = make_engine(home, "my engine")
        assert find_engine(settings_with(LLAMA_BIN=form)).path == path

    def test_without_a_home_the_other_places_are_still_searched(self, tmp_path: Path) -> None:
        on_path = make_engine(tmp_path / "path")
        homeless = dataclasses.replace(settings_with(), home=None)
        assert find_engine(homeless).path == on_path


VERSIONS = {
    "old": ("version: 9780 (abc1234)\nbuilt with GNU 12.2.0", 9780),
    "five digits": ("version: 10005 (d)\nbuilt with GNU 12.2.0", 10005),
    "semantic": ("version: 0.6.0-dev (build 11434, commit unknown)", 11434),
    "semantic, changed tree": ("version: 0.6.0-dev-dirty (build 11434, commit abc-dirty)", 11434),
    "tag only": ("b10217-ddd4ec", 10217),
    "tag after a word": ("llama-server version: build b11434", 11434),
    "with a v": ("version: v11434 (abc)", 11434),
    "a v, no word": ("llama-server v11434", 11434),
    "number only": ("11434", 11434),
    "no commit": ("version: 11434", 11434),
    "carriage returns": ("version: 11434 (abc)\r\nbuilt with MSVC\r", 11434),
    "colours": ("\x1b[1;32mversion: 11434 (abc)\x1b[0m\nbuilt with GNU", 11434),
    "libraries first": (
        "ggml_cuda_init: driver version 535.104\nload_backend: loaded CPU from /opt/llama-b9000/libggml-cpu.so\n"
        "version: 11434 (abc)",
        11434,
    ),
    "libraries first, other shape": ("ggml_cuda_init: driver version 535.104\nllama version: build b11434", 11434),
    "vendor's 0": ("version: 0 (unknown)", None),
    "vendor's 1": ("version: 0.1.0-dev (build 1, commit 7e4c0a9)", None),
    "unknown": ("version: unknown (build 0, commit unknown)", None),
    "counted in another repository": ("version: 0.6.0-dev (build 2500, commit 7e4c0a9)", None),
    "no number": ("version: 0.6.0", None),
    "a date": ("version: 2026.10.1", None),
    "nothing": ("", None),
}


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("name", VERSIONS)
def test_every_form_of_version_gets_its_verdict(tmp_path: Path, name: str, stream: Literal["stdout", "stderr"]) -> None:
    """A build that is not known is no reason to refuse: its flags were read."""
    text, build = VERSIONS[name]
    found = good(make_engine(tmp_path, version=text, version_stream=stream))
    assert (found.build, found.note) == (build, "" if build else UNKNOWN)


def foreign(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    path.chmod(0o755)


def broken(path: Path, text: str, mode: int = 0o755) -> None:
    path.write_text(text)
    path.chmod(mode)


LIBRARY = "llama-server: error while loading shared libraries: libllama-server-impl.so: cannot open shared object file"
GOMP = LIBRARY.replace("libllama-server-impl.so", "libgomp.so.1")
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "gone": (lambda path: None, "there is no such file"),
    "a folder": (lambda path: path.mkdir(), "a folder, not a program"),
    "a folder with the program in it": (
        lambda path: make_engine(path / "build" / "bin"),
        "a folder, not a program (did you mean {path}/build/bin/llama-server?)",
    ),
    "not executable": (lambda path: broken(path, "#!/bin/sh", 0o644), "not executable (chmod +x {path})"),
    "a dangling link": (lambda path: path.symlink_to("gone"), "a link to nothing"),
    "a link to itself": (
        lambda path: path.symlink_to(path.name),
        "it cannot be looked at (Too many levels of symbolic links)",
    ),
    "text": (
        lambda path: broken(path, "echo version: 11434 (a)"),
        "it cannot be run on this machine (Exec format error): not a program",
    ),
    "an empty file": (
        lambda path: broken(path, ""),
        "it cannot be run on this machine (Exec format error): not a program",
    ),
    "an ELF file of another processor": (
        lambda path: foreign(path, b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\x00\x02\x00\x01" + bytes(100)),
        "it cannot be run on this machine (Exec format error): wrong architecture",
    ),
    "a program of macOS": (
        lambda path: foreign(path, b"\xcf\xfa\xed\xfe" + bytes(60)),
        "it cannot be run on this machine (Exec format error): wrong architecture",
    ),
    "an interpreter that is not there": (
        lambda path: broken(path, "#!/opt/gone/sh"),
        "the interpreter or loader that it names is not on this machine",
    ),
    "a library that is not there": (
        lambda path: make_engine(path.parent, version=LIBRARY, version_exit=127),
        "the loader cannot find the library libllama-server-impl.so",
    ),
    "a library of the system": (
        lambda path: make_engine(path.parent, version=GOMP, version_exit=127),
        "the loader cannot find the library libgomp.so.1 (Debian: apt-get install libgomp1)",
    ),
    "a library on macOS": (
        lambda path: make_engine(path.parent, version="Library not loaded: @rpath/libmtmd.dylib\n x", version_exit=-6),
        "the loader cannot find the library @rpath/libmtmd.dylib",
    ),
    "another CPU": (
        lambda path: make_engine(path.parent, version_exit=-signal.SIGILL),
        "built for another CPU (killed by SIGILL)",
    ),
    "a crash": (
        lambda path: make_engine(path.parent, version="first\nlast words", version_exit=-signal.SIGSEGV),
        "it ended (killed by SIGSEGV) when asked for --version: last words",
    ),
    "a failure told on the other stream": (
        lambda path: make_engine(path.parent, version="\x1b[31mno\x1b[0m", version_stream="stdout", version_exit=3),
        "it ended (exit code 3) when asked for --version: no",
    ),
    "too old": (
        lambda path: make_engine(path.parent, version="version: 9779 (abc1234)"),
        "build b9779 is older than b9780, the first that can run the profiles",
    ),
    "another program": (
        lambda path: make_engine(path.parent, help_drop=["-m"]),
        "it does not answer --help as llama-server does",
    ),
    "another tool of llama.cpp": (
        lambda path: make_engine(path.parent, help_drop=["--port"]),
        "it does not answer --help as llama-server does",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_every_broken_llama_bin_says_what_is_wrong_with_it(tmp_path: Path, home: Path, name: str) -> None:
    """Whatever would do elsewhere: a LLAMA_BIN that is set is the only candidate."""
    make_engine(home / "llamacpp-b11434")
    make, why = BROKEN[name]
    path = tmp_path / "llama-server"
    make(path)
    with pytest.raises(EngineMissing) as raised:
        find_engine(settings_with(LLAMA_BIN=str(path)))
    assert str(raised.value).splitlines()[0] == f"LLAMA_BIN={path} cannot be used: {why.format(path=path)}."


@pytest.mark.skipif(not COMPILER, reason="there is no compiler here")
def test_a_real_loader_that_misses_a_library(tmp_path: Path) -> None:
    """A program in one folder and its library in another, as after copying llama-server alone; then both together."""
    (tmp_path / "f.c").write_text("int f(void) { return 0; }")
    said = r"version: 11434 (a)\n--model X\n--ctx-size X\n--port X"
    (tmp_path / "main.c").write_text(
        f'int puts(const char *); int f(void); int main(void) {{ puts("{said}"); return f(); }}'
    )
    for words in ("-shared -o libf.so f.c", "-o moved/llama-server main.c -L. -lf"):
        (tmp_path / "moved").mkdir(exist_ok=True)
        subprocess.run([str(COMPILER), *words.split()], cwd=tmp_path, check=True, env={"PATH": PATH})
    moved = tmp_path / "moved" / "llama-server"
    assert why_not(moved) == "the loader cannot find the library libf.so"
    shutil.copy(tmp_path / "libf.so", moved.parent)
    assert good(moved).library_path


class TestSkipped:
    def test_below_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        assert why_not(tmp_path / "file" / "llama-server") == "there is no such file"

    def test_a_path_that_the_system_will_not_look_at(self, tmp_path: Path) -> None:
        assert why_not(tmp_path / ("x" * 5000)) == "it cannot be looked at (File name too long)"

    @pytest.mark.parametrize("build", [1000, 4321, 9779])
    def test_a_build_before_the_floor_is_refused_by_number(self, tmp_path: Path, build: int) -> None:
        path = make_engine(tmp_path, version=f"version: {build} (abc1234)")
        assert why_not(path) == f"build b{build} is older than b9780, the first that can run the profiles"

    def test_a_crash_says_how_and_when(self, tmp_path: Path) -> None:
        path = make_engine(tmp_path, version="first\nlast words", version_exit=-signal.SIGSEGV)
        assert why_not(path) == "it ended (killed by SIGSEGV) when asked for --version: last words"
        other = make_engine(tmp_path, "other", help_exit=3)
        assert why_not(other).startswith("it ended (exit code 3) when asked for --help")

    def test_a_program_that_macos_does_not_let_run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = make_engine(tmp_path, version="", version_exit=-signal.SIGKILL)
        monkeypatch.setattr(sys, "platform", "darwin")
        assert why_not(path) == (f"macOS does not let it run (killed by SIGKILL): xattr -d com.apple.quarantine {path}")

    def test_a_program_that_does_not_answer(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(probe, "PROBE_TIMEOUT", 0.2)
        path = tmp_path / "llama-server"
        path.write_text(f"#!{sys.executable} -IS\nimport signal\nsignal.pause()\n")
        path.chmod(0o755)
        assert why_not(path) == "it did not answer --version within 0.2 s"
