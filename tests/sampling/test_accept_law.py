"""Laws of the acceptance rules over several rounds, against enumeration.

Each test fails by chance with probability `FALSE_ALARM` per p-value it looks at; seeds are fixed, so that happens at
most once, when a stream of random numbers changes: then 0.1 of the hundred p-values here are expected to fall below it.
Planted faults show that the same statistic, on as many draws, finds what it is there for.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from markov import (
    DETECTED,
    DRAFT,
    DRAWS,
    FALSE_ALARM,
    MODES,
    ROUNDS,
    SAMPLINGS,
    TABLES,
    TARGET,
    Mode,
    V,
    arguments,
    chi_square,
    count,
    decode,
    generate,
    generate_plainly,
    joint_law,
    law_p_value,
    likely,
    match,
    next_law,
    reject,
    sampled,
)
from marks import fast_part, quick_part
from sampling_cases import shard_call

from jaxspec.config import SamplingParams
from jaxspec.models.config import TENSOR_AXIS
from jaxspec.sampling.accept import Decision, children_mask, find_child
from jaxspec.sampling.choose import gumbel_rows, role_key
from jaxspec.sampling.processors import processor_specs


def law_cases(*axes, fast):
    """Every mode with every value of the axes; `.ci/run` keeps what equals `fast`, `make test` two modes of that."""
    cases = fast_part(itertools.product(MODES, *axes), lambda mode, *values: values == fast)
    return quick_part(cases, lambda mode, *values: mode in ("chain", "tree"))


# R2, R3 and R4 promise equality with plain decoding in different senses; these promise it token for token.
MATCHING = ("tree", "simulated")


@functools.cache
def _generated(mode, sampling, fans=None):
    return generate(MODES[mode], SAMPLINGS[sampling], fans=fans)


@pytest.mark.parametrize(("mode", "sampling"), law_cases(SAMPLINGS, fast=("all",)))
def test_joint_law_of_the_first_tokens(mode, sampling):
    generated = _generated(mode, sampling)
    assert law_p_value(generated.tokens, SAMPLINGS[sampling]) > FALSE_ALARM
    # The tokens come from rounds of every length, so that the next round starts from what each leaves.
    assert (np.bincount(generated.counts[:, 0])[1:] > DRAWS // 100).all()


@pytest.mark.parametrize(
    ("mode", "sampling"),
    quick_part(
        fast_part(itertools.product(MATCHING, SAMPLINGS), lambda mode, sampling: sampling == "all"),
        lambda mode, _: mode == "tree",
    ),
)
def test_matching_gives_the_tokens_of_plain_decoding(mode, sampling):
    tokens, _ = generate_plainly(SAMPLINGS[sampling])
    np.testing.assert_array_equal(_generated(mode, sampling).tokens, tokens)


@pytest.mark.parametrize(("mode", "draft"), law_cases(["equal", "opposite", "flat", "certain"], fast=("opposite",)))
def test_joint_law_does_not_depend_on_the_draft(mode, draft):
    table = {
        "equal": TARGET,
        "opposite": -TARGET,
        "flat": np.zeros_like(TARGET),
        "certain": 20 * DRAFT,
    }[draft]
    generated = generate(MODES[mode], SAMPLINGS["cold"], draft=table)
    assert law_p_value(generated.tokens, SAMPLINGS["cold"]) > FALSE_ALARM
    if draft == "equal" and mode != "tree":
        # What is drawn from p is accepted, the last bit of a probability aside.
        assert (generated.counts == MODES[mode].steps).mean() > 0.9999


def _p_value_after(generated, where, given, params):
    """p-value of the tokens after the first `given`, among the draws `where`."""
    tokens = generated.tokens[where]
    assert len(tokens) > DRAWS // 100
    law = joint_law(params)
    context = law.reshape(V**given, -1).sum(axis=1, keepdims=True)
    conditional = law.reshape(V**given, -1) / np.where(context > 0, context, 1)
    return chi_square(count(tokens).reshape(V**given, -1), conditional)


@pytest.mark.parametrize(("mode", "first", "sampling"), law_cases([1, 2], ["hot", "all"], fast=(1, "all")))
def test_a_round_knows_nothing_of_the_one_before(mode, first, sampling):
    """How many tokens a round accepted says nothing about the next ones: no number decides twice."""
    generated = _generated(mode, sampling)
    p_value = _p_value_after(generated, generated.counts[:, 0] == first, first, SAMPLINGS[sampling])
    assert p_value > FALSE_ALARM


def _accepts(p, q, draws, replacement):
    """Probability that one of several drawn children is accepted, by the statement of R2, R3 and R3'."""
    if draws == 0:
        return 0.0
    total = 0.0
    for x in np.flatnonzero(q):
        accept = min(1.0, p[x] / q[x])
        left, others = np.maximum(p - q, 0), q if replacement else np.where(np.arange(V) == x, 0, q)
        if accept < 1 and draws > 1 and others.any():
            rest = _accepts(left / left.sum(), others / others.sum(), draws - 1, replacement)
        else:
            rest = 0.0
        total += q[x] * (accept + (1 - accept) * rest)
    return total


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "fan", "sampling"),
    [("chain", 1, "plain"), ("chain", 1, "all"), ("multi", 2, "cold"), ("multi", 3, "all"), ("distinct", 2, "all"),
     ("distinct", 3, "plain")],
)  # fmt: skip
def test_how_often_a_child_is_accepted(mode, fan, sampling):
    """No rule is exact because it rejects more than it must."""
    params = SAMPLINGS[sampling]
    generated = _generated(mode, sampling, (fan,))
    p, q = next_law(params), next_law(params, target=DRAFT)
    rate = _accepts(p, q, fan, mode != "distinct")
    if mode == "chain":
        np.testing.assert_allclose(rate, 1 - np.abs(p - q).sum() / 2, atol=1e-12)
    accepted = (generated.counts[:, 0] > 1).sum()
    assert 0.05 < rate < 0.999
    assert chi_square(np.array([accepted, DRAWS - accepted]), np.array([rate, 1 - rate])) > FALSE_ALARM


