"""Programs in the form of accelerators, which never wait for data, give what those of a CPU give.

They run on a CPU here, whose kernels say that they are a GPU's.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from method_cases import (
    LLAMA_CHAIN,
    LLAMA_LOOKUP,
    LLAMA_SPECEXEC,
    LLAMA_SPECINFER,
    LONG_PROMPT,
    SAMPLINGS,
    Case,
    models_of,
    params_of,
    plain,
    run,
    tokens_of,
)

from jaxspec.checkpoint.load import pack_trees
from jaxspec.config import SamplingParams
from jaxspec.engine import Engine
from jaxspec.errors import ConfigError
from jaxspec.methods.autoregressive import Autoregressive
from jaxspec.methods.core import verify
from jaxspec.methods.core.round import ModelParams, Models
from jaxspec.methods.swiftspec.settings import SwiftSpec
from jaxspec.sampling import accept
from jaxspec.sampling.processors import GREEDY, Variant, find_variant
from pallas_kernels.registry import Kernels

COUNT, BF16 = 24, jnp.bfloat16
PLAIN = Case("llama", 1, "none", Autoregressive())
IN_TURN = Case("llama", 1, "same", SwiftSpec(7, 4, depth=2))
RUNS = [
    (PLAIN, "greedy", "copy"),
    (PLAIN, "cuts", "copy"),
    (LLAMA_SPECEXEC, "greedy", "first layer"),
    (LLAMA_SPECEXEC, "greedy penalties", "first layer"),
    pytest.param(LLAMA_CHAIN, "penalties", "first layer", marks=pytest.mark.slow),
    pytest.param(LLAMA_LOOKUP, "T=1", "copy", marks=pytest.mark.slow),
    (IN_TURN, "greedy", "first layer"),
]


@functools.cache
def engine_of(case, accelerator="gpu"):
    """An engine of a case on one CPU, in the form of an accelerator."""
    models = models_of(case)
    if accelerator:
        plan = dataclasses.replace(models.target.plan, kernels=Kernels("xla", accelerator))
        models = Models(*(model and dataclasses.replace(model, plan=plan) for model in models))
    return Engine(models, case.method, 160)


def rounds_of(case, draft, sampling, accelerator="gpu"):
    """Rounds of a text."""
    engine = engine_of(case, accelerator)
    engine.prepare(None, SamplingParams(**sampling))
    models, given = engine.models, params_of(case, draft)
    trees = [(model.params(), dict(own)) for model, own in zip(models, given, strict=True) if model]
    params = ModelParams(*pack_trees([own for _, own in trees], [shapes for shapes, _ in trees]))
    return run(engine, params, LONG_PROMPT, COUNT, 0, **sampling)


def test_one_place_says_which_form_programs_have():
    kernels = [Kernels("xla", platform) for platform in ("cpu", "gpu", "tpu")]
    assert [each.takes_cpu_forms for each in kernels] == [True, False, False]
    assert [each.loops_are_free for each in kernels] == [True, False, True]


@pytest.mark.parametrize(("case", "sampling", "draft"), RUNS)
def test_tokens_are_those_of_plain_decoding(case, sampling, draft):
    rounds, expected = (
        rounds_of(case, draft, SAMPLINGS[sampling]),
        plain("llama", LONG_PROMPT, COUNT, 0, **SAMPLINGS[sampling]),
    )
    assert tokens_of(rounds) == tokens_of(expected)
    got, wanted = ([p for r in all_ for p in r.logprobs] for all_ in (rounds, expected))
    assert got == pytest.approx(wanted, abs=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize(("case", "sampling"), [(PLAIN, "cuts"), (LLAMA_CHAIN, "greedy"), (LLAMA_LOOKUP, "penalties")])
def test_tokens_in_the_form_of_a_tpu(case, sampling):
    """Steps counted on the device, several rounds in a dispatch, and one row padded to a tile."""
    rounds = rounds_of(case, "first layer", SAMPLINGS[sampling], "tpu")
    assert tokens_of(rounds) == tokens_of(plain("llama", LONG_PROMPT, COUNT, 0, **SAMPLINGS[sampling]))
    names = {program.name for program in engine_of(case, "tpu").runner.programs}
    assert "decode" in names if case is PLAIN else "rounds" in names


@pytest.mark.thorough
@pytest.mark.parametrize("sampling", ["T=1", pytest.param("greedy", marks=pytest.mark.slow)])
def test_rejection_accepts_what_the_walk_accepts(sampling):
    """Round by round: the same draws decide."""
    here, there = (rounds_of(LLAMA_SPECINFER, "first layer", SAMPLINGS[sampling], form) for form in ("gpu", None))
    assert [(r.tokens, r.accepted) for r in here] == [(r.tokens, r.accepted) for r in there]
    assert any(r.accepted for r in here) or sampling == "greedy"


def test_the_most_probable_tokens_are_reported():
    sampling = {"logprobs": 3}
    rounds, expected = (
        rounds_of(LLAMA_SPECEXEC, "first layer", sampling),
        plain("llama", LONG_PROMPT, COUNT, 0, **sampling),
    )
    ids, wanted = ([[token for token, _ in top] for r in all_ for top in r.top] for all_ in (rounds, expected))
    assert ids == wanted and len(ids) == COUNT


@pytest.mark.parametrize("lazy", [5, pytest.param(128, marks=pytest.mark.slow)])
def test_a_large_batch_is_walked(lazy, monkeypatch):
    """Only rows that are reached decide; the head runs for each of them, or for all rows."""
    monkeypatch.setattr(verify, "ROWS_AT_ONCE", 5)
    monkeypatch.setattr(verify, "LAZY_HEAD_ROWS", lazy)
    walked = []
    walk = accept.walk
    monkeypatch.setattr(accept, "walk", lambda *args: walked.append(args) or walk(*args))
    monkeypatch.setattr(accept, "walk_at_once", None)
    case = Case("llama", 1, "same", dataclasses.replace(LLAMA_SPECEXEC.method, num_draft_tokens=12 + (lazy > 5)))
    rounds = rounds_of(case, "first layer", SAMPLINGS["penalties"])
    assert tokens_of(rounds) == tokens_of(plain("llama", LONG_PROMPT, COUNT, 0, **SAMPLINGS["penalties"])) and walked


def test_a_request_of_a_known_kind_compiles_nothing(compilations):
    for temperature in (0.5, 1.5):
        rounds_of(PLAIN, "copy", {"temperature": temperature})
        if temperature == 0.5:
            before = len(compilations)
    assert len(compilations) == before


def test_what_the_host_knows_of_a_request():
    assert find_variant(SamplingParams()) == GREEDY
    assert find_variant(SamplingParams(**SAMPLINGS["cuts"])) == Variant(
        draws=True, top_k=True, top_p=True, logprob=True
    )
    assert find_variant(SamplingParams(**SAMPLINGS["greedy penalties"])) == Variant(penalised=True, logprob=True)
    early = SamplingParams(stop_token_ids=(3,), min_tokens=2, logprobs=2)
    assert find_variant(early) == Variant(penalised=True, logprob=True, ranked=True)


def in_bfloat16(case, kernels):
    """An engine in bfloat16 with other kernels, and its parameters."""
    models = models_of(case)
    plan = dataclasses.replace(models.target.plan, kernels=kernels)
    models = Models(*(model and dataclasses.replace(model, plan=plan, dtype=jnp.dtype(BF16)) for model in models))
    shapes = ModelParams(*(model and model.params() for model in models))
    params = jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), params_of(case, "first layer"), shapes)
    engine = Engine(models, case.method, 160)
    engine.prepare()
    return engine, params


@pytest.mark.thorough
@pytest.mark.parametrize("degree", [2, pytest.param(4, marks=pytest.mark.slow), 8])
def test_partial_sums_cross_in_bfloat16(degree):
    """Plain decoding and verification of one mesh add the same: all-reduces of half the bytes, and the same tokens."""
    rounds = []
    for case in (PLAIN._replace(degree=degree), LLAMA_SPECEXEC._replace(degree=degree)):
        engine, params = in_bfloat16(case, Kernels("xla", "gpu"))
        rounds.append(run(engine, params, LONG_PROMPT, COUNT, 0))
        texts = [program.lower(program.fit(GREEDY)).as_text() for program in engine.runner.programs]
        crossed = {kind for text in texts for kind in re.findall(r"}\) : \(tensor<\d+x\d+x(\w+)>\)", text)}
        assert "bf16" in crossed
    assert tokens_of(rounds[1]) == tokens_of(rounds[0])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("platform", "degree", "case", "sampling"),
    [
        pytest.param("gpu", 1, LLAMA_SPECEXEC, "T=1", marks=pytest.mark.slow),
        ("gpu", 2, LLAMA_CHAIN, "greedy"),
        ("gpu", 1, LLAMA_CHAIN._replace(family="mixtral"), "T=1"),
        pytest.param("cpu", 1, LLAMA_SPECEXEC, "penalties", marks=pytest.mark.slow),
        pytest.param("gpu", 1, IN_TURN, "greedy", marks=pytest.mark.slow),
    ],
)
def test_exact_numerics_give_the_bits_of_plain_decoding(platform, degree, case, sampling):
    """Tokens and log-probabilities, in bfloat16, of one row and of trees."""
    kernels, found = Kernels("xla", platform, exact=True), []
    for each in (PLAIN._replace(family=case.family), case):
        engine, params = in_bfloat16(each._replace(degree=degree), kernels)
        engine.prepare(None, SamplingParams(**SAMPLINGS[sampling]))
        rounds = run(engine, params, LONG_PROMPT, COUNT, 0, **SAMPLINGS[sampling])
        found.append((tokens_of(rounds), [p for one in rounds for p in one.logprobs]))
    assert found[0] == found[1]


def test_exact_numerics_bound_the_rows_of_a_pass():
    case = LLAMA_SPECEXEC._replace(method=dataclasses.replace(LLAMA_SPECEXEC.method, num_draft_tokens=64))
    with pytest.raises(ConfigError, match="passes of up to 64 rows, 'specexec' has 65"):
        in_bfloat16(case, Kernels("xla", "gpu", exact=True))
