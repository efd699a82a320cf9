"""The draft's half of a round: the contract of drafters, the drafter with a model, and the passes that drafts share."""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxspec.methods.core.cost_model import CostModel
from jaxspec.methods.core.round import ModelParams
from jaxspec.methods.core.sequence import ModelSequence, PromptStates, SequenceState
from jaxspec.methods.core.verify import Draft, draft_shapes
from jaxspec.models.config import ModelConfig
from jaxspec.models.feature_draft import forward_draft, fuse
from jaxspec.models.kv_cache import KVCache, commit_rows
from jaxspec.models.params import Params
from jaxspec.models.transformer import forward, vocab_logits
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.program import Program
from jaxspec.runtime.transfer import read_scalar
from jaxspec.sampling.accept import Verified
from jaxspec.sampling.processors import history_shapes
from jaxspec.sampling.request import Request, request_shapes

# How a drafter makes a batch, for one shard: (parameters of the draft, state, what the last round verified, history,
# request, further operands) -> state, batch.
Propose = Callable[..., tuple[Any, Draft]]


class Drafter(abc.ABC):
    """The draft's half of a method."""

    shapes: Draft  # of what `draft` gives
    state: Any  # shapes of what `start` gives
    programs: Sequence[Program]  # everything that it may call
    idle_steps: int = 0  # tokens that a round may decode where it proposed none; 0 verifies the root as a batch
    slots: int = 0  # of the draft's cache; 0 without a model
    propose: Propose | None = None  # what `draft` runs; None where rounds have a dispatch each
    placement: Placement | None = None  # of its model
    operands: Any = ()  # what else `propose` takes
    draft_program: Program | None = None  # that `draft` dispatches

    @abc.abstractmethod
    def start(self, root: int, state: Any | None) -> Any:
        """State of an empty sequence; `state` is donated."""

    @abc.abstractmethod
    def prefill(self, params: ModelParams, state: Any, tokens: np.ndarray, states: PromptStates | None = None) -> Any:
        """Commit int32 `tokens` `[n]`; `states` are the target's, for a feature draft."""

    def resume(
        self, params: ModelParams, state: Any, tokens: np.ndarray, common: int, states: PromptStates | None = None
    ) -> Any:
        """See `Runner.resume` and `prefill`; the default, of a drafter without a model, begins anew."""
        return self.prefill(params, self.start(int(tokens[-1]), state), tokens[:-1])

    @abc.abstractmethod
    def draft(
        self, params: ModelParams, target: SequenceState, state: Any, verified: Verified, request: Request
    ) -> tuple[SequenceState, Any, Draft]:
        """Take in what the last round verified, and propose a batch for the next; dispatches only.

        `state` is donated. A draft made of the target's own layers runs in the target's cache: so is `target` then.
        """

    def use_costs(self, costs: CostModel) -> None:
        """Weigh drafts with these figures from now on; the default weighs nothing."""
        return None

    def skip(self, params: ModelParams, state: Any, verified: Verified) -> Any:
        """Take in what the last round verified, and propose nothing: the next round decodes plainly."""
        raise NotImplementedError

    def num_rows_kept(self, state: Any) -> int:
        """Rows of the draft's cache; waits for what runs on `state`."""
        raise NotImplementedError


