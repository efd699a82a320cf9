"""Layer sets found offline: what scoring counts, and what the search finds."""

import dataclasses

import numpy as np
import pytest
from tiny_models import FAMILIES, RandomSource

from jaxspec.checkpoint.load import load_foreign
from jaxspec.config import SamplingParams
from jaxspec.engine import Engine
from jaxspec.methods.autoregressive import Autoregressive
from jaxspec.methods.core.round import ModelParams, Models
from jaxspec.methods.swift.search import SearchSettings
from jaxspec.models.layer_set import all_layers, parse_layers, uniform_layers
from jaxspec.runtime.mesh import plan_mesh
from jaxspec.runtime.placement import Placement
from jaxspec.tune.swift import LayerScorer, Passage, all_windows, predict_gain, search_layers

LAYERS, WINDOW, FLOAT32 = 6, 16, np.dtype("float32")


@pytest.fixture(scope="module")
def damped():
    """A model whose layers 2 and 4 add nearly nothing, and texts of its own."""
    cfg = dataclasses.replace(FAMILIES["llama"], num_layers=LAYERS)

    def edit(tensors):
        tensors["model.norm.weight"] *= 3
        for name in tensors:
            if name.endswith(("o_proj.weight", "down_proj.weight")) and int(name.split(".")[2]) in (2, 4):
                tensors[name] = tensors[name] * np.float32(0.01)

    source = RandomSource(cfg)
    edit(source._tensors)
    params = load_foreign(source, plan_mesh(1), FLOAT32)
    placement = Placement(cfg, plan_mesh(1), FLOAT32)
    engine = Engine(Models(placement), Autoregressive(), 150)
    engine.prepare()
    scorer = LayerScorer(placement, params, 150, WINDOW)
    passages = []
    for prompt in ([0, 3, 5, 9] * 8, [*range(40)]):
        sampling = SamplingParams(max_tokens=70, temperature=1.0)
        with engine.open(ModelParams(params), prompt, sampling, 1) as session:
            while not session.done:
                session.step()
        passages.append(Passage(tuple(session.tokens), len(prompt)))
    return scorer, passages, placement


@pytest.mark.thorough
def test_scores_do_not_depend_on_what_was_scored_before(damped):
    scorer, passages, _ = damped
    sets = [all_layers(LAYERS), uniform_layers(LAYERS), parse_layers("attention=2,4;mlp=2,4", LAYERS)]
    first = [scorer.count(passage, passage.prompt, each) for passage in passages for each in sets]
    again = [scorer.count(passage, passage.prompt, each) for passage in passages[::-1] for each in sets[::-1]]
    assert first == again[::-1]
    windows = all_windows(passages, WINDOW)
    everything, uniform, damped_ones = (scorer.matchness(windows, each) for each in sets)
    # Sampled text: the model's own argmax is right now and then.
    assert damped_ones == pytest.approx(everything, abs=0.05) and uniform < everything


def test_the_search_finds_what_adds_nothing(damped):
    scorer, passages, _ = damped
    settings = SearchSettings(ratio=0.5, window=WINDOW, interval=4, steps=120, tolerance=120, max_score=1.0)
    told = []
    search = search_layers(scorer, passages, settings, progress=lambda steps, score: told.append((steps, score)))
    assert search.layers == parse_layers("attention=2,4;mlp=2,4", LAYERS)
    assert told[-1] == (search.steps, search.matchness) and search.steps <= 120


def test_predicted_gain(damped):
    _, _, placement = damped
    sets = [parse_layers(text, LAYERS) for text in ("none", "mlp=1-4", "attention=1-4;mlp=1-4")]
    sure = [predict_gain(placement, layers, 1.0) for layers in sets]
    assert sure == sorted(sure) and sure[0] < 1 < sure[2]
    assert predict_gain(placement, sets[2], 0.0) < 1
    assert predict_gain(placement, sets[2], 0.5) < predict_gain(placement, sets[2], 0.9) < sure[2]
