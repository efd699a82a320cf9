"""Plain autoregressive decoding: one target pass, one token."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.cache import KVCache, commit_rows, init_cache
from jaxspec.methods.base import Round
from jaxspec.methods.chunks import split_chunks, usable_chunks
from jaxspec.methods.program import Program
from jaxspec.models.params import Params
from jaxspec.models.transformer import forward, prefill, vocab_logits
from jaxspec.placement import Placement
from jaxspec.sampling.choose import choose
from jaxspec.sampling.processors import History, init_history, update_history
from jaxspec.sampling.request import Request


@dataclasses.dataclass(frozen=True)
class Autoregressive:
    """One token per round: the baseline that every other method must reproduce and beat."""

    name: ClassVar[str] = "ar"

    def window(self) -> int:
        """One slot: the root's."""
        return 1

    def bind(self, target: Placement, slots: int) -> "AutoregressiveRunner":
        """See `Method.bind`."""
        return AutoregressiveRunner(target, slots)


@struct.dataclass
class ChainState:
    """State of one sequence.

    Attributes:
      cache: target cache; its length is n - 1 for n verified tokens.
      history: tokens seen, for penalties.
      root: int32 scalar, the last verified token.
    """

    cache: KVCache
    history: History
    root: jax.Array


class AutoregressiveRunner:
    """Compiled functions of `Autoregressive` for one placement and capacity."""

    def __init__(self, target: Placement, slots: int):
        """See `Autoregressive.bind`."""
        self.slots = slots
        cfg, vocab, plan = target.cfg, target.vocab, target.plan
        params = target.params()
        scalar = target.array((), jnp.int32)
        state = ChainState(target.cache(slots), target.history(), scalar)
        round_ = Round(target.array((2,), jnp.int32), target.array((1,), jnp.float32))

        def begin(cache: KVCache, root: jax.Array) -> ChainState:
            history = update_history(init_history(vocab), root[None], jnp.ones(1, bool), vocab, generated=False)
            return ChainState(cache, history, root)

        def create(root):
            return begin(init_cache(cfg, target.local_kv_heads, slots, target.dtype), root)

        def restart(state, root):
            return begin(state.cache.replace(length=jnp.int32(0)), root)

        def fill(params, state, token, count):
            valid = jnp.arange(token.shape[0]) < count
            history = update_history(state.history, token, valid, vocab, generated=False)
            return state.replace(cache=prefill(params, cfg, token, count, state.cache), history=history)

        def step(params, state, request):
            return decode_token(params, cfg, vocab, state, request)

        self._create = Program("create", create, plan, [scalar], state)
        self._restart = Program("restart", restart, plan, [state, scalar], state, donate=[0])
        self._fill = {}
        for size in usable_chunks(slots):
            args = [params, state, target.array((size,), jnp.int32), scalar]
            self._fill[size] = Program(f"prefill{size}", fill, plan, args, state, donate=[1])
        self._step = Program("round", step, plan, [params, state, target.request()], (state, round_), donate=[1])
        self.programs = (self._create, self._restart, *self._fill.values(), self._step)

    def start(self, root: int, state: ChainState | None) -> ChainState:
        """See `Runner.start`."""
        if state is None:
            return self._create(np.int32(root))
        return self._restart(state, np.int32(root))

    def prefill(self, params: Params, state: ChainState, tokens: np.ndarray) -> ChainState:
        """See `Runner.prefill`."""
        for chunk, count in split_chunks(tokens, self.slots):
            state = self._fill[len(chunk)](params, state, chunk, np.int32(count))
        return state

    def round(self, params: Params, state: ChainState, request: Request) -> tuple[ChainState, Round]:
        """See `Runner.round`."""
        return self._step(params, state, request)


def decode_token(params, cfg, vocab, state: ChainState, request: Request) -> tuple[ChainState, Round]:
    """Run the root through the target and draw the next token; written for one shard.

    The root sits at position n - 1, which is the cache's length; the new token gets absolute position n.
    """
    position = state.cache.length[None]
    hidden, cache = forward(params, cfg, state.root[None], position, state.cache, jnp.ones((1, 1), bool))
    logits = vocab_logits(params, hidden)
    with jax.named_scope("choose"):
        seen, counts = state.history.seen[None], state.history.counts[None]
        token, logprob = choose(logits, request.processors, seen, counts, request.key, position + 1, vocab)
        history = update_history(state.history, token, jnp.ones(1, bool), vocab, generated=True)
    state = ChainState(commit_rows(cache, jnp.int32(1)), history, token[0])
    return state, Round(jnp.concatenate([jnp.ones(1, jnp.int32), token]), logprob)
