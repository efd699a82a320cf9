"""Prompts of a target that gives its hidden states away, and of the draft that is fed with them.

Row t of the draft joins token t + 1 to the target's state of token t, so a prompt of n tokens, the last of which is the
root, has n - 2 rows of the draft before the root's own. The root's row comes with the first round, like those of
everything that is verified later.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxspec.methods.core.sequence import ModelSequence, SequenceState, fit_kept, split_chunks, usable_chunks
from jaxspec.models.config import ModelConfig
from jaxspec.models.feature_draft import forward_draft, fuse, prefill_draft
from jaxspec.models.kv_cache import KVCache, commit_rows
from jaxspec.models.params import Params
from jaxspec.models.transformer import forward, prefill_with_states, vocab_logits
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.program import Program
from jaxspec.sampling.accept import Verified
from jaxspec.sampling.processors import update_history


class StatesChunk(NamedTuple):
    """A chunk of a prompt after the target's pass: padded tokens int32 [size], how many count, their states."""

    tokens: np.ndarray
    count: int
    states: Array  # float32 [size, n * D]


class FeedingSequence(ModelSequence, ABC):
    """A `ModelSequence` of a target whose prompts come with their hidden states, for a draft that is fed them."""

    def __init__(self, placement: Placement, slots: int, layers: tuple[int, ...], path: int):
        """Declare the programs; `layers` are those of the states, `path` (P) the rows of `Verified.states`."""
        self._fed, self._path = layers, path
        super().__init__(placement, slots, "target")

    @abstractmethod
    def prefill_with_states(
        self, params: Params, state: SequenceState, tokens: np.ndarray, slots: int, start: int = 0
    ) -> tuple[SequenceState, list[StatesChunk], Array | None]:
        """Commit int32 `tokens` `[n]` after the first `start`, in chunks that also fit into a cache of `slots` slots.

        Returns the state, the chunks, and `Verified.states` of a round that begins with the token after them; None
        where there is no token.
        """

    def resume_with_states(
        self, params: Params, state: SequenceState, tokens: np.ndarray, kept: int, slots: int
    ) -> tuple[SequenceState, list[StatesChunk], Array | None]:
        """Begin a sequence of int32 `tokens` `[n]`, the last of which is the root, whose first `kept` are in the cache.

        The rest is that of `prefill_with_states`.
        """
        state = self.rewind(self._fit(state), tokens[:kept], int(tokens[-1]))
        return self.prefill_with_states(params, state, tokens[kept:-1], slots, kept)


class TargetSequence(FeedingSequence):
    """A `FeedingSequence` whose weights stay on the devices."""

    def _declare_fill(self, role: str, keeps_text: bool) -> Sequence[Program]:
        placement, cfg, vocab = self.placement, self.placement.cfg, self.placement.text_vocab
        layers, path, scalar = self._fed, self._path, placement.array((), jnp.int32)
        width = len(layers) * cfg.embed_dim
        last = placement.array((path, width), jnp.float32)

        def fill(params, state, token, count):
            cache, states = prefill_with_states(params, cfg, token, count, state.cache, layers)
            valid = jnp.arange(token.shape[0]) < count
            history = update_history(state.history, token, valid, vocab, generated=False)
            first = jnp.zeros((path, width)).at[0].set(states[count - 1])
            return dataclasses.replace(state, cache=cache, history=history), states, first

        self._fill = {
            size: Program(
                f"{role} prefill {size} with states", fill, placement.plan,
                [placement.params(), self.state, placement.array((size,), jnp.int32), scalar],
                (self.state, placement.array((size, width), jnp.float32), last), donate=[1],
            )
            for size in usable_chunks(self.slots)
        }  # fmt: skip
        return tuple(self._fill.values())

    def prefill_with_states(
        self, params: Params, state: SequenceState, tokens: np.ndarray, slots: int, start: int = 0
    ) -> tuple[SequenceState, list[StatesChunk], Array | None]:
        chunks, first = [], None
        for chunk, count in split_chunks(tokens, slots - start):
            state, states, first = self._fill[len(chunk)](params, state, chunk, np.int32(count))
            chunks.append(StatesChunk(chunk, count, states))
        return state, chunks, first


