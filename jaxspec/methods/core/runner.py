"""What runs a method: the contract with the engine, and the runner of every method that drafts and verifies in turn."""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import struct

from jaxspec.config import SamplingParams
from jaxspec.methods.core.executor import ResidentExecutor, TargetExecutor
from jaxspec.methods.core.round import STEPS_PER_DISPATCH, ModelParams, Round, StepOutput, verified_shapes
from jaxspec.methods.core.sequence import ModelSequence, SequenceState, cache_slots
from jaxspec.methods.core.timing import RoundTimer
from jaxspec.methods.core.verify import Draft, Rule, draft_shapes
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.program import Program
from jaxspec.sampling.accept import Verified
from jaxspec.sampling.request import Request


class Runner:
    """A method bound to models and a capacity: compiled programs and what the host remembers.

    The engine calls

        state = runner.start(root, state)                  # a new sequence; reuses the buffers of a finished one
        state = runner.prefill(params, state, tokens)      # every prompt token but the last, the root
        state, round_, least = runner.round(params, state, request, room)   # again and again; dispatches only
        runner.observe(state, output)                      # once for each round, in order, when it was read
        runner.close()                                     # the generation has ended

    Round r is read while round r + 1 runs. State goes in and comes out and is donated; parameters never are.
    """

    slots: int  # of the target's cache
    programs: Sequence[Program]  # everything that a generation may call, to be compiled before it starts

    def start(self, root: int, state: Any | None) -> Any:
        """State of an empty sequence whose last verified token is `root`; `state` is donated."""
        raise NotImplementedError

    def prefill(self, params: ModelParams, state: Any, tokens: np.ndarray) -> Any:
        """Commit int32 `tokens` `[n]` to the caches."""
        raise NotImplementedError

    def place_request(self, sampling: SamplingParams, seed: int, prompt_tokens: int = 0) -> Any:
        """What `round` needs to know of a generation, on the devices; `min_tokens` counts from the prompt's end."""
        raise NotImplementedError

    def round(self, params: ModelParams, state: Any, request: Any, room: int) -> tuple[Any, Round, int]:
        """Dispatch one round; returns before it has run.

        `room` is the most tokens that are wanted of a round without a draft, at least 1. Returns the state, the round,
        and the least number of tokens that it brings.
        """
        raise NotImplementedError

    def observe(self, state: Any, output: StepOutput) -> None:
        """Take in a round that the host has read; rounds of one sequence come in order."""

    def report(self) -> dict[str, Any] | None:
        """What the method chose and why, for `DecodeStats.choice`."""
        return None

    def close(self) -> None:
        """A generation has ended, or its caller stopped listening."""


class Drafter:
    """The draft's half of a method."""

    shapes: Draft  # of what `draft` gives
    programs: Sequence[Program]  # everything that it may call
    idle_steps: int = 0  # tokens that a round may decode where it proposed none; 0 verifies the root as a batch

    def start(self, root: int, state: Any | None) -> Any:
        """State of an empty sequence; `state` is donated."""
        raise NotImplementedError

    def prefill(self, params: ModelParams, state: Any, tokens: np.ndarray) -> Any:
        """Commit int32 `tokens` `[n]`."""
        raise NotImplementedError

    def draft(
        self, params: ModelParams, target: SequenceState, state: Any, verified: Verified, request: Request
    ) -> tuple[SequenceState, Any, Draft]:
        """Take in what the last round verified, and propose a batch for the next; dispatches only.

        `state` is donated. A draft made of the target's own layers runs in the target's cache: so is `target` then.
        """
        raise NotImplementedError

    def skip(self, state: Any, verified: Verified) -> Any:
        """Take in what the last round verified, and propose nothing: the next round decodes plainly."""
        raise NotImplementedError


class ModelDrafter(Drafter):
    """A `Drafter` with a model of its own; the state of its cache is `sequence` in its state."""

    def __init__(self, placement: Placement, slots: int, num_rows: int, extra: Any = None):
        """Declare the programs of a cache of `slots` slots; `extra` are shapes of `Draft.extra`."""
        self._placement = placement
        self._sequence = ModelSequence(placement, slots, "draft", keeps_text=False)
        self.shapes = draft_shapes(placement, num_rows, extra)

    def declare(self, verified: Verified, state: Any, draft: Callable[..., Any]) -> None:
        """Declare how a batch is proposed: a function of parameters, state, `verified`, history and request."""
        placement = self._placement
        args = [placement.params(), state, verified, placement.history(), placement.request()]
        self._draft = Program("draft", draft, placement.plan, args, (state, self.shapes), donate=[1])
        self.programs = (*self._sequence.programs, self._draft)

    def declare_begin(self, state: Any, begin: Callable[[SequenceState], Any]) -> None:
        """Declare how the state of an empty sequence is made."""
        plan = self._placement.plan
        self._begin = Program("draft begin", begin, plan, [self._sequence.state], state, donate=[0])
        self.programs = (*self.programs, self._begin)

    def start(self, root: int, state: Any | None) -> Any:
        return self._begin(self._sequence.start(root, None if state is None else state.sequence))

    def prefill(self, params: ModelParams, state: Any, tokens: np.ndarray) -> Any:
        assert params.draft is not None
        return dataclasses.replace(state, sequence=self._sequence.prefill(params.draft, state.sequence, tokens))

    def draft(
        self, params: ModelParams, target: SequenceState, state: Any, verified: Verified, request: Request
    ) -> tuple[SequenceState, Any, Draft]:
        return target, *self._draft(params.draft, state, verified, target.history, request)


