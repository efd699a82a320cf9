"""The figures that drafts are weighed with: costs of passes, and acceptance rates (docs/algorithms.md, "Cost model").

Costs are relative to a target pass of one row. Rates are learned while decoding, by what proposed a token and how sure
it was.

A token has a *kind*. Those of a draft model are classes of its probability, apart for first choices and others, and for
tokens that a copy of earlier text proposes, too. Those of copies are lengths of the match. Where the draft proposes
other tokens than the copy, the copy is contradicted. Longer than 400 lines because costs and rates are weighed
together.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxspec.methods.core.round import STEPS_PER_DISPATCH, count_bytes, steps_per_dispatch
from jaxspec.models.experts import distinct_experts
from jaxspec.models.layer_set import LayerSet
from jaxspec.models.params import MLP_PARAMS, ROUTED_PARAMS, Params
from jaxspec.pytree import pytree
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.transfer import place_like
from jaxspec.tree.tree import Candidates
from pallas_kernels.active_rows import computed_rows

# Time of a pass of so many rows over that of one row on CPUs, between the slowest and the fastest kernels
# (docs/results/levels-cpu.md). On accelerators a pass is bound by its weights far beyond that: the cost of a row there.
CPU_PASS_COST = {1: 1.0, 2: 1.1, 4: 1.3, 8: 1.8, 16: 3.0, 32: 6.0}
ROW_COST = 0.003
# Costs of a draft pass beyond reading its weights, and of a round beyond its passes.
FIXED_DRAFT_COST, ROUND_COST = 0.01, 0.05
# Tokens per pass of SpecExec by its draft tokens, greedy, with the shipped draft (docs/results/specexec-budgets.md); of
# other drafts only their ratios count. About so many draft passes grow a tree, or more where they are narrow.
USUAL_RATES = {1: 1.42, 4: 1.9, 16: 2.53, 64: 2.78, 256: 3.0, 1024: 3.2}
USUAL_DEPTH = 12

# Bounds between classes of draft probability, and what is believed of each class before anything is known, worth so
# many observations. Drafts are a little too sure of themselves.
EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
PRIOR_RATE = (0.05, 0.14, 0.23, 0.32, 0.41, 0.5, 0.59, 0.69, 0.79, 0.88, 0.95)
CLASSES = len(PRIOR_RATE)
PRIOR_WEIGHT = 4.0
# The chance of any first choice, before its probability is known.
PRIOR_MEAN = 0.5
# Chance that a refused token which a copy proposes, too, is right after all; of a token that a copy alone proposes,
# by the length of its match (longer ones count as the longest), and a factor where the draft contradicts it.
AGREEMENT = 0.4
PRIOR_COPY = (0.0, 0.25, 0.45, 0.6, 0.7, 0.78, 0.83, 0.87, 0.9)
CONTRADICTION = 0.25
# Observations lose weight with each token, so that a change of subject is noticed.
FORGETTING = 0.98
# Of each group of kinds, and of drafts, so many observations of earlier texts are kept; in a text they count as fewer.
# Greedy texts are law 0 and sampled ones law 1, kept apart: drafts are right more often where nothing is drawn.
USUAL_KEPT, USUAL_WEIGHT, LAWS = 150.0, 12.0, 2
# A draft is judged by so many standard deviations more tokens than it is expected to bring: what is little known is
# tried.
OPTIMISM = 0.5

# Kinds: first choices, other choices, both again where a copy agrees; then copies, and contradicted copies.
OTHERS, AGREED, COPIES, CONTRADICTED = CLASSES, 2 * CLASSES, 4 * CLASSES, len(PRIOR_COPY)
# Then places of a block, see `place_kind`: what became of their tokens over what their other kind promised.
PLACES = COPIES + 2 * CONTRADICTED
DEPTHS, RANKS = 8, 3
KINDS = PLACES + 2 * DEPTHS * RANKS
# The group of each kind: drafts, copies or places.
GROUPS = np.digitize(np.arange(KINDS), [COPIES, PLACES])
# That ratio before anything is known, below a choice that is not the first: marginals go on as if that one were right.
BESIDE = 0.3
SUREST = 0.99


@pytree
class PlacedCosts:
    """A `CostModel` on the devices, where it is data: programs do not depend on what a machine's passes cost."""

    rounds: Array  # float32 [bs], see `CostModel.rounds`
    draft: Array  # float32 [], of a draft pass of one row
    draft_overhead: Array  # float32 [], of a draft apart from its passes


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Times of passes, in target passes of one row."""

    passes: np.ndarray  # float64 [bs], of target passes of 1, 2, ... rows
    draft: float = 0.0  # of a draft pass of one row; 0 without a draft
    round: float = ROUND_COST  # what a round costs apart from its passes
    draft_overhead: float = 0.0  # of a draft apart from its passes
    one_pass: bool = False  # whether a draft pass proposes all tokens of a round; it has more rows then
    # The origin of the figures: "built in", "measured", "given", or two of them.
    source: str = "built in"
    steps: int = STEPS_PER_DISPATCH  # tokens that plain decoding computes in one dispatch

    @classmethod
    def of(cls, target: Placement, rows: int, measured: Sequence[float] = (), **figures: Any) -> "CostModel":
        """Costs of passes of up to `rows` rows of a target, see `pass_costs`, and further figures."""
        return cls(pass_costs(target, rows, measured), steps=steps_per_dispatch(target), **figures)

    @property
    def rounds(self) -> np.ndarray:
        """Costs of rounds with 1, 2, ... rows, without their draft passes; float64 [bs].

        Rounds without a draft decode several tokens per dispatch, which share the round's other costs.
        """
        rounds = self.passes + self.round
        rounds[0] = self.passes[0] + self.round / self.steps
        return rounds

    @property
    def row(self) -> float:
        """Mean cost of a further row of a pass."""
        return float(self.passes[-1] - self.passes[0]) / max(1, self.passes.size - 1)

    def spent(self, rows: Any, passes: Any) -> Any:
        """Costs of rounds with so many drafted rows, which may be means, and draft passes; numbers or arrays."""
        rounds = np.interp(rows, np.arange(len(self.passes)), self.rounds)
        return rounds + self.draft_overhead + self.draft * passes

    def gain(self, brought: Any, rows: Any, passes: Any) -> Any:
        """Speed over plain decoding of drafts that bring so many tokens; numbers or arrays."""
        return (1 + brought) / self.spent(rows, passes) * self.rounds[0]

    def best_chain(self, rate: float, length: int) -> tuple[float, float, float]:
        """Of the best chain of 1 to `length` tokens the tokens that it brings, its rows and its passes.

        Each of its tokens is right with a chance of `rate`.
        """
        rows = np.arange(1, min(length, len(self.passes) - 1) + 1)
        tokens, passes = np.cumsum(rate**rows), np.ones_like(rows) if self.one_pass else rows
        best = int(self.gain(tokens, rows, passes).argmax())
        return float(tokens[best]), float(rows[best]), float(passes[best])

    def place(self, placement: Placement) -> PlacedCosts:
        """The figures on a model's devices."""
        shapes = self.shapes(placement)
        figures = PlacedCosts(*map(np.float32, (self.rounds, self.draft, self.draft_overhead)))  # pyright: ignore
        return place_like(figures, shapes)

    def shapes(self, placement: Placement) -> PlacedCosts:
        """Shapes of what `place` gives."""
        one = placement.array((), jnp.float32)
        return PlacedCosts(placement.array(self.passes.shape, jnp.float32), one, one)

    def report(self) -> dict[str, Any]:
        """For the statistics of a generation."""
        known = {"figures": self.source, "pass_cost": self.passes.round(3).tolist(), "round_cost": self.round}
        costs = {"draft_cost": round(self.draft, 4), "draft_overhead": round(self.draft_overhead, 4)}
        return known | (costs if self.draft else {})


