"""Token by token: equal texts pass, ties are named as such, and every planted fault is found where it is."""

import copy
import dataclasses
import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from sampling_reference import process_reference
from tiny_models import FAMILIES, place, tiny_params

from jaxspec.check.distribution import check_distribution, draw_many
from jaxspec.check.reference_decoder import ReferenceDecoder, Row, margin
from jaxspec.check.run import PlainDistribution, check_tokens, count_verdicts, default_samplings
from jaxspec.config import SamplingParams
from jaxspec.engine import Engine
from jaxspec.errors import ConfigError
from jaxspec.llm import Internals, internals
from jaxspec.methods.autoregressive import Autoregressive
from jaxspec.methods.core.round import ModelParams, Models

V = FAMILIES["llama"].vocab_size
PROMPTS = [[int(t) for t in np.random.default_rng(length).integers(1, V, length)] for length in (1, 9, 70)]
TOKENS = 20
GREEDY = SamplingParams(TOKENS)
SEEDED = SamplingParams(TOKENS, temperature=0.8, seed=5)


class TinyLLM:
    """The part of `LLM` that checks need, on a tiny random model; without end-of-sequence tokens."""

    def __init__(self, engine, params):
        self._internals = Internals(engine, ModelParams(params))

    def generate(self, prompt, sampling):
        engine, params, *_ = self._internals
        engine.check_request(prompt, sampling)
        engine.prepare(len(prompt) + sampling.max_tokens)
        tokens = []
        with engine.open(params, prompt, sampling, sampling.seed or 0) as session:
            while not session.done:
                tokens += session.step().tokens
        return SimpleNamespace(token_ids=tuple(tokens))


class Altered:
    """Plain decoding whose finished text is altered by a function of the list of tokens."""

    def __init__(self, plain, alter):
        self.plain = plain
        self.alter = alter

    def generate(self, prompt, sampling):
        return SimpleNamespace(token_ids=tuple(self.alter([*self.plain.generate(prompt, sampling).token_ids])))


class Rounds:
    """Rounds of `length` tokens, each continued from the text so far; the last of a round may be chosen otherwise."""

    def __init__(self, plain, length, bonus=lambda sampling: sampling):
        self.plain = plain
        self.length = length
        self.bonus = bonus

    def generate(self, prompt, sampling):
        tokens = []
        one = dataclasses.replace(sampling, max_tokens=1)
        while len(tokens) < sampling.max_tokens:
            last = len(tokens) % self.length == self.length - 1
            chosen = self.bonus(one) if last else one
            tokens += self.plain.generate([*prompt, *tokens], chosen).token_ids
        return SimpleNamespace(token_ids=tuple(tokens))


class Replacing:
    """Greedy decoding that says `other` wherever plain decoding says `token`, and goes on from there."""

    def __init__(self, plain, token, other):
        self.plain = plain
        self.swap = {token: other}

    def generate(self, prompt, sampling):
        tokens = []
        for _ in range(sampling.max_tokens):
            token = self.plain.generate([*prompt, *tokens], dataclasses.replace(sampling, max_tokens=1)).token_ids[0]
            tokens.append(self.swap.get(token, token))
        return SimpleNamespace(token_ids=tuple(tokens))


@pytest.fixture(scope="module")
def plain():
    engine = Engine(Models(place(FAMILIES["llama"])), Autoregressive())
    engine.prepare()
    return TinyLLM(engine, tiny_params("llama"))


@pytest.fixture(scope="module")
def reference(plain):
    return ReferenceDecoder(internals(plain).target, internals(plain).params.target)


def with_twin(plain, reference, token, gap=0.0):
    """The same model with a second token of the same logit, but for a relative `gap`; and its reference."""
    twin, head = token + 1, internals(plain).params.target["head"]
    other = copy.copy(reference)
    other._params = {**internals(plain).params.target, "head": head.at[twin].set(head[token] * (1 - gap))}
    return TinyLLM(internals(plain).engine, other._params), other, twin


def noisy(plain, size):
    """The same model with weights that are off by a relative `size`, as another order of summation is."""
    rng = np.random.default_rng(0)

    def off(leaf):
        return leaf * (1 + size * rng.normal(size=leaf.shape).astype(np.float32))

    return TinyLLM(internals(plain).engine, jax.tree.map(off, internals(plain).params.target))


def test_plain_decoding_equals_itself(plain, reference):
    samplings = default_samplings(TOKENS, seed=1)
    comparisons = check_tokens(plain, plain, PROMPTS, samplings, reference)
    assert [(c.sampling, c.prompt) for c in comparisons] == [(s, i) for s in samplings for i in range(3)]
    assert all((c.verdict, c.equal, c.position, c.margin) == ("equal", TOKENS, None, None) for c in comparisons)
    summary = count_verdicts(comparisons)
    assert (summary.prompts, summary.equal, summary.tokens, summary.suspicious) == (12, 12, 12 * TOKENS, False)


