"""SwiftSpec's draft after any number of rounds: what a replay from scratch says it must hold, and nothing more.

The replay (`Replay`) grows the same trees as Python lists. It keeps no keys and values: every proposal comes from a
fresh prefill of the whole path, on one device, and from the processor that is written for reading. Logits have a
standard deviation of about 3 and rounding is below 1e-5, so no choice is expected to hang on a tie.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import fast_part
from method_cases import LONG_PROMPT, PROMPT, SAMPLINGS, arrays, check_written_slots, with_garbage
from sampling_reference import process_reference
from swiftspec_cases import (
    ADAPTIVE,
    BASIC,
    CASES,
    CHAIN,
    DEEP,
    FOREIGN,
    LARGE_BATCH,
    NODES,
    SERIAL,
    SHORT_CHAIN,
    TIGHT,
    TOGETHER,
    TOGETHER_TP2,
    UNEVEN,
    WIDE,
    Rounds,
    case_id,
    check_counts,
    draft_params,
    grown_rows,
    overlaps,
    params_of,
)
from tiny_models import logits_after, on_one_device
from tiny_pairs import FAMILIES, HEAD_IDS, VOCAB, draft_config, target_params

from jaxspec.config import SamplingParams
from jaxspec.methods.core.round import DraftCounts, ModelParams
from jaxspec.methods.swiftspec.messages import pack_batch, pack_verified, unpack_batch, unpack_verified
from jaxspec.sampling.accept import Verified
from jaxspec.sampling.choose import gumbel_at, seed_key
from jaxspec.tree.tree import Batch

pytestmark = pytest.mark.thorough

ROUNDS = 6
LONGEST = 192  # text and path


class Node:
    """An evaluated token and its proposals, [token, score, row or None]."""

    def __init__(self, path, score, proposals):
        self.path, self.score = path, score
        self.children = [[token, score + np.float32(logprob), None] for token, logprob in proposals]


class Replay:
    """The draft's side, written for reading: what it holds, and what it counts."""

    def __init__(self, case, draft, prompt, seed, sampling):
        self.case, self.draft, self.prompt, self.seed, self.sampling = case, draft, list(prompt), seed, sampling
        self.text, self.rows, self.known = list(prompt), [], {}
        self.passes = self.computed = 0

    def propose(self, path):
        """The likeliest choices of the target after the text and a path, given the noise at their position."""
        text = (*self.text, *path)
        if text not in self.known:
            logits = draft_logits(self.case, self.draft, text)
            config = draft_config(self.case.family, self.case.geometry)
            output, tokens = text[len(self.prompt) :], min(VOCAB, config.vocab_size)
            logprob = process_reference(logits, self.sampling, self.prompt, output, tokens)
            if self.sampling.temperature > 0:
                noise = gumbel_at(seed_key(self.seed), jnp.array([len(text)]), jnp.arange(tokens)[None])[0]
                logprob = self.sampling.temperature * (logprob[:tokens] + np.asarray(noise))
            logprob = logprob - np.logaddexp.reduce(logprob)
            best = np.argsort(-logprob, kind="stable")[: self.case.method.branch]
            self.known[text] = [(int(token), logprob[token]) for token in best]
        return self.known[text]

    def node(self, path, score):
        return Node(path, score, self.propose(path))

    def child(self, row, token):
        """Row of an evaluated child, or None."""
        return next((own for t, _, own in self.rows[row].children if t == token and own is not None), None)

    def proposals(self):
        """(score, row, child), best first, earlier ones first on a tie."""
        every = [
            (child[1], row, child)
            for row, node in enumerate(self.rows)
            for child in node.children
            if child[1] > -np.inf
        ]
        return sorted(every, key=lambda proposal: -proposal[0])

    def expand(self, width):
        for score, row, child in [p for p in self.proposals() if p[2][2] is None][:width]:
            child[2] = len(self.rows)
            self.rows.append(self.node((*self.rows[row].path, child[0]), score))
            self.computed += 1

    def grow(self, passes):
        for _ in range(passes):
            self.expand(self.case.method.width)
            self.passes += 1

    def turn(self, verified):
        """Take in verified tokens; returns the batch as (tokens, parents), and the counts."""
        method, old = self.case.method, self.rows
        first = not old
        path = [] if first else [0]
        while (
            path and len(path) <= len(verified) and (row := self.child(path[-1], verified[len(path) - 1])) is not None
        ):
            path.append(row)
        token_hit = len(path) > len(verified) or (
            len(path) == len(verified) and verified[-1] in [t for t, s, _ in old[path[-1]].children if s > -np.inf]
        )
        if not method.reuse:
            path = path[: len(verified)]
        hit = len(path) > len(verified)
        joined = path[:-1] if hit else path
        pending = [] if hit else verified[max(len(path) - 1, 0) :]
        self.text += [] if first else verified
        self.rows = self.survivors(path[-1]) if hit else []
        kept = len(self.rows)
        exposed = len(pending) > 0
        if pending:
            self.computed += len(pending)
            self.rows = [self.node((), np.float32(0))]
        self.passes += exposed
        if not overlaps(self.case):
            self.grow(method.depth)
            exposed += method.depth
        while not method.leaves and len(self.rows) < method.num_rows and any(p[2][2] is None for p in self.proposals()):
            self.grow(1)
            exposed += 1
        counts = DraftCounts(
            passes=self.passes, exposed=exposed, computed=self.computed, caught_up=len(pending), kept=kept,
            committed=len(joined), dropped=len(old) - kept - len(joined), token_hit=int(token_hit),
            evaluated_hit=int(hit), nodes=len(self.rows),
        )  # fmt: skip
        self.passes = self.computed = 0
        return self.select(), counts

    def survivors(self, root):
        """The best rows below and at `root`, in their old order."""
        above, shift = self.rows[root].path, self.rows[root].score
        below = [r for r, node in enumerate(self.rows) if node.path[: len(above)] == above]
        best = sorted(sorted(below, key=lambda r: -self.rows[r].score)[: self.case.method.survivors])
        kept = []
        for row in best:
            node = self.rows[row]
            node.path, node.score = node.path[len(above) :], node.score - shift
            for child in node.children:
                child[1] -= shift
                child[2] = best.index(child[2]) if child[2] in best else None
            kept.append(node)
        return kept

    def select(self):
        """The root and the best proposals, in the order in which they were made."""
        method = self.case.method
        offered = [p for p in self.proposals() if method.leaves or p[2][2] is not None]
        chosen = {id(child) for _, _, child in offered[: method.num_rows - 1]}
        tokens, parents, place = [self.text[-1]], [0], {(): 0}
        for node in self.rows:
            for child in node.children:
                if id(child) in chosen:
                    place[(*node.path, child[0])] = len(tokens)
                    tokens.append(child[0])
                    parents.append(place[node.path])
        return tokens, parents


