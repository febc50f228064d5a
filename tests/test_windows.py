"""The Windows half with Windows' own functions patched: what is asked of the system, in which order, in which shape."""

from __future__ import annotations

import ctypes
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from looprun_models import _posix, _windows, probe, search, system
from looprun_models.engine import Engine
from tests.engines import make_engine, settings_with

WIDE, ME = 0x1_2345_6789, 0x9_8765_4321
"""Handles that do not fit into 32 bits."""


class Function:
    """One function of kernel32: notes its calls in the common list and gives its answer."""

    restype: Any = ctypes.c_int
    argtypes: Any = None

    def __init__(self, name: str, calls: list[tuple[Any, ...]], answer: Any) -> None:
        self.name, self.calls, self.answer = name, calls, answer

    def __call__(self, *given: Any) -> Any:
        assert self.argtypes is None or len(given) == len(self.argtypes), f"{self.name}{given}"
        self.calls.append((self.name, *given))
        answer = self.answer(*given) if callable(self.answer) else self.answer
        return answer if self.restype is ctypes.c_void_p or answer is None else ctypes.c_int(answer).value


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What was asked of kernel32 and of subprocess, in order."""
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(_windows, "_job", [])

    def popen(argv: list[str], **options: Any) -> None:
        seen.append(("Popen", argv, options))

    def run(argv: list[str], **options: Any) -> None:
        seen.append(("run", argv, options))

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(subprocess, "run", run)
    return seen


@pytest.fixture
def kernel(calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`kernel(AssignProcessToJobObject=0)` is a kernel32 that answers so, and otherwise agrees to everything."""

    def answering(**answers: Any) -> None:
        usual = {"CreateJobObjectW": WIDE, "SetInformationJobObject": 1, "AssignProcessToJobObject": 1}
        usual |= {"GetCurrentProcess": ME, "OpenProcess": WIDE, "CloseHandle": 1}
        usual |= {"GetExitCodeProcess": exits_with(_windows.STILL_ACTIVE), "GetProcessTimes": started_at(7)}
        functions = {name: Function(name, calls, answer) for name, answer in {**usual, **answers}.items()}
        monkeypatch.setattr(ctypes, "WinDLL", lambda name, **_: SimpleNamespace(**functions), raising=False)

    return answering


def exits_with(code: int) -> Any:
    def answer(handle: int, into: Any) -> int:
        into._obj.value = code
        return 1

    return answer


def started_at(time: int) -> Any:
    def answer(handle: int, created: Any, *others: Any) -> int:
        created._obj.value = time
        return 1

    return answer


def test_both_systems_have_the_same_functions() -> None:
    names = set(system.__all__) - {"LOOPBACK"}
    for name in names:
        ours, theirs = inspect.signature(getattr(_posix, name)), inspect.signature(getattr(_windows, name))
        assert str(ours) == str(theirs), name


def test_the_limits_have_the_shape_that_the_system_documents() -> None:
    assert ctypes.sizeof(_windows.JobLimits) == (144 if ctypes.sizeof(ctypes.c_void_p) == 8 else 112)
    assert _windows.JobLimits.flags.offset == 16


def test_a_child_is_started_inside_a_job_that_ends_with_us(
    calls: list[tuple[Any, ...]], kernel: Callable[..., None]
) -> None:
    limits: list[int] = []

    def note(job: int, kind: int, info: Any, size: int) -> int:
        limits.append(info._obj.flags)
        return 1

    kernel(SetInformationJobObject=note)
    _windows.start_tied(["engine", "-x"], cwd="C:\\")
    assert [call[0] for call in calls] == [
        "CreateJobObjectW", "SetInformationJobObject", "GetCurrentProcess", "AssignProcessToJobObject", "Popen",
    ]  # fmt: skip
    assert calls[1][1:3] == (WIDE, 9)
    assert calls[1][4] == ctypes.sizeof(_windows.JobLimits)
    assert limits == [0x2000], "JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE"
    assert calls[3][1:] == (WIDE, ME)
    assert calls[4][1:] == (["engine", "-x"], {"creationflags": 0x08000200, "cwd": "C:\\"})

    calls.clear()
    _windows.start_tied(["another"])
    assert [call[0] for call in calls] == ["Popen"], "one job is enough"


