"""GPTQ checkpoints, versions 1 and 2, of 4 and 8 bits, with inputs in any order.

Of a module, `qweight` is int32 `[I * bits / 32, O]`, packed along the inputs; `qzeros` int32 `[groups, O * bits / 32]`;
`scales` `[groups, O]`; and `g_idx` int32 `[I]`, the group of each input. A weight is `(code - zero point) * scale`.
Version 1 stores zero points less one. The tensors say how many bits a module has, so overrides for some modules
(`dynamic`) need no rules.
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
    unpack_words,
)
from jaxspec.errors import CheckpointError
from jaxspec.models.families.base import ConfigValues

BITS = (4, 8)
_VERSIONS = ("gptq", "gptq_v2")

# Which modules are quantised, and how, is seen in the tensors; the others say how the codes were found.
HARMLESS_KEYS = frozenset({
    "desc_act", "sym", "static_groups", "true_sequential", "damp_percent", "damp_auto_increment", "model_seqlen",
    "block_name_to_quantize", "module_name_preceding_first_block", "modules_in_block_to_quantize", "lm_head", "dynamic",
    "model_name_or_path", "model_file_base_name", "model_base_name", "tokenizer", "dataset", "cache_block_outputs",
    "use_cuda_fp16", "use_exllama", "disable_exllama", "exllama_config", "max_input_length", "batch_size", "backend",
    "pad_token_id", "quant_method_version", "mse", "autoround_version", "iters", "lr", "minmax_lr", "nsamples",
    "low_gpu_mem_usage", "seqlen", "enable_minmax_tuning", "enable_quanted_input", "data_type",
    "gradient_accumulate_steps",
    "act_group_aware", "gptaq", "gptaq_alpha", "method", "pack_impl", "offload_to_disk", "fallback",
})  # fmt: skip


def check(values: ConfigValues) -> None:
    """Refuse settings that ask for another layout."""
    if values.get("is_marlin_format", False):
        values.refuse("is_marlin_format", "only GPTQ's own layout is supported")
    if _version(values) not in _VERSIONS:
        values.refuse("checkpoint_format", f"GPTQ layouts {' and '.join(_VERSIONS)} are supported")
    if values.get("bits") not in BITS:
        values.refuse("bits", "GPTQ of 4 and 8 bits is supported")
    if values.get("pack_dtype", "int32") != "int32":
        values.refuse("pack_dtype", "codes packed into int32 are supported")
    group = values.get("group_size", 128)
    if type(group) is not int or (group != -1 and group < 1):
        values.refuse("group_size", "a number of inputs, or -1 for all, is needed")
    values.get("meta")


def find_weights(tensors: Tensors, values: ConfigValues) -> dict[str, QuantisedWeight]:
    """The quantised weights by name, such as `model.layers.0.mlp.up_proj.weight`.

    The arrays `g_idx` are read; they hold four bytes per input.

    Raises:
      CheckpointError: tensors are missing or do not fit together.
      ConfigError: the groups are none that can be kept.
    """
    add = "none" if _version(values) == "gptq_v2" else "words" if _is_gptqmodel(values) else "codes"
    return {
        f"{module}.weight": _find_weight(tensors, module, values, add) for module in modules_with(tensors, "qweight")
    }


def _version(values: ConfigValues) -> object:
    # GPTQModel writes both keys.
    return values.get("checkpoint_format", values.get("format", "gptq"))


def _is_gptqmodel(values: ConfigValues) -> bool:
    meta = values.get("meta")
    quantizer = meta.get("quantizer") if isinstance(meta, dict) else None
    quantizers = quantizer if isinstance(quantizer, list) else [quantizer]
    return any(isinstance(each, str) and each.lower().startswith("gptqmodel") for each in quantizers)


def _find_weight(tensors: Tensors, module: str, values: ConfigValues, add: str) -> QuantisedWeight:
    names = tuple(f"{module}.{part}" for part in ("qweight", "qzeros", "scales"))
    words, outputs = expect(tensors, names[0], ("int32",), (None, None))
    groups, _ = expect(tensors, names[2], SCALE_TYPES, (None, outputs))
    _, zero_words = expect(tensors, names[1], ("int32",), (groups, None))
    where = f"{tensors.path}: {module}"
    bits = next((bits for bits in BITS if zero_words * 32 == outputs * bits), None)
    if bits is None:
        found = f"{zero_words} words of zero points for {outputs} outputs"
        raise CheckpointError(f"{where}: {found} are not of {' or '.join(map(str, BITS))} bits")
    if bits != values.get("bits") and not values.get("dynamic"):
        raise CheckpointError(f"{where}: has {bits} bits, but quantization_config.bits is {values.get('bits')}")
    inputs = words * 32 // bits
    group_of_input = even_groups(where, inputs, values.get("group_size", 128))
    if tensors.describe(f"{module}.g_idx") is not None:
        names += (f"{module}.g_idx",)
        expect(tensors, names[3], ("int32",), (inputs,))
        group_of_input = tensors.read_raw(names[3]).astype(np.int64)
        group_of_input = np.where(group_of_input < 0, group_of_input + groups, group_of_input)
    if group_of_input.min() < 0 or group_of_input.max() >= groups:
        listed = f"inputs name groups {group_of_input.min()} to {group_of_input.max()}"
        raise CheckpointError(f"{where}: {listed}, but there are scales of {groups}")
    found = tensors.describe(names[2])
    assert found is not None
    grouping = cut_groups(where, f"int{bits}", group_of_input, found[0])
    read = functools.partial(_read_blocks, tensors, names, grouping, bits, add)
    return QuantisedWeight((outputs, inputs), grouping.format, names, read, grouping.order)


def _read_blocks(tensors: Tensors, names: tuple[str, ...], grouping: Grouping, bits: int, add: str) -> np.ndarray:
    codes = unpack_words(tensors.read_raw(names[0]).T, bits)
    zero = tensors.read_raw(names[1])
    if add == "words":
        # GPTQModel subtracted one from each code of a word at once, and borrows went from code to code.
        ones = np.uint32(0x11111111 if bits == 4 else 0x01010101)
        zero = (zero.view(np.uint32) + ones).view(np.int32)
    zero = unpack_words(zero, bits)
    if add == "codes":
        zero = zero + np.uint8(1) & np.uint8(2**bits - 1)
    return grouping.encode(codes, read_scales(tensors, names[2]).T, zero.T)
