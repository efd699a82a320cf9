"""A chain of a draft model that ends where the next token is no longer worth its passes."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from jaxspec.methods.core.cost_model import AcceptanceStats, PlacedCosts, class_of
from jaxspec.methods.core.drafter import run_draft
from jaxspec.methods.core.proposals import PathHistory, same_two_draws
from jaxspec.models.kv_cache import KVCache, commit_rows
from jaxspec.models.params import Params
from jaxspec.models.transformer import forward, vocab_logits
from jaxspec.runtime.placement import Placement
from jaxspec.sampling.processors import History
from jaxspec.sampling.request import Request
from jaxspec.tree.select import Candidates

# Verified tokens that the draft takes in one pass when it catches up.
SYNC_ROWS = 16


@struct.dataclass
class DraftChain:
    """A chain in the making: first choices, each after the one before, and beside each the second choice."""

    # The draft's; every verified token is part of its prefix, all first choices but the last are rows of its window.
    cache: KVCache
    states: Array | None  # float32 [1, D], of the last row of a draft that is fed hidden states; else None
    token: Array  # int32 [n, 2]
    kind: Array  # int32 [n, 2], class of each
    # float32 [n, 2], log of the chance that the target accepts each and all before it; -inf where there is none.
    score: Array
    gain: Array  # float32 [], expected output of a batch that holds the first choices
    count: Array  # int32 [], first choices so far
    passes: Array  # int32 [], of the draft

    @property
    def chance(self) -> Array:
        """That the target accepts all first choices, float32 []."""
        return jnp.where(self.count > 0, jnp.exp(self.score[jnp.maximum(self.count - 1, 0), 0]), 1.0)

    def candidates(self) -> Candidates:
        """First choices, then second ones."""
        above = jnp.arange(-1, self.token.shape[0] - 1, dtype=jnp.int32)
        return Candidates(
            token=self.token.T.reshape(-1),
            parent=jnp.concatenate([above, above]),
            depth=jnp.concatenate([above, above]) + 2,
            score=self.score.T.reshape(-1),
        )


def grow_chain(
    params: Params, placement: Placement, cache: KVCache, text: Array, text_length: Array,
    acceptance: AcceptanceStats, history: History, request: Request, should_draft: Array, length: int,
    costs: PlacedCosts, root: tuple[Array, Array] | None = None,
) -> DraftChain:  # fmt: skip
    """Catch up with the text and draft token by token while a further pass pays; for one shard.

    `text`, int32 [S], holds `text_length` verified tokens; the draft's cache may lack the last of them. The chain has
    at most `length` tokens. Where `should_draft`, bool [], is False, nothing runs. A draft that is fed hidden states
    has caught up; `root` is what the head sees of the root, which is slot 0 of the window, and its own state.
    """
    cfg = placement.cfg
    propose = same_two_draws(placement.vocab)
    mean, round_cost = acceptance.mean_rate(), costs.rounds

    def add(chain: DraftChain, cache: KVCache, hidden: Array, own: Array | None = None) -> DraftChain:
        """Add the two tokens after what the head sees of a row, `[1, D]`; `own` is the row's own state."""
        at = chain.count
        paths = PathHistory(history, chain.token[:, 0], (jnp.arange(length) < at)[None])
        token, logprob = propose(vocab_logits(params, cfg, hidden), paths, request, (text_length + at)[None])
        kind = jnp.stack([class_of(logprob[0, 0]), class_of(logprob[0, 1], second=True)])
        first, second = acceptance.rate(kind)
        chance = chain.chance * jnp.stack([first, jnp.where(logprob[0, 1] > -jnp.inf, (1 - first) * second, 0.0)])
        return dataclasses.replace(
            chain,
            cache=cache,
            states=own,
            token=chain.token.at[at].set(token[0]),
            kind=chain.kind.at[at].set(kind),
            score=chain.score.at[at].set(jnp.log(chance)),
            gain=chain.gain + chance[0],
            count=at + 1,
            passes=chain.passes + 1,
        )

    zero = jnp.int32(0)
    pairs = jnp.zeros((length, 2), jnp.int32)
    states = None if root is None else root[1]
    start = DraftChain(cache, states, pairs, pairs, jnp.full((length, 2), -jnp.inf), jnp.float32(1), zero, zero)

    def is_behind(chain: DraftChain) -> Array:
        return should_draft & (chain.cache.length < text_length)

    def catch_up(chain: DraftChain) -> DraftChain:
        cache = chain.cache
        count = jnp.minimum(text_length - cache.length, SYNC_ROWS)
        token = jax.lax.dynamic_slice_in_dim(text, cache.length, SYNC_ROWS)
        position = cache.length + jnp.arange(SYNC_ROWS, dtype=jnp.int32)
        mask = jnp.tril(jnp.ones((SYNC_ROWS, SYNC_ROWS), bool))
        hidden, cache = forward(params, cfg, token, position, cache, mask, active_rows=count)
        last = jax.lax.dynamic_slice_in_dim(hidden, count - 1, 1)
        # Discard proposals of earlier chunks.
        return add(dataclasses.replace(start, passes=chain.passes), commit_rows(cache, count), last)

    def go_on(chain: DraftChain) -> Array:
        def rate(gain: Array, tokens: Array) -> Array:
            return gain / (round_cost[tokens] + costs.draft * tokens)

        count = chain.count
        further = rate(chain.gain + chain.chance * mean, jnp.minimum(count + 1, length))
        return should_draft & (count < length) & (further > rate(chain.gain, count))

    def extend(chain: DraftChain) -> DraftChain:
        if root is not None:
            return extend_fed(chain)
        slot = chain.count - 1
        token = jax.lax.dynamic_slice_in_dim(chain.token[:, 0], slot, 1)
        position = (chain.cache.length + slot)[None]
        mask = (jnp.arange(length) <= slot)[None]
        window = chain.cache.length + jnp.arange(length, dtype=jnp.int32)
        hidden, cache = forward(params, cfg, token, position, chain.cache, mask, window_position=window, offset=slot)
        return add(chain, cache, hidden)

    def extend_fed(chain: DraftChain) -> DraftChain:
        """The same with the root in slot 0 of the window; the first pass was the root's."""
        slot = chain.count
        token = jax.lax.dynamic_slice_in_dim(chain.token[:, 0], slot - 1, 1)
        mask = (jnp.arange(length + 1) <= slot)[None]
        window = chain.cache.length + jnp.arange(length + 1, dtype=jnp.int32)
        hidden, own, cache = run_draft(
            params, cfg, token, chain.states, (chain.cache.length + slot)[None], chain.cache, mask,
            window_position=window, offset=slot,
        )  # fmt: skip
        return add(chain, cache, hidden, own)

    def begin(chain: DraftChain) -> DraftChain:
        assert root is not None
        return add(chain, chain.cache, *root)

    with jax.named_scope("draft/catch_up"):
        if root is None:
            chain = jax.lax.while_loop(is_behind, catch_up, start)
        else:
            # A loop of at most one turn: the head runs only where it is wanted.
            chain = jax.lax.while_loop(lambda chain: should_draft & (chain.count == 0), begin, start)
    with jax.named_scope("draft/grow"):
        return jax.lax.while_loop(go_on, extend, chain)
