"""The gated delta rule over trees: the recurrence, and one row's bits whatever pass, chunk or tree it runs in."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import quick_part

from jaxspec.models.delta_rule import delta_chunk, delta_pass
from jaxspec.models.recurrent import BLOCK, RecurrentConfig, RecurrentRows, commit_window, rows_shapes
from pallas_kernels.delta_rule import DeltaRows
from pallas_kernels.native import library
from pallas_kernels.registry import Kernels, using

CONFIG = RecurrentConfig("delta", (True, False), 4, 2, value_heads=6, key_dim=16, value_dim=12)
HEADS, LENGTH = CONFIG.key_heads, 150


def random_rows(count, seed=0, decay=0.1):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    query, key = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in normal(2, count, HEADS, CONFIG.key_dim))
    rates = (count, HEADS, CONFIG.group)
    decays = np.exp(-np.abs(normal(*rates)) * np.float32(decay))
    return DeltaRows(query, key, normal(*rates, CONFIG.value_dim), decays, 1 / (1 + np.exp(-normal(*rates))))


def pick(rows, index):
    return DeltaRows(*(array[index] for array in rows))


def empty():
    shapes = rows_shapes(CONFIG, HEADS)
    return jax.tree.map(lambda shape: jnp.zeros(shape), shapes, is_leaf=lambda leaf: isinstance(leaf, tuple))


KERNELS = {"native": Kernels("cpu", "cpu", 2), "xla": Kernels("xla", "cpu")}


@pytest.fixture(params=KERNELS)
def steps(request):
    """The operations under native kernels, then left to XLA."""
    if request.param == "native" and library.load().problem is not None:
        pytest.skip("the native kernels were not built")
    return Steps(request.param)


class Steps:
    """Passes, chunks and commits as programs of one kind of kernels."""

    def __init__(self, kernels: str):
        self.kernels = kernels
        self.run_rows, self.run_chunk, self.commit = (
            self._traced(function, kernels) for function in (delta_pass, delta_chunk, commit)
        )

    @staticmethod
    @functools.cache
    def _traced(function, kernels):
        def run(*operands):
            with using(KERNELS[kernels]):
                return function(*operands)

        return jax.jit(run)

    def one_by_one(self):
        """Results of `random_rows(LENGTH)` decoded row by row, and the layer after each."""
        return one_by_one(self.kernels)


def commit(layer, length, slots, count):
    """A path of the window's rows becomes part of the prefix."""
    start = length - BLOCK * jnp.maximum(length // BLOCK - 1, 0)
    rows = {}
    for name, array in layer.rows().items():
        moved = jnp.take(array, start + slots, axis=1)
        rows[name] = jax.lax.dynamic_update_slice(array, moved, (0, start, 0))
    return commit_window((layer.with_rows(rows),), length, count, True)[0]


def chain(rows):
    return len(rows.key), np.tril(np.ones((len(rows.key),) * 2, bool))


@functools.cache
def one_by_one(kernels):
    steps = Steps(kernels)
    rows, layer, results, layers = random_rows(LENGTH), empty(), [], []
    for n in range(LENGTH):
        out, layer = steps.run_rows(layer, pick(rows, slice(n, n + 1)), n, np.array([n]), np.ones((1, 1), bool))
        layer = steps.commit(layer, n, np.zeros(1, np.int32), 1)
        results.append(np.asarray(out)[0])
        layers.append(layer)
    return np.stack(results), layers


def assert_same_layer(steps: Steps, layer: RecurrentRows, length: int):
    """Committed rows and the state have the bits of plain decoding."""
    exact = steps.one_by_one()[1][length - 1]
    np.testing.assert_array_equal(layer.state, exact.state)
    kept = length - BLOCK * max(length // BLOCK - 1, 0)
    for name, array in layer.rows().items():
        np.testing.assert_array_equal(array[:, :kept], exact.rows()[name][:, :kept], err_msg=name)


@pytest.mark.parametrize("decay", [1e-4, 0.1, 200.0])
def test_the_recurrence(steps, decay):
    """In float64; decays near one, and so strong that a quotient of them would be 0 / 0."""
    rows = random_rows(LENGTH, decay=decay)
    state, expected = np.zeros((HEADS, CONFIG.group, CONFIG.value_dim, CONFIG.key_dim)), []
    for query, key, value, a, rate in zip(*rows, strict=True):
        state = a[:, :, None, None] * state
        u = rate[..., None] * (value - np.einsum("hgvk,hk->hgv", state, key))
        state = state + u[..., None] * key[:, None, None]
        expected.append(np.einsum("hgvk,hk->hgv", state, query))
    out, _ = steps.run_chunk(empty(), rows, 0, LENGTH)
    assert np.abs(out - np.stack(expected)).max() < 2e-5 * np.abs(expected).max()


@pytest.mark.parametrize("size", quick_part([2, 5, 9, 17, 31, 32], lambda size: size in (5, 32)))
def test_chains_have_the_bits_of_plain_decoding(steps, size):
    rows, exact, layer, n = random_rows(LENGTH), steps.one_by_one()[0], empty(), 0
    while n < LENGTH:
        piece = pick(rows, slice(n, n + size))
        count, mask = chain(piece)
        out, layer = steps.run_rows(layer, piece, n, n + np.arange(count), mask)
        layer = steps.commit(layer, n, np.arange(count, dtype=np.int32), count)
        np.testing.assert_array_equal(out, exact[n : n + count])
        n += count
    assert_same_layer(steps, layer, LENGTH)


@pytest.mark.parametrize("chunks", [[LENGTH], [64, 86], [33, 1, 63, 31, 22]])
def test_prefill_has_the_bits_of_plain_decoding(steps, chunks):
    rows, exact, layer, n = random_rows(LENGTH), steps.one_by_one()[0], empty(), 0
    for count in chunks:
        padded = DeltaRows(
            *(np.pad(a, ((0, -count % 64), *((0, 0),) * (a.ndim - 1))) for a in pick(rows, slice(n, n + count)))
        )
        out, layer = steps.run_chunk(layer, padded, n, count)
        np.testing.assert_array_equal(out[:count], exact[n : n + count])
        n += count
    assert_same_layer(steps, layer, LENGTH)


def grow(rng, text, n, size, other):
    """A tree whose first path is the text's, among rows of another text: parents, depths and its rows."""
    parent, depth, on_path = [0], [0], [True]
    for row in range(1, size):
        at = int(rng.integers(row)) if rng.random() < 0.4 else row - 1
        parent.append(at)
        depth.append(depth[at] + 1)
        right = on_path[at] and not any(on_path[i] and depth[i] == depth[at] + 1 for i in range(row))
        on_path.append(right and rng.random() < 0.8 and n + depth[row] < LENGTH)
    ancestors = np.eye(size, dtype=bool)
    for row in range(1, size):
        ancestors[row] |= ancestors[parent[row]]
    made = [
        pick(text, [n + depth[row]]) if on_path[row] else pick(other, [int(rng.integers(LENGTH))])
        for row in range(size)
    ]
    rows = DeltaRows(*(np.concatenate(arrays) for arrays in zip(*made, strict=True)))
    return np.array(depth), ancestors, rows, np.flatnonzero(on_path)


@pytest.mark.parametrize("seed", quick_part(range(4), lambda seed: seed == 3))
def test_trees_acceptances_and_rewinds_have_the_bits_of_plain_decoding(steps, seed):
    """Random trees of 1 to 32 rows: a path is committed or a part of it, or the text goes back within a block."""
    rng, text, other = np.random.default_rng(seed), random_rows(LENGTH), random_rows(LENGTH, 1)
    exact, layer, n, size, folds = steps.one_by_one()[0], empty(), 0, [1, 9, 16, 32][seed], 0
    while n < LENGTH - 1:
        depth, ancestors, rows, path = grow(rng, text, n, size, other)
        out, layer = steps.run_rows(layer, rows, n, n + depth, ancestors)
        np.testing.assert_array_equal(np.asarray(out)[path], exact[n : n + len(path)])
        count = int(rng.integers(1, len(path) + 1))
        slots = np.pad(path, (0, size - len(path))).astype(np.int32)
        layer = steps.commit(layer, n, slots, count)
        folds += (n + count) // BLOCK - n // BLOCK
        n += count
        assert_same_layer(steps, layer, n)
        back = int(rng.integers(1, 4))
        if rng.random() < 0.2 and n % BLOCK >= back:  # a rewind changes the length alone
            n -= back
    assert folds >= 4
