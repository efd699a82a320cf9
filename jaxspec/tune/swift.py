"""Layer sets for `Swift` found and judged off line: on texts that the model wrote, in place of the one being decoded.

The search is that of decoding (`methods.swift_search`), a window of text after the other; nothing is timed.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxspec.bench.prompts import BenchPrompt
from jaxspec.bench.report import make_report
from jaxspec.bench.run import BASELINE, Column, measure
from jaxspec.config import SamplingParams
from jaxspec.errors import ConfigError
from jaxspec.methods.autoregressive import Autoregressive
from jaxspec.methods.core.chunks import cache_slots
from jaxspec.methods.core.cost_model import pass_costs, relative_set_cost
from jaxspec.methods.core.sequence import TargetSide
from jaxspec.methods.swift.score import matchness_program
from jaxspec.methods.swift.search import LayerSearch, SearchSettings
from jaxspec.methods.swift.settings import ROUND_COST, Swift, branches, sets_per_pass
from jaxspec.models.layer_set import LayerSet, uniform_layers
from jaxspec.models.params import Params
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.program import compile_programs

# What drafting has to gain over plain decoding to be worth a preset: less is noise.
LEAST_GAIN = 1.02

# Told the steps that were made, and the matchness of the best set so far.
Progress = Callable[[int, float], None]


@dataclasses.dataclass(frozen=True)
class Passage:
    """A text of the model.

    Attributes:
      tokens: prompt and answer.
      prompt: how many of them are the prompt's.
    """

    tokens: tuple[int, ...]
    prompt: int

    def windows(self, width: int) -> list[int]:
        """First positions of the windows of `width` predicted tokens that the answer has room for."""
        return [*range(self.prompt, len(self.tokens) - width, width)]


def write_passages(llm: Any, prompts: Sequence[BenchPrompt], sampling: SamplingParams) -> list[Passage]:
    """Let a model answer the first turn of each prompt.

    Args:
      llm: an `LLM`; the method does not matter, all write the same.
      prompts: what is asked.
      sampling: how it answers.
    """
    passages = []
    for prompt in prompts:
        turn = prompt.turns[0]
        ids = llm.encode([{"role": "user", "content": turn}] if llm.tokenizer.has_chat_template else turn)
        passages.append(Passage((*ids, *llm.generate(ids, sampling).token_ids), len(ids)))
    return passages


class Scorer:
    """Scores layer sets on windows of passages, as a generation would score them on its own text.

    Attributes:
      sets: scored in one pass.
      window: gamma.
      num_layers: L.
    """

    def __init__(self, placement: Placement, params: Params, longest: int, window: int):
        """Compile.

        Args:
          placement: the target.
          params: its parameters.
          longest: tokens of the longest passage.
          window: gamma.
        """
        self.window, self.num_layers, self._params = window, placement.cfg.num_layers, params
        branching = branches(placement)
        self.sets = sets_per_pass(branching)
        self._side = TargetSide(placement, cache_slots(longest, self.sets * window))
        self._score = matchness_program(placement, self._side.state, self.sets, window, branching)
        self._state: Any = None
        self._passage: Passage | None = None
        compile_programs((*self._side.programs, self._score))

    def count(self, passage: Passage, start: int, layers: Sequence[LayerSet]) -> list[int]:
        """Tokens of the window from `start` on that each set predicts, of `window`."""
        if passage is not self._passage:
            state = self._side.start(passage.tokens[0], self._state)
            # What lies behind a window is hidden from it: one prefill serves all windows of a passage.
            self._state = self._side.prefill(self._params, state, np.array(passage.tokens, np.int32))
            self._passage = passage
        tokens = np.array(passage.tokens[start : start + self.window + 1], np.int32)
        counts: list[int] = []
        for first in range(0, len(layers), self.sets):
            some = [*layers[first : first + self.sets]]
            filled = some + some[-1:] * (self.sets - len(some))
            units = np.stack([each.runs for each in filled])
            self._state, matches = self._score(self._params, self._state, tokens, np.int32(start), units)
            counts += np.asarray(matches).tolist()[: len(some)]
        return counts

    def matchness(self, passages: Sequence[Passage], layers: Sequence[LayerSet]) -> list[float]:
        """Share of all windows' tokens that each set predicts."""
        windows = [(passage, start) for passage in passages for start in passage.windows(self.window)]
        counts = np.array([self.count(passage, start, layers) for passage, start in windows])
        return (counts.sum(axis=0) / (len(windows) * self.window)).tolist()


def search_layers(
    scorer: Scorer, passages: Sequence[Passage], settings: SearchSettings, seed: int = 0,
    progress: Progress = lambda steps, matchness: None,
) -> LayerSearch:  # fmt: skip
    """Search to the end; windows come in random order of passages, again and again.

    Args:
      scorer: of windows of `settings.window`.
      passages: texts to score on.
      settings: how to search, and when to stop.
      seed: of the order and of the proposals.
      progress: told after every pass.

    Raises:
      ConfigError: no passage is long enough for a window.
    """
    search = LayerSearch(scorer.num_layers, settings, seed=seed)
    windows = _shuffled(passages, settings.window, seed)
    passage, start = next(windows)
    search.open_window()
    while search.stopped is None:
        if search.window_is_used_up:
            passage, start = next(windows)
            search.open_window()
        asked = search.next_sets(scorer.sets)
        search.tell(asked, scorer.count(passage, start, asked.layers))
        progress(search.steps, search.incumbent.matchness or 0.0)
    return search