def best_count(scores: Array, costs: Array) -> tuple[Array, Array]:
    """How many of the tokens of these scores, float32 [N], bring the most expected output per time, and that output.

    The expected output of a batch is 1 + the sum of its tokens' probabilities (docs/algorithms.md). `costs`, float32
    [bs], are those of a batch of 1, 2, ... rows, each with its share of a round's other costs.
    """
    best, _ = jax.lax.top_k(scores, min(costs.shape[0] - 1, scores.shape[0]))
    gain = 1 + jnp.concatenate([jnp.zeros(1), jnp.cumsum(jnp.exp(best))])
    count = jnp.argmax(gain / costs[: gain.shape[0]]).astype(jnp.int32)
    return count, gain[count]


class Prospect(NamedTuple):
    """Whether a draft model is asked."""

    wanted: Array  # bool [], it is: because that pays, or to see whether it does now
    pays: Array  # bool []
    retry: Array  # bool []
    num_copied: Array  # int32 [], copied tokens that pay without it


def weigh_prospect(
    copied: Array, chain: Array, passes: Array, stats: "AcceptanceStats", costs: PlacedCosts, idle: Array,
    patience: Array,
) -> Prospect:  # fmt: skip
    """Weigh a draft that was not made yet against copies alone.

    Args:
      copied: float32 [N], scores of copied tokens.
      chain: float32 [L], the chance that the first 1, 2, ... tokens of a chain of the model are all accepted.
      passes: int32 [L], draft passes that these take.
      stats: what became of earlier drafts.
      costs: of rounds and draft passes.
      idle: int32 [], tokens since the model was asked; after `patience` it is asked though it seems not to pay.
    """
    last = costs.rounds.shape[0] - 1
    num_copied, copy_gain = best_count(copied, costs.rounds)
    first_copy = jnp.exp(copied.max())
    length, tokens = jnp.arange(1, chain.shape[0] + 1), jnp.cumsum(chain)
    alone = costs.rounds[jnp.minimum(length, last)] + costs.draft_overhead + costs.draft * passes
    best = jnp.argmax((1 + tokens) / alone)
    brought, rows, needed = stats.usual_draft(jnp.stack([tokens[best], length[best], passes[best]]).astype(jnp.float32))
    # It joins the copies, of which it brings what they do not have, or takes their rows.
    joined, own = jnp.interp(jnp.stack([num_copied + rows, rows]), jnp.arange(last + 1), costs.rounds)
    drafting = costs.draft_overhead + costs.draft * needed
    speed = jnp.maximum(
        (copy_gain + brought * (1 - first_copy)) / (joined + drafting), (1 + brought) / (own + drafting)
    )
    pays = speed > copy_gain / costs.rounds[num_copied]
    # A draft that would not pay if all its tokens were accepted is never tried.
    hopeful = jnp.max((1 + length) / alone) > 1 / costs.rounds[0]
    retry = ~pays & (num_copied == 0) & (idle >= patience) & hopeful
    return Prospect(pays | retry, pays, retry, num_copied)


