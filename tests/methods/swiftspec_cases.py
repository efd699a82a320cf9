"""Pairs for SwiftSpec: target and draft on devices of their own, and ways to run them. See `method_cases`."""

import functools
from typing import NamedTuple

import numpy as np
from marks import quick_part
from method_cases import plain, run, tokens_of
from tiny_pairs import (
    FAMILIES,
    FLOAT32,
    VOCAB,
    EditedSource,
    draft_config,
    resize_vocab,
    sharpen,
    spoil,
    target_params,
    vocab_rows_of,
)

from jaxspec.checkpoint.load import load_foreign
from jaxspec.checkpoint.shared_weights import share_embedding
from jaxspec.config import SamplingParams
from jaxspec.engine import Engine
from jaxspec.methods.core.round import DraftCounts, ModelParams, Models, read_rounds
from jaxspec.methods.swiftspec.settings import SwiftSpec
from jaxspec.models.quantization import Storage
from jaxspec.runtime.mesh import plan_mesh, plan_pair
from jaxspec.runtime.placement import Placement, SharedEmbedding

CONTEXT = 176


class Case(NamedTuple):
    """A compiled engine: target family, devices of target and draft (0: the target's), draft geometry, method."""

    family: str
    target: int
    draft: int
    geometry: str
    method: SwiftSpec


BASIC = Case("llama", 1, 1, "same", SwiftSpec(7, 4, depth=2))
SERIAL = Case("llama", 1, 1, "same", SwiftSpec(7, 4, depth=2, overlap=False))
WIDE = Case("llama", 1, 1, "same", SwiftSpec(3, 8, branch=5, depth=2, survivors=2))
NODES = Case("qwen3", 2, 2, "same", SwiftSpec(3, 2, depth=3, leaves=False))
TIGHT = Case("llama", 3, 1, "small", SwiftSpec(1, 4, branch=2, depth=4, leaves=False, survivors=3))
FORGETFUL = Case("mistral", 4, 4, "same", SwiftSpec(7, 8, depth=1, reuse=False))
LARGE_BATCH = Case("qwen3", 6, 2, "large", SwiftSpec(15, 2, depth=2))
ADAPTIVE = Case("llama", 7, 1, "shared", SwiftSpec(7, 16, depth=1, adaptive=True, survivors=24))
CHAIN = Case("llama", 1, 1, "same", SwiftSpec(7, 1, branch=1, depth=4))
TOGETHER = Case("mistral", 1, 0, "layer", SwiftSpec(3, 8, depth=3, leaves=False, survivors=9))
TOGETHER_TP2 = Case("qwen3", 2, 0, "same", SwiftSpec(15, 16, depth=2, reuse=False, survivors=16))
FOREIGN = Case(
    "mistral", 1, 2, "foreign",
    SwiftSpec(1, 4, depth=2, reuse=False, leaves=False, adaptive=True, survivors=2),
)  # fmt: skip
SHORT_CHAIN = Case("llama", 1, 1, "same", SwiftSpec(3, 1, branch=1, depth=4, survivors=2))
# Deeper than the sliding window of its models.
DEEP = Case("mistral", 2, 2, "same", SwiftSpec(3, 2, branch=2, depth=8, leaves=False))
# Neither degree divides the heads.
UNEVEN = Case("llama", 5, 3, "same", SwiftSpec(7, 4, depth=3))
CASES = [
    BASIC, SERIAL, WIDE, NODES, TIGHT, FORGETFUL, LARGE_BATCH, ADAPTIVE, CHAIN,
    TOGETHER, TOGETHER_TP2, FOREIGN, SHORT_CHAIN, DEEP, UNEVEN,
]  # fmt: skip


def quick(cases):
    """Cases of which `make test` runs those of two engines."""
    return quick_part(cases, lambda case: case in (BASIC, WIDE))


def case_id(case):
    """The name of the test case: the constant's name says what is special about it."""
    return next(name.lower() for name, value in globals().items() if value is case)


def overlaps(case):
    """Whether the draft runs while the target does."""
    return case.draft > 0 and case.method.overlap


def grown_rows(case):
    """M: rows of the draft's tree."""
    return case.method.growth().rows


def plans_of(case):
    """Meshes of target and draft."""
    if not case.draft:
        return (plan_mesh(case.target),) * 2
    return plan_pair(case.target, case.draft, method="swiftspec", own_devices=True)


@functools.cache
def models_of(case):
    """Placements of both models."""
    plan, draft_plan = plans_of(case)
    config, rows = draft_config(case.family, case.geometry), vocab_rows_of(case.geometry)
    limit = min(VOCAB, config.vocab_size) if rows else None
    shared = SharedEmbedding(FAMILIES[case.family], Storage("float32")) if config.borrows else None
    target = Placement(FAMILIES[case.family], plan, FLOAT32, rows)
    return Models(target, Placement(config, draft_plan, FLOAT32, rows, limit, shared_embedding=shared))


def params_of(case, draft="copy"):
    """Parameters of both models, the draft of a kind of `tiny_pairs.DRAFTS`."""
    target = target_params(case.family, case.target, vocab_rows_of(case.geometry))
    offset = case.target if case.draft else 0
    own = draft_params(case.family, case.draft or case.target, offset, case.geometry, draft)
    if case.geometry == "shared":
        own = {name: own[name] for name in ("final_norm", "layers")}
    if models_of(case).draft.cfg.borrows:
        own |= share_embedding(models_of(case).draft, target)
    return ModelParams(target, own)


