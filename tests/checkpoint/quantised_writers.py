"""Checkpoints of quantised safetensors, written from the definitions of their formats with numpy alone.

Each `write_*` takes random codes, scales and zero points, returns the tensors of one linear layer under the format's
names, and the float32 matrix `[out, in]` that they stand for.
"""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from make import hf_config
from safetensors.numpy import save_file

from jaxspec.checkpoint.keymaps import recipes
from jaxspec.models.config import ModelConfig

FP8 = ml_dtypes.float8_e4m3fn
BF16 = ml_dtypes.bfloat16


def scales(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, size: float = 0.02) -> np.ndarray:
    return (size * rng.uniform(0.5, 1.5, shape)).astype(dtype)


def pack_rows(codes: np.ndarray, bits: int) -> np.ndarray:
    """Consecutive codes of the last axis into int32 words, the first one lowest, bit by bit."""
    per_word = 32 // bits
    padded = np.zeros((*codes.shape[:-1], -(-codes.shape[-1] // per_word) * per_word), np.uint64)
    padded[..., : codes.shape[-1]] = codes
    words = np.zeros((*codes.shape[:-1], padded.shape[-1] // per_word), np.uint64)
    for place in range(per_word):
        words += padded[..., place::per_word] << np.uint64(bits * place)
    return words.astype(np.uint32).view(np.int32)


def awq(rng: np.random.Generator, out: int, width: int, group: int = 128, dtype: Any = np.float16):
    """AutoAWQ's gemm layout: codes of eight outputs in a word, in the order 0 2 4 6 1 3 5 7."""
    group = width if group == -1 else group
    q = rng.integers(0, 16, (width, out))
    z = rng.integers(0, 16, (width // group, out))
    s = scales(rng, (width // group, out), dtype)

    def pack(codes: np.ndarray) -> np.ndarray:
        words = np.zeros((len(codes), out // 8), np.uint64)
        for nibble, column in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
            words |= codes[:, column::8].astype(np.uint64) << np.uint64(4 * nibble)
        return words.astype(np.uint32).view(np.int32)

    spread = np.arange(width) // group
    weight = (q - z[spread]).astype(np.float32) * s[spread].astype(np.float32)
    return {"qweight": pack(q), "qzeros": pack(z), "scales": s}, np.ascontiguousarray(weight.T)


def gptq(
    rng: np.random.Generator, out: int, width: int, group: int = 128, bits: int = 4, version: int = 1,
    act_order: bool = False, sym: bool = False, g_idx: np.ndarray | None = None, dtype: Any = np.float16,
    whole_words: bool = False, least_zero: int = 1,
):  # fmt: skip
    """GPTQ: words along the inputs; version 1 stores zero points less one."""
    group = width if group == -1 else group
    groups = -(-width // group)
    q = rng.integers(0, 2**bits, (width, out))
    z = np.full((groups, out), 2 ** (bits - 1)) if sym else rng.integers(least_zero, 2**bits, (groups, out))
    s = scales(rng, (groups, out), dtype, 0.02 if bits == 4 else 0.002)
    order = np.arange(width) // group
    if act_order:
        order = rng.permutation(order) if g_idx is None else g_idx
    stored = pack_rows(z, bits)
    if version == 1 and whole_words:
        stored = (stored.view(np.uint32) - np.uint32(0x11111111 if bits == 4 else 0x01010101)).view(np.int32)
    elif version == 1:
        stored = pack_rows((z - 1) % 2**bits, bits)
    tensors = {
        "qweight": np.ascontiguousarray(pack_rows(q.T, bits).T),
        "qzeros": stored,
        "scales": s,
        "g_idx": order.astype(np.int32),
    }
    return tensors, np.ascontiguousarray(((q - z[order]).astype(np.float32) * s[order].astype(np.float32)).T)


def packed(
    rng: np.random.Generator, out: int, width: int, group: int = 128, bits: int = 4, symmetric: bool = True,
    act_order: bool = False, g_idx: np.ndarray | None = None, dtype: Any = BF16,
):  # fmt: skip
    """compressed-tensors' pack-quantized: codes plus the middle one, along inputs; zero points along outputs."""
    groups = 1 if group == -1 else width // group
    middle = 2 ** (bits - 1)
    q = rng.integers(-middle, middle, (out, width))
    z = np.zeros((out, groups), int) if symmetric else rng.integers(-middle, middle, (out, groups))
    s = scales(rng, (out, groups), dtype, 0.02 if bits == 4 else 0.002)
    order = np.arange(width) // (width // groups)
    tensors = {
        "weight_packed": pack_rows(q + middle, bits),
        "weight_scale": s,
        "weight_shape": np.array([out, width], np.int64),
    }
    if not symmetric:
        tensors["weight_zero_point"] = np.ascontiguousarray(pack_rows((z + middle).T, bits).T)
    if act_order:
        order = rng.permutation(order) if g_idx is None else g_idx
        tensors["weight_g_idx"] = order.astype(np.int32)
    return tensors, (q - z[:, order]).astype(np.float32) * s.astype(np.float32)[:, order]


def int8(
    rng: np.random.Generator, out: int, width: int, per: str = "channel", symmetric: bool = True, dtype: Any = BF16
):
    """compressed-tensors' int-quantized (W8A8): one scale per output, or per matrix."""
    q = rng.integers(-128, 128, (out, width))
    shape = (out, 1) if per == "channel" else (1,)
    s = scales(rng, shape, dtype, 0.002)
    tensors = {"weight": q.astype(np.int8), "weight_scale": s}
    z = np.zeros(shape, int)
    if not symmetric:
        z = rng.integers(-128, 128, shape)
        tensors["weight_zero_point"] = z.astype(np.int8)
    return tensors, (q - z).astype(np.float32) * s.astype(np.float32)


def fp8(
    rng: np.random.Generator, out: int, width: int, block: tuple[int, int] | None = (128, 128), per: str = "tensor",
    name: str = "weight_scale_inv", dtype: Any = np.float32,
):  # fmt: skip
    """float8_e4m3fn with a scale per block, per output or per matrix. Denormal numbers are among the values."""
    codes = rng.integers(0, 256, (out, width), np.uint8)
    codes[codes & 0x7F == 0x7F] = 0x01
    value = codes.view(FP8)
    if block is not None:
        s = scales(rng, (-(-out // block[0]), -(-width // block[1])), dtype, 0.001)
        spread = s[np.arange(out) // block[0]][:, np.arange(width) // block[1]]
    else:
        s = scales(rng, (out, 1) if per == "channel" else (1,) if per == "tensor" else (), dtype, 0.001)
        spread = s
    return {"weight": value, name: s}, value.astype(np.float32) * np.asarray(spread, np.float32)


def mxfp4(rng: np.random.Generator, out: int, width: int):
    """Packed E2M1: the even element in the low half of a byte; one power of two for 32."""
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    q = rng.integers(0, 16, (out, width))
    e = rng.integers(117, 124, (out, width // 32))
    value = table[q] * np.repeat(np.exp2(e.astype(np.float32) - 127), 32, axis=1)
    tensors = {"weight_packed": (q[:, ::2] | q[:, 1::2] << 4).astype(np.uint8), "weight_scale": e.astype(np.uint8)}
    return tensors, value


def gpt_oss(rng: np.random.Generator, cfg: ModelConfig) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """gpt-oss's folder with experts in MXFP4, gate and up rows in turns; and the numbers by projection."""
    assert cfg.experts is not None
    numbers = {
        name: (rng.normal(0, 0.1, shape) + name.endswith("norm.weight")).astype(BF16).astype(np.float32)
        for name, shape in [source for recipe in recipes(cfg).values() for source in recipe.sources]
    }
    stored = {name: value.astype(BF16) for name, value in numbers.items() if ".experts." not in name}
    for index in range(cfg.num_layers):
        prefix = f"model.layers.{index}.mlp.experts"
        gate, up, down = (numbers[f"{prefix}.{name}_proj.bias"] for name in ("gate", "up", "down"))
        together = np.empty((len(gate), 2 * gate.shape[1]), np.float32)
        together[:, 0::2], together[:, 1::2] = gate, up
        stored |= {f"{prefix}.gate_up_proj_bias": together.astype(BF16), f"{prefix}.down_proj_bias": down.astype(BF16)}
        for module, out, width in (
            ("gate_up_proj", 2 * cfg.experts.dim, cfg.embed_dim), ("down_proj", cfg.embed_dim, cfg.experts.dim),
        ):  # fmt: skip
            made = [mxfp4(rng, out, width) for _ in range(cfg.experts.count)]
            codes = np.stack([parts["weight_packed"] for parts, _ in made])
            stored[f"{prefix}.{module}_blocks"] = codes.reshape(*codes.shape[:2], -1, 16)
            stored[f"{prefix}.{module}_scales"] = np.stack([parts["weight_scale"] for parts, _ in made])
            for expert, (_, value) in enumerate(made):
                if module == "down_proj":
                    numbers[f"{prefix}.{expert}.down_proj.weight"] = value
                else:
                    numbers[f"{prefix}.{expert}.gate_proj.weight"] = value[0::2]
                    numbers[f"{prefix}.{expert}.up_proj.weight"] = value[1::2]
    return stored, numbers


def compressed_config(layout: str, **weights: Any) -> dict[str, Any]:
    """A `quantization_config` of compressed-tensors with one group of modules."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None,
        "global_compression_ratio": 1.5,
    }  # fmt: skip


def write_folder(
    folder: Path, cfg: ModelConfig, settings: dict[str, Any], write: Any, seed: int = 0, lm_head: bool = False,
    changes: dict[str, Any] | None = None, **options: Any,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Write a folder whose linear layers `write` makes; returns every weight in float32 under its plain name.

    Layers with the same inputs share the order of their groups, as their activations are the same.
    """
    rng = np.random.default_rng(seed)
    stored: dict[str, np.ndarray] = {}
    plain: dict[str, np.ndarray] = {}
    orders: dict[Any, np.ndarray] = {}
    if write is gpt_oss:
        stored, plain = gpt_oss(rng, cfg)
    for name, shape in [source for recipe in recipes(cfg).values() for source in recipe.sources if not stored]:
        is_linear = len(shape) == 2 and "embed" not in name and (lm_head or "lm_head" not in name)
        if not is_linear:
            value = rng.normal(0, 0.1, shape).astype(np.float16)
            stored[name], plain[name] = value, value.astype(np.float32)
            continue
        module = name.removesuffix(".weight")
        own = dict(options)
        if own.get("act_order"):
            shared = (module.rsplit(".", 1)[0], shape[1]) if "o_proj" not in module else module
            group = shape[1] if own.get("group", 128) == -1 else own.get("group", 128)
            orders.setdefault(shared, rng.permutation(np.arange(shape[1]) // group))
            own["g_idx"] = orders[shared]
        parts, plain[name] = write(rng, *shape, **own)
        stored |= {
            f"{module}.{part}": np.ascontiguousarray(value).reshape(np.shape(value)) for part, value in parts.items()
        }
    folder.mkdir(parents=True, exist_ok=True)
    config = hf_config(cfg) | {"quantization_config": settings} | (changes or {})
    (folder / "config.json").write_text(json.dumps(config))
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return plain
