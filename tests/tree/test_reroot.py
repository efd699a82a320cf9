"""Re-rooting equals a tree rebuilt from its survivors, for every verified sequence; the cache follows it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import quick_part
from plain_trees import (
    LEVELS,
    UNKNOWN,
    VOCAB,
    PlainTree,
    assert_same,
    expand,
    numpy_trees,
    plant,
    propose,
    random_draft,
    stack,
    start,
)
from test_select import assert_batch

from jaxspec.models.kv_cache import KVCache, commit_rows, permute_window
from jaxspec.tree.reroot import reroot
from jaxspec.tree.tree import follow, init_tree, pending_tokens, select_batch

ROWS, BRANCH, WIDTH, STEPS = 28, 4, 3, 5
PATH = STEPS + 2  # the deepest leaf, and a bonus token
MOST = 132  # sequences of one tree
PREFIX, SLOTS = 5, 5 + ROWS + PATH + 1  # the re-ordered window just fits


@functools.cache
def grown(rows=ROWS, branch=BRANCH, steps=STEPS, cases=10):
    """(tree, the same as lists, its draft) of several drafts, with room for more, behind what an older tree left.

    The last two took one step only; two others have so few tokens that not all picked leaves are any.
    """
    rng = np.random.default_rng(7)
    kinds = [("ties", "law")[case % 2] for case in range(cases)]
    sizes = [(int(vocab), LEVELS) for vocab in rng.integers(2, VOCAB + 1, cases)]
    sizes[-4:] = [(2, 3), (3, 2), (VOCAB, LEVELS), (VOCAB, LEVELS)][-cases:]
    drafts = [random_draft(rng, kind, *size, branch) for kind, size in zip(kinds, sizes, strict=True)]
    roots = rng.integers(VOCAB, size=cases).astype(np.int32)
    counts = np.array([steps] * (cases - 2) + [min(steps, 1)] * 2)

    def grow(draft, root, count):
        def steps_from(tree, count):
            return jax.lax.fori_loop(0, count, lambda _, t: expand(t, draft, WIDTH)[0], tree) if steps else tree

        older = steps_from(start(draft, (root + 1) % VOCAB, rows), (rows - 1) // WIDTH)
        token, logprob = propose(draft, jnp.array([0]), root[None])
        return steps_from(plant(older, root, token[0], logprob[0]), count)

    trees = numpy_trees(jax.jit(jax.vmap(grow))(stack(drafts), roots, counts))
    plains = [PlainTree(draft, root) for draft, root in zip(drafts, roots, strict=True)]
    for plain, count in zip(plains, counts, strict=True):
        for _ in range(count):
            plain.grow(WIDTH)
    return list(zip(trees, plains, drafts, strict=True))


def verified_sequences(plain):
    """All (tokens, row of the last one or -1) that a target may send for some batch of this tree."""
    found = []
    for row, path in enumerate(plain.path):
        if row:
            found.append((path, row))  # the bonus token is a node
        found.append(((*path, UNKNOWN), -1))  # or not in the tree
        for child in plain.children[row]:
            if child[2] > -np.inf and child[3] < 0:
                leaf = (*path, child[0])
                found.append((leaf, -1))  # or a leaf
                found.append(((*leaf, UNKNOWN), -1))  # or it follows an accepted leaf
    return found


def test_every_kind_of_sequence_occurs():
    kinds = {}
    for _, plain, _ in grown():
        for sequence, row in verified_sequences(plain):
            nodes = sum(sequence[:n] in plain.path for n in range(1, len(sequence) + 1))
            kind = (row >= 0, len(sequence) - nodes, nodes > 0, sequence[-1] == UNKNOWN, len(sequence) == PATH)
            kinds[kind[:4]] = kinds.get(kind[:4], 0) + 1
            kinds["longest"] = kinds.get("longest", 0) + kind[4]
    assert kinds.keys() == {"longest"} | {
        (True, 0, True, False),  # a node
        *((False, 1, deep, unknown) for deep in (False, True) for unknown in (False, True)),  # a leaf; a miss
        *((False, 2, deep, True) for deep in (False, True)),  # an accepted leaf and a miss
    }
    assert min(kinds.values()) > 1, kinds


def as_arrays(plain, sequences, rng, length=PATH, total=MOST):
    """Tokens and counts, `total` of them; what lies behind a count would go on in the tree if it were read."""
    tokens, counts = np.full((total, length), UNKNOWN, np.int32), np.ones(total, np.int32)
    for i, (tokens_of, row) in enumerate(sequences):
        behind = []
        while row >= 0:
            inner = [c for c in plain.children[row] if c[3] >= 0]
            if not inner:
                break
            token, _, _, row = inner[rng.integers(len(inner))]
            behind.append(token)
        every = [*tokens_of, *behind, *rng.integers(VOCAB, size=length)]
        tokens[i] = every[:length]
        counts[i] = len(tokens_of)
    return tokens, counts


@functools.cache
def reroot_function(grows):
    """(tree, tokens, counts, caches, draft) -> all that follows, mapped over sequences."""

    def run(tree, tokens, count, cache, draft):
        moved = reroot(tree, tokens, count)
        cache = commit_rows(permute_window(cache, moved.order, tree.rows), moved.committed)
        # What a method does next: plant a root that was not evaluated, and grow.
        root = moved.pending[jnp.maximum(moved.num_pending - 1, 0)]
        token, logprob = propose(draft, count[None], root[None])
        fresh = plant(moved.tree, root, token[0], logprob[0])
        again = jax.tree.map(lambda a, b: jnp.where(moved.num_pending > 0, a, b), fresh, moved.tree)
        for _ in range(2 * grows):
            again = expand(again, draft, WIDTH, below=count)[0]
        # Another method always evaluates the root anew: it takes one node less than it reached.
        rows, reached = follow(tree, tokens, count)
        short = pending_tokens(tokens, count, jnp.minimum(reached, count))
        return moved, cache, again, select_batch(again, 9), (rows, reached, *short)

    return jax.jit(jax.vmap(run, (None, 0, 0, None, None)))


def labelled_cache(size):
    """A cache whose slots hold their own numbers, 100 and on in the window, -1 behind it."""
    slots = np.full(SLOTS, -1, np.int32)
    slots[:PREFIX] = np.arange(PREFIX)
    slots[PREFIX : PREFIX + size] = 100 + np.arange(size)
    layer = np.broadcast_to(slots[None, :, None], (2, SLOTS, 3))
    return KVCache((layer, layer + 1000), (layer + 2000, layer + 3000), np.int32(PREFIX))


CASES = [(ROWS, BRANCH, STEPS, case) for case in range(10)]
# The root alone, and chains.
CASES += [(rows, branch, steps, case) for rows, branch, steps in ((1, 3, 0), (13, 1, 3)) for case in (0, 1)]


@pytest.mark.parametrize(("rows", "branch", "steps", "case"), quick_part(CASES, lambda rows, *_: rows < 13))
def test_every_verified_sequence(rows, branch, steps, case):
    whole = rows == ROWS
    tree, plain, draft = grown(rows, branch, steps, 10 if whole else 2)[case]
    sequences = verified_sequences(plain)
    tokens, counts = as_arrays(plain, sequences, np.random.default_rng(case))
    results = reroot_function(whole)(tree, tokens, counts, labelled_cache(tree.size), draft)
    results = jax.tree.map(np.asarray, results)
    close = functools.partial(np.testing.assert_allclose, atol=1e-5)
    scores = np.testing.assert_array_equal if case % 2 == 0 and whole else close  # sums of ties are exact
    for i, (sequence, row) in enumerate(sequences):
        result = jax.tree.map(lambda x, i=i: x[i], results)
        moved, cache, again, batch, (path_rows, reached, short, num_short) = result
        # Rows of the tokens on the path, as far as there are any.
        on_path = [0]
        for token in sequence:
            rows = [c[3] for c in plain.children[on_path[-1]] if c[0] == token and c[3] >= 0]
            if not rows:
                break
            on_path += rows
        if row >= 0:
            expected, old_rows = plain.below_row(row, len(sequence))
            assert on_path[-1] == row and len(on_path) == len(sequence) + 1
            assert_same(moved.tree, expected, scores)
            joined, pending = on_path[:-1], []
        else:
            expected, old_rows = PlainTree(draft, sequence[-1], len(sequence)), []
            assert moved.tree.size == 0 and (moved.tree.child_score == -np.inf).all()
            joined, pending = on_path, [*sequence[len(on_path) - 1 :]]
        assert moved.num_pending == len(pending) <= 2 and moved.committed == len(joined)
        assert moved.pending[: len(pending)].tolist() == pending
        # Every verified token but the root is in the prefix or pending.
        assert len(joined) + max(len(pending) - 1, 0) == len(sequence)
        assert reached == len(on_path) and path_rows[:reached].tolist() == on_path
        assert path_rows.shape == (PATH + 1,) and num_short == max(len(pending), 1)
        assert tuple(short[:num_short]) == sequence[-num_short:]

        assert cache.length == PREFIX + len(joined)
        labels = [*range(PREFIX), *(100 + r for r in joined), *(100 + r for r in old_rows)]
        for i, layer in enumerate((*cache.key, *cache.value)):
            expected_layer = np.broadcast_to(np.array(labels)[None, :, None] + 1000 * i, (2, len(labels), 3))
            np.testing.assert_array_equal(layer[:, : len(labels)], expected_layer)

        if whole:  # with room for more rows
            expected.grow(WIDTH).grow(WIDTH)
            assert_same(again, expected, scores)
            assert_batch(batch, expected)


def empty_tree(rows, branch):
    return jax.tree.map(np.asarray, jax.jit(init_tree, static_argnums=(0, 1))(rows, branch))


# Many rounds.


def label(text):
    """The content of the cache row of the last token of `text`: a function of everything up to it."""
    value = 0
    for token in text:
        value = (value * 31 + token + 1) % 1_000_003
    return value


@functools.cache
def round_functions():
    @functools.partial(jax.jit, static_argnames="width")
    def grow(tree, draft, below, width):
        return expand(tree, draft, width, below=below)

    @jax.jit
    def move(tree, cache, tokens, count):
        moved = reroot(tree, tokens, count)
        return moved, commit_rows(permute_window(cache, moved.order, tree.rows), moved.committed)

    @jax.jit
    def begin(tree, draft, below, root):
        token, logprob = propose(draft, below[None], root[None])
        return plant(tree, root, token[0], logprob[0])

    return grow, move, begin, jax.jit(lambda tree: select_batch(tree, 6))


@pytest.mark.parametrize("loyalty", [0.0, 0.5, 0.9, 1.0])
def test_the_cache_holds_the_verified_text_after_any_number_of_rounds(loyalty):
    """The target draws from the tree's own tables with probability `loyalty`; the tree grows while it verifies."""
    rng = np.random.default_rng(int(loyalty * 10))
    draft = random_draft(rng, "law", 5, branch=BRANCH)
    grow, move, begin, select = round_functions()
    rows, slots = 2 * ROWS, 512
    layer = np.zeros((1, slots, 1), np.int32)
    text, root_at = [3], 0  # the root is the last token
    tree, cache = begin(empty_tree(rows, BRANCH), draft, np.int32(0), np.int32(3)), KVCache((layer,), (layer,), 0)
    window = [label(text)]
    states = set()

    def write(cache, at, labels):
        """A pass: its rows go behind those that are there, fillers among them."""
        layers = [np.array(x) for x in (*cache.key, *cache.value)]
        for x in layers:
            x[0, at : at + len(labels), 0] = labels
        return dataclasses.replace(cache, key=(layers[0],), value=(layers[1],))

    cache = write(dataclasses.replace(cache, length=np.int32(0)), 0, window)

    def grow_once(tree, cache):
        if int(tree.size) + WIDTH > rows:
            return tree, cache
        before = int(tree.size)
        tree, picked = jax.tree.map(np.asarray, grow(tree, draft, np.int32(root_at), WIDTH))
        labels = []
        for i, valid in enumerate(picked.score > -np.inf):
            path, row = [], before + i
            while valid and row:
                path.append(int(tree.token[row]))
                row = int(tree.parent[row])
            labels.append(label(text + path[::-1]) if valid else -7)
        return tree, write(cache, int(cache.length) + before, labels)

    for _ in range(25):
        tree, cache = grow_once(tree, cache)
        batch = jax.tree.map(np.asarray, select(tree))
        for _ in range(rng.integers(3)):  # while the batch is in flight
            tree, cache = grow_once(tree, cache)
        verified, row = [], 0
        while row >= 0:
            token = UNKNOWN
            if rng.random() < loyalty:
                level = (root_at + len(verified)) % LEVELS
                at = level, min([text[-1], *verified][-1], VOCAB - 1)
                p = np.exp(np.float64(draft[1][at]))
                token = int(rng.choice(draft[0][at], p=p / p.sum()))
            verified.append(token)
            children = [r for r in range(1, batch.count) if batch.parent[r] == row and batch.token[r] == token]
            row = children[0] if children else -1
        tokens = np.array([*verified, *[0] * PATH], np.int32)[:PATH]
        moved, cache = jax.tree.map(np.asarray, move(tree, cache, tokens, np.int32(len(verified))))
        text, root_at, tree = text + verified, root_at + len(verified), moved.tree
        states.add(int(moved.num_pending))
        if moved.num_pending:
            n = int(moved.num_pending)
            assert moved.pending[:n].tolist() == text[-n:]
            cache = write(cache, int(cache.length), [label(text[: len(text) - n + 1 + i]) for i in range(n)])
            cache = dataclasses.replace(cache, length=cache.length + np.int32(n - 1))
            tree = jax.tree.map(np.asarray, begin(tree, draft, np.int32(root_at), np.int32(text[-1])))
        assert cache.length == len(text) - 1
        held = [label(text[: i + 1]) for i in range(len(text) - 1)]
        for row in range(int(tree.size)):
            path, at = [], row
            while at:
                path.append(int(tree.token[at]))
                at = int(tree.parent[at])
            held.append(label(text + path[::-1]))
        for x in (*cache.key, *cache.value):
            np.testing.assert_array_equal(x[0, : len(held), 0], held)
    assert states == ({0, 1, 2} if loyalty else {1})
