"""Trunk states on the disk: killed, damaged, crowded, contended, and on disks that do not want them."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from looprun_models import system, trunkfiles
from looprun_models.trunkentry import Entry, NotSaved, Proof, TrunkMeta
from looprun_models.trunkfiles import JSON_LIMIT, LOCK_NAME, temporary_name
from looprun_models.trunkmisses import ENGINES_KEPT, Misses
from looprun_models.trunkstore import DEFAULT_BUDGET, TrunkStore
from tests.helpers import PATIENCE, labelled

STATE = bytes(range(256)) * 64
DAY = 86400
posix = pytest.mark.skipif(sys.platform == "win32", reason="modes, links, signals")


def meta(name: str = "one", **changed: Any) -> TrunkMeta:
    values: dict[str, Any] = {
        "key": hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest(),
        "label": name,
        "alias": "ram16",
        "tokens": 2193,
        "token_digest": "d" * 64,
        "engine": "llama-server b11434",
        "read_seconds": 9.4,
        "facts": {"ctk": "q8_0", "weights": "a" * 64},
    }
    return TrunkMeta(**{**values, **changed})


def save(store: TrunkStore, of: TrunkMeta, state: bytes = STATE) -> Entry:
    """What an engine and its caller do."""
    name = store.reserve(of.key)
    with open(store.folder / name, "wb") as engine:
        engine.write(state)
    return store.commit(name, of, len(state))


def key(name: str = "one") -> str:
    return meta(name).key


def in_folder(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {LOCK_NAME}


def pair(name: str) -> set[str]:
    return {f"{key(name)}.trunk", f"{key(name)}.json"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "slot-states"
    made.mkdir(mode=0o700)
    return made


@pytest.fixture
def store(folder: Path) -> TrunkStore:
    return TrunkStore(folder, 1 << 30)


# --- saving and finding ---


def test_what_is_saved_is_found_by_its_key_and_checked(store: TrunkStore) -> None:
    saved = save(store, meta())
    found = store.find(key())
    assert found == store.check(key())[0]
    assert found is not None
    assert dataclasses.replace(found, last_used=0.0) == dataclasses.replace(saved, last_used=0.0)
    assert (found.meta, found.size, found.file) == (meta(), len(STATE), f"{key()}.trunk")
    assert found.sha256 == hashlib.sha256(STATE).hexdigest()
    assert (store.folder / found.file).read_bytes() == STATE
    assert store.find(key("two")) is None
    assert store.check(key("two")) == (None, "")


def test_a_trunk_whose_cold_reading_was_never_seen_is_kept_as_that(store: TrunkStore) -> None:
    save(store, meta(read_seconds=None, facts={}))
    assert store.entries()[0].meta == meta(read_seconds=None, facts={})


@posix
def test_files_are_private_from_their_first_byte(store: TrunkStore) -> None:
    before = os.umask(0)
    try:
        name = store.reserve(key())
        assert stat.S_IMODE((store.folder / name).stat().st_mode) == 0o600
        (store.folder / name).unlink()
        (store.folder / name).write_bytes(STATE)  # an engine that makes the file anew
        store.commit(name, meta(), len(STATE))
        store.proved(key(), 1, 1)
    finally:
        os.umask(before)
    assert {stat.S_IMODE((store.folder / name).stat().st_mode) for name in pair("one")} == {0o600}


@posix
def test_a_folder_that_others_can_enter_is_said_and_left_as_it_is(store: TrunkStore) -> None:
    assert store.exposed() == ""
    store.folder.chmod(0o755)
    save(store, meta())
    assert f"{store.folder} (mode 755)" in store.exposed()
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o755


def test_a_file_where_the_folder_should_be_is_no_folder_that_others_enter(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "file").chmod(0o644)
    assert TrunkStore(tmp_path / "file").exposed() == ""


def test_the_names_given_to_an_engine_are_bare_and_never_twice_the_same(store: TrunkStore) -> None:
    names = [store.reserve(key()) for _ in range(3)]
    assert len(set(names)) == 3
    assert all(set(name) <= set("0123456789abcdef.-part") and len(name) < 128 for name in names)
    for name in names:
        store.discard(name)
    assert in_folder(store.folder) == set()


@pytest.mark.parametrize("bad", ["../x", "A" * 64, "a" * 63, "a" * 64 + "\n", ""])
def test_what_is_no_key_names_no_file(store: TrunkStore, bad: str) -> None:
    with pytest.raises(ValueError, match="not a sha256"):
        store.reserve(bad)
    assert store.find(bad) is None
    assert store.check(bad) == (None, "")
    assert store.drop(bad) == 0
    store.touch(bad)
    store.proved(bad, 1, 1)


def test_only_what_was_reserved_for_this_trunk_is_taken(store: TrunkStore) -> None:
    mine = store.folder.parent / "mine"
    mine.write_bytes(STATE)
    for name in (store.reserve(key("two")), "../mine", f"{key()}.trunk"):
        with pytest.raises(ValueError, match="was not reserved"):
            store.commit(name, meta(), len(STATE))
    store.discard("../mine")
    assert mine.exists()


def test_a_value_that_would_not_be_read_again_is_a_bug_that_shows(store: TrunkStore) -> None:
    with pytest.raises(ValueError, match="wrong kind"):
        save(store, meta(facts={"ctx": 4096}))
    with pytest.raises(ValueError, match="wrong kind"):
        save(store, meta(read_seconds=float("nan")))
    assert in_folder(store.folder) == set()


@pytest.mark.parametrize(
    ("written", "said", "why"),
    [
        (b"", 0, "the engine could not write to"),
        (STATE, 0, "the engine could not write to"),
        (STATE[:-1], len(STATE), f"wrote {len(STATE)} bytes, and there are {len(STATE) - 1}"),
        (STATE, len(STATE) - 1, f"and there are {len(STATE)}"),
        (None, len(STATE), "cannot be written: No such file"),
    ],
)
def test_what_the_engine_did_not_write_whole_is_not_kept(
    store: TrunkStore, written: bytes | None, said: int, why: str
) -> None:
    save(store, meta(), b"old")
    name = store.reserve(key())
    if written is None:
        (store.folder / name).unlink()
    else:
        (store.folder / name).write_bytes(written)
    with pytest.raises(NotSaved) as raised:
        store.commit(name, meta(), said)
    assert why in raised.value.why
    assert in_folder(store.folder) == pair("one"), "the older one stays"
    assert store.check(key())[0] is not None


@posix
def test_a_link_under_the_reserved_name_is_not_taken(store: TrunkStore, tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes(STATE)
    name = store.reserve(key())
    (store.folder / name).unlink()
    (store.folder / name).symlink_to(tmp_path / "outside")
    with pytest.raises(NotSaved, match="not a regular file"):
        store.commit(name, meta(), len(STATE))
    assert in_folder(store.folder) == set()
    assert (tmp_path / "outside").read_bytes() == STATE


@pytest.mark.parametrize("suffix", ["json", "trunk"])
def test_a_folder_in_the_way_goes_when_it_is_empty_and_is_named_when_it_stays(store: TrunkStore, suffix: str) -> None:
    there = store.folder / f"{key()}.{suffix}"
    there.mkdir()
    assert store.check(key()) == (None, "")
    save(store, meta())
    assert store.check(key())[0]
    for path in store.folder.iterdir():
        path.unlink()
    there.mkdir()
    (there / "somebody's").write_bytes(b"x" * 5000)
    with pytest.raises(NotSaved) as caught:
        save(store, meta())
    assert caught.value.why.startswith(f"{there} is a folder in the way, and stays: ")
    assert in_folder(store.folder) == {there.name}
    assert (store.check(key()), store.sweep(), store.total()) == ((None, ""), 0, 0)


def test_a_folder_that_went_is_made_again_for_the_next_save(store: TrunkStore) -> None:
    save(store, meta())
    shutil.rmtree(store.folder)
    assert (store.find(key()), store.entries(), store.total(), store.sweep()) == (None, [], 0, 0)
    assert store.exposed() == ""
    save(store, meta())
    assert store.find(key()) is not None
    if os.name != "nt":
        assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700


def test_a_place_where_no_folder_can_be_is_not_saved_and_nothing_else_raises(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = TrunkStore(tmp_path / "file" / "slot-states")
    with pytest.raises(NotSaved, match="cannot be written: Not a directory"):
        store.commit(store.reserve(key()), meta(), 0)
    with pytest.raises(NotSaved, match="cannot be written: Not a directory"):
        store.commit(store.reserve(key()), meta(), 1)
    store.touch(key())
    store.proved(key(), 1, 1)
    assert (store.check(key())[0], store.entries(), store.drop(key()), store.limit()) == (None, [], 0, DEFAULT_BUDGET)


# --- labels ---


@pytest.mark.parametrize("label", ["a/b", "..", "", "ü", "u\u0308", "x" * 300, "\udcff", "A", "a", "\n\x1b[31m", "💾"])
def test_a_label_may_be_any_text(store: TrunkStore, label: str) -> None:
    other = meta("other", label="a" if label != "a" else "A")
    save(store, meta("one", label=label))
    save(store, other)
    assert [entry.meta.label for entry in labelled(store, "ram16", label)] == [label]
    assert labelled(store, "ram24", label) == []
    assert in_folder(store.folder) == pair("one") | pair("other")


def test_facts_without_end_are_not_saved(store: TrunkStore) -> None:
    with pytest.raises(NotSaved, match="too long"):
        save(store, meta(facts={"x": "x" * JSON_LIMIT}))
    assert in_folder(store.folder) == set()


def test_a_changed_prompt_keeps_its_label_and_supersedes_the_older_one_unless_that_is_used(store: TrunkStore) -> None:
    for name in ("first", "second", "third"):
        save(store, meta(name, label="scheduler"))
    save(store, meta("elsewhere", label="scheduler", alias="ram24"))
    assert [entry.key for entry in labelled(store, "ram16", "scheduler")] == [
        key("third"),
        key("second"),
        key("first"),
    ]
    assert {entry.key for entry in store.superseded()} == {key("first"), key("second")}
    store.touch(key("first"))
    assert [entry.key for entry in store.superseded()] == [key("second")]


@pytest.mark.parametrize("fact", ["engine", "flags"])
def test_engines_and_flags_in_turn_do_not_supersede_each_others(store: TrunkStore, fact: str) -> None:
    for name in ("one", "two", "one again"):
        save(store, meta(name, label="scheduler", facts={fact: name[:3]}))
    assert [entry.key for entry in store.superseded()] == [key("one")]


# --- use, proof, budget ---


def test_the_last_used_stands_first(store: TrunkStore) -> None:
    for name in ("a", "b", "c", "d"):
        save(store, meta(name))
    store.touch(key("a"))
    store.proved(key("b"), 1, 2)
    assert [entry.meta.label for entry in store.entries()] == ["b", "a", "d", "c"]


def test_what_is_used_in_one_tick_of_the_file_systems_clock_keeps_its_order(
    store: TrunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count(10**18, 1000)
    monkeypatch.setattr(time, "time_ns", lambda: next(ticks))
    save(store, meta("before"), b"x")
    for number in range(5):
        store.touch(key("before"))
        save(store, meta(f"{number}"), b"x")
        assert [entry.meta.label for entry in store.entries()][:2] == [f"{number}", "before"]


def test_a_proof_stays_with_its_trunk_until_the_next_and_until_it_is_baked_anew(store: TrunkStore) -> None:
    first = save(store, meta())
    assert first.proof is None
    for reused in (0, 2192):
        store.proved(key(), reused, 2193)
    found, why = store.check(key())
    assert (why, found is not None and found.proof is not None) == ("", True)
    assert found is not None
    assert found.proof == Proof(2192, 2193, found.proof.at if found.proof else 0)
    assert found.created == first.created < found.last_used
    save(store, meta())
    assert store.entries()[0].proof is None
    store.proved(key("gone"), 1, 1)
    assert in_folder(store.folder) == pair("one")


def test_the_least_recently_used_go_when_the_budget_is_spent(folder: Path) -> None:
    size = TrunkStore(folder, 1 << 30)
    save(size, meta("0"))
    store = TrunkStore(folder, 3 * size.total() + 100)
    save(store, meta("1"))
    save(store, meta("2"))
    store.touch(key("0"))
    save(store, meta("3"))
    assert in_folder(folder) == pair("0") | pair("2") | pair("3")
    save(store, meta("4"))
    assert in_folder(folder) == pair("0") | pair("3") | pair("4")


def test_the_one_just_saved_stays_even_when_the_clock_went_back(folder: Path) -> None:
    save(TrunkStore(folder, 1 << 30), meta("from the future"))
    os.utime(folder / f"{key('from the future')}.json", (2**31, 2**31))
    store = TrunkStore(folder, len(STATE) + 2000)
    save(store, meta("now"))
    assert in_folder(folder) == pair("now")


def test_fifty_labels_never_take_more_than_the_budget(folder: Path) -> None:
    store = TrunkStore(folder, 5 * len(STATE))
    for number in range(50):
        save(store, meta(f"agent {number}"), STATE[: 4096 + 97 * number])
        assert store.total() <= 5 * len(STATE)
        assert store.entries()[0].meta.label == f"agent {number}"
    labels = [entry.meta.label for entry in store.entries()]
    assert labels == [f"agent {number}" for number in range(49, 49 - len(labels), -1)]
    assert len(labels) > 4
    assert all(store.check(entry.key) == (entry, "") for entry in store.entries())


def test_one_that_alone_is_over_the_budget_is_not_kept_and_costs_nobody_his_place(folder: Path) -> None:
    save(TrunkStore(folder, 1 << 30), meta("small"), b"small")
    store = TrunkStore(folder, len(STATE))
    with pytest.raises(
        NotSaved, match=r"its 1[67]\.\d kB are more than the 16\.4 kB that all trunks may take \(LOOPRUN_TR"
    ):
        save(store, meta())
    assert in_folder(folder) == pair("small")
    with pytest.raises(NotSaved, match=r"than the 100 B that all trunks may take \(LOOPRUN_TRUNK_BUDGET\)$"):
        save(TrunkStore(folder, 100), meta())


@pytest.mark.parametrize(
    ("free", "why"), [(0, "the 0 B that.* a tenth of what is free"), (1 << 40, "8.6 GB.* default")]
)
def test_without_a_budget_the_disk_is_what_is_named(
    folder: Path, free: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(folder)
    store = TrunkStore(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))
    monkeypatch.setattr(store, "_received", lambda part, written: (written, "0" * 64))
    with pytest.raises(NotSaved, match=why) as caught:
        store.commit(store.reserve(key()), meta(), 9 << 30)
    assert "LOOPRUN" not in caught.value.why


def test_a_budget_of_nothing_keeps_nothing(folder: Path) -> None:
    with pytest.raises(NotSaved, match="LOOPRUN_TRUNK_BUDGET is 0"):
        save(TrunkStore(folder, 0), meta())
    assert in_folder(folder) == set()


def test_the_budget_by_default_is_a_tenth_of_what_is_free_or_8_gib(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = TrunkStore(folder)
    save(store, meta())
    usage = shutil.disk_usage(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10**6 - store.total()))
    assert store.limit() == 10**5, "what the trunks themselves take does not shrink it"
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10**12))
    assert store.limit() == DEFAULT_BUDGET == 8 * 1024**3


def test_dropping_frees_both_files(store: TrunkStore) -> None:
    save(store, meta())
    save(store, meta("two"))
    taken = store.total()
    assert store.drop(key()) == taken - store.total() > len(STATE)
    assert in_folder(store.folder) == pair("two")
    assert store.drop(key()) == 0


# --- damage ---


def cut(state: Path, _: Path) -> None:
    os.truncate(state, len(STATE) - 1)


def flipped(state: Path, _: Path) -> None:
    state.write_bytes(STATE[:4000] + bytes(byte ^ 0xFF for byte in STATE[4000:6048]) + STATE[6048:])


def zeroed(state: Path, _: Path) -> None:
    state.write_bytes(bytes(len(STATE)))


def swapped(state: Path, other: Path) -> None:
    state.rename(state.with_name("third"))
    other.rename(state)
    state.with_name("third").rename(other)


def linked(state: Path, other: Path) -> None:
    outside = state.parent.parent / "outside"
    state.rename(outside)
    state.symlink_to(outside)


def piped(state: Path, _: Path) -> None:
    state.unlink()
    os.mkfifo(state)


@posix
@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (cut, f"it has {len(STATE) - 1} bytes instead of {len(STATE)}"),
        (flipped, "its bytes are not those that were saved"),
        (zeroed, "its bytes are not those that were saved"),
        (swapped, "its bytes are not those that were saved"),
        (linked, "it is a link, or no file"),
        (piped, "it is a link, or no file"),
    ],
)
def test_a_damaged_state_is_refused_with_its_reason_and_gone_from_use(
    store: TrunkStore, damage: Callable[[Path, Path], None], why: str
) -> None:
    save(store, meta("one"))
    save(store, meta("two"), STATE[::-1])
    damage(store.folder / f"{key('one')}.trunk", store.folder / f"{key('two')}.trunk")
    assert store.check(key("one")) == (None, why)
    assert not in_folder(store.folder) & pair("one")
    assert store.find(key("one")) is None
    assert store.check(key("one")) == (None, "")
    assert (store.check(key("two"))[0] is None) == (damage is swapped)
    outside = store.folder.parent / "outside"
    assert (outside.exists() and outside.read_bytes() == STATE) == (damage is linked), "what it points to stays"
    save(store, meta("one"))
    assert store.check(key("one"))[0] is not None


@posix
def test_finding_already_refuses_what_its_size_or_kind_betrays(store: TrunkStore) -> None:
    for damage in (cut, linked, piped):
        save(store, meta())
        damage(store.folder / f"{key()}.trunk", store.folder)
        assert store.find(key()) is None
        assert in_folder(store.folder) == set()


def with_told(store: TrunkStore, change: Callable[[dict[str, Any]], Any]) -> bytes:
    told = json.loads((store.folder / f"{key()}.json").read_text())
    changed = change(told)
    return json.dumps(told if changed is None else changed).encode()


HOSTILE: dict[str, Callable[[TrunkStore], bytes]] = {
    "empty": lambda _: b"",
    "not JSON": lambda _: b"{",
    "binary": lambda _: os.urandom(500),
    "a list": lambda _: b"[1]",
    "too deep": lambda _: b"[" * 100_000,
    "huge": lambda store: (store.folder / f"{key()}.json").read_bytes() + b" " * JSON_LIMIT,
    "a huge number": lambda store: with_told(store, lambda told: told.update(created=10**400)),
    "another schema": lambda store: with_told(store, lambda told: told.update(schema=2)),
    "no schema": lambda store: with_told(store, lambda told: told.pop("schema") and None),
    "no size": lambda store: with_told(store, lambda told: told.pop("size") and None),
    "more than it should": lambda store: with_told(store, lambda told: told.update(extra=1)),
    "its own last_used": lambda store: with_told(store, lambda told: told.update(last_used=1.0)),
    "size is text": lambda store: with_told(store, lambda told: told.update(size=str(told["size"]))),
    "size is true": lambda store: with_told(store, lambda told: told.update(size=True)),
    "size is a fraction": lambda store: with_told(store, lambda told: told.update(size=float(told["size"]))),
    "no hash": lambda store: with_told(store, lambda told: told.update(sha256=None)),
    "NaN": lambda store: with_told(store, lambda told: told.update(created=float("nan"))),
    "meta is a list": lambda store: with_told(store, lambda told: told.update(meta=[])),
    "meta is short": lambda store: with_told(store, lambda told: told["meta"].pop("label") and None),
    "label is null": lambda store: with_told(store, lambda told: told["meta"].update(label=None)),
    "read_seconds is text": lambda store: with_told(store, lambda told: told["meta"].update(read_seconds="")),
    "facts is text": lambda store: with_told(store, lambda told: told["meta"].update(facts="")),
    "a fact is a number": lambda store: with_told(store, lambda told: told["meta"].update(facts={"a": 1})),
    "proof is text": lambda store: with_told(store, lambda told: told.update(proof="yes")),
    "proof is short": lambda store: with_told(store, lambda told: told.update(proof={"reused": 1})),
    "proof is negative": lambda store: with_told(
        store, lambda told: told.update(proof={"reused": -1, "tokens": 1, "at": 1})
    ),
    "another's key": lambda store: with_told(store, lambda told: told["meta"].update(key=key("two"))),
    "a path for a key": lambda store: with_told(store, lambda told: told["meta"].update(key=f"../{key()}")),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_sidecar_that_is_none_means_that_there_is_no_trunk(store: TrunkStore, kind: str) -> None:
    save(store, meta("one"))
    save(store, meta("two"))
    sidecar = store.folder / f"{key()}.json"
    assert store.check(key())[0] is not None
    sidecar.write_bytes(with_told(store, lambda _: None))
    assert store.check(key())[0] is not None, "the same, written by another hand"
    sidecar.write_bytes(HOSTILE[kind](store))
    assert (store.find(key()), store.check(key())) == (None, (None, ""))
    store.touch(key())
    store.proved(key(), 1, 1)
    assert [entry.meta.label for entry in store.entries()] == ["two"]
    store.sweep()
    assert in_folder(store.folder) == pair("two")


@posix
def test_a_linked_sidecar_is_refused_and_what_it_points_to_stays(store: TrunkStore, tmp_path: Path) -> None:
    save(store, meta())
    sidecar = store.folder / f"{key()}.json"
    sidecar.rename(tmp_path / "outside.json")
    sidecar.symlink_to(tmp_path / "outside.json")
    assert store.check(key()) == (None, "it is a link, or no file")
    assert in_folder(store.folder) == set()
    assert (tmp_path / "outside.json").exists()


def test_what_cannot_be_read_just_now_is_not_taken_for_damaged(
    store: TrunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, meta())
    opened = os.open

    def too_many(path: Any, *flags: Any) -> int:
        if str(path).endswith((".trunk", ".lock")):
            raise OSError(24, "Too many open files")
        return opened(path, *flags)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", too_many)
        assert store.check(key()) == (None, "it cannot be read: Too many open files")
        assert store.find(key()) is None
        assert store.sweep() == 0
    assert store.check(key())[0] is not None


# --- what others and crashes leave ---


def test_foreign_files_are_never_touched_nor_counted(store: TrunkStore, tmp_path: Path) -> None:
    foreign = {
        "trunk.bin",
        "notes.json",
        f"{key()}.bin",
        f"{key()}.trunk.bak",
        f"x{key()}.trunk",
        f"{key().upper()}.trunk",
        f"{key()}.1-2-3.part",
        f"{key()}.1.part",
        "1-00000000-3.part",
    }
    for name in foreign:
        (store.folder / name).write_bytes(b"mine")
        os.utime(store.folder / name, (1, 1))
    (store.folder / "folder").mkdir()
    (store.folder / f"{key('three')}.trunk").mkdir()
    save(TrunkStore(store.folder, len(STATE) + 2000), meta("two"))
    assert (store.total() < len(STATE) + 8192, store.sweep()) == (True, 0)
    assert in_folder(store.folder) == foreign | pair("two") | {"folder", f"{key('three')}.trunk"}


def test_a_sweep_takes_what_the_dead_left_and_nothing_of_the_living(store: TrunkStore) -> None:
    save(store, meta("whole"))
    mine, old_of_mine = store.reserve(key()), store.reserve(key())
    ended = subprocess.run(
        [sys.executable, "-c", f"from looprun_models.trunkfiles import temporary_name as t; print(t({key()!r}))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    pid = os.getpid()
    recycled = f"{key()}.{pid}-00000000-7.part"
    for name in (ended, recycled, f"{key('state only')}.trunk", f"{key('sidecar only')}.json"):
        (store.folder / name).write_bytes(b"12345")
    os.utime(store.folder / old_of_mine, (os.stat(store.folder).st_mtime - DAY - 60,) * 2)
    before = store.total()
    assert store.sweep() == 20 == before - store.total()
    assert in_folder(store.folder) == pair("whole") | {mine}
    assert store.sweep() == 0


def test_saving_sweeps_so_that_leftovers_do_not_eat_the_budget(store: TrunkStore) -> None:
    (store.folder / f"{key('state only')}.trunk").write_bytes(STATE)
    (store.folder / f"{key()}.{os.getpid()}-00000000-7.part").write_bytes(STATE)
    save(store, meta())
    assert in_folder(store.folder) == pair("one")


KILLER = """
import json, os, signal, sys
from pathlib import Path
from looprun_models import trunkentry, trunkfiles, trunkstore
from tests.test_trunkstore import STATE, in_folder, key, meta, pair, save

