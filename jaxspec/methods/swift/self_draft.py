"""Drafting with the target itself, some of its blocks skipped (SWIFT, arXiv 2410.06916): a chain with siblings.

The draft has the target's parameters and its cache. Blocks that run find the keys and values of all verified tokens
there. Drafted rows go to the tree window, which verification writes again for all layers. So there is no second cache.
"""

import dataclasses
import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.methods.core.cost_model import (
    CLASSES,
    KINDS,
    PRIOR_WEIGHT,
    AcceptanceStats,
    CostModel,
    class_of,
    init_acceptance,
    keep_best,
    relative_set_cost,
)
from jaxspec.methods.core.draft_passes import PathHistory
from jaxspec.methods.core.drafter import Drafter
from jaxspec.methods.core.round import ModelParams
from jaxspec.methods.core.sequence import SequenceState, sequence_shapes
from jaxspec.methods.core.verify import Draft, draft_shapes
from jaxspec.models.kv_cache import KVCache
from jaxspec.models.layer_set import LayerSet
from jaxspec.models.params import Params
from jaxspec.models.transformer import forward, vocab_logits
from jaxspec.pytree import pytree
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.program import Program
from jaxspec.runtime.transfer import place
from jaxspec.sampling.accept import Verified
from jaxspec.sampling.choose import choose_ranked
from jaxspec.sampling.request import Request, request_shapes
from jaxspec.tree.tree import Batch, Candidates, pack_best, root_alone

# Confidence from which on a step has the first, second and third number of siblings (paper, section 4.3).
LEVELS = (0.95, 0.8, 0.5)
# First choices that count as accepted to begin with: nearly all of the paper's are. Chance of the second choice where
# the first is refused, and the factor from each choice to the next.
ACCEPTED_BEFORE, PRIOR_SECOND, PRIOR_DECAY = 6.0, 0.5, 0.4
# Tokens without a draft before one is tried again although it seemed not to pay: the first time, and at most.
FIRST_PATIENCE, LONGEST_PATIENCE = 8, 256


@dataclasses.dataclass(frozen=True)
class ChainSettings:
    """How drafts are grown; `Swift` documents the fields."""

    length: int
    threshold: float
    siblings: tuple[int, ...]
    adaptive: bool
    num_rows: int

    @property
    def branch(self) -> int:  # k: most children of a row
        return max(self.siblings)


@pytree
class ChainMemory:
    """Statistics of the draft's hits, and its last chain."""

    acceptance: AcceptanceStats  # of first choices
    ranks: jax.Array  # float32 [2, k - 1], refusals of a first choice, and how often each further one was right then
    token: jax.Array  # int32 [n, k], choices of each step, best first
    kind: jax.Array  # int32 [n], class of each first choice
    count: jax.Array  # int32 [], steps
    idle: jax.Array  # int32 [], tokens since the last draft
    patience: jax.Array  # int32 [], tokens after which a draft is made all the same


@pytree
class GrownChain:
    """A draft in the making; `token`, `kind` and `count` as in `ChainMemory`."""

    cache: KVCache  # the root and all chain tokens but the last are rows of its window
    token: jax.Array
    kind: jax.Array
    score: jax.Array  # float32 [n, k], log chance that the target accepts the token and all before it; -inf for none
    confidence: jax.Array  # float32 [], probability of its last token
    count: jax.Array

    @property
    def gain(self) -> jax.Array:
        """Expected tokens of a round with the first choices, float32 []."""
        return 1 + jnp.exp(self.score[:, 0]).sum()

    @property
    def chance(self) -> jax.Array:
        """Chance that the target accepts all first choices, float32 []."""
        return jnp.where(self.count > 0, jnp.exp(self.score[jnp.maximum(self.count - 1, 0), 0]), 1.0)

    def candidates(self) -> Candidates:
        """First choices, then second ones, and so on."""
        n, k = self.token.shape
        above = jnp.tile(jnp.arange(-1, n - 1, dtype=jnp.int32), k)
        return Candidates(self.token.T.reshape(-1), above, above + 2, self.score.T.reshape(-1))


