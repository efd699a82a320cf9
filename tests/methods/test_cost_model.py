"""What is learned of drafts, and what passes cost: the figures that rounds are weighed with."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from method_cases import LLAMA_AUTO, Case, models_of
from tiny_pairs import HEAD_IDS

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
    AcceptanceStats,
    PlacedCosts,
    class_of,
    init_acceptance,
    pass_costs,
    relative_draft_cost,
    weigh_prospect,
)
from jaxspec.runtime.mesh import plan_mesh


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
