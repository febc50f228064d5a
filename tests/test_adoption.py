"""Weights of other tools: made-up stores in an empty home, what is found there, and what adopting leaves untouched."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from looprun_models import local_model
from looprun_models.adoption import Candidate, adopt, find_candidates
from looprun_models.errors import UsageError, WeightsBad
from looprun_models.paths import read_paths, set_path
from looprun_models.receipts import kept_receipt_path, read_receipt
from looprun_models.registry import LocalModelSpec, resolve_alias
from looprun_models.settings import load_settings
from looprun_models.storage import remove
from looprun_models.weights import inspect_weights, verify
from tests.test_weights import split

Profile = Callable[..., str]
COMMIT = "c" * 40
NAME = "tiny-qwen35-mtp.gguf"


@dataclass(frozen=True)
class Stores:
    """The folders in which other tools keep weights, under one home."""

    home: Path
    raw: bytes

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.raw).hexdigest()

    def hf(self, name: str = NAME, *, hub: str = ".cache/huggingface/hub", raw: bytes | None = None) -> Path:
        """A snapshot's link to a blob, whose name is the sha256."""
        content = self.raw if raw is None else raw
        repo = self.home / hub / "models--nobody--tiny"
        blob = repo / "blobs" / hashlib.sha256(content).hexdigest()
        link = repo / "snapshots" / COMMIT / name
        for folder in (blob.parent, link.parent):
            folder.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        link.symlink_to(os.path.relpath(blob, link.parent))
        return link

    def ollama(self, *, models: str = ".ollama/models", claim: str | None = None) -> Path:
        blobs = self.home / models / "blobs"
        blobs.mkdir(parents=True)
        (blobs / f"sha256-{hashlib.sha256(b'{}').hexdigest()}").write_bytes(b"{}")
        path = blobs / f"sha256-{claim or self.digest}"
        path.write_bytes(self.raw)
        return path

    def plain(self, folder: str, name: str = NAME, raw: bytes | None = None) -> Path:
        path = self.home / folder / name
        path.parent.mkdir(parents=True)
        path.write_bytes(self.raw if raw is None else raw)
        return path

    def lm_studio(self) -> Path:
        return self.plain(".lmstudio/models/nobody/tiny")


@pytest.fixture
def stores(home: Path, tiny_gguf: Callable[[str], Path]) -> Stores:
    return Stores(home, tiny_gguf("tiny-qwen35-mtp").read_bytes())


@pytest.fixture
def wanted(profile: Profile, tmp_path: Path, stores: Stores) -> Callable[..., LocalModelSpec]:
    """`wanted(sha256=...)` is a profile whose weights are not in its folder."""

    def make(*, pinned: bool = True, **changed: object) -> LocalModelSpec:
        pins = {"size_bytes": len(stores.raw), "sha256": stores.digest} if pinned else {}
        size = len(stores.raw) / 1e9
        folder = str(tmp_path / "own")
        return resolve_alias(profile(default_dir=folder, approx_size_gb=size, **{**pins, **changed}))

    return make


def find(spec: LocalModelSpec, extra: Path | None = None) -> list[Candidate]:
    return find_candidates(spec, load_settings(), extra)


def snapshot(root: Path) -> dict[str, tuple[int, int, int]]:
    """Every file and link of a store: what must be the same afterwards."""
    found = {}
    for path in sorted(root.rglob("*")):
        stat = path.lstat()
        found[str(path)] = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
    return found


# --- finding ---


def test_nothing_is_found_where_nothing_is(wanted: Callable[..., LocalModelSpec]) -> None:
    assert find(wanted()) == []
    assert find(wanted(pinned=False)) == []


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("store", ["hf", "ollama", "lm_studio"])
def test_each_store_is_found(wanted: Callable[..., LocalModelSpec], stores: Stores, store: str, pinned: bool) -> None:
    path = getattr(stores, store)()
    [found] = find(wanted(pinned=pinned))
    assert (found.path, found.size, found.exact) == (path, len(stores.raw), pinned)
    assert found.tool == {"hf": "Hugging Face cache", "ollama": "Ollama", "lm_studio": "LM Studio"}[store]
    assert found.claim == (None if store == "lm_studio" else stores.digest)
    if not pinned:
        assert "no sha256 to compare with" in found.evidence
    elif store == "lm_studio":
        assert found.evidence == "it has the size of the profile's pin"
    else:
        assert found.evidence == "its name is the sha256 of the profile's pin"


