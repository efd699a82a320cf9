"""Native products with every weight format: within rounding of float64, and the same bits whatever the other rows are.

The order of the native sum is no promise; that it is the same for every row, row count, thread count and weight format
is one, and losslessness rests on it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import (
    ALL_FORMATS,
    DENSE,
    XLA,
    assert_close,
    assert_same_bits,
    block_values,
    needs_native,
    numbers,
    product_and_bound,
    random_rows,
    random_weight,
    run,
    run_native,
)
from marks import quick_part

from pallas_kernels import registry
from pallas_kernels.linear import Blocks, linear
from pallas_kernels.linear.blocks import FORMATS, GROUP_FORMATS
from pallas_kernels.linear.reference import linear_of_batch

COUNTS = (*range(1, 65), 65, 130)
OUTPUTS = (1, 2, 5, 23, 97)
DENSE_INPUTS = (1, 7, 16, 33, 100)
BLOCKS = (1, 2, 3)


def products(xs, weights, active_rows=None):
    """Many calls in one program."""
    return [linear(x, weight, active_rows) for x, weight in zip(xs, weights, strict=True)]


def rows_alone(x, weight):
    """Each row's product in a call of its own, `[T, O]`."""
    return np.concatenate([run_native(linear, row[None], weight) for row in x])


@functools.cache
def operands(weight_format, rows=130, outputs=97, inputs=512):
    rng = np.random.default_rng([rows, outputs, inputs])
    return random_rows(rng, rows, inputs), random_weight(rng, weight_format, outputs, inputs)


def root_mean_square(x):
    return np.sqrt(np.mean(np.square(x.astype(np.float64))))


@needs_native
@pytest.mark.parametrize("weight_format", ALL_FORMATS)
def test_error_is_that_of_a_good_float32_sum(weight_format):
    for shape in [(130, 97, 512)] + [(3, 23, 8192)] * (weight_format in ("float32", "q8_0", "q4_k")):
        x, weight = operands(weight_format, *shape)
        exact, bound = product_and_bound(x, weight)
        got = run_native(linear, x, weight)
        assert_close(got, exact, bound)
        for row, expected in zip(got, exact, strict=True):
            assert np.linalg.norm(row - expected) <= 1e-6 * np.linalg.norm(expected)
        # XLA sums in its own order in float32. For a half-precision weight it rounds the rows first: it is less exact.
        reference = run(linear, x, weight, kernels=XLA)
        assert root_mean_square(got - exact) <= root_mean_square(reference - exact)


@needs_native
@pytest.mark.parametrize("weight_format", ALL_FORMATS)
def test_bits_do_not_depend_on_the_number_of_rows(weight_format):
    x, weight = operands(weight_format)
    alone = rows_alone(x, weight)
    for threads in (1, 2):
        results = run_native(products, [x[:count] for count in COUNTS], [weight] * len(COUNTS), threads=threads)
        for count, got in zip(COUNTS, results, strict=True):
            assert_same_bits(got, alone[:count], f"{count} rows")


@needs_native
@pytest.mark.parametrize("weight_format", ALL_FORMATS)
def test_shapes_that_nothing_divides(weight_format):
    """Scales from zero over denormal to 3e4, of both signs; the bits are those of the float32 numbers."""
    rng = np.random.default_rng(0)
    sizes = DENSE_INPUTS if weight_format in DENSE else [n * block_values(weight_format) for n in BLOCKS]
    xs, weights = [], []
    for inputs in sizes:
        for outputs in OUTPUTS:
            for rows in (1, 2, 33):
                xs.append(random_rows(rng, rows, inputs))
                weights.append(random_weight(rng, weight_format, outputs, inputs, extreme=True))
    together, together_on_two = (run_native(products, xs, weights, threads=threads) for threads in (1, 2))
    alone = run_native(products, [x[-1:] for x in xs], weights)
    plain = run_native(products, xs, [numbers(weight) for weight in weights])
    for x, weight, got, on_two, last, of_numbers in zip(
        xs, weights, together, together_on_two, alone, plain, strict=True
    ):
        label = f"{x.shape} and {weight.shape}"
        assert_close(got, *product_and_bound(x, weight), label)
        assert_same_bits(on_two, got, label)
        assert_same_bits(got[-1:], last, label)
        assert_same_bits(got, of_numbers, label)


@needs_native
@pytest.mark.parametrize("weight_format", FORMATS)
def test_every_value_of_a_block(weight_format):
    """Each weight by itself: a product with one row of the identity has nothing to round."""
    rng = np.random.default_rng(2)
    inputs = 2 * block_values(weight_format)
    weight = random_weight(rng, weight_format, 24, inputs, extreme=True)
    got = run_native(linear, np.eye(inputs, dtype=np.float32), weight)
    np.testing.assert_array_equal(got, numbers(weight).T)