def keep_best(candidates: Candidates, costs: Array) -> tuple[Candidates, Array, Array]:
    """Drop what does not pay; the candidates that stay, and the results of `best_count`."""
    count, gain = best_count(candidates.score, costs)
    best, _ = jax.lax.top_k(candidates.score, min(costs.shape[0] - 1, candidates.score.shape[0]))
    bound = jnp.where(count > 0, best[jnp.maximum(count - 1, 0)], jnp.inf)
    score = jnp.where(candidates.score >= bound, candidates.score, -jnp.inf)
    return dataclasses.replace(candidates, score=score), count, gain


def pass_costs(target: Placement, rows: int, measured: Sequence[float] = ()) -> np.ndarray:
    """Times of target passes of 1, 2, ... `rows` rows over that of one row, float64 [rows].

    The target's kernels say which built-in figures hold. `measured` gives the first of these times; the rest grows as
    the built-in figures do. Of a mixture of experts a pass reads more weights the more rows it has.
    """
    costs = np.array([_built_in_cost(1 + n, rows, target) for n in range(rows)])
    known = np.array(measured[:rows], np.float64)
    if known.size:
        costs *= known[-1] / costs[known.size - 1]
        costs[: known.size] = known
    return costs


def fill_rows(costs: Mapping[int, float]) -> tuple[float, ...]:
    """Costs of 1, 2, ... rows from those of some numbers of rows, ascending from 1; fewer never cost more than more."""
    least = np.minimum.accumulate([*costs.values()][::-1])[::-1]
    return tuple(np.interp(range(1, 1 + max(costs)), [*costs], least).round(3).tolist())


