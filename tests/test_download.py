"""The downloader and the real huggingface_hub client against a stand-in Hub: what a user gets, what is left behind."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, file_download

from looprun_models import download, journal, source, spans, transfer
from looprun_models.download import bytes_kept, pull, upstream_news
from looprun_models.errors import BadSetting, DownloadFailed, LooprunError, NotEnoughDisk
from looprun_models.hub import RemoteFile, resolve
from looprun_models.journal import PIECE
from looprun_models.progress import Progress
from looprun_models.receipts import read_receipt
from looprun_models.registry import LocalModelSpec
from looprun_models.settings import load_settings
from tests.hub_server import BYTES_HOST, COMMIT, HUB_HOST, Faults, HubServer

REPO, FILE = "someone/Tiny-GGUF", "tiny.gguf"
CONTENT = b"GGUF" + bytes(range(256)) * 4096
SHA256 = hashlib.sha256(CONTENT).hexdigest()
DONE = [FILE, f"{FILE}.receipt.json"]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """A Hub with one file, and a client that has no token, no proxy and no patience."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(transfer, "BACKOFF", (0.0,))
    monkeypatch.setattr(transfer, "REPORT", 0.005)
    monkeypatch.setattr(source, "TIMEOUT", 0.2)
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


def fetch(hub: HubServer, target: Path, **callbacks: Any) -> Path:
    return pull(spec(), load_settings({"HF_ENDPOINT": hub.url}), target, **callbacks)


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


