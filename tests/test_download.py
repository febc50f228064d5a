"""The real huggingface_hub client against a stand-in Hub: what a user gets and what is left in the folder."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, file_download

from looprun_models import download
from looprun_models.download import RemoteFile, fetch, resolve
from looprun_models.errors import BadSetting, DownloadFailed, LooprunError, NotEnoughDisk
from looprun_models.progress import Progress
from looprun_models.registry import LocalModelSpec
from looprun_models.settings import load_settings
from tests.hub_server import BYTES_HOST, COMMIT, HUB_HOST, Faults, HubServer

REPO, FILE = "someone/Tiny-GGUF", "tiny.gguf"
CONTENT = b"GGUF" + bytes(range(256)) * 4096
SHA256 = hashlib.sha256(CONTENT).hexdigest()
CHUNK = 2**18


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """A Hub with one file, and a client that has no token, no proxy and no patience."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", CHUNK)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    huggingface_hub.close_session()
    with HubServer({f"{REPO}/{FILE}": CONTENT}) as server:
        yield server
        huggingface_hub.close_session()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "models" / "tiny" / FILE


def spec(**changes: Any) -> LocalModelSpec:
    values: dict[str, Any] = {
        "alias": "tiny",
        "note": "for tests",
        "file": FILE,
        "default_dir": "~/models/tiny",
        "env_var": "TINY_GGUF",
        "hf_repo": REPO,
        "approx_size_gb": 0.001,
        "kv": "f16",
        "ctx": 512,
        "cache_ram_mib": 16,
        "served_id": "tiny-gguf",
    }
    return LocalModelSpec(**{**values, **changes})


def ask(hub: HubServer, **changes: Any) -> RemoteFile:
    return resolve(spec(**changes), load_settings({"HF_ENDPOINT": hub.url}))


@contextmanager
def told(kind: type[LooprunError], *, exit_code: int, message: str, hint: str) -> Iterator[None]:
    """What the block raises is what a user reads: both texts contain these words."""
    with pytest.raises(kind) as caught:
        yield
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert caught.value.exit_code == exit_code
    assert "\n" not in caught.value.message


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_resolve_says_what_the_file_is_and_fetches_nothing(hub: HubServer) -> None:
    assert ask(hub) == RemoteFile(REPO, COMMIT, FILE, len(CONTENT), SHA256, f"{hub.url}/{REPO}/resolve/{COMMIT}/{FILE}")
    assert [(request.method, request.path) for request in hub.requests] == [("HEAD", f"/{REPO}/resolve/main/{FILE}")]


def test_resolve_asks_for_the_pinned_revision(hub: HubServer) -> None:
    remote = ask(hub, revision=COMMIT, size_bytes=len(CONTENT), sha256=SHA256)
    assert remote.revision == COMMIT
    assert hub.requests[0].path == f"/{REPO}/resolve/{COMMIT}/{FILE}"


def test_fetch_puts_the_file_under_its_name_and_tells_how_far_it_is(hub: HubServer, target: Path) -> None:
    heard: list[Progress] = []
    assert fetch(ask(hub), target, on_progress=heard.append) == target
    assert target.read_bytes() == CONTENT
    assert left_in(target.parent) == [FILE]
    total = len(CONTENT)
    steps = [*range(0, total, CHUNK), total]
    assert [step for step in heard if step.phase == "downloading"] == [
        Progress("downloading", done, total) for done in steps
    ]
    assert heard[len(steps) :] == [Progress("hashing", total, total)]