@functools.cache
def _tied_tables():
    """Logits with many ties, of targets and of drafts that know half of their rows."""
    rng = np.random.default_rng(3)
    target, other = (rng.integers(-2, 3, size=(2, TABLES, V, V)) / 2).astype(np.float32)
    return target, np.where(rng.random((TABLES, V, 1)) < 0.5, target, other)


@pytest.mark.parametrize("mode", quick_part(MODES, lambda mode: mode in ("chain", "tree")))
def test_temperature_zero_is_the_argmax_chain(mode):
    """The lowest id wins a tie, whatever was drafted; penalties see the path, and cuts change nothing."""
    # Penalties that float32 represents, so that ties stay ties.
    unlimited = SamplingParams(
        repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=-0.25, logit_bias={0: 0.5, 3: -np.inf, 4: 0.5}
    )
    params = dataclasses.replace(unlimited, top_k=2, top_p=0.5, min_p=0.5)
    target, draft = _tied_tables()
    expected = []
    for table in target:
        output = ()
        for _ in range(ROUNDS):
            output += (int(np.argmax(next_law(unlimited, output, table))),)
        expected.append(output)
    generated = generate(MODES[mode], params, target=target, draft=draft)
    np.testing.assert_array_equal(generated.tokens, np.resize(expected, (DRAWS, ROUNDS)))
    assert len(set(generated.counts[:, 0].tolist())) == MODES[mode].steps


@pytest.mark.thorough
@pytest.mark.parametrize(
    "sampling", fast_part(["greedy", "hot", "top-p", "bias"], lambda sampling: sampling == "top-p")
)
def test_a_sharded_vocabulary_decides_the_same(sampling):
    mode = "distinct"  # every step of the others is one of its own, or of `draw_children`, see test_accept.py
    params = SAMPLINGS.get(sampling, SamplingParams(repetition_penalty=1.5))
    some, target, draft = 8 * TABLES, TARGET.copy(), DRAFT.copy()
    target[:, -1] = draft[:, -1] = -np.inf
    whole = generate(MODES[mode], params, target=target, draft=draft)
    target[:, -1] = draft[:, -1] = 50  # padding may hold anything
    args = arguments(MODES[mode], params, draft, target, None, 0, some, vocab_size=V - 1)
    tokens, counts = _sharded(mode)(*args)
    np.testing.assert_array_equal(tokens, whole.tokens[:some])
    np.testing.assert_array_equal(counts, whole.counts[:some])


@functools.cache
def _sharded(mode):
    def decode_all(vocab, *args):
        each = functools.partial(decode, vocab, MODES[mode])
        return jax.vmap(each, in_axes=(None, None, None, None, None, 0, 0))(*args)

    columns, scalar = P(None, None, TENSOR_AXIS), P()
    specs = columns, columns, processor_specs(TENSOR_AXIS), scalar, scalar, scalar, scalar
    return shard_call(decode_all, 4, V - 1, V, specs, (scalar, scalar))