class SelfDrafter(Drafter):
    """Proposes what the target says with the blocks in `layers` skipped.

    Its `cost` is that of a draft pass, in target passes of one row.
    """

    idles = skips = True

    def __init__(
        self, target: Placement, slots: int, verified: Verified, chain: ChainSettings, costs: CostModel,
        layers: LayerSet, branching: bool,
    ):  # fmt: skip
        """Declare the programs, for a cache of `slots`, shapes `verified` by a round, and its `costs`.

        If `branching`, one program skips the blocks of any set, by branches on the device; else each set has its own.
        """
        self._target, self._branching = target, branching
        plan, state = target.plan, sequence_shapes(target, slots)
        self.shapes = draft_shapes(target, chain.num_rows)
        self.state = memory = target.replicated(jax.eval_shape(lambda: init_memory(chain)))
        choice = (target.array((target.cfg.num_layers, 2), jnp.bool_), target.array((), jnp.float32))
        args = [target.params(), state, memory, verified, request_shapes(target), *choice]

        def declare(known: LayerSet | None) -> Program:
            def draft(params, state, memory, verified, request, units, cost):
                runs = units if known is None else known
                return draft_chain(params, target, state, memory, verified, request, runs, cost, chain, costs)

            return Program("draft", draft, plan, args, (state, memory, self.shapes), donate=[1, 2])

        def compile_(known: LayerSet) -> Program:
            program = declare(known)
            program.finish(program.lower())
            return program

        def restart(memory):
            return dataclasses.replace(memory, count=jnp.int32(0), idle=jnp.int32(0))

        def skip(memory, verified):
            idle = memory.idle + verified.count
            return dataclasses.replace(learn(memory, verified), count=jnp.int32(0), idle=idle)

        self._create = Program("draft create", lambda: init_memory(chain), plan, [], memory)
        self._restart = Program("draft restart", restart, plan, [memory], memory, donate=[0])
        self._skip = Program("draft skip", skip, plan, [memory, verified], memory, donate=[0])
        self._drafts = {None if branching else layers: declare(None if branching else layers)}
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="swift")
        self._compile, self._choice_shapes = compile_, choice
        self._compiling: tuple[LayerSet, Future[Program]] | None = None
        self._failed: set[LayerSet] = set()
        self._use(layers)

    @property
    def programs(self) -> Sequence[Program]:
        return (self._create, self._restart, self._skip, *self._drafts.values())

    def start(self, root: int, state: ChainMemory | None) -> ChainMemory:
        """Begin a text; what was learned of the draft in earlier ones counts."""
        return self._create() if state is None else self._restart(state)

    def draft(
        self, params: ModelParams, target: SequenceState, state: ChainMemory, verified: Verified, request: Request
    ) -> tuple[SequenceState, ChainMemory, Draft]:
        return self._draft(params.target, target, state, verified, request, *self._choice)

    def skip(self, params: ModelParams, state: ChainMemory, verified: Verified, flush: bool = False) -> ChainMemory:
        return self._skip(state, verified)

    def adopt(self, layers: LayerSet) -> bool:
        """Draft with another set once its program is compiled, and else with the old; says whether it changed now."""
        if self._compiling is not None and self._compiling[1].done():
            (compiled, program), self._compiling = self._compiling, None
            if (error := program.exception()) is None:
                self._drafts[compiled] = program.result()
            else:
                self._failed.add(compiled)
                logging.getLogger(__name__).warning("the draft of %s could not be compiled: %s", compiled, error)
        if layers == self.layers or layers in self._failed:
            return False
        if self._branching or layers in self._drafts:
            self._use(layers)
            return True
        if self._compiling is None:
            self._compiling = (layers, self._worker.submit(self._compile, layers))
        return False

    def _use(self, layers: LayerSet) -> None:
        self.layers, self._draft = layers, self._drafts[None if self._branching else layers]
        self.cost = relative_set_cost(self._target, layers)
        values = zip((layers.runs, np.float32(self.cost)), self._choice_shapes, strict=True)
        self._choice = [place(value, shape.sharding) for value, shape in values]


