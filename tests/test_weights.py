"""Where a profile's file is looked for, what state it is in, and what mends it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from looprun_models import weights as weights_module
from looprun_models.errors import BadPaths, LooprunError, WeightsBad, WeightsMissing
from looprun_models.paths import drop_path, read_paths, set_path
from looprun_models.progress import Progress
from looprun_models.receipts import write_receipt
from looprun_models.registry import LocalModelSpec, resolve_alias
from looprun_models.runtime import LlamaCppRuntime, model_file_status
from looprun_models.settings import load_settings
from looprun_models.weights import (
    Weights,
    check_pullable,
    inspect_weights,
    mending_error,
    shard_paths,
    verify,
    weights_path,
)
from tests.test_gguf import LLAMA, gguf

Profile = Callable[..., str]
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 98362432\n"
HTML = b"<!DOCTYPE html><html><body>Please log in.</body></html>"


@pytest.fixture
def own(profile: Profile, tiny_gguf: Callable[[str], Path], tmp_path: Path) -> Callable[..., LocalModelSpec]:
    """`own(content)` is a profile whose file has this content, the tiny model's by default; None leaves it out."""

    def make(content: bytes | str | None = "tiny", **changed: object) -> LocalModelSpec:
        folder = tmp_path / "w"
        folder.mkdir(exist_ok=True)
        alias = profile("tiny-qwen35", default_dir=str(folder), **changed)
        if content is not None:
            raw = tiny_gguf("tiny-qwen35").read_bytes() if isinstance(content, str) else content
            (folder / "tiny-qwen35.gguf").write_bytes(raw)
        return resolve_alias(alias)

    return make


def look(spec: LocalModelSpec) -> Weights:
    return inspect_weights(spec, load_settings())


# --- whole or not ---


def test_a_whole_file_is_ok(own: Callable[..., LocalModelSpec], tiny_gguf: Callable[[str], Path]) -> None:
    found = look(own())
    assert (found.state, found.why, found.origin) == ("ok", "", "profile")
    assert found.header is not None
    assert found.size == found.header.file_size == tiny_gguf("tiny-qwen35").stat().st_size


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"0123456789", "does not begin with 'GGUF'"),
        (LFS, "LFS pointer"),
        (HTML, "HTML"),
        (b"", "empty"),
    ],
)
def test_a_bad_file_says_what_it_is_and_both_ways_out(
    own: Callable[..., LocalModelSpec], content: bytes, told: str
) -> None:
    spec = own(content)
    status = model_file_status(spec, load_settings())
    assert status.state == "bad"
    assert told.lower() in status.note.lower()
    assert f"looprun models pull {spec.alias}" in status.fix
    assert f"looprun models rm {spec.alias}" in status.fix


def test_a_file_that_ends_early_is_bad(own: Callable[..., LocalModelSpec], tiny_gguf: Callable[[str], Path]) -> None:
    found = look(own(tiny_gguf("tiny-qwen35").read_bytes()[:-1]))
    assert found.state == "bad"
    assert "cut short" in found.why


def test_the_size_is_that_of_the_pin_else_of_the_receipt(own: Callable[..., LocalModelSpec]) -> None:
    spec = own()
    path = look(spec).path
    size = path.stat().st_size
    write_receipt(path, repo="", revision="", size=size + 1, sha256="a" * 64)
    found = look(spec)
    assert found.state == "bad"
    assert f"{size:,} bytes; the receipt of 20" in found.why
    assert f"{size + 1:,} bytes" in found.why
    assert look(own(size_bytes=size)).state == "ok", "the pin is the profile's word, and stands above a receipt"
    pinned = look(own(size_bytes=size + 2))
    assert f"tiny-qwen35 pins {size + 2:,} bytes" in pinned.why


def test_another_architecture_than_the_profiles_is_refused_before_anything_is_started(
    own: Callable[..., LocalModelSpec],
) -> None:
    assert look(own(architecture="qwen35")).state == "ok"
    spec = own(architecture="llama")
    found = look(spec)
    assert (found.state, found.header) == ("bad", None)
    assert found.why == f"{found.path} is a qwen35 model; {spec.alias} is for llama."
    with pytest.raises(WeightsBad, match="is a qwen35 model"):
        LlamaCppRuntime().ensure_server(spec)


def test_every_shipped_profile_names_its_architecture() -> None:
    aliases = ("qwen3.5-4b", "ram8", "ram16", "ram24", "ram32", "smoke")
    told = {alias: resolve_alias(alias).architecture for alias in aliases}
    moe = dict.fromkeys(("ram16", "ram24", "ram32"), "qwen35moe")
    assert told == {"qwen3.5-4b": "qwen35", "ram8": "qwen35", "smoke": "llama", **moe}