os.fsync = lambda _: None  # a killed process takes nothing back that the system has; it would be most of the time
OURS = {module.__file__ for module in (trunkentry, trunkfiles, trunkstore)}
ACT, FOLDER = sys.argv[1], Path(sys.argv[2])
OLD, NEW = STATE, STATE[::-1]

def lines(frame):
    while frame:
        if frame.f_code.co_filename in OURS:
            yield frame.f_code.co_name, frame.f_lineno
        frame = frame.f_back

def dies_at(n):
    steps = set()  # each line once for each way to it: the second round of a loop is no new case
    def trace(frame, event, _):
        if frame.f_code.co_filename not in OURS:
            return None
        if event == "line":
            steps.add(tuple(lines(frame)))
            if len(steps) == n:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace
    sys.settrace(trace)

def act(store, n):
    if ACT == "prove":
        dies_at(n)
        store.proved(key(), 7, 9)
        return
    dies_at(n)
    save(store, meta(read_seconds=2.0), NEW)

def what_is_there(store):
    entry, why = store.check(key())
    assert not why, why
    assert entry == store.find(key())
    if entry is None:
        return "none"
    state = (store.folder / entry.file).read_bytes()
    assert (state, entry.meta.read_seconds) in ((OLD, 1.0), (NEW, 2.0)), entry
    return "proved" if entry.proof else "old" if state == OLD else "new"

