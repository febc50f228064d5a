"""What is counted, what is given back, and what is never removed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from looprun_models import journal, storage
from looprun_models.errors import LooprunError, ServerInUse, UsageError
from looprun_models.paths import read_paths, set_path
from looprun_models.receipts import receipt_path, write_receipt
from looprun_models.records import list_servers
from looprun_models.registry import LocalModelSpec, resolve_alias
from looprun_models.runtime import LlamaCppRuntime
from looprun_models.settings import load_settings
from looprun_models.storage import Share, account, partials_of, remove, sharers
from looprun_models.trunkstore import TrunkStore
from looprun_models.weights import inspect_weights, weights_path
from tests.helpers import wait_for
from tests.test_trunkstore import STATE, meta, save
from tests.test_weights import split

Profile = Callable[..., str]
PARTIAL_BYTES = 1000


@pytest.fixture
def raw(tiny_gguf: Callable[[str], Path]) -> bytes:
    return tiny_gguf("tiny-qwen35").read_bytes()


@pytest.fixture
def own(profile: Profile, tmp_path: Path, raw: bytes) -> Callable[..., LocalModelSpec]:
    """`own(alias="a")` is a profile with its file in its folder."""

    def make(*, folder: str = "own", **changed: object) -> LocalModelSpec:
        path = tmp_path / folder / "tiny-qwen35.gguf"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(raw)
        return resolve_alias(profile("tiny-qwen35", default_dir=str(path.parent), **changed))

    return make


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Callable[[LocalModelSpec], Path]:
    """`begun(spec)` leaves what an interrupted download of it leaves, in the journal's eyes."""

    def make(spec: LocalModelSpec) -> Path:
        target = spec.default_path(load_settings())
        part = target.with_name("a-partial-download")
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(bytes(PARTIAL_BYTES))

        def files(of: Path) -> list[Path]:
            return [part] if of == target and part.exists() else []

        monkeypatch.setattr(journal, "part_files", files)

        def drop(of: Path) -> bool:
            for path in files(of):
                path.unlink()
            return True

        monkeypatch.setattr(journal, "drop", drop)
        return part

    return make


def path_of(spec: LocalModelSpec) -> Path:
    return weights_path(spec, load_settings())[0]


def share_of(spec: LocalModelSpec) -> Share:
    return next(share for share in account(load_settings()).profiles if share.alias == spec.alias)


# --- accounting ---


def test_an_empty_home_takes_nothing() -> None:
    told = account(load_settings())
    assert (told.weights, told.partials, told.logs, told.slot_states) == (0, 0, 0, 0)
    assert {(share.state, share.frees) for share in told.profiles} == {("missing", 0)}


def test_everything_is_counted_where_it_belongs(
    own: Callable[..., LocalModelSpec], begun: Callable[[LocalModelSpec], Path], raw: bytes
) -> None:
    spec, settings = own(), load_settings()
    begun(spec)
    for folder, name, size in (
        (settings.logs_dir, f"{spec.alias}-20260101-000000.log", 30),
        (settings.logs_dir, "other-1.log", 5),
        (settings.cache_dir / "slot-states", "trunk.bin", 700),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bytes(size))
    told, share = account(settings), share_of(spec)
    assert (share.weights, share.partials, share.logs) == (len(raw), PARTIAL_BYTES, 30)
    assert (share.frees, share.kept_by, share.shared_with) == (len(raw) + PARTIAL_BYTES, "", ())
    assert (told.weights, told.partials, told.logs, told.slot_states) == (len(raw), PARTIAL_BYTES, 35, 700)


def test_a_named_slot_folder_is_the_one_that_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trunk").write_bytes(bytes(9))
    monkeypatch.setenv("LLAMA_SLOT_SAVE_PATH", str(tmp_path))
    assert account(load_settings()).slot_states == 9