@pytest.mark.parametrize(
    ("variable", "value", "folder"),
    [
        ("HF_HOME", "hf", "hf/hub/models--a--b/snapshots/c"),
        ("HF_HUB_CACHE", "hub", "hub/models--a--b/snapshots/c/sub"),
        ("LLAMA_CACHE", "ll", "ll"),
        ("OLLAMA_MODELS", "om", None),
        ("XDG_CACHE_HOME", "xdg", "xdg/llama.cpp"),
        ("XDG_CACHE_HOME", "xdg", "xdg/huggingface/hub/models--a--b/snapshots/c"),
        (None, "", ".cache/llama.cpp"),
        (None, "", ".cache/lm-studio/models/a/b"),
    ],
)
def test_variables_move_the_stores(
    wanted: Callable[..., LocalModelSpec],
    stores: Stores,
    monkeypatch: pytest.MonkeyPatch,
    variable: str | None,
    value: str,
    folder: str | None,
) -> None:
    if variable:
        monkeypatch.setenv(variable, f"~/{value}")
    path = stores.plain(folder) if folder else stores.ollama(models=value)
    assert [found.path for found in find(wanted())] == [path]


def test_one_file_under_several_names_is_found_once_and_the_surest_first(
    wanted: Callable[..., LocalModelSpec], stores: Stores
) -> None:
    studio, link = stores.lm_studio(), stores.hf()
    again = link.parent.parent / ("d" * 40) / NAME
    again.parent.mkdir()
    again.symlink_to(link.resolve())
    assert [found.path for found in find(wanted())] == [link, studio]


def test_another_size_or_another_digest_is_no_candidate(wanted: Callable[..., LocalModelSpec], stores: Stores) -> None:
    stores.plain(".lmstudio/models/a/b", raw=stores.raw + b"x")
    other = bytearray(stores.raw)
    other[-1] ^= 1
    stores.hf(raw=bytes(other))
    assert find(wanted()) == []
    [by_size] = find(wanted(sha256=hashlib.sha256(other).hexdigest()))
    assert by_size.tool == "Hugging Face cache"


def test_a_receipt_stands_for_the_pin(wanted: Callable[..., LocalModelSpec], stores: Stores, tmp_path: Path) -> None:
    from looprun_models.receipts import write_receipt

    spec, path = wanted(pinned=False), tmp_path / "own" / NAME
    path.parent.mkdir()
    path.write_bytes(b"x")
    write_receipt(path, repo="r", revision="", size=len(stores.raw), sha256=stores.digest)
    path.unlink()
    stores.plain(".cache/llama.cpp", "another-name.gguf")
    [found] = find(spec)
    assert found.exact
    assert found.evidence.startswith("it has the size of the receipt of 20")


def test_without_a_pin_name_and_header_decide(wanted: Callable[..., LocalModelSpec], stores: Stores) -> None:
    path = stores.plain(".cache/llama.cpp", f"nobody_tiny_{NAME}")
    stores.plain(".cache/lm-studio/models/a/b", f"x-{NAME}")
    assert [found.path for found in find(wanted(pinned=False))] == [path]
    assert find(wanted(pinned=False, architecture="llama")) == []


def test_a_file_without_the_draft_head_is_not_the_one(
    wanted: Callable[..., LocalModelSpec], stores: Stores, tiny_gguf: Callable[[str], Path]
) -> None:
    stores.plain(".cache/llama.cpp", raw=tiny_gguf("tiny-qwen35").read_bytes())
    assert find(wanted(pinned=False)) == []


@pytest.mark.parametrize("changed", [{"approx_size_gb": 1.0}, {"file": "other-model.gguf"}])
def test_a_nameless_blob_must_be_like_the_profile_in_name_and_size(
    profile: Profile, tmp_path: Path, stores: Stores, changed: dict[str, object]
) -> None:
    stores.ollama()
    values = {"default_dir": str(tmp_path / "own"), "approx_size_gb": len(stores.raw) / 1e9}
    assert len(find(resolve_alias(profile(**values)))) == 1
    assert find(resolve_alias(profile(**{**values, **changed}))) == []


