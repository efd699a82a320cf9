"""Whether a draft model fits a target: the same tokens must have the same ids."""

import hashlib
from collections.abc import Sequence

from jaxspec.errors import ConfigError


def count_shared_tokens(target: Sequence[str], draft: Sequence[str]) -> int:
    """Number of leading ids that mean the same token in both vocabularies; the draft proposes only these.

    Tokens are compared and not counted: embeddings are padded, and models of one family add tokens at the end.

    Args:
      target: every token as the target's vocabulary writes it, by id; "" for an id without a token.
      draft: the same for the draft's vocabulary.

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
      draft_digest: digest of the vocabulary that the draft was made for.
      widths: D of target and draft.

    Raises:
      ConfigError: the vocabulary or the width differs.
    """
    reason = "the draft does not fit the target: it shares"
    if (digest := vocabulary_digest(target)) != draft_digest:
        raise ConfigError(
            f"{reason} the embedding of the target that it was made for, whose vocabulary has the digest "
            f"{draft_digest:.12}; that of this one is {digest:.12}"
        )
    if widths[0] != widths[1]:
        raise ConfigError(f"{reason} an embedding of width {widths[1]}, the target's has {widths[0]}")


def vocabulary_digest(tokens: Sequence[str]) -> str:
    """SHA-256 of a vocabulary, by which a draft that shares its target's embedding names the target.

    Args:
      tokens: every token as the vocabulary writes it, by id.
    """
    return hashlib.sha256("\0".join(tokens).encode("utf-8", "surrogatepass")).hexdigest()