@pytest.mark.parametrize(
    "refused", [{"CreateJobObjectW": None}, {"SetInformationJobObject": 0}, {"AssignProcessToJobObject": 0}]
)
def test_where_a_job_is_refused_the_child_is_started_all_the_same(
    calls: list[tuple[Any, ...]], kernel: Callable[..., None], refused: dict[str, Any]
) -> None:
    kernel(**refused)
    _windows.start_tied(["engine"])
    assert calls[-1][0] == "Popen"


def test_a_supervisor_has_a_group_of_its_own_and_no_window() -> None:
    assert _windows.detached() == {"creationflags": 0x200 | 0x08000000}


@pytest.mark.parametrize("end", [_windows.kill, _windows.terminate])
def test_an_end_takes_the_whole_tree_and_shows_no_window(
    calls: list[tuple[Any, ...]], end: Callable[[int], None]
) -> None:
    end(123)
    ((_, words, options),) = calls
    assert words == ["taskkill", "/T", "/F", "/PID", "123"]
    assert (options["check"], options["creationflags"]) == (False, 0x08000000)


def test_a_process_is_known_by_when_it_started(calls: list[tuple[Any, ...]], kernel: Callable[..., None]) -> None:
    kernel(GetProcessTimes=started_at(133_500_000_000_000_000))
    assert _windows.start_of(7) == "133500000000000000"
    assert calls[0] == ("OpenProcess", 0x1000, False, 7)
    assert calls[-1] == ("CloseHandle", WIDE)
    kernel(GetExitCodeProcess=exits_with(0))
    assert _windows.start_of(7) is None
    kernel(OpenProcess=None)
    assert _windows.start_of(7) is None
    assert _windows.reap(7)


@pytest.mark.parametrize("taken", [False, True])
def test_a_lock_is_one_byte_and_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: bool) -> None:
    asked: list[tuple[int, ...]] = []

    def locking(fd: int, mode: int, size: int) -> None:
        asked.append((mode, size))
        if taken:
            raise OSError("somebody has it")

    monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(LK_NBLCK=2, locking=locking))
    with (tmp_path / "lock").open("w") as file:
        assert _windows.try_lock(file.fileno()) is not taken
    assert asked == [(2, 1)]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exit code 0"),
        (3, "exit code 3"),
        (0xC000001D, "killed by SIGILL (0xc000001d)"),
        (0xC0000005, "killed by SIGSEGV (0xc0000005)"),
        (0xC0000135, "a DLL that it needs is missing (0xc0000135)"),
        (0xC0000142, "exit code 0xc0000142"),
    ],
)
def test_exit_codes_in_words(code: int, words: str) -> None:
    assert _windows.describe_exit(code) == words


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (0xC000001D, "built for another CPU (killed by SIGILL (0xc000001d))"),
        (0xC0000135, "it ended (a DLL that it needs is missing (0xc0000135)) when asked for --version"),
    ],
)
def test_a_program_that_cannot_run_there_says_why(monkeypatch: pytest.MonkeyPatch, code: int, why: str) -> None:
    monkeypatch.setattr(system, "describe_exit", _windows.describe_exit)
    monkeypatch.setattr(
        subprocess, "run", lambda words, **_: subprocess.CompletedProcess(words, code, stdout="", stderr="")
    )
    assert probe.ask(("llama-server.exe",), "--version", settings_with(), False) == why


@pytest.mark.skipif(sys.platform == "win32", reason="the fake engines are scripts with a shebang")
@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize("layout", ["bin", "build/bin", "build/bin/Release", ".", "llama-b11434"])
@pytest.mark.parametrize(("name", "more"), [("llama-server.exe", ()), ("llama.exe", ("serve",))])
def test_programs_are_found_by_their_names_there(
    home: Path, monkeypatch: pytest.MonkeyPatch, layout: str, name: str, more: tuple[str, ...]
) -> None:
    monkeypatch.setattr(search, "PROGRAM", "llama-server.exe")
    monkeypatch.setattr(search, "SINGLE", "llama.exe")
    make_engine(home / "llamacpp-b11434" / layout, "llama-server")  # of another system: a shared home
    path = make_engine(home / "llamacpp-b11434" / layout, name, single=bool(more))
    found = next(iter(search.search_engines(settings_with())))
    assert isinstance(found, Engine), found
    assert found.command == (str(path), *more)
