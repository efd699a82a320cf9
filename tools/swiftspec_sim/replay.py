"""SwiftSpec's rounds over a recorded table: the scheduler is the library's, only the two models are looked up.

`turn` and `grow` mirror the programs of the same names in `jaxspec.methods.swiftspec.draft_tree`, whose forward passes
became lookups; picking, growing, re-rooting and selecting are the functions of `jaxspec.tree` themselves. A test holds
every counter of every round to those of the real runner.

A proposal without a recorded node gets the log-probabilities of a stand-in (`Trace.stand_ins`), and so do all below it.
It lies off the text, where no token can ever be accepted: what the approximation touches is only which leaves and rows
it competes with. Such proposals are numbered below zero, -1 - (stand-in's proposal), and counted.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.methods.core.round import DraftCounts
from jaxspec.methods.swiftspec.draft_tree import Growth
from jaxspec.methods.swiftspec.settings import SwiftSpec
from jaxspec.tree.grow import add_rows, leaf_scores, pick_leaves, picked_mask, plant
from jaxspec.tree.reroot import reroot
from jaxspec.tree.select import pack_best, proposals
from jaxspec.tree.tree import Tree, init_tree
from swiftspec_sim.trace import UNPROPOSED, Trace


@struct.dataclass
class Table:
    """A trace on the device, padded so that texts of similar length share their compiled functions.

    Attributes:
      node: int32 [N * K], node of each proposal, -1 for none.
      stand_in: int32 [N * K].
      logprob: float32 [N, K].
      truth: int32 [L + P], proposal that each token of the text is.
    """

    node: jax.Array
    stand_in: jax.Array
    logprob: jax.Array
    truth: jax.Array


def make_table(trace: Trace, nodes: int, tokens: int) -> Table:
    """A trace with room for `nodes` nodes and a text of `tokens` tokens."""
    more = nodes - len(trace.parent)
    padding = UNPROPOSED + np.arange(len(trace.text), tokens, dtype=np.int32)

    def pad(array: np.ndarray, fill: float) -> jax.Array:
        return jnp.asarray(np.pad(array, ((0, more), (0, 0)), constant_values=fill))

    return Table(
        node=pad(trace.child_nodes(), -1).reshape(-1),
        stand_in=pad(trace.stand_ins(), 0).reshape(-1),
        logprob=pad(trace.child_logprob, -np.inf),
        truth=jnp.asarray(np.concatenate([trace.truth(), padding])),
    )


@struct.dataclass
class State:
    """Both sides between two rounds.

    Attributes:
      tree: its tokens are proposals.
      root: int32 [], tokens of the text up to the root; -1 before the first turn.
      count: int32 [], tokens that the target has verified after the root.
      passes: int32 [], of the draft since the last turn.
      computed: int32 [], tokens that these ran.
      stood_in: int32 [], how many of these were approximated.
    """

    tree: Tree
    root: jax.Array
    count: jax.Array
    passes: jax.Array
    computed: jax.Array
    stood_in: jax.Array


@struct.dataclass
class RoundCounts:
    """What a round did, int32 [] each.

    Attributes:
      verified: new tokens, the bonus included.
      drafted: rows of the batch without the root.
      stood_in: draft tokens that were approximated, of those in `draft.computed` but for the catching up.
      draft: the counts that the real draft's side reports.
    """

    verified: jax.Array | int
    drafted: jax.Array | int
    stood_in: jax.Array | int
    draft: DraftCounts


def growth_of(method: SwiftSpec, room: int, branch_free: bool = False) -> Growth:
    """How a method's tree grows, with room for `room` passes; its `depth` is 1, for `grow` is told the passes."""
    assert method.branch is not None and method.survivors is not None
    return Growth(
        method.num_rows,
        method.width,
        method.branch,
        1,
        method.survivors,
        room,
        method.reuse,
        method.leaves,
        branch_free,
        method.refill or 0,
        method.refill or 0,
    )


def begin(growth: Growth) -> State:
    """A text of which only the prompt is there: its last token is verified, and nothing is evaluated."""
    zero = jnp.int32(0)
    return State(init_tree(growth.rows, growth.branch), zero - 1, zero + 1, zero, zero, zero)


@functools.partial(jax.jit, static_argnames="growth")
def grow(table: Table, state: State, passes: jax.Array, growth: Growth) -> State:
    """EXPAND `passes` times; see `draft_tree.expand_tree`."""
    carry = (state.tree, state.stood_in)
    tree, stood_in = jax.lax.fori_loop(0, passes, lambda _, c: _expand(table, c[0], c[1], growth.width), carry)
    return dataclasses.replace(
        state, tree=tree, passes=state.passes + passes, stood_in=stood_in,
        computed=state.computed + tree.size - state.tree.size,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames="growth")
