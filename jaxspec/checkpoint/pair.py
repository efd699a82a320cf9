"""A target and its draft: found, opened, checked against each other, placed and loaded together."""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxspec.checkpoint import shared_weights
from jaxspec.checkpoint.hub import fetch, parse_name
from jaxspec.checkpoint.load import Weights, open_weights
from jaxspec.checkpoint.packing import pack_pair
from jaxspec.checkpoint.shared_weights import PREFIX
from jaxspec.checkpoint.shipped import find_shipped_draft
from jaxspec.config import ActivationsSetting, DType, KVDType, check_path
from jaxspec.errors import CheckpointError, ConfigError, shown
from jaxspec.files import vocabulary_digest
from jaxspec.models.params import Params
from jaxspec.models.quantization import KEPT_ON_CPU, Storage, keep_blocks, parts_of
from jaxspec.runtime.mesh import MeshPlan
from jaxspec.runtime.placement import Activations, Placement, SharedEmbedding, resolve_dtype
from pallas_kernels.linear.blocks import FORMATS

# What "auto" is: int8 changes the most probable token too often (docs/results/integer-cpu.md).
AUTO_ACTIVATIONS: Activations = "int16"
# Instead of a draft's checkpoint: no draft model, not even the shipped one.
NO_DRAFT = "none"


class DamagedDraftError(CheckpointError):
    """The draft's weights cannot be read; the target's can."""


def open_model(role: str, path: object, revision: str | None = None) -> Weights:
    """Open a checkpoint by its path, or by its name on the Hugging Face Hub; None is the default model.

    `role` begins the message of an error. `revision` is a branch, tag or commit of a name, None its main branch.
    ConfigError: a revision of what is no name.
    """
    if not isinstance(path, str | PathLike | None) or path == "":
        raise ConfigError(f"{role} must be the path of a checkpoint or a name on the hub, got {shown(path)}")
    name = parse_name(path, revision) if isinstance(path, str) else None
    if name is not None:
        path = fetch(dataclasses.replace(name, takes_pickle=role == "draft"))
    elif revision is not None:
        raise ConfigError(f"revision {shown(revision)} is for a model on the hub, and {role} {shown(path)} is none")
    return open_weights(None if path is None else check_path(role, path))


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
    activations: ActivationsSetting = "auto",
    kv_dtype: KVDType = "auto",
) -> tuple[Placement, Placement | None]:
    """Placements of target and draft on their meshes.

    Arguments without `draft_` in their name are the target's; `dtype` is of both, as `LLM` takes it.

    Args:
      tokens: the target's vocabulary, by id.
      token_strings: reads the vocabulary of a checkpoint.
      activations: of the target, as `LLM` takes it. A draft decides the speed alone and has int8 wherever it can,
        except where its arrays are the target's.
      kv_dtype: of the caches of both, as `LLM` takes it.

    Raises:
      ConfigError: the two do not fit together, or the weights cannot be multiplied by integers.
    """
    storage = _choose_storage(weights, plan, dtype) if dtype == "auto" else None
    target = Placement(weights.config, plan, resolve_dtype(dtype, plan), storage=storage)
    target = dataclasses.replace(target, activations=_resolve_activations(target, activations, AUTO_ACTIVATIONS))
    target = dataclasses.replace(target, cache_dtype=_resolve_kv_dtype(target, kv_dtype))
    if draft_weights is None:
        return target, None
    if draft_weights.layers is not None:
        own_dtype = resolve_dtype(dtype, draft_plan)
        subset = shared_weights.place_layer_subset(target, draft_weights.layers, draft_plan, own_dtype)
        shared = target.activations if _takes_integers(subset) else "float32"
        subset = dataclasses.replace(subset, activations=shared)
        return target, dataclasses.replace(subset, cache_dtype=_resolve_kv_dtype(subset, kv_dtype))
    if draft_weights.config.features is not None:
        draft_weights = fit_features(weights, draft_weights)
    limit, rows = _match_vocabularies(weights, draft_weights, tokens, token_strings)
    if draft_weights.config.max_context < weights.config.max_context:
        logging.getLogger(__name__).warning(
            "the draft was made for %d tokens of context, the target for %d: drafts beyond that may be poor",
            draft_weights.config.max_context, weights.config.max_context,
        )  # fmt: skip
    target = dataclasses.replace(target, vocab_rows=rows)
    # A draft decides the speed alone, so it need not follow the target to float32.
    keeps = dtype == "auto" or (dtype == "float32" and draft_plan.kernels.native)
    shares = draft_weights.config.borrows
    draft = Placement(
        draft_weights.config,
        draft_plan,
        resolve_dtype(dtype, draft_plan),
        vocab_rows=rows,
        vocab_limit=limit,
        storage=_choose_storage(draft_weights, draft_plan, dtype) if keeps else None,
        shared_embedding=SharedEmbedding(weights.config, target.weights, target.activations) if shares else None,
    )
    draft = dataclasses.replace(draft, activations=_resolve_activations(draft, "auto", "int8"))
    return target, dataclasses.replace(draft, cache_dtype=_resolve_kv_dtype(draft, kv_dtype))


