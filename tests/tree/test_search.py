"""Best-first search against enumeration of all prefixes."""

import functools

import jax
import numpy as np
import pytest
from marks import quick_part
from plain_trees import (
    BUDGET,
    TABLES,
    VOCAB,
    expand,
    growing_trees,
    random_draft,
    stack,
    start,
)

from jaxspec.tree.tree import is_complete


@functools.cache
def searches():
    """Drafts, roots, and for each of them the scores of all prefixes, best first."""
    rng = np.random.default_rng(0)
    drafts, roots, prefixes = [], [], []
    for case in range(TABLES):
        vocab = int(rng.integers(3, VOCAB + 1))
        depth = int(rng.integers(3, 6 if vocab < 5 else 5))
        draft = random_draft(rng, ("law", "chain", "ties")[case % 3], vocab, depth)
        root = int(rng.integers(vocab))
        drafts.append(draft)
        roots.append(root)
        prefixes.append(enumerate_prefixes(draft, root, depth))
    return stack(drafts), np.array(roots, np.int32), prefixes


def enumerate_prefixes(draft, root, depth):
    """(score, path) of every prefix of at most `depth` tokens, float32 sums from the root on; best first."""
    last, found = [(np.float32(0), (), root)], []
    for level in range(depth):
        longer = []
        for score, path, token in last:
            for t, x in zip(draft[0][level, token].tolist(), draft[1][level, token], strict=True):
                if x > -np.inf:
                    longer.append((score + x, (*path, t), t))
        found += [(score, path) for score, path, _ in longer]
        last = longer
    return sorted(found, key=lambda f: -f[0])


@functools.cache
def search_function(width):
    """(draft, root, budget) -> tree, steps; mapped over cases, and over budgets within."""
    rows = 1 + width * (BUDGET if width < 16 else 8)

    def search(draft, root, budget):
        def go_on(state):
            tree, _ = state
            return ~is_complete(tree, budget) & (tree.size + width <= rows)

        def step(state):
            tree, steps = state
            return expand(tree, draft, width)[0], steps + 1

        tree, steps = jax.lax.while_loop(go_on, step, (start(draft, root, rows), 0))
        return tree, steps, is_complete(tree, budget)

    over_budgets = jax.vmap(search, (None, None, 0))
    return jax.jit(jax.vmap(over_budgets))


def search_all(width):
    """Yields (tree, steps, complete, budget, prefixes) of every search."""
    drafts, roots, prefixes = searches()
    # Every budget in turn: 1 .. 24 in 4 lots of 6, a lot per case.
    budgets = np.stack([np.arange(1 + case % 4, BUDGET + 1, 4) for case in range(TABLES)])
    trees, steps, complete = jax.tree.map(np.asarray, search_function(width)(drafts, roots, budgets))
    for case in range(TABLES):
        for i, budget in enumerate(budgets[case]):
            tree = jax.tree.map(lambda x, at=(case, i): x[at], trees)
            yield tree, steps[case, i], complete[case, i], int(budget), prefixes[case]


def best_scores(tree, budget):
    scores = np.sort(tree.child_score.ravel())[::-1][:budget]
    return scores[scores > -np.inf]


def best_paths(tree, budget):
    paths = {0: ()}
    for row in range(1, tree.size):
        paths[row] = (*paths[int(tree.parent[row])], int(tree.token[row]))
    chosen = np.argsort(-tree.child_score.ravel(), kind="stable")[:budget]
    chosen = chosen[tree.child_score.ravel()[chosen] > -np.inf]
    rows, places = np.divmod(chosen, tree.branch)
    return {(*paths[int(r)], int(tree.child_token[r, p])) for r, p in zip(rows, places, strict=True)}


@pytest.mark.parametrize("width", quick_part([1, 2, 4, 16], lambda width: width == 4))
def test_search_finds_the_most_probable_prefixes(width):
    early = 0
    for tree, steps, complete, budget, prefixes in search_all(width):
        assert complete, "stopped for want of rows"
        expected = prefixes[:budget]
        np.testing.assert_array_equal(best_scores(tree, budget), [score for score, _ in expected])
        # A batch of these is closed, and made of prefixes that have these scores.
        found = best_paths(tree, budget)
        score_of = {path: score for score, path in prefixes}
        assert sorted(score_of[path] for path in found) == sorted(score for score, _ in expected)
        assert all(path[:-1] in found or len(path) == 1 for path in found)
        clear = len(prefixes) <= budget or prefixes[budget - 1][0] > prefixes[budget][0]
        if clear:
            assert found == {path for _, path in expected}
        early += budget > 8 and width == 1 and steps < budget
    assert width > 1 or early > TABLES  # it does stop early


def test_is_complete_says_whether_growth_could_change_the_best():
    """At worst a leaf's children, their children and so on have probability 1, and nothing scores higher."""
    complete = jax.jit(jax.vmap(jax.vmap(is_complete, (None, 0, None)), (0, None, 0)))
    budgets = np.arange(1, 41)
    said = set()
    for trees, plains in growing_trees():
        least = np.array([[-np.inf, -1.0, -2.5][i % 3] for i in range(len(plains))], np.float32)
        got = np.asarray(complete(trees, budgets, least))
        for i, plain in enumerate(plains):
            scores = sorted((p[0] for p in plain.proposals()), reverse=True)
            frontier = [p[0] for p in plain.leaves(least[i])]
            for budget, answer in zip(budgets, got[i], strict=True):
                more = frontier[:1] * budget
                changed = sorted(scores + more, reverse=True)[:budget] != scores[:budget]
                assert answer == (not changed), (budget, least[i])
                said.add((bool(answer), bool(frontier), least[i] > -np.inf))
    assert len(said) == 6  # also without a frontier, which is always complete
