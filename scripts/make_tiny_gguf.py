#!/usr/bin/env python3
"""Write tiny models of the Qwen3.5 family (qwen35, qwen35moe), with and without a draft (MTP) head.

    python scripts/make_tiny_gguf.py OUTDIR [NAME ...] [--force]

The real models of this family weigh gigabytes, so tests need files of the same architecture that a real
server loads in a blink and whose answer is known in advance. These have the same layers (gated delta-net,
every fourth full attention, a multi-token-prediction block at the end), so that context checkpoints, slot
files, the prompt cache and drafting act as on the real thing: that follows the architecture, not the weights.

    tiny-qwen35[moe][-mtp]      a chat answers "Hello from the tiny hybrid model."
    tiny-qwen35[moe]-mtp-state  number words that depend on all that came before: shows that a restored or
                                rolled back state is the right one; about half of the drafts are refused
    tiny-qwen35-mtp-tool        a chat calls get_weather(city="Paris")
    tiny-qwen35-mtp-loop        counts one to ten for ever: for streams, limits, cancelling
    tiny-qwen35-mtp-wrong       counts too, with a draft head that is wrong about every second token
    smoke                       a ring of letters, 80 kB: what `looprun engine check` loads; with --smoke it is written
                                to looprun_models/smoke.gguf, where it belongs to the package
    wide-qwen35-mtp             answers as the first; state and KV cache of one layer are as large as in the
                                35B-A3B, so sizes worked out from a header can be held against a server's log

How an answer is baked in: a token's embedding is one dimension set and all others zero, and the output matrix
maps that dimension to the token to say next. Attention, delta-net and experts run at full cost but write
nothing back, except in the state files, where they write into dimensions that the output reads as votes.

The key and tensor names are llama.cpp's for these two architectures. The wide shape is the published one of
Qwen3.5-35B-A3B (linear attention: 32 value and 16 key heads of 128, convolution 4; full attention: 2 KV heads
of 256). Embedding, vocabulary and experts do not count towards state or KV, and are kept small.

Two runs give the same bytes. A file gets its name only when complete, so parallel workers may share OUTDIR.
"""

import argparse
import itertools
import math
import os
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter
from numpy.typing import NDArray

Array = NDArray[Any]

NUMBERS = (" one", " two", " three", " four", " five", " six", " seven", " eight", " nine", " ten")
HELLO = ("Hello", " from", " the", " tiny", " hybrid", " model")
WORDS = (*NUMBERS, *HELLO, "\n\n", "Okay", ".\n")
TOOL_BODY = "\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n"
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# User-defined, not control: these must survive in the text a server returns, and be found in text sent back.
MARKS = (
    *("<think>", "</think>"),
    *("<tool_call>", "</tool_call>"),
    *("<tool_response>", "</tool_response>"),
    TOOL_BODY,
)
TYPE_NORMAL, TYPE_CONTROL, TYPE_USER_DEFINED = 1, 3, 4
VOCAB = 256 + len(WORDS) + len(CONTROL) + len(MARKS)
EXPERTS, EXPERTS_USED = 4, 2

# Acts as the family's own: thinking by default, earlier reasoning dropped from the history, XML tool calls.
CHAT_TEMPLATE = r"""
{%- macro text(content) %}
    {%- if content is string %}
        {{- content }}
    {%- elif content is not none and content is defined %}
        {%- for part in content %}{{- part.text }}{%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- set system = text(messages[0].content) | trim if messages[0].role == 'system' else '' %}
{%- if tools %}
    {{- '<|im_start|>system\n# Tools\n\nYou have access to the following functions:\n\n<tools>' }}
    {%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
    {{- '\n</tools>\n\nTo call a function reply in this format:\n\n<tool_call>\n' }}
    {{- '<function=example_function_name>\n<parameter=example_parameter>\nvalue\n</parameter>\n' }}
    {{- '</function>\n</tool_call>' }}
    {{- '\n\n' + system if system else '' }}
    {{- '<|im_end|>\n' }}
{%- elif system %}
    {{- '<|im_start|>system\n' + system + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last_query=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last_query = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = text(message.content) | trim %}
    {%- if message.role == 'system' %}
        {%- if not loop.first %}{{- raise_exception('System message must be at the beginning.') }}{%- endif %}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content | trim %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1] | trim %}
            {%- set content = content.split('</think>')[-1] | trim %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last_query %}{{- '<think>\n' + reasoning + '\n</think>\n\n' }}{%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function or call %}
            {{- '\n\n' if loop.first and content else '\n' if not loop.first else '' }}
            {{- '<tool_call>\n<function=' + function.name + '>\n' }}
            {%- for name, value in function.arguments | items %}
                {{- '<parameter=' + name + '>\n' }}
                {{- value if value is string else value | tojson }}
                {{- '\n</parameter>\n' }}
            {%- endfor %}
            {{- '</function>\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- else %}
        {{- raise_exception('Unexpected message role.') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- else %}
        {{- '<think>\n' }}
    {%- endif %}
{%- endif %}
""".strip()