seen, n, code = [], 0, None
while code != 0:
    n += 1
    folder = FOLDER / str(n)
    folder.mkdir()
    store = trunkstore.TrunkStore(folder, 1 << 30)
    if ACT != "new":
        save(store, meta(read_seconds=1.0), OLD)
    save(store, meta("neighbour"), OLD)
    if ACT == "crowd":
        store.touch(key())
        store.budget = store.total() // 2 + 1000
    child = os.fork()
    if child == 0:
        act(store, n)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -9), code
    seen.append(what_is_there(store))
    store.sweep()
    assert seen[-1] == what_is_there(store)
    neighbour, why = store.check(key("neighbour"))
    assert not why and (neighbour or ACT == "crowd"), why
    wanted = (pair("one") if seen[-1] != "none" else set()) | (pair("neighbour") if neighbour else set())
    assert in_folder(folder) == wanted, in_folder(folder) ^ wanted
assert bool(neighbour) == (ACT != "crowd")
print(json.dumps(seen))
"""


@posix
@pytest.mark.parametrize(
    ("act", "stages"),
    [
        ("new", ["none", "new"]),
        ("replace", ["old", "none", "new"]),
        ("crowd", ["old", "none", "new"]),
        ("prove", ["old", "proved"]),
    ],
)
def test_killed_at_any_line_the_store_has_the_old_the_new_or_none(tmp_path: Path, act: str, stages: list[str]) -> None:
    """One process for each line that runs, killed by SIGKILL right before it."""
    done = subprocess.run(
        [sys.executable, "-c", KILLER, act, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
        cwd=Path(__file__).parent.parent,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert len(seen) > 40
    assert list(dict.fromkeys(seen)) == stages
    assert seen == sorted(seen, key=stages.index), "never back"


RIVAL = """
import sys
from pathlib import Path
from looprun_models.trunkstore import TrunkStore
from tests.test_trunkstore import STATE, key, meta, save
store, mine = TrunkStore(Path(sys.argv[1]), 1 << 30), sys.argv[2].encode()
print("ready", flush=True)
sys.stdin.readline()
for _ in range(20):
    save(store, meta(), mine + STATE)
    store.touch(key())
    store.proved(key(), 5, 9)
