"""What trunks promise on every engine: a saved one gives the same text, a damaged one is not used, switches are warm.

The engine is LOOPRUN_TEST_ENGINE or the embedded one, as in test_properties.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from looprun_models import LocalModel, ServerUnavailable, Trunk, local_model, warmth
from looprun_models.ledger import open_ledger
from looprun_models.settings import load_settings
from looprun_models.trunks import Keeper
from looprun_models.trunkstore import TrunkStore
from looprun_models.wire import Record
from tests.helpers import gone, labelled, wait_for

Profile = Callable[..., str]
Note = Callable[[str, object], None]
STATE = "tiny-qwen35-mtp-state"
TURNS = ("first", "Count to ten, please.", "x = 3\ny = 4", "Où est la gare ?", "\n  why is that so? ")
pytestmark = pytest.mark.engine


def rules(name: str, lines: int = 12) -> list[dict[str, str]]:
    told = " ".join(f"{number}. {name} counts stones and ferries." for number in range(lines))
    return [{"role": "system", "content": f"{name} rules. {told}"}]


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def record_of(model: LocalModel) -> Record:
    record: Record = model.server.record  # type: ignore[attr-defined]
    return record


def kill(model: LocalModel) -> None:
    record = record_of(model)
    os.kill(record.child_pid, signal.SIGKILL)
    wait_for(lambda: gone(record.child_pid) and gone(record.supervisor_pid), "the server is gone")


@contextlib.contextmanager
def running(alias: str, **options: Any) -> Iterator[LocalModel]:
    with local_model(alias, keep_alive=0, **options) as model:
        yield model


def say(trunk: Trunk, *messages: dict[str, str], max_tokens: int = 24, **options: Any) -> Any:
    return trunk.create(messages=messages, temperature=0, max_tokens=max_tokens, **options)


def text(reply: Any) -> str:
    """Thinking included: the tiny models think."""
    message = reply.choices[0].message
    return f"{getattr(message, 'reasoning_content', None) or ''}|{message.content or ''}"


def uncached(model: LocalModel, *messages: dict[str, str], max_tokens: int = 24) -> str:
    """What this server says without any cache."""
    reply = model.chat.completions.create(
        model=model.model,
        messages=messages,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=max_tokens,
        extra_body={"cache_prompt": False},
    )
    assert reply.timings["cache_n"] == 0  # type: ignore[attr-defined]
    return text(reply)


def store_of(model: LocalModel) -> TrunkStore:
    return TrunkStore(Path(record_of(model).slot_dir or ""))


def bake(alias: str, name: str = "Ada") -> tuple[list[str], str]:
    """A saved trunk of a server that was killed then; what each turn says uncached, and the store's key."""
    messages = rules(name)
    with running(alias) as model:
        told = [uncached(model, *messages, user(turn)) for turn in TURNS]
        assert len(set(told)) > 3, "the turns must matter"
        trunk = model.trunk(name, messages=messages)
        assert trunk.state == "baked", trunk.note
        [entry] = labelled(store_of(model), record_of(model).alias, name)
        assert (entry.size, entry.meta.tokens) == (trunk.bytes, trunk.tokens)
        kill(model)
    return told, entry.key


# --- restored after a crash ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafts", ["draft-mtp", ""], ids=["draft-mtp", "no drafts"])
@pytest.mark.parametrize("name", [STATE, "tiny-qwen35moe-mtp-state"])
def test_trunk_restored_after_kill_changes_no_byte(
    profile: Profile, record_property: Note, monkeypatch: pytest.MonkeyPatch, name: str, drafts: str
) -> None:
    monkeypatch.setenv("LLAMA_SPEC_TYPE", drafts)
    alias = profile(name)
    told, key = bake(alias)
    with running(alias) as model:
        trunk = model.trunk("Ada", messages=rules("Ada"))
        assert (trunk.state, trunk.note) == ("restored", "")
        replies = [say(trunk, user(turn)) for turn in TURNS]
        assert [text(reply) for reply in replies] == told
        shares = [warmth(reply) for reply in replies]
        assert shares[0].reused >= trunk.tokens
        assert all(share.reused >= trunk.tokens - 4 for share in shares), shares
        assert all(share.note == "" and share.drift is None for share in shares)
        proof = store_of(model).find(key).proof  # type: ignore[union-attr]
        assert proof is not None
        assert proof.reused == shares[0].reused
    record_property("value", f"{shares[0].reused} of {trunk.tokens} tokens")


# --- damage ----------------------------------------------------------------------------------------------------------


def cut(state: Path, _: Path) -> None:
    os.truncate(state, state.stat().st_size - 1)


