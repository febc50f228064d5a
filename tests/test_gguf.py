"""The header reader: what it says of good files and of bad ones, and that garbage never gets further."""

from __future__ import annotations

import errno
import os
import random
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from looprun_models.errors import WeightsBad, WeightsMissing
from looprun_models.gguf import GgufHeader, read_header

MIB, KIB = 1 << 20, 1 << 10
F32, F16, Q8_0, UNKNOWN = 0, 1, 8, 250

Tensor = tuple[str, Sequence[int], int, int]
"""Name, dimensions, type, bytes."""

QWEN36_35B: dict[str, Any] = {
    "general.architecture": "qwen35moe",
    "general.name": "Qwen3.6-35B-A3B",
    "qwen35moe.block_count": 41,
    "qwen35moe.nextn_predict_layers": 1,
    "qwen35moe.context_length": 262144,
    "qwen35moe.embedding_length": 2048,
    "qwen35moe.full_attention_interval": 4,
    "qwen35moe.attention.head_count": 16,
    "qwen35moe.attention.head_count_kv": 2,
    "qwen35moe.attention.key_length": 256,
    "qwen35moe.attention.value_length": 256,
    "qwen35moe.ssm.conv_kernel": 4,
    "qwen35moe.ssm.state_size": 128,
    "qwen35moe.ssm.group_count": 16,
    "qwen35moe.ssm.time_step_rank": 32,
    "qwen35moe.ssm.inner_size": 4096,
}
"""The published shape of the 35B-A3B, with its draft head."""

LLAMA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 4,
    "llama.context_length": 8192,
    "llama.embedding_length": 576,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
}


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(item: Any) -> bytes:
    """A value with its type, as GGUF writes it."""
    if isinstance(item, bool):
        return struct.pack("<I?", 7, item)
    if isinstance(item, int):
        return struct.pack("<Iq", 11, item) if item < 0 else struct.pack("<II", 4, item)
    if isinstance(item, str):
        return struct.pack("<I", 8) + text(item)
    if isinstance(item, float):
        return struct.pack("<If", 6, item)
    if item and isinstance(item[0], str):
        return struct.pack("<IIQ", 9, 8, len(item)) + b"".join(map(text, item))
    kind, code = (7, "?") if item and isinstance(item[0], bool) else (5, "i")
    return struct.pack(f"<IIQ{len(item)}{code}", 9, kind, len(item), *item)


