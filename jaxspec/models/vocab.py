"""VocabShard: reductions over a vocabulary whose columns are split across devices.

Device i holds the ids [i * V_local, (i + 1) * V_local), or as many of a draft's own subset of them; ids at or above the
real vocabulary size are padding. Only per-row results cross between devices, never the columns themselves.

Letters: T rows, V_local columns of this device.
"""

import bisect
import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels import registry
from pallas_kernels.row_top import MAX_COUNT, row_top

# Slices that a row is reduced in side by side. XLA's CPU loop keeps one running value per operand and waits for it at
# every column; eight independent ones make an argmax over 49152 columns 3.5 times faster (32 against 117 us).
_SLICES = 8


@dataclasses.dataclass(frozen=True)
class VocabShard:
    """The part of the vocabulary that one device holds; static, so that it can key compiled functions.

    With `axis_name`, methods must be called inside `jax.shard_map` over that axis. Over an axis of size 1 no
    collective is emitted, so results are not marked as replicated: use `check_vma=False`.
    """

    vocab_size: int  # ids of the real vocabulary
    local_size: int  # columns per device, padding included
    axis_name: str | None = None  # mesh axis over which the columns are split; None for a vocabulary in one piece
    # The ids that the columns stand for, ascending; empty where they are all ids in order. Columns after the last one
    # are padding.
    subset: tuple[int, ...] = ()

    @property
    def num_shards(self) -> int:
        """Devices that share the vocabulary."""
        return 1 if self.axis_name is None else lax.axis_size(self.axis_name)

    @property
    def is_padded(self) -> bool:
        """Whether any device holds ids that are not in the real vocabulary."""
        real = bisect.bisect_left(self.subset, self.vocab_size) if self.subset else self.vocab_size
        return self.num_shards * self.local_size > real

    @property
    def is_native(self) -> bool:
        """Whether the native library finds the largest values of a row: NaN is -inf to it, inf the largest float32."""
        return self.num_shards == 1 and registry.current().native

    def ids(self) -> Array:
        """Global ids of the local columns, int32 [V_local], ascending."""
        if not self.subset:
            return self._first_column() + jnp.arange(self.local_size, dtype=jnp.int32)
        ids = np.full(self.num_shards * self.local_size, np.iinfo(np.int32).max, np.int32)
        ids[: len(self.subset)] = self.subset
        return lax.dynamic_slice_in_dim(jnp.asarray(ids), self._first_column(), self.local_size)

    def local(self, token: Array) -> Array:
        """Local columns of global ids, int32; `local_size` (for `mode="drop"`) where no column here has the id."""
        if self.subset:
            ids = self.ids()
            column = jnp.minimum(jnp.searchsorted(ids, token), self.local_size - 1)
            return jnp.where(ids[column] == token, column, self.local_size).astype(jnp.int32)
        column = token - self._first_column()
        return jnp.where((column >= 0) & (column < self.local_size), column, self.local_size).astype(jnp.int32)

    def sum(self, x: Array) -> Array:
        """Sum over devices of a per-device result."""
        return x if self.num_shards == 1 else lax.psum(x, self._axis)

    def max(self, x: Array) -> Array:
        """Maximum over devices of a per-device result."""
        return x if self.num_shards == 1 else lax.pmax(x, self._axis)

    def min(self, x: Array) -> Array:
        """Minimum over devices of a per-device result."""
        return x if self.num_shards == 1 else lax.pmin(x, self._axis)

    def row_max(self, values: Array) -> Array:
        """Each row's largest value over all devices, [T, 1], of [T, V_local]."""
        return self.max(_reduce_row(values, jnp.maximum, -jnp.inf))[:, None]

    def argmax(self, values: Array) -> Array:
        """Global id of each row's largest value, int32 [T]: the lowest id on a tie, or in a row of -inf everywhere.

        `values` are float32 [T, V_local], without NaN.
        """
        if self.is_native:
            return self._to_ids(row_top(values, 1)[1])[:, 0]
        largest_id = jnp.iinfo(jnp.int32).max
        # Maximum, then lowest id that has it: XLA's two-operand argmax reduction is twice as slow on CPU.
        ids = jnp.where(values == self.row_max(values), self.ids(), largest_id)
        return self.min(_reduce_row(ids, jnp.minimum, largest_id))

    def log_total(self, values: Array) -> Array:
        """Log of the sum of exp(value) of each row, [T, 1], without overflow; finite even for a row of -inf."""
        if self.is_native:
            return row_top(values, 1, with_total=True)[2][:, None]
        top = jnp.maximum(self.row_max(values), jnp.finfo(jnp.float32).min)
        return top + jnp.log(jnp.maximum(self.sum(jnp.exp(values - top).sum(axis=-1, keepdims=True)), 1.0))

    def take(self, values: Array, token: Array) -> Array:
        """Each row's value, of [T, V_local], at a global id, int32 [T]."""
        column = self.local(token)[:, None]
        here = jnp.take_along_axis(values, column, axis=-1, mode="fill", fill_value=-jnp.inf)[:, 0]
        return self.max(here)

    def top_k(self, values: Array, k: int) -> tuple[Array, Array]:
        """The k largest values of each row over all devices, largest first, the lowest id first on a tie.

        `values` are float32 [T, V_local], without NaN; k is at most the padded vocabulary. Returns values float32 [T,
        k] and global ids int32 [T, k].
        """
        if self.is_native and k <= min(MAX_COUNT, self.local_size):
            best, column, _ = row_top(values, k)
            return best, self._to_ids(column)
        values = jnp.where(values == 0, 0.0, values)  # `lax.top_k` puts 0 above -0; `argmax` has them tied
        best, column = _top_k(values, min(k, self.local_size))
        ids = self._to_ids(column)
        if self.num_shards > 1:
            # Shards come in order of their ids, so position still breaks ties.
            best = lax.all_gather(best, self._axis, axis=1, tiled=True)
            ids = lax.all_gather(ids, self._axis, axis=1, tiled=True)
            best, place = lax.top_k(best, k)
            ids = jnp.take_along_axis(ids, place, axis=1)
        return best, ids.astype(jnp.int32)

    def narrow(self, columns: Array) -> Array:
        """The local columns [..., V_local] out of those of all ids, [..., n]; padded columns hold anything."""
        if not self.subset:
            return columns
        if self.num_shards > 1:
            columns = lax.all_gather(columns, self._axis, axis=columns.ndim - 1, tiled=True)
        return jnp.take(columns, self.ids(), axis=-1, mode="clip")

    def widen(self, columns: Array, local_size: int, fill: float) -> Array:
        """The reverse of `narrow`; n is `local_size`, and ids without a column get the value `fill`."""
        if not self.subset:
            return columns
        if self.num_shards > 1:
            columns = lax.all_gather(columns, self._axis, axis=columns.ndim - 1, tiled=True)
        place = np.full(self.num_shards * local_size, columns.shape[-1], np.int32)
        place[list(self.subset)] = np.arange(len(self.subset))
        first = 0 if self.num_shards == 1 else lax.axis_index(self._axis) * local_size
        place = lax.dynamic_slice_in_dim(jnp.asarray(place), first, local_size)
        return jnp.take(columns, place, axis=-1, mode="fill", fill_value=fill)

    def _to_ids(self, column: Array) -> Array:
        return self.ids()[column] if self.subset else self._first_column() + column

    def _first_column(self) -> Array | int:
        return 0 if self.num_shards == 1 else lax.axis_index(self._axis) * self.local_size

    @property
    def _axis(self) -> str:
        assert self.axis_name is not None
        return self.axis_name


