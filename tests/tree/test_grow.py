"""Growth against enumeration of all prefixes, and against the same tree grown one node at a time in Python."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import quick_compilation

from jaxspec.tree.grow import add_rows, is_complete, leaf_scores, pick_leaves, picked_mask, plant
from jaxspec.tree.select import select_batch
from jaxspec.tree.topology import ancestor_matrix, init_tree

VOCAB = BRANCH = 6
LEVELS = 6  # of a table; deeper nodes start at its first level again
BUDGET = 24
TABLES = 40
UNKNOWN = 99  # a token that no table proposes; tokens from VOCAB on share the last row


@pytest.fixture(scope="module", autouse=True)
def quickly():
    with quick_compilation():
        yield


# Drafts: proposals and their log-probabilities depend on the depth and the token of their parent. [LEVELS, VOCAB, k]


def random_draft(rng, kind, vocab=VOCAB, depth=LEVELS, branch=BRANCH):
    """Children in random places; places without one, and all places from level `depth` on, are -inf.

    Args:
      rng: numpy's.
      kind: "law", normalised and from flat to spiked; "chain", the same for all depths; or "ties", few values, 0 (that
        is, probability 1) among them, all of which float32 adds exactly.
      vocab: tokens that are proposed.
      depth: of the deepest token.
      branch: k; the most probable tokens of a law are kept.
    """
    shape = (LEVELS, VOCAB, vocab)
    if kind == "ties":
        values = np.array([[0, -1], [0, -0.25, -0.5], [-0.5, -0.5, -1], [0, 0, -8]][rng.integers(4)], object)
        logprob = rng.choice(np.asarray(values, np.float64), shape)
        logprob[rng.random(shape) < 0.1] = -np.inf
    else:
        z = rng.normal(size=shape) * rng.choice([0.5, 1, 3, 6])
        if kind == "chain":
            z = np.broadcast_to(z[0], shape)
        logprob = z - np.log(np.exp(z).sum(-1, keepdims=True))
    place = rng.permuted(np.broadcast_to(np.arange(branch), (LEVELS, VOCAB, branch)), axis=-1)
    best_first = np.argsort(-logprob, axis=-1, kind="stable")
    token = np.broadcast_to(np.arange(branch), place.shape).copy()
    wide = np.full((LEVELS, VOCAB, branch), -np.inf, np.float32)
    count = min(vocab, branch)
    token[..., :count] = best_first[..., :count]
    wide[..., :count] = np.take_along_axis(logprob, best_first, axis=-1)[..., :count]
    wide[depth:] = -np.inf
    return tuple(np.take_along_axis(x, place, axis=-1) for x in (token.astype(np.int32), wide))


def propose(draft, depth, token):
    """Rows [w, k] of a draft, as a model would compute them; fillers get some row as well."""
    return tuple(jnp.asarray(table)[depth % LEVELS, jnp.minimum(token, VOCAB - 1)] for table in draft)


def expand(tree, draft, width, least=-jnp.inf, below=0):
    """One draft pass over `width` leaves; the root lies at depth `below` of the draft."""
    picked = pick_leaves(tree, width, least)
    mask = picked_mask(tree, picked)
    return add_rows(tree, picked, mask, *propose(draft, picked.depth + below, picked.token)), picked


def start(draft, root, rows, below=0):
    """A tree of one evaluated root."""
    token, logprob = (x[0] for x in propose(draft, jnp.atleast_1d(below), jnp.atleast_1d(root)))
    return plant(init_tree(rows, draft[0].shape[-1]), jnp.int32(root), token, logprob)


def numpy_trees(trees):
    """A batch of trees as a list of trees of numpy arrays."""
    trees = jax.tree.map(np.asarray, trees)
    return [jax.tree.map(lambda x, i=i: x[i], trees) for i in range(len(trees.size))]


def stack(drafts):
    return tuple(np.stack(x) for x in zip(*drafts, strict=True))


class PlainTree:
    """The same tree as lists; `draft` is one pair of tables, `below` the root's depth in them."""

    def __init__(self, draft, root, below=0):
        self.draft, self.below = draft, below
        self.token, self.parent, self.depth, self.score, self.path = [], [], [], [], []
        self.children = []  # per row: [token, log-probability, score, own row or -1] of each proposal
        self.append(int(root), 0, 0, np.float32(0), ())

    def append(self, token, parent, depth, score, path):
        at = (depth + self.below) % LEVELS, min(token, VOCAB - 1)
        self.token.append(token)
        self.parent.append(parent)
        self.depth.append(depth)
        self.score.append(score)
        self.path.append(path)
        tokens, logprobs = self.draft[0][at], self.draft[1][at]
        self.children.append([[int(t), x, score + x, -1] for t, x in zip(tokens, logprobs, strict=True)])

    def proposals(self):
        """(score, row, place) of all proposals, best first, earlier ones first on a tie."""
        every = [
            (child[2], row, place)
            for row, children in enumerate(self.children)
            for place, child in enumerate(children)
            if child[2] > -np.inf
        ]
        return sorted(every, key=lambda p: (-p[0], p[1], p[2]))

    def path_of(self, row, place):
        return (*self.path[row], self.children[row][place][0])

    def leaves(self, least=-np.inf):
        """(score, row, place), best first."""
        return [p for p in self.proposals() if self.children[p[1]][p[2]][3] < 0 and p[0] >= least]

    def grow(self, width, least=-np.inf):
        for score, row, place in self.leaves(least)[:width]:
            child = self.children[row][place]
            child[3] = len(self.token)
            self.append(child[0], row, self.depth[row] + 1, score, self.path_of(row, place))
        return self

    def select(self, rows, least=-np.inf):
        """Paths of a batch without its root."""
        return {self.path_of(row, place) for score, row, place in self.proposals()[: rows - 1] if score >= least}

    def below_row(self, new_root, below):
        """The tree under one of its rows, replayed row by row; and the old row of each new one."""
        tree = PlainTree(self.draft, self.token[new_root], below)
        new_row, old_rows = {new_root: 0}, [new_root]
        for old in range(len(self.token)):
            if old != new_root and self.parent[old] in new_row:
                parent = new_row[self.parent[old]]
                child = next(c for c in tree.children[parent] if c[0] == self.token[old])
                child[3] = new_row[old] = len(old_rows)
                old_rows.append(old)
                tree.append(self.token[old], parent, tree.depth[parent] + 1, child[2], (*tree.path[parent], child[0]))
        return tree, old_rows