class DraftSequence(ModelSequence):
    """A `ModelSequence` of a draft that is fed hidden states."""

    def _declare_fill(self, role: str, keeps_text: bool) -> Sequence[Program]:
        placement, cfg, vocab = self.placement, self.placement.cfg, self.placement.text_vocab
        assert cfg.features is not None
        scalar, width = placement.array((), jnp.int32), cfg.features.states_dim

        def fill(params, state, token, following, states, count, rows):
            cache = prefill_draft(params, cfg, following, fuse(params, cfg, states), rows, state.cache)
            state = dataclasses.replace(state, cache=cache, seen=cache.length + 1)
            if not keeps_text:
                return state
            valid = jnp.arange(token.shape[0]) < count
            history = update_history(state.history, token, valid, vocab, generated=False)
            return dataclasses.replace(state, history=history)

        def declare(size: int) -> Program:
            row, states = placement.array((size,), jnp.int32), placement.array((size, width), jnp.float32)
            args = [placement.params(), self.state, row, row, states, scalar, scalar]
            return Program(f"{role} prefill {size} with states", fill, placement.plan, args, self.state, donate=[1])

        self._fill = {size: declare(size) for size in usable_chunks(self.slots)}
        return tuple(self._fill.values())

    def prefill_with_states(
        self, params: Params, state: SequenceState, tokens: np.ndarray, chunks: Sequence[StatesChunk]
    ) -> SequenceState:
        """Commit the rows of the chunks of int32 `tokens` `[n]`: all but that of the token after them, the root."""
        at = 0
        for index, (chunk, count, states) in enumerate(chunks):
            following = tokens[at + 1 : at + 1 + count]
            is_last = index == len(chunks) - 1
            padded = np.zeros(len(chunk), np.int32)
            padded[: len(following)] = following
            rows = np.int32(count - 1 if is_last else count)
            state = self._fill[len(chunk)](params, state, chunk, padded, states, np.int32(count), rows)
            at += count
        return state

    def resume_with_states(
        self, params: Params, state: SequenceState, tokens: np.ndarray, kept: int, chunks: Sequence[StatesChunk]
    ) -> SequenceState:
        """Begin a sequence of int32 `tokens` `[n]` whose first `kept` have rows; `chunks` are those of the others."""
        state = self.rewind(self._fit(state), tokens[:kept], int(tokens[-1]))
        return self.prefill_with_states(params, state, tokens[kept:-1], chunks)


def kept_with_states(common: int, count: int, slots: Sequence[int]) -> int:
    """How many tokens stay of `common` that two texts share, of which the second has `count` before its root.

    The state of the last of them is needed and was not kept, so it runs again. `slots` are those of both caches.
    """
    return min(fit_kept(max(0, common - 1), count, each) for each in slots)


def run_draft(
    params: Params, cfg: ModelConfig, token: Array, states: Array | None, position: Array, cache: KVCache,
    window_mask: Array, **window: Array | None,
) -> tuple[Array, Array | None, KVCache]:  # fmt: skip
    """A pass of a draft of either kind: what the head sees, the rows' own states, and the cache.

    `states`, float32 [T, D], are those of the rows' parents; None for a draft that is not fed them, as is the second
    result then. `window` are further arguments of `forward`.
    """
    if states is None:
        hidden, cache = forward(params, cfg, token, position, cache, window_mask, **window)
        return hidden, None, cache
    return forward_draft(params, cfg, token, states, position, cache, window_mask, **window)


def keep_states(states: Array | None, own: Array | None, first: Array) -> Array | None:
    """Own states [w, D] of a pass among those of all nodes, [M, D], from row `first` on."""
    return None if states is None or own is None else jax.lax.dynamic_update_slice(states, own, (first, jnp.int32(0)))


class Root(NamedTuple):
    """A draft's root, evaluated: what its tree begins with."""

    token: Array  # int32 []
    logits: Array  # [1, V_local], after it
    states: Array  # float32 [1, D], its own
    sequence: SequenceState  # window slot 0 of its cache is the root
    produced: Array  # int32 [], position of its children in the text


def take_verified(params: Params, cfg: ModelConfig, sequence: SequenceState, verified: Verified) -> Root:
    """Run everything that was verified with the target's true states; for one shard.

    Rows that the draft ran with its own states are computed again: what they stand on were guesses.
    """
    hidden, states, taken = run_verified(params, cfg, sequence, verified)
    last = verified.count - 1
    return Root(verified.tokens[last], vocab_logits(params, cfg, hidden), states, taken, taken.seen)


def run_verified(
    params: Params, cfg: ModelConfig, sequence: SequenceState, verified: Verified
) -> tuple[Array, Array, SequenceState]:
    """`take_verified` without its head: what the head sees of the root, and its own state, float32 [1, D] each."""
    # The root of the round before lies in the window, with true states.
    known = jnp.maximum(sequence.seen - 1, 0) - sequence.cache.length
    cache: KVCache = commit_rows(sequence.cache, known)
    rows = verified.tokens.shape[0]
    position = cache.length + jnp.arange(rows, dtype=jnp.int32)
    assert verified.states is not None
    hidden, own, cache = forward_draft(
        params, cfg, verified.tokens, fuse(params, cfg, verified.states, verified.count), position, cache,
        jnp.tril(jnp.ones((rows, rows), bool)), active_rows=verified.count,
    )  # fmt: skip
    last = verified.count - 1
    seen = sequence.seen + verified.count
    hidden, own = (jnp.take(x, last[None], axis=0, mode="clip") for x in (hidden, own))
    return hidden, own, dataclasses.replace(sequence, cache=commit_rows(cache, last), seen=seen)
