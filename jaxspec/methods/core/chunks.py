"""Prefill in chunks of few fixed sizes, so that no prompt length compiles anything new."""

from collections.abc import Iterator

import numpy as np

from jaxspec.runtime.padding import round_up

# Rows per pass. On CPU 64 rows run at 60 % of the arithmetic peak and 512 near it; a third size would cost another
# compilation for little.
CHUNKS = (64, 512)


def cache_slots(tokens: int, window: int) -> int:
    """Slots of a cache for sequences of `tokens` tokens: a window behind the last, rounds in flight, whole chunks."""
    return round_up(tokens + 2 * window, CHUNKS[0])


def usable_chunks(slots: int) -> list[int]:
    """Chunk sizes that a cache of `slots` slots can take."""
    return [size for size in CHUNKS if size <= slots]


def plan_chunks(count: int, slots: int) -> list[int]:
    """Chunk sizes that cover `count` tokens, padding included.

    The last chunk may be padded; it is a large one only if that costs less than the small ones it replaces, and
    never if its padding would run over the end of a cache of `slots` slots (a write there would be moved back onto
    live slots).
    """
    small, large = CHUNKS
    sizes = [large] * (count // large)
    rest = count - sum(sizes)
    smalls = -(-rest // small)
    # Measured on CPU: a pass of 512 rows costs about as much as six of 64.
    if smalls > 6 and sum(sizes) + large <= slots:
        return [*sizes, large]
    return [*sizes, *[small] * smalls]


def split_chunks(tokens: np.ndarray, slots: int) -> Iterator[tuple[np.ndarray, int]]:
    """Padded int32 chunks of `tokens` `[n]`, each with the number of tokens that count."""
    start = 0
    for size in plan_chunks(len(tokens), slots):
        piece = tokens[start : start + size]
        # Padded with its own last token: whatever that row computes is as sound as the rows that count.
        yield np.pad(piece, (0, size - len(piece)), mode="edge").astype(np.int32), len(piece)
        start += size
