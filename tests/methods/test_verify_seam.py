"""Rule R4 at the seam that all methods share: whatever valid tree is verified, the tokens are those of plain decoding.

One executor per case, and one program for all its trees, requests and texts. Methods differ only in the trees that they
propose, so what holds here for random trees holds for each of them; their own tests ask what they propose.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import quick_part
from method_cases import PROMPT, SAMPLINGS, arrays
from tiny_models import FAMILIES, place
from tiny_pairs import VOCAB, target_params

from jaxspec.config import SamplingParams
from jaxspec.methods.core.executor import ResidentExecutor
from jaxspec.methods.core.round import read_rounds
from jaxspec.methods.core.runner import decode_one
from jaxspec.methods.core.sequence import NO_LIMIT, cache_slots
from jaxspec.methods.core.verify import LAZY_HEAD_ROWS, Draft
from jaxspec.tree.tree import Batch

STEPS, MAX_PATH = 4, 6  # a path of five tokens, and the bonus token
LENGTH, SEEDS = 40, range(3)  # tokens of a text, and how many texts a case has


class Case(NamedTuple):
    """An executor: target family, devices, rows of a batch, and what a draft that is often idle asks for."""

    family: str
    degree: int = 1
    rows: int = 10
    idle: bool = False


CASES = [
    *map(Case, FAMILIES),
    Case("qwen2", 4),
    Case("llama", rows=LAZY_HEAD_ROWS + 2),  # the head runs row by row
    Case("llama-tied", idle=True),  # passes of fewer rows, and several tokens where nothing is proposed
]


@functools.cache
def executor_of(case):
    target = place(FAMILIES[case.family], case.degree)
    row, scalar = target.array((case.rows,), jnp.int32), target.array((), jnp.int32)
    slots = cache_slots(len(PROMPT) + LENGTH + 2 * MAX_PATH, case.rows)
    return ResidentExecutor(
        target, slots, steps=STEPS, max_path=MAX_PATH, draft=Draft(Batch(row, row, row, scalar), scalar),
        dynamic_rows=case.idle, idle_steps=STEPS if case.idle else 0,
    )  # fmt: skip


def begin(case, tokens):
    """A sequence whose last token is the root."""
    sequence, params = executor_of(case).sequence, target_params(case.family, case.degree)
    return sequence.prefill(params, sequence.start(tokens[-1], None), np.array(tokens[:-1], np.int32))[0]


@functools.cache
def plain(case, sampling, seed):
    """Tokens and log-probabilities of plain decoding."""
    executor, params = executor_of(case), target_params(case.family, case.degree)
    state, tokens, logprobs = begin(case, PROMPT), [], []
    request = executor.place_request(SamplingParams(**SAMPLINGS[sampling]), seed)
    while len(tokens) < LENGTH + MAX_PATH:
        state, _, round_, _ = executor.decode(params, state, request, STEPS)
        (output,) = read_rounds(round_)
        tokens += output.tokens
        logprobs += output.logprobs
    return tokens, logprobs


def test_decoding_stops_after_a_token_that_ends_the_text():
    """A dispatch that was launched ahead decodes one more; a prompt may end with such a token."""
    case = CASES[0]
    executor, params = executor_of(case), target_params(case.family, case.degree)
    expected, _ = plain(case, "greedy", 0)
    end = expected[STEPS]  # the first token of a dispatch, if it did not occur before
    first, found = expected.index(end), []
    request = executor.place_request(SamplingParams(stop_token_ids=(end,)), 0)
    for prompt in (PROMPT, [*PROMPT, end]):
        state, found = begin(case, prompt), []
        while not found or found[-1][-1] != end:
            state, _, round_, steps = executor.decode(params, state, request, STEPS)
            found.append(read_rounds(round_)[0].tokens)
            assert steps == STEPS and end not in found[-1][:-1]
            assert len(found[-1]) == STEPS or found[-1][-1] == end
            if prompt != PROMPT:
                break
        assert prompt != PROMPT or [token for one in found for token in one] == expected[: first + 1]
        state, _, round_, _ = executor.decode(params, state, request, STEPS)
        assert len(read_rounds(round_)[0].tokens) == (1 if found[-1][-1] == end else STEPS)


def random_batch(rng, rows, root, future):
    """A random tree whose rows often carry the tokens of `future`; rows that are not in use do too."""
    count = int(rng.integers(1, rows + 1)) if rng.random() < 0.7 else 1 + int(rng.random() < 0.3)
    token, parent, depth = np.zeros(rows, np.int32), np.arange(rows, dtype=np.int32), np.zeros(rows, np.int32)
    token[0] = root
    for row in range(1, count):
        open_ = np.flatnonzero(depth[:row] < MAX_PATH - 1)
        # Half of the rows prolong a path, so that long ones occur.
        parent[row] = open_[-1] if rng.random() < 0.5 else rng.choice(open_)
        depth[row] = depth[parent[row]] + 1
        token[row] = future[depth[row] - 1] if rng.random() < 0.7 else rng.choice([0, rng.integers(VOCAB)])
    token[count:] = future[0]  # a pad that were taken for a token would be accepted
    return Batch(token, parent, depth, np.int32(count))


def accepted_by(batch, future):
    """How many tokens of `future` the walk from the root finds, the lowest row first."""
    row, accepted = 0, 0
    while True:
        children = [
            i for i in range(1, int(batch.count)) if batch.parent[i] == row and batch.token[i] == future[accepted]
        ]
        if not children:
            return accepted
        row, accepted = children[0], accepted + 1


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(
    "case",
    quick_part(CASES, lambda case: case.family == "llama"),
    ids=lambda case: "-".join(map(str, case)),
)
def test_any_tree_gives_the_tokens_of_plain_decoding(case, sampling):
    accepted = [count for seed in SEEDS for count in decode(case, sampling, seed)]
    assert set(range(4)) < set(accepted), "paths of many lengths occur"


def decode(case, sampling, seed):
    """Decode a text with random trees; returns how many tokens each of them brought."""
    executor, params = executor_of(case), target_params(case.family, case.degree)
    expected, logprobs = plain(case, sampling, seed)
    request = executor.place_request(SamplingParams(**SAMPLINGS[sampling]), seed)
    rng, state, tokens, counts = np.random.default_rng(seed), begin(case, PROMPT), [], []
    found = []
    while len(tokens) < LENGTH:
        future = expected[len(tokens) :]
        batch = random_batch(rng, case.rows, (PROMPT + tokens)[-1], future)
        shapes = executor.placement.array((), jnp.int32)
        passes, one = rng.integers(2, size=2)
        draft = jax.device_put(Draft(batch, np.int32(passes)), shapes.sharding)
        state, _, round_ = executor.verify(params, decode_one(state) if one else state, draft, request)
        (output,) = read_rounds(round_)
        if case.idle:  # the limit is that of one round
            assert int(state.most) == NO_LIMIT
        if batch.count == 1:  # a draft that was asked for nothing is followed by one token
            assert len(output.tokens) == (STEPS if case.idle and not passes and not one else 1)
        tokens += output.tokens
        found += output.logprobs
        assert tokens == expected[: len(tokens)]
        if batch.count > 1 or not case.idle:
            assert output.accepted == accepted_by(batch, future)
            assert len(output.tokens) == output.accepted + 1
            assert (output.drafted, output.depth) == (batch.count - 1, batch.depth.max())
        counts.append(output.accepted)
    np.testing.assert_allclose(found, logprobs[: len(found)], atol=1e-3)
    check_cache(case, state, PROMPT + tokens)
    return counts


def check_cache(case, state, text):
    """The cache after the rounds is the one that a prefill of the same text computes."""
    length = len(text) - 1
    assert int(state.cache.length) == length and int(state.root) == text[-1]
    fresh = begin(case, text)
    for got, expected in zip(arrays(state.cache), arrays(fresh.cache), strict=True):
        np.testing.assert_allclose(got[:, :length], expected[:, :length], atol=2e-4)