"""


def test_two_processes_baking_the_same_trunk_at_once_leave_one_that_is_whole(store: TrunkStore) -> None:
    rivals = [
        subprocess.Popen(
            [sys.executable, "-c", RIVAL, str(store.folder), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent.parent,
        )
        for name in ("1", "2")
    ]
    for rival in rivals:
        assert rival.stdout
        assert rival.stdout.readline() == "ready\n"
    for rival in rivals:
        assert rival.stdin
        rival.stdin.write("go\n")
        rival.stdin.flush()
    seen = set()
    while any(rival.poll() is None for rival in rivals):
        entry, why = store.check(key())
        assert why == ""
        seen.add(entry and entry.sha256)
        store.proved(key(), 5, 9)
    for rival in rivals:
        _, errors = rival.communicate(timeout=PATIENCE)
        assert rival.returncode == 0, errors
    entry, why = store.check(key())
    assert why == ""
    assert entry is not None
    assert entry.proof is not None
    assert seen - {None} <= {hashlib.sha256(name + STATE).hexdigest() for name in (b"1", b"2")}
    assert in_folder(store.folder) == pair("one")


def test_a_lock_that_never_comes_is_not_waited_for(store: TrunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trunkfiles, "LOCK_PATIENCE", 0.0)
    save(store, meta())
    with open(store.folder / LOCK_NAME, "rb+") as held:
        assert system.try_lock(held.fileno())
        save(store, meta("two"))
        store.proved(key(), 1, 1)
        assert store.check(key("two"))[0] is not None
        assert {entry.proof for entry in store.entries()} == {None}, "a proof could undo what the holder writes"
        assert store.drop(key("two")) > 0
    store.proved(key(), 1, 1)
    assert store.entries()[0].proof is not None


def test_a_file_system_without_locks_has_trunks_too(store: TrunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(_: int) -> bool:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(system, "try_lock", no_locks)
    save(store, meta())
    store.proved(key(), 1, 1)
    found = store.check(key())[0]
    assert found is not None
    assert found.proof is not None


# --- disks that do not want them ---

LIMITED = """
import resource, sys
from pathlib import Path
from looprun_models.trunkentry import NotSaved
from looprun_models.trunkstore import TrunkStore
from tests.test_trunkstore import STATE, key, meta
store = TrunkStore(Path(sys.argv[1]), 1 << 30)
name = store.reserve(key())
(store.folder / name).write_bytes(STATE)
store.touch(key())
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
store.proved(key(), 1, 1)
try:
    store.commit(name, meta(), len(STATE))
