"""Which official build is taken: by platform, by driver, and by what the index says there is."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from looprun_models.errors import BadSetting, DownloadFailed, EngineMissing, UsageError
from looprun_models.releases import Asset, Release, find_build, find_latest, parse_wanted, pick
from looprun_models.settings import Settings, load_settings
from looprun_models.variants import BUILDS, Drivers, Platform, choose_variant, find_drivers, this_platform
from tests.release_server import ReleaseServer

LINUX, ARM_LINUX = Platform("linux", "x64"), Platform("linux", "arm64")
WINDOWS, ARM_WINDOWS = Platform("windows", "x64"), Platform("windows", "arm64")
MAC, INTEL_MAC = Platform("macos", "arm64"), Platform("macos", "x64")
UBUNTU = "llama-b{}-bin-ubuntu-x64.tar.gz"
ARCHIVES = [
    "macos-arm64",
    "macos-x64",
    "ubuntu-x64",
    "ubuntu-arm64",
    "ubuntu-vulkan-x64",
    "ubuntu-vulkan-arm64",
    "ubuntu-cuda-13.4-x64",
    "ubuntu-cuda-12.8-x64",
    "ubuntu-cuda-13.4-arm64",
    "ubuntu-rocm-7.2-x64",
    "ubuntu-sycl-fp16-x64",
    "ubuntu-openvino-2026.1-x64",
]
ZIPS = [
    "win-cpu-x64",
    "win-cpu-arm64",
    "win-cuda-13.3-x64",
    "win-cuda-12.4-x64",
    "win-vulkan-x64",
    "win-hip-radeon-x64",
]
PARTS = [*(f"{name}.tar.gz" for name in ARCHIVES), *(f"{name}.zip" for name in ZIPS)]
CUDART = [
    "cudart-llama-bin-win-cuda-12.4-x64.zip",
    "cudart-llama-bin-win-cuda-13.3-x64.zip",
    "cudart-llama-bin-ubuntu-cuda-12.8-x64.tar.gz",
]


def release_of(*names: str, build: int = 11434) -> Release:
    return Release(build, tuple(Asset(name, 1, "http://x/", None) for name in names))


FULL = release_of(*(f"llama-b11434-bin-{part}" for part in PARTS), *CUDART)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ReleaseServer]:
    with ReleaseServer() as server:
        monkeypatch.setenv("LOOPRUN_ENGINE_INDEX", server.index)
        yield server


@pytest.fixture
def settings(server: ReleaseServer) -> Settings:
    return load_settings()


# --- which file ---


@pytest.mark.parametrize(
    ("here", "variant", "parts"),
    [
        (LINUX, "cpu", ["ubuntu-x64.tar.gz"]),
        (LINUX, "vulkan", ["ubuntu-vulkan-x64.tar.gz"]),
        (LINUX, "cuda", ["ubuntu-cuda-12.8-x64.tar.gz", CUDART[2]]),
        (ARM_LINUX, "cpu", ["ubuntu-arm64.tar.gz"]),
        (ARM_LINUX, "vulkan", ["ubuntu-vulkan-arm64.tar.gz"]),
        (ARM_LINUX, "cuda", ["ubuntu-cuda-13.4-arm64.tar.gz"]),
        (MAC, "metal", ["macos-arm64.tar.gz"]),
        (INTEL_MAC, "cpu", ["macos-x64.tar.gz"]),
        (WINDOWS, "cpu", ["win-cpu-x64.zip"]),
        (WINDOWS, "vulkan", ["win-vulkan-x64.zip"]),
        (WINDOWS, "cuda", ["win-cuda-12.4-x64.zip", CUDART[0]]),
        (ARM_WINDOWS, "cpu", ["win-cpu-arm64.zip"]),
    ],
)
def test_each_platform_and_variant_has_its_file(here: Platform, variant: str, parts: list[str]) -> None:
    names = [asset.name.removeprefix("llama-b11434-bin-") for asset in pick(FULL, here, variant)]
    assert names == parts


def test_every_row_of_the_table_is_tested() -> None:
    assert sum(len(row) for row in BUILDS.values()) == 12


def test_cuda_versions_are_compared_as_numbers() -> None:
    names = [f"llama-b11434-bin-ubuntu-cuda-{version}-x64.tar.gz" for version in ("12.10", "12.8", "13.0")]
    assert pick(release_of(*names), LINUX, "cuda")[0].name == names[1]


def test_cuda_on_windows_is_nothing_without_its_libraries() -> None:
    both = ["llama-b11434-bin-win-cuda-12.4-x64.zip", "llama-b11434-bin-win-cuda-13.3-x64.zip"]
    assert pick(release_of(*both), WINDOWS, "cuda") == ()
    assert [asset.name for asset in pick(release_of(*both, CUDART[1]), WINDOWS, "cuda")] == [both[1], CUDART[1]]


@pytest.mark.parametrize(
    "name",
    [
        "llama-b11433-bin-ubuntu-x64.tar.gz",
        "llama-b11434-bin-ubuntu-x64.tar.gz.sig",
        "llama-b11434-bin-ubuntu-x64-extra.tar.gz",
        "../llama-b11434-bin-ubuntu-x64.tar.gz",
        "LLAMA-b11434-bin-ubuntu-x64.tar.gz",
    ],
)
def test_what_is_only_like_the_name_is_not_taken(name: str) -> None:
    assert pick(release_of(name), LINUX, "cpu") == ()


# --- which variant ---


@pytest.mark.parametrize(
    ("here", "drivers", "variant", "why"),
    [
        (MAC, Drivers(), "metal", "Apple silicon"),
        (INTEL_MAC, Drivers(), "cpu", "the only one"),
        (LINUX, Drivers(), "cpu", "no GPU driver"),
        (LINUX, Drivers(vulkan="/etc/radeon.json", loader="/lib/v"), "vulkan", "/etc/radeon.json"),
        (LINUX, Drivers(vulkan="/etc/radeon.json"), "cpu", "no GPU driver"),
        (LINUX, Drivers(loader="/lib/v"), "cpu", "no GPU driver"),
        (LINUX, Drivers(nvidia="/dev/nvidiactl"), "cpu", "or try the experimental --variant cuda"),
        (LINUX, Drivers("/etc/nvidia.json", "/lib/v", "/dev/nvidiactl"), "vulkan", "/etc/nvidia.json"),
        (WINDOWS, Drivers("nv-vk64.json", "vulkan-1.dll", "nvcuda.dll"), "vulkan", "nv-vk64.json"),
        (ARM_WINDOWS, Drivers("q.json", "vulkan-1.dll"), "cpu", "the only one"),
    ],
)
def test_the_machine_decides_and_the_reason_is_said(here: Platform, drivers: Drivers, variant: str, why: str) -> None:
    chosen, reason = choose_variant(here, drivers)
    assert chosen == variant
    assert why in reason


def test_what_is_asked_for_wins_and_cuda_is_called_experimental() -> None:
    everything = Drivers("/etc/nvidia.json", "/lib/v", "/dev/nvidiactl")
    assert choose_variant(LINUX, everything, "cpu")[0] == "cpu"
    variant, why = choose_variant(LINUX, Drivers(), "cuda")
    assert variant == "cuda"
    assert "nobody of this project has run: experimental" in why


@pytest.mark.parametrize(("here", "asked"), [(LINUX, "metal"), (MAC, "cpu"), (MAC, "cuda"), (ARM_WINDOWS, "vulkan")])
def test_a_variant_that_there_is_no_build_of(here: Platform, asked: str) -> None:
    with pytest.raises(UsageError, match=rf"no {asked} build of llama.cpp for {here}: there is ") as caught:
        choose_variant(here, Drivers(), asked)
    assert "leave --variant out" in caught.value.hint


def make(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def test_drivers_of_a_linux_machine(tmp_path: Path) -> None:
    settings = load_settings()
    icd, loader = "usr/share/vulkan/icd.d/radeon_icd.x86_64.json", "usr/lib/x86_64-linux-gnu/libvulkan.so.1"
    make(tmp_path, icd, loader)
    assert find_drivers(LINUX, settings, tmp_path) == Drivers(), "drivers for GPUs that are not there"
    make(tmp_path, "dev/dri/renderD128")
    assert find_drivers(LINUX, settings, tmp_path) == Drivers(str(tmp_path / icd), str(tmp_path / loader))
    (tmp_path / icd).rename((tmp_path / icd).with_name("lvp_icd.x86_64.json"))
    assert find_drivers(LINUX, settings, tmp_path).vulkan == "", "that one computes on the CPU"
    make(tmp_path, "dev/nvidiactl")
    assert find_drivers(LINUX, settings, tmp_path).nvidia == str(tmp_path / "dev/nvidiactl")


def test_drivers_in_the_users_own_places(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "dev/dri/renderD128", "own/libvulkan.so.1")
    make(home, ".local/share/vulkan/icd.d/x.json")
    monkeypatch.setenv("LD_LIBRARY_PATH", f":{tmp_path}/own")
    found = find_drivers(LINUX, load_settings(), tmp_path)
    assert (found.vulkan[-6:], found.loader) == ("x.json", f"{tmp_path}/own/libvulkan.so.1")


def test_drivers_of_a_windows_machine(tmp_path: Path) -> None:
    settings = load_settings()
    assert find_drivers(WINDOWS, settings, tmp_path) == Drivers()
    make(
        tmp_path, "System32/vulkan-1.dll", "System32/nvcuda.dll", "System32/DriverStore/FileRepository/nv/nv-vk64.json"
    )
    found = find_drivers(WINDOWS, settings, tmp_path)
    assert [Path(path).name for path in (found.vulkan, found.loader, found.nvidia)] == [
        "nv-vk64.json",
        "vulkan-1.dll",
        "nvcuda.dll",
    ]


@pytest.mark.parametrize(
    ("system", "machine", "found"),
    [
        ("linux", "x86_64", LINUX),
        ("linux", "aarch64", ARM_LINUX),
        ("darwin", "arm64", MAC),
        ("darwin", "x86_64", INTEL_MAC),
        ("win32", "AMD64", WINDOWS),
        ("win32", "ARM64", ARM_WINDOWS),
    ],
)
def test_the_platform(system: str, machine: str, found: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert this_platform() == found


@pytest.mark.parametrize(("system", "machine"), [("linux", "riscv64"), ("linux", "i686"), ("freebsd14", "amd64")])
def test_a_platform_without_builds_names_the_other_ways(
    system: str, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    with pytest.raises(EngineMissing, match=r"no official llama\.cpp build for") as caught:
        this_platform()
    assert "build llama.cpp from source and set LLAMA_BIN" in caught.value.hint
    assert "looprun-models[embedded]" in caught.value.hint


def test_another_c_library_than_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(os, "confstr", lambda name: "")
    with pytest.raises(EngineMissing, match=r"need glibc, and this system has another C library \(musl\)"):
        this_platform()


# --- which build ---


def test_the_words_for_a_build() -> None:
    assert [parse_wanted(word) for word in ("latest", "LATEST", "b11434", "11434", "B9780")] == [
        None,
        None,
        11434,
        11434,
        9780,
    ]


@pytest.mark.parametrize("word", ["", "newest", "v0.6.0", "b", "b11434 ", "b-1", "b٣٣٣٣٣", "../b11434"])
def test_a_word_that_is_no_build(word: str) -> None:
    with pytest.raises(UsageError, match=r"is no build of llama\.cpp"):
        parse_wanted(word)


def test_a_build_that_is_too_old_is_refused_without_asking(server: ReleaseServer) -> None:
    with pytest.raises(UsageError, match="b9779 is older than b9780"):
        parse_wanted("b9779")
    assert server.asked() == []


def test_a_named_build(server: ReleaseServer, settings: Settings) -> None:
    server.release(11434, {UBUNTU.format(11434): b"content"})
    release, (asset,) = find_build(11434, LINUX, "cpu", settings)
    assert (release.tag, asset.name, asset.size) == ("b11434", UBUNTU.format(11434), 7)
    assert (asset.sha256, asset.host) == (server.sha256(b"content"), "127.0.0.1")
    assert server.asked() == ["/releases/tags/b11434"]


def test_no_token_goes_to_the_release_host(
    server: ReleaseServer, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    server.release(11434, {UBUNTU.format(11434): b"content"})
    find_build(11434, LINUX, "cpu", settings)
    assert [request.headers["Authorization"] for request in server.requests] == [None]
    assert server.requests[0].headers["User-Agent"].startswith("looprun-models/")


def test_the_newest_that_has_the_file_is_taken_and_what_is_passed_over_is_said(
    server: ReleaseServer, settings: Settings
) -> None:
    server.release(11430, {UBUNTU.format(11430): b"old"})
    server.release(11434, {UBUNTU.format(11434): b"good"})
    server.release(11436, {UBUNTU.format(11436): b"half"}, state="starter")
    server.release(11437, {"llama-b11437-bin-macos-arm64.tar.gz": b"other"})
    server.releases.insert(0, {"tag_name": "v0.7.0", "assets": []})
    server.releases.insert(0, server.releases[-1] | {"tag_name": "b99999", "draft": True})
    notes: list[str] = []
    release, _ = find_latest(LINUX, "cpu", settings, notes.append)
    assert release.tag == "b11434"
    assert notes == ["b11437, b11436 have no cpu build for linux x64 (yet): b11434 is the newest that does."]
    assert server.asked() == ["/releases?per_page=30"]


def test_the_order_of_the_list_does_not_matter(server: ReleaseServer, settings: Settings) -> None:
    for build in (11434, 9999, 10500):
        server.release(build, {UBUNTU.format(build): b"x"})
    assert find_latest(LINUX, "cpu", settings, print)[0].build == 11434


def test_latest_is_never_an_old_one(server: ReleaseServer, settings: Settings) -> None:
    server.release(9779, {UBUNTU.format(9779): b"x"})
    with pytest.raises(EngineMissing, match="none of the 1 newest releases has a cpu build for linux x64"):
        find_latest(LINUX, "cpu", settings, print)


def test_a_build_without_the_file_names_what_there_is(server: ReleaseServer, settings: Settings) -> None:
    for build in (9000, 11420, 11429, 11440, 11450):
        server.release(build, {f"llama-b{build}-bin-ubuntu-vulkan-x64.tar.gz": b"x"})
    server.release(11434, {UBUNTU.format(11434): b"x"})
    with pytest.raises(EngineMissing) as caught:
        find_build(11434, LINUX, "vulkan", settings)
    assert caught.value.message == (
        "b11434 has no vulkan build for linux x64: it has cpu for it. Nearest with one: b11440 (newer), b11429 (older)."
    )
    assert caught.value.hint == "looprun engine install b11440"


@pytest.mark.parametrize("changed", [{"size": 0}, {"state": "starter"}, None])
def test_a_build_that_is_half_uploaded_says_so_and_where_to_go(
    changed: dict[str, Any] | None, server: ReleaseServer, settings: Settings
) -> None:
    server.release(11434, {} if changed is None else {UBUNTU.format(11434): b"x"}, **changed or {})
    with pytest.raises(EngineMissing, match="for linux x64: it is still being uploaded") as caught:
        find_build(11434, LINUX, "cpu", settings)
    assert caught.value.hint == "try again in some minutes: looprun engine install b11434"
    with pytest.raises(EngineMissing, match="for linux x64, and b11434 is still being uploaded") as caught:
        find_latest(LINUX, "cpu", settings, print)
    assert caught.value.hint.startswith("try again in some minutes, or name an older one: looprun engine install bNNNN")
    server.release(11430, {UBUNTU.format(11430): b"x"})
    with pytest.raises(EngineMissing, match=r"being uploaded\. Nearest with one: b11430 \(older\)") as caught:
        find_build(11434, LINUX, "cpu", settings)
    assert caught.value.hint == "looprun engine install b11430"


def test_a_build_that_nobody_has_for_the_machine_is_not_answered_with_latest(
    server: ReleaseServer, settings: Settings
) -> None:
    server.release(11434, {UBUNTU.format(11434): b"x"})
    with pytest.raises(EngineMissing, match="it has cpu for it") as caught:
        find_build(11434, LINUX, "vulkan", settings)
    assert caught.value.hint == "looprun engine install b11434 --variant cpu"
    server.release(11436, {"llama-b11436-bin-macos-arm64.tar.gz": b"x"})
    with pytest.raises(EngineMissing, match=r"it has none for it \(of 1 files in all\)") as caught:
        find_build(11436, LINUX, "vulkan", settings)
    assert "looprun engine install bNNNN" in caught.value.hint


def test_an_index_without_builds(server: ReleaseServer, settings: Settings) -> None:
    with pytest.raises(EngineMissing, match=r"http://127\.0\.0\.1.* lists no build of llama\.cpp\.") as caught:
        find_latest(LINUX, "cpu", settings, print)
    assert "check LOOPRUN_ENGINE_INDEX" in caught.value.hint


def test_an_unknown_tag(server: ReleaseServer, settings: Settings) -> None:
    with pytest.raises(EngineMissing, match=r"there is no release b11435 at http://127\.0\.0\.1") as caught:
        find_build(11435, LINUX, "cpu", settings)
    assert caught.value.hint == "looprun engine install latest"


# --- an index that answers badly ---


@pytest.mark.parametrize("digest", [None, "", "md5:00", "sha256:xyz", f"sha512:{'0' * 64}", 7])
def test_a_digest_that_is_none(digest: Any, server: ReleaseServer, settings: Settings) -> None:
    server.release(11434, {UBUNTU.format(11434): b"x"}, digest=digest)
    assert find_build(11434, LINUX, "cpu", settings)[1][0].sha256 is None


@pytest.mark.parametrize("status", [403, 429])
def test_the_rate_limit_says_until_when(status: int, server: ReleaseServer, settings: Settings) -> None:
    reset = str(int(time.time()) + 25 * 60)
    server.answer = (status, {"x-ratelimit-remaining": "0", "x-ratelimit-reset": reset}, b"{}")
    with pytest.raises(DownloadFailed, match=r"no more questions .* until \d\d:\d\d \(in 2[45] min\)") as caught:
        find_build(11434, LINUX, "cpu", settings)
    assert "try again then, or set LOOPRUN_ENGINE_INDEX to a mirror" in caught.value.hint


@pytest.mark.parametrize("reset", ["9" * 17, "9" * 400, "soon", "-1", ""])
@pytest.mark.parametrize("name", ["x-ratelimit-reset", "retry-after"])
def test_a_rate_limit_that_ends_at_no_time(name: str, reset: str, server: ReleaseServer, settings: Settings) -> None:
    server.answer = (403, {"x-ratelimit-remaining": "0", name: reset}, b"{}")
    with pytest.raises(DownloadFailed, match="no more questions from this network address for now: ") as caught:
        find_build(11434, LINUX, "cpu", settings)
    assert "try again in an hour, or set LOOPRUN_ENGINE_INDEX" in caught.value.hint


@pytest.mark.parametrize("where", ["http://127.0.0.1/{}/login", "ftp://elsewhere/", None])
def test_a_redirect_that_leads_nowhere_is_named(where: str | None, server: ReleaseServer, settings: Settings) -> None:
    to = where and where.replace("/{}", f":{server.port}")
    server.answer = (302, {"Location": to} if to else {}, b"")
    with pytest.raises(DownloadFailed, match=r"cannot be followed \(HTTP 302\)") as caught:
        find_build(11434, LINUX, "cpu", settings)
    assert f"leads to {to or 'nowhere'}, which" in caught.value.message
    assert "check LOOPRUN_ENGINE_INDEX" in caught.value.hint


ODD_ADDRESSES = [
    "http://[::1",
    "http://[:::]/x",
    "http://127.0.0.1:99999/x",
    "http://127.0.0.1/x y",
    "http:///x",
    "//x",
]


@pytest.mark.parametrize("address", ODD_ADDRESSES)
def test_a_file_whose_address_is_none(address: str, server: ReleaseServer, settings: Settings) -> None:
    server.release(11434, {UBUNTU.format(11434): b"x"}, browser_download_url=address)
    with pytest.raises(DownloadFailed, match="a file in it has no name, size or address"):
        find_build(11434, LINUX, "cpu", settings)


@pytest.mark.parametrize("address", ["https://x.example/a/b?token=a%20b&x=1", "http://[::1]:8080/x+y", "http://x?y"])
def test_a_file_whose_address_is_unusual(address: str, server: ReleaseServer, settings: Settings) -> None:
    server.release(11434, {UBUNTU.format(11434): b"x"}, browser_download_url=address)
    assert find_build(11434, LINUX, "cpu", settings)[1][0].url == address


@pytest.mark.parametrize("extra", [{"retry-after": "120"}, {"x-ratelimit-remaining": "0", "x-ratelimit-reset": "soon"}])
def test_the_rate_limit_in_other_forms(extra: dict[str, str], server: ReleaseServer, settings: Settings) -> None:
    server.answer = (403, extra, b"")
    with pytest.raises(DownloadFailed, match="answers no more questions"):
        find_build(11434, LINUX, "cpu", settings)


@pytest.mark.parametrize("status", [403, 500, 502])
def test_other_refusals_are_no_rate_limit(status: int, server: ReleaseServer, settings: Settings) -> None:
    server.answer = (status, {"x-ratelimit-remaining": "59"}, b"")
    with pytest.raises(DownloadFailed, match=f"answered HTTP {status}"):
        find_latest(LINUX, "cpu", settings, print)


GOOD_ASSET = {"name": "x", "size": 1, "browser_download_url": "http://x/"}


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"<html>log in</html>", "it is a web page"),
        (b"", "it is no JSON"),
        (b'{"tag_name": "b11', "it is no JSON"),
        (b"[" * 100_000, "it is no JSON"),
        (b"[]", "no tag or no list of files"),
        (b'"b11434"', "no tag or no list of files"),
        (b'{"tag_name": "b11434"}', "no tag or no list of files"),
        (b'{"tag_name": "b11434", "assets": [1]}', "a file in it has no name, size or address"),
        (b'{"tag_name": "b11434", "assets": [{"name": "x", "size": 1, "browser_download_url": "file:///etc/passwd"}]}',
         "a file in it has no name, size or address"),
        (b'{"tag_name": "b9780", "assets": []}', "it tells of another release"),
    ],
)  # fmt: skip
def test_an_answer_that_is_none(body: bytes, why: str, server: ReleaseServer, settings: Settings) -> None:
    server.answer = (200, {"Content-Type": "application/json"}, body)
    with pytest.raises(DownloadFailed, match="does not answer as a release index does") as caught:
        find_build(11434, LINUX, "cpu", settings)
    assert why in caught.value.message
    assert "check LOOPRUN_ENGINE_INDEX" in caught.value.hint


def test_a_list_that_is_none(server: ReleaseServer, settings: Settings) -> None:
    server.answer = (200, {}, b'{"tag_name": "b11434", "assets": []}')
    with pytest.raises(DownloadFailed, match="it is no list of releases"):
        find_latest(LINUX, "cpu", settings, print)
    server.answer = (404, {}, b"")
    with pytest.raises(DownloadFailed, match=r"has no releases \(HTTP 404\)"):
        find_latest(LINUX, "cpu", settings, print)


def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOPRUN_ENGINE_INDEX", "http://127.0.0.1:9/x")
    with pytest.raises(
        DownloadFailed, match=r"the release index at 127.0.0.1:9 was not reached: Connection refused\.\n"
    ) as caught:
        find_latest(LINUX, "cpu", load_settings(), print)
    assert "check the network, the proxy variables and LOOPRUN_ENGINE_INDEX" in caught.value.hint


def test_a_proxy_is_used_as_for_weights(
    server: ReleaseServer, monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> None:
    server.release(11434, {UBUNTU.format(11434): b"x"})
    monkeypatch.setenv("LOOPRUN_ENGINE_INDEX", "http://no.such.host.invalid/repos/ggml-org/llama.cpp")
    monkeypatch.setenv("HTTP_PROXY", server.url)
    server.answer = (503, {}, b"")
    with pytest.raises(DownloadFailed, match=r"the release index at no\.such\.host\.invalid answered HTTP 503"):
        find_build(11434, LINUX, "cpu", load_settings())
    assert server.requests[0].path == "http://no.such.host.invalid/repos/ggml-org/llama.cpp/releases/tags/b11434"


@pytest.mark.parametrize("index", ["ftp://x/", "x.example", "http://", "http://[:::]/", "https://me:secret@x/y"])
def test_an_index_that_is_no_address(index: str) -> None:
    settings = load_settings({"HOME": "/x", "LOOPRUN_ENGINE_INDEX": index})
    with pytest.raises(BadSetting, match="LOOPRUN_ENGINE_INDEX") as caught:
        find_latest(LINUX, "cpu", settings, print)
    assert "secret" not in str(caught.value)


def test_an_encrypted_index_does_not_lead_to_unencrypted_files(
    server: ReleaseServer, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.release(11434, {UBUNTU.format(11434): b"x"})
    monkeypatch.setattr("looprun_models.releases._ask", lambda address, settings: server.releases[0])
    monkeypatch.setattr("looprun_models.releases._index", lambda settings: "https://mirror.example")
    with pytest.raises(DownloadFailed, match=re.escape(f"{UBUNTU.format(11434)} would be fetched without encryption")):
        find_build(11434, LINUX, "cpu", settings)
