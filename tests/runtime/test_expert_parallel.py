"""Whole experts on each device: the logits and tokens of one device, and the weights where they should be."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import fast_part
from native_models import write_model
from tiny_models import FOR_TWO_DEVICES, MORE_FAMILIES, RandomSource, relative_error

import jaxspec
from jaxspec.checkpoint.load import load_foreign
from jaxspec.errors import ConfigError
from jaxspec.models.config import TENSOR_AXIS
from jaxspec.models.experts import ExpertsConfig
from jaxspec.models.kv_cache import init_cache
from jaxspec.models.transformer import forward, vocab_logits
from jaxspec.runtime.mesh import plan_mesh
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.program import Program

ROWS = 9
TOKENS = np.random.default_rng(0).integers(0, 101, ROWS).astype(np.int32)


def logits(family, degree, expert_parallel):
    cfg = (MORE_FAMILIES | FOR_TWO_DEVICES)[family]
    plan = dataclasses.replace(plan_mesh(degree), expert_parallel=expert_parallel)
    target = Placement(cfg, plan, np.dtype("float32"))
    params = load_foreign(RandomSource(cfg), plan, np.dtype("float32"))

    def run(params, tokens):
        cache = init_cache(cfg, target.local_kv_heads, 64, target.dtype)
        hidden, _ = forward(params, cfg, tokens, jnp.arange(ROWS), cache, jnp.tril(jnp.ones((ROWS, ROWS), bool)))
        return vocab_logits(params, cfg, hidden)

    out = target.array((ROWS, target.padded_vocab), jnp.float32, None, TENSOR_AXIS)
    program = Program("experts", run, plan, [target.params(), target.array((ROWS,), jnp.int32)], out)
    return params, np.asarray(program(params, TOKENS))[:, : cfg.vocab_size]


@pytest.mark.parametrize(
    ("family", "degree"),
    fast_part(
        [("mixtral", 2), ("qwen2-moe", 4), ("qwen3-moe", 3), ("gpt-oss", 4), ("gemma4-large-two", 2)],
        lambda *case: case in (("qwen2-moe", 4), ("gpt-oss", 4)),
    ),
)
def test_logits_of_one_device(family, degree):
    experts = (MORE_FAMILIES | FOR_TWO_DEVICES)[family].experts
    params, got = logits(family, degree, True)
    _, expected = logits(family, 1, False)
    assert relative_error(got, expected) < 1e-4
    held = params["layers"][1]["gate_up"]
    assert {shard.data.shape[0] for shard in held.addressable_shards} == {-(-experts.count // degree)}
    assert held.shape[2] == experts.dim  # no column is padded
    cut, _ = logits(family, degree, False)
    assert {shard.data.shape[0] for shard in cut["layers"][1]["gate_up"].addressable_shards} == {experts.count}
    if experts.shared_dim:
        # What every row passes is cut in any case.
        shared = params["layers"][1]["shared_down"]
        assert shared.addressable_shards[0].data.shape[1] == -(-experts.shared_dim // degree)


@pytest.mark.thorough
def test_through_the_front_door(tmp_path):
    cfg = dataclasses.replace(MORE_FAMILIES["mixtral"], experts=ExpertsConfig(5, 2, 12), vocab_size=40)
    write_model(tmp_path / "experts", cfg)
    sampling = jaxspec.SamplingParams(max_tokens=12, ignore_eos=True)
    texts = [
        jaxspec.LLM(tmp_path / "experts", method="ar", draft="none", **options).generate("w3 w1 w4", sampling)
        for options in ({}, {"target_devices": 2, "expert_parallel": True})
    ]
    assert texts[0].token_ids == texts[1].token_ids
    write_model(tmp_path / "dense", dataclasses.replace(cfg, family="llama", experts=None))
    with pytest.raises(ConfigError, match="has no experts; expert_parallel is for"):
        jaxspec.LLM(tmp_path / "dense", expert_parallel=True)
    with pytest.raises(ConfigError, match="give target_devices, 2 or more"):
        jaxspec.LLM(tmp_path / "experts", expert_parallel=True)
    with pytest.raises(ConfigError, match="expert_parallel must be true or false"):
        jaxspec.LLM(tmp_path / "experts", expert_parallel=1)  # pyright: ignore[reportArgumentType]
    assert len(jax.devices()) >= 4
