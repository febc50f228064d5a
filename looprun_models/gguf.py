"""What a GGUF file says about itself, from its header alone: `read_header(path)` gives a `GgufHeader`.

The weights are never read, so a 17 GB file costs as much as its tokenizer. What is checked is what a download
that went wrong looks like: another kind of file under this name, a header that stops in the middle, weights
that end early. The sizes of caches and checkpoints follow from the header by formulas that were measured on
the tiny and wide test files.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from looprun_models.errors import WeightsBad, WeightsMissing
from looprun_models.ggufformat import (
    MAX_TENSORS,
    MAX_VALUES,
    Cursor,
    Tensors,
    Unusable,
    Values,
    tensor_table,
    value_at,
    version_of,
)

KV_BYTES = {"f16": (2, 1), "q8_0": (34, 32)}
"""Bytes of a KV element, as a fraction: q8_0 stores 32 elements in 34 bytes."""

_MAX_BLOCKS = 1 << 12
_INTERVAL_FAMILY = ("qwen35", "qwen35moe", "qwen3next")


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The facts of one GGUF file. Every size is in bytes.

    block_count counts the trunk's layers and, after them, the draft_layers (MTP blocks). kv_heads has one
    entry for each trunk layer with full attention, draft_kv_heads one for each MTP block. recurrent_layers
    carry a fixed state of recurrent_layer_bytes each (f32); a layer can be both. Sliding-window layers
    count as full attention, which over-estimates their KV; recurrent families that `ssm` and `shortconv`
    keys do not describe (RWKV, KDA) count no state. expert_layer_bytes has the routed experts of each
    block, what `-ncmoe` moves; () when dense. data_end is where the last tensor's data ends. tensor_bytes,
    data_end and expert_layer_bytes are of this file alone, which holds one of `shards` parts.
    """

    path: Path
    file_size: int
    version: int
    architecture: str
    name: str
    context_length: int
    embedding_length: int
    block_count: int
    draft_layers: int
    recurrent_layers: int
    kv_heads: tuple[int, ...]
    draft_kv_heads: tuple[int, ...]
    key_length: int
    value_length: int
    recurrent_layer_bytes: int
    expert_layer_bytes: tuple[int, ...]
    tensor_bytes: int
    data_end: int
    shards: int = 1

    @property
    def attention_layers(self) -> int:
        return len(self.kv_heads)

    @property
    def has_draft_head(self) -> bool:
        """Whether `--spec-type draft-mtp` has something to draft with."""
        return self.draft_layers > 0

    @property
    def is_hybrid(self) -> bool:
        """Whether some layers keep a state that cannot be cut back, which takes checkpoints."""
        return self.recurrent_layers > 0

    @property
    def recurrent_bytes(self) -> int:
        """The state of all recurrent layers, whatever the number of tokens."""
        return self.recurrent_layers * self.recurrent_layer_bytes

    def live_recurrent_bytes(self, draft_max: int = 0) -> int:
        """What a running server holds of `recurrent_bytes`: one state and, to take drafts back, one more for
        each token that a draft may have (3 by the engine's default). Measured on the wide test file: 1, 2, 4
        and 6 states for drafts of 0, 1, 3 and 5 tokens. Checkpoints hold one state each.
        """
        return (1 + draft_max) * self.recurrent_bytes

    def kv_bytes(self, tokens: int, kv: str) -> int:
        """The trunk's KV of so many tokens: `tokens * KV heads of all layers * (key + value length) * bytes`
        of a kv element ('f16' 2, 'q8_0' 34/32). Measured on the tiny and wide test files: the engine's KV
        buffer is this for its context, rounded up to 256 tokens.
        """
        return self._kv(self.kv_heads, tokens, kv)

    def draft_kv_bytes(self, tokens: int, kv: str = "f16") -> int:
        """The MTP blocks' own KV, by the formula of `kv_bytes`; f16 unless the engine is told otherwise,
        whatever the trunk uses. Measured on the tiny and wide test files.
        """
        return self._kv(self.draft_kv_heads, tokens, kv)

    def checkpoint_bytes(self, tokens: int, drafting: bool) -> int:
        """One context checkpoint at so many tokens: the whole recurrent state and, when drafting, the draft's
        KV of those tokens. Measured on the tiny and wide test files; the engine's own figure is higher by 20
        to 24 bytes a token. 0 without recurrent layers: those of sliding-window models are not counted.
        """
        if not self.is_hybrid:
            return 0
        return self.recurrent_bytes + (self.draft_kv_bytes(tokens) if drafting else 0)

    def _kv(self, heads: tuple[int, ...], tokens: int, kv: str) -> int:
        over, under = KV_BYTES[kv]
        elements = tokens * sum(heads) * (self.key_length + self.value_length)
        return -(-elements * over // under)


def read_header(path: Path) -> GgufHeader:
    """Read and check the header of a GGUF.

    Raises WeightsMissing when nothing is there, and WeightsBad, saying why, when it is not a whole GGUF of a
    language model. Any bytes at all end in one of these or in a header.
    """
    with _opened(path) as cursor:
        return _parse(path, cursor)


def check_part(path: Path) -> None:
    """Check a later part of a split GGUF, which has tensors and no facts of the model; raises like `read_header`."""
    with _opened(path) as cursor:
        _tables(cursor, first=False)


@contextmanager
def _opened(path: Path) -> Iterator[Cursor]:
    try:
        found = path.stat()
        if stat.S_ISDIR(found.st_mode):
            raise WeightsBad(f"{path} is a folder, not a GGUF file.")
        if not stat.S_ISREG(found.st_mode):
            raise WeightsBad(f"{path} is not a regular file.")
        with path.open("rb") as file:
            yield Cursor(file, os.fstat(file.fileno()).st_size)
    except (FileNotFoundError, NotADirectoryError) as error:
        broken = ": it is a link to a file that is gone" if path.is_symlink() else ""
        raise WeightsMissing(f"{path} is not there{broken}.") from error
    except Unusable as error:
        raise WeightsBad(f"{path} cannot be used: {error}.") from error
    except OSError as error:
        why = "permission denied" if error.errno == errno.EACCES else error.strerror or str(error)
        raise WeightsBad(f"{path} cannot be read: {why}.") from error


def _parse(path: Path, cursor: Cursor) -> GgufHeader:
    version, values, table, data_start = _tables(cursor, first=True)
    shards = _whole(values, "split.count", 1)
    return _header(path, cursor.size, version, values, table, data_start, max(shards, 1))


def _tables(cursor: Cursor, *, first: bool) -> tuple[int, Values, Tensors, int]:
    """Version, values, tensors and where their data starts; all of the data is there."""
    version = version_of(cursor)
    tensors, count = cursor.count(), cursor.count()
    if tensors > MAX_TENSORS or count > MAX_VALUES:
        raise Unusable(f"its header is damaged: it claims {tensors} tensors and {count} values")
    values = dict(value_at(cursor) for _ in range(count))
    shards = _whole(values, "split.count", 1)
    if first and "general.architecture" not in values and shards > 1:
        raise Unusable(f"it is part {_whole(values, 'split.no', 0) + 1} of {shards}: name the first part")
    table = tensor_table(cursor, tensors)
    alignment = _whole(values, "general.alignment", 32)
    if alignment < 1 or alignment & (alignment - 1):
        raise Unusable(f"its alignment is {alignment}, not a power of two")
    data_start = -(-cursor.offset // alignment) * alignment if tensors else cursor.offset
    if data_start + table.end > cursor.size:
        raise Unusable(f"it is cut short: {cursor.size} of {data_start + table.end} bytes")
    return version, values, table, data_start


def _header(
    path: Path, size: int, version: int, values: Values, table: Tensors, data_start: int, shards: int
) -> GgufHeader:
    arch = _text(values, "general.architecture")
    blocks, drafts = _block_counts(values, arch)
    layers = _Layers(values, arch, blocks - drafts)
    embedding = _whole(values, f"{arch}.embedding_length")
    heads = _per_layer(values, f"{arch}.attention.head_count", blocks, 0)
    kv_heads = _per_layer(values, f"{arch}.attention.head_count_kv", blocks, None) or heads
    share = embedding // max(heads, default=0) if any(heads) else 0
    attention, recurrent = layers.split(kv_heads)
    return GgufHeader(
        path=path,
        file_size=size,
        version=version,
        architecture=arch,
        name=_text(values, "general.name", ""),
        context_length=_whole(values, f"{arch}.context_length"),
        embedding_length=embedding,
        block_count=blocks,
        draft_layers=drafts,
        recurrent_layers=len(recurrent),
        kv_heads=tuple(kv_heads[i] for i in attention),
        draft_kv_heads=tuple(kv_heads[blocks - drafts :]),
        key_length=_whole(values, f"{arch}.attention.key_length", share),
        value_length=_whole(values, f"{arch}.attention.value_length", share),
        recurrent_layer_bytes=layers.state_bytes(embedding) if recurrent else 0,
        expert_layer_bytes=tuple(table.experts.get(i, 0) for i in range(blocks)) if table.experts else (),
        tensor_bytes=table.total,
        data_end=data_start + table.end,
        shards=shards,
    )


@dataclass(frozen=True, slots=True)
class _Layers:
    """Which trunk layers attend and which carry a recurrent state, by the engine's own rules."""

    values: Values
    arch: str
    trunk: int

    def split(self, kv_heads: list[int]) -> tuple[list[int], list[int]]:
        """The numbers of the attention layers and of the recurrent layers."""
        every = list(range(self.trunk))
        if not self._has_state():
            return [i for i in every if kv_heads[i]], []
        flags = self.values.get(f"{self.arch}.attention.recurrent_layers")
        interval = f"{self.arch}.full_attention_interval"
        if isinstance(flags, list) and len(flags) >= self.trunk:
            recurrent = [i for i in every if flags[i]]
        elif interval in self.values or self.arch in _INTERVAL_FAMILY:
            step = _whole(self.values, interval, 4)
            if step < 1:
                raise Unusable(f"its {interval} is {step}")
            recurrent = [i for i in every if (i + 1) % step]
        else:
            # Without a rule, no KV heads means a recurrent layer; where every layer has some, each does both.
            attending = [i for i in every if kv_heads[i]]
            return attending, every if len(attending) == self.trunk else [i for i in every if not kv_heads[i]]
        return [i for i in every if i not in set(recurrent) and kv_heads[i]], recurrent

    def state_bytes(self, embedding: int) -> int:
        """`4 * (inner * state + (kernel - 1) * (inner + 2 * groups * state))`: the state and the
        convolution's tail, both f32; families with `shortconv` have only a tail of the embedding's width.
        """
        conv = _whole(self.values, f"{self.arch}.shortconv.l_cache", 0)
        if conv:
            return 4 * embedding * (conv - 1)
        inner, state, groups, kernel = (
            _whole(self.values, f"{self.arch}.ssm.{key}", 0)
            for key in ("inner_size", "state_size", "group_count", "conv_kernel")
        )
        return 4 * (inner * state + max(kernel - 1, 0) * (inner + 2 * groups * state))

    def _has_state(self) -> bool:
        return any(f"{self.arch}.{key}" in self.values for key in ("ssm.conv_kernel", "shortconv.l_cache"))


def _block_counts(values: Values, arch: str) -> tuple[int, int]:
    blocks, drafts = _whole(values, f"{arch}.block_count"), _whole(values, f"{arch}.nextn_predict_layers", 0)
    if not 1 <= blocks <= _MAX_BLOCKS or drafts > blocks:
        raise Unusable(f"its header is damaged: it claims {blocks} blocks, {drafts} of them for drafts")
    return blocks, drafts


def _text(values: Values, key: str, default: str | None = None) -> str:
    value = values.get(key)
    if isinstance(value, str) and value:
        return value
    if default is None:
        raise Unusable(f"its header has no {key}")
    return default


def _whole(values: Values, key: str, default: int | None = None) -> int:
    value = values.get(key, default)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if key not in values:
        kind = values.get("general.type", "model")
        what = f"a {kind} file" if isinstance(kind, str) and kind != "model" else "not a language model"
        raise Unusable(f"its header has no {key}: it is {what}")
    raise Unusable(f"its {key} is not a whole number")


def _per_layer(values: Values, key: str, blocks: int, default: int | None) -> list[int]:
    """One number for each block, from a scalar or a list; a short list goes on with its last entry."""
    value = values.get(key, default)
    if value is None:
        return []
    if not isinstance(value, list):
        return [_whole(values, key, default)] * blocks
    if not value or not all(isinstance(item, int) and item >= 0 for item in value):
        raise Unusable(f"its {key} is not a list of whole numbers")
    return [*value, *[value[-1]] * (blocks - len(value))][:blocks]
