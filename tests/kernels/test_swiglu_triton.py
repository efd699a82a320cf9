"""Fused norm and SwiGLU in the Triton dialect: against float64 in the interpreter, and lowered for CUDA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import DENSE, XLA, assert_close, numbers, run
from lowering import lower_for_cuda
from scipy.special import expit

from jaxspec.models.config import ModelConfig
from jaxspec.models.params import declare_params, is_info
from jaxspec.models.transformer import feed_forward
from pallas_kernels import registry
from pallas_kernels.linear import Blocks
from pallas_kernels.linear.blocks import FORMATS
from pallas_kernels.swiglu import norm_swiglu, swiglu, triton
from pallas_kernels.swiglu.config import MAX_ROWS, Config

SWIGLU = (("swiglu", "triton"),)
INTERPRETED = registry.Kernels("pallas-triton", "gpu", implementations=SWIGLU, interpret=True)
LOWERED = registry.Kernels("pallas-triton", "gpu", implementations=SWIGLU, device_kind="NVIDIA H100 80GB HBM3")

# What one rounding to the weights' dtype, and the float32 sums of up to 200 terms, are off by, relative to the terms.
UNIT = {"bfloat16": 2.0**-8, "float32": 2.0**-17}
# Rows, inputs and columns: of one block, at and around the edges of blocks, and widths that no block divides. Each is a
# program of its own, which takes a second to compile.
SHAPES = ((1, 64, 48), (1, 65, 17), (5, 100, 83), (16, 16, 16), (17, 192, 33), (64, 128, 64))
EPS = 1e-5


@functools.cache
def operands(rows, inputs, columns, dtype):
    """Rows of very different sizes, a norm's scale with signs, and weights."""
    rng = np.random.default_rng(rows)
    x = rng.normal(size=(rows, inputs)) * 10.0 ** rng.uniform(-3, 3, (rows, 1))
    scale, weight = rng.normal(size=inputs), rng.normal(size=(2 * columns, inputs)) / np.sqrt(inputs)
    return x.astype(np.float32), scale.astype(np.float32), weight.astype(DENSE[dtype])


def expected_and_bound(x, scale, weight, dtype):
    """In float64, and how far a result may be off whose rows were rounded once to the weights' dtype."""
    x, weight = x.astype(np.float64), numbers(weight).astype(np.float64)
    if scale is not None:
        x = x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + EPS) * scale
    gate, up = np.split(x @ weight.T, 2, axis=1)
    gate_error, up_error = np.split(np.abs(x) @ np.abs(weight).T * UNIT[dtype], 2, axis=1)
    activated = gate * expit(gate)
    # The slope of silu is at most 1.1.
    bound = 1.1 * gate_error * (np.abs(up) + up_error) + np.abs(activated) * (up_error + np.abs(up) * 1e-5)
    return activated * up, bound + 1e-30


def fused(x, scale, weight, eps, config):
    """The kernel itself, with given block sizes."""
    return triton.swiglu(x, weight, scale, eps, config)


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_reference(dtype, shape):
    x, scale, weight = operands(*shape, dtype)
    got = run(norm_swiglu, x, scale, weight, kernels=INTERPRETED, eps=EPS)
    assert got.dtype == np.float32 and got.shape == (shape[0], shape[2])
    assert_close(got, *expected_and_bound(x, scale, weight, dtype))


@pytest.mark.parametrize("dtype", UNIT)
def test_xla_meets_the_same_bound(dtype):
    x, scale, weight = operands(5, 100, 83, dtype)
    got = run(norm_swiglu, x, scale, weight, kernels=XLA, eps=EPS)
    assert_close(got, *expected_and_bound(x, scale, weight, dtype))


def test_without_a_norm():
    x, _, weight = operands(5, 100, 83, "bfloat16")
    got = run(swiglu, x, weight, kernels=INTERPRETED)
    assert_close(got, *expected_and_bound(x, None, weight, "bfloat16"))


