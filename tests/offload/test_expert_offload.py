"""Streamed mixtures: a pass reads the experts that its rows were sent to; the bits are those of the resident model."""

import dataclasses
import functools
from concurrent.futures import wait

import jax
import numpy as np
import pytest
from marks import fast_part, quick_part
from offload_cases import LAYERS, PROMPT, checkpoint, decode, make_pair, stream_of
from test_equal import check_equal
from test_stream_faults import at_call, read_error

from jaxspec.checkpoint.load import open_weights
from jaxspec.errors import CheckpointError
from jaxspec.methods.autoregressive import Autoregressive
from jaxspec.methods.chain import Chain
from jaxspec.methods.lookup import PromptLookup
from jaxspec.methods.specexec import SpecExec
from jaxspec.methods.swiftspec.settings import SwiftSpec
from jaxspec.offload import experts, stores
from jaxspec.offload.layout import layer_layouts
from jaxspec.offload.reader import OpenFile
from jaxspec.offload.stream import Pass

METHODS = {
    "ar": Autoregressive(),
    "chain": Chain(4),
    "lookup": PromptLookup(),
    "specexec": SpecExec(16),
    "swiftspec": SwiftSpec(7, depth=3),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("experts")


@functools.cache
def resident(folder, kind, method):
    draft = checkpoint(folder, "draft") if METHODS[method].drafts else None
    return make_pair(checkpoint(folder, kind), METHODS[method], draft=draft)


def streamed(folder, kind, method, **options):
    draft = checkpoint(folder, "draft") if METHODS[method].drafts else None
    return make_pair(checkpoint(folder, kind), METHODS[method], draft=draft, **options)


FAST = [("mixtral", "ar", "disk", 0), ("shared expert", "specexec", "disk", 1), ("mixed moe", "chain", "host", 0)]
CASES = [
    *FAST, ("qwen3 moe", "ar", "host", 1), ("gpt oss", "ar", "disk", 1), ("native moe", "ar", "disk", 0),
    ("mixed moe", "swiftspec", "host", 1), ("mixed moe", "lookup", "disk", 1), ("shared expert", "ar", "host", 0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "method", "offload", "kept"),
    quick_part(fast_part(CASES, lambda *case: case in FAST), lambda kind, *_: kind == "mixtral"),
)
def test_the_bits_of_the_resident_model(folder, kind, method, offload, kept):
    """Tokens, log-probabilities and caches, also with a layer that stays and experts that stay."""
    pair = streamed(folder, kind, method, offload=offload, resident=kept, kept=2 * kept)
    assert len(stream_of(pair).store.experts) == LAYERS - kept
    check_equal(resident(folder, kind, method), pair)
    stream_of(pair).close()


class Record:
    """The record of passes: layers with the choices of their rows; and the fills of a store."""

    def __init__(self, monkeypatch, stream):
        self.asked, self.filled = [], []
        ask, fill = Pass.experts, stream.store.fill

        def asking(weights, layer, choices):
            self.asked.append((layer, np.concatenate(choices)))
            return ask(weights, layer, choices)

        def filling(layer, leaf, buffers, expert=None):
            self.filled.append((layer, leaf, expert))
            fill(layer, leaf, buffers, expert)

        monkeypatch.setattr(Pass, "experts", asking)
        monkeypatch.setattr(stream.store, "fill", filling)

    def distinct(self):
        """Layers and experts in the order in which layers asked, each once for each time."""
        return [(layer, expert) for layer, choice in self.asked for expert in np.unique(choice[choice >= 0]).tolist()]


def file_bytes(pair, path, layer, expert):
    """Bytes of the files that hold an expert, or what every pass reads of a layer."""
    store, weights = stream_of(pair).store, open_weights(path)
    leaves = store.layouts[layer].leaves if expert is None else store.experts[layer].layout.leaves
    return sum(weights.file_bytes(leaf.name, leaf.info, expert) for leaf in leaves)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "method"),
    fast_part(
        [("mixtral", "specexec"), ("native moe", "ar"), ("gpt oss", "ar"), ("mixed moe", "specexec")],
        lambda kind, method: kind in ("mixtral", "native moe"),
    ),
)
def test_bytes_are_those_of_the_experts_that_rows_were_sent_to(folder, kind, method, monkeypatch):
    """Counted by the reader and by a store: each expert once per pass, whole files' bytes, nothing else."""
    path = checkpoint(folder, kind)
    pair = streamed(folder, kind, method, offload="disk")
    stream = stream_of(pair)
    record, before = Record(monkeypatch, stream), stream.counts
    decode(pair, count=8)
    wait([future for _, _, parts in stream._coming for future in parts])  # what is read ahead
    needed = record.distinct()
    read = [(layer, expert) for layer, leaf, expert in record.filled if expert is not None and leaf == 0]
    assert sorted(read) == sorted(needed) and needed
    counts = stream.counts.since(before)
    assert counts.experts == counts.experts_read == len(needed)
    passing = [layer for layer, leaf, expert in record.filled if expert is None and leaf == 0]
    expected = sum(file_bytes(pair, path, layer, expert) for layer, expert in needed)
    expected += sum(file_bytes(pair, path, layer, None) for layer in passing)
    assert counts.bytes == expected
    per_token = pair.engine.target.cfg.experts.per_token
    for layer, choice in record.asked:
        rows = (choice >= 0).all(axis=1)
        assert ((choice >= 0).any(axis=1) == rows).all() and rows[: rows.sum()].all()
        if method == "ar":
            assert rows.sum() in (1, len(PROMPT) - 1) and (rows.sum() == 1 or layer < LAYERS - 1)
            assert len(np.unique(choice[rows])) <= per_token * rows.sum()
    stream.close()


