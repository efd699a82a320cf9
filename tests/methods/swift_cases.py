"""Deeper tiny models, which have layers to skip, and engines of `Swift` for them, compiled once per process."""

import dataclasses
import functools

import numpy as np
from method_cases import FLOAT32, EditedSource, run, sharpen, tokens_of
from tiny_models import FAMILIES, quick_compilation

from jaxspec.checkpoint.load import load_foreign
from jaxspec.engine import Engine
from jaxspec.methods.autoregressive import Autoregressive
from jaxspec.methods.base import ModelParams, Models
from jaxspec.methods.core.timing import Clock, RoundTimer
from jaxspec.methods.swift.search import LayerSearch, SearchSettings
from jaxspec.methods.swift.settings import Session, Swift
from jaxspec.runtime.mesh import plan_mesh
from jaxspec.runtime.placement import Placement

LAYERS = 6


class StepClock(Clock):
    """A second passes between two looks, and an array is ready the `late`-th time that somebody asks.

    So nothing depends on how busy the machine is. Asking waits.
    """

    def __init__(self, late=1):
        self.seconds, self.late = 0.0, late
        self._asked = {}

    def now(self):
        self.seconds += 1.0
        return self.seconds

    def is_ready(self, array):
        array.block_until_ready()
        # The array is kept, so that no other one gets its id.
        times, _ = self._asked.get(id(array), (0, None))
        self._asked[id(array)] = (times + 1, array)
        return times + 1 >= self.late


def on_step_clock(method, late=1):
    """The same method, of nobody else, timed by a `StepClock`."""
    own = dataclasses.replace(method)
    vars(own)["session"] = Session(RoundTimer(StepClock(late)))
    return own


# A search step in nearly every round, on windows of a few tokens; drafts in every round.
EAGER = Swift(window=6, interval=4, share=1.0, adaptive=False, length=5, threshold=0.1, max_score=1.0)
EACH = dataclasses.replace(EAGER, programs="each", candidates=3)


def config_of(family):
    cfg = FAMILIES[family]
    sliding = tuple(bool(layer % 2) for layer in range(LAYERS)) if cfg.sliding_layers else ()
    return dataclasses.replace(cfg, num_layers=LAYERS, sliding_layers=sliding)


def models_of(family, degree=1):
    return Models(Placement(config_of(family), plan_mesh(degree), FLOAT32))


def damp(tensors, gain, layers=range(1, LAYERS - 1)):
    """Let blocks of some layers add little, so that skipping them changes few tokens."""
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")) and int(name.split(".")[2]) in layers:
            tensors[name] = tensors[name] * np.float32(gain)


@functools.cache
def params_of(family, degree=1, gain=0.3):
    def edit(tensors):
        sharpen(tensors)
        damp(tensors, gain)

    source = EditedSource(config_of(family), 0, edit)
    return ModelParams(load_foreign(source, plan_mesh(degree), FLOAT32))


@functools.cache
def engine_of(family, degree=1, method=EAGER):
    # Of this engine alone: what it finds says nothing to others. Results come as late as the engine reads rounds.
    engine = Engine(models_of(family, degree), on_step_clock(method, late=2), 190)
    with quick_compilation():
        engine.prepare()
    return engine


@functools.cache
def plain_engine(family):
    engine = Engine(models_of(family), Autoregressive(), 190)
    with quick_compilation():
        engine.prepare()
    return engine


def plain_tokens(family, prompt, count, seed=0, gain=0.3, **sampling):
    return tokens_of(run(plain_engine(family), params_of(family, gain=gain), prompt, count, seed, **sampling))


def restart_search(engine, ratio=0.45, **settings):
    """Begin a new search, of another ratio, in an engine with one program for all sets; returns it."""
    runner = engine._runner
    settings = {"window": runner._search.settings.window, "interval": 4, "max_score": 1.0} | settings
    search = LayerSearch(LAYERS, SearchSettings(ratio=ratio, **settings))
    runner._search = search
    runner._window = runner._pending = None
    return search
