"""Drafting as far as it pays: what is learned, what it is weighed against, and the rounds that come of it.

That the tokens are plain decoding's is `test_exact`'s matter; here it is how often the draft is asked, and for what.
"""

import dataclasses
import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from method_cases import (
    CASES,
    LLAMA_AUTO,
    LLAMA_AUTO_LONG,
    LLAMA_LOOKUP,
    LONG_PROMPT,
    PROMPT,
    SAMPLINGS,
    Case,
    Steps,
    arrays,
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
from tiny_pairs import HEAD_IDS, count_on, counting

from jaxspec.errors import ConfigError
from jaxspec.methods.auto.settings import LONGEST_CHAIN, Auto, stream_speeds
from jaxspec.methods.base import Store
from jaxspec.methods.core.cost_model import (
    AGREED,
    CLASSES,
    COPIES,
    EDGES,
    FIXED_DRAFT_COST,
    FORGETTING,
    KINDS,
    OTHERS,
    PRIOR_RATE,
    PRIOR_WEIGHT,
    USUAL_KEPT,
    USUAL_RATES,
    AcceptanceStats,
    PlacedCosts,
    class_of,
    init_acceptance,
    pass_costs,
    relative_draft_cost,
    weigh_prospect,
)
from jaxspec.methods.core.round import STEPS_OF_SMALL, ModelParams
from jaxspec.methods.core.tree_round import FIRST_PATIENCE, LONGEST_PATIENCE, SYNC_ROWS
from jaxspec.methods.specexec import SpecExec
from jaxspec.runtime.mesh import plan_mesh
from jaxspec.stream_events import count_speculation

LENGTH = LLAMA_AUTO_LONG.method.length
AUTO_TP4 = next(case for case in CASES if isinstance(case.method, Auto) and case.degree == 4)
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


def test_classes_part_at_their_edges():
    inside = [0.0, 1e-30, 0.05, *((a + b) / 2 for a, b in itertools.pairwise(EDGES)), 0.99, 1.0]
    classes = np.asarray(class_of(jnp.log(jnp.array(inside)))).tolist()
    assert classes == [0, 0, 0, *range(1, CLASSES - 1), CLASSES - 1, CLASSES - 1]
    assert int(class_of(jnp.float32(-np.inf))) == 0
    assert len(PRIOR_RATE) == CLASSES == len(EDGES) + 1


def test_before_anything_is_known_the_prior_holds():
    chance = np.asarray(init_acceptance().rates())
    np.testing.assert_allclose(chance[:AGREED], PRIOR_RATE * 2, rtol=1e-6)
    # A token that a copy proposes, too, is likelier; a copy that the draft contradicts is less likely.
    assert (chance[AGREED:COPIES] > chance[:AGREED]).all() and (0 <= chance).all() and (chance < 1).all()
    alone, contradicted = chance[COPIES:].reshape(2, -1)
    assert (contradicted[1:] < alone[1:]).all() and (np.diff(alone) > 0).all()


def test_what_was_looked_at_counts_and_older_rounds_count_less():
    kind = jnp.array([KINDS - 1, 3, 10, 10, OTHERS + 3, 0], jnp.int32)
    tried = jnp.array([0.0, 1.0, 1.0, 1.0, 0.5, 0.0])
    accepted = jnp.array([False, True, True, False, False, False])
    stats = init_acceptance().update(kind, tried, accepted)
    expected = np.zeros((2, KINDS))
    expected[0, [3, 10, OTHERS + 3]] = 1, 2, 0.5
    expected[1, [3, 10]] = 1, 1
    np.testing.assert_array_equal(np.stack([stats.tried, stats.accepted]), expected)
    at_ten = (1 + PRIOR_WEIGHT * PRIOR_RATE[10]) / (2 + PRIOR_WEIGHT)
    assert float(stats.rates()[10]) == pytest.approx(at_ten)
    # Each accepted token, and the refusal after them, makes what came before count less.
    again = stats.update(kind, tried, accepted)
    np.testing.assert_allclose(np.stack([again.tried, again.accepted]), expected * (1 + FORGETTING**3), rtol=1e-6)


def test_earlier_texts_are_what_a_text_is_drawn_to():
    stats, one, yes = init_acceptance(), jnp.array([4]), jnp.array([True])
    step, following = jax.jit(AcceptanceStats.update), jax.jit(AcceptanceStats.next_text)
    for _ in range(30):
        for number in range(40):
            stats = step(stats, one, yes, yes & (number % 4 > 0))
        stats = following(stats)
    # All of them count, up to a bound, whether the last one drafted or not.
    assert float(stats.rates()[4]) == pytest.approx(0.75, abs=0.02)
    assert float(stats.usual_tried.sum()) == pytest.approx(USUAL_KEPT)
    jax.tree.map(np.testing.assert_array_equal, following(stats), stats)
    # A text of its own is believed after some observations, and forgotten beside the others after it.
    for _ in range(40):
        stats = step(stats, one, yes, ~yes)
    assert float(stats.rates()[4]) < 0.3 < 0.6 < float(following(stats).rates()[4])


def test_greedy_texts_say_nothing_of_sampled_ones():
    one, yes = jnp.array([4]), jnp.array([True])

    @jax.jit
    def step(stats, right):
        stats = stats.note_draft(jnp.int32(1), jnp.int32(1), yes[0]).update(one, yes, right[None])
        return stats.note_outcome(jnp.int32(right), jnp.int32(2))

    def expect(stats, law):
        stats = dataclasses.replace(stats, law=jnp.int32(law))
        return stats, float(stats.rates()[4]), float(stats.usual_draft(jnp.zeros(3))[0])

    stats, unknown = init_acceptance(), expect(init_acceptance(), 0)[1:]
    for law, right in enumerate(([True] * 60, [False] * 60)):
        stats, *expected = expect(stats, law)
        assert tuple(expected) == unknown
        stats = functools.reduce(step, jnp.array(right), stats)
        before, stats = stats.all(), stats.next_text()
        jax.tree.map(lambda kept, new: np.testing.assert_allclose(kept, new, rtol=1e-5), before, stats.all())
    assert expect(stats, 0)[1] > 0.8 > 0.2 > expect(stats, 1)[1] and expect(stats, 0)[2] > 0.5 > expect(stats, 1)[2]


def test_drafts_are_asked_for_what_they_brought_and_more_while_little_is_known():
    costs = PlacedCosts(jnp.array([1.0, 1.4, 1.6, 1.8]), jnp.float32(0.1), jnp.float32(0.05))
    blank, never = jnp.full(2, -jnp.inf), jnp.int32(1 << 20)

    @jax.jit
    def step(stats, verified, counts):
        return stats.note_draft(jnp.int32(2), jnp.int32(1), counts).note_outcome(jnp.int32(1), verified)

    def note(stats, drafts, verified):
        for _ in range(drafts):
            stats = step(stats, jnp.int32(verified), jnp.bool_(True))
        return stats

    def pays(stats, rate=0.5):
        chain, passes = rate ** jnp.arange(1, 4), jnp.arange(1, 4)
        return bool(weigh_prospect(blank, chain, passes, stats, costs, jnp.int32(0), never).pays)

    # A chain of usual tokens would bring too little, but not by much: drafts are tried, and their record decides.
    fresh = init_acceptance()
    assert pays(fresh) and not pays(fresh, rate=0.2)
    assert pays(note(fresh, 30, 2)) and not pays(note(fresh, 30, 1))
    brought, rows, passes = np.asarray(note(fresh, 400, 2).usual_draft(jnp.zeros(3)))
    assert 0.8 < brought < 1.1 and rows == pytest.approx(2, abs=0.2) and passes == pytest.approx(1, abs=0.1)
    # What a text showed fades with its tokens, but is not lost.
    bad = note(note(fresh, 100, 2).next_text(), 40, 1)
    later = step(bad, jnp.int32(300), jnp.bool_(False))
    assert not pays(bad) and pays(later) and pays(bad.next_text())
    np.testing.assert_allclose(later.usual_asked[0, :2], [140, 100], atol=1)
    assert not pays(step(note(fresh, 40, 1), jnp.int32(300), jnp.bool_(False)))
    # A draft that was made ahead of nothing has no outcome.
    jax.tree.map(np.testing.assert_array_equal, step(fresh, jnp.int32(0), jnp.bool_(True)), fresh)


def test_a_round_without_a_draft_changes_nothing():
    stats = init_acceptance().update(jnp.array([1, 2]), jnp.ones(2), jnp.array([True, False]))
    same = stats.update(jnp.zeros(4, jnp.int32), jnp.zeros(4), jnp.zeros(4, bool))
    jax.tree.map(np.testing.assert_array_equal, same, stats)


def test_a_change_for_the_worse_is_noticed_within_a_hundred_tokens():
    stats, one, yes, no = init_acceptance(), jnp.array([9]), jnp.array([True]), jnp.array([False])
    step = jax.jit(AcceptanceStats.update)
    for _ in range(400):
        stats = step(stats, one, yes, yes)
    assert float(stats.rates()[9]) > 0.95
    for _ in range(100):
        stats = step(stats, one, yes, no)
    assert float(stats.rates()[9]) < 0.25


# What passes cost


@pytest.mark.parametrize("name", ["xla", "auto"])
def test_measured_figures_go_on_as_the_built_in_ones(name):
    target = dataclasses.replace(models_of(LLAMA_AUTO).target, plan=plan_mesh(1, kernels=name))
    built_in = pass_costs(target, 12)
    assert built_in[0] == 1.0 and (np.diff(built_in) >= 0).all() and built_in[7] == pytest.approx(1.8)
    got = pass_costs(target, 12, (1.0, 1.5, 1.75))
    np.testing.assert_allclose(got, [1.0, 1.5, 1.75, *(built_in[3:] * 1.75 / built_in[2])])
    np.testing.assert_allclose(pass_costs(target, 2, (1.0, 1.5, 1.75)), [1.0, 1.5])
    np.testing.assert_allclose(pass_costs(target, 12, (1.0,)), built_in / built_in[0])


def test_a_draft_pass_costs_what_it_reads():
    """A layer has 19392 numbers, its norms among them; the target two of them, a norm and a head of 101 rows of 48."""
    layer, norm, row = 19392, 48, 48
    shared, same, none = (models_of(Case("llama", 1, geometry, None)) for geometry in ("shared", "same", "none"))
    target = 2 * layer + norm + 101 * row
    small = layer + norm + len(HEAD_IDS) * row
    assert relative_draft_cost(*shared) == pytest.approx(small / target + FIXED_DRAFT_COST)
    assert relative_draft_cost(*same) == pytest.approx(1 + FIXED_DRAFT_COST)
    # The embedding is the head here, of the target and of a draft that has all of its rows.
    tied = models_of(Case("llama-tied", 1, "layer", None))
    assert relative_draft_cost(*tied) == pytest.approx((layer + norm + 101 * row) / target + FIXED_DRAFT_COST)
    assert none.draft is None


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


# The draft's cache


def assert_draft_cache(steps):
    """The committed prefix is that of a fresh prefill of the verified text."""
    cache = steps.caches()["draft"]
    length = int(cache.length)
    assert length <= len(steps.text)
    fresh = steps.prefilled([*steps.text, 0]).draft.sequence.cache
    for one, other in zip(arrays(cache), arrays(fresh), strict=True):
        np.testing.assert_allclose(one[:, :length], other[:, :length], rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("case", [LLAMA_AUTO, LLAMA_AUTO_LONG, AUTO_TP4], ids=case_id)
def test_the_drafts_cache_is_that_of_the_verified_text(case):
    for index, draft in enumerate(("copy", "first layer", "random", "constant")):
        for sampling in ("greedy", "T=1"):
            steps = Steps(case, draft, (PROMPT, LONG_PROMPT)[index % 2], index, **SAMPLINGS[sampling])
            for _ in range(10):
                known = len(steps.text)
                steps.step()
                # Up to the root where it was asked, else where it stopped.
                length = int(steps.caches()["draft"].length)
                assert (length == known - 1) if int(steps.state.draft.idle) == 0 else (length < known)
            assert_draft_cache(steps)


def test_the_drafts_cache_after_long_rests():
    steps = Steps(LLAMA_AUTO_LONG, "adversarial", LONG_PROMPT, 1, temperature=1.0)
    longest = caught_up = 0
    while len(steps.text) < 300:
        idle, known = int(steps.state.draft.idle), len(steps.text)
        lag = known - int(steps.caches()["draft"].length)
        steps.step()
        if int(steps.state.draft.idle) == 0 and lag > SYNC_ROWS:
            assert int(steps.caches()["draft"].length) == known - 1
            assert_draft_cache(steps)
            caught_up += 1
        longest = max(longest, idle)
    assert longest > 3 * FIRST_PATIENCE and caught_up
    assert_draft_cache(steps)


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
    cases = Case("llama", 1, "none", Auto(round_cost=0)), LLAMA_LOOKUP
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


def test_what_a_draft_costs_says_nothing_where_there_is_none():
    assert figures_of(Auto(**ALL_GIVEN), models_of(LLAMA_AUTO)) == (0.1, 1.2, 0.2, "given")
    two = Auto(pass_cost=(1.0, 1.2), round_cost=0.2)
    assert figures_of(two, models_of(LLAMA_LOOKUP)) == (0.0, 1.2, 0.2, "given")
    assert figures_of(Auto(draft_cost=0.1), models_of(LLAMA_LOOKUP))[3] == "built in"
