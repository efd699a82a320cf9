"""Shared by the tests of tree attention: calls with random trees, and their results in plain numpy.

`expected_and_bound` is written from the contract in `tree_attention.api` alone.
"""

import dataclasses
import functools

import jax
import ml_dtypes
import numpy as np
from kernel_cases import ROUNDING, assert_same_bits

from pallas_kernels import registry

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


@dataclasses.dataclass(frozen=True)
class Case:
    """Operands of one call, as numpy; `mask` and `position` are None for a causal chunk."""

    qkv: np.ndarray
    cos: np.ndarray
    sin: np.ndarray
    key: np.ndarray
    value: np.ndarray
    length: int
    mask: np.ndarray | None = None
    position: np.ndarray | None = None
    offset: int | None = None
    sliding_window: int | None = None
    sinks: np.ndarray | None = None

    @property
    def operands(self):
        """The operands of a call, up to the position."""
        length = np.int32(self.length)
        return (self.qkv, self.cos, self.sin, self.key, self.value, length, self.mask, self.position)

    @property
    def rows(self):
        return len(self.qkv)

    @property
    def first_slot(self):
        """The slot into which row 0 is written."""
        return self.length + (self.offset or 0)

    @property
    def written(self):
        """The slots that rows are written at."""
        return slice(self.first_slot, self.first_slot + self.rows)


def rotate(x, cos, sin):
    """Half-split pairs (i, i + H / 2) of each head `[T, ..., H]`."""
    first, second = np.split(x, 2, axis=-1)
    cos, sin = (table.reshape(len(table), *[1] * (x.ndim - 2), -1) for table in (cos, sin))
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def visible(case):
    """bool `[T, S]`: which slots each row sees."""
    row, slot = np.arange(case.rows), np.arange(case.key.shape[1])
    reach = case.sliding_window or 10**9
    position = case.length + row if case.position is None else case.position
    seen = (slot < case.length) & (slot > position[:, None] - reach)
    distance = row[:, None] - row
    window = (distance >= 0) & (distance < reach) if case.mask is None else case.mask
    width = min(window.shape[1], len(slot) - case.length)
    assert not window[:, width:].any()
    seen[:, case.length : case.length + width] = window[:, :width]
    return seen


def assert_cache(case, key, value):
    """The rows at their slots, in the cache's dtype, and not another bit of it changed."""
    untouched = np.ones(case.key.shape[1], bool)
    untouched[case.written] = False
    assert_same_bits(key[:, untouched], case.key[:, untouched])
    assert_same_bits(value[:, untouched], case.value[:, untouched])
    # Large numbers become infinite when they are rounded.
    with np.errstate(over="ignore"):
        new_value = case.qkv[:, :, -1].astype(case.value.dtype)
    new_value = np.where(np.isfinite(new_value), new_value, np.zeros_like(new_value))
    assert_same_bits(value[:, case.written], new_value.swapaxes(0, 1))
    x, cos, sin = (array.astype(np.float64) for array in (case.qkv[:, :, -2], case.cos, case.sin))
    expected = rotate(x, cos, sin).swapaxes(0, 1)
    # Two products and their sum, each rounded.
    magnitude = rotate(np.abs(x), np.abs(cos), np.abs(sin)), rotate(np.abs(x), np.abs(cos), -np.abs(sin))
    bound = 3 * ROUNDING * np.maximum(*magnitude).swapaxes(0, 1) + 1e-30
    if case.key.dtype != np.float32:
        bound = bound + 2.0**-8 * (np.abs(expected) + bound)
    assert (np.abs(key[:, case.written].astype(np.float64) - expected) <= bound).all()


