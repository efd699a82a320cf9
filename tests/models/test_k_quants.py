"""K-quants that are written here: read by the `gguf` package, near their numbers, and exact where they can be."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from jaxspec.models.k_quants import K_QUANTS, quantise_k
from jaxspec.models.quantization import encode_blocks
from pallas_kernels.linear.blocks import FORMATS


def read(blocks, name):
    return dequantize(blocks.reshape(1, -1), GGMLQuantizationType[name.upper()]).reshape(len(blocks), 256)


def error(numbers, name):
    return np.sqrt(np.square(read(quantise_k(numbers, name), name) - numbers).mean(axis=1))


def normal(count=300, scale=0.02):
    return (np.random.default_rng(1).normal(size=(count, 256)) * scale).astype(np.float32)


def plain_error(numbers, kind):
    rows = numbers.reshape(1, -1)
    return np.sqrt(np.square(dequantize(quantize(rows, kind), kind) - rows).mean())


def test_errors_are_those_of_their_bits():
    """Of normal numbers each further bit halves the error, and a minimum and a fitted scale beat Q4_0."""
    numbers = normal()
    q4, q5, q6 = (float(np.sqrt(np.square(error(numbers, name)).mean())) for name in K_QUANTS)
    assert q4 < 0.85 * plain_error(numbers, GGMLQuantizationType.Q4_0)
    assert 0.4 * q4 < q5 < 0.55 * q4 and 0.35 * q5 < q6 < 0.75 * q5
    # Of a uniform code over about +-2.2 deviations: step / sqrt(12).
    assert q4 / 0.02 == pytest.approx(2 * 2.1 / 15 / np.sqrt(12), rel=0.15)


def test_no_value_is_off_by_more_than_a_step():
    numbers = normal() * np.geomspace(1e-3, 1e3, 300, dtype=np.float32)[:, None]
    for name, parts, codes in (("q4_k", 8, 15), ("q5_k", 8, 31), ("q6_k", 16, 63)):
        off = np.abs(read(quantise_k(numbers, name), name) - numbers).reshape(300, parts, -1).max(axis=2)
        split = numbers.reshape(300, parts, -1)
        span = np.maximum(split.max(axis=2), 0) - np.minimum(split.min(axis=2), 0)
        if name == "q6_k":
            span = 2 * np.abs(split).max(axis=2)
        # The scales of a block are rounded as well, to 1/63 or 1/127 of the largest.
        room = 1.2 * span / codes + span.max(axis=1, keepdims=True) / (60 if name != "q6_k" else 120)
        assert (off <= room).all(), name


@pytest.mark.parametrize("name", K_QUANTS)
def test_what_blocks_hold_is_written_again_exactly(name):
    """Numbers that a block can hold come back: every code, scales and minima over their whole range."""
    rng = np.random.default_rng(0)
    if name == "q6_k":
        codes, scale = rng.integers(-32, 32, (40, 16, 16)), rng.integers(60, 128, (40, 16, 1))
        # The fit sees all codes, and the largest scale is the one of the format's own normalisation.
        codes[:, :, 0], codes[:, :, 1], scale[:, 0] = -32, 31, -128
        numbers = (codes * scale * np.float32(2.0**-12)).astype(np.float32).reshape(40, 256)
    else:
        most = 2 ** int(name[1]) - 1
        codes, scale = rng.integers(0, most + 1, (40, 8, 32)), rng.integers(1, 64, (40, 8, 1))
        minimum = rng.integers(1, 64, (40, 8, 1))
        codes[:, :, 0], codes[:, :, 1], scale[:, 0], minimum[:, 3] = 0, most, 63, 63
        numbers = codes * scale * np.float32(2.0**-10) - minimum * np.float32(2.0**-11)
        # Above 0 a part has no minimum of its own: it is not exact there.
        numbers = numbers.astype(np.float32).reshape(40, 256)
    blocks = quantise_k(numbers, name)
    assert blocks.shape == (40, FORMATS[name].nbytes) and blocks.dtype == np.uint8
    np.testing.assert_allclose(read(blocks, name), numbers, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(quantise_k(read(blocks, name), name), blocks)


@pytest.mark.parametrize("name", K_QUANTS)
def test_odd_numbers(name):
    zeros = np.zeros((2, 256), np.float32)
    np.testing.assert_array_equal(read(quantise_k(zeros, name), name), zeros)
    for value in (1.0, -1.0, 1e-4, -3e3):
        same = np.full((1, 256), value, np.float32)
        np.testing.assert_allclose(read(quantise_k(same, name), name), same, rtol=5e-3)
    with np.errstate(all="ignore"):  # as `encode_blocks` calls it
        for value in (3e38, 1e-38, 1e-45):
            blocks = quantise_k(np.full((1, 256), value, np.float32), name)
            assert np.isfinite(read(blocks, name)).all()
    one = zeros.copy()
    one[0, 100] = 5.0
    np.testing.assert_allclose(read(quantise_k(one, name), name), one, rtol=2e-3, atol=1e-6)


def test_blocks_of_a_weight_are_its_rows_blocks():
    numbers = normal(6).reshape(3, 512)
    blocks = encode_blocks(numbers, "q4_k")
    np.testing.assert_array_equal(blocks, quantise_k(numbers.reshape(6, 256), "q4_k"))
    with pytest.raises(ValueError, match="'q2_k' is not one of q4_k, q5_k, q6_k"):
        quantise_k(normal(1), "q2_k")
