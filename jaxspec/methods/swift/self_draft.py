"""Drafting with the target itself, some of its layers skipped (SWIFT, arXiv 2410.06916): a spine with siblings.

The draft has the target's parameters and the target's cache: what the target verified is there for every layer that is
kept, and the rows that it drafts go into the tree window, which verification writes anew for all layers. So there is
no second cache, nothing is copied, and nothing has to catch up.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.methods.core.acceptance import (
    CLASSES,
    PRIOR_WEIGHT,
    AcceptanceStats,
    chance_of,
    class_of,
    init_acceptance,
    observe,
)
from jaxspec.methods.core.lookup import keep_worthwhile
from jaxspec.methods.core.path_history import PathHistory
from jaxspec.methods.core.sequence import TargetState
from jaxspec.methods.core.verify import Draft, Outcome
from jaxspec.models.kv_cache import KVCache
from jaxspec.models.layer_set import LayerSet
from jaxspec.models.params import Params
from jaxspec.models.transformer import forward, vocab_logits
from jaxspec.runtime.placement import Placement
from jaxspec.sampling.choose import choose_ranked
from jaxspec.sampling.request import Request
from jaxspec.tree.select import Candidates, pack_best, root_alone
from jaxspec.tree.tree import Batch

# Bounds between levels of confidence: each has its number of children (ALGORITHMS 4.3).
LEVELS = (0.95, 0.8, 0.5)
# What is believed of the draft's first choices before any was verified: the paper's are accepted nearly always.
PRIOR_MEAN = 0.8
# Of its next choices, in order, where the first one was refused; each next one is this much less likely.
PRIOR_SECOND, PRIOR_DECAY = 0.5, 0.4
# Tokens without a draft before it is tried again, though it seemed not to pay: the first time, and at most.
FIRST_PATIENCE, LONGEST_PATIENCE = 8, 256


@dataclasses.dataclass(frozen=True)
class SpineSettings:
    """How drafts are grown; see `Swift`.

    Attributes:
      length: n, most tokens of the spine.
      threshold: the spine ends behind a token of less confidence.
      siblings: children per step at a confidence of at least each of `LEVELS`, and below; the spine's own is one.
      adaptive: draft only what pays.
      most_rows: bound on `batch_rows`, if there is one.
    """

    length: int
    threshold: float
    siblings: tuple[int, ...]
    adaptive: bool
    most_rows: int | None = None

    @property
    def branch(self) -> int:
        """k: most children of a row."""
        return max(self.siblings)

    @property
    def batch_rows(self) -> int:
        """bs: the root and all that a draft can hold, up to the bound; all steps but the last have some confidence."""
        confident = [c for c, below in zip(self.siblings, (math.inf, *LEVELS), strict=True) if below > self.threshold]
        rows = 1 + (self.length - 1) * max(confident) + self.branch
        return rows if self.most_rows is None else min(rows, self.most_rows)

    def children(self, confidence: jax.Array) -> jax.Array:
        """How many of a step's first ids are children of the row before, int32 []."""
        level = (confidence < jnp.array(LEVELS)).sum()
        return jnp.array(self.siblings, jnp.int32)[level]


@struct.dataclass
class Control:
    """What the host decides of a round, as data.

    Attributes:
      units: bool [L, 2], the units that run, where the program does not know them.
      cost: float32 [], of a draft pass, in target passes of one row.
      serial: int32 [], number of the layer set; what was learned of another one is forgotten.
    """

    units: jax.Array
    cost: jax.Array
    serial: jax.Array


@struct.dataclass
class SpineMemory:
    """What is known of the draft, and its last spine.

    Attributes:
      gauge: what became of first choices.
      tried: float32 [k - 1], refused first choices behind which the choice of that place could have been right.
      accepted: float32 [k - 1], those behind which it was.
      token: int32 [n, k], choices of each step, best first.
      kind: int32 [n], class of each step's first choice.
      count: int32 [], steps.
      idle: int32 [], tokens since the last draft.
      patience: int32 [], after how many one is made all the same.
      generated: int32 [], tokens of this text behind its prompt.
      serial: int32 [], the layer set's.
    """

    gauge: AcceptanceStats
    tried: jax.Array
    accepted: jax.Array
    token: jax.Array
    kind: jax.Array
    count: jax.Array
    idle: jax.Array
    patience: jax.Array
    generated: jax.Array
    serial: jax.Array

    def plain(self, request: Request, most: int) -> jax.Array:
        """Tokens of a round without a draft, at most `most` and none behind the end of the text; int32 [].

        The first ones come one by one: somebody waits for them.
        """
        return jnp.minimum(jnp.clip(self.generated, 1, most), request.left(self.generated))


