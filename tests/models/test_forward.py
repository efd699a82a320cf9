"""Invariants of the forward pass on tiny models of every family."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import quick_part
from tiny_models import FAMILIES, empty_cache, logits_after, on_one_device, relative_error, step_logits, tiny_params

from jaxspec.models.config import RopeConfig
from jaxspec.models.kv_cache import KVCache
from jaxspec.models.rope import rope_frequencies
from jaxspec.models.transformer import forward, prefill, vocab_logits
from pallas_kernels.rope import rope_tables
from pallas_kernels.tree_attention.xla import rotate

PREFIX = 13
NODES = 6  # within the sliding window of every family: inside the window the mask alone decides
TREES = 3
LENGTH = PREFIX + NODES
SLOTS = 40
EXACT = 2e-5  # float32, other orders of summation
UNTIED = [family for family in FAMILIES if family != "llama-tied"]  # the head alone differs


def tokens_of(length, seed=0):
    return np.random.default_rng(seed).integers(0, 101, length).astype(np.int32)


def random_tree(seed):
    """Parents (-1 for the root), depths, ancestors (self included)."""
    rng = np.random.default_rng(seed)
    parent = np.array([-1] + [int(rng.integers(0, i)) for i in range(1, NODES)])
    ancestors = np.eye(NODES, dtype=bool)
    depth = np.zeros(NODES, np.int32)
    for i in range(1, NODES):
        ancestors[i] |= ancestors[parent[i]]
        depth[i] = depth[parent[i]] + 1
    return depth, ancestors


@functools.cache
def tree_pass(family):
    cfg = FAMILIES[family]

    def run(params, prefix, token, depth, ancestors):
        cache = prefill(params, cfg, prefix, jnp.int32(PREFIX), empty_cache(cfg, SLOTS))
        hidden, _ = forward(params, cfg, token, cache.length + depth, cache, ancestors)
        return vocab_logits(params, cfg, hidden)

    return on_one_device(run)


@functools.cache
def sequence_pass(family, chunk=None):
    """Logits at several places of several sequences: `[B, T], [B] -> [B, V]`."""
    cfg = FAMILIES[family]

    def run(params, tokens, counts):
        return jax.vmap(lambda t, c: logits_after(params, cfg, t, c, SLOTS, chunk))(tokens, counts)

    return on_one_device(run)


@pytest.mark.parametrize("family", UNTIED)
def test_tree_row_equals_the_sequence_of_its_path(family):
    params = tiny_params(family)
    prefix = tokens_of(PREFIX)
    rows, sequences, counts = [], np.zeros((LENGTH, LENGTH), np.int32), np.zeros(LENGTH, np.int32)
    for seed in range(TREES):
        token, (depth, ancestors) = tokens_of(NODES, seed + 1), random_tree(seed)
        rows.append(tree_pass(family)(params, prefix, token, depth, ancestors))
        for node in range(NODES):
            path = np.flatnonzero(ancestors[node])  # parents precede children
            sequences[seed * NODES + node, : PREFIX + len(path)] = [*prefix, *token[path]]
            counts[seed * NODES + node] = PREFIX + depth[node]
    expected = sequence_pass(family)(params, sequences, counts)
    assert relative_error(np.concatenate(rows), expected[: TREES * NODES]) < EXACT


@pytest.mark.parametrize("family", quick_part(UNTIED, lambda family: family == "llama"))
def test_chunks_and_single_tokens_equal_one_causal_pass(family):
    cfg, params = FAMILIES[family], tiny_params(family)
    tokens, counts = tokens_of(LENGTH), np.arange(LENGTH, dtype=np.int32)
    batch = np.broadcast_to(tokens, (LENGTH, LENGTH))
    whole = sequence_pass(family)(params, batch, counts)
    # Chunks of five: windows of seven positions cross two boundaries.
    assert relative_error(sequence_pass(family, 5)(params, batch, counts), whole) < EXACT

    def decode(params, tokens):
        def step(cache, token):
            logits, cache = step_logits(params, cfg, token, cache)
            return cache, logits

        return jax.lax.scan(step, empty_cache(cfg, SLOTS), tokens)[1]

    assert relative_error(on_one_device(decode)(params, tokens), whole) < EXACT


def test_sliding_window_hides_what_lies_before_it():
    # Layer l sees 6 positions back from layer l - 1's: two layers reach 12 back, and no further.
    params = tiny_params("mistral")
    tokens = np.broadcast_to(tokens_of(LENGTH), (LENGTH, LENGTH)).copy()
    tokens[np.arange(LENGTH), np.arange(LENGTH)] = (tokens[0] + 1) % 101  # row i differs at place i
    logits = np.asarray(sequence_pass("mistral")(params, tokens, np.full(LENGTH, LENGTH - 1, np.int32)))
    last = LENGTH - 1
    np.testing.assert_array_equal(logits[: last - 12], np.broadcast_to(logits[0], (last - 12, 101)))
    for place in range(last - 12, LENGTH):
        assert relative_error(logits[place], logits[0]) > 1e-4


@pytest.mark.parametrize("family", quick_part(["llama", "mistral"], lambda family: family == "llama"))
def test_padded_rows_never_change_live_slots(family):
    cfg, params = FAMILIES[family], tiny_params(family)

    @on_one_device
    def fill(params, cache, tokens, count):
        return prefill(params, cfg, tokens, count, cache)

    rng = np.random.default_rng(0)
    first = fill(params, empty_cache(cfg, SLOTS), tokens_of(8), np.int32(8))
    for count in range(9):
        chunk = tokens_of(8, seed=3)
        other = chunk.copy()
        other[count:] = rng.integers(0, 101, 8 - count)
        one, two = fill(params, first, chunk, np.int32(count)), fill(params, first, other, np.int32(count))
        assert int(one.length) == int(two.length) == 8 + count
        for before, a, b in zip(arrays(first), arrays(one), arrays(two), strict=True):
            np.testing.assert_array_equal(a[:, :8], before[:, :8])
            np.testing.assert_array_equal(a[:, : 8 + count], b[:, : 8 + count])
            assert not a[:, 16:].any()  # nothing behind the chunk is touched
    # What lies behind the prefix is never read: neither by one token nor by a chunk.
    dirty = jax.tree.map(lambda a: a if a.ndim == 0 else a.at[:, 8:].set(50.0), first)
    clean_next, dirty_next = (fill(params, c, tokens_of(8, seed=4), np.int32(8)) for c in (first, dirty))
    for a, b in zip(arrays(clean_next), arrays(dirty_next), strict=True):
        np.testing.assert_array_equal(a[:, :16], b[:, :16])


def arrays(cache: KVCache):
    return [np.asarray(a) for a in (*cache.key, *cache.value)]


def test_rotary_tables_and_rotation_against_an_oracle():
    position = np.array([0, 1, 2, 77, 500], np.int32)
    for rope in (
        RopeConfig(500.0),
        RopeConfig(10000.0, "linear", 4.0),
        RopeConfig(500000.0, "llama3", 32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192),
    ):
        H = 64
        frequency = rope_oracle(rope, H)
        np.testing.assert_allclose(rope_frequencies(rope, H), frequency, rtol=1e-5)
        x = np.random.default_rng(0).normal(size=(len(position), 2, 3, H)).astype(np.float32)
        pair = x[..., : H // 2] + 1j * x[..., H // 2 :]
        turned = pair * np.exp(1j * position[:, None] * frequency)[:, None, None, :]
        expected = np.concatenate([turned.real, turned.imag], axis=-1)
        got = rotate(jnp.asarray(x), *rope_tables(jnp.asarray(position), rope_frequencies(rope, H)))
        np.testing.assert_allclose(got, expected, atol=3e-4)
        np.testing.assert_allclose(got[:3], expected[:3], atol=3e-6)


def rope_oracle(rope, head_dim):
    """Frequencies in float64, one at a time, as the Llama 3.1 release writes them."""
    result = []
    for i in range(head_dim // 2):
        frequency = rope.theta ** (-2 * i / head_dim)
        if rope.scaling == "linear":
            frequency /= rope.factor
        if rope.scaling == "llama3":
            turns = rope.original_context * frequency / (2 * np.pi)  # over the original context
            if turns < rope.low_freq_factor:
                frequency /= rope.factor
            elif turns <= rope.high_freq_factor:
                smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
                frequency *= (1 - smooth) / rope.factor + smooth
        result.append(frequency)
    return np.array(result)
