"""The distribution test: correct walks pass it, and every classic mistake fails it."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest

from jaxspec.check.distribution import (
    FALSE_ALARM,
    REST,
    Draw,
    _find_cell,
    check_distribution,
    chi_square,
    draw_many,
    joint_distribution,
)
from jaxspec.config import SamplingParams
from jaxspec.errors import ConfigError

V, LENGTH, PROMPT, SAMPLES, SEED = 8, 5, (3,), 1500, 10**6


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def table(seed, temperature=1.0):
    """Next-token distribution of an order-1 Markov model, [V, V]: processed by temperature and by top-6."""
    z = np.random.default_rng(seed).normal(size=(V, V)) * 1.5
    z[z < np.sort(z)[:, [2]]] = -np.inf
    return softmax(z / temperature)


TEMPERATURE = 2.0
TARGET, DRAFT = table(0, TEMPERATURE), softmax(np.log(table(0, TEMPERATURE) + 0.05) + 0.8 * np.log(table(1) + 0.05))
SURE = np.full((V, V), 0.02) + 0.84 * np.eye(V)[TARGET.argmax(-1)]  # a draft that is far too sure of itself
UNWARMED = table(0)  # the target, its temperature ignored


def scores(text):
    with np.errstate(divide="ignore"):
        return np.log(TARGET[text[-1]])


def pick(rng, p):
    return int(rng.choice(V, p=p))


def residual(p, q):
    rest = np.maximum(p - q, 0)
    return rest / rest.sum() if rest.sum() > 0 else p


# Walks of one round from a root: (accepted tokens, the token after them). Each draws two levels.
def chain(rng, root, draft=DRAFT, bonus=TARGET, shared=False):
    """R2: a chain of two, drawn from q."""
    path, uniform = [], rng.random()
    node = root
    for _ in range(2):
        p, q = TARGET[node], draft[node]
        token = pick(rng, q)
        if (uniform if shared else rng.random()) >= p[token] / q[token]:
            return path, pick(rng, residual(p, q))
        path.append(token)
        node = token
    return path, pick(rng, bonus[node])


def tree(rng, root, children="sampled", replacement=True):
    """R3 and R3': two levels of two children, drawn from q; or (the classic error) its most probable two."""
    path, node = [], root
    for _ in range(2):
        p, q = TARGET[node], DRAFT[node].copy()
        for i in range(2):
            token = pick(rng, q) if children == "sampled" else int(np.argsort(-DRAFT[node])[i])
            if rng.random() < p[token] / q[token]:
                break
            p = residual(p, q)
            if not replacement:
                q[token] = 0
                q /= q.sum()
        else:
            return path, pick(rng, p)
        path.append(token)
        node = token
    return path, pick(rng, TARGET[node])


def match(rng, root, redraw=False, pad=None):
    """R4: two levels of the two most probable children."""
    path, node = [], root
    for _ in range(2):
        token = pick(rng, TARGET[node])
        children = [*np.argsort(-DRAFT[node])[:2]] if pad is None else [int(np.argmax(DRAFT[node])), pad]
        if redraw and token not in children:
            token = pick(rng, TARGET[node])
            return path, token
        if pad is not None and token not in children and rng.random() < 0.2:
            token = pad  # an empty row, taken for a token
        if token not in children:
            return path, token
        path.append(token)
        node = token
    return path, pick(rng, TARGET[node])


class Toy:
    """A method: a walk, round after round; reports what it accepted as a completion does."""

    def __init__(self, walk, reports=True):
        self.walk = walk
        self.reports = reports

    def generate(self, prompt, sampling):
        assert sampling.ignore_eos
        rng = np.random.default_rng(sampling.seed)
        tokens, accepted = [], []
        while len(tokens) < sampling.max_tokens:
            path, last = self.walk(rng, (*prompt, *tokens)[-1])
            tokens += [*path, last]
            accepted.append(len(path))
        counters = SimpleNamespace(per_step_accepted=accepted) if self.reports else None
        return SimpleNamespace(
            token_ids=tokens[: sampling.max_tokens], stats=SimpleNamespace(speculative_decoding=counters)
        )


def draw(walk, reports=True):
    return list(draw_many(Toy(walk, reports), PROMPT, SamplingParams(LENGTH, temperature=TEMPERATURE), SAMPLES, SEED))


def check(walk, reports=True):
    return check_distribution(scores, PROMPT, draw(walk, reports))


CORRECT = {
    "R2": chain,
    "R2, a draft too sure": functools.partial(chain, draft=SURE),
    "R3": tree,
    "R3'": functools.partial(tree, replacement=False),
    "R4": match,
}


