"""Costs of a pair's rounds on this machine: measured once, and kept beside the compiled programs.

The first start runs each kind of round a few times on a text of its own (`measure_rounds`), for half a second.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.config import MOST_TOKENS, SamplingParams
from jaxspec.methods.auto.online import DRAFT_CHEAPER, CostFilter
from jaxspec.methods.auto.profiles import RoundTimes, load_learned, measured_rows, save_costs, save_learned
from jaxspec.methods.core.cost_model import LAWS, CostModel
from jaxspec.methods.core.round import ModelParams, StepOutput, count_bytes, first_verified, read_rounds
from jaxspec.methods.core.runner import SpeculativeRunner, SpeculativeState, decode_one
from jaxspec.methods.core.sequence import ABSENT, CHUNKS, SequenceState
from jaxspec.methods.core.timing import Worth
from jaxspec.results import Choice
from jaxspec.runtime.transfer import zeros_of

# Rounds of a sample, at most, and of one of drafts where rounds share dispatches. The first of several is not timed:
# while it runs the others are dispatched, as while decoding, and a processor is slower just after a rest.
SAMPLE, DRAFTED_SAMPLE = 3, 4
# Samples of each kind of round; seconds that all of them take, warming up included.
MOST_SAMPLES, ENOUGH_S = 6, 0.45
# Seconds of a pass beside which dispatching it is nothing: then one round makes a sample. Bytes of a target whose pass
# alone takes as long as measuring may: its figures are the built-in ones.
LONG_PASS_S, MOST_BYTES = 0.03, 4 << 30
# Tokens of context at which rounds are timed, as far as the cache has room: attention over them makes rows dearer.
CONTEXT = 256
# Tokens after which the text of these rounds repeats itself.
PERIOD = 64
# Children of a node that the draft model proposes.
BRANCH = 2
# Tokens of each place of a block: below one that was accepted, further ones hardly ever are.
PLACE_BRANCH = 4
# Plain tokens that the end of a prompt, or of each of its pieces, may cost a draft which is fed hidden states.
MOST_OF_PROMPT = 4.0
# The chance of a first choice by which a draft takes its first prompts, of greedy and of sampled texts.
FIRST_RATES = 0.6, 0.5
# Tokens after which what was learned is kept the first time; then each time that the number has doubled.
WORTH_KEEPING = 64


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class AutoChoice(Choice):
    """The costs by which `auto` decides; their unit is a target pass of one row.

    Attributes:
      figures: source of the costs: "given", "measured" or "built in", or two of these.
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
    """What the rounds of one sample leave of a cache of so many slots, whatever is accepted; negative if too few.

    `steps` are the tokens of a dispatch of plain decoding.
    """
    return slots - SAMPLE * (num_rows + steps) - num_rows


def measure_rounds(
    runner: SpeculativeRunner, params: ModelParams, state: SpeculativeState | None, length: int, costs: CostModel,
    now: Callable[[], float] = time.perf_counter,
) -> CostFilter:  # fmt: skip
    """Correct `costs` by rounds of each kind in turn, for at most half a second in all; `state` is donated.

    `length` is 0 without a draft model. Rounds for which there is no time, by the costs, are left out; the more
    important ones come first. The caller sets the figures of drafts anew afterwards.
    """
    start, rounds, most = now(), _Rounds(runner, params, state, now), costs.passes.size - 1
    # The first round warms up. The second one, or a slow first one, says how long a pass takes.
    *_, plain_s = rounds.run(0, 0, 1)
    if plain_s < ENOUGH_S / 3:
        *_, plain_s = rounds.run(0, 0, 1)
    is_short, steps, shares = plain_s < LONG_PASS_S, runner.steps, runner.shared_rounds is not None
    found = CostFilter(dataclasses.replace(costs, source="measured"), plain_s)
    copied = [(rows - 1, 0) for rows in measured_rows(most + 1)[1:]]
    # A draft of one pass: what others cost is learned while decoding.
    often, once = [(0, 0), *copied[:1], *[(min(BRANCH, most), 1)] * bool(length), *copied[1:2]], copied[2:]
    for number in range(MOST_SAMPLES):
        for tokens, passes in often if number else often + once:
            count = DRAFTED_SAMPLE if passes and shares else SAMPLE if tokens and (tokens, passes) in often else 2
            count, several = (count, not tokens) if is_short else (1, False)
            if now() - start + plain_s * (count * costs.spent(tokens, passes) + (steps - 1) * several) < ENOUGH_S:
                untimed, outputs, seconds = rounds.run(tokens, passes, count, several)
                found.observe(untimed, None)
                found.observe(outputs, seconds)
        costs, plain_s = found.costs(), found.plain_s or plain_s
    return found


