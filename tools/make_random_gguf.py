"""A GGUF file of a published geometry with random weights, for speed measurements: nothing is downloaded.

    python tools/make_random_gguf.py OUT.gguf [--geometry qwen2.5-1.5b] [--type q4_k_m] [--tokenizer FILE.gguf]

The types of the tensors are those of llama.cpp's Q4_K_M: Q4_K, and Q6_K for the embedding and, in half of the layers,
for the values and the down projection; or all matrices are Q4_0. Codes are random; scales make activations as large as
in a trained model. In a Q4_0 file matrices of one shape are alike in all layers, so that writing takes little memory.
The tokenizer is another file's (the default model's), filled up with unused tokens.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, TokenType

from jaxspec.checkpoint.shipped import default_model_path
from jaxspec.models.presets import load_preset

Q4_0, Q4_K, Q6_K = GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K
VALUES = 256
Q4_0_VALUES = 32
# Bytes of a block; where its float16 numbers lie; and a scale with which rows of `inputs` weights have a norm near one.
NBYTES = {Q4_0: 18, Q4_K: 144, Q6_K: 210}


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--geometry", default="qwen2.5-1.5b", help="a preset of qwen2 or llama [qwen2.5-1.5b]")
    parser.add_argument("--type", choices=("q4_k_m", "q4_0"), default="q4_k_m")
    parser.add_argument("--tokenizer", type=Path, help="a GGUF file [the default model's]")
    arguments = parser.parse_args()
    cfg = load_preset(arguments.geometry)
    plain = cfg.rope.scaling == "default" and not cfg.qk_norm and cfg.sliding_window is None
    values = Q4_0_VALUES if arguments.type == "q4_0" else VALUES
    if cfg.family not in ("qwen2", "llama") or not plain or cfg.embed_dim % values or cfg.mlp_dim % values:
        parser.error(f"a geometry of qwen2 or llama without rope scaling, of widths that {values} divides, is needed")
    writer = GGUFWriter(arguments.out, cfg.family)
    writer.add_block_count(cfg.num_layers)
    writer.add_context_length(cfg.max_context)
    writer.add_embedding_length(cfg.embed_dim)
    writer.add_feed_forward_length(cfg.mlp_dim)
    writer.add_head_count(cfg.num_kv_heads * cfg.group)
    writer.add_head_count_kv(cfg.num_kv_heads)
    writer.add_layer_norm_rms_eps(cfg.norm_eps)
    writer.add_rope_freq_base(cfg.rope.theta)
    copy_tokenizer(GGUFReader(arguments.tokenizer or default_model_path()), writer, cfg.vocab_size)
    add_tensors(writer, cfg, q4_0=arguments.type == "q4_0")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=True)
    writer.close()


def copy_tokenizer(source: GGUFReader, writer: GGUFWriter, size: int) -> None:
    """Every key of the tokenizer; the vocabulary is filled up to `size`."""
    fill = {"tokenizer.ggml.tokens": "<unused_{}>", "tokenizer.ggml.token_type": int(TokenType.UNUSED)}
    for name, field in source.fields.items():
        if not name.startswith("tokenizer."):
            continue
        value: Any = field.contents()
        if name in fill:
            extra, count = fill[name], size - len(value)
            value = [*value, *(extra.format(i) if isinstance(extra, str) else extra for i in range(count))]
        kinds = field.types
        writer.add_key_value(name, value, kinds[0], kinds[-1] if kinds[0] == GGUFValueType.ARRAY else None)


def add_tensors(writer: GGUFWriter, cfg: Any, q4_0: bool) -> None:
    """Random blocks and biases, norms of one."""
    rng = np.random.default_rng(0)
    made: dict[tuple[int, int], np.ndarray] = {}
    D, F, H, L = cfg.embed_dim, cfg.mlp_dim, cfg.head_dim, cfg.num_layers

    def add(name: str, outputs: int, inputs: int, kind: GGMLQuantizationType) -> None:
        if q4_0:
            if (outputs, inputs) not in made:
                data = rng.integers(0, 256, (outputs, inputs // Q4_0_VALUES, NBYTES[Q4_0]), np.uint8)
                # Codes have a standard deviation of 4.6.
                data[..., 0:2] = np.float16(1 / (4.6 * np.sqrt(inputs))).reshape(1).view(np.uint8)
                made[outputs, inputs] = data.reshape(outputs, -1)
            writer.add_tensor(name, made[outputs, inputs], raw_dtype=Q4_0)
            return
        blocks = (outputs, inputs // VALUES)
        data = rng.integers(0, 256, (*blocks, NBYTES[kind]), np.uint8)
        # Codes times six-bit scales have a standard deviation near 150, codes times eight-bit ones one near 1,400.
        if kind == Q4_K:
            scale = 1 / (150 * np.sqrt(inputs))
            data[..., 0:2] = np.float16(scale).reshape(1).view(np.uint8)
            data[..., 2:4] = np.float16(scale * 7.5).reshape(1).view(np.uint8)
        else:
            data[..., 208:210] = np.float16(1 / (1400 * np.sqrt(inputs))).reshape(1).view(np.uint8)
        writer.add_tensor(name, data.reshape(outputs, -1), raw_dtype=kind)

    def add_numbers(name: str, numbers: np.ndarray) -> None:
        writer.add_tensor(name, numbers.astype(np.float32))

    add("token_embd.weight", cfg.vocab_size, D, Q6_K)
    add_numbers("output_norm.weight", np.ones(D))
    if not cfg.tied:
        add("output.weight", cfg.vocab_size, D, Q6_K)
    for i in range(L):
        more_bits = Q6_K if i < L // 8 or i >= 7 * L // 8 or (i - L // 8) % 3 == 2 else Q4_K
        heads = {"q": cfg.num_kv_heads * cfg.group, "k": cfg.num_kv_heads, "v": cfg.num_kv_heads}
        for part, count in heads.items():
            add(f"blk.{i}.attn_{part}.weight", count * H, D, more_bits if part == "v" else Q4_K)
            if cfg.qkv_bias:
                add_numbers(f"blk.{i}.attn_{part}.bias", 0.1 * rng.normal(size=count * H))
        add(f"blk.{i}.attn_output.weight", D, heads["q"] * H, Q4_K)
        for part in ("gate", "up"):
            add(f"blk.{i}.ffn_{part}.weight", F, D, Q4_K)
        add(f"blk.{i}.ffn_down.weight", D, F, more_bits)
        for norm in ("attn_norm", "ffn_norm"):
            add_numbers(f"blk.{i}.{norm}.weight", np.ones(D))


if __name__ == "__main__":
    main()
