"""The default: a draft model's chains and copies of earlier text, as far as they pay, else plain decoding.

What a round may gain is estimated from what became of earlier drafts, what it costs from measured, shipped or built-in
figures. Everything is data inside one compiled program: the choice costs no host read. Where the host measures that
drafts do not pay after all, rounds are those of plain decoding for a while (`RoundTimer`). A draft that was left out
catches up in chunks when it is asked again.
"""

import dataclasses
import numbers
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from jaxspec.errors import ConfigError
from jaxspec.methods.base import NO_STORE, Method, Store
from jaxspec.methods.core.acceptance import AcceptanceStats, chain_outcome, init_acceptance
from jaxspec.methods.core.cost_model import ROUND_COST, CostModel, pass_costs, relative_draft_cost, shipped_costs
from jaxspec.methods.core.draft_chain import SYNC_ROWS, grow_chain
from jaxspec.methods.core.round import STEPS_PER_DISPATCH, ModelParams, Models
from jaxspec.methods.core.runner import Drafter, ModelDrafter, Runner, SpeculativeRunner
from jaxspec.methods.core.sequence import SequenceState, cache_slots
from jaxspec.methods.core.settings import check_range, renamed_settings
from jaxspec.methods.core.timing import RoundTimer
from jaxspec.methods.core.verify import Draft, match
from jaxspec.methods.lookup import (
    LookupSettings,
    NGramDrafter,
    TokenBuffer,
    TokenText,
    draft_candidates,
    find_candidates,
    keep_worthwhile,
    take_in,
)
from jaxspec.models.kv_cache import commit_rows
from jaxspec.models.params import Params
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.program import Program
from jaxspec.sampling.accept import Verified
from jaxspec.sampling.processors import History
from jaxspec.sampling.request import Request
from jaxspec.tree.select import pack_best, root_alone
from jaxspec.tree.tree import Batch

LONGEST_CHAIN = 8
# Tokens decoded without the draft model before it is tried again, though it seemed not to pay: the first time, and at
# most.
FIRST_PATIENCE, LONGEST_PATIENCE = 8, 64
# Share of what was learned of the draft that counts in the next text.
CARRIED_OVER = 0.25


