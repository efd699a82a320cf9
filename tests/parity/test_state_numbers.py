"""Which hidden states a folder asks for, seen by a target whose state i is the constant i.

State i is the residual stream that enters layer i, and state 6 of 6 layers what leaves the last one, before the final
norm. Layouts number states in three ways; a number that is off by one still decodes, and accepts a little less.
"""

import dataclasses

import eagle_folders
import jax.numpy as jnp
import numpy as np
import pytest
from block_folders import (
    DSPARK,
    TABLES,
    H,
    V,
    dflash2_tensors,
    inner,
    markov_tensors,
    random_tensors,
    write_deepspec,
    write_dflash2,
    write_folder,
    write_speculators,
)
from tiny_models import FAMILIES, RandomSource, empty_cache, on_one_device

from jaxspec.checkpoint.eagle import open_feature_draft
from jaxspec.checkpoint.load import load_foreign
from jaxspec.models.feature_draft import fuse
from jaxspec.models.transformer import forward_with_states, prefill_with_states
from jaxspec.runtime.mesh import plan_mesh

LAYERS, ROWS = 6, 5
SPECULATORS = dict(speculators_model_type="dspark", architectures=["DSparkSpeculator"], draft_vocab_size=V)
PARALLEL = dict(speculators_model_type="peagle", architectures=["PEagleSpeculator"], mask_token_id=9)
FLAT = dict(parallel_drafting=True, ptd_token_id=9, num_hidden_layers=2)
IDS = "eagle_aux_hidden_state_layer_ids"


def dflash(path, tensors, **changes):
    return write_folder(path, random_tensors() | tensors, **changes)


def deepspec(path, tensors, **changes):
    return write_deepspec(path, markov_tensors() | tensors, **changes)


def plain_deepspec(path, tensors, **changes):
    return write_deepspec(path, random_tensors() | tensors, enable_confidence_head=False, **changes)


def spec_forge(path, tensors, **changes):
    plain = {name: tensor for name, tensor in markov_tensors().items() if not name.startswith("confidence")}
    settings = inner(projector_type="dspark", **DSPARK, **changes)
    return write_folder(path, plain | tensors, architectures=["DSparkDraftModel"], **settings)


def dflash2(path, tensors, **changes):
    return write_dflash2(path, dflash2_tensors() | tensors, **changes)


def nested(path, tensors, own=None, **changes):
    settings = dict(draft_vocab_size=V) | changes
    return write_speculators(path, (random_tensors() if own is None else own) | TABLES | tensors, **settings)


def p_eagle(path, tensors, write=eagle_folders.write_speculators, **changes):
    own = eagle_folders.random_tensors(layers=2, first="layers.0", embedding=True)
    width = eagle_folders.STATES * eagle_folders.TARGET_DIM
    own["mask_hidden"] = np.ones((1, 1, width), np.float32)
    layer = () if write is eagle_folders.write_folder else ({"num_hidden_layers": 2},)
    return write(path, own | tensors, *layer, **changes)


# How a folder is written with some tensors of its own, what it says of its states, and the states that it means.
FLAVOURS = {
    "DFlash": (dflash, inner(target_layer_ids=[1, 4]), (2, 5)),
    "DFlash, both ends": (dflash, inner(target_layer_ids=[0, 5]), (1, 6)),
    "DFlash, by z-lab's rule": (dflash, {"dflash_config": {"mask_token_id": 97}}, (2, 4)),
    "DFlash, SpecForge": (dflash, inner(target_layer_ids=[1, 4], projector_type="dflash"), (2, 5)),
    "DFlash, speculators": (nested, {"aux_hidden_state_layer_ids": [2, 6]}, (2, 6)),
    "JetSpec": (dflash, inner(target_layer_ids=[1, 4], causal_head=True), (2, 5)),
    "DFlash, DeepSpec": (plain_deepspec, {"target_layer_ids": [-1, 4], "markov_rank": 0}, (0, 5)),
    "DSpark, DeepSpec": (deepspec, {"target_layer_ids": [1, 4]}, (2, 5)),
    "DSpark, the embedding and the end": (deepspec, {"target_layer_ids": [-1, 5]}, (0, 6)),
    "DSpark, SpecForge": (spec_forge, {"target_layer_ids": [1, 4]}, (2, 5)),
    "DSpark, speculators": (
        nested, {"own": markov_tensors(), "aux_hidden_state_layer_ids": [2, 5]} | SPECULATORS | DSPARK, (2, 5),
    ),
    "DFlash2": (dflash2, {}, (2, 5)),
    "P-EAGLE, speculators": (p_eagle, {IDS: [1, 3, 6]} | PARALLEL, (1, 3, 6)),
    "P-EAGLE, flat": (
        p_eagle, {"write": eagle_folders.write_folder, "eagle_config": {IDS: [0, 2, 5]}} | FLAT, (1, 3, 6),
    ),
    "P-EAGLE, nothing said": (p_eagle, {"write": eagle_folders.write_folder} | FLAT, (2, 3, 3)),
}  # fmt: skip


def counting_target():
    """A target whose embedding is 0 and whose layers add 1 each, by the biases of their attention."""
    cfg = dataclasses.replace(FAMILIES["llama"], family="seed_oss", num_layers=LAYERS, out_bias=True)
    source = RandomSource(cfg)
    for name, tensor in source._tensors.items():
        if name.endswith("o_proj.bias"):
            tensor[:] = 1
        elif name.endswith(("embed_tokens.weight", "o_proj.weight", "down_proj.weight")):
            tensor[:] = 0
    return cfg, load_foreign(source, plan_mesh(1), "float32")


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_states_are_those_that_the_layout_means(flavour, tmp_path):
    write, says, meant = FLAVOURS[flavour]
    # `fc` reads each state back: number j of its result is the mean of state j.
    fc = np.zeros((H, len(meant) * H), np.float32)
    for j in range(len(meant)):
        fc[j, j * H : (j + 1) * H] = 1 / H
    ones = {} if write is p_eagle else {"hidden_norm.weight": np.ones(H, np.float32)}
    source = open_feature_draft(write(tmp_path, {"fc.weight": fc} | ones, **says))
    draft, layers = source.config, source.config.features.resolve(LAYERS).layers
    cfg, target = counting_target()

    @on_one_device
    def read(target, params):
        token, position = jnp.arange(ROWS, dtype=jnp.int32), jnp.arange(ROWS, dtype=jnp.int32)
        cache, prompt = prefill_with_states(target, cfg, token, jnp.int32(ROWS), empty_cache(cfg, 32), layers)
        causal = jnp.tril(jnp.ones((ROWS, ROWS), bool))
        _, _, window = forward_with_states(target, cfg, token, ROWS + position, cache, causal, layers)
        return fuse(params, draft, jnp.concatenate([prompt, window]))

    expected = np.zeros(H)
    expected[: len(meant)] = meant
    if write is not p_eagle:  # one norm for what all layers see
        expected /= np.sqrt((expected**2).mean() + 1e-6)
    fused = read(target, load_foreign(source, plan_mesh(1), "float32"))
    np.testing.assert_allclose(fused, np.tile(expected, (2 * ROWS, 1)), atol=1e-5)