def test_from_looks_there_and_nowhere_else(wanted: Callable[..., LocalModelSpec], stores: Stores) -> None:
    stores.lm_studio()
    path = stores.plain("usb/stick", "renamed.gguf")
    spec = wanted()
    assert [found.path for found in find(spec, path)] == [path]
    assert [found.path for found in find(spec, path.parent.parent)] == [path]
    assert find(spec, stores.home / "nothing") == []


def test_the_profiles_own_file_is_no_candidate(wanted: Callable[..., LocalModelSpec], stores: Stores) -> None:
    spec, path = wanted(), stores.lm_studio()
    set_path(load_settings(), spec.alias, path)
    assert find(spec) == []


def test_a_split_file_is_found_with_all_its_parts_only(profile: Profile, tmp_path: Path, home: Path) -> None:
    folder = home / ".lmstudio" / "models"
    folder.mkdir(parents=True)
    parts = split(folder / "split")
    spec = resolve_alias(profile("tiny-qwen35", file=parts[0].name, default_dir=str(tmp_path / "own")))
    [found] = find(spec)
    assert (found.path, found.size) == (parts[0], sum(part.stat().st_size for part in parts))
    done = adopt(spec, found, load_settings(), link=True)
    assert [part.name for part in sorted((tmp_path / "own").glob("*.gguf"))] == [part.name for part in parts]
    assert inspect_weights(spec, load_settings()).state == "ok"
    assert not done.verified
    remove(spec, load_settings())
    parts[1].unlink()
    assert find(spec) == []


# --- adopting ---


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("store", ["hf", "ollama", "lm_studio"])
def test_adopting_neither_copies_nor_touches_and_rm_leaves_it_alone(
    wanted: Callable[..., LocalModelSpec], stores: Stores, tmp_path: Path, store: str, link: bool
) -> None:
    path = getattr(stores, store)()
    root = stores.home / path.relative_to(stores.home).parts[0]
    if root.name == ".cache":
        root = root / "huggingface"
    spec, before = wanted(), snapshot(root)
    [found] = find(spec)
    done = adopt(spec, found, load_settings(), link=link)
    assert (done.sha256, done.verified, done.aliases) == (stores.digest, True, (spec.alias,))
    used = inspect_weights(spec, load_settings())
    assert (used.state, used.path) == ("ok", tmp_path / "own" / NAME if link else path)
    assert used.path.stat().st_ino == path.stat().st_ino, "the very same file"
    assert [verdict.ok for verdict in verify(spec, load_settings())] == [True]
    assert snapshot(root) == before
    assert remove(spec, load_settings()) == 0, "the bytes are still in use"
    assert inspect_weights(spec, load_settings()).state == "missing"
    assert snapshot(root) == before
    assert not list((load_settings().state_dir / "receipts").glob("*"))
    assert not list((tmp_path / "own").glob("*"))


def test_the_receipt_of_an_adopted_file_lies_with_us_and_names_its_source(
    wanted: Callable[..., LocalModelSpec], stores: Stores
) -> None:
    link, spec = stores.hf(), wanted(pinned=False)
    [found] = find(spec)
    done = adopt(spec, found, load_settings())
    assert not done.verified, "a file that is what its name says need not be the right one"
    assert done.proof.startswith("its content agrees with its own name, but nothing tells")
    receipt = read_receipt(link, at=kept_receipt_path(link, load_settings()))
    assert receipt is not None
    assert (receipt.repo, receipt.revision, receipt.sha256) == ("nobody/tiny", COMMIT, stores.digest)
    link.resolve().write_bytes(stores.raw + b"x")
    seen = inspect_weights(spec, load_settings())
    assert seen.state == "bad", "the other tool has changed it since"
    assert "the receipt of" in seen.why


