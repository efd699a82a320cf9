"""EXPAND: one draft pass over the best leaves of a tree, whose keys and values go behind the tree's own."""

import jax

from jaxspec.methods.core.path_history import PathHistory
from jaxspec.methods.core.proposals import Propose
from jaxspec.models.kv_cache import KVCache
from jaxspec.models.params import Params
from jaxspec.models.transformer import forward, vocab_logits
from jaxspec.runtime.placement import Placement
from jaxspec.sampling.processors import History
from jaxspec.sampling.request import Request
from jaxspec.tree.grow import add_rows, pick_leaves, picked_mask
from jaxspec.tree.tree import Tree


def expand(
    params: Params,
    placement: Placement,
    cache: KVCache,
    tree: Tree,
    history: History,
    request: Request,
    propose: Propose,
    *,
    width: int,
    least: float,
) -> tuple[KVCache, Tree]:
    """Evaluate the `width` best leaves that score at least `least`; `tree.size + width` must not exceed M.

    Args:
      params: the draft's.
      placement: the draft.
      cache: its prefix holds the verified text without the root, its window the tree.
      tree: its root is evaluated.
      history: tokens of the verified text, the root included.
      request: processors and seed.
      propose: turns logits into children.
      width: w.
      least: -inf for no bound.
    """
    picked = pick_leaves(tree, width, least)
    mask = picked_mask(tree, picked)
    # The rows see themselves, and are not in the tree yet.
    token = jax.lax.dynamic_update_slice(tree.token, picked.token, (tree.size,))
    slot_depth = jax.lax.dynamic_update_slice(tree.depth, picked.depth, (tree.size,))
    hidden, cache = forward(
        params, placement.cfg, picked.token, cache.length + picked.depth, cache, mask,
        window_position=cache.length + slot_depth, offset=tree.size,
    )  # fmt: skip
    paths = PathHistory(history, token, mask.at[:, 0].set(False))
    produced = cache.length + 1 + picked.depth
    child_token, child_logprob = propose(vocab_logits(params, hidden), paths, request, produced)
    return cache, add_rows(tree, picked, mask, child_token, child_logprob)