def tree_passes(budget: int, width: int) -> int:
    """About how many draft passes of `width` rows grow a tree of `budget` tokens best-first."""
    return min(budget, max(USUAL_DEPTH, -(-budget // width)))


def relative_draft_cost(target: Placement, draft: Placement) -> float:
    """A draft pass over a target pass, by the bytes of weights that each reads; of one row, or of a block's rows."""
    rows = 1 if draft.cfg.features is None else max(1, draft.cfg.features.block)
    return _bytes_read(draft) / _bytes_read(target) * float(pass_costs(draft, rows)[-1]) + FIXED_DRAFT_COST


def relative_set_cost(target: Placement, layers: LayerSet) -> float:
    """A pass of one row through some of the target's layers over one through all, by the bytes of weights read."""
    skipped = 0.0
    for index, (layer, runs) in enumerate(zip(target.params()["layers"], layers.runs, strict=True)):
        for name in layer:
            skipped += 0 if runs[int(name in MLP_PARAMS)] else _layer_bytes(target, index, {name: layer[name]})
    return 1 - skipped / _bytes_read(target) + FIXED_DRAFT_COST


def stream_growth(target: Placement, rows: int, expert_share: float) -> float:
    """Bytes of a streamed pass of so many rows over those of one; `expert_share` of the latter are experts'."""
    experts = target.cfg.experts
    if experts is None:
        return 1.0
    return 1 - expert_share + expert_share * distinct_experts(experts, rows) / experts.per_token


def _built_in_cost(active_rows: int, rows: int, target: Placement) -> float:
    """Time of a pass with so many active rows of `rows` over that of a one-row pass: a rough, fixed figure."""
    kernels, experts = target.plan.kernels, target.cfg.experts
    cost = _dense_cost(active_rows, rows, target)
    if experts is None or active_rows == 1:
        return cost
    computed = active_rows
    if not kernels.native:
        computed = computed_rows(active_rows, rows, kernels)
    if kernels.native:
        read = distinct_experts(experts, computed)
        # Rows of an expert, which are multiplied together.
        together = computed * experts.per_token / read
    else:
        # XLA gathers the experts of a few rows, and sends more rows through all of them.
        few = computed * experts.per_token <= experts.count
        read, together = (computed * experts.per_token, 1) if few else (experts.count, active_rows)
    mixed = read / experts.per_token * _dense_cost(together, rows, target)
    share = _routed_bytes(target) / _bytes_read(target)
    return (1 - share) * cost + share * mixed


def _dense_cost(active_rows: float, rows: int, target: Placement) -> float:
    """`_built_in_cost` where all rows pass the same weights."""
    kernels = target.plan.kernels
    if kernels.platform != "cpu":
        return 1.0 + ROW_COST * (active_rows - 1)
    computed = active_rows if kernels.native else computed_rows(math.ceil(active_rows), rows, kernels)
    computed = min(computed, rows)
    most = max(CPU_PASS_COST)
    return float(np.interp(computed, [*CPU_PASS_COST], [*CPU_PASS_COST.values()])) * max(1.0, computed / most)


def _bytes_read(placement: Placement) -> float:
    """Bytes of weights that a pass of one row reads."""
    params = placement.params()
    layers = sum(_layer_bytes(placement, index, layer) for index, layer in enumerate(params["layers"]))
    # A pass reads one row of the embedding, unless that is the head, too.
    skipped = ("layers", "embed") if "head" in params else ("layers",)
    return layers + count_bytes({name: leaf for name, leaf in params.items() if name not in skipped})


def _routed_bytes(placement: Placement) -> float:
    """Bytes of the experts among them that the row is sent to."""
    layers = enumerate(placement.params()["layers"])
    return sum(
        _layer_bytes(placement, index, {name: layer[name] for name in ROUTED_PARAMS if name in layer})
        for index, layer in layers
        if placement.cfg.layer_experts(index) is not None
    )


def _layer_bytes(placement: Placement, index: int, layer: Params) -> float:
    """Bytes of some leaves of a layer that a pass of one row reads."""
    experts, total = placement.cfg.layer_experts(index), 0.0
    for name, leaf in layer.items():
        # A shape's first dimension is that of the experts, padding included.
        part = 1.0 if experts is None or name not in ROUTED_PARAMS else experts.per_token / leaf.shape[0]
        total += part * count_bytes(leaf)
    return total


def _priors() -> np.ndarray:
    model = np.array(PRIOR_RATE * 2)
    copies = np.array(PRIOR_COPY)
    return np.concatenate([model, model + AGREEMENT * (1 - model), copies, CONTRADICTION * copies]).astype(np.float32)


@pytree
class AcceptanceStats:
    """Observations of tokens of each kind, in this text and in earlier ones."""

    tried: Array  # float32 [KINDS], tokens that the verified text confirmed or refuted, with forgetting
    accepted: Array  # float32 [KINDS], those that it confirmed
    usual_tried: Array  # float32 [LAWS, KINDS], the same of earlier texts, greedy and sampled ones
    usual_accepted: Array  # float32 [LAWS, KINDS]
    # Drafts that were made where no copies paid: their number, and sums of the tokens that they brought, of their rows
    # and of their passes; float32 [4] of this text's last tokens, and [LAWS, 4] of all before.
    asked: Array
    usual_asked: Array
    latest: Array  # float32 [3], of the draft that is verified now: 1 if it counts, its rows, its passes
    law: Array  # int32 [], 1 if this text is sampled

    def note_draft(self, rows: Array, passes: Array, counts: Array) -> "AcceptanceStats":
        """Remember a draft whose outcome is to come, if it `counts`, bool []."""
        return dataclasses.replace(self, latest=counts * jnp.stack([jnp.float32(1), rows, passes]))

    def note_outcome(self, own: Array, verified: Array) -> "AcceptanceStats":
        """Count the latest draft by its `own` tokens that were right, of the tokens `verified` with it, int32 [] each.

        With these, earlier drafts of this text become some of all that were made.
        """
        # Nothing was verified where a draft was made ahead.
        counts, rows, passes = jnp.where(verified > 0, self.latest, 0.0)
        # Where no row was worth verifying, the draft brought nothing, whatever it proposed.
        brought = jnp.where(rows > 0, counts * jnp.minimum(own, verified - 1), 0.0)
        kept = FORGETTING**verified * self.asked
        return dataclasses.replace(
            self,
            asked=kept + jnp.stack([counts, brought, rows, passes]),
            usual_asked=self.usual_asked.at[self.law].add(self.asked - kept),
            latest=jnp.zeros(3),
        )

    def usual_draft(self, prior: Array) -> Array:
        """Tokens that a draft brings, its rows and its passes, float32 [3]: the `prior` where none was made.

        The tokens are an upper confidence bound.
        """
        before = self.usual_asked[self.law]
        known = self.asked + jnp.minimum(1.0, USUAL_WEIGHT / jnp.maximum(before[0], 1.0)) * before
        count = known[0] + PRIOR_WEIGHT
        usual = (known[1:] + PRIOR_WEIGHT * prior) / count
        return usual.at[0].add(OPTIMISM * jnp.sqrt(usual[0] / count))

    def next_text(self) -> "AcceptanceStats":
        """What is known when another text begins: this one is one of several."""

        def keep(tried: Array) -> Array:
            return jnp.minimum(1.0, USUAL_KEPT / jnp.maximum(tried, 1.0))

        tried, accepted, asked = self.all().values()
        share = jnp.stack([keep(part.sum(axis=1)) for part in jnp.split(tried, [COPIES, PLACES], axis=1)], axis=1)
        share, asked = share[:, GROUPS], keep(asked[:, :1]) * asked
        return dataclasses.replace(
            init_acceptance(), usual_tried=share * tried, usual_accepted=share * accepted, usual_asked=asked
        )

    def all(self) -> dict[str, Any]:
        """Tokens "tried" and "accepted" and drafts "asked" for, of this text and of earlier ones, as in `usual_*`."""
        here = np.arange(LAWS)[:, None] == self.law
        names = "tried", "accepted", "asked"
        return {name: getattr(self, f"usual_{name}") + here * getattr(self, name) for name in names}

    def update(self, kind: Array, tried: Array, accepted: Array) -> "AcceptanceStats":
        """Count what became of drafted tokens: their kinds, int32 [n], and which were confirmed, bool [n].

        `tried`, float32 or bool [n], is how much each counts that the verified text could confirm or refute.
        """
        tried = tried.astype(jnp.float32)
        # What becomes of copies makes nothing older that is known of the draft.
        own = jnp.array(GROUPS)[kind] == jnp.arange(3)[:, None]
        weight = FORGETTING ** ((own & accepted).sum(axis=1) + (own & (tried > 0)).any(axis=1))
        weight = weight[GROUPS]
        return dataclasses.replace(
            self,
            tried=(self.tried * weight).at[kind].add(tried),
            accepted=(self.accepted * weight).at[kind].add(accepted.astype(jnp.float32)),
        )

    def _expect(self, chosen: Any, prior: Any, total: bool = False) -> Array:
        """Rates of the chosen kinds: those of this text, drawn to those of earlier ones, and these to `prior`."""
        usual = self.usual_tried[self.law], self.usual_accepted[self.law]
        counts = [leaf[chosen] for leaf in (self.tried, self.accepted, *usual)]
        tried, accepted, usual_tried, usual_accepted = [leaf.sum() for leaf in counts] if total else counts
        usual = (usual_accepted + PRIOR_WEIGHT * prior) / (usual_tried + PRIOR_WEIGHT)
        weight = jnp.minimum(usual_tried + PRIOR_WEIGHT, USUAL_WEIGHT)
        return (accepted + weight * usual) / (tried + weight)

    def rates(self) -> Array:
        """Estimated chance that a token of each kind is accepted, once the walk comes to it; float32 [PLACES]."""
        rates = self._expect(np.s_[:PLACES], jnp.array(_priors()))
        model, copies = jnp.split(jnp.minimum(rates, 1.0), [COPIES])
        # A longer match is never worth less.
        return jnp.concatenate([model, jax.lax.cummax(copies.reshape(2, -1), axis=1).reshape(-1)])

    def place_ratios(self, beside: float) -> Array:
        """Tokens of a block that were accepted over those that were expected to be, float32 [KINDS - PLACES].

        `beside` is believed of those below a choice that is not the first, before anything is known.
        """
        prior = np.tile(np.repeat([1.0, beside], RANKS), DEPTHS).astype(np.float32)
        return self._expect(np.s_[PLACES:], prior)

    def mean_rate(self) -> Array:
        """Estimated chance of a first choice whose probability is not known yet, float32 []."""
        return self._expect(np.r_[0:CLASSES, AGREED : AGREED + CLASSES], PRIOR_MEAN, total=True)


def init_acceptance() -> AcceptanceStats:
    """Nothing observed."""
    kinds, usual, drafts, asked, latest = map(jnp.zeros, (KINDS, (LAWS, KINDS), 4, (LAWS, 4), 3))
    return AcceptanceStats(kinds, kinds, usual, usual, drafts, asked, latest, jnp.int32(0))


def class_of(logprob: Array) -> Array:
    """The kind of a first choice by a draft's log-probability of it, int32, of any shape."""
    return (jnp.exp(logprob)[..., None] >= jnp.array(EDGES)).sum(axis=-1, dtype=jnp.int32)


def copy_kind(length: Array) -> Array:
    """The kind of a copy after a match of so many tokens, int32, of any shape."""
    return COPIES + jnp.minimum(length, CONTRADICTED - 1)


def place_kind(depth: int, beside: Array, rank: Array) -> Array:
    """The kind of a block's token by its depth, whether it lies below a choice that is not the first, and its rank."""
    return PLACES + (2 * (min(depth, DEPTHS) - 1) + beside.astype(jnp.int32)) * RANKS + jnp.minimum(rank, RANKS - 1)
