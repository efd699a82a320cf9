"""Native kernels: a row's bits do not depend on the rows beside it, its place in a tree, or how weights are kept."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import fast_part
from tiny_models import ALL_FAMILIES, FAMILIES, MORE_FAMILIES, RandomSource, place, relative_error

import jaxspec
from jaxspec.check.invariance import measure_invariance
from jaxspec.checkpoint.load import load_foreign
from jaxspec.llm import internals
from jaxspec.models import transformer
from jaxspec.models.config import TENSOR_AXIS
from jaxspec.models.kv_cache import init_cache
from jaxspec.models.transformer import forward, prefill, vocab_logits
from jaxspec.runtime.mesh import plan_mesh
from jaxspec.runtime.program import Program
from pallas_kernels.selection import choose

NATIVE = choose("auto", "cpu").native

needs_native = pytest.mark.skipif(not NATIVE, reason="the native kernels were not built")


@functools.cache
def placed(family, dtype="float32", kernels="cpu", degree=1):
    target = place(ALL_FAMILIES[family], dtype=dtype)
    target = dataclasses.replace(target, plan=plan_mesh(degree, kernels=kernels))
    return target, load_foreign(RandomSource(ALL_FAMILIES[family]), target.plan, target.dtype)


def text(length, seed=0):
    return np.random.default_rng(seed).integers(0, 101, length).tolist()


BITWISE = [
    ("qwen3", "float32"),
    *((family, "float32") for family in ("qwen2-moe", "gemma2", "olmo2", "granite", "gemma4", "gemma4-large")),
]


@needs_native
@pytest.mark.parametrize(
    ("family", "dtype"),
    fast_part(
        [*((family, "float32") for family in ALL_FAMILIES), ("llama", "bfloat16"), ("qwen2-moe", "bfloat16")],
        lambda family, dtype: family == "llama" or (family, dtype) in BITWISE,
    ),
)
def test_chains_and_trees_give_the_bits_of_plain_decoding(family, dtype):
    target, params = placed(family, dtype)
    result = measure_invariance(target, params, text(150), text(40, seed=1), rows=9)
    assert (result.tokens, result.rows) == (40, 9)
    assert result.bitwise and result.largest == 0


@pytest.mark.thorough
def test_what_differs_is_counted():
    target, params = placed("llama", kernels="xla")
    result = measure_invariance(target, params, text(20), text(12, seed=1), rows=4)
    # XLA's products of one row and of several add in other orders.
    assert not result.bitwise and 0 < result.largest < 1e-4
    assert 0 < result.differing_chain <= 12 and 0 < result.differing_tree <= 12


@functools.cache
def tree_logits(family, kernels, degree):
    """Logits of a chunk's last tokens, seen as a chain with dead rows after it."""
    target, params = placed(family, kernels=kernels, degree=degree)
    cfg, rows, slots = target.cfg, 6, 256

    def run(params, tokens, active_rows):
        cache = init_cache(cfg, target.local_kv_heads, slots, target.dtype, target.local_recurrent_heads)
        cache = prefill(params, cfg, tokens[:-rows], jnp.int32(tokens.shape[0] - rows), cache)
        position = cache.length + jnp.arange(rows)
        mask = jnp.tril(jnp.ones((rows, rows), bool))
        hidden, _ = forward(params, cfg, tokens[-rows:], position, cache, mask, active_rows=active_rows)
        return vocab_logits(params, cfg, hidden, active_rows)

    scalar, row = target.array((), jnp.int32), target.array((140,), jnp.int32)
    out = target.array((rows, target.padded_vocab), jnp.float32, None, TENSOR_AXIS)
    program = Program("tree", run, target.plan, [target.params(), row, scalar], out)
    return np.asarray(program(params, np.asarray(text(140), np.int32), np.int32(4)))[:, : cfg.vocab_size]


@needs_native
@pytest.mark.parametrize(
    ("family", "degree"),
    fast_part(
        [
            *((family, 1) for family in FAMILIES),
            *((family, 4) for family, cfg in MORE_FAMILIES.items() if cfg.kinds is None),
            ("gemma4", 3),
            ("llama-tied", 2),
            ("qwen3", 3),
            ("olmo2", 6),
            *((family, 2) for family in ("exaone4", "glm4", "granite")),
        ],
        lambda family, degree: (
            (family, degree) in (("mistral", 1), ("qwen3", 3), ("olmo2", 6), ("qwen2-moe", 4), ("glm4", 2))
        ),
    ),
)
def test_native_and_xla_agree_within_rounding(family, degree):
    native, xla = tree_logits(family, "cpu", degree), tree_logits(family, "xla", 1)
    assert relative_error(native[:4], xla[:4]) < 2e-5


@needs_native
@pytest.mark.parametrize("family", ["mistral", "qwen2-moe", "qwen3.5"])
def test_rows_that_do_not_matter_may_hold_anything(family, monkeypatch):
    """They are not cleared between operations, so NaN in them goes through all layers."""
    look_up = transformer.embed

    def spoilt(params, token):
        rows = look_up(params, token)
        return rows.at[4:].set(jnp.nan) if token.shape[0] == 6 else rows

    monkeypatch.setattr(transformer, "embed", spoilt)
    np.testing.assert_array_equal(tree_logits.__wrapped__(family, "cpu", 1)[:4], tree_logits(family, "cpu", 1)[:4])


@needs_native
@pytest.mark.slow
@pytest.mark.real_model
def test_default_model_bitwise(llm):
    """64 greedy tokens, one by one against chains and trees, from the file's blocks and from float32: all the same."""
    whole, exact = jaxspec.LLM(dtype="float32"), jaxspec.LLM(activations="float32")
    assert "q4_1" in str(internals(exact).target.weights) and str(internals(whole).target.weights) == "float32"
    assert internals(llm).target.activations == "int16"
    for model in (llm, exact):
        assert sum(leaf.nbytes for leaf in jax.tree.leaves(internals(model).params.target)) < 100e6
    ids = llm.encode([{"role": "user", "content": "Why is the sky blue?"}])
    sampling = jaxspec.SamplingParams(max_tokens=64, ignore_eos=True, logprobs=True)
    blocks, floats = (model.generate(ids, sampling) for model in (exact, whole))
    assert blocks.token_ids == floats.token_ids and blocks.logprobs == floats.logprobs
    for model in (llm, exact, whole):
        target, params = internals(model).target, internals(model).params.target
        assert measure_invariance(target, params, ids, blocks.token_ids).bitwise
