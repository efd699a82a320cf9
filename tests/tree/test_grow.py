"""Growth against the same tree grown one node at a time in Python."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_trees import (
    ROWS,
    WIDTH,
    PlainTree,
    assert_same,
    batch_paths,
    expand,
    grow_functions,
    growing_trees,
    numpy_trees,
    propose,
    random_draft,
    stack,
    start,
    step_drafts,
)

from jaxspec.tree.tree import ancestor_matrix, renew_root, select_batch


def test_growth_equals_a_tree_grown_one_node_at_a_time():
    fillers = 0
    for trees, plains in growing_trees():
        for tree, plain in zip(numpy_trees(trees), plains, strict=True):
            assert_same(tree, plain)
            for children in plain.children:
                assert len({c[0] for c in children}) == 4
        fillers += sum(len(plain.leaves()) < WIDTH for plain in plains)
    assert fillers > 10


@pytest.mark.parametrize("least", [-np.inf, -0.5, -1.0, 0.0, 0.5])
def test_picked_leaves_are_the_best_ones(least):
    drafts, _ = step_drafts()
    _, step = grow_functions()
    for trees, plains in growing_trees()[::3]:
        lowest = np.full(len(plains), least, np.float32)
        grown, picked = step(trees, drafts, least=lowest)
        grown, valid, picked = numpy_trees(grown), np.asarray(picked.valid), jax.tree.map(np.asarray, picked)
        for i, plain in enumerate(plains):
            best = plain.leaves(least)[:WIDTH]
            n = len(best)
            assert valid[i].tolist() == [True] * n + [False] * (WIDTH - n)
            assert (picked.score[i, n:] == -np.inf).all()
            np.testing.assert_array_equal(picked.score[i, :n], [score for score, _, _ in best])
            np.testing.assert_array_equal(picked.parent[i, :n], [row for _, row, _ in best])
            np.testing.assert_array_equal(picked.proposal[i, :n], [row * 4 + place for _, row, place in best])
            np.testing.assert_array_equal(picked.token[i, :n], [plain.children[r][p][0] for _, r, p in best])
            np.testing.assert_array_equal(picked.depth[i, :n], [plain.depth[r] + 1 for _, r, _ in best])
            assert grown[i].size == len(plain.token) + n  # fillers do not count


def test_a_probability_above_one_does_not_lift_a_child():
    draft = random_draft(np.random.default_rng(2), "law", branch=4)
    draft = draft[0], np.where(draft[1] > -1.5, np.float32(3e-7), draft[1])
    tree = jax.tree.map(np.asarray, jax.jit(lambda: expand(start(draft, 0, ROWS), draft, WIDTH)[0])())
    parent_score = np.broadcast_to(tree.score[: tree.size, None], (tree.size, 4))
    assert tree.size > 1 and (tree.child_score[: tree.size] <= parent_score).all()
    assert (tree.child_score[: tree.size] == parent_score).any()


def test_a_renewed_root_keeps_its_nodes_and_proposes_anew():
    drafts, roots = step_drafts()
    other = stack([
        random_draft(np.random.default_rng(50 + i), ("law", "ties")[i % 2], 5 - i % 3, branch=4)
        for i in range(len(roots))
    ])  # fmt: skip
    # A root without proposals, and probabilities a little above 1 by rounding.
    other[1][0, 0] = -np.inf
    other[1][2::5, 0, :, 1] = 3e-7
    kept = replaced = 0

    def renew(tree, root, draft, other):
        token, logprob = propose(other, jnp.array([0]), root[None])
        renewed = renew_root(tree, token[0], logprob[0])
        return renewed, expand(renewed, draft, WIDTH)[0], select_batch(renewed, 9)

    renew = jax.jit(jax.vmap(renew))
    for trees, plains in growing_trees()[:-1]:
        results = jax.tree.map(np.asarray, renew(trees, roots, drafts, other))
        for i, (tree, grown) in enumerate(zip(*map(numpy_trees, results[:2]), strict=True)):
            before, plain = {child[0] for child in plains[i].children[0]}, copy.deepcopy(plains[i])
            tokens, logprobs = (table[i][0, roots[i]] for table in other)
            wanted = {int(t): min(x, np.float32(0)) for t, x in zip(tokens, logprobs, strict=True) if x > -np.inf}
            nodes = {child[0]: child for child in plain.children[0] if child[3] >= 0}
            least = min(wanted.values(), default=np.float32(0))
            for token, child in nodes.items():
                change = np.float32(wanted.get(token, min(child[2], least)) - child[2])
                below = [r for r in range(len(plain.token)) if plain.path[r][:1] == (token,)]
                child[2] += change
                for row in below:
                    plain.score[row] += change
                    for proposal in plain.children[row]:
                        proposal[2] += change
            new = sorted(((x, t) for t, x in wanted.items() if t not in nodes), key=lambda one: -one[0])
            free = [child for child in plain.children[0] if child[3] < 0]
            for place, child in enumerate(free):
                score, token = new[place] if place < len(new) else (np.float32(-np.inf), child[0])
                child[0], child[2] = token, score
            assert_same(tree, plain)
            assert set(batch_paths(jax.tree.map(lambda x, i=i: x[i], results[2]))[1:]) == plain.select(9)
            assert grown.size == tree.size + min(WIDTH, len(plain.leaves()))
            scored = tree.child_score[: tree.size] <= tree.score[: tree.size, None]
            assert scored[1:].all() and (tree.child_score[0] <= 0).all()
            kept += len(nodes)
            replaced += before != {child[0] for child in plain.children[0]}
    assert kept > 400 and replaced > 40


# Extremes.


@pytest.mark.thorough
def test_a_tree_of_4096_rows():
    draft = random_draft(np.random.default_rng(5), "law", branch=4)
    draft = draft[0], np.round(draft[1] * 4) / 4  # many ties
    width = 585  # 1 + 7 * 585 = 4096
    step = jax.jit(lambda tree: expand(tree, draft, width)[0], donate_argnums=0)
    tree, plain = jax.jit(lambda: start(draft, 0, 4096))(), PlainTree(draft, 0)
    for _ in range(7):
        tree, plain = step(tree), plain.grow(width)
    assert_same(jax.tree.map(np.asarray, tree), plain)

    depth = max(plain.depth) + 1
    batch, seen = jax.jit(lambda tree: (b := select_batch(tree, 2049), ancestor_matrix(b.parent, depth)))(tree)
    batch = jax.tree.map(np.asarray, batch)
    expected = np.eye(2049, dtype=bool)
    for row in range(1, 2049):
        expected[row] |= expected[batch.parent[row]]
    assert batch.count == 2049 and set(batch_paths(batch)[1:]) == plain.select(2049)
    np.testing.assert_array_equal(seen, expected)