def init_memory(chain: ChainSettings) -> ChainMemory:
    """Nothing known but that most first choices are accepted."""
    n, k, zero = chain.length, chain.branch, jnp.int32(0)
    token, kind, ranks = jnp.zeros((n, k), jnp.int32), jnp.zeros(n, jnp.int32), jnp.zeros((2, k - 1))
    surest = jnp.where(jnp.arange(KINDS) == CLASSES - 1, ACCEPTED_BEFORE, 0.0)
    known = dataclasses.replace(init_acceptance(), tried=surest, accepted=surest)
    return ChainMemory(known, ranks, token, kind, zero, zero, jnp.int32(FIRST_PATIENCE))


def learn(memory: ChainMemory, verified: Verified) -> ChainMemory:
    """Compare the last chain with the verified text, whether the batch held it or not."""
    hit = memory.token == verified.tokens[: memory.token.shape[0], None]
    seen = chain_outcome(memory.token[:, 0], memory.count, verified.tokens, verified.count)
    refused = seen & ~hit[:, 0]  # at most one
    right = (refused[:, None] & hit)[:, 1:].any(0)
    # A refusal is rare: as many count as make the estimate, and nothing is forgotten without one.
    ranks = memory.ranks * jnp.where(refused.any(), 0.97, 1.0)
    return dataclasses.replace(
        memory,
        acceptance=memory.acceptance.update(memory.kind, seen, seen & hit[:, 0]),
        ranks=ranks + jnp.stack([jnp.full_like(right, refused.any()), right]),
    )


def chain_outcome(first: jax.Array, count: jax.Array, tokens: jax.Array, num_tokens: jax.Array) -> jax.Array:
    """Which tokens of a drafted chain the verified text says something about, bool [n].

    `first`, int32 [n], is the chain, of length `count`; `tokens`, int32 [P], are `num_tokens` verified ones, and P is
    at least n.
    """
    n = first.shape[0]
    hit = first == tokens[:n]
    before = jnp.concatenate([jnp.ones(1, bool), jnp.cumprod(hit[:-1]).astype(bool)])
    return before & (jnp.arange(n) < jnp.minimum(count, num_tokens))


def draft_chain(
    params: Params, target: Placement, state: SequenceState, memory: ChainMemory, verified: Verified, request: Request,
    units: LayerSet | jax.Array, cost: jax.Array, chain: ChainSettings, costs: CostModel,
) -> tuple[SequenceState, ChainMemory, Draft]:  # fmt: skip
    """Learn from what the last round `verified`, and draft; for one shard.

    Only window slots of the state's cache change. `units` are the blocks that run, as data bool [L, 2]. `cost` is that
    of a draft pass, float32 [], in target passes of one row.
    """
    assert state.root is not None
    root, idle, memory = state.root, memory.idle + verified.count, learn(memory, verified)
    tokens, round_cost, mean = jnp.arange(1, chain.length + 1), jnp.asarray(costs.rounds), memory.acceptance.mean_rate()
    rate = (1 + jnp.cumsum(mean**tokens)) / (round_cost[tokens] + cost * tokens)
    pays = jnp.max(rate) > 1 / round_cost[0] if chain.adaptive else jnp.bool_(True)
    retry = ~pays & (idle >= memory.patience)
    should_draft = pays | retry
    grown = grow_chain(params, target, state, memory, request, units, cost, should_draft, chain, round_cost)

    def pack() -> Batch:
        candidates = grown.candidates()
        if chain.adaptive:
            candidates, _, _ = keep_best(candidates, round_cost + cost * grown.count)
        return pack_best(root, candidates, chain.num_rows)

    # Most rounds that draft nothing should not sort empty lists.
    batch = jax.lax.cond(should_draft, pack, lambda: root_alone(root, chain.num_rows))
    backoff = jnp.where(retry, jnp.minimum(2 * memory.patience, LONGEST_PATIENCE), memory.patience)
    memory = dataclasses.replace(
        memory, token=grown.token, kind=grown.kind, count=grown.count, idle=jnp.where(should_draft, 0, idle),
        patience=jnp.where(pays, FIRST_PATIENCE, backoff),
    )  # fmt: skip
    return dataclasses.replace(state, cache=grown.cache), memory, Draft(batch, grown.count)


