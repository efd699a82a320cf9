"""The noise is Gumbel, independent, and a function of seed, position and id alone."""

import jax
import numpy as np
import pytest
from sampling_cases import noise_function

from jaxspec.sampling.noise import gumbel_at, gumbel_from_bits, seed_key, threefry

_EULER = 0.5772156649


@pytest.fixture(scope="module")
def rows():
    """Noise of 64 positions and 4096 ids."""
    return np.asarray(noise_function(0, 4096, 4096)(seed_key(3), np.arange(64, dtype=np.int32)), np.float64)


def test_moments_and_distribution(rows):
    n = rows.size
    assert abs(rows.mean() - _EULER) < 5 * np.sqrt(np.pi**2 / 6 / n)
    assert abs(rows.var() - np.pi**2 / 6) < 5 * np.sqrt(4.4 * (np.pi**2 / 6) ** 2 / n)
    # Kolmogorov-Smirnov: exceeds 1.95 / sqrt(n) once in a thousand seeds.
    cdf = np.exp(-np.exp(-np.sort(rows.ravel())))
    assert np.abs(cdf - (np.arange(n) + 0.5) / n).max() < 1.95 / np.sqrt(n)


def test_independent_across_positions_and_ids(rows):
    u = np.exp(-np.exp(-rows)) - 0.5

    def correlation(a, b):
        return (a * b).mean() * 12 * np.sqrt(a.size)  # standard normal if independent

    assert abs(correlation(u[1:], u[:-1])) < 4
    assert abs(correlation(u[:, 1:], u[:, :-1])) < 4
    assert abs(correlation(u[1:, 1:], u[:-1, :-1])) < 4
    assert abs(correlation(u[1:, :-1], u[:-1, 1:])) < 4
    other = np.asarray(noise_function(0, 4096, 4096)(seed_key(4), np.arange(64, dtype=np.int32)), np.float64)
    assert abs(correlation(u, np.exp(-np.exp(-other)) - 0.5)) < 4
    assert len(np.unique(rows)) > 0.99 * rows.size


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 8])
def test_same_for_any_sharding(num_shards):
    key, positions = seed_key(5), np.array([0, 9, 123456, 2**31 - 1], np.int32)
    whole = np.asarray(noise_function(0, 49, 49)(key, positions))
    sharded = np.asarray(noise_function(num_shards, 49, -(-49 // num_shards) * num_shards)(key, positions))
    np.testing.assert_array_equal(sharded[:, :49], whole)


def test_same_for_any_number_and_order_of_rows(rows):
    some = noise_function(0, 4096, 4096)(seed_key(3), np.array([40, 2], np.int32))
    np.testing.assert_array_equal(np.float64(some), rows[[40, 2]])
    ids = np.array([[7, 4095, 7]], np.int32)
    # Vectors of three go through other instructions than long ones; jax 0.11 rounds their logarithms differently.
    few = gumbel_at(seed_key(3), np.array([40, 2], np.int32), ids)
    np.testing.assert_allclose(np.float64(few), rows[[40, 2]][:, ids[0]], rtol=2e-7)


def _threefry(key, high, low):
    k, high, low = np.asarray(key, np.uint32)[:, None], np.uint32([high]), np.uint32([low])
    return [int(word[0]) for word in jax.jit(threefry)((k[0], k[1]), high, low)]


def test_threefry_is_fold_in():
    for seed, number in ((0, 0), (1, 1), (2**40 + 7, 2**31 - 1), (2**63 - 1, 49151)):
        key = jax.random.wrap_key_data(seed_key(seed), impl="threefry2x32")
        expected = jax.random.key_data(jax.random.fold_in(key, number))
        assert _threefry(seed_key(seed), 0, number) == expected.tolist()


def test_threefry_is_random123s():
    """What a seed means must never change: the test vectors published with the generator."""
    assert _threefry([0, 0], 0, 0) == [0x6B200159, 0x99BA4EFE]
    assert _threefry([2**32 - 1] * 2, 2**32 - 1, 2**32 - 1) == [0x1CB996FC, 0xBB002BE7]


def test_seeds_that_differ_have_keys_that_differ():
    seeds = [0, 1, 2**31, 2**32, 2**32 + 1, 2**62, 2**63 - 1]
    assert len({tuple(seed_key(seed)) for seed in seeds}) == len(seeds)


def test_tails():
    extremes = np.asarray(gumbel_from_bits(np.array([0, 1, 2, 2**31, 2**32 - 2, 2**32 - 1], np.uint32)))
    assert np.isfinite(extremes).all()
    assert -2.82 < extremes[-1] and extremes[0] < 22.88 and (np.diff(extremes) <= 0).all()
    expected = -np.log(-np.log1p(-np.array([0.5, 1.5, 2.5]) / 2**32))
    np.testing.assert_allclose(extremes[:3], expected, rtol=1e-6)
