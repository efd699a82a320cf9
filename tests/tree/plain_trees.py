"""Drafts as tables of proposals, trees that grow from them, and the same trees grown one node at a time in Python."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.tree.tree import add_rows, init_tree, pick_leaves, picked_mask, plant

VOCAB = BRANCH = 6
LEVELS = 6  # of a table; deeper nodes start at its first level again
BUDGET = 24
TABLES = 40
UNKNOWN = 99  # a token that no table proposes; tokens from VOCAB on share the last row
ROWS, WIDTH = 37, 4


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
    """Check a tree's promises for its used rows, and that unused rows propose nothing."""
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