def expected_and_bound(case, key, value):
    """Attention in float64 over the cache as it was written, and how far float32 may be off.

    A score is a sum like any other (`kernel_cases.product_and_bound`); its error, and that of a rounded exponent, is
    a relative error of the weight, twice because weights are divided by their sum.
    """
    query = rotate(case.qkv[:, :, :-2].astype(np.float64), case.cos.astype(np.float64), case.sin.astype(np.float64))
    key, value = key.astype(np.float64), value.astype(np.float64)
    seen = visible(case)
    out, bound = np.zeros(query.shape), np.zeros(query.shape)
    width = query.shape[-1]
    for row in range(case.rows):
        slots = np.flatnonzero(seen[row])
        k, v = key[:, slots], value[:, slots]
        scores = np.einsum("kgh,ksh->kgs", query[row], k) / np.sqrt(width)
        magnitude = np.einsum("kgh,ksh->kgs", np.abs(query[row]), np.abs(k)) / np.sqrt(width)
        sink = np.full(scores.shape[:2], -np.inf) if case.sinks is None else case.sinks.astype(np.float64)
        most = np.maximum(scores.max(-1), sink)[..., None]
        below = most - scores
        weights = np.exp(-below)
        weights /= weights.sum(-1, keepdims=True) + np.exp(sink[..., None] - most)
        out[row] = np.einsum("kgs,ksh->kgh", weights, v)
        # The query's rotation adds three roundings and the scaling one.
        score_error = ((width / 16 + 24) * magnitude).max(-1, keepdims=True)
        relative = 2 * score_error + (below * (below < 90)).max(-1, keepdims=True) * 2 + len(slots) / 16 + 64
        bound[row] = ROUNDING * relative * np.einsum("kgs,ksh->kgh", weights, np.abs(v)) + 1e-30
    return out, bound


def poisoned(case):
    """The case with NaN in every slot that no row sees, and in those that rows are written at."""
    hidden = ~visible(case).any(axis=0)
    hidden[case.written] = True
    key, value = case.key.copy(), case.value.copy()
    key[:, hidden], value[:, hidden] = np.nan, np.nan
    return dataclasses.replace(case, key=key, value=value)


def assert_attention(case, out, key, value, rounding, active_rows=None):
    """The first `active_rows` rows' results by norm, from the caches as they were written; the others' are finite."""
    assert out.dtype == np.float32 and np.isfinite(out).all()
    exact, _ = expected_and_bound(case, key, value)
    error = np.linalg.norm((out - exact)[:active_rows])
    assert error <= rounding * np.linalg.norm(exact[:active_rows]), f"length {case.length}"


class Interpreted:
    """A GPU kernel's attention in its interpreter, with given block sizes."""

    def __init__(self, module, kernels, rounding):
        """`rounding` is by the cache's dtype: query and weights are rounded to it before they are multiplied."""
        self._module, self._kernels, self._rounding = module, kernels, rounding
        self._program = functools.cache(self._make_program)

    def function(self, config, sliding_window=None):
        """`(operands, offset, active_rows)` -> output, keys and values."""

        def run(operands, offset=None, active_rows=None):
            options = dict(offset=offset, active_rows=active_rows, sliding_window=sliding_window)
            options |= {} if config is None else {"config": config}
            with registry.using(self._kernels):
                return self._module.tree_attention(*operands, **options)

        return run

    def _make_program(self, config, sliding_window):
        """One program for each set of shapes; lengths, offsets, masks and active rows are data."""
        return jax.jit(self.function(config, sliding_window))

    def attend(self, case, config=None, active_rows=None):
        """Output, keys and values of a case, as numpy."""
        offset, active_rows = (None if number is None else np.int32(number) for number in (case.offset, active_rows))
        program = self._program(config, case.sliding_window)
        return jax.tree.map(np.asarray, program(case.operands, offset, active_rows))

    def assert_right(self, case, config=None, active_rows=None):
        """A case against plain numpy, with NaN where no row may look; the result."""
        case = poisoned(case)
        out, key, value = self.attend(case, config, active_rows)
        assert_cache(case, key, value)
        assert_attention(case, out, key, value, self._rounding[case.key.dtype.name], active_rows)
        return out, key, value

    def assert_rows_are_apart(self, rng, case, config, counts):
        """Garbage in rows that are not active reaches nothing, and that of one row reaches no row that is apart."""
        whole = self.attend(case, config, case.rows)
        for active_rows in counts:
            broken = case.qkv.copy()
            broken[active_rows:] = rng.choice([np.nan, np.inf])
            out, key, value = self.attend(dataclasses.replace(case, qkv=broken), config, active_rows)
            assert np.isfinite(out).all() and not out[active_rows:].any()
            assert np.isfinite(value.astype(np.float32)).all()
            end = case.first_slot + active_rows
            for got, expected in zip((out[:active_rows], key[:, :end], value[:, :end]), whole, strict=True):
                part = expected[:active_rows] if expected is whole[0] else expected[:, :end]
                assert_same_bits(got, part)
        case = dataclasses.replace(case, mask=np.eye(case.rows, dtype=bool))
        whole = self.attend(case, config, case.rows)
        slot = case.first_slot + 3
        # The largest numbers are infinite in bfloat16.
        for garbage in (np.nan, np.inf, -np.inf, 3.4e38)[: 3 if case.key.dtype == np.float32 else 4]:
            broken = case.qkv.copy()
            broken[3] = garbage
            got = self.attend(dataclasses.replace(case, qkv=broken), config, case.rows)
            for place, after, before in zip((3, slot, slot), got, whole, strict=True):
                axis = 0 if place == 3 and after is got[0] else 1
                assert_same_bits(np.delete(after, place, axis), np.delete(before, place, axis))