def test_fetch_prints_no_bar_of_its_own(hub: HubServer, target: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fetch(ask(hub), target)
    assert capfd.readouterr() == ("", "")


@pytest.mark.skipif(os.name == "nt", reason="file modes are POSIX")
def test_the_file_has_the_mode_that_the_umask_gives(hub: HubServer, target: Path) -> None:
    fetch(ask(hub), target)
    ordinary = target.with_name("ordinary")
    ordinary.touch()
    assert target.stat().st_mode == ordinary.stat().st_mode


def test_the_token_goes_to_the_hub_and_nowhere_else(
    hub: HubServer, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    fetch(ask(hub), target)
    to_hub = [*hub.seen("HEAD", HUB_HOST), *hub.seen("GET", HUB_HOST)]
    assert [request.headers["Authorization"] for request in to_hub] == ["Bearer hf_secret"] * 2
    (elsewhere,) = hub.seen("GET", BYTES_HOST)
    assert "hf_secret" not in str(elsewhere.headers)


def test_a_token_in_the_hub_clients_own_file_is_used(hub: HubServer, tmp_path: Path) -> None:
    Path(constants.HF_TOKEN_PATH).write_text("hf_from_login")
    ask(hub)
    assert hub.requests[0].headers["Authorization"] == "Bearer hf_from_login"


@pytest.mark.parametrize("ignore_ranges", [False, True])
def test_a_connection_that_breaks_once_is_taken_up_again(hub: HubServer, target: Path, ignore_ranges: bool) -> None:
    remote = ask(hub)
    hub.faults = Faults(cut_at=2 * CHUNK + 7)
    done: list[int] = []

    def mend(step: Progress) -> None:
        if step.phase == "downloading":
            done.append(step.done)
        if step.done == 2 * CHUNK:
            hub.faults = Faults(ignore_ranges=ignore_ranges)

    fetch(remote, target, on_progress=mend)
    assert target.read_bytes() == CONTENT
    _, again = hub.seen("GET", BYTES_HOST)
    assert again.headers["Range"] == f"bytes={2 * CHUNK}-"
    assert again.headers["Accept-Encoding"] == "identity"
    assert done.count(CHUNK) == (2 if ignore_ranges else 1)
    assert max(done) == done[-1] == len(CONTENT)


def test_a_folder_beside_others_files_is_left_as_it_was(hub: HubServer, target: Path) -> None:
    target.parent.mkdir(parents=True)
    (target.parent / "other.gguf").write_text("theirs")
    fetch(ask(hub), target)
    assert left_in(target.parent) == ["other.gguf", FILE]


@pytest.mark.parametrize(
    ("pin", "both"),
    [
        ({"sha256": "0" * 64}, f"sha256 is {SHA256} on the Hub and {'0' * 64} in the profile"),
        ({"size_bytes": 5}, f"size_bytes is {len(CONTENT)} on the Hub and 5 in the profile"),
    ],
)
def test_a_pin_that_the_hub_contradicts_names_both(hub: HubServer, pin: dict[str, Any], both: str) -> None:
    with told(DownloadFailed, exit_code=1, message=both, hint="pin a revision"):
        ask(hub, **pin)
    assert hub.seen("GET", HUB_HOST) == []


DAMAGE = {
    "flipped": (Faults(flip_byte=len(CONTENT) - 1), f"sha256 expected {SHA256}, got ", "pull again"),
    "no GGUF": (Faults(flip_byte=0), "first bytes expected b'GGUF', got b'\\xb8GUF'", "pull again"),
    "a page": (Faults(html=True), f"size in bytes expected {len(CONTENT)}, got ", "proxy"),
    "cut": (Faults(cut_at=CHUNK + 9), "failed: peer closed connection", "check the network"),
    "cut at once": (Faults(cut_at=0), "failed: peer closed connection", "check the network"),
    "stall": (Faults(stall_after=CHUNK), "failed: timed out", "check the network"),
    "server error": (Faults(status=500), "was not given by the Hub (HTTP 500)", "try again later"),
    "too many": (Faults(status=429), "too many requests (HTTP 429)", "wait a few minutes"),
    "expired": (Faults(status=403), "refused to this account (HTTP 403)", "HF_TOKEN"),
}


@pytest.mark.parametrize("existing", [b"", b"an older file"], ids=["new", "replacing"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_what_does_not_arrive_whole_leaves_the_folder_as_it_was(
    hub: HubServer, target: Path, damage: str, existing: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults, message, hint = DAMAGE[damage]
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.1 if faults.stall_after else 10)
    remote = ask(hub)
    if existing:
        target.parent.mkdir(parents=True)
        target.write_bytes(existing)
    hub.faults = faults
    with told(DownloadFailed, exit_code=1, message=message, hint=hint):
        fetch(remote, target)
    assert left_in(target.parent) == ([FILE] if existing else [])
    if existing:
        assert target.read_bytes() == existing


def test_an_existing_file_is_replaced_by_the_verified_one(hub: HubServer, target: Path) -> None:
    target.parent.mkdir(parents=True)
    target.write_bytes(b"an older file")
    fetch(ask(hub), target)
    assert target.read_bytes() == CONTENT


REFUSALS = {
    "gated": (401, "GatedRepo", "is gated", f"accept them at {{url}}/{REPO}, then set HF_TOKEN"),
    "gated, other account": (403, "GatedRepo", "is gated", f"{{url}}/{REPO}"),
    "no repository": (401, "RepoNotFound", "in no public repository", f"check {{url}}/{REPO}"),
    "bad token": (401, "", "does not accept the token", "HF_TOKEN"),
    "forbidden": (403, "", "refused to this account", f"visit {{url}}/{REPO}"),
    "no file": (404, "EntryNotFound", "not there at this revision", "correct file or revision"),
    "no revision": (404, "RevisionNotFound", "not there at this revision", "correct file or revision"),
    "no page": (404, "", "not there at this revision", "correct file or revision"),
    "too many": (429, "", "too many requests", "wait a few minutes"),
    "server error": (500, "", "not given by the Hub", "try again later"),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_refusal_says_why_and_what_to_do(hub: HubServer, refusal: str) -> None:
    status, code, message, hint = REFUSALS[refusal]
    hub.faults = Faults(status=status, error_code=code)
    with told(DownloadFailed, exit_code=1, message=message, hint=hint.format(url=hub.url)):
        ask(hub)
    assert len(hub.requests) == 1


def test_a_repository_that_the_hub_does_not_have(hub: HubServer) -> None:
    with told(DownloadFailed, exit_code=1, message="nobody/nothing/tiny.gguf is in no", hint="HF_TOKEN"):
        ask(hub, hf_repo="nobody/nothing")


def test_a_name_that_no_repository_can_have(hub: HubServer) -> None:
    with told(DownloadFailed, exit_code=1, message="is no name on the Hub", hint="hf_repo"):
        ask(hub, hf_repo="a/b/c")
    assert hub.requests == []


def test_a_page_in_place_of_the_hub(hub: HubServer) -> None:
    hub.faults = Faults(html=True)
    with told(DownloadFailed, exit_code=1, message="does not answer like a Hub", hint="HF_ENDPOINT"):
        ask(hub)


def test_a_hub_where_nothing_answers(hub: HubServer) -> None:
    with socket.socket() as bound:
        # Bound and not listening: refused for certain, and nobody else can get the port meanwhile.
        bound.bind((HUB_HOST, 0))
        settings = load_settings({"HF_ENDPOINT": f"http://{HUB_HOST}:{bound.getsockname()[1]}"})
        with told(DownloadFailed, exit_code=1, message="refused", hint="check the network"):
            resolve(spec(), settings)


def test_offline_mode_asks_nobody(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with told(DownloadFailed, exit_code=1, message="offline mode", hint="unset HF_HUB_OFFLINE"):
        ask(hub)
    assert hub.requests == []


@pytest.mark.parametrize("address", ["hub.example", "ftp://hub.example", "http://", "http://hub:port", "http://a b"])
def test_an_endpoint_that_is_no_address(address: str) -> None:
    with told(BadSetting, exit_code=2, message="HF_ENDPOINT", hint="unset HF_ENDPOINT"):
        resolve(spec(), load_settings({"HF_ENDPOINT": address}))


@pytest.mark.parametrize("blank", ["", "  "])
def test_a_blank_endpoint_is_the_hub_itself(blank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def metadata(url: str, **_: Any) -> file_download.HfFileMetadata:
        asked.append(url)
        return file_download.HfFileMetadata(COMMIT, SHA256, url, 1, None)

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", metadata)
    monkeypatch.setattr(constants, "ENDPOINT", blank)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", blank + "/{repo_id}/resolve/{revision}/{filename}")
    resolve(spec(), load_settings({"HF_ENDPOINT": blank}))
    assert asked == [f"{constants.HUGGINGFACE_CO_URL_HOME}{REPO}/resolve/main/{FILE}"]


def test_a_disk_without_room_is_noticed_before_anything_is_fetched(
    hub: HubServer, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Path] = []

    def usage(path: Path) -> SimpleNamespace:
        looked.append(path)
        return SimpleNamespace(free=3_000_000)

    remote = ask(hub)
    monkeypatch.setattr(shutil, "disk_usage", usage)
    need = (len(CONTENT) + download.DISK_MARGIN) / 1e9
    message = f"needs {need:.2f} GB, and {target.parent} has 0.00 GB free"
    with told(NotEnoughDisk, exit_code=4, message=message, hint="free some space"):
        fetch(remote, target)
    assert looked == [target.parent.parent.parent]
    assert hub.seen("GET", HUB_HOST) == []
    assert not target.parent.exists()


def test_a_disk_that_fills_up_on_the_way(hub: HubServer, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    remote = ask(hub)
    monkeypatch.setattr(os, "fsync", full)
    with told(NotEnoughDisk, exit_code=4, message=f"{target.parent} became full", hint="free some space"):
        fetch(remote, target)
    assert left_in(target.parent) == []


def test_a_folder_that_cannot_be_made(hub: HubServer, tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    with told(DownloadFailed, exit_code=1, message=str(in_the_way), hint="check that you may write"):
        fetch(ask(hub), in_the_way / FILE)


@pytest.mark.parametrize("phase", ["downloading", "hashing"])
def test_an_interrupt_leaves_nothing_and_stays_an_interrupt(hub: HubServer, target: Path, phase: str) -> None:
    def interrupt(step: Progress) -> None:
        if step.phase == phase and step.done:
            assert [name for name in left_in(target.parent) if name != FILE]
            assert not target.exists()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(ask(hub), target, on_progress=interrupt)
    assert left_in(target.parent) == []


def test_importing_the_module_does_not_load_the_hub_client() -> None:
    code = "import sys, looprun_models.download; sys.exit('huggingface_hub' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
