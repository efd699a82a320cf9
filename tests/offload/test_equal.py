"""A streamed target gives the bits of the resident one, and each pass reads the streamed bytes once."""

import functools

import jax
import numpy as np
import pytest
from marks import fast_part
from offload_cases import PROMPT, caches, checkpoint, decode, make_pair, stream_of

import jaxspec
from jaxspec.config import SamplingParams
from jaxspec.methods.auto.settings import Auto
from jaxspec.methods.autoregressive import Autoregressive
from jaxspec.methods.chain import Chain
from jaxspec.methods.lookup import PromptLookup
from jaxspec.methods.specexec import SpecExec
from jaxspec.methods.specinfer import SpecInfer
from jaxspec.methods.swiftspec.settings import SwiftSpec
from jaxspec.offload import stores

SAMPLINGS = ({}, {"temperature": 1.0, "repetition_penalty": 1.2})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("offload")


@functools.cache
def resident(folder, kind, method, **options):
    return make_pair(checkpoint(folder, kind), method, **options)


def check_equal(one, other):
    """Tokens, log-probabilities and cached keys and values of two engines are the same bits."""
    for sampling in SAMPLINGS:
        assert decode(other, **sampling) == decode(one, **sampling)
    # A resident target may have run a round that was not read: what both hold for sure is compared.
    same = [
        np.array_equal(a[:, : len(PROMPT) + 20], b[:, : len(PROMPT) + 20])
        for a, b in zip(caches(other), caches(one), strict=True)
    ]
    assert all(same), f"layers {[i for i, equal in enumerate(same) if not equal]} of the caches differ"


@pytest.mark.thorough
@pytest.mark.parametrize(
    "kind", fast_part(["float32", "bfloat16", "q4_0", "medium", "native q8_0"], lambda kind: kind != "float32")
)
def test_plain_decoding(folder, kind):
    """Every format, from disk and from memory, with some layers resident and none."""
    method = Autoregressive()
    expected = resident(folder, kind, method)
    for offload, kept in (("disk", 0), ("host", 2)):
        streamed = make_pair(checkpoint(folder, kind), method, offload=offload, resident=kept)
        check_equal(expected, streamed)
        stream_of(streamed).close()


FAST = ("specexec", "swiftspec", "plain tp4", "fed specexec")
METHODS = {
    "chain": (Chain(4), 1),
    "specexec": (SpecExec(16), 1),
    "specinfer": (SpecInfer((2, 2, 1)), 4),
    "swiftspec": (SwiftSpec(7, depth=3), 4),
    "lookup": (PromptLookup(), 1),
    "auto": (Auto(draft_cost=0.01), 1),
    "plain tp4": (Autoregressive(), 4),
    "fed specexec": (SpecExec(12), 1),
    "fed specinfer": (SpecInfer((2, 2)), 1),
    "fed swiftspec": (SwiftSpec(7, depth=3), 1),
    "added chain": (Chain(3), 4),
    "block chain": (Chain(4), 4),
    "block specexec": (SpecExec(8, branch=3), 1),
    "block auto": (Auto(draft_cost=0.01), 1),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", fast_part(METHODS, lambda name: name in FAST))
def test_methods(folder, name):
    method, degree = METHODS[name]
    draft = name.split()[0] if name.startswith(("fed", "added", "block")) else "draft"
    options = {"degree": degree, "draft": checkpoint(folder, draft) if method.drafts else None}
    expected = make_pair(checkpoint(folder, "q4_0"), method, **options)
    streamed = make_pair(checkpoint(folder, "q4_0"), method, offload="host", resident=1, **options)
    check_equal(expected, streamed)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "method"),
    fast_part(
        [
            ("q4_0", "specexec"),
            ("mixtral", "specexec"),
            ("bfloat16", "specexec"),
            ("medium", "ar"),
            ("shared expert", "ar"),
        ],
        lambda kind, method: kind == "mixtral",
    ),
)
def test_four_devices(folder, kind, method):
    """Tensor parallelism of every kind of weights, mixtures of experts too: each device has its part of a layer."""
    chosen = {"ar": Autoregressive(), "specexec": SpecExec(8)}[method]
    options = {"degree": 4, "draft": checkpoint(folder, "draft") if chosen.drafts else None}
    expected = make_pair(checkpoint(folder, kind), chosen, **options)
    offload, kept = ("host", 1) if method == "ar" else ("disk", 0)
    check_equal(expected, make_pair(checkpoint(folder, kind), chosen, offload=offload, resident=kept, **options))


