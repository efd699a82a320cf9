"""What passes cost, relative to a target pass of one row: what methods weigh drafts with."""

from collections.abc import Sequence

import numpy as np

from jaxspec.models.config import ModelConfig
from jaxspec.models.params import count_params
from pallas_kernels.live import relative_pass_cost


def pass_costs(rows: int, blocks: bool = False, measured: Sequence[float] = ()) -> np.ndarray:
    """Times of target passes of 1, 2, ... `rows` rows over that of one row, float32 [rows].

    Args:
      rows: of the pass.
      blocks: whether most weights are kept in blocks.
      measured: the first of these times, where somebody measured them; the rest grows as the built-in figures do.
    """
    built_in = np.array([relative_pass_cost(1 + n, rows, blocks) for n in range(rows)], np.float32)
    known = np.array(measured[:rows], np.float32)
    if known.size:
        built_in *= known[-1] / built_in[known.size - 1]
        built_in[: known.size] = known
    return built_in


def relative_draft_cost(target: ModelConfig, draft: ModelConfig) -> float:
    """A draft pass of one row over a target pass: their weights, and a little for what does not depend on them."""
    read = count_params(draft) + (len(draft.head_ids) or draft.vocab_size) * draft.embed_dim * draft.shares_embedding
    return read / count_params(target) + 0.01
