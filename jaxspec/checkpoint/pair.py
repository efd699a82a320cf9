"""A target and its draft: found, opened, checked against each other, placed and loaded together."""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path

from jaxspec.checkpoint.layer_subset import PREFIX, open_layer_subset, place_layer_subset, take_layers
from jaxspec.checkpoint.load import Weights, open_weights
from jaxspec.checkpoint.shared_embedding import share_embedding
from jaxspec.checkpoint.shipped import find_shipped_draft
from jaxspec.checkpoint.vocabulary import check_vocabulary, count_named, count_shared_tokens, vocabulary_digest
from jaxspec.config import DType
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.models.params import Params
from jaxspec.runtime.mesh import MeshPlan
from jaxspec.runtime.placement import Placement, SharedEmbedding, resolve_dtype

# Instead of a draft's checkpoint: no draft model, not even the shipped one.
NO_DRAFT = "none"


class DamagedDraftError(CheckpointError):
    """The draft's weights cannot be read; the target's can."""


def open_model(role: str, path: object) -> Weights:
    """Open a checkpoint; None is the default model. `role` begins the message of an error."""
    if not isinstance(path, str | PathLike | None) or path == "":
        raise ConfigError(f"{role} must be the path of a checkpoint, got {path!r}")
    return open_weights(None if path is None else Path(path).expanduser())


def open_draft(draft: object, weights: Weights, tokens: Sequence[str], *, find_shipped: bool) -> Weights | None:
    """The draft that was asked for, or the shipped one if nothing was asked for and the method takes one.

    Args:
      draft: as `LLM` takes it.
      weights: the target's.
      tokens: the target's vocabulary.
      find_shipped: whether a shipped draft may be taken.
    """
    if isinstance(draft, str) and draft.startswith(PREFIX):
        return open_layer_subset(draft, weights, vocabulary_digest(tokens))
    if draft is None and find_shipped:
        draft = find_shipped_draft(weights.config, vocabulary_digest(tokens))
    return None if draft is None or draft == NO_DRAFT else open_model("draft", draft)


def place_pair(
    weights: Weights,
    draft_weights: Weights | None,
    tokens: Sequence[str],
    token_strings: Callable[[Path], Sequence[str]],
    plan: MeshPlan,
    draft_plan: MeshPlan,
    dtype: DType,
) -> tuple[Placement, Placement | None]:
    """Placements of target and draft on their meshes.

    Args:
      weights: the target's.
      draft_weights: the draft's, if there is one.
      tokens: the target's vocabulary.
      token_strings: reads the vocabulary of a checkpoint.
      plan: the target's devices.
      draft_plan: the draft's.
      dtype: of both, as `LLM` takes it.

    Raises:
      ConfigError: the two do not fit together.
    """
    # Only the native kernels read blocks and half precision faster than float32.
    keeps = dtype == "auto" and plan.kernels.native
    storage = weights.storage(plan) if keeps else None
    target = Placement(weights.config, plan, resolve_dtype(dtype, plan), storage=storage)
    if draft_weights is None:
        return target, None
    if draft_weights.layers is not None:
        own_dtype = resolve_dtype(dtype, draft_plan)
        return target, place_layer_subset(target, draft_weights.layers, draft_plan, own_dtype)
    limit, rows = _match_vocabularies(weights, draft_weights, tokens, token_strings)
    if draft_weights.config.max_context < weights.config.max_context:
        logging.getLogger(__name__).warning(
            "the draft was made for %d tokens of context, the target for %d: drafts beyond that may be poor",
            draft_weights.config.max_context, weights.config.max_context,
        )  # fmt: skip
    target = dataclasses.replace(target, vocab_rows=rows)
    # A draft decides the speed alone, so it need not follow the target to float32.
    keeps = dtype in ("auto", "float32") and draft_plan.kernels.native
    shares = draft_weights.config.shares_embedding
    draft = Placement(
        draft_weights.config,
        draft_plan,
        resolve_dtype(dtype, draft_plan),
        vocab_rows=rows,
        vocab_limit=limit,
        storage=draft_weights.storage(draft_plan) if keeps else None,
        shared_embedding=SharedEmbedding(weights.config, target.weights) if shares else None,
    )
    return target, draft


def load_pair(
    weights: Weights, draft_weights: Weights | None, target: Placement, draft: Placement | None
) -> tuple[Params, Params | None]:
    """Read both models onto their devices.

    Raises:
      DamagedDraftError: the draft cannot be read.
      CheckpointError: the target cannot be read.
    """
    params = weights.load(target)
    if draft_weights is None or draft is None:
        return params, None
    if draft_weights.layers is not None:
        own = take_layers(target, draft, draft_weights.layers, params)
    else:
        try:
            own = draft_weights.load(draft)
        except CheckpointError as error:
            raise DamagedDraftError(str(error)) from error
    return params, own | share_embedding(draft, params)


def _match_vocabularies(
    weights: Weights, draft_weights: Weights, tokens: Sequence[str], token_strings: Callable[[Path], Sequence[str]]
) -> tuple[int, int]:
    """Ids that a draft may propose, from 0 up to a limit, and the vocabulary rows that both models need."""
    if draft_weights.vocabulary is not None:
        widths = (weights.config.embed_dim, draft_weights.config.embed_dim)
        check_vocabulary(tokens, draft_weights.vocabulary, widths)
        return weights.config.vocab_size, weights.config.vocab_size
    draft_tokens = token_strings(draft_weights.path)
    shared = count_shared_tokens(tokens, draft_tokens)
    if unused := count_named(tokens[shared:], draft_tokens[shared:]):
        logging.getLogger(__name__).warning(
            "the draft proposes tokens 0 to %d only: its vocabulary and the target's differ from there on, and %d "
            "later tokens that both have are left to the target", shared - 1, unused,
        )  # fmt: skip
    sizes = (weights.config.vocab_size, draft_weights.config.vocab_size)
    return min(shared, *sizes), max(sizes)
