"""Runner of every method that drafts and verifies in turn on one set of devices: two programs a round."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.config import SamplingParams
from jaxspec.methods.base import ROUND_HEADER, ModelParams, Round, place_request
from jaxspec.methods.core.chunks import cache_slots
from jaxspec.methods.core.sequence import TargetSide, TargetState
from jaxspec.methods.core.verify import Draft, Outcome, Rule, verify
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.program import Program
from jaxspec.sampling.processors import History
from jaxspec.sampling.request import Request


class Drafter(Protocol):
    """The draft's half of a method: how its sequence starts, prefill, and one compiled `draft` a round."""

    @property
    def programs(self) -> Sequence[Program]:
        """Everything that it may call."""
        ...

    @property
    def drafted(self) -> Draft:
        """Shapes of what `draft` gives."""
        ...

    def start(self, state: Any | None) -> Any:
        """State of an empty sequence; `state` is donated."""
        ...

    def prefill(self, params: Any, state: Any, tokens: np.ndarray) -> Any:
        """Commit int32 `tokens` `[n]`."""
        ...

    def draft(self, params: Any, state: Any, outcome: Outcome, history: History, request: Request) -> tuple[Any, Draft]:
        """Take in what the last round verified, and propose a batch for the next; dispatches only."""
        ...


@struct.dataclass
class SpeculativeState:
    """State of both halves, and what the last round verified."""

    target: TargetState
    draft: Any
    outcome: Outcome


class SpeculativeRunner:
    """Compiled functions of a drafter and of verification, for one placement and capacity."""

    def __init__(self, target: Placement, tokens: int, drafter: Drafter, *, steps: int, rule: Rule, varies: bool):
        """Join a drafter to a target.

        Args:
          target: the target.
          tokens: longest sequence.
          drafter: proposes batches.
          steps: P, the longest path of a batch and the bonus token.
          rule: which tokens are accepted.
          varies: see `verify`.
        """
        self.slots = cache_slots(tokens, max(steps, drafter.drafted.batch.token.shape[0]))
        self._steps = steps
        self._drafter = drafter
        self._side = TargetSide(target, self.slots)
        self._outcome = outcome_shapes(target, steps)

        def check(params, state, drafted, request):
            return verify(params, target, state, drafted, request, steps=steps, rule=rule, varies=varies)

        round_ = Round(target.array((ROUND_HEADER + steps,), jnp.int32), target.array((steps,), jnp.float32))
        args = [target.params(), self._side.state, drafter.drafted, target.request()]
        out = (self._side.state, self._outcome, round_)
        self._verify = Program("verify", check, target.plan, args, out, donate=[1])
        self.programs = (*self._side.programs, *drafter.programs, self._verify)

    def start(self, root: int, state: SpeculativeState | None) -> SpeculativeState:
        """See `Runner.start`."""
        tokens = np.zeros(self._steps, np.int32)
        tokens[0] = root
        # What a sequence begins with: its root, verified by definition.
        first = Outcome(tokens, np.int32(1), np.zeros(self._steps, np.int32))  # pyright: ignore[reportArgumentType]
        return SpeculativeState(
            self._side.start(root, None if state is None else state.target),
            self._drafter.start(None if state is None else state.draft),
            jax.tree.map(lambda leaf, shape: jax.device_put(leaf, shape.sharding), first, self._outcome),
        )

    def prefill(self, params: ModelParams, state: SpeculativeState, tokens: np.ndarray) -> SpeculativeState:
        """See `Runner.prefill`."""
        return dataclasses.replace(
            state,
            target=self._side.prefill(params.target, state.target, tokens),
            draft=self._drafter.prefill(params.draft, state.draft, tokens),
        )

    def place_request(self, sampling: SamplingParams, seed: int) -> Request:
        """See `Runner.place_request`."""
        placement = self._side.placement
        return place_request(placement, sampling, seed, placement.cfg.vocab_size)

    def round(self, params: ModelParams, state: SpeculativeState, request: Request) -> tuple[SpeculativeState, Round]:
        """See `Runner.round`."""
        draft, drafted = self._drafter.draft(params.draft, state.draft, state.outcome, state.target.history, request)
        target, outcome, round_ = self._verify(params.target, state.target, drafted, request)
        return SpeculativeState(target, draft, outcome), round_


def outcome_shapes(target: Placement, steps: int) -> Outcome:
    """Shapes of an `Outcome`."""
    row = target.array((steps,), jnp.int32)
    return Outcome(row, target.array((), jnp.int32), row)
