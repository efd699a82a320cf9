"""What is fastest here: measured step costs, predicted speeds, and the best predictions put to the proof.

1. Times of target passes of 1 to 16 rows and of a draft pass, alone, medians.
2. What rounds cost besides their passes: the time from one round to the next, less its passes (`measure_rounds`).
3. Acceptance: a long chain answers the prompts once; its counters give the length that chains of every length would
   have reached.
4. Prediction by the cost model (ALGORITHMS 10): speed-up = E * T_plain / T_round.
5. Confirmation: plain decoding, `auto` as it is without a preset, what cannot be predicted and the best predictions
   answer the prompts in turn; what counts is what was measured.
"""

import contextlib
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxspec.bench.microbench import time_pass, time_target_pass
from jaxspec.bench.prompts import BenchPrompt
from jaxspec.bench.report import make_report
from jaxspec.bench.run import BASELINE, Column, measure
from jaxspec.config import SamplingParams
from jaxspec.engine import StepOutput
from jaxspec.llm import LLM
from jaxspec.methods.auto import Auto
from jaxspec.methods.autoregressive import Autoregressive
from jaxspec.methods.base import Method
from jaxspec.methods.chain import Chain
from jaxspec.methods.lookup import PromptLookup
from jaxspec.methods.specexec import SpecExec

ROWS = (1, 2, 3, 4, 6, 8, 12, 16)
CONTEXT = 256
PASS_REPEATS = 15
LONGEST_CHAIN = 8
BUDGETS = (8, 15)
CONFIRMED = 3
# Prompts that are answered to time rounds, most tokens of an answer, and rounds with drafts that are enough to go by.
ROUND_PROMPTS, ROUND_TOKENS, ENOUGH_ROUNDS = 8, 48, 8
# `auto` with its defaults, the shipped figures included where there are some; and with the figures of this machine.
DEFAULT, TUNED = "auto", "auto, measured costs"
# A method has to be this much faster than plain decoding, and than `auto` as it is, to be worth its preset: less is
# noise.
LEAST_GAIN = 1.02

Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class StepCosts:
    """Seconds of single passes behind `CONTEXT` tokens, medians, and what rounds cost besides; see `measure_rounds`.

    Attributes:
      target_s: of the target, by number of rows.
      draft_s: of the draft, one row; 0 without a draft.
      round_cost: of a round of `auto` with a draft besides its passes, in target passes of one row; None where too few
        were seen. Below 0 where passes take less time in a round than alone.
      plain_cost: the same of a round of plain decoding.
    """

    target_s: Mapping[int, float]
    draft_s: float
    round_cost: float | None = None
    plain_cost: float = 0.0

    def pass_cost(self) -> tuple[float, ...]:
        """Target passes of 1, 2, ... rows over that of one row; never decreasing."""
        rows, costs = list(self.target_s), [s / self.target_s[1] for s in self.target_s.values()]
        costs = list(itertools.accumulate(costs, max))
        filled = []
        for (low, cheap), (high, dear) in itertools.pairwise(zip(rows, costs, strict=True)):
            filled += [cheap + (dear - cheap) * n / (high - low) for n in range(high - low)]
        return tuple(round(cost, 3) for cost in [*filled, costs[-1]])

    @property
    def draft_cost(self) -> float:
        """A draft pass over a target pass, both of one row."""
        return round(self.draft_s / self.target_s[1], 4)

    def auto(self) -> Auto:
        """`auto` with these costs; one that was not measured stays at its default."""
        costs: dict[str, Any] = {"pass_cost": self.pass_cost(), "draft_cost": self.draft_cost}
        return Auto(**costs) if self.round_cost is None else Auto(**costs, round_cost=max(0.0, self.round_cost))


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A method and what the cost model says of it.

    Attributes:
      label: for tables.
      method: with its settings.
      predicted: speed-up over plain decoding; None where only running it tells.
      measured: geometric mean of the speed-up over prompts; None where it was not run.
    """

    label: str
    method: Method
    predicted: float | None
    measured: float | None = None


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What `tune` found.

    Attributes:
      costs: of single passes.
      acceptance: share of accepted tokens of a chain by depth; empty without a draft.
      candidates: every one, the fastest first, those that were not run last.
      best: the one to use: plain decoding where nothing gained, `auto` as it is where nothing gained on that.
      report: of the confirming run, as `jaxspec-bench` writes it.
    """

    costs: StepCosts
    acceptance: tuple[float, ...]
    candidates: tuple[Candidate, ...]
    best: Candidate
    report: dict[str, Any]


