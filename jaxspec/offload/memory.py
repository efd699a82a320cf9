"""Memory that an answer takes beside the weights, known before anything is compiled: for plans, and for TPUs."""

import math
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec.methods.core.round import Models, round_shapes
from jaxspec.methods.core.runner import Runner
from jaxspec.methods.core.sequence import CHUNKS, plan_chunks
from jaxspec.methods.core.verify import LAZY_HEAD_ROWS
from jaxspec.offload.executor import row_shapes
from jaxspec.runtime.placement import Placement
from jaxspec.sampling.request import request_shapes
from pallas_kernels.linear.blocks import FORMATS

# Arrays of a vocabulary's length that a choice among tokens holds at once: noise, sorted values, their places and sums.
CHOICE_ROWS = 12
# The same for each row of a draft, whose children are ranked.
RANKED_ROWS = 5


class Needs(NamedTuple):
    """Bytes by device.

    Attributes:
      held: caches, trees and texts of an answer, from its first round to its last.
      work: what programs take while they run, an estimate from above.
    """

    held: dict[Any, int]
    work: dict[Any, int]


def answer_needs(
    runner: Runner, models: Models, tokens: int, *, rows: int, path: int, draft_rows: int
) -> Needs:  # fmt: skip
    """Bytes that an answer of up to `tokens` tokens, prompt included, takes on each device.

    `runner` is bound to the models. A target pass has `rows` rows and gives at most
    `path` tokens, a draft pass has `draft_rows`, 0 without a draft model.
    """
    target, draft = models
    passed = (round_shapes(target, path), request_shapes(target), None if draft is None else request_shapes(draft))
    return Needs(bytes_by_device((runner.held, passed)), _work(models, tokens, runner.slots, rows, draft_rows))


def bytes_by_device(tree: Any) -> dict[Any, int]:
    """Bytes of placed shapes on each device that has a part of them."""
    found: dict[Any, int] = {}
    for leaf in jax.tree.leaves(tree):
        nbytes = math.prod(leaf.sharding.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize
        for device in leaf.sharding.device_set:
            found[device] = found.get(device, 0) + nbytes
    return found


def _work(models: Models, tokens: int, slots: int, rows: int, draft_rows: int) -> dict[Any, int]:
    target, draft = models
    chunk = min(max(CHUNKS), slots)
    # Rows between the programs of a pass; those of one chunk come and go while a layer runs.
    prompt = chunk if target.resident_layers is None else sum(plan_chunks(tokens, slots))
    of_prompt = _rows_bytes(target, prompt, windowed=False) + 4 * chunk * target.cfg.embed_dim
    of_batch = _rows_bytes(target, rows, windowed=True) + 4 * rows * target.cfg.embed_dim
    if draft is not None and (features := draft.cfg.features) is not None:
        # The states that the draft is fed, apart and side by side.
        states = 2 * 4 * features.states_dim
        of_prompt, of_batch = of_prompt + prompt * states, of_batch + rows * states
    if (experts := target.cfg.experts) is not None:
        # What experts take, and which of them, waits until their weights are there.
        routed = 4 * target.cfg.embed_dim + 8 * experts.per_token
        of_prompt, of_batch = of_prompt + prompt * routed, of_batch + rows * routed
    passes = max(of_prompt + layer_work(target, chunk, slots), of_batch + layer_work(target, rows, slots))
    # Of large batches the head scores a row when it is reached.
    scored = rows if rows <= LAZY_HEAD_ROWS else 1
    found = dict.fromkeys(target.plan.devices, max(passes, of_batch + _head_work(target, scored)))
    if draft is not None and draft.cfg.features is not None:
        draft_rows = max(draft_rows, draft.cfg.features.block)
    if draft is not None and draft_rows:
        ranked = _head_work(draft, RANKED_ROWS * draft_rows)
        own = max(layer_work(draft, max(chunk, draft_rows), slots), ranked)
        for device in draft.plan.devices:
            found[device] = max(found.get(device, 0), own)
    return found


def layer_work(placement: Placement, rows: int, slots: int) -> int:
    """Bytes on a device that a layer takes while it runs `rows` rows after a cache of `slots` slots."""
    cfg, degree = placement.cfg, placement.plan.tensor
    width = -(-cfg.mlp_dim // degree)
    if cfg.experts is not None:
        # Each row passes several experts, and maybe one that all rows share.
        width = max(width, cfg.experts.per_token * cfg.experts.dim + cfg.experts.shared_dim)
    heads = placement.heads.queries + 2 * sum(placement.heads.slots)
    values = 2 * width + 4 * cfg.embed_dim + 2 * heads * cfg.head_dim
    if placement.plan.kernels.native:
        return 4 * rows * values
    kernels = placement.plan.kernels
    # The kernel for TPUs writes none; it takes heads as wide as a tile.
    if kernels.platform != "tpu" or cfg.head_dim % 128 or not kernels.candidates("tree_attention"):
        values += 2 * placement.heads.queries * slots  # scores and their exponentials
    # XLA multiplies by numbers: the largest matrix of a layer, where it is kept in blocks. A TPU's kernel makes none.
    matrix = 2 * width * cfg.embed_dim if placement.weights.default in FORMATS and kernels.platform != "tpu" else 0
    return 4 * (rows * values + matrix)


def _head_work(placement: Placement, scored: int) -> int:
    return 4 * (scored + CHOICE_ROWS) * placement.vocab.local_size


def _rows_bytes(target: Placement, rows: int, *, windowed: bool) -> int:
    found = bytes_by_device(row_shapes(target, rows, windowed=windowed))
    return max(found.values())
