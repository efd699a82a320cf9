"""Measured costs of passes and rounds, acceptance by depth, and the speed-up of chains that follows from them.
The speed-up is a round's expected tokens times the time of a plain token, over the round's time (docs/algorithms.md,
"Cost model").
"""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxspec.bench.microbench import PassTimer, median_times, time_pass, time_target_pass
from jaxspec.bench.prompts import BenchPrompt
from jaxspec.bench.run import encode_prompt
from jaxspec.config import SamplingParams
from jaxspec.methods.auto.settings import Auto
from jaxspec.methods.autoregressive import Autoregressive
from jaxspec.methods.chain import Chain
from jaxspec.methods.core.cost_model import ROUND_COST, fill_rows
from jaxspec.methods.core.round import StepOutput

ROWS = (1, 2, 3, 4, 6, 8, 12, 16)
CONTEXT = 256
PASS_REPEATS = 15
# Passes per sample, in one program: its dispatch belongs to a round, not to each pass.
PASSES = 4
LONGEST_CHAIN = 8
# Prompts that are answered to time rounds, most tokens of an answer, and least rounds with drafts for a median.
ROUND_PROMPTS, ROUND_TOKENS, ENOUGH_ROUNDS = 8, 48, 8

Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class Costs:
    """Median seconds of single passes after `CONTEXT` tokens, and what rounds cost apart from their passes."""

    target_s: Mapping[int, float]  # of the target, by number of rows
    draft_s: float  # of the draft, one row; 0 without a draft
    # Of a round with a draft, apart from its passes, in target passes of one row.
    round_cost: float | None = None  # at least 0; None where too few were seen
    plain_cost: float = 0.0  # the same of a plain token
    quicker: bool = False  # whether some rounds took less than their passes alone; such a cost is 0

    def pass_cost(self) -> tuple[float, ...]:
        """Target passes of 1, 2, ... rows over that of one row; never decreasing."""
        return fill_rows({rows: seconds / self.target_s[1] for rows, seconds in self.target_s.items()})

    @property
    def draft_cost(self) -> float:
        """A draft pass over a target pass, both of one row."""
        return round(self.draft_s / self.target_s[1], 4)

    def auto(self) -> Auto:
        """`auto` with these costs; one that was not measured stays at its default."""
        return Auto(pass_cost=self.pass_cost(), draft_cost=self.draft_cost, round_cost=self.round_cost)

    def report(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def lines(self, acceptance: Sequence[float]) -> list[str]:
        """For people; `acceptance` by depth of a chain, empty without a draft."""
        passes = ", ".join(f"{rows}: {1e3 * seconds:.1f}" for rows, seconds in self.target_s.items())
        lines = [f"target pass in ms by rows: {passes}"]
        if self.draft_s:
            lines.append(f"draft pass: {1e3 * self.draft_s:.2f} ms")
            lines.append("accepted by depth of a chain: " + ", ".join(f"{share:.2f}" for share in acceptance))
        drafted = "too few to tell" if self.round_cost is None else f"{self.round_cost:.3f}"
        others = f"a plain token {self.plain_cost:.3f}, a round with a draft {drafted}"
        lines.append(f"cost apart from passes, in one-row passes: {others}")
        if self.quicker:
            lines.append("rounds took less time than their passes alone: such a cost counts as 0")
        return lines


def measure_costs(llm: Any, prompts: Sequence[BenchPrompt], sampling: SamplingParams, progress: Progress) -> Costs:
    """Time passes of target and draft in turn, then rounds."""
    progress("single passes", 0, 1)
    models = llm.engine.models
    timers: dict[int, PassTimer] = {rows: time_target_pass(models.target, llm.params, rows, CONTEXT) for rows in ROWS}
    if models.draft is not None and llm.draft_params is not None:
        timers[0] = time_pass(models.draft, llm.draft_params, 1, CONTEXT, levels=LONGEST_CHAIN)
    medians = median_times(timers, PASS_REPEATS, dict.fromkeys(ROWS, PASSES) | {0: LONGEST_CHAIN})
    return measure_rounds(
        llm, Costs({rows: medians[rows] for rows in ROWS}, medians.get(0, 0.0)), prompts, sampling, progress
    )


def measure_rounds(
    llm: Any, costs: Costs, prompts: Sequence[BenchPrompt], sampling: SamplingParams, progress: Progress
) -> Costs:
    """Add what rounds cost apart from their passes: searches, bookkeeping, dispatch.
    Plain decoding and `auto`, with rounds at no cost so that it drafts a little more, answer a few prompts in turn. One
    dispatch runs while the one before is read, so the time between two reads is that of its rounds. Passes come off
    at the times in `costs`, scaled by one-row passes timed before each answer, since a machine's speed drifts. The
    median of the rest counts, and at least 0.
    """
    passes = costs.pass_cost()
    models = (llm.with_method(Autoregressive()), llm.with_method(dataclasses.replace(costs.auto(), round_cost=0.0)))
    one_row = time_target_pass(llm.engine.models.target, llm.params, 1, CONTEXT)
    one_row(PASSES)
    rest: tuple[list[float], list[float]] = [], []
    short = dataclasses.replace(sampling, max_tokens=min(ROUND_TOKENS, sampling.max_tokens or ROUND_TOKENS))
    for index, prompt in enumerate(prompts[:ROUND_PROMPTS]):
        progress("rounds", index, len(prompts[:ROUND_PROMPTS]))
        for model, found in zip(models, rest, strict=True):
            unit = statistics.median(one_row(PASSES) / PASSES for _ in range(PASS_REPEATS))
            for outputs, seconds in time_dispatches(model, encode_prompt(model, prompt), short):
                if all(output.drafted for output in outputs):
                    drafts = sum(output.draft_passes for output in outputs) * costs.draft_cost
                    spent = sum(passes[output.drafted] for output in outputs) + drafts
                    found.append((seconds / unit - spent) / len(outputs))
                elif model is models[0]:
                    found.append(seconds / unit / sum(len(output.tokens) for output in outputs) - 1)
    plain, drafted = (statistics.median(found) if found else 0.0 for found in rest)
    enough = len(rest[1]) >= ENOUGH_ROUNDS
    return dataclasses.replace(
        costs,
        plain_cost=round(max(0.0, plain), 4),
        round_cost=round(max(0.0, drafted), 4) if enough else None,
        quicker=plain < 0 or (enough and drafted < 0),
    )


def time_dispatches(llm: Any, ids: list[int], sampling: SamplingParams) -> Iterator[tuple[list[StepOutput], float]]:
    """Rounds of each dispatch but the first and the last (it is cut), with the seconds since the dispatch before."""
    engine, last = llm.engine, None
    engine.check_request(ids, sampling)
    engine.prepare(len(ids) + engine.token_limit(ids, sampling))
    with engine.open(llm.model_params, ids, sampling, sampling.seed or 0) as session:
        while not session.done:
            outputs = [session.step()]
            now = time.perf_counter()
            while session.ready and not session.done:
                outputs.append(session.step())
            tokens = {token for output in outputs for token in output.tokens}
            if session.done or not (sampling.ignore_eos or tokens.isdisjoint(llm.eos_ids)):
                break
            if last is not None:
                yield outputs, now - last
            last = now
    engine.settle()


def measure_acceptance(
    llm: Any, prompts: Sequence[BenchPrompt], sampling: SamplingParams, progress: Progress
) -> tuple[float, ...]:
    """Of the rounds of a long chain that accepted d - 1 tokens or more, the share that accepted d; by d from 1."""
    tried, accepted = [0] * LONGEST_CHAIN, [0] * LONGEST_CHAIN
    chain = llm.with_method(Chain(LONGEST_CHAIN))
    for index, prompt in enumerate(prompts):
        progress("acceptance of a chain", index, len(prompts))
        counters = chain.generate(encode_prompt(chain, prompt), sampling).stats.speculative_decoding
        for drafted, count in zip(counters["per_step_drafted"], counters["per_step_accepted"], strict=True):
            for depth in range(min(drafted, count + 1)):
                tried[depth] += 1
                accepted[depth] += depth < count
    return tuple(a / t if t else 0.0 for a, t in zip(accepted, tried, strict=True))


def predict_chain(costs: Costs, acceptance: Sequence[float], tokens: int) -> float:
    """Speed-up of a chain of so many tokens over plain decoding, by the cost model."""
    length = 1 + sum(itertools.accumulate(acceptance[:tokens], lambda reached, share: reached * share))
    other = ROUND_COST if costs.round_cost is None else costs.round_cost
    round_ = costs.pass_cost()[tokens] + tokens * costs.draft_cost + other
    return round(length * (1 + costs.plain_cost) / round_, 3)