@pytest.mark.thorough
def test_a_mixture_feeds_a_draft(folder):
    """The state after the last layer, too, of which a prompt without such a draft needs keys and values only."""
    options = {"draft": checkpoint(folder, "fed")}
    expected = make_pair(checkpoint(folder, "mixtral"), Chain(4), **options)
    check_equal(expected, make_pair(checkpoint(folder, "mixtral"), Chain(4), offload="host", **options))


def test_a_streamed_target_feeds_what_a_resident_one_does(folder):
    """The draft's keys and values are the same bits: they stand on the states."""
    cached = []
    for offload in ("none", "host"):
        pair = make_pair(checkpoint(folder, "q4_0"), Chain(3), draft=checkpoint(folder, "fed"), offload=offload)
        decode(pair, count=30)
        cache = pair.engine._idle[-1].state.draft.sequence.cache
        cached.append([np.asarray(part)[:, : len(PROMPT) + 24] for part in (*cache.key, *cache.value)])
    for one, other in zip(*cached, strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.abs(one[:, 5:]).max() > 0


@pytest.mark.parametrize("method", [Autoregressive(), Chain(3)], ids=["plain", "fed chain"])
def test_a_longer_prompt_goes_on_from_the_shorter_one(folder, method):
    """Tokens that an earlier text left in the caches are not computed again; the bits are those of a cold run."""
    path, draft = checkpoint(folder, "q4_0"), checkpoint(folder, "fed") if method.drafts else None
    streamed = make_pair(path, method, offload="host", draft=draft)
    cold = decode(streamed, prompt=PROMPT + PROMPT[:9])
    streamed.engine.session_memory = 2**30
    decode(streamed, count=2)
    with streamed.engine.open(streamed.params, PROMPT + PROMPT[:9], SamplingParams(max_tokens=1), 1) as session:
        # The last kept token runs again where its states are needed.
        assert session.num_cached == len(PROMPT) - (1 if method.drafts else 0)
    assert decode(streamed, prompt=PROMPT + PROMPT[:9]) == cold


@pytest.mark.slow
def test_large_trees(folder):
    options = {"draft": checkpoint(folder, "draft"), "dtype": "float32"}
    method = SpecExec(1024, width=32, depth=8)
    expected = make_pair(checkpoint(folder, "float32"), method, **options)
    check_equal(expected, make_pair(checkpoint(folder, "float32"), method, offload="disk", **options))


@pytest.mark.slow
@pytest.mark.real_model
def test_the_default_model(llm):
    """Fully compiled, from its file: logits of its integer products are those of the resident model."""
    streamed = jaxspec.LLM(method="ar", offload="disk", resident_layers=10)
    options = jaxspec.SamplingParams(max_tokens=16, logprobs=5, ignore_eos=True)
    text = "The capital of France is"
    one, other = llm.with_method("ar").generate(text, options), streamed.generate(text, options)
    assert other.token_ids == one.token_ids
    assert other.top_logprobs == one.top_logprobs and other.logprobs == one.logprobs
    assert other.stats.offload.passes >= 16


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["specexec", pytest.param("plain tp4", marks=pytest.mark.slow)])
def test_from_pinned_memory(folder, name, monkeypatch):
    """As on a GPU: the devices copy by themselves, two buffers, and the host fills nothing."""
    monkeypatch.setattr(stores, "can_pin", bool)
    monkeypatch.setattr(stores.HostStore, "fill", None)
    method, degree = METHODS[name]
    options = {"degree": degree, "draft": checkpoint(folder, "draft") if method.drafts else None}
    expected = make_pair(checkpoint(folder, "q4_0"), method, **options)
    streamed = make_pair(checkpoint(folder, "q4_0"), method, offload="host", resident=1, **options)
    stream = stream_of(streamed)
    kinds = {leaf.sharding.memory_kind for held in stream.store.pinned.values() for leaf in jax.tree.leaves(held)}
    assert kinds == {stores.PINNED} and stream.num_buffers == 2
    check_equal(expected, streamed)
    counts = stream.counts
    assert counts.bytes == stream.nbytes * (counts.passes + 1) or counts.bytes > stream.nbytes * counts.passes
    assert counts.stalls == 0 and counts.since(counts).overlap is None
