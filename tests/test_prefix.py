"""The tokens that every chat of an agent begins with: on templates of several kinds, for prompts made at random."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessage, ChatCompletionSystemMessageParam

from looprun_models import ContextOverflow, TrunkRefused, local_model
from looprun_models.errors import UsageError
from looprun_models.prefix import Prefix, common_length, find_changed, find_drift, listed
from looprun_models.settings import load_settings
from looprun_models.slot import Slot, plain
from looprun_models.trunks import Keeper

Profile = Callable[..., str]
Chat = list[dict[str, Any]]
# The tiny vocabulary loses a blank before the letters that its words begin with: these have none of those.
SYSTEM = {"role": "system", "content": "Look up lucky keys."}
PLAIN = "{% for m in messages %}{{ m.role }}.{{ m.content }}{% endfor %}{% if add_generation_prompt %}bot.{% endif %}"
"""No special token anywhere, and nothing between a full stop and the user's words: the two melt."""
BEHIND = (
    "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n"
    "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}<|im_start|>assistant\n"
)
"""As some of Mistral's: the system prompt goes into the last user turn."""
FRAGMENTS = (
    *("\n", "\n\n", " ", "  ", "\t", "\r\n", "\u00a0", "\u3000", ".", "...", "://", "'s", ")", '"', "\\", "{", "}"),
    *(
        "one",
        " two",
        "Okay",
        "A",
        "zebra",
        "7",
        "1234567",
        "é",
        "e\u0301",
        "\u0301",
        "日本",
        "🙂",
        "<think>",
        "</think>",
    ),
    *("<|im_end|>", "<|im_start|>", "user", "<tool_call>", "system", "\n\nOkay.\n", "{{ x }}"),
)
SEEDS = range(24)


@contextmanager
def keeper_of(alias: str, *flags: str) -> Iterator[Keeper]:
    with local_model(alias, engine_flags=flags) as model:
        yield Keeper(model.server.record, load_settings())  # type: ignore[attr-defined]


