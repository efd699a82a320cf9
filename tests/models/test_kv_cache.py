"""Moving window rows into the prefix: against numpy, at the end of the cache, and in place."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.kv_cache import KVCache, commit_path, permute_window

LAYERS, HEADS, SLOTS, WIDTH, PATH = 2, 3, 24, 5, 4


def random_cache(rng, length, slots=SLOTS):
    def layers():
        return tuple(rng.normal(size=(HEADS, slots, WIDTH)).astype(np.float32) for _ in range(LAYERS))

    return KVCache(layers(), layers(), np.int32(length))


def arrays(cache):
    return [np.asarray(x) for x in (*cache.key, *cache.value)]


@functools.cache
def compiled(function):
    return jax.jit(function, static_argnames="window")


# The last of these leaves room for the path and nothing else.
@pytest.mark.parametrize("length", [0, 9, SLOTS - PATH])
def test_committing_a_path(length):
    rng = np.random.default_rng(length)
    window = SLOTS - length
    for count in (0, 1, 2, 3, 4):
        cache = random_cache(rng, length)
        path = rng.choice(window, count, replace=False).astype(np.int32)  # in any order
        # Slots behind the count may hold anything.
        junk = rng.choice([0, -1, -(2**31), 2**31 - 1, SLOTS, window, 3], PATH - count)
        slots = np.concatenate([path, junk]).astype(np.int32)
        moved = compiled(commit_path)(cache, slots, np.int32(count), window=window)
        assert moved.length == length + count and moved.length.dtype == np.int32
        for before, after in zip(arrays(cache), arrays(moved), strict=True):
            assert after.shape == before.shape and after.dtype == before.dtype
            np.testing.assert_array_equal(after[:, :length], before[:, :length])
            np.testing.assert_array_equal(after[:, length : length + count], before[:, length + path])
            np.testing.assert_array_equal(after[:, length + PATH :], before[:, length + PATH :])
            assert np.isfinite(after).all()  # 0 * NaN would leak through a mask


@pytest.mark.parametrize("length", [0, 7, SLOTS - PATH])
def test_permuting_the_window(length):
    """Any slots, some of them twice, some overwritten before they are read if they were moved one by one."""
    rng = np.random.default_rng(length)
    every = [[0, 1, 2, 3], [3, 2, 1, 0], [1, 1, 1, 1], [1, 2, 3, 3], [2, 0, 2, 0]]
    for slots in [*every, *rng.integers(SLOTS - length, size=(5, PATH)).tolist()]:
        cache = random_cache(rng, length)
        moved = compiled(permute_window)(cache, np.array(slots, np.int32), window=SLOTS - length)
        assert moved.length == length
        for before, after in zip(arrays(cache), arrays(moved), strict=True):
            expected = before.copy()
            expected[:, length : length + PATH] = before[:, length + np.array(slots)]
            np.testing.assert_array_equal(after, expected)


def test_a_donated_cache_moves_in_place():
    """A copy of the layers in each round would cost more than the round's own attention."""
    length, slots, path = 100, 4096, np.array([5, 2, 9, 40], np.int32)
    # Copied: a donated buffer must not be numpy's.
    cache = jax.tree.map(jnp.array, random_cache(np.random.default_rng(0), length, slots))
    expected = [x[:, length + path] for x in arrays(cache)]
    commit = functools.partial(commit_path, window=64)
    run = jax.jit(commit, donate_argnums=0).lower(cache, path, np.int32(3)).compile()
    assert run.memory_analysis().temp_size_in_bytes < cache.key[0].nbytes / 8
    places = [x.unsafe_buffer_pointer() for x in (*cache.key, *cache.value)]
    moved = run(cache, path, np.int32(3))
    assert [x.unsafe_buffer_pointer() for x in (*moved.key, *moved.value)] == places
    for after, rows in zip(arrays(moved), expected, strict=True):
        np.testing.assert_array_equal(after[:, length : length + PATH], rows)
