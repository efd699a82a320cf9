"""Drafting as far as it pays: each round a chain of the draft model, a copy of earlier text, or nothing at all.

What a round may gain is estimated from what became of earlier drafts, what it costs from measured or built-in figures
(ALGORITHMS 10: speed = expected length / time of the round). Everything is data inside one compiled program: the choice
costs no host read. A draft that was left out for a while catches up in chunks when it is asked again.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.methods.core.acceptance import AcceptanceStats, chance_of, class_of, init_acceptance, mean_chance, observe
from jaxspec.methods.core.draft import DraftSide
from jaxspec.methods.core.lookup import (
    LookupSettings,
    TextSide,
    TokenBuffer,
    draft_candidates,
    find_candidates,
    keep_worthwhile,
    plain_tokens,
)
from jaxspec.methods.core.path_history import PathHistory
from jaxspec.methods.core.proposals import same_two_draws
from jaxspec.methods.core.runner import outcome_shapes
from jaxspec.methods.core.verify import Draft, Outcome
from jaxspec.models.kv_cache import KVCache, commit_rows
from jaxspec.models.params import Params
from jaxspec.models.transformer import forward, vocab_logits
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.program import Program
from jaxspec.sampling.processors import History
from jaxspec.sampling.request import Request
from jaxspec.tree.select import Candidates, pack_best, root_alone
from jaxspec.tree.tree import Batch

# Verified tokens that the draft takes in one pass when it catches up.
SYNC_ROWS = 16
# Rounds without the draft model before it is tried again, though it seemed not to pay: the first time, and at most.
FIRST_PATIENCE, LONGEST_PATIENCE = 8, 64


@dataclasses.dataclass(frozen=True)
class RoundCosts:
    """What a round costs, in target passes of one row.

    Attributes:
      batch: float64 [bs], a target pass of 1, 2, ... rows with what a round costs besides.
      draft: a draft pass.
      besides: what a round costs besides its passes.
    """

    batch: np.ndarray
    draft: float
    besides: float


@struct.dataclass
class AutoState:
    """State of the drafting half.

    Attributes:
      text: the verified tokens, and what became of copies.
      cache: the draft's; may lack the last verified tokens.
      gauge: what became of the draft's tokens.
      token: int32 [n, 2], first and second choices of the last chain.
      kind: int32 [n, 2], class of each.
      count: int32 [], how long it was; all its first choices but the last lie in the cache's window.
      idle: int32 [], rounds since the draft ran; of those that drafted nothing, their tokens.
      patience: int32 [], after how many it is tried again.
    """

    text: TokenBuffer
    cache: KVCache
    gauge: AcceptanceStats
    token: jax.Array
    kind: jax.Array
    count: jax.Array
    idle: jax.Array
    patience: jax.Array


class AutoDrafter:
    """See `pair.Drafter`."""

    def __init__(
        self, placement: Placement, slots: int, lookup: LookupSettings, length: int, steps: int, costs: RoundCosts
    ):
        """Declare the programs.

        Args:
          placement: the draft.
          slots: capacity of its cache, at least `SYNC_ROWS` and `length` more than the longest text.
          lookup: what is copied; its `batch` is bs.
          length: longest chain, below bs.
          steps: P.
          costs: of a round.
        """
        self._side = DraftSide(placement, slots)
        self._text = TextSide(placement, slots, lookup)
        rows, plain = lookup.batch, plain_tokens(placement, lookup.longest_path)
        scalar, row = placement.array((), jnp.int32), placement.array((rows,), jnp.int32)
        self.drafted = Draft(Batch(row, row, row, scalar), scalar, plain=scalar if plain else None)

        def begin(text: TokenBuffer, cache: KVCache) -> AutoState:
            zero, pairs = jnp.int32(0), jnp.zeros((length, 2), jnp.int32)
            return AutoState(text, cache, init_acceptance(), pairs, pairs, zero, zero, jnp.int32(FIRST_PATIENCE))

        def draft(params, state, outcome, history, request):
            return draft_round(params, placement, state, outcome, history, request, lookup, length, costs, plain)

        plan = placement.plan
        shapes = jax.eval_shape(begin, self._text.state, self._side.state)
        state = dataclasses.replace(placement.replicated(shapes), text=self._text.state, cache=self._side.state)
        self._begin = Program("draft begin", begin, plan, [self._text.state, self._side.state], state, donate=[0, 1])
        args = [placement.params(), state, outcome_shapes(placement, steps), placement.history(), placement.request()]
        self._draft = Program("draft", draft, plan, args, (state, self.drafted), donate=[1])
        self.programs = (*self._side.programs, *self._text.programs, self._begin, self._draft)

    def start(self, state: AutoState | None) -> AutoState:
        """See `Drafter.start`."""
        return self._begin(self._text.start(), self._side.start(None if state is None else state.cache))

    def prefill(self, params: Params, state: AutoState, tokens: np.ndarray) -> AutoState:
        """See `Drafter.prefill`."""
        cache = self._side.prefill(params, state.cache, tokens)
        return dataclasses.replace(state, text=self._text.prefill(state.text, tokens), cache=cache)

    def draft(
        self, params: Params, state: AutoState, outcome: Outcome, history: History, request: Request
    ) -> tuple[AutoState, Draft]:
        """See `Drafter.draft`."""
        return self._draft(params, state, outcome, history, request)


def draft_round(
    params: Params,
    placement: Placement,
    state: AutoState,
    outcome: Outcome,
    history: History,
    request: Request,
    lookup: LookupSettings,
    length: int,
    costs: RoundCosts,
    most_plain: int,
) -> tuple[AutoState, Draft]:
    """Learn from the last round, decide what is worth drafting, and draft it; for one shard.

    `most_plain` is `plain_tokens`; the rest see `AutoDrafter`.
    """
    gauge, known = learn(state, outcome)
    # The keys of what the draft guessed right lie behind the prefix already, in order.
    cache = commit_rows(state.cache, known)
    text, candidates, matched = find_candidates(state.text, outcome, lookup)
    plain = text.plain(request, most_plain) if most_plain else jnp.int32(1)
    # Tokens that are decoded plainly share what a round costs besides its passes.
    batch_cost = jnp.asarray(costs.batch, jnp.float32).at[0].add(costs.besides * (1 / plain - 1))
    candidates, copy_rate = keep_worthwhile(candidates, batch_cost)

    tokens = jnp.arange(1, length + 1)
    expected = 1 + jnp.cumsum(mean_chance(gauge) ** tokens)
    chain_rate = jnp.max(expected / (batch_cost[tokens] + costs.draft * tokens))
    worth = chain_rate > copy_rate
    copies = (candidates.score > -jnp.inf).any()
    probe = ~worth & ~copies & (state.idle >= state.patience)
    wanted = worth | probe

    chain = grow_chain(params, placement, cache, text, gauge, history, request, wanted, length, costs)

    def choose() -> tuple[Batch, jax.Array, jax.Array]:
        spent = batch_cost + costs.draft * chain.passes
        kept, own_rate = keep_worthwhile(chain.candidates(), spent)
        _, copy_rate = keep_worthwhile(candidates, spent)
        copied_text, copied = draft_candidates(text, candidates, matched, lookup)
        own = pack_best(copied.token[0], kept, lookup.batch)
        use_chain = wanted & (own_rate >= copy_rate)
        batch = jax.tree.map(lambda a, b: jnp.where(use_chain, a, b), own, copied)
        # No match proposed a row of a chain: what becomes of it says nothing about matches.
        return (
            batch,
            jnp.where(use_chain, lookup.ngram + 1, copied_text.matched),
            jnp.where(use_chain, rows, batch.parent),
        )

    def nothing() -> tuple[Batch, jax.Array, jax.Array]:
        return root_alone(text.token[text.length - 1], lookup.batch), jnp.full_like(rows, lookup.ngram + 1), rows

    rows = jnp.arange(lookup.batch, dtype=jnp.int32)
    # Most rounds that draft nothing are plain because nothing pays: they should not sort empty lists either.
    batch, row_matched, parent = jax.lax.cond(wanted | copies, choose, nothing)
    alone = batch.count == 1
    calm = jnp.where(alone, text.calm + 1, 0)
    plain = jnp.where(alone, plain, 0)
    text = dataclasses.replace(text, matched=row_matched, parent=parent, calm=calm)
    patience = jnp.where(probe, jnp.minimum(2 * state.patience, LONGEST_PATIENCE), state.patience)
    state = AutoState(
        text=text,
        cache=chain.cache,
        gauge=gauge,
        token=chain.token,
        kind=chain.kind,
        count=chain.count,
        idle=jnp.where(wanted, 0, state.idle + jnp.maximum(plain, 1)),
        patience=jnp.where(worth, FIRST_PATIENCE, patience),
    )
    return state, Draft(batch, chain.passes, plain=plain if most_plain else None)


def learn(state: AutoState, outcome: Outcome) -> tuple[AcceptanceStats, jax.Array]:
    """Compare the last chain with the verified text, whether the batch held it or not.

    Returns:
      The gauge, and how many evaluated tokens of the chain are verified now: all but the last one, at most, since the
      draft needs a token to run to say what follows.
    """
    place = jnp.arange(state.token.shape[0])
    hit = state.token == outcome.tokens[: state.token.shape[0], None]
    before = jnp.concatenate([jnp.ones(1, bool), jnp.cumprod(hit[:-1, 0]).astype(bool)])
    seen = before & (place < jnp.minimum(state.count, outcome.count))
    tried = jnp.stack([seen, seen & ~hit[:, 0]], axis=1)
    gauge = observe(state.gauge, state.kind.reshape(-1), tried.reshape(-1), (tried & hit).reshape(-1))
    right = (seen & hit[:, 0]).sum(dtype=jnp.int32)
    return gauge, jnp.minimum(right, jnp.minimum(jnp.maximum(state.count - 1, 0), outcome.count - 1))


@struct.dataclass
class Chain:
    """A chain in the making: first choices, each behind the one before, and beside each the second choice.

    Attributes:
      cache: the draft's; every verified token is part of its prefix, all first choices but the last are rows of its
        window.
      token: int32 [n, 2].
      kind: int32 [n, 2], class of each.
      score: float32 [n, 2], log of the chance that the target accepts each and all before it; -inf where there is none.
      gain: float32 [], expected output of a batch that holds the first choices.
      count: int32 [], first choices so far.
      passes: int32 [], of the draft.
    """

    cache: KVCache
    token: jax.Array
    kind: jax.Array
    score: jax.Array
    gain: jax.Array
    count: jax.Array
    passes: jax.Array

    @property
    def chance(self) -> jax.Array:
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
    params: Params,
    placement: Placement,
    cache: KVCache,
    text: TokenBuffer,
    gauge: AcceptanceStats,
    history: History,
    request: Request,
    wanted: jax.Array,
    length: int,
    costs: RoundCosts,
) -> Chain:
    """Catch up with the text and draft token by token while a further pass pays; nothing runs unless `wanted`."""
    cfg = placement.cfg
    propose = same_two_draws(placement.vocab)
    mean, batch_cost = mean_chance(gauge), jnp.asarray(costs.batch)

    def add(chain: Chain, cache: KVCache, hidden: jax.Array) -> Chain:
        """Add the two tokens behind a hidden state `[1, D]`."""
        at = chain.count
        paths = PathHistory(history, chain.token[:, 0], (jnp.arange(length) < at)[None])
        token, logprob = propose(vocab_logits(params, hidden), paths, request, (text.length + at)[None])
        kind = jnp.stack([class_of(logprob[0, 0]), class_of(logprob[0, 1], second=True)])
        first, second = chance_of(gauge, kind)
        chance = chain.chance * jnp.stack([first, jnp.where(logprob[0, 1] > -jnp.inf, (1 - first) * second, 0.0)])
        return dataclasses.replace(
            chain,
            cache=cache,
            token=chain.token.at[at].set(token[0]),
            kind=chain.kind.at[at].set(kind),
            score=chain.score.at[at].set(jnp.log(chance)),
            gain=chain.gain + chance[0],
            count=at + 1,
            passes=chain.passes + 1,
        )

    zero = jnp.int32(0)
    pairs = jnp.zeros((length, 2), jnp.int32)
    start = Chain(cache, pairs, pairs, jnp.full((length, 2), -jnp.inf), jnp.float32(1), zero, zero)

    def is_behind(chain: Chain) -> jax.Array:
        return wanted & (chain.cache.length < text.length)

    def catch_up(chain: Chain) -> Chain:
        cache = chain.cache
        count = jnp.minimum(text.length - cache.length, SYNC_ROWS)
        token = jax.lax.dynamic_slice_in_dim(text.token, cache.length, SYNC_ROWS)
        position = cache.length + jnp.arange(SYNC_ROWS, dtype=jnp.int32)
        mask = jnp.tril(jnp.ones((SYNC_ROWS, SYNC_ROWS), bool))
        hidden, cache = forward(params, cfg, token, position, cache, mask, active_rows=count)
        last = jax.lax.dynamic_slice_in_dim(hidden, count - 1, 1)
        # What an earlier chunk proposed is behind the times.
        return add(dataclasses.replace(start, passes=chain.passes), commit_rows(cache, count), last)

    def go_on(chain: Chain) -> jax.Array:
        def rate(gain: jax.Array, tokens: jax.Array) -> jax.Array:
            return gain / (batch_cost[tokens] + costs.draft * tokens)

        count = chain.count
        further = rate(chain.gain + chain.chance * mean, jnp.minimum(count + 1, length))
        return wanted & (count < length) & (further > rate(chain.gain, count))

    def extend(chain: Chain) -> Chain:
        slot = chain.count - 1
        token = jax.lax.dynamic_slice_in_dim(chain.token[:, 0], slot, 1)
        position = (chain.cache.length + slot)[None]
        mask = (jnp.arange(length) <= slot)[None]
        window = chain.cache.length + jnp.arange(length, dtype=jnp.int32)
        hidden, cache = forward(params, cfg, token, position, chain.cache, mask, window_position=window, offset=slot)
        return add(chain, cache, hidden)

    with jax.named_scope("draft/catch_up"):
        chain = jax.lax.while_loop(is_behind, catch_up, start)
    with jax.named_scope("draft/grow"):
        return jax.lax.while_loop(go_on, extend, chain)
