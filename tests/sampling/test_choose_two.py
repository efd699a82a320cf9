"""The token that `choose` takes and the runner-up, over whole vocabularies and subsets in any number of shards."""

import dataclasses
import functools

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from sampling_cases import shard_call

from jaxspec.config import SamplingParams
from jaxspec.models.config import TENSOR_AXIS
from jaxspec.models.vocab import VocabShard
from jaxspec.sampling.choose import choose, choose_two
from jaxspec.sampling.noise import seed_key
from jaxspec.sampling.processors import from_sampling, processor_specs

VOCAB, PADDED, ROWS = 21, 24, 6
SUBSET = (0, 2, 3, 5, 7, 11, 13, 14, 17, 18, 20)
COLUMNS = P(None, TENSOR_AXIS)
OPTIONS = (
    {},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 3, "min_p": 0.01},
    {"presence_penalty": 2.0, "logit_bias": {0: 3.0, 5: -np.inf}},
    {"temperature": 1.3, "frequency_penalty": 0.5, "repetition_penalty": 1.4},
)


@functools.cache
def both(num_shards, subset):
    """(logits, processors, seen, counts, positions) -> what `choose_two` and `choose` give."""

    def call(vocab, logits, processors, seen, counts, positions):
        if subset:
            vocab = dataclasses.replace(vocab, subset=subset, local_size=12 // max(num_shards, 1))
        args = logits, processors, seen, counts, seed_key(3), positions, vocab
        return choose_two(*args), choose(*args)

    specs = COLUMNS, processor_specs(TENSOR_AXIS), COLUMNS, COLUMNS, P()
    return shard_call(call, num_shards, VOCAB, PADDED, specs, ((P(), P()), (P(), P())))


def cases(subset, seed=0):
    """Logits with ties, and a history, of the columns of the subset or of all."""
    rng = np.random.default_rng(seed)
    size = 12 if subset else PADDED
    logits = rng.integers(-12, 12, (ROWS, size)).astype(np.float32) / 4
    counts = rng.integers(0, 3, (1, size)).astype(np.int32)
    return logits, counts > 0, counts, np.arange(ROWS, dtype=np.int32) * 7


@pytest.mark.parametrize(("num_shards", "subset"), [(0, ()), (4, SUBSET)], ids=["all", "some in shards"])
def test_the_runner_up_is_the_choice_once_the_first_is_ruled_out(num_shards, subset):
    logits, seen, counts, positions = cases(subset)
    ids = np.array(subset or range(VOCAB))
    for options in OPTIONS:
        processors = from_sampling(SamplingParams(logprobs=True, **options), VOCAB, PADDED)
        (token, logprob), (first, first_logprob) = both(num_shards, subset)(logits, processors, seen, counts, positions)
        token, logprob = np.asarray(token), np.asarray(logprob)
        assert token.dtype == np.int32 and token.shape == logprob.shape == (ROWS, 2)
        np.testing.assert_array_equal(token[:, 0], first)
        np.testing.assert_allclose(logprob[:, 0], first_logprob, rtol=1e-5, atol=1e-6)
        without = logits.copy()
        without[np.arange(ROWS), np.searchsorted(ids, token[:, 0])] = -np.inf
        # Cuts are made before the noise: ruled out after them, a token leaves the others' chances as they are.
        if not {"top_k", "min_p"} & set(options):
            _, (second, _) = both(num_shards, subset)(without, processors, seen, counts, positions)
            np.testing.assert_array_equal(token[:, 1], second)
        possible = logprob[:, 1] > -np.inf
        assert (token[possible, 0] != token[possible, 1]).all() and np.isin(token, ids).all()
        assert (np.exp(logprob).sum(1) < 1 + 1e-5).all()


@pytest.mark.parametrize(
    "options", [{"temperature": 1.0, "top_k": 1}, {"logit_bias": dict.fromkeys(range(1, 21), -np.inf)}]
)
def test_where_one_token_is_possible_the_second_is_of_no_use(options):
    logits = np.zeros((1, PADDED), np.float32)
    logits[0, 0] = 5
    processors = from_sampling(SamplingParams(**options), VOCAB, PADDED)
    none = np.zeros((1, PADDED), np.int32)
    token, logprob = choose_two(
        logits, processors, none > 0, none, seed_key(0), np.array([3], np.int32), VocabShard(VOCAB, PADDED)
    )
    assert token[0, 0] == 0 and logprob[0, 1] == -np.inf
