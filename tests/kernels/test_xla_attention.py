"""XLA's attention: the blocked form equals the reference, and a chunk equals a tree with a triangular mask."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import registry
from pallas_kernels.tree_attention import blocked, reference, tree_attention
from pallas_kernels.tree_attention.blocked import QUERY_BLOCK, SMALLEST_PREFIX, prefix_sizes

K, G, H = 2, 3, 8
SLOTS = 600  # three static prefix lengths: 256, 512, 600
LENGTHS = (0, 1, 100, 255, 256, 257, 290)
WINDOWS = (None, 1, 7, 300)


@functools.cache
def operands(rows):
    rng = np.random.default_rng(rows)
    # Everything after the slots in use is garbage, much larger than what is in use.
    query = rng.normal(size=(rows, K, G, H)).astype(np.float32)
    key, value = rng.normal(size=(2, K, SLOTS, H)).astype(np.float32)
    return query, key, value


def with_garbage(array, used):
    array = array.copy()
    array[:, used:] = 1e6
    return array


@functools.cache
def compiled(function, windowed):
    """One program per shape; the sliding window is traced, or None."""
    if windowed:
        return jax.jit(function)
    return jax.jit(lambda *operands: function(*operands[:-1], None))


def assert_equal_reference(fast, query, key, value, length, mask, position, window):
    rows = query.shape[0]
    used = length + rows
    k, v, n = with_garbage(key, used), with_garbage(value, used), np.int32(length)
    reach = np.int32(window or SLOTS)
    expected = compiled(reference.attend_tree, True)(query, k, v, n, mask, position, reach)
    extra = (mask, position) if fast is blocked.attend_tree else ()
    got = compiled(fast, window is not None)(query, k, v, n, *extra, reach)
    np.testing.assert_allclose(got, expected, rtol=0, atol=3e-6, err_msg=f"length {length}")


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("rows", [1, 12, QUERY_BLOCK + 44])
def test_causal_attention(rows, window):
    distance = np.arange(rows)[:, None] - np.arange(rows)[None, :]
    mask = (distance >= 0) & (distance < (window or rows))
    for length in LENGTHS:
        assert_equal_reference(blocked.attend_chunk, *operands(rows), length, mask, length + np.arange(rows), window)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("rows", [1, 12])
def test_tree_attention(rows, window):
    rng = np.random.default_rng(0)
    for length in LENGTHS:
        mask = (rng.random((rows, rows)) < 0.4) | np.eye(rows, dtype=bool)
        position = length + rng.integers(0, 5, rows)
        assert_equal_reference(blocked.attend_tree, *operands(rows), length, mask, position, window)


def test_reference_against_plain_numpy():
    rows, length, window = 12, 100, 30
    query, key, value = operands(rows)
    rng = np.random.default_rng(0)
    mask = (rng.random((rows, rows)) < 0.4) | np.eye(rows, dtype=bool)
    position = length + rng.integers(0, 5, rows)
    got = np.asarray(compiled(reference.attend_tree, True)(query, key, value, np.int32(length), mask, position, window))
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


def test_prefix_sizes():
    assert prefix_sizes(SLOTS) == [SMALLEST_PREFIX, SLOTS]
    assert prefix_sizes(2112) == [256, 512, 1024, 2112]
    assert prefix_sizes(64) == [64]


@pytest.mark.parametrize("active_rows", [None, 1, 3])
def test_step_rotates_writes_and_attends(active_rows):
    rows, length = 5, 100
    query, key, value = operands(rows)
    rng = np.random.default_rng(0)
    new_key, new_value = rng.normal(size=(2, rows, K, H)).astype(np.float32)
    cos, sin = rng.normal(size=(2, rows, H // 2)).astype(np.float32)
    mask, position = np.tril(np.ones((rows, rows), bool)), length + np.arange(rows, dtype=np.int32)
    qkv = jnp.concatenate([query, new_key[:, :, None], new_value[:, :, None]], axis=2)
    with registry.using(registry.Kernels("xla", "cpu")):
        step = jax.jit(
            lambda qkv, active_rows: tree_attention(
                qkv, cos, sin, key, value, length, mask, position, active_rows=active_rows
            )
        )
        out, written_key, written_value = step(qkv, None if active_rows is None else jnp.int32(active_rows))

    def rotated(x):
        first, second = np.split(x, 2, axis=-1)
        c, s = (table.reshape(rows, *[1] * (x.ndim - 2), -1) for table in (cos, sin))
        return np.concatenate([first * c - second * s, second * c + first * s], axis=-1)

    expected_key, expected_value = key.copy(), value.copy()
    expected_key[:, length : length + rows] = rotated(new_key).swapaxes(0, 1)
    expected_value[:, length : length + rows] = new_value.swapaxes(0, 1)
    np.testing.assert_allclose(written_key, expected_key, atol=1e-6)
    np.testing.assert_array_equal(written_value, expected_value)
    expected = reference.attend_tree(rotated(query), expected_key, expected_value, jnp.int32(length), mask, position)
    np.testing.assert_allclose(out[:active_rows], expected[:active_rows], atol=3e-6)


def test_shapes_that_do_not_fit():
    query, key, value = operands(1)
    qkv = jnp.zeros((1, 1, G + 2, H))
    with pytest.raises(ValueError, match=r"\(2, 600, 8\)"):
        tree_attention(qkv, jnp.zeros((1, 4)), jnp.zeros((1, 4)), jnp.asarray(key), jnp.asarray(value), jnp.int32(0))
