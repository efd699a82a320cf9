"""One loop for all methods: candidates on some devices, measured side by side, the fastest one, its preset.
A method's own part gives `Trial`s: loaded models and candidates, with predictions where a model of costs can make them.
`tune` decodes with the candidates of each trial, plain decoding beside them, and compares all.
"""

import dataclasses
import gc
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxspec.bench.prompts import BenchPrompt
from jaxspec.bench.report import MIN_RATED_TOKENS, make_report
from jaxspec.bench.run import BASELINE, Column, encode_prompt, measure
from jaxspec.config import SamplingParams
from jaxspec.errors import ConfigError
from jaxspec.llm import internals
from jaxspec.methods.auto.settings import Auto, stream_speeds
from jaxspec.methods.autoregressive import Autoregressive
from jaxspec.methods.base import Measured, Method
from jaxspec.methods.chain import Chain
from jaxspec.methods.core.cost_model import USUAL_RATES, CostModel
from jaxspec.methods.registry import METHODS, make_method, method_class
from jaxspec.methods.specexec import SpecExec

# Candidates with a prediction that are run, the most promising ones. Those without a prediction are all run.
CONFIRMED = 3
# The least speed-up over plain decoding, and over `auto` without a preset, that is worth a preset: less is noise.
LEAST_GAIN = 1.02
# The label of `auto` with its default settings.
DEFAULT = "auto"
# Methods that are compared where none is named.
COMPARED = ("auto", "lookup", "chain", "specexec")
# Draft tokens of SpecExec that are compared where the target is streamed.
BUDGETS = tuple(budget for budget in USUAL_RATES if budget > 1)
# Tokens before passes that are timed, and the chain that acceptance is counted with.
CONTEXT, LONGEST_CHAIN = 256, 8

Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A method with settings, on some devices."""

    label: str  # for tables
    method: Method
    predicted: float | None = None  # speed-up over plain decoding by the cost model; None where only a run can tell
    preset: Mapping[str, Any] | None = None  # options that a preset has in place of the settings; None for the settings
    placed: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # its model options: how many devices they take
    row: Mapping[str, Any] | None = None  # its column of a report; None where it was not run
    score: float | None = None  # speed-up over the fastest plain decoding; None where it was not run

    @property
    def is_separate(self) -> bool:
        """Whether its samples tell it from plain decoding: it drafted, and the interval lies above 1."""
        if self.row is None:
            return True
        low = (self.row["speedup"] or self.row["call_speedup"])["low"]
        return low is not None and low > 1 and (self.row["acceptance_length"] or 1) > 1

    @property
    def settings(self) -> dict[str, Any]:
        """Options of a preset: the method's settings that are not their defaults."""
        if self.preset is not None:
            return dict(self.preset)
        method: Any = self.method
        if method == type(method)():  # fields that follow from others differ from their own defaults
            return {}
        blank = {field.name: field.default for field in dataclasses.fields(method)}
        return {name: value for name, value in dataclasses.asdict(method).items() if value != blank[name]}