@pytest.mark.parametrize(("block_f", "block_k"), [(64, 16), (16, 128)])
def test_any_block_sizes(block_f, block_k):
    x, scale, weight = operands(3, 100, 83, "float32")
    got = run(fused, x, scale, weight, kernels=INTERPRETED, eps=EPS, config=Config(block_f, block_k, 4, 2))
    assert_close(got, *expected_and_bound(x, scale, weight, "float32"))


def test_a_broken_row_stays_by_itself():
    x, scale, weight = operands(5, 100, 83, "bfloat16")
    broken = x.copy()
    broken[2] = np.nan
    broken[3] = np.inf
    sound, got = (run(norm_swiglu, rows, scale, weight, kernels=INTERPRETED, eps=EPS) for rows in (x, broken))
    np.testing.assert_array_equal(got[[0, 1, 4]], sound[[0, 1, 4]])
    assert np.isnan(got[2]).all()


def test_gates_of_any_size():
    x = np.array([[-1e4], [-90], [0], [90], [1e4]], np.float32)
    got = run(swiglu, x, np.ones((2, 1), np.float32), kernels=INTERPRETED)
    np.testing.assert_allclose(got, x * x * expit(x.astype(np.float64)), rtol=1e-5, atol=1e-30)


def test_what_the_kernel_does_not_take_goes_through_xla():
    weights = np.zeros((4, 32), np.float32)
    blocks = Blocks(jnp.zeros((4, 1, FORMATS["q8_0"].nbytes), jnp.uint8), "q8_0")
    for rows, weight in ((MAX_ROWS + 1, weights), (1, weights.astype(np.float16)), (1, blocks)):
        assert "triton" not in lower(np.ones((rows, 32), np.float32), np.ones(32, np.float32), weight)
    assert "triton" in lower(np.ones((MAX_ROWS, 32), np.float32), np.ones(32, np.float32), weights)


@pytest.mark.parametrize("kernels", [XLA, INTERPRETED])
def test_refuses_what_does_not_fit(kernels):
    x, scale, weight = operands(5, 64, 48, "float32")
    with registry.using(kernels):
        with pytest.raises(ValueError, match=r"rms_norm needs \[\.\.\., D\] and \[D\]"):
            norm_swiglu(x, scale[1:], weight, EPS)
        with pytest.raises(ValueError, match="as many gate as up rows, got 95"):
            norm_swiglu(x, scale, weight[1:], EPS)
        with pytest.raises(ValueError, match=r"linear needs \[T, I\] and \[O, I\]"):
            norm_swiglu(x, scale, weight[:, 1:], EPS)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(("rows", "inputs", "columns"), [(1, 4096, 14336), (64, 8192, 3584), (3, 100, 83)])
def test_lowers_for_cuda(dtype, rows, inputs, columns):
    x, scale = jax.ShapeDtypeStruct((rows, inputs), jnp.float32), jax.ShapeDtypeStruct((inputs,), jnp.float32)
    text = lower(x, scale, jax.ShapeDtypeStruct((2 * columns, inputs), dtype))
    assert text.count("custom_call @__gpu$xla.gpu.triton") == 1
    assert triton.NAME in text


def test_a_models_block_has_its_norm_inside_the_kernel():
    cfg = ModelConfig("llama", 1, 64, 48, 4, 2, 16, 64, 64)
    infos = declare_params(cfg, jnp.bfloat16)["layers"][0]
    layer = jax.tree.map(lambda info: jax.ShapeDtypeStruct(info.shape, info.dtype), infos, is_leaf=is_info)

    def block(layer, x):
        with registry.using(LOWERED):
            return feed_forward(layer, cfg, x, None)

    text = lower_for_cuda(block, layer, jax.ShapeDtypeStruct((8, 64), jnp.float32))
    assert text.count("custom_call @__gpu$xla.gpu.triton") == 1
    assert "rsqrt" not in text.replace(kernel_of(text), "")


def kernel_of(text):
    """The kernel's own code in a program's text."""
    return next(line for line in text.splitlines() if "xla.gpu.triton" in line)


def lower(x, scale, weight):
    """Program text for an H100."""

    def call(x, scale, weight):
        with registry.using(LOWERED):
            return norm_swiglu(x, scale, weight, EPS)

    return lower_for_cuda(call, x, scale, weight)
