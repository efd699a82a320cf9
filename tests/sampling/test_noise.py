"""The noise is Gumbel, independent, and a function of seed, position and id alone."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from sampling_cases import noise_function, shard_call

from jaxspec.models.config import TENSOR_AXIS
from jaxspec.sampling.choose import gumbel_at, gumbel_from_bits, gumbel_rows, role_key, seed_key, threefry, uniform_at

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
    assert_neighbours_are_independent(u)
    assert abs(_correlation(u[1:, 1:], u[:-1, :-1])) < 4
    other = np.asarray(noise_function(0, 4096, 4096)(seed_key(4), np.arange(64, dtype=np.int32)), np.float64)
    assert abs(_correlation(u, np.exp(-np.exp(-other)) - 0.5)) < 4
    assert len(np.unique(rows)) > 0.99 * rows.size


@pytest.mark.thorough
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
    """The meaning of a seed must never change: the test vectors published with the generator."""
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


# Several draws at one position, and streams for other uses.


def _correlation(a, b):
    """Standard normal if the two are independent and uniform on [-1/2, 1/2)."""
    return (a * b).mean() * 12 * np.sqrt(a.size)


def assert_neighbours_are_independent(u):
    """Rows, columns, and rows with columns."""
    assert abs(_correlation(u[1:], u[:-1])) < 4 and abs(_correlation(u[:, 1:], u[:, :-1])) < 4
    assert abs(_correlation(u[1:, :-1], u[:-1, 1:])) < 4


def _draws_function(num_shards, vocab_size, padded_size):
    """(key, positions, draw) -> noise [T, padded_size]."""
    specs = (P(), P(), P()), P(None, TENSOR_AXIS)

    def noise(vocab, key, positions, draw):
        return gumbel_rows(key, positions, vocab, draw)

    return shard_call(noise, num_shards, vocab_size, padded_size, *specs)


def test_draws_at_one_position_are_independent(rows):
    noise = _draws_function(0, 4096, 4096)
    positions = np.arange(64, dtype=np.int32)
    draws = [np.asarray(noise(seed_key(3), positions, np.full(64, draw, np.int32)), np.float64) for draw in range(4)]
    np.testing.assert_array_equal(draws[0], rows)  # draw 0 is what chooses tokens
    u = [np.exp(-np.exp(-draw)) - 0.5 for draw in draws]
    for i in range(1, 4):
        assert abs(draws[i].mean() - _EULER) < 5 * np.sqrt(np.pi**2 / 6 / rows.size)
        for other in u[:i]:
            assert abs(_correlation(u[i], other)) < 4
            # Neither is one draw another's noise of the position or of the token before or after.
            assert abs(_correlation(u[i][1:], other[:-1])) < 4 and abs(_correlation(u[i][:-1], other[1:])) < 4
            assert abs(_correlation(u[i][:, 1:], other[:, :-1])) < 4
    assert len(np.unique(np.stack(draws))) > 0.97 * 4 * rows.size


@pytest.mark.parametrize("num_shards", [1, 3, 8])
def test_draws_are_the_same_for_any_sharding(num_shards):
    key, positions = seed_key(5), np.array([0, 9, 9, 9, 123456, 2**31 - 1], np.int32)
    draw = np.array([1, 0, 1, 7, 0, 0], np.int32)
    padded = -(-49 // num_shards) * num_shards
    whole = np.asarray(_draws_function(0, 49, 49)(key, positions, draw))
    sharded = np.asarray(_draws_function(num_shards, 49, padded)(key, positions, draw))
    np.testing.assert_array_equal(sharded[:, :49], whole)
    assert len(np.unique(whole)) == whole.size
    # One number for all rows, and rows of their own, mean the same.
    np.testing.assert_array_equal(_draws_function(0, 49, 49)(key, positions, np.int32(7))[3], whole[3])


@jax.jit
def _role_keys(keys, numbers):
    return jax.vmap(lambda key: jax.vmap(lambda number: role_key(key, number))(numbers))(keys)


def test_no_role_has_the_key_of_a_position_or_of_another_role():
    seeds = [0, 1, 2, 2**32, 2**40 + 7, 2**63 - 1]
    keys = np.stack([seed_key(seed) for seed in seeds])
    roles = np.asarray(_role_keys(keys, np.arange(1, 100, dtype=np.uint32)))
    # Positions up to a thousand, and the last ones; a position's key is that of `gumbel_at`, which is fold_in's.
    numbers = np.concatenate([np.arange(1000), 2**31 - 1 - np.arange(10)]).astype(np.uint32)
    at = jax.jit(lambda k: threefry((k[:, 0:1], k[:, 1:2]), np.uint32(0), numbers[None]))(keys)
    positions = np.stack([np.asarray(word) for word in at], axis=-1)
    every = np.concatenate([keys, roles.reshape(-1, 2), positions.reshape(-1, 2)])
    assert len(np.unique(every, axis=0)) == len(every)


@jax.jit
def _uniform(key, positions, draws):
    return jax.vmap(lambda position: uniform_at(key, position, draws))(positions)


def test_uniform_numbers():
    positions, draws = np.arange(512, dtype=np.int32), np.arange(256, dtype=np.int32)
    one = np.asarray(_uniform(role_key(seed_key(3), 1), positions, draws))
    assert one.dtype == np.float32 and 0 <= one.min() < 1e-4 and 1 - 1e-4 < one.max() < 1
    n, u = one.size, np.float64(one) - 0.5
    assert abs(u.mean()) < 4 * np.sqrt(1 / 12 / n)
    assert abs((u**2).mean() - 1 / 12) < 4 * np.sqrt(1 / 180 / n)
    assert np.abs(np.sort(one.ravel()) - (np.arange(n) + 0.5) / n).max() < 1.95 / np.sqrt(n)
    assert_neighbours_are_independent(u)
    np.testing.assert_array_equal(
        _uniform(role_key(seed_key(3), 1), positions[[13, 2]], draws[[4, 0]]), one[[13, 2]][:, [4, 0]]
    )
    # Apart from other roles, other seeds, and the noise that chooses tokens or is drawn in the same role.
    for key in (role_key(seed_key(3), 2), role_key(seed_key(4), 1), seed_key(3)):
        assert abs(_correlation(u, np.float64(_uniform(key, positions, draws)) - 0.5)) < 4
    noise = np.asarray(noise_function(0, 256, 256)(seed_key(3), positions), np.float64)
    assert abs(_correlation(u, np.exp(-np.exp(-noise)) - 0.5)) < 4


def test_uniform_numbers_never_round_up_to_one():
    """u * q < p must hold for every u if q = p: what is certain is accepted."""
    positions = np.arange(2**9, dtype=np.int32)
    u = np.asarray(_uniform(role_key(seed_key(0), 1), positions, np.arange(2**12, dtype=np.int32)))
    assert 0 <= u.min() < 1e-6 and 1 - 1e-6 < u.max() < 1
    steps = np.float64(u) * 2**24
    assert (steps == np.floor(steps)).all() and (steps % 2).mean() > 0.4