class Author:
    """Prompts at random, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)

    def text(self, most: int = 8) -> str:
        return "".join(self.dice.choices(FRAGMENTS, k=self.dice.randint(0, most)))

    def tools(self) -> list[dict[str, Any]]:
        return [
            {"type": "function", "function": {"name": f"tool_{n}", "description": self.text(), "parameters": p}}
            for n in range(self.dice.randint(0, 2))
            for p in [{"type": "object", "properties": {"city": {"type": "string", "description": self.text()}}}]
        ]

    def trunk(self) -> Chat:
        messages: Chat = [{"role": "system", "content": self.text(30)}] if self.dice.random() < 0.8 else []
        for _ in range(self.dice.randint(0 if messages else 1, 2)):
            messages += [{"role": "user", "content": self.text()}, {"role": "assistant", "content": self.text()}]
        return messages

    def turns(self) -> Chat:
        chat = [{"role": "user", "content": self.text()}]
        for _ in range(self.dice.randint(0, 2)):
            chat += [{"role": "assistant", "content": self.text()}, {"role": "user", "content": self.text()}]
        return chat


def check_at_random(keeper: Keeper, *, tools: bool) -> list[Prefix]:
    """Every chat after a trunk begins with its tokens, or the trunk is refused with the place."""
    kept, told = [], list[str]()
    for seed in SEEDS:
        author = Author(seed)
        messages, offered = author.trunk(), author.tools() if tools else []
        try:
            prefix = keeper.prefix(messages, offered, {})
        except TrunkRefused as refused:
            told.append(refused.hint)
            continue
        kept.append(prefix)
        for _ in range(4):
            chat = {"messages": [*messages, *author.turns()], **({"tools": offered} if offered else {})}
            tokens = keeper.slot.tokenise(keeper.slot.render(chat))
            assert tokens[: len(prefix.tokens)] == prefix.tokens, (seed, chat)
            assert find_drift(keeper.slot, prefix, chat) is None
    assert all("part at character" in hint for hint in told)
    return kept


def test_chats_begin_with_their_trunk_on_the_familys_template(profile: Profile) -> None:
    with keeper_of(profile()) as keeper:
        assert len(check_at_random(keeper, tools=True)) == len(SEEDS)


def test_chats_begin_with_their_trunk_where_nothing_is_trimmed(profile: Profile) -> None:
    with keeper_of(profile(), "--chat-template", "chatml") as keeper:
        kept = check_at_random(keeper, tools=False)
        assert len(kept) == len(SEEDS)
        assert all(keeper.slot.detokenise(prefix.tokens[-1:]) == "<|im_start|>" for prefix in kept)


def test_chats_begin_with_their_trunk_where_words_melt(profile: Profile) -> None:
    with keeper_of(profile(), "--chat-template", PLAIN) as keeper:
        assert check_at_random(keeper, tools=False)
        prefix = keeper.prefix([SYSTEM], None, {})
        assert keeper.slot.detokenise(prefix.tokens) == "system.Look up lucky keys.us"


def test_a_system_prompt_that_is_moved_behind_is_refused(profile: Profile) -> None:
    with keeper_of(profile(), "--chat-template", BEHIND) as keeper:
        with pytest.raises(TrunkRefused, match=r"puts message 0 \(system\) behind the user's words") as caught:
            keeper.prefix([SYSTEM, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], None, {})
        assert re.search(r"part at character \d+", caught.value.hint)
        parts = [{"type": "text", "text": "Look up"}, {"type": "text", "text": " lucky keys, all of them."}]
        with pytest.raises(TrunkRefused, match="behind"):
            keeper.prefix([{"role": "system", "content": parts}, *Author(3).turns()[:1]], None, {})
        check_at_random(keeper, tools=False)


def test_what_is_no_beginning_is_refused(profile: Profile) -> None:
    with keeper_of(profile(ctx=512)) as keeper:
        with pytest.raises(TrunkRefused, match="at least one message"):
            keeper.prefix([], None, {})
        with pytest.raises(TrunkRefused, match="System message must be at the beginning") as caught:
            keeper.prefix([{"role": "user", "content": "a"}, SYSTEM], None, {})
        assert str(caught.value).splitlines()[0].endswith("user turn: System message must be at the beginning.")
        assert "give each message a role" in caught.value.hint
        with pytest.raises(ContextOverflow) as overflow:
            keeper.prefix([{"role": "system", "content": "x" * 700}], None, {})
        assert (overflow.value.context, overflow.value.prompt_tokens > 700) == (512, True)

        prefix = keeper.prefix([SYSTEM], None, {})
        assert (
            keeper.slot.detokenise(prefix.tokens) == "<|im_start|>system\nLook up lucky keys.<|im_end|>\n<|im_start|>"
        )
        check_forms(keeper, prefix)
        check_places(keeper, prefix)
        check_options(keeper)


def check_forms(keeper: Keeper, prefix: Prefix) -> None:
    """However messages and tools are given, they are the same trunk, and a copy."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    typed: ChatCompletionSystemMessageParam = {"role": "system", "content": "Look up lucky keys."}
    given = [dict(SYSTEM)]
    assert keeper.prefix((message for message in given), (), {}) == prefix
    assert keeper.prefix([typed], [], {}) == prefix
    parts = {"role": "system", "content": [{"type": "text", "text": "Look up lucky keys."}]}
    assert keeper.prefix([parts], None, {}).tokens == prefix.tokens
    kept = keeper.prefix(given, None, {})
    given[0]["content"] = "changed"
    assert kept == prefix
    answer = ChatCompletionMessage.model_validate({"role": "assistant", "content": "yes"})
    with_example = keeper.prefix([SYSTEM, {"role": "user", "content": "a"}, answer], [tool], {})
    assert with_example.messages[2] == {"role": "assistant", "content": "yes"}
    assert find_drift(keeper.slot, prefix, {"messages": [parts, {"role": "user", "content": "x"}]}) is None


def check_places(keeper: Keeper, prefix: Prefix) -> None:
    """Where a chat parts from its trunk, in the words of the caller."""
    user = {"role": "user", "content": "x"}

    def place(messages: Chat, **more: Any) -> str:
        return str(find_drift(keeper.slot, prefix, {"messages": messages, **more}))

    told = place([{"role": "system", "content": "Look up rusty keys."}, user])
    assert told == "message 0 (system) differs from the trunk at character 8: 'rusty keys.' for 'lucky keys.'"
    assert place([user]).startswith("message 0 (system): its role differs")
    assert place([SYSTEM, user]) == "None"
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    assert place([SYSTEM, user], tools=[tool]).startswith("tool 0 (f) is new and differs")


def check_options(keeper: Keeper) -> None:
    """What has the same messages and tools, and becomes another prompt."""
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
        for name in ("first", "second")
    ]
    prefix = keeper.prefix([SYSTEM], tools, {})
    chat = {"messages": [SYSTEM, {"role": "user", "content": "x"}], "tools": tools}
    assert find_drift(keeper.slot, prefix, chat) is None
    turned = find_drift(keeper.slot, prefix, {**chat, "tools": tools[::-1]})
    assert turned
    assert turned.what == "tool 0 (second)"
    assert "second" in turned.found
    reordered = [{"function": tools[0]["function"], "type": "function"}, tools[1]]
    keys = find_drift(keeper.slot, prefix, {**chat, "tools": reordered})
    assert keys is None or keys.what == "tool 0 (first)"
    missing = find_drift(keeper.slot, prefix, {"messages": chat["messages"]})
    assert missing
    assert missing.what == "tool 0 (first) is missing and"