def turn(table: Table, state: State, passes: jax.Array, growth: Growth) -> tuple[State, RoundCounts]:
    """REROOT, CATCH_UP, `passes` expansions (where drafting and verifying take turns), SELECT; then the target's walk.

    See `draft_tree.follow_verified` and `draft_tree.choose_batch`.
    """
    tokens = jax.lax.dynamic_slice_in_dim(table.truth, jnp.maximum(state.root, 0), growth.num_rows)
    moved = reroot(state.tree, tokens, state.count, limit=growth.survivors, reuse=growth.reuse)
    root, missed = state.root + state.count, moved.num_pending > 0
    keep = table.logprob.shape[1]
    planted = plant(
        moved.tree,
        tokens[state.count - 1],
        root * keep + jnp.arange(growth.branch, dtype=jnp.int32),
        table.logprob[root, : growth.branch],
    )
    hit_tree, stood_in = moved.tree, state.stood_in
    if growth.branch_free:
        hit_tree, stood_in = _expand(table, moved.tree, stood_in, max(2, growth.width))
        stood_in = jnp.where(missed, state.stood_in, stood_in)
    tree: Tree = jax.tree.map(lambda a, b: jnp.where(missed, a, b), planted, hit_tree)
    exposed = jnp.int32(1) if growth.branch_free else missed.astype(jnp.int32)
    waited = growth.refill if growth.branch_free else missed * growth.refill
    computed = state.computed + jnp.where(missed, moved.num_pending, tree.size - moved.tree.size)
    state_now = State(tree, root, state.count, state.passes + exposed, computed, stood_in)
    state_now = grow(table, state_now, passes + waited, growth)
    tree, stood_in, refills = state_now.tree, state_now.stood_in, jnp.int32(0)
    if not growth.leaves:

        def short(carry: Any) -> jax.Array:
            return (carry[0].size < growth.num_rows) & (leaf_scores(carry[0]).max() > -jnp.inf)

        def refill(carry: Any) -> Any:
            return *_expand(table, carry[0], carry[1], growth.width), carry[2] + 1

        tree, stood_in, refills = jax.lax.while_loop(short, refill, (tree, stood_in, refills))
    candidates = proposals(tree)
    if not growth.leaves:
        evaluated = tree.child_row.reshape(-1) >= 0
        candidates = dataclasses.replace(candidates, score=jnp.where(evaluated, candidates.score, -jnp.inf))
    batch = pack_best(tree.token[0], candidates, growth.num_rows)

    # A row continues the text iff it is the proposal that the text's token is: its number names its whole path.
    truth = table.truth[jnp.clip(root + batch.depth - 1, 0, table.truth.shape[0] - 1)]
    rows = jnp.arange(batch.rows)
    accepted = ((rows > 0) & (rows < batch.count) & (batch.token == truth)).sum(dtype=jnp.int32)
    counts = DraftCounts(
        passes=state_now.passes + refills,
        exposed=exposed + waited + passes + refills,
        computed=state_now.computed + tree.size - state_now.tree.size,
        caught_up=moved.num_pending,
        kept=moved.tree.size,
        committed=moved.committed,
        dropped=state.tree.size - moved.committed - moved.tree.size,
        token_hit=moved.token_hit.astype(jnp.int32),
        evaluated_hit=(moved.num_pending == 0).astype(jnp.int32),
        nodes=tree.size,
    )
    zero = jnp.int32(0)
    result = RoundCounts(accepted + 1, batch.count - 1, stood_in, counts)
    return State(tree, root, accepted + 1, zero, zero, zero), result


def _expand(table: Table, tree: Tree, stood_in: jax.Array, width: int) -> tuple[Tree, jax.Array]:
    """One draft pass over the best leaves; see `expand.expand`."""
    picked = pick_leaves(tree, width)
    mask = picked_mask(tree, picked)
    unknown = picked.token < 0
    proposal = jnp.where(unknown, -1 - picked.token, picked.token)
    node = table.node[proposal]
    unknown |= node < 0
    node = jnp.where(node < 0, table.stand_in[proposal], node)
    child = node[:, None] * table.logprob.shape[1] + jnp.arange(tree.branch, dtype=jnp.int32)
    child = jnp.where(unknown[:, None], -1 - child, child)
    grown = add_rows(tree, picked, mask, child, table.logprob[node, : tree.branch])
    return grown, stood_in + (picked.valid & unknown).sum(dtype=jnp.int32)


def unrecorded(trace: Trace, tree: Tree) -> list[int]:
    """Proposals among a replayed tree's rows that were approximated although their parents are recorded."""
    row = np.asarray(tree.token)[: int(tree.size)]
    row = row[(row >= 0) & (row < UNPROPOSED)]
    return row[trace.child_nodes().reshape(-1)[row] < 0].tolist()
