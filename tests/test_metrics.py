"""Counters, by hand: only emitted tokens count."""

import dataclasses

import pytest

from jaxspec.methods.core.round import DraftCounts, StepOutput
from jaxspec.stream_events import count_draft_tree, count_speculation


def emitted(accepted, drafted, depth, passes=2):
    """A round that accepted `accepted` of `drafted` tokens and adds the bonus token."""
    tokens = tuple(range(accepted + 1))
    return StepOutput(tokens, (0.0,) * len(tokens), accepted, drafted, depth, passes)


ROUNDS = [emitted(2, 4, 3), emitted(0, 4, 2), emitted(3, 3, 3), emitted(0, 0, 0, 1)]


def test_by_hand():
    counts = count_speculation(ROUNDS, 9, num_spec_tokens=4)
    assert counts.num_spec_steps == 4 and counts.num_spec_tokens == 4
    assert counts.num_draft_tokens == 11 and counts.num_accepted_draft_tokens == 5
    assert counts.mean_acceptance_length == pytest.approx(9 / 4)
    assert counts.draft_acceptance_rate == pytest.approx(5 / 11)
    assert counts.acceptance_histogram == (2, 0, 1, 1)
    # Depth 1 was tried three times (the last round drafted nothing) and twice accepted, both times depth 2 as well.
    assert counts.acceptance_by_depth == pytest.approx((2 / 3, 1, 1 / 2))
    assert counts.mean_tree_depth == 2 and counts.mean_tree_size == 11 / 4
    assert counts.budget_used == pytest.approx(11 / 16)
    assert counts.num_draft_passes == 7
    assert counts.rounds_by_kind == {"plain": 0, "copied": 0, "drafted": 4}
    assert counts.per_step_accepted == (2, 0, 3, 0) and counts.per_step_drafted == (4, 4, 3, 0)


@pytest.mark.parametrize("length", range(1, 10))
def test_what_is_not_emitted_is_not_counted(length):
    """A stop may fall on any token of an accepted path, its last accepted one included."""
    counts = count_speculation(ROUNDS, length, num_spec_tokens=4)
    accepted, steps = counts.per_step_accepted, counts.num_spec_steps
    assert steps == [1, 1, 1, 2, 3, 3, 3, 3, 4][length - 1]
    assert accepted[:-1] == (2, 0, 3)[: steps - 1]
    inside = length - sum(a + 1 for a in accepted[:-1])
    assert accepted[-1] == min(inside, [2, 0, 3, 0][steps - 1])
    assert counts.num_accepted_draft_tokens <= counts.num_draft_tokens
    assert length - steps <= sum(accepted) <= length
    histogram = counts.acceptance_histogram
    assert sum(histogram) == steps and sum(n * times for n, times in enumerate(histogram)) == sum(accepted)


def test_a_cut_round_keeps_what_was_drafted_for_the_kept_tokens():
    cut = emitted(5, 9, 7, 3).cut(2)
    assert cut.tokens == (0, 1) and len(cut.logprobs) == 2 and cut.accepted == 2
    assert cut.accepted <= cut.depth <= cut.drafted <= 9
    assert emitted(5, 9, 7, 3).cut(6) == emitted(5, 9, 7, 3)
    # The bonus token alone is cut: everything accepted stays accepted.
    assert emitted(5, 9, 7, 3).cut(5).accepted == 5


TREES = [
    DraftCounts(1, 1, 1, 1, 0, 0, 0, 0, 0, 1),  # a first round: nothing to hit
    DraftCounts(2, 0, 8, 0, 3, 2, 4, 1, 1, 7),
    DraftCounts(3, 1, 9, 1, 0, 3, 5, 1, 0, 4),
    DraftCounts(3, 1, 10, 2, 0, 1, 8, 0, 0, 4),
]


def test_counts_of_a_tree_that_outlives_the_rounds():
    tree = count_draft_tree([TREES])
    assert tree.token_hit_rate == pytest.approx(2 / 3) and tree.evaluated_hit_rate == pytest.approx(1 / 3)
    assert tree.exposed_passes_per_round == pytest.approx(2 / 3)
    assert (tree.tokens_computed, tree.tokens_caught_up) == (28, 4)
    assert (tree.nodes_kept, tree.nodes_committed, tree.nodes_dropped) == (3, 6, 17)
    # Each generation has a first round.
    assert count_draft_tree([TREES, TREES]).token_hit_rate == pytest.approx(2 / 3)
    assert count_draft_tree([TREES[:1]]).token_hit_rate is None


def test_a_tree_is_counted_where_there_is_one_and_up_to_the_stop():
    rounds = [dataclasses.replace(emitted(1, 3, 2), draft=tree) for tree in TREES]
    assert count_speculation(rounds, 8, num_spec_tokens=3).draft_tree == count_draft_tree([TREES])
    assert count_speculation(rounds, 3, num_spec_tokens=3).draft_tree == count_draft_tree([TREES[:2]])
    assert count_speculation(ROUNDS, 9, num_spec_tokens=4).draft_tree is None


def test_without_drafts_there_is_no_rate():
    counts = count_speculation([emitted(0, 0, 0, 0)] * 3, 3, num_spec_tokens=15)
    assert counts.draft_acceptance_rate is None and counts.acceptance_by_depth == ()
    assert counts.mean_acceptance_length == 1 and counts.budget_used == 0