def fit_features(weights: Weights, draft_weights: Weights) -> Weights:
    """A feature draft with the states that it takes of this target filled in.

    Raises:
      ConfigError: the two do not fit; the message has the two values that disagree.
    """
    target, draft = weights.config, draft_weights.config
    features = draft.features
    assert features is not None
    reason = f"the draft {draft_weights.path} does not fit the target"
    for what, ours, theirs in (
        ("hidden states", target.embed_dim, features.target_dim),
        ("a vocabulary", target.vocab_size, draft.vocab_size),
    ):
        if ours != theirs:
            raise ConfigError(f"{reason}: it was made for {what} of {theirs}, the target has {ours}")
    try:
        features = features.resolve(target.num_layers)
    except ConfigError as error:
        raise ConfigError(f"{draft_weights.path}: {error}") from error
    return dataclasses.replace(draft_weights, config=dataclasses.replace(draft, features=features))


def _choose_storage(weights: Weights, plan: MeshPlan, dtype: DType) -> Storage | None:
    """How the weights of a checkpoint are kept where nothing else is asked for; None for numbers of one dtype.

    Native kernels read everything as it is. Accelerators keep every block: a few rows take as long as their weights
    are read, and blocks are a quarter of the numbers. XLA on a CPU is slow at GGUF's blocks, so these become numbers
    there; quantised safetensors stay packed, because their models are too large otherwise.
    """
    own, kernels = weights.storage(plan), plan.kernels
    if kernels.native:
        return own
    formats = KEPT_ON_CPU if kernels.platform == "cpu" else FORMATS
    kept = keep_blocks(own, weights.config, jnp.dtype(resolve_dtype(dtype, plan)).name, formats)
    types = (part for leaf_type in (kept.default, *(t for _, t in kept.leaves)) for part in parts_of(leaf_type))
    return kept if any(part in formats for part in types) else None


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
        return pack_pair(params, None, target, None)
    read = shared_weights.target_reader(weights, target, draft)
    if draft_weights.layers is not None:
        own = shared_weights.take_layers(target, draft, draft_weights.layers, params, read)
    else:
        try:
            own = draft_weights.load(draft)
        except CheckpointError as error:
            raise DamagedDraftError(str(error)) from error
    return pack_pair(params, own | shared_weights.share_embedding(draft, params, read), target, draft)


def _resolve_activations(placement: Placement, setting: ActivationsSetting, best: Activations) -> Activations:
    """`best` where "auto" finds native kernels and weights in blocks; ConfigError where integers have neither."""
    possible = _takes_integers(placement)
    if setting in ("int8", "int16") and not possible:
        name = placement.plan.kernels.name
        native = placement.plan.kernels.native
        reason = "these weights are numbers or FP8" if native else f"kernels {name!r} have no such products"
        raise ConfigError(
            f"activations {setting!r} need native CPU kernels and weights in blocks of integer codes: {reason}"
        )
    if setting == "auto":
        return best if possible else "float32"
    return setting


def _takes_integers(placement: Placement) -> bool:
    return placement.plan.kernels.native and holds_integers(placement)


def _resolve_kv_dtype(placement: Placement, setting: KVDType) -> Any:
    """The type of a cache; ConfigError where float16 is asked for without the kernels that read it."""
    native = placement.plan.kernels.native
    if setting == "float16" and not native:
        raise ConfigError(f"kv_dtype 'float16' needs native CPU kernels, not {placement.plan.kernels.name!r}")
    if setting == "auto":
        return jnp.dtype("float16") if placement.activations != "float32" else placement.dtype
    return jnp.dtype(setting)


def holds_integers(placement: Placement) -> bool:
    """Whether any weight is kept in blocks whose codes are integers."""
    storage = placement.weights
    types = (storage.default, *(leaf_type for _, leaf_type in storage.leaves))
    return any(part in FORMATS and FORMATS[part].has_integers for leaf_type in types for part in parts_of(leaf_type))


def _match_vocabularies(
    weights: Weights, draft_weights: Weights, tokens: Sequence[str], token_strings: Callable[[Path], Sequence[str]]
) -> tuple[int, int]:
    """Ids that a draft may propose, from 0 up to a limit, and the vocabulary rows that both models need."""
    if draft_weights.config.features is not None and draft_weights.vocabulary is None:
        return weights.config.vocab_size, weights.config.vocab_size  # its folder has no tokenizer
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
