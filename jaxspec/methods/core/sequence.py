"""One model's side of a sequence: its cache, the history of its text, its root; how it starts, rewinds and prefills."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxspec.models.feature_draft import fuse, prefill_draft
from jaxspec.models.kv_cache import KVCache, can_rewind, init_cache, rewind_cache
from jaxspec.models.params import Params
from jaxspec.models.transformer import chunk_rows, prefill_with_states
from jaxspec.models.vocab import VocabShard
from jaxspec.pytree import pytree
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.program import Program
from jaxspec.runtime.sharding import round_up
from jaxspec.runtime.transfer import read_scalar
from jaxspec.sampling.processors import History, history_shapes, init_history, update_history

# Rows of a prefill pass: few fixed sizes, so that no prompt length compiles anything new. On CPU 64 rows run at 60 % of
# the arithmetic peak and 512 near it; a third size would cost another compilation for little.
CHUNKS = (64, 512)
# Most small passes in place of a large one, which costs some six of them on a CPU. Native kernels on one device compute
# no padding. Of a delta rule with narrow keys, though, XLA rounds passes of other sizes otherwise.
MOST_SMALL, MOST_SMALL_NATIVE = 6, 2
# No limit to the tokens of a round where nothing is proposed, but that of its program.
NO_LIMIT = 1 << 20
# What a state holds of a text that it does not keep.
ABSENT: Any = None


@pytree
class SequenceState:
    """State of one model's side of a sequence with n verified tokens.

    A side that does not keep the text has a cache alone; the rest is None.
    """

    cache: KVCache  # its length is n - 1 (of a draft that has to catch up, less)
    history: History = ABSENT  # tokens seen, for penalties
    root: Array = ABSENT  # int32 [], the last verified token
    generated: Array = ABSENT  # int32 [], verified tokens after the prompt
    most: Array = ABSENT  # int32 [], tokens that the next round decodes where nothing is proposed, at most
    # int32 [], of a feature draft: verified tokens that it was told of. Its cache has no row for the
    # first token of a text (`jaxspec/models/feature_draft.py`), and none for those that it was not told of.
    seen: Array = ABSENT


def sequence_shapes(placement: Placement, slots: int, *, keeps_text: bool = True) -> SequenceState:
    """Shapes of the state of one model's side, with a cache of `slots` slots."""
    scalar = placement.array((), jnp.int32)
    text: Any = (history_shapes(placement), scalar, scalar, scalar) if keeps_text else ()
    return SequenceState(placement.cache(slots), *text, seen=ABSENT if placement.cfg.features is None else scalar)


class PromptStates(NamedTuple):
    """Hidden states of a prompt, from the target's pass over it, for a feature draft."""

    chunks: list[Array]  # of each chunk, padding included, float32 [size, n * D]
    # `Verified.states` of the round that begins with the token after them, float32 [P, n * D]; None without a chunk.
    last: Array | None
    first: int = 0  # rows of the first chunk that come before the tokens

    def of_last(self, skipped: int) -> "PromptStates":
        """The states of all but the first `skipped` tokens; chunks of none of them go."""
        chunks, first = self.chunks, self.first + skipped
        while chunks and first >= chunks[0].shape[0]:
            first -= chunks[0].shape[0]
            chunks = chunks[1:]
        return PromptStates(chunks, self.last, first)


