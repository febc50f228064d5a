"""`looprun models pull` as programs of its own: killed, in crowds, on full disks, without a network."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from looprun_models.cli import app
from typer.testing import CliRunner

from looprun_models import download, journal, local_model, source, spans, transfer
from looprun_models.errors import WeightsMissing
from looprun_models.journal import PIECE, journal_path, lock_path, part_path, read_progress
from looprun_models.system import try_lock
from tests.helpers import wait_for
from tests.hub_server import BYTES_HOST, Faults, HubServer

LOOPRUN = Path(sys.executable).with_name("looprun")
REPO, FILE = "nobody/tiny", "big.gguf"
KILLS = 10
SIZE = 128_000_000
RATE = 24e6
"""Bytes a second of each connection: slow enough that what a kill finds on its way is little."""

Pull = Callable[..., subprocess.Popen[str]]


def made_up(size: int) -> bytes:
    """As good as any content: no piece is like another, and the first bytes are right."""
    block = random.Random(7).randbytes(1 << 20)
    count = -(-size // (len(block) + 8))
    return (b"GGUF" + b"".join(number.to_bytes(8, "big") + block for number in range(count)))[:size]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer({}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("NO_PROXY", "*")
        yield server


@pytest.fixture
def target(profile: Callable[..., str], tmp_path: Path) -> Path:
    """Where the profile "big" has its weights, which are not there."""
    profile("tiny-qwen35", alias="big", file=FILE, default_dir=str(tmp_path / "w"))
    return tmp_path / "w" / FILE


@pytest.fixture
def pulling() -> Iterator[Pull]:
    """Start `looprun models pull big --yes`; all are ended with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*words: str, **environ: str) -> subprocess.Popen[str]:
        command = [str(LOOPRUN), "models", "pull", "big", *(words or ("--yes",))]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environ},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


DONE = [FILE, f"{FILE}.receipt.json"]


