"""A vocabulary of some ids only, over any number of shards: what numpy finds among those ids of the whole one."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from marks import quick_part
from sampling_cases import noise_function, shard_call

from jaxspec.config import SamplingParams
from jaxspec.models.config import TENSOR_AXIS
from jaxspec.sampling.choose import choose, gumbel_rows, seed_key
from jaxspec.sampling.processors import (
    from_sampling,
    init_history,
    process,
    processor_specs,
    update_history,
)

SHARDS = (0, 2, 4)  # 0: no mesh at all
VOCAB, PADDED = 21, 24
# Eleven ids, which neither 2 nor 4 devices divide; first, last and neighbours among them.
SUBSET = (0, 2, 3, 5, 7, 11, 13, 14, 17, 18, 20)
LATE = (4, 9, 10, 19, 20)  # with 4 devices the last one holds nothing
LARGEST = np.iinfo(np.int32).max
KS = (1, 2, 5)
OPTIONS = (
    {},
    {"top_k": 3},
    {"top_p": 0.7, "min_p": 0.01},
    {"repetition_penalty": 1.7, "frequency_penalty": 0.5, "presence_penalty": 0.25},
    {"logit_bias": {0: 2.0, 5: -np.inf, 6: 9.0, 18: -1.5}, "top_p": 0.9, "presence_penalty": -0.5},
)
COLUMNS = P(None, TENSOR_AXIS)


class Kind(NamedTuple):
    """A vocabulary: its subset, how many ids are real, and how many columns stand for the subset."""

    num_shards: int
    subset: tuple[int, ...] = SUBSET
    limit: int = VOCAB
    columns: int = 12


KINDS = [Kind(0), Kind(4), Kind(0, columns=11), Kind(2, limit=13), Kind(0, LATE, columns=8), Kind(4, LATE, columns=8)]


def subset_call(function, kind, in_specs, out_specs):
    """`shard_call` with a vocabulary of a kind."""

    def on_subset(vocab, *args):
        columns = -(-kind.columns // max(kind.num_shards, 1))
        return function(dataclasses.replace(vocab, subset=kind.subset, local_size=columns), *args)

    return shard_call(on_subset, kind.num_shards, kind.limit, PADDED, in_specs, out_specs)


def row_cases(kind, count=24):
    """Values of the subset's columns: without ties, with many, mostly -inf; padding is -inf, as `clean` leaves it."""
    rng = np.random.default_rng(kind.limit)
    values = np.full((count, kind.columns), -np.inf, np.float32)
    real = sum(token < kind.limit for token in kind.subset)
    for index, row in enumerate(values):
        row[:real] = rng.normal(size=real) if index % 3 == 0 else rng.integers(-1, 2, real)
        if index % 3 == 2:
            row[np.flatnonzero(rng.random(real) < 0.8)[1:]] = -np.inf
    return values


def on_all_ids(kind, values):
    """The same values in the columns of the whole vocabulary, -inf elsewhere."""
    whole = np.full((len(values), PADDED), -np.inf, np.float32)
    whole[:, list(kind.subset)] = values[:, : len(kind.subset)]
    return whole


@functools.cache
def reductions(kind):
    """(values, token) -> all that `VocabShard` gives."""

    def reduce(vocab, values, token):
        everywhere = jnp.arange(PADDED, dtype=jnp.int32)
        tops = tuple(vocab.top_k(values, k) for k in KS)
        taken = vocab.take(values, token)
        return vocab.ids(), vocab.local(everywhere)[None], vocab.argmax(values), vocab.row_max(values), taken, tops

    out = (P(TENSOR_AXIS), P(TENSOR_AXIS), P(), P(), P(), tuple((P(), P()) for _ in KS))
    return subset_call(reduce, kind, (COLUMNS, P()), out)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_reductions_are_those_of_the_whole_vocabulary(kind):
    values = row_cases(kind)
    whole = on_all_ids(kind, values)
    token = np.random.default_rng(1).integers(0, VOCAB, len(values)).astype(np.int32)
    ids, local, argmax, row_max, taken, tops = jax.tree.map(np.asarray, reductions(kind)(values, token))
    np.testing.assert_array_equal(ids, [*kind.subset, *[LARGEST] * (kind.columns - len(kind.subset))])
    assert ids.dtype == local.dtype == argmax.dtype == np.int32
    np.testing.assert_array_equal(argmax, whole.argmax(-1))
    np.testing.assert_array_equal(row_max[:, 0], whole.max(-1))
    # An id that no column stands for has no chance.
    np.testing.assert_array_equal(taken, whole[np.arange(len(token)), token])
    order = np.argsort(-whole, axis=-1, kind="stable")
    for k, (best, best_ids) in zip(KS, tops, strict=True):
        expected = np.take_along_axis(whole, order[:, :k], axis=-1)
        np.testing.assert_array_equal(best, expected)
        possible = expected > -np.inf
        np.testing.assert_array_equal(best_ids[possible], order[:, :k][possible])
    impossible = np.full_like(values, -np.inf)
    assert (np.asarray(reductions(kind)(impossible, token)[2]) == kind.subset[0]).all()
    # Every id has one column or none.
    size = kind.columns // max(kind.num_shards, 1)
    assert local.shape == (max(kind.num_shards, 1), PADDED)
    for token in range(PADDED):
        here = np.flatnonzero(local[:, token] < size)
        if token in kind.subset:
            assert (here * size + local[here, token]).tolist() == [kind.subset.index(token)]
        else:
            assert here.size == 0 and (local[:, token] == size).all()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_narrow_takes_the_subsets_columns_and_widen_puts_them_back(kind):
    whole_size = PADDED // max(kind.num_shards, 1)

    def there_and_back(vocab, columns, flags):
        narrow = vocab.narrow(columns)
        return narrow, vocab.widen(narrow, whole_size, -np.inf), vocab.narrow(flags)

    call = subset_call(there_and_back, kind, (COLUMNS, P(TENSOR_AXIS)), (COLUMNS, COLUMNS, P(TENSOR_AXIS)))
    columns = np.random.default_rng(0).normal(size=(3, PADDED)).astype(np.float32)
    ids = list(kind.subset)
    narrow, wide, flags = map(np.asarray, call(columns, columns[0] > 0))
    np.testing.assert_array_equal(narrow[:, : len(ids)], columns[:, ids])
    np.testing.assert_array_equal(wide, on_all_ids(kind, columns[:, ids]))
    np.testing.assert_array_equal(flags[: len(ids)], columns[0, ids] > 0, strict=True)