class _Rounds:
    """Rounds of each kind, on a text of their own."""

    def __init__(
        self, runner: SpeculativeRunner, params: ModelParams, state: SpeculativeState | None, now: Callable[[], float]
    ):
        """`state` is donated."""
        self._runner, self._params, self._now, self._state = runner, params, now, state
        self._num_rows, limit = runner.drafter.shapes.batch.rows, runner.executor.placement.num_tokens
        # The text repeats itself, so that as many tokens can be copied as are wanted. Some tokens are not part of it.
        context = min(CONTEXT, spare_slots(runner.slots, self._num_rows, runner.steps))
        self._text = np.arange(context + SAMPLE, dtype=np.int32) % max(1, min(PERIOD, limit - SAMPLE))
        self._unseen = [limit - 1 - number for number in range(SAMPLE)]
        self._request = runner.place_request(SamplingParams(max_tokens=1 << 20, ignore_eos=True), 0, 1)

    def run(
        self, tokens: int, passes: int, count: int, several: bool = False
    ) -> tuple[list[StepOutput], list[StepOutput], float]:
        """Rounds that verify so many `tokens`, of a draft of so many `passes` or copied, and their seconds.

        Without any, a round decodes one token; where `several`, the last one as many as a plain dispatch. If there are
        more than one, the first is not timed, and stands apart. Drafts are of a few tokens: four rounds of them fit.
        """
        runner, drafter, request = self._runner, self._runner.drafter, self._request
        rows, context = np.arange(self._num_rows), len(self._text) - SAMPLE
        # By these figures a draft of so many tokens always pays, and no longer one does.
        drafter.use_costs(CostModel(np.where(rows <= tokens, 1 / (rows + 1), 1e3), round=0.0))
        drafter.rest(not passes)
        state = runner.start(0, self._state)
        draft, _ = drafter.resume(self._params, state.draft, self._text[: context + 1], 0)
        # What is known of drafts would say how long one is worth making.
        draft = dataclasses.replace(draft, stats=zeros_of(draft.stats))
        target = _as_long(state.target, context)
        if draft.sequence is not None and draft.sequence.seen is ABSENT:
            draft = dataclasses.replace(draft, sequence=_as_long(draft.sequence, context))
        roots = self._unseen if passes or not tokens else self._text[context:].tolist()
        # Of each dispatch its number of rounds. What is copied has to be there, so that copies have one each.
        dispatches = [1, count - 1] if count == DRAFTED_SAMPLE else [1] * count
        shapes, rounds = runner.executor.verified, []
        jax.block_until_ready((target, draft))
        start = self._now()
        for number, size in enumerate(dispatches):
            target = target if several and number else decode_one(target)
            before = first_verified(shapes, roots[number])
            target, draft, last, round_ = runner.dispatch_rounds(self._params, target, draft, before, request, size)
            rounds.append(round_)
        self._state = dataclasses.replace(state, target=target, draft=draft, verified=last)
        untimed = read_rounds(rounds.pop(0)) if count > 1 else []
        start = self._now() if count > 1 else start
        outputs = [output for round_ in rounds for output in read_rounds(round_)]
        return untimed, outputs, self._now() - start


