"""Matchness: how often a model of which blocks are skipped says what the whole model said (SWIFT, section 4.2).

One parallel pass over verified tokens scores several layer sets: each has its own rows. The pass runs in the cache of
the generation at hand, on top of the keys and values before those tokens. What it overwrites is put back.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxspec.methods.core.sequence import SequenceState
from jaxspec.models.params import Params
from jaxspec.models.transformer import forward, vocab_logits
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.program import Program
from jaxspec.sampling.processors import clean


def matchness_program(target: Placement, state: SequenceState, sets: int, window: int, branching: bool) -> Program:
    """Count the tokens that each of C `sets` predicts on a `window` of gamma, given the verified tokens before each.

    Blocks are skipped by `branching` on the device, one set in a pass; else all is computed, for all sets at once.
    Returns a program (params, state, tokens, start, units) -> (state, matches), which leaves the state unchanged:
      tokens: int32 [gamma + 1], verified ones in order; the first is given, the others are predicted.
      start: int32 [], position of the first one. The cache has C * gamma slots from there on.
      units: bool [C, L, 2], blocks that run; matches: int32 [C], at most gamma.
    """
    rows = sets * window

    def count(params: Params, state: SequenceState, tokens: jax.Array, start: jax.Array, units: jax.Array) -> tuple:
        place, cache = jnp.arange(rows, dtype=jnp.int32), state.cache
        own_set, step = place // window, place % window
        mask = (own_set[:, None] == own_set[None, :]) & (step[None, :] <= step[:, None])
        layers = (cache.key, cache.value)

        def save(_: tuple) -> tuple:
            saved = jax.tree.map(lambda layer: jax.lax.dynamic_slice_in_dim(layer, start, rows, axis=1), layers)
            return jnp.bool_(False), start, saved

        # A loop of one turn, which the compiler does not know, that says where to write. Fused with the restoring, or
        # not ordered before the writing, the saving would copy the whole cache.
        nothing = jax.tree.map(lambda layer: jnp.zeros((layer.shape[0], rows, layer.shape[2]), layer.dtype), layers)
        _, begin, (key, value) = jax.lax.while_loop(lambda carry: carry[0], save, (start >= 0, jnp.int32(0), nothing))
        scratch = dataclasses.replace(cache, length=begin)
        runs = units[0] if branching else jnp.repeat(units, window, axis=0).transpose(1, 2, 0)  # [L, 2] or [L, 2, T]
        with jax.named_scope("matchness"):
            hidden, scratch = forward(params, target.cfg, tokens[:-1][step], start + step, scratch, mask, units=runs)
            said = target.vocab.argmax(clean(vocab_logits(params, target.cfg, hidden), target.vocab))
            matches = (said.reshape(sets, window) == tokens[1:]).sum(axis=1, dtype=jnp.int32)

        def restore(layer: jax.Array, held: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(layer, held, begin, axis=1)

        key, value = tuple(map(restore, scratch.key, key)), tuple(map(restore, scratch.value, value))
        return dataclasses.replace(state, cache=dataclasses.replace(cache, key=key, value=value)), matches

    tokens, units = target.array((window + 1,), jnp.int32), target.array((sets, target.cfg.num_layers, 2), jnp.bool_)
    args = [target.params(), state, tokens, target.array((), jnp.int32), units]
    return Program("matchness", count, target.plan, args, (state, target.array((sets,), jnp.int32)), donate=[1])
