"""compressed-tensors checkpoints: packed int4 and int8, W8A8, FP8 and MXFP4.

The config's groups say what kinds of weights there are; the tensors of a module say which of them it is. Weights are
`[O, I]`. Packed codes and zero points are stored plus the middle code (8 or 128). Activations stay as they are where a
file asks to round them: scales of activations and of the cache are not needed.
"""

import functools
import re
from typing import Any

import numpy as np

from jaxspec.checkpoint.quantised import fp8, mxfp4
from jaxspec.checkpoint.quantised.layout import (
    SCALE_TYPES,
    Grouping,
    QuantisedWeight,
    Tensors,
    cut_groups,
    even_groups,
    expect,
    modules_with,
    read_scales,
    unpack_words,
)
from jaxspec.errors import CheckpointError
from jaxspec.models.families.base import ConfigValues

_PACKED, _MXFP4 = "pack-quantized", "mxfp4-pack-quantized"
_LAYOUTS = (_PACKED, "int-quantized", "naive-quantized", "float-quantized", _MXFP4)

HARMLESS_KEYS = frozenset({
    "quantization_status", "global_compression_ratio", "ignore", "kv_cache_scheme", "version", "sparsity_config",
    "transform_config", "run_compressed",
})  # fmt: skip

# Presets that a config may name in place of settings: type, bits.
_PRESETS = {
    "W4A16": ("int", 4), "W4A16_ASYM": ("int", 4), "W8A16": ("int", 8), "W8A8": ("int", 8), "INT8": ("int", 8),
    "W4A8": ("int", 4), "FP8": ("float", 8), "FP8_DYNAMIC": ("float", 8), "FP8_BLOCK": ("float", 8),
}  # fmt: skip

# Of activations, queries and the cache; not needed.
_UNUSED = ("input_scale", "input_zero_point", "output_scale", "output_zero_point", "input_global_scale")


def check(values: ConfigValues) -> None:
    """Refuse settings that ask for another layout, or for more than weights."""
    layout = values.get("format", "dense")
    if layout not in (*_LAYOUTS, "mixed-precision"):
        values.refuse("format", f"supported: {', '.join(_LAYOUTS)}")
    sparsity, transforms = values.get("sparsity_config"), values.get("transform_config")
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") not in ("dense", None):
        values.refuse("sparsity_config", "sparse layouts are not supported")
    if transforms and (not isinstance(transforms, dict) or transforms.get("config_groups")):
        values.refuse("transform_config", "weights that need transforms of activations are not supported")
    if values.get("quantization_status", "compressed") not in ("compressed", "frozen"):
        values.refuse("quantization_status", "only compressed weights are supported")
    _weight_kinds(values)


def find_weights(tensors: Tensors, values: ConfigValues) -> dict[str, QuantisedWeight]:
    """The quantised weights by name, such as `model.layers.0.mlp.up_proj.weight`.

    Raises:
      CheckpointError: tensors are missing or do not fit together, or are of a kind that the config does not list.
      ConfigError: the groups are none that can be kept.
    """
    kinds = _weight_kinds(values)
    found: dict[str, QuantisedWeight] = {}
    for module in modules_with(tensors, "weight_packed"):
        found[f"{module}.weight"] = _find_packed(tensors, module, kinds)
    for module in modules_with(tensors, "weight"):
        dtype, _ = tensors.describe(f"{module}.weight") or ("", ())
        if dtype == "int8":
            found[f"{module}.weight"] = _find_int8(tensors, module, kinds)
        elif dtype == fp8.FP8:
            _require(tensors, module, kinds, ("float", 8))
            block = next((tuple(kind["block_structure"]) for kind in kinds if kind.get("block_structure")), None)
            # Channel and block scales may be mixed: the shape tells them apart.
            scale = tensors.describe(f"{module}.weight_scale")
            outputs = expect(tensors, f"{module}.weight", (fp8.FP8,), (None, None))[0]
            is_block = block and scale and len(scale[1]) == 2 and scale[1] != (outputs, 1)
            found[f"{module}.weight"] = fp8.find_weight(tensors, module, "weight_scale", block if is_block else None)
    return found


