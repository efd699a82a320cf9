"""The ring: order, overlap, bytes, faults, and that nothing stays open."""

from concurrent.futures import Future, wait

import numpy as np
import pytest
from offload_cases import LAYERS, PROMPT, checkpoint, decode, make_pair, stream_of

from jaxspec.checkpoint.load import open_weights
from jaxspec.errors import CheckpointError
from jaxspec.methods.autoregressive import Autoregressive
from jaxspec.offload.layout import layer_layouts
from jaxspec.offload.stores import WeightStore
from jaxspec.offload.stream import LayerStream


class Clock:
    """Virtual seconds: reads take turns on one disk, programs on one device."""

    def __init__(self, read_s, compute_s):
        self.now = self.disk = self.device = 0.0
        self.read_s, self.compute_s = read_s, compute_s

    def compute(self, filled):
        """Dispatch a program; returns what is there when it has run."""
        self.device = max(self.device, self.now) + self.compute_s
        return Result(self, self.device)


class Result:
    def __init__(self, clock, at):
        self.clock, self.at = clock, at

    def block_until_ready(self):
        self.clock.now = max(self.clock.now, self.at)


class Pool:
    """Runs what is submitted at once, and lets it end when the disk of a clock would have read it."""

    def __init__(self, clock):
        self.clock = clock

    def submit(self, function, *args):
        future = Timed(self.clock)
        self.clock.disk = max(self.clock.disk, self.clock.now) + self.clock.read_s
        future.at = self.clock.disk
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)
        return future

    @staticmethod
    def wait(futures):
        for future in futures:
            future.clock.now = max(future.clock.now, future.at)

    def shutdown(self):
        pass


class Timed(Future):
    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def done(self):
        return self.clock.now >= self.at


class Counting(WeightStore):
    """Layers of the number one, which counts what it gave; `fail` names fills that fail."""

    def __init__(self, layouts):
        self.layouts, self.filled, self.fail = layouts, [], set()

    @property
    def counters(self):
        return len(self.filled), len(self.filled), 0.0

    def fill(self, layer, leaf, buffers):
        self.filled.append((layer, leaf))
        if len(self.filled) in self.fail:
            raise CheckpointError("broken")
        for buffer in buffers:
            buffer[...] = layer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("stream")


@pytest.fixture(scope="module")
def placement(folder):
    return make_pair(checkpoint(folder, "float32"), Autoregressive(), offload="host").engine.target


def ring(placement, clock, resident=(), buffers=3):
    layouts = {i: layout.weights for i, layout in enumerate(layer_layouts(placement)) if i not in resident}
    kept = {i: {} for i in resident}
    return LayerStream(
        Counting(layouts), [{}] * LAYERS, kept, buffers=buffers, pool=Pool(clock), clock=lambda: clock.now
    )


def one_pass(stream, clock):
    with stream.weights() as weights:
        for layer in range(LAYERS):
            params = weights.take(layer)
            for leaf in params.values():
                assert (np.asarray(leaf)[..., :1] == layer).all(), "a buffer holds another layer"
            weights.used(layer, clock.compute(params))


@pytest.mark.parametrize(
    ("read_s", "compute_s", "resident"), [(1.0, 1.0, ()), (1.0, 0.1, (1, 3)), (0.1, 4.0, ()), (1.0, 4.0, (1, 3))]
)
def test_reading_and_computing_overlap(placement, read_s, compute_s, resident):
    """After the first pass, one takes 1.1 times what the slower of both takes: the ring goes on to the next pass."""
    clock = Clock(read_s, compute_s)
    stream = ring(placement, clock, resident)
    one_pass(stream, clock)
    start, count = clock.now, 8
    for _ in range(count):
        one_pass(stream, clock)
    leaves = sum(len(layout.leaves) for layout in stream.store.layouts.values())
    # A program that runs alone while nothing else can: the last of one pass, before the host begins the next.
    least = max(leaves * read_s, LAYERS * compute_s)
    assert (clock.now - start) / count <= 1.10 * least


@pytest.mark.parametrize("at", [1, 9, 33])
def test_a_failed_fill_ends_the_pass_and_the_next_one_works(placement, at):
    clock = Clock(1.0, 1.0)
    stream = ring(placement, clock)
    stream.store.fail = {at}
    with pytest.raises(CheckpointError, match="broken"):
        for _ in range(3):
            one_pass(stream, clock)
    assert len(stream._free) == stream.num_buffers
    one_pass(stream, clock)


def test_a_pool_that_takes_no_more_work_keeps_no_buffer(placement):
    clock = Clock(1.0, 1.0)
    stream = ring(placement, clock)
    submit, calls = stream._pool.submit, []

    def refuse(*args):
        calls.append(args)
        if len(calls) % 5 == 0:
            raise RuntimeError("no")
        return submit(*args)

    stream._pool.submit = refuse
    for _ in range(4):
        with pytest.raises(RuntimeError, match="no"):
            one_pass(stream, clock)
        assert len(stream._free) == stream.num_buffers
    stream._pool.submit = submit
    one_pass(stream, clock)


@pytest.mark.thorough
def test_bytes_of_a_pass(folder):
    """Each pass reads the bytes of the streamed tensors, no more and no fewer; a prompt takes one pass."""
    for kind in ("float32", "q4_0", "native"):
        pair = make_pair(checkpoint(folder, kind), Autoregressive(), offload="disk", resident=1)
        stream = stream_of(pair)
        before = stream.counts
        decode(pair, prompt=PROMPT * 4, count=8)
        counts = stream.counts.since(before)
        assert counts.passes == 9  # the prompt, and each token
        weights = open_weights(checkpoint(folder, kind))
        sizes = [
            sum(weights.file_bytes(leaf.name, leaf.info) for leaf in stream.store.layouts[layer].leaves)
            for layer in sorted(stream.store.layouts)
        ]
        wait([future for _, _, futures in stream._coming for future in futures])
        read = stream.counts.since(before).bytes
        assert read == 9 * sum(sizes) + sum(sizes[: stream.num_buffers])
        stream.close()