def tune(
    llm: LLM, prompts: Sequence[BenchPrompt], sampling: SamplingParams, repeats: int, command: str,
    progress: Progress = lambda what: None,
) -> Tuning:  # fmt: skip
    """Find the fastest method for a model, its draft and this machine.

    Args:
      llm: the model; its draft is tuned for if it has one.
      prompts: what is decoded.
      sampling: how, with `max_tokens`.
      repeats: of the confirming run.
      command: for the report.
      progress: told what is going on.
    """
    progress("single passes")
    costs = measure_steps(llm)
    progress("rounds")
    costs = measure_rounds(llm, costs, prompts, sampling)
    acceptance: tuple[float, ...] = ()
    if llm.draft_params is not None:
        progress("acceptance of a chain")
        acceptance = measure_acceptance(llm.with_method(Chain(LONGEST_CHAIN)), prompts, sampling)
    candidates = predict(costs, acceptance)
    # What cannot be predicted is run.
    ranked = sorted(candidates, key=lambda c: -(c.predicted or float("inf")))
    chosen = [c for c in ranked if c.predicted is None or c.predicted > 1]
    unpredicted = sum(c.predicted is None for c in chosen)
    chosen = chosen[: unpredicted + CONFIRMED]
    columns = [Column(BASELINE, Autoregressive()), *(Column(c.label, c.method) for c in chosen)]
    measured = measure(
        llm, columns, prompts, sampling, repeats, lambda what, done, total: progress(f"{what} ({done} of {total})")
    )
    draft = None if llm.draft_path is None else str(llm.draft_path)
    report = make_report(measured, command, str(llm.model_path), draft, llm.engine.target.plan.tensor)
    speedups = _speedups(report)
    run = [dataclasses.replace(c, measured=speedups[c.label]) for c in chosen]
    rest = [c for c in candidates if c.label not in {r.label for r in run}]
    plain = Candidate(BASELINE, Autoregressive(), 1.0, 1.0)
    run = sorted([plain, *run], key=lambda c: -(c.measured or 0))
    return Tuning(costs, acceptance, (*run, *rest), _choose(run), report)


def _choose(run: Sequence[Candidate]) -> Candidate:
    """The one to use, of those that were run, the fastest first."""
    plain, default = (next(c for c in run if c.label == label) for label in (BASELINE, DEFAULT))
    fastest = run[0].measured or 0
    if fastest < LEAST_GAIN:
        return plain
    return default if fastest < LEAST_GAIN * (default.measured or 0) else run[0]


def measure_steps(llm: LLM) -> StepCosts:
    """Time passes of target and draft in turn."""
    models = llm.engine.models
    runs: dict[int, Callable[..., float]] = {
        rows: time_target_pass(models.target, llm.params, rows, CONTEXT) for rows in ROWS
    }
    if models.draft is not None and llm.draft_params is not None:
        runs[0] = time_pass(models.draft, llm.draft_params, 1, CONTEXT, levels=LONGEST_CHAIN)
    for run in runs.values():
        run()
    samples: dict[int, list[float]] = {rows: [] for rows in runs}
    for _ in range(PASS_REPEATS):
        for rows, run in runs.items():
            # Several draft passes in one program: its start is part of a round, not of each pass.
            samples[rows].append(run(LONGEST_CHAIN) / LONGEST_CHAIN if rows == 0 else run())
    medians = {rows: statistics.median(values) for rows, values in samples.items()}
    return StepCosts({rows: medians[rows] for rows in ROWS}, medians.get(0, 0.0))


