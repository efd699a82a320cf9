"""Whether a draft model fits a target: the same tokens under the same ids."""

import hashlib
from collections.abc import Sequence

from jaxspec.errors import ConfigError


def count_shared_tokens(target: Sequence[str], draft: Sequence[str]) -> int:
    """Number of leading ids that mean the same token in both vocabularies; the draft proposes only these.

    Sizes prove nothing: embeddings are padded, and models of one family add tokens of their own at the end. What
    decides is how each id is written.

    Args:
      target: every token as the target's vocabulary writes it, by id; "" for an id without a token.
      draft: likewise.

    Raises:
      ConfigError: an id is one token here and another there; both are named.
    """
    shared = min(len(target), len(draft))
    for token_id in range(shared):
        ours, theirs = target[token_id], draft[token_id]
        if ours and theirs and ours != theirs:
            raise ConfigError(
                f"the draft does not fit the target: token {token_id} is {ours!r} in the target's vocabulary "
                f"and {theirs!r} in the draft's; both must use the same tokenizer"
            )
    for token_id in range(shared):
        if target[token_id] != draft[token_id]:
            shared = token_id
            break
    if shared == 0:
        raise ConfigError("the draft does not fit the target: their vocabularies have no token in common")
    return shared


def count_named(target: Sequence[str], draft: Sequence[str]) -> int:
    """Number of ids that have a token in both vocabularies."""
    return sum(bool(ours and theirs) for ours, theirs in zip(target, draft, strict=False))


def check_vocabulary(target: Sequence[str], draft_digest: str, widths: tuple[int, int]) -> None:
    """Whether a draft that shares its target's embedding was made for this one.

    Args:
      target: every token as the target's vocabulary writes it, by id.
      draft_digest: what the draft names its target by.
      widths: D of target and draft.

    Raises:
      ConfigError: it was made for another.
    """
    digest = vocabulary_digest(target)
    if digest != draft_digest:
        raise ConfigError(
            "the draft does not fit the target: it shares the embedding of the target that it was made for, whose "
            f"vocabulary has the digest {draft_digest:.12}; that of this one is {digest:.12}"
        )
    if widths[0] != widths[1]:
        raise ConfigError(
            f"the draft does not fit the target: it shares an embedding of width {widths[1]}, the target's has "
            f"{widths[0]}"
        )


def vocabulary_digest(tokens: Sequence[str]) -> str:
    """SHA-256 of a vocabulary: what a draft that shares its target's embedding names its target by.

    Args:
      tokens: every token as the vocabulary writes it, by id.
    """
    return hashlib.sha256("\0".join(tokens).encode("utf-8", "surrogatepass")).hexdigest()
