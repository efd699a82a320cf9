"""Attention heads on devices that do not divide the KV heads: replicated KV heads, split queries."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import fast_part
from tiny_models import FAMILIES, RandomSource

from jaxspec.checkpoint.load import load_foreign
from jaxspec.config import SamplingParams
from jaxspec.methods.autoregressive import Autoregressive
from jaxspec.methods.core.round import ModelParams, Models, read_rounds
from jaxspec.models.heads import KV_ROWS, QKV_ROWS, QUERY_ROWS, arrange_heads, collect_heads, head_layout
from jaxspec.models.quantization import Storage, fit_storage
from jaxspec.models.transformer import forward
from jaxspec.runtime.mesh import plan_mesh
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.program import Program

DEGREES = range(1, 9)
# KV heads and queries of each: the default model's, Llama-3-70B's, Llama-3-8B's, and one query each.
SHAPES = [(3, 3), (8, 8), (8, 4), (6, 1), (2, 7), (5, 5)]
MODELS = {3: FAMILIES["qwen2"], 8: dataclasses.replace(FAMILIES["qwen3"], num_heads=32, num_kv_heads=8, head_dim=8)}


@pytest.mark.parametrize(("kv_heads", "group"), SHAPES)
def test_every_query_lies_on_one_device_beside_its_key(kv_heads, group):
    for degree in (*DEGREES, 16):
        layout = head_layout(kv_heads, group, degree)
        assert sum(layout.slots) == -(-kv_heads // degree), "copies take no more memory than padding"
        assert layout.queries <= -(-kv_heads // degree) * group
        assert layout.queries * degree >= kv_heads * group
        if not layout.splits:
            continue
        kv, queries = layout.kv_of_slots(), layout.queries_of_slots()
        assert kv.shape == (degree, sum(layout.slots)) and queries.shape == (degree, layout.queries)
        assert sorted(queries[queries >= 0]) == list(range(kv_heads * group))
        # A slot's queries are those of its own KV head.
        slot = np.repeat(np.arange(layout.whole + 1), [group] * layout.whole + [layout.part])
        beside = kv[:, slot]
        assert ((queries < 0) | (queries // group == beside)).all()


@pytest.mark.parametrize(("kv_heads", "group", "degree"), [(8, 8, 6), (8, 8, 7), (3, 3, 8), (3, 3, 2), (5, 5, 4)])
def test_arranged_heads_come_back(kv_heads, group, degree):
    layout = head_layout(kv_heads, group, degree)
    assert layout.splits
    rng = np.random.default_rng(0)
    # The last one is `out` in blocks, three of a query.
    for rows, entries in ((QKV_ROWS, group + 2), (QUERY_ROWS, group), (KV_ROWS, 1), (QUERY_ROWS, 3 * group)):
        array = rng.normal(size=(2, kv_heads, entries, 4))
        placed = arrange_heads(array, layout, 1, rows)
        assert placed.shape[:2] == (2, degree) and placed.shape[3:] == (4,)
        np.testing.assert_array_equal(collect_heads(placed, layout, 1, rows, entries), array)
        if rows != KV_ROWS:
            queries = np.unique(arrange_heads(array[..., :1, :].repeat(entries, 2), layout, 1, rows)).size
            assert queries <= 8 * kv_heads + 1  # nothing but the heads' own numbers, and zeros


@functools.cache
def answer(kv_heads, degree, temperature):
    """Tokens of plain decoding."""
    cfg = MODELS[kv_heads]
    target = Placement(cfg, plan_mesh(degree), jnp.dtype("float32"))
    params = ModelParams(load_foreign(RandomSource(cfg), target.plan, "float32"))
    bound = Autoregressive().bind(Models(target), 128)
    prompt = np.random.default_rng(3).integers(0, cfg.vocab_size, 40).astype(np.int32)
    request = bound.place_request(SamplingParams(temperature=temperature), 5)
    state, tokens = bound.resume(params, bound.start(0, None), prompt, 0), []
    while len(tokens) < 16:
        state, round_, _ = bound.round(params, state, request, 16 - len(tokens))
        tokens += read_rounds(round_)[0].tokens
    return tokens


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kv_heads", "degree"),
    fast_part([(8, 6), (3, 7), (8, 3), (8, 8), (3, 2), (3, 4), (3, 8)], lambda *case: case in ((8, 6), (3, 7))),
)
def test_tokens_are_those_of_one_device(kv_heads, degree):
    for temperature in (0.0, 1.0):
        assert answer(kv_heads, degree, temperature) == answer(kv_heads, 1, temperature)


def attention_costs(kv_heads, group, degree):
    """Floating-point operations and bytes of the cache of a device, in a program that is nearly attention alone."""
    cfg = dataclasses.replace(
        MODELS[3], family="llama", num_layers=1, embed_dim=512, mlp_dim=8, num_heads=kv_heads * group,
        num_kv_heads=kv_heads, head_dim=32, qkv_bias=False, sliding_window=None, sliding_layers=(),
    )  # fmt: skip
    placement, rows = Placement(cfg, plan_mesh(degree, kernels="xla"), jnp.dtype("float32")), 8

    def run(params, cache, token):
        place = jnp.arange(rows, dtype=jnp.int32)
        return forward(params, cfg, token, cache.length + place, cache, place[None] <= place[:, None])

    args = [placement.params(), placement.cache(256), placement.array((rows,), jnp.int32)]
    out = placement.array((rows, cfg.embed_dim), jnp.float32), args[1]
    compiled = Program("forward", run, placement.plan, args, out, donate=[1]).lower().compile()
    layers = [leaf for leaf in jax.tree.leaves(compiled.in_avals[0][1]) if leaf.ndim]
    shards = [sharding for sharding in jax.tree.leaves(compiled.input_shardings[0][1])][: len(layers)]
    cache = sum(math.prod(s.shard_shape(leaf.shape)) * 4 for s, leaf in zip(shards, layers, strict=True))
    return compiled.cost_analysis()["flops"], cache


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kv_heads", "group", "degrees"),
    fast_part([(8, 8, (4, 6)), (3, 3, DEGREES)], lambda kv_heads, group, degrees: degrees == (4, 6)),
)
def test_a_device_computes_and_keeps_less_with_every_degree(kv_heads, group, degrees):
    costs = {degree: attention_costs(kv_heads, group, degree) for degree in degrees}
    flops, cache = ([costs[degree][place] for degree in degrees] for place in (0, 1))
    assert flops == sorted(flops, reverse=True) and cache == sorted(cache, reverse=True)
    if kv_heads == 8:
        assert costs[6][0] <= 0.72 * costs[4][0] and costs[6][1] <= costs[4][1]
    if 8 in costs:
        assert costs[8][1] * 3 <= costs[1][1]


def test_blocks_that_a_single_query_does_not_fill_become_numbers():
    """Heads of 64 values: whole blocks of 32, a quarter of a block of 256."""
    cfg = dataclasses.replace(MODELS[8], head_dim=64, num_heads=32, embed_dim=256, mlp_dim=256)
    for block_format, degree, kept in (("q8_0", 6, True), ("q4_k", 6, False), ("q4_k", 4, True)):
        assert (fit_storage(Storage(block_format), cfg, degree).type_of("layers.0.out") == block_format) == kept
