"""The linear layer: every matrix product of a model goes through it."""

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import native, registry
from pallas_kernels.linear.blocks import COLUMNS, PLANES, Blocks, Weight, find_format
from pallas_kernels.linear.config import MAX_ROWS, count_parts
from pallas_kernels.linear.exact import linear as exact_linear
from pallas_kernels.linear.exact import linear_parts as exact_linear_parts
from pallas_kernels.linear.reference import (
    as_numbers,
    linear_in_parts,
    linear_in_tiles,
    linear_of_batch,
    linear_on_cpu,
    linear_on_tpu,
)
from pallas_kernels.linear.reference import linear as linear_reference

# Platform of programs that are differentiated through `jax.vmap`, which runs everything that calls `linear`.
BATCHES = "batches"


def linear(x: jax.Array, weight: Weight, active_rows: jax.Array | None = None) -> jax.Array:  # [T, I], [O, I] -> [T, O]
    """Multiply rows by a weight stored `[out, in]`; float32 results.

    Args:
      x: `[T, I]` activations. Native kernels multiply them as float32, and by packed blocks as integers of 8 or 16
        bits that share a scale in groups of 32 inputs of a row. XLA rounds them to the dtype of a bfloat16 or
        float16 weight first, as accelerators do, and accumulates in float32. Blocks become numbers a tile at a time;
        on accelerators these are bfloat16.
      weight: `[O, I]` float32, bfloat16 or float16, or `Blocks` with data `[O, I / values, nbytes]`.
      active_rows: int32 [], at least 1: the rows that matter, which come first. The others come out arbitrary.
        None for all. Only native kernels save time by it.

    Returns:
      `[T, O]` float32.

    Raises:
      ValueError: the inner dimensions differ.
    """
    check_operands(x, weight)
    kernels = registry.current()
    if kernels.exact and x.shape[0] <= MAX_ROWS:
        return exact_linear(x, weight)
    if not kernels.native:
        if isinstance(weight, Blocks):
            fused = find_packed(x, weight)
            return fused.linear(x, weight) if fused else linear_in_tiles(x, weight, kernels.platform)
        forms = {"cpu": linear_on_cpu, "tpu": linear_on_tpu, BATCHES: linear_of_batch}
        return forms.get(kernels.platform, linear_reference)(x, weight)
    data, weight_format = native_weight(weight)
    out = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), jnp.float32)
    return native.call(
        "linear", out, x.astype(jnp.float32), data, native.row_count(active_rows, x),
        format=weight_format, threads=kernels.threads,
    )  # fmt: skip


def linear_parts(
    x: jax.Array, weight: Weight, active_rows: jax.Array | None = None
) -> jax.Array:  # [T, I], [O, I] -> [P, T, O]
    """`linear` as parts, float32, whose sum over the first axis it is: for what adds them up while it reads them.

    GPUs compute parts of the inputs at the same time where there are too few outputs to keep all multiprocessors busy.
    Else there is one part. For `active_rows` see `linear`.

    Raises:
      ValueError: the inner dimensions differ.
    """
    check_operands(x, weight)
    kernels = registry.current()
    if kernels.exact and x.shape[0] <= MAX_ROWS:
        return exact_linear_parts(x, weight)
    if fused := find_packed(x, weight):
        return fused.linear_parts(x, weight)
    # XLA multiplies one row by a reduction, which has no parts.
    if kernels.platform == "gpu" and not isinstance(weight, Blocks) and 1 < x.shape[0] <= MAX_ROWS:
        num_outputs, num_inputs = weight.shape
        return linear_in_parts(x, weight, count_parts(num_outputs, num_inputs, kernels.multiprocessors))
    return linear(x, weight, active_rows)[None]