def grow_chain(
    params: Params, target: Placement, state: SequenceState, memory: ChainMemory, request: Request,
    units: LayerSet | jax.Array, cost: jax.Array, should_draft: jax.Array, chain: ChainSettings, round_cost: jax.Array,
) -> GrownChain:  # fmt: skip
    """Draft token by token while the draft is confident and, if it is adaptive, while a further pass pays."""
    assert state.root is not None and state.history is not None
    cfg, vocab, root, text = target.cfg, target.vocab, state.root, state.history
    n, k = chain.length, chain.branch
    place, mean, rates = jnp.arange(n, dtype=jnp.int32), memory.acceptance.mean_rate(), memory.acceptance.rates()
    tried, right = memory.ranks
    # Of each further choice where the first one is wrong; their sum is below 1.
    ranks = (right + PRIOR_WEIGHT * PRIOR_SECOND * PRIOR_DECAY ** jnp.arange(k - 1)) / (tried + PRIOR_WEIGHT)

    def go_on(done: GrownChain) -> jax.Array:
        def rate(gain: jax.Array, tokens: jax.Array) -> jax.Array:
            return gain / (round_cost[tokens] + cost * tokens)

        more = should_draft & (done.count < n) & (done.confidence >= chain.threshold)
        if chain.adaptive:
            further = rate(done.gain + done.chance * mean, jnp.minimum(done.count + 1, n))
            more &= (done.count == 0) | (further > rate(done.gain, done.count))  # the first pass has been decided on
        return more

    def extend(done: GrownChain) -> GrownChain:
        at, cache = done.count, done.cache
        token = jnp.where(at > 0, done.token[jnp.maximum(at - 1, 0), 0], root)[None]
        hidden, cache = forward(
            params, cfg, token, (cache.length + at)[None], cache, (place <= at)[None],
            window_position=cache.length + place, offset=at, units=units,
        )  # fmt: skip
        histories = PathHistory(text, done.token[:, 0], (place < at)[None]).over(vocab)
        choices, possible, confidence = choose_ranked(
            vocab_logits(params, cfg, hidden), request.processors, histories, request.key,
            (cache.length + 1 + at)[None], vocab, k,
        )  # fmt: skip
        kind = class_of(jnp.log(confidence[0]))
        first = rates[kind]
        chance = done.chance * jnp.concatenate([first[None], (1 - first) * ranks])
        children = jnp.array(chain.siblings)[(confidence[0] < jnp.array(LEVELS)).sum()]
        child = possible[0] & (jnp.arange(k) < children)
        score = done.score.at[at].set(jnp.where(child, jnp.log(chance), -jnp.inf))
        token, kind = done.token.at[at].set(choices[0]), done.kind.at[at].set(kind)
        return GrownChain(cache, token, kind, score, confidence[0], at + 1)

    token, kind = jnp.zeros((n, k), jnp.int32), jnp.zeros(n, jnp.int32)
    start = GrownChain(state.cache, token, kind, jnp.full((n, k), -jnp.inf), jnp.float32(1), jnp.int32(0))
    with jax.named_scope("draft/grow"):
        return jax.lax.while_loop(go_on, extend, start)
