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

from looprun_models.errors import TrunkRefused, UsageError
from looprun_models.slot import Message, Slot, SlotRefused, plain

PROBES = ("A", "\n")
"""First user turns, as unlike as can be: a line break can melt into one token with what stands before it."""
REACH = 16
"""Tokens from the end of what probes share in which a special token is looked for."""
MARGIN = 2
"""Tokens that are given up where there is none: more than a word that was not tried could melt with."""
TAIL = 60
"""Characters of a text that are shown where two part."""
SHOULD_BE = {
    "messages": 'an object with "role" and "content"',
    "tools": 'an object {"type": "function", "function": {...}}',
}
JOINS = ("", "\n")
"""What templates put between the text parts of a message."""
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
    """Where a chat parts from the trunk that it named.

    character: in the text of that message, its text parts joined; of a tool, or of another field, in its JSON.
    """

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

    Raises TrunkRefused when there are none, or when part of the messages comes after the user's first words; UsageError
    for what are no messages or tools.
    """
    fixed, offered = listed("messages", messages), listed("tools", tools or ())
    args = plain(template_args)
    if not fixed:
        raise TrunkRefused("a trunk needs at least one message.", hint='messages=[{"role": "system", "content": ...}]')
    try:
        texts = [slot.render(chat) for chat in _chats(fixed, offered, args)]
        renderings = [slot.tokenise(text) for text in texts]
        end = _solid(slot, renderings[0][: common_length(renderings)])
    except SlotRefused as error:
        if error.status in (400, 500):
            raise TrunkRefused(
                f"the model's template does not take these messages followed by a user turn: {_reason(error.why)}",
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
    """The first message or tool that is not the trunk's; None when all of those are there.

    A message with the same text in other parts is named only where no other differs: a template may write it alike.
    """
    for number, (wanted, tool) in enumerate(itertools.zip_longest(prefix.tools, tools)):
        if _text(wanted) != _text(tool):
            how = " is missing and" if tool is None else " is new and" if wanted is None else ""
            return _difference(f"tool {number}{_name_of(tool or wanted)}{how}", _text(wanted), _text(tool))
    parted = None
    for number, expected in enumerate(prefix.messages):
        what = f"message {number} ({expected.get('role')})"
        found = _said(messages[number]) if number < len(messages) else None
        if not found:
            return _difference(f"{what} is missing and", _texts(expected)[0], "")
        changed = _change(what, _said(expected), found)
        if changed:
            return changed
        if {*_texts(expected)} != {*_texts(found)} and not parted:
            parted = _difference(f"{what}: its parts", _text(expected.get("content")), _text(found.get("content")))
    return parted


def listed(name: str, given: Any) -> list[Any]:
    """Messages or tools as they go over the wire, and a copy: an iterator is used up, so what it gave is kept.

    Raises UsageError for anything else than a list of objects. name: of the argument.
    """
    told = plain(given)
    hint = f"give {name}= a list; each of it: {SHOULD_BE[name]}"
    if not isinstance(told, list):
        raise UsageError(f"{name}: expected a list, found {_shown(told)}.", hint=hint)
    for number, each in enumerate(told):
        if not isinstance(each, Mapping):
            raise UsageError(f"{name}[{number}]: expected {SHOULD_BE[name]}, found {_shown(each)}.", hint=hint)
    return told


def check_label(label: object) -> None:
    """Raises UsageError for what is no text."""
    if not isinstance(label, str):
        raise UsageError(
            f"label: expected a text, found {_shown(label)}.", hint='model.trunk("scheduler", messages=[...])'
        )


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


def _difference(what: str, expected: str, found: str) -> Drift:
    """what: the thing, before "differs"."""
    at = common_length((expected, found))
    return Drift(what, at, expected[at : at + TAIL], found[at : at + TAIL])


def _change(what: str, expected: Message, found: Message) -> Drift | None:
    """How two messages differ, but for how their text is parted."""
    if expected.get("role") != found.get("role"):
        return Drift(f"{what}: its role", 0, str(expected.get("role")), str(found.get("role")))
    lefts, rights = _texts(expected), _texts(found)
    alike = len(lefts) == len(rights)  # parts beside parts, or texts: any way of joining does to compare
    pairs = [(lefts[0], rights[0])] if alike else list(itertools.product(lefts, rights))
    if all(left != right for left, right in pairs):
        return _difference(what, *max(pairs, key=common_length))
    for name in sorted((expected.keys() | found.keys()) - {"content"}):
        if expected.get(name) != found.get(name):
            given = (message.get(name) for message in (expected, found))
            left, right = (value if isinstance(value, str) else _text(value, sort_keys=True) for value in given)
            return _difference(f"{what}: its {name}", left, right)
    return None


def _texts(message: Message) -> list[str]:
    """What a template may make of its content: parts are joined in one way or another."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return [content or ""]
    if not isinstance(content, list) or not all(_is_text(part) for part in content):
        return [_text(content, sort_keys=True)]
    return list(dict.fromkeys(join.join(part["text"] for part in content) for join in JOINS))


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _name_of(tool: Any) -> str:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return f" ({function['name']})" if isinstance(function, Mapping) and function.get("name") else ""


def _said(message: Message) -> dict[str, Any]:
    return {name: value for name, value in message.items() if value is not None}


def _text(value: Any, *, sort_keys: bool = False) -> str:
    """By default in the order in which it was given: a template writes tools as they come."""
    return "" if value is None else json.dumps(value, ensure_ascii=False, default=str, sort_keys=sort_keys)


def _reason(said: str) -> str:
    """What a template, or the engine, complains of, without where in the template that stands."""
    lines = [line.strip() for line in said.splitlines() if line.strip(" -\t")] or [said]
    errors = [line.removeprefix("Error: ").removeprefix("Jinja Exception: ") for line in lines if "Error: " in line[:7]]
    return errors[-1] if errors else lines[0]


def _shown(value: Any) -> str:
    """For people: what it is instead."""
    told = repr(value)
    return f"{told[:TAIL]}..." if len(told) > TAIL else told
