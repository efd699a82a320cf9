"""Candidates for a target whose layers are streamed: trees of how many draft tokens pay for its passes."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxspec.bench.microbench import median_times, time_pass, time_target_pass
from jaxspec.bench.prompts import BenchPrompt
from jaxspec.bench.run import encode_prompt
from jaxspec.config import SamplingParams
from jaxspec.errors import ConfigError
from jaxspec.methods.auto.settings import Auto
from jaxspec.methods.base import Method
from jaxspec.methods.core.cost_model import USUAL_RATES, tree_passes
from jaxspec.methods.registry import make_method
from jaxspec.methods.specexec import SpecExec
from jaxspec.tune.run import CONTEXT, DEFAULT, Candidate, Progress, Trial, label_of

BUDGETS = tuple(budget for budget in USUAL_RATES if budget > 1)
# Tokens per pass are measured with this tree, on so many prompts; those of others are taken to keep their usual ratios.
PROBED, PROBE_PROMPTS, PROBE_TOKENS = 64, 4, 24
# A streamed pass takes long, and varies little: so many are timed for each number of rows.
PASS_REPEATS, DRAFT_REPEATS = 3, 9


@dataclasses.dataclass(frozen=True)
class StreamCosts:
    """Seconds of passes after `CONTEXT` tokens, and tokens per pass.

    Attributes:
      plain_s: a streamed pass of one row.
      pass_s: the same by draft tokens, the root added.
      draft_s: a draft pass, by the draft tokens of the tree that it grows.
      rates: tokens per target pass, by draft tokens.
    """

    plain_s: float
    pass_s: Mapping[int, float]
    draft_s: Mapping[int, float]
    rates: Mapping[int, float]

    def predict(self, budget: int) -> float:
        """Speed-up of SpecExec with so many draft tokens over plain decoding."""
        drafting = tree_passes(budget, SpecExec(budget).draft_rows) * self.draft_s[budget]
        return round(self.rates[budget] * self.plain_s / (self.pass_s[budget] + drafting), 3)

    def lines(self) -> list[str]:
        """For people."""
        passes = ", ".join(f"{budget}: {seconds:.3f}" for budget, seconds in self.pass_s.items())
        drafts = ", ".join(f"{budget}: {1e3 * seconds:.2f}" for budget, seconds in self.draft_s.items())
        rates = ", ".join(f"{budget}: {rate:.2f}" for budget, rate in self.rates.items())
        return [
            f"streamed pass of one row: {self.plain_s:.3f} s; in s by draft tokens: {passes}",
            f"draft pass in ms by draft tokens of the tree: {drafts}",
            f"tokens per pass by draft tokens, from those of {PROBED}: {rates}",
        ]


def tune_streamed(
    llm: Any, name: str | None, prompts: Sequence[BenchPrompt], sampling: SamplingParams, progress: Progress
) -> Iterator[Trial]:
    """The trial of a streamed target: `auto`, and SpecExec with predictions; or the variants of a method `name`.

    Trees for which the memory of `device_memory` does not suffice are left out, with a line that says so.
    """
    models = llm.engine.models
    if name not in (None, "specexec", "auto"):
        methods = make_method(name).variants(models)
        yield Trial(llm, [Candidate(label_of(method), method) for method in methods])
        return
    auto = [] if name == "specexec" else [Candidate(DEFAULT, Auto())]
    if models.draft is None:
        if name == "specexec":
            raise ConfigError("specexec needs a draft model: give one")
        yield Trial(llm, auto)
        return
    budgets, left_out = [], []
    for budget in BUDGETS:
        (budgets if _fits(llm, SpecExec(budget)) else left_out).append(budget)
    costs = measure_stream(llm, budgets, prompts, sampling, progress)
    candidates = [Candidate(label_of(SpecExec(n)), SpecExec(n), costs.predict(n)) for n in budgets]
    lines = [*costs.lines(), *(f"specexec {n} does not fit into device_memory: left out" for n in left_out)]
    known = {"streamed": dataclasses.asdict(costs), "left_out": left_out}
    yield Trial(llm, [*auto, *candidates], known=known, lines=lines, smallest=True)


def measure_stream(
    llm: Any, budgets: Sequence[int], prompts: Sequence[BenchPrompt], sampling: SamplingParams, progress: Progress
) -> StreamCosts:
    """Time streamed passes and draft passes, and count the tokens per pass of one tree."""
    (target, draft), shown = llm.engine.models, len(budgets) + 1
    progress("streamed passes", 0, shown)
    seconds, draft_s = {}, {}
    for index, budget in enumerate((0, *budgets)):
        progress("streamed passes", index, shown)
        # One after the other: the buffers of all of them might not fit.
        seconds |= median_times({budget: time_target_pass(target, llm.params, budget + 1, CONTEXT)}, PASS_REPEATS)
        if budget:
            width = SpecExec(budget).draft_rows
            draft_s |= median_times(
                {budget: time_pass(draft, llm.draft_params, width, CONTEXT, levels=4)}, DRAFT_REPEATS
            )  # fmt: skip
    plain_s, pass_s = seconds.pop(0), seconds
    probed = max((budget for budget in budgets if budget <= PROBED), default=None)
    if probed is None:
        return StreamCosts(plain_s, pass_s, draft_s, {})
    decoder, short = llm.with_method(SpecExec(probed)), dataclasses.replace(sampling, max_tokens=PROBE_TOKENS)
    tokens = passes = 0
    for index, prompt in enumerate(prompts[:PROBE_PROMPTS]):
        progress("acceptance of a tree", index, len(prompts[:PROBE_PROMPTS]))
        stats = decoder.generate(encode_prompt(decoder, prompt), short).stats
        tokens, passes = tokens + stats.completion_tokens, passes + stats.speculative_decoding["num_spec_steps"]
    rate = tokens / max(passes, 1)
    usual = {budget: USUAL_RATES[budget] for budget in budgets}
    # What a usual draft adds to the one token of a plain pass, scaled.
    scale = (rate - 1) / (usual[probed] - 1)
    return StreamCosts(plain_s, pass_s, draft_s, {budget: 1 + scale * (r - 1) for budget, r in usual.items()})


def _fits(llm: Any, method: Method) -> bool:
    engine = llm.engine
    if engine.check_room is None:
        return True
    try:
        runner = method.bind(engine.models, engine.capacity)
        engine.check_room(method, runner, engine.models, engine.capacity)
    except ConfigError:
        return False
    return True