except NotSaved as error:
    print(error.why)
"""


@posix
def test_a_sidecar_that_cannot_be_written_leaves_the_older_trunk(store: TrunkStore) -> None:
    save(store, meta(), b"old")
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(store.folder)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent.parent,
    )
    assert (done.stdout, done.stderr) == (f"{store.folder} cannot be written: File too large\n", "")
    assert in_folder(store.folder) == pair("one")
    entry = store.check(key())[0]
    assert entry is not None
    assert (entry.size, entry.proof) == (3, None)


MOUNTED = """
import subprocess, sys
from pathlib import Path
from looprun_models.trunkentry import NotSaved
from looprun_models.trunkmisses import Misses
from looprun_models.trunkstore import TrunkStore
from tests.test_trunkstore import STATE, in_folder, key, meta, pair, save
folder = Path(sys.argv[1])
store, misses = TrunkStore(folder, 1 << 30), Misses(folder)

def not_saved(name, said):
    try:
        store.commit(name, meta("two"), said)
    except NotSaved as error:
        print(error.why)

def fill(path, leave=0):
    written = 0
    try:
        with open(path, "wb", buffering=0) as file:
            while True:
                written += file.write(bytes(4096))
    except OSError:
        return written

save(store, meta("one"))
name = store.reserve(key("two"))
fill(folder / name)
not_saved(name, 0)                           # the engine could not write it all
name = store.reserve(key("two"))
not_saved(name, fill(folder / name))         # it could, and there is no room for what lies beside it
assert in_folder(folder) == pair("one"), in_folder(folder)
fill(folder / "foreign")
store.proved(key("one"), 1, 1)
misses.note_miss("e", "a")
assert store.check(key("one"))[0].proof is None
assert (folder / "foreign").exists()
(folder / "foreign").unlink()
try:
    save(TrunkStore(folder), meta("two"), STATE * 20)
