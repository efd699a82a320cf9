"""The k largest of a row, over any number of shards: numpy's stable sort, the lowest id first on a tie."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from sampling_cases import shard_call

from jaxspec.models.config import TENSOR_AXIS
from jaxspec.models.vocab import VocabShard

SHARDS = (0, 2, 4, 8)  # 0: no mesh at all


def expected_top(values, k):
    """The order of the comparison `>`, to which -0 and 0 are a tie."""
    ids = np.argsort(-values, axis=-1, kind="stable")[:, :k]
    return np.take_along_axis(values, ids, axis=-1), ids


@functools.cache
def top_functions(num_shards, vocab_size, padded_size, ks):
    """values [T, padded_size] -> for each k, values and ids."""

    def top(vocab, values):
        return tuple(vocab.top_k(values, k) for k in ks)

    out = tuple((P(), P()) for _ in ks)
    return shard_call(top, num_shards, vocab_size, padded_size, (P(None, TENSOR_AXIS),), out)


def rows(rng, count, vocab_size, padded_size):
    """From no ties to nothing but ties; padding columns are -inf, as the model's are."""
    values = np.empty((count, padded_size), np.float32)
    for row in values:
        kind = rng.integers(5)
        if kind == 0:
            row[:] = rng.normal(size=padded_size)
        elif kind == 1:
            row[:] = rng.integers(-2, 3, padded_size)
        elif kind == 2:
            row[:] = 1.5
        else:  # most are -inf, as after top-p, or all of them
            row[:] = np.where(rng.random(padded_size) < 0.1 * (kind - 3), rng.integers(3, size=padded_size), -np.inf)
    values[:, vocab_size:] = -np.inf
    return values


def check(num_shards, vocab_size, padded_size, ks, values):
    results = top_functions(num_shards, vocab_size, padded_size, ks)(values)
    for k, (best, ids) in zip(ks, results, strict=True):
        expected, expected_ids = expected_top(values, k)
        assert best.dtype == np.float32 and ids.dtype == np.int32 and ids.shape == (len(values), k)
        np.testing.assert_array_equal(best, expected)
        np.testing.assert_array_equal(ids, expected_ids)


@pytest.mark.parametrize("num_shards", SHARDS)
def test_a_small_vocabulary(num_shards):
    """k from 1 to all columns; with 8 shards, the last holds padding only."""
    check(num_shards, 21, 24, (1, 2, 3, 7, 20, 21, 22, 24), rows(np.random.default_rng(0), 40, 21, 24))


# Columns of one shard in many groups, so that some groups need not be looked at; and a size that nothing divides.
@pytest.mark.parametrize("local", [1536, 816, 272, 997])
def test_a_large_vocabulary(local):
    """Also where the best are neighbours, and where they are tied across the row."""
    rng = np.random.default_rng(local)
    values = rows(rng, 30, local - 5, local)
    for i, row in enumerate(values[:10]):
        row[i * 7 : i * 7 + 5] = 9
    for i, row in enumerate(values[10:20]):
        row[rng.choice(local - 5, 3 + i, replace=False)] = 9
    check(0, local - 5, local, (1, 4, 17, 64), values)
    alone = jax.tree.map(np.asarray, top_functions(0, local - 5, local, (4,))(values[3:4])[0])
    np.testing.assert_array_equal(alone[1], expected_top(values[3:4], 4)[1])


@pytest.mark.parametrize("num_shards", [2, 8])
def test_a_large_vocabulary_in_shards(num_shards):
    padded = 1536 * num_shards
    values = rows(np.random.default_rng(num_shards), 30, padded - 1600, padded)
    check(num_shards, padded - 1600, padded, (1, 4, 50), values)


@pytest.mark.parametrize("num_shards", SHARDS)
def test_signed_zeros_tie(num_shards):
    """As they do for argmax, which greedy decoding uses."""
    values = np.full((2, 24), -1, np.float32)
    values[0, [3, 11, 20]] = -0.0, 0.0, -0.0
    values[1, [5, 6]] = 0.0, -0.0
    ((_, ids),) = top_functions(num_shards, 24, 24, (3,))(values)
    assert np.asarray(ids)[:, :2].tolist() == [[3, 11], [5, 6]]
    greedy = shard_call(VocabShard.argmax, num_shards, 24, 24, (P(None, TENSOR_AXIS),), P())(values)
    np.testing.assert_array_equal(np.asarray(ids)[:, 0], greedy)