# Planted faults: mistakes found in other decoders, which the joint law must show.
NO_FAULT, RAW_BONUS, SAME_NUMBERS, TEXT_ONLY, NO_TEMPERATURE, REDRAWN, PICKED, TOGETHER = range(8)
FAULTS = {
    RAW_BONUS: "the bonus token is drawn from the raw logits",
    SAME_NUMBERS: "two positions share their random numbers",
    TEXT_ONLY: "penalties see the text and not the path",
    NO_TEMPERATURE: "the temperature is ignored",
    REDRAWN: "what is not in the tree is drawn again",
    PICKED: "p/q ratios of children that were picked, not drawn",
    TOGETHER: "children drawn without replacement are judged as independent draws",
}
_PLANTED = SamplingParams(temperature=0.6, frequency_penalty=1.0)
_POOR_DRAFT = np.roll(DRAFT, 3, axis=0)  # mistakes show most where much is rejected


def _plant(rule):
    def faulty(logits, grown, position, setting):
        fault, vocab, key = setting.fault, setting.vocab, setting.request.key
        batch = dataclasses.replace(grown.batch, depth=jnp.where(fault == SAME_NUMBERS, 0, grown.batch.depth))
        processors, heat = setting.request.processors, setting.request.processors.temperature
        unheated = dataclasses.replace(processors, temperature=jnp.where(fault == NO_TEMPERATURE, 1.0, heat))
        setting = setting._replace(request=dataclasses.replace(setting.request, processors=unheated))
        right = rule(logits, grown._replace(batch=batch), position, setting)

        def decide(row, histories):
            def draw(z, key):
                return vocab.argmax(z + gumbel_rows(key, position[None] + batch.depth[row] + 1, vocab))[0]

            pick = functools.partial(jnp.where, fault == TEXT_ONLY)
            token, logprob, child, top = right(row, lambda: jax.tree.map(pick, grown.history.row(), histories()))
            is_leaf = ~children_mask(batch, row).any()
            token = jnp.where(is_leaf & (fault == RAW_BONUS), draw(logits(row), key), token)
            again = draw(logits(row) / heat, role_key(key, 9))
            redraw = (fault == REDRAWN) & (child < 0) & ~is_leaf
            child = jnp.where(redraw, find_child(batch, row, again), child)
            return Decision(jnp.where(redraw, again, token), logprob, child, top)

        return decide

    return faulty


def _plant_children(logits, paths, position, setting):
    token, valid, q = sampled(logits, paths, position, setting)
    _, vocab, request, fault = setting
    noise = gumbel_rows(role_key(request.key, 9), position, vocab)
    for wrong, scores in ((PICKED, q), (TOGETHER, q + noise)):
        token = jnp.where(fault == wrong, vocab.top_k(scores, token.shape[1])[1], token)
    return token, valid, q


_FAULTY_MATCH = Mode(_plant(match), likely, (2, 2))
_FAULTY_REJECT = Mode(_plant(reject), _plant_children, (2, 2))
_MATCH_FAULTS = (RAW_BONUS, SAME_NUMBERS, TEXT_ONLY, NO_TEMPERATURE, REDRAWN)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "fault"),
    [(_FAULTY_MATCH, f) for f in (NO_FAULT, *_MATCH_FAULTS)] + [(_FAULTY_REJECT, f) for f in (NO_FAULT, *FAULTS)],
    ids=[f"match: {FAULTS.get(f, f)}" for f in (NO_FAULT, *_MATCH_FAULTS)]
    + [f"reject: {FAULTS.get(f, f)}" for f in (NO_FAULT, *FAULTS)],
)
def test_planted_faults_are_found(mode, fault):
    params = SAMPLINGS["hot"] if fault == REDRAWN else _PLANTED  # it draws without penalties
    p_value = law_p_value(generate(mode, params, draft=_POOR_DRAFT, fault=fault).tokens, params)
    assert p_value > FALSE_ALARM if fault == NO_FAULT else p_value < DETECTED


def test_the_statistic_by_hand():
    assert chi_square(np.array([50, 50]), np.array([0.5, 0.5])) == 1
    assert chi_square(np.array([60, 40]), np.array([0.5, 0.5])) == pytest.approx(0.0455, abs=1e-4)
    assert chi_square(np.array([1, 99]), np.array([0.0, 1.0])) == 0  # cannot be
    assert chi_square(np.array([0, 99]), np.array([0.0, 1.0])) == 1  # nothing to compare
    # 1 and 2 of 100 expect too few: with the next they expect 43, and 57 beside them are as expected.
    assert chi_square(np.array([0, 43, 57, 0]), np.array([0.01, 0.4, 0.57, 0.02])) > 0.999
    law = np.array([[0.5, 0.5], [0.9, 0.1], [0.0, 0.0]])
    assert chi_square(np.array([[60, 40], [80, 20], [0, 0]]), law) == pytest.approx(
        np.exp(-(4 + 100 / 9) / 2), rel=1e-9
    )  # two degrees of freedom