except NotSaved as error:
    print(error.why)
subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
not_saved(store.reserve(key("two")), 0)
not_saved(store.reserve(key("two")), 5)
store.touch(key("one")); store.proved(key("one"), 1, 1); misses.note_miss("e", "a")
assert (store.drop(key("one")), store.sweep()) == (0, 0)
assert store.check(key("one"))[0] == store.entries()[0]
"""


def may_mount() -> bool:
    if not sys.platform.startswith("linux") or os.geteuid() != 0 or not shutil.which("unshare"):
        return False
    return subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not may_mount(), reason="mounts a file system of its own")
def test_a_full_and_then_a_read_only_disk_are_said_and_keep_what_was_there(folder: Path) -> None:
    run = 'mount -t tmpfs -o size=1m,mode=700 tmpfs "$3" && exec "$1" -c "$2" "$3"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", run, "sh", sys.executable, MOUNTED, str(folder)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent.parent,
    )
    assert done.stderr == ""
    full = f"the disk of {folder} is full"
    assert done.stdout.splitlines() == [
        full,
        full,
        "its 328.2 kB are more than the 104.5 kB that all trunks may take: a tenth of what is free on the disk of "
        f"{folder}",
        f"{folder} cannot be written",
        f"{folder} cannot be written: No such file or directory",
    ]
    assert list(folder.iterdir()) == []


# --- where a restore does not help ---


def test_misses_are_counted_for_engine_and_architecture_until_a_hit(folder: Path) -> None:
    misses = Misses(folder)
    assert misses.count("b9780", "qwen35") == 0
    assert [misses.note_miss("b9780", "qwen35") for _ in range(2)] == [1, 2]
    assert Misses(folder).count("b9780", "qwen35") == 2
    assert (misses.count("b9780", "llama"), misses.count("b11434", "qwen35")) == (0, 0)
    misses.note_hit("b11434", "qwen35")
    assert misses.count("b9780", "qwen35") == 2
    misses.note_hit("b9780", "qwen35")
    assert misses.count("b9780", "qwen35") == 0
    assert stat.S_IMODE((folder / "trunk-misses.json").stat().st_mode) == 0o600 or os.name == "nt"


def test_all_misses_are_forgotten_at_once(folder: Path) -> None:
    misses = Misses(folder)
    assert misses.forget() == []
    assert in_folder(folder) == set()
    for engine, architecture in (("b1", "qwen35"), ("b2", "qwen35"), ("b2", "llama")):
        misses.note_miss(engine, architecture)
    assert misses.forget() == [("b1", "qwen35"), ("b2", "qwen35"), ("b2", "llama")]
    assert (misses.count("b2", "llama"), misses.forget()) == (0, [])


def test_engines_not_heard_of_are_forgotten(folder: Path) -> None:
    misses = Misses(folder)
    for number in range(ENGINES_KEPT):
        misses.note_miss(f"engine {number}", "llama")
    misses.note_miss("engine 0", "llama")
    misses.note_miss("one more", "llama")
    assert [misses.count(f"engine {number}", "llama") for number in (0, 1, 2)] == [2, 0, 1]


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"[]",
        b"{",
        b"\xff\x00",
        b"[" * 100_000,
        b'{"e": 1}',
        b'{"e": {"a": "1"}}',
        b'{"e": {"a": -1}}',
        b'{"e": {"a": true}}',
    ],
)
def test_garbage_counts_nothing_and_is_written_over(folder: Path, garbage: bytes) -> None:
    (folder / "trunk-misses.json").write_bytes(garbage)
    misses = Misses(folder)
    assert misses.count("e", "a") == 0
    misses.note_hit("e", "a")
    assert (misses.note_miss("e", "a"), misses.count("e", "a")) == (1, 1)


def test_a_folder_that_is_not_there_remembers_nothing(tmp_path: Path) -> None:
    misses = Misses(tmp_path / "none")
    assert (misses.note_miss("e", "a"), misses.count("e", "a")) == (1, 0)
    misses.note_hit("e", "a")


def test_a_temporary_is_told_from_the_living_by_more_than_its_pid() -> None:
    name = temporary_name("0" * 64)
    assert not trunkfiles.abandoned(Path(name))
    assert trunkfiles.abandoned(Path(name.replace(f".{os.getpid()}-", ".1-")))
    assert not trunkfiles.abandoned(Path("foreign.part"))
