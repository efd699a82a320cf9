"""One model's side of a sequence: its cache, the history of its text, its root; how it starts, rewinds and prefills."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from jaxspec.models.config import ModelConfig
from jaxspec.models.kv_cache import KVCache, commit_rows, init_cache
from jaxspec.models.params import Params
from jaxspec.models.transformer import forward, prefill, vocab_logits
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.program import Program
from jaxspec.runtime.sharding import round_up
from jaxspec.runtime.transfer import read_scalar
from jaxspec.sampling.processors import History, init_history, update_history

# Rows of a prefill pass: few fixed sizes, so that no prompt length compiles anything new. On CPU 64 rows run at 60 % of
# the arithmetic peak and 512 near it; a third size would cost another compilation for little.
CHUNKS = (64, 512)
# What a state holds of a text that it does not keep.
ABSENT: Any = None


@struct.dataclass
class SequenceState:
    """State of one model's side of a sequence with n verified tokens.

    A side that does not keep the text has a cache alone; the rest is None.
    """

    cache: KVCache  # its length is n - 1 (of a draft that has to catch up, less)
    history: History = ABSENT  # tokens seen, for penalties
    root: Array = ABSENT  # int32 [], the last verified token
    generated: Array = ABSENT  # int32 [], verified tokens after the prompt
    idle: Array = ABSENT  # int32 [], rounds in a row to which no draft added a token
    # int32 [], of a draft that is fed hidden states: verified tokens that it was told of. Its cache has no row for the
    # first token of a text (`jaxspec/models/feature_draft.py`), and none for those that it was not told of.
    seen: Array = ABSENT


def sequence_shapes(placement: Placement, slots: int, *, keeps_text: bool = True) -> SequenceState:
    """Shapes of the state of one model's side, with a cache of `slots` slots."""
    scalar = placement.array((), jnp.int32)
    text: Any = (placement.history(), scalar, scalar, scalar) if keeps_text else ()
    return SequenceState(placement.cache(slots), *text, seen=ABSENT if placement.cfg.features is None else scalar)


