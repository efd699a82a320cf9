"""Rounding numbers to the K-quants of GGUF files: Q4_K, Q5_K and Q6_K. The `gguf` package only reads them.

A block has 256 values in parts that have a scale each; the scales of a block are integers times one float16. Of Q4_K
and Q5_K a part is 32 values, code times scale less a minimum; of Q6_K it is 16 values, code times scale. The scale of a
part is the best of a few, by the squared error: each gives codes, and the codes give the scale (and minimum) of least
squares.
"""

import numpy as np

VALUES = 256
# Scales that are tried: the part's range is spread over the codes, and over so many codes more or fewer.
_SPREADS = np.linspace(-1.0, 1.0, 9, dtype=np.float32)
K_QUANTS = ("q4_k", "q5_k", "q6_k")


def quantise_k(numbers: np.ndarray, block_format: str) -> np.ndarray:
    """Round finite float32 `[n, 256]` to blocks of one of `K_QUANTS`: uint8 `[n, nbytes]`.

    Raises:
      ValueError: the format is none of them.
    """
    if block_format not in K_QUANTS:
        raise ValueError(f"{block_format!r} is not one of {', '.join(K_QUANTS)}")
    if block_format == "q6_k":
        return _quantise_q6_k(numbers)
    bits = int(block_format[1])
    codes, scale, minimum, heads = _with_minima(numbers.reshape(len(numbers), 8, 32), 2**bits - 1)
    low = codes & 15
    fields = [heads, _pack_scales(scale, minimum)]
    if bits == 5:
        # Byte j holds the fifth bits of value j of all parts.
        shifts = np.arange(8, dtype=np.uint8)[:, None]
        fields.append(np.bitwise_or.reduce((codes >> 4) << shifts, axis=1))
    fields.append((low[:, 0::2] | low[:, 1::2] << 4).reshape(len(numbers), 128))
    return np.concatenate(fields, axis=1)


def _with_minima(x: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Codes uint8 [n, 8, 32] up to `most`, scales and minima uint8 [n, 8], and two float16 as uint8 [n, 4]."""
    lowest = np.minimum(x.min(axis=2), 0)
    scale, minimum = _fit_line(x, lowest, x.max(axis=2), most)
    d, dmin = (_float16(part.max(axis=1) / 63) for part in (scale, minimum))
    scale, minimum = (_whole(part, one[:, None], 0, 63) for part, one in ((scale, d), (minimum, dmin)))
    own = (d[:, None] * scale)[..., None]
    codes = _whole(x + (dmin[:, None] * minimum)[..., None], own, 0, most)
    heads = np.stack([d, dmin], axis=1).astype("<f2").view(np.uint8)
    return codes.astype(np.uint8), scale.astype(np.uint8), minimum.astype(np.uint8), heads


def _fit_line(x: np.ndarray, lowest: np.ndarray, highest: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Scale and minimum, both at least 0, of each part: x is about code * scale - minimum."""
    width, values = highest - lowest, x.shape[2]
    best_scale, best_minimum = width / most, -lowest
    best = np.full(width.shape, np.inf, np.float32)
    total = x.sum(axis=2)
    for spread in _SPREADS:
        codes = _whole(x - lowest[..., None], (width / (most + spread))[..., None], 0, most)
        first, second, product = codes.sum(axis=2), (codes * codes).sum(axis=2), (codes * x).sum(axis=2)
        spread_out = values * second - first * first
        scale = _divide(values * product - first * total, spread_out)
        minimum = _divide(first * product - second * total, spread_out)
        # Without a minimum below 0 the best line goes through 0.
        through_0 = minimum < 0
        scale = np.where(through_0, _divide(product, second), scale)
        minimum = np.where(through_0, 0, minimum)
        error = np.square(codes * scale[..., None] - minimum[..., None] - x).sum(axis=2)
        better = (error < best) & (scale > 0)
        best = np.where(better, error, best)
        best_scale = np.where(better, scale, best_scale)
        best_minimum = np.where(better, minimum, best_minimum)
    return best_scale, best_minimum


def _pack_scales(scale: np.ndarray, minimum: np.ndarray) -> np.ndarray:
    """Eight scales and eight minima of 6 bits in twelve bytes, uint8 [n, 12]; `blocks.py` has the layout."""
    first = scale[:, :4] | scale[:, 4:] >> 4 << 6
    second = minimum[:, :4] | minimum[:, 4:] >> 4 << 6
    return np.concatenate([first, second, scale[:, 4:] & 15 | (minimum[:, 4:] & 15) << 4], axis=1)


def _quantise_q6_k(numbers: np.ndarray) -> np.ndarray:
    x = numbers.reshape(len(numbers), 16, 16)
    scale = _fit_scale(x)
    largest = np.take_along_axis(scale, np.abs(scale).argmax(axis=1)[:, None], axis=1)[:, 0]
    d = _float16(largest / -128)
    scale = _whole(scale, d[:, None], -128, 127)
    codes = _whole(x, (d[:, None] * scale)[..., None], -32, 31)
    codes = (codes + 32).astype(np.uint8).reshape(len(numbers), 2, 128)
    low = codes & 15
    low = low[:, :, :64] | low[:, :, 64:] << 4
    pairs = (codes >> 4).reshape(len(numbers), 2, 4, 32) << np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = np.bitwise_or.reduce(pairs, axis=2)
    parts = [low, high, scale.astype(np.int8).view(np.uint8), d.astype("<f2").view(np.uint8)]
    return np.concatenate([part.reshape(len(numbers), -1) for part in parts], axis=1)


def _fit_scale(x: np.ndarray) -> np.ndarray:
    """The scale of each part, of either sign: x is about code * scale, with codes from -32 to 31."""
    at = np.abs(x).argmax(axis=2)[..., None]
    extreme = np.take_along_axis(x, at, axis=2)[..., 0]
    best_scale, best = extreme / -32, np.full(extreme.shape, np.inf, np.float32)
    for spread in _SPREADS:
        codes = _whole(x, (extreme / -(32 + spread))[..., None], -32, 31)
        scale = _divide((codes * x).sum(axis=2), (codes * codes).sum(axis=2))
        error = np.square(codes * scale[..., None] - x).sum(axis=2)
        better = error < best
        best_scale, best = np.where(better, scale, best_scale), np.where(better, error, best)
    return best_scale


def _float16(values: np.ndarray) -> np.ndarray:
    """Float32 that float16 holds, finite; what float16 has few bits for is rounded away from 0, and is not lost."""
    most, tiny = float(np.finfo(np.float16).max), float(np.finfo(np.float16).tiny)
    small = np.copysign(np.ceil(np.abs(np.clip(values, -tiny, tiny)) * 2.0**24) * 2.0**-24, values)
    rounded = np.where(np.abs(values) < tiny, small, np.clip(values, -most, most))
    return rounded.astype(np.float16).astype(np.float32)


def _whole(values: np.ndarray, unit: np.ndarray, least: int, most: int) -> np.ndarray:
    """The nearest multiples of a unit, as float32 integers in a range; 0 where the unit is 0."""
    return np.clip(np.rint(_divide(values, unit)), least, most)


def _divide(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """Quotients, 0 where the divisor is 0."""
    return np.divide(above, below, out=np.zeros(np.broadcast_shapes(above.shape, below.shape), np.float32),
                     where=np.broadcast_to(below != 0, np.broadcast_shapes(above.shape, below.shape)))  # fmt: skip
