"""The programs of the tree drafter: a tree is grown from every source, as far as it is certain or pays.

Longer than 400 lines because what is weighed and what is grown are one program.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.methods.core.copies import (
    Copies,
    CopySettings,
    Nodes,
    Text,
    Watch,
    concatenate,
    find_copies,
    join,
    learn,
    least_match,
    no_nodes,
    path_terms,
    proposal_hashes,
)
from jaxspec.methods.core.cost_model import (
    AGREED,
    OTHERS,
    AcceptanceStats,
    PlacedCosts,
    Prospect,
    class_of,
    keep_best,
    weigh_prospect,
)
from jaxspec.methods.core.draft_passes import (
    DraftModel,
    Grown,
    Rows,
    Unfed,
    expand,
    feed,
    feed_block,
    plant_children,
    run_root,
    run_verified,
)
from jaxspec.methods.core.round import TRUNCATED
from jaxspec.methods.core.sequence import SequenceState
from jaxspec.methods.core.verify import Draft
from jaxspec.models.kv_cache import KVCache, commit_path, commit_rows
from jaxspec.models.transformer import forward
from jaxspec.pytree import pytree
from jaxspec.runtime.placement import Placement
from jaxspec.sampling.accept import Verified
from jaxspec.sampling.processors import History
from jaxspec.tree.table import num_prefixes
from jaxspec.tree.tree import (
    Batch,
    Candidates,
    Tree,
    follow,
    init_tree,
    is_complete,
    leaf_scores,
    pack_best,
    proposals,
    root_alone,
    select_batch,
)

# Verified tokens that a draft which was left alone takes in one pass when it is asked again.
SYNC_ROWS = 16
# Cost of a draft pass of a model that rests: none of its tokens is worth it.
NEVER = 1e9
# Tokens decoded without the draft model before it is tried again, though it seemed not to pay: the first time. Each
# further time that it is tried for nothing doubles the number.
FIRST_PATIENCE, LONGEST_PATIENCE = 32, 1024


@dataclasses.dataclass(frozen=True)
class TreeSettings:
    """Limits of a draft.

    Attributes:
      num_rows: bs, rows of a batch, the root included.
      width: leaves that one draft pass evaluates; `branch` (k) children are proposed below each node.
      depth: most draft passes, so that no token of the model lies deeper.
      min_score: leaves that score below it are not evaluated, -inf for no bound.
      copies: what is copied of earlier text; None for nothing. Where something is, scores are corrected by what became
        of earlier ones; else they are the draft's own.
      weighs: whether only what pays is drafted, copies included; else as much as the batch holds.
      places: places of a block that are proposed for, of a draft that fills all of them in one pass; 0 for others. Each
        has `branch` (k) tokens.
    """

    num_rows: int
    width: int = 1
    branch: int = 1
    depth: int = 1
    min_score: float = -math.inf
    copies: CopySettings | None = None
    weighs: bool = False
    places: int = 0

    @property
    def tree_rows(self) -> int:
        """M, see `tree_rows`."""
        return tree_rows(self.width, self.depth)

    @property
    def proposals(self) -> int:
        """Most tokens that a draft model proposes in a round, of which a batch is chosen."""
        if self.places:
            return num_prefixes(self.places, self.branch, self.num_rows - 1)
        return self.tree_rows * self.branch


def tree_rows(width: int, depth: int) -> int:
    """M: the root, and `width` nodes in each further pass."""
    return 1 + width * (depth - 1)


@pytree
class TreeState:
    """State of the drafting half; parts that a drafter has no use for are None."""

    text: Text  # the verified tokens
    sequence: SequenceState | None  # the draft's; its cache may lack the last verified tokens
    # Of the last round; its nodes lie in the cache's window. None for a draft with `unfed`, which keeps none of them.
    tree: Tree | None
    stats: AcceptanceStats | None
    nodes: Nodes | None  # of the last round
    idle: Array  # int32 [], tokens since the draft ran
    patience: Array  # int32 [], after how many it is tried again, though it seems not to pay
    unfed: Unfed | None = None  # of a draft that is fed hidden states and weighed


def blank_nodes(settings: TreeSettings) -> Nodes:
    """Nothing proposed, by a model or by copies."""
    assert settings.copies is not None
    return no_nodes(num_observed(settings) + settings.copies.candidates * settings.copies.length)


def num_observed(settings: TreeSettings) -> int:
    """Nodes that are learned from of a model's proposals; those of a block count as tokens and as places."""
    return settings.proposals * (2 if settings.places else 1)


