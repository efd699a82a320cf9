"""Block formats: the decoder against the `gguf` package's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from kernel_cases import group_numbers, random_weight
from marks import quick_part

from pallas_kernels.linear.blocks import FORMATS, GGUF_FORMATS, GROUP_FORMATS, Blocks, as_matrix, dequantise
from pallas_kernels.linear.groups import decode_groups, encode_groups, find_group_format, quantise_groups


def random_blocks(name: str, *shape: int, seed: int = 0) -> np.ndarray:
    """Random bytes `[*shape, nbytes]` whose scales are finite."""
    data = np.random.default_rng(seed).integers(0, 256, (*shape, FORMATS[name].nbytes), np.uint8)
    # The upper half of a scale: clearing the highest exponent bit rules infinities out.
    for at in {"q4_1": (1, 3), "q4_k": (1, 3), "q5_k": (1, 3), "q6_k": (209,)}.get(name, (1,)):
        data[..., at] &= 0xBF
    if name == "mxfp4":
        data[..., 0] = np.random.default_rng(1).integers(2, 200, shape)
    return data


def reference(name: str, data: np.ndarray) -> np.ndarray:
    """The package's values, `[..., n * values]`."""
    return quants.dequantize(data.reshape(*data.shape[:-2], -1), GGMLQuantizationType[name.upper()])


@pytest.mark.parametrize("name", GGUF_FORMATS)
def test_values_are_those_of_the_package(name):
    data = random_blocks(name, 3, 5, 4)
    expected = reference(name, data)
    blocks = Blocks(jnp.asarray(data), name)
    values = dequantise(blocks)
    assert values.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(values).view(np.uint32), expected.view(np.uint32))
    compiled = np.asarray(jax.jit(dequantise)(blocks))
    # A fused product and sum rounds once instead of twice: off by at most half a unit of the product.
    product = 64 * np.abs(expected).max()
    np.testing.assert_allclose(compiled, expected, rtol=0, atol=np.spacing(np.float32(product)))
    if name not in ("q4_1", "q4_k", "q5_k"):  # nothing to fuse
        np.testing.assert_array_equal(compiled, expected)


@pytest.mark.parametrize("name", quick_part(FORMATS, lambda name: name in ("q4_k", "q8_0", "int4_g32", "mxfp4")))
def test_zero_bytes_are_zeros(name):
    blocks = Blocks(jnp.zeros((2, 3, FORMATS[name].nbytes), jnp.uint8), name)
    np.testing.assert_array_equal(dequantise(blocks), np.zeros((2, 3 * FORMATS[name].values)))


def test_blocks_are_one_leaf_whose_format_is_static():
    blocks = Blocks(jnp.zeros((2, 3, 34), jnp.uint8), "q8_0")
    assert [leaf.shape for leaf in jax.tree.leaves(blocks)] == [(2, 3, 34)]
    assert jax.tree.map(lambda leaf: leaf + 1, blocks).format == "q8_0"
    assert (blocks.shape, blocks.ndim, blocks.nbytes) == ((2, 3, 34), 3, 2 * 3 * 34)
    ((path, _),) = jax.tree.flatten_with_path({"qkv": blocks})[0]
    assert jax.tree_util.keystr(path, simple=True, separator=".") == "qkv.data"


@pytest.mark.parametrize("shape", [(6, 4), (2, 3, 4), (6, 2, 2)])
def test_a_weight_of_any_rank_is_a_matrix(shape):
    data = random_blocks("q4_1", *shape)
    matrix = as_matrix(Blocks(jnp.asarray(data), "q4_1"), 6)
    assert isinstance(matrix, Blocks) and matrix.shape == (6, 4, 20)
    np.testing.assert_array_equal(matrix.data, data.reshape(6, 4, 20))
    assert as_matrix(jnp.zeros(shape), 6).shape == (6, 4)


def test_refusals_name_both_values():
    with pytest.raises(ValueError, match=r"'q9_0' is not one of q8_0, .*q6_k"):
        dequantise(Blocks(jnp.zeros((1, 34), jnp.uint8), "q9_0"))
    with pytest.raises(ValueError, match="q8_0 take 34 bytes, got 18"):
        dequantise(Blocks(jnp.zeros((1, 18), jnp.uint8), "q8_0"))


@pytest.mark.parametrize("name", [*GROUP_FORMATS, "mxfp4"])
def test_values_of_groups_are_those_of_the_definition(name):
    weight = random_weight(np.random.default_rng(0), name, 5, 512)
    expected = reference(name, weight.data) if name == "mxfp4" else group_numbers(weight.data, name)
    np.testing.assert_array_equal(decode_groups(weight.data, name), expected)
    blocks = Blocks(jnp.asarray(weight.data), name)
    np.testing.assert_array_equal(dequantise(blocks), expected)
    np.testing.assert_array_equal(jax.jit(dequantise)(blocks), expected)


@pytest.mark.parametrize("name", GROUP_FORMATS)
def test_groups_are_written_as_they_are_read(name):
    rng = np.random.default_rng(0)
    values, most = GROUP_FORMATS[name].values, 15 if name.startswith("int4") else 255
    codes, scale = rng.integers(0, most + 1, (6, 256)).astype(np.uint8), rng.normal(size=(6, 256 // values))
    scale = scale.astype(np.float16).astype(np.float32)
    zero = rng.integers(0, most + 1, scale.shape)
    if name.startswith("fp8"):
        codes[codes & 0x7F == 0x7F] = 0
        expected = codes.view(jnp.float8_e4m3fn).astype(np.float32) * np.repeat(scale, values, axis=1)
        zero = None
    else:
        shifted = codes.astype(np.float32) - np.repeat(zero, values, axis=1).astype(np.float32)
        expected = shifted * np.repeat(scale, values, axis=1)
    np.testing.assert_array_equal(decode_groups(encode_groups(codes, scale, zero, name), name), expected)


@pytest.mark.parametrize("name", GROUP_FORMATS)
def test_numbers_are_rounded_to_groups(name):
    numbers = np.random.default_rng(0).normal(size=(6, 256)).astype(np.float32)
    numbers[0, :128] = 0
    got = decode_groups(quantise_groups(numbers, name), name)
    steps = {"int4": 7, "int8": 127, "fp8": 14}[name.partition("_")[0]]
    assert np.abs(got - numbers).max() <= 0.51 * np.abs(numbers).max() / steps
    assert not got[0, :128].any()


def test_the_largest_groups_that_fit():
    assert find_group_format("int4", 128) == find_group_format("int4", 384) == "int4_g128"
    assert (find_group_format("int4", 64), find_group_format("int8", 64)) == ("int4_g64", "int8_g64")
    assert find_group_format("int4", 48) is None
    with pytest.raises(ValueError, match="int4_g32 holds scales of float16 and bfloat16 only"):
        encode_groups(np.zeros((1, 32), np.uint8), np.float32([[0.1]]), None, "int4_g32")