@pytest.mark.thorough
def test_experts_that_were_used_last_stay(folder, monkeypatch):
    """Exactly the experts are read that a cache of each layer does not hold, as a list says that is moved by hand."""
    pair = streamed(folder, "qwen3 moe", "ar", offload="host", kept=2)
    record = Record(monkeypatch, stream_of(pair))
    expected = decode(resident(folder, "qwen3 moe", "ar"), count=16)
    assert decode(pair, count=16) == expected
    held, reads = {layer: [] for layer in range(LAYERS)}, []
    for layer, choice in record.asked:
        rows = np.bincount(choice[choice >= 0], minlength=5)
        needed = sorted((expert for expert in range(5) if rows[expert]), key=lambda expert: rows[expert])
        reads += sorted((layer, expert) for expert in needed if expert not in held[layer])
        held[layer] = [*(expert for expert in held[layer] if expert not in needed), *needed][-2:]
    filled = [(layer, expert) for layer, leaf, expert in record.filled if expert is not None and leaf == 0]
    assert sorted(filled) == sorted(reads)
    assert 0 < len(reads) < len(record.distinct())


@pytest.mark.thorough
def test_devices_with_memory_of_their_own(folder, monkeypatch):
    """There an expert is copied into the array on the device."""
    monkeypatch.setattr(experts, "is_same_memory", lambda *_: False)
    expected = make_pair(checkpoint(folder, "mixed moe"), METHODS["ar"], degree=2)
    check_equal(expected, make_pair(checkpoint(folder, "mixed moe"), METHODS["ar"], degree=2, offload="host", kept=1))


@pytest.mark.thorough
def test_experts_from_pinned_memory(folder, monkeypatch):
    """As on a GPU: the routed experts that are not there are copied, and no others."""
    monkeypatch.setattr(stores, "can_pin", bool)
    expected = make_pair(checkpoint(folder, "mixed moe"), METHODS["ar"], degree=2)
    pinned = make_pair(checkpoint(folder, "mixed moe"), METHODS["ar"], degree=2, offload="host", kept=1)
    check_equal(expected, pinned)
    counts = stream_of(pinned).counts
    assert 0 < counts.experts_read < counts.experts


@pytest.mark.thorough
def test_a_read_error_names_the_expert_and_the_next_request_works(folder, monkeypatch):
    path = checkpoint(folder, "mixtral")
    pair = streamed(folder, "mixtral", "ar", offload="disk", kept=1)
    expected, hit = decode(pair, count=4), 0
    for number in range(1, 60, 4):
        with monkeypatch.context() as patch:
            at_call(patch, OpenFile, "_read_some", number, read_error)
            try:
                assert decode(pair, count=4) == expected
            except CheckpointError as error:
                assert str(path) in str(error)
                hit += "of expert" in str(error)
        assert decode(pair, count=4) == expected
        slots = {id(one): one for one in stream_of(pair)._experts._slots.values()}.values()
        held = sum(len(places) for places in stream_of(pair)._experts._places.values())
        assert held + sum(len(one.free) for one in slots) == 4 + LAYERS * 1
    assert hit > 2


def test_layers_whose_experts_cannot_be_split_pass_whole(folder):
    """Experts that lie whole on devices, and blocks that are packed across experts."""
    target = make_pair(checkpoint(folder, "mixtral"), METHODS["ar"], offload="host").engine.target
    layouts = layer_layouts(target)
    assert all(layout.experts is not None and layout.experts.count == 4 for layout in layouts)
    assert {leaf.name for leaf in layouts[0].experts.layout.leaves} == {"layers.0.gate_up", "layers.0.down"}
    together = dataclasses.replace(target, plan=dataclasses.replace(target.plan, expert_parallel=True))
    assert all(layout.experts is None and layout.passing is layout.weights for layout in layer_layouts(together))
    leaf = layouts[0].experts.layout.leaves[0]
    assert leaf.has_separate_experts
    placed = jax.ShapeDtypeStruct((4, 2, 12, *leaf.placed.shape[3:]), np.uint8, sharding=leaf.placed.sharding)
    assert not dataclasses.replace(leaf, placed=placed, packed="int8_q8_0").has_separate_experts
    assert dataclasses.replace(leaf, placed=placed, packed=None).has_separate_experts
