"""The ledger of one server's life: what it takes for resident, and who may write it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from looprun_models.ledger import FOREIGN, Held, Ledger, alone, open_ledger
from looprun_models.settings import Settings, load_settings
from looprun_models.wire import Record


def ledger(capacity: int = 3) -> Ledger:
    return Ledger(capacity)


def used(ledger: Ledger, *keys: str, size: int = 1) -> Ledger:
    for key in keys:
        ledger.use(Held(key, size, 100))
    return ledger


def cached(ledger: Ledger) -> str:
    return "".join(held.key or "?" for held in ledger.cached)


def held_by(ledger: Ledger, keys: str) -> str:
    return "".join(key for key in keys if ledger.holds(key))


def record(**changed: object) -> Record:
    values = dict.fromkeys(Record.__annotations__)
    return Record(**{**values, "port": 9999, "child_pid": 1, "child_start": "a", "cache_bytes": 3, **changed})


@pytest.fixture
def settings() -> Settings:
    return load_settings()


# --- what the engine's RAM cache does --------------------------------------------------------------------------------


def test_what_is_displaced_goes_to_the_end_and_the_oldest_out() -> None:
    kept = used(ledger(), "a", "b", "c", "d", "e")
    assert kept.slot
    assert (kept.slot.key, cached(kept)) == ("e", "bcd")


def test_the_oldest_of_a_full_cache_makes_room_for_the_slot_before_it_could_be_found() -> None:
    """Round robin over one more than fits is the case in which a plain look into the cache is wrong every time."""
    kept = used(ledger(), "a", "b", "c", "d")
    assert cached(kept) == "abc"
    assert held_by(kept, "abcd") == "bcd"
    assert cached(kept) == "abc", "asking changes nothing"


def test_what_is_used_again_leaves_its_place() -> None:
    kept = used(ledger(), "a", "b", "c", "b")
    assert kept.slot
    assert (kept.slot.key, cached(kept)) == ("b", "ac")


def test_a_state_larger_than_the_cache_is_not_kept_and_costs_nobody_his_place() -> None:
    kept = used(ledger(), "a", "b")
    kept.use(Held("big", 4, 100))
    kept.park()
    assert (kept.slot, cached(kept)) == (None, "ab")


def test_without_a_cache_only_the_slot_holds() -> None:
    kept = used(ledger(0), "a", "b")
    assert held_by(kept, "ab") == "b"


def test_a_conversation_grows_in_the_slot() -> None:
    kept = used(ledger(), "a", "b")
    kept.use(Held("b", 2, 200))
    kept.park()
    assert [held.size for held in kept.cached] == [1, 2]


def test_other_peoples_prompts_take_room_too() -> None:
    kept = used(ledger(), "a", "b", "c")
    kept.notice(100, lambda read: Held(FOREIGN, 1, read))
    assert cached(kept) == "ab", "nothing is known of what was read before the first look"
    kept.tell(20)
    kept.notice(120, lambda read: Held(FOREIGN, 1, read))
    assert cached(kept) == "ab", "that was one of us"
    kept.notice(150, lambda read: Held(FOREIGN, 1, read))
    assert kept.slot == Held(FOREIGN, 1, 30)
    assert cached(kept) == "abc"
    used(kept, "a")
    assert cached(kept) == "bc?"
    kept.notice(None, lambda read: Held(FOREIGN, 1, read))
    kept.notice(900, lambda read: Held(FOREIGN, 1, read))
    assert cached(kept) == "bc?", "an engine that does not count says nothing"


def test_what_a_reply_did_not_find_is_lost() -> None:
    kept = used(ledger(), "a", "b")
    kept.lose("a")
    kept.lose("b")
    assert held_by(kept, "ab") == ""


# --- who keeps it ----------------------------------------------------------------------------------------------------


def test_it_is_kept_for_one_life_of_the_server(settings: Settings) -> None:
    with open_ledger(record(), settings) as kept:
        used(kept, "a", "b")
        kept.counted = 7
    with open_ledger(record(), settings) as again:
        assert again == kept
    with open_ledger(record(child_start="b"), settings) as other:
        assert other == Ledger(3)


@pytest.mark.parametrize("garbage", ["", "{", "[]", '{"life": "1:a"}', '{"life": "1:a", "slot": [1], "cached": 3}'])
def test_garbage_means_that_nothing_is_known(settings: Settings, garbage: str) -> None:
    with open_ledger(record(), settings) as kept:
        used(kept, "a")
    [file] = (settings.state_dir / "ledgers").glob("*.json")
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_text(garbage)
    with open_ledger(record(), settings) as kept:
        assert kept == Ledger(3)
        used(kept, "b")
    with open_ledger(record(), settings) as kept:
        assert held_by(kept, "ab") == "b"


def test_where_it_cannot_be_kept_nothing_is_known(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    nowhere = load_settings({"LOOPRUN_STATE_DIR": str(tmp_path / "file" / "x"), "HOME": str(tmp_path)})
    for _ in range(2):
        with open_ledger(record(), nowhere) as kept, alone(record(), nowhere):
            assert kept == Ledger(3)
            used(kept, "a")


def test_writers_of_one_process_wait_for_each_other(settings: Settings) -> None:
    def many(key: str) -> None:
        for _ in range(20):
            with open_ledger(record(cache_bytes=99), settings) as kept:
                used(kept, key)
                kept.counted = (kept.counted or 0) + 1

    threads = [threading.Thread(target=many, args=(key,)) for key in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with open_ledger(record(), settings) as kept:
        assert kept.counted == 80
        assert held_by(kept, "abcd") == "abcd"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.parametrize("block", [alone, open_ledger])
def test_a_child_forked_meanwhile_does_not_keep_the_lock(
    settings: Settings, block: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = os.pipe()
    with block(record(), settings):  # type: ignore[attr-defined]
        child = os.fork()
        if not child:
            os.close(there)
            os.read(here, 1)  # lives until the parent closes its end
            os._exit(0)
    os.close(here)
    monkeypatch.setattr("looprun_models.ledger.LOOK", 0)
    taken = threading.Event()

    def take() -> None:
        with block(record(), settings):  # type: ignore[attr-defined]
            taken.set()

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    found = taken.wait(10)
    os.close(there)
    os.waitpid(child, 0)
    thread.join()
    assert found