def _as_long(sequence: SequenceState, tokens: int) -> SequenceState:
    """A model's side of a text of so many tokens, of which it lacks none; what its cache holds changes no time."""
    length: Any = np.int32(tokens)  # the next program takes it
    return dataclasses.replace(sequence, cache=dataclasses.replace(sequence.cache, length=length))


class MeasuringRunner(SpeculativeRunner):
    """A `SpeculativeRunner` that measures what its rounds cost where nothing was measured yet.

    What is learned of drafts is kept for later processes.
    """

    def __init__(
        self, *arguments: Any, profile: Path | None, times: RoundTimes | None, length: int, built_in: CostModel,
        weigh: Callable[[RoundTimes | None], CostModel], num_rows: int, worths: Sequence[Worth] = (), **settings: Any,
    ):  # fmt: skip
        """See `SpeculativeRunner`; `profile` is the file for what is measured, None to measure nothing.

        `times` were measured before. `length` is that of the longest chain, 0 without a draft. `weigh` makes the
        `costs` that rounds are weighed with of what was measured. It is measured from the `built_in` ones on.
        `worths` are those of an earlier runner.
        """
        super().__init__(*arguments, num_rows=num_rows, **settings)
        self._length, self._built_in, self._weigh = length, built_in, weigh
        self._profile = profile if spare_slots(self.slots, num_rows, self.steps) >= 2 * PERIOD else None
        self.times = times
        self.drafter.learned = None if profile is None else load_learned(profile)
        self._tokens, self._keep_at = 0, WORTH_KEEPING
        # One is for greedy texts, and one for sampled ones.
        learned = self.drafter.learned
        known = [Worth() if learned is None else Worth(learned["asked"][law]) for law in range(LAWS)]
        self.worths = worths or known
        self._use(weigh(times))
        self._filter = CostFilter(self.costs)
        small = count_bytes(self.executor.placement.params()) <= MOST_BYTES
        self.measures = self._profile is not None and small and times is None and self.costs.source != "given"

    def calibrate(self, params: ModelParams, state: SpeculativeState | None) -> SpeculativeState | None:
        if not self.measures or self._profile is None:
            return state
        self._filter = measure_rounds(self, params, state, self._length, self._built_in)
        self.measures, self.times = False, self.latest_times()
        assert self.times is not None
        save_costs(self._profile, self.times)
        self._use(self._weigh(self.latest_times(DRAFT_CHEAPER)))
        # The measured rounds say nothing of the texts to come.
        return self.start(0, None)

    def _use(self, costs: CostModel) -> None:
        self.costs = costs
        self.drafter.use_costs(costs)
        if self._length:
            for worth, rate in zip(self.worths, FIRST_RATES, strict=True):
                worth.believe(costs, rate, self._length)

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
        allowed, _ = state.host.dispatched[0]
        super().observe(state, outputs)
        seconds, plain_s = (None, None) if self.timer is None else (self.timer.latest_s, self.timer.plain_s)
        if allowed is not None:  # drafts that a constraint refused say nothing of others
            state.host.gained += self.worths[state.host.law].note(outputs, seconds, plain_s)
        costs = self._filter.observe(outputs, seconds) if self.costs.source == "measured" else None
        if costs is not None and costs is not self.costs:
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
        if times is not None and times is not self.times and self.costs.source == "measured":
            save_costs(self._profile, times)
        save_learned(self._profile, jax.device_get(state.draft.stats).all())

    def latest_times(self, optimism: float = 0.0) -> RoundTimes | None:
        """What was measured, as rounds have corrected it; `optimism` is that of `CostFilter.costs`."""
        costs, plain_s = self._filter.costs(optimism), self._filter.plain_s
        return self.times if plain_s is None else RoundTimes.of(costs, plain_s)

    def report(self) -> AutoChoice:
        return AutoChoice(**self.costs.report(), gain=None if self.timer is None else self.timer.total_gain)
