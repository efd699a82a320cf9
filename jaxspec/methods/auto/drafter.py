"""The draft's half of method `auto`: in each round a chain of the draft model, copies of earlier text, or nothing.

Everything is data inside one compiled program: the choice costs no host read. A draft that was left out catches up in
chunks when it is asked again.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from jaxspec.methods.auto.draft_chain import grow_chain
from jaxspec.methods.core.copies import (
    LookupSettings,
    TokenBuffer,
    TokenText,
    draft_candidates,
    find_candidates,
    take_in,
)
from jaxspec.methods.core.cost_model import (
    AcceptanceStats,
    CostModel,
    PlacedCosts,
    chain_outcome,
    init_acceptance,
    keep_worthwhile,
)
from jaxspec.methods.core.drafter import ModelDrafter, run_verified
from jaxspec.methods.core.round import STEPS_PER_DISPATCH, ModelParams
from jaxspec.methods.core.sequence import PromptStates, SequenceState
from jaxspec.methods.core.verify import Draft
from jaxspec.models.kv_cache import commit_rows
from jaxspec.models.params import Params
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.program import Program
from jaxspec.sampling.accept import Verified
from jaxspec.sampling.processors import History, history_shapes
from jaxspec.sampling.request import Request, request_shapes
from jaxspec.tree.select import pack_best, root_alone
from jaxspec.tree.tree import Batch

# Tokens decoded without the draft model before it is tried again, though it seemed not to pay: the first time, and at
# most.
FIRST_PATIENCE, LONGEST_PATIENCE = 8, 64
# Share of what was learned of the draft that counts in the next text.
CARRIED_OVER = 0.25


@struct.dataclass
class AutoState:
    """State of the drafting half."""

    text: TokenBuffer  # the verified tokens, and what became of copies
    sequence: SequenceState  # the draft's; its cache may lack the last verified tokens
    acceptance: AcceptanceStats  # what became of the draft's tokens
    token: Array  # int32 [n, 2], first and second choices of the last chain
    kind: Array  # int32 [n, 2], class of each
    count: Array  # int32 [], how long it was; all its first choices but the last lie in the cache's window
    idle: Array  # int32 [], tokens since the draft ran
    patience: Array  # int32 [], after how many it is tried again


class AutoDrafter(ModelDrafter):
    """Each round a chain of the draft model, a copy of earlier text, or nothing at all."""

    idle_steps = STEPS_PER_DISPATCH

    def __init__(
        self, placement: Placement, slots: int, lookup: LookupSettings, length: int, costs: CostModel,
        verified: Verified,
    ):  # fmt: skip
        """Declare the programs.

        `slots` is the capacity of the draft's cache, at least `SYNC_ROWS` and `length` more than the longest text.
        `length` is that of the longest chain, below bs.
        """
        super().__init__(placement, slots, lookup.num_rows)
        self._text = TokenText(placement, slots, lookup, verified.tokens.shape[0])

        def begin(text, sequence, acceptance):
            pairs, zero = jnp.zeros((length, 2), jnp.int32), jnp.int32(0)
            first = jnp.int32(FIRST_PATIENCE)
            return AutoState(text, sequence, acceptance, pairs, pairs, zero, idle=first, patience=first)

        def create(text, sequence):
            return begin(text, sequence, init_acceptance())

        def restart(text, sequence, acceptance):
            return begin(text, sequence, jax.tree.map(lambda leaf: CARRIED_OVER * leaf, acceptance))

        def draft(params, state, verified, history, request, costs):
            return draft_round(params, placement, state, verified, history, request, lookup, length, costs)

        is_fed = placement.cfg.features is not None

        def skip(params, state, verified):
            acceptance, known = learn(state, verified)
            if is_fed:
                _, _, sequence = run_verified(params, placement.cfg, state.sequence, verified)
            else:
                sequence = SequenceState(commit_rows(state.sequence.cache, known))
            text = take_in(state.text, verified).forget_batch()
            idle = state.idle + verified.count
            return dataclasses.replace(
                state, text=text, sequence=sequence, acceptance=acceptance, count=jnp.int32(0), idle=idle
            )

        scalar, plan = placement.array((), jnp.int32), placement.plan
        parts = [self._text.state, self._sequence.state]
        stats = placement.replicated(jax.eval_shape(init_acceptance))
        pairs = placement.array((length, 2), jnp.int32)
        state = AutoState(self._text.state, self._sequence.state, stats, pairs, pairs, scalar, scalar, scalar)
        self.state = state
        self._create = Program("draft begin", create, plan, parts, state, donate=[0, 1])
        self._restart = Program("draft begin again", restart, plan, [*parts, stats], state, donate=[0, 1, 2])
        args = [
            placement.params(),
            state,
            verified,
            history_shapes(placement),
            request_shapes(placement),
            costs.shapes(placement),
        ]
        self.draft_program = Program("draft", draft, plan, args, (state, self.shapes), donate=[1])
        self.propose = draft
        # A draft that is fed hidden states takes them in at once: nothing else keeps them.
        self._is_fed = is_fed
        taken = [placement.params() if is_fed else (), state, verified]
        self._skip = Program("draft skip", skip, plan, taken, state, donate=[1])
        own = (self.draft_program, self._create, self._restart, self._skip)
        self.programs = (*self.programs, *self._text.programs, *own)
        self.use_costs(costs)

    def use_costs(self, costs: CostModel) -> None:
        """Weigh drafts with these figures from now on."""
        self.operands = costs.place(self.placement)

    def start(self, root: int, state: AutoState | None) -> AutoState:
        """See `Drafter.start`; what was learned of the draft counts in the next text, too, with less weight."""
        text = self._text.start()
        if state is None:
            return self._create(text, self._sequence.start(root, None))
        return self._restart(text, self._sequence.start(root, state.sequence), state.acceptance)

    def prefill(
        self, params: ModelParams, state: AutoState, tokens: np.ndarray, states: PromptStates | None = None
    ) -> AutoState:
        state = super().prefill(params, state, tokens, states)
        return dataclasses.replace(state, text=self._text.prefill(state.text, tokens))

    def resume(
        self, params: ModelParams, state: AutoState, tokens: np.ndarray, common: int, states: PromptStates | None = None
    ) -> AutoState:
        assert params.draft is not None
        sequence, _ = self._sequence.resume(params.draft, state.sequence, tokens, common, states)
        return self._restart(self._text.prefill(self._text.start(), tokens[:-1]), sequence, state.acceptance)

    def draft(
        self, params: ModelParams, target: SequenceState, state: AutoState, verified: Verified, request: Request
    ) -> tuple[SequenceState, AutoState, Draft]:
        assert self.draft_program is not None
        return target, *self.draft_program(params.draft, state, verified, target.history, request, self.operands)

    def skip(self, params: ModelParams, state: AutoState, verified: Verified) -> AutoState:
        return self._skip(params.draft if self._is_fed else (), state, verified)


def draft_round(
    params: Params, placement: Placement, state: AutoState, verified: Verified, history: History, request: Request,
    lookup: LookupSettings, length: int, costs: PlacedCosts,
) -> tuple[AutoState, Draft]:  # fmt: skip
    """Learn from the last round, decide what is worth drafting, and draft it; for one shard."""
    acceptance, known = learn(state, verified)
    if placement.cfg.features is None:
        # The keys of what the draft guessed right lie after the prefix already, in order.
        sequence, root = SequenceState(commit_rows(state.sequence.cache, known)), None
    else:
        hidden, own, sequence = run_verified(params, placement.cfg, state.sequence, verified)
        root = hidden, own
    text, candidates, matched = find_candidates(state.text, verified, lookup)
    round_cost = costs.rounds
    candidates, copy_rate = keep_worthwhile(candidates, round_cost)

    tokens = jnp.arange(1, length + 1)
    expected = 1 + jnp.cumsum(acceptance.mean_rate() ** tokens)
    chain_rate = jnp.max(expected / (round_cost[tokens] + costs.draft * tokens))
    pays = chain_rate > copy_rate
    copies = (candidates.score > -jnp.inf).any()
    idle = state.idle + verified.count
    retry = ~pays & ~copies & (idle >= state.patience)
    should_draft = pays | retry

    chain = grow_chain(
        params, placement, sequence.cache, text.token, text.length, acceptance, history, request, should_draft, length,
        costs, root,
    )  # fmt: skip
    rows = jnp.arange(lookup.num_rows, dtype=jnp.int32)

    def choose() -> tuple[Batch, Array, Array]:
        spent = round_cost + costs.draft * chain.passes
        kept, own_rate = keep_worthwhile(chain.candidates(), spent)
        _, copy_rate = keep_worthwhile(candidates, spent)
        copied_text, copied = draft_candidates(text, candidates, matched, lookup)
        own = pack_best(copied.token[0], kept, lookup.num_rows)
        use_chain = should_draft & (own_rate >= copy_rate)
        batch = jax.tree.map(lambda a, b: jnp.where(use_chain, a, b), own, copied)
        # No match proposed a row of a chain: what becomes of it says nothing about matches.
        return (
            batch,
            jnp.where(use_chain, lookup.ngram + 1, copied_text.matched),
            jnp.where(use_chain, rows, batch.parent),
        )

    def nothing() -> tuple[Batch, Array, Array]:
        return root_alone(text.token[text.length - 1], lookup.num_rows), jnp.full_like(rows, lookup.ngram + 1), rows

    # Most rounds that draft nothing are plain because nothing pays: they should not sort empty lists either.
    batch, row_matched, parent = jax.lax.cond(should_draft | copies, choose, nothing)
    backoff = jnp.where(retry, jnp.minimum(2 * state.patience, LONGEST_PATIENCE), state.patience)
    state = AutoState(
        text=dataclasses.replace(text, matched=row_matched, parent=parent),
        sequence=dataclasses.replace(sequence, cache=chain.cache),
        acceptance=acceptance,
        token=chain.token,
        kind=chain.kind,
        count=chain.count,
        idle=jnp.where(should_draft, 0, idle),
        patience=jnp.where(pays, FIRST_PATIENCE, backoff),
    )
    return state, Draft(batch, chain.passes)


def learn(state: AutoState, verified: Verified) -> tuple[AcceptanceStats, Array]:
    """Compare the last chain with the verified text, whether the batch held it or not.

    Returns the statistics, and how many evaluated tokens of the chain are verified now. The last one never counts: the
    draft needs a token to run to say what follows.
    """
    seen = chain_outcome(state.token[:, 0], state.count, verified.tokens, verified.count)
    hit = state.token == verified.tokens[: state.token.shape[0], None]
    tried = jnp.stack([seen, seen & ~hit[:, 0]], axis=1)
    acceptance = state.acceptance.update(state.kind.reshape(-1), tried.reshape(-1), (tried & hit).reshape(-1))
    right = (seen & hit[:, 0]).sum(dtype=jnp.int32)
    return acceptance, jnp.minimum(right, jnp.minimum(jnp.maximum(state.count - 1, 0), verified.count - 1))