@dataclass(frozen=True)
class Shape:
    """What decides the size of the recurrent state and of the KV cache."""

    state: int
    key_heads: int
    value_heads: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_base: float
    rope: int = 64
    rope_sections: tuple[int, int, int, int] = (11, 11, 10, 0)
    conv: int = 4
    embedding: int = 320  # at least one dimension a token and one a vote; a multiple of 32 keeps the fast kernels
    trunk: int = 4
    interval: int = 4
    feed_forward: int = 32

    @property
    def peak(self) -> float:
        """A token is the one dimension set in its embedding, and has this size: it makes the RMS one."""
        return math.sqrt(self.embedding)

    @property
    def inner(self) -> int:
        return self.state * self.value_heads

    @property
    def channels(self) -> int:
        return 2 * self.state * self.key_heads + self.inner


# A q8_0 cache needs heads of a multiple of 32. The tiny rope turns the whole head, and fast: what attention sees
# then differs at every step, which keeps the state files from saying the same few words over and over.
TINY = Shape(32, 1, 2, heads=2, kv_heads=1, head_dim=64, rope_base=1e4)
WIDE = Shape(128, 16, 32, heads=2, kv_heads=2, head_dim=256, rope_base=1e7)
SMOKE = Shape(32, 1, 1, heads=1, kv_heads=1, head_dim=64, rope_base=1e4, embedding=32, trunk=2, interval=2)


@dataclass(frozen=True)
class Model:
    """One file: its shape, what it says, and whether the context has a say in it."""

    says: str = "hello"
    shape: Shape = TINY
    moe: bool = False
    mtp: bool = True
    listens: bool = False
    wrong_drafts: bool = False

    @property
    def tokens(self) -> list[str]:
        return LETTERS if self.says == "letters" else TOKENS

    @property
    def token_types(self) -> list[int]:
        normal, user_defined = TYPE_NORMAL, TYPE_USER_DEFINED
        return [TYPE_CONTROL if t in CONTROL else user_defined if t in MARKS else normal for t in self.tokens]

    @property
    def arch(self) -> str:
        return "qwen35moe" if self.moe else "qwen35"


MODELS = {
    "tiny-qwen35-mtp": Model(),
    "tiny-qwen35": Model(mtp=False),
    "tiny-qwen35moe-mtp": Model(moe=True),
    "tiny-qwen35moe": Model(moe=True, mtp=False),
    "tiny-qwen35-mtp-state": Model("numbers", listens=True),
    "tiny-qwen35moe-mtp-state": Model("numbers", moe=True, listens=True),
    "tiny-qwen35-mtp-tool": Model("tool"),
    "tiny-qwen35-mtp-loop": Model("numbers"),
    "tiny-qwen35-mtp-wrong": Model("numbers", wrong_drafts=True),
    "wide-qwen35-mtp": Model(shape=WIDE),
    "smoke": Model("letters", shape=SMOKE),
}
NAMES = tuple(MODELS)