@pytest.mark.parametrize("rule", CORRECT)
def test_exact_rules_pass(rule):
    result = check(CORRECT[rule])
    assert result.verdict == "equal" and result.p_value > 0.01
    assert list(result.after) == [1, 2]  # the bonus token of a fully accepted round, and the one before it
    assert (result.samples, result.impossible, result.edge) == (SAMPLES, 0, 0)


@pytest.mark.parametrize(
    "walk",
    [
        pytest.param(functools.partial(chain, bonus=UNWARMED), id="bonus token at the wrong temperature"),
        pytest.param(functools.partial(chain, draft=SURE, shared=True), id="one random number decides twice"),
        pytest.param(functools.partial(tree, children="top"), id="p/q ratio on top-k children"),
        pytest.param(functools.partial(match, redraw=True), id="redrawn because it was not in the tree"),
        pytest.param(functools.partial(match, pad=0), id="pad accepted"),
    ],
)
def test_planted_bugs_fail(walk):
    result = check(walk)
    assert result.verdict == "different" and result.p_value < FALSE_ALARM


def test_impossible_tokens_fail_by_themselves_unless_a_cut_is_near():
    cut = int(np.flatnonzero(TARGET[PROMPT[-1]] == 0)[0])

    draws = draw(match)
    for i in range(3):
        draws[i] = Draw((cut, *draws[i].tokens[1:]), accepted=0)
    result = check_distribution(scores, PROMPT, draws)
    assert (result.verdict, result.p_value, result.impossible) == ("different", 0.0, 3)
    forgiven = check_distribution(scores, PROMPT, draws, edge_fn=lambda text, token: (text, token) == (PROMPT, cut))
    assert (forgiven.verdict, forgiven.impossible, forgiven.edge) == ("equal", 0, 3)


def test_joint_distribution_enumerates():
    full = joint_distribution(scores, PROMPT, 2)
    first = TARGET[PROMPT[-1]]
    assert sum(full.values()) == pytest.approx(1) and len(full) == 36
    assert full[1, 2] if first[1] * TARGET[1][2] else (1, 2) not in full
    assert all(mass == pytest.approx(first[a] * TARGET[a][b]) for (a, b), mass in full.items())
    pooled = joint_distribution(scores, PROMPT, 2, width=3)
    assert sum(pooled.values()) == pytest.approx(1) and len(pooled) == 3 * 4 + 1
    top = [int(token) for token in np.argsort(-first)[:3]]
    assert {cell[0] for cell in pooled} == {*top, REST}
    assert pooled[(REST,)] == pytest.approx(1 - first[top].sum())
    inner = {cell[:i] for cell in pooled for i in range(len(cell))}
    for (a, b), mass in full.items():
        cell = _find_cell((a, b, 7), pooled, inner)
        assert cell in pooled and pooled[cell] >= mass * (1 - 1e-9)
    with pytest.raises(ConfigError, match="fewer than the distribution describes"):
        _find_cell((top[0],), pooled, inner)


def test_chi_square_finds_a_shift_and_keeps_its_false_alarm_rate():
    rng = np.random.default_rng(0)
    probs = softmax(np.linspace(0, -6, 40))
    p_values = np.array([chi_square(counts, probs) for counts in rng.multinomial(2000, probs, size=2000)])
    for level in (0.01, 0.1, 0.5):
        assert abs((p_values < level).mean() - level) < 4 * np.sqrt(level * (1 - level) / 2000)
    shifted = softmax(np.log(probs) / 1.3)
    assert max(chi_square(counts, probs) for counts in rng.multinomial(2000, shifted, size=20)) < FALSE_ALARM


def test_chi_square_pools_small_cells_and_knows_what_cannot_be():
    assert chi_square([0, 5], [0.0, 1.0]) == 1.0  # nothing to compare
    assert chi_square([1, 5], [0.0, 1.0]) == 0.0  # cannot be
    assert chi_square([50, 50], [0.5, 0.5]) == 1.0
    # A small cell joins the next smallest when the small ones together are too few: (0.1 % + 49.9 %) against 50 %.
    assert chi_square([20, 30, 50], [0.001, 0.499, 0.5]) == 1.0
    assert chi_square([60, 40], [0.5, 0.5]) == pytest.approx(0.0455, abs=1e-4)
    # One token has nearly all the mass: what is rare must stay rare.
    assert chi_square([0, 2000], [0.9952, 0.0048]) < 1e-300
    assert chi_square([1980, 20], [0.998, 0.002]) < FALSE_ALARM
    assert chi_square([1996, 4], [0.998, 0.002]) > 0.5
    assert chi_square([2000, 0], [0.998, 0.002]) == pytest.approx(2 * 0.998**2000)
    assert chi_square([30, 0, 0], [1.0, 0.0, 0.0]) == 1.0
