"""Trunks on one server: made resident by the cheapest way that is known to work, and proved by what was reused.

    in the slot or the RAM cache   -> nothing to do
    saved, verified                -> restored (a conversation in the slot is put into the RAM cache first)
    neither                        -> read once, and saved

A restore is believed when a reply shows it. After two that changed nothing, trunks of that engine and architecture are
read cold until the engine changes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from looprun_models.errors import ContextOverflow
from looprun_models.ledger import FOREIGN, Held, Ledger, alone, open_ledger
from looprun_models.prefix import Drift, Prefix, common_length, find_changed, find_drift, find_prefix
from looprun_models.provenance import files_of, weights_identity, why_unsaved
from looprun_models.reply import Warmth
from looprun_models.settings import Settings
from looprun_models.slot import Slot, SlotRefused, plain, saved_tokens
from looprun_models.trunkentry import Entry, NotSaved, TrunkMeta
from looprun_models.trunkfiles import why_unwritten
from looprun_models.trunkmisses import Misses
from looprun_models.trunkstore import TrunkStore
from looprun_models.wire import Record

BAKED, RESTORED, WARM, COLD = "baked", "restored", "warm", "cold"
ENOUGH = 0.9
"""Share of a trunk that a reply must reuse for it to count as warm: a hybrid model steps back to a checkpoint, which is
a few tokens before the end, or some hundred on older builds."""
MISSES_ALLOWED = 2
BAKE_TRIES = 2
LEAST_TOKENS = 8
LAST_TO_MIX = 10549
"""Up to about this build a restore leaves the checkpoints of what was in the slot, and a hybrid model may go back to
one: no other request may come between putting that away and the restore."""
CHECKPOINTS_A_READING = 3
LEAST_KEPT = 0.25
"""The engine takes a prompt out of its RAM cache only for one that begins with at least this share of it."""
PARKING = 1
"""Tokens that the engine reads for it."""


@dataclass(frozen=True, slots=True)
class Readiness:
    """How a trunk became resident. seconds: in all; size: of its saved state in bytes, 0 when it is not saved; note:
    why not, or what else went wrong. read_seconds: reading it cold, as measured on this engine, None if never.
    mark: the engine's count of tokens read, just after a restore. displaced: it would have been saved, had not other
    requests come in between."""

    state: str
    seconds: float
    size: int = 0
    note: str = ""
    read_seconds: float | None = None
    mark: int | None = None
    displaced: bool = False


class Keeper:
    """The trunks of one server. Any number of threads and processes may have one for the same server."""

    def __init__(self, record: Record, settings: Settings) -> None:
        self.record, self.settings = record, settings
        self.slot = Slot(record)
        self.misses = Misses(settings.cache_dir)
        self.weights, self.files, self.why_unsaved = "", "", ""
        try:
            self.weights, self.files = weights_identity(Path(record.model_path), settings), files_of(record)
        except OSError as error:
            self.why_unsaved = f"{error.filename or record.model_path}: {error.strerror}"
        self.why_unsaved = self.why_unsaved or why_unsaved(record, settings)
        self.store = None if self.why_unsaved else TrunkStore(Path(record.slot_dir or ""), settings.trunk_budget)

    def prefix(self, messages: Iterable[Any], tools: Iterable[Any] | None, template_args: Mapping[str, Any]) -> Prefix:
        """Raises TrunkRefused, ContextOverflow, or SlotRefused when the server is gone."""
        prefix = find_prefix(self.slot, messages, tools, template_args)
        if len(prefix.tokens) >= self.record.ctx:
            hint = "shorten the trunk, or serve a longer context: LLAMA_CTX"
            raise ContextOverflow(len(prefix.tokens), self.record.ctx, hint=hint)
        return prefix

    def facts(self, prefix: Prefix) -> dict[str, str]:
        """All that must be the same for a saved state to be this trunk's."""
        record = self.record
        return {
            "weights": self.weights,
            "engine": record.engine_identity,
            "flags": record.state_flags,
            **({"files": self.files} if self.files else {}),
            "tokens": prefix.token_digest,
        }

    def key(self, prefix: Prefix) -> str:
        return hashlib.sha256(json.dumps(self.facts(prefix), sort_keys=True).encode()).hexdigest()

    @contextlib.contextmanager
    def turn(self) -> Iterator[bool]:
        """Around what restores a trunk, and around each chat: where an engine mixes them up they wait for each other.

        False when others did not end in time; then nothing may be restored.
        """
        build = self.record.build
        if not self.record.checkpoints or (build is not None and build > LAST_TO_MIX):
            yield True
            return
        with alone(self.record, self.settings, "turn") as held:
            yield held

    # --- before a reply ---

    def bring(self, prefix: Prefix, label: str, *, save: bool = False, may_restore: bool = True) -> Readiness:
        """Make the trunk resident; with save, on the disk too. What could not be saved is said in the note, not raised.

        To be called within a `turn`, which says whether it may restore. Raises SlotRefused when the server is gone, or
        does not take the trunk.
        """
        began = time.monotonic()
        key = self.key(prefix)
        ready = self._warm(prefix, key, save=save)
        if ready is None:
            with alone(self.record, self.settings):
                ready = self._warm(prefix, key, save=save, alone=True) or self._make(prefix, key, label, may_restore)
        return replace(ready, seconds=time.monotonic() - began)

    def _warm(self, prefix: Prefix, key: str, *, save: bool, alone: bool = False) -> Readiness | None:
        """None when it is not there, not saved as it should be, or takes the lock to bring it up."""
        counted = self.slot.tokens_read()
        with open_ledger(self.record, self.settings) as ledger:
            ledger.notice(counted, lambda tokens: self._held(FOREIGN, tokens))
            if not ledger.holds(key):
                return None
            crowded = self._crowded(ledger, prefix, key)
        entry = self.store.find(key) if self.store else None
        if (crowded and not alone) or (save and self.store and entry is None and self._helps()):
            return None
        if crowded:
            self._park(empty=True)
        with open_ledger(self.record, self.settings) as ledger:
            ledger.wake(key)
        if self.store and entry:
            self.store.touch(key)
        return Readiness(WARM, 0.0, entry.size if entry else 0, read_seconds=entry.meta.read_seconds if entry else None)

    def _make(self, prefix: Prefix, key: str, label: str, may_restore: bool) -> Readiness:
        record, store = self.record, self.store
        if len(prefix.tokens) < LEAST_TOKENS:
            return self._read(
                prefix, key, label, f"not saved: its {len(prefix.tokens)} tokens are too few to be worth it"
            )
        if store is None:
            return self._read(prefix, key, label, f"not saved: {self.why_unsaved}")
        if not self._helps():
            why = f"not saved: restoring did not help on {self._build} with {record.architecture or 'this model'}"
            why += " (looprun trunks clean has it tried again)"
            return self._read(prefix, key, label, why)
        if not may_restore:
            return self._read(prefix, key, label, "not restored: other chats did not end in time")
        entry, damage = store.check(key)
        if entry is not None:
            ready, damage = self._restore(prefix, entry)
            if ready is not None:
                return ready
            store.drop(key)
        ready = self._read(prefix, key, label)
        told = f"the saved state was not used and is gone: {damage}" if damage else ""
        return replace(ready, note="; ".join(filter(None, (told, ready.note))))

    def _helps(self) -> bool:
        """Whether restoring is worth a try here."""
        return self.misses.count(self.record.engine_identity, self.record.architecture) < MISSES_ALLOWED

    def _restore(self, prefix: Prefix, entry: Entry) -> tuple[Readiness | None, str]:
        """None and why when the engine does not take it, which may be its end."""
        self._park()
        try:
            restored = self.slot.restore(entry.file)
        except SlotRefused as refused:
            if refused.status == 0 and self.store:
                self.store.drop(entry.key)
                raise
            return None, f"the engine refused it ({refused.why})"
        if restored != (len(prefix.tokens), entry.size):
            self.slot.erase()
            return None, f"the engine read {restored[0]} tokens and {restored[1]} bytes of it"
        mark = self.slot.tokens_read()
        with open_ledger(self.record, self.settings) as ledger:
            ledger.use(self._held(entry.key, len(prefix.tokens)))
        if self.store:
            self.store.touch(entry.key)
        return Readiness(RESTORED, 0.0, entry.size, read_seconds=entry.meta.read_seconds, mark=mark), ""

    def _read(self, prefix: Prefix, key: str, label: str, unsaved: str = "") -> Readiness:
        """Read the trunk and, unless there is a reason not to, save it; once more if another request came between."""
        seconds: float | None = None
        displaced = False
        for _ in range(BAKE_TRIES):
            with open_ledger(self.record, self.settings) as ledger:
                crowded = self._crowded(ledger, prefix, key)
            if crowded:
                self._park(empty=True)
            mark = self.slot.tokens_read()
            reading = self.slot.read(prefix.tokens)
            if reading.read >= ENOUGH * len(prefix.tokens):
                seconds = reading.prefill_seconds * len(prefix.tokens) / reading.read
            with open_ledger(self.record, self.settings) as ledger:
                self._forget_kin(ledger, prefix, key, reading.reused)
                ledger.use(self._held(key, len(prefix.tokens)))
                ledger.tell(reading.read)
            if unsaved:
                break
            try:
                entry = self._save(prefix, key, label, seconds, None if mark is None else mark + reading.read)
            except NotSaved as refused:
                displaced, note = isinstance(refused, _Displaced), f"not saved: {refused.why}"
                if not displaced:
                    break
            else:
                return Readiness(BAKED, 0.0, entry.size, read_seconds=seconds)
        return Readiness(COLD, 0.0, note=unsaved or note, read_seconds=seconds, displaced=displaced)

    def _save(self, prefix: Prefix, key: str, label: str, seconds: float | None, mark: int | None) -> Entry:
        """mark: the engine's count of tokens read if nothing came after the trunk."""
        assert self.store is not None
        temporary = self.store.reserve(key)
        try:
            saved, written = self.slot.save(temporary)
            tokens = self._tokens_in(temporary) if written else prefix.tokens
            strange = tokens is None and self._others_ran(mark, 0)  # a build whose files are not known
            if saved != len(prefix.tokens) or strange or tokens not in (None, prefix.tokens):
                raise _Displaced("other requests came in between")
            meta = TrunkMeta(
                key=key,
                label=label,
                alias=self.record.alias,
                tokens=len(prefix.tokens),
                token_digest=prefix.token_digest,
                engine=self._build,
                read_seconds=seconds,
                facts=self.facts(prefix),
            )
            return self.store.commit(temporary, meta, written)
        except SlotRefused as refused:
            if refused.status == 0:
                raise
            raise NotSaved(f"{why_unwritten(self.store.folder)} ({refused.why})") from refused
        finally:
            self.store.discard(temporary)

    def _park(self, *, empty: bool = False) -> None:
        """Have the engine keep what is in the slot, which it does not do for a restore. empty: leave nothing in it."""
        with open_ledger(self.record, self.settings) as ledger:
            known = ledger.slot is not None
        if known or not self.slot.empty():
            self.slot.park()
            if empty:
                self.slot.erase()
            with open_ledger(self.record, self.settings) as ledger:
                ledger.park()
                ledger.tell(PARKING)

    # --- after a reply ---

    def judge(
        self, prefix: Prefix, ready: Readiness, found: Warmth, chat: Mapping[str, Any]
    ) -> tuple[Drift | None, str]:
        """Where the chat parts from the trunk, and what its reply shows besides: what was restored is believed or
        doubted by what this reply reused."""
        key, warm = self.key(prefix), found.reused >= ENOUGH * len(prefix.tokens)
        try:
            drift = self._drift(prefix, chat, warm)
            note = "" if drift else self._prove(prefix, ready, found, chat, warm)
        except SlotRefused as refused:  # the reply is there; what it shows is not known for sure
            drift, note = None, f"not proved: {refused.why}"
        tokens = found.prompt + found.written
        with open_ledger(self.record, self.settings) as ledger:
            if not warm or drift:
                ledger.lose(key)
                self._forget_kin(ledger, prefix, key, found.reused)
            readings = ledger.slot.readings + 1 if ledger.slot and ledger.slot.key == key else 1
            ledger.use(self._held(FOREIGN if drift else key, tokens, readings))
            ledger.tell(found.read)
        return drift, note

    def _drift(self, prefix: Prefix, chat: Mapping[str, Any], warm: bool) -> Drift | None:
        same = find_changed(prefix, plain(chat["messages"]), plain(chat.get("tools") or ())) is None
        return None if same and warm else find_drift(self.slot, prefix, chat)

    def _prove(self, prefix: Prefix, ready: Readiness, found: Warmth, chat: Mapping[str, Any], warm: bool) -> str:
        record, tokens = self.record, len(prefix.tokens)
        if (chat.get("extra_body") or {}).get("cache_prompt") is False:
            return "this call asked for no reuse (cache_prompt)"
        told = f"{found.reused} of its {tokens} tokens were reused"
        if ready.state != RESTORED:
            return "" if warm else f"the trunk was not in the server: {told}"
        if self._others_ran(ready.mark, found.read):
            return "" if warm else f"other requests came in after the restore: {told}"
        if self.store:
            self.store.proved(self.key(prefix), found.reused, tokens)
        if warm:
            self.misses.note_hit(record.engine_identity, record.architecture)
            return ""
        count = self.misses.note_miss(record.engine_identity, record.architecture)
        model = record.architecture or "this model"
        note = f"the restored trunk was not taken up: {told} ({self._build}, {model})"
        return f"{note}; trunks are read cold from now on" if count >= MISSES_ALLOWED else note

    def _others_ran(self, mark: int | None, read: int) -> bool:
        """Whether the engine read more tokens since the mark than the reply says; True when it cannot be known."""
        now = self.slot.tokens_read()
        return mark is None or now is None or now - mark != read

    # --- what the engine's RAM cache does ---

    def _crowded(self, ledger: Ledger, prefix: Prefix, key: str) -> bool:
        """Whether the slot holds another trunk that begins so much like this one that the engine would write over it,
        and not look for this one, instead of putting it away."""
        slot = ledger.slot
        return slot is not None and slot.key != key and 2 * self._shared(slot.key, prefix) >= slot.tokens

    def _forget_kin(self, ledger: Ledger, prefix: Prefix, key: str, reused: int) -> None:
        """What was reused and was not this trunk's own was taken from another, which is not in the RAM cache then."""
        for held in list(ledger.cached):
            if not reused or held.key == key:
                continue
            shared = self._shared(held.key, prefix)
            if shared >= max(reused, LEAST_KEPT * held.tokens):
                ledger.lose(held.key)

    def _shared(self, key: str, prefix: Prefix) -> int:
        """How many tokens a saved trunk and this one begin with alike; 0 when that is not known."""
        return common_length((self._tokens_in(f"{key}.trunk") or (), prefix.tokens))

    def _tokens_in(self, file: str) -> tuple[int, ...] | None:
        with contextlib.suppress(OSError):
            return saved_tokens(self.store.folder / file) if self.store else None
        return None

    def _held(self, key: str, tokens: int, readings: int = 1) -> Held:
        """With what it takes in the RAM cache, at most: each reading leaves some checkpoints, up to their number."""
        record = self.record
        checkpoints = min(record.checkpoints or 0, CHECKPOINTS_A_READING * readings)
        checkpoint = (record.checkpoint_bytes or 0) + tokens * (record.checkpoint_token_bytes or 0)
        size = tokens * (record.token_bytes or 0) + (record.checkpoint_bytes or 0) + checkpoints * checkpoint
        return Held(key, size, tokens, readings)

    @property
    def _build(self) -> str:
        return "this engine" if self.record.build is None else f"b{self.record.build}"


class _Displaced(NotSaved):
    """What was saved is not the trunk."""