def gguf(values: Mapping[str, Any], tensors: Sequence[Tensor] = (), version: int = 3, align: int = 32) -> bytes:
    """A whole file: the header and zeros for the weights."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(values))
    head += b"".join(text(key) + value(item) for key, item in values.items())
    end = offset = 0
    for name, dims, kind, size in tensors:
        head += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
        end = offset + size
        offset = -(-end // align) * align
    return head + bytes(-len(head) % align) + bytes(end) if tensors else head


def without(values: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: item for key, item in values.items() if key not in keys}


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., GgufHeader]:
    def from_bytes(*args: Any, **named: Any) -> GgufHeader:
        path = tmp_path / "model.gguf"
        path.write_bytes(args[0] if isinstance(args[0], bytes) else gguf(*args, **named))
        return read_header(path)

    return from_bytes


def test_published_shape_gives_the_published_sizes(read: Callable[..., GgufHeader]) -> None:
    header = read(QWEN36_35B)

    assert (header.architecture, header.name, header.version) == ("qwen35moe", "Qwen3.6-35B-A3B", 3)
    assert (header.block_count, header.draft_layers, header.context_length) == (41, 1, 262144)
    assert (header.attention_layers, header.recurrent_layers) == (10, 30)
    assert header.kv_heads == (2,) * 10
    assert header.is_hybrid
    assert header.has_draft_head
    assert header.recurrent_layer_bytes / MIB == pytest.approx(2.09, abs=0.01)
    assert header.recurrent_bytes / MIB == pytest.approx(62.8, abs=0.05)
    assert header.kv_bytes(1, "f16") == 20 * KIB
    assert header.kv_bytes(1, "q8_0") / KIB == pytest.approx(10.6, abs=0.05)
    assert header.kv_bytes(8192, "q8_0") / MIB == pytest.approx(85, abs=0.1)
    assert header.draft_kv_bytes(1) == 2 * KIB
    assert header.draft_kv_bytes(32, "q8_0") == 32 * 2 * KIB * 17 // 32


def test_checkpoint_carries_the_drafts_kv_only_when_drafting(read: Callable[..., GgufHeader]) -> None:
    header = read(QWEN36_35B)

    assert header.checkpoint_bytes(8192, drafting=False) / MIB == pytest.approx(62.8, abs=0.05)
    assert header.checkpoint_bytes(8192, drafting=True) - header.recurrent_bytes == 16 * MIB
    assert 64 * header.checkpoint_bytes(0, drafting=True) / (1 << 30) == pytest.approx(3.93, abs=0.01)


def test_drafting_server_holds_a_state_for_every_token_of_a_draft(read: Callable[..., GgufHeader]) -> None:
    header = read(QWEN36_35B)

    assert header.live_recurrent_bytes() == header.recurrent_bytes
    assert header.live_recurrent_bytes(3) == 4 * header.recurrent_bytes


def test_plain_transformer_has_no_state(read: Callable[..., GgufHeader]) -> None:
    header = read(LLAMA)

    assert (header.attention_layers, header.recurrent_layers, header.draft_layers) == (4, 0, 0)
    assert (header.key_length, header.value_length) == (64, 64)
    assert not header.is_hybrid
    assert not header.has_draft_head
    assert header.kv_bytes(10, "f16") == 10 * 4 * 3 * 128 * 2
    assert header.checkpoint_bytes(4096, drafting=True) == 0
    assert header.draft_kv_bytes(4096) == 0
    assert header.name == ""


def test_kv_heads_default_to_heads(read: Callable[..., GgufHeader]) -> None:
    assert read(without(LLAMA, "llama.attention.head_count_kv")).kv_heads == (9,) * 4


def test_key_length_wins_over_the_share_of_the_embedding(read: Callable[..., GgufHeader]) -> None:
    header = read(LLAMA | {"llama.attention.key_length": 192, "llama.attention.value_length": 128})

    assert header.kv_bytes(1, "f16") == 4 * 3 * 320 * 2


def test_interval_defaults_to_four_in_this_family(read: Callable[..., GgufHeader]) -> None:
    values = without(QWEN36_35B, "qwen35moe.full_attention_interval")

    assert read(values).recurrent_layers == 30
    assert read(values | {"qwen35moe.full_attention_interval": 2}).recurrent_layers == 20


def test_last_layer_of_an_interval_attends(read: Callable[..., GgufHeader]) -> None:
    values = QWEN36_35B | {"qwen35moe.block_count": 7, "qwen35moe.nextn_predict_layers": 0}
    header = read(values | {"qwen35moe.attention.head_count_kv": [1, 2, 3, 4, 5, 6, 7]})

    assert header.kv_heads == (4,)
    assert header.recurrent_layers == 6


def test_recurrent_layers_can_be_listed(read: Callable[..., GgufHeader]) -> None:
    flags = [True] * 38 + [False] * 3

    assert read(QWEN36_35B | {"qwen35moe.attention.recurrent_layers": flags}).recurrent_layers == 38


def test_kv_heads_of_each_layer(read: Callable[..., GgufHeader]) -> None:
    header = read(LLAMA | {"llama.attention.head_count_kv": [1, 2, 3, 4]})

    assert header.kv_heads == (1, 2, 3, 4)
    assert header.kv_bytes(1, "f16") == 10 * 128 * 2


def test_without_a_rule_layers_without_kv_heads_are_recurrent(read: Callable[..., GgufHeader]) -> None:
    values = {key.replace("llama", "jamba"): item for key, item in LLAMA.items()} | {
        "general.architecture": "jamba",
        "jamba.attention.head_count_kv": [0, 0, 8, 0],
        "jamba.ssm.conv_kernel": 4,
        "jamba.ssm.inner_size": 1024,
        "jamba.ssm.state_size": 16,
    }
    header = read(values)

    assert (header.kv_heads, header.recurrent_layers) == ((8,), 3)
    assert header.recurrent_layer_bytes == 4 * (1024 * 16 + 3 * 1024)
    both = read(values | {"jamba.attention.head_count_kv": 8})
    assert (both.attention_layers, both.recurrent_layers) == (4, 4)


def test_layers_without_kv_heads_are_not_recurrent_in_a_family_without_state(
    read: Callable[..., GgufHeader],
) -> None:
    header = read(LLAMA | {"llama.attention.head_count_kv": [3, 0, 3, 0]})

    assert (header.attention_layers, header.recurrent_layers) == (2, 0)


def test_short_convolutions_have_a_small_state(read: Callable[..., GgufHeader]) -> None:
    header = read(LLAMA | {"llama.attention.head_count_kv": [0, 3, 0, 3], "llama.shortconv.l_cache": 3})

    assert (header.recurrent_layers, header.recurrent_layer_bytes) == (2, 4 * 576 * 2)


def test_experts_are_summed_by_block(read: Callable[..., GgufHeader]) -> None:
    tensors: list[Tensor] = [
        ("blk.0.attn_q.weight", [64, 2], F16, 256),
        ("blk.0.ffn_up_exps.weight", [32, 4, 2], F16, 512),
        ("blk.0.ffn_down_exps.weight", [32, 4, 2], F32, 1024),
        ("blk.2.ffn_gate_up_exps.weight", [64, 3], Q8_0, 204),
        ("blk.2.ffn_up_shexp.weight", [64, 3], F32, 768),
    ]
    header = read(LLAMA, tensors)

    assert header.expert_layer_bytes == (1536, 0, 204, 0)
    assert header.tensor_bytes == 256 + 512 + 1024 + 204 + 768
    assert header.data_end == header.file_size
    assert read(LLAMA, tensors[:1]).expert_layer_bytes == ()


def test_unknown_tensor_type_ends_where_the_next_begins(read: Callable[..., GgufHeader]) -> None:
    header = read(LLAMA, [("a", [64], UNKNOWN, 96), ("b", [8], F32, 32)])

    assert header.tensor_bytes == 128


def test_alignment_of_the_file_is_followed(read: Callable[..., GgufHeader]) -> None:
    values = LLAMA | {"general.alignment": 256}
    header = read(values, [("a", [3], F32, 12), ("b", [3], F32, 12)], align=256)

    assert header.data_end == header.file_size
    with pytest.raises(WeightsBad, match="power of two"):
        read(LLAMA | {"general.alignment": 48})


def test_values_are_found_whatever_their_order(read: Callable[..., GgufHeader]) -> None:
    values = {"tokenizer.ggml.tokens": ["a", "", "ccc"] * 1000, "general.description": "x" * 100_000}
    backwards = dict(reversed(list(QWEN36_35B.items()))) | values

    assert read(values | backwards, version=2).recurrent_layers == 30


@pytest.mark.parametrize("longest", [3, 3_000_000])
def test_long_lists_of_texts_are_stepped_over(read: Callable[..., GgufHeader], longest: int) -> None:
    """Texts that straddle, or do not fit, the window through which the file is read."""
    tokens = ["t" * (index % 50) for index in range(60_000)] + ["x" * longest, "end"]
    values = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": [1] * 60_000} | LLAMA

    assert read(values, [("a", [8], F32, 32)]).tensor_bytes == 32


def test_big_vocabulary_is_read_past(tmp_path: Path) -> None:
    """As many tokens and merges as the real files have; how fast is the benchmark's business."""
    tokens = [f"token{index}" for index in range(250_000)]
    values = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": tokens} | LLAMA
    path = tmp_path / "big.gguf"
    path.write_bytes(gguf(values))

    assert read_header(path).architecture == "llama"


