"""SwiftSpec with its target on a GPU and its draft elsewhere: the tokens of plain decoding."""

import pytest
from native_models import write_native, write_tokenizer

import jaxspec
from jaxspec.models.config import ModelConfig

# Heads as wide as kernels take them.
SMALL = ModelConfig("llama", 2, 128, 192, 4, 2, 64, 64, 512)
PROMPT = [3, 9, 14, 9, 14, 9]
SAMPLINGS = [
    jaxspec.SamplingParams(max_tokens=24, ignore_eos=True),
    jaxspec.SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0, seed=3),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu") / "model"
    write_native(folder, SMALL)
    write_tokenizer(folder, SMALL.vocab_size)
    return folder


def test_a_draft_on_the_cpu_beside_a_target_on_the_gpu(gpu, model):
    options = {"dtype": "float32", "kernels": "xla"}
    plain = jaxspec.LLM(model, method="ar", **options)
    for method in (jaxspec.SwiftSpec(depth=2), jaxspec.SwiftSpec(depth=2, adaptive=True)):
        pair = jaxspec.LLM(model, draft=model, method=method, draft_platform="cpu", **options)
        target, draft = pair.engine.models
        assert [plan.devices[0].platform for plan in (target.plan, draft.plan)] == [gpu.platform, "cpu"]
        for sampling in SAMPLINGS:
            got, expected = pair.generate(PROMPT, sampling), plain.generate(PROMPT, sampling)
            assert got.token_ids == expected.token_ids
            assert got.stats.speculative_decoding["num_accepted_draft_tokens"] > 0
