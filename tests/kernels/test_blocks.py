"""Block formats: the decoder against the `gguf` package's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from pallas_kernels.linear.blocks import FORMATS, Blocks, as_matrix, dequantise


def random_blocks(name: str, *shape: int, seed: int = 0) -> np.ndarray:
    """Random bytes `[*shape, nbytes]` whose scales are finite."""
    data = np.random.default_rng(seed).integers(0, 256, (*shape, FORMATS[name].nbytes), np.uint8)
    # The upper half of a scale: clearing the highest exponent bit rules infinities out.
    for at in {"q4_1": (1, 3), "q4_k": (1, 3), "q6_k": (209,)}.get(name, (1,)):
        data[..., at] &= 0xBF
    return data


def reference(name: str, data: np.ndarray) -> np.ndarray:
    """The package's values, `[..., n * values]`."""
    return quants.dequantize(data.reshape(*data.shape[:-2], -1), GGMLQuantizationType[name.upper()])


@pytest.mark.parametrize("name", FORMATS)
def test_the_sizes_are_those_of_the_package(name):
    values, nbytes = quants.GGML_QUANT_SIZES[GGMLQuantizationType[name.upper()]]
    assert (FORMATS[name].values, FORMATS[name].nbytes) == (values, nbytes)


@pytest.mark.parametrize("name", FORMATS)
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
    if name not in ("q4_1", "q4_k"):  # nothing to fuse
        np.testing.assert_array_equal(compiled, expected)


@pytest.mark.parametrize("name", FORMATS)
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
