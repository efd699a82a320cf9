"""Padded tensor parallelism over 2, 3, 4 and 8 devices agrees with one device, and moves no more than it must."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import fast_part
from tiny_models import FAMILIES, place, relative_error, step_logits, tiny_params

from jaxspec.config import MAX_LOGPROBS, SamplingParams
from jaxspec.methods.autoregressive import Autoregressive
from jaxspec.methods.core.round import ModelParams, Models, read_rounds
from jaxspec.models.config import TENSOR_AXIS
from jaxspec.models.kv_cache import init_cache
from jaxspec.models.params import ArrayInfo
from jaxspec.models.transformer import prefill
from jaxspec.runtime.program import Program
from jaxspec.runtime.sharding import partition_spec, round_up
from jaxspec.sampling.processors import clean

SLOTS = 128
CHUNK, STEPS = 32, 12
PROMPT = np.random.default_rng(0).integers(0, 101, 70).astype(np.int32)  # two chunks, the second one padded


def greedy_program(target):
    """Logits `[STEPS, padded V]` and tokens of greedy decoding after a padded chunk."""
    cfg = target.cfg

    def run(params, tokens, count, root):
        cache = prefill(params, cfg, tokens, count, init_cache(cfg, target.local_kv_heads, SLOTS, target.dtype))

        def step(carry, _):
            token, cache = carry
            logits, cache = step_logits(params, cfg, token, cache)
            token = target.vocab.argmax(clean(logits[None], target.vocab))[0]
            return (token, cache), (logits, token)

        return jax.lax.scan(step, (root, cache), length=STEPS)[1]

    args = [target.params(), *(target.array(shape, jnp.int32) for shape in [(CHUNK,), (), ()])]
    out = target.array((STEPS, target.padded_vocab), jnp.float32, None, TENSOR_AXIS), target.array((STEPS,), jnp.int32)
    return Program("greedy", run, target.plan, args, out)


@functools.cache
def greedy(family, degree):
    """Logits and tokens of `greedy_program` on a number of devices."""
    program = greedy_program(place(FAMILIES[family], degree))
    logits, tokens = program(tiny_params(family, degree), PROMPT[:CHUNK], np.int32(CHUNK - 3), PROMPT[-1])
    return np.asarray(logits), tokens.tolist()


@functools.cache
def runner(family, degree):
    return Autoregressive().bind(Models(place(FAMILIES[family], degree)), SLOTS)


def decode(family, degree, sampling, seed):
    bound, params = runner(family, degree), tiny_params(family, degree)
    request = bound.place_request(sampling, seed)
    state = bound.resume(ModelParams(params), bound.start(0, None), PROMPT, 0)
    tokens, logprobs = [], []
    while len(tokens) < sampling.max_tokens:
        state, round_, _ = bound.round(ModelParams(params), state, request, sampling.max_tokens - len(tokens))
        (output,) = read_rounds(round_)
        tokens += output.tokens
        logprobs += output.logprobs
    return tokens, logprobs


@pytest.mark.parametrize(
    ("family", "degree"),
    fast_part(
        [("llama", 3), ("qwen2", 4), ("llama-tied", 8), ("llama", 6), ("mistral", 2), ("qwen3", 3), ("qwen2", 8)],
        lambda family, degree: (family, degree) in (("llama", 3), ("qwen2", 4), ("llama-tied", 8)),
    ),
)
def test_logits_and_greedy_tokens_agree_with_one_device(family, degree):
    cfg = FAMILIES[family]
    # Nothing divides: this tests padding of every kind.
    assert any(n % degree for n in (cfg.num_kv_heads, cfg.vocab_size, cfg.mlp_dim))
    (logits, tokens), (expected, expected_tokens) = greedy(family, degree), greedy(family, 1)
    assert logits.shape[1] == round_up(cfg.vocab_size, degree)
    assert not logits[:, cfg.vocab_size :].any()
    assert relative_error(logits[:, : cfg.vocab_size], expected) < 1e-4
    assert tokens == expected_tokens


@pytest.mark.parametrize(
    ("family", "degree"),
    fast_part([("qwen2", 8), ("llama", 3), ("llama", 6), ("qwen3", 2)], lambda family, degree: family == "qwen2"),
)
def test_decoding_equals_that_of_one_device(family, degree):
    for sampling in (
        SamplingParams(max_tokens=16, logprobs=True),
        SamplingParams(max_tokens=16, temperature=1.3, top_p=0.95, repetition_penalty=1.2, logprobs=True),
    ):
        tokens, logprobs = decode(family, degree, sampling, seed=7)
        expected_tokens, expected_logprobs = decode(family, 1, sampling, seed=7)
        assert tokens == expected_tokens
        np.testing.assert_allclose(logprobs, expected_logprobs, atol=1e-4)


COLLECTIVE = re.compile(
    r"= (?P<result>.*?) (?P<kind>all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|"
    r"collective-broadcast)(-start)?\("
)


def collectives(program):
    """Kind and element count of every collective of a compiled program, one per result of a merged one."""
    found = []
    for line in program.lower().compile().as_text().splitlines():
        if match := COLLECTIVE.search(line):
            for dims in re.findall(r"\w+\[([\d,]*)\]", match["result"]):
                found.append((match["kind"], math.prod(int(d) for d in dims.split(",") if d)))
    return found


def test_two_all_reduces_a_layer_and_no_gathered_logits():
    cfg = FAMILIES["llama"]
    bound = Autoregressive().bind(Models(place(cfg, 4)), SLOTS)
    programs = [p for p in bound.programs if p.name in ("decode", "target prefill 64")]
    fill, step = programs
    found = collectives(step)
    wide = [size for kind, size in found if kind == "all-reduce" and size >= cfg.embed_dim]
    # Two a layer and the embedding's.
    assert wide == [cfg.embed_dim] * (2 * cfg.num_layers + 1)
    # The head reduces to a few numbers per row, and where the most probable tokens are asked for, each shard sends as
    # many as there can be, with their ids, in one of two branches. Nothing else crosses; logits do not.
    assert [size for kind, size in found if kind != "all-reduce"] == [4 * MAX_LOGPROBS] * 4
    assert len(found) > len(wide)
    # A prefill computes only keys and values in the last layer, which need no reduction.
    wide = [size for _, size in collectives(fill) if size >= cfg.embed_dim]
    assert wide == [64 * cfg.embed_dim] * (2 * (cfg.num_layers - 1) + 1)


def test_greedy_choice_needs_two_reductions():
    """Maximum, then the lowest id that has it: the collectives of the greedy branch."""
    target = place(FAMILIES["llama"], 4)

    def choose(logits):
        return target.vocab.argmax(logits)

    logits = target.array((1, target.padded_vocab), jnp.float32, None, TENSOR_AXIS)
    program = Program("choose", choose, target.plan, [logits], target.array((1,), jnp.int32))
    assert collectives(program) == [("all-reduce", 1), ("all-reduce", 1)]


def test_every_shard_lies_on_its_device():
    params, cfg = tiny_params("llama", 8), FAMILIES["llama"]
    head, qkv = params["head"], params["layers"][0]["qkv"]
    # Two devices and more share a KV head: each has a copy of it, and at most two of its three queries.
    assert head.shape == (104, cfg.embed_dim) and qkv.shape == (8, 2 + 2, cfg.head_dim, cfg.embed_dim)
    assert [s.device for s in head.addressable_shards] == jax.devices()
    assert {s.data.shape for s in head.addressable_shards} == {(13, cfg.embed_dim)}
    assert {s.data.shape for s in qkv.addressable_shards} == {(1, *qkv.shape[1:])}
    # Padding is exact zeros: padded heads and columns add nothing.
    assert not head[101:].any() and not qkv[6:].any() and head[100].any() and qkv[5, 0].any() and not qkv[5, 1].any()
    np.testing.assert_array_equal(qkv[4, 2:], qkv[5, 2:])


def test_axis_rules_refuse_what_they_cannot_split():
    with pytest.raises(ValueError, match="'batch' has no rule"):
        partition_spec(ArrayInfo((2, 2), jnp.float32, ("batch", None)))
    with pytest.raises(ValueError, match="claim one mesh axis twice"):
        partition_spec(ArrayInfo((2, 2), jnp.float32, ("mlp", "vocab")))