def row_dtype(weight: Weight) -> Any:
    """The dtype that `linear` rounds rows to before it multiplies them: what makes the rows may round them to it.

    On accelerators that of the weight, bfloat16 beside blocks. Else float32: a CPU's forms round for themselves.
    """
    if registry.current().platform == "cpu":
        return jnp.dtype(jnp.float32)
    return jnp.dtype(jnp.bfloat16 if isinstance(weight, Blocks) else weight.dtype)


def find_packed(x: jax.Array, weight: Weight) -> ModuleType | None:
    """The kernel that multiplies by a weight in planes or columns, or None.

    More than `MAX_ROWS` rows by planes go to XLA silently.
    """
    few, exact = x.shape[0] <= MAX_ROWS, registry.current().exact
    if not isinstance(weight, Blocks) or (exact and few):
        return None
    takes = weight.format in COLUMNS or (weight.format in PLANES and few)
    return registry.current().find("linear", x, weight) if takes else None


def take_rows(weight: Weight, index: jax.Array, alone: bool = False) -> jax.Array:
    """Rows of a weight `[O, I]` as float32 numbers `[T, I]`; `index` is int32 `[T]`, all within the weight.

    `alone`: the program has no collectives. Then what follows a native call usually runs on threads of XLA's pool,
    without a further thread beside them. Collectives wait in their threads, of which the pool may have too few.

    Raises:
      ValueError: the weight is no matrix, or the index is no int32 vector.
    """
    check_weight(weight)
    if index.ndim != 1 or index.dtype != jnp.int32:
        raise ValueError(f"take_rows needs an int32 vector of rows, got {index.dtype} {index.shape}")
    if isinstance(weight, Blocks) and weight.outer:
        raise ValueError("rows of columns cannot be taken")
    if (kernels := registry.current()).native:
        # Numbers, too: in a loop XLA turns a whole bfloat16 table into float32 first, once a dispatch.
        data, weight_format = native_weight(weight)
        out = jax.ShapeDtypeStruct((index.shape[0], _inputs(weight)), jnp.float32)
        moves = alone and kernels.threads > 1  # else a call takes no other thread, and the pool may be another device's
        return native.call("take_rows", out, data, index, format=weight_format, moves=moves)
    if isinstance(weight, Blocks):
        return as_numbers(Blocks(weight.data[index], weight.format))
    return weight[index].astype(jnp.float32)


def check_operands(x: jax.Array, weight: Weight) -> None:
    """Raise ValueError for operands that no implementation can multiply."""
    check_weight(weight)
    # Rows of columns are padded.
    filled = isinstance(weight, Blocks) and weight.outer and x.shape[1] < _inputs(weight)
    if x.ndim != 2 or (x.shape[1] != _inputs(weight) and not filled):
        raise ValueError(f"linear needs [T, I] and [O, I], got {x.shape} and {(weight.shape[0], _inputs(weight))}")


def check_weight(weight: Weight) -> None:
    """Raise ValueError unless the weight is a matrix in a format that kernels read."""
    if isinstance(weight, Blocks):
        known = find_format(weight.format) if weight.data.dtype == jnp.uint8 else None
        assert bool(weight.outer) == (weight.format in COLUMNS)
        if known is None or weight.ndim != 3 or weight.shape[2] != known.nbytes:
            raise ValueError(
                f"{weight.format!r} blocks of {weight.data.dtype} {weight.shape} are no uint8 [O, I / values, bytes]"
            )
    elif weight.ndim != 2 or weight.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"linear needs a float32, bfloat16 or float16 [O, I], got {weight.dtype} {weight.shape}")


def native_weight(weight: Weight) -> tuple[jax.Array, str]:
    """The buffer of a weight and the native library's name for its format."""
    return (weight.data, weight.format) if isinstance(weight, Blocks) else (weight, jnp.dtype(weight.dtype).name)


def _inputs(weight: Weight) -> int:
    if isinstance(weight, Blocks):
        block_format = find_format(weight.format)
        assert block_format is not None  # see `check_weight`
        return weight.shape[1] * block_format.values
    return weight.shape[1]