class ModelSequence:
    """Compiled functions that start a sequence of one model, rewind it and commit a prompt; `state` holds shapes.

    A target with `layers` gives their hidden states with each prompt, and a feature draft takes them.
    Row t of such a draft joins token t + 1 to the target's state of token t. So a prompt of n tokens, the last of which
    is the root, has n - 2 rows of the draft before the root's own. The root's row comes with the first round.
    """

    def __init__(
        self, placement: Placement, slots: int, role: str, *, keeps_text: bool = True, layers: tuple[int, ...] = (),
        path: int = 0, chunk_slots: int = 0,
    ):  # fmt: skip
        """Declare the programs; nothing is compiled yet.

        Args:
          placement: of the model.
          slots: capacity of the cache.
          role: "target" or "draft", part of the programs' names.
          keeps_text: whether the state has a history and a root; else it is a cache alone.
          layers: hidden states that prompts give; `path` (P) is the number of rows of `PromptStates.last`.
          chunk_slots: a smaller capacity that the chunks of prompts must fit into, too: the draft's, which takes the
            same chunks. 0 for none.
        """
        self.placement, self.slots = placement, slots
        self.chunk_slots = min(slots, chunk_slots or slots)
        self._layers, self._path, self._keeps_text = layers, path, keeps_text
        cfg, vocab, plan = placement.cfg, placement.text_vocab, placement.plan
        alike = plan.kernels.native and plan.tensor == 1 and (cfg.recurrent is None or cfg.recurrent.kind != "delta")
        self._most_small = MOST_SMALL_NATIVE if alike else MOST_SMALL
        scalar = placement.array((), jnp.int32)
        self.state = sequence_shapes(placement, slots, keeps_text=keeps_text)

        def begin(cache: KVCache, history: History, root: Array) -> SequenceState:
            seen = ABSENT if cfg.features is None else jnp.int32(0)
            if not keeps_text:
                return SequenceState(cache, seen=seen)
            history = update_history(history, root[None], jnp.ones(1, bool), vocab, generated=False)
            return SequenceState(cache, history, root, jnp.int32(0), jnp.int32(NO_LIMIT), seen)

        def create(root):
            cache = init_cache(
                cfg, placement.local_kv_heads, slots, placement.kv_dtype, placement.local_recurrent_heads
            )
            return begin(cache, init_history(vocab), root)

        def rewind(recurrent, token, length, root):
            history = init_history(vocab)
            history = update_history(history, token, jnp.arange(slots) < length, vocab, generated=False)
            return begin(rewind_cache(KVCache((), (), length, recurrent), length), history, root)

        self._create = Program(f"{role} create", create, plan, [scalar], self.state)
        # Keys and values stay as they are. A call takes longer the more arrays go in and come out.
        cache = self.state.cache
        args = [cache.recurrent, placement.array((slots,), jnp.int32), scalar, scalar]
        rest = dataclasses.replace(self.state, cache=dataclasses.replace(cache, key=(), value=()))
        self._rewind = Program(f"{role} rewind", rewind, plan, args, rest, donate=[0])
        self._cuts = not keeps_text and cfg.recurrent is None  # a cache alone is cut by its length
        begins = (self._create,) if self._cuts else (self._create, self._rewind)
        self.programs: Sequence[Program] = (*begins, *self._declare_fill(role))

    def _declare_fill(self, role: str) -> Sequence[Program]:
        """Programs that commit a chunk of a prompt, with or without hidden states."""
        placement, cfg, layers, path = self.placement, self.placement.cfg, self._layers, self._path
        features, vocab, keeps_text = cfg.features, placement.text_vocab, self._keeps_text
        scalar, width = placement.array((), jnp.int32), cfg.states_dim(layers)

        def note(state: SequenceState, token: Array, count: Array) -> SequenceState:
            return note_tokens(state, token, count, vocab) if keeps_text else state

        def fill(params, state, token, count):
            cache, states = prefill_with_states(params, cfg, token, count, state.cache, layers)
            state = note(dataclasses.replace(state, cache=cache), token, count)
            return state if states is None else (state, states, states_before(states, count, path))

        def fill_fed(params, state, token, count, following, states, rows, first):
            states = fuse(params, cfg, jnp.roll(states, -first, axis=0), chunk_rows(rows))
            cache = prefill_draft(params, cfg, following, states, rows, state.cache)
            return note(dataclasses.replace(state, cache=cache, seen=cache.length + 1), token, count)

        def declare(size: int) -> Program:
            token, out = placement.array((size,), jnp.int32), self.state
            args = [placement.params(), self.state, token, scalar]
            if features is not None:
                args += [token, placement.array((size, features.states_dim), jnp.float32), scalar, scalar]
            if layers:
                out = out, *(placement.array((rows, width), jnp.float32) for rows in (size, path))
            name = f"{role} prefill {size}" + (" with states" if features is not None or layers else "")
            function = fill if features is None else fill_fed
            return Program(name, function, placement.plan, args, out, donate=[1])

        self._fill = {size: declare(size) for size in usable_chunks(self.slots)}
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
        if self._cuts:  # the next program takes these numbers
            seen: Any = ABSENT if self.placement.cfg.features is None else np.int32(0)
            return SequenceState(dataclasses.replace(state.cache, length=np.int32(len(kept))), seen=seen)
        token = np.zeros(self.slots, np.int32)
        token[: len(kept)] = kept
        rest = self._rewind(state.cache.recurrent, token, np.int32(len(kept)), np.int32(root))
        return dataclasses.replace(
            rest, cache=dataclasses.replace(rest.cache, key=state.cache.key, value=state.cache.value)
        )

    def rewind_to(self, state: SequenceState, tokens: np.ndarray, common: int) -> tuple[SequenceState, int]:
        """Go back to what a sequence shares with int32 `tokens` `[n]`, the last of which is the new root.

        `state`, which is donated, is that of a sequence with the same first `common` tokens, maybe of a smaller cache.
        A draft's cache may hold fewer of them, and that of a model with recurrent layers what follows its last rows
        only, else nothing is kept. Waits for what runs on `state`, where something may be kept. The second result is
        the number of tokens that are kept; `prefill` takes the others.
        """
        state, count = self._fit(state), len(tokens) - 1
        if not common:
            return self.rewind(state, (), tokens[-1]), 0
        kept = fit_kept(min(common, read_scalar(state.cache.length)), count, self.chunk_slots)
        kept = self.rewindable(state, kept)
        return self.rewind(state, tokens[:kept], tokens[-1]), kept

    def rewindable(self, state: SequenceState, kept: int) -> int:
        """`kept`, or 0 where recurrent layers have folded what continues so many tokens; waits for them then."""
        cfg = self.placement.cfg
        keeps = not kept or cfg.recurrent is None or can_rewind(cfg, read_scalar(state.cache.length), kept)
        return kept if keeps else 0

    def resume(
        self, params: Params, state: SequenceState, tokens: np.ndarray, common: int, states: PromptStates | None = None
    ) -> tuple[SequenceState, PromptStates | None]:
        """`rewind_to` and `prefill`: begin a sequence of int32 `tokens` `[n]`, computing only what is new."""
        state, kept = self.rewind_to(state, tokens, common)
        return self.prefill(params, state, tokens[kept:-1], kept, states)

    def prefill(
        self, params: Params, state: SequenceState, tokens: np.ndarray, start: int = 0,
        states: PromptStates | None = None,
    ) -> tuple[SequenceState, PromptStates | None]:  # fmt: skip
        """Commit int32 `tokens` `[n]`, chunk by chunk, after the first `start`.

        A feature draft takes those of the same tokens, `states`: it commits the rows of all but the
        token after them, the root. The second result is the hidden states of `layers`; None without any.
        """
        chunks, last = [], None
        if states is not None:
            return self._prefill_fed(params, state, tokens, states), None
        for chunk, count in split_chunks(tokens, self.chunk_slots - start, self._most_small):
            done = self._fill[len(chunk)](params, state, chunk, np.int32(count))
            if self._layers:
                state, hidden, last = done
                chunks.append(hidden)
            else:
                state = done
        return state, PromptStates(chunks, last) if self._layers else None

    def _prefill_fed(
        self, params: Params, state: SequenceState, tokens: np.ndarray, states: PromptStates
    ) -> SequenceState:
        following, start = np.append(tokens[1:], 0), 0
        for number, hidden in enumerate(states.chunks):
            size, first = hidden.shape[0], 0 if number else states.first
            part = slice(start, start + size - first)
            chunk, count = pad_chunk(tokens[part], size)
            after, _ = pad_chunk(following[part], size)
            start += count
            rows = np.int32(count if start < len(tokens) else count - 1)
            fill = self._fill[size]
            state = fill(params, state, chunk, np.int32(count), after, hidden, rows, np.int32(first))
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
        return dataclasses.replace(new, cache=KVCache(key, value, state.cache.length, state.cache.recurrent))


