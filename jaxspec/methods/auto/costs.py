"""Costs of a pair's rounds on this machine: measured once, and kept beside the compiled programs.

The first start runs each kind of round a few times on a text of its own (`measure_rounds`), for half a second, or once.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.config import SamplingParams
from jaxspec.methods.auto.profiles import Learned, RoundTimes, load_learned, save_costs, save_learned
from jaxspec.methods.core.cost_model import PRIOR_MEAN, AcceptanceStats, CostModel
from jaxspec.methods.core.round import STEPS_PER_DISPATCH, ModelParams, StepOutput, first_verified, read_rounds
from jaxspec.methods.core.runner import RESTING, ROUNDS_PER_DISPATCH, SpeculativeRunner, SpeculativeState
from jaxspec.methods.core.timing import time_turns
from jaxspec.methods.core.verify import Draft
from jaxspec.results import Choice
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.transfer import place
from jaxspec.tree.tree import Batch

# Verified rows that are timed, as far as a batch has so many.
ROWS = (1, 2, 4, 8, 16, 32, 64)
# Equal rounds that are dispatched together and make one sample: their dispatch is hidden, as while decoding.
TOGETHER = 2
# Samples of each kind of round, after one that warms up; no further ones after so many seconds.
MOST_SAMPLES, ENOUGH_S = 6, 0.5
# Tokens of context at which rounds are timed, as far as the cache has room: attention over them makes rows dearer.
CONTEXT = 256
# Children of a node that the draft model proposes.
BRANCH = 2
# Tokens of each place of a block: below one that was accepted, further ones hardly ever are.
PLACE_BRANCH = 4
# Tokens after which what was learned is kept the first time; then each time that the number has doubled.
WORTH_KEEPING = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutoChoice(Choice):
    """The costs by which `auto` decides; their unit is a target pass of one row.

    Attributes:
      figures: source of the costs: "given", "measured" or "built in".
      pass_cost: costs of target passes of 1, 2, ... rows.
      round_cost: cost of a round apart from its passes.
      draft_cost: cost of a draft pass; None without a draft model.
      gain: speed of drafted rounds over plain decoding; None before both were measured.
    """

    figures: str
    pass_cost: Sequence[float]
    round_cost: float
    draft_cost: float | None = None
    gain: float | None = None


def measured_rows(num_rows: int) -> list[int]:
    """Verified rows that are timed for batches of `num_rows` rows, at least 2."""
    return sorted({rows for rows in ROWS if rows < num_rows} | {min(num_rows, ROWS[-1])})


def spare_slots(slots: int, num_rows: int) -> int:
    """What all rounds of one sample leave of a cache of so many slots, whatever is accepted; negative if too few."""
    most = TOGETHER * (sum(measured_rows(num_rows)) + STEPS_PER_DISPATCH + 2 * num_rows)
    most += ROUNDS_PER_DISPATCH * STEPS_PER_DISPATCH
    return slots - most - num_rows


def measure_rounds(
    runner: SpeculativeRunner, params: ModelParams, state: SpeculativeState | None, num_rows: int, length: int,
    now: Callable[[], float] = time.perf_counter,
) -> RoundTimes:  # fmt: skip
    """Time verifications, plain decoding and drafts in turn; `state` is donated.

    `length` is the most passes of a draft, 0 without one. Drafts are made as long as is wanted by the figures that they
    are weighed with, which the caller sets anew afterwards.
    """

    def turn() -> dict[Any, float]:
        nonlocal state
        sample, state = _sample(runner, params, state, num_rows, length, now)
        return sample

    samples = time_turns(turn, MOST_SAMPLES, enough_s=ENOUGH_S, now=now)
    # What else runs on the machine only adds to a time.
    least: dict[Any, float] = {}
    for sample in samples:
        least |= {name: min(seconds, least.get(name, seconds)) for name, seconds in sample.items()}
    verify_s = {name: seconds for name, seconds in least.items() if isinstance(name, int)}
    search_s = draft_s = 0.0
    if length:
        few, many = (least["passes", wanted] for wanted in (1, length))
        short, long = least["draft", 1], least["draft", length]
        draft_s = max(0.0, (long - short) / (many - few)) if many > few else short / max(few, 1)
        search_s = max(0.0, short - few * draft_s)
    passes = least.pop("shared passes", 0.0)  # of the draft, in each of the rounds that shared a dispatch
    if "shared" in least:
        alone = search_s + verify_s[1] - least["plain"]
        search_s -= max(0.0, alone - least["shared"] + passes * draft_s)
    return RoundTimes(least["plain"], verify_s, search_s, draft_s)


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
        self._profile = profile if spare_slots(self.slots, num_rows) >= 0 else None
        self.times = times
        learned = None if profile is None else load_learned(profile)
        self._tokens, self._keep_at = 0, WORTH_KEEPING
        self._use(weigh(times))
        if learned is not None:
            # Arrays of the host: those on a device are donated to the first text.
            rates: list[Any] = [np.array(counts, np.float32) for counts in (learned.tried, learned.accepted)]
            self.drafter.learned = AcceptanceStats(*rates)
        if self._is_due:
            self.programs = tuple(dict.fromkeys((*self.programs, *self.single)))

    @property
    def calibrated(self) -> bool:
        # Programs that are loaded beside a measured round would slow it: then the next text measures.
        return not self._is_due or any(program.is_coming() for program in self.programs)

    @property
    def _is_due(self) -> bool:
        return self._profile is not None and (self.times is None or self.times.is_due)

    def calibrate(self, params: ModelParams, state: SpeculativeState | None) -> SpeculativeState | None:
        if self.calibrated or self._profile is None:
            return state
        found = measure_rounds(self, params, state, self._num_rows, self._length)
        self.times = found if self.times is None else self.times.join(found)
        save_costs(self._profile, self.times)
        self._use(self._weigh(self.times))
        # The measured rounds say nothing of the texts to come.
        return self.start(0, None)

    def _use(self, costs: CostModel) -> None:
        self.costs = costs
        self.drafter.use_costs(costs)
        # A draft that is not expected to pay takes no prompt before it is asked.
        self._undrafted = 0 if costs.pays(PRIOR_MEAN, self._length) else RESTING

    def observe(self, state: SpeculativeState, outputs: Sequence[StepOutput]) -> None:
        super().observe(state, outputs)
        self._tokens += sum(len(output.tokens) for output in outputs)

    def close(self, state: SpeculativeState | None) -> None:
        if self._profile is None or state is None or self._tokens < self._keep_at:
            return
        self._keep_at = 2 * self._tokens
        if self.times is not None and self.timer is not None:
            times = self.times.after(self.timer.plain_s)
            if times != self.times:
                save_costs(self._profile, times)
        tried, accepted = (np.asarray(leaf).tolist() for leaf in (state.draft.stats.tried, state.draft.stats.accepted))
        save_learned(self._profile, Learned(tried, accepted))

    def report(self) -> AutoChoice:
        return AutoChoice(**self.costs.report(), gain=None if self.timer is None else self.timer.total_gain)


def _sample(
    runner: SpeculativeRunner, params: ModelParams, state: SpeculativeState | None, num_rows: int, length: int,
    now: Callable[[], float],
) -> tuple[dict[Any, float], SpeculativeState]:  # fmt: skip
    """Seconds of each kind of round, by number of rows or name, on a text that repeats nothing."""
    executor, drafter = runner.executor, runner.drafter
    limit = executor.placement.num_tokens
    text = np.random.default_rng(0).integers(0, max(1, limit // 2), num_rows, np.int32)
    unseen = itertools.count(limit - 1, -1)  # tokens after which nothing can be copied
    request = runner.place_request(SamplingParams(max_tokens=1 << 20, ignore_eos=True), 0, 1)
    state = runner.start(int(text[0]), state)
    target, draft, verified = state.target, state.draft, state.verified
    # What the cache holds does not matter to the times.
    context = np.int32(min(CONTEXT, spare_slots(runner.slots, num_rows)))
    cache = dataclasses.replace(target.cache, length=place(context, target.cache.length.sharding))
    target = dataclasses.replace(target, cache=cache)
    jax.block_until_ready((target, draft))
    seconds: dict[Any, float] = {}

    # One row first: after a few rounds without a draft such a round decodes several tokens.
    for rows in measured_rows(num_rows):
        batch = _chain(executor.placement, text[:rows], num_rows)
        start = now()
        for _ in range(TOGETHER):
            target, verified, round_ = executor.verify(params.target, target, batch, request)
        jax.block_until_ready(round_)
        seconds[rows] = (now() - start) / TOGETHER
    start, tokens = now(), 0
    for _ in range(TOGETHER):
        target, verified, round_, steps = executor.decode(params.target, target, request, STEPS_PER_DISPATCH)
        tokens += steps
    jax.block_until_ready(round_)
    seconds["plain"] = (now() - start) / tokens

    for wanted in sorted({1, length}) if length else ():
        drafter.use_costs(_costs_of_drafts(num_rows, BRANCH * wanted))
        last = [first_verified(executor.verified, next(unseen)) for _ in range(TOGETHER)]
        jax.block_until_ready(last)
        start, passes = now(), []
        for verified in last:
            target, draft, drafted = drafter.draft(params, target, draft, verified, request)
            passes.append(drafted.passes)
        jax.block_until_ready(passes)
        spent = (now() - start) / TOGETHER
        seconds["draft", wanted], seconds["passes", wanted] = spent, sum(map(int, passes)) / TOGETHER
    if runner.shared_rounds is not None:
        # Rounds that verify no draft: what each takes apart from its token, which is decoded plainly. As after a draft
        # that was right: later rounds would decode several tokens.
        drafter.use_costs(_costs_of_drafts(num_rows, 0))
        verified = first_verified(executor.verified, next(unseen))
        target = dataclasses.replace(target, idle=place(np.int32(0), target.idle.sharding))
        jax.block_until_ready((verified, target))
        start = now()
        target, draft, verified, rounds = runner.dispatch_rounds(
            params, target, draft, verified, request, ROUNDS_PER_DISPATCH
        )
        jax.block_until_ready(rounds)
        spent, found = now() - start, read_rounds(rounds)
        tokens = sum(len(output.tokens) for output in found)
        seconds["shared"] = max(0.0, spent - tokens * seconds["plain"]) / len(found)
        seconds["shared passes"] = sum(output.draft_passes for output in found) / len(found)
    return seconds, dataclasses.replace(state, target=target, draft=draft, verified=verified)


def _chain(placement: Placement, tokens: np.ndarray, num_rows: int) -> Draft:
    """A batch whose rows are one chain of int32 `tokens` `[n]`."""
    row, count = np.arange(num_rows, dtype=np.int32), len(tokens)
    used = row < count
    padded = np.zeros(num_rows, np.int32)
    padded[:count] = tokens
    parent = np.where(used, np.maximum(row - 1, 0), row).astype(np.int32)
    depth = np.where(used, row, 0).astype(np.int32)
    batch = Batch(padded, parent, depth, np.int32(count))  # pyright: ignore[reportArgumentType]
    shape = placement.array((), np.int32)
    return jax.tree.map(lambda leaf: place(leaf, shape.sharding), Draft(batch, np.int32(0)))  # pyright: ignore[reportArgumentType]


def _costs_of_drafts(num_rows: int, tokens: int) -> CostModel:
    """Figures by which a draft of so many tokens always pays, and no longer one does."""
    rows = np.arange(num_rows)
    return CostModel(np.where(rows <= tokens, 1 / (rows + 1), 1e3), round=0.0)
