"""Small decodes through each `--kernels`, which come to kernels, and to what XLA's programs choose.

In float32 the tokens are the same. In bfloat16 they may differ where two tokens are nearly as good: there XLA's model
follows the text, as `jaxspec-check` has it, and its scores must allow every token.
"""

import dataclasses
import functools

import numpy as np
import pytest
from native_models import write_model

import jaxspec
from jaxspec.check.reference_decoder import ReferenceDecoder, margin, rounding
from jaxspec.llm import internals
from jaxspec.models.config import ModelConfig
from jaxspec.runtime.program import Program
from pallas_kernels import selection

# Heads as wide as kernels take them.
SMALL = ModelConfig("llama", 2, 128, 192, 4, 2, 64, 64, 512)
PROMPT = [3, 9, 14, 9, 14, 9]
METHODS = {"ar": "ar", "tree": jaxspec.SpecExec(num_draft_tokens=15)}
SAMPLING = jaxspec.SamplingParams(max_tokens=24, ignore_eos=True)
# What a program calls by each implementation.
CALLS = {"triton": "xla.gpu.triton", "mosaic": "mosaic_gpu", "jax_triton": "triton_kernel_call"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu") / "model"
    write_model(folder, SMALL)
    return folder


def skip_where_impossible(name, device):
    """Only where kernels are none for this GPU or not installed: one that fails its check must fail here."""
    capability = selection.choose("auto", "gpu", device=device).capability
    if obstacle := selection.find_obstacle(selection.OWN.get(name, "triton"), capability):
        pytest.skip(f"{name}: {obstacle}")


@functools.cache
def load(model, kernels, method, dtype):
    """A model, its greedy tokens, and the text of the programs that they come from."""
    texts = []
    finish = Program.finish

    def record(program, lowered, variant=None):
        texts.append(lowered.as_text())
        finish(program, lowered, variant)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Program, "finish", record)
        draft = model if method == "tree" else None
        llm = jaxspec.LLM(model, draft=draft, method=METHODS[method], dtype=dtype, kernels=kernels)
        tokens = tuple(llm.generate(PROMPT, SAMPLING).token_ids)
    assert len(tokens) == SAMPLING.max_tokens
    return llm, tokens, "\n".join(texts)


def assert_comes_to_kernels(llm, text):
    """The first implementation of each operation that the set has one for; all of them take this model."""
    assert internals(llm).kernels.candidates("tree_attention")
    for operation, _ in internals(llm).kernels.implementations:
        assert CALLS[internals(llm).kernels.candidates(operation)[0]] in text


def score(llm, tokens):
    """Rows of scores after the prompt and each token of a given text."""
    return list(ReferenceDecoder(internals(llm).target, internals(llm).params.target).rows(PROMPT, tokens, SAMPLING))


def test_xla_comes_to_no_kernels(gpu, model):
    _, _, text = load(model, "xla", "ar", "bfloat16")
    assert not any(call in text for call in CALLS.values())


# Mosaic's attention is for bfloat16 alone, and `auto` leaves float32 to XLA.
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kernels", ["auto", "pallas-triton", "jax-triton"])
def test_float32_tokens_are_those_of_xla(gpu, model, kernels, method):
    skip_where_impossible(kernels, gpu)
    _, got, text = load(model, kernels, method, "float32")
    assert (CALLS["triton"] in text) == (kernels != "auto")
    assert got == load(model, "xla", "ar", "float32")[1]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kernels", ["auto", "pallas-triton", "mosaic", "jax-triton"])
def test_bfloat16_tokens_are_good_by_the_scores_of_xla(gpu, model, kernels, method):
    skip_where_impossible(kernels, gpu)
    llm, tokens, text = load(model, kernels, method, "bfloat16")
    assert_comes_to_kernels(llm, text)
    rows = score(load(model, "xla", "ar", "bfloat16")[0], tokens)
    for row, token in zip(rows, tokens, strict=False):
        assert margin(row, token, SAMPLING) <= rounding(row, SAMPLING, "bfloat16")


@pytest.mark.parametrize("kernels", ["auto", "pallas-triton", "mosaic", "jax-triton"])
def test_bfloat16_logits_are_those_of_xla(gpu, model, kernels):
    """As near to XLA's in bfloat16 as those are to float32's, whose difference is the rounding."""
    skip_where_impossible(kernels, gpu)
    _, tokens, _ = load(model, "xla", "ar", "float32")
    got, rounded, exact = (
        np.stack([row.logits for row in score(load(model, name, "ar", dtype)[0], tokens)])
        for name, dtype in ((kernels, "bfloat16"), ("xla", "bfloat16"), ("xla", "float32"))
    )
    assert np.isfinite(got).all()
    assert np.linalg.norm(got - rounded) <= np.linalg.norm(rounded - exact)
    assert np.linalg.norm(got - exact) <= 1.5 * np.linalg.norm(rounded - exact)


def test_a_draft_on_the_cpu_beside_a_target_on_the_gpu(gpu, model):
    """The tokens of plain decoding, from SwiftSpec on two kinds of device."""
    options = {"dtype": "float32", "kernels": "xla"}
    plain = jaxspec.LLM(model, method="ar", **options)
    for method in (jaxspec.SwiftSpec(depth=2), jaxspec.SwiftSpec(depth=2, adaptive=True)):
        pair = jaxspec.LLM(model, draft=model, method=method, draft_platform="cpu", **options)
        target, draft = pair.engine.models
        assert [plan.devices[0].platform for plan in (target.plan, draft.plan)] == [gpu.platform, "cpu"]
        for sampling in (SAMPLING, dataclasses.replace(SAMPLING, temperature=1.0, seed=3)):
            got, expected = pair.generate(PROMPT, sampling), plain.generate(PROMPT, sampling)
            assert got.token_ids == expected.token_ids
            assert got.stats.speculative_decoding.num_accepted_draft_tokens > 0
