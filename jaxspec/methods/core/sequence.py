"""One model's side of a sequence: its state, how it starts, prefill. The target's in every method."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.methods.core.chunks import split_chunks, usable_chunks
from jaxspec.models.kv_cache import KVCache, commit_rows, init_cache
from jaxspec.models.params import Params
from jaxspec.models.transformer import forward, prefill, vocab_logits
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.program import Program
from jaxspec.sampling.choose import choose
from jaxspec.sampling.processors import History, init_history, update_history
from jaxspec.sampling.request import Request


@struct.dataclass
class TargetState:
    """State of one sequence.

    Attributes:
      cache: its length is n - 1 for n verified tokens.
      history: tokens seen, for penalties.
      root: int32 scalar, the last verified token.
    """

    cache: KVCache
    history: History
    root: jax.Array


class TargetSide:
    """Compiled functions that start a sequence and commit a prompt.

    Attributes:
      placement: the target.
      slots: capacity of its cache.
      state: shapes of a `TargetState`.
    """

    def __init__(self, placement: Placement, slots: int, role: str = "target"):
        """Declare the programs; nothing is compiled yet. `role` is part of their names."""
        self.placement = placement
        self.slots = slots
        cfg, vocab, plan = placement.cfg, placement.text_vocab, placement.plan
        scalar = placement.array((), jnp.int32)
        self.state = TargetState(placement.cache(slots), placement.history(), scalar)

        def begin(cache: KVCache, root: jax.Array) -> TargetState:
            history = update_history(init_history(vocab), root[None], jnp.ones(1, bool), vocab, generated=False)
            return TargetState(cache, history, root)

        def create(root):
            return begin(init_cache(cfg, placement.local_kv_heads, slots, placement.dtype), root)

        def restart(state, root):
            return begin(state.cache.replace(length=jnp.int32(0)), root)

        def fill(params, state, token, count):
            valid = jnp.arange(token.shape[0]) < count
            history = update_history(state.history, token, valid, vocab, generated=False)
            return state.replace(cache=prefill(params, cfg, token, count, state.cache), history=history)

        self._create = Program(f"{role} create", create, plan, [scalar], self.state)
        self._restart = Program(f"{role} restart", restart, plan, [self.state, scalar], self.state, donate=[0])
        self._fill = make_fill(role, fill, placement, self.state, slots)
        self.programs = (self._create, self._restart, *self._fill.values())

    def start(self, root: int, state: TargetState | None) -> TargetState:
        """See `Runner.start`."""
        if state is None:
            return self._create(np.int32(root))
        return self._restart(state, np.int32(root))

    def prefill(self, params: Params, state: TargetState, tokens: np.ndarray) -> TargetState:
        """See `Runner.prefill`."""
        return run_fill(self._fill, params, state, tokens, self.slots)


def next_token(
    params: Params, target: Placement, state: TargetState, request: Request
) -> tuple[TargetState, jax.Array]:
    """Run the root through the target and draw the token behind it, the new root; written for one shard.

    The root sits at position n - 1, which is the cache's length; the new token gets absolute position n.

    Returns:
      The state, and the token's log-probability under the processed distribution, float32 [].
    """
    position = state.cache.length[None]
    hidden, cache = forward(params, target.cfg, state.root[None], position, state.cache, jnp.ones((1, 1), bool))
    logits = vocab_logits(params, hidden)
    seen, counts = state.history.seen[None], state.history.counts[None]
    token, logprob = choose(logits, request.processors, seen, counts, request.key, position + 1, target.vocab)
    history = update_history(state.history, token, jnp.ones(1, bool), target.vocab, generated=True)
    return TargetState(commit_rows(cache, jnp.int32(1)), history, token[0]), logprob[0]


def make_fill(name: str, fill: Any, placement: Placement, state: Any, slots: int) -> dict[int, Program]:
    """Programs of `fill(params, state, tokens, count)`, by chunk size."""
    scalar = placement.array((), jnp.int32)
    programs = {}
    for size in usable_chunks(slots):
        args = [placement.params(), state, placement.array((size,), jnp.int32), scalar]
        programs[size] = Program(f"{name} prefill {size}", fill, placement.plan, args, state, donate=[1])
    return programs


def run_fill(programs: dict[int, Program], params: Params, state: Any, tokens: np.ndarray, slots: int) -> Any:
    """Commit int32 `tokens` `[n]` chunk by chunk."""
    for chunk, count in split_chunks(tokens, slots):
        state = programs[len(chunk)](params, state, chunk, np.int32(count))
    return state
