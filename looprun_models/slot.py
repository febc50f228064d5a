"""The engine's one slot, over HTTP: what a chat becomes, reading a prompt into it, saving and restoring its state.

No policy: what is done when, and whether a saved state may be trusted, is decided in `trunks`.
"""

from __future__ import annotations

import json
import re
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from looprun_models.records import child_ended
from looprun_models.trunkfiles import open_regular
from looprun_models.wire import Record, get_text, post_json

Message = Mapping[str, Any]

QUICK = 60.0
"""Seconds for what does not wait for the slot (a template, a tokeniser)."""
STATE_MAGIC, PACKED = 0x67677371, 0xFFFFFFFF
MOST_TOKENS = 1 << 24
PATIENT = 6 * 3600.0
"""Seconds for what waits until the slot is free, or reads a long prompt on a slow machine."""


class SlotRefused(Exception):
    """The engine would not do it. status: of its answer, 0 when there was none (it may have ended)."""

    def __init__(self, why: str, status: int = 0) -> None:
        super().__init__(why)
        self.why, self.status = why, status


@dataclass(frozen=True, slots=True)
class Reading:
    """A prompt read into the slot: tokens in it before, tokens read now, seconds for those, seconds in all."""

    reused: int
    read: int
    prefill_seconds: float
    seconds: float


class Slot:
    """The slot of the server in a record. Every method raises SlotRefused when the engine will not or is gone."""

    def __init__(self, record: Record) -> None:
        self.record = record

    def render(self, chat: Mapping[str, Any]) -> str:
        """The text that a chat becomes. chat: what the chat endpoint is sent."""
        return str(self._post("/apply-template", chat, QUICK)["prompt"])

    def tokenise(self, text: str) -> tuple[int, ...]:
        """Tokens as the chat endpoint would make them of a rendered text."""
        return self._tokenise(text, add_special=True, parse_special=True)

    def marks(self, token: int) -> bool:
        """Whether it is a special token: found before anything else, so that texts on its two sides never melt."""
        text = self.detokenise([token])
        alone = self._tokenise(text, add_special=False, parse_special=False)
        return alone != (token,) and self._tokenise(text, add_special=False, parse_special=True) == (token,)

    def _tokenise(self, text: str, *, add_special: bool, parse_special: bool) -> tuple[int, ...]:
        body = {"content": text, "add_special": add_special, "parse_special": parse_special}
        return tuple(self._post("/tokenize", body, QUICK)["tokens"])

    def detokenise(self, tokens: Sequence[int]) -> str:
        """For people to read."""
        return str(self._post("/detokenize", {"tokens": list(tokens)}, QUICK)["content"])

    def read(self, tokens: Sequence[int]) -> Reading:
        """Make these tokens the slot's state. What was in the slot goes to the engine's RAM cache first."""
        began = time.monotonic()
        body = {"prompt": list(tokens), "n_predict": 0, "cache_prompt": True, "stream": False}
        timings = self._post("/completion", body, PATIENT)["timings"]
        return Reading(
            reused=int(timings.get("cache_n", 0)),
            read=int(timings["prompt_n"]),
            prefill_seconds=float(timings["prompt_ms"]) / 1000,
            seconds=time.monotonic() - began,
        )

    def park(self) -> None:
        """Have the engine put the slot's state into its RAM cache, which a restore does not do.

        It does so for a prompt that has little in common with what the slot holds, which is then in the slot instead.
        """
        self.read([1])

    def erase(self) -> None:
        """Empty the slot, without keeping what was in it."""
        self._post("/slots/0?action=erase", {}, PATIENT)

    def save(self, file: str) -> tuple[int, int]:
        """Save the slot's state under a bare file name: the tokens in it, the bytes written (0: it could not)."""
        told = self._post("/slots/0?action=save", {"filename": file}, PATIENT)
        return int(told["n_saved"]), int(told["n_written"])

    def restore(self, file: str) -> tuple[int, int]:
        """Make a saved state the slot's: the tokens in it, the bytes read. A refusal leaves the slot empty."""
        told = self._post("/slots/0?action=restore", {"filename": file}, PATIENT)
        return int(told["n_restored"]), int(told["n_read"])

    def empty(self) -> bool:
        """Whether there is nothing in the slot, as after a start. A state restored since then may not show."""
        try:
            return not json.loads(self._ask("/slots"))[0].get("n_prompt_tokens")
        except (ValueError, LookupError, AttributeError, TypeError):
            return False  # an engine that does not tell may hold some

    def tokens_read(self) -> int | None:
        """How many prompt tokens the engine has read in its life; None when it does not tell."""
        counted = re.search(r"^llamacpp:prompt_tokens_total (\d+)", self._ask("/metrics"), re.MULTILINE)
        return int(counted[1]) if counted else None

    def _living(self) -> Record:
        """After its server's end, the port may be another's: its slot is not for our trunks."""
        if child_ended(self.record):
            raise SlotRefused("the server has ended")
        return self.record

    def _ask(self, path: str) -> str:
        record = self._living()
        try:
            return get_text(record.host, record.port, path, record.api_key, PATIENT)[1]
        except (OSError, ValueError) as error:
            raise SlotRefused(f"{path}: {error or type(error).__name__}") from error

    def _post(self, path: str, body: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        record = self._living()
        try:
            status, told = post_json(record.host, record.port, path, record.api_key, timeout, body)
        except (OSError, ValueError) as error:
            raise SlotRefused(f"{path}: {error or type(error).__name__}") from error
        if status == 200 and isinstance(told, dict):
            return told
        wrong = told.get("error") if isinstance(told, dict) else None
        said = wrong.get("message") if isinstance(wrong, dict) else wrong
        raise SlotRefused(str(said or f"HTTP {status}"), status)


def plain(value: Any) -> Any:
    """As it goes over the wire, and a copy: callers give dicts, objects of pydantic (a reply's message), iterables."""
    if hasattr(value, "model_dump"):
        return value.model_dump(exclude_unset=True, mode="json")
    if isinstance(value, Mapping):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return [plain(part) for part in value]
    return value


def saved_tokens(file: Path) -> tuple[int, ...] | None:
    """The tokens that a saved state begins with; None when it does not begin like one that is known.

    Raises OSError. Builds up to b10549 write magic, version, count, tokens; later ones pack them: -1, 1, count, tokens.
    """
    with open_regular(file) as state:
        head = state.read(12) or b""
        if len(head) < 12:
            return None
        magic, _, count = struct.unpack("<III", head)
        if magic != STATE_MAGIC or count > MOST_TOKENS:
            return None
        words = struct.unpack(f"<{count}I", (state.read(4 * count) or b"").ljust(4 * count, b"\0"))
    if words[:1] != (PACKED,):
        return words
    return words[3 : 3 + words[2]] if len(words) > 2 and words[2] <= len(words) - 3 else None
