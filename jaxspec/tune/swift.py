"""Layer sets for `Swift`, searched and judged offline on texts that the model wrote.
The search is that of decoding (`methods.swift.search`), on a few windows that stay the same; nothing is timed.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxspec.bench.prompts import BenchPrompt
from jaxspec.bench.run import encode_prompt
from jaxspec.config import SamplingParams
from jaxspec.errors import ConfigError
from jaxspec.llm import internals
from jaxspec.methods.core.cost_model import ROUND_COST, pass_costs, relative_set_cost
from jaxspec.methods.core.sequence import ModelSequence, SequenceState, cache_slots
from jaxspec.methods.swift.search import LayerSearch, SearchSettings, matchness_program
from jaxspec.methods.swift.settings import Swift, branches
from jaxspec.methods.swift.store import LayerStore
from jaxspec.models.layer_set import LayerSet, uniform_layers
from jaxspec.models.params import Params
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.program import compile_programs
from jaxspec.sampling.processors import GREEDY
from jaxspec.tune.run import Candidate, Progress, Trial

CONTEXTS = 4  # windows on which each candidate is scored
LONGEST_DRAFT, ROWS = 25, 32  # of the prediction: tokens of a draft, rows of a target pass


@dataclasses.dataclass(frozen=True)
class Passage:
    """A text of the model."""

    tokens: tuple[int, ...]  # prompt and answer
    prompt: int  # number of prompt tokens

    def windows(self, width: int) -> list[int]:
        """First positions of the answer's windows of `width` predicted tokens."""
        return [*range(self.prompt, len(self.tokens) - width, width)]


Window = tuple[Passage, int]  # with its first position


def all_windows(passages: Sequence[Passage], width: int) -> list[Window]:
    """All windows of the answers. Raises `ConfigError` if there is none."""
    windows = [(passage, start) for passage in passages for start in passage.windows(width)]
    if not windows:
        raise ConfigError(f"no answer has the {width + 1} tokens that a window takes: ask for longer ones")
    return windows


def write_passages(llm: Any, prompts: Sequence[BenchPrompt], sampling: SamplingParams) -> Iterator[Passage]:
    """The model's answers to the first turn of each prompt; they do not depend on the method."""
    for prompt in prompts:
        ids = encode_prompt(llm, prompt)
        yield Passage((*ids, *llm.generate(ids, sampling).token_ids), len(ids))


class LayerScorer:
    """Scores layer sets on windows of passages, as a generation scores them on its own text."""

    def __init__(self, placement: Placement, params: Params, longest: int, window: int):
        """Compile for passages of up to `longest` tokens and windows of `window` (gamma) tokens."""
        self.window, self.num_layers, self._params = window, placement.cfg.num_layers, params
        self._sequence = ModelSequence(placement, cache_slots(longest, window), "layers")
        self._score = matchness_program(placement, self._sequence.state, window, branches(placement))
        self._states: dict[Passage, SequenceState] = {}
        compile_programs((*self._sequence.programs, self._score), GREEDY)

    def count(self, passage: Passage, start: int, layers: LayerSet) -> int:
        """Tokens of the window from `start` on that a set predicts, of `window`."""
        if passage not in self._states:
            state = self._sequence.start(passage.tokens[0], None)
            # One prefill serves all windows of a passage: a window does not see the tokens after it.
            prefilled = self._sequence.prefill(self._params, state, np.array(passage.tokens, np.int32))
            self._states[passage], _ = prefilled
        tokens = np.array(passage.tokens[start : start + self.window + 1], np.int32)
        state, matches = self._score(self._params, self._states[passage], tokens, np.int32(start), layers.runs)
        self._states[passage] = state
        return int(matches)

    def matchness(self, windows: Sequence[Window], layers: LayerSet) -> float:
        """Share of all windows' tokens that a set predicts."""
        return sum(self.count(*window, layers) for window in windows) / (len(windows) * self.window)