def test_rows_are_what_plain_decoding_sees(plain, reference):
    """Every token is its row's choice, and rows agree with the processor that was written for reading."""
    for sampling in default_samplings(TOKENS, seed=2):
        for prompt in PROMPTS:
            tokens = plain.generate(prompt, sampling).token_ids
            rows = list(reference.rows(prompt, tokens, sampling))
            assert len(rows) == TOKENS + 1 and rows[0].logits.shape == (V,)
            assert [margin(row, token, sampling) for row, token in zip(rows, tokens, strict=False)] == [0.0] * TOKENS
        expected = process_reference(rows[7].logits.tolist(), sampling, prompt, tokens[:7], V)
        np.testing.assert_allclose(rows[7].log_probs, expected, rtol=1e-4, atol=1e-4)


def test_rows_do_not_depend_on_the_mesh(reference):
    split = ReferenceDecoder(place(FAMILIES["llama"], 8), tiny_params("llama", 8))
    sampling = default_samplings(TOKENS, seed=3)[-1]
    for one, other in zip(*(s.rows(PROMPTS[2], [4, 7, 4], sampling) for s in (reference, split)), strict=True):
        for name in ("logits", "penalised", "noise"):
            np.testing.assert_allclose(getattr(one, name), getattr(other, name), atol=2e-5)


def altered(index, token):
    def alter(tokens):
        tokens[index] = (tokens[index] + token) % V if token > 0 else token
        return tokens

    return alter


@pytest.mark.parametrize(("sampling", "index"), [(GREEDY, 0), (SEEDED, 6), (GREEDY, TOKENS - 1)])
def test_a_wrong_token_is_found_where_it_is(plain, reference, sampling, index):
    for compared in check_tokens(plain, Altered(plain, altered(index, 1)), PROMPTS, [sampling], reference):
        assert (compared.verdict, compared.equal, compared.position) == ("different", index, index)
        assert compared.expected_token == compared.expected[index] and compared.got_token == compared.got[index]
        assert compared.margin > compared.eps > 0


@pytest.mark.parametrize("pad", [0, -1, V])
def test_pads_taken_for_tokens_are_found(plain, reference, pad):
    def alter(tokens):
        return [*tokens[:5], pad, *tokens[6:]]

    for sampling in (GREEDY, SEEDED):
        compared = check_tokens(plain, Altered(plain, alter), PROMPTS[:1], [sampling], reference)[0]
        assert (compared.verdict, compared.position, compared.got_token) == ("different", 5, pad)
        assert math.isinf(compared.margin) == (not 0 <= pad < V)


def test_texts_that_end_elsewhere_are_found(plain, reference):
    for alter, expected, got in [(lambda t: t[:-2], True, False), (lambda t: [*t, 3], False, True)]:
        compared = check_tokens(plain, Altered(plain, alter), PROMPTS[:1], [GREEDY], reference)[0]
        assert (compared.verdict, compared.margin) == ("different", None)
        assert (compared.expected_token is not None, compared.got_token is not None) == (expected, got)


@pytest.mark.thorough
def test_bonus_token_at_the_wrong_temperature_is_found(plain, reference):
    """Only the last token of a round is wrong, and only sometimes."""
    sampling = dataclasses.replace(SEEDED, top_k=20)
    right = check_tokens(plain, Rounds(plain, 4), PROMPTS, [GREEDY, sampling], reference)
    assert all(c.verdict == "equal" for c in right)
    for wrong in ({"temperature": 2.0}, {"top_k": 0}, {"temperature": 0.0}):
        method = Rounds(plain, 4, lambda s, wrong=wrong: dataclasses.replace(s, **wrong) if s.temperature else s)
        compared = check_tokens(plain, method, PROMPTS, [GREEDY, sampling], reference)
        assert all(c.verdict == "equal" for c in compared[:3])  # greedy texts cannot tell
        found = [c for c in compared if c.verdict == "different"]
        assert found and all(c.position % 4 == 3 for c in found) and count_verdicts(compared).different == len(found)


def test_rounding_is_a_tie_and_more_is_not(plain, reference):
    """The method computes with other last bits; a near tie is planted by making two tokens' rows nearly equal."""
    token = plain.generate(PROMPTS[1], GREEDY).token_ids[3]
    for gap, verdict in [(0.0, "tie"), (1e-6, "tie"), (3e-2, "different")]:
        model, judge, twin = with_twin(plain, reference, token, gap)
        compared = check_tokens(model, Replacing(model, token, twin), PROMPTS[1:2], [GREEDY], judge)[0]
        assert (compared.verdict, compared.expected_token, compared.got_token) == (verdict, token, twin)
        assert (compared.margin <= compared.eps) == (verdict == "tie")