@struct.dataclass
class Spine:
    """A draft in the making.

    Attributes:
      cache: rows of the root and of all spine tokens but the last are in its window.
      token: int32 [n, k], choices of each step, best first.
      kind: int32 [n].
      score: float32 [n, k], log of the chance that the target accepts the token and all before it; -inf where there is
        no child.
      gain: float32 [], expected output of a batch that holds the spine.
      chance: float32 [], that the target accepts all of it.
      confidence: float32 [], of its last token.
      count: int32 [], steps.
    """

    cache: KVCache
    token: jax.Array
    kind: jax.Array
    score: jax.Array
    gain: jax.Array
    chance: jax.Array
    confidence: jax.Array
    count: jax.Array

    def candidates(self) -> Candidates:
        """First choices, then second ones, and so on."""
        n, k = self.token.shape
        above = jnp.tile(jnp.arange(-1, n - 1, dtype=jnp.int32), k)
        return Candidates(self.token.T.reshape(-1), above, above + 2, self.score.T.reshape(-1))


def init_memory(settings: SpineSettings) -> SpineMemory:
    """Nothing known."""
    n, k = settings.length, settings.branch
    zero, ranks = jnp.int32(0), jnp.zeros(k - 1)
    token, kind = jnp.zeros((n, k), jnp.int32), jnp.zeros(n, jnp.int32)
    patience = jnp.int32(FIRST_PATIENCE)
    # The first round brings the prompt's last token.
    return SpineMemory(init_acceptance(), ranks, ranks, token, kind, zero, zero, patience, jnp.int32(-1), zero)


def restart(memory: SpineMemory) -> SpineMemory:
    """For another text: what was learned of the draft outlives one."""
    return dataclasses.replace(memory, count=jnp.int32(0), idle=jnp.int32(0), generated=jnp.int32(-1))


def draft_spine(
    params: Params,
    placement: Placement,
    state: TargetState,
    memory: SpineMemory,
    outcome: Outcome,
    request: Request,
    control: Control,
    *,
    layers: LayerSet | None,
    settings: SpineSettings,
    costs: np.ndarray,
    most_plain: int,
) -> tuple[TargetState, SpineMemory, Draft]:
    """Learn from the last round, and draft; for one shard.

    Args:
      params: the target's.
      placement: the target.
      state: its state; only window slots of its cache change.
      memory: of earlier rounds.
      outcome: what the last one verified.
      request: processors and seed.
      control: what the host decided.
      layers: the units that run; None leaves that to `control`.
      settings: how drafts are grown.
      costs: float64 [bs], of target passes of 1, 2, ... rows with what a round costs besides, in target passes of one.
      most_plain: see `plain_tokens`.
    """
    known = learn(memory, outcome)
    fresh = memory.serial != control.serial
    blank = dataclasses.replace(init_memory(settings), generated=known.generated)
    known = jax.tree.map(lambda new, old: jnp.where(fresh, new, old), blank, known)

    tokens = jnp.arange(1, settings.length + 1)
    mean = mean_chance(known.gauge)
    rate = (1 + jnp.cumsum(mean**tokens)) / (jnp.asarray(costs)[tokens] + control.cost * tokens)
    pays = jnp.max(rate) > 1 / costs[0] if settings.adaptive else jnp.bool_(True)
    probe = ~pays & (known.idle >= known.patience)
    wanted = pays | probe

    units = control.units if layers is None else layers
    spine = grow_spine(params, placement, state, known, request, control, wanted, units, settings, costs)

    def pack() -> Batch:
        candidates = spine.candidates()
        if settings.adaptive:
            candidates, _ = keep_worthwhile(candidates, jnp.asarray(costs) + control.cost * spine.count)
        return pack_best(state.root, candidates, settings.batch_rows)

    # Where nothing pays most rounds draft nothing, and they should not sort empty lists.
    batch = jax.lax.cond(wanted, pack, lambda: root_alone(state.root, settings.batch_rows))
    plain = jnp.where(batch.count == 1, known.plain(request, most_plain), 0) if most_plain else None
    patience = jnp.where(probe, jnp.minimum(2 * known.patience, LONGEST_PATIENCE), known.patience)
    memory = dataclasses.replace(
        known,
        token=spine.token,
        kind=spine.kind,
        count=spine.count,
        idle=jnp.where(wanted, 0, known.idle + (1 if plain is None else plain)),
        patience=jnp.where(pays, FIRST_PATIENCE, patience),
        serial=control.serial,
    )
    return dataclasses.replace(state, cache=spine.cache), memory, Draft(batch, spine.count, plain=plain)


def draft_nothing(
    root: jax.Array,
    memory: SpineMemory,
    outcome: Outcome,
    request: Request,
    *,
    settings: SpineSettings,
    most_plain: int,
) -> tuple[SpineMemory, Draft]:
    """As `draft_spine` where nothing may be drafted; it does not need the model."""
    known = learn(memory, outcome)
    plain = known.plain(request, most_plain) if most_plain else None
    memory = dataclasses.replace(known, count=jnp.int32(0), idle=known.idle + (1 if plain is None else plain))
    return memory, Draft(root_alone(root, settings.batch_rows), jnp.int32(0), plain=plain)