def take_in(
    params: Any, placement: Placement | None, state: TreeState, verified: Verified, masked: int = 0
) -> tuple[TreeState, Array, tuple[Array, Array] | None]:  # fmt: skip
    """Learn from the last round and keep what the last tree knows of the verified path; for one shard.

    Returns the state, the number of rows of the tree that were kept, and of a draft that is fed hidden states what the
    head sees of the root, and the root's own state. Such a draft keeps no rows: they stand on states of its own.
    Where it is weighed, it takes nothing yet, see `feed`. `masked` is that of `run_verified`.
    """
    text, stats, sequence, unfed = state.text.append(verified), state.stats, state.sequence, state.unfed
    if stats is not None and state.nodes is not None:
        stats = learn(stats, state.nodes, verified)
    reached, root = jnp.int32(0), None
    if unfed is not None:
        unfed = unfed.append(verified)
    elif placement is not None and sequence is not None:
        if placement.cfg.features is None:
            assert state.tree is not None
            with jax.named_scope("draft/commit"):
                path, reached = follow(state.tree, verified.tokens, verified.count)
                # The bonus token is evaluated anew as root, in the rare case that the old tree had it.
                reached = jnp.minimum(reached, verified.count)
                cache = commit_path(sequence.cache, path, reached, state.tree.rows)
                sequence = dataclasses.replace(sequence, cache=cache)
        elif placement.cfg.features.kind == "block":
            sequence = feed_block(params, placement.cfg, sequence, verified)
        else:
            hidden, own, sequence = run_verified(params, placement.cfg, sequence, verified, masked)
            root = hidden, own
    return dataclasses.replace(state, text=text, stats=stats, sequence=sequence, unfed=unfed), reached, root


def draft_round(
    model: DraftModel | None, settings: TreeSettings, state: TreeState, verified: Verified, history: History,
    costs: PlacedCosts | None,
) -> tuple[TreeState, Draft]:  # fmt: skip
    """Take in the last round, and propose a batch for the next; for one shard.

    Without a `model` the state has no `sequence`, even where there is one, which rests then.
    """
    placement, params = (None, ()) if model is None else (model.placement, model.params)
    state, reached, root = take_in(params, placement, state, verified)
    if model is not None and costs is None:
        grown, sequence, passes = _search(model, settings, state, verified, history, reached, root)
        batch = select_batch(grown.tree, settings.num_rows)
        sequence = dataclasses.replace(sequence, cache=grown.cache)
        return dataclasses.replace(state, sequence=sequence, tree=grown.tree), Draft(batch, passes)
    copied = find_and_join(settings, state, costs)
    if model is not None and costs is not None:
        return _weigh(model, settings, state, verified, history, costs, copied)
    candidates = copied.candidates
    if costs is not None:
        candidates, _, _ = keep_best(candidates, costs.rounds)
    batch = pack_best(state.text.token[state.text.length - 1], candidates, settings.num_rows)
    return leave(state, verified, copied.nodes), Draft(batch, jnp.int32(0), watch=copied.watch)


def leave(state: TreeState, verified: Verified, nodes: Nodes | None) -> TreeState:
    """The state after a round without the draft model, in which these nodes were proposed."""
    tree = None if state.tree is None else dataclasses.replace(state.tree, size=jnp.int32(0))
    return dataclasses.replace(state, idle=state.idle + verified.count, tree=tree, nodes=nodes)


class Copied(NamedTuple):
    """What is copied in a round."""

    copies: Copies
    candidates: Candidates  # the copies alone; in front, as many proposals that do not exist as a draft may make
    nodes: Nodes
    rates: Array  # of the state's `AcceptanceStats`
    watch: Watch  # for copies that may come