def unused_tensors(tensors: Tensors) -> set[str]:
    """Scales of activations and of the cache."""
    kept = (*_UNUSED, "k_scale", "v_scale", "q_scale")
    return {name for name in tensors.names() if name.rpartition(".")[2] in kept}


def _weight_kinds(values: ConfigValues) -> list[dict[str, Any]]:
    """The settings of the weights of each group of modules: `type`, `num_bits` and the like."""
    groups, layout = values.get("config_groups"), values.get("format", "dense")
    if not isinstance(groups, dict) or not groups:
        values.refuse("config_groups", "a JSON object of groups is needed", CheckpointError)
    kinds = []
    for name, group in groups.items():
        if name in _PRESETS and isinstance(group, list):
            kinds.append(dict(zip(("type", "num_bits"), _PRESETS[name], strict=True)) | {"layout": layout})
            continue
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            values.refuse("config_groups", f"the weights of its group {name!r} are not described", CheckpointError)
        own = group.get("format") or layout
        if own not in _LAYOUTS:
            values.refuse("config_groups", f"the layout {own!r} of its group {name!r} is not supported")
        kind, bits = weights.get("type", "int"), weights.get("num_bits")
        wanted = {_MXFP4: (("float", 4),), "float-quantized": (("float", 8),)}.get(own, (("int", 4), ("int", 8)))
        if own == "naive-quantized":
            wanted = (("int", 8), ("float", 8))
        if (kind, bits) not in wanted:
            values.refuse("config_groups", f"its group {name!r} has weights of {bits} bits ({kind}) in {own!r}")
        block = weights.get("block_structure")
        if isinstance(block, str) and re.fullmatch(r"\d{1,6}x\d{1,6}", block):  # of older files
            block = [int(n) for n in block.split("x")]
        if block is not None:
            fits = isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
            if not fits:
                values.refuse("config_groups", f"the blocks of its group {name!r} are no two sizes", CheckpointError)
        kinds.append(weights | {"type": kind, "layout": own, "block_structure": block})
    return kinds


def _require(tensors: Tensors, module: str, kinds: list[dict[str, Any]], kind: tuple[str, int]) -> None:
    if not any((each["type"], each["num_bits"]) == kind for each in kinds):
        listed = ", ".join(sorted({f"{each['num_bits']} bits ({each['type']})" for each in kinds}))
        raise CheckpointError(
            f"{tensors.path}: {module} has weights of {kind[1]} bits ({kind[0]}), but config_groups lists {listed}"
        )