@pytest.mark.parametrize("num_shards", SHARDS)
def test_noise_belongs_to_ids_not_to_columns(num_shards):
    key, positions = seed_key(7), np.array([0, 3, 99999], np.int32)
    noise = subset_call(lambda vocab, *args: gumbel_rows(*args, vocab), Kind(num_shards), (P(), P()), COLUMNS)
    expected = np.asarray(noise_function(0, VOCAB, PADDED)(key, positions))[:, list(SUBSET)]
    # Vectors of other lengths may round logarithms differently (see test_noise).
    np.testing.assert_allclose(np.asarray(noise(key, positions))[:, : len(SUBSET)], expected, rtol=3e-7)


def _process(vocab, logits, processors, prompt, output, key, positions):
    """With the history of the whole text narrowed, and once more with one that saw only what the columns stand for."""
    whole = dataclasses.replace(vocab, subset=(), local_size=PADDED // vocab.num_shards)
    every = jnp.ones(prompt.shape, bool)
    text = update_history(init_history(whole), prompt, every, whole, generated=False)
    text = jax.tree.map(vocab.narrow, update_history(text, output[:2], every[:2], whole, generated=True))
    text = update_history(text, output[2:], every[: len(output) - 2], vocab, generated=True)
    rows = logits, processors, text.row
    return process(*rows, vocab), *choose(*rows, key, positions, vocab)


def _process_all(vocab, logits, processors, prompt, output, key, positions):
    every = jnp.ones(prompt.shape, bool)
    text = update_history(init_history(vocab), prompt, every, vocab, generated=False)
    text = update_history(text, output, every[: len(output)], vocab, generated=True)
    rows = logits, processors, text.row
    return process(*rows, vocab), *choose(*rows, key, positions, vocab)


PROCESS_SPECS = (COLUMNS, processor_specs(TENSOR_AXIS), P(), P(), P(), P())


@functools.cache
def process_subset(kind):
    return subset_call(_process, kind, PROCESS_SPECS, (COLUMNS, P(), P()))


@functools.cache
def process_whole(limit):
    return shard_call(_process_all, 0, limit, PADDED, PROCESS_SPECS, (COLUMNS, P(), P()))


@pytest.mark.parametrize(
    ("num_shards", "limit"), quick_part([(0, VOCAB), (2, 13), (4, VOCAB)], lambda shards, _: shards == 2)
)
def test_processors_see_a_vocabulary_without_the_other_ids(num_shards, limit):
    """As if every logit outside were -inf: the same cuts, the same log-probabilities, the same draw."""
    kind = Kind(num_shards, limit=limit)
    rng = np.random.default_rng(limit)
    prompt, output = np.array([0, 1, 3, 20, 20], np.int32), np.array([5, 1, 5, 14], np.int32)
    positions = np.arange(6, dtype=np.int32)
    logits = rng.normal(0, 3, (6, kind.columns)).astype(np.float32)  # what padding holds is of no concern
    whole = on_all_ids(kind, logits)
    for options in OPTIONS:
        for temperature in (0.0, 0.8):
            params = SamplingParams(temperature=temperature, logprobs=True, **options)
            rest = (from_sampling(params, VOCAB, PADDED), prompt, output, seed_key(5), positions)
            got, token, logprob = map(np.asarray, process_subset(kind)(logits, *rest))
            expected, whole_token, whole_logprob = map(np.asarray, process_whole(limit)(whole, *rest))
            np.testing.assert_allclose(got[:, : len(SUBSET)], expected[:, list(SUBSET)], rtol=1e-5, atol=1e-6)
            assert (got[:, len(SUBSET) :] == -np.inf).all()
            np.testing.assert_array_equal(token, whole_token)
            np.testing.assert_allclose(logprob, whole_logprob, rtol=1e-5, atol=1e-6)