def _top_k(values: Array, k: int) -> tuple[Array, Array]:
    """`lax.top_k` over the last axis of [T, V_local], three times faster for many rows on CPU.

    The k largest values lie within the k groups of largest maximum: any other group's values are beaten, or tied at a
    lower index, by one value in each of these.
    """
    rows, columns = values.shape
    width = next((w for w in (96, 64, 48, 32, 16) if columns % w == 0), 1)
    if columns // width < 4 * k or width == 1:
        return lax.top_k(values, k)
    groups = values.reshape(rows, columns // width, width)
    _, chosen = lax.top_k(groups.max(-1), k)
    chosen = jnp.sort(chosen, axis=-1)  # candidates in order of their ids, for ties
    candidates = jnp.take_along_axis(groups, chosen[:, :, None], axis=1).reshape(rows, k * width)
    best, place = lax.top_k(candidates, k)
    return best, jnp.take_along_axis(chosen, place // width, axis=1) * width + place % width


def sum_rows(arrays: Sequence[Array]) -> Array:
    """Sum several arrays over their last axis in one pass: [T, V_local] each to [T, len(arrays)]."""
    return jnp.stack(_reduce(arrays, jnp.add, 0), axis=-1)


def _reduce_row(values: Array, op: Callable, init: float) -> Array:
    """Reduce the last axis of [T, V_local] by an exactly associative `op` (maximum or minimum): [T]."""
    slices = _SLICES if values.shape[-1] % _SLICES == 0 else 1
    return functools.reduce(op, _reduce(jnp.split(values, slices, axis=-1), op, init))


def _reduce(arrays: Sequence[Array], op: Callable, init: float) -> list[Array]:
    """Reduce arrays [T, n] of one type over their last axis in one loop: [T] each."""
    start = jnp.asarray(init, arrays[0].dtype)
    combine = lambda a, b: tuple(op(x, y) for x, y in zip(a, b, strict=True))  # noqa: E731
    return list(lax.reduce(tuple(arrays), (start,) * len(arrays), combine, (1,)))
