"""A model that suits SWIFT: the default one with layers that add nearly nothing, which the search has to find."""

import copy
import dataclasses

import pytest

from jaxspec import LLM, SamplingParams, Swift
from jaxspec.bench.prompts import load_prompts, select_prompts
from jaxspec.engine import Engine
from jaxspec.methods.autoregressive import Autoregressive
from jaxspec.methods.core.round import ModelParams, Models
from jaxspec.methods.swift.search import SearchSettings
from jaxspec.models.layer_set import uniform_layers
from jaxspec.tune.swift import LayerScorer, all_windows, search_layers, write_passages

pytestmark = [pytest.mark.slow, pytest.mark.real_model]

REAL, INSERTED = 4, 12
# Inserted layers add this much of what the layers add that they are copies of.
TINY = 1e-3
WINDOW = 16
ANSWER = SamplingParams(max_tokens=60, ignore_eos=True)


def deepen(llm, real, inserted):
    """The first and last layers of a float32 model, `real` of them, with near-identity layers in between."""
    target, own = llm.engine.target, llm.params["layers"]

    def damp(layer):
        return layer | {name: layer[name] * TINY for name in ("out", "down")}

    middle = [damp(own[index % len(own)]) for index in range(inserted)]
    layers = [*own[: real // 2], *middle, *own[len(own) - (real - real // 2) :]]
    made = copy.copy(llm)
    made.model_params = ModelParams(llm.params | {"layers": layers})
    placement = dataclasses.replace(target, cfg=dataclasses.replace(target.cfg, num_layers=len(layers)))
    made.engine = Engine(Models(placement), Autoregressive())
    made.engine.prepare()
    return made


@pytest.fixture(scope="module")
def deep():
    return deepen(LLM(method="ar", draft="none", dtype="float32"), REAL, INSERTED)


@pytest.fixture(scope="module")
def passages(deep):
    return [*write_passages(deep, select_prompts(load_prompts(), None, 3), ANSWER)]


@pytest.fixture(scope="module")
def found(deep, passages):
    """A search over half of the blocks."""
    longest = max(len(passage.tokens) for passage in passages)
    scorer = LayerScorer(deep.engine.target, deep.params, longest, WINDOW)
    settings = SearchSettings(ratio=0.5, window=WINDOW, steps=80, tolerance=80, interval=8)
    layers = search_layers(scorer, passages[1:], settings).layers
    windows = all_windows(passages[:1], WINDOW)
    return layers, [scorer.matchness(windows, each) for each in (layers, uniform_layers(scorer.num_layers))]


def test_the_search_finds_the_inserted_layers(found):
    layers, (matchness, uniform) = found
    inserted = range(REAL // 2, REAL // 2 + INSERTED)
    left_out = [layer for kind in (layers.attention, layers.mlp) for layer, runs in enumerate(kind) if not runs]
    assert len(left_out) == int(2 * (REAL + INSERTED - 2) * 0.5)
    assert set(left_out) <= set(inserted)
    assert matchness > 0.8 > 0.3 > uniform


@pytest.mark.parametrize("sampling", [ANSWER, dataclasses.replace(ANSWER, temperature=0.7, seed=3)], ids=["t0", "t0.7"])
def test_what_it_found_drafts_several_tokens_a_pass(deep, passages, found, sampling):
    layers, _ = found
    tokens = list(passages[0].tokens[: passages[0].prompt])
    plain = deep.with_method(Autoregressive()).generate(tokens, sampling)
    out = deep.with_method(Swift(layers=str(layers), adaptive=False, threshold=0.1)).generate(tokens, sampling)
    assert out.token_ids == plain.token_ids
    assert out.stats.speculative_decoding["mean_acceptance_length"] > 2