class ModelSequence:
    """Compiled functions that start a sequence of one model, rewind it and commit a prompt; `state` holds shapes."""

    def __init__(self, placement: Placement, slots: int, role: str, *, keeps_text: bool = True):
        """Declare the programs; nothing is compiled yet.

        `slots` is the capacity of the cache; `role`, "target" or "draft", is part of the programs' names. With
        `keeps_text` the state has a history and a root; else it is a cache alone.
        """
        self.placement, self.slots = placement, slots
        cfg, vocab, plan = placement.cfg, placement.text_vocab, placement.plan
        scalar = placement.array((), jnp.int32)
        self.state = sequence_shapes(placement, slots, keeps_text=keeps_text)

        def begin(cache: KVCache, history: History, root: Array) -> SequenceState:
            seen = ABSENT if cfg.features is None else jnp.int32(0)
            if not keeps_text:
                return SequenceState(cache, seen=seen)
            history = update_history(history, root[None], jnp.ones(1, bool), vocab, generated=False)
            return SequenceState(cache, history, root, jnp.int32(0), jnp.int32(0), seen)

        def create(root):
            return begin(
                init_cache(cfg, placement.local_kv_heads, slots, placement.kv_dtype), init_history(vocab), root
            )

        def rewind(state, token, length, root):
            history = init_history(vocab)
            history = update_history(history, token, jnp.arange(slots) < length, vocab, generated=False)
            return begin(dataclasses.replace(state.cache, length=length), history, root)

        row = placement.array((slots,), jnp.int32)
        self._create = Program(f"{role} create", create, plan, [scalar], self.state)
        args = [self.state, row, scalar, scalar]
        self._rewind = Program(f"{role} rewind", rewind, plan, args, self.state, donate=[0])
        self.programs: Sequence[Program] = (self._create, self._rewind, *self._declare_fill(role, keeps_text))

    def _declare_fill(self, role: str, keeps_text: bool) -> Sequence[Program]:
        """Programs that commit a chunk of a prompt."""
        placement, cfg, vocab = self.placement, self.placement.cfg, self.placement.text_vocab
        scalar = placement.array((), jnp.int32)

        def fill(params, state, token, count):
            cache = prefill(params, cfg, token, count, state.cache)
            if not keeps_text:
                return SequenceState(cache)
            valid = jnp.arange(token.shape[0]) < count
            history = update_history(state.history, token, valid, vocab, generated=False)
            return dataclasses.replace(state, cache=cache, history=history)

        self._fill = {
            size: Program(
                f"{role} prefill {size}", fill, placement.plan,
                [placement.params(), self.state, placement.array((size,), jnp.int32), scalar],
                self.state, donate=[1],
            )
            for size in usable_chunks(self.slots)
        }  # fmt: skip
        return tuple(self._fill.values())

    def start(self, root: int, state: SequenceState | None) -> SequenceState:
        """An empty sequence whose last verified token is `root`; `state`, of a finished one, is donated."""
        return self._create(np.int32(root)) if state is None else self.rewind(state, (), root)

    def rewind(self, state: SequenceState, kept: Sequence[int] | np.ndarray, root: int) -> SequenceState:
        """Go back to the first tokens of a sequence; their keys and values are not computed again.

        The cache of `state`, which is donated, holds `kept`, the tokens before `root`, and maybe more. All of them
        count as prompt from now on. More tokens than the cache has slots raise `ValueError`.
        """
        if len(kept) > self.slots:
            raise ValueError(f"{len(kept)} tokens cannot be kept in a cache of {self.slots} slots")
        token = np.zeros(self.slots, np.int32)
        token[: len(kept)] = kept
        return self._rewind(state, token, np.int32(len(kept)), np.int32(root))

    def resume(self, params: Params, state: SequenceState, tokens: np.ndarray, common: int) -> SequenceState:
        """Begin a sequence of int32 `tokens` `[n]`, the last of which is the root; what the cache holds stays.

        `state`, which is donated, is that of a sequence with the same first `common` tokens, maybe of a smaller cache.
        A draft's cache may hold fewer of them. Waits for what runs on `state`.
        """
        state = self._fit(state)
        text = tokens[:-1]
        kept = fit_kept(min(common, read_scalar(state.cache.length)), len(text), self.slots)
        state = self.rewind(state, text[:kept], tokens[-1])
        return self.prefill(params, state, text[kept:], kept)

    def prefill(self, params: Params, state: SequenceState, tokens: np.ndarray, start: int = 0) -> SequenceState:
        """Commit int32 `tokens` `[n]`, chunk by chunk, after the first `start`."""
        for chunk, count in split_chunks(tokens, self.slots - start):
            state = self._fill[len(chunk)](params, state, chunk, np.int32(count))
        return state

    def _fit(self, state: SequenceState) -> SequenceState:
        """The same sequence in a cache of `slots` slots; the rest of the state is new where it had fewer."""
        if state.cache.slots >= self.slots:
            return state
        new = self._create(np.int32(0))

        def move(large: Array, small: Array) -> Array:
            return jax.device_put(jax.lax.dynamic_update_slice(large, small, (0, 0, 0)), large.sharding)

        key, value = (
            tuple(map(move, *layers))
            for layers in ((new.cache.key, state.cache.key), (new.cache.value, state.cache.value))
        )
        return dataclasses.replace(new, cache=KVCache(key, value, state.cache.length))


def catch_up(
    params: Params, cfg: ModelConfig, cache: KVCache, pending: Array, num_pending: Array
) -> tuple[Array, Array, KVCache]:
    """Run the verified tokens that a draft has not seen, one or two, the last of which is the new root.

    The cache holds every verified token but `pending`, int32 [2], of which `num_pending` count. Returns the root, int32
    []; the logits after it, [1, V_local]; and the cache, whose window slot 0 is the root.
    """
    position = cache.length + jnp.arange(2, dtype=jnp.int32)
    hidden, cache = forward(params, cfg, pending, position, cache, jnp.tril(jnp.ones((2, 2), bool)))
    logits = vocab_logits(params, cfg, jax.lax.dynamic_slice_in_dim(hidden, num_pending - 1, 1))
    return pending[num_pending - 1], logits, commit_rows(cache, num_pending - 1)


def cache_slots(tokens: int, window: int) -> int:
    """Slots of a cache for sequences of `tokens` tokens: a window after the last, rounds in flight, whole chunks."""
    return round_up(tokens + 2 * window, CHUNKS[0])


def usable_chunks(slots: int) -> list[int]:
    """Chunk sizes that a cache of `slots` slots can take."""
    return [size for size in CHUNKS if size <= slots]


def fit_kept(kept: int, count: int, slots: int) -> int:
    """How many of `kept` cached tokens stay, so that chunks of the rest of `count` tokens fit into `slots` slots."""
    if kept + sum(plan_chunks(count - kept, slots - kept)) > slots:
        kept -= kept % min(CHUNKS)
    return kept


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
        # Padded with its own last token: what that row computes is as sound as the rows that count.
        yield np.pad(piece, (0, size - len(piece)), mode="edge").astype(np.int32), len(piece)
        start += size