def assert_same(tree, plain, scores=np.testing.assert_array_equal):
    """What a tree promises of its used rows, and that unused rows propose nothing."""
    n = len(plain.token)
    assert tree.size == n
    np.testing.assert_array_equal(tree.token[:n], plain.token)
    np.testing.assert_array_equal(tree.parent[:n], plain.parent)
    np.testing.assert_array_equal(tree.depth[:n], plain.depth)
    assert (tree.parent[1:n] < np.arange(1, n)).all() and tree.parent[0] == 0
    children = np.array(plain.children, np.float64)  # [n, k, 4]
    real = children[:, :, 2] > -np.inf
    scores(tree.score[:n], np.array(plain.score))
    scores(tree.child_score[:n][real], children[:, :, 2].astype(np.float32)[real])
    np.testing.assert_array_equal(tree.child_token[:n][real], children[:, :, 0][real])
    np.testing.assert_array_equal(tree.child_row[:n][real], children[:, :, 3][real])
    assert (tree.child_score[:n][~real] == -np.inf).all() and (tree.child_score[n:] == -np.inf).all()
    assert (tree.child_row[:n][~real] == -1).all()
    ancestors = np.zeros((n, tree.rows), bool)
    for row in range(n):
        ancestors[row] = ancestors[plain.parent[row]]
        ancestors[row, row] = True
    np.testing.assert_array_equal(tree.ancestors[:n], ancestors)


def batch_paths(batch):
    """The path of each row in use, given that parents precede it."""
    paths = [()]
    for row in range(1, int(batch.count)):
        assert batch.parent[row] < row
        paths.append((*paths[int(batch.parent[row])], int(batch.token[row])))
    return paths


# Best-first search.


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
    """(draft, root, budget, naive) -> tree, steps; mapped over cases, and over budgets within."""
    rows = 1 + width * (BUDGET if width < 16 else 8)

    def search(draft, root, budget, naive):
        def stop(tree, before):
            # The published code's test: the proposals made last against the budget-th best of all.
            scores = tree.child_score
            worst = jnp.sort(scores.reshape(-1))[::-1][budget - 1]
            newest = jnp.where(jnp.arange(rows)[:, None] >= before, scores, -jnp.inf).max()
            no_leaf = leaf_scores(tree).max() == -jnp.inf
            looks_done = (newest <= worst) & (worst > -jnp.inf) | no_leaf
            return jnp.where(naive, looks_done, is_complete(tree, budget))

        def go_on(state):
            tree, before, steps = state
            return ~stop(tree, before) & (tree.size + width <= rows)

        def step(state):
            tree, _, steps = state
            return expand(tree, draft, width)[0], tree.size, steps + 1

        tree, _, steps = jax.lax.while_loop(go_on, step, (start(draft, root, rows), jnp.int32(0), 0))
        return tree, steps, is_complete(tree, budget)

    over_budgets = jax.vmap(search, (None, None, 0, None))
    return jax.jit(jax.vmap(over_budgets, (0, 0, 0, None)))