@needs_native
@pytest.mark.parametrize("weight_format", ALL_FORMATS)
def test_active_rows(weight_format):
    """Whatever the others hold."""
    x, weight = operands(weight_format)
    expected = run_native(linear, x, weight)
    for active_rows in (*range(1, 10), 15, 16, 17, 30, 31, 32, 33, 63, 64, 65):
        broken = x[:65].copy()
        broken[active_rows:] = (np.nan, np.inf, 3e38)[active_rows % 3]
        for rows in (rows for rows in (9, 65) if rows >= active_rows):
            got = run_native(linear, broken[:rows], weight, np.int32(active_rows), threads=1 + active_rows % 2)
            assert_same_bits(got[:active_rows], expected[:active_rows], f"{active_rows} of {rows} rows")


@needs_native
@pytest.mark.parametrize(
    "weight_format", quick_part(ALL_FORMATS, lambda name: name in ("float32", "bfloat16", "q8_0", "q4_k", "int4_g64"))
)
def test_bits_do_not_depend_on_the_number_of_threads(weight_format):
    """Large enough that threads take part."""
    x, weight = operands(weight_format, 64, 1537, 768)
    xs = [x[:1], x[:4], x]
    expected = run_native(products, xs, [weight] * 3)
    assert_close(expected[2], *product_and_bound(x, weight))
    for threads in (2, 3, 8):
        for got, of_one in zip(run_native(products, xs, [weight] * 3, threads=threads), expected, strict=True):
            assert_same_bits(got, of_one, f"{len(got)} rows on {threads} threads")


@needs_native
@settings(derandomize=True, deadline=None, max_examples=25)
@given(
    st.sampled_from(ALL_FORMATS),
    st.integers(1, 64),
    st.integers(1, 70),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 2**32 - 1),
)
def test_any_rows_in_any_order(weight_format, rows, outputs, size, threads, seed):
    rng = np.random.default_rng(seed)
    inputs = size * block_values(weight_format) if weight_format in FORMATS else int(rng.integers(1, 300))
    x, weight = random_rows(rng, rows, inputs), random_weight(rng, weight_format, outputs, inputs)
    order = rng.permutation(rows)
    chosen = rng.integers(0, rows, rng.integers(1, 65))  # some rows twice, others not at all
    # The same for outputs: some rows of the weight, in another order.
    columns = rng.permutation(outputs)[: int(rng.integers(1, outputs + 1))]
    part = Blocks(weight.data[columns], weight.format) if isinstance(weight, Blocks) else weight[columns]
    got, permuted, again, of_part, of_numbers = run_native(
        products, [x, x[order], x[chosen], x, x], [weight, weight, weight, part, numbers(weight)], threads=threads
    )
    assert_close(got, *product_and_bound(x, weight))
    assert_same_bits(permuted, got[order])
    assert_same_bits(again, got[chosen])
    assert_same_bits(of_part, got[:, columns])
    assert_same_bits(of_numbers, got)
    active_rows = int(rng.integers(1, rows + 1))
    first = run_native(linear, x, weight, np.int32(active_rows))
    assert_same_bits(first[:active_rows], got[:active_rows])


@needs_native
@pytest.mark.parametrize("weight_format", ALL_FORMATS)
def test_a_broken_row_breaks_no_other(weight_format):
    x, weight = operands(weight_format)
    expected = run_native(linear, x, weight)
    for row, broken in ((0, np.nan), (1, np.inf), (5, -np.inf), (8, np.nan), (40, np.inf), (63, -np.inf)):
        damaged = x.copy()
        damaged[row, 300] = broken
        for got in run_native(products, [damaged[:rows] for rows in (2, 9, 64)], [weight] * 3, threads=2):
            others = np.arange(len(got)) != row
            assert_same_bits(got[others], expected[: len(got)][others])
            # Inf times a zero weight is NaN as well, and times any other infinite.
            assert not np.isfinite(got[~others]).any()


@needs_native
@pytest.mark.parametrize("weight_format", [name for name in ALL_FORMATS if name != "mxfp4"])  # which has no NaN
def test_a_broken_weight_breaks_one_output(weight_format):
    x, weight = operands(weight_format)
    expected = run_native(linear, x, weight)
    for output, broken in ((0, np.nan), (17, np.inf), (95, -np.inf), (96, np.nan)):
        damaged = break_weight(weight, output, broken)
        for got in run_native(products, [x[:rows] for rows in (1, 5, 64)], [damaged] * 3, threads=2):
            others = np.arange(97) != output
            assert_same_bits(got[:, others], expected[: len(got), others])
            assert not np.isfinite(got[:, output]).any()


def break_weight(weight, output, broken):
    """A weight with one number that is not finite, or one NaN scale: float16, or the upper half of a float32."""
    if not isinstance(weight, Blocks):
        damaged = weight.copy()
        damaged[output, 511] = broken
        return damaged
    data, grouped = weight.data.copy(), weight.format in GROUP_FORMATS
    at = {"q6_k": 208, "int4_g32": 1}.get(weight.format, 2 if grouped else 0)
    data[output, -1, at : at + 2] = np.array([0xC0, 0x7F] if grouped else [0, 0x7E], np.uint8)
    return Blocks(data, weight.format)