def search_layers(
    scorer: LayerScorer, passages: Sequence[Passage], settings: SearchSettings,
    progress: Callable[[int, float], None] = lambda steps, matchness: None,
) -> LayerSearch:  # fmt: skip
    """Search to the end, on windows spread over the passages.
    `progress` is told the steps and the matchness of the best set after every step.
    Raises `ConfigError` if no passage is long enough for a window.
    """
    search, windows = LayerSearch(scorer.num_layers, settings), all_windows(passages, settings.window)
    windows = windows[:: max(1, len(windows) // CONTEXTS)][:CONTEXTS]
    while search.stopped is None:
        layers = search.propose()
        search.tell(layers, scorer.matchness(windows, layers))
        progress(search.steps, search.matchness or 0.0)
    return search


@dataclasses.dataclass(frozen=True)
class LayerOptions:
    """How the sets are searched and kept."""

    ratios: tuple[float, ...]  # skip ratios, a search for each
    steps: int  # candidates of a search
    interval: int  # every how many of them one is Bayesian
    task: str  # name under which the sets are kept
    named: str | None = None  # layer file that the user named, for the preset; None is the one in the cache folder


def tune_layers(
    llm: Any, options: LayerOptions, store: LayerStore, prompts: Sequence[BenchPrompt], sampling: SamplingParams,
    progress: Progress,
) -> Iterator[Trial]:  # fmt: skip
    """The trial of `Swift`: search on the model's own answers for each ratio, judge on others, predict. Two answers of
    three serve the search, the third the judgement; a few serve both. `llm` decodes plainly. `store` keeps the sets
    that were found. Raises `ConfigError` if no answer is long enough for a window, or a ratio leaves nothing to choose.
    """
    target, steps = internals(llm).target, options.steps
    searches = [
        SearchSettings(ratio=ratio, steps=steps, interval=options.interval, tolerance=steps) for ratio in options.ratios
    ]
    for settings in searches:
        if LayerSearch(target.cfg.num_layers, settings).stopped is not None:
            raise ConfigError(f"ratio {settings.ratio:g} leaves nothing to choose in {target.cfg.num_layers} layers")
    width = searches[0].window
    passages = []
    for passage in write_passages(llm, prompts, sampling):
        passages.append(passage)
        progress("answers", len(passages), len(prompts))
    passages = [*dict.fromkeys(passage for passage, _ in all_windows(passages, width))]
    few = len(passages) < 3
    seen = passages if few else [passage for index, passage in enumerate(passages) if index % 3]
    judged = all_windows(passages if few else passages[::3], width)
    scorer = LayerScorer(target, internals(llm).params.target, max(len(passage.tokens) for passage in passages), width)
    uniform = scorer.matchness(judged, uniform_layers(target.cfg.num_layers))
    candidates, known, lines = [], [], [f"matchness of the uniform set: {uniform:.3f}"]
    for settings in searches:

        def tell(done: int, score: float, ratio: float = settings.ratio) -> None:
            progress(f"ratio {ratio:g}: matchness {score:.2f}", done, steps)

        search = search_layers(scorer, seen, settings, progress=tell)
        store.save(options.task, search, replace=True)
        layers, score = search.layers, scorer.matchness(judged, search.layers)
        preset: dict[str, Any] = {"ratio": settings.ratio}
        preset |= {"task": options.task} if options.task != Swift().task else {}
        preset |= {"swift_layers": options.named} if options.named else {}
        gain = predict_gain(target, layers, score)
        candidates.append(Candidate(f"swift at ratio {settings.ratio:g}", Swift(layers=str(layers)), gain, preset))
        lines.append(f"ratio {settings.ratio:g}: matchness {score:.3f}, skips {layers.num_skipped} blocks: {layers}")
        known.append({
            "ratio": settings.ratio, "layers": str(layers), "num_skipped": layers.num_skipped, "matchness": score,
            "steps": search.steps, "stopped": search.stopped, "history": search.history,
        })  # fmt: skip
    known = {"uniform": uniform, "judged_tokens": len(judged) * width, "results": known}
    yield Trial(llm, candidates, known=known, lines=lines)


def plot_layers(known: dict[str, Any], path: Any) -> None:
    """Matchness of the best set against the steps of the search (extra `plot`: matplotlib)."""
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    figure, axis = pyplot.subplots(figsize=(6.5, 3.8))
    for result in known["results"]:
        steps, scores = zip(*result["history"], strict=True)
        [line] = axis.step(steps, scores, where="post", label=f"ratio {result['ratio']:g}")
        axis.plot(steps[-1], result["matchness"], marker="o", color=line.get_color())
    axis.axhline(known["uniform"], color="gray", linestyle=":", label="uniform set, other texts")
    axis.set(xlabel="candidates scored", ylabel="matchness of the best so far", ylim=(0, 1))
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, title="dots: on other texts", title_fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def predict_gain(placement: Placement, layers: LayerSet, matchness: float) -> float:
    """Speed of drafts of the best length over plain decoding, by the cost model; below 1 they lose.
    `matchness` is the chance of a drafted token.
    """
    costs, draft = pass_costs(placement, ROWS), relative_set_cost(placement, layers)

    def gain(n: int) -> float:
        return sum(matchness**place for place in range(n + 1)) / (float(costs[n]) + n * draft + ROUND_COST)

    return max(gain(n) for n in range(1, LONGEST_DRAFT + 1))