def _find_packed(tensors: Tensors, module: str, kinds: list[dict[str, Any]]) -> QuantisedWeight:
    if (tensors.describe(f"{module}.weight_packed") or ("",))[0] == "uint8":
        _require(tensors, module, kinds, ("float", 4))
        return mxfp4.find_packed(tensors, module)
    parts = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
    packed, scales, size, zeros, order = (f"{module}.{part}" for part in parts)
    where = f"{tensors.path}: {module}"
    _, words = expect(tensors, packed, ("int32",), (None, None))
    expect(tensors, size, ("int64", "int32"), (2,))
    outputs, inputs = (int(n) for n in tensors.read_raw(size))
    bits = next((bits for bits in (4, 8) if inputs > 0 and words * 32 == inputs * bits), None)
    if bits is None:
        raise CheckpointError(f"{where}: {words} words a row do not hold {inputs} codes of 4 or 8 bits")
    _require(tensors, module, kinds, ("int", bits))
    expect(tensors, packed, ("int32",), (outputs, words))
    _, groups = expect(tensors, scales, SCALE_TYPES, (outputs, None))
    if inputs % groups:
        raise CheckpointError(f"{where}: {groups} scales a row do not divide {inputs} inputs")
    sizes = [kind.get("group_size") for kind in kinds if kind.get("strategy") == "group"]
    if groups > 1 and sizes and inputs // groups not in sizes:
        raise CheckpointError(f"{where}: groups of {inputs // groups} inputs, but config_groups lists {sizes}")
    names = [packed, scales, size]
    group_of_input = even_groups(where, inputs, inputs // groups)
    has_zeros = tensors.describe(zeros) is not None
    if has_zeros:
        expect(tensors, zeros, ("int32",), (-(-outputs * bits // 32), groups))
        names.append(zeros)
    elif all(
        kind.get("symmetric", True) is False for kind in kinds if (kind["type"], kind["num_bits"]) == ("int", bits)
    ):
        raise CheckpointError(f"{where}: config_groups says that weights have zero points, but there are none")
    if tensors.describe(order) is not None:
        expect(tensors, order, ("int32",), (inputs,))
        names.append(order)
        listed = tensors.read_raw(order).astype(np.int64)
        if (listed >= groups).any() or ((listed < 0).any() and not (listed == -1).all()):
            raise CheckpointError(f"{where}: an input names a group that there is no scale of")
        group_of_input = group_of_input if (listed == -1).all() else listed
    found = tensors.describe(scales)
    assert found is not None
    grouping = cut_groups(where, f"int{bits}", group_of_input, found[0])
    read = functools.partial(_read_packed, tensors, (packed, scales, zeros if has_zeros else None), grouping, bits)
    return QuantisedWeight((outputs, inputs), grouping.format, tuple(names), read, grouping.order)


def _read_packed(tensors: Tensors, names: tuple[str, str, str | None], grouping: Grouping, bits: int) -> np.ndarray:
    codes, scale, zero = unpack_words(tensors.read_raw(names[0]), bits), read_scales(tensors, names[1]), None
    if names[2] is not None:
        zero = unpack_words(tensors.read_raw(names[2]).T, bits).T[: len(codes)]
    return grouping.encode(codes, scale, zero)


def _find_int8(tensors: Tensors, module: str, kinds: list[dict[str, Any]]) -> QuantisedWeight:
    names = (f"{module}.weight", f"{module}.weight_scale", f"{module}.weight_zero_point")
    outputs, inputs = expect(tensors, names[0], ("int8",), (None, None))
    _require(tensors, module, kinds, ("int", 8))
    found = tensors.describe(names[1])
    one_each = found is not None and found[1] in ((outputs, 1), (outputs,))
    if not one_each and (found is None or found[1] not in ((1,), (1, 1), ())):
        expect(tensors, names[1], SCALE_TYPES, (outputs, 1))
    expect(tensors, names[1], SCALE_TYPES)
    has_zeros = tensors.describe(names[2]) is not None
    if has_zeros:
        expect(tensors, names[2], ("int8",), found[1] if found else ())
    where = f"{tensors.path}: {module}"
    grouping = cut_groups(where, "int8", even_groups(where, inputs, -1), "float32")
    own = names if has_zeros else names[:2]
    return QuantisedWeight(
        (outputs, inputs), grouping.format, own, functools.partial(_read_int8, tensors, own, grouping)
    )


def _read_int8(tensors: Tensors, names: tuple[str, ...], grouping: Grouping) -> np.ndarray:
    codes = tensors.read_raw(names[0]).view(np.uint8) ^ np.uint8(128)
    column = (len(codes), 1)
    scale, zero = np.broadcast_to(read_scales(tensors, names[1]).reshape(-1, 1), column), None
    if len(names) > 2:
        stored = tensors.read_raw(names[2]).reshape(-1, 1).view(np.uint8) ^ np.uint8(128)
        zero = np.broadcast_to(stored, column)
    return grouping.encode(codes, scale, zero)
