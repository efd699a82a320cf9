"""What is fastest here: measured step costs, predicted speeds, and the best predictions put to the proof.

1. Times of target passes of 1 to 16 rows and of a draft pass, alone, medians.
2. Acceptance: a long chain and `auto` answer the prompts once; their counters give the length that chains of every
   length would have reached.
3. Prediction by the cost model (ALGORITHMS 10): speed-up = E * t_target(1) / T_round.
4. Confirmation: plain decoding and the best predictions answer the prompts in turn; what counts is what was measured.
"""

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxspec.config import SamplingParams
from jaxspec.llm import LLM
from jaxspec.measure.bench import BASELINE, Column, measure
from jaxspec.measure.passes import time_pass, time_target_pass
from jaxspec.measure.prompts import BenchPrompt
from jaxspec.measure.report import make_report
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
# A method has to be this much faster than plain decoding to be worth its preset: less is noise.
LEAST_GAIN = 1.02

Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class StepCosts:
    """Seconds of single passes behind `CONTEXT` tokens, medians.

    Attributes:
      target_s: of the target, by number of rows.
      draft_s: of the draft, one row; 0 without a draft.
    """

    target_s: Mapping[int, float]
    draft_s: float

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
      best: the one to use: plain decoding where nothing gained.
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
    auto = Auto(pass_cost=costs.pass_cost(), draft_cost=costs.draft_cost)
    acceptance: tuple[float, ...] = ()
    if llm.draft_params is not None:
        progress("acceptance of a chain")
        acceptance = measure_acceptance(llm.with_method(Chain(LONGEST_CHAIN)), prompts, sampling)
    candidates = predict(costs, acceptance, auto)
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
    best = run[0] if (run[0].measured or 0) >= LEAST_GAIN else plain
    return Tuning(costs, acceptance, (*run, *rest), best, report)


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


def measure_acceptance(llm: LLM, prompts: Sequence[BenchPrompt], sampling: SamplingParams) -> tuple[float, ...]:
    """Share of rounds in which a chain's d-th token was accepted, among those that accepted the one before."""
    tried, accepted = [0] * LONGEST_CHAIN, [0] * LONGEST_CHAIN
    for prompt in prompts:
        message: Any = [{"role": "user", "content": prompt.turns[0]}]
        ids = llm.encode(message if llm.tokenizer.has_chat_template else prompt.turns[0])
        *_, event = llm.stream(ids, sampling)
        assert event.completion is not None
        counters = event.completion.stats.speculative_decoding
        assert counters is not None
        for drafted, count in zip(counters["per_step_drafted"], counters["per_step_accepted"], strict=True):
            for depth in range(min(drafted, count + 1)):
                tried[depth] += 1
                accepted[depth] += depth < count
    return tuple(a / t if t else 0.0 for a, t in zip(accepted, tried, strict=True))


def predict(costs: StepCosts, acceptance: Sequence[float], auto: Auto) -> list[Candidate]:
    """Candidates, with the speed-up that the cost model gives those whose length is known."""
    candidates = [Candidate("lookup", PromptLookup(), None), Candidate("auto", auto, None)]
    if not acceptance:
        return candidates
    passes, length, reached = costs.pass_cost(), 1.0, 1.0
    for tokens in range(1, LONGEST_CHAIN + 1):
        reached *= acceptance[tokens - 1]
        length += reached
        speedup = length / (passes[tokens] + tokens * costs.draft_cost)
        candidates.append(Candidate(f"chain {tokens}", Chain(tokens), round(speedup, 3)))
    candidates += [Candidate(f"specexec {budget}", SpecExec(budget), None) for budget in BUDGETS]
    return candidates


def _speedups(report: dict[str, Any]) -> dict[str, float]:
    columns = report["overall"]["columns"]
    return {label: (column["speedup"] or column["call_speedup"])["geometric_mean"] for label, column in columns.items()}
