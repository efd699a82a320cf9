"""Constraints at the seam of verification: whatever tree and masks, the tokens are those of plain decoding under them.

The oracle is plain decoding, a token at a time, with a bias of -inf for every token that a mask leaves out.
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from marks import quick_part
from method_cases import PROMPT, SAMPLINGS
from test_verify_seam import MAX_PATH, Case, begin, executor_of, random_batch, target_params
from tiny_pairs import VOCAB

from jaxspec.config import SamplingParams
from jaxspec.methods.core.constrained import ConstrainedPasses
from jaxspec.methods.core.round import read_rounds
from jaxspec.methods.core.verify import Draft, chain_draft
from jaxspec.models.vocab import VocabShard
from jaxspec.sampling.processors import allow

LENGTH = 16
CASES = [Case("llama"), Case("qwen2", 4), Case("llama-tied", idle=True)]


def allowed_after(text):
    """Tokens that may follow a text: a few, often those that are likely, now and then one alone."""
    rng = np.random.default_rng(text[-3:])
    return np.flatnonzero(rng.random(VOCAB) < rng.choice([0.02, 0.5, 0.9])).tolist() or [int(rng.integers(VOCAB))]


def bits(tokens, columns):
    found = np.zeros((-(-columns // 32), 32), bool)
    found.reshape(-1)[tokens] = True
    return (found << np.arange(32, dtype=np.uint32)).sum(axis=1, dtype=np.uint32)


class RandomMatcher:
    """Masks that follow from the text before a token."""

    def __init__(self, text):
        self.text = text

    def masks(self, token, parent, columns):
        rows, texts = [], {0: self.text}
        for row in range(len(token)):
            if row and parent[row] != row:
                texts[row] = [*texts[int(parent[row])], int(token[row])]
            rows.append(bits(allowed_after(texts.get(row, self.text)), columns))
        return np.stack(rows)


@functools.cache
def passes_of(case, rows):
    return ConstrainedPasses(executor_of(case), rows, dynamic_rows=case.idle)


@functools.cache
def oracle(case, sampling, seed):
    """Tokens and log-probabilities of plain decoding with biases."""
    executor, params = executor_of(case), target_params(case.family, case.degree)
    text, state, logprobs = [*PROMPT], begin(case, PROMPT), []
    given = SAMPLINGS[sampling]
    while len(text) < len(PROMPT) + LENGTH + MAX_PATH:
        bias = dict(given.get("logit_bias", {}))
        bias |= dict.fromkeys(set(range(VOCAB)) - set(allowed_after(text)), -np.inf)
        request = executor.place_request(SamplingParams(**{**given, "logit_bias": bias, "logprobs": True}), seed)
        state, _, round_, _ = executor.decode(params, state, request, 1)
        (output,) = read_rounds(round_)
        text += output.tokens
        logprobs += output.logprobs
    return text[len(PROMPT) :], logprobs


@pytest.mark.parametrize("case", quick_part(CASES, lambda case: case.family == "llama"), ids=str)
@pytest.mark.parametrize("sampling", ["greedy", "T=1", "cuts"])
def test_any_tree_under_any_masks_gives_the_tokens_of_plain_decoding(case, sampling):
    seed = 3
    expected, logprobs = oracle(case, sampling, seed)
    executor, params = executor_of(case), target_params(case.family, case.degree)
    request = executor.place_request(SamplingParams(**{**SAMPLINGS[sampling], "logprobs": True}), seed)
    accepted = 0
    for rows, number in ((1, 0), (case.rows, 1), (case.rows, 2)):
        rng, passes = np.random.default_rng(number), passes_of(case, rows)
        text, state, found = [*PROMPT], begin(case, PROMPT), []
        while len(text) < len(PROMPT) + LENGTH:
            if rows == 1:
                draft = chain_draft(text[-1:], passes.num_rows)
            else:
                batch = random_batch(rng, rows, text[-1], expected[len(text) - len(PROMPT) :])
                draft = Draft(batch, np.int32(0))
            state, _, round_ = passes.verify(params, state, draft, request, RandomMatcher(text))
            (output,) = read_rounds(round_)
            accepted += output.accepted
            text += output.tokens
            found += output.logprobs
        tokens = text[len(PROMPT) :]
        assert tokens == expected[: len(tokens)]
        assert np.allclose(found, logprobs[: len(found)], atol=1e-4)
    assert accepted > 5


def test_a_mask_has_a_bit_for_each_column():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, VOCAB)).astype(np.float32)
    tokens = [sorted(rng.choice(VOCAB, count, replace=False).tolist()) for count in (0, 1, 60)]
    masks = jnp.asarray(np.stack([bits(row, VOCAB) for row in tokens]))
    expected = np.full_like(logits, -np.inf)
    for row, columns in enumerate(tokens):
        expected[row, columns] = logits[row, columns]
    assert np.array_equal(allow(jnp.asarray(logits), masks, VocabShard(VOCAB, VOCAB)), expected)
