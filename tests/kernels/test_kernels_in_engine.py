"""A tiny model decoded through the GPU kernels, in Pallas' interpreter, gives the tokens of plain decoding by XLA."""

import dataclasses

import jax
import numpy as np
import pytest
from tiny_models import FAMILIES, RandomSource

from jaxspec.checkpoint.load import load_foreign
from jaxspec.config import SamplingParams
from jaxspec.engine import Engine
from jaxspec.methods.autoregressive import Autoregressive
from jaxspec.methods.core.round import ModelParams, Models
from jaxspec.methods.specexec import SpecExec
from jaxspec.runtime.mesh import MeshPlan
from jaxspec.runtime.placement import Placement
from pallas_kernels.registry import Kernels
from pallas_kernels.tree_attention import triton as triton_attention

XLA = Kernels("xla", "cpu")
# On a GPU the number of active rows is data. On a CPU each of a few row counts is a separate branch.
TRITON = Kernels(
    "pallas-triton", "gpu", implementations=(("tree_attention", "triton"),), capability=(8, 0), interpret=True
)  # fmt: skip
SUMS = Kernels("pallas-triton", "gpu", implementations=(("add_norm", "triton"),), capability=(8, 0), interpret=True)
PROMPT = [int(token) for token in np.random.default_rng(5).integers(0, 101, 40)]
TOKENS = 12
# Sliding windows, and a second layer whose inputs went through the kernels.
TINY = dataclasses.replace(FAMILIES["mistral"], max_context=64)


def decode(kernels, method, devices=1):
    """Greedy tokens; a draft is the target itself."""
    target = Placement(TINY, MeshPlan(tuple(jax.devices()[:devices]), kernels), np.dtype("float32"))
    params = load_foreign(RandomSource(TINY), target.plan, target.dtype)
    drafts = method.drafts
    engine = Engine(Models(target, target if drafts else None), method)
    options = SamplingParams(max_tokens=TOKENS)
    engine.prepare(len(PROMPT) + TOKENS)
    given = ModelParams(params, params) if drafts else ModelParams(params)
    with engine.open(given, PROMPT, options, seed=0) as session:
        while not session.done:
            session.step()
    return session.tokens[len(PROMPT) :]


@pytest.fixture
def calls(monkeypatch):
    """The calls of the kernel in a program: rows, and the kind of window."""
    found, attend = set(), triton_attention._attend

    def record_attention(call, operands, interpret):
        found.add((call.T, "grown" if call.grown else "chunk" if call.causal else "tree"))
        return attend(call, operands, interpret)

    monkeypatch.setattr(triton_attention, "_attend", record_attention)
    return found


@pytest.mark.slow
def test_triton(calls):
    """The tree of the draft grows in its window, the target verifies it at once; both through the kernel."""
    assert decode(TRITON, SpecExec(6, width=2, depth=3)) == decode(XLA, Autoregressive())
    # The root and six nodes; two nodes of the draft at a time, after the window's older ones.
    assert (7, "tree") in calls and (2, "grown") in calls


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_sums_and_norms(devices):
    """Layers hand each other the parts of sums, which devices add up among each other."""
    assert decode(SUMS, SpecExec(6, width=2, depth=3), devices) == decode(XLA, Autoregressive())