def test_other_messages_are_told_apart_without_asking() -> None:
    prefix = Prefix((1,), tuple(plain([SYSTEM, {"role": "user", "content": "q", "name": None}])), ())
    assert find_changed(prefix, [SYSTEM, {"role": "user", "content": "q"}], ()) is None
    missing = find_changed(prefix, [SYSTEM], ())
    assert missing
    assert missing.what == "message 1 (user) is missing and"
    parts = find_changed(prefix, [{"role": "system", "content": [{"type": "image_url", "image_url": "x"}]}], ())
    assert parts
    assert parts.what == "message 0 (system)"
    named = find_changed(prefix, [{**SYSTEM, "name": "x"}], ())
    assert str(named) == "message 0 (system): its name differs from the trunk at character 0: 'x' for ''"


LONG = "Alpha beta. " * 8
PARTS = [{"type": "text", "text": LONG}, {"type": "text", "text": "Second part here."}]
OTHER = [PARTS[0], {"text": "Second pXrt here.", "type": "text"}]
AT = len(LONG) + len("Second p")


@pytest.mark.parametrize(
    ("trunk", "chat", "character"),
    [
        ({"role": "system", "content": PARTS}, {"role": "system", "content": OTHER}, AT),
        ({"role": "system", "content": PARTS}, {"content": OTHER, "role": "system"}, AT),
        ({"role": "system", "content": PARTS}, {"role": "system", "content": f"{LONG}Second pXrt here."}, AT),
        ({"role": "system", "content": PARTS}, {"role": "system", "content": f"{LONG}\nSecond pXrt here."}, AT + 1),
        ({"role": "system", "content": f"{LONG}Second part here."}, {"role": "system", "content": OTHER}, AT),
        ({"role": "system", "content": "Grüße 😀😀"}, {"role": "system", "content": "Grüße 😀🙂"}, 7),
    ],
)
def test_a_place_is_counted_in_the_text_whatever_its_form(
    trunk: dict[str, Any], chat: dict[str, Any], character: int
) -> None:
    drift = find_changed(Prefix((1,), (trunk,), ()), [chat], ())
    assert drift
    assert (drift.what, drift.character) == ("message 0 (system)", character)
    assert drift.found[:1] in "X🙂"


def test_the_form_of_a_message_matters_only_where_nothing_else_differs() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    turned = {"tool_calls": [dict(reversed(call.items()))], "role": "assistant"}
    prefix = Prefix((1,), ({"role": "system", "content": PARTS}, answer), ())
    joined = {"role": "system", "content": f"{LONG}Second part here."}
    assert (
        find_changed(prefix, [{"content": [dict(reversed(p.items())) for p in PARTS], "role": "system"}, turned], ())
        is None
    )
    alone = find_changed(prefix, [joined, turned], ())
    assert alone
    assert alone.what == "message 0 (system): its parts"
    later = find_changed(prefix, [joined, {**turned, "tool_calls": [dict(reversed({**call, "id": "2"}.items()))]}], ())
    assert later
    assert later.what == "message 1 (assistant): its tool_calls"
    assert later.found.startswith("2")
    single = Prefix((1,), ({"role": "system", "content": [{"type": "text", "text": "x"}]},), ())
    assert find_changed(single, [{"role": "system", "content": "x"}], ()) is None


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        ("messages", None, "messages: expected a list, found None."),
        ("messages", "hello", "messages: expected a list, found 'hello'."),
        ("messages", SYSTEM, "messages: expected a list, found {'role': 'system'"),
        ("messages", [SYSTEM, "x"], 'messages[1]: expected an object with "role" and "content", found \'x\'.'),
        ("tools", 7, "tools: expected a list, found 7."),
        ("tools", ["f"], "tools[0]: expected an object {"),
        ("messages", "x" * 999, "x..."),
    ],
)
def test_what_are_no_messages_or_tools_is_refused_with_what_is_expected(name: str, given: Any, told: str) -> None:
    with pytest.raises(UsageError, match=re.escape(told)) as caught:
        listed(name, given)
    assert len(str(caught.value)) < 400
    assert f"give {name}= a list" in caught.value.hint


def test_iterators_are_used_up_once_and_kept() -> None:
    messages = ({"role": role, "content": (part for part in [{"type": "text", "text": role}])} for role in "ab")
    kept = listed("messages", messages)
    assert kept == [{"role": role, "content": [{"type": "text", "text": role}]} for role in "ab"]


def test_common_length() -> None:
    assert common_length(["abc", "abd", "ab"]) == 2
    assert common_length([(1, 2, 3), (1, 2, 3)]) == 3
    assert common_length(["", "a"]) == 0
    assert common_length(["abc", "b", "abd"]) == 0


def test_only_special_tokens_part_texts(profile: Profile) -> None:
    with keeper_of(profile()) as keeper:
        slot: Slot = keeper.slot
        for text, marks in {"<|im_start|>": True, "a": False, "\n\n": False}.items():
            [token] = slot.tokenise(text)
            assert slot.marks(token) is marks, text
        assert not any(slot.marks(token) for token in slot.tokenise("é日")), "halves of a character"
