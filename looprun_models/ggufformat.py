"""The GGUF file format, as far as a header goes: a cursor over the bytes, values, and the table of tensors.

What the values mean is `gguf`'s business. Any bytes at all end in a value or in `Unusable`, which says why.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, TypeAlias

Values: TypeAlias = Mapping[str, Any]

_WINDOW = 1 << 20
MAX_VALUES = 1 << 17
MAX_TENSORS = 1 << 20
_MAX_STRINGS = 1 << 22
_MAX_TEXT = 1 << 16
_MAX_KEPT_ARRAY = 1 << 13

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_SCALARS = {kind: struct.Struct("<" + code) for kind, code in enumerate("BbHhIif?")} | {
    kind: struct.Struct("<" + code) for kind, code in zip((10, 11, 12), "Qqd", strict=True)
}
_STRING, _ARRAY = 8, 9

# ggml type: (elements, bytes) of a block. A type that is not here is not an error: engines learn new ones.
_BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 40),
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292),
    16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82),
    23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2),
    34: (256, 54), 35: (256, 66), 39: (32, 17), 40: (64, 36), 41: (128, 18), 42: (64, 18),
}  # fmt: skip
_EXPERTS = re.compile(rb"blk\.(\d{1,4})\.ffn_(?:up|down|gate|gate_up)_(?:ch)?exps\b")


class Unusable(Exception):
    """Why these bytes are not a GGUF that can be served."""


class Cursor:
    """A place in the file, with the bytes around it.

    Not a memory map: a file that shrinks under a map ends the process with SIGBUS instead of an error.
    """

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.size = size
        self._file = file
        self._window = b""
        self._start = 0
        self._at = 0

    @property
    def offset(self) -> int:
        return self._start + self._at

    def take(self, count: int) -> bytes:
        if self._at + count > len(self._window):
            self._refill(count)
        taken = self._window[self._at : self._at + count]
        self._at += count
        return taken

    def skip(self, count: int) -> None:
        self._at += count
        self._check(0)

    def number(self, layout: struct.Struct) -> Any:
        return layout.unpack(self.take(layout.size))[0]

    def count(self) -> int:
        """A number of things, as the format writes all of them."""
        number: int = self.number(_U64)
        return number

    def text(self) -> bytes:
        length = self.number(_U64)
        if length > _MAX_TEXT:
            raise Unusable(f"its header is damaged: a name of {length} bytes at offset {self.offset}")
        return self.take(length)

    def skip_strings(self, count: int) -> None:
        """Real files hold hundreds of thousands of tokens and merges: the loop only steps over them."""
        if count > _MAX_STRINGS:
            raise Unusable(f"its header is damaged: a list of {count} texts at offset {self.offset}")
        unpack = _U64.unpack_from
        while count:
            window, at = self._window, self._at
            try:
                while count:
                    at += 8 + unpack(window, at)[0]
                    count -= 1
            except (struct.error, OverflowError):
                pass
            self._at = at
            if count:
                self._refill(8)
        self._check(0)

    def _check(self, count: int) -> None:
        if self.offset + count > self.size:
            raise Unusable(f"its header is cut short or damaged: it runs past the end, at {self.size} bytes")

    def _refill(self, count: int) -> None:
        self._check(count)
        self._start, self._at = self.offset, 0
        self._file.seek(self._start)
        self._window = self._file.read(max(count, _WINDOW))
        if len(self._window) < count:
            raise Unusable("it became shorter while it was read")


@dataclass(slots=True)
class Tensors:
    """Sums over the tensor table; offsets count from the start of the data section."""

    end: int = 0
    total: int = 0
    experts: dict[int, int] = field(default_factory=dict)


def version_of(cursor: Cursor) -> int:
    """Check the magic; what usually lies under a model's name instead is told by its first bytes."""
    if cursor.size == 0:
        raise Unusable("it is empty")
    start = cursor.take(min(cursor.size, 256))
    if not start.startswith(b"GGUF"):
        raise Unusable(_kind_of(start))
    cursor.skip(4 - len(start))
    version: int = cursor.number(_U32)
    if version and version % 0x10000 == 0:
        raise Unusable("it is a big-endian GGUF, which this machine's engine does not read")
    if version not in (2, 3):
        raise Unusable(f"it is GGUF version {version}; versions 2 and 3 are known")
    return version


