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

from jaxspec.cache import KVCache, commit_rows
from jaxspec.methods.draft import DraftSide
from jaxspec.methods.gauge import Gauge, chance_of, class_of, init_gauge, mean_chance, observe_chain
from jaxspec.methods.matching import (
    LookupSettings,
    LookupState,
    TextSide,
    draft_candidates,
    find_candidates,
    keep_worthwhile,
)
from jaxspec.methods.pair import outcome_shapes
from jaxspec.methods.path_history import PathHistory
from jaxspec.methods.program import Program
from jaxspec.methods.propose import same_draw
from jaxspec.methods.verification import Drafted, Outcome
from jaxspec.models.params import Params
from jaxspec.models.transformer import forward, vocab_logits
from jaxspec.placement import Placement
from jaxspec.sampling.processors import History
from jaxspec.sampling.request import Request
from jaxspec.tree.topology import Batch

# Verified tokens that the draft takes in one pass when it catches up.
SYNC_ROWS = 16
# Rounds without the draft model before it is tried again, though it seemed not to pay: the first time, and at most.
FIRST_PATIENCE, LONGEST_PATIENCE = 8, 64


@dataclasses.dataclass(frozen=True)
class RoundCosts:
    """What a round costs, in target passes of one row.

    Attributes:
      batch: float32 [bs], a target pass of 1, 2, ... rows with what a round costs besides.
      draft: a draft pass.
    """

    batch: np.ndarray
    draft: float


@struct.dataclass
class AdaptiveState:
    """State of the drafting half.

    Attributes:
      text: the verified tokens, and what became of copies.
      cache: the draft's; may lack the last verified tokens.
      gauge: what became of the draft's tokens.
      kind: int32 [n], classes of the tokens of the last chain.
      drafted: int32 [], how many of them the last batch held; 0 where it held none of the draft's.
      evaluated: int32 [], how many of them lie in the cache's window.
      idle: int32 [], rounds since the draft ran.
      patience: int32 [], after how many it is tried again.
    """

    text: LookupState
    cache: KVCache
    gauge: Gauge
    kind: jax.Array
    drafted: jax.Array
    evaluated: jax.Array
    idle: jax.Array
    patience: jax.Array


class AdaptiveDrafter:
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
        rows = lookup.batch
        scalar, row = placement.array((), jnp.int32), placement.array((rows,), jnp.int32)
        self.drafted = Drafted(Batch(row, row, row, scalar), scalar)

        def begin(text: LookupState, cache: KVCache) -> AdaptiveState:
            zero = jnp.int32(0)
            kind = jnp.zeros(length, jnp.int32)
            return AdaptiveState(text, cache, init_gauge(), kind, zero, zero, zero, jnp.int32(FIRST_PATIENCE))

        def draft(params, state, outcome, history, request):
            return draft_round(params, placement, state, outcome, history, request, lookup, length, costs)

        plan = placement.plan
        shapes = jax.eval_shape(begin, self._text.state, self._side.state)
        state = dataclasses.replace(placement.replicated(shapes), text=self._text.state, cache=self._side.state)
        self._begin = Program("draft begin", begin, plan, [self._text.state, self._side.state], state, donate=[0, 1])
        args = [placement.params(), state, outcome_shapes(placement, steps), placement.history(), placement.request()]
        self._draft = Program("draft", draft, plan, args, (state, self.drafted), donate=[1])
        self.programs = (*self._side.programs, *self._text.programs, self._begin, self._draft)

    def start(self, state: AdaptiveState | None) -> AdaptiveState:
        """See `Drafter.start`."""
        return self._begin(self._text.start(), self._side.start(None if state is None else state.cache))

    def prefill(self, params: Params, state: AdaptiveState, tokens: np.ndarray) -> AdaptiveState:
        """See `Drafter.prefill`."""
        cache = self._side.prefill(params, state.cache, tokens)
        return dataclasses.replace(state, text=self._text.prefill(state.text, tokens), cache=cache)

    def draft(
        self, params: Params, state: AdaptiveState, outcome: Outcome, history: History, request: Request
    ) -> tuple[AdaptiveState, Drafted]:
        """See `Drafter.draft`."""
        return self._draft(params, state, outcome, history, request)


