"""Drafts that are their target without some blocks (`draft="self:..."`): what they compute, hold and propose."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import fast_part, quick_part
from method_cases import LONG_PROMPT, PROMPT, SAMPLINGS, run, tokens_of
from swift_cases import LAYERS, config_of, models_of, params_of, plain_tokens
from tiny_models import FAMILIES, empty_cache, on_one_device
from tiny_pairs import FLOAT32

from jaxspec.checkpoint.shared_weights import cut_config, place_layer_subset, share_embedding, take_layers
from jaxspec.engine import Engine
from jaxspec.errors import ConfigError
from jaxspec.methods.core.round import ModelParams, Models
from jaxspec.methods.specexec import SpecExec
from jaxspec.methods.swiftspec.settings import SwiftSpec
from jaxspec.models.config import config_from_data, config_to_data
from jaxspec.models.kv_cache import init_cache
from jaxspec.models.layer_set import parse_layers
from jaxspec.models.params import declare_leaves
from jaxspec.models.transformer import forward, prefill, vocab_logits
from jaxspec.runtime.mesh import plan_mesh

# Layer 1 is gone, layer 2 has attention only, layer 4 an MLP only.
SET = "attention=1,4;mlp=1-2"


def pair(family, text, degree=1, plan=None):
    """Placements and parameters of a target and a draft of its own layers."""
    target, layers = models_of(family, degree).target, parse_layers(text, LAYERS)
    draft = place_layer_subset(target, layers, plan or target.plan, FLOAT32)
    params = params_of(family, degree).target
    own = take_layers(target, draft, layers, params)
    return Models(target, draft), ModelParams(params, own | share_embedding(draft, params))


FAST = fast_part(FAMILIES, lambda family: family in ("llama", "qwen2"))


@pytest.mark.parametrize("family", quick_part(FAST, lambda family: family == "llama"))
def test_the_draft_computes_what_the_skipping_model_computes(family):
    models, params = pair(family, SET)
    assert models.draft is not None and params.draft is not None
    tokens = np.array(PROMPT, np.int32)

    def logits_of(cfg, slots, **units):
        @on_one_device
        def run_all(params, tokens):
            place = jnp.arange(len(PROMPT))
            hidden, _ = forward(params, cfg, tokens, place, slots(cfg), place[:, None] >= place, **units)
            return vocab_logits(params, cfg, hidden)

        return run_all

    skipping = logits_of(config_of(family), lambda cfg: empty_cache(cfg, 64), units=parse_layers(SET, LAYERS))
    alone = logits_of(models.draft.cfg, lambda cfg: init_cache(cfg, cfg.num_kv_heads, 64, jnp.dtype("float32")))
    np.testing.assert_allclose(alone(params.draft, tokens), skipping(params.target, tokens), rtol=1e-5, atol=1e-5)


def test_prefill_commits_the_layers_that_have_attention():
    models, params = pair("llama", SET)
    assert models.draft is not None
    cfg = models.draft.cfg

    @on_one_device
    def fill(params, tokens):
        cache = init_cache(cfg, cfg.num_kv_heads, 64, jnp.dtype("float32"))
        return prefill(params, cfg, tokens, jnp.int32(len(PROMPT)), cache)

    cache = fill(params.draft, np.array(PROMPT, np.int32))
    assert len(cache.key) == LAYERS - 2 and int(cache.length) == len(PROMPT)
    assert all(np.asarray(key)[:, : len(PROMPT)].any() for key in cache.key)


def test_what_the_draft_holds():
    """On the target's devices its very arrays; nothing of what is skipped, on any devices."""
    models, params = pair("llama", SET)
    assert models.draft is not None and params.draft is not None
    assert len(params.draft["layers"]) == LAYERS - 1
    for kept, layer in zip((0, 2, 3, 4, 5), params.draft["layers"], strict=True):
        assert all(leaf is params.target["layers"][kept][name] for name, leaf in layer.items())
    assert set(params.draft["layers"][1]) == {"attn_norm", "qkv", "out"}
    assert set(params.draft["layers"][3]) == {"mlp_norm", "gate_up", "down"}
    assert params.draft["embed"] is params.target["embed"]

    models, params = pair("llama", SET, 2, plan_mesh(3, offset=2))
    assert models.draft is not None
    devices = set(models.draft.plan.devices)
    assert all(leaf.sharding.device_set == devices for leaf in jax.tree.leaves(params.draft))
    shapes = jax.tree.map(lambda leaf: leaf.shape, params.draft)
    assert shapes == jax.tree.map(lambda leaf: leaf.shape, models.draft.params())


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "degree", "draft_devices"),
    fast_part(
        [(SpecExec(8), 1, None), (SwiftSpec(3, 2), 2, (1, 2)), (SwiftSpec(3, 2), 1, (3, 1))],
        lambda method, degree, draft_devices: degree == 1 and draft_devices is None,
    ),
)
def test_methods_that_draft_with_it_write_what_plain_decoding_writes(method, degree, draft_devices):
    family = "qwen2" if degree == 2 else "llama"
    plan = None if draft_devices is None else plan_mesh(draft_devices[0], offset=draft_devices[1])
    models, params = pair(family, SET, degree, plan)
    engine = Engine(models, method, 150)
    engine.prepare()
    for seed, name in enumerate(("greedy", "T=1", "penalties")):
        prompt, sampling = (PROMPT, LONG_PROMPT)[seed % 2], SAMPLINGS[name]
        rounds = run(engine, params, prompt, 40, seed, **sampling)
        assert tokens_of(rounds) == plain_tokens(family, prompt, 40, seed, **sampling)
    accepted = sum(emitted.accepted for emitted in run(engine, params, PROMPT, 40))
    assert accepted > 10


@pytest.mark.thorough
def test_nothing_skipped_is_a_perfect_draft():
    models, params = pair("llama", "none")
    engine = Engine(models, SpecExec(4, width=1, branch=1), 150)
    engine.prepare()
    assert {len(emitted.tokens) for emitted in run(engine, params, PROMPT, 40)} == {5}


def test_the_geometry_survives_as_data():
    cfg = cut_config(config_of("qwen2"), parse_layers(SET, LAYERS))
    assert cfg.num_layers == LAYERS - 1 and cfg.attention_layers == (0, 1, 2, 4)
    assert cfg.sliding_layers == tuple(config_of("qwen2").sliding_layers[i] for i in (0, 2, 3, 4, 5))
    assert config_from_data(config_to_data(cfg), "here") == cfg
    assert "units" not in config_to_data(config_of("qwen2"))
    assert not any(name.startswith("layers.1.down") for name in declare_leaves(cfg, "float32"))
    with pytest.raises(ConfigError, match="units are of 5 layers, the model has 4"):
        dataclasses.replace(cfg, num_layers=4, sliding_layers=())