def test_profiles_that_name_the_same_file_are_adopted_together(
    wanted: Callable[..., LocalModelSpec], stores: Stores
) -> None:
    path = stores.lm_studio()
    first, second = wanted(alias="one"), wanted(alias="two")
    other = wanted(alias="three", env_var="ANOTHER")
    [found] = find(first)
    assert set(adopt(first, found, load_settings()).aliases) == {"one", "two"}
    assert read_paths(load_settings()) == {"one": path, "two": path}
    assert inspect_weights(second, load_settings()).state == "ok"
    assert inspect_weights(other, load_settings()).state == "missing"
    remove(first, load_settings())
    assert inspect_weights(second, load_settings()).state == "ok"
    assert read_receipt(path, at=kept_receipt_path(path, load_settings())), "the other one still needs it"


def test_a_name_that_lies_is_found_out_and_nothing_is_changed(
    wanted: Callable[..., LocalModelSpec], stores: Stores
) -> None:
    stores.ollama(claim="e" * 64)
    spec = wanted(pinned=False)
    [found] = find(spec)
    with pytest.raises(WeightsBad, match="its own name says sha256 eee"):
        adopt(spec, found, load_settings())
    assert read_paths(load_settings()) == {}


def test_the_right_size_with_other_bytes_is_not_adopted(wanted: Callable[..., LocalModelSpec], stores: Stores) -> None:
    stores.lm_studio()
    spec = wanted(sha256="e" * 64)
    [found] = find(spec)
    with pytest.raises(WeightsBad, match="the profile's pin says sha256 eee"):
        adopt(spec, found, load_settings(), link=True)
    assert inspect_weights(spec, load_settings()).state == "missing"


def test_a_link_across_file_systems_says_so(
    wanted: Callable[..., LocalModelSpec], stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores.lm_studio()
    spec = wanted()

    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(UsageError, match="another file system") as caught:
        adopt(spec, find(spec)[0], load_settings(), link=True)
    assert caught.value.hint.startswith("leave --link out")
    assert inspect_weights(spec, load_settings()).state == "missing"


def test_a_link_replaces_nothing(wanted: Callable[..., LocalModelSpec], stores: Stores, tmp_path: Path) -> None:
    stores.lm_studio()
    spec, there = wanted(), tmp_path / "own" / NAME
    there.parent.mkdir()
    there.write_bytes(b"mine")
    with pytest.raises(UsageError, match="already there"):
        adopt(spec, find(spec)[0], load_settings(), link=True)
    assert there.read_bytes() == b"mine"


def test_no_privilege_for_symlinks_is_needed(
    wanted: Callable[..., LocalModelSpec], stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores.lm_studio()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(1314, "A required privilege is not held by the client")

    monkeypatch.setattr(os, "symlink", refuse)
    for link in (False, True):
        spec = wanted()
        adopt(spec, find(spec)[0], load_settings(), link=link)
        assert inspect_weights(spec, load_settings()).state == "ok"
        remove(spec, load_settings())


def test_a_link_ends_the_lines_that_would_stand_above_it(
    wanted: Callable[..., LocalModelSpec], stores: Stores, tmp_path: Path
) -> None:
    stores.lm_studio()
    spec = wanted(short=["tiny"])
    set_path(load_settings(), "tiny", tmp_path / "gone.gguf")
    adopt(spec, find(spec)[0], load_settings(), link=True)
    assert inspect_weights(spec, load_settings()).state == "ok"
    assert read_paths(load_settings()) == {}


def test_a_variable_that_stands_above_it_is_named(
    wanted: Callable[..., LocalModelSpec], stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores.lm_studio()
    spec = wanted()
    [found] = find(spec)
    monkeypatch.setenv("TINY_GGUF", "/elsewhere.gguf")
    with pytest.raises(UsageError, match="TINY_GGUF already names"):
        adopt(spec, found, load_settings())


@pytest.mark.engine
@pytest.mark.parametrize("store", ["hf", "ollama"])
def test_an_adopted_file_is_served_where_it_lies(
    wanted: Callable[..., LocalModelSpec], stores: Stores, tmp_path: Path, store: str
) -> None:
    path = getattr(stores, store)()
    spec = wanted(pinned=False)
    adopt(spec, find(spec)[0], load_settings())
    with local_model(spec.alias) as model:
        reply = model.chat.completions.create(
            model=model.model, messages=[{"role": "user", "content": "Hi"}], max_tokens=4
        )
        assert reply.choices[0].message is not None
    assert not (tmp_path / "own").exists(), "no copy was made"
    assert path.read_bytes() == stores.raw
