"""`looprun engine install | rm`: from a release server on loopback to a folder that the search finds, or not at all."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import pytest
from looprun_models.cli import app, installing
from typer.testing import CliRunner, Result

from looprun_models import install
from looprun_models.download import DISK_MARGIN
from looprun_models.engine import Engine
from looprun_models.errors import FolderUnwritable, InstallFailed, NotEnoughDisk
from looprun_models.install import Order, install_engine, place_order
from looprun_models.journal import held
from looprun_models.records import list_servers
from looprun_models.removal import find_folder
from looprun_models.search import search_engines
from looprun_models.settings import load_settings
from looprun_models.staging import LOCK, MARKER, STAGING
from looprun_models.transfer import CONNECTIONS
from looprun_models.variants import Drivers, Platform
from looprun_models.verdicts import Verdict
from tests.engines import Behaviour, make_engine
from tests.helpers import gone, wait_for
from tests.hub_server import Faults
from tests.release_server import ReleaseServer

LINUX = Platform("linux", "x64")
NAME = "llama-b{}-bin-ubuntu-x64.tar.gz"
VULKAN = "llama-b{}-bin-ubuntu-vulkan-x64.tar.gz"
GOOD = Verdict(True, drafted=1)


def archive(folder: Path, form: str = "tar", top: str = "llama-b11434/") -> bytes:
    """What a release has of this folder: symbolic links and the right to be run are in it."""
    out = io.BytesIO()
    if form == "tar":
        with tarfile.open(fileobj=out, mode="w:gz") as tar:
            tar.add(folder, top.rstrip("/") or ".")
        return out.getvalue()
    with zipfile.ZipFile(out, "w") as packed:
        for path in sorted(folder.iterdir()):
            info = zipfile.ZipInfo(f"{top}{path.name}")
            info.create_system, info.external_attr = 3, path.lstat().st_mode << 16
            packed.writestr(info, os.readlink(path).encode() if path.is_symlink() else path.read_bytes())
    return out.getvalue()


def engine_files(folder: Path, build: int, **behaviour: Unpack[Behaviour]) -> Path:
    """The content of an official archive: program, libraries with versioned names and links, licence."""
    behaviour.setdefault("version", f"version: {build} (abc)")
    make_engine(folder, **behaviour)
    (folder / "libllama.so.0.1").write_bytes(os.urandom(300_000))
    (folder / "libllama.so.0").symlink_to("libllama.so.0.1")
    (folder / "libllama.so").symlink_to("libllama.so.0")
    (folder / "LICENSE").write_text("MIT")
    return folder


@dataclass
class World:
    """A release server, a home, and how engines are proved there."""

    server: ReleaseServer
    home: Path
    scratch: Path
    proved: list[Path]
    verdict: Verdict = GOOD

    def release(self, build: int = 11434, name: str = NAME, **behaviour: Unpack[Behaviour]) -> bytes:
        folder = engine_files(self.scratch / "files" / name.format(build), build, **behaviour)
        content = archive(folder, top=f"llama-b{build}/")
        self.server.release(build, {name.format(build): content})
        return content

    def standing(self, build: int = 9800, **behaviour: Unpack[Behaviour]) -> Path:
        """A good engine that somebody has put there."""
        folder = engine_files(self.home / f"llamacpp-b{build}", build, **behaviour)
        return folder / "llama-server"

    def prove(self, engine: Engine, *_: Any, **__: Any) -> Verdict:
        self.proved.append(engine.path)
        return self.verdict

    def order(self, wanted: str = "b11434", **more: Any) -> Order:
        order = place_order(wanted, load_settings(), self.prove, **more)
        assert isinstance(order, Order)
        return order

    def install(self, wanted: str = "b11434", **more: Any) -> Path:
        return install_engine(self.order(wanted, **more), load_settings(), self.prove).engine.path

    def found(self) -> list[str]:
        """Every engine or reason in the home's folders, as a search tells it."""
        verdicts = search_engines(load_settings())
        return [str(each) if not isinstance(each, Engine) else each.label for each in verdicts if each.source[0] == "~"]

    def left(self) -> list[str]:
        """What is in the home that is neither an engine nor there from the start."""
        names = {path.name for path in self.home.iterdir()} - {".cache", ".local", ".config"}
        return sorted(name for name in names if not name.startswith("llamacpp-"))

    def downloads(self) -> list[str]:
        folder = self.home / ".cache" / "looprun" / "downloads"
        return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.fixture
