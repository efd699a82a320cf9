"""Ancestors from parents."""

import jax
import numpy as np

from jaxspec.tree.tree import ancestor_matrix

DEEPEST = (0, 1, 2, 3, 7, 40)


def random_parents(deepest, trees=12, rows=64):
    """Parents [trees, rows] and ancestors, each tree with a row of depth `deepest` and none deeper."""
    rng = np.random.default_rng(deepest)
    parents, ancestors = np.zeros((trees, rows), np.int32), np.zeros((trees, rows, rows), bool)
    for tree in range(trees):
        used = 1 if deepest == 0 else int(rng.integers(deepest + 1, rows + 1))
        depth = np.zeros(rows, int)
        for row in range(rows):
            if row >= used:
                parents[tree, row] = row  # a filler is its own parent
            elif 0 < row <= deepest:
                parents[tree, row] = row - 1  # a chain down to the deepest row, then anything
            elif row > 0:
                parents[tree, row] = rng.choice(np.flatnonzero(depth[:row] < deepest))
            parent = parents[tree, row]
            depth[row] = depth[parent] + 1 if parent != row else 0
            ancestors[tree, row] = ancestors[tree, parent]
            ancestors[tree, row, row] = True
        assert depth.max() == deepest
    return parents, ancestors


def test_ancestor_matrix():
    cases = [random_parents(deepest) for deepest in DEEPEST]

    @jax.jit
    def run(parents):  # a bound may be larger than what occurs
        return [
            [jax.vmap(lambda p, bound=bound: ancestor_matrix(p, bound))(trees) for bound in (deepest, deepest + 3)]
            for deepest, trees in zip(DEEPEST, parents, strict=True)
        ]

    # Only `parent` counts: rows may come before their parents.
    order = np.random.default_rng(9).permutation(64)
    shuffled = [np.empty_like(parents) for parents, _ in cases]
    for new, (parents, _) in zip(shuffled, cases, strict=True):
        new[:, order] = order[parents]
    in_order, in_any_order = run([parents for parents, _ in cases]), run(shuffled)
    for found, other, (_, expected) in zip(in_order, in_any_order, cases, strict=True):
        for one, two in zip(found, map(np.asarray, other), strict=True):
            np.testing.assert_array_equal(one, expected)
            np.testing.assert_array_equal(two[:, order[:, None], order], expected)
