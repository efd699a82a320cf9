"""Matchness: how often a model of which layers are skipped says what the whole model said (SWIFT, section 4.2).

Several layer sets are scored by one parallel pass over tokens that are verified already, each set's rows beside the
others': the tokens are given, so nothing has to be decoded. The pass runs in the cache of the generation at hand, on
top of the keys and values before those tokens; what it overwrites is put back.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxspec.methods.core.sequence import TargetState
from jaxspec.models.params import Params
from jaxspec.models.transformer import forward, vocab_logits
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.program import Program
from jaxspec.sampling.processors import clean


def matchness_program(placement: Placement, state: TargetState, sets: int, window: int, branching: bool) -> Program:
    """`count_matches`, compiled: (params, state, tokens, start, units) -> state, matches.

    Args:
      placement: the target.
      state: shapes of its state.
      sets: C, layer sets of one pass; 1 where `branching`.
      window: gamma, tokens on which they are scored.
      branching: leave out what is skipped by branches on the device; else everything is computed, for all sets at once.
    """

    def run(params, state, tokens, start, units):
        return count_matches(params, placement, state, tokens, start, units, branching)

    array = placement.array
    args = [
        placement.params(), state, array((window + 1,), jnp.int32), array((), jnp.int32),
        array((sets, placement.cfg.num_layers, 2), jnp.bool_),
    ]  # fmt: skip
    return Program("matchness", run, placement.plan, args, (state, array((sets,), jnp.int32)), donate=[1])


def count_matches(
    params: Params,
    placement: Placement,
    state: TargetState,
    tokens: jax.Array,
    start: jax.Array,
    units: jax.Array,
    branching: bool,
) -> tuple[TargetState, jax.Array]:
    """Teacher-forced: how many of the tokens does each layer set predict, given those before; for one shard.

    Args:
      params: the target's.
      placement: the target.
      state: its state, which comes back as it is; donated, since the pass runs in its cache.
      tokens: int32 [gamma + 1], verified ones in order; the first is given, the others are predicted.
      start: int32 [], position of the first one. The cache has C * gamma slots from there on.
      units: bool [C, L, 2], units that run; C is 1 where `branching`.
      branching: see `matchness_program`.

    Returns:
      The state, and int32 [C], out of gamma.
    """
    sets, window = units.shape[0], tokens.shape[0] - 1
    rows = sets * window
    place = jnp.arange(rows, dtype=jnp.int32)
    own_set, step = place // window, place % window
    mask = (own_set[:, None] == own_set[None, :]) & (step[None, :] <= step[:, None])
    cache = state.cache

    layers = (cache.key, cache.value)

    def save(_: tuple) -> tuple:
        saved = jax.tree.map(lambda layer: jax.lax.dynamic_slice_in_dim(layer, start, rows, axis=1), layers)
        return jnp.bool_(False), start, saved

    # In a loop of one turn, which the compiler does not know to be one, and which says where to write: fused with the
    # restoring, or unordered with the writing, the saving would need a copy of the whole cache.
    nothing = jax.tree.map(lambda layer: jnp.zeros((layer.shape[0], rows, layer.shape[2]), layer.dtype), layers)
    _, begin, (saved_key, saved_value) = jax.lax.while_loop(
        lambda carry: carry[0], save, (start >= 0, jnp.int32(0), nothing)
    )
    scratch = dataclasses.replace(cache, length=begin)
    which = units[0] if branching else jnp.repeat(units, window, axis=0).transpose(1, 2, 0)  # [L, 2, T]
    with jax.named_scope("matchness"):
        hidden, scratch = forward(
            params, placement.cfg, tokens[:-1][step], start + step, scratch, mask, units=which
        )  # fmt: skip
        said = placement.vocab.argmax(clean(vocab_logits(params, hidden), placement.vocab))
        matches = (said.reshape(sets, window) == tokens[1:]).sum(axis=1, dtype=jnp.int32)

    def restore(layer: jax.Array, held: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(layer, held, begin, axis=1)

    restored = dataclasses.replace(
        cache, key=tuple(map(restore, scratch.key, saved_key)), value=tuple(map(restore, scratch.value, saved_value))
    )
    return dataclasses.replace(state, cache=restored), matches
