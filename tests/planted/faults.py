"""Planted faults: mistakes that a change of the code could make, and the test of `.ci/run` that must find each.

Each fault replaces one function of the package by a version with one mistake, in every module that has imported it.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.methods.core import round
from jaxspec.models import kv_cache, layer, rope, transformer
from jaxspec.sampling import accept, choose
from jaxspec.tree import reroot, tree


class Fault(NamedTuple):
    """A mistake.

    Attributes:
      mistake: what goes wrong, for docs/testing.md.
      owner: module or class of the function.
      name: of the function.
      make: from the right function to the wrong one.
      found_by: id of the test that must fail.
    """

    mistake: str
    owner: object
    name: str
    make: Callable[[Callable], Callable]
    found_by: str


@contextlib.contextmanager
def planted(fault):
    """Within, a function is replaced by its wrong version wherever the package has a name for it."""
    right = getattr(fault.owner, fault.name)
    wrong = fault.make(right)
    setattr(fault.owner, fault.name, wrong)
    _replace(right, wrong)
    try:
        yield
    finally:
        # Also in modules that were imported meanwhile.
        setattr(fault.owner, fault.name, right)
        _replace(wrong, right)


def _replace(old, new):
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "jaxspec":
            for key, value in list(vars(module).items()):
                if value is old:
                    setattr(module, key, new)


def every_earlier_row(right):
    def ancestor_matrix(parent, depth):
        return jnp.tril(jnp.ones((parent.shape[0], parent.shape[0]), bool))

    return ancestor_matrix


def pads_are_children_of_the_root(right):
    def children_mask(batch, row):
        rows = jnp.arange(batch.rows)
        return right(batch, row) | ((row == 0) & (rows > 0) & (rows == batch.parent))

    return children_mask


def one_row_too_few(right):
    return lambda cache, slots, count, window: right(cache, slots, count - 1, window)


def nothing_moves(right):
    return lambda cache, slots, window, count=None: cache


def order_of_the_checkpoint(right):
    return lambda rope, head_dim, neighbours: None


def grows_within_the_pass(right):
    return lambda cfg, position: right(cfg, position - position[0])


def window_order_stays(right):
    def reroot(tree, tokens, count, **options):
        moved = right(tree, tokens, count, **options)
        return dataclasses.replace(moved, order=jnp.arange(moved.order.shape[0], dtype=jnp.int32))

    return reroot


def one_pending_token(right):
    def pending_tokens(tokens, count, reached):
        pending, number = right(tokens, count, reached)
        return jnp.roll(pending, 1 - number), jnp.minimum(number, 1)

    return pending_tokens


def neighbours_share_noise(right):
    return lambda key, positions, vocab, draw=0: right(key, positions // 2 * 2, vocab, draw)


def penalties_see_the_prefix(right):
    def walk(decide, history, *rest):
        return right(lambda row, _: decide(row, history.row), history, *rest)

    return walk


def counts_are_not_cut(right):
    def cut(self, count):
        return dataclasses.replace(self, tokens=self.tokens[:count], logprobs=self.logprobs[:count])

    return cut


def rows_are_positions(right):
    def forward(params, cfg, token, position, *rest, **options):
        return right(params, cfg, token, position[:1] + jnp.arange(token.shape[0]), *rest, **options)

    return forward


def the_draft_judges_itself(right):
    def rejection_rule(logits, batch, draft_logprob, *args, **options):
        def own(row):
            return jax.lax.dynamic_slice_in_dim(draft_logprob, jnp.minimum(row, draft_logprob.shape[0] - 1), 1)

        return right(own, batch, draft_logprob, *args, **options)

    return rejection_rule


def parents_may_be_missing(right):
    def pack_best(root, candidates, rows):
        # Of two candidates the later one first: children before their parents.
        score = candidates.score + 1e-3 * candidates.depth
        return right(root, dataclasses.replace(candidates, score=score), rows)

    return pack_best


SEAM = "tests/methods/test_verify_seam.py::test_any_tree_gives_the_tokens_of_plain_decoding"
GOLDEN = "tests/checkpoint/test_family_golden.py::test_logits_from_both_formats"
FAULTS = {
    "wrong tree mask": Fault(
        "a row of a tree sees every earlier row, not only its ancestors",
        tree, "ancestor_matrix", every_earlier_row, f"{SEAM}[llama-1-10-False-greedy]",
    ),
    "pad accepted": Fault(
        "an unused row of a batch is accepted as a token",
        accept, "children_mask", pads_are_children_of_the_root, f"{SEAM}[llama-1-10-False-greedy]",
    ),
    "commit off by one": Fault(
        "one row too few joins the prefix of the cache",
        kv_cache, "commit_path", one_row_too_few, f"{SEAM}[qwen3-1-10-False-greedy]",
    ),
    "row not moved": Fault(
        "keys and values of accepted rows stay where the tree had them",
        kv_cache, "permute_window", nothing_moves, f"{SEAM}[qwen2-1-10-False-T=1]",
    ),
    "wrong position": Fault(
        "the rotary position of a row is its place in the batch, not its depth",
        transformer, "forward_with_states", rows_are_positions, f"{SEAM}[mistral-1-10-False-greedy]",
    ),
    "penalties of the prefix": Fault(
        "penalties do not count the tokens on the path to a row",
        accept, "walk", penalties_see_the_prefix, f"{SEAM}[llama-1-10-False-penalties]",
    ),
    "noise reused": Fault(
        "two neighbouring positions draw with the same noise",
        choose, "gumbel_rows", neighbours_share_noise,
        "tests/sampling/test_noise.py::test_independent_across_positions_and_ids",
    ),
    "draft judges itself": Fault(
        "a drafted token is verified against the draft's distribution",
        accept, "rejection_rule", the_draft_judges_itself,
        "tests/sampling/test_accept_law.py::test_joint_law_of_the_first_tokens[chain-all]",
    ),
    "stale cache after re-rooting": Fault(
        "the draft's cache keeps the old order when its tree gets a new root",
        reroot, "reroot", window_order_stays,
        "tests/tree/test_reroot.py::test_the_cache_holds_the_verified_text_after_any_number_of_rounds",
    ),
    "token not caught up": Fault(
        "the draft runs the new root, but not the accepted leaf before it",
        tree, "pending_tokens", one_pending_token,
        "tests/methods/test_draft_cache.py::test_caches_equal_a_fresh_prefill_of_the_verified_text",
    ),
    "child without its parent": Fault(
        "a batch is not closed under parents",
        tree, "pack_best", parents_may_be_missing,
        "tests/tree/test_select.py::test_batches_are_the_best_proposals",
    ),
    "counted after the stop": Fault(
        "drafted tokens after the end of the text are counted",
        round.StepOutput, "cut", counts_are_not_cut,
        "tests/test_metrics.py::test_a_cut_round_keeps_what_was_drafted_for_the_kept_tokens",
    ),
    "rotary pairs apart": Fault(
        "heads of which a part turns keep the checkpoint's order",
        rope, "rotary_order", order_of_the_checkpoint, f"{GOLDEN}[glm4]",
    ),
    "queries do not grow": Fault(
        "the factor of a query goes by its place in the batch, not by its position",
        layer, "query_factors", grows_within_the_pass, f"{GOLDEN}[ministral3]",
    ),
}  # fmt: skip