@dataclasses.dataclass
class Trial:
    """Loaded models and the candidates for them."""

    llm: Any  # other methods share its weights
    candidates: Sequence[Candidate]  # without plain decoding, which always runs beside them
    placed: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # model options that a preset needs
    suffix: str = ""  # part of plain decoding's label, where there are several trials
    known: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # findings on the way, for the report
    lines: Sequence[str] = ()  # findings for people
    smallest: bool = False  # whether of trees that are equally fast the smallest is to be used


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The findings of `tune`."""

    candidates: tuple[Candidate, ...]  # the fastest first, those that were not run last
    best: Candidate  # plain decoding where nothing gained on it, `auto` where nothing gained on that
    lines: tuple[str, ...]  # findings for people, trial by trial
    trials: tuple[dict[str, Any], ...]  # by trial, further findings, and its run's report as `jaxspec-bench` writes it

    @property
    def verdict(self) -> str:
        """The result in a sentence."""
        best = self.best
        if best.method.name == BASELINE:
            if unsure := [c.label for c in self.candidates if (c.score or 0) >= LEAST_GAIN and not c.is_separate]:
                return (
                    f"these samples are too few to tell {', '.join(unsure)} from plain decoding, which is kept: "
                    "more --max-prompts, -n or --repeats may"
                )
            return f"plain decoding is the fastest here ({best.label}): nothing that was tried gains on it"
        gain = f"{best.score:.2f} times plain decoding"
        if best.label == DEFAULT:
            return f"auto without a preset is the fastest here, {gain}: nothing that was tried gains on it"
        return f"the fastest here is {best.label}, {gain}"

    def preset(self, given: Mapping[str, Any], command: str) -> str:
        """TOML for `--config`; `given` are options of the models."""
        options: dict[str, Any] = {"method": self.best.method.name, **self.best.settings}
        given = {**given, **self.best.placed}
        plain = {"target_devices": 1, "offload": "none"}
        options |= {n: value for n, value in given.items() if value not in (None, "auto", plain.get(n))}
        if not self.best.method.drafts and options.get("draft_model") != "none":
            options.pop("draft_model", None)  # a method that drafts without a model refuses one
        # A comment ends at a line break and holds no control characters.
        comments = ["".join(c if c.isprintable() else "?" for c in text) for text in (command, self.verdict)]
        lines = [f"# {text}" for text in comments] + [f"{name} = {_toml(value)}" for name, value in options.items()]
        return "\n".join(lines) + "\n"

    def report(self) -> dict[str, Any]:
        fields = ("label", "settings", "predicted", "score", "placed", "row")
        rows = [{"method": c.method.name} | {name: getattr(c, name) for name in fields} for c in self.candidates]
        return {"candidates": rows, "best": rows[self.candidates.index(self.best)], "trials": self.trials}


def tune(
    trials: Iterator[Trial], prompts: Sequence[BenchPrompt], sampling: SamplingParams, repeats: int, command: str,
    progress: Progress = lambda what, done, total: None,
) -> Tuning:  # fmt: skip
    """Run the candidates of all trials, and choose.
    Each trial is let go of before the next is asked for. A candidate answers each prompt `repeats` times; `command` is
    for the reports. Raises `ConfigError` if plain decoding's answers are too short to be timed, or no trial fits.
    """
    run: list[Candidate] = []
    rest: list[Candidate] = []
    lines: list[str] = []
    reports, smallest = [], False
    while (trial := next(trials, None)) is not None:
        chosen = _shortlist(trial.candidates)
        plain = Candidate(f"{BASELINE}{trial.suffix}", Autoregressive(), 1.0, placed=trial.placed)
        columns = [Column(BASELINE, plain.method), *(Column(c.label, c.method) for c in chosen)]
        try:
            measured = measure(trial.llm, columns, prompts, sampling, repeats, progress)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            progress(f"out of memory, left out{trial.suffix}", 0, 1)
            del trial
            gc.collect()
            continue
        draft, tensor = trial.llm.draft_path, internals(trial.llm).target.plan.tensor
        report = make_report(measured, command, str(trial.llm.model_path), draft and str(draft), tensor)
        rows = report["overall"]["columns"]
        if rows[BASELINE]["tokens_per_s"] is None:
            raise ConfigError(
                f"no answer is long enough to be timed, which takes {MIN_RATED_TOKENS} tokens after plain decoding's "
                "first dispatch: raise --max-tokens or give other --prompts"
            )
        run.append(dataclasses.replace(plain, row=rows[BASELINE]))
        run += [dataclasses.replace(c, row=rows[c.label], placed={**trial.placed, **c.placed}) for c in chosen]
        rest += [c for c in trial.candidates if c not in chosen]
        lines += trial.lines
        smallest = smallest or trial.smallest
        reports.append({**trial.known, "placed": trial.placed, "report": report})
        del trial, measured, columns
        gc.collect()  # programs and their buffers hold on to each other
    if not run:
        raise ConfigError("no placement of the models fits these devices")
    run = _score(run)
    return Tuning((*run, *rest), pick(run, smallest=smallest), tuple(lines), tuple(reports))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that devices or host have no memory left."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


def pick(run: Sequence[Candidate], *, smallest: bool = False) -> Candidate:
    """The candidate to use, of those that were run, the fastest first; plain decoding where samples separate none.

    With `smallest` it is the tree at the knee: of the fastest method's settings that are no more than noise slower,
    that with the fewest draft tokens.
    """
    plain = next(c for c in run if c.method.name == BASELINE)
    run = [c for c in run if c.is_separate and c.method.name != BASELINE]
    default = next((c for c in run if c.label == DEFAULT), None)
    fastest = run[0].score or 0.0 if run else 0.0
    if fastest < LEAST_GAIN:
        return plain
    if default is not None and fastest < LEAST_GAIN * (default.score or 0.0):
        return default
    if not smallest:
        return run[0]
    equal = [c for c in run if c.method.name == run[0].method.name and fastest < LEAST_GAIN * (c.score or 0.0)]
    return min(equal, key=lambda c: c.method.num_rows)


def compare_methods(
    llm: Any, name: str | None, prompts: Sequence[BenchPrompt], sampling: SamplingParams, progress: Progress
) -> Iterator[Trial]:
    """The trial of methods on models as they are loaded: `name`, or all in `COMPARED` that fit."""
    progress("costs of rounds", 0, 1)
    engine, params = internals(llm.with_method(Auto())).engine, internals(llm).params
    engine.settle()
    engine.calibrate(params)  # where programs still loaded before, and where `auto` measures at all
    runner: Any = engine.runner
    costs = runner.costs
    drafting = params.draft is not None
    acceptance = measure_acceptance(llm, prompts, sampling, progress) if drafting else ()
    passes = ", ".join(f"{cost:.2f}" for cost in costs.passes)
    lines = [f"costs ({costs.source}), in one-row passes: target pass by rows {passes}; round {costs.round:.3f}"]
    if drafting:
        lines.append(f"draft pass: {costs.draft:.3f}; each draft: {costs.draft_overhead:.3f} more")
        lines.append("accepted by depth of a chain: " + ", ".join(f"{share:.2f}" for share in acceptance))
    yield Trial(
        llm, list_candidates(engine.models, name, costs, acceptance),
        known={"costs": costs.report(), "acceptance": acceptance}, lines=lines,
    )  # fmt: skip


def compare_streamed(
    llm: Any, name: str | None, prompts: Sequence[BenchPrompt], sampling: SamplingParams, progress: Progress
) -> Iterator[Trial]:
    """The trial of a streamed target: `auto`, and SpecExec with predictions; or the variants of a method `name`.

    Predictions are those that `auto` chooses by. Trees for which the memory of `device_memory` does not suffice are
    left out, with a line that says so.
    """
    engine, plan = internals(llm).engine, internals(llm).offload_plan
    assert plan is not None
    models = engine.models
    if name not in (None, "specexec", "auto"):
        methods = make_method(name).variants()
        yield Trial(llm, [Candidate(label_of(method), method) for method in methods])
        return
    candidates = [] if name == "specexec" else [Candidate(DEFAULT, Auto())]
    if models.draft is None:
        if name == "specexec":
            raise ConfigError("specexec needs a draft model: give one")
        yield Trial(llm, candidates)
        return
    speeds, left_out = stream_speeds(models, plan.stream_ratio, plan.expert_share), []
    for budget in BUDGETS:
        method = SpecExec(budget)
        if _fits(engine, method):
            candidates.append(Candidate(label_of(method), method, round(speeds[budget], 3)))
        else:
            left_out.append(budget)
    lines = [f"a streamed pass of one row takes {plan.stream_ratio:.1f} times what it computes"]
    lines += [f"specexec {budget} does not fit into device_memory: left out" for budget in left_out]
    known = {"stream_ratio": plan.stream_ratio, "left_out": left_out}
    yield Trial(llm, candidates, known=known, lines=lines, smallest=True)


def measure_acceptance(
    llm: Any, prompts: Sequence[BenchPrompt], sampling: SamplingParams, progress: Progress,
    encode: Callable[[Any, BenchPrompt], list[int]] = encode_prompt,
) -> tuple[float, ...]:  # fmt: skip
    """The share that accepted d of the rounds of a long chain that accepted d - 1 tokens or more; by d from 1."""
    tried, accepted = [0] * LONGEST_CHAIN, [0] * LONGEST_CHAIN
    chain = llm.with_method(Chain(LONGEST_CHAIN))
    for index, prompt in enumerate(prompts):
        progress("acceptance of a chain", index, len(prompts))
        counters = chain.generate(encode(chain, prompt), sampling).stats.speculative_decoding
        for drafted, count in zip(counters.per_step_drafted, counters.per_step_accepted, strict=True):
            for depth in range(min(drafted, count + 1)):
                tried[depth] += 1
                accepted[depth] += depth < count
    return tuple(a / t if t else 0.0 for a, t in zip(accepted, tried, strict=True))


def predict_chain(costs: CostModel, acceptance: Sequence[float], tokens: int) -> float:
    """Speed-up of a chain of so many tokens over plain decoding: its expected tokens over the time of its round."""
    expected = 1 + sum(itertools.accumulate(acceptance[:tokens], lambda reached, share: reached * share))
    spent = costs.rounds[tokens] + costs.draft_overhead + tokens * costs.draft
    return round(float(expected * costs.rounds[0] / spent), 3)


def list_candidates(models: Any, name: str | None, costs: CostModel, acceptance: Sequence[float]) -> list[Candidate]:
    """Candidates for some models: variants of the methods, with predictions where the costs allow them."""
    assert name is None or name in METHODS
    candidates = []
    for known in COMPARED if name is None else (name,):
        cls = method_class(known)
        if models.draft is None and cls.needs_draft:
            continue
        for method in cls().variants():
            predicted = predict_chain(costs, acceptance, method.max_path - 1) if known == "chain" else None
            candidates.append(Candidate(label_of(method), method, predicted))
    return candidates


def profile_rows(tuning: Tuning) -> list[Measured]:
    """Rows of a device profile: methods that were run, their devices, and speeds that compare across placements."""
    plain = max(c.row["tokens_per_s"]["mean"] for c in tuning.candidates if c.row and c.method.name == BASELINE)
    return [
        Measured(c.method.name, c.settings, c.placed["target_devices"], c.placed.get("draft_devices"), c.score * plain)
        for c in tuning.candidates if c.score is not None
    ]  # fmt: skip


def label_of(method: Any) -> str:
    """A method's name in tables, with its draft tokens; default `auto` and `lookup` have the name alone."""
    return method.name if method == type(method)() and method.name in (DEFAULT, "lookup") else (
        f"{method.name} {method.num_rows - 1}"
    )  # fmt: skip