def test_weights_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sparse.gguf"
    path.write_bytes(gguf(LLAMA, [("a", [64], F32, 256)]))
    header = path.read_bytes()[:-256].replace(struct.pack("<Q", 64), struct.pack("<Q", 16 << 20), 1)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + 64 * MIB)
    read_bytes = 0
    plain_open = Path.open

    def counting(self: Path, *args: Any, **named: Any) -> Any:
        file = plain_open(self, *args, **named)
        plain_read = file.read

        class Counted:
            def read(self, count: int) -> bytes:
                nonlocal read_bytes
                read_bytes += count
                return bytes(plain_read(count))

            def __enter__(self) -> Counted:
                return self

            def __exit__(self, *_: object) -> None:
                file.close()

            def __getattr__(self, name: str) -> Any:
                return getattr(file, name)

        return Counted()

    monkeypatch.setattr(Path, "open", counting)

    assert read_header(path).tensor_bytes == 64 * MIB
    assert 0 < read_bytes <= 4 * MIB


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(WeightsMissing, match=r"none\.gguf is not there"):
        read_header(tmp_path / "none.gguf")
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(WeightsMissing):
        read_header(tmp_path / "file" / "none.gguf")


def test_link_to_a_file_that_is_gone(tmp_path: Path) -> None:
    link = tmp_path / "link.gguf"
    try:
        link.symlink_to(tmp_path / "blob")
    except OSError:
        pytest.skip("this account may not make links")

    with pytest.raises(WeightsMissing, match="link to a file that is gone"):
        read_header(link)