def test_the_files_of_the_trunk_store_are_counted_and_what_a_link_points_to_is_not(tmp_path: Path) -> None:
    store = TrunkStore(load_settings().cache_dir / "slot-states", 1 << 30)
    save(store, meta())
    store.reserve(meta().key)
    (tmp_path / "outside").write_bytes(bytes(9))
    (store.folder / "link").symlink_to(tmp_path / "outside")
    assert account(load_settings()).slot_states == store.total() > len(STATE)


def test_a_trunk_that_goes_while_it_is_counted_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "second"):
        (tmp_path / name).write_bytes(bytes(9))
    glob = Path.glob

    def then_one_goes(self: Path, pattern: str) -> list[Path]:
        seen = list(glob(self, pattern))
        if self == tmp_path:
            (tmp_path / "first").unlink()
        return seen

    monkeypatch.setattr(Path, "glob", then_one_goes)
    monkeypatch.setenv("LLAMA_SLOT_SAVE_PATH", str(tmp_path))
    assert account(load_settings()).slot_states == 9


def test_a_shared_file_is_counted_once_and_said(own: Callable[..., LocalModelSpec], raw: bytes) -> None:
    first, second = own(alias="one"), own(alias="two")
    assert account(load_settings()).weights == len(raw)
    assert share_of(first).shared_with == ("two",)
    assert sharers(second, load_settings()) == ("one",)


def test_ram16_and_ram24_are_one_file() -> None:
    assert sharers(resolve_alias("ram16"), load_settings()) == ("qwen3.6-35b-ram24",)


def test_the_parts_of_a_split_file_are_counted_and_removed(profile: Profile, tmp_path: Path) -> None:
    parts = split(tmp_path / "own")
    spec = resolve_alias(profile("tiny-qwen35", file=parts[0].name, default_dir=str(tmp_path / "own")))
    total = sum(part.stat().st_size for part in parts)
    assert (share_of(spec).weights, share_of(spec).frees, account(load_settings()).weights) == (total, total, total)
    assert remove(spec, load_settings()) == total
    assert list((tmp_path / "own").iterdir()) == []


# --- removing ---


def test_removing_takes_file_receipt_and_partial_and_tells_what_is_free(
    own: Callable[..., LocalModelSpec], begun: Callable[[LocalModelSpec], Path], raw: bytes
) -> None:
    spec = own()
    path, part = path_of(spec), begun(spec)
    write_receipt(path, repo="", revision="", size=len(raw), sha256="a" * 64)
    promised = share_of(spec).frees
    assert remove(spec, load_settings()) == promised == len(raw) + PARTIAL_BYTES
    assert not path.exists()
    assert not receipt_path(path).exists()
    assert not part.exists()
    assert remove(spec, load_settings()) == 0


def test_removing_the_partial_leaves_the_file(
    own: Callable[..., LocalModelSpec], begun: Callable[[LocalModelSpec], Path]
) -> None:
    spec = own()
    part = begun(spec)
    assert partials_of(spec, load_settings()) == [part]
    assert remove(spec, load_settings(), partial=True) == PARTIAL_BYTES
    assert not part.exists()
    assert path_of(spec).exists()


def test_a_real_partial_download_counts_what_is_on_the_disk_and_not_its_holes(
    own: Callable[..., LocalModelSpec],
) -> None:
    spec = own()
    content = journal.Content("nobody/tiny", "c" * 40, 100 << 20, None)
    path_of(spec).unlink()
    with journal.Journal.open(path_of(spec), content) as begun:
        with journal.part_path(path_of(spec)).open("r+b") as part:
            part.write(b"x" * journal.PIECE)
            part.flush()
            os.fsync(part.fileno())
        begun.mark(0)
    assert share_of(spec).state == "partial"
    assert journal.PIECE <= share_of(spec).partials < 2 * journal.PIECE
    assert remove(spec, load_settings(), partial=True) >= journal.PIECE
    assert list(path_of(spec).parent.iterdir()) == []
    assert share_of(spec).state == "missing"


def test_a_bad_file_can_be_removed(own: Callable[..., LocalModelSpec]) -> None:
    spec = own()
    path_of(spec).write_bytes(b"0123456789")
    assert share_of(spec).state == "bad"
    assert remove(spec, load_settings()) == 10
    assert inspect_weights(spec, load_settings()).state == "missing"