def _kind_of(start: bytes) -> str:
    words = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if not start.strip(b"\0"):
        return "it begins with zeros, as a file does that was reserved and never filled"
    if words.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer, a note of where the weights are, not the weights"
    if words.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        return "it is an HTML page, such as a login or error page saved under this name"
    if start.startswith((b"PK\x03\x04", b"\x1f\x8b")):
        return "it is a zip or gzip archive (perhaps a PyTorch checkpoint), not a GGUF"
    if start[8:9] == b"{" and start[:8].rstrip(b"\0") and start[5:8] == bytes(3):
        return "it is a safetensors file, not a GGUF"
    if words.startswith(b"{"):
        return "it is a JSON text, such as a server's error reply saved under this name"
    if start[:4] in (b"lmgg", b"fmgg", b"tjgg", b"algg"):
        return "it is in the old GGML format that came before GGUF"
    return f"it does not begin with 'GGUF' but with {start[:4]!r}"


def value_at(cursor: Cursor) -> tuple[str, Any]:
    """One key with its value, or None for what nobody here asks for (long texts and lists)."""
    key = cursor.text().decode("utf-8", "replace")
    kind = cursor.number(_U32)
    if kind in _SCALARS:
        return key, cursor.number(_SCALARS[kind])
    if kind == _STRING:
        if key.startswith("general."):
            return key, _kept_text(cursor)
        cursor.skip(cursor.number(_U64))
        return key, None
    if kind == _ARRAY:
        return key, _array(cursor, key)
    raise Unusable(f"its header is damaged: {key[:80]!r} is of the unknown type {kind}")


def _kept_text(cursor: Cursor) -> str | None:
    """Descriptions can be long and are not wanted; names are short."""
    length = cursor.number(_U64)
    if length > _MAX_TEXT:
        cursor.skip(length)
        return None
    return cursor.take(length).decode("utf-8", "replace")


def _array(cursor: Cursor, key: str) -> list[Any] | None:
    kind, count = cursor.number(_U32), cursor.number(_U64)
    if kind == _STRING:
        cursor.skip_strings(count)
        return None
    layout = _SCALARS.get(kind)
    if layout is None:
        raise Unusable(f"its header is damaged: the list {key[:80]!r} is of the unknown type {kind}")
    if count > _MAX_KEPT_ARRAY:
        cursor.skip(count * layout.size)
        return None
    return [item for (item,) in layout.iter_unpack(cursor.take(count * layout.size))]


def tensor_table(cursor: Cursor, count: int) -> Tensors:
    table = Tensors()
    sized = []
    for name, dims, kind, offset in (_tensor(cursor) for _ in range(count)):
        per_block, block_bytes = _BLOCKS.get(kind, (0, 0))
        size = -(-math.prod(dims) // per_block) * block_bytes if per_block else None
        sized.append((offset, size, name))
    sized.sort(key=lambda tensor: tensor[0])
    following = [offset for offset, _, _ in [*sized, *sized[-1:]][1:]]
    for (offset, size, name), after in zip(sized, following, strict=True):
        # A type that is not known ends where the next tensor begins; only the last has to be taken on trust.
        known = size if size is not None else after - offset
        table.total += known
        table.end = max(table.end, offset + known)
        expert = _EXPERTS.match(name)
        if expert:
            layer = int(expert[1])
            table.experts[layer] = table.experts.get(layer, 0) + known
    return table


def _tensor(cursor: Cursor) -> tuple[bytes, tuple[int, ...], int, int]:
    name = cursor.text()
    rank = cursor.number(_U32)
    if rank > 4:
        raise Unusable(f"its header is damaged: the tensor {name[:80]!r} has {rank} dimensions")
    *dims, kind, offset = struct.unpack(f"<{rank}QIQ", cursor.take(8 * rank + 12))
    return name, tuple(dims), kind, offset
