"""Block sizes of the Triton attention: a tuned table for each kind of GPU, and a heuristic for all other calls."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import tables

TABLE = tables.FOLDER / "tree_attention_triton.json"

# A program's tiles of queries, keys and values must fit the smallest shared memory: 99 KiB on consumer Ampere and Ada.
SHARED_BYTES = 96 * 1024


# Query rows of all KV heads from which Mosaic's attention is faster than Triton's.
MANY_ROWS = 2048


def preferred(qkv: jax.Array, cos: Any, sin: Any, key: jax.Array, *others: Any, **options: Any) -> tuple[str, ...]:
    """Implementations that are faster than XLA for a call of `tree_attention`, the fastest first.

    Measured on an H100 (docs/results/gpu-h100.md): Triton's with few rows, Mosaic's with many. In float32 neither is,
    since exact products leave the matrix units idle.
    """
    T, K, heads, _ = qkv.shape
    if key.dtype == jnp.float32:
        return ()
    return ("mosaic", "triton") if T * K * (heads - 2) >= MANY_ROWS else ("triton", "mosaic")


@dataclasses.dataclass(frozen=True)
class Config:
    """How one call is cut into programs.

    Attributes:
      block_q: rows of a query tile (query heads of one KV head times new rows), a power of two of at least 16.
      block_k: prefix slots of a tile, a power of two of at least 16.
      splits: parts of the prefix that run at the same time, a power of two.
      warps: warps of one program.
      stages: tiles in flight.
    """

    block_q: int
    block_k: int
    splits: int
    warps: int
    stages: int

    def __post_init__(self):
        """Raise ValueError for sizes that Triton does not take."""
        for name, smallest in (("block_q", 16), ("block_k", 16), ("splits", 1), ("warps", 1), ("stages", 1)):
            size = getattr(self, name)
            if size < smallest or (name != "stages" and size & (size - 1)):
                raise ValueError(f"{name} must be a power of two of at least {smallest}, got {size}")


def choose(
    device_kind: str, multiprocessors: int, T: int, group: int, head_width: int, slots: int,
    *, kv_heads: int = 8, itemsize: int = 2,
) -> Config:  # fmt: skip
    """Block sizes for one call.

    Args:
      device_kind: JAX's name of the GPU.
      multiprocessors: streaming multiprocessors of the GPU.
      T: rows.
      group: query heads per KV head.
      head_width: H.
      slots: S.
      kv_heads: K of this shard.
      itemsize: bytes of a number in the cache.
    """
    tuned = load_table().get(device_kind, {}).get(bucket(T, group, head_width, slots, kv_heads, itemsize))
    if tuned is not None:
        return tuned
    width = max(power_of_two(head_width), 16)
    # Results stay in registers. Exact float32 products use registers too: with larger tiles, or four warps, hundreds or
    # thousands of bytes spill, with these 60 to 88 (none with heads of 64), and 156 for 128 rows. One row spills less
    # with eight warps than with sixteen, sixteen rows and more the other way round.
    most_q, most_k = (min(128, 16384 // width), 64) if itemsize == 2 else (16, 32)
    block_q = min(max(power_of_two(T * group), 16), most_q)
    pair = 2 * width * itemsize  # a key and a value
    block_k = min(max(_floor_power(16 * 1024 // pair * 2), 16), most_k)
    # Shared memory holds all stages but one, the queries, and half a tile for changes of layout.
    left = SHARED_BYTES - block_q * width * itemsize - block_k * pair // 2
    stages = min(max(left // (block_k * pair), 1), 3) + 1
    programs = kv_heads * -(-T * group // block_q)
    # Two programs on a multiprocessor hide each other's waits. A part of fewer than two tiles costs more to merge than
    # it saves.
    splits = min(2 * multiprocessors // programs, slots // (2 * block_k), 64)
    warps = (16 if T >= 16 and width >= 128 else 8) if itemsize == 4 else 8 if block_q * width >= 8192 else 4
    return Config(block_q, block_k, _floor_power(max(splits, 1)), warps, stages)


def bucket(T: int, group: int, head_width: int, slots: int, kv_heads: int, itemsize: int = 2) -> str:
    """Name of the table's row for such a call.

    T is rounded up to a power of two, as tiles are. Slots are rounded to the nearest one: a cache has a power of two of
    them, or as many as a prompt and its answer take.
    """
    near = 1 << round(math.log2(slots))
    return f"T{power_of_two(T)} G{group} H{head_width} S{near} K{kv_heads} x{itemsize}"


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def _floor_power(number: int) -> int:
    return 1 << (max(number, 1).bit_length() - 1)


@functools.cache
def load_table() -> dict[str, dict[str, Config]]:
    """The tuned table.

    Raises:
      ValueError: the file is no table; see `tables.load_table`.
    """
    return tables.load_table(TABLE, Config)
