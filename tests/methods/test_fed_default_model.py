"""The default model with a random EAGLE-3 head, from its folder to the text."""

import numpy as np
import pytest

import jaxspec
from jaxspec import Chain, SamplingParams
from jaxspec.checkpoint.eagle import write_eagle3
from jaxspec.checkpoint.load import open_weights
from jaxspec.errors import ConfigError
from jaxspec.llm import internals
from jaxspec.models.config import ModelConfig
from jaxspec.models.features import FeatureConfig
from jaxspec.models.params import declare_leaves

pytestmark = [pytest.mark.slow, pytest.mark.real_model]

TEXT = "The lighthouse stood on the cliff. The lighthouse keeper walked down the cliff. The lighthouse"
SAMPLINGS = [SamplingParams(max_tokens=16), SamplingParams(max_tokens=16, temperature=0.8, top_p=0.9, seed=11)]


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """A folder in SafeAILab's layout."""
    path, target = tmp_path_factory.mktemp("head"), open_weights(None).config
    cfg = ModelConfig(
        "llama", 1, target.embed_dim, 64, 4, 2, 32, target.vocab_size, 2048, shares_embedding=True,
        head_ids=tuple(range(0, 2000, 3)), features=FeatureConfig(target.embed_dim),
    )  # fmt: skip
    rng = np.random.default_rng(0)
    noise = {n: rng.normal(size=i.shape) / np.sqrt(i.shape[-1]) for n, i in declare_leaves(cfg, "float16").items()}
    leaves = {n: np.ones_like(x) if n.endswith("norm") else x for n, x in noise.items()}
    write_eagle3(path, cfg, {name: leaf.astype(np.float16) for name, leaf in leaves.items()})
    return str(path)


def test_the_text_is_that_of_plain_decoding(llm, head):
    fed = jaxspec.LLM(draft=head, method=Chain(3))
    assert internals(fed).models.draft.cfg.features.layers == (2, 15, 27)
    for method in (Chain(3), "auto", "swiftspec", "ar"):
        other = fed if method == internals(fed).engine.method else fed.with_method(method)
        for sampling in SAMPLINGS:
            assert other.generate(TEXT, sampling).token_ids == llm.generate(TEXT, sampling).token_ids, method


def test_a_streamed_model_feeds_the_draft(llm, head):
    streamed = jaxspec.LLM(draft=head, method=Chain(3), offload="disk", resident_layers=20)
    assert streamed.generate(TEXT, SAMPLINGS[0]).token_ids == llm.generate(TEXT, SAMPLINGS[0]).token_ids


def test_what_cannot_be_done_is_refused(head):
    with pytest.raises(ConfigError, match="fed a target's hidden states; give it as the draft"):
        jaxspec.LLM(head)