def whole_geometry(case):
    """With an embedding of its own in place of the target's."""
    return "layer" if case.geometry == "shared" else case.geometry


@functools.cache
def _logits_function(family, geometry):
    config = draft_config(family, geometry)
    return on_one_device(lambda params, tokens, count: logits_after(params, config, tokens, count, LONGEST + 64))


@functools.cache
def draft_logits(case, draft, text):
    """The draft's logits behind a text, from scratch."""
    params = draft_params(case.family, 1, 0, whole_geometry(case), draft)
    if case.geometry == "shared":
        params = target_params(case.family) | {name: params[name] for name in ("final_norm", "layers")}
    tokens = np.zeros(LONGEST, np.int32)
    tokens[: len(text)] = text
    logits = _logits_function(case.family, whole_geometry(case))(params, tokens, np.int32(len(text) - 1))
    logits = np.array(logits, np.float64)
    if case.geometry == "shared":
        logits[[token for token in range(len(logits)) if token not in HEAD_IDS]] = -np.inf
    return logits


def host(tree):
    """A copy of a pytree: its buffers are donated."""
    return jax.tree.map(np.array, tree)


def assert_tree(tree, replay):
    """Used rows are the replay's; nothing can be picked from the others."""
    rows, size = replay.rows, int(tree.size)
    places = {node.path: row for row, node in enumerate(rows)}
    assert size == len(rows) == len(places)
    assert tree.token[:size].tolist() == [node.path[-1] if node.path else replay.text[-1] for node in rows]
    assert tree.parent[:size].tolist() == [places[node.path[:-1]] for node in rows]
    assert tree.depth[:size].tolist() == [len(node.path) for node in rows]
    np.testing.assert_allclose(tree.score[:size], [node.score for node in rows], atol=1e-4)
    ancestors = np.zeros((size, tree.ancestors.shape[1]), bool)
    for row, node in enumerate(rows):
        ancestors[row, [places[node.path[:depth]] for depth in range(len(node.path) + 1)]] = True
    np.testing.assert_array_equal(tree.ancestors[:size], ancestors)
    children = [[child for child in node.children] for node in rows]
    real = np.array([[child[1] > -np.inf for child in row] for row in children])
    scores = np.array([[child[1] for child in row] for row in children])
    np.testing.assert_allclose(tree.child_score[:size][real], scores[real], atol=1e-4)
    assert (tree.child_score[:size][~real] == -np.inf).all() and (tree.child_score[size:] == -np.inf).all()
    tokens = np.array([[child[0] for child in row] for row in children])
    np.testing.assert_array_equal(tree.child_token[:size][real], tokens[real])
    own = np.array([[-1 if child[2] is None else child[2] for child in row] for row in children])
    np.testing.assert_array_equal(tree.child_row[:size], own)
    # Scores from scratch, without the replay's own sums.
    for node in rows:
        total = sum(dict(replay.propose(node.path[:at]))[token] for at, token in enumerate(node.path))
        assert abs(total - node.score) < 1e-3