def find_and_join(settings: TreeSettings, state: TreeState, costs: PlacedCosts | None) -> Copied:
    """Copies of earlier text, without a draft's proposals."""
    count = settings.proposals
    zero, none = jnp.zeros(count, jnp.int32), no_nodes(num_observed(settings))
    nothing = Candidates(zero, zero - 1, zero + 1, jnp.full(count, -jnp.inf))
    assert settings.copies is not None and state.stats is not None
    rates = state.stats.rates()
    copies = find_copies(state.text, rates, settings.copies)
    candidates, nodes = join(nothing, none.hash[:count], zero > 0, jnp.bool_(False), copies, rates)
    least = jnp.int32(1) if costs is None else least_match(rates, costs, settings.copies.length)
    watch = Watch(state.text, least, settings.copies.ngram)
    return Copied(copies, candidates, concatenate(none, nodes), rates, watch)


def _search(
    model: DraftModel, settings: TreeSettings, state: TreeState, verified: Verified, history: History, reached: Array,
    taken: tuple[Array, Array] | None,
) -> tuple[Grown, SequenceState, Array]:  # fmt: skip
    """Plant the new root and grow until the best tokens of the batch are certain, or the depth is reached.

    The last result is the number of draft passes, with `TRUNCATED` where the best tokens are not certain. `reached`
    and `taken` are the results of `take_in`.
    """
    assert state.sequence is not None
    budget, depth, min_score = settings.num_rows - 1, settings.depth, settings.min_score
    tree = init_tree(settings.tree_rows, settings.branch)
    root = run_root(model.params, model.placement.cfg, state.sequence, verified, reached, taken)
    tree, _ = plant_children(model, tree, root.token, root.hidden, history, root.produced)
    states = spread_states(root.states, tree)

    def go_on(carry: tuple) -> Array:
        grown, passes = carry
        return (passes < depth) & ~is_complete(grown.tree, budget, min_score)

    def grow(carry: tuple) -> tuple:
        grown, passes = carry
        return expand(model, grown, history, root.produced, width=settings.width, min_score=min_score), passes + 1

    with jax.named_scope("draft/grow"):
        # A chain is complete after its last pass and never before, unless it stops at an improbable token.
        start = Grown(root.sequence.cache, tree, states), jnp.int32(1)
        chain = settings.width == 1 and settings.branch == 1 and min_score == -math.inf and budget >= depth
        if depth > 1 and chain and not model.placement.plan.kernels.takes_cpu_forms:
            grown, passes = jax.lax.fori_loop(1, depth, lambda _, carry: grow(carry), start)
        elif depth > 1:
            # Accelerators loop until data says so, too: a pass that is spared saves more than the wait costs.
            grown, passes = jax.lax.while_loop(go_on, grow, start)
        else:
            grown, passes = start
        if not chain:
            passes += jnp.where(is_complete(grown.tree, budget, min_score), 0, TRUNCATED)
    return grown, root.sequence, passes


@pytree
class _Weighed:
    """A tree in the making, and what follows from the costs."""

    grown: Grown
    passes: Array  # int32 [], of the draft
    candidates: Candidates  # those that are worth their rows
    nodes: Nodes
    value: Array  # float32 [M * k], expected tokens from evaluating each leaf
    goes_on: Array  # bool [], whether a further pass is worth its time


