"""Layers with a recurrence in place of attention: what they are, and their part of a cache.

A short convolution mixes a row's inputs with those of the rows before it. Such a layer keeps the inputs of rows as
attention keeps keys: a row that is rejected is never read again, and a row's predecessors are its ancestors in the
tree. Rows are kept from `block_start` on, a function of the committed length alone. So what a row reads depends on its
position and its ancestors, not on the passes in which they ran. A gated delta net also keeps the state before those
rows (`jaxspec/models/delta_rule.py`).

Letters: Hk key heads, g value heads of each, K and V widths of a key and a value head, R kept rows, B `BLOCK`.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxspec.errors import ConfigError
from jaxspec.pytree import pytree
from pallas_kernels.delta_rule import KeptRows, delta_fold

# B: rows fall out of the window by blocks of so many positions, when the block after the next one begins.
BLOCK = 32


@dataclasses.dataclass(frozen=True)
class RecurrentConfig:
    """The recurrent blocks of a model, which are alike.

    Attributes:
      kind: "convolution" is LFM2's: `out(C * conv(B * x))`, where B, C and x are projections of a row. "delta" is a
        gated delta net: queries, keys and values pass the convolution, then the gated delta rule.
      layers: those that have one; the others have attention.
      taps: width of the short convolution, the row itself included.
      key_heads: Hk; the parts of the channels that several devices share.
      channels: of "convolution", those of a key head.
      value_heads, key_dim, value_dim: of "delta": Hv, a multiple of Hk; K and V.
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
        own = ("channels",) if self.kind == "convolution" else ("value_heads", "key_dim", "value_dim")
        for name in ("key_heads", *own):
            if not 0 < getattr(self, name) < 2**31:
                raise ConfigError(f"recurrent {name} must be positive, got {getattr(self, name)}")
        if not 2 <= self.taps < BLOCK:
            raise ConfigError(f"recurrent taps must lie between 2 and {BLOCK - 1}, got {self.taps}")
        if self.value_heads % self.key_heads:
            raise ConfigError(f"value_heads {self.value_heads} is not a multiple of key_heads {self.key_heads}")

    @property
    def input_width(self) -> int:
        """What the convolution takes of a key head: of "delta" a query, a key and the values."""
        return self.channels if self.kind == "convolution" else 2 * self.key_dim + self.result_width

    @property
    def projected_width(self) -> int:
        """Rows of a key head in `mix_in`."""
        return 3 * self.channels if self.kind == "convolution" else self.input_width

    @property
    def result_width(self) -> int:
        """What a key head gives to `out`."""
        return self.channels if self.kind == "convolution" else self.group * self.value_dim

    @property
    def group(self) -> int:
        """g: value heads of a key head."""
        return self.value_heads // self.key_heads

    @property
    def window_rows(self) -> int:
        """The largest tree window; rows of a convolution are small."""
        return 1024 if self.kind == "convolution" else 128

    @property
    def rows(self) -> int:
        """R: rows of the window that a layer keeps: committed ones, less than two blocks, then those of the tree."""
        return 2 * BLOCK + self.window_rows


@pytree
class RecurrentRows:
    """A recurrent layer's part of a cache: row i is that of position `block_start(length) + i`, or of the tree window.

    Attributes:
      inputs: of the short convolution, float32 `[Hk, R, n]`.
      key, value, decay: of "delta", float32 `[Hk, R, K]`, `[Hk, R, g V]` (corrected, the u of the rule), `[Hk, R, g]`.
      state: of "delta", float32 `[Hk, K, g V]`, before the first row.
    """

    inputs: Any
    key: Any = None
    value: Any = None
    decay: Any = None
    state: Any = None

    def rows(self) -> dict[str, jax.Array]:
        """The arrays that have a row for each kept row, `[Hk, R, n]`."""
        names = ("inputs", "key", "value", "decay")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def kept(self) -> KeptRows:
        """What the delta rule keeps."""
        return KeptRows(self.key, self.value, self.decay, self.state)

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
    inputs = (heads, cfg.rows, cfg.input_width)
    if cfg.kind == "convolution":
        return RecurrentRows(inputs)
    key, value, decay = ((heads, cfg.rows, width) for width in (cfg.key_dim, cfg.result_width, cfg.group))
    return RecurrentRows(inputs, key, value, decay, (heads, cfg.key_dim, cfg.result_width))


def block_start(length: jax.Array) -> jax.Array:
    """The first position whose row is kept while `length` rows are committed."""
    return BLOCK * jnp.maximum(length // BLOCK - 1, 0)


def begins_alike(length: int, other: int) -> bool:
    """Whether two committed lengths have the same `block_start`."""
    return max(1, length // BLOCK) == max(1, other // BLOCK)


def predecessors(count: int, steps: int, first: jax.Array, mask: jax.Array | None) -> jax.Array:
    """The rows before each of `count` rows of a pass, from `steps` rows before it to the one before it.

    Args:
      first: int32 [], place of the tree window's first row.
      mask: bool [count, W], each row's ancestors and itself; parents have lower slots. None for a chain.

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


def commit_chunk(rows: jax.Array, new: jax.Array, length: jax.Array, count: jax.Array) -> jax.Array:
    """Kept rows `[Hk, R, n]` after the first `count` rows of a chunk `new` `[T, Hk, n]`, which follow `length` rows."""
    start = block_start(length)
    wide = jnp.pad(rows, ((0, 0), (0, new.shape[0] + BLOCK), (0, 0)))
    wide = write_inputs(wide, new, length - start)
    return jax.lax.dynamic_slice_in_dim(wide, block_start(length + count) - start, rows.shape[1], axis=1)


def commit_window(
    layers: tuple[RecurrentRows, ...], length: jax.Array, count: jax.Array, in_steps: bool
) -> tuple[RecurrentRows, ...]:
    """The rows of all layers after the first `count` rows of the tree window, which follow `length` rows.

    With `in_steps` rows are folded one after the other, and only where a block ends: bits follow from the position.
    """
    start, end = block_start(length), block_start(length + count)
    if in_steps:
        step = lambda carry: (carry[0] + BLOCK, tuple(advance(layer, length) for layer in carry[1]))  # noqa: E731
        return jax.lax.while_loop(lambda carry: carry[0] < end, step, (start, layers))[1]
    moved = tuple(advance(layer, length, at_once=True) for layer in layers)
    return jax.tree.map(lambda old, new: jnp.where(start < end, new, old), layers, moved)


def advance(layer: RecurrentRows, length: jax.Array, at_once: bool = False) -> RecurrentRows:
    """The rows without the first block, which the state takes in; `length` is any number that is not negative."""
    rows = {name: jnp.roll(array, -BLOCK, axis=1) for name, array in layer.rows().items()}
    state = None if layer.state is None else delta_fold(layer.kept(), length, block=BLOCK, at_once=at_once)
    return dataclasses.replace(layer.with_rows(rows), state=state)
