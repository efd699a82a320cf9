"""The shapes that kernels are measured at, with operands as models give them.

Letters: T rows, K KV heads, G query heads per KV head, H head width, S slots, D inputs, F output columns, B bytes of a
block of a packed weight.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.models.config import ModelConfig
from jaxspec.models.presets import load_preset
from kernel_bench.timing import Function, count_copies
from pallas_kernels.linear import Blocks, linear
from pallas_kernels.linear.blocks import PLANES
from pallas_kernels.swiglu import norm_swiglu
from pallas_kernels.tree_attention import tree_attention

# Preset and tensor-parallel degree: one device's share is measured.
MODELS = (
    ("llama-3-8b", 1),
    ("llama-3-70b", 4),
    ("llama-3-70b", 8),
    ("qwen2-72b", 8),
    ("smollm2-135m", 1),
)
ATTENTION_ROWS, PREFIXES = (8, 1, 64), (1024, 8192)
SWIGLU_ROWS = (8, 1, 64)
LINEAR_ROWS, LINEAR_FORMATS = (8, 1, 16), ("int4_g128", "q4_0", "q8_0", "q4_k")
EPS = 1e-5


@dataclasses.dataclass(frozen=True)
class Case:
    """One operation at one shape.

    Attributes:
      operation: "tree_attention", "swiglu" or "linear".
      model: preset and tensor-parallel degree.
      sizes: by letter, `prefix` among them.
      function: of operands and state; see `timing`.
      operands: shapes of one copy.
      state: shapes of what the function updates.
      fixed: values of the operands that are not random numbers, by index.
      nbytes: least traffic with device memory.
    """

    operation: str
    model: str
    sizes: dict[str, int]
    function: Function
    operands: tuple[jax.ShapeDtypeStruct, ...]
    state: tuple[jax.ShapeDtypeStruct, ...]
    fixed: dict[int, Any]
    nbytes: int

    @property
    def name(self) -> str:
        """For tables and records."""
        return f"{self.operation} {self.model} " + " ".join(f"{name}={size}" for name, size in self.sizes.items())

    def copies(self, most: int | None = None) -> list[tuple[tuple[Any, ...], tuple[Any, ...]]]:
        """Operands and states, as many as push each other out of the cache, `most` at most."""
        count = min(count_copies(self.nbytes), most or count_copies(self.nbytes))
        operands = tuple(
            jnp.asarray(self.fixed[i]) if i in self.fixed else _random(i, leaf) for i, leaf in enumerate(self.operands)
        )
        state = tuple(_random(len(operands) + i, leaf) for i, leaf in enumerate(self.state))
        return [jax.tree.map(jnp.copy, (operands, state)) for _ in range(count)]


def attention_case(cfg: ModelConfig, model: str, tensor: int, T: int, prefix: int, dtype: Any = jnp.bfloat16) -> Case:
    """T rows of a chain after `prefix` tokens, on one of `tensor` devices."""
    K, G, H = -(-cfg.num_kv_heads // tensor), cfg.group, cfg.head_dim
    slots = -(-(prefix + T) // 64) * 64
    row = jnp.arange(T, dtype=jnp.int32)
    rows, table = jax.ShapeDtypeStruct((T, K, G + 2, H), jnp.float32), jax.ShapeDtypeStruct((T, H // 2), jnp.float32)
    cache = jax.ShapeDtypeStruct((K, slots, H), dtype)
    integers = (jnp.int32(prefix), row[:, None] >= row, prefix + row)

    def attend(operands: Any, state: Any) -> tuple[jax.Array, Any]:
        qkv, cos, sin, length, mask, position = operands
        key, value = state
        heads, key, value = tree_attention(qkv, cos, sin, key, value, length, mask, position)
        return heads, (key, value)

    itemsize = jnp.dtype(dtype).itemsize
    nbytes = 2 * K * H * itemsize * (prefix + T) + 4 * T * K * H * (2 * G + 2)
    return Case(
        "tree_attention", f"{model} TP{tensor}", {"T": T, "prefix": prefix, "K": K, "G": G, "H": H}, attend,
        (rows, table, table, *(jax.ShapeDtypeStruct(i.shape, i.dtype) for i in integers)), (cache, cache),
        {3 + index: value for index, value in enumerate(integers)}, nbytes,
    )  # fmt: skip


def swiglu_case(cfg: ModelConfig, model: str, tensor: int, T: int, dtype: Any = jnp.bfloat16) -> Case:
    """T rows through norm, gate and up projection, on one of `tensor` devices."""
    D, F = cfg.embed_dim, -(-cfg.mlp_dim // tensor)

    def project(operands: Any, state: Any) -> tuple[jax.Array, Any]:
        x, scale, gate_up = operands
        return norm_swiglu(x, scale, gate_up, EPS), state

    shapes = ((T, D), jnp.float32), ((D,), jnp.float32), ((2 * F, D), dtype)
    operands = tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes)
    nbytes = 2 * F * D * jnp.dtype(dtype).itemsize + 4 * T * (D + F)
    return Case("swiglu", f"{model} TP{tensor}", {"T": T, "D": D, "F": F}, project, operands, (), {}, nbytes)


def linear_case(cfg: ModelConfig, model: str, tensor: int, T: int, name: str) -> Case:
    """T rows through the down projection of one of `tensor` devices, in planes of a format of `FORMATS`."""
    block, inputs = PLANES[f"{name}_planes"], -(-cfg.mlp_dim // tensor)

    def project(operands: Any, state: Any) -> tuple[jax.Array, Any]:
        x, data = operands
        return linear(x, Blocks(data, block.name)), state

    data = jax.ShapeDtypeStruct((cfg.embed_dim, inputs // block.values, block.nbytes), jnp.uint8)
    operands = jax.ShapeDtypeStruct((T, inputs), jnp.float32), data
    nbytes = data.size + 4 * T * (inputs + cfg.embed_dim)
    sizes = {"T": T, "D": cfg.embed_dim, "F": inputs, "B": block.nbytes}
    return Case("linear", f"{model} TP{tensor} {name}", sizes, project, operands, (), {}, nbytes)


def list_cases(operation: str, smoke: bool = False, rows: Sequence[int] | None = None) -> list[Case]:
    """All cases of an operation, those that the targets are about first; models that share one are named together.

    Args:
      operation: its name.
      smoke: one tiny case instead.
      rows: T of the cases; None for those that are benchmarked.
    """
    if smoke:
        tiny = ModelConfig("llama", 1, 64, 96, 4, 2, 32, 64, 256)
        if operation == "linear":
            return [linear_case(tiny, "tiny", 1, 2, "q4_0")]
        if operation == "swiglu":
            return [swiglu_case(tiny, "tiny", 1, 2, jnp.float32)]
        return [attention_case(tiny, "tiny", 1, 2, 40, jnp.float32)]
    models = [(load_preset(name), name, tensor) for name, tensor in MODELS]
    if operation == "swiglu":
        cases = [swiglu_case(*model, T) for T in rows or SWIGLU_ROWS for model in models]
    elif operation == "linear":
        kinds = itertools.product(rows or LINEAR_ROWS, LINEAR_FORMATS, models)
        cases = [
            linear_case(*model, T, name)
            for T, name, model in kinds
            if -(-model[0].mlp_dim // model[2]) % PLANES[f"{name}_planes"].values == 0
        ]
    else:
        T_prefix = itertools.product(rows or ATTENTION_ROWS, PREFIXES)
        cases = [attention_case(*model, T, prefix) for T, prefix in T_prefix for model in models]
    found: dict[tuple[int, ...], Case] = {}
    for case in cases:
        same = tuple(case.sizes.values())
        earlier = found.get(same)
        found[same] = case if earlier is None else dataclasses.replace(earlier, model=f"{earlier.model}, {case.model}")
    return list(found.values())


def _random(seed: int, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Numbers as large as activations and weights of such a width are."""
    return jax.jit(_normal, static_argnums=(1, 2))(jax.random.key(seed), leaf.shape, leaf.dtype)


def _normal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    if dtype == jnp.uint8:
        return jax.random.bits(key, shape, jnp.uint8)
    return jax.random.normal(key, shape, jnp.bfloat16).astype(dtype)