def test_a_tie_hides_no_later_fault(plain, reference):
    token = plain.generate(PROMPTS[1], GREEDY).token_ids[3]
    model, judge, twin = with_twin(plain, reference, token)
    tied = Replacing(model, token, twin)
    first = check_tokens(model, tied, PROMPTS[1:2], [GREEDY], judge)[0]
    assert (first.verdict, first.position, first.margin) == ("tie", first.equal, 0.0) and first.ties >= 1
    index = TOKENS - 2
    assert first.equal < index
    faulty = check_tokens(model, Altered(tied, altered(index, 2)), PROMPTS[1:2], [GREEDY], judge)[0]
    assert (faulty.verdict, faulty.equal, faulty.position) == ("different", first.equal, index)
    assert faulty.margin > faulty.eps


def test_other_last_bits_are_no_fault_and_other_weights_are(plain, reference):
    samplings = default_samplings(TOKENS, seed=4)
    near = check_tokens(plain, noisy(plain, 2**-24), PROMPTS, samplings, reference)
    assert "different" not in [c.verdict for c in near]
    far = check_tokens(plain, noisy(plain, 0.02), PROMPTS, samplings, reference)
    assert "different" in [c.verdict for c in far]


def test_seeds_are_needed(plain, reference):
    with pytest.raises(ConfigError, match="without a seed cannot be compared"):
        check_tokens(plain, plain, PROMPTS, [SamplingParams(4, temperature=1.0)], reference)
    with pytest.raises(ConfigError, match="temperature 0 has no distribution"):
        PlainDistribution(reference, PROMPTS[0], GREEDY)
    with pytest.raises(ConfigError, match="520 tokens of prompt and output exceed the model's context of 512"):
        next(reference.rows(PROMPTS[0] * 500, [1] * 20, GREEDY))


@pytest.mark.thorough
def test_distribution_of_a_model(plain, reference):
    """The distribution test on a real forward pass: plain decoding passes, an ignored temperature does not."""
    prompt, sampling = PROMPTS[1], SamplingParams(2, temperature=2.0, top_k=20)
    exact = PlainDistribution(reference, prompt, sampling)
    draws = list(draw_many(plain, prompt, sampling, 300))
    result = check_distribution(exact, prompt, draws, edge_fn=exact.edge)
    assert (result.verdict, result.impossible, result.after) == ("equal", 0, {})
    cold = list(draw_many(plain, prompt, dataclasses.replace(sampling, temperature=0.5), 200))
    assert check_distribution(exact, prompt, cold, edge_fn=exact.edge).verdict == "different"
    loose = list(draw_many(plain, prompt, dataclasses.replace(sampling, top_k=0), 50))
    assert check_distribution(exact, prompt, loose, edge_fn=exact.edge).impossible > 0


def row_of(z, noise=None, **sampling):
    z = np.array(z, np.float32)
    noise = np.zeros_like(z) if noise is None else np.array(noise, np.float32)
    return Row(z, z, np.zeros_like(z), noise), SamplingParams(**sampling)


@pytest.mark.parametrize(
    ("token", "expected", "z", "options"),
    [
        (0, 0.0, [3, 1, 2], {}),
        (2, 1.0, [3, 1, 2], {}),
        (1, math.inf, [3, -math.inf, 2], {}),
        (-1, math.inf, [3, 1, 2], {}),
        # Scores are logits over the temperature, plus noise.
        (2, 2.0, [3, 1, 2], {"temperature": 0.5}),
        (2, 0.0, [3, 1, 2], {"temperature": 1.0, "noise": [0, 0, 1.5]}),
        # Cut off by 0.1, and chosen if it were not.
        (2, 0.1, [3, 2.1, 2], {"temperature": 1.0, "top_k": 2, "noise": [0, 0, 5]}),
        # The winner would be cut off if it were 0.1 less probable.
        (0, 0.1, [3, 2, 1.9], {"temperature": 1.0, "top_k": 2, "noise": [0, 5, 0]}),
        # log(0.3) - log(0.25): the most probable token's mass over top_p's odds.
        (1, math.log(0.8 / 0.2) - math.log(0.79 / 0.21), [math.log(0.8), math.log(0.15), math.log(0.05)],
         {"temperature": 1.0, "top_p": 0.79, "noise": [0, 9, 0]}),
        (1, 0.2, [0, math.log(0.1) - 0.2], {"temperature": 1.0, "min_p": 0.1, "noise": [0, 9]}),
    ],
)  # fmt: skip
def test_margins_by_hand(token, expected, z, options):
    row, sampling = row_of(z, **options)
    assert margin(row, token, sampling) == pytest.approx(expected, rel=2e-3, abs=1e-6)