def assert_text(text, known, prompt):
    """The root, the history and the prefix's length are those of the verified text."""
    assert int(text.root) == known[-1] and int(text.cache.length) == len(known) - 1
    seen, counts = np.asarray(text.history.seen), np.asarray(text.history.counts)
    assert set(np.nonzero(seen)[0].tolist()) == set(known)
    np.testing.assert_array_equal(counts, np.bincount(known[len(prompt) :], minlength=len(counts)))


def assert_cache(steps, replay):
    """Prefix and window hold what a fresh prefill of the text and of every path writes."""
    cache, known = steps.state.draft.sequence.cache, steps.known
    paths = {node.path for node in replay.rows}
    ends = [path for path in paths if not any(other[:-1] == path for other in paths if other)]
    places = {node.path: row for row, node in enumerate(replay.rows)}
    got = arrays(cache)
    side, state = steps.runner.drafter, None
    for end in ends:
        text = [*known, *end]
        state, _ = side.resume(steps.params, state or side.start(0, None), np.array([*text, 0], np.int32), 0)
        # The last layer's keys and values are there as well: a prefill skips what comes behind them only.
        slots = [*range(len(known) - 1), *(len(known) - 1 + places[end[:depth]] for depth in range(len(end) + 1))]
        for one, other in zip(got, arrays(state.sequence.cache), strict=True):
            np.testing.assert_allclose(one[:, slots], other[:, : len(text)], rtol=1e-4, atol=1e-5)


def replayed(case, draft, prompt, seed, **sampling):
    """A generation, compared with its replay after every round; the cache at the end.

    Yields the counts, and the depth of the tree that the batch was chosen from.
    """
    replay = Replay(case, draft, prompt, seed, SamplingParams(**sampling))
    steps = Rounds(case, draft, prompt, seed, **sampling)
    before = None
    for _ in range(ROUNDS):
        counts = steps.step()
        state = steps.state.draft
        batch, expected = replay.turn(steps.verified)
        depth = max(len(node.path) for node in replay.rows)
        assert steps.batches[-1] == batch
        assert counts == expected
        check_counts(case, counts, before)
        before = counts
        if overlaps(case):
            grown = int(state.passes)
            assert case.method.adaptive or grown == case.method.depth
            replay.grow(grown)
        assert (int(state.passes), int(state.computed)) == (replay.passes, replay.computed)
        assert replay.text == steps.known
        assert_text(state.sequence, steps.known, prompt)
        assert_tree(host(state.tree), replay)
        yield counts, depth
    assert_cache(steps, replay)