def search_all(width, naive=False):
    """Yields (tree, steps, complete, budget, prefixes) of every search."""
    drafts, roots, prefixes = searches()
    # Every budget in turn: 1 .. 24 in 4 lots of 6, a lot per case.
    budgets = np.stack([np.arange(1 + case % 4, BUDGET + 1, 4) for case in range(TABLES)])
    trees, steps, complete = jax.tree.map(np.asarray, search_function(width)(drafts, roots, budgets, naive))
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


@pytest.mark.parametrize("width", [1, 2, 4, 16])
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


def test_a_stop_test_of_new_proposals_alone_would_be_wrong():
    wrong, hard = {}, 0
    for width in (1, 2, 4, 16):
        cases = [
            not np.array_equal(best_scores(tree, budget), [score for score, _ in prefixes[:budget]])
            for tree, _, _, budget, prefixes in search_all(width, naive=True)
        ]
        wrong[width], hard = sum(cases), len(cases)
    assert wrong[1] > hard // 4 and wrong[2] > 10 and wrong[4] > 0, wrong


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


# Growth step by step.

ROWS, WIDTH = 37, 4


@functools.cache
def grow_functions():
    """start and expand, mapped over drafts."""
    return (
        jax.jit(jax.vmap(functools.partial(start, rows=ROWS))),
        jax.jit(jax.vmap(functools.partial(expand, width=WIDTH))),
    )


@functools.cache
def step_drafts():
    rng = np.random.default_rng(1)
    kinds = ["ties"] * 20 + ["law", "chain"] * 4
    drafts = [random_draft(rng, kind, int(rng.integers(1, 7)), int(rng.integers(1, 7)), branch=4) for kind in kinds]
    roots = rng.integers(VOCAB, size=len(kinds)).astype(np.int32)
    return stack(drafts), roots


@functools.cache
def growing_trees(steps=7):
    """Trees after 0, 1, ... draft passes: (batch of trees, [PlainTree]) each."""
    drafts, roots = step_drafts()
    begin, step = grow_functions()
    trees, result = begin(drafts, roots), []
    for count in range(steps + 1):
        plains = [PlainTree((drafts[0][i], drafts[1][i]), roots[i]) for i in range(len(roots))]
        for plain in plains:
            for _ in range(count):
                plain.grow(WIDTH)
        result.append((trees, plains))
        trees = step(trees, drafts)[0]
    return result


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


def test_planting_starts_over():
    drafts, roots = step_drafts()
    trees, plains = growing_trees()[-1]

    def again(tree, root, draft):
        token, logprob = propose(draft, jnp.array([0]), root[None])
        tree = plant(tree, root, token[0], logprob[0])
        grown = expand(tree, draft, WIDTH)[0]
        return tree, grown, select_batch(grown, 9)

    planted, grown, batches = jax.tree.map(np.asarray, jax.jit(jax.vmap(again))(trees, roots, drafts))
    for i, (one, two) in enumerate(zip(numpy_trees(planted), numpy_trees(grown), strict=True)):
        plain = PlainTree(plains[i].draft, roots[i])
        assert_same(one, plain)
        assert_same(two, plain.grow(WIDTH))
        assert set(batch_paths(jax.tree.map(lambda x, i=i: x[i], batches))[1:]) == plain.select(9)


# Extremes.


def test_a_tree_of_one_row():
    draft = random_draft(np.random.default_rng(3), "law", branch=4)

    @jax.jit
    def run():
        tree = start(draft, 2, 1)
        return tree, pick_leaves(tree, 3), is_complete(tree, 1), is_complete(tree, 4)

    tree, picked, *complete = jax.tree.map(np.asarray, run())
    plain = PlainTree(draft, 2)
    assert_same(tree, plain)
    assert complete == [True, False]  # the best leaf's children may beat the fourth
    np.testing.assert_array_equal(picked.score, [p[0] for p in plain.leaves()[:3]])
    np.testing.assert_array_equal(picked.depth, [1, 1, 1])


def test_one_proposal_per_row_makes_a_chain():
    draft = random_draft(np.random.default_rng(4), "law", depth=5, branch=1)

    step = jax.jit(lambda tree: (expand(tree, draft, 3)[0], is_complete(tree, 100)))
    tree, plain = jax.tree.map(np.asarray, jax.jit(lambda: start(draft, 1, 12))()), PlainTree(draft, 1)
    for _ in range(8):  # two of three leaves are fillers, and the last steps find none
        assert_same(tree, plain)
        complete = not plain.leaves()
        (tree, got), plain = jax.tree.map(np.asarray, step(tree)), plain.grow(3)
        assert got == complete
    assert tree.size == 6 and complete
    np.testing.assert_array_equal(tree.depth[:6], np.arange(6))


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


# Ancestors.


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
