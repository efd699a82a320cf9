"""Which type each weight is kept in, and what that declares."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import FAMILIES

from jaxspec.models.params import declare_leaves, declare_params
from jaxspec.models.quantization import (
    Storage,
    as_storage,
    collect_storage,
    fit_storage,
    restrict_storage,
    weight_leaves,
)
from pallas_kernels.linear.blocks import Blocks

CFG = dataclasses.replace(FAMILIES["qwen3"], embed_dim=64, mlp_dim=96, num_heads=8, num_kv_heads=4, head_dim=8)


def test_a_dtype_is_that_of_all_weights():
    assert as_storage(jnp.bfloat16) == as_storage(np.dtype("bfloat16")) == as_storage("bfloat16") == Storage("bfloat16")
    storage = Storage("q8_0", (("embed", "q4_0"),))
    assert as_storage(storage) is storage
    dtypes = {name: info.dtype for name, info in declare_leaves(CFG, jnp.bfloat16).items()}
    assert {name for name, dtype in dtypes.items() if dtype == jnp.bfloat16} == set(weight_leaves(CFG))


def test_collected_types_have_one_form():
    types = dict.fromkeys(weight_leaves(CFG), "q4_k") | {"embed": "q6_k", "layers.1.qkv": ("q4_k", "q4_k", "q6_k")}
    storage = collect_storage(types)
    assert storage == Storage("q4_k", (("embed", "q6_k"), ("layers.1.qkv", ("q4_k", "q4_k", "q6_k"))))
    assert hash(storage) == hash(collect_storage(types)) and str(storage) == "q4_k and q6_k"
    other = Storage("q6_k", tuple((leaf, t) for leaf, t in types.items() if t != "q6_k"))
    assert restrict_storage(other, CFG) == storage
    assert restrict_storage(other, dataclasses.replace(CFG, num_layers=1)) == Storage("q4_k", (("embed", "q6_k"),))
    assert str(Storage("q8_0", (("embed", "float32"), ("layers.0.out", "bfloat16")))) == "q8_0, bfloat16 and float32"


def test_leaf_names_are_those_of_numbers():
    assert list(declare_leaves(CFG, Storage("q8_0", (("layers.0.out", "float32"),)))) == list(
        declare_leaves(CFG, "float32")
    )
    parts = Storage("float32", (("layers.1.qkv", ("q8_0", "float16", "q4_0")),))
    infos = declare_leaves(CFG, parts)
    assert "layers.1.qkv" not in infos and "layers.0.qkv" in infos
    assert infos["layers.1.qkv.query"].shape == (4, 2, 8, 2, 34)
    assert (infos["layers.1.qkv.key"].shape, infos["layers.1.qkv.key"].dtype) == ((4, 1, 8, 64), jnp.float16)
    assert (infos["layers.1.qkv.value"].shape, infos["layers.1.qkv.value"].format) == ((4, 1, 8, 2, 18), "q4_0")


def test_heads_of_no_whole_blocks_lie_in_one_row():
    layer = declare_params(CFG, "q8_0")["layers"][0]
    assert isinstance(layer["out"], Blocks) and layer["out"].shape == (64, 1, 2, 34)
    fitted = fit_storage(Storage("q8_0"), CFG, 2)
    assert fitted == Storage("q8_0", (("layers.0.out", "float32"), ("layers.1.out", "float32")))
    assert fit_storage(Storage("q8_0"), CFG, 1) == Storage("q8_0")
    whole = dataclasses.replace(CFG, head_dim=16)
    assert fit_storage(Storage("q8_0"), whole, 2) == Storage("q8_0")
    assert declare_params(whole, "q8_0")["layers"][0]["out"].shape == (64, 4, 1, 34)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Storage("q9_0"), "default: weight type 'q9_0' is not one of float32, .*q6_k"),
        (lambda: Storage("q8_0", (("layers.0.qkv", ("q8_0",) * 2),)), "layers.0.qkv: a qkv has one type or 3"),
        (lambda: declare_params(CFG, Storage("float32", (("layers.2.out", "q8_0"),))), "'layers.2.out', which is no"),
        (lambda: declare_params(CFG, "q4_k"), "rows of 64 values are not a whole number of q4_k blocks of 256"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        make()
