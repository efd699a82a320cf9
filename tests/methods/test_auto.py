"""Drafting as far as it pays: what is learned, what it is weighed against, and the rounds that come of it.

That the tokens are plain decoding's is `test_exact`'s matter; here it is how often the draft is asked, and for what.
"""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from method_cases import (
    LLAMA_AUTO,
    LLAMA_AUTO_LONG,
    LLAMA_LOOKUP,
    LONG_PROMPT,
    PROMPT,
    SAMPLINGS,
    Case,
    Steps,
    case_id,
    check_counts,
    decode,
    engine_of,
    forget_drafts,
    models_of,
    params_of,
    passes_of,
    plain,
    run,
    tokens_of,
)
from tiny_pairs import count_on, counting

from jaxspec.errors import ConfigError
from jaxspec.methods.auto.settings import LONGEST_CHAIN, Auto, stream_speeds
from jaxspec.methods.base import Store
from jaxspec.methods.core.cost_model import (
    USUAL_RATES,
    pass_costs,
    relative_draft_cost,
)
from jaxspec.methods.core.round import STEPS_OF_SMALL, ModelParams
from jaxspec.methods.core.tree_round import FIRST_PATIENCE, LONGEST_PATIENCE, SYNC_ROWS
from jaxspec.methods.specexec import SpecExec
from jaxspec.stream_events import count_speculation

LENGTH = LLAMA_AUTO_LONG.method.length
# As long as the engine has room for, less the longer prompt.
MANY = 300


# What became of drafts


def test_a_streamed_target_gets_a_tree_with_the_budget_at_the_knee():
    """The longer a pass takes over what it computes, the more draft tokens; settings of one's own are kept."""
    models = models_of(LLAMA_AUTO)

    def chosen(ratio, method=None):
        return (method or Auto()).configure(models, Store(stream_ratio=ratio))

    assert chosen(0.0) == chosen(2.0) == Auto()
    budgets = [chosen(ratio).num_draft_tokens for ratio in (5, 50, 500, 5000)]
    assert all(isinstance(chosen(ratio), SpecExec) for ratio in (5, 5000))
    assert budgets == sorted(budgets) and budgets[0] < budgets[-1]
    assert chosen(100.0, Auto(length=3)) == Auto(length=3)
    # At long passes the largest tree gains what it accepts; at short ones its drafting and its rows cost more.
    slow, fast = stream_speeds(models, 1e6, 0.0), stream_speeds(models, 1.0, 0.0)
    assert slow == pytest.approx(USUAL_RATES, rel=1e-2) and fast[16] > fast[1024] < 1


# Rounds


def first_text(case, draft, prompt, count, seed, params=None, **sampling):
    """Rounds of a text before which nothing was learned of the draft; the last one may be longer than `count`."""
    steps, rounds = Steps(case, draft, prompt, seed, params, **sampling), []
    while sum(len(emitted.tokens) for emitted in rounds) < count:
        steps.step()
        rounds.append(steps.output)
    return rounds


def asked_of(rounds):
    """Rounds in which the draft ran."""
    return [index for index, emitted in enumerate(rounds) if emitted.draft_passes]


@pytest.mark.parametrize("sampling", ["greedy", "T=1"])
@pytest.mark.parametrize("draft", ["random", "adversarial"])
@pytest.mark.slow
def test_a_poor_draft_is_left_alone_and_tried_again_ever_more_rarely(draft, sampling):
    rounds = first_text(LLAMA_AUTO_LONG, draft, PROMPT, MANY, 1, **SAMPLINGS[sampling])
    assert tokens_of(rounds)[:MANY] == tokens_of(plain("llama", PROMPT, MANY, 1, **SAMPLINGS[sampling]))
    check_counts(LLAMA_AUTO_LONG, rounds)
    rounds = passes_of(rounds)
    asked = asked_of(rounds)
    assert len(asked) < len(rounds) / 4
    assert sum(emitted.drafted == 0 for emitted in rounds) > 20  # plain; others copy what the text repeats
    # Once it is known not to pay, patience doubles; where a copy pays, the draft waits a little longer.
    gaps = [len(tokens_of(rounds[a:b])) for a, b in itertools.pairwise(asked)]
    first = next(index for index, gap in enumerate(gaps) if gap >= FIRST_PATIENCE)
    waits = list(itertools.takewhile(lambda gap: gap >= FIRST_PATIENCE, gaps[first:]))
    expected = [min(FIRST_PATIENCE * 2**n, LONGEST_PATIENCE) for n in range(len(waits))]
    assert len(expected) >= 3
    for gap, patience in zip(waits, expected, strict=True):
        assert patience <= gap < 2 * patience