@dataclasses.dataclass(frozen=True)
class RatioResult:
    """What was found for one skip ratio.

    Attributes:
      ratio: r.
      search: it has ended.
      matchness: of its set, on texts that the search did not see where there are enough.
      predicted: speed-up over plain decoding by the cost model.
      measured: the same, decoded, over the faster of plain decoding and rounds without a draft; None where another
        ratio promised more.
    """

    ratio: float
    search: LayerSearch
    matchness: float
    predicted: float
    measured: float | None = None

    @property
    def layers(self) -> LayerSet:
        """The set."""
        return self.search.incumbent.layers


@dataclasses.dataclass(frozen=True)
class LayerTuning:
    """What `tune_layers` found.

    Attributes:
      results: by ratio, in the order that was asked for.
      uniform: matchness of the uniform set.
      judged_tokens: on so many tokens.
      best: the one to use; None where plain decoding is as fast.
      report: of the confirming run, as `jaxspec-bench` writes it.
    """

    results: tuple[RatioResult, ...]
    uniform: float
    judged_tokens: int
    best: RatioResult | None
    report: dict[str, Any]


def tune_layers(
    llm: Any, prompts: Sequence[BenchPrompt], sampling: SamplingParams, ratios: Sequence[float],
    steps: int, interval: int, repeats: int, command: str,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> LayerTuning:  # fmt: skip
    """Search on a model's own answers, for each ratio; judge on others; decode with what promises most.

    Args:
      llm: an `LLM` that decodes plainly.
      prompts: what it answers: two of three for the search, the third for judging; all for both if there are few.
      sampling: how, with `max_tokens`.
      ratios: skip ratios.
      steps: candidates for each of them.
      interval: every how many of these one is Bayesian.
      repeats: of the confirming run.
      command: for the report.
      progress: told what is going on, how much of it is done, and of how much.

    Raises:
      ConfigError: no answer is long enough for a window, or a ratio leaves this model nothing to choose.
    """
    target = llm.engine.target
    searches = [SearchSettings(ratio=r, steps=steps, interval=interval, tolerance=steps) for r in ratios]
    for settings in searches:
        if LayerSearch(target.cfg.num_layers, settings).stopped is not None:
            raise ConfigError(f"ratio {settings.ratio:g} leaves nothing to choose in {target.cfg.num_layers} layers")
    width = searches[0].window
    passages = []
    for done, prompt in enumerate(prompts):
        progress("answers", done, len(prompts))
        passages += write_passages(llm, [prompt], sampling)
    passages = _usable(passages, width)
    few = len(passages) < 3
    seen, judged = ([p for i, p in enumerate(passages) if few or i % 3], passages if few else passages[::3])
    scorer = Scorer(target, llm.params, max(len(passage.tokens) for passage in passages), width)
    results = []
    for settings in searches:

        def tell(done: int, score: float, ratio: float = settings.ratio) -> None:
            progress(f"ratio {ratio:g}: matchness {score:.2f}", done, steps)

        search = search_layers(scorer, seen, settings, progress=tell)
        layers = search.incumbent.layers
        [score] = scorer.matchness(judged, [layers])
        results.append(RatioResult(settings.ratio, search, score, predict_gain(target, layers, score)))
    [uniform] = scorer.matchness(judged, [uniform_layers(target.cfg.num_layers)])
    chosen = max(results, key=lambda result: result.predicted)
    column = Column("swift", Swift(layers=str(chosen.layers)))
    # Its rounds without a draft may be faster than plain decoding's: that is no merit of drafts.
    idle = Column("swift without a draft", Swift(layers="none"))
    columns = [Column(BASELINE, Autoregressive()), idle, column]
    report = make_report(
        measure(llm, columns, prompts, sampling, repeats, progress),
        command,
        str(llm.model_path),
        None,
        target.plan.tensor,
    )
    speedup, without = (report["overall"]["columns"][each.label]["speedup"] for each in (column, idle))
    gain = speedup["mean"] / max(1.0, without["mean"]) if speedup and without else None
    confirmed = dataclasses.replace(chosen, measured=gain)
    results[results.index(chosen)] = confirmed
    tokens = sum(len(passage.windows(width)) for passage in judged) * width
    best = confirmed if (confirmed.measured or 0.0) >= LEAST_GAIN else None
    return LayerTuning(tuple(results), uniform, tokens, best, report)


def predict_gain(placement: Placement, layers: LayerSet, matchness: float, length: int = 25, rows: int = 32) -> float:
    """Speed of drafts of the best length over plain decoding, by the cost model (ALGORITHMS 10); below 1 they lose.

    Args:
      placement: the target.
      layers: what drafts.
      matchness: chance of a drafted token.
      length: of the longest draft.
      rows: most rows of a target pass.
    """
    costs, draft = pass_costs(placement, rows), relative_set_cost(placement, layers)

    def gain(n: int) -> float:
        return sum(matchness**place for place in range(n + 1)) / (float(costs[n]) + n * draft + ROUND_COST)

    return max(gain(n) for n in range(1, min(length, rows - 1) + 1))


def _usable(passages: Sequence[Passage], window: int) -> list[Passage]:
    usable = [passage for passage in passages if passage.windows(window)]
    if not usable:
        raise ConfigError(f"no answer has the {window + 1} tokens that a window takes: ask for longer ones")
    return usable


def _shuffled(passages: Sequence[Passage], window: int, seed: int) -> Iterator[tuple[Passage, int]]:
    usable = _usable(passages, window)
    rng = np.random.default_rng(seed)
    for _ in itertools.count():
        for index in rng.permutation(len(usable)):
            for start in usable[index].windows(window):
                yield usable[index], start