@functools.cache
def draft_params(family, degree, offset, geometry, kind):
    """Parameters of a kind of `tiny_pairs.DRAFTS`; "certain" is a copy that gives nearly all mass to one token."""
    config = draft_config(family, "layer" if geometry == "shared" else geometry)
    resized = geometry in ("small", "large")

    def edit(tensors):
        sharpen(tensors)
        if "model.norm.weight" in tensors or kind == "broken":  # EAGLE-1 has none
            spoil(tensors, kind)
        if kind == "certain":
            tensors["model.norm.weight"] *= 4
        if resized:
            resize_vocab(tensors, config.vocab_size)

    source = EditedSource(FAMILIES[family] if resized else config, 1 if kind == "random" else 0, edit)
    source.config = config
    return load_foreign(source, plan_mesh(degree, offset), FLOAT32, vocab_rows_of(geometry))


@functools.cache
def engine_of(case):
    """A compiled engine."""
    engine = Engine(models_of(case), case.method, CONTEXT)
    engine.prepare()
    return engine


def decode(case, prompt, count, draft="copy", seed=0, **sampling):
    """Rounds of a generation of a case."""
    return run(engine_of(case), params_of(case, draft), prompt, count, seed, **sampling)


def expected_tokens(case, prompt, count, seed=0, **sampling):
    """The tokens of plain decoding."""
    return tokens_of(plain(case.family, prompt, count, seed, **sampling))


def check_rounds(case, rounds):
    """Check the counters of every round; the last one may be cut."""
    method, before = case.method, None
    for emitted in rounds[:-1]:
        assert len(emitted.tokens) == len(emitted.logprobs) == emitted.accepted + 1
        if not method.leaves:
            assert emitted.drafted == min(method.num_rows, emitted.draft.nodes) - 1
    for emitted in rounds:
        counts = emitted.draft
        assert 0 <= emitted.accepted <= emitted.depth <= emitted.drafted <= method.num_draft_tokens
        assert emitted.draft_passes == counts.passes
        check_counts(case, counts, None if before is None else before.draft)
        if before is None:
            assert counts.caught_up == 1 and counts.computed >= 1
            assert not any((counts.kept, counts.committed, counts.dropped, counts.token_hit, counts.evaluated_hit))
        else:
            # The prefix holds every verified token but the root.
            assert counts.committed + max(counts.caught_up - 1, 0) == len(before.tokens)
        before = emitted


def check_counts(case, counts, before):
    """Check a draft's counts, given those of the batch before, if there was one."""
    method, first = case.method, before is None
    missed = counts.caught_up > 0
    assert 0 <= counts.caught_up <= 2 and counts.evaluated_hit == (not missed)
    assert counts.evaluated_hit <= counts.token_hit <= 1
    assert (counts.kept == 0) == missed and counts.kept <= method.survivors
    assert 1 <= counts.nodes <= grown_rows(case)
    least = int(missed)
    if overlaps(case):
        grown = counts.passes - counts.exposed
        least_grown, most_grown = method.depth, method.depth
        if method.adaptive:
            least_grown, most_grown = 1, 4 * method.depth
        assert grown == 0 if first else least_grown <= grown <= most_grown
    else:
        assert counts.passes == counts.exposed
        least += method.depth
    assert counts.exposed >= least
    if method.leaves:
        assert counts.exposed == least
    if not method.reuse:
        assert counts.kept == counts.evaluated_hit == 0 and missed
    # What the tree held when the outcome came, and what it gained before it and after.
    held = counts.committed + counts.kept + counts.dropped
    assert counts.dropped >= 0 and counts.committed >= 0
    nodes_before = 0 if first else before.nodes
    assert held == nodes_before if first or not overlaps(case) else held >= nodes_before
    gained = (held - nodes_before) + (counts.nodes - counts.kept - missed)
    assert counts.computed == gained + counts.caught_up


class Rounds:
    """A generation of one engine, round by round, with its state in reach.

    Attributes:
      text: all verified tokens.
      known: those that the draft knew when it chose the last batch.
      verified: what the target sent to the draft before that; at first the root.
      batches: (token, parent) of the rows in use of each batch that crossed.
    """

    def __init__(self, case, draft="copy", prompt=(), seed=0, **sampling):
        self.case, self.params = case, params_of(case, draft)
        self.runner = engine_of(case).runner
        self.prompt, self.text, self.known = list(prompt), list(prompt), []
        self.verified, self.sent = [], [prompt[-1]]
        self.batches = []
        self.request = self.runner.place_request(SamplingParams(**sampling), seed)
        self.state = self.prefilled(prompt)

    def prefilled(self, text):
        """State of a new sequence: all tokens but the last are committed."""
        return self.runner.resume(self.params, self.runner.start(0, None), np.array(text, np.int32), 0)

    def dispatch(self):
        """Run a round and read nothing."""
        self.state, round_, _ = self.runner.round(self.params, self.state, self.request, 1)
        return round_

    def step(self):
        """Run a round; returns what the draft counted."""
        verify = self.runner.executor.verify

        def spy(params, state, batch, request, meanwhile=None):
            count, *rest = np.array(batch).tolist()
            self.batches.append((rest[: len(rest) // 2][:count], rest[len(rest) // 2 :][:count]))
            return verify(params, state, batch, request, meanwhile)

        self.runner.executor.verify = spy
        try:
            round_ = self.dispatch()
        finally:
            self.runner.executor.verify = verify
        (output,) = read_rounds(round_)
        self.verified, self.known = self.sent, list(self.text)
        self.sent = list(output.tokens)
        self.text += self.sent
        return DraftCounts(*np.array(round_.draft).tolist())

    def caches(self):
        """Caches of target and draft."""
        return {"target": self.state.target.cache, "draft": self.state.draft.sequence.cache}
