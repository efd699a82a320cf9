"""Layers with a recurrence in place of attention: what they are, and their part of a cache.

A short convolution mixes a row's inputs with those of the rows before it. Such a layer keeps the inputs of rows as
attention keeps keys: a row that is rejected is never read again, and a row's predecessors are its ancestors in the
tree. Rows are kept from `block_start` on, a function of the committed length alone. So what a row reads depends on its
position and its ancestors, not on the passes in which they ran.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxspec.errors import ConfigError
from jaxspec.pytree import pytree

# B: rows fall out of the window by blocks of so many positions, when the block after the next one begins.
BLOCK = 32


@dataclasses.dataclass(frozen=True)
class RecurrentConfig:
    """The recurrent blocks of a model, which are alike.

    Attributes:
      kind: "convolution" is LFM2's: `out(C * conv(B * x))`, where B, C and x are projections of a row.
      layers: those that have one; the others have attention.
      taps: width of the short convolution, the row itself included.
      key_heads: Hk; the parts of the channels that several devices share.
      channels: of a key head: what the convolution takes, and what a convolution block gives.
    """

    kind: Literal["convolution", "delta"]
    layers: tuple[bool, ...]
    taps: int
    key_heads: int
    channels: int = 0
    value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0

    def __post_init__(self):
        """Refuse sizes that cannot be built."""
        for name in ("key_heads", "channels"):
            if not 0 < getattr(self, name) < 2**31:
                raise ConfigError(f"recurrent {name} must be positive, got {getattr(self, name)}")
        if not 2 <= self.taps < BLOCK:
            raise ConfigError(f"recurrent taps must lie between 2 and {BLOCK - 1}, got {self.taps}")

    @property
    def input_width(self) -> int:
        """What the convolution takes of a key head."""
        return self.channels

    @property
    def projected_width(self) -> int:
        """Rows of a key head in `mix_in`."""
        return 3 * self.channels

    @property
    def result_width(self) -> int:
        """What a key head gives to `out`."""
        return self.channels

    @property
    def group(self) -> int:
        """Value heads of a key head."""
        return 1

    @property
    def window_rows(self) -> int:
        """The largest tree window."""
        return 1024

    @property
    def rows(self) -> int:
        """R: rows of the window that a layer keeps: committed ones, less than two blocks, then those of the tree."""
        return 2 * BLOCK + self.window_rows


@pytree
class RecurrentRows:
    """A recurrent layer's part of a cache: row i is that of position `block_start(length) + i`, or of the tree window.

    Attributes:
      inputs: of the short convolution, float32 `[Hk, R, channels]`.
    """

    inputs: Any

    def rows(self) -> dict[str, jax.Array]:
        """The arrays that have a row for each kept row, `[Hk, R, n]`."""
        return {"inputs": self.inputs}

    def with_rows(self, rows: dict[str, jax.Array]) -> "RecurrentRows":
        """The same with other rows."""
        return dataclasses.replace(self, **rows)


def refuse_tree(cfg: RecurrentConfig, rows: int, depth: int) -> None:
    """Refuse a tree of so many rows, or of such a depth below its root: `ConfigError`."""
    refuse_window(cfg, rows)
    if cfg.kind == "delta" and depth > BLOCK:
        raise ConfigError(
            f"a model with recurrent layers takes drafts of at most {BLOCK} tokens in a row, this method has {depth}"
        )


def refuse_window(cfg: RecurrentConfig, slots: int) -> None:
    """Refuse a tree window of so many slots that the kept rows have no place for it: `ConfigError`."""
    if slots > cfg.window_rows:
        held = f"a model with recurrent layers ({cfg.kind}) has {cfg.window_rows} rows for drafted tokens"
        raise ConfigError(f"{held}, this method needs {slots}: draft a smaller tree")


def rows_shapes(cfg: RecurrentConfig, heads: int) -> RecurrentRows:
    """Shapes of one layer's rows for so many key heads."""
    return RecurrentRows(inputs=(heads, cfg.rows, cfg.input_width))


