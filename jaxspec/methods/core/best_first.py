"""Drafting by best-first search: deterministic trees, whose output `match` keeps equal to plain decoding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.methods.core.draft import DraftSide, catch_up
from jaxspec.methods.core.expand import expand
from jaxspec.methods.core.path_history import PathHistory
from jaxspec.methods.core.proposals import Propose
from jaxspec.methods.core.runner import outcome_shapes
from jaxspec.methods.core.verify import Draft, Outcome
from jaxspec.models.kv_cache import KVCache, commit_path
from jaxspec.models.params import Params
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.program import Program
from jaxspec.sampling.processors import History
from jaxspec.sampling.request import Request
from jaxspec.tree.grow import is_complete, plant
from jaxspec.tree.reroot import follow, pending_tokens
from jaxspec.tree.select import select_batch
from jaxspec.tree.tree import Batch, Tree, init_tree


@struct.dataclass
class BestFirstState:
    """The draft's cache and the tree of the last round, whose nodes lie in the cache's window."""

    cache: KVCache
    tree: Tree


class BestFirstDrafter:
    """Grows a fresh tree each round; see `pair.Drafter`."""

    def __init__(
        self,
        placement: Placement,
        slots: int,
        propose: Propose,
        *,
        rows: int,
        width: int,
        branch: int,
        depth: int,
        least: float,
        steps: int,
    ):
        """Declare the programs.

        Args:
          placement: the draft.
          slots: capacity of its cache.
          propose: turns logits into children.
          rows: bs of the batch, root included.
          width: leaves evaluated in one draft pass.
          branch: k, proposals per node.
          depth: most draft passes, and so the deepest token.
          least: score below which a leaf is not evaluated; -inf for no bound.
          steps: P.
        """
        self._side = DraftSide(placement, slots)
        capacity = tree_rows(width, depth)
        state = BestFirstState(
            self._side.state, placement.replicated(jax.eval_shape(lambda: init_tree(capacity, branch)))
        )
        batch = placement.array((rows,), jnp.int32)
        scalar = placement.array((), jnp.int32)
        self.drafted = Draft(Batch(batch, batch, batch, scalar), scalar)

        def begin(cache: KVCache) -> BestFirstState:
            return BestFirstState(cache, init_tree(capacity, branch))

        def draft(params, state, outcome, history, request):
            cache, tree, passes = grow_tree(
                params, placement, state, outcome, history, request, propose,
                rows=rows, width=width, depth=depth, least=least,
            )  # fmt: skip
            return BestFirstState(cache, tree), Draft(select_batch(tree, rows), passes)

        plan = placement.plan
        self._begin = Program("draft begin", begin, plan, [self._side.state], state, donate=[0])
        args = [placement.params(), state, outcome_shapes(placement, steps), placement.history(), placement.request()]
        self._draft = Program("draft", draft, plan, args, (state, self.drafted), donate=[1])
        self.programs = (*self._side.programs, self._begin, self._draft)

    def start(self, state: BestFirstState | None) -> BestFirstState:
        """See `Drafter.start`."""
        return self._begin(self._side.start(None if state is None else state.cache))

    def prefill(self, params: Params, state: BestFirstState, tokens: np.ndarray) -> BestFirstState:
        """See `Drafter.prefill`."""
        return dataclasses.replace(state, cache=self._side.prefill(params, state.cache, tokens))

    def draft(
        self, params: Params, state: BestFirstState, outcome: Outcome, history: History, request: Request
    ) -> tuple[BestFirstState, Draft]:
        """See `Drafter.draft`."""
        return self._draft(params, state, outcome, history, request)


def tree_rows(width: int, depth: int) -> int:
    """M: the root, and `width` nodes in each further pass."""
    return 1 + width * (depth - 1)


def grow_tree(
    params: Params,
    placement: Placement,
    state: BestFirstState,
    outcome: Outcome,
    history: History,
    request: Request,
    propose: Propose,
    *,
    rows: int,
    width: int,
    depth: int,
    least: float,
) -> tuple[KVCache, Tree, jax.Array]:
    """Keep what the last tree knows of the verified path, plant the new root, grow until the batch is certain.

    Returns:
      The draft's cache with the tree in its window, the tree, and the number of draft passes.
    """
    cfg = placement.cfg
    path, reached = follow(state.tree, outcome.tokens, outcome.count)
    # The bonus token is evaluated anew as root, in the rare case that the old tree had it.
    reached = jnp.minimum(reached, outcome.count)
    with jax.named_scope("draft/commit"):
        cache = commit_path(state.cache, path, reached)
    pending, num_pending = pending_tokens(outcome.tokens, outcome.count, reached)
    with jax.named_scope("draft/root"):
        root, logits, cache = catch_up(params, cfg, cache, pending, num_pending)
    produced = cache.length + 1  # position of the root's children
    nowhere = jnp.zeros((1, state.tree.rows), bool)
    child_token, child_logprob = propose(
        logits, PathHistory(history, state.tree.token, nowhere), request, produced[None]
    )
    tree = plant(state.tree, root, child_token[0], child_logprob[0])

    def go_on(carry: tuple) -> jax.Array:
        _, tree, passes = carry
        return (passes < depth) & ~is_complete(tree, rows - 1, least)

    def grow(carry: tuple) -> tuple:
        cache, tree, passes = carry
        cache, tree = expand(
            params, placement, cache, tree, history, request, propose, width=width, least=least
        )  # fmt: skip
        return cache, tree, passes + 1

    with jax.named_scope("draft/grow"):
        if depth > 1:
            cache, tree, passes = jax.lax.while_loop(go_on, grow, (cache, tree, jnp.int32(1)))
        else:
            passes = jnp.int32(1)
    return cache, tree, passes