def learn(memory: SpineMemory, outcome: Outcome) -> SpineMemory:
    """Compare the last spine with the verified text, whether the batch held it or not."""
    n, k = memory.token.shape
    place = jnp.arange(n)
    hit = memory.token == outcome.tokens[:n, None]
    before = jnp.concatenate([jnp.ones(1, bool), jnp.cumprod(hit[:-1, 0]).astype(bool)])
    seen = before & (place < jnp.minimum(memory.count, outcome.count))
    refused = seen & ~hit[:, 0]  # at most one
    gauge = observe(memory.gauge, memory.kind, seen, seen & hit[:, 0])
    # Rare events: as many count as make the estimate, and no more are forgotten than come in.
    kept = jnp.where(refused.any(), 0.97, 1.0)
    return dataclasses.replace(
        memory,
        gauge=gauge,
        tried=memory.tried * kept + refused.any(),
        accepted=memory.accepted * kept + (refused[:, None] & hit)[:, 1:].any(0),
        generated=memory.generated + outcome.count,
    )


def mean_chance(gauge: AcceptanceStats) -> jax.Array:
    """Estimated chance of a first choice whose confidence is not known yet, float32 []."""
    tried, accepted = gauge.tried[:CLASSES].sum(), gauge.accepted[:CLASSES].sum()
    return (accepted + PRIOR_WEIGHT * PRIOR_MEAN) / (tried + PRIOR_WEIGHT)


def rank_chances(memory: SpineMemory) -> jax.Array:
    """Estimated chance of each next choice where the first one is not right, float32 [k - 1]; their sum is below 1."""
    prior = PRIOR_SECOND * PRIOR_DECAY ** jnp.arange(memory.tried.shape[0], dtype=jnp.float32)
    return (memory.accepted + PRIOR_WEIGHT * prior) / (memory.tried + PRIOR_WEIGHT)


def grow_spine(
    params: Params,
    placement: Placement,
    state: TargetState,
    memory: SpineMemory,
    request: Request,
    control: Control,
    wanted: jax.Array,
    units: LayerSet | jax.Array,
    settings: SpineSettings,
    costs: np.ndarray,
) -> Spine:
    """Draft token by token while the draft is confident and, where that counts, while a further pass pays."""
    cfg, vocab = placement.cfg, placement.vocab
    n, k = settings.length, settings.branch
    batch_cost, mean, ranks = jnp.asarray(costs), mean_chance(memory.gauge), rank_chances(memory)
    place = jnp.arange(n, dtype=jnp.int32)

    def go_on(spine: Spine) -> jax.Array:
        def rate(gain: jax.Array, tokens: jax.Array) -> jax.Array:
            return gain / (batch_cost[tokens] + control.cost * tokens)

        more = wanted & (spine.count < n) & (spine.confidence >= settings.threshold)
        if settings.adaptive:
            count = spine.count
            further = rate(spine.gain + spine.chance * mean, jnp.minimum(count + 1, n))
            # Behind the root a pass has been decided on already, as part of several.
            more &= (count == 0) | (further > rate(spine.gain, count))
        return more

    def extend(spine: Spine) -> Spine:
        at = spine.count
        token = jnp.where(at > 0, spine.token[jnp.maximum(at - 1, 0), 0], state.root)[None]
        hidden, cache = forward(
            params, cfg, token, (spine.cache.length + at)[None], spine.cache, (place <= at)[None],
            window_position=spine.cache.length + place, offset=at, units=units,
        )  # fmt: skip
        paths = PathHistory(state.history, spine.token[:, 0], (place < at)[None])
        history = paths.build(request.processors, vocab)
        produced = (cache.length + 1 + at)[None]
        choices, possible, confidence = choose_ranked(
            vocab_logits(params, hidden), request.processors, history.seen, history.counts, request.key, produced,
            vocab, k,
        )  # fmt: skip
        kind = class_of(jnp.log(confidence[0]))
        first = chance_of(memory.gauge, kind)
        chance = spine.chance * jnp.concatenate([first[None], (1 - first) * ranks])
        child = possible[0] & (jnp.arange(k) < settings.children(confidence[0]))
        return Spine(
            cache=cache,
            token=spine.token.at[at].set(choices[0]),
            kind=spine.kind.at[at].set(kind),
            score=spine.score.at[at].set(jnp.where(child, jnp.log(chance), -jnp.inf)),
            gain=spine.gain + chance[0],
            chance=chance[0],
            confidence=confidence[0],
            count=at + 1,
        )

    one = jnp.float32(1)
    start = Spine(
        state.cache, jnp.zeros((n, k), jnp.int32), jnp.zeros(n, jnp.int32), jnp.full((n, k), -jnp.inf), one, one, one,
        jnp.int32(0),
    )  # fmt: skip
    with jax.named_scope("draft/grow"):
        return jax.lax.while_loop(go_on, extend, start)
