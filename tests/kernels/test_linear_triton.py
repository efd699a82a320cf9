"""Products of a few rows by weights in planes, in the Triton dialect: in the interpreter, and lowered for CUDA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import assert_close, numbers, random_weight, run
from lowering import lower_for_cuda
from marks import quick_part
from scipy.special import expit

from pallas_kernels import registry
from pallas_kernels.linear import linear, triton
from pallas_kernels.linear.blocks import FORMATS, PLANES, Blocks
from pallas_kernels.linear.config import MAX_ROWS, Config, choose
from pallas_kernels.linear.planes import planes_name, to_planes
from pallas_kernels.swiglu import swiglu

LINEAR = (("linear", "triton"),)
INTERPRETED = registry.Kernels("pallas-triton", "gpu", implementations=LINEAR, interpret=True)
LOWERED = registry.Kernels("pallas-triton", "gpu", implementations=LINEAR, device_kind="NVIDIA H100 80GB HBM3")
NAMES = [name.removesuffix("_planes") for name in PLANES]

# Rounding a row and a weight to bfloat16, and float32 sums, are off by this relative to the terms.
UNIT = 2.0**-8 + 2.0**-17


@functools.cache
def operands(name, rows, outputs, inputs):
    """Rows of very different sizes, and a weight in planes with its numbers."""
    rng = np.random.default_rng(rows)
    x = rng.normal(size=(rows, inputs)) * 10.0 ** rng.uniform(-3, 3, (rows, 1))
    weight = random_weight(rng, name, outputs, inputs)
    planes = Blocks(to_planes(weight.data, name, outputs), planes_name(name))
    return x.astype(np.float32), planes, numbers(weight).astype(np.float64)


def product_and_bound(x, weight):
    """In float64, and how far a result may be off."""
    x = x.astype(np.float64)
    return x @ weight.T, np.abs(x) @ np.abs(weight).T * UNIT + 1e-30


@pytest.mark.parametrize("name", quick_part(NAMES, lambda name: name in ("q4_0", "q6_k", "int8_g64", "fp8_g32")))
def test_equals_the_reference(name):
    """Several steps, the last of them with groups past the end, and outputs that no block divides."""
    x, planes, weight = operands(name, 5, 72, 1280)
    got = run(linear, x, planes, kernels=INTERPRETED)
    assert got.dtype == np.float32 and got.shape == (5, 72)
    assert_close(got, *product_and_bound(x, weight))


@pytest.mark.parametrize(("rows", "splits", "name"), [(1, 4, "q4_0"), (9, 2, "int4_g128"), (33, 8, "q6_k")])
def test_parts_of_the_inputs(rows, splits, name):
    """Also parts that the steps do not fill, and tiles of 8, 16 and 64 rows."""
    x, planes, weight = operands(name, rows, 64, 2304)
    got = run(fused, x, planes, kernels=INTERPRETED, config=Config(32, 64, splits, 4, 3))
    assert_close(got, *product_and_bound(x, weight))


def fused(x, weight, config):
    """The kernel itself, with given block sizes."""
    return triton.linear(x, weight, config)


@pytest.mark.parametrize("splits", [1, 2])
def test_gate_and_up(splits):
    x, planes, weight = operands("q4_0", 5, 96, 512)
    got = run(gated, x, planes, kernels=INTERPRETED, config=Config(32, 64, splits, 4, 3))
    (gate, up), (gate_off, up_off) = (np.split(part, 2, axis=1) for part in product_and_bound(x, weight))
    activated = gate * expit(gate)
    # The slope of silu is at most 1.1.
    bound = 1.1 * gate_off * (np.abs(up) + up_off) + np.abs(activated) * (up_off + np.abs(up) * 1e-5) + 1e-30
    assert_close(got, activated * up, bound)


def gated(x, weight, config):
    return triton.swiglu(x, weight, config)


def test_a_rows_sum_does_not_depend_on_the_rows_beside_it():
    """As long as a call has the same tile of rows."""
    x, planes, _ = operands("int4_g64", 8, 64, 1024)
    whole, one = (run(linear, rows, planes, kernels=INTERPRETED) for rows in (x, x[3:4]))
    np.testing.assert_array_equal(one, whole[3:4])


# Inputs and outputs of one device's share: attention's products and the MLP's of Llama-3-8B, of Llama-3-70B on 8
# devices, of Qwen2.5-7B on 4, and a Mixtral expert on 8. An eighth of the outputs, since the interpreter is slow.
SHARES = {
    "llama-3-8b out": (4096, 512), "llama-3-8b down": (14336, 512), "llama-3-70b qkv, 8": (8192, 160),
    "llama-3-70b down, 8": (3584, 1024), "qwen2.5-7b gate and up, 4": (3584, 1184), "qwen2.5-7b down, 4": (4736, 448),
    "mixtral down, 8": (1792, 512),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("share", "name", "rows"), [
    (share, ("q4_0", "int4_g128", "q8_0", "fp8_g128")[i % 4], (1, 16)[i // 4]) for i, share in enumerate(SHARES)
])  # fmt: skip
def test_shares_of_real_models(share, name, rows):
    """With the block sizes that the call gets on a device."""
    inputs, outputs = SHARES[share]
    x, planes, weight = operands(name, rows, outputs, inputs)
    assert_close(run(linear, x, planes, kernels=INTERPRETED), *product_and_bound(x, weight))


def lower(function, name, rows, outputs, inputs):
    """Program text for an H100."""
    block = PLANES[planes_name(name)]
    weight = Blocks(jax.ShapeDtypeStruct((outputs, inputs // block.values, block.nbytes), jnp.uint8), block.name)

    def call(x, weight):
        with registry.using(LOWERED):
            return function(x, weight)

    return lower_for_cuda(call, jax.ShapeDtypeStruct((rows, inputs), jnp.float32), weight)


@pytest.mark.parametrize("name", NAMES)
def test_lowers_for_cuda(name):
    for rows in (1, 64):
        text = lower(linear, name, rows, 4096, 14336)
        assert text.count("custom_call @__gpu$xla.gpu.triton") == 1 and triton.NAME in text


def test_gate_and_up_are_one_kernel_with_the_activation():
    text = lower(swiglu, "q4_0", 8, 28672, 4096)
    assert text.count("custom_call @__gpu$xla.gpu.triton") == 1
    kernel = next(line for line in text.splitlines() if "xla.gpu.triton" in line)
    assert "exponential" not in text.replace(kernel, "") and "logistic" not in text.replace(kernel, "")


def test_what_the_kernel_does_not_take_goes_through_xla():
    assert "triton" not in lower(linear, "q4_0", MAX_ROWS + 1, 64, 64)
    assert "triton" in lower(linear, "q4_0", MAX_ROWS, 64, 64)
    # Places of bytes are int32.
    assert "triton" not in lower(linear, "q8_0", 1, 1 << 17, 16384) and "triton" in lower(
        linear, "q8_0", 1, 1 << 16, 16384
    )
    blocks = Blocks(jax.ShapeDtypeStruct((64, 2, FORMATS["q5_0"].nbytes), jnp.uint8), "q5_0")

    def call(x, weight):
        with registry.using(LOWERED):
            return linear(x, weight)

    assert "triton" not in lower_for_cuda(call, jax.ShapeDtypeStruct((1, 64), jnp.float32), blocks)


def test_parts_fill_a_gpu():
    """Twice as many programs as an H100 has multiprocessors, unless the parts would be too short."""
    for outputs, code_bytes in ((4096, 2048), (4096, 7168), (1024, 4096), (28672, 2048)):
        config = choose("", "q4_0_planes", 8, outputs, code_bytes)
        programs, steps = outputs // config.block_o * config.splits, code_bytes // config.step // config.splits
        assert steps >= 4 and (programs >= 264 or steps < 8)
        assert choose("", "q4_0_planes", 1, outputs, code_bytes) == config
