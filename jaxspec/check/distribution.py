"""Distribution tests for methods that keep the distribution of a text but not the text of a seed (rules R2 and R3).

A method decodes with many seeds. Its tokens are compared with plain decoding's exact distribution, by chi-square:

* the joint distribution of the first tokens, which also shows a random number that decides twice;
* the distribution of the token after D accepted draft tokens, for every D that occurs. For the deepest D this is the
  bonus token of a fully accepted round. It is exact for every D: the randomness that accepts the first D tokens is
  independent of the next one's.

**Cells.** A position has `WIDTH` cells for its most probable tokens and one for the rest: samples are few. A token that
is impossible in plain decoding fails the test by itself, whatever the counts.
**False alarms.** Bonferroni's bound combines all p-values of a check, and the result is compared with `FALSE_ALARM` =
1e-4: a correct method fails about one check in 10,000. Cells are pooled to an expectation of 10. In 200,000 simulated
tests with 2,000 draws over 57 cells, p < 1e-4 came in 1.3 of 10,000.
**Power.** With N samples and a total variation distance t, the statistic's noncentrality is at least 4 N t**2. A fault
of t = 0.11 is found at N = 2,000 with probability 0.99 over 57 cells (two tokens), of t = 0.08 over 8 (one token). Four
times the samples halve t. A fault after accepted drafts has as many samples as rounds got there.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from jaxspec.config import SamplingParams
from jaxspec.errors import ConfigError

FALSE_ALARM = 1e-4
DEPTH = 2  # tokens of the joint distribution
WIDTH = 7  # cells of a position, not counting the one for the rest
SMALLEST_CELL = 10.0  # expected counts below this are pooled
FEWEST = 100  # draws that reached a depth, to test the token after it
MOST_CONTEXTS = 16  # texts whose next token is scored, per depth
REST = -1  # in a cell: any token that has no cell of its own

# Log-probabilities of the next token, [V] with -inf for impossible ones, after a text (prompt and continuation).
ScoreFn = Callable[[tuple[int, ...]], npt.NDArray[np.floating]]
# Whether a token after a text could be within rounding of a cut (top-k, top-p, min-p) that removes it.
EdgeFn = Callable[[tuple[int, ...], int], bool]
Cell = tuple[int, ...]


class Decoder(Protocol):
    """Generates text: an `LLM`, or another object whose `generate` returns one with `token_ids`."""

    # Complete a prompt of token ids; with `stats.speculative_decoding`, drafts are counted.
    def generate(self, prompt: Any, sampling_params: Any, /) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Draw:
    """One sampled continuation."""

    tokens: tuple[int, ...]  # token ids, in order
    accepted: int | None = None  # draft tokens accepted in the first round; None if that was not reported


@dataclasses.dataclass(frozen=True)
class DistributionResult:
    """The test of one prompt and one sampling setting."""

    samples: int  # number of draws
    joint: float  # p-value of the joint distribution of the first tokens
    after: dict[int, float]  # p-value of the token after D accepted draft tokens, by D
    impossible: int  # draws of a token that is impossible in plain decoding
    edge: int  # draws left out of a test because a cut removes their token by no more than rounding
    p_value: float  # of all tests together (Bonferroni), 0 if anything impossible was drawn
    verdict: Literal["equal", "different"]  # "different" below `FALSE_ALARM`


def chi_square(observed_counts: npt.ArrayLike, expected_probs: npt.ArrayLike) -> float:
    """p-value of Pearson's goodness-of-fit test of counts [C] against probabilities [C], which are normalised.
    Cells that expect fewer than `SMALLEST_CELL` counts are pooled, the smallest first. If one cell is left, the exact
    binomial test of the most probable token against all others is used. A count at probability 0 gives 0. Raises
    `ConfigError` if lengths differ, a number is negative, or the probabilities do not add up to 1 within 1e-3.
    """
    observed, probs = np.asarray(observed_counts, np.float64), np.asarray(expected_probs, np.float64)
    if observed.shape != probs.shape or observed.ndim != 1:
        raise ConfigError(f"chi_square needs one probability per count, got {observed.shape} and {probs.shape}")
    if not (observed >= 0).all() or not (probs >= 0).all() or abs(probs.sum() - 1) > 1e-3:
        raise ConfigError(f"chi_square needs counts and probabilities that add up to 1, got a sum of {probs.sum()}")
    if observed[probs == 0].any():
        return 0.0
    expected = probs / probs.sum() * observed.sum()
    order = np.argsort(expected, kind="stable")
    observed, expected = observed[order], expected[order]
    # The shortest head of the sorted cells that holds all small ones and expects enough counts.
    small = int((expected < SMALLEST_CELL).sum())
    enough = np.flatnonzero((np.cumsum(expected) >= SMALLEST_CELL) & (np.arange(1, len(expected) + 1) >= small))
    head = 0 if small == 0 else int(enough[0]) + 1 if len(enough) else len(expected)
    observed = np.append(observed[head:], observed[:head].sum() if head else [])
    expected = np.append(expected[head:], expected[:head].sum() if head else [])
    if len(expected) < 2:
        return _binomial(np.asarray(observed_counts, np.float64), probs / probs.sum())
    from scipy.special import chdtrc  # the survival function of chi-square; scipy.stats takes a second to import

    return float(chdtrc(len(expected) - 1, ((observed - expected) ** 2 / expected).sum()))


def _binomial(observed: npt.NDArray[np.floating], probs: npt.NDArray[np.floating]) -> float:
    """Two-sided exact p-value of the most probable cell against all others."""
    from scipy.special import bdtr, bdtrc

    total, most = int(observed.sum()), int(np.argmax(probs))
    others, mass = total - int(observed[most]), 1 - float(probs[most])
    if mass <= 0:
        return 1.0
    below, above = bdtr(others, total, mass), 1.0 if others == 0 else bdtrc(others - 1, total, mass)
    return min(1.0, 2 * float(min(below, above)))


def distribution_samplings(tokens: int) -> list[SamplingParams]:
    """Two settings for distribution tests. Neither is at temperature 1, which would hide an ignored temperature."""
    return [
        SamplingParams(tokens, temperature=2.0, top_k=20),
        SamplingParams(tokens, temperature=0.6, top_p=0.95, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.3),
    ]


def joint_distribution(
    score_fn: ScoreFn, prompt: Sequence[int], depth: int, width: int | None = None
) -> dict[Cell, float]:
    """The exact distribution of the next `depth` tokens, at least 1, by enumeration: one call of `score_fn` per text.
    A cell is `depth` token ids, or fewer that end with `REST`, "any other token here". In each position the `width`
    most probable tokens have a cell of their own; None is all possible ones.
    """
    return dict(_enumerate(score_fn, tuple(prompt), (), 1.0, depth, width))


def draw_many(
    method: Decoder, prompt: Sequence[int], sampling: SamplingParams, samples: int, seed: int = 0
) -> Iterator[Draw]:
    """Draw texts of `sampling.max_tokens` tokens, by `ignore_eos`, with the seeds `seed`, `seed + 1`, ..."""
    for index in range(samples):
        named = dataclasses.replace(sampling, seed=seed + index, ignore_eos=True)
        completion = method.generate(list(prompt), named)
        yield Draw(tuple(int(token) for token in completion.token_ids), _first_accepted(completion))


def check_distribution(
    score_fn: ScoreFn, prompt: Sequence[int], draws: Sequence[Draw], edge_fn: EdgeFn | None = None
) -> DistributionResult:
    """Compare draws with the exact distribution; see the module for tests, false alarms and power.
    `score_fn` is of plain decoding, and may be asked for a text more than once. `draws` continue `prompt` with
    different seeds. Without an `edge_fn` no token is within rounding of a cut. Raises `ConfigError` for no draws, or
    one that is shorter than `DEPTH`.
    """
    if not draws or min(len(draw.tokens) for draw in draws) < DEPTH:
        raise ConfigError(f"the distribution of {DEPTH} tokens needs draws of at least {DEPTH} tokens each")
    prompt = tuple(prompt)
    support = _Support(score_fn, edge_fn or (lambda text, token: False))
    exact = joint_distribution(score_fn, prompt, DEPTH, WIDTH)
    inner = {cell[:i] for cell in exact for i in range(len(cell))}
    counts: Counter[Cell] = Counter()
    for draw in draws:
        steps = [(prompt + draw.tokens[:i], draw.tokens[i]) for i in range(DEPTH) if draw.tokens[:i] in inner]
        if support.admits(steps):
            counts[_find_cell(draw.tokens, exact, inner)] += 1
    cells = [*exact, *(counts.keys() - exact.keys())]
    joint = chi_square([counts[cell] for cell in cells], [exact.get(cell, 0.0) for cell in cells])
    after = {}
    for accepted in range(1, max(draw.accepted or 0 for draw in draws) + 1):
        there = [draw for draw in draws if (draw.accepted or 0) >= accepted and len(draw.tokens) > accepted]
        if len(there) >= FEWEST:
            after[accepted] = _check_after(support, prompt, there, accepted)
    p_values = [joint, *after.values()]
    p_value = 0.0 if support.impossible else min(1.0, min(p_values) * len(p_values))
    verdict = "different" if p_value < FALSE_ALARM else "equal"
    return DistributionResult(len(draws), joint, after, support.impossible, support.edge, p_value, verdict)


class _Support:
    """The tokens that plain decoding can emit, and a count of others that a method emitted."""

    def __init__(self, score_fn: ScoreFn, edge_fn: EdgeFn):
        self.score_fn = score_fn
        self.impossible = 0
        self.edge = 0
        self._edge_fn = edge_fn

    def admits(self, steps: list[tuple[tuple[int, ...], int]]) -> bool:
        """Whether every (text, next token) of a draw is possible; counts the draw if not."""
        removed = [(text, token) for text, token in steps if math.isinf(self.score_fn(text)[token])]
        if all(self._edge_fn(text, token) for text, token in removed):
            self.edge += bool(removed)
        else:
            self.impossible += 1
        return not removed


def _check_after(support: _Support, prompt: Cell, draws: list[Draw], accepted: int) -> float:
    """p-value of the token after `accepted` draft tokens, by its rank under plain decoding.
    Ranks pool different texts. Their counts vary no more than those of one multinomial with the mean probabilities: the
    p-value is valid, and rather too large.
    """
    texts = Counter(draw.tokens[:accepted] for draw in draws)
    observed, expected = np.zeros(WIDTH + 1), np.zeros(WIDTH + 1)
    for text, _ in texts.most_common(MOST_CONTEXTS):
        log_probs = np.asarray(support.score_fn(prompt + text), np.float64)
        top = _most_probable(log_probs, WIDTH)
        rank = {int(token): i for i, token in enumerate(top)}
        mass = np.exp(log_probs[top])
        cells = np.concatenate([mass, np.zeros(WIDTH - len(top)), [max(1.0 - mass.sum(), 0.0)]])
        for draw in draws:
            if draw.tokens[:accepted] == text and support.admits([(prompt + text, draw.tokens[accepted])]):
                observed[rank.get(draw.tokens[accepted], WIDTH)] += 1
                expected += cells
    return chi_square(observed, expected / expected.sum()) if expected.any() else 1.0


def _enumerate(
    score_fn: ScoreFn, prompt: Cell, head: Cell, mass: float, depth: int, width: int | None
) -> Iterator[tuple[Cell, float]]:
    log_probs = np.asarray(score_fn(prompt + head), np.float64)
    possible = int(np.isfinite(log_probs).sum())
    own = _most_probable(log_probs, possible if width is None else min(width, possible))
    probs = np.exp(log_probs[own])
    for token, prob in zip(own.tolist(), probs.tolist(), strict=True):
        if depth == 1:
            yield (*head, token), mass * prob
        else:
            yield from _enumerate(score_fn, prompt, (*head, token), mass * prob, depth - 1, width)
    if len(own) < possible:
        yield (*head, REST), mass * max(1.0 - float(probs.sum()), 0.0)


def _most_probable(log_probs: npt.NDArray[np.floating], count: int) -> npt.NDArray[np.intp]:
    """Ids of the most probable tokens that are possible, at most `count`, the lower id first on a tie."""
    order = np.argsort(-log_probs, kind="stable")[:count]
    return order[np.isfinite(log_probs[order])]


def _find_cell(tokens: Cell, exact: dict[Cell, float], inner: set[Cell]) -> Cell:
    for end in range(1, len(tokens) + 1):
        if tokens[:end] in exact:
            return tokens[:end]
        if tokens[:end] not in inner:
            return (*tokens[: end - 1], REST)
    raise ConfigError(f"{len(tokens)} tokens are fewer than the distribution describes")


def _first_accepted(completion: Any) -> int | None:
    """Draft tokens accepted in the first round, if the completion reports it."""
    counters = getattr(getattr(completion, "stats", None), "speculative_decoding", None)
    return None if counters is None else counters.per_step_accepted[0]
