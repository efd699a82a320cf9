"""Batches hold the best proposals, closed under parents whatever the ties."""

import functools

import jax
import numpy as np
from plain_trees import (
    PlainTree,
    batch_paths,
    grow_functions,
    growing_trees,
    numpy_trees,
    step_drafts,
)

from jaxspec.tree.tree import Batch, Candidates, ancestor_matrix, pack_best, select_batch

SIZES = (1, 2, 3, 5, 8, 16, 64, 149, 170)  # 148 proposals fill a tree
MASKED = 6  # sizes whose window masks are looked at


@functools.cache
def select_function():
    """trees -> for each size, a batch of batches and their window masks."""

    def select(tree):
        batches = [select_batch(tree, size) for size in SIZES]
        # No batch of these is deeper than 15.
        return batches, [ancestor_matrix(batch.parent, 16) for batch in batches[:MASKED]]

    return jax.jit(jax.vmap(select))


def assert_batch(batch: Batch, plain: PlainTree, ancestors=None):
    """Everything that a batch promises, given the tree it was selected from."""
    paths, seen = assert_closed(batch)
    assert batch.token[0] == plain.token[0]
    # As many as there are; the very best, ties to earlier proposals; no token twice below one parent.
    expected = plain.select(batch.rows)
    assert batch.count == 1 + len(expected) <= batch.rows and set(paths[1:]) == expected
    assert all(path[:-1] in expected or len(path) == 1 for path in expected)
    if ancestors is not None:
        np.testing.assert_array_equal(ancestors, seen)


def assert_closed(batch):
    """Parents precede children, depths follow; returns the path of each row in use and all rows' ancestors."""
    paths, count = batch_paths(batch), int(batch.count)
    assert batch.parent[0] == 0 and batch.depth[0] == 0
    seen = np.eye(batch.rows, dtype=bool)
    for row in range(1, count):
        assert batch.depth[row] == batch.depth[batch.parent[row]] + 1
        seen[row] |= seen[batch.parent[row]]
    np.testing.assert_array_equal(batch.parent[count:], np.arange(count, batch.rows))
    return paths, seen


def test_batches_are_the_best_proposals():
    few = ties_at_the_edge = 0
    for trees, plains in growing_trees()[::2] + growing_trees()[-1:]:
        batches, masks = select_function()(trees)
        masks = [np.asarray(mask) for mask in masks] + [None] * len(SIZES[MASKED:])
        for same_size, mask in zip(batches, masks, strict=True):
            same_size = jax.tree.map(np.asarray, same_size)
            for i, plain in enumerate(plains):
                batch = jax.tree.map(lambda x, i=i: x[i], same_size)
                assert_batch(batch, plain, None if mask is None else mask[i])
                few += batch.count < batch.rows
                scores = [score for score, _, _ in plain.proposals()[batch.rows - 2 : batch.rows]]
                ties_at_the_edge += batch.rows > 1 and len(scores) == 2 and scores[0] == scores[1]
    assert few > 100 and ties_at_the_edge > 100


def test_filled_tree():
    """Every row and every proposal is in use."""
    drafts, roots = step_drafts()
    _, step = grow_functions()
    trees = growing_trees()[-1][0]  # 29 rows at most
    trees = step(step(trees, drafts)[0], drafts)[0]
    batches = jax.tree.map(np.asarray, select_function()(trees)[0])
    assert trees.token.shape[1] in np.asarray(trees.size)
    for i, tree in enumerate(numpy_trees(trees)):
        plain = PlainTree((drafts[0][i], drafts[1][i]), roots[i])
        for _ in range(9):
            plain.grow(4)
        assert tree.size == len(plain.token)
        for batch in batches:
            assert_batch(jax.tree.map(lambda x, i=i: x[i], batch), plain)


def test_candidates_of_any_origin():
    """A forest in any order that has parents first, few scores, gaps; each token names its candidate."""
    rng = np.random.default_rng(0)
    cases, total, sizes = 60, 20, (2, 5, 13, 21, 24)
    parent = np.array(
        [[rng.integers(-1, max(i, 1)) if i else -1 for i in range(total)] for _ in range(cases)], np.int32
    )
    step = rng.choice([0, 0, -1], (cases, total)).astype(np.float32)
    score, depth = np.zeros((cases, total), np.float32), np.ones((cases, total), np.int32)
    for case in range(cases):
        step[case, rng.random(total) < rng.choice([0, 0.1, 0.4])] = -np.inf
        for i, above in enumerate(parent[case]):
            score[case, i] = step[case, i] + (score[case, above] if above >= 0 else 0)
            depth[case, i] = depth[case, above] + 1 if above >= 0 else 1
    token = np.broadcast_to(np.arange(total, dtype=np.int32) + 50, (cases, total))
    candidates = Candidates(token, parent, depth, score)
    pack = jax.jit(jax.vmap(lambda c: [pack_best(np.int32(7), c, size) for size in sizes]))
    for size, batches in zip(sizes, pack(candidates), strict=True):
        batches = jax.tree.map(np.asarray, batches)
        for case in range(cases):
            batch = jax.tree.map(lambda x, i=case: x[i], batches)
            paths, _ = assert_closed(batch)
            best = [i for i in np.argsort(-score[case], kind="stable")[: size - 1] if score[case, i] > -np.inf]
            assert batch.count == 1 + len(best) and batch.token[0] == 7
            expected = set()
            for i in best:
                path = [i]
                while (above := parent[case, path[0]]) >= 0:
                    path.insert(0, above)
                expected.add(tuple(int(token[case, i]) for i in path))
            assert set(paths[1:]) == expected
