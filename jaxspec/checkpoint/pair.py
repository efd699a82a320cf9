"""A target and its draft: found, opened, checked against each other, placed and loaded together."""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path

from jaxspec.checkpoint import shared_weights
from jaxspec.checkpoint.load import Weights, open_weights
from jaxspec.checkpoint.shared_weights import PREFIX
from jaxspec.checkpoint.shipped import find_shipped_draft, vocabulary_digest
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
    """The draft that was asked for as `LLM` takes it, or a shipped one if none was asked for and `find_shipped`.

    `weights` and `tokens` (the vocabulary, by id) are the target's.
    """
    if isinstance(draft, str) and draft.startswith(PREFIX):
        return shared_weights.open_layer_subset(draft, weights, vocabulary_digest(tokens))
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

    Arguments without `draft_` in their name are the target's; `dtype` is of both, as `LLM` takes it.

    Args:
      tokens: the target's vocabulary, by id.
      token_strings: reads the vocabulary of a checkpoint.

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
        return target, shared_weights.place_layer_subset(target, draft_weights.layers, draft_plan, own_dtype)
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
        own = shared_weights.take_layers(target, draft, draft_weights.layers, params)
    else:
        try:
            own = draft_weights.load(draft)
        except CheckpointError as error:
            raise DamagedDraftError(str(error)) from error
    return params, own | shared_weights.share_embedding(draft, params)


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


def count_shared_tokens(target: Sequence[str], draft: Sequence[str]) -> int:
    """Number of leading ids that mean the same token in both vocabularies; the draft proposes only these.

    Tokens are compared and not counted: embeddings are padded, and models of one family add tokens at the end. Both
    lists hold every token by id, as the vocabulary writes it; "" is an id without a token.

    Raises:
      ConfigError: an id has different tokens in the two vocabularies, or they share no token.
    """
    pairs = list(zip(target, draft, strict=False))
    for token_id, (ours, theirs) in enumerate(pairs):
        if ours and theirs and ours != theirs:
            raise ConfigError(
                f"the draft does not fit the target: token {token_id} is {ours!r} in the target's vocabulary "
                f"and {theirs!r} in the draft's; both must use the same tokenizer"
            )
    shared = next((token_id for token_id, (ours, theirs) in enumerate(pairs) if ours != theirs), len(pairs))
    if shared == 0:
        raise ConfigError("the draft does not fit the target: their vocabularies have no token in common")
    return shared


def count_named(target: Sequence[str], draft: Sequence[str]) -> int:
    """Number of ids that have a token in both vocabularies."""
    return sum(bool(ours and theirs) for ours, theirs in zip(target, draft, strict=False))


def check_vocabulary(target: Sequence[str], draft_digest: str, widths: tuple[int, int]) -> None:
    """Refuse a draft that shares its target's embedding and was made for another target.

    Args:
      target: every token as the target's vocabulary writes it, by id.
      draft_digest: of the vocabulary that the draft was made for.
      widths: D of target and draft.
    """
    reason = "the draft does not fit the target: it shares"
    if (digest := vocabulary_digest(target)) != draft_digest:
        made_for = f"the target that it was made for, whose vocabulary has the digest {draft_digest:.12}"
        raise ConfigError(f"{reason} the embedding of {made_for}; that of this one is {digest:.12}")
    if widths[0] != widths[1]:
        raise ConfigError(f"{reason} an embedding of width {widths[1]}, the target's has {widths[0]}")