def _fits(engine: Any, method: Method) -> bool:
    if engine.check_room is None:
        return True
    try:
        engine.check_room(method, method.bind(engine.models, engine.capacity), engine.models, engine.capacity)
    except ConfigError:
        return False
    return True


def _shortlist(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those without a prediction, and the best of those that are predicted to gain."""
    known = [(c.predicted, -index, c) for index, c in enumerate(candidates) if c.predicted is not None]
    promising = [c for predicted, _, c in sorted(known, reverse=True, key=lambda k: k[:2]) if predicted > 1]
    return [c for c in candidates if c.predicted is None] + promising[:CONFIRMED]


def _score(run: Sequence[Candidate]) -> list[Candidate]:
    """Add speed-ups over the fastest plain decoding, from those over the plain decoding beside each; fastest first."""
    plain = 0.0
    scored = []
    best = max(c.row["tokens_per_s"]["mean"] for c in run if c.row and c.method.name == BASELINE)
    for candidate in run:
        row: Any = candidate.row
        if candidate.method.name == BASELINE:
            plain = row["tokens_per_s"]["mean"]
        ratio = (row["speedup"] or row["call_speedup"])["geometric_mean"]
        scored.append(dataclasses.replace(candidate, score=ratio * plain / best))
    return sorted(scored, key=lambda c: -(c.score or 0.0))


def _toml(value: Any) -> str:
    """JSON's strings, numbers and lists of numbers are TOML's too, except for one character that TOML escapes."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