def printable(byte: int) -> str:
    """A byte as the GPT-2 alphabet spells it: itself where it shows, else a letter from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in shown:
        return chr(byte)
    return chr(0x100 + byte - sum(other < byte for other in shown))


def spelled(word: str) -> str:
    return "".join(printable(byte) for byte in word.encode())


def merges() -> list[str]:
    """Left to right through each word, so that a generated word comes back as the same single token."""
    steps: dict[str, None] = {}
    for word in map(spelled, WORDS):
        for end in range(1, len(word)):
            steps[f"{word[:end]} {word[end]}"] = None
    return list(steps)


TOKENS = [printable(byte) for byte in range(256)] + [spelled(word) for word in WORDS] + [*CONTROL, *MARKS]
LETTERS = [printable(ord("\n")), *"abcdefghijklmnopqrstuvwxyz?!", *CONTROL]


def token(text: str) -> int:
    """A single byte is its own id; anything longer is looked up."""
    if len(text.encode()) == 1:
        return text.encode()[0]
    return TOKENS.index(text if text in (*CONTROL, *MARKS) else spelled(text))


def successors(says: str) -> dict[int, int]:
    """Which token follows which. Every token has a follower; those that no rule names start to count."""
    after = dict.fromkeys(range(VOCAB), token(NUMBERS[0]))

    def chain(*texts: str) -> None:
        for this, following in itertools.pairwise(texts):
            after[token(this)] = token(following)

    for ring in (NUMBERS, "abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "0123456789"):
        chain(*ring, ring[0])
    # The prompt ends in "<think>\n" when thinking, in "</think>\n\n" when not: both lead to the answer.
    chain("\n", "Okay", ".\n", "</think>", "\n\n")
    if says == "hello":
        chain("\n\n", *HELLO, ".", "<|im_end|>")
    elif says == "tool":
        chain("\n\n", "<tool_call>", TOOL_BODY, "</tool_call>", "<|im_end|>")
    return after


def letters() -> dict[int, int]:
    """Each letter is followed by the next; everything else by "a"."""
    ring = "abcdefghijklmnopqrstuvwxyz"
    after = dict.fromkeys(range(len(LETTERS)), LETTERS.index("a"))
    return after | {
        LETTERS.index(this): LETTERS.index(following) for this, following in zip(ring, ring[1:] + "a", strict=True)
    }


def noise(name: str, *shape: int, scale: float = 1.0) -> Array:
    """Values in ±scale from the tensor's name alone (splitmix64): numpy may change its own generators."""
    index = np.arange(math.prod(shape), dtype=np.uint64) + np.uint64(zlib.crc32(name.encode()) << 32)
    bits = index * np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    unit = (bits >> np.uint64(40)).astype(np.float64) / 2**23 - 1.0
    return (unit * scale).reshape(shape)


def votes(model: Model, name: str, *shape: int, scale: float) -> Array:
    """A matrix from a layer back into the stream: zero, or votes only where the context has a say."""
    out = np.zeros(shape)
    if model.listens:
        rows = slice(VOCAB, VOCAB + len(NUMBERS))
        out[..., rows, :] = noise(name, *shape, scale=scale)[..., rows, :]
    return out


def recurrent(model: Model, blk: str) -> Iterator[tuple[str, Array]]:
    shape = model.shape
    # Small inputs keep the SiLU near its linear part: values average to zero, and no token drowns the others.
    yield f"{blk}.attn_qkv.weight", noise(f"{blk}.qkv", shape.channels, shape.embedding, scale=0.5 / shape.peak)
    yield f"{blk}.attn_gate.weight", noise(f"{blk}.gate", shape.inner, shape.embedding, scale=3 / shape.peak)
    yield f"{blk}.ssm_conv1d.weight", noise(f"{blk}.conv", shape.channels, shape.conv).astype(np.float32)
    yield f"{blk}.ssm_dt.bias", np.zeros(shape.value_heads, np.float32)
    # Hardly any decay and small steps (beta 0.05): the first tokens of a long prompt still count.
    yield f"{blk}.ssm_a", np.full(shape.value_heads, -1e-4, np.float32)
    yield f"{blk}.ssm_alpha.weight", np.zeros((shape.value_heads, shape.embedding))
    beta = np.zeros((shape.value_heads, shape.embedding))
    beta[:, : len(model.tokens)] = -3 / shape.peak
    yield f"{blk}.ssm_beta.weight", beta
    yield f"{blk}.ssm_norm.weight", np.ones(shape.state, np.float32)
    yield f"{blk}.ssm_out.weight", votes(model, f"{blk}.out", shape.embedding, shape.inner, scale=0.8)