def _weigh(
    model: DraftModel, settings: TreeSettings, state: TreeState, verified: Verified, history: History,
    costs: PlacedCosts, copied: Copied,
) -> tuple[TreeState, Draft]:  # fmt: skip
    """Draft as far as it pays: nothing, copies, or a tree of the model that copies join."""
    text, stats, sequence = state.text, state.stats, state.sequence
    copies, rates, tree = copied.copies, copied.rates, init_tree(settings.tree_rows, settings.branch)
    assert stats is not None and sequence is not None
    num_rows, width, mean = settings.num_rows, settings.width, stats.mean_rate()
    length, idle = jnp.arange(1, settings.depth + 1), state.idle + verified.count
    produced = text.length - text.start
    prospect = weigh_prospect(copied.candidates.score, mean**length, length, stats, costs, idle, state.patience)
    wanted, (alone, _, _) = prospect.wanted, keep_best(copied.candidates, costs.rounds)

    if state.unfed is None:
        (hidden, cache, passes), own = _catch_up(model, sequence.cache, text, wanted), None
    else:
        sequence, unfed, (hidden, own), passes = feed(
            model.params, model.placement.cfg, text, sequence, state.unfed, verified, wanted
        )
        state, cache, passes = dataclasses.replace(state, unfed=unfed), sequence.cache, jnp.where(wanted, passes, 0)
    known = jnp.where(copies.own, copies.hash, 0).reshape(-1)

    def correct(rows: Rows, token: Array, logprob: Array) -> tuple[Array, Array]:
        """Log of the chance that each child is accepted, float32 [w, k], and its kind."""
        terms = jnp.where(rows.sees & (rows.depth > 0)[None], path_terms(rows.token, rows.depth)[None], 0)
        here = terms.sum(axis=1, dtype=jnp.uint32)[:, None] + path_terms(token, rows.child_depth[:, None])
        kind = class_of(logprob) + jnp.where(jnp.arange(token.shape[1]) > 0, OTHERS, 0)
        kind += jnp.where((here[..., None] == known).any(axis=-1), AGREED, 0)
        return jnp.where(logprob > -jnp.inf, jnp.log(rates[kind]), -jnp.inf), kind

    def judge(grown: Grown, passes: Array) -> _Weighed:
        candidates, made = proposals(grown.tree), grown.tree
        hashes, above = proposal_hashes(made)
        assert grown.kind is not None
        # A draft that finds nothing possible is wrong, too: each row's first choice counts.
        first = (jnp.arange(made.rows) < made.size)[:, None] & (jnp.arange(made.branch) == 0)[None]
        exists = (candidates.score > -jnp.inf) | first.reshape(-1)
        nodes = Nodes(hashes, above, candidates.depth, grown.kind.reshape(-1), exists.astype(jnp.float32))
        has_row = (made.child_row >= 0).reshape(-1)
        candidates, others = join(candidates, hashes, has_row, made.size > 0, copies, rates)
        nodes = concatenate(nodes, others)
        # What copies have below each proposal.
        chance, parent = jnp.exp(candidates.score[hashes.size :]), candidates.parent[hashes.size :]
        above = jnp.where(parent >= 0, parent, candidates.score.size)
        covered = jnp.zeros(hashes.shape).at[above].max(chance, mode="drop")
        begun = costs.rounds + costs.draft_overhead
        spent = begun + costs.draft * passes
        candidates, count, gain = keep_best(candidates, spent)
        value = jnp.maximum(jnp.exp(leaf_scores(made)) * mean - covered, 0.0)
        new = jax.lax.top_k(value, width)[0].sum()
        further = begun[jnp.minimum(count + width, num_rows - 1)] + costs.draft * (passes + 1)
        fits = made.size + width <= made.rows
        return _Weighed(grown, passes, candidates, nodes, value, fits & ((gain + new) / further > gain / spent[count]))

    def plant_tree() -> tuple[Tree, Array]:
        planted = plant_children(model, tree, text.token[text.length - 1], hidden, history, produced, correct)
        assert planted[1] is not None
        return planted[0], planted[1]

    planted, kind = jax.lax.cond(wanted, plant_tree, lambda: (tree, tree.child_token))
    start, caught_up = Grown(cache, planted, spread_states(own, tree), kind), jnp.maximum(passes - 1, 0)

    def grow(weighed: _Weighed) -> _Weighed:
        grown = expand(model, weighed.grown, history, produced, width=width, value=weighed.value, correct=correct)
        return judge(grown, weighed.passes + 1)

    def draft() -> tuple[Candidates, Nodes, Array, Array]:
        judged = judge(start, passes)
        return judged.candidates, judged.nodes, judged.value, judged.goes_on

    def draft_nothing() -> tuple[Candidates, Nodes, Array, Array]:
        return alone, copied.nodes, jnp.zeros(tree.rows * tree.branch), jnp.bool_(False)

    with jax.named_scope("draft/grow"):
        weighed = _Weighed(start, passes, *jax.lax.cond(wanted, draft, draft_nothing))
        weighed = jax.lax.while_loop(lambda weighed: weighed.goes_on, grow, weighed)
    root = text.token[text.length - 1]
    batch = pack_wanted(prospect, root, weighed.candidates, num_rows)
    sequence = dataclasses.replace(sequence, cache=weighed.grown.cache)
    kept = None if state.tree is None else weighed.grown.tree
    state = dataclasses.replace(state, sequence=sequence, tree=kept, nodes=weighed.nodes)
    # Drafts in a row lack no tokens that plain rounds decoded.
    state = note_draft(state, prospect, weighed.candidates.score, weighed.passes - caught_up, idle)
    return state, Draft(batch, weighed.passes, watch=copied.watch)