def test_folder(tmp_path: Path) -> None:
    with pytest.raises(WeightsBad, match="is a folder"):
        read_header(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.gguf"
    os.mkfifo(pipe)

    with pytest.raises(WeightsBad, match="not a regular file"):
        read_header(pipe)


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal is put in by hand: the administrator, who runs CI, is never refused."""
    path = tmp_path / "secret.gguf"
    path.write_bytes(gguf(LLAMA))

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)

    with pytest.raises(WeightsBad, match="permission denied"):
        read_header(path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"GG", "does not begin with 'GGUF'"),
        (b"GGUF", "cut short"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS pointer"),
        (b"\xef\xbb\xbf\n<!DOCTYPE html><html>", "HTML page"),
        (b"<html><head>", "HTML page"),
        (b"PK\x03\x04" + bytes(40), "zip or gzip"),
        (struct.pack("<Q", 70) + b'{"__metadata__": {}}', "safetensors"),
        (b'{"error": "not found"}', "JSON"),
        (bytes(4096), "zeros"),
        (b"tjgg" + bytes(40), "old GGML"),
        (b"\x7fELF" + bytes(40), "with b'.*ELF'"),
        (gguf(LLAMA, version=1), "version 1"),
        (gguf(LLAMA, version=4), "version 4"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (gguf({}), r"no general\.architecture"),
        (gguf(without(LLAMA, "llama.block_count")), r"no llama\.block_count: it is not a language model"),
        (gguf({"general.architecture": "clip", "general.type": "mmproj"}), "it is a mmproj file"),
        (gguf(LLAMA | {"llama.block_count": 0}), "0 blocks"),
        (gguf(LLAMA | {"llama.block_count": 4_000_000_000}), "4000000000 blocks"),
        (gguf(LLAMA | {"llama.nextn_predict_layers": 5}), "5 of them for drafts"),
        (gguf(LLAMA | {"llama.block_count": "four"}), "not a whole number"),
        (gguf(LLAMA | {"llama.context_length": -1}), "not a whole number"),
        (gguf(LLAMA | {"llama.embedding_length": 5.0}), "not a whole number"),
        (gguf(LLAMA | {"llama.attention.head_count_kv": [1, -1]}), "not a list of whole numbers"),
        (gguf(QWEN36_35B | {"qwen35moe.full_attention_interval": 0}), "full_attention_interval is 0"),
        (gguf({"split.no": 1, "split.count": 3}), "part 2 of 3: name the first"),
    ],
)
def test_what_is_not_a_model_is_named(read: Callable[..., GgufHeader], content: bytes, says: str) -> None:
    with pytest.raises(WeightsBad, match=says) as caught:
        read(content)

    assert "model.gguf" in str(caught.value)


def test_first_part_of_a_split_file_says_how_many_there_are(read: Callable[..., GgufHeader]) -> None:
    assert read(LLAMA | {"split.no": 0, "split.count": 3}).shards == 3
    assert read(LLAMA).shards == 1


def test_file_that_ends_early_is_told_in_bytes(read: Callable[..., GgufHeader]) -> None:
    whole = gguf(LLAMA, [("a", [64], F32, 256)])

    with pytest.raises(WeightsBad, match=f"cut short: {len(whole) - 1} of {len(whole)} bytes"):
        read(whole[:-1])
    assert read(whole + b"padding").data_end == len(whole)


def test_header_cut_anywhere_is_told(read: Callable[..., GgufHeader]) -> None:
    header = gguf(LLAMA | {"tokenizer.ggml.tokens": ["a", "bb"]})
    assert read(header).block_count == 4

    for length in range(4, len(header)):
        with pytest.raises(WeightsBad, match="cut short"):
            read(header[:length])


@pytest.mark.parametrize("count", [1 << 31, (1 << 64) - 1])
@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("tensors", "it claims .* tensors"),
        ("values", "and .* values"),
        ("key", "a name of"),
        ("texts", "a list of .* texts"),
        ("numbers", "runs past the end"),
        ("text", "runs past the end"),
    ],
)
def test_absurd_counts_are_refused_and_not_walked(
    read: Callable[..., GgufHeader], where: str, says: str, count: int
) -> None:
    """The reason shows that the count itself was refused: in a large file a loop would go on for minutes."""
    start = b"GGUF" + struct.pack("<I", 3)
    packed = struct.pack("<Q", count)
    one = start + struct.pack("<QQ", 0, 1)
    content = {
        "tensors": start + packed + struct.pack("<Q", 0),
        "values": start + struct.pack("<Q", 0) + packed,
        "key": one + packed,
        "texts": one + text("k") + struct.pack("<II", 9, 8) + packed,
        "numbers": one + text("k") + struct.pack("<II", 9, 10) + packed,
        "text": one + text("general.name") + struct.pack("<I", 8) + packed,
    }[where]

    with pytest.raises(WeightsBad, match=says):
        read(content + bytes(1000))


def test_any_garbage_ends_in_a_header_or_in_weights_bad(tmp_path: Path) -> None:
    tensors: list[Tensor] = [("blk.0.ffn_up_exps.weight", [32, 4], F16, 256), ("b", [8], UNKNOWN, 64)]
    lists = {"tokenizer.ggml.tokens": ["a", "bb"] * 9, "qwen35moe.attention.head_count_kv": [2] * 41}
    good = gguf(QWEN36_35B | lists, tensors)
    path = tmp_path / "model.gguf"
    chance = random.Random(20260730)
    header_end = len(good) - 400
    outcomes = {"header": 0, "bad": 0}
    for turn in range(1500):
        mutant = bytearray(good)
        for _ in range(chance.choice([1, 1, 2, 5])):
            at = chance.randrange(4, header_end)
            width = chance.choice([1, 2, 4, 8])
            mutant[at : at + width] = chance.choice([bytes(width), b"\xff" * width, chance.randbytes(width)])
        if turn % 3 == 0:
            del mutant[chance.randrange(4, len(mutant)) :]
        path.write_bytes(mutant)
        try:
            header = read_header(path)
        except WeightsBad:
            outcomes["bad"] += 1
        else:
            outcomes["header"] += 1
            assert header.kv_bytes(4096, "q8_0") >= 0
            assert header.checkpoint_bytes(4096, drafting=True) >= 0

    assert min(outcomes.values()) > 150, outcomes


def test_random_bytes_after_the_magic(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    chance = random.Random(7)
    for _ in range(300):
        path.write_bytes(b"GGUF\x03\0\0\0" + chance.randbytes(chance.randrange(400)))
        with pytest.raises(WeightsBad):
            read_header(path)


def test_file_written_by_the_reference_library(tmp_path: Path) -> None:
    """Every kind of value, and quantized tensors, as the `gguf` package lays them out."""
    import numpy
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    path = tmp_path / "written.gguf"
    writer = GGUFWriter(path, "qwen35")
    writer.add_name("written")
    writer.add_block_count(5)
    writer.add_uint32("qwen35.nextn_predict_layers", 1)
    writer.add_context_length(4096)
    writer.add_embedding_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_key_length(32)
    writer.add_value_length(32)
    writer.add_uint64("extra.u64", 1 << 40)
    writer.add_int8("extra.i8", -1)
    writer.add_float64("extra.f64", 0.5)
    writer.add_bool("extra.bool", True)
    writer.add_token_list(["a", "b"])
    for key, number in {"conv_kernel": 4, "state_size": 8, "group_count": 1, "inner_size": 16}.items():
        writer.add_uint32(f"qwen35.ssm.{key}", number)
    for index, kind in enumerate((GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0)):
        data = quantize(numpy.ones((3, 64), dtype=numpy.float32), kind)
        writer.add_tensor(f"blk.{index}.attn_q.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    header = read_header(path)

    assert (header.attention_layers, header.recurrent_layers, header.draft_layers) == (1, 3, 1)
    assert header.recurrent_layer_bytes == 4 * (16 * 8 + 3 * (16 + 2 * 8))
    assert header.tensor_bytes == 3 * 2 * (34 + 18)
    with path.open("rb+") as file:
        file.truncate(header.data_end - 1)
    with pytest.raises(WeightsBad, match="cut short"):
        read_header(path)


def test_block_sizes_are_those_of_the_reference_library() -> None:
    from gguf import GGML_QUANT_SIZES

    from looprun_models.ggufformat import _BLOCKS

    assert {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}.items() <= _BLOCKS.items()


@pytest.mark.parametrize(
    ("name", "drafts", "experts"),
    [("tiny-qwen35", 0, False), ("tiny-qwen35-mtp", 1, False), ("tiny-qwen35moe-mtp", 1, True)],
)
def test_tiny_models(tiny_gguf: Callable[[str], Path], name: str, drafts: int, experts: bool) -> None:
    header = read_header(tiny_gguf(name))

    assert (header.attention_layers, header.recurrent_layers, header.draft_layers) == (1, 3, drafts)
    assert header.kv_bytes(4096, "f16") == MIB
    assert header.has_draft_head is bool(drafts)
    assert all(header.expert_layer_bytes) is True
    assert bool(header.expert_layer_bytes) is experts
    assert header.data_end == header.file_size


def test_wide_model_has_what_engines_report(tiny_gguf: Callable[[str], Path]) -> None:
    """The engine's log lines for this file, context 4096: KV 8.00 MiB, 4.25 in q8_0; the draft's KV 8.00;
    recurrent state 6.28, and 25.12 with drafts of 3; a checkpoint of 1794 tokens 9.82.
    """
    header = read_header(tiny_gguf("wide-qwen35-mtp"))

    assert header.kv_bytes(4096, "f16") == 8 * MIB
    assert header.kv_bytes(4096, "q8_0") == 4.25 * MIB
    assert header.draft_kv_bytes(4096) == 8 * MIB
    assert header.recurrent_bytes / MIB == pytest.approx(6.28, abs=0.005)
    assert header.live_recurrent_bytes(3) / MIB == pytest.approx(25.12, abs=0.01)
    assert header.checkpoint_bytes(1794, drafting=True) / MIB == pytest.approx(9.82, rel=0.005)
