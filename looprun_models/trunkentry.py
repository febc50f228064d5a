"""What the store knows of a trunk, and the JSON of it that lies beside the state."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from looprun_models.trunkfiles import JSON_LIMIT

SCHEMA = 1


class NotSaved(Exception):
    """A state could not be kept. why: the cause in plain words, for whoever goes on without it."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


@dataclass(frozen=True, slots=True)
class TrunkMeta:
    """What a trunk is. key: sha256 in hex over all that must match; facts: what went into it, for people.

    tokens is a count, token_digest their hash, engine a label. read_seconds: reading them cold, None if never seen.
    """

    key: str
    label: str
    alias: str
    tokens: int
    token_digest: str
    engine: str
    read_seconds: float | None
    facts: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Proof:
    """A first reply after a restore: `reused` of the trunk's `tokens` were not read again. at: Unix time."""

    reused: int
    tokens: int
    at: float


@dataclass(frozen=True, slots=True)
class Entry:
    """A trunk in the store. size is the state's in bytes; created and last_used are Unix times."""

    meta: TrunkMeta
    size: int
    sha256: str
    created: float
    last_used: float
    proof: Proof | None = None

    @property
    def key(self) -> str:
        return self.meta.key

    @property
    def file(self) -> str:
        """The bare name that the engine restores from."""
        return f"{self.key}.trunk"


def encoded(entry: Entry) -> bytes:
    """The sidecar. Raises NotSaved when it is too long to be read again, ValueError for what is no entry."""
    entry = replace(entry, meta=replace(entry.meta, facts=dict(entry.meta.facts)))
    if not _sound(entry):
        raise ValueError(f"a value of the wrong kind in {entry}")
    told = asdict(entry)
    del told["last_used"]  # the sidecar's time of change
    content = json.dumps({"schema": SCHEMA, **told}, indent=1).encode()
    if len(content) > JSON_LIMIT:
        raise NotSaved("its label and facts are too long")
    return content


def decoded(told: dict[str, Any], changed: float) -> Entry | None:
    """What a sidecar says; None when it is not one that this version wrote."""
    try:
        if told.pop("schema") != SCHEMA:
            return None
        proof = told["proof"]
        entry = Entry(
            **{**told, "meta": TrunkMeta(**told["meta"]), "proof": Proof(**proof) if proof else None},
            last_used=changed,
        )
    except (KeyError, TypeError):
        return None
    return entry if _sound(entry) else None


def _sound(entry: Entry) -> bool:
    meta, proof = entry.meta, entry.proof
    if not isinstance(meta.facts, dict):
        return False
    texts = (meta.key, meta.label, meta.alias, meta.token_digest, meta.engine, entry.sha256, *meta.facts.values())
    counts = (entry.size, meta.tokens, *((proof.reused, proof.tokens) if proof else ()))
    times = (entry.created, 0.0 if meta.read_seconds is None else meta.read_seconds, proof.at if proof else 0.0)
    return (
        all(type(text) is str for text in texts)
        and all(type(count) is int and 0 <= count < 1 << 63 for count in counts)
        and all(type(moment) in (int, float) and 0 <= moment < 1e15 for moment in times)
    )