@pytest.mark.thorough
def test_where_nothing_pays_a_round_decodes_several_tokens():
    """Idle rounds after a right draft decode one token, and the last round may hold more than is wanted."""
    sampling = dict(temperature=1.3, seed=7)
    for count in (MANY, MANY - 1, MANY - 2, MANY - 3):
        forget_drafts(LLAMA_AUTO_LONG)
        rounds = decode(LLAMA_AUTO_LONG, PROMPT, count, "random", **sampling)
        assert tokens_of(rounds) == tokens_of(plain("llama", PROMPT, count, **sampling))
        alone = [len(emitted.tokens) for emitted in rounds if not emitted.drafted]
        assert sum(alone) > count // 2 and set(alone) >= {1, STEPS_OF_SMALL}
        assert len(alone) < 2 * sum(alone) / 3
        assert len(asked_of(rounds)) < count / 3


@pytest.mark.parametrize("draft", ["constant", pytest.param("broken", marks=pytest.mark.thorough)])
def test_a_draft_that_is_never_sure_is_left_alone(draft):
    """Its tokens have a chance of 1 % by its own account: few are verified, and it is found out all the same."""
    forget_drafts(LLAMA_AUTO_LONG)
    rounds = decode(LLAMA_AUTO_LONG, PROMPT, 150, draft, 1)
    passes = passes_of(rounds)
    assert 0 < len(asked_of(passes)) < len(passes) / 4
    # Where it found nothing worth a row, it is asked again after one token; where it is not asked, several are decoded.
    alone = [one for one in rounds if not one.drafted]
    assert {len(one.tokens) for one in alone if one.draft_passes} == {1}
    assert max(len(one.tokens) for one in alone if not one.draft_passes) > 1


def test_rounds_are_counted_by_whether_the_draft_ran():
    rounds = first_text(LLAMA_AUTO_LONG, "random", PROMPT, 150, 1)
    counts = count_speculation(rounds, 150, num_spec_tokens=LLAMA_AUTO_LONG.method.num_draft_tokens)
    assert all(counts.rounds_by_kind[kind] for kind in ("plain", "copied", "drafted"))


