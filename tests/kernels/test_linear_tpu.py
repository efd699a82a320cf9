"""Rows times weights in columns: in the interpreter, which leaves NaN in memory that no program wrote."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import assert_close, numbers, random_weight, run
from marks import quick_part
from scipy.special import expit
from test_linear_triton import SHARES, product_and_bound

from pallas_kernels import registry, selection
from pallas_kernels.linear import Blocks, linear, linear_parts, mosaic_tpu
from pallas_kernels.linear.blocks import COLUMNS, FORMATS
from pallas_kernels.linear.columns import columns_name, to_columns
from pallas_kernels.linear.reference import as_numbers
from pallas_kernels.swiglu import swiglu

KERNELS = registry.Kernels("mosaic-tpu", "tpu", implementations=(("linear", "mosaic_tpu"),), interpret=True)
NAMES = [name.removesuffix("_columns") for name in COLUMNS]


def in_columns(weight):
    outputs = len(weight.data)
    return Blocks(to_columns(weight.data, weight.format, outputs), columns_name(weight.format), (None,))


@functools.cache
def operands(name, rows, outputs, inputs):
    """Rows of very different sizes, and a weight in columns with its numbers."""
    rng = np.random.default_rng(rows)
    x = rng.normal(size=(rows, inputs)) * 10.0 ** rng.uniform(-3, 3, (rows, 1))
    weight = random_weight(rng, name, outputs, inputs)
    return x.astype(np.float32), in_columns(weight), numbers(weight).astype(np.float64)


@pytest.mark.parametrize("name", [*NAMES, "q8_0", "q4_0"])
def test_the_numbers_are_the_same(name):
    """Zero blocks fill rows up; formats of GGUF become groups with the same numbers."""
    weight = random_weight(np.random.default_rng(3), name, 6, 640, extreme=True)
    columns = in_columns(weight)
    assert columns.shape == (6, columns.data.shape[1], COLUMNS[columns.format].nbytes) and columns.shape[1] % 8 == 0
    with jax.disable_jit():
        found = np.asarray(as_numbers(Blocks(jnp.asarray(columns.data), columns.format, (None,))))
    np.testing.assert_array_equal(found[:, :640], numbers(weight))
    assert not found[:, 640:].any()


def test_other_formats_have_no_columns():
    others = {name for name in FORMATS if columns_name(name) is None}
    assert others == {"q4_1", "q5_0", "q4_k", "q5_k", "q6_k", "mxfp4", "fp8_g32", "fp8_g128"}


# Tiles of 8 to 128 rows, and more than one; the last block of outputs is not full.
@pytest.mark.parametrize(("name", "rows"), quick_part([
    ("int4_g32", 5), ("int4_g64", 1), ("int4_g128", 13), ("int8_g32", 8), ("int8_g64", 64), ("int8_g128", 2),
    ("q8_0", 1), ("q4_0", 9), ("int4_g64", 150),
], lambda name, rows: name == "int4_g64" and rows == 1 or name == "q4_0"))  # fmt: skip
def test_equals_the_reference(name, rows):
    x, columns, weight = operands(name, rows, 584, 1280)
    assert_close(run(linear_parts, x, columns, kernels=KERNELS)[0], *product_and_bound(x, weight))


def test_gate_and_up():
    x, columns, weight = operands("int4_g32", 5, 96, 512)
    (gate, up), (gate_off, up_off) = (np.split(part, 2, axis=1) for part in product_and_bound(x, weight))
    activated = gate * expit(gate)
    # The slope of silu is at most 1.1.
    bound = 1.1 * gate_off * (np.abs(up) + up_off) + np.abs(activated) * (up_off + np.abs(up) * 1e-5) + 1e-30
    assert_close(run(swiglu, x, columns, kernels=KERNELS), activated * up, bound)


def test_a_rows_sum_does_not_depend_on_the_rows_beside_it():
    x, columns, _ = operands("int4_g128", 17, 160, 1024)
    whole = run(linear, x, columns, kernels=KERNELS)
    for rows in (1, 8):
        np.testing.assert_array_equal(run(linear, x[:rows], columns, kernels=KERNELS), whole[:rows])


@pytest.mark.slow
@pytest.mark.parametrize(("share", "name", "rows"), [
    (share, NAMES[i % len(NAMES)], (1, 16)[i // 4]) for i, share in enumerate(SHARES)
])  # fmt: skip
def test_shares_of_real_models(share, name, rows):
    inputs, outputs = SHARES[share]
    x, columns, weight = operands(name, rows, outputs, inputs)
    assert_close(run(linear, x, columns, kernels=KERNELS), *product_and_bound(x, weight))


def test_without_the_kernel_the_reference_multiplies():
    """Of the same rows and numbers, rounded to bfloat16."""
    x, columns, weight = operands("int8_g64", 5, 96, 320)
    got = run(linear, x, columns, kernels=registry.Kernels("xla", "tpu"))
    assert_close(got, *product_and_bound(x, weight))


@pytest.mark.thorough
def test_the_check_before_it_is_used():
    check = functools.partial(selection.find_failure.__wrapped__, "linear", "mosaic_tpu")
    base = dataclasses.replace(KERNELS, implementations=())
    assert check(base, jax.devices()[0]) is None
    run_right = mosaic_tpu._run

    def run_wrong(x_ref, data_ref, out_ref, **options):
        run_right(x_ref, data_ref, out_ref, **options)
        out_ref[...] += jnp.abs(out_ref[...]) * 0.1

    with mock.patch.object(mosaic_tpu, "_run", run_wrong):
        assert "linear by mosaic_tpu fails its check" in check(base, jax.devices()[0])