def flipped(state: Path, _: Path) -> None:
    data = bytearray(state.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 2048] = bytes(byte ^ 0xFF for byte in data[middle : middle + 2048])
    state.write_bytes(data)


def zeros(state: Path, _: Path) -> None:
    state.write_bytes(bytes(state.stat().st_size))


def swapped(state: Path, other: Path) -> None:
    one, two = state.read_bytes(), other.read_bytes()
    state.write_bytes(two)
    other.write_bytes(one)


def linked(state: Path, _: Path) -> None:
    outside = state.parent.parent / "outside"
    state.rename(outside)
    state.symlink_to(outside)


def test_damaged_states_are_never_used(profile: Profile, record_property: Note) -> None:
    """One server's life for all of them: it must outlive each."""
    alias = profile(STATE)
    told, key = bake(alias)
    _, other = bake(alias, "Bob")
    damages = [cut, flipped, zeros, linked, swapped]
    with running(alias) as model:
        store, settings = store_of(model), load_settings()
        for damage in damages:
            with open_ledger(record_of(model), settings) as ledger:  # as if the server had lost it
                ledger.slot, ledger.cached = None, []
            damage(store.folder / f"{key}.trunk", store.folder / f"{other}.trunk")
            trunk = model.trunk("Ada", messages=rules("Ada"))
            assert trunk.state == "baked", damage
            assert "the saved state was not used" in trunk.note, damage
            reply = say(trunk, user(TURNS[0]))
            assert text(reply) == told[0], damage
            assert warmth(reply).state == "warm"
            assert not (store.folder / f"{key}.trunk").is_symlink()
            assert store.check(key)[0] is not None, "and a good one is in its place"
        assert store.check(other)[0] is None
        assert model.trunk("Bob", messages=rules("Bob")).state == "baked"
    record_property("value", f"{len(damages)} kinds")