def test_an_adopted_file_stays_and_is_only_forgotten(
    own: Callable[..., LocalModelSpec], tiny_gguf: Callable[[str], Path], begun: Callable[[LocalModelSpec], Path]
) -> None:
    spec, theirs = own(), tiny_gguf("tiny-qwen35")
    mine = path_of(spec)
    begun(spec)
    set_path(load_settings(), spec.alias, theirs)
    assert share_of(spec).kept_by == "adopted: it belongs to another tool"
    assert share_of(spec).frees == PARTIAL_BYTES
    assert remove(spec, load_settings()) == PARTIAL_BYTES
    assert theirs.exists()
    assert mine.exists(), "the next rm takes this one"
    assert read_paths(load_settings()) == {}


def test_a_hard_linked_file_loses_one_name_and_frees_nothing(
    own: Callable[..., LocalModelSpec], tmp_path: Path, raw: bytes
) -> None:
    spec = own()
    other = tmp_path / "theirs.gguf"
    other.hardlink_to(path_of(spec))
    assert share_of(spec).frees == 0
    assert remove(spec, load_settings()) == 0
    assert other.read_bytes() == raw
    assert not path_of(spec).exists()


def test_a_symbolic_link_goes_and_what_it_points_to_stays(
    own: Callable[..., LocalModelSpec], tiny_gguf: Callable[[str], Path]
) -> None:
    spec, theirs = own(), tiny_gguf("tiny-qwen35")
    path_of(spec).unlink()
    path_of(spec).symlink_to(theirs)
    assert remove(spec, load_settings()) == 0
    assert theirs.exists()
    assert not path_of(spec).is_symlink()


def test_what_a_variable_names_is_removed_only_if_we_fetched_it(
    own: Callable[..., LocalModelSpec], tmp_path: Path, raw: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, named = own(), tmp_path / "named.gguf"
    named.write_bytes(raw)
    monkeypatch.setenv("TINY_GGUF", str(named))
    assert "TINY_GGUF names it" in share_of(spec).kept_by
    assert share_of(spec).frees == 0
    with pytest.raises(UsageError, match="left alone: TINY_GGUF names it") as caught:
        remove(spec, load_settings())
    assert "unset TINY_GGUF" in caught.value.hint
    assert named.exists()
    write_receipt(named, repo="", revision="", size=len(raw), sha256="a" * 64)
    assert remove(spec, load_settings()) == len(raw)
    assert not named.exists()


@pytest.mark.engine
@pytest.mark.parametrize("by", ["itself", "another profile", "a link"])
def test_nothing_is_removed_while_a_server_of_ours_uses_it(
    own: Callable[..., LocalModelSpec], raw: bytes, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = own(alias="one")
    user = spec
    if by == "another profile":
        user = own(alias="two")
    elif by == "a link":
        user = own(alias="two", folder="linked")
        path_of(user).unlink()
        path_of(user).symlink_to(path_of(spec))
    with LlamaCppRuntime().ensure_server(user):
        with pytest.raises(ServerInUse, match=f"the server of {user.alias} ") as caught:
            remove(spec, load_settings())
        assert caught.value.hint == f"looprun models stop {user.alias}"
        assert path_of(spec).exists()
        monkeypatch.setattr(storage, "list_servers", lambda _: [])  # it came after the first look
        with pytest.raises(ServerInUse):
            remove(spec, load_settings())
        assert path_of(spec).exists()
    wait_for(lambda: not list_servers(load_settings()), "its server has ended")
    assert remove(spec, load_settings()) == len(raw)


def test_what_the_system_does_not_let_go_is_said(
    own: Callable[..., LocalModelSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = own()
    path = path_of(spec)
    unlink = Path.unlink

    def refuse(self: Path, missing_ok: bool = False) -> None:
        if self == path:
            raise PermissionError(13, "Permission denied")
        unlink(self, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(LooprunError, match="could not be removed: Permission denied"):
        remove(spec, load_settings())