def test_killed_at_ten_points_it_ends_right_and_fetches_hardly_anything_twice(
    hub: HubServer, target: Path, pulling: Pull
) -> None:
    content = made_up(SIZE)
    hub.files = {f"{REPO}/{FILE}": content}
    hub.faults = Faults(rate=RATE)
    for point in sorted(random.Random(3).sample(range(SIZE // 50, SIZE - SIZE // 50), KILLS)):
        process = pulling()
        wait_for(lambda at=point: (read_progress(target) or (0, 0))[0] >= at, f"{point} bytes there")  # type: ignore[misc]
        process.kill()
        process.communicate()
        assert not target.exists()
    process = pulling()
    out, err = process.communicate()
    assert (process.returncode, out) == (0, f"{target}\n"), err
    assert hashlib.sha256(target.read_bytes()).digest() == hashlib.sha256(content).digest()
    assert left_in(target.parent) == DONE
    assert SIZE <= hub.sent <= 1.2 * SIZE, hub.sent / SIZE


def test_ten_at_once_are_one_download(hub: HubServer, target: Path, pulling: Pull) -> None:
    content = made_up(4_000_000)
    hub.files = {f"{REPO}/{FILE}": content}
    hub.faults = Faults(rate=1e6)
    processes = [pulling() for _ in range(10)]
    told = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0] * 10, told
    assert {out for out, _ in told} == {f"{target}\n"}
    assert target.read_bytes() == content
    assert left_in(target.parent) == DONE
    assert len(content) <= hub.sent <= 1.2 * len(content), "what is over was on its way to a span that was divided"
    assert sum("Another pull of big.gguf is running" in err for _, err in told) >= 1


def test_a_dead_holder_of_the_lock_is_no_obstacle_and_a_live_ones_progress_is_shown(
    hub: HubServer, target: Path, pulling: Pull
) -> None:
    content = made_up(20 * PIECE)
    hub.files = {f"{REPO}/{FILE}": content}
    hub.faults = Faults(stall_after=10 * PIECE)
    first = pulling()
    wait_for(lambda: (read_progress(target) or (0, 0))[0] == 10 * PIECE, "half is there")
    second = pulling()
    assert second.stderr
    assert second.stderr.readline() == f"Another pull of {FILE} is running; waiting for it.\n"
    assert second.stderr.readline() == "downloading: 2.6 MB of 5.2 MB (50 %)\n"
    hub.faults = Faults()
    first.kill()
    out, err = second.communicate()
    assert (second.returncode, out) == (0, f"{target}\n"), err
    assert target.read_bytes() == content


@pytest.mark.parametrize("anew", [False, True], ids=["in the same part", "in a part of its own"])
def test_without_working_locks_two_pulls_still_end_right(
    hub: HubServer, target: Path, monkeypatch: pytest.MonkeyPatch, anew: bool
) -> None:
    """The other one begins, ends, and takes the part file away while the first is half-way."""
    content = made_up(20 * PIECE)
    hub.files = {f"{REPO}/{FILE}": content}
    monkeypatch.setattr(journal, "try_lock", lambda handle: True)
    finish, others = download._Pull._finish, list[str]()

    def interrupted(self: download._Pull, fetched: tuple[int, str]) -> bool:
        if not others:
            others.append("runs")
            if anew:
                part_path(target).unlink()
            assert run("models", "pull", "big", "--yes").exit_code == 0
        return finish(self, fetched)

    monkeypatch.setattr(download._Pull, "_finish", interrupted)
    assert run("models", "pull", "big", "--yes").exit_code == 0
    assert target.read_bytes() == content
    assert left_in(target.parent) == DONE


def run(*words: str) -> Any:
    return CliRunner().invoke(app.app, words, prog_name="looprun")


MISBEHAVIOURS: dict[str, tuple[Faults, int, str]] = {
    "cut": (Faults(cut_at=PIECE), 1, "ended early, again and again. 0.3 of 2.0 MB are kept."),
    "flip": (Faults(flip_byte=1_000_000), 1, "did not arrive as it is on the Hub: sha256 expected"),
    "ignores ranges": (Faults(ignore_ranges=True), 0, "ignores ranges (HTTP 200)"),
    "another etag half-way": (Faults(etag="another", times=1), 0, "has changed upstream"),
    "stall": (Faults(stall_after=PIECE), 1, "nothing arrived for 0.2 seconds, again and again"),
    "html for the bytes": (Faults(bytes_html=True), 1, "the answer is a web page"),
    "html for the hub": (Faults(html=True), 1, "does not answer like a Hub"),
    "gated": (Faults(status=401, error_code="GatedRepo"), 1, "is gated"),
    "busy": (Faults(bytes_status=503), 1, "was not given by the Hub (HTTP 503)"),
}


@pytest.mark.parametrize("what", MISBEHAVIOURS)
def test_each_misbehaviour_has_one_message_an_exit_code_and_the_right_end(
    hub: HubServer, target: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "BACKOFF", (0.0,))
    monkeypatch.setattr(spans, "LEAST_SPAN", 2)
    monkeypatch.setattr(source, "TIMEOUT", 0.2)
    content = made_up(2_000_000)
    hub.files = {f"{REPO}/{FILE}": content}
    hub.faults, code, message = MISBEHAVIOURS[what]
    if what == "another etag half-way":
        hub.faults = Faults(cut_at=PIECE)
        assert run("models", "pull", "big", "--yes").exit_code == 1
        hub.faults = Faults(etag="another", times=1)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    done = run("models", "pull", "big", "--yes")
    assert done.exit_code == code, done.output
    assert message in done.stderr
    assert done.stderr.count(message) == 1
    assert done.stderr.count("error: ") == (code != 0)
    assert "hf_secret" not in done.output
    assert target.exists() == (code == 0)
    if code == 0:
        assert target.read_bytes() == content
        assert left_in(target.parent) == DONE
    assert not [request for request in hub.seen("GET", BYTES_HOST) if request.headers["Authorization"]]


def test_a_full_disk_keeps_the_part_and_more_space_lets_it_go_on(
    hub: HubServer, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = made_up(40 * PIECE)
    hub.files = {f"{REPO}/{FILE}": content}
    keep = transfer.Transfer._keep

    def full(self: transfer.Transfer, piece: int, *rest: Any) -> None:
        if self._journal.bytes_done >= 20 * PIECE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        keep(self, piece, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(transfer.Transfer, "_keep", full)
        done = run("models", "pull", "big", "--yes")
    assert done.exit_code == 4
    kept, size = read_progress(target) or (0, 0)
    assert 20 * PIECE <= kept < size == len(content)
    assert f"{target.parent} became full: {(size - kept) / 1e6:.1f} MB more are needed and " in done.stderr
    assert f"What has arrived ({kept / 1e6:.1f} MB) is kept." in done.stderr
    assert "looprun models rm big --partial" in done.stderr
    assert not target.exists()
    sent, hub.faults = hub.sent, Faults(rate=8e6)  # what a divided span finds on its way stays little
    question = run("models", "pull", "big")
    assert f"{kept / 1e6:.1f} MB of it are here already" in question.stderr
    assert run("models", "pull", "big", "--yes").exit_code == 0
    assert target.read_bytes() == content
    assert hub.sent - sent < 1.2 * (size - kept) + PIECE


def test_ctrl_c_keeps_what_came_and_says_so(hub: HubServer, target: Path, pulling: Pull) -> None:
    hub.files = {f"{REPO}/{FILE}": made_up(20 * PIECE)}
    hub.faults = Faults(stall_after=10 * PIECE)
    process = pulling()
    wait_for(lambda: (read_progress(target) or (0, 0))[0] == 10 * PIECE, "half is there")
    process.send_signal(2)
    out, err = process.communicate()
    assert (process.returncode, out) == (130, ""), err
    assert "2.6 MB are kept: looprun models pull big takes it up from there." in err
    assert "Traceback" not in err
    assert left_in(target.parent) == [part_path(target).name, journal_path(target).name]


def test_without_a_terminal_and_without_yes_nothing_is_fetched(hub: HubServer, target: Path, pulling: Pull) -> None:
    hub.files = {f"{REPO}/{FILE}": made_up(PIECE)}
    process = pulling("--")
    out, err = process.communicate()
    assert (process.returncode, out) == (1, "")
    assert "looprun models pull big --yes" in err
    with pytest.raises(WeightsMissing, match="looprun models pull big"):
        local_model("big")
    assert hub.requests == []
    assert not target.parent.exists()


def test_what_changed_upstream_is_told_by_pull_and_not_followed(hub: HubServer, target: Path, tiny_gguf: Any) -> None:
    content = tiny_gguf("tiny-qwen35").read_bytes()
    hub.files = {f"{REPO}/{FILE}": content}
    assert run("models", "pull", "big", "--yes").exit_code == 0
    hub.files = {f"{REPO}/{FILE}": content + b"newer"}
    again = run("models", "pull", "big")
    assert (again.exit_code, again.stdout) == (0, f"{target}\n")
    assert "has another big.gguf now" in again.stderr
    hub.faults = Faults(status=500)
    assert run("models", "pull", "big").exit_code == 0
    assert target.read_bytes() == content


LOOKED_AT = """
import ipaddress, sys
def hook(event, args):
    if event == "socket.getaddrinfo":
        host = args[0]
        assert host in (None, "localhost", "127.0.0.1", "::1"), f"looked up {host}"
    elif event in ("socket.connect", "socket.sendto"):
        address = args[1]
        if isinstance(address, tuple) and not ipaddress.ip_address(address[0]).is_loopback:
            raise AssertionError(f"connected to {address}")
sys.addaudithook(hook)
"""


@pytest.mark.engine
def test_with_weights_present_nothing_but_loopback_is_spoken_to(profile: Callable[..., str], hub: HubServer) -> None:
    alias = profile("tiny-qwen35")
    code = LOOKED_AT + (
        "from looprun_models import local_model, local_model_status\n"
        f"assert local_model_status({alias!r}).model_file.state == 'ok'\n"
        f"with local_model({alias!r}, auto_download=True) as model:\n"
        "    assert model.models.list().data\n"
        "sys.argv = ['looprun', 'models', 'status']\n"
        "from looprun_models.cli.app import main\nmain()\n"
    )
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=offline, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert hub.requests == []


def test_pull_in_offline_mode_says_why_it_cannot(hub: HubServer, target: Path, pulling: Pull) -> None:
    process = pulling(HF_HUB_OFFLINE="1")
    _, err = process.communicate()
    assert process.returncode == 1
    assert "huggingface_hub is in offline mode" in err
    assert "next: unset HF_HUB_OFFLINE" in err
    assert hub.requests == []


def test_pull_without_a_network_says_so(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    done = run("models", "pull", "big", "--yes")
    assert done.exit_code == 1
    assert "the connection to http://127.0.0.1:9/nobody/tiny failed" in done.stderr
    assert "next: check the network" in done.stderr


def test_a_lock_file_that_nobody_holds_is_taken(hub: HubServer, target: Path) -> None:
    hub.files = {f"{REPO}/{FILE}": made_up(PIECE)}
    target.parent.mkdir()
    lock_path(target).write_text("12345")
    assert run("models", "pull", "big", "--yes").exit_code == 0
    assert left_in(target.parent) == DONE
    with contextlib.closing(os.fdopen(os.open(target, os.O_RDONLY))) as free:
        assert try_lock(free.fileno())


def test_a_file_of_the_users_own_is_not_replaced(
    hub: HubServer, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.files = {f"{REPO}/{FILE}": made_up(PIECE)}
    own = tmp_path / "thesis.txt"
    own.write_text("precious")
    monkeypatch.setenv("TINY_GGUF", str(own))
    told = run("models", "pull", "big", "--yes")
    assert (told.exit_code, told.stdout) == (4, "")
    assert "was not fetched by looprun, and a pull would replace it" in told.stderr
    assert "correct or unset TINY_GGUF" in told.stderr
    assert own.read_text() == "precious"
    assert hub.requests == []


def test_the_partial_of_a_running_pull_is_not_removed(target: Path) -> None:
    target.parent.mkdir()
    part_path(target).write_bytes(b"half")
    with lock_path(target).open("a+b") as lock:
        assert try_lock(lock.fileno())
        told = run("models", "rm", "big", "--partial", "--yes")
        assert told.exit_code == 1
        assert "big.gguf is being pulled right now" in told.stderr
        assert part_path(target).exists()
    assert run("models", "rm", "big", "--partial", "--yes").exit_code == 0
    assert not part_path(target).exists()


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("ALL_PROXY", "socks5h://127.0.0.1:9", 1),
        ("HTTP_PROXY", "foo://x", 1),
        ("HF_ENDPOINT", "http://127.0.0.1:99999", 2),
        ("HF_ENDPOINT", "http://me:secret@127.0.0.1:80", 2),
        ("HF_TOKEN", "hf_\u00e9", 1),
    ],
)
def test_settings_that_no_library_can_use_are_named(
    hub: HubServer, target: Path, pulling: Pull, name: str, value: str, code: int
) -> None:
    process = pulling(**{"NO_PROXY": "", name: value})
    out, err = process.communicate()
    assert (process.returncode, out) == (code, ""), err
    assert "Traceback" not in err
    assert name.partition("_")[0] in err or "proxy" in err
    assert "secret" not in err