def pack_wanted(prospect: Prospect, root: Array, candidates: Candidates, num_rows: int) -> Batch:
    """The best candidates below `root`, int32 [], where a draft was made or copies pay; else the root alone."""
    # Most rounds that draft nothing are plain because nothing pays: they should not sort empty lists either.
    return jax.lax.cond(
        prospect.wanted | (prospect.num_copied > 0),
        lambda: pack_best(root, candidates, num_rows),
        lambda: root_alone(root, num_rows),
    )


def note_draft(state: TreeState, prospect: Prospect, score: Array, passes: Array, idle: Array) -> TreeState:
    """Remember a draft whose tokens have these scores, float32 [N], and the tokens since the model was asked.

    It says, too, after how many of these the model is asked again for nothing.
    """
    assert state.stats is not None
    backoff = jnp.where(prospect.retry, jnp.minimum(2 * state.patience, LONGEST_PATIENCE), state.patience)
    counts = prospect.wanted & (prospect.num_copied == 0)
    return dataclasses.replace(
        state,
        stats=state.stats.note_draft((score > -jnp.inf).sum(), passes, counts),
        idle=jnp.where(prospect.wanted, 0, idle),
        patience=jnp.where(prospect.pays, FIRST_PATIENCE, backoff),
    )


def spread_states(own: Array | None, tree: Tree) -> Array | None:
    """The root's own state, float32 [1, D], in the first of M rows; None for a draft that is not fed any."""
    return None if own is None else jnp.zeros((tree.rows, own.shape[1])).at[0].set(own[0])


def _catch_up(model: DraftModel, cache: KVCache, text: Text, wanted: Array) -> tuple[Array, KVCache, Array]:
    """Run the verified tokens that the draft's cache lacks, the root last, where `wanted`, bool [].

    Returns what the head sees of the root, float32 [1, D]; the cache, whose window slot 0 is the root; and the number
    of passes.
    """
    cfg = model.placement.cfg
    mask = jnp.tril(jnp.ones((SYNC_ROWS, SYNC_ROWS), bool))

    def run(carry: tuple[Array, KVCache, Array, Array]) -> tuple[Array, KVCache, Array, Array]:
        _, cache, passes, _ = carry
        left = text.length - text.start - cache.length
        count = jnp.minimum(left, SYNC_ROWS)
        token = jax.lax.dynamic_slice_in_dim(text.token, text.start + cache.length, SYNC_ROWS)
        position = cache.length + jnp.arange(SYNC_ROWS, dtype=jnp.int32)
        hidden, cache = forward(model.params, cfg, token, position, cache, mask, active_rows=count)
        last, is_last = jax.lax.dynamic_slice_in_dim(hidden, count - 1, 1), left <= SYNC_ROWS
        return last, commit_rows(cache, count - is_last), passes + 1, ~is_last

    start = jnp.zeros((1, cfg.embed_dim)), cache, jnp.int32(0), wanted
    with jax.named_scope("draft/catch_up"):
        hidden, cache, passes, _ = jax.lax.while_loop(lambda carry: carry[3], run, start)
    return hidden, cache, passes
