"""AWQ checkpoints in AutoAWQ's "gemm" layout: four bits, one scale and one zero point per group of inputs.

Of a module, `qweight` is int32 `[I, O / 8]`, `qzeros` int32 `[groups, O / 8]` and `scales` `[groups, O]`. A weight is
`(code - zero point) * scale`.
"""

import functools

import numpy as np

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
)
from jaxspec.errors import CheckpointError
from jaxspec.models.families.base import ConfigValues

# Four bits from bit 4 * i of a word on are output `_ORDER[i]` of its eight.
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

HARMLESS_KEYS = frozenset(
    {"modules_to_not_convert", "do_fuse", "exllama_config", "fuse_max_seq_len", "modules_to_fuse"}
)


def check(values: ConfigValues) -> None:
    """Refuse settings that ask for another layout."""
    version = values.get("version", "gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        values.refuse("version", "only AWQ's layout 'gemm' is supported")
    bits = values.get("bits", values.get("w_bit", 4))
    if bits != 4:
        values.refuse("bits", "AWQ of 4 bits is supported")
    if values.get("zero_point", True) is not True:
        values.refuse("zero_point", "AWQ's layout 'gemm' has zero points")
    if values.get("backend") not in (None, "autoawq"):
        values.refuse("backend", "only AutoAWQ's layout is supported")


def find_weights(tensors: Tensors, values: ConfigValues) -> dict[str, QuantisedWeight]:
    """The quantised weights by name, such as `model.layers.0.mlp.up_proj.weight`.

    Raises:
      CheckpointError: tensors are missing or do not fit together.
      ConfigError: the groups are none that can be kept.
    """
    group = values.get("group_size", values.get("q_group_size", 128))
    if type(group) is not int or (group != -1 and group < 1):
        values.refuse("group_size", "a number of inputs, or -1 for all, is needed")
    return {f"{module}.weight": _find_weight(tensors, module, group) for module in modules_with(tensors, "qweight")}


def _find_weight(tensors: Tensors, module: str, group: int) -> QuantisedWeight:
    names = tuple(f"{module}.{part}" for part in ("qweight", "qzeros", "scales"))
    inputs, words = expect(tensors, names[0], ("int32",), (None, None))
    where = f"{tensors.path}: {module}"
    group_of_input = even_groups(where, inputs, group)
    groups = int(group_of_input[-1]) + 1
    if inputs != groups * (inputs if group == -1 else group):
        raise CheckpointError(f"{where}: {inputs} inputs are no whole groups of {group}")
    expect(tensors, names[1], ("int32",), (groups, words))
    expect(tensors, names[2], SCALE_TYPES, (groups, 8 * words))
    found = tensors.describe(names[2])
    assert found is not None
    grouping = cut_groups(where, "int4", group_of_input, found[0])
    read = functools.partial(_read_blocks, tensors, names, grouping)
    return QuantisedWeight((8 * words, inputs), grouping.format, names, read, grouping.order)


def _read_blocks(tensors: Tensors, names: tuple[str, ...], grouping: Grouping) -> np.ndarray:
    codes, zero = (_unpack(tensors.read_raw(name)) for name in names[:2])
    return grouping.encode(codes, read_scales(tensors, names[2]).T, zero)


def _unpack(words: np.ndarray) -> np.ndarray:  # int32 [R, O / 8] -> uint8 [O, R]
    words = np.ascontiguousarray(words.T).view(np.uint32)
    codes = np.empty((len(words), 8, words.shape[1]), np.uint8)
    for place, output in enumerate(_ORDER):
        codes[:, output] = words >> np.uint32(4 * place) & np.uint32(15)
    return codes.reshape(-1, words.shape[1])