def draft_round(
    params: Params,
    placement: Placement,
    state: AdaptiveState,
    outcome: Outcome,
    history: History,
    request: Request,
    lookup: LookupSettings,
    length: int,
    costs: RoundCosts,
) -> tuple[AdaptiveState, Drafted]:
    """Learn from the last round, decide what is worth drafting, and draft it; for one shard."""
    accepted = jnp.minimum(outcome.count - 1, state.drafted)
    gauge = observe_chain(state.gauge, state.kind, state.drafted, accepted)
    cache = commit_rows(state.cache, jnp.minimum(accepted, state.evaluated))
    text, candidates, matched = find_candidates(state.text, outcome, lookup)
    candidates, copy_rate = keep_worthwhile(candidates, costs.batch)
    mean = mean_chance(gauge)

    tokens = jnp.arange(1, length + 1)
    chain_rate = jnp.max((1 + jnp.cumsum(mean**tokens)) / (jnp.asarray(costs.batch)[tokens] + costs.draft * tokens))
    worth = chain_rate > copy_rate
    nothing_else = copy_rate <= 1 / costs.batch[0]
    probe = ~worth & nothing_else & (state.idle >= state.patience)
    wanted = worth | probe

    chain = grow_chain(params, placement, cache, text, gauge, history, request, wanted, length, costs)
    # A draft that is tried again has its first token verified, or nothing would be learned.
    count = jnp.where(wanted, jnp.maximum(chain.worth, probe.astype(jnp.int32)), 0)
    copied_text, copied = draft_candidates(text, candidates, matched, lookup.batch)
    use_chain = count > 0
    rows = jnp.arange(lookup.batch, dtype=jnp.int32)
    own = Batch(
        token=jnp.zeros(lookup.batch, jnp.int32).at[0].set(copied.batch.token[0]).at[1 : length + 1].set(chain.token),
        parent=jnp.where(rows <= count, jnp.maximum(rows - 1, 0), rows),
        depth=jnp.where(rows <= count, rows, 0),
        count=count + 1,
    )
    batch = jax.tree.map(lambda a, b: jnp.where(use_chain, a, b), own, copied.batch)
    # No match proposed a row of a chain: what becomes of it says nothing about matches.
    text = dataclasses.replace(
        text,
        matched=jnp.where(use_chain, lookup.ngram + 1, copied_text.matched),
        parent=jnp.where(use_chain, rows, copied_text.parent),
    )
    patience = jnp.where(probe, jnp.minimum(2 * state.patience, LONGEST_PATIENCE), state.patience)
    state = AdaptiveState(
        text=text,
        cache=chain.cache,
        gauge=gauge,
        kind=chain.kind,
        drafted=count,
        evaluated=jnp.maximum(chain.count - 1, 0),
        idle=jnp.where(wanted, 0, state.idle + 1),
        patience=jnp.where(worth, FIRST_PATIENCE, patience),
    )
    return state, Drafted(batch, chain.passes)


@struct.dataclass
class Chain:
    """A chain in the making.

    Attributes:
      cache: the draft's; every verified token is part of its prefix, all tokens of the chain but the last are rows of
        its window.
      token: int32 [n].
      kind: int32 [n], class of each.
      gain: float32 [n + 1], expected output of a batch that holds the first 0, 1, ... of them.
      chance: float32 [], that the target accepts all of them.
      count: int32 [], tokens so far.
      worth: int32 [], how many of them are worth their rows.
      passes: int32 [], of the draft.
    """

    cache: KVCache
    token: jax.Array
    kind: jax.Array
    gain: jax.Array
    chance: jax.Array
    count: jax.Array
    worth: jax.Array
    passes: jax.Array