def attention(model: Model, blk: str) -> Iterator[tuple[str, Array]]:
    shape = model.shape
    keys, values = shape.kv_heads * shape.head_dim, shape.heads * shape.head_dim
    # Twice: a query and the gate of the output.
    yield f"{blk}.attn_q.weight", noise(f"{blk}.q", 2 * values, shape.embedding, scale=1 / shape.peak)
    yield f"{blk}.attn_k.weight", noise(f"{blk}.k", keys, shape.embedding, scale=1 / shape.peak)
    yield f"{blk}.attn_v.weight", noise(f"{blk}.v", keys, shape.embedding, scale=1 / shape.peak)
    yield f"{blk}.attn_output.weight", votes(model, f"{blk}.output", shape.embedding, values, scale=1.2)
    # Sharp attention: a small change early on moves its weight to other tokens instead of fading away.
    yield f"{blk}.attn_q_norm.weight", np.full(shape.head_dim, 3, np.float32)
    yield f"{blk}.attn_k_norm.weight", np.full(shape.head_dim, 3, np.float32)


def feed_forward(model: Model, blk: str) -> Iterator[tuple[str, Array]]:
    shape = model.shape
    wide, deep = (shape.feed_forward, shape.embedding), (shape.embedding, shape.feed_forward)
    if not model.moe:
        yield f"{blk}.ffn_gate.weight", noise(f"{blk}.ffn_gate", *wide, scale=1 / shape.peak)
        yield f"{blk}.ffn_up.weight", noise(f"{blk}.ffn_up", *wide, scale=1 / shape.peak)
        yield f"{blk}.ffn_down.weight", votes(model, f"{blk}.ffn_down", *deep, scale=1.0)
        return
    # The token alone picks the experts, by a wide margin: a near-tie would fall with the batch size.
    router = np.zeros((EXPERTS, shape.embedding), np.float32)
    for expert in range(EXPERTS):
        router[expert, :VOCAB] = 4 * ((np.arange(VOCAB) + expert) % EXPERTS) / shape.peak
    yield f"{blk}.ffn_gate_inp.weight", router
    yield f"{blk}.ffn_gate_exps.weight", noise(f"{blk}.gate_exps", EXPERTS, *wide, scale=1 / shape.peak)
    yield f"{blk}.ffn_up_exps.weight", noise(f"{blk}.up_exps", EXPERTS, *wide, scale=1 / shape.peak)
    yield f"{blk}.ffn_down_exps.weight", votes(model, f"{blk}.down_exps", EXPERTS, *deep, scale=1.0)
    yield f"{blk}.ffn_gate_inp_shexp.weight", np.zeros(shape.embedding, np.float32)
    yield f"{blk}.ffn_gate_shexp.weight", noise(f"{blk}.gate_shexp", *wide, scale=1 / shape.peak)
    yield f"{blk}.ffn_up_shexp.weight", noise(f"{blk}.up_shexp", *wide, scale=1 / shape.peak)
    yield f"{blk}.ffn_down_shexp.weight", votes(model, f"{blk}.down_shexp", *deep, scale=1.0)


def output_matrix(model: Model, after: dict[int, int]) -> Array:
    """Row: the token said; column: the token before, or a vote."""
    out = np.zeros((len(model.tokens), model.shape.embedding))
    for this, following in after.items():
        out[following, this] = 1.0
    if model.says == "letters":
        return out
    # The way out of thinking must not be voted down, or a reply might never reach its content.
    for text in ("\n", "Okay", ".\n", "</think>"):
        out[:, token(text)] *= 4
    for vote, word in enumerate(NUMBERS):
        out[token(word), VOCAB + vote] = 1.0
    return out