@renamed_settings(batch=("num_draft_tokens", -1))
@dataclasses.dataclass(frozen=True)
class Auto(Method):
    """Weigh each round what drafting would gain against what it costs, and draft as far as it pays.

    Where the text repeats itself, what followed before is copied (`PromptLookup`); elsewhere a draft model, if there is
    one, drafts a chain that ends where the next token is no longer worth its passes. How often tokens of a given
    probability are accepted is learned while decoding. While nothing pays, rounds are plain decoding, and the draft
    model is tried again now and then. The output is plain decoding's, token for token (rule R4).

    Attributes:
      num_draft_tokens: most tokens of a target pass, the root not counted.
      length: most tokens drafted by the model in a row, at most `num_draft_tokens`; None is 8, or that.
      ngram: see `PromptLookup`.
      candidates: see `PromptLookup`.
      draft_cost: time of a draft pass over that of a target pass of one row; 0 takes a shipped figure, or estimates it
        from the weights.
      pass_cost: times of target passes of 1, 2, ... rows over that of one row; empty takes shipped or built-in figures.
      round_cost: what a round costs besides its passes, in target passes of one row; None takes a shipped figure, or
        0.05.
    """

    num_draft_tokens: int = 15
    length: int | None = None
    ngram: int = 8
    candidates: int = 8
    draft_cost: float = 0.0
    pass_cost: tuple[float, ...] = ()
    round_cost: float | None = None

    name: ClassVar[str] = "auto"
    drafts: ClassVar[bool] = True

    def __post_init__(self):
        check_range("num_draft_tokens", self.num_draft_tokens, 1, 1023)
        if self.length is None:
            object.__setattr__(self, "length", min(LONGEST_CHAIN, self.num_draft_tokens))
        check_range("length", self.length, 1, self.num_draft_tokens)
        check_range("ngram", self.ngram, 1, 64)
        check_range("candidates", self.candidates, 1, 64)
        object.__setattr__(self, "pass_cost", tuple(self.pass_cost))
        given = [("draft_cost", self.draft_cost), *(("pass_cost", cost) for cost in self.pass_cost)]
        if self.round_cost is not None:
            given.append(("round_cost", self.round_cost))
        for name, value in given:
            if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 <= value < 1e6:
                raise ConfigError(f"{name} must be a time relative to a one-row pass, at least 0, got {value!r}")

    @property
    def num_rows(self) -> int:
        return self.num_draft_tokens + 1

    @property
    def draft_rows(self) -> int:
        return 1

    def costs(self, models: Models, store: Store = NO_STORE) -> CostModel:
        """What rounds are taken to cost; each figure as given, else as shipped, else built in.

        All are ratios to one target pass of one row. One that was given does not replace the others: a shipped figure
        is a better guess than a built-in one beside it.
        """
        target, draft = models
        given = {"pass_cost": self.pass_cost, "round_cost": self.round_cost}
        given |= {"draft_cost": self.draft_cost} if draft is not None else {}
        used = {name: value for name, value in given.items() if value not in (0, (), None)}
        shipped = shipped_costs(store.shipped_draft, target) if store.shipped_draft and len(used) < len(given) else {}
        figures: dict[str, Any] = {name: value for name, value in shipped.items() if name in given} | used
        rest = "shipped" if shipped else "built in"
        source = "given" if len(used) == len(given) else f"given, rest {rest}" if used else rest
        cost = figures.get("draft_cost", 0.0 if draft is None else relative_draft_cost(target, draft))
        passes = pass_costs(target, self.num_rows, figures.get("pass_cost", ()))
        return CostModel(passes, cost, figures.get("round_cost", ROUND_COST), source)

    def bind(self, models: Models, tokens: int, store: Store = NO_STORE, previous: Runner | None = None) -> Runner:
        length, (target, draft) = self.length, models
        assert length is not None
        lookup = LookupSettings(self.num_rows, self.ngram, self.candidates, self.num_draft_tokens)
        slots, costs = cache_slots(tokens, max(SYNC_ROWS, self.num_rows)), self.costs(models, store)

        def make_drafter(verified: Verified) -> Drafter:
            if draft is None:
                return NGramDrafter(target, slots, lookup, costs.rounds, verified)
            return AutoDrafter(draft, slots, lookup, length, costs, verified)

        timer = previous.timer if isinstance(previous, SpeculativeRunner) else None
        return SpeculativeRunner(
            target, tokens, make_drafter, max_path=self.max_path, num_rows=self.num_rows, rule=match, dynamic_rows=True,
            timer=timer or RoundTimer(), report=costs.report,
        )  # fmt: skip


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

        def draft(params, state, verified, history, request):
            return draft_round(params, placement, state, verified, history, request, lookup, length, costs)

        def skip(state, verified):
            acceptance, known = learn(state, verified)
            sequence = SequenceState(commit_rows(state.sequence.cache, known))
            text = take_in(state.text, verified).forget_batch()
            idle = state.idle + verified.count
            state = dataclasses.replace(
                state, text=text, sequence=sequence, acceptance=acceptance, count=jnp.int32(0), idle=idle
            )
            return state, text.length

        scalar, plan = placement.array((), jnp.int32), placement.plan
        parts = [self._text.state, self._sequence.state]
        stats = placement.replicated(jax.eval_shape(init_acceptance))
        pairs = placement.array((length, 2), jnp.int32)
        state = AutoState(self._text.state, self._sequence.state, stats, pairs, pairs, scalar, scalar, scalar)
        self._create = Program("draft begin", create, plan, parts, state, donate=[0, 1])
        self._restart = Program("draft begin again", restart, plan, [*parts, stats], state, donate=[0, 1, 2])
        self.declare(verified, state, draft)
        self._skip = Program("draft skip", skip, plan, [state, verified], (state, scalar), donate=[0])
        self.programs = (*self.programs, *self._text.programs, self._create, self._restart, self._skip)

    def start(self, root: int, state: AutoState | None) -> AutoState:
        """See `Drafter.start`; what was learned of the draft counts in the next text, too, with less weight."""
        text = self._text.start()
        if state is None:
            return self._create(text, self._sequence.start(root, None))
        return self._restart(text, self._sequence.start(root, state.sequence), state.acceptance)

    def prefill(self, params: ModelParams, state: AutoState, tokens: np.ndarray) -> AutoState:
        state = super().prefill(params, state, tokens)
        return dataclasses.replace(state, text=self._text.prefill(state.text, tokens))

    def skip(self, state: AutoState, verified: Verified) -> AutoState:
        return self._skip(state, verified)[0]


def draft_round(
    params: Params, placement: Placement, state: AutoState, verified: Verified, history: History, request: Request,
    lookup: LookupSettings, length: int, costs: CostModel,
) -> tuple[AutoState, Draft]:  # fmt: skip
    """Learn from the last round, decide what is worth drafting, and draft it; for one shard."""
    acceptance, known = learn(state, verified)
    # The keys of what the draft guessed right lie after the prefix already, in order.
    cache = commit_rows(state.sequence.cache, known)
    text, candidates, matched = find_candidates(state.text, verified, lookup)
    round_cost = jnp.asarray(costs.rounds, jnp.float32)
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
        params, placement, cache, text.token, text.length, acceptance, history, request, should_draft, length, costs
    )
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
        sequence=SequenceState(chain.cache),
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
    text = jnp.pad(verified.tokens, (0, max(0, state.token.shape[0] - verified.tokens.shape[0])))
    hit = state.token == text[: state.token.shape[0], None]
    tried = jnp.stack([seen, seen & ~hit[:, 0]], axis=1)
    acceptance = state.acceptance.update(state.kind.reshape(-1), tried.reshape(-1), (tried & hit).reshape(-1))
    right = (seen & hit[:, 0]).sum(dtype=jnp.int32)
    return acceptance, jnp.minimum(right, jnp.minimum(jnp.maximum(state.count - 1, 0), verified.count - 1))