@dataclasses.dataclass
class HostState:
    """What the host knows of one generation."""

    # Of each round that was launched and not read yet, whether it could draft.
    allowed: collections.deque[bool] = dataclasses.field(default_factory=collections.deque)


@struct.dataclass
class SpeculativeState:
    """State of both halves, what the last round verified, and what the host knows."""

    target: SequenceState
    draft: Any
    verified: Verified
    host: HostState = struct.field(pytree_node=False)


class SpeculativeRunner(Runner):
    """Drafts and verifies in turn on one set of devices: two programs a round."""

    def __init__(
        self, target: Placement, tokens: int, make_drafter: Callable[[Verified], Drafter], *, max_path: int,
        num_rows: int, rule: Rule, dynamic_rows: bool, timer: RoundTimer | None = None,
        report: Callable[[], dict[str, Any]] | None = None,
    ):  # fmt: skip
        """Join a drafter to a target for sequences of `tokens` tokens; `make_drafter` takes shapes of a `Verified`.

        A batch has `num_rows` (bs) rows, the root included. `max_path` (P) is its longest path and the bonus token.
        `rule` and `dynamic_rows` are those of `verify`, `report` is that of `Runner`. Where `timer` finds that drafts
        do not pay, rounds are those of plain decoding; None drafts always.
        """
        verified = verified_shapes(target, max_path)
        self.slots = cache_slots(tokens, max(verified.tokens.shape[0], num_rows))
        self.drafter, self.timer = make_drafter(verified), timer
        self.executor: TargetExecutor = ResidentExecutor(
            target, self.slots, steps=STEPS_PER_DISPATCH if timer else 0, max_path=max_path, draft=self.drafter.shapes,
            rule=rule, dynamic_rows=dynamic_rows, idle_steps=self.drafter.idle_steps,
        )  # fmt: skip
        self._report = report
        self.programs = (*self.executor.programs, *self.drafter.programs)

    def start(self, root: int, state: SpeculativeState | None) -> SpeculativeState:
        if self.timer is not None:
            self.timer.begin_text()
        return SpeculativeState(
            self.executor.start(root, None if state is None else state.target),
            self.drafter.start(root, None if state is None else state.draft),
            first_verified(self.executor.verified, root),
            HostState(),
        )

    def prefill(self, params: ModelParams, state: SpeculativeState, tokens: np.ndarray) -> SpeculativeState:
        return dataclasses.replace(
            state,
            target=self.executor.prefill(params.target, state.target, tokens),
            draft=self.drafter.prefill(params, state.draft, tokens),
        )

    def place_request(self, sampling: SamplingParams, seed: int, prompt_tokens: int = 0) -> Request:
        return self.executor.place_request(sampling, seed, prompt_tokens)

    def round(
        self, params: ModelParams, state: SpeculativeState, request: Request, room: int
    ) -> tuple[SpeculativeState, Round, int]:
        allowed = self.timer is None or self.timer.may_draft()
        state.host.allowed.append(allowed)
        if not allowed:
            draft = self.drafter.skip(state.draft, state.verified)
            target, verified, round_, least = self.executor.decode(params.target, state.target, request, room)
            return SpeculativeState(target, draft, verified, state.host), round_, least
        target, draft, batch = self.drafter.draft(params, state.target, state.draft, state.verified, request)
        target, verified, round_ = self.executor.verify(params.target, target, batch, request)
        return SpeculativeState(target, draft, verified, state.host), round_, 1

    def observe(self, state: SpeculativeState, output: StepOutput) -> None:
        allowed = state.host.allowed.popleft()
        if self.timer is not None:
            self.timer.observe(output, allowed=allowed)

    def report(self) -> dict[str, Any] | None:
        if self._report is None:
            return None
        return self._report() | ({} if self.timer is None else self.timer.report())


def first_verified(shapes: Verified, root: int) -> Verified:
    """What a sequence begins with: its root, verified by definition; on the devices."""
    tokens = np.zeros(shapes.tokens.shape, np.int32)
    tokens[0] = root
    values = (tokens, np.int32(1), np.zeros(shapes.path.shape, np.int32), np.zeros(shapes.logprob.shape, np.float32))
    return Verified(
        *(jax.device_put(value, shape.sharding) for value, shape in zip(values, jax.tree.leaves(shapes), strict=True))
    )
