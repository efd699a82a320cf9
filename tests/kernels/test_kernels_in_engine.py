"""A tiny model decoded through the GPU kernels, in Pallas' interpreter, gives the tokens of plain decoding by XLA."""

import dataclasses

import jax
import numpy as np
from tiny_models import FAMILIES, RandomSource, quick_compilation

from jaxspec.checkpoint.load import load_foreign
from jaxspec.config import SamplingParams
from jaxspec.engine import Engine
from jaxspec.mesh.plan import MeshPlan
from jaxspec.methods.autoregressive import Autoregressive
from jaxspec.methods.base import ModelParams, Models
from jaxspec.methods.specexec import SpecExec
from jaxspec.placement import Placement
from pallas_kernels.registry import Kernels

XLA = Kernels("xla", "cpu")
TRITON = Kernels(
    "pallas-triton", "cpu", implementations=(("tree_attention", "triton"), ("swiglu", "triton")), capability=(8, 0),
    interpret=True,
)  # fmt: skip
PROMPT = [int(token) for token in np.random.default_rng(5).integers(0, 101, 40)]
TOKENS = 12
# Sliding windows, and a second layer whose inputs went through the kernels.
TINY = dataclasses.replace(FAMILIES["mistral"], max_context=64)


def decode(kernels, method):
    """Greedy tokens; a draft is the target itself."""
    target = Placement(TINY, MeshPlan((jax.devices()[0],), kernels), np.dtype("float32"))
    params = load_foreign(RandomSource(TINY), target.plan, target.dtype)
    drafts = method.drafts
    engine = Engine(Models(target, target if drafts else None), method)
    options = SamplingParams(max_tokens=TOKENS)
    with quick_compilation():
        engine.prepare(len(PROMPT) + TOKENS)
        given = ModelParams(params, params) if drafts else ModelParams(params)
        return [token for emitted in engine.rounds(given, PROMPT, options, seed=0) for token in emitted.tokens]


def test_triton():
    """The tree of the draft grows in its window, the target verifies it at once."""
    assert decode(TRITON, SpecExec(6, width=2, depth=3)) == decode(XLA, Autoregressive())