def test_a_draft_that_is_tried_again_catches_up_in_chunks():
    rounds = passes_of(first_text(LLAMA_AUTO_LONG, "adversarial", LONG_PROMPT, MANY, 1, **SAMPLINGS["T=1"]))
    checked = 0
    for before, now in itertools.pairwise(asked_of(rounds)):
        behind = sum(len(emitted.tokens) for emitted in rounds[before:now])
        # What was accepted of the last chain it has already, but for that chain's last token.
        least = -(-(behind - rounds[before].accepted) // SYNC_ROWS)
        assert least <= rounds[now].draft_passes <= -(-behind // SYNC_ROWS) + LENGTH - 1
        checked += behind > 2 * SYNC_ROWS
    assert checked


def test_a_perfect_draft_is_asked_every_round():
    rounds = first_text(LLAMA_AUTO_LONG, "copy", PROMPT, 120, 1)
    own = [emitted for emitted in rounds[:-1] if emitted.draft_passes]
    assert len(own) > 0.8 * len(rounds)
    # What copies add below the draft's own nodes may be wrong.
    assert all(emitted.accepted for emitted in own[2:])
    assert sum(len(emitted.tokens) for emitted in rounds) / len(rounds) > 2.5


def test_a_sure_draft_writes_chains_of_full_length():
    params = ModelParams(counting(), counting())
    rounds = first_text(LLAMA_AUTO_LONG, "copy", count_on(0, 20), 6 * (LENGTH + 1), 0, params)
    assert tokens_of(rounds)[: 6 * (LENGTH + 1)] == count_on(20, 6 * (LENGTH + 1))
    assert [emitted.accepted for emitted in rounds[:-1]] == [emitted.depth for emitted in rounds[:-1]]
    # It has to prove itself for three rounds.
    full = [(emitted.accepted, emitted.draft_passes) for emitted in rounds[3:-1]]
    assert len(full) >= 3 and set(full) == {(LENGTH, LENGTH)}


def test_where_the_text_repeats_itself_it_is_copied_and_the_draft_rests():
    """A target that counts, over and over: 101 tokens, then the same again."""
    params = ModelParams(counting(), params_of(LLAMA_AUTO_LONG, "adversarial").draft)
    rounds = run(engine_of(LLAMA_AUTO_LONG), params, count_on(0, 110), 100)
    assert tokens_of(rounds) == count_on(110, 100)
    copied = [emitted for emitted in rounds if emitted.drafted and not emitted.draft_passes]
    assert len(copied) > len(rounds) / 2 and len(rounds) < 25


def test_a_wrong_turn_and_the_way_back():
    """The target jumps after some tokens, the draft does not: chains are cut there, and go on."""
    wrong = (15, 40, 70)
    params = ModelParams(counting(wrong), counting())
    prompt = count_on(0, 5)
    rounds = first_text(LLAMA_AUTO_LONG, "copy", prompt, 90, 0, params)
    assert tokens_of(rounds)[:90] == tokens_of(plain("llama", prompt, 90, params=counting(wrong)))
    assert sum(emitted.accepted for emitted in rounds) > 60


@pytest.mark.parametrize("case", [LLAMA_AUTO, Case("llama", 1, "fed", LLAMA_AUTO.method)], ids=case_id)
def test_a_draft_that_rests_proposes_and_learns_without_its_model(case):
    """As the program with the model does where no draft is worth its price."""
    steps = Steps(case, "random", PROMPT * 2, 1)
    drafter, copied = steps.runner.drafter, 0
    for _ in range(12):
        steps.step()
        state, verified = jax.tree.map(jnp.array, (steps.state.draft, steps.state.verified))
        drafter.rest(True)
        given = verified, steps.state.target.history, steps.request, drafter.operands
        expected, batch = drafter._draft(steps.params.draft, jax.tree.map(jnp.array, state), *given)
        _, found, rested = drafter.draft(steps.params, steps.state.target, state, verified, steps.request)
        drafter.rest(False)
        assert found.sequence is state.sequence
        sizes = [None if one.tree is None else one.tree.size for one in (found, expected)]
        found, expected = (dataclasses.replace(one, sequence=None, tree=None) for one in (found, expected))
        given, wanted = (jax.tree.leaves(one) for one in ((rested, found, sizes[0]), (batch, expected, sizes[1])))
        for one, other in zip(given, wanted, strict=True):
            np.testing.assert_array_equal(one, other)
        copied += int(rested.batch.count) > 1
    assert copied


# The whole context


@pytest.mark.parametrize("case", [LLAMA_AUTO, LLAMA_AUTO_LONG], ids=case_id)
def test_the_last_token_of_the_context_can_be_decoded(case):
    """Down to the last slot of both caches, also by a draft that has to catch up there."""
    engine = engine_of(case)
    prompt = (LONG_PROMPT + PROMPT)[:90]
    room = engine.max_context - len(prompt)
    for draft, sampling in (("copy", "greedy"), ("first layer", "T=1"), ("random", "T=1"), ("constant", "greedy")):
        expected = tokens_of(plain(case.family, prompt, room, 1, **SAMPLINGS[sampling]))
        assert tokens_of(decode(case, prompt, room, draft, 1, **SAMPLINGS[sampling])) == expected
    prompt = (prompt * 5)[: engine.max_context - 1]
    assert tokens_of(decode(case, prompt, 1, "copy", 1)) == tokens_of(plain(case.family, prompt, 1, 1))


# Without a draft


@pytest.mark.thorough
def test_without_a_draft_it_is_prompt_lookup():
    """Round by round: what is drafted, accepted and written."""
    cases = Case("llama", 1, "none", Auto()), LLAMA_LOOKUP
    # Engines that learned nothing from the texts of other tests.
    engines, params = [engine_of.__wrapped__(case) for case in cases], params_of(LLAMA_LOOKUP, "copy")
    engines[0].runner.timer = None  # with one, the first token waits for no copies
    for prompt, sampling in ((LONG_PROMPT, "greedy"), (PROMPT, "T=1"), (LONG_PROMPT, "cuts")):
        rounds, others = (run(engine, params, prompt, 60, seed=3, **SAMPLINGS[sampling]) for engine in engines)
        assert rounds == others
    assert any(emitted.drafted for emitted in rounds) and not any(emitted.draft_passes for emitted in rounds)


@pytest.mark.thorough
def test_without_a_draft_given_figures_count_too():
    """Rows that cost a thousand passes are never worth it."""
    case = Case("llama", 1, "none", Auto(num_draft_tokens=1, pass_cost=(1.0, 1000.0)))
    rounds = decode(case, [1, 2, 3] * 12, 30, logit_bias={1: 50.0, 2: 50.0, 3: 50.0})
    assert not any(emitted.drafted for emitted in rounds)


# Figures


def test_settings_that_make_no_sense():
    assert Auto().length == LONGEST_CHAIN and Auto(num_draft_tokens=4).length == 4
    assert Auto(pass_cost=[1, 1.5]).pass_cost == (1, 1.5)
    for settings, message in (
        ({"num_draft_tokens": 0}, "num_draft_tokens must be at least 1"),
        ({"num_draft_tokens": 3, "length": 4}, "length must be at most 3"),
        ({"length": 0}, "length"),
        ({"ngram": 0}, "ngram"),
        ({"candidates": 65}, "candidates"),
        ({"draft_cost": -0.1}, "draft_cost must be a time relative to a one-row pass, at least 0, got -0.1"),
        ({"draft_cost": True}, "draft_cost"),
        ({"round_cost": float("nan")}, "round_cost"),
        ({"pass_cost": (1, "2")}, "pass_cost"),
        ({"pass_cost": (1, 0)}, "pass_cost must be above 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            Auto(**settings)


def test_the_report_says_what_the_choices_rest_on():
    method = Auto(num_draft_tokens=3, draft_cost=0.125, pass_cost=(1.0, 1.25, 1.5, 2.0), round_cost=0.25)
    known = method.costs(models_of(LLAMA_AUTO)).report()
    figures = {"figures": "given", "pass_cost": [1.0, 1.25, 1.5, 2.0], "round_cost": 0.25}
    assert known == figures | {"draft_cost": 0.125, "draft_overhead": 0.0}
    assert json.loads(json.dumps(known)) == known
    assert method.costs(models_of(LLAMA_LOOKUP)).report() == figures
    # Nothing given: built-in figures, and an estimate by the weights.
    models = models_of(LLAMA_AUTO)
    costs = Auto().costs(models)
    np.testing.assert_allclose(costs.passes, pass_costs(models.target, 16))
    assert costs.draft == pytest.approx(relative_draft_cost(*models)) and costs.source == "built in"


ALL_GIVEN = {"draft_cost": 0.1, "pass_cost": (1.0, 1.2), "round_cost": 0.2}


def figures_of(method, models):
    """Draft cost, cost of two rows, cost of a round, and where they come from."""
    costs = method.costs(models)
    return float(costs.draft), float(costs.passes[1]), float(costs.round), costs.source


@pytest.mark.parametrize("name", ALL_GIVEN)
def test_a_given_figure_replaces_no_other_one(name):
    models = models_of(LLAMA_AUTO)
    usual = dict(zip(ALL_GIVEN, figures_of(Auto(), models), strict=False))
    expected = usual | {name: 1.2 if name == "pass_cost" else ALL_GIVEN[name]}
    assert figures_of(Auto(**{name: ALL_GIVEN[name]}), models) == (*expected.values(), "given, rest built in")
    assert figures_of(Auto(round_cost=0), models)[2:] == (0.0, "given, rest built in")


def test_what_a_draft_costs_says_nothing_where_there_is_none():
    assert figures_of(Auto(**ALL_GIVEN), models_of(LLAMA_AUTO)) == (0.1, 1.2, 0.2, "given")
    two = Auto(pass_cost=(1.0, 1.2), round_cost=0.2)
    assert figures_of(two, models_of(LLAMA_LOOKUP)) == (0.0, 1.2, 0.2, "given")
    assert figures_of(Auto(draft_cost=0.1), models_of(LLAMA_LOOKUP))[3] == "built in"