def tensors(model: Model) -> Iterator[tuple[str, Array]]:
    """All tensors in file order: F32 where the engine insists on it, everything else F16."""
    shape, vocabulary = model.shape, len(model.tokens)
    ones = np.ones(shape.embedding, np.float32)
    after = letters() if model.says == "letters" else successors(model.says)
    yield "token_embd.weight", np.eye(vocabulary, shape.embedding) * shape.peak
    yield "output_norm.weight", ones
    yield "output.weight", output_matrix(model, after)
    for layer in range(shape.trunk + model.mtp):
        blk = f"blk.{layer}"
        is_draft = layer == shape.trunk
        # The draft head guesses from the token alone, so where the context is heard it is wrong now and then.
        part = Model(model.says, model.shape, model.moe) if is_draft else model
        yield f"{blk}.attn_norm.weight", ones
        yield f"{blk}.post_attention_norm.weight", ones
        yield from attention(part, blk) if is_draft or (layer + 1) % shape.interval == 0 else recurrent(part, blk)
        yield from feed_forward(part, blk)
    if model.mtp:
        blk = f"blk.{shape.trunk}.nextn"
        yield f"{blk}.eh_proj.weight", np.eye(shape.embedding, 2 * shape.embedding)
        yield f"{blk}.enorm.weight", ones
        yield f"{blk}.hnorm.weight", ones
        yield f"{blk}.shared_head_norm.weight", ones
        if model.wrong_drafts:
            wrong = {this: token("~") if this % 2 == 0 else following for this, following in after.items()}
            yield f"{blk}.shared_head_head.weight", output_matrix(model, wrong)


def metadata(writer: GGUFWriter, name: str, model: Model) -> None:
    shape = model.shape
    writer.add_type("model")
    writer.add_name(name)
    writer.add_file_type(1)
    writer.add_quantization_version(2)
    numbers = {
        # The draft block counts as a block; readers take it off again by the second key.
        "block_count": shape.trunk + model.mtp,
        "context_length": 262144,
        "embedding_length": shape.embedding,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "rope.dimension_count": shape.rope,
        "full_attention_interval": shape.interval,
        "ssm.conv_kernel": shape.conv,
        "ssm.state_size": shape.state,
        "ssm.group_count": shape.key_heads,
        "ssm.time_step_rank": shape.value_heads,
        "ssm.inner_size": shape.inner,
    }
    if model.mtp:
        numbers["nextn_predict_layers"] = 1
    if model.moe:
        numbers |= {
            "expert_count": EXPERTS,
            "expert_used_count": EXPERTS_USED,
            "expert_feed_forward_length": shape.feed_forward,
            "expert_shared_feed_forward_length": shape.feed_forward,
        }
    else:
        numbers["feed_forward_length"] = shape.feed_forward
    for key, value in numbers.items():
        writer.add_uint32(f"{model.arch}.{key}", value)
    writer.add_float32(f"{model.arch}.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32(f"{model.arch}.rope.freq_base", shape.rope_base)
    writer.add_array(f"{model.arch}.rope.dimension_sections", shape.rope_sections)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list(model.tokens)
    writer.add_token_types(model.token_types)
    writer.add_token_merges(["? !"] if model.says == "letters" else merges())  # without any, it is not loaded
    writer.add_eos_token_id(model.tokens.index("<|im_end|>"))
    writer.add_pad_token_id(model.tokens.index("<|endoftext|>"))
    writer.add_bos_token_id(model.tokens.index("<|endoftext|>"))
    writer.add_add_bos_token(False)
    if model.says != "letters":
        writer.add_chat_template(CHAT_TEMPLATE)


def write(name: str, folder: Path, *, force: bool = False) -> Path:
    """Write one model into `folder` and return its path; one that is already there is kept unless `force`."""
    model = MODELS[name]
    path = folder / f"{name}.gguf"
    if path.exists() and not force:
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{name}-") as scratch:
        unfinished = Path(scratch) / path.name
        writer = GGUFWriter(unfinished, model.arch)
        metadata(writer, name, model)
        for tensor, values in tensors(model):
            writer.add_tensor(tensor, values if values.dtype == np.float32 else values.astype(np.float16))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.replace(unfinished, path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("outdir", type=Path, metavar="OUTDIR")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(NAMES)} (default: all)")
    parser.add_argument("--force", action="store_true", help="write files that are already there again")
    args = parser.parse_intermixed_args()
    unknown = sorted(set(args.names) - set(NAMES))
    if unknown:
        parser.error(f"no such model: {', '.join(unknown)}; there are: {', '.join(NAMES)}")
    for name in args.names or NAMES:
        path = write(name, args.outdir, force=args.force)
        print(f"{path.stat().st_size / 1e6:8.2f} MB  {path}")


if __name__ == "__main__":
    main()
