"""Costs of a pair's rounds on this machine: measured once, and kept beside the compiled programs.

The first start runs each kind of round a few times on a text of its own (`measure_rounds`), for half a second.
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.config import MOST_TOKENS, SamplingParams
from jaxspec.methods.auto.online import CostFilter, differ
from jaxspec.methods.auto.profiles import RoundTimes, load_learned, measured_rows, save_costs, save_learned
from jaxspec.methods.core.cost_model import LAWS, PRIOR_MEAN, CostModel
from jaxspec.methods.core.round import (
    STEPS_PER_DISPATCH,
    ModelParams,
    StepOutput,
    count_bytes,
    first_verified,
    read_rounds,
)
from jaxspec.methods.core.runner import ROUNDS_PER_DISPATCH, SpeculativeRunner, SpeculativeState
from jaxspec.methods.core.sequence import CHUNKS, SequenceState
from jaxspec.methods.core.timing import Worth
from jaxspec.methods.core.verify import Draft, chain_draft
from jaxspec.results import Choice
from jaxspec.runtime.transfer import place, zeros_of

# Equal rounds that are dispatched together and make one sample: their dispatch is hidden, as while decoding.
TOGETHER = 2
# Samples of each kind of round; seconds that all of them take, warming up included.
MOST_SAMPLES, ENOUGH_S = 6, 0.45
# Seconds of a pass beside which dispatching it is nothing: then one round makes a sample. Bytes of a target whose pass
# alone takes as long as measuring may: its figures are the built-in ones.
LONG_PASS_S, MOST_BYTES = 0.03, 4 << 30
# Tokens of context at which rounds are timed, as far as the cache has room: attention over them makes rows dearer.
CONTEXT = 256
# Children of a node that the draft model proposes.
BRANCH = 2
# Tokens of each place of a block: below one that was accepted, further ones hardly ever are.
PLACE_BRANCH = 4
# Plain tokens that the end of a prompt, or of each of its pieces, may cost a draft which is fed hidden states.
MOST_OF_PROMPT = 4.0
# Tokens after which what was learned is kept the first time; then each time that the number has doubled.
WORTH_KEEPING = 64


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class AutoChoice(Choice):
    """The costs by which `auto` decides; their unit is a target pass of one row.

    Attributes:
      figures: source of the costs: "given", "measured" or "built in".
      pass_cost: costs of target passes of 1, 2, ... rows.
      round_cost: cost of a round apart from its passes.
      draft_cost: cost of a draft pass; None without a draft model.
      draft_overhead: cost of a draft apart from its passes; None without a draft model.
      gain: speed of drafted rounds over plain decoding; None before both were measured.
    """

    figures: str
    pass_cost: Sequence[float]
    round_cost: float
    draft_cost: float | None = None
    draft_overhead: float | None = None
    gain: float | None = None


def spare_slots(slots: int, num_rows: int, steps: int) -> int:
    """What all rounds of one sample leave of a cache of so many slots, whatever is accepted; negative if too few.

    `steps` are the tokens of a dispatch of plain decoding.
    """
    most = TOGETHER * (sum(measured_rows(num_rows)) + steps + 2 * num_rows + 4)
    most += steps + num_rows
    return slots - most - num_rows


def measure_rounds(
    runner: SpeculativeRunner, params: ModelParams, state: SpeculativeState | None, num_rows: int, length: int,
    expected: CostModel, now: Callable[[], float] = time.perf_counter,
) -> RoundTimes:  # fmt: skip
    """Time verifications, drafts and plain decoding in turn, for at most half a second in all; `state` is donated.

    `length` is the most passes of a draft, 0 without one. Rounds for which there is no time, by the `expected` costs,
    are not measured; the more important ones come first. The caller sets the figures of drafts anew afterwards.
    """
    start, rounds = now(), _Rounds(runner, params, state, num_rows, now)
    # The first pass warms up, and says how long one takes. What else runs on the machine only adds to a time.
    least: dict[Any, float] = rounds.verify(1, 1)
    together = TOGETHER if least[1] < LONG_PASS_S else 1
    rows = measured_rows(num_rows)
    verifications = [(rounds.verify, count, float(expected.passes[count - 1])) for count in rows]
    lengths = sorted({1, length}) if length else []
    first = [*verifications[:1], *((rounds.draft, one, 1 + expected.round + one * expected.draft) for one in lengths)]
    first += verifications[1:2]
    rest: list[tuple[Any, int, float]] = [(rounds.plain, STEPS_PER_DISPATCH, STEPS_PER_DISPATCH)]
    if runner.shared_rounds is not None:
        most = ROUNDS_PER_DISPATCH // 2
        rest.append((rounds.shared, most, most * (1 + expected.round + length * expected.draft) / together))
    rest += [*verifications[2:], *[(rounds.draft, 0, 1 + expected.round)] * bool(length)]
    cold = {rounds.draft, rounds.plain, rounds.shared}
    for number in range(MOST_SAMPLES):
        rounds.begin(rounds.state)
        # Where a sample is one round, two samples of a few figures are worth more than one of each.
        for measure, amount, cost in first + (rest if number or together > 1 else []):
            warming = measure in cold  # with one more round of one token
            if now() - start + least[1] * (together * cost + warming) < ENOUGH_S:
                if warming:
                    measure(1, 1)
                    cold.remove(measure)
                found = measure(amount, together)
                for name, seconds in found.items():
                    least[name] = min(seconds, least[name]) if name in least else seconds
    verify_s = {count: least[count] for count in rows if count in least}
    # Of a target that is too slow to decode several tokens here, a dispatch is little beside them.
    plain_s = least.get("plain", verify_s[1])
    if length and ("draft", length) not in least:
        return RoundTimes(plain_s, verify_s, None, 0.0)
    search_s = draft_s = overhead_s = 0.0
    if length:
        few, many = (least["passes", wanted] for wanted in (1, length))
        short, long = (max(0.0, least["draft", wanted] - verify_s[1]) for wanted in (1, length))
        draft_s = max(0.0, (long - short) / (many - few)) if many > few else short / max(few, 1)
        begun_s = max(0.0, short - few * draft_s)
        # A draft of no passes is the search alone. What else a draft costs is overhead.
        search_s = min(begun_s, max(0.0, least.get(("draft", 0), math.inf) - verify_s[1]))
        overhead_s = begun_s - search_s
    if "shared" in least:
        # Apart from their tokens, which are decoded plainly, and from the draft's passes in each of them.
        shared = max(0.0, least["shared"] - least["shared tokens"] * plain_s) + least["shared passes"] * draft_s
        search_s -= max(0.0, search_s + verify_s[1] - plain_s - shared)
    return RoundTimes(plain_s, verify_s, search_s, draft_s, overhead_s)


class _Rounds:
    """Rounds of each kind on a text that repeats nothing; each method gives their seconds, by rows or name."""

    def __init__(
        self, runner: SpeculativeRunner, params: ModelParams, state: SpeculativeState | None, num_rows: int,
        now: Callable[[], float],
    ):  # fmt: skip
        """Begin a text; `state` is donated."""
        self._runner, self._params, self._num_rows, self._now = runner, params, num_rows, now
        limit = runner.executor.placement.num_tokens
        self._text = np.random.default_rng(0).integers(0, max(1, limit // 2), num_rows, np.int32)
        self._unseen = itertools.count(limit - 1, -1)  # tokens after which nothing can be copied
        self._request = runner.place_request(SamplingParams(max_tokens=1 << 20, ignore_eos=True), 0, 1)
        self.begin(state)

    def begin(self, state: SpeculativeState | None) -> None:
        """Begin the text in the buffers of `state`; what the cache holds does not matter to the times."""
        runner = self._runner
        self.state = state = runner.start(int(self._text[0]), state)
        context = np.int32(min(CONTEXT, spare_slots(runner.slots, self._num_rows, runner.steps)))
        cache = state.target.cache
        cache = dataclasses.replace(cache, length=place(context, cache.length.sharding))
        # What is known of drafts would say how long one is worth making.
        draft = dataclasses.replace(state.draft, stats=zeros_of(state.draft.stats))
        self._keep(target=dataclasses.replace(state.target, cache=cache), draft=draft)
        jax.block_until_ready(self.state)

    def _batch(self, rows: int) -> Draft:
        home = self._runner.executor.verified.count.sharding
        return jax.tree.map(lambda leaf: place(leaf, home), chain_draft(self._text[:rows], self._num_rows))

    def _target(self) -> SequenceState:
        """The target as long before a round of one row decodes several tokens."""
        idle: Any = np.int32(-ROUNDS_PER_DISPATCH)
        return dataclasses.replace(self.state.target, idle=idle)

    def verify(self, rows: int, count: int) -> dict[Any, float]:
        executor, batch, target = self._runner.executor, self._batch(rows), self._target()
        jax.block_until_ready((target, batch))
        start = self._now()
        for _ in range(count):
            target, verified, round_ = executor.verify(self._params.target, target, batch, self._request)
        jax.block_until_ready(round_)
        seconds = self._now() - start
        self._keep(target=target, verified=verified)
        return {rows: seconds / count}

    def plain(self, tokens: int, count: int) -> dict[Any, float]:
        executor, target = self._runner.executor, self.state.target
        start, done = self._now(), 0
        for _ in range(count):
            target, verified, round_, steps = executor.decode(self._params.target, target, self._request, tokens)
            done += steps
        jax.block_until_ready(round_)
        seconds = self._now() - start
        self._keep(target=target, verified=verified)
        return {"plain": seconds / done}

    def draft(self, wanted: int, count: int) -> dict[Any, float]:
        """Drafts of up to `wanted` passes, each before a pass of the target, which evicts their weights as usual."""
        runner, state = self._runner, self.state
        runner.drafter.use_costs(_costs_of_drafts(self._num_rows, BRANCH * wanted))
        last = [first_verified(runner.executor.verified, next(self._unseen)) for _ in range(count)]
        target, draft, passes, batch = self._target(), state.draft, [], self._batch(1)
        jax.block_until_ready((last, target, batch))
        start = self._now()
        for verified in last:
            target, draft, drafted = runner.drafter.draft(self._params, target, draft, verified, self._request)
            passes.append(drafted.passes)
            target, _, round_ = runner.executor.verify(self._params.target, target, batch, self._request)
        jax.block_until_ready(round_)
        seconds = self._now() - start
        self._keep(target=target, draft=draft)
        return {("draft", wanted): seconds / count, ("passes", wanted): sum(map(int, passes)) / count}

    def shared(self, wanted: int, count: int) -> dict[Any, float]:
        """A dispatch of up to `wanted` rounds that verify no draft."""
        runner, state = self._runner, self.state
        runner.drafter.use_costs(_costs_of_drafts(self._num_rows, 0))
        verified, target = first_verified(runner.executor.verified, next(self._unseen)), self._target()
        jax.block_until_ready((verified, target))
        start = self._now()
        target, draft, verified, rounds = runner.dispatch_rounds(
            self._params, target, state.draft, verified, self._request, wanted
        )
        jax.block_until_ready(rounds)
        seconds, found = self._now() - start, read_rounds(rounds)
        self._keep(target=target, draft=draft, verified=verified)
        tokens, passes = sum(len(one.tokens) for one in found), sum(one.draft_passes for one in found)
        each = {"shared": seconds, "shared tokens": tokens, "shared passes": passes}
        return {name: total / len(found) for name, total in each.items()}

    def _keep(self, **parts: Any) -> None:
        self.state = dataclasses.replace(self.state, **parts)


class MeasuringRunner(SpeculativeRunner):
    """A `SpeculativeRunner` that measures what its rounds cost where nothing was measured yet.

    What is learned of drafts is kept for later processes.
    """

    def __init__(
        self, *arguments: Any, profile: Path | None, times: RoundTimes | None, length: int,
        weigh: Callable[[RoundTimes | None], CostModel], num_rows: int, **settings: Any,
    ):  # fmt: skip
        """See `SpeculativeRunner`; `profile` is the file for what is measured, None to measure nothing.

        `times` were measured before. `length` is that of the longest chain, 0 without a draft. `weigh` makes the
        `costs` that rounds are weighed with of what was measured.
        """
        super().__init__(*arguments, num_rows=num_rows, **settings)
        self._num_rows, self._length, self._weigh = num_rows, length, weigh
        self._profile = profile if spare_slots(self.slots, num_rows, self.steps) >= 0 else None
        self.times = times
        self.drafter.learned = None if profile is None else load_learned(profile)
        self._tokens, self._keep_at = 0, WORTH_KEEPING
        # One is for greedy texts, and one for sampled ones.
        self.worths, learned = (Worth(), Worth()), self.drafter.learned
        self._usual = np.zeros((LAWS, 4)) if learned is None else learned["asked"]
        self._use(weigh(times))
        self._filter = CostFilter(self.costs)
        small = count_bytes(self.executor.placement.params()) <= MOST_BYTES
        self.measures = self._profile is not None and small and times is None
        if self.measures:
            self.programs = tuple(dict.fromkeys((*self.programs, *self.single)))

    def calibrate(self, params: ModelParams, state: SpeculativeState | None) -> SpeculativeState | None:
        if not self.measures or self._profile is None:
            return state
        self.times = measure_rounds(self, params, state, self._num_rows, self._length, self._weigh(None))
        self.measures = False
        save_costs(self._profile, self.times)
        self._use(self._weigh(self.times))
        self._filter = CostFilter(self.costs)
        # The measured rounds say nothing of the texts to come.
        return self.start(0, None)

    def _use(self, costs: CostModel) -> None:
        self.costs = costs
        self.drafter.use_costs(costs)
        for worth, (n, *usual) in zip(self.worths, self._usual, strict=True):
            worth.believe(costs.gain(*np.divide(usual, n)) if n else costs.chain_gain(PRIOR_MEAN, self._length))

    @property
    def most_taken(self) -> int:
        if not self.drafter.rests:
            return MOST_TOKENS
        most = (MOST_OF_PROMPT - self.costs.round) / max(self._token_taken, 1e-6)
        return max(CHUNKS[0], int(most))

    def worth_taking(self, law: int, tokens: int, most: float) -> float:
        return self.worths[law].taking(self.costs.round + tokens * self._token_taken, most)

    @property
    def _token_taken(self) -> float:
        """What each token of a prompt costs the draft: as a further row the target, each over its own pass."""
        return self.costs.row * self.costs.draft

    def observe(self, state: SpeculativeState, outputs: Sequence[StepOutput]) -> None:
        super().observe(state, outputs)
        seconds, plain_s = (None, None) if self.timer is None else (self.timer.latest_s, self.timer.plain_s)
        state.host.gained += self.worths[state.host.law].note(outputs, seconds, plain_s)
        costs = self._filter.observe(outputs, seconds) if self.costs.source == "measured" else None
        if costs is not None and differ(costs, self.costs):
            self._use(costs)

    def close(self, state: SpeculativeState | None) -> None:
        if state is not None and state.host.begun:
            host = state.host
            self._tokens += host.read
            self.worths[host.law].end_text(host.read - host.copied, host.pending is None, host.gained)
            host.pending = None  # the next turn begins without a prompt that was not taken
        if self._profile is None or state is None or self._tokens < self._keep_at:
            return
        self._keep_at = 2 * self._tokens
        times = self.latest_times()
        if times is not None and times is not self.times:
            save_costs(self._profile, times)
        save_learned(self._profile, jax.device_get(state.draft.stats).all())

    def latest_times(self) -> RoundTimes | None:
        """What was measured, as rounds have corrected it."""
        costs, plain_s = self._filter.costs(), self._filter.plain_s
        return self.times if self.times is None or plain_s is None else self.times.corrected(costs, plain_s)

    def report(self) -> AutoChoice:
        return AutoChoice(**self.costs.report(), gain=None if self.timer is None else self.timer.total_gain)


def _costs_of_drafts(num_rows: int, tokens: int) -> CostModel:
    """Figures by which a draft of so many tokens always pays, and no longer one does."""
    rows = np.arange(num_rows)
    return CostModel(np.where(rows <= tokens, 1 / (rows + 1), 1e3), round=0.0)