def note_tokens(state: SequenceState, token: Array, count: Array, vocab: VocabShard) -> SequenceState:
    """Count the first `count` of `token`, of a prompt, in the history."""
    valid = jnp.arange(token.shape[0]) < count
    return dataclasses.replace(state, history=update_history(state.history, token, valid, vocab, generated=False))


def states_before(states: Array, count: Array, path: int) -> Array:
    """`PromptStates.last` after a chunk with hidden states [size, n * D], of which `count` rows matter."""
    return jnp.zeros((path, states.shape[1])).at[0].set(states[count - 1])


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


def plan_chunks(count: int, slots: int, most_small: int = MOST_SMALL) -> list[int]:
    """Chunk sizes that cover `count` tokens, padding included.

    The last chunk may be padded; it is a large one only in place of more than `most_small` small ones, and never if its
    padding would run over the end of a cache of `slots` slots (a write there would be moved back onto live slots).
    """
    small, large = CHUNKS
    sizes = [large] * (count // large)
    smalls = -(-(count % large) // small)
    if smalls > most_small and sum(sizes) + large <= slots:
        return [*sizes, large]
    return [*sizes, *[small] * smalls]


def split_chunks(tokens: np.ndarray, slots: int, most_small: int = MOST_SMALL) -> Iterator[tuple[np.ndarray, int]]:
    """Padded int32 chunks of `tokens` `[n]`, each with the number of tokens that count."""
    start = 0
    for size in plan_chunks(len(tokens), slots, most_small):
        yield pad_chunk(tokens[start : start + size], size)
        start += size


def pad_chunk(tokens: np.ndarray, size: int) -> tuple[np.ndarray, int]:
    """An int32 chunk of `size` that begins with `tokens`, and their number."""
    # Padded with its own last token: what that row computes is as sound as the rows that count.
    return np.pad(tokens, (0, size - len(tokens)), mode="edge").astype(np.int32), len(tokens)
