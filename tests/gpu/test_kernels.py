"""Every kernel on the device, against the same operation in float32 on the host."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import registry
from pallas_kernels.swiglu import norm_swiglu, swiglu
from pallas_kernels.tree_attention import tree_attention

ORACLE = registry.Kernels("xla", "cpu")
# Relative to the largest number of a result: bfloat16 rounds to 2^-9, and a result is a sum of many rounded products.
TOLERANCE = {"bfloat16": 2e-2, "float32": 1e-4}
EPS = 1e-5


def kernels_for(name, device, operation, implementation):
    """A set of kernels whose own implementation of an operation runs here; the test is skipped where it cannot."""
    obstacle = registry.find_obstacle(implementation, registry.choose("auto", "gpu", device=device).capability)
    if obstacle:
        pytest.skip(f"{name}: {obstacle}")
    kernels = registry.choose(name, "gpu", device=device)
    assert dict(kernels.implementations).get(operation) == implementation
    return kernels


def run(function, operands, kernels, device):
    """The results on a device, as float32 numbers."""

    def call(operands):
        with registry.using(kernels):
            return function(*operands)

    with jax.default_device(device):
        placed = jax.device_put(operands, device)
        return jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), jax.jit(call)(placed))


def assert_near(got, exact, dtype):
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(exact), strict=True):
        assert np.isfinite(mine).all()
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=TOLERANCE[dtype] * max(1.0, np.abs(theirs).max()))


def as_float32(operands):
    return [np.asarray(o, np.float32) if jnp.issubdtype(o.dtype, jnp.floating) else o for o in operands]


def tree_mask(rng, rows):
    """A random tree's ancestors, each row's own slot among them, and depths."""
    mask, depth = np.eye(rows, dtype=bool), np.zeros(rows, np.int32)
    for row in range(1, rows):
        parent = rng.integers(row)
        mask[row] |= mask[parent]
        depth[row] = depth[parent] + 1
    return mask, depth


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("name", "implementation"), [("pallas-triton", "triton"), ("mosaic", "mosaic")])
@pytest.mark.parametrize(
    ("rows", "prefix", "heads", "group", "width"),
    [(1, 0, 8, 4, 128), (8, 1000, 8, 4, 128), (16, 64, 3, 3, 64), (64, 4097, 1, 8, 128), (128, 300, 2, 8, 64)],
)
def test_attention(gpu, name, implementation, dtype, rows, prefix, heads, group, width):
    if implementation == "mosaic" and dtype == "float32":
        pytest.skip("Mosaic's attention is for bfloat16 caches")
    kernels = kernels_for(name, gpu, "tree_attention", implementation)
    rng = np.random.default_rng(rows)
    mask, depth = tree_mask(rng, rows)
    slots = -(-(prefix + rows) // 64) * 64
    position = (prefix + depth).astype(np.int32)
    angle = position[:, None] * 10.0 ** -np.linspace(0, 4, width // 2)
    cache = [rng.normal(size=(heads, slots, width)).astype(jnp.dtype(dtype)) for _ in range(2)]
    operands = [
        rng.normal(size=(rows, heads, group + 2, width)).astype(np.float32),
        np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32),
        *cache, np.int32(prefix), mask, position,
    ]  # fmt: skip
    got = run(tree_attention, operands, kernels, gpu)
    exact = run(tree_attention, as_float32(operands), ORACLE, jax.devices("cpu")[0])
    used = prefix + rows
    assert_near((got[0], got[1][:, :used], got[2][:, :used]), (exact[0], exact[1][:, :used], exact[2][:, :used]), dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("name", "implementation"), [("pallas-triton", "triton"), ("jax-triton", "jax_triton")])
@pytest.mark.parametrize(
    ("rows", "inputs", "columns"), [(1, 4096, 14336), (16, 576, 1536), (64, 2048, 3584), (3, 100, 83)]
)
def test_swiglu(gpu, name, implementation, dtype, rows, inputs, columns):
    kernels = kernels_for(name, gpu, "swiglu", implementation)
    rng = np.random.default_rng(rows)
    x, scale = rng.normal(size=(rows, inputs)).astype(np.float32), rng.normal(size=inputs).astype(np.float32)
    weight = (rng.normal(size=(2 * columns, inputs)) / np.sqrt(inputs)).astype(jnp.dtype(dtype))
    host = jax.devices("cpu")[0]

    def normed(x, scale, weight):
        return norm_swiglu(x, scale, weight, EPS)

    exact = run(normed, as_float32([x, scale, weight]), ORACLE, host)
    assert_near(run(normed, [x, scale, weight], kernels, gpu), exact, dtype)
    assert_near(run(swiglu, [x, weight], kernels, gpu), run(swiglu, as_float32([x, weight]), ORACLE, host), dtype)


def test_auto_finds_kernels(gpu):
    kernels = registry.choose("auto", "gpu", device=gpu)
    if registry.find_obstacle("triton", kernels.capability):
        pytest.skip("kernels are for NVIDIA GPUs from Ampere on")
    assert {operation for operation, _ in kernels.implementations} == {"tree_attention", "swiglu"}
    if importlib.util.find_spec("jax_triton") is None:
        assert ("swiglu", "jax_triton") not in kernels.implementations