@needs_native
@pytest.mark.parametrize("weight_format", ["float32", "bfloat16"])
def test_tiny_results_have_the_same_bits_on_every_thread(weight_format):
    """Whether denormal numbers are flushed to zero is a setting of the thread: all must agree."""
    rng = np.random.default_rng(3)
    x = (rng.normal(size=(64, 768)) * 1e-20).astype(np.float32)
    x[1::2] *= np.float32(1e-19)  # denormal themselves
    weight = random_weight(rng, weight_format, 1537, 768)
    weight[::2] = (weight[::2].astype(np.float32) * np.float32(2.0**-66)).astype(weight.dtype)
    weight[1::2, 3] = 1e-40
    expected = run_native(linear, x, weight)
    for threads in (2, 3, 8):
        assert_same_bits(run_native(linear, x, weight, threads=threads), expected, f"{threads} threads")
    assert (expected != 0).any()
    for row in (0, 1, 40, 63):
        assert_same_bits(run_native(linear, x[row : row + 1], weight, threads=2), expected[row : row + 1])


@needs_native
def test_calls_at_the_same_time():
    """Programs on several devices share the machine's threads and give the bits that each gives alone."""
    cases = [operands(name, rows, 1537, 768) for name, rows in [("float32", 4), ("q8_0", 64), ("q4_k", 1)]]
    expected = [run_native(linear, x, weight) for x, weight in cases]
    kernels = registry.Kernels("cpu", "cpu", 2)

    def step(x, weight):
        with registry.using(kernels):
            return linear(x, weight)

    step = jax.jit(step)
    placed = [
        (which, jax.device_put(cases[which], device))
        for which, device in zip((0, 1, 2, 0, 1, 2), jax.devices(), strict=False)
    ]
    for _ in range(10):
        results = [(which, step(*case)) for which, case in placed]
        for which, got in results:
            assert_same_bits(got, expected[which])


@needs_native
def test_rows_of_half_precision_and_a_batch_of_calls():
    x, weight = operands("q4_0", 12)
    for dtype in ("bfloat16", "float16"):
        half = x.astype(DENSE[dtype])
        assert_same_bits(run_native(linear, half, weight), run_native(linear, half.astype(np.float32), weight))
    got = run_native(batched, x.reshape(3, 4, -1), weight)
    assert_same_bits(got.reshape(12, -1), run_native(linear, x, weight))


def batched(xs, weight):
    return jax.vmap(lambda x: linear(x, weight))(xs)


@pytest.mark.parametrize("name", ["xla", "cpu"])
def test_operands_that_do_not_fit(name):
    x = np.zeros((3, 64), np.float32)
    q8_0 = Blocks(np.zeros((5, 2, 34), np.uint8), "q8_0")
    with registry.using(registry.Kernels(name, "cpu")):
        for bad_x, weight, message in (
            (x, np.zeros((5, 63), np.float32), r"\(3, 64\) and \(5, 63\)"),
            (np.zeros((3, 32), np.float32), q8_0, r"\(3, 32\) and \(5, 64\)"),
            (x[0], q8_0, r"\(64,\) and \(5, 64\)"),
            (x[None], np.zeros((5, 64), np.float32), r"\(1, 3, 64\) and \(5, 64\)"),
            (x, np.zeros((5, 64), np.int8), r"int8 \(5, 64\)"),
            (x, np.zeros((5, 8, 8), np.float32), r"float32 \(5, 8, 8\)"),
            (x, Blocks(np.zeros((5, 2, 18), np.uint8), "q8_0"), r"'q8_0' blocks of uint8 \(5, 2, 18\)"),
            (x, Blocks(np.zeros((10, 34), np.uint8), "q8_0"), r"'q8_0' blocks of uint8 \(10, 34\)"),
            (x, Blocks(np.zeros((5, 2, 34), np.uint8), "q9_0"), r"'q9_0' blocks of uint8 \(5, 2, 34\)"),
            (x, Blocks(np.zeros((5, 2, 34), np.int8), "q8_0"), r"int8"),
        ):
            with pytest.raises(ValueError, match=message):
                linear(bad_x, weight)


def test_gradients_of_a_batch_are_those_of_its_rows_together():
    rng = np.random.default_rng(4)
    x, weight, out = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((3, 5, 8), (7, 8), (3, 5, 7)))

    def total(product):
        return lambda x, weight: (product(x, weight) * out).sum()

    batched = jax.vmap(jax.jit(linear_of_batch), (0, None))
    found = jax.jit(jax.grad(total(batched), (0, 1)))(x, weight)
    expected = jax.grad(total(lambda x, w: jnp.einsum("rti,oi->rto", x, w, precision="highest")), (0, 1))(x, weight)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    # The gradient of the weight is one product, and no sum of one for each element.
    text = jax.jit(jax.grad(total(batched), 1)).lower(x, weight).as_text()
    assert "tensor<3x7x8xf32>" not in text and "tensor<3x8x7xf32>" not in text
    with pytest.raises(NotImplementedError, match="a batch of weights"):
        jax.vmap(linear_of_batch, (None, 0))(x[0], jnp.stack([weight, weight]))