def world(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(install, "find_drivers", lambda *_: Drivers())
    monkeypatch.setenv("NO_PROXY", "*")
    with ReleaseServer() as server:
        monkeypatch.setenv("LOOPRUN_ENGINE_INDEX", server.index)
        world = World(server, home, tmp_path, [])
        monkeypatch.setattr(installing, "prove", world.prove)
        yield world


def run(*words: str) -> Result:
    return CliRunner().invoke(app.app, ["engine", *words], prog_name="looprun")


def failed(done: Result, code: int) -> str:
    assert (done.exit_code, done.stdout) == (code, ""), done.output
    assert done.stderr.count("error: ") == 1, done.stderr
    assert done.stderr.count("  next: ") == 1, done.stderr
    return str(done.stderr)


# --- what a user sees ---


def test_install_says_what_it_fetches_proves_it_and_names_it(world: World) -> None:
    world.standing(9800)
    content = world.release()
    done = run("install", "b11434", "--yes")
    assert done.exit_code == 0, done.output
    program = world.home / "llamacpp-b11434" / "llama-server"
    assert done.stdout == f"{program}\n"
    assert "variant cpu: no GPU driver was found" in done.stderr
    assert f"b11434 ({program}) is installed: serves (drafts; " in done.stderr
    assert f"used now: b11434 ({program}), from ~/llamacpp-b11434" in done.stderr
    assert "stays until: looprun engine rm llamacpp-b9800\n" in done.stderr
    assert os.readlink(program.with_name("libllama.so")) == "libllama.so.0"
    assert stat.S_IMODE(program.stat().st_mode) == 0o755
    marker = json.loads((program.parent / MARKER).read_text())
    assert (marker["build"], marker["variant"]) == (11434, "cpu")
    assert marker["files"] == {NAME.format(11434): world.server.sha256(content)}
    assert (world.left(), world.downloads()) == ([], [])
    assert [path.parts[-4].startswith(STAGING) for path in world.proved] == [True], "proved before it has its name"


def test_without_a_terminal_and_without_yes_nothing_is_fetched(world: World) -> None:
    content = world.release()
    told = run("install")
    assert (told.exit_code, told.stdout) == (1, "")
    size = f"{len(content) / 1e3:.1f} kB"
    target = world.home / "llamacpp-b11434"
    assert f"Fetch {NAME.format(11434)} ({size}) from 127.0.0.1 and install it in {target}? No term" in told.stderr
    assert "error: nothing was fetched.\n  next: looprun engine install b11434 --yes" in told.stderr
    assert world.server.fetched() == []
    assert (world.found(), world.left(), world.downloads()) == ([], [], [])


def test_latest_passes_over_a_half_uploaded_release(world: World) -> None:
    world.release(11434)
    world.server.release(11436, {NAME.format(11436): b"x"}, state="starter")
    done = run("install", "--yes")
    assert done.exit_code == 0, done.output
    assert "b11436 has no cpu build for linux x64 (yet): b11434 is the newest that does." in done.stderr


def test_an_engine_that_is_there_is_not_fetched_again(world: World) -> None:
    world.release()
    assert run("install", "b11434", "--yes").exit_code == 0
    before = len(world.server.requests)
    done = run("install", "b11434")
    assert (done.exit_code, done.stdout.count("\n")) == (0, 1), done.output
    assert "is already installed." in done.stderr
    assert len(world.server.requests) == before, "the index need not be asked"
    assert "is already installed." in run("install", "latest").stderr


def test_what_comes_before_it_is_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.release()
    other = make_engine(world.scratch / "own")
    monkeypatch.setenv("LLAMA_BIN", str(other))
    done = run("install", "--yes")
    assert f"({other}), from LLAMA_BIN, comes before it and is used: looprun engine list" in done.stderr


def test_an_engine_that_is_not_used_because_of_a_variable_says_so(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.release()
    monkeypatch.setenv("LLAMA_BIN", "/nope")
    for _ in ("fetched", "there already"):
        done = run("install", "--yes")
        assert done.exit_code == 0, done.output
        assert "LLAMA_BIN=/nope cannot be used: there is no such file.\n  next: point LLAMA_BIN at" in done.stderr
        assert "or unset it" in done.stderr
        assert "next: looprun engine install" not in done.stderr


def test_servers_that_run_on_another_engine_are_named(world: World, profile: Callable[..., str]) -> None:
    from looprun_models.registry import resolve_alias
    from looprun_models.runtime import LlamaCppRuntime

    world.standing(9800)
    alias = profile("tiny-qwen35")
    with LlamaCppRuntime().ensure_server(resolve_alias(alias)):
        (server,) = list_servers(load_settings())
        world.release()
        done = run("install", "b11434", "--yes")
        stop = f"looprun models stop {alias}, then serve it again"
        assert f"{alias} still runs on b9800 (pid {server.child_pid}): {stop}\n" in done.stderr
    assert "still runs" not in run("install", "b11434").stderr


@pytest.mark.parametrize("word", ["b9779", "newest"])
def test_a_build_that_cannot_be_used_is_exit_2_without_network(word: str, world: World) -> None:
    assert "looprun engine install latest" in failed(run("install", word, "--yes"), 2)
    assert world.server.requests == []


def test_no_digest_no_install(world: World) -> None:
    folder = engine_files(world.scratch / "files", 11434)
    world.server.release(11434, {NAME.format(11434): archive(folder)}, digest=None)
    told = failed(run("install", "b11434", "--yes"), 1)
    assert "gives no sha256 for" in told
    assert "looprun engine install b11434 --allow-unverified" in told
    assert world.server.fetched() == []
    done = run("install", "b11434", "--yes", "--allow-unverified")
    assert done.exit_code == 0, done.output
    assert "not verified, as you allowed" in done.stderr


def test_a_wrong_digest(world: World) -> None:
    world.release()
    world.server.releases[0]["assets"][0]["digest"] = f"sha256:{'0' * 64}"
    told = failed(run("install", "b11434", "--yes"), 1)
    assert "did not arrive as it is on the release host: sha256 expected 0000" in told
    assert "looprun engine install b11434" in told
    assert (world.found(), world.left(), world.downloads()) == ([], [], [])


def test_a_log_in_page_in_place_of_the_file(world: World) -> None:
    world.release()
    world.server.faults = Faults(bytes_html=True)
    told = failed(run("install", "b11434", "--yes"), 1)
    assert "is no archive where it was fetched from: the answer is a web page" in told
    assert "check LOOPRUN_ENGINE_INDEX" in told


def test_a_file_that_is_gone(world: World) -> None:
    world.release()
    world.server.releases[0]["assets"][0]["browser_download_url"] = f"{world.server.index}/gone"
    told = failed(run("install", "b11434", "--yes"), 1)
    assert "was not given by the release host (HTTP 404)" in told


@pytest.mark.parametrize("status", [403, 404, 410])
def test_a_host_that_refuses_the_file_is_not_asked_again(status: int, world: World) -> None:
    world.release()
    world.server.faults = Faults(bytes_status=status)
    told = failed(run("install", "b11434", "--yes"), 1)
    assert f"was not given by the release host (HTTP {status})" in told
    assert "next: name another build: looprun engine install bNNNN; or check LOOPRUN_ENGINE_INDEX" in told
    assert len(world.server.fetched()) <= CONNECTIONS, "each connection once"


@pytest.mark.parametrize("more", [-1, 1])
def test_a_size_that_the_index_has_wrong_is_said_once(more: int, world: World) -> None:
    size = len(world.release())
    world.server.releases[0]["assets"][0]["size"] = size + more
    told = failed(run("install", "b11434", "--yes"), 1)
    assert f"the index says {size + more:,} bytes, and the host of the file has {size:,}." in told
    assert "upstream" not in told
    assert (world.found(), world.left()) == ([], [])


def test_the_token_of_the_hub_goes_nowhere(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    world.release()
    world.install()
    assert world.server.fetched()
    assert not [request for request in world.server.requests if request.headers["Authorization"]]


# --- archives ---


def test_a_zip_without_a_folder_around_everything(world: World) -> None:
    folder = engine_files(world.scratch / "files", 11434)
    world.server.release(11434, {NAME.format(11434).replace("tar.gz", "zip"): archive(folder, "zip", "")})
    program = world.install()
    assert os.readlink(program.with_name("libllama.so.0")) == "libllama.so.0.1"
    assert world.found() == [f"b11434 ({program})"]


def evil(name: str, to: str = "") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        info = tarfile.TarInfo(name)
        info.type, info.linkname = (tarfile.SYMTYPE, to) if to else (tarfile.REGTYPE, "")
        tar.addfile(info, io.BytesIO(b""))
    return out.getvalue()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (evil("../llamacpp-b99999"), "its entry '../llamacpp-b99999' has a name that leads outside"),
        (evil("/tmp/x"), "its entry '/tmp/x' has an absolute name"),
        (evil("llama/link", "/etc"), "its entry 'llama/link' is a link that leads outside (to '/etc')"),
        (evil("llama/nothing"), "was not installed: no llama-server in it"),
        (b"\x1f\x8b\x08\x00 cut", "is cut short or damaged"),
    ],
    ids=["parent", "absolute", "link", "no engine", "cut"],
)
def test_a_bad_archive_leaves_nothing(content: bytes, why: str, world: World) -> None:
    world.standing(9800)
    before = world.found()
    world.server.release(11434, {NAME.format(11434): content})
    assert why in failed(run("install", "b11434", "--yes"), 1)
    assert (world.found(), world.left(), world.downloads()) == (before, [], [])


@pytest.mark.parametrize("inside", ["", "/x"])
def test_an_archive_that_brings_our_mark_is_a_bad_one(inside: str, world: World) -> None:
    folder = engine_files(world.scratch / "files", 11434)
    (folder / MARKER).mkdir() if inside else (folder / MARKER).touch()
    world.server.release(11434, {NAME.format(11434): archive(folder)})
    told = failed(run("install", "b11434", "--yes"), 1)
    assert f"was not installed: it brings a {MARKER}" in told
    assert "another build" in told
    assert (world.found(), world.left(), world.downloads()) == ([], [], [])


def test_a_cut_archive_with_a_digest_of_its_own(world: World) -> None:
    content = archive(engine_files(world.scratch / "files", 11434))
    world.server.release(11434, {NAME.format(11434): content[: len(content) // 2]})
    assert "is cut short or damaged after 'llama-b11434/" in failed(run("install", "b11434", "--yes"), 1)
    assert (world.found(), world.left(), world.downloads()) == ([], [], [])


def test_the_libraries_of_a_second_file_lie_beside_the_program(world: World) -> None:
    name, runtime = "llama-b11434-bin-ubuntu-cuda-12.8-x64.tar.gz", "cudart-llama-bin-ubuntu-cuda-12.8-x64.tar.gz"
    libraries = world.scratch / "libraries"
    libraries.mkdir()
    (libraries / "libcudart.so.12").write_bytes(b"cuda")
    (libraries / "LICENSE").write_text("another")
    files = engine_files(world.scratch / "files", 11434)
    world.server.release(11434, {name: archive(files), runtime: archive(libraries, top="")})
    told = run("install", "b11434", "--variant", "cuda")
    assert "nobody of this project has run: experimental" in told.stderr
    assert f"{name} (" in told.stderr
    assert f" and {runtime} (" in told.stderr
    program = world.install(variant="cuda")
    assert program.parent == world.home / "llamacpp-b11434-cuda"
    assert program.with_name("libcudart.so.12").read_bytes() == b"cuda"
    assert program.with_name("LICENSE").read_text() == "MIT"


# --- engines that are not what they should be ---


def test_an_engine_that_does_not_serve_is_not_installed(world: World) -> None:
    world.standing(9800)
    before = world.found()
    world.release()
    world.verdict = Verdict(False, "built for another CPU (killed by SIGILL)")
    told = failed(run("install", "b11434", "--yes"), 1)
    assert f"{NAME.format(11434)} was not installed: built for another CPU (killed by SIGILL)." in told
    assert (world.found(), world.left(), world.downloads()) == (before, [], [])


def test_an_engine_that_could_not_be_proved_is_not_installed(world: World) -> None:
    world.release()
    world.verdict = Verdict(None, "it was not ready within 120 s")
    assert "was not installed: it was not ready" in failed(run("install", "b11434", "--yes"), 1)
    assert world.found() == []


def test_a_gpu_build_that_does_not_serve_points_at_the_cpu_build(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "find_drivers", lambda *_: Drivers("/etc/x.json", "/lib/libvulkan.so.1"))
    world.release(name=VULKAN)
    world.verdict = Verdict(False, "no device")
    told = failed(run("install", "b11434", "--yes"), 1)
    assert "looprun engine install b11434 --variant cpu" in told
    assert "variant vulkan: a Vulkan driver is here (/etc/x.json)" in told


def test_the_next_command_asks_for_the_same_variant(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "find_drivers", lambda *_: Drivers("/etc/x.json", "/lib/libvulkan.so.1"))
    world.release()
    assert "next: looprun engine install b11434 --variant cpu --yes" in run("install", "--variant", "cpu").stderr


def test_an_interrupt_names_the_command_that_goes_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.release()

    def interrupted(*_: Any, **__: Any) -> Verdict:
        raise KeyboardInterrupt

    monkeypatch.setattr(installing, "prove", interrupted)
    done = run("install", "--yes")
    assert done.exit_code == 130
    assert "nothing was changed; looprun engine install b11434 takes it up from there." in done.stderr
    assert (world.found(), world.left()) == ([], [])


def test_a_program_that_does_not_start_says_why(world: World) -> None:
    world.release(version_exit=-4)
    told = failed(run("install", "b11434", "--yes"), 1)
    assert "SIGILL" in told
    assert world.proved == []


def test_an_engine_of_another_build_than_its_tag(world: World) -> None:
    world.release(version="version: 11000 (abc)")
    assert "the engine in it says that it is b11000" in failed(run("install", "b11434", "--yes"), 1)
    assert (world.found(), world.left()) == ([], [])


def test_an_engine_that_does_not_know_its_build_may_stay(world: World) -> None:
    world.release(version="version: 0 (unknown)")
    assert world.install().parent.name == "llamacpp-b11434"


# --- what is there already ---


def test_a_broken_engine_of_ours_is_replaced(world: World) -> None:
    world.release()
    program = world.install()
    program.write_text("#!/bin/sh\nexit 1\n")
    done = run("install", "b11434", "--yes")
    assert done.exit_code == 0, done.output
    assert f"{program.parent} is no b11434 that serves (" in done.stderr
    assert "): it is replaced." in done.stderr
    assert world.found() == [f"b11434 ({program})"]
    assert world.left() == []


def test_a_broken_engine_of_somebody_else_is_moved_aside(world: World) -> None:
    own = world.home / "llamacpp-b11434"
    own.mkdir()
    (own / "notes").write_text("mine")
    (world.home / "was-llamacpp-b11434").mkdir()
    world.release()
    done = run("install", "b11434", "--yes")
    assert done.exit_code == 0, done.output
    assert "): it is moved aside." in done.stderr
    assert f"what was in {own} is in {world.home}/was-llamacpp-b11434-2 now" in done.stderr
    assert (world.home / "was-llamacpp-b11434-2" / "notes").read_text() == "mine"
    assert len(world.found()) == 1


@pytest.mark.parametrize("mine", [True, False])
def test_another_build_under_the_name_is_not_taken_for_it(mine: bool, world: World) -> None:
    folder = engine_files(world.home / "llamacpp-b11434", 9780)
    if not mine:
        (folder / MARKER).touch()
    world.release()
    done = run("install", "b11434", "--yes")
    assert done.exit_code == 0, done.output
    fate = "moved aside" if mine else "replaced"
    assert f"{folder} is no b11434 that serves (the engine in it says that it is b9780): it is {fate}." in done.stderr
    assert world.found() == [f"b11434 ({folder}/llama-server)"]
    assert world.left() == (["was-llamacpp-b11434"] if mine else [])


@pytest.mark.parametrize(("link", "why"), [(True, "it is a link to nothing"), (False, "it is no folder")])
def test_what_has_the_name_and_is_no_folder_is_moved_aside(link: bool, why: str, world: World) -> None:
    place = world.home / "llamacpp-b11434"
    if link:
        place.symlink_to("nowhere")
    else:
        place.write_text("notes")
    world.release()
    done = run("install", "b11434", "--yes")
    assert done.exit_code == 0, done.output
    assert f"serves ({why}): it is moved aside." in done.stderr
    assert world.left() == ["was-llamacpp-b11434"]


def test_a_rename_that_fails_puts_the_old_one_back(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    own = world.home / "llamacpp-b11434"
    own.mkdir()
    world.release()
    order, rename = world.order(), Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if STAGING in str(self) and Path(target) == own:
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(InstallFailed, match="b11434 was not installed: Input/output error"):
        install_engine(order, load_settings(), world.prove)
    assert own.is_dir()
    assert world.left() == []


def test_variants_lie_beside_each_other(world: World) -> None:
    world.release()
    plain = world.install()
    world.server.releases.clear()
    world.release(name=VULKAN)
    vulkan = world.install(variant="vulkan")
    assert (plain.parent.name, vulkan.parent.name) == ("llamacpp-b11434", "llamacpp-b11434-vulkan")
    assert world.found() == [f"b11434 ({vulkan})", f"b11434 ({plain})"], "the one that was asked for comes first"


# --- places that cannot be used ---


def test_no_home(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    world.release()
    monkeypatch.setenv("HOME", str(tmp_path / "nowhere"))
    told = failed(run("install", "b11434", "--yes"), 1)
    assert f"cannot write to {tmp_path}/nowhere: there is no such folder" in told
    assert world.server.requests == []
    settings = load_settings()
    with pytest.raises(FolderUnwritable, match="there is no home folder"):
        place_order("latest", type(settings)(**{**vars_of(settings), "home": None}), world.prove)


def vars_of(settings: Any) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in settings.__dataclass_fields__}


def test_a_home_that_cannot_be_written(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != world.home)
    told = failed(run("install", "b11434", "--yes"), 1)
    assert f"cannot write to {world.home}: Permission denied" in told


def test_too_little_room_is_said_before_anybody_is_asked(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    content = world.release()
    usage = type("Usage", (), {"free": 5 * len(content) + DISK_MARGIN - 1})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    told = failed(run("install", "b11434", "--yes"), 4)
    assert "b11434 needs 0.07 GB for a while, and" in told
    assert world.server.fetched() == []


def test_a_disk_that_becomes_full(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.standing(9800)
    before = world.found()
    world.release()
    order = world.order()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(install, "unpack", full)
    with pytest.raises(NotEnoughDisk, match=r"became full .*: b11434 was not installed") as caught:
        install_engine(order, load_settings(), world.prove)
    assert "looprun engine install b11434" in caught.value.hint
    assert (world.found(), world.left(), world.downloads()) == (before, [], [])


# --- kills ---

CHILD = """
import sys
from pathlib import Path
from looprun_models import install
from looprun_models.install import install_engine, place_order
from looprun_models.settings import load_settings
from looprun_models.variants import Drivers, Platform
from looprun_models.verdicts import Verdict

stop_at = sys.argv[1]
install.find_drivers = lambda *_: Drivers()
install.this_platform = lambda: Platform("linux", "x64")

def here(point):
    if point == stop_at:
        print("there", flush=True)
        sys.stdin.read()

def prove(engine):
    here("proving")
    return Verdict(True)

def progress(step):
    if step.phase == "unpacking":
        here("unpacking")

def unpack(archive, folder, on_progress):
    here("fetched")
    original(archive, folder, on_progress)
    here("unpacked")

def put(*words):
    here("before the rename")
    renamed(*words)
    here("after the rename")

original, install.unpack = install.unpack, unpack
renamed, install._put = install._put, put
settings = load_settings()
install_engine(place_order("b11434", settings, prove), settings, prove, on_progress=progress)
here("end")
"""


@contextlib.contextmanager
def installing_until(point: str) -> Iterator[subprocess.Popen[str]]:
    """An install in a process of its own that stops at a point until it is killed."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    child = subprocess.Popen([sys.executable, "-c", CHILD, point], **pipes)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def reached(child: subprocess.Popen[str]) -> bool:
    assert child.stdout
    return child.stdout.readline() == "there\n"


POINTS = ("fetched", "unpacking", "unpacked", "proving", "before the rename", "after the rename")


@pytest.mark.parametrize("broken_one_there", [False, True])
@pytest.mark.parametrize("point", POINTS)
def test_a_kill_leaves_whole_engines_only(point: str, broken_one_there: bool, world: World) -> None:
    world.standing(9800)
    if broken_one_there:
        (world.home / "llamacpp-b11434").mkdir()
        (world.home / "llamacpp-b11434" / MARKER).touch()
    before = world.found()
    world.release()
    with installing_until(point) as child:
        assert reached(child)
    after = world.found()
    program = world.home / "llamacpp-b11434" / "llama-server"
    if point == "after the rename":
        assert after == [f"b11434 ({program})", before[-1]]
    else:
        assert after == before
    assert stat.S_IMODE(next(world.home.glob(f"{STAGING}*")).stat().st_mode) == 0o700 or point == "fetched"
    done = run("install", "b11434", "--yes")
    assert done.exit_code == 0, done.output
    assert world.found() == [f"b11434 ({program})", before[-1]]
    if point != "after the rename":
        assert (world.left(), world.downloads()) == ([], [])
    fetched = world.server.fetched()
    assert len(fetched) == 1, "what was whole was not fetched again"


def test_a_kill_between_the_two_renames_loses_only_what_was_broken(world: World) -> None:
    world.standing(9800)
    folder = world.home / "llamacpp-b11434"
    folder.mkdir()
    (folder / MARKER).touch()
    world.release()
    code = CHILD.replace(
        "renamed, install._put",
        """def rename(self, target):
    moved(self, target)
    if Path(target).name == "old":
        here("between")
moved, Path.rename = Path.rename, rename
renamed, install._put""",
    )
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code, "between"], **pipes) as child:
        assert reached(child)
        child.kill()
    assert [each[:5] for each in world.found()] == ["b9800"]
    world.install()
    assert [each.split()[0] for each in world.found()] == ["b11434", "b9800"]
    assert world.left() == []


def test_a_kill_during_the_download_is_taken_up(world: World) -> None:
    world.standing(9800)
    before = world.found()
    files = engine_files(world.scratch / "big", 11434)
    (files / "libggml.so").write_bytes(os.urandom(3_000_000))
    content = archive(files)
    world.server.release(11434, {NAME.format(11434): content})
    world.server.faults = Faults(stall_after=1_500_000)
    with installing_until("end"):
        journal = world.home / ".cache/looprun/downloads" / f"{NAME.format(11434)}.part.journal"
        wait_for(lambda: journal.exists() and journal.read_bytes().count(b"\x01") >= 5, "most of it has arrived")
    assert world.found() == before
    world.server.faults, sent = Faults(), world.server.sent
    done = run("install", "b11434", "--yes")
    assert done.exit_code == 0, done.output
    assert world.server.sent - sent < len(content) - 1_000_000, "what had arrived was not fetched again"
    assert (len(world.found()), world.left(), world.downloads()) == (2, [], [])


def test_a_kill_while_the_new_engine_answers_version(world: World) -> None:
    world.standing(9800)
    before = world.found()
    pipe, pid = world.scratch / "pipe", world.scratch / "pid"
    os.mkfifo(pipe)
    folder = engine_files(world.scratch / "files", 11434)
    program = (folder / "llama-server").read_text()
    (folder / "llama-server").write_text(f"#!/bin/sh\necho $$ > {pid}\nread line < {pipe}\n")
    world.server.release(11434, {NAME.format(11434): archive(folder)})
    with installing_until("end"):
        wait_for(lambda: pid.exists() and pid.read_text().endswith("\n"), "the program runs")
    assert world.found() == before
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(pid.read_text()), signal.SIGKILL)
    wait_for(lambda: gone(int(pid.read_text())), "the program has ended")
    world.server.releases.clear()
    (folder / "llama-server").write_text(program)
    world.server.release(11434, {NAME.format(11434): archive(folder)})
    world.install()
    assert (len(world.found()), world.left(), world.downloads()) == (2, [], [])


def test_an_interrupt_keeps_what_was_fetched_and_nothing_else(world: World) -> None:
    world.release()
    order = world.order()

    def interrupted(_: Engine) -> Verdict:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        install_engine(order, load_settings(), interrupted)
    assert (world.found(), world.left()) == ([], [])
    assert world.downloads() == [NAME.format(11434), f"{NAME.format(11434)}.receipt.json"]


# --- two at once ---


def test_a_second_install_waits_and_finds_the_first_ones_engine(world: World) -> None:
    world.release()
    order, notes = world.order(), list[str]()
    with installing_until("proving") as child:
        assert reached(child)

        def heard(note: str) -> None:
            notes.append(note)
            assert child.stdin
            child.stdin.close()  # the first goes on

        done = install_engine(order, load_settings(), world.prove, on_note=heard)
        child.stdin = None
        child.wait()
    assert notes == ["another install or removal of an engine is running; waiting for it."]
    assert done.proof is None, "the first one's engine, proved where it is"
    assert len(world.server.fetched()) == 1
    assert (len(world.found()), world.left()) == (1, [])


def test_a_running_install_is_not_cleaned_away(world: World) -> None:
    world.release()
    (world.home / f"{STAGING}dead").mkdir()
    with installing_until("proving") as child:
        assert reached(child)
        assert len(list(world.home.glob(f"{STAGING}*"))) == 1, "the dead one's is gone, its own is there"


# --- rm ---


def test_rm_asks_removes_and_says_what_is_used_then(world: World) -> None:
    world.standing(9800)
    world.release()
    folder = world.install().parent
    told = run("rm", "b11434")
    assert told.exit_code == 1
    assert f"Remove {folder} (" in told.stderr
    assert "looprun did not put it" not in told.stderr
    assert "nothing was removed.\n  next: looprun engine rm b11434 --yes" in told.stderr
    done = run("rm", "b11434", "--yes")
    assert done.exit_code == 0, done.output
    assert done.stdout.endswith(" freed\n")
    assert "used now: b9800 (" in done.stderr
    assert [each.split()[0] for each in world.found()] == ["b9800"]
    assert world.left() == []


def test_rm_of_the_last_one_says_how_to_get_another(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.standing(9800)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("looprun_models.search.importlib.util.find_spec", lambda name: None)
    done = run("rm", "llamacpp-b9800", "--yes")
    assert done.exit_code == 0, done.output
    assert "no engine can be used now\n  next: looprun engine install" in done.stderr


def ours(folder: Path, build: int) -> Path:
    """An engine in a folder as `install` leaves it."""
    engine_files(folder, build)
    (folder / MARKER).touch()
    return folder


@pytest.mark.parametrize("name", ["b9800", "B9800", "9800", "llamacpp-b9800"])
def test_the_names_of_an_engine(name: str, world: World) -> None:
    folder = ours(world.home / "llamacpp-b9800", 9800)
    world.standing(9900)
    assert find_folder(name, load_settings()) == folder
    done = run("rm", name, "--yes")
    assert (done.exit_code, done.stdout.split(",")[0]) == (0, f"{folder} removed"), done.output


@pytest.mark.parametrize("end", ["b9800", "9800", "b9800-mine"])
@pytest.mark.parametrize("word", ["b9800", "9800"])
def test_what_looprun_did_not_put_there_goes_by_its_whole_name_only(word: str, end: str, world: World) -> None:
    folder = engine_files(world.home / f"llamacpp-{end}", 9800)
    told = failed(run("rm", word, "--yes"), 2)
    assert f"looprun did not put {folder} there" in told
    assert f"next: looprun engine rm llamacpp-{end}\n" in told
    assert folder.exists()
    assert "which looprun did not put there?" in run("rm", folder.name).stderr
    assert run("rm", folder.name, "--yes").exit_code == 0
    assert not folder.exists()


@pytest.mark.parametrize("name", ["llamacpp-src", "llamacpp-b9800x", "llamacpp-my-b9800", "llamacpp-b98001"])
@pytest.mark.parametrize("word", ["b9800", "9800"])
def test_a_build_never_means_a_folder_whose_name_does_not_say_it(word: str, name: str, world: World) -> None:
    folder = ours(world.home / name, 9800)
    (folder / ".git").mkdir()
    assert "looprun engine list" in failed(run("rm", word, "--yes"), 4)
    assert (folder / ".git").exists()


def test_a_variant_is_named_by_its_folder(world: World) -> None:
    plain, vulkan = (ours(world.home / f"llamacpp-b11000{end}", 11000) for end in ("", "-vulkan"))
    assert find_folder("b11000", load_settings()) == plain
    assert find_folder("11000-vulkan", load_settings()) == vulkan
    shutil.rmtree(plain)
    assert find_folder("b11000", load_settings()) == vulkan


def test_a_build_that_several_have_is_answered_with_a_command_that_can_be_typed(world: World) -> None:
    for end in ("cuda", "vulkan"):
        ours(world.home / f"llamacpp-b11000-{end}", 11000)
    told = failed(run("rm", "b11000", "--yes"), 2)
    assert "b11000 is the build of llamacpp-b11000-cuda, llamacpp-b11000-vulkan." in told
    assert "next: looprun engine rm llamacpp-b11000-cuda   (or llamacpp-b11000-vulkan)\n" in told
    assert len(world.found()) == 2


def test_rm_of_what_another_rm_has_just_removed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ours(world.home / "llamacpp-b11000", 11000)
    monkeypatch.setattr(installing, "check_unused", lambda *_: shutil.rmtree(folder))
    told = failed(run("rm", "b11000", "--yes"), 4)
    assert f"{folder} is gone already: something else removed it." in told
    assert world.left() == []


def test_rm_removes_what_an_install_has_left_without_an_engine(world: World) -> None:
    folder = world.home / "llamacpp-b11000"
    folder.mkdir()
    (folder / MARKER).touch()
    assert run("rm", "b11000", "--yes").exit_code == 0
    assert not folder.exists()


@pytest.mark.parametrize("name", ["b11111", "..", "../home", "*", "llama.cpp", ""])
def test_rm_of_what_is_not_there(name: str, world: World) -> None:
    world.standing(9800)
    assert "looprun engine list" in failed(run("rm", name, "--yes"), 4)
    assert len(world.found()) == 1


def test_rm_leaves_a_folder_that_holds_no_engine(world: World) -> None:
    folder = world.home / "llamacpp-b11434"
    folder.mkdir()
    (folder / "notes").touch()
    assert "holds no engine and is left alone" in failed(run("rm", "b11434", "--yes"), 2)
    assert (folder / "notes").exists()


def test_rm_of_a_broken_engine(world: World) -> None:
    program = world.standing(9800, version_exit=1)
    assert run("rm", "llamacpp-b9800", "--yes").exit_code == 0
    assert not program.parent.exists()


def test_rm_of_a_link_leaves_what_it_leads_to(world: World) -> None:
    real = engine_files(world.scratch / "elsewhere", 9800)
    (world.home / "llamacpp-b9800").symlink_to(real)
    done = run("rm", "llamacpp-b9800", "--yes")
    assert (done.exit_code, done.stdout) == (0, f"{world.home}/llamacpp-b9800 removed, 0 B freed\n"), done.output
    assert (real / "llama-server").exists()
    assert world.found() == []


def test_rm_of_an_interrupted_download(world: World) -> None:
    world.release()
    order = world.order()
    with contextlib.suppress(KeyboardInterrupt):
        install_engine(order, load_settings(), lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    assert "Remove what an interrupted install has fetched of b11434 (" in run("rm", "b11434").stderr
    done = run("rm", "b11434", "--yes")
    assert done.exit_code == 0, done.output
    assert world.downloads() == []


def test_rm_refuses_while_a_server_runs_from_it(
    world: World, profile: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from looprun_models.registry import resolve_alias
    from looprun_models.runtime import LlamaCppRuntime

    program = world.standing(9800)
    alias = profile("tiny-qwen35")
    with LlamaCppRuntime().ensure_server(resolve_alias(alias)):
        told = failed(run("rm", "llamacpp-b9800", "--yes"), 1)
        assert f"{program.parent} is in use: the server of {alias} (pid " in told
        assert f"next: looprun models stop {alias}" in told
        assert program.exists()


def test_a_kill_of_rm_leaves_no_half_engine(world: World) -> None:
    world.standing(9800)
    world.standing(9900)
    code = (
        "import shutil, sys\n"
        "from looprun_models.removal import find_folder, remove_engine\n"
        "from looprun_models.settings import load_settings\n"
        "def stop(*_, **__):\n    print('there', flush=True)\n    sys.stdin.read()\n"
        "settings = load_settings()\nfolder = find_folder('llamacpp-b9900', settings)\n"
        "shutil.rmtree = stop\nremove_engine(folder, settings)\n"
    )
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as child:
        assert reached(child)
        child.kill()
    assert [each.split()[0] for each in world.found()] == ["b9800"]
    assert len(list(world.home.glob(f"{STAGING}*"))) == 1
    assert run("rm", "llamacpp-b9800", "--yes").exit_code == 0
    assert (world.found(), world.left()) == ([], [])


def test_the_lock_is_gone_after_use_and_free_after_a_kill(world: World) -> None:
    (world.home / LOCK).touch()  # as a kill leaves it
    with held(world.home / LOCK, lambda first: pytest.fail("a dead holder holds nothing")):
        pass
    assert world.left() == []


@pytest.mark.usefixtures("nothing_installed")
def test_init_installs_an_engine_after_a_yes_and_says_both_ways_without_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    world.release()
    no = CliRunner().invoke(app.app, ["init", "--local", "smoke"])
    assert no.exit_code == 0, no.output
    assert "looprun engine install  " in no.stdout
    assert 'pip install "looprun-models[embedded]"  ' in no.stdout
    assert world.server.requests == []
    yes = CliRunner().invoke(app.app, ["init", "--local", "smoke", "--yes"])
    assert f"engine   b11434 ({world.home}/llamacpp-b11434/llama-server), from ~/llamacpp-b11434" in yes.stdout
    assert world.found()
    assert "offline mode" in yes.stderr  # the weights came next