STATE_CASES = [case for case in CASES if case not in (TOGETHER_TP2, UNEVEN)]

# Draft, prompt, seed, sampling: such that every kind of outcome occurs.
RUNS = [
    ("copy", PROMPT, 1, SAMPLINGS["T=1"]),
    ("first layer", LONG_PROMPT, 1, SAMPLINGS["penalties"]),
    ("random", PROMPT, 2, SAMPLINGS["greedy"]),
    ("copy", LONG_PROMPT, 0, SAMPLINGS["greedy penalties"]),
    ("copy", PROMPT, 4, {"temperature": 0.4}),
]


# Trees grow deep where one token is nearly always the best.
DEEP_RUN = ("certain", LONG_PROMPT, 1, SAMPLINGS["greedy"])


FAST = (BASIC, NODES, ADAPTIVE, CHAIN, FOREIGN, SHORT_CHAIN)


@pytest.mark.parametrize("case", fast_part(STATE_CASES, lambda case: case in FAST), ids=case_id)
def test_the_draft_holds_what_a_replay_from_scratch_says(case):
    # Growth that goes on until the target has verified makes large trees.
    runs = {DEEP: [*RUNS, DEEP_RUN], ADAPTIVE: RUNS[:3]}.get(case, RUNS)
    found = [one for draft, *run, sampling in runs for one in replayed(case, draft, *run, **sampling)]
    seen, depths = zip(*found, strict=True)
    if case is BASIC:
        # The bonus token is unknown, a leaf, or a node; or it is behind an accepted leaf, so that two are unknown.
        kinds = {(counts.caught_up, counts.token_hit) for counts in seen}
        assert kinds == {(1, 0), (1, 1), (0, 1), (2, 0)}
    if case is DEEP:
        assert max(depths) > 2 + FAMILIES[case.family].sliding_window
    kept = max(counts.kept for counts in seen)
    if not case.method.reuse:
        assert kept == 0
    elif case in (NODES, CHAIN, DEEP):
        # Subtrees survive, not roots alone.
        assert kept > 1
    elif case in (WIDE, TIGHT, SHORT_CHAIN):
        # What is too large is cut.
        assert kept == case.method.survivors


@pytest.mark.parametrize(
    "case", fast_part([BASIC, SERIAL, NODES, LARGE_BATCH, ADAPTIVE], lambda case: case in FAST), ids=case_id
)
def test_no_token_is_computed_twice(case):
    """As many as there are different beginnings of texts that the draft ever saw; survivors have room here."""
    assert case.method.survivors >= 16
    for draft in ("copy", "first layer", "random"):
        steps, seen, computed = Rounds(case, draft, PROMPT, 2, temperature=1.0), set(), 0
        for _ in range(8):
            computed += steps.step().computed
            tree = host(steps.state.draft.tree)
            paths = [()]
            for row in range(1, int(tree.size)):
                paths.append((*paths[tree.parent[row]], int(tree.token[row])))
            seen |= {(*steps.known, *path) for path in paths}
        # Verified tokens went through the draft as well, whether or not they ever were nodes.
        seen |= {tuple(steps.known[:count]) for count in range(len(PROMPT), len(steps.known) + 1)}
        # What grew since is counted with the next batch.
        assert computed + int(steps.state.draft.computed) == len(seen)


