"""FP8 checkpoints: `weight` is float8_e4m3fn `[O, I]`, with one scale per block, per output, or per matrix.

A weight is `value * scale`. Block scales are named `weight_scale_inv`, and are multiplied nevertheless; others are
`weight_scale`, or named as those. Activations are not rounded to eight bits, which files ask for
(`activation_scheme`): scales of activations (`input_scale`) are not needed.
"""

import functools

import numpy as np

from jaxspec.checkpoint.quantised.layout import (
    SCALE_TYPES,
    Grouping,
    QuantisedWeight,
    Shape,
    Tensors,
    cut_groups,
    even_groups,
    expect,
    modules_with,
    read_scales,
)
from jaxspec.errors import CheckpointError
from jaxspec.models.families.base import ConfigValues

FP8 = "float8_e4m3fn"

HARMLESS_KEYS = frozenset({
    "activation_scheme", "modules_to_not_convert", "ignored_layers", "scale_fmt", "kv_cache_scheme",
    "kv_cache_quant_method", "dequantize",
})  # fmt: skip


def check(values: ConfigValues) -> None:
    """Refuse settings that ask for another layout."""
    if values.get("fmt", "e4m3") != "e4m3":
        values.refuse("fmt", "float8 'e4m3' is supported")
    block_shape(values)


def block_shape(values: ConfigValues) -> tuple[int, int] | None:
    """Outputs and inputs that share a scale, None where no `weight_block_size` says so."""
    block = values.get("weight_block_size")
    if block is None:
        return None
    if not (isinstance(block, list) and len(block) == 2 and all(type(n) is int and 0 < n < 2**24 for n in block)):
        values.refuse("weight_block_size", "the outputs and inputs that share a scale are needed", CheckpointError)
    return block[0], block[1]


def find_weights(tensors: Tensors, values: ConfigValues) -> dict[str, QuantisedWeight]:
    """The quantised weights by name, such as `model.layers.0.mlp.up_proj.weight`.

    Raises:
      CheckpointError: tensors are missing or do not fit together.
      ConfigError: the blocks are none that can be kept.
    """
    block = block_shape(values)

    def suffix(module: str) -> str:
        inverse = block is not None or tensors.describe(f"{module}.weight_scale_inv") is not None
        return "weight_scale_inv" if inverse else "weight_scale"

    return {
        f"{module}.weight": find_weight(tensors, module, suffix(module), block)
        for module in modules_with(tensors, "weight")
        if (tensors.describe(f"{module}.weight") or ("", ()))[0] == FP8
    }


def find_weight(tensors: Tensors, module: str, suffix: str, block: tuple[int, int] | None) -> QuantisedWeight:
    """One weight; `block` says how many outputs and inputs share a scale, None that all inputs do."""
    names = (f"{module}.weight", f"{module}.{suffix}")
    outputs, inputs = expect(tensors, names[0], (FP8,), (None, None))
    where = f"{tensors.path}: {module}"
    found = tensors.describe(names[1])
    shape: Shape = () if found is None else found[1]
    if block is not None:
        rows, columns = block
        expect(tensors, names[1], SCALE_TYPES, (-(-outputs // rows), -(-inputs // columns)))
    else:
        rows, columns = (1, -1) if shape in ((outputs, 1), (outputs,)) else (outputs, -1)
        if found is None or shape not in ((outputs, 1), (outputs,), (1,), (1, 1), ()):
            expect(tensors, names[1], SCALE_TYPES, (outputs, 1))
        if found is not None and found[0] not in SCALE_TYPES:
            expect(tensors, names[1], SCALE_TYPES)
    # The last block may be partial; what it lacks only matters for how groups are cut.
    grouping = cut_groups(where, "fp8", even_groups(where, inputs, columns), "float32")
    names += tuple(
        name for name in (f"{module}.input_scale", f"{module}.activation_scale") if tensors.describe(name) is not None
    )
    read = functools.partial(_read_blocks, tensors, names, grouping, rows, outputs)
    return QuantisedWeight((outputs, inputs), grouping.format, names, read)


def _read_blocks(tensors: Tensors, names: tuple[str, ...], grouping: Grouping, rows: int, outputs: int) -> np.ndarray:
    codes = tensors.read_raw(names[0]).view(np.uint8)
    if (codes & 0x7F == 0x7F).any():
        raise CheckpointError(f"{tensors.path}: {names[0]!r} holds a value that is no number: the file is damaged")
    scale = read_scales(tensors, names[1])
    scale = scale.reshape(-1, 1) if scale.ndim < 2 else scale
    return grouping.encode(codes, scale[np.arange(outputs) // rows], None)