def grow_chain(
    params: Params,
    placement: Placement,
    cache: KVCache,
    text: LookupState,
    gauge: Gauge,
    history: History,
    request: Request,
    wanted: jax.Array,
    length: int,
    costs: RoundCosts,
) -> Chain:
    """Catch up with the text and draft token by token while a further pass pays; nothing runs unless `wanted`."""
    cfg, vocab = placement.cfg, placement.vocab
    propose = same_draw(vocab, scored=True)
    mean, batch_cost = mean_chance(gauge), jnp.asarray(costs.batch)

    def rate(gain: jax.Array, rows: jax.Array, passes: jax.Array) -> jax.Array:
        return gain / (batch_cost[rows] + costs.draft * passes)

    def add(chain: Chain, cache: KVCache, hidden: jax.Array) -> Chain:
        """Add the token behind a hidden state `[1, D]`."""
        on_path = (jnp.arange(length) < chain.count)[None]
        paths = PathHistory(history, chain.token, on_path)
        position = (text.length + chain.count)[None]
        token, logprob = propose(vocab_logits(params, hidden), paths, request, position)
        kind = class_of(logprob[0, 0])
        chance = chain.chance * chance_of(gauge, kind)
        count = chain.count + 1
        return dataclasses.replace(
            chain,
            cache=cache,
            token=chain.token.at[chain.count].set(token[0, 0]),
            kind=chain.kind.at[chain.count].set(kind),
            gain=chain.gain.at[count].set(chain.gain[chain.count] + chance),
            chance=chance,
            count=count,
            passes=chain.passes + 1,
        )

    def is_behind(chain: Chain) -> jax.Array:
        return wanted & (chain.cache.length < text.length)

    def catch_up(chain: Chain) -> Chain:
        cache = chain.cache
        count = jnp.minimum(text.length - cache.length, SYNC_ROWS)
        token = jax.lax.dynamic_slice_in_dim(text.token, cache.length, SYNC_ROWS)
        position = cache.length + jnp.arange(SYNC_ROWS, dtype=jnp.int32)
        mask = jnp.tril(jnp.ones((SYNC_ROWS, SYNC_ROWS), bool))
        hidden, cache = forward(params, cfg, token, position, cache, mask, live=count)
        last = jax.lax.dynamic_slice_in_dim(hidden, count - 1, 1)
        # What an earlier chunk proposed is behind the times.
        chain = dataclasses.replace(chain, count=jnp.int32(0), chance=jnp.float32(1))
        return add(chain, commit_rows(cache, count), last)

    def go_on(chain: Chain) -> jax.Array:
        gain, count = chain.gain[chain.count], chain.count
        further = rate(gain + chain.chance * mean, jnp.minimum(count + 1, length), count + 1)
        return wanted & (count < length) & (further > rate(gain, count, count))

    def extend(chain: Chain) -> Chain:
        slot = chain.count - 1
        token = jax.lax.dynamic_slice_in_dim(chain.token, slot, 1)
        position = (chain.cache.length + slot)[None]
        mask = (jnp.arange(length) <= slot)[None]
        window = chain.cache.length + jnp.arange(length, dtype=jnp.int32)
        hidden, cache = forward(params, cfg, token, position, chain.cache, mask, window_position=window, offset=slot)
        return add(chain, cache, hidden)

    zero = jnp.int32(0)
    row = jnp.zeros(length, jnp.int32)
    chain = Chain(cache, row, row, jnp.ones(length + 1), jnp.float32(1), zero, zero, zero)
    with jax.named_scope("draft/catch_up"):
        chain = jax.lax.while_loop(is_behind, catch_up, chain)
    with jax.named_scope("draft/grow"):
        chain = jax.lax.while_loop(go_on, extend, chain)
    counts = jnp.arange(length + 1)
    rates = jnp.where(counts <= chain.count, rate(chain.gain, counts, chain.passes), -jnp.inf)
    return dataclasses.replace(chain, worth=jnp.argmax(rates).astype(jnp.int32))
