"""A trunk as callers hold it: `trunk.create(...)` is the OpenAI call with the trunk resident."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import openai

from looprun_models.prefix import Prefix, listed
from looprun_models.reply import Warmth, counted, remember
from looprun_models.slot import SlotRefused
from looprun_models.trunks import RESTORED, WARM, Keeper, Readiness

NOT_GIVEN = (openai.NotGiven, *filter(None, [getattr(openai, "Omit", None)]))
FULL_CHAT_BEGINS = ("system", "developer")
"""Roles that only the first message of a whole chat has."""


class _Trunk:
    """What both kinds have. label: any text. state: "baked" (read cold and saved), "restored" (from disk), "warm"
    (already in this server) or "cold" (read, and not saved: `note` says why). tokens: of the trunk. seconds: to make it
    resident. bytes: of its saved state, 0 when it is not saved."""

    def __init__(self, keeper: Keeper, label: str, prefix: Prefix, ready: Readiness) -> None:
        self.label, self._keeper, self._prefix = label, keeper, prefix
        self._cold_seconds: float | None = None
        self._unproved: Readiness | None = None
        self._save_later = False
        self._take(ready)

    @property
    def tokens(self) -> int:
        return len(self._prefix.tokens)

    @property
    def key(self) -> str:
        """What its files are named after: a sha256 in hex over all that must match."""
        return self._keeper.key(self._prefix)

    def __repr__(self) -> str:
        return f"<trunk {self.label!r}: {self.state}, {self.tokens} tokens, {self.seconds:.2f} s>"

    def _take(self, ready: Readiness) -> None:
        if ready.state == RESTORED:
            self._unproved = ready
        self._save_later = ready.displaced
        self.state, self.seconds, self.bytes, self.note = ready.state, ready.seconds, ready.size, ready.note
        self._cold_seconds = ready.read_seconds if ready.read_seconds is not None else self._cold_seconds

    def _prepare(self, may_restore: bool) -> Readiness:
        """Nothing fails here: when the server is gone, or busy loading, the call itself says it best."""
        try:
            ready = self._keeper.bring(self._prefix, self.label, save=self._save_later, may_restore=may_restore)
        except SlotRefused as refused:
            return Readiness("", 0.0, note=f"the trunk was not made resident: {refused.why}")
        self._take(ready)
        restored, self._unproved = self._unproved, None
        if restored is None or ready.state not in (WARM, RESTORED):
            return ready
        return replace(ready, state=RESTORED, mark=restored.mark)  # this call's reply is the first after it

    def _request(self, options: dict[str, Any]) -> dict[str, Any]:
        """The call's arguments, trunk in front. Raises UsageError for what are no messages or tools."""
        given, trunk = listed("messages", options.pop("messages", ())), self._prefix
        begins = given[: len(trunk.messages)]
        whole = begins == list(trunk.messages) or (begins[:1] and begins[0].get("role") in FULL_CHAT_BEGINS)
        tools = options.pop("tools", None)
        tools = list(trunk.tools) if tools is None or isinstance(tools, NOT_GIVEN) else listed("tools", tools)
        body = dict(options.pop("extra_body", None) or {})
        body["chat_template_kwargs"] = {**trunk.template_args, **(body.get("chat_template_kwargs") or {})}
        options.update(messages=given if whole else [*trunk.messages, *given], extra_body=body)
        return {**options, "tools": tools} if tools else options

    def _finish(
        self, reply: Any, found: Warmth | None, ready: Readiness, chat: dict[str, Any], ttft: float | None
    ) -> None:
        """What is found out of a reply is kept with it."""
        if found is None:
            return
        drift, note = self._keeper.judge(self._prefix, ready, found, chat)
        cold = self._cold_seconds
        found = replace(
            found,
            ttft=ttft if ttft is not None else None if found.ttft is None else found.ttft + ready.seconds,
            cold_estimate=None if cold is None else cold * found.prompt / self.tokens,
            trunk=self.tokens,
            state=ready.state,
            drift=drift,
            note="; ".join(filter(None, (ready.note, note))),
        )
        remember(reply, found)


class Trunk(_Trunk):
    """Made by `LocalModel.trunk`."""

    def __init__(self, model: openai.OpenAI, keeper: Keeper, label: str, prefix: Prefix, ready: Readiness) -> None:
        self._model, self._served_id = model, keeper.record.served_id
        super().__init__(keeper, label, prefix, ready)

    def create(self, **options: Any) -> Any:
        """`chat.completions.create` with the trunk resident. messages: those after the trunk's, or a whole chat.

        Restores the trunk when this server has not seen it or has lost it. `warmth(reply)` says what was reused.
        """
        began = time.monotonic()
        options = self._request({"model": self._served_id, **options})
        with contextlib.ExitStack() as turn:
            ready = self._prepare(turn.enter_context(self._keeper.turn()))
            reply = self._model.chat.completions.create(**options)
            if options.get("stream"):
                reply._iterator = self._watched(reply, reply._iterator, ready, options, began, turn.pop_all())
                return reply
        self._finish(reply, counted(reply), ready, options, None)
        return reply

    def _watched(
        self,
        stream: Any,
        chunks: Iterator[Any],
        ready: Readiness,
        chat: dict[str, Any],
        began: float,
        turn: contextlib.ExitStack,
    ) -> Iterator[Any]:
        first: float | None = None
        found: Warmth | None = None
        with turn:
            for chunk in chunks:
                first = first if first is not None or not _speaks(chunk) else time.monotonic() - began
                found = counted(chunk) or found
                yield chunk
        self._finish(stream, found, ready, chat, first)


class AsyncTrunk(_Trunk):
    """Made by `AsyncLocalModel.trunk`; what may wait runs in a thread."""

    def __init__(self, model: openai.AsyncOpenAI, keeper: Keeper, label: str, prefix: Prefix, ready: Readiness) -> None:
        self._model, self._served_id = model, keeper.record.served_id
        super().__init__(keeper, label, prefix, ready)

    async def create(self, **options: Any) -> Any:
        """As `Trunk.create`."""
        began = time.monotonic()
        options = self._request({"model": self._served_id, **options})
        with contextlib.ExitStack() as turn:
            may_restore = await asyncio.to_thread(turn.enter_context, self._keeper.turn())
            ready = await asyncio.to_thread(self._prepare, may_restore)
            reply = await self._model.chat.completions.create(**options)
            if options.get("stream"):
                reply._iterator = self._watched(reply, reply._iterator, ready, options, began, turn.pop_all())
                return reply
        await asyncio.to_thread(self._finish, reply, counted(reply), ready, options, None)
        return reply

    async def _watched(
        self,
        stream: Any,
        chunks: AsyncIterator[Any],
        ready: Readiness,
        chat: dict[str, Any],
        began: float,
        turn: contextlib.ExitStack,
    ) -> AsyncIterator[Any]:
        first: float | None = None
        found: Warmth | None = None
        with turn:
            async for chunk in chunks:
                first = first if first is not None or not _speaks(chunk) else time.monotonic() - began
                found = counted(chunk) or found
                yield chunk
        await asyncio.to_thread(self._finish, stream, found, ready, chat, first)


def _speaks(chunk: Any) -> bool:
    """Whether a chunk carries a token: the first ones only name the role."""
    for choice in getattr(chunk, "choices", ()):
        delta = choice.delta
        if delta.content or delta.tool_calls or getattr(delta, "reasoning_content", None):
            return True
    return False
