"""Trunks when servers end, weights change and threads mix: the text is right, and nothing is kept under a wrong key."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from gguf import GGUFReader

from looprun_models import LocalModel, ServerUnavailable, local_model, warmth
from tests.helpers import free_port
from tests.real.test_trunks import STATE, kill, rules, running, say, store_of, text, uncached, user

Profile = Callable[..., str]
QUESTION = user("Count to ten, please.")
pytestmark = pytest.mark.engine


@pytest.fixture
def weights(tmp_path: Path, tiny_gguf: Callable[[str], Path]) -> Path:
    """A copy that a test may replace."""
    return Path(shutil.copy2(tiny_gguf(STATE), tmp_path / "weights.gguf"))


def others(weights: Path) -> Path:
    """Other weights of equal shape, size and time of change."""
    copy = Path(shutil.copy2(weights, weights.with_name("others.gguf")))
    for tensor in GGUFReader(copy, "r+").tensors:
        if tensor.name in ("blk.0.ssm_out.weight", "blk.3.attn_output.weight"):
            tensor.data[:] = -tensor.data
    shutil.copystat(weights, copy)
    return copy


def use(profile: Profile, weights: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TINY_GGUF", str(weights))
    return profile(STATE, port=free_port())


def test_a_trunk_does_nothing_to_a_later_server_on_its_port(
    profile: Profile, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alias = use(profile, weights, monkeypatch)
    other = others(weights)
    with local_model(alias, keep_alive=0) as first, running(alias):
        old = first.trunk("a", messages=rules("Ada"))
        assert old.state == "baked"
        kill(first)
        os.replace(other, weights)
        with running(alias) as second:
            assert second.base_url == first.base_url, "the same port"
            right = uncached(second, *rules("Ada"), QUESTION)
            trunk = second.trunk("b", messages=rules("Bea"))
            files = set(store_of(second).folder.iterdir())
            with pytest.raises(ServerUnavailable):
                say(old, QUESTION)
            with pytest.raises(ServerUnavailable):
                first.chat.completions.create(model=first.model, messages=[QUESTION], max_tokens=1)  # type: ignore[list-item]
            assert set(store_of(second).folder.iterdir()) == files
            assert warmth(say(trunk, QUESTION)).reused >= 0.9 * trunk.tokens
            assert text(say(second.trunk("a", messages=rules("Ada")), QUESTION)) == right


def test_weights_replaced_under_a_running_server_are_kept_apart(
    profile: Profile, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alias = use(profile, weights, monkeypatch)
    with running(alias) as model:
        os.replace(others(weights), weights)
        trunk = model.trunk("a", messages=rules("Ada"))
        assert (trunk.state, trunk.bytes) == ("cold", 0)
        assert trunk.note == f"not saved: {weights} was changed since the server was started"
        assert text(say(trunk, QUESTION)) == uncached(model, *rules("Ada"), QUESTION)
    with running(alias) as model:
        right = uncached(model, *rules("Ada"), QUESTION)
        trunk = model.trunk("a", messages=rules("Ada"))
        assert trunk.state == "baked"
        assert text(say(trunk, QUESTION)) == right


def test_agents_in_threads_say_what_each_would_say_alone(profile: Profile) -> None:
    """On builds that mix up checkpoints, a restore between two chats of another thread gave wrong text."""
    alias, names = profile(STATE), [f"Agent {number}" for number in range(6)]
    turns = [user(turn) for turn in ("first", "Count to ten, please.", "x = 3")]
    with running(alias) as model:
        right = {name: [uncached(model, *rules(name), turn) for turn in turns] for name in names}
        for name in names:
            assert model.trunk(name, messages=rules(name)).state == "baked"
    for _ in range(2):
        with running(alias) as model:
            told = all_at_once(model, names, turns)
            kill(model)
        assert told == right


def all_at_once(model: LocalModel, names: list[str], turns: list[dict[str, str]]) -> dict[str, list[str]]:
    begin = threading.Barrier(len(names))

    def live(name: str) -> list[str]:
        begin.wait()
        trunk = model.trunk(name, messages=rules(name))
        return [text(say(trunk, turn)) for turn in turns]

    with ThreadPoolExecutor(len(names)) as pool:
        return dict(zip(names, pool.map(live, names), strict=True))


def test_a_call_without_reuse_is_no_miss(profile: Profile) -> None:
    alias = profile(STATE)
    with running(alias) as model:
        model.trunk("a", messages=rules("Ada"))
    for _ in range(3):
        with running(alias) as model:
            trunk = model.trunk("a", messages=rules("Ada"))
            assert trunk.state == "restored"
            reply = say(trunk, QUESTION, extra_body={"cache_prompt": False})
            assert "asked for no reuse" in warmth(reply).note
            kill(model)
