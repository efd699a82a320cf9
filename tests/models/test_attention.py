"""Blocked attention equals the reference, and causal attention equals tree attention with a triangular mask."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tree_attention import blocked, causal_attention, reference, tree_attention
from pallas_kernels.tree_attention.blocked import QUERY_BLOCK, SMALLEST_PREFIX, prefix_sizes

K, G, H = 2, 3, 8
SLOTS = 600  # three static prefix lengths: 256, 512, 600
LENGTHS = (0, 1, 100, 255, 256, 257, 290)
WINDOWS = (None, 1, 7, 300)


@functools.cache
def operands(rows):
    rng = np.random.default_rng(rows)
    # Everything behind the live rows is garbage, much larger than what is live.
    query = rng.normal(size=(rows, K, G, H)).astype(np.float32)
    key, value = rng.normal(size=(2, K, SLOTS, H)).astype(np.float32)
    return query, key, value


def with_garbage(array, live):
    array = array.copy()
    array[:, live:] = 1e6
    return array


@functools.cache
def compiled(function, windowed):
    """One program per shape; the sliding window is traced, or None."""
    if windowed:
        return jax.jit(function)
    return jax.jit(lambda *operands: function(*operands[:-1], None))


def assert_equal_reference(fast, query, key, value, length, mask, position, window):
    rows = query.shape[0]
    live = length + rows
    k, v, n = with_garbage(key, live), with_garbage(value, live), np.int32(length)
    reach = np.int32(window or SLOTS)
    expected = compiled(reference.tree_attention, True)(query, k, v, n, mask, position, reach)
    extra = (mask, position) if fast is tree_attention else ()
    got = compiled(fast, window is not None)(query, k, v, n, *extra, reach)
    np.testing.assert_allclose(got, expected, rtol=0, atol=3e-6, err_msg=f"length {length}")


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("rows", [1, 12, QUERY_BLOCK + 44])
def test_causal_attention(rows, window):
    distance = np.arange(rows)[:, None] - np.arange(rows)[None, :]
    mask = (distance >= 0) & (distance < (window or rows))
    for length in LENGTHS:
        assert_equal_reference(causal_attention, *operands(rows), length, mask, length + np.arange(rows), window)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("rows", [1, 12])
def test_tree_attention(rows, window):
    rng = np.random.default_rng(0)
    for length in LENGTHS:
        mask = (rng.random((rows, rows)) < 0.4) | np.eye(rows, dtype=bool)
        position = length + rng.integers(0, 5, rows)
        assert_equal_reference(tree_attention, *operands(rows), length, mask, position, window)


def test_reference_against_plain_numpy():
    rows, length, window = 12, 100, 30
    query, key, value = operands(rows)
    rng = np.random.default_rng(0)
    mask = (rng.random((rows, rows)) < 0.4) | np.eye(rows, dtype=bool)
    position = length + rng.integers(0, 5, rows)
    got = np.asarray(
        compiled(reference.tree_attention, True)(query, key, value, np.int32(length), mask, position, window)
    )
    for row in range(rows):
        # A row at position p sees the `window` positions p - window + 1 .. p.
        seen = [s for s in range(length) if s > position[row] - window] + [
            length + j for j in np.flatnonzero(mask[row])
        ]
        for head in range(K):
            scores = query[row, head] @ key[head, seen].T / np.sqrt(H)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            expected = weights / weights.sum(-1, keepdims=True) @ value[head, seen]
            np.testing.assert_allclose(got[row, head], expected, atol=1e-5)


def test_cpu_runs_the_blocked_implementation():
    assert prefix_sizes(SLOTS) == [SMALLEST_PREFIX, SLOTS]
    assert prefix_sizes(2112) == [256, 512, 1024, 2112]
    assert prefix_sizes(64) == [64]
    query, key, value = operands(1)
    arguments = (query, key, value, jnp.int32(3), np.ones((1, 1), bool), np.array([3], np.int32))
    assert str(jax.make_jaxpr(tree_attention)(*arguments)) == str(jax.make_jaxpr(blocked.tree_attention)(*arguments))


def test_shapes_that_do_not_fit():
    query, key, value = operands(1)
    with pytest.raises(ValueError, match=r"\(2, 600, 8\)"):
        causal_attention(jnp.asarray(query[:, :1]), jnp.asarray(key), jnp.asarray(value), jnp.int32(0))
