"""Weights in planes are the same numbers as the blocks that they were made of, and take the bytes that they say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import numbers, random_weight
from marks import quick_part

from pallas_kernels.linear.blocks import FORMATS, PLANES, Blocks
from pallas_kernels.linear.planes import dequantise_planes, find_planes, plane_starts, planes_name, to_planes

NAMES = [name.removesuffix("_planes") for name in PLANES]


def in_planes(weight, outputs=None):
    """A weight in blocks as the same weight in planes."""
    data = to_planes(weight.data, weight.format, outputs or len(weight.data))
    return Blocks(data, planes_name(weight.format))


@pytest.mark.parametrize("name", quick_part(NAMES, lambda name: name not in ("q4_k", "q6_k", "int4_g128", "fp8_g32")))
def test_the_numbers_are_the_same(name):
    weight = random_weight(np.random.default_rng(3), name, 6, 512, extreme=True)
    planes = in_planes(weight)
    assert planes.shape == (6, 512 // PLANES[planes.format].values, PLANES[planes.format].nbytes)
    with jax.disable_jit():
        found = np.asarray(dequantise_planes(Blocks(jnp.asarray(planes.data), planes.format)))
    np.testing.assert_array_equal(found, numbers(weight))


@pytest.mark.parametrize("name", quick_part(["q4_k", "q6_k", "int4_g128"], lambda name: name == "int4_g128"))
def test_on_the_host_and_on_a_device_alike(name):
    """And any shape of outputs and inputs: an output projection's inputs have several dimensions."""
    weight = random_weight(np.random.default_rng(4), name, 4, 1024)
    blocks = weight.data.reshape(4, 2, -1, FORMATS[name].nbytes)
    here, there = to_planes(blocks, name, 4), to_planes(jnp.asarray(blocks), name, 4)
    np.testing.assert_array_equal(here, np.asarray(there))
    np.testing.assert_array_equal(here.reshape(4, -1), in_planes(weight).data.reshape(4, -1))
    apart = to_planes(blocks, name, 8)
    assert apart.shape == here.shape and not np.array_equal(apart, here)


@pytest.mark.parametrize("name", NAMES)
def test_planes_fill_the_row(name):
    layout, block = find_planes(planes_name(name)), PLANES[planes_name(name)]
    groups = 3 * layout.codes // layout.group
    last = plane_starts(layout, groups)[-1] + groups // layout.per[-1]
    assert last == 3 * block.nbytes
    assert layout.codes * layout.halves == block.values == FORMATS[name].values


def test_what_has_no_planes():
    assert planes_name("q5_0") is None and planes_name("mxfp4") is None and find_planes("q4_0") is None


@pytest.mark.thorough
def test_float8_codes_without_a_number_stay_so():
    data = np.zeros((1, 1, 36), np.uint8)
    data[0, 0, :4] = np.frombuffer(np.float32(1).tobytes(), np.uint8)
    data[0, 0, 4:] = np.arange(0x60, 0x80)
    found = np.asarray(dequantise_planes(in_planes(Blocks(jnp.asarray(data), "fp8_g32"))))[0]
    assert np.isnan(found[-1]) and np.isfinite(found[:-1]).all() and found[-2] == 448
