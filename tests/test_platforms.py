"""Process handling where the test machine is another system: macOS, with the platform patched; Linux as it is."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from looprun_models import _posix, system

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="of the other half")


class TestMacOs:
    """No /proc and no parent-death signal there."""

    @pytest.fixture(autouse=True)
    def on_macos(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_posix, "LINUX", False)

    @pytest.fixture
    def ps(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        """What `ps` was asked; its answer is to be appended first."""
        asked: list[Any] = []

        def run(words: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
            answer = asked.pop(0)
            asked.append((words, options))
            return subprocess.CompletedProcess(words, 0, stdout=answer)

        monkeypatch.setattr(subprocess, "run", run)
        return asked

    def test_a_process_is_known_by_when_it_started_whatever_the_locale_and_the_time_zone(self, ps: list[Any]) -> None:
        ps.append("Ss   Mon Nov 30 17:24:01 2026\n")
        assert _posix.start_of(7) == "Mon Nov 30 17:24:01 2026"
        ((words, options),) = ps
        assert words == ["/bin/ps", "-o", "stat=,lstart=", "-p", "7"]
        assert options["env"] == {"LC_ALL": "C", "TZ": "UTC0"}

    @pytest.mark.parametrize("answer", ["", "Z    Mon Nov 30 17:24:01 2026\n", "Z+ Mon Nov 30 17:24:01 2026\n"])
    def test_one_that_has_ended_has_no_start(self, ps: list[Any], answer: str) -> None:
        ps.append(answer)
        assert _posix.start_of(7) is None

    @pytest.mark.skipif(not os.path.exists("/bin/ps"), reason="there is no ps here")
    def test_a_real_ps_understands_the_question(self) -> None:
        assert _posix.start_of(os.getpid())
        with subprocess.Popen(["sleep", "0"]) as ended:
            ended.wait()
        assert _posix.start_of(ended.pid) is None

    def test_a_child_is_in_a_session_of_its_own_and_asks_for_nothing_more(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        given: dict[str, Any] = {}
        monkeypatch.setattr(subprocess, "Popen", lambda argv, **options: given.update(options, argv=argv))
        _posix.start_tied(["engine"], cwd="/")
        assert given == {"argv": ["engine"], "cwd": "/", "start_new_session": True, "preexec_fn": None}

    def test_a_child_and_what_it_started_end_together(self) -> None:
        code = "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True); sys.stdin.read()"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with _posix.start_tied([sys.executable, "-IS", "-c", code], **pipes) as child:
            assert child.stdout
            helper = int(child.stdout.readline())
            assert os.getpgid(child.pid) == os.getpgid(helper) == child.pid != os.getpgid(0)
            _posix.terminate(child.pid)
            assert child.wait() == -15
            assert child.stdout.read() == b"", "the helper held the pipe until it ended"


@pytest.mark.skipif(not _posix.LINUX, reason="a request that only Linux has")
def test_a_tied_child_ends_with_its_parent_on_linux() -> None:
    """kill -9 of a parent: its child's pipe closes because the child is gone, helpers or not."""
    child = "import time; print(1, flush=True); time.sleep(20); print(2)"
    code = (
        "import sys, time\nfrom looprun_models import system\n"
        f"system.start_tied([sys.executable, '-IS', '-c', {child!r}])\ntime.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout
        parent.stdout.readline()
        system.kill(parent.pid)
        assert parent.stdout.read() == b""
