"""Rows of caches moved within the window, by XLA and by one kernel for all layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowering import lower_for_cuda

from pallas_kernels import registry
from pallas_kernels.move_rows import move_rows, triton

MOVE = (("move_rows", "triton"),)
KERNELS = {
    "xla": registry.Kernels("xla", "gpu"),
    "triton": registry.Kernels("pallas-triton", "gpu", implementations=MOVE, interpret=True),
    "tpu": registry.Kernels("xla", "tpu"),
}
LOWERED = registry.Kernels("pallas-triton", "gpu", implementations=MOVE, device_kind="NVIDIA H100 80GB HBM3")


def moved(kernels, caches, source, start, window):
    def run(caches, source, start):
        with registry.using(kernels):
            return move_rows(caches, source, start, window)

    return jax.tree.map(np.asarray, jax.jit(run)(caches, source, start))


def caches(*shapes, dtype=np.float32):
    rng = np.random.default_rng(1)
    return tuple(rng.normal(size=shape).astype(dtype) for shape in shapes)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("start", [0, 8, 24])
@pytest.mark.parametrize("rows", [1, 5, 16])
def test_moves(name, rows, start):
    """Rows of every layer move, for heads of two kinds and a width that is no power of two; all else stays.

    A window may end after the cache. Slots that nothing is taken from hold NaN, which must not spread.
    """
    given = caches((2, 40, 24), (1, 40, 24), (2, 40, 24))
    rng = np.random.default_rng(rows)
    source = (start + rng.integers(0, 16, rows)).astype(np.int32)
    source[-1] = min(start + 19, 39)
    for cache in given:
        cache[:, np.setdiff1d(np.arange(40), source)] = np.nan
    for cache, after in zip(given, moved(KERNELS[name], given, source, np.int32(start), 20), strict=True):
        expected = cache.copy()
        expected[:, start : start + rows] = cache[:, source]
        np.testing.assert_array_equal(after, expected)


@pytest.mark.parametrize("name", KERNELS)
def test_of_sequences_in_a_batch(name):
    given = tuple(np.stack([cache, cache + 1]) for cache in caches((1, 32, 16), (1, 32, 16)))
    source, start = np.int32([[9, 12, 11], [5, 6, 5]]), np.int32([8, 4])

    def run(*operands):
        with registry.using(KERNELS[name]):
            return move_rows(*operands, 32)

    after = jax.jit(jax.vmap(run))(given, source, start)
    for cache, got in zip(given, after, strict=True):
        for i in range(2):
            expected = cache[i].copy()
            expected[:, start[i] : start[i] + 3] = cache[i][:, source[i]]
            np.testing.assert_array_equal(got[i], expected)


def lower(layers, rows, shape=(8, 1088, 128), dtype=jnp.bfloat16):
    def run(*operands):
        with registry.using(LOWERED):
            return move_rows(*operands, 32)

    cache = jax.ShapeDtypeStruct(shape, dtype)
    integers = jax.ShapeDtypeStruct((rows,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    return lower_for_cuda(run, (cache,) * layers, *integers)


@pytest.mark.thorough
def test_one_launch_for_all_layers():
    text = lower(64, 17)
    assert text.count("custom_call @__gpu$xla.gpu.triton") == 1 and triton.NAME in text
    assert "dynamic_update_slice" not in text and "gather" not in text
    # Many rows go through XLA.
    most = triton.MOST_NUMBERS // triton.MIN_COLUMNS
    assert "xla.gpu.triton" in lower(2, most) and "xla.gpu.triton" not in lower(2, most + 1)
    # As many pointers as a kernel takes.
    assert lower(2 * triton.MOST_CACHES, 17).count("custom_call @__gpu$xla.gpu.triton") == 2


def test_refuses_what_does_not_fit():
    (cache,) = caches((1, 8, 4))
    with pytest.raises(ValueError, match="needs caches .* of at least 9 slots"):
        move_rows((cache,), jnp.zeros(9, jnp.int32), jnp.int32(0), 8)
    with pytest.raises(ValueError, match="needs an int32 vector"):
        move_rows((cache,), jnp.zeros(3, jnp.float32), jnp.int32(0), 8)
