"""The JSON file that `looprun trunks bake` reads: messages, tools and template arguments, or what is wrong with it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from looprun_models.errors import UsageError

from .output import harmless

SHAPE = (
    '{"messages": [{"role": "system", "content": "..."}], "tools": [...], "template_args": {...}}, or the list alone'
)
KINDS = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a trunk is made of. template_args None: the profile's."""

    messages: list[Mapping[str, Any]]
    tools: list[Any] = field(default_factory=list)
    template_args: Mapping[str, Any] | None = None


def read_prompt(name: str) -> Prompt:
    """Read and check a file, or standard input for "-". Raises UsageError with the place and what is expected there."""
    where = "standard input" if name == "-" else harmless(name)
    try:
        raw = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: no name of a file at all
        why = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{where} cannot be read: {why}.", hint=f"name a JSON file, or - : {SHAPE}") from error
    try:
        told = json.loads(raw.decode("utf-8-sig"), parse_constant=_refuse_constant)
        return _prompt(told)
    except UnicodeDecodeError as error:
        _refuse(where, f"byte {error.start} is not UTF-8")
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        _refuse(where, f"{place}: {error.msg}" if raw.strip() else "it is empty")
    except RecursionError:
        _refuse(where, "its lists are nested too deeply")
    except _WrongShape as wrong:
        _refuse(where, str(wrong))


class _WrongShape(Exception):
    """str: the place, what is expected there and what was found."""


def _refuse(where: str, why: str) -> NoReturn:
    raise UsageError(f"{where}: {why}.", hint=f"write {SHAPE}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise _WrongShape(f"{name} is no JSON")


def _prompt(told: Any) -> Prompt:
    if isinstance(told, list):
        told = {"messages": told}
    _expect(told, dict, "the file", "an object or a list of messages")
    for key in told:
        if key not in ("messages", "tools", "template_args"):
            raise _WrongShape(f"expected messages, tools and template_args, found the key {key!r}")
    if "messages" not in told:
        raise _WrongShape("the file: expected messages, and there are none")
    messages, tools, template_args = told["messages"], told.get("tools"), told.get("template_args")
    _expect(messages, list, "messages", "a list of messages")
    if not messages:
        raise _WrongShape("messages: expected at least one message, found an empty list")
    for number, message in enumerate(messages):
        _check_message(message, f"messages[{number}]")
    if tools is not None:
        _expect(tools, list, "tools", "a list of tools")
    for number, tool in enumerate(tools or ()):
        _check_tool(tool, f"tools[{number}]")
    if template_args is not None:
        _expect(template_args, dict, "template_args", "an object")
    return Prompt(messages, tools or [], template_args)


def _check_message(message: Any, place: str) -> None:
    _expect(message, dict, place, 'an object with "role" and "content"')
    _expect(message.get("role"), str, f"{place}.role", 'a text such as "system"')
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return
    if not isinstance(content, str | list):
        raise _WrongShape(f"{place}.content: expected a text or a list of parts, found {_kind(content)}")


def _check_tool(tool: Any, place: str) -> None:
    _expect(tool, dict, place, 'an object {"type": "function", "function": {...}}')
    _expect(tool.get("function"), dict, f"{place}.function", 'an object with "name" and "parameters"')
    _expect(tool["function"].get("name"), str, f"{place}.function.name", "a text")


def _expect(value: Any, kind: type, place: str, expected: str) -> None:
    if not isinstance(value, kind):
        raise _WrongShape(f"{place}: expected {expected}, found {_kind(value)}")


def _kind(value: Any) -> str:
    return "nothing" if value is None else KINDS.get(type(value), "a number")
