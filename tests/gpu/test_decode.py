"""Small decodes through each `--kernels`: the same tokens, in float32, whatever multiplies and attends."""

import functools

import pytest
from native_models import write_native

import jaxspec
from jaxspec.errors import ConfigError
from jaxspec.models.config import ModelConfig

# Heads as wide as kernels take them.
SMALL = ModelConfig("llama", 2, 128, 192, 4, 2, 64, 64, 512)
PROMPT = [3, 9, 14, 9, 14, 9]
METHODS = {"ar": "ar", "tree": jaxspec.SpecExec(budget=15)}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu") / "model"
    write_native(folder, SMALL)
    return folder


@functools.cache
def decode(model, kernels, method, dtype="float32"):
    draft = model if method == "tree" else None
    llm = jaxspec.LLM(model, draft=draft, method=METHODS[method], dtype=dtype, kernels=kernels, compile_cache="")
    out = llm.generate(PROMPT, jaxspec.SamplingParams(max_tokens=24, ignore_eos=True))
    return tuple(out.token_ids)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kernels", ["auto", "pallas-triton", "mosaic", "jax-triton"])
def test_tokens_are_those_of_xla(gpu, model, kernels, method):
    try:
        got = decode(model, kernels, method)
    except ConfigError as error:
        pytest.skip(str(error))
    assert got == decode(model, "xla", "ar")


@pytest.mark.parametrize("kernels", ["auto", "pallas-triton", "mosaic", "jax-triton"])
def test_bfloat16_decodes(gpu, model, kernels):
    try:
        assert len(decode(model, kernels, "ar", "bfloat16")) == 24
    except ConfigError as error:
        pytest.skip(str(error))
