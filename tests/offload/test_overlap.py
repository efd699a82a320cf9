"""The draft grows while the target's layers stream: a round takes the longer of both, in virtual seconds."""

import jax
import pytest
from offload_cases import LAYERS, PROMPT, checkpoint, make_pair, stream_of
from test_stream import Clock, Pool

from jaxspec.config import SamplingParams
from jaxspec.methods.core.round import ModelParams
from jaxspec.methods.swiftspec.settings import SwiftSpec
from jaxspec.offload.stream import LayerStream
from jaxspec.runtime.program import Program

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("overlap")


class Virtual:
    """A pair whose reads take turns on a virtual disk, and whose draft programs take turns on a virtual device."""

    def __init__(self, path, draft, method, monkeypatch, *, read_s, grow_s, shared=False):
        self.pair = make_pair(path, method, draft=draft, offload="host", shared=shared)
        own = stream_of(self.pair)
        self.clock = Clock(read_s, 0.0)
        stream = LayerStream(
            own.store, own._small, own._resident, pool=Pool(self.clock), clock=lambda: self.clock.now
        )  # fmt: skip
        params = ModelParams(self.pair.params.target | {"layers": stream}, self.pair.params.draft)
        self.pair = self.pair._replace(params=params)
        self.leaves = sum(len(layout.leaves) for layout in stream.store.layouts.values())
        self.grown = 0
        drafter, run = self.pair.engine.runner.drafter, Program.run
        grows = {id(getattr(drafter, name)): name for name in ("expand", "expand_once", "advance_and_expand")}

        def timed(program, label, *args):
            clock = self.clock
            if id(program) in grows:
                # It begins when the device is free, and this thread goes on.
                clock.device = max(clock.device, clock.now) + grow_s
                self.grown += 1
            if program in (drafter.advance, drafter.advance_and_expand):
                clock.now = max(clock.now, clock.device)  # the target waits for its batch, that for the tree
            return run(program, label, *args)

        monkeypatch.setattr(Program, "run", timed)

    def round_s(self, rounds=6):
        """Virtual seconds of a round, the mean of several."""
        options = SamplingParams(max_tokens=60, ignore_eos=True)
        with self.pair.engine.open(self.pair.params, PROMPT, options, 1) as session:
            session.step()
            session.step()
            start = self.clock.now
            for _ in range(rounds):
                session.step()
            return (self.clock.now - start) / rounds


@pytest.mark.parametrize(
    ("longer", "shared"), [("pass", False), ("draft", False), pytest.param("draft", True, marks=pytest.mark.slow)]
)
def test_a_round_takes_the_longer_of_draft_and_pass(folder, monkeypatch, longer, shared):
    """Also on shared devices, which have time while the target waits for its layers."""
    times = {"read_s": 1.0, "grow_s": 9.0 if longer == "pass" else 40.0, "shared": shared}
    paths = checkpoint(folder, "q4_0"), checkpoint(folder, "draft")
    method = SwiftSpec(7, depth=2, refill=0)
    with monkeypatch.context() as patch:
        virtual = Virtual(*paths, method, patch, **times)
        overlapped, pass_s = virtual.round_s(), virtual.leaves * times["read_s"]
    assert virtual.grown > 6
    assert overlapped <= 1.10 * max(pass_s, times["grow_s"])
    with monkeypatch.context() as patch:
        in_turn = Virtual(*paths, SwiftSpec(7, depth=2, refill=0, overlap=False), patch, **times).round_s()
    # Reading goes on while the draft runs in turn, until the ring's buffers are full: the other layers come after it.
    beyond_ring = pass_s * (LAYERS - 3) / LAYERS
    assert in_turn >= max(0.95 * (times["grow_s"] + beyond_ring), overlapped)
    if longer == "draft":
        assert in_turn > 1.15 * overlapped


def test_adaptive_growth_comes_by_between_layers(folder, monkeypatch):
    """Passes of the draft are dispatched while the target waits for its layers, not after them."""
    method = SwiftSpec(7, depth=2, refill=0, adaptive=True)
    pair = make_pair(checkpoint(folder, "q4_0"), method, draft=checkpoint(folder, "draft"), offload="host")
    order, run = [], Program.run

    def noted(program, label, *args):
        order.append(label)
        result = run(program, label, *args)
        if label == "expand once":
            jax.block_until_ready(result)
        return result

    monkeypatch.setattr(Program, "run", noted)
    options = SamplingParams(max_tokens=40, ignore_eos=True)
    with pair.engine.open(pair.params, PROMPT, options, 1) as session:
        for _ in range(5):
            session.step()
    for start in [place for place, label in enumerate(order) if label == "verify open"]:
        stop = order.index("verify close", start)
        layers = [place for place in range(start, stop) if order[place].startswith("layer")]
        grown = [place for place in range(start, stop) if order[place] == "expand once"]
        assert len(layers) == LAYERS and len(grown) == min(LAYERS, pair.engine.runner.room)
        assert grown[0] < layers[0], "growth begins before the first layer is waited for"
