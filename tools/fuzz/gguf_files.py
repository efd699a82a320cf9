"""GGUF files: metadata of any type, tensors of any shape and place, damaged bytes; opened, and every weight read."""

import random
import struct
from pathlib import Path
from typing import Any

import numpy as np

from fuzz.tokenizers import use
from fuzz.wild import mutate_bytes, mutate_json, wild_json
from jaxspec.checkpoint.load import open_weights
from jaxspec.models.params import declare_leaves
from jaxspec.text.tokenizer import load_tokenizer

WIDTH, VOCAB = 32, 8
TOKENS = ["<unk>", "<s>", "</s>", "a", "b", "ab", "▁", "▁a"]
METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": WIDTH,
    "llama.feed_forward_length": WIDTH,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "llama.vocab_size": VOCAB,
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.scores": [-float(i) for i in range(VOCAB)],
    "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 1],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.chat_template": "{{ messages[0].content }}",
}
BPE = {
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.tokens": ["$B", "x:9", "</s>", "a", "b", "ab", "Ġ", "Ġa"], "tokenizer.ggml.add_bos_token": True,
}  # fmt: skip
LAYER = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def make_tensors() -> dict[str, tuple[list[int], int, int]]:
    """Dimensions (fastest first), type and offset of each tensor, all float32."""
    shapes = {"token_embd": [WIDTH, VOCAB], "output_norm": [WIDTH], "output": [WIDTH, VOCAB]}
    shapes |= {f"blk.0.{name}": [WIDTH, WIDTH] for name in LAYER}
    shapes |= {"blk.0.attn_norm": [WIDTH], "blk.0.ffn_norm": [WIDTH]}
    placed, offset = {}, 0
    for name, dims in shapes.items():
        placed[f"{name}.weight"] = (dims, 0, offset)
        offset += -(-4 * int(np.prod(dims)) // 32) * 32
    return placed


def pack_string(text: str) -> bytes:
    """A string of the format."""
    raw = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(raw)) + raw


def pack_value(rng: random.Random, value: Any) -> bytes:
    """A value with its type; what the format lacks becomes something near it."""
    match value:
        case bool():
            return struct.pack("<IB", 7, value)
        case int():
            kind, code, bits = rng.choice(((4, "<I", 32), (5, "<i", 31), (10, "<Q", 64), (11, "<q", 63)))
            return struct.pack("<I", kind) + struct.pack(code, value % 2**bits)
        case float():
            return struct.pack("<Id", 12, value)
        case str():
            return struct.pack("<I", 8) + pack_string(value)
        case list() if value:
            first = pack_value(random.Random(0), value[0])[:4]
            same = [item for item in value if type(item) is type(value[0])]
            items = [pack_value(random.Random(0), item)[4:] for item in same]
            return struct.pack("<I", 9) + first + struct.pack("<Q", len(items)) + b"".join(items)
    return struct.pack("<IIQ", 9, 8, 0)


def make_file(rng: random.Random) -> bytes:
    """A file, sound or with one or two things wrong."""
    metadata = METADATA | (BPE if rng.random() < 0.5 else {})
    metadata = mutate_json(rng, metadata, rng.choice((0, 1, 1, 2)))
    if rng.random() < 0.2:
        metadata[rng.choice([*METADATA])] = wild_json(rng)
    tensors = make_tensors()
    if rng.random() < 0.3:
        name = rng.choice([*tensors])
        dims, kind, offset = tensors[name]
        tensors[name] = rng.choice(
            (
                ([*dims, rng.choice((0, 1, 2**40))], kind, offset),
                (dims, rng.choice((1, 2, 8, 12, 14, 99)), offset),
                (dims, kind, rng.choice((7, 2**60, 0))),
            )
        )
    return pack_file(rng, metadata, tensors, rng.choice((3, 3, 3, 2, 99)))


def pack_file(
    rng: random.Random, metadata: dict[str, Any], tensors: dict[str, tuple[list[int], int, int]], version: int = 3
) -> bytes:
    """A file of given metadata and tensors, with random weights."""
    parts = [b"GGUF", struct.pack("<IQQ", version, len(tensors), len(metadata))]
    parts += [pack_string(str(key)) + pack_value(rng, value) for key, value in metadata.items()]
    for name, (dims, kind, offset) in tensors.items():
        parts.append(pack_string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset))
    header = b"".join(parts)
    size = max((offset + 4 * WIDTH * WIDTH for _, _, offset in tensors.values() if offset < 2**20), default=0)
    weights = np.random.default_rng(rng.randrange(2**32)).normal(size=size // 4).astype("<f4").tobytes()
    return header + bytes(-len(header) % 32) + weights


def run(rng: random.Random, folder: Path) -> None:
    """One file."""
    path = folder / "model.gguf"
    content = make_file(rng)
    path.write_bytes(mutate_bytes(rng, content) if rng.random() < 0.4 else content)
    if rng.random() < 0.6:
        tokenizer = load_tokenizer(path)
        tokenizer.token_strings()
        use(rng, tokenizer)
        return
    weights = open_weights(path)
    for name, info in declare_leaves(weights.config, weights.own_storage).items():
        weights.read(name, info)