def test_growth_in_turn_makes_the_same_trees():
    """The same verified tokens give the same tree whether it grew before the batch was chosen or after."""
    for draft, sampling in (("copy", "T=1"), ("random", "greedy"), ("first layer", "penalties")):
        steps = Rounds(SERIAL, draft, PROMPT, 4, **SAMPLINGS[sampling])
        beside = Rounds(BASIC, draft, PROMPT, 4, **SAMPLINGS[sampling])
        side, state = beside.runner.drafter, beside.state.draft
        longest = SERIAL.method.max_path
        for _ in range(ROUNDS):
            steps.step()
            message = np.zeros(1 + longest, np.int32)
            message[0], message[1 : 1 + len(steps.verified)] = len(steps.verified), steps.verified
            params, request = beside.params.draft, beside.request.draft
            state, _, _ = side.advance(params, state, jax.device_put(message, jax.devices()[1]), request)
            state, _ = side.expand(params, state, request)
            one, other = host(steps.state.draft), host(state)
            size = int(one.tree.size)
            assert size == int(other.tree.size)
            for name in ("token", "parent", "depth", "ancestors", "child_token", "child_row"):
                np.testing.assert_array_equal(getattr(one.tree, name)[:size], getattr(other.tree, name)[:size])
            np.testing.assert_allclose(one.tree.child_score[:size], other.tree.child_score[:size], atol=1e-5)
            live = int(one.sequence.cache.length) + size
            assert int(other.sequence.cache.length) + size == live
            for x, y in zip(arrays(one.sequence.cache), arrays(other.sequence.cache), strict=True):
                np.testing.assert_allclose(x[:, :live], y[:, :live], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", [BASIC, WIDE, TOGETHER, LARGE_BATCH], ids=case_id)
def test_rounds_write_into_their_window_only(case):
    for draft in ("copy", "broken"):
        steps = Rounds(case, draft, PROMPT, 3, temperature=1.0)
        for _ in range(ROUNDS):
            check_written_slots(steps, grown_rows(case))


@pytest.mark.parametrize("case", fast_part([BASIC, WIDE, TIGHT, LARGE_BATCH], lambda case: case in FAST), ids=case_id)
def test_garbage_behind_the_prefix_is_never_read(case):
    clean, spoiled = (Rounds(case, "copy", PROMPT, 2, temperature=1.0) for _ in range(2))
    target, draft = spoiled.state.target, spoiled.state.draft
    text = dataclasses.replace(draft.sequence, cache=with_garbage(draft.sequence.cache))
    spoiled.state = dataclasses.replace(
        spoiled.state,
        target=dataclasses.replace(target, cache=with_garbage(target.cache)),
        draft=dataclasses.replace(draft, sequence=text),
    )
    for _ in range(ROUNDS):
        assert spoiled.step() == clean.step()
        assert spoiled.text == clean.text and spoiled.batches == clean.batches


def test_a_draft_that_proposes_nothing():
    """A broken root has no leaves: the batch is the root alone, and nothing is evaluated for it."""
    for case in (BASIC, WIDE, NODES, SERIAL):
        params = params_of(case, "broken")
        spoiled = jax.tree.map(lambda x: jax.device_put(np.full(x.shape, np.nan, x.dtype), x.sharding), params.draft)
        steps = Rounds(case, "copy", PROMPT, 0)
        steps.params = ModelParams(params.target, spoiled)
        for _ in range(4):
            counts = steps.step()
            assert steps.batches[-1] == ([steps.known[-1]], [0])
            assert (counts.nodes, counts.caught_up, counts.computed, counts.token_hit) == (1, 1, 1, 0)
        assert len(steps.text) == len(PROMPT) + 4


def test_messages_hold_any_token():
    """Ids above 65,536, which a float of half the width would round; unused rows stay their own parents."""
    tokens = jnp.array([200_001, 65_537, 0, 131_073], jnp.int32)
    batch = Batch(tokens, jnp.array([0, 0, 1, 3]), jnp.array([0, 1, 2, 0]), jnp.int32(3))
    packed = pack_batch(batch)
    assert packed.dtype == jnp.int32
    for one, other in zip(jax.tree.leaves(unpack_batch(packed)), jax.tree.leaves(batch), strict=True):
        np.testing.assert_array_equal(one, other)
    message = pack_verified(Verified(tokens, jnp.int32(2), jnp.zeros(4, jnp.int32), jnp.zeros(4)))
    assert message.dtype == jnp.int32
    assert [x.tolist() for x in unpack_verified(message)] == [tokens.tolist(), 2]
