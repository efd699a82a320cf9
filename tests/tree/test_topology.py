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

    for found, (_, expected) in zip(run([parents for parents, _ in cases]), cases, strict=True):
        for ancestors in found:
            np.testing.assert_array_equal(ancestors, expected)


def test_ancestor_matrix_of_any_order_of_rows():
    # Only `parent` counts: rows may come before their parents.
    rng = np.random.default_rng(9)
    parent = np.array([0, *(rng.integers(0, i) for i in range(1, 30))])
    order = rng.permutation(30)
    shuffled = np.empty(30, np.int32)
    shuffled[order] = order[parent]
    seen = jax.jit(lambda *parents: [ancestor_matrix(parent, 29) for parent in parents])
    one, other = map(np.asarray, seen(parent, shuffled))
    np.testing.assert_array_equal(other[np.ix_(order, order)], one)