@functools.cache
def rope(width):
    """Tables for every position, so that a row's depend on nothing else."""
    angle = np.arange(3000)[:, None] * (1e4 ** -(np.arange(0, width, 2) / width))
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def random_parents(rng, rows):
    """Parents before children; -1 stands for the last token of the prefix. Chains, stars and what lies between."""
    reach = int(rng.integers(1, rows + 1))
    roots = float(rng.choice([0, 0.2]))
    return [
        -1 if row == 0 or rng.random() < roots else int(rng.integers(max(0, row - reach), row)) for row in range(rows)
    ]


def path_to(parents, row):
    """Rows from a root down to `row`."""
    path = []
    while row >= 0:
        path.append(row)
        row = parents[row]
    return path[::-1]


def tree_mask(parents, sliding_window=None, width=None):
    """Ancestors and the row itself, as far as the sliding window reaches; and each row's depth."""
    rows = len(parents)
    mask, depth = np.zeros((rows, width or rows), bool), np.zeros(rows, np.int32)
    for row in range(rows):
        path = path_to(parents, row)
        depth[row] = len(path) - 1
        mask[row, path[-(sliding_window or len(path)) :]] = True
    return mask, depth


def random_case(rng, model, rows, length, parents=None, sliding_window=None, slots=512, spread=1.0):
    """A tree, or a chunk without `parents`. Every slot that is not committed holds random numbers."""
    K, G, H, dtype = model
    qkv = rng.normal(size=(rows, K, G + 2, H)).astype(np.float32)
    qkv[:, :, :-1] *= np.sqrt(np.float32(spread))
    key, value = rng.normal(size=(2, K, slots, H)).astype(np.float32)
    key *= np.sqrt(np.float32(spread))
    mask = position = None
    depth = np.arange(rows)
    if parents is not None:
        mask, depth = tree_mask(parents, sliding_window)
        position = length + depth
    cos, sin = (table[length + depth] for table in rope(H))
    key, value = key.astype(DTYPES[dtype]), value.astype(DTYPES[dtype])
    return Case(qkv, cos, sin, key, value, length, mask, position, sliding_window=sliding_window)


def grown_case(rng, model, rows, length, offset, width, sliding_window=None, slots=512):
    """Rows `[offset, offset + rows)` of a random tree in a window of `width` slots.

    Earlier passes wrote the rows before them, some of which are on no row's path.
    """
    mask, depth = tree_mask(random_parents(rng, offset + rows), sliding_window, width)
    new = slice(offset, offset + rows)
    case = random_case(rng, model, rows, length, [-1] * rows, sliding_window, slots)
    cos, sin = (table[length + depth[new]] for table in rope(model[2]))
    return dataclasses.replace(case, cos=cos, sin=sin, mask=mask[new], position=length + depth[new], offset=offset)
