"""How warm a reply was: what of its prompt was reused, what was read, and what the trunk had to do with it.

Every number was observed: the counts are the engine's own of this reply, the times were measured here, and
`cold_estimate` is scaled from a cold read of this trunk on this engine, None when there was none.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from looprun_models.errors import UsageError
from looprun_models.prefix import Drift


@dataclass(frozen=True, slots=True)
class Warmth:
    """One reply. prompt = reused + read, in tokens; written: tokens of the reply itself.

    ttft: seconds to the first token, the restore included: as seen by the caller of a stream, else from the engine's
    prefill. cold_estimate: seconds that reading all of the prompt would take. trunk: tokens of the trunk, None for a
    reply without one. state: how the trunk was made resident for it. drift: where the chat parts from the trunk.
    note: what else is to be known.
    """

    prompt: int
    reused: int
    read: int
    ttft: float | None = None
    cold_estimate: float | None = None
    trunk: int | None = None
    state: str = ""
    drift: Drift | None = None
    note: str = ""
    written: int = 0

    def __str__(self) -> str:
        parts = [f"{self.reused} of {self.prompt} prompt tokens reused"]
        if self.ttft is not None:
            parts.append(f"first token after {self.ttft:.2f} s")
        if self.cold_estimate is not None:
            parts.append(f"cold about {self.cold_estimate:.1f} s")
        return "; ".join([", ".join(parts), *map(str, filter(None, (self.drift, self.note)))])


_known: dict[int, tuple[weakref.ref[Any], Warmth]] = {}


def warmth(reply: Any) -> Warmth:
    """How warm this reply of a local model was. A stream is asked when it has ended.

    Raises UsageError for what carries no counts.
    """
    kept = _known.get(id(reply))
    if kept is not None and kept[0]() is reply:
        return kept[1]
    found = counted(reply)
    if found is None:
        raise UsageError(
            f"no token counts in this {type(reply).__name__}.",
            hint="ask about a completion of local_model(), or about a stream of trunk.create() after its end",
        )
    return found


def remember(reply: Any, found: Warmth) -> None:
    """What `warmth(reply)` will say, for as long as the reply lives."""
    number = id(reply)
    _known[number] = weakref.ref(reply, lambda _: _known.pop(number, None)), found


def counted(reply: Any) -> Warmth | None:
    """The engine's own counts of a completion, or of the last chunk of a stream; None when there are none."""
    timings = _part(reply, "timings")
    usage = _part(reply, "usage")
    if timings and "prompt_n" in timings:
        reused, read = int(timings.get("cache_n", 0)), int(timings["prompt_n"])
        prefill, written = timings.get("prompt_ms"), int(timings.get("predicted_n", 0))
        ttft = None if prefill is None else float(prefill) / 1000
        return Warmth(reused + read, reused, read, ttft=ttft, written=written)
    if usage and usage.get("prompt_tokens") is not None:
        details = usage.get("prompt_tokens_details") or {}
        prompt, reused = int(usage["prompt_tokens"]), int(details.get("cached_tokens") or 0)
        return Warmth(prompt, reused, prompt - reused, written=int(usage.get("completion_tokens") or 0))
    return None


def _part(reply: Any, name: str) -> Mapping[str, Any] | None:
    part = getattr(reply, name, None)
    if part is not None and hasattr(part, "model_dump"):
        part = part.model_dump()
    return part if isinstance(part, Mapping) else None