def test_a_token_that_the_hub_does_not_know_is_left_out_and_that_is_said(
    hub: HubServer, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    hub.faults = Faults(no_token=True)
    said: list[str] = []
    fetch(hub, target, on_note=said.append)
    assert target.read_bytes() == CONTENT
    assert said == ["The Hub does not accept the token in use (HTTP 401); fetched without it."]
    assert all("Authorization" not in request.headers for request in hub.requests[1:])


def test_pull_puts_the_file_under_its_name_with_a_receipt(hub: HubServer, target: Path) -> None:
    heard: list[Progress] = []
    assert fetch(hub, target, on_progress=heard.append) == target
    assert target.read_bytes() == CONTENT
    assert left_in(target.parent) == DONE
    receipt = read_receipt(target)
    assert receipt
    assert (receipt.repo, receipt.revision, receipt.size, receipt.sha256) == (REPO, COMMIT, len(CONTENT), SHA256)
    assert {(step.phase, step.done) for step in heard} >= {("downloading", len(CONTENT)), ("hashing", len(CONTENT))}
    assert {step.total for step in heard} == {len(CONTENT)}
    for phase in ("downloading", "hashing"):
        steps = [step.done for step in heard if step.phase == phase]
        assert steps == sorted(steps)


def test_callbacks_are_called_on_the_callers_thread_and_no_thread_is_left(hub: HubServer, target: Path) -> None:
    threads, before = set(), threading.active_count()
    fetch(hub, target, on_progress=lambda _: threads.add(threading.current_thread()))
    assert threads == {threading.current_thread()}
    assert not [thread for thread in threading.enumerate() if "_guarded" in thread.name], before


def test_pull_prints_nothing_of_its_own(hub: HubServer, target: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fetch(hub, target)
    assert capfd.readouterr() == ("", "")


@pytest.mark.skipif(os.name == "nt", reason="file modes are POSIX")
def test_the_file_has_the_mode_that_the_umask_gives(hub: HubServer, target: Path) -> None:
    fetch(hub, target)
    ordinary = target.with_name("ordinary")
    ordinary.touch()
    assert target.stat().st_mode == ordinary.stat().st_mode


def test_the_token_goes_to_the_hub_and_nowhere_else(
    hub: HubServer, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    fetch(hub, target)
    to_hub = [*hub.seen("HEAD", HUB_HOST), *hub.seen("GET", HUB_HOST)]
    assert {request.headers["Authorization"] for request in to_hub} == {"Bearer hf_secret"}
    elsewhere = hub.seen("GET", BYTES_HOST)
    assert elsewhere
    assert not [request for request in elsewhere if "hf_secret" in str(request.headers)]


def test_a_redirect_on_the_hubs_own_host_keeps_the_token_and_one_to_another_port_loses_it() -> None:
    handler = source._SameHostOnly()
    request = urllib.request.Request("https://hub.example/a")
    request.add_unredirected_header("Authorization", "Bearer hf_secret")

    def followed(url: str) -> bool:
        new = handler.redirect_request(request, None, 302, "Found", Message(), url)
        assert new
        return new.has_header("Authorization")

    assert followed("https://hub.example/b")
    for url in (
        "https://hub.example:8443/b",
        "http://hub.example/b",
        "https://cdn.example/b",
        "https://x.hub.example/",
    ):
        assert not followed(url), url


def test_a_token_in_the_hub_clients_own_file_is_used(hub: HubServer, tmp_path: Path) -> None:
    Path(constants.HF_TOKEN_PATH).write_text("hf_from_login")
    ask(hub)
    assert hub.requests[0].headers["Authorization"] == "Bearer hf_from_login"


@pytest.mark.parametrize(
    ("environ", "proxies"),
    [
        ({}, {}),
        ({"HTTPS_PROXY": "http://p:1", "https_proxy": "http://q:2"}, {"https": "http://q:2"}),
        ({"ALL_PROXY": "http://p:1", "http_proxy": ""}, {"http": "http://p:1", "https": "http://p:1"}),
        ({"NO_PROXY": "a,b", "PROXY": "x"}, {"no": "a,b"}),
    ],
)
def test_proxies_are_read_from_the_settings(environ: dict[str, str], proxies: dict[str, str]) -> None:
    assert source.proxies_of(environ) == proxies


@pytest.mark.parametrize(
    ("host", "rule", "passed_by"),
    [
        ("hub.example", "", False),
        ("hub.example:443", "example", True),
        ("hub.example", ".example", True),
        ("hub.example", "*", True),
        ("notexample", "example", False),
        ("hub.example", "other, hub.example", True),
    ],
)
def test_no_proxy(host: str, rule: str, passed_by: bool) -> None:
    assert source.bypasses(host, rule) == passed_by


def test_the_bytes_come_through_the_proxy_that_the_settings_name(hub: HubServer, target: Path) -> None:
    with HubServer({}) as proxy:
        proxy.faults = Faults(bytes_status=503, status=503)
        settings = load_settings({"HF_ENDPOINT": hub.url, "http_proxy": proxy.url})
        with pytest.raises(DownloadFailed):
            pull(spec(), settings, target)
        assert proxy.requests[0].path.startswith(hub.url)
    assert hub.seen("GET", BYTES_HOST) == hub.seen("GET", HUB_HOST) == []


def test_a_folder_beside_others_files_is_left_as_it_was(hub: HubServer, target: Path) -> None:
    target.parent.mkdir(parents=True)
    (target.parent / "other.gguf").write_text("theirs")
    fetch(hub, target)
    assert left_in(target.parent) == sorted(["other.gguf", *DONE])


def test_an_existing_file_is_replaced_by_a_new_one_and_whoever_has_it_open_keeps_theirs(
    hub: HubServer, target: Path
) -> None:
    target.parent.mkdir(parents=True)
    target.write_bytes(b"an older file")
    with target.open("rb") as in_use:
        fetch(hub, target)
        assert in_use.read() == b"an older file"
    assert target.read_bytes() == CONTENT


def test_the_very_file_is_not_fetched_again(hub: HubServer, target: Path) -> None:
    fetch(hub, target)
    sent = hub.sent
    assert fetch(hub, target) == target
    assert hub.sent == sent


RECOVERS: dict[str, tuple[Faults, str]] = {
    "each connection is cut": (Faults(cut_after=PIECE // 2, times=5), "ended early"),
    "cut at once": (Faults(cut_at=0, times=3), "ended early"),
    "stalls once": (Faults(stall_after=PIECE, times=2), "nothing arrived"),
    "ignores ranges": (Faults(ignore_ranges=True), "ignores ranges (HTTP 200): fetched in one stream"),
    "ignores ranges and is cut": (Faults(ignore_ranges=True, cut_at=2 * PIECE + 9, times=6), "in one stream"),
    "answers another range": (Faults(shift=77), "answers another range"),
    "refuses ranges": (Faults(bytes_status=416), "refuses a range"),
    "is busy": (Faults(bytes_status=503, times=5), "HTTP 503"),
    "limits": (Faults(bytes_status=429, retry_after="0", times=5), "HTTP 429"),
    "address expired": (Faults(bytes_status=403, times=5), "HTTP 403"),
}


@pytest.mark.parametrize("trouble", RECOVERS)
def test_trouble_that_passes_is_said_once_and_got_over(
    hub: HubServer, target: Path, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans, "LEAST_SPAN", 1)
    hub.faults, message = RECOVERS[trouble]
    said: list[str] = []
    fetch(hub, target, on_note=said.append)
    assert target.read_bytes() == CONTENT
    assert left_in(target.parent) == DONE
    assert any(message in note for note in said), said
    assert len(said) == len(set(said))


FAILS: dict[str, tuple[Faults, str, str]] = {
    "flipped": (Faults(flip_byte=len(CONTENT) - 1), f"sha256 expected {SHA256}, got ", "pull again"),
    "no GGUF": (Faults(flip_byte=0), "begins with b'\\xb8GUF' instead of b'GGUF'", "log-in page"),
    "a page": (Faults(bytes_html=True), "a web page", "log-in page"),
    "always cut": (Faults(cut_at=0), "ended early, again and again", "check the network"),
    "always stalls": (Faults(stall_after=0), "nothing arrived for 0.2 seconds, again", "check the network"),
    "server error": (Faults(bytes_status=500), "was not given by the Hub (HTTP 500)", "try again later"),
    "too many": (Faults(bytes_status=429), "too many requests (HTTP 429)", "wait a few minutes"),
    "expired": (Faults(bytes_status=403), "refused to this account (HTTP 403)", "HF_TOKEN"),
}


@pytest.mark.parametrize("existing", [b"", b"an older file"], ids=["new", "replacing"])
@pytest.mark.parametrize("damage", FAILS)
def test_what_does_not_arrive_whole_never_has_the_name(
    hub: HubServer, target: Path, damage: str, existing: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans, "LEAST_SPAN", 1)
    hub.faults, message, hint = FAILS[damage]
    if existing:
        target.parent.mkdir(parents=True)
        target.write_bytes(existing)
    with told(DownloadFailed, exit_code=1, message=message, hint=hint):
        fetch(hub, target)
    assert target.exists() == bool(existing)
    if existing:
        assert target.read_bytes() == existing
    hub.faults = Faults()
    fetch(hub, target)
    assert target.read_bytes() == CONTENT, "and the next pull mends it"


def test_what_came_is_kept_and_the_next_pull_takes_it_up(hub: HubServer, target: Path) -> None:
    hub.faults = Faults(cut_at=3 * PIECE)
    with told(DownloadFailed, exit_code=1, message="0.8 of 1.0 MB are kept", hint="looprun models pull tiny"):
        fetch(hub, target)
    assert journal.read_progress(target) == (3 * PIECE, len(CONTENT))
    assert not target.exists()
    hub.faults, hub.sent = Faults(), 0
    fetch(hub, target)
    assert target.read_bytes() == CONTENT
    assert hub.sent == len(CONTENT) - 3 * PIECE
    assert hub.seen("GET", BYTES_HOST)[-1].headers["If-Range"] == f'"{SHA256}"'


def test_a_connection_that_only_drips_is_given_up_for_a_new_one(
    hub: HubServer, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "STALL", 0.1)
    monkeypatch.setattr(transfer, "SLOWEST", 10**9)
    hub.faults = Faults(rate=1e6, times=1)
    said: list[str] = []
    fetch(hub, target, on_note=said.append)
    assert target.read_bytes() == CONTENT
    assert said == [f"{FILE}: less than 1000000000 bytes a second arrived for 0.1 seconds; trying again."]
    assert len(hub.seen("GET", BYTES_HOST)) > 1


def test_retry_after_is_waited_for(hub: HubServer, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "LONGEST_WAIT", 0.3)
    hub.faults = Faults(bytes_status=429, retry_after="3600", times=1)
    started = time.monotonic()
    fetch(hub, target)
    assert time.monotonic() - started >= 0.3


def test_a_file_that_changes_on_the_way_is_begun_again_never_spliced(hub: HubServer, target: Path) -> None:
    newer = b"GGUF" + CONTENT[4:][::-1]
    hub.faults = Faults(cut_at=2 * PIECE, rate=5e6)

    def change(step: Progress) -> None:
        if step.done == 2 * PIECE:
            hub.files[f"{REPO}/{FILE}"], hub.faults = newer, Faults()

    said: list[str] = []
    fetch(hub, target, on_progress=change, on_note=said.append)
    assert target.read_bytes() == newer
    assert any("has changed upstream" in note for note in said), said
    assert left_in(target.parent) == DONE


def test_a_file_that_changed_between_two_pulls_is_begun_again(hub: HubServer, target: Path) -> None:
    hub.faults = Faults(cut_at=2 * PIECE)
    with pytest.raises(DownloadFailed):
        fetch(hub, target)
    newer = b"GGUF" + CONTENT[4:][::-1]
    hub.files[f"{REPO}/{FILE}"], hub.faults, said = newer, Faults(), list[str]()
    fetch(hub, target, on_note=said.append)
    assert target.read_bytes() == newer
    assert said == [f"{FILE} has changed upstream since it was begun; starting from the beginning."]


def test_a_mirror_whose_machines_have_etags_of_their_own_is_believed_by_the_hash(
    hub: HubServer, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans, "LEAST_SPAN", 1)
    said: list[str] = []
    monkeypatch.setattr(hub, "faults_for_bytes", lambda: Faults(etag=str(len(hub.requests))))
    fetch(hub, target, on_note=said.append)
    assert target.read_bytes() == CONTENT
    assert len([note for note in said if "has changed upstream" in note]) == 1


def test_a_line_that_breaks_within_each_piece_still_gets_there(hub: HubServer, target: Path) -> None:
    hub.faults = Faults(cut_after=PIECE // 3)
    fetch(hub, target)
    assert target.read_bytes() == CONTENT


@pytest.mark.skipif(not hasattr(os, "SEEK_HOLE"), reason="the system does not say where holes are")
def test_pieces_that_a_power_cut_took_are_fetched_again(hub: HubServer, target: Path) -> None:
    hub.faults = Faults(cut_at=3 * PIECE)
    with pytest.raises(DownloadFailed):
        fetch(hub, target)
    part, size = journal.part_path(target), len(CONTENT)
    kept = part.read_bytes()[: 2 * PIECE]
    with part.open("wb") as file:  # the third piece is a hole now
        file.write(kept)
        file.truncate(size)
    hub.faults, said = Faults(), list[str]()
    sent = hub.sent
    fetch(hub, target, on_note=said.append)
    assert (target.read_bytes(), said) == (CONTENT, [])
    assert hub.sent - sent == size - 2 * PIECE


def test_the_plan_gives_every_piece_to_one_connection() -> None:
    done = bytearray(5000)
    done[100:200] = bytes([1]) * 100
    plan, fetched = spans.Plan(done, 4, ranged=True), list[int]()
    active = [span for _ in range(4) if (span := plan.take())]
    turn = random.Random(5)
    while active:
        span = turn.choice(active)
        fetched.append(span.position)
        if not plan.advance(span) or turn.random() < 0.01:
            active.remove(span)
            plan.give_back(span)
            active += [more] if (more := plan.take()) else []
    assert sorted(fetched) == [piece for piece in range(5000) if not 100 <= piece < 200]


def test_kept_bytes_that_are_wrong_cost_one_clean_retry(hub: HubServer, target: Path) -> None:
    hub.faults = Faults(cut_at=3 * PIECE, flip_byte=PIECE)
    with pytest.raises(DownloadFailed):
        fetch(hub, target)
    hub.faults, said = Faults(), list[str]()
    fetch(hub, target, on_note=said.append)
    assert target.read_bytes() == CONTENT
    assert any("from the start" in note for note in said)


def test_a_file_whose_hash_nobody_knows_is_fetched_and_that_is_said(
    hub: HubServer, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = replace(ask(hub), sha256=None)
    monkeypatch.setattr(download, "resolve", lambda *_, **__: remote)
    said: list[str] = []
    fetch(hub, target, on_note=said.append)
    assert said == [f"The Hub gives no sha256 for {FILE}: only its size and first bytes were checked."]
    receipt = read_receipt(target)
    assert receipt
    assert receipt.sha256 == SHA256


def test_all_parts_of_a_split_file_are_there_before_the_first(hub: HubServer, tmp_path: Path) -> None:
    names = [f"big-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    hub.files = {f"{REPO}/{name}": CONTENT + name.encode() for name in names}
    split, target = spec(file=names[0]), tmp_path / "w" / names[0]
    settings = load_settings({"HF_ENDPOINT": hub.url})
    hub.faults = Faults(cut_at=0)
    with pytest.raises(DownloadFailed):
        pull(split, settings, target)
    hub.faults = Faults()
    heard: list[Progress] = []

    def listen(step: Progress) -> None:
        heard.append(step)
        assert not target.exists()

    assert pull(split, settings, target, on_progress=listen) == target
    for name in names:
        assert (target.parent / name).read_bytes() == hub.files[f"{REPO}/{name}"]
    assert {step.total for step in heard} == {sum(map(len, hub.files.values()))}
    assert heard[-1].done == heard[-1].total
    del hub.files[f"{REPO}/{names[2]}"]
    with told(DownloadFailed, exit_code=1, message=f"{names[2]} is not there", hint="see "):
        pull(split, settings, tmp_path / "again" / names[0])
    assert not (tmp_path / "again").exists()


def test_a_newer_file_upstream_is_told_of_and_not_followed(hub: HubServer, target: Path) -> None:
    settings = load_settings({"HF_ENDPOINT": hub.url})
    assert upstream_news(spec(), settings, target) is None
    fetch(hub, target)
    assert upstream_news(spec(), settings, target) is None
    hub.files[f"{REPO}/{FILE}"] = CONTENT + b"newer"
    assert f"{REPO} has another {FILE} now" in str(upstream_news(spec(), settings, target))
    assert upstream_news(spec(sha256=SHA256), settings, target) is None, "a pin is a pin"
    hub.faults = Faults(status=500)
    assert upstream_news(spec(), settings, target) is None, "being offline is fine"
    assert target.read_bytes() == CONTENT


def test_a_disk_without_room_is_noticed_before_anything_is_fetched(
    hub: HubServer, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Path] = []

    def usage(path: Path) -> SimpleNamespace:
        looked.append(path)
        return SimpleNamespace(free=3_000_000)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    need = (len(CONTENT) + download.DISK_MARGIN) / 1e9
    message = f"needs {need:.2f} GB, and {target.parent} has 0.00 GB free"
    with told(NotEnoughDisk, exit_code=4, message=message, hint="free some space"):
        fetch(hub, target)
    assert looked == [target.parent.parent.parent]
    assert hub.seen("GET", HUB_HOST) == []
    assert not target.parent.exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_on_the_way_keeps_what_came(
    hub: HubServer, target: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    keep = transfer.Transfer._keep

    def full(self: transfer.Transfer, piece: int, *rest: Any) -> None:
        if self._journal.bytes_done >= 2 * PIECE:
            raise OSError(number, os.strerror(number))
        keep(self, piece, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(transfer.Transfer, "_keep", full)
        message = f"{target.parent} became full: 0.5 MB more are needed and "
        with told(NotEnoughDisk, exit_code=4, message=message, hint="looprun models rm tiny --partial"):
            fetch(hub, target)
    assert bytes_kept(target) >= 2 * PIECE
    assert not target.exists()
    fetch(hub, target)
    assert target.read_bytes() == CONTENT


def test_a_folder_that_cannot_be_made(hub: HubServer, tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    with told(DownloadFailed, exit_code=1, message=str(in_the_way), hint="check that you may write"):
        fetch(hub, in_the_way / FILE)


@pytest.mark.parametrize("phase", ["downloading", "hashing"])
def test_an_interrupt_keeps_what_came_and_stays_an_interrupt(hub: HubServer, target: Path, phase: str) -> None:
    hub.faults = Faults(rate=4e6)

    def interrupt(step: Progress) -> None:
        if step.phase == phase and step.done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(hub, target, on_progress=interrupt)
    assert not target.exists()
    assert bytes_kept(target) > 0
    assert left_in(target.parent) == [f"{FILE}.part", f"{FILE}.part.journal"]
    hub.faults = Faults()
    fetch(hub, target)
    assert target.read_bytes() == CONTENT


@pytest.mark.parametrize("damage", ["journal cut", "journal garbage", "part gone", "part cut", "another piece size"])
def test_a_journal_that_does_not_fit_its_part_is_worth_nothing(hub: HubServer, target: Path, damage: str) -> None:
    hub.faults = Faults(cut_at=2 * PIECE)
    with pytest.raises(DownloadFailed):
        fetch(hub, target)
    part, record = journal.part_path(target), journal.journal_path(target)
    if damage == "journal cut":
        os.truncate(record, journal.HEADER + 1)
    elif damage == "journal garbage":
        record.write_bytes(b"\0" * 5000)
    elif damage == "part gone":
        part.unlink()
    elif damage == "part cut":
        os.truncate(part, PIECE)
    else:
        record.write_bytes(record.read_bytes().replace(str(PIECE).encode(), b"131072"))
    assert journal.read_progress(target) is None
    hub.faults = Faults()
    fetch(hub, target)
    assert target.read_bytes() == CONTENT
    assert left_in(target.parent) == DONE


def test_dropping_an_unfinished_download(hub: HubServer, target: Path) -> None:
    assert journal.part_files(target) == []
    hub.faults = Faults(cut_at=2 * PIECE)
    with pytest.raises(DownloadFailed):
        fetch(hub, target)
    assert [path.name for path in journal.part_files(target)] == left_in(target.parent)
    journal.drop(target)
    assert left_in(target.parent) == []


def test_importing_the_module_does_not_load_the_hub_client() -> None:
    code = "import sys, looprun_models.download; sys.exit('huggingface_hub' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