class ModelDrafter(Drafter):
    """A `Drafter` with a model of its own; the state of its cache is `sequence` in its state."""

    def __init__(self, placement: Placement, slots: int, num_rows: int, extra: Any = None, *, keeps_text: bool = False):
        """Declare the programs of a cache of `slots` slots; `extra` are shapes of `Draft.extra`."""
        self.placement: Placement = placement
        self._sequence = ModelSequence(placement, slots, "draft", keeps_text=keeps_text)
        self.slots = slots
        self.shapes = draft_shapes(placement, num_rows, extra)
        self.programs = tuple(self._sequence.programs)

    def declare(self, verified: Verified, state: Any, draft: Callable[..., Any]) -> None:
        """Declare how a batch is proposed: a function of parameters, state, `verified`, history and request."""
        placement, self.state = self.placement, state
        args = [placement.params(), state, verified, history_shapes(placement), request_shapes(placement)]
        self.draft_program = Program("draft", draft, placement.plan, args, (state, self.shapes), donate=[1])
        self.propose = lambda *arguments: draft(*arguments[:-1])
        self.programs = (*self.programs, self.draft_program)

    def declare_begin(self, state: Any, begin: Callable[[SequenceState], Any]) -> None:
        """Declare how the state of an empty sequence is made."""
        plan = self.placement.plan
        self._begin = Program("draft begin", begin, plan, [self._sequence.state], state, donate=[0])
        self.programs = (*self.programs, self._begin)

    def start(self, root: int, state: Any | None) -> Any:
        return self._begin(self._sequence.start(root, None if state is None else state.sequence))

    def prefill(self, params: ModelParams, state: Any, tokens: np.ndarray, states: PromptStates | None = None) -> Any:
        assert params.draft is not None
        sequence, _ = self._sequence.prefill(params.draft, state.sequence, tokens, states=states)
        return dataclasses.replace(state, sequence=sequence)

    def resume(
        self, params: ModelParams, state: Any, tokens: np.ndarray, common: int, states: PromptStates | None = None
    ) -> Any:
        assert params.draft is not None
        return self._begin(self._sequence.resume(params.draft, state.sequence, tokens, common, states)[0])

    def num_rows_kept(self, state: Any) -> int:
        return read_scalar(state.sequence.cache.length)

    def draft(
        self, params: ModelParams, target: SequenceState, state: Any, verified: Verified, request: Request
    ) -> tuple[SequenceState, Any, Draft]:
        assert self.draft_program is not None
        return target, *self.draft_program(params.draft, state, verified, target.history, request)


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


def run_draft(
    params: Params, cfg: ModelConfig, token: Array, states: Array | None, position: Array, cache: KVCache,
    window_mask: Array, **window: Array | None,
) -> tuple[Array, Array | None, KVCache]:  # fmt: skip
    """A pass of a draft of either kind: what the head sees, the rows' own states, and the cache.

    `states`, float32 [T, D], are those of the rows' parents; None for a draft that is not fed them, as is the second
    result then. `window` are further arguments of `forward`.
    """
    if states is None:
        hidden, cache = forward(params, cfg, token, position, cache, window_mask, **window)
        return hidden, None, cache
    return forward_draft(params, cfg, token, states, position, cache, window_mask, **window)


def keep_states(states: Array | None, own: Array | None, first: Array) -> Array | None:
    """Own states [w, D] of a pass among those of all nodes, [M, D], from row `first` on."""
    return None if states is None or own is None else jax.lax.dynamic_update_slice(states, own, (first, jnp.int32(0)))


class Root(NamedTuple):
    """A draft's root, evaluated: what its tree begins with."""

    token: Array  # int32 []
    logits: Array  # [1, V_local], after it
    states: Array  # float32 [1, D], its own
    sequence: SequenceState  # window slot 0 of its cache is the root
    produced: Array  # int32 [], position of its children in the text


def take_verified(params: Params, cfg: ModelConfig, sequence: SequenceState, verified: Verified) -> Root:
    """Run everything that was verified with the target's true states; for one shard.

    Rows that the draft ran with its own states are computed again: what they stand on were guesses.
    """
    hidden, states, taken = run_verified(params, cfg, sequence, verified)
    last = verified.count - 1
    return Root(verified.tokens[last], vocab_logits(params, cfg, hidden), states, taken, taken.seen)


def run_verified(
    params: Params, cfg: ModelConfig, sequence: SequenceState, verified: Verified
) -> tuple[Array, Array, SequenceState]:
    """`take_verified` without its head: what the head sees of the root, and its own state, float32 [1, D] each."""
    # The root of the round before lies in the window, with true states.
    known = jnp.maximum(sequence.seen - 1, 0) - sequence.cache.length
    cache: KVCache = commit_rows(sequence.cache, known)
    rows = verified.tokens.shape[0]
    position = cache.length + jnp.arange(rows, dtype=jnp.int32)
    assert verified.states is not None
    hidden, own, cache = forward_draft(
        params, cfg, verified.tokens, fuse(params, cfg, verified.states, verified.count), position, cache,
        jnp.tril(jnp.ones((rows, rows), bool)), active_rows=verified.count,
    )  # fmt: skip
    last = verified.count - 1
    seen = sequence.seen + verified.count
    hidden, own = (jnp.take(x, last[None], axis=0, mode="clip") for x in (hidden, own))
    return hidden, own, dataclasses.replace(sequence, cache=commit_rows(cache, last), seen=seen)
