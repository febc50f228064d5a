"""What of an agent's prompt never changes: the tokens that every chat of it begins with; where a chat parts from it.

The template decides what a chat becomes, so it is asked, not imitated: chats with different turns after the trunk are
rendered and tokenised, and what they have in common is the prefix. It ends before the user's first word, so that every
later prompt is a strict extension of it, which is all that a hybrid model can reuse.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from looprun_models.errors import TrunkRefused
from looprun_models.slot import Message, Slot, SlotRefused, plain

PROBES = ("A", "\n")
"""First user turns, as unlike as can be: a line break can melt into one token with what stands before it."""
REACH = 16
"""Tokens from the end of what probes share in which a special token is looked for."""
MARGIN = 2
"""Tokens that are given up where there is none: more than a word that was not tried could melt with."""
TAIL = 60
"""Characters of a text that are shown where two part."""
SHAPES_THE_PROMPT = ("messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "reasoning_effort")


@dataclass(frozen=True, slots=True)
class Prefix:
    """A trunk's tokens, and what they were made of."""

    tokens: tuple[int, ...]
    messages: tuple[Message, ...]
    tools: tuple[Any, ...]
    template_args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def token_digest(self) -> str:
        return hashlib.sha256(json.dumps(self.tokens).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Drift:
    """Where a chat parts from the trunk that it named. character: in the text of that message (or tool)."""

    what: str
    character: int
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.what} differs from the trunk at character {self.character}: {self.found!r} for {self.expected!r}"


def find_prefix(
    slot: Slot, messages: Iterable[Any], tools: Iterable[Any] | None, template_args: Mapping[str, Any]
) -> Prefix:
    """The tokens that every chat which begins with these messages and tools begins with.

    Raises TrunkRefused when there are none, or when part of the messages comes after the user's first words.
    """
    fixed, offered, args = plain(messages), plain(tools or ()), plain(template_args)
    if not fixed:
        raise TrunkRefused("a trunk needs at least one message.", hint='messages=[{"role": "system", "content": ...}]')
    try:
        texts = [slot.render(chat) for chat in _chats(fixed, offered, args)]
        renderings = [slot.tokenise(text) for text in texts]
        end = _solid(slot, renderings[0][: common_length(renderings)])
    except SlotRefused as error:
        if error.status in (400, 500):
            raise TrunkRefused(
                f"the model's template does not take these messages followed by a user turn: {error.why}",
                hint="end a trunk with a system or an assistant message; give each message a role and a content",
            ) from error
        raise
    _check_whole(fixed, texts)
    if not end:
        raise TrunkRefused("chats that begin with these messages have no token in common.", hint=_parting(texts))
    return Prefix(renderings[0][:end], tuple(fixed), tuple(offered), args)


def find_drift(slot: Slot, prefix: Prefix, chat: Mapping[str, Any]) -> Drift | None:
    """Where what the chat endpoint is sent parts from the trunk; None when the prompt begins with all of its tokens.

    Raises SlotRefused.
    """
    shaping = {name: chat[name] for name in SHAPES_THE_PROMPT if name in chat}
    tokens = slot.tokenise(slot.render(plain(shaping | (chat.get("extra_body") or {}))))
    at = common_length((tokens, prefix.tokens))
    if at == len(prefix.tokens):
        return None
    named = find_changed(prefix, plain(chat["messages"]), plain(chat.get("tools") or ()))
    if named is not None:
        return named
    before = len(slot.detokenise(prefix.tokens[:at]))
    expected, found = (slot.detokenise(sequence[at : at + TAIL])[:TAIL] for sequence in (prefix.tokens, tokens))
    return Drift("what the template makes of these messages and options", before, expected, found)