def block_start(length: jax.Array) -> jax.Array:
    """The first position whose row is kept while `length` rows are committed."""
    return BLOCK * jnp.maximum(length // BLOCK - 1, 0)


def begins_alike(length: int, other: int) -> bool:
    """Whether two committed lengths have the same `block_start`."""
    return max(1, length // BLOCK) == max(1, other // BLOCK)


def predecessors(
    count: int, steps: int, first: jax.Array, mask: jax.Array | None, offset: jax.Array | None
) -> jax.Array:
    """The rows before each of `count` rows of a pass, from `steps` rows before it to the one before it.

    Args:
      first: int32 [], place of the tree window's first row.
      mask: bool [count, W], each row's ancestors and itself; parents have lower slots. None for a chain.
      offset: slot of the first row; None is 0.

    Returns:
      Places among the kept rows, int32 [steps, count]; negative before the text.
    """
    back = jnp.arange(steps, 0, -1)[:, None]
    if mask is None:
        return first + jnp.arange(count) - back
    rank = jnp.cumsum(mask[:, ::-1], axis=1)[:, ::-1]  # of ancestors, the row itself has 1
    ancestors = rank[:, 0] - 1
    slot = jnp.argmax(mask & (rank == back[..., None] + 1), axis=2)
    return first + jnp.where(back <= ancestors, slot, ancestors - back)


def write_inputs(rows: jax.Array, new: jax.Array, place: jax.Array) -> jax.Array:
    """Kept rows `[Hk, R, n]` with the rows `new` `[T, Hk, n]` of a pass at `place`."""
    return jax.lax.dynamic_update_slice(rows, new.swapaxes(0, 1), (0, place, 0))


def convolve(weight: jax.Array, rows: jax.Array, new: jax.Array, before: jax.Array) -> jax.Array:
    """The short convolution of rows `new` `[T, Hk, n]`, float32 of the same shape.

    `rows` `[Hk, R, n]` are the kept ones, those of the pass included; `before` `[taps - 1, T]` is of `predecessors`.
    """
    taken = jnp.take(rows, jnp.maximum(before, 0), axis=1, mode="clip")  # [Hk, taps - 1, T, n]
    taken = jnp.where((before >= 0)[None, :, :, None], taken, 0.0)
    out = taken[:, 0].swapaxes(0, 1) * weight[:, :, 0]
    for tap in range(1, before.shape[0]):
        out = out + taken[:, tap].swapaxes(0, 1) * weight[:, :, tap]
    return out + new * weight[:, :, -1]


def commit_chunk(rows: jax.Array, new: jax.Array, length: jax.Array, count: jax.Array) -> jax.Array:
    """Kept rows `[Hk, R, n]` after the first `count` rows of a chunk `new` `[T, Hk, n]`, which follow `length` rows."""
    start = block_start(length)
    wide = jnp.pad(rows, ((0, 0), (0, new.shape[0] + BLOCK), (0, 0)))
    wide = write_inputs(wide, new, length - start)
    return jax.lax.dynamic_slice_in_dim(wide, block_start(length + count) - start, rows.shape[1], axis=1)


def commit_window(
    layers: tuple[RecurrentRows, ...], length: jax.Array, count: jax.Array, branches: bool
) -> tuple[RecurrentRows, ...]:
    """The rows of all layers after the first `count` rows of the tree window, which follow `length` rows.

    `branches` is whether a branch is cheap.
    """

    def advance(layers: tuple[RecurrentRows, ...]) -> tuple[RecurrentRows, ...]:
        roll = lambda array: jnp.roll(array, -BLOCK, axis=1)  # noqa: E731
        return tuple(layer.with_rows(jax.tree.map(roll, layer.rows())) for layer in layers)

    start, end = block_start(length), block_start(length + count)
    if branches:
        step = lambda carry: (carry[0] + BLOCK, advance(carry[1]))  # noqa: E731
        return jax.lax.while_loop(lambda carry: carry[0] < end, step, (start, layers))[1]
    moved = advance(layers)
    return jax.tree.map(lambda old, new: jnp.where(start < end, new, old), layers, moved)
