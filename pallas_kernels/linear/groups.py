"""Group formats on the host: blocks from codes, scales and zero points, and back to numbers.

A group of `values` consecutive inputs of a row has one scale and one zero point, and stands for
`(code - zero point) * scale`, rounded once. Its bytes:

| format | scale | zero point | codes |
|---|---|---|---|
| int4_g64, int4_g128 | float32 | int8, less 8 | 0 to 15: of each 32, the low halves of 16 bytes, then the high ones |
| int4_g32 | the upper 20 bits of a float32 | 4 bits: the lowest of the three bytes | as above |
| int8_g32, int8_g64, int8_g128 | float32 | int8, less 128 | 0 to 255, as int8, less 128 |
| fp8_g32, fp8_g128 | float32 | none | float8_e4m3fn |

The upper 20 bits hold every float16 and bfloat16 number.
"""

import ml_dtypes
import numpy as np

from pallas_kernels.linear.blocks import FORMATS, GROUP_FORMATS, MXFP4_DOUBLES

# Bits of a float32 that a scale of `int4_g32` keeps.
_SHORT_SCALE = np.uint32(0xFFFFF000)


def find_group_format(kind: str, group: int) -> str | None:
    """The format for groups of `group` inputs: its own groups divide them, as few as possible. None if none does.

    `kind` is "int4", "int8" or "fp8".
    """
    fits = [found for name, found in GROUP_FORMATS.items() if name.startswith(f"{kind}_") and group % found.values == 0]
    return max(fits, key=lambda found: found.values).name if fits else None


def has_short_scales(name: str) -> bool:
    """Whether a format keeps scales of float16 or bfloat16 exactly, but not all of float32."""
    return name == "int4_g32"


def encode_groups(codes: np.ndarray, scale: np.ndarray, zero: np.ndarray | None, name: str) -> np.ndarray:
    """Blocks of a group format.

    Args:
      codes: `[O, I]`; uint8 below 16 for int4, uint8 for int8, the bytes of float8_e4m3fn for fp8.
      scale: `[O, I / values]`, exact in float32, or in its upper 20 bits where the format `has_short_scales`.
      zero: integers `[O, I / values]` in the range of the codes; None for fp8, and for the middle code.
      name: one of `GROUP_FORMATS`.

    Returns:
      uint8 `[O, I / values, nbytes]`.

    Raises:
      ValueError: a scale does not fit.
    """
    group = GROUP_FORMATS[name]
    outputs, inputs = codes.shape
    blocks = np.empty((outputs, inputs // group.values, group.nbytes), np.uint8)
    scale = np.ascontiguousarray(scale, np.float32)
    if name.startswith("int4"):
        halves = codes.reshape(outputs, -1, 2, 16)
        packed = (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(outputs, -1, group.values // 2)
    else:
        packed = codes.reshape(outputs, -1, group.values)
    if name == "int4_g32":
        bits = scale.view(np.uint32)
        if (bits & ~_SHORT_SCALE).any():
            raise ValueError(f"{name} holds scales of float16 and bfloat16 only")
        word = bits >> np.uint32(8) | (np.uint32(8) if zero is None else zero.astype(np.uint32))
        for byte in range(3):
            blocks[..., byte] = word >> np.uint32(8 * byte) & np.uint32(255)
        blocks[..., 3:] = packed
        return blocks
    blocks[..., :4] = scale[..., None].view(np.uint8)
    if name.startswith("fp8"):
        blocks[..., 4:] = packed
        return blocks
    middle = 8 if name.startswith("int4") else 128
    blocks[..., 4] = 0 if zero is None else (zero.astype(np.int16) - middle).astype(np.int8).view(np.uint8)
    blocks[..., 5:] = packed if middle == 8 else packed ^ np.uint8(128)
    return blocks


def quantise_groups(numbers: np.ndarray, name: str) -> np.ndarray:
    """Round float32 `[O, I]` to a group format, without a zero point: blocks uint8 `[O, I / values, nbytes]`.

    The number of the largest magnitude of a group becomes 7, 127 or 448 times the scale.
    """
    groups = numbers.reshape(len(numbers), -1, GROUP_FORMATS[name].values)
    kind = name.partition("_")[0]
    most = {"int4": 7, "int8": 127, "fp8": 448}[kind]
    scale = (np.abs(groups).max(-1) / np.float32(most)).astype(np.float32)
    if has_short_scales(name):
        scale = (scale.view(np.uint32) & _SHORT_SCALE).view(np.float32)
    # Below, a reciprocal would be infinite.
    scale = np.where(scale < np.float32(1e-36), np.float32(0), scale)
    codes = groups * np.where(scale == 0, np.float32(0), 1 / np.where(scale == 0, np.float32(1), scale))[..., None]
    codes = np.clip(codes, -most, most).reshape(numbers.shape)
    if kind == "fp8":
        return encode_groups(codes.astype(ml_dtypes.float8_e4m3fn).view(np.uint8), scale, None, name)
    middle = 8 if kind == "int4" else 128
    return encode_groups((np.rint(codes).astype(np.int16) + middle).astype(np.uint8), scale, None, name)


def decode_groups(raw: np.ndarray, name: str) -> np.ndarray:
    """The float32 values `[..., I]` of blocks `[..., I / values, nbytes]` of a group format or of mxfp4."""
    values = FORMATS[name].values
    outer = raw.shape[:-2]
    if name == "mxfp4":
        exponent = raw[..., :1].astype(np.uint32)
        half = np.where(exponent < 2, np.uint32(0x00200000) << exponent, (exponent - np.uint32(1)) << np.uint32(23))
        numbers = half.view(np.float32) * np.array(MXFP4_DOUBLES, np.float32)[_nibbles(raw[..., 1:])]
    elif name == "int4_g32":
        word = sum(raw[..., byte : byte + 1].astype(np.uint32) << np.uint32(8 * byte) for byte in range(3))
        scale = ((word & np.uint32(0xFFFFF0)) << np.uint32(8)).view(np.float32)
        numbers = (_nibbles(raw[..., 3:]).astype(np.int16) - (word & np.uint32(15)).astype(np.int16)) * scale
    else:
        scale = np.ascontiguousarray(raw[..., :4]).view(np.float32)
        zero = raw[..., 4:5].view(np.int8).astype(np.int16)
        if name.startswith("int4"):
            numbers = (_nibbles(raw[..., 5:]).astype(np.int16) - np.int16(8) - zero) * scale
        elif name.startswith("int8"):
            numbers = (raw[..., 5:].view(np.int8) - zero) * scale
        else:
            numbers = raw[..., 4:].view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale
    return numbers.astype(np.float32, copy=False).reshape(*outer, raw.shape[-2] * values)


def _nibbles(raw: np.ndarray) -> np.ndarray:  # [..., B] -> [..., 2 * B], in the order of the values
    runs = raw.reshape(*raw.shape[:-1], -1, 1, 16)
    return (runs >> np.array([[0], [4]], np.uint8) & np.uint8(15)).reshape(*raw.shape[:-1], -1)