def test_a_state_that_the_engine_refuses_or_dies_of_is_gone_then(profile: Profile, record_property: Note) -> None:
    """Verified bytes that are still no state, as from a broken engine: half of one, with a sidecar that fits."""
    alias = profile(STATE)
    told, key = bake(alias)
    with running(alias) as model:
        store = store_of(model)
        entry = store.find(key)
        assert entry is not None
        half = (store.folder / entry.file).read_bytes()[: entry.size // 2]
        name = store.reserve(key)
        (store.folder / name).write_bytes(half)
        store.commit(name, entry.meta, len(half))
        try:
            trunk = model.trunk("Ada", messages=rules("Ada"))
        except ServerUnavailable:
            record_property("value", "the engine ends of it, and the error says so")
            assert store.find(key) is None
        else:
            record_property("value", "refused")
            assert trunk.state == "baked"
            assert "the saved state was not used" in trunk.note
            assert text(say(trunk, user(TURNS[0]))) == told[0]
    with running(alias) as model:
        trunk = model.trunk("Ada", messages=rules("Ada"))
        assert trunk.state in ("baked", "restored")
        assert text(say(trunk, user(TURNS[1]))) == told[1]


def test_what_else_decides_a_state_makes_another_key(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    """KV type, context, drafts, flags that pass through, another model of equal shape."""
    base = {"port": 0, "kv": "q8_0", "ctx": 4096}
    variants: dict[str, dict[str, Any]] = {
        "kv": {"kv": "f16"},
        "context": {"ctx": 2048},
        "flags": {"engine_flags": ["-t", "1", "-tb", "1", "-ub", "256"]},
        "model": {"name": "tiny-qwen35-mtp"},
    }
    keys: dict[str, str] = {}
    for name, changed in {"as it is": {}, **variants}.items():
        options = {key: value for key, value in {**base, **changed}.items() if key not in ("port", "name")}
        alias = profile(str(changed.get("name", STATE)), alias="one", **options)
        with running(alias) as model:
            trunk = model.trunk("Ada", messages=rules("Ada"))
            assert (trunk.state, trunk.note) == ("baked", ""), name
            [keys[name]] = [entry.key for entry in store_of(model).entries() if entry.key not in keys.values()]
    assert len(set(keys.values())) == len(variants) + 1


# --- switches --------------------------------------------------------------------------------------------------------


def test_a_restore_keeps_the_conversation_that_it_displaces(profile: Profile, record_property: Note) -> None:
    alias = profile(STATE)
    with running(alias) as model:
        model.trunk("Bob", messages=rules("Bob"))
        kill(model)
    with running(alias) as model:
        told = uncached(model, *rules("Ada"), user("first"))
        ada = model.trunk("Ada", messages=rules("Ada"))
        chat = [user("first")]
        for _ in range(2):
            reply = say(ada, *chat)
            chat += [{"role": "assistant", "content": reply.choices[0].message.content or "?"}, user("and then?" * 9)]
        bob = model.trunk("Bob", messages=rules("Bob"))
        assert bob.state == "restored"
        assert warmth(say(bob, user("hi"))).reused >= bob.tokens
        back = say(ada, *chat)
        assert warmth(back).state == "warm"
        assert warmth(back).reused > ada.tokens + 20, warmth(back)
        assert text(say(ada, user("first"))) == told
    record_property("value", f"{warmth(back).reused} of {warmth(back).prompt} tokens")


def test_agents_that_begin_alike_stay_warm(profile: Profile, record_property: Note) -> None:
    """The engine itself writes the one over the other: nine tenths of a prompt is reason enough for it to keep that."""
    shared = rules("All of you", 14)[0]["content"]
    prompts = {name: [{"role": "system", "content": f"{shared} {name} is your name. " * 1}] for name in ("Ada", "Bob")}
    with running(profile(STATE)) as model:
        told = {name: uncached(model, *prompt, user("hi")) for name, prompt in prompts.items()}
        trunks = {name: model.trunk(name, messages=prompt) for name, prompt in prompts.items()}
        turns = [(name, say(trunk, user("hi"))) for _ in range(4) for name, trunk in trunks.items()]
        assert all(text(reply) == told[name] for name, reply in turns)
        warm = [warmth(reply).reused >= trunks[name].tokens - 4 for name, reply in turns]
        assert all(bool(warmth(reply).note) != was_warm for (_, reply), was_warm in zip(turns, warm, strict=True))
        assert all(warm[4:]), turns  # a b9780 that made no checkpoint while baking reads once more
    record_property("value", f"{sum(warm)} of {len(warm)} turns")


TWELVE = [f"{letter}{letter}" for letter in "ABCDEFGHIJKL"]


@pytest.fixture
def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two MiB, for a handful of agents."""
    monkeypatch.setenv("LLAMA_CACHE_RAM", "2")


ORDERS = {
    "round robin": TWELVE * 2,
    "few": TWELVE[:2] * 6,
    "uneven": [*TWELVE, *(TWELVE[at * at % 12] for at in range(24))],
}


@pytest.mark.usefixtures("small_cache")
@pytest.mark.parametrize("order", ORDERS)
def test_no_trunk_that_is_called_warm_is_read_again(profile: Profile, record_property: Note, order: str) -> None:
    """More agents than the RAM cache holds: what it has dropped comes from the disk, never out of a cold reading."""
    with running(profile(STATE)) as model:
        trunks = {name: model.trunk(name, messages=rules(name, 10)) for name in sorted(set(ORDERS[order]))}
        found = []
        for at, name in enumerate(ORDERS[order]):
            reply = say(trunks[name], user(f"turn {at}"), max_tokens=2)
            found.append(warmth(reply))
            assert warmth(reply).reused >= 0.9 * trunks[name].tokens, (at, name, warmth(reply))
            assert warmth(reply).note == ""
    states = [each.state for each in found]
    expected = {"round robin": {"restored"}, "few": {"warm"}, "uneven": {"warm", "restored"}}
    assert set(states) == expected[order]
    record_property("value", f"{states.count('restored')} of {len(states)} restored")


@pytest.mark.usefixtures("small_cache")
@pytest.mark.parametrize("order", ORDERS)
def test_the_ledger_says_what_the_engine_keeps(profile: Profile, record_property: Note, order: str) -> None:
    """It may take a state for lost that is there, which costs a restore; the other error would cost a cold reading."""
    wrong = 0
    with running(profile(STATE)) as model:
        keeper = Keeper(record_of(model), load_settings())
        prefixes = {name: keeper.prefix(rules(name, 10), None, {}) for name in sorted(set(ORDERS[order]))}
        for at, name in enumerate(ORDERS[order]):
            prefix, turn = prefixes[name], keeper.slot.tokenise(f"{name} turn {at}")
            with open_ledger(keeper.record, keeper.settings) as ledger:
                held = ledger.holds(keeper.key(prefix))
            reading = keeper.slot.read((*prefix.tokens, *turn))
            there = reading.reused >= 0.9 * len(prefix.tokens)
            assert there or not held, (at, name, reading)
            wrong += there != held
            with open_ledger(keeper.record, keeper.settings) as ledger:
                size = len(prefix.tokens) + len(turn)
                ledger.use(keeper._held(keeper.key(prefix), size))
    record_property("value", f"{len(ORDERS[order]) - wrong} of {len(ORDERS[order])} right")
    print("wrong", order, wrong, keeper._held("", size), keeper.record.cache_bytes)