def find_changed(prefix: Prefix, messages: Sequence[Message], tools: Sequence[Any]) -> Drift | None:
    """The first message or tool that is not the trunk's; None when all of those are there."""
    for number, (wanted, tool) in enumerate(itertools.zip_longest(prefix.tools, tools)):
        if _text(wanted) != _text(tool):
            return _difference(f"tool {number}{_name_of(tool or wanted)}", wanted, tool)
    for number, expected in enumerate(prefix.messages):
        found = messages[number] if number < len(messages) else None
        if not found or _said(expected) != _said(found):
            return _difference(f"message {number} ({expected.get('role')})", expected, found)
    return None


def _chats(
    messages: Sequence[Message], tools: Sequence[Any], template_args: Mapping[str, Any]
) -> Iterable[dict[str, Any]]:
    """Two chats after the trunk: the first turn of one, and one with a second turn, which some templates treat
    otherwise."""
    first, other = ({"role": "user", "content": probe} for probe in PROBES)
    for turn in ([first], [other, {"role": "assistant", "content": "c"}, first]):
        yield {
            "messages": [*messages, *turn],
            "chat_template_kwargs": template_args,
            **({"tools": tools} if tools else {}),
        }


def _solid(slot: Slot, tokens: Sequence[int]) -> int:
    """How many of these tokens stay as they are whatever text comes after them: those up to the last special token."""
    for end in range(len(tokens), max(0, len(tokens) - REACH), -1):
        if slot.marks(tokens[end - 1]):
            return end
    return max(0, len(tokens) - MARGIN)


def common_length(sequences: Iterable[str] | Iterable[tuple[int, ...]]) -> int:
    """How many elements all of them begin with."""
    given: list[Any] = list(sequences)
    first, last = min(given), max(given)  # what these two begin with, all that sort between them do
    pairs = zip(first, last, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(first), len(last)))


def _check_whole(messages: Sequence[Message], texts: Sequence[str]) -> None:
    """Some templates move the system prompt to the last user turn: those have no prefix to keep."""
    at = common_length(texts)
    shared, rest = texts[0][:at], texts[0][at:]
    for number, message in enumerate(messages):
        words = _words(message)[-TAIL:].strip()
        if words and words not in shared and words in rest:
            raise TrunkRefused(
                f"the model's template puts message {number} ({message.get('role')}) behind the user's words.",
                hint=_parting(texts),
            )


def _words(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, Mapping)]
        content = next((text for text in reversed(texts) if isinstance(text, str)), "")
    return content.strip() if isinstance(content, str) else ""


def _parting(texts: Sequence[str]) -> str:
    at = common_length(texts)
    first, second = (text[at : at + TAIL] for text in texts[:2])
    return f"renderings part at character {at}, after {texts[0][max(0, at - TAIL) : at]!r}: {first!r} and {second!r}"


def _difference(what: str, expected: Any, found: Any) -> Drift:
    if found is None:
        return Drift(f"{what} is missing and", 0, _text(expected)[:TAIL], "")
    if expected is None:
        return Drift(f"{what} is new and", 0, "", _text(found)[:TAIL])
    if isinstance(expected, Mapping) and isinstance(found, Mapping) and expected.get("role") != found.get("role"):
        return Drift(f"{what}: its role", 0, str(expected.get("role")), str(found.get("role")))
    left, right = _content(expected), _content(found)
    if not isinstance(left, str) or not isinstance(right, str) or left == right:
        left, right = _text(expected), _text(found)
    at = common_length((left, right))
    return Drift(what, at, left[at : at + TAIL], right[at : at + TAIL])


def _content(value: Any) -> Any:
    return value.get("content") if isinstance(value, Mapping) else None


def _name_of(tool: Any) -> str:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return f" ({function['name']})" if isinstance(function, Mapping) and function.get("name") else ""


def _said(message: Message) -> dict[str, Any]:
    return {name: value for name, value in message.items() if value is not None}


def _text(value: Any) -> str:
    """In the order in which it was given: a template writes tools as they come."""
    return json.dumps(value, ensure_ascii=False, default=str)
