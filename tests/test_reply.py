"""What `warmth` says of replies, and of what is none."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from looprun_models import Warmth, warmth
from looprun_models.errors import UsageError
from looprun_models.prefix import Drift
from looprun_models.reply import _known, counted, remember

PLAIN = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": []}


def reply(**parts: Any) -> ChatCompletion:
    return ChatCompletion.model_validate({**PLAIN, **parts})


TIMINGS = {"cache_n": 90, "prompt_n": 10, "prompt_ms": 250.0, "predicted_n": 7}
USAGE = {"prompt_tokens": 100, "completion_tokens": 7, "total_tokens": 107}


def test_the_engines_own_counts() -> None:
    assert warmth(reply(timings=TIMINGS)) == Warmth(prompt=100, reused=90, read=10, ttft=0.25, written=7)


def test_counts_of_a_server_without_timings() -> None:
    told = reply(usage={**USAGE, "prompt_tokens_details": {"cached_tokens": 64}})
    assert warmth(told) == Warmth(prompt=100, reused=64, read=36, written=7)
    assert warmth(reply(usage=USAGE)) == Warmth(prompt=100, reused=0, read=100, written=7)


def test_timings_without_times_give_no_time() -> None:
    assert warmth(reply(timings={"prompt_n": 3})) == Warmth(prompt=3, reused=0, read=3)


@pytest.mark.parametrize(
    "nothing", [reply(), reply(timings={"predicted_n": 1}), "text", None, SimpleNamespace(usage=3)]
)
def test_what_has_no_counts_is_refused_by_name(nothing: object) -> None:
    with pytest.raises(UsageError, match=f"no token counts in this {type(nothing).__name__}") as caught:
        warmth(nothing)
    assert "stream" in caught.value.hint


def test_what_was_found_out_is_kept_as_long_as_the_reply_lives() -> None:
    told = reply(timings=TIMINGS)
    found = counted(told)
    assert found
    before = len(_known)
    remember(told, Warmth(100, 90, 10, note="restored"))
    assert warmth(told).note == "restored"
    del told
    gc.collect()
    assert len(_known) == before


def test_in_words() -> None:
    drift = Drift("message 0 (system)", 17, "Monday", "Tuesday")
    told = str(Warmth(100, 90, 10, ttft=0.254, cold_estimate=14.23, drift=drift, note="not saved: the disk is full"))
    assert told == (
        "90 of 100 prompt tokens reused, first token after 0.25 s, cold about 14.2 s; message 0 (system) differs from "
        "the trunk at character 17: 'Tuesday' for 'Monday'; not saved: the disk is full"
    )
    assert str(Warmth(100, 90, 10)) == "90 of 100 prompt tokens reused"