def progress(monkeypatch: pytest.MonkeyPatch, told: dict[str, tuple[int, int]]) -> None:
    """What the downloads' journals say, by file name."""
    monkeypatch.setattr(weights_module, "read_progress", lambda target: told.get(target.name))


def test_a_begun_download_is_partial_and_goes_on_by_pull(
    own: Callable[..., LocalModelSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    progress(monkeypatch, {"tiny-qwen35.gguf": (430, 1000)})
    spec = own(None)
    status = model_file_status(spec, load_settings())
    assert (status.state, status.note) == ("partial", "43 %")
    assert status.fix == f"looprun models pull {spec.alias}   (goes on where it stopped)"
    with pytest.raises(WeightsMissing, match="in part only"):
        LlamaCppRuntime().ensure_server(spec)
    assert LlamaCppRuntime().plan(spec).fit is None, "a plan can be looked at all the same"


def test_a_download_that_waits_for_its_name_is_not_yet_whole(
    own: Callable[..., LocalModelSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    progress(monkeypatch, {"tiny-qwen35.gguf": (1000, 1000)})
    assert look(own(None)).why == "99 %"


# --- split files ---


def split(folder: Path, count: int = 3, stem: str = "m") -> list[Path]:
    """A split model: facts in the first part, tensors in each."""
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{stem}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]
    for number, path in enumerate(paths):
        values = {"split.no": number, "split.count": count}
        tensor = ("t", (64 + 8 * number,), 0, 256 + 32 * number)
        path.write_bytes(gguf((LLAMA | values) if number == 0 else values, [tensor]))
    return paths


@pytest.fixture
def parts(profile: Profile, tmp_path: Path) -> tuple[LocalModelSpec, list[Path]]:
    made = split(tmp_path / "w")
    alias = profile("tiny-qwen35", alias="parts", file=made[0].name, default_dir=str(tmp_path / "w"))
    return resolve_alias(alias), made


def test_the_parts_of_a_split_file_follow_from_the_first() -> None:
    names = [path.name for path in shard_paths(Path("/x/a-00001-of-00003.gguf"))]
    assert names == [f"a-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for alone in ("a.gguf", "a-00002-of-00003.gguf", "a-00001-of-00003.bin"):
        assert shard_paths(Path(alone)) == (Path(alone),)


def test_a_split_file_is_ok_with_all_its_parts_and_as_large_as_they_are(
    parts: tuple[LocalModelSpec, list[Path]],
) -> None:
    spec, paths = parts
    found = look(spec)
    total = sum(path.stat().st_size for path in paths)
    assert (found.state, found.size) == ("ok", total)
    plan = LlamaCppRuntime().plan(spec)
    assert plan.model_size == total
    assert plan.fit is not None
    assert plan.fit.weights == total
    assert plan.model == paths[0]


def test_a_missing_or_damaged_part_is_seen(parts: tuple[LocalModelSpec, list[Path]]) -> None:
    spec, paths = parts
    before = look(spec).identity
    raw = paths[2].read_bytes()
    paths[2].write_bytes(raw[:-1])
    assert look(spec).state == "bad"
    assert str(paths[2]) in look(spec).why
    assert look(spec).identity != before, "a server of the whole file is not one of this"
    paths[2].unlink()
    assert look(spec).state == "partial"
    with pytest.raises(WeightsMissing, match="in part only"):
        LlamaCppRuntime().ensure_server(spec)
    paths[0].unlink()
    assert look(spec).state == "partial"
    paths[1].unlink()
    assert look(spec).state == "missing"


def test_a_part_under_the_name_of_a_whole_file_is_bad(own: Callable[..., LocalModelSpec]) -> None:
    found = look(own(gguf(LLAMA | {"split.no": 0, "split.count": 3})))
    assert "is the first of 3 parts, which its name does not say" in found.why


# --- paths.toml ---


def write_paths(text: str) -> Path:
    path = load_settings().paths_file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_the_variable_stands_above_paths_toml_and_that_above_the_profile(
    own: Callable[..., LocalModelSpec], tiny_gguf: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = own()
    assert weights_path(spec, load_settings())[1] == "profile"
    file = tiny_gguf("tiny-qwen35")
    set_path(load_settings(), spec.alias, file)
    assert weights_path(spec, load_settings()) == (file, "paths.toml")
    assert LlamaCppRuntime().plan(spec).flags[0].origin == "paths.toml"
    monkeypatch.setenv("TINY_GGUF", "/v.gguf")
    assert weights_path(spec, load_settings()) == (Path("/v.gguf"), "variable TINY_GGUF")


@pytest.mark.parametrize("key", ['"qwen3.6-35b-ram16"', "'qwen3.6-35b-ram16'", "qwen3.6-35b-ram16", '"ram16"', "ram16"])
def test_an_alias_may_be_written_with_and_without_quotes_and_short(key: str) -> None:
    write_paths(f'{key} = "~/x.gguf"\n')
    settings = load_settings()
    assert settings.home
    assert weights_path(resolve_alias("ram16"), settings) == (settings.home / "x.gguf", "paths.toml")


@pytest.mark.parametrize(
    ("text", "told"), [("x = ", "TOML"), ("x = 1", "`x` must be the path"), ('x = "a/b.gguf"', "full path")]
)
def test_a_broken_paths_toml_is_named(text: str, told: str, own: Callable[..., LocalModelSpec]) -> None:
    spec, path = own(), write_paths(text)
    with pytest.raises(BadPaths, match=told) as caught:
        look(spec)
    assert str(path) in caught.value.message
    assert caught.value.exit_code == 2
    assert str(path) in caught.value.hint


def test_lines_are_changed_one_by_one_and_comments_stay() -> None:
    path = write_paths('# mine\na = "/a.gguf"  # of a\n\n"b.1" = "/b.gguf"\n# end')
    settings = load_settings()
    set_path(settings, "b.1", Path('/with "quotes" and \\.gguf'))
    set_path(settings, "c", Path("/c.gguf"))
    assert read_paths(settings) == {
        "a": Path("/a.gguf"),
        "b.1": Path('/with "quotes" and \\.gguf'),
        "c": Path("/c.gguf"),
    }
    drop_path(settings, "b.1")
    drop_path(settings, "unknown")
    assert path.read_text() == '# mine\na = "/a.gguf"  # of a\n\n# end\n"c" = "/c.gguf"\n'


def test_a_broken_paths_toml_is_not_overwritten() -> None:
    path = write_paths("x = ")
    with pytest.raises(BadPaths):
        set_path(load_settings(), "a", Path("/a"))
    with pytest.raises(BadPaths):
        drop_path(load_settings(), "a")
    assert path.read_text() == "x = "


def test_an_adopted_file_that_is_gone_or_bad_is_not_pulled_over(
    own: Callable[..., LocalModelSpec], tmp_path: Path
) -> None:
    spec, theirs = own(None), tmp_path / "theirs.gguf"
    set_path(load_settings(), spec.alias, theirs)
    for content, kind in ((None, WeightsMissing), (HTML, WeightsBad)):
        if content is not None:
            theirs.write_bytes(content)
        error: LooprunError = mending_error(spec, look(spec))
        assert isinstance(error, kind)
        assert error.hint.startswith(f"looprun models rm {spec.alias}   (forgets that path), then: looprun models pull")
        with pytest.raises(kind):
            check_pullable(spec, look(spec))


# --- verify ---


def test_verify_compares_with_the_receipt_else_with_the_pin(own: Callable[..., LocalModelSpec]) -> None:
    spec = own()
    path = look(spec).path
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    heard: list[Progress] = []
    [unknown] = verify(spec, load_settings(), heard.append)
    assert (unknown.ok, unknown.sha256, unknown.against) == (None, digest, "")
    assert (heard[-1].phase, heard[-1].done) == ("hashing", path.stat().st_size)
    receipt = write_receipt(path, repo="", revision="", size=path.stat().st_size, sha256=digest)
    [right] = verify(spec, load_settings())
    assert (right.ok, right.against) == (True, f"the receipt of {receipt.date[:10]}")
    [pinned] = verify(own(sha256="f" * 64), load_settings())
    assert (pinned.ok, pinned.against) == (False, "the profile's pin")


def test_verify_sees_one_flipped_bit(own: Callable[..., LocalModelSpec]) -> None:
    spec = own()
    path = look(spec).path
    raw = bytearray(path.read_bytes())
    write_receipt(path, repo="", revision="", size=len(raw), sha256=hashlib.sha256(raw).hexdigest())
    raw[-1] ^= 1
    path.write_bytes(raw)
    assert look(spec).state == "ok", "which is why verify exists"
    assert verify(spec, load_settings())[0].ok is False


def test_verify_of_what_is_not_whole_says_so(own: Callable[..., LocalModelSpec]) -> None:
    with pytest.raises(WeightsMissing):
        verify(own(None), load_settings())
    with pytest.raises(WeightsBad):
        verify(own(HTML), load_settings())


def test_verify_reads_every_part(parts: tuple[LocalModelSpec, list[Path]]) -> None:
    spec, paths = parts
    for path in paths:
        write_receipt(path, repo="", revision="", size=path.stat().st_size, sha256="0" * 64)
    digest = hashlib.sha256(paths[1].read_bytes()).hexdigest()
    write_receipt(paths[1], repo="", revision="", size=paths[1].stat().st_size, sha256=digest)
    assert [verdict.ok for verdict in verify(spec, load_settings())] == [False, True, False]
