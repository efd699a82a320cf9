"""Deeper tiny models, which have layers to skip, and engines of `Swift` for them, compiled once per process."""

import dataclasses
import functools
from typing import ClassVar

import numpy as np
from tiny_models import ALL_FAMILIES as FAMILIES
from tiny_models import RandomSource

from jaxspec.checkpoint.load import load_foreign
from jaxspec.config import SamplingParams
from jaxspec.engine import Engine
from jaxspec.methods.autoregressive import Autoregressive
from jaxspec.methods.base import NO_STORE
from jaxspec.methods.core.round import ModelParams, Models
from jaxspec.methods.swift.runner import SwiftRunner
from jaxspec.methods.swift.search import LayerSearch, SearchSettings
from jaxspec.methods.swift.settings import Swift
from jaxspec.runtime.mesh import plan_mesh
from jaxspec.runtime.placement import Placement

OUTPUTS = ("o_proj.weight", "down_proj.weight", "w2.weight")
LAYERS, CONTEXT, FLOAT32 = 6, 190, np.dtype("float32")
_rng = np.random.default_rng(5)
VOCAB = FAMILIES["llama"].vocab_size
# Id 0 is frequent, so that a pad taken for a token shows. The second prompt takes two chunks of prefill.
PROMPT = [0, 0, *np.where(_rng.random(30) < 0.4, 0, _rng.integers(0, VOCAB, 30)).tolist(), 0]
LONG_PROMPT = [*_rng.integers(0, 4, 70).tolist(), 0, 3]
CUTS = {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01}
PENALTIES = {
    "temperature": 1.0,
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.4,
    "logit_bias": {0: 6.0, 7: -np.inf},
}


# A search step in nearly every round, on windows of a few tokens; drafts in every round.
@dataclasses.dataclass(frozen=True)
class SmallSwift(Swift):
    """`Swift` with small windows; `each`: a program for each set, as on accelerators."""

    each: bool = False

    search_settings: ClassVar[SearchSettings] = SearchSettings(window=6, interval=4, max_score=1.0)

    def _branches(self, target):
        return not self.each


EAGER = SmallSwift(share=1.0, adaptive=False, length=5, threshold=0.1)
EACH = dataclasses.replace(EAGER, each=True)


class StepClock:
    """A second passes between two looks, so nothing depends on how busy the machine is."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        self.seconds += 1.0
        return self.seconds


def config_of(family):
    cfg = FAMILIES[family]
    sliding = tuple(bool(layer % 2) for layer in range(LAYERS)) if cfg.sliding_layers else ()
    experts = cfg.experts
    if experts is not None and experts.layers:
        experts = dataclasses.replace(experts, layers=tuple(bool(layer % 2) for layer in range(LAYERS)))
    nope = tuple(layer % 3 == 1 for layer in range(LAYERS)) if cfg.nope_layers else ()
    return dataclasses.replace(cfg, num_layers=LAYERS, sliding_layers=sliding, nope_layers=nope, experts=experts)


def models_of(family, degree=1):
    return Models(Placement(config_of(family), plan_mesh(degree), FLOAT32))


@functools.cache
def params_of(family, degree=1, gain=0.3, layers=(1, 2, 3, 4)):
    """Sharp random models; blocks of some layers add little, so that skipping them changes few tokens."""
    cfg = config_of(family)
    source = RandomSource(cfg)
    tensors = source._tensors
    tensors["model.norm.weight"] *= 3
    for name in tensors:
        # Where a norm follows, its scale says how much a block adds.
        ends = ("attention_layernorm.weight", "post_feedforward_layernorm.weight") if cfg.norms != "pre" else OUTPUTS
        if name.endswith(ends) and int(name.split(".")[2]) in layers:
            tensors[name] = tensors[name] * np.float32(gain)
    return ModelParams(load_foreign(source, plan_mesh(degree), FLOAT32))


def engine_with(method, family="llama", degree=1, store=NO_STORE, context=CONTEXT):
    """An engine whose timer has a clock of its own."""
    engine = Engine(models_of(family, degree), method, context, store)
    engine.prepare()
    runner_of(engine).timer.now = StepClock()
    return engine


engine_of = functools.cache(engine_with)


def runner_of(engine) -> SwiftRunner:
    assert isinstance(engine.runner, SwiftRunner)
    return engine.runner


@functools.cache
def plain_engine(family):
    engine = Engine(models_of(family), Autoregressive(), CONTEXT)
    engine.prepare()
    return engine


def rounds_of(engine, params, prompt, count, seed=0, **sampling):
    """Rounds of a generation, one by one."""
    with engine.open(params, prompt, SamplingParams(max_tokens=count, **sampling), seed) as session:
        while not session.done:
            yield session.step()


def run(engine, params, prompt, count, seed=0, **sampling):
    return [*rounds_of(engine, params, prompt, count, seed, **sampling)]


def tokens_of(rounds):
    return [token for output in rounds for token in output.tokens]


def plain_tokens(family, prompt, count, seed=0, gain=0.3, **sampling):
    return tokens_of(run(plain_engine(family), params_of(family, gain=gain), prompt, count, seed, **sampling))


def restart_search(engine, ratio=0.45, **settings):
    """Begin a new search, of another ratio, in an engine with one program for all sets; returns it."""
    runner = runner_of(engine)
    settings = {"window": runner.search.settings.window, "interval": 4, "max_score": 1.0} | settings
    runner.search = LayerSearch(LAYERS, SearchSettings(ratio=ratio, **settings))
    return runner.search
