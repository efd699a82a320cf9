"""Drafts whose states are added to embeddings, against an ordinary model that has the sums as its embeddings."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import FAMILIES, empty_cache, init_params, on_one_device, relative_error

from jaxspec.errors import ConfigError
from jaxspec.models.feature_draft import forward_draft, fuse, prefill_draft
from jaxspec.models.features import FeatureConfig
from jaxspec.models.transformer import forward

LENGTH, STEPS, SLOTS = 14, 4, 32
ORDINARY = dataclasses.replace(FAMILIES["llama"], vocab_size=SLOTS)
D = ORDINARY.embed_dim
FEATURES = FeatureConfig(D, (0, 2), "added", own_head=False, fc_norm="each")
CFG = dataclasses.replace(ORDINARY, shares_embedding=True, features=FEATURES)
TOLERANCE = 2e-5


def draft_params(seed):
    params = init_params(jax.random.key(seed), CFG, scale=0.15)
    params["fc_norm"] = 1 + jax.random.normal(jax.random.key(seed + 1), (2, D)) / 4
    return params


def chain(params, embed, tokens, states):
    """Hidden states of the last verified row and of `STEPS` rows of a chain after it."""

    def every(params, tokens, states):
        fed = fuse(params, CFG, states)
        cache = prefill_draft(
            params, CFG, tokens[: LENGTH - 1], fed[:-1], jnp.int32(LENGTH - 1), empty_cache(CFG, SLOTS)
        )
        state, out = fed[-1:], []
        for step in range(STEPS + 1):
            token, one = tokens[LENGTH - 1 + step, None], jnp.ones((1, 1), bool)
            hidden, state, cache = forward_draft(params, CFG, token, state, cache.length[None], cache, one)
            cache = dataclasses.replace(cache, length=cache.length + 1)
            out.append(hidden[0])
        return jnp.stack(out)

    return on_one_device(every)(params | {"embed": embed}, tokens, states)


@on_one_device
def ordinary_hidden(params, table, tokens):
    mask = jnp.tril(jnp.ones((SLOTS, SLOTS), bool))
    return forward(params | {"embed": table}, ORDINARY, tokens, jnp.arange(SLOTS), empty_cache(ORDINARY, SLOTS), mask)[
        0
    ]


def inputs(seed):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, SLOTS, LENGTH + STEPS).astype(np.int32)
    states = (rng.normal(size=(LENGTH, 2 * D)) * [*[1.0] * D, *[30.0] * D]).astype(np.float32)
    return rng.normal(size=(SLOTS, D)).astype(np.float32), tokens, states


def test_states_are_added_to_embeddings():
    """Row i is token i + 1 with the projected state of token i; in a chain, with the projected state of its parent."""
    embed, tokens, states = inputs(0)
    params = draft_params(1)
    found = np.asarray(chain(params, embed, tokens, states))
    own = {name: params[name] for name in ("final_norm", "layers")}
    fc, fc_own, norms = (np.asarray(params[name], np.float64) for name in ("fc", "fc_own", "fc_norm"))
    parts = states.reshape(LENGTH, 2, D).astype(np.float64)
    parts = parts / np.sqrt((parts**2).mean(-1, keepdims=True) + CFG.norm_eps) * norms
    # Every row has a token of its own, whose embedding is the sum.
    table = np.zeros((SLOTS, D), np.float32)
    table[:LENGTH] = embed[tokens[:LENGTH]] + parts.reshape(LENGTH, -1) @ fc.T
    for step in range(STEPS + 1):
        hidden = np.asarray(ordinary_hidden(own, table, jnp.arange(SLOTS)))[LENGTH - 1 + step]
        assert relative_error(found[step], hidden) < TOLERANCE
        if step < STEPS:
            table[LENGTH + step] = embed[tokens[LENGTH + step]] + fc_own @ hidden


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"own_head": True}, "has its target's head"),
        ({"own_head": False, "norm_output": True}, "no such norms"),
        ({"own_head": False, "norm_before_residual": True}, "no such norms"),
    ],
)
def test_what_no_such_draft_has_is_refused(changes, problem):
    with pytest.raises(ConfigError, match=problem):
        FeatureConfig(D, (0, 2), "added", **changes)
    with pytest.raises(ConfigError, match="as wide as the target"):
        dataclasses.replace(CFG, shares_embedding=False, features=dataclasses.replace(FEATURES, target_dim=D + 8))