def measure_rounds(llm: LLM, costs: StepCosts, prompts: Sequence[BenchPrompt], sampling: SamplingParams) -> StepCosts:
    """Add what rounds cost besides their passes: searches, bookkeeping, dispatch, whatever the passes leave over.

    Plain decoding and `auto`, which takes rounds to cost nothing and so drafts a little more than it will, answer a few
    prompts in turn. One round runs while the one before is read, so that the time from one to the next is that of a
    round. The passes that its counters name are taken off at the times of `costs`, scaled by one-row passes timed
    before each answer, since a machine's speed drifts; the median of what remains counts. It holds whatever makes a
    pass in a round differ from one alone, too: what `auto` adds up is the time that rounds took.
    """
    passes = costs.pass_cost()
    models = (llm.with_method(Autoregressive()), llm.with_method(dataclasses.replace(costs.auto(), round_cost=0.0)))
    one_row = time_target_pass(llm.engine.models.target, llm.params, 1, CONTEXT)
    one_row()
    rest: tuple[list[float], list[float]] = [], []
    short = dataclasses.replace(sampling, max_tokens=min(ROUND_TOKENS, sampling.max_tokens or ROUND_TOKENS))
    for prompt in prompts[:ROUND_PROMPTS]:
        for model, found in zip(models, rest, strict=True):
            unit = statistics.median(one_row() for _ in range(PASS_REPEATS))
            for emitted, seconds in time_rounds(model, _encode(model, prompt), short):
                # Rounds of `auto` without a draft may share what a round costs among several tokens.
                if emitted.drafted or model is models[0]:
                    known = passes[emitted.drafted] + emitted.draft_passes * costs.draft_cost
                    found.append(seconds / unit - known)
    plain, drafted = (round(statistics.median(found), 4) if found else 0.0 for found in rest)
    return dataclasses.replace(costs, plain_cost=plain, round_cost=drafted if len(rest[1]) >= ENOUGH_ROUNDS else None)


def time_rounds(llm: LLM, ids: list[int], sampling: SamplingParams) -> Iterator[tuple[StepOutput, float]]:
    """What each round of an answer brought, and the seconds since the one before.

    The first has none before it, and the last is cut to the length of the answer: it does not say what it drafted.
    """
    engine = llm.engine
    engine.check_request(ids, sampling)
    room, last = engine.token_limit(ids, sampling), None
    engine.prepare(len(ids) + room)
    with contextlib.closing(engine.rounds(llm.model_params, ids, sampling, sampling.seed or 0)) as rounds:
        for emitted in rounds:
            now = time.perf_counter()
            room -= len(emitted.tokens)
            if room <= 0 or not (sampling.ignore_eos or set(llm.eos_ids).isdisjoint(emitted.tokens)):
                break
            if last is not None:
                yield emitted, now - last
            last = now
    engine.settle()


def measure_acceptance(llm: LLM, prompts: Sequence[BenchPrompt], sampling: SamplingParams) -> tuple[float, ...]:
    """Share of rounds in which a chain's d-th token was accepted, among those that accepted the one before."""
    tried, accepted = [0] * LONGEST_CHAIN, [0] * LONGEST_CHAIN
    for prompt in prompts:
        *_, event = llm.stream(_encode(llm, prompt), sampling)
        assert event.completion is not None
        counters = event.completion.stats.speculative_decoding
        assert counters is not None
        for drafted, count in zip(counters["per_step_drafted"], counters["per_step_accepted"], strict=True):
            for depth in range(min(drafted, count + 1)):
                tried[depth] += 1
                accepted[depth] += depth < count
    return tuple(a / t if t else 0.0 for a, t in zip(accepted, tried, strict=True))


def predict(costs: StepCosts, acceptance: Sequence[float]) -> list[Candidate]:
    """Candidates, with the speed-up that the cost model gives those whose length is known."""
    auto = costs.auto()
    candidates = [
        Candidate("lookup", PromptLookup(), None),
        Candidate(DEFAULT, Auto(), None),
        Candidate(TUNED, auto, None),
    ]
    if not acceptance:
        return candidates
    besides = auto.round_cost if costs.round_cost is None else costs.round_cost
    passes, length, reached = costs.pass_cost(), 1.0, 1.0
    for tokens in range(1, LONGEST_CHAIN + 1):
        reached *= acceptance[tokens - 1]
        length += reached
        round_ = passes[tokens] + tokens * costs.draft_cost + besides
        speedup = length * (1 + costs.plain_cost) / round_
        candidates.append(Candidate(f"chain {tokens}", Chain(tokens), round(speedup, 3)))
    candidates += [Candidate(f"specexec {budget}", SpecExec(budget), None) for budget in BUDGETS]
    return candidates


def _encode(llm: LLM, prompt: BenchPrompt) -> list[int]:
    message: Any = [{"role": "user", "content": prompt.turns[0]}]
    return llm.encode(message if llm.tokenizer.has_chat_template else prompt.turns[0])


def _speedups(report: dict[str, Any]) -> dict[str, float]:
    columns = report["overall"]["columns"]
    return {label: (column["speedup"] or column["call_speedup"])["geometric_mean"] for label, column in columns.items()}
