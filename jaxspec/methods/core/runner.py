"""What runs a method: the contract with the engine, and the runner of every method that drafts and verifies in turn."""

import abc
import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from flax import struct

from jaxspec.config import SamplingParams
from jaxspec.methods.core.cost_model import CostModel
from jaxspec.methods.core.executor import TargetExecutor, make_executor
from jaxspec.methods.core.feature_sequence import DraftSequence, StatesChunk, kept_with_states
from jaxspec.methods.core.round import (
    STEPS_PER_DISPATCH,
    ModelParams,
    Round,
    StepOutput,
    first_verified,
    verified_shapes,
)
from jaxspec.methods.core.rounds import ROUNDS_PER_DISPATCH, Propose, declare_rounds, share_dispatches
from jaxspec.methods.core.sequence import ModelSequence, SequenceState, cache_slots, fit_kept
from jaxspec.methods.core.timing import RoundTimer
from jaxspec.methods.core.verify import Draft, Rule, draft_shapes
from jaxspec.runtime import trace
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.program import Program
from jaxspec.runtime.transfer import read_scalar
from jaxspec.sampling.accept import Verified
from jaxspec.sampling.request import Request


class Runner(abc.ABC):
    """A method bound to models and a capacity: compiled programs and what the host remembers.

    The engine calls

        state = runner.start(root, state)                  # a new sequence; reuses the buffers of a finished one
        state = runner.prefill(params, state, tokens)      # every prompt token but the last, the root
        state = runner.resume(params, state, tokens, common)   # both, after a sequence with the same first tokens
        state, round_, least = runner.round(params, state, request, room)   # again and again; dispatches only
        runner.observe(state, outputs)                     # once for each dispatch, in order, when it was read
        runner.close()                                     # the generation has ended

    One dispatch is read while the next one runs. State goes in and comes out and is donated; parameters never are.
    """

    slots: int  # of the target's cache
    held: Any  # shapes of what an answer holds on the devices: state, and what is drafted and verified
    programs: Sequence[Program]  # everything that a generation may call, to be compiled before it starts
    single: Sequence[Program] = ()  # of one round, where `programs` has one for several; a trace shows these
    late: frozenset[str] = frozenset()  # names of those that no first token needs
    executor: TargetExecutor  # of the target
    calibrated: bool = True  # False as long as `calibrate` has to choose something before a generation can start

    @property
    def in_flight(self) -> int:
        """Dispatches that run or wait on the devices while one is read."""
        return self.executor.in_flight

    def calibrate(self, params: ModelParams, state: Any | None) -> Any:
        """Measure passes with the loaded weights, and settle what depends on their times; may compile.

        The engine calls it once, when the weights are there. `state`, if there is one, is donated; returns the state of
        some sequence, or None.
        """
        return state

    @abc.abstractmethod
    def start(self, root: int, state: Any | None) -> Any:
        """State of an empty sequence whose last verified token is `root`; `state` is donated."""

    @abc.abstractmethod
    def prefill(self, params: ModelParams, state: Any, tokens: np.ndarray) -> Any:
        """Commit int32 `tokens` `[n]` to the caches."""

    @abc.abstractmethod
    def resume(self, params: ModelParams, state: Any, tokens: np.ndarray, common: int) -> Any:
        """Begin a sequence of int32 `tokens` `[n]`, the last of which is the root, computing only what is new.

        `state`, which is donated, is that of a sequence with the same first `common` tokens, below n, whose capacity
        may be smaller. What comes is what `start` and `prefill` give.
        """

    @abc.abstractmethod
    def place_request(self, sampling: SamplingParams, seed: int, prompt_tokens: int = 0) -> Any:
        """What `round` needs to know of a generation, on the devices; `min_tokens` counts from the prompt's end."""

    @abc.abstractmethod
    def round(self, params: ModelParams, state: Any, request: Any, room: int) -> tuple[Any, Round, int]:
        """Dispatch one round or a few; returns before they have run.

        `room` is the most tokens that are wanted of rounds without a draft, at least 1. Returns the state, the round or
        rounds (see `read_rounds`), and the least number of tokens that they bring.
        """

    def num_cached(self, state: Any, common: int, count: int) -> int:
        """How many of `common` tokens `resume` keeps, of a text with `count` tokens before its root."""
        return fit_kept(common, count, self.slots)

    def observe(self, state: Any, outputs: Sequence[StepOutput]) -> None:
        """Take in the rounds of one dispatch, which the host has read; those of one sequence come in order."""
        return None

    def report(self) -> dict[str, Any] | None:
        """What the method chose and why, for `DecodeStats.choice`."""
        return None

    def close(self) -> None:
        """A generation has ended, or its caller stopped listening."""
        return None


class Drafter(abc.ABC):
    """The draft's half of a method."""

    shapes: Draft  # of what `draft` gives
    state: Any  # shapes of what `start` gives
    programs: Sequence[Program]  # everything that it may call
    idle_steps: int = 0  # tokens that a round may decode where it proposed none; 0 verifies the root as a batch
    slots: int = 0  # of the draft's cache, where it is fed hidden states
    propose: Propose | None = None  # what `draft` runs; None where rounds have a dispatch each
    placement: Placement | None = None  # of its model
    operands: Any = ()  # what else `propose` takes
    draft_program: Program | None = None  # that `draft` dispatches

    @abc.abstractmethod
    def start(self, root: int, state: Any | None) -> Any:
        """State of an empty sequence; `state` is donated."""

    @abc.abstractmethod
    def prefill(self, params: ModelParams, state: Any, tokens: np.ndarray) -> Any:
        """Commit int32 `tokens` `[n]`."""

    def resume(self, params: ModelParams, state: Any, tokens: np.ndarray, common: int) -> Any:
        """See `Runner.resume`; the default, of a drafter without a model, begins anew."""
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

    def prefill_with_states(
        self, params: ModelParams, state: Any, tokens: np.ndarray, chunks: Sequence[StatesChunk]
    ) -> Any:
        """`prefill` of a draft that is fed the hidden states of `chunks`; see `DraftSequence`."""
        raise NotImplementedError

    def resume_with_states(
        self, params: ModelParams, state: Any, tokens: np.ndarray, kept: int, chunks: Sequence[StatesChunk]
    ) -> Any:
        """`resume` of such a draft, of which the first `kept` rows stay."""
        raise NotImplementedError

    def num_rows_kept(self, state: Any) -> int:
        """Rows of such a draft's cache that stand on true states; waits for what runs on `state`."""
        raise NotImplementedError


class ModelDrafter(Drafter):
    """A `Drafter` with a model of its own; the state of its cache is `sequence` in its state."""

    def __init__(self, placement: Placement, slots: int, num_rows: int, extra: Any = None):
        """Declare the programs of a cache of `slots` slots; `extra` are shapes of `Draft.extra`."""
        self.placement: Placement = placement
        features = placement.cfg.features
        kind = ModelSequence if features is None else DraftSequence
        self._sequence = kind(placement, slots, "draft", keeps_text=False)
        self.slots = slots
        self.shapes = draft_shapes(placement, num_rows, extra)

    def declare(self, verified: Verified, state: Any, draft: Callable[..., Any]) -> None:
        """Declare how a batch is proposed: a function of parameters, state, `verified`, history and request."""
        placement, self.state = self.placement, state
        args = [placement.params(), state, verified, placement.history(), placement.request()]
        self.draft_program = Program("draft", draft, placement.plan, args, (state, self.shapes), donate=[1])
        self.propose = lambda *arguments: draft(*arguments[:-1])
        self.programs = (*self._sequence.programs, self.draft_program)

    def declare_begin(self, state: Any, begin: Callable[[SequenceState], Any]) -> None:
        """Declare how the state of an empty sequence is made."""
        plan = self.placement.plan
        self._begin = Program("draft begin", begin, plan, [self._sequence.state], state, donate=[0])
        self.programs = (*self.programs, self._begin)

    def start(self, root: int, state: Any | None) -> Any:
        return self._begin(self._sequence.start(root, None if state is None else state.sequence))

    def prefill(self, params: ModelParams, state: Any, tokens: np.ndarray) -> Any:
        assert params.draft is not None
        return dataclasses.replace(state, sequence=self._sequence.prefill(params.draft, state.sequence, tokens))

    def resume(self, params: ModelParams, state: Any, tokens: np.ndarray, common: int) -> Any:
        assert params.draft is not None
        return self._begin(self._sequence.resume(params.draft, state.sequence, tokens, common))

    @property
    def _fed(self) -> DraftSequence:
        assert isinstance(self._sequence, DraftSequence)
        return self._sequence

    def prefill_with_states(
        self, params: ModelParams, state: Any, tokens: np.ndarray, chunks: Sequence[StatesChunk]
    ) -> Any:
        assert params.draft is not None
        sequence = self._fed.prefill_with_states(params.draft, state.sequence, tokens, chunks)
        return dataclasses.replace(state, sequence=sequence)

    def resume_with_states(
        self, params: ModelParams, state: Any, tokens: np.ndarray, kept: int, chunks: Sequence[StatesChunk]
    ) -> Any:
        assert params.draft is not None
        return self._begin(self._fed.resume_with_states(params.draft, state.sequence, tokens, kept, chunks))

    def num_rows_kept(self, state: Any) -> int:
        return read_scalar(state.sequence.cache.length)

    def draft(
        self, params: ModelParams, target: SequenceState, state: Any, verified: Verified, request: Request
    ) -> tuple[SequenceState, Any, Draft]:
        assert self.draft_program is not None
        return target, *self.draft_program(params.draft, state, verified, target.history, request)


@dataclasses.dataclass
class HostState:
    """What the host knows of one generation."""

    # Of each dispatch that was not read yet, whether it could draft; None while programs were loaded.
    allowed: collections.deque[bool | None] = dataclasses.field(default_factory=collections.deque)


@struct.dataclass
class SpeculativeState:
    """State of both halves, what the last round verified, and what the host knows."""

    target: SequenceState
    draft: Any
    verified: Verified
    host: HostState = struct.field(pytree_node=False)


class SpeculativeRunner(Runner):
    """Drafts and verifies in turn on one set of devices: two programs a round, or one for several rounds."""

    def __init__(
        self, target: Placement, tokens: int, make_drafter: Callable[[Verified], Drafter], *, max_path: int,
        num_rows: int, rule: Rule, dynamic_rows: bool, timer: RoundTimer | None = None,
        draft: Placement | None = None,
    ):  # fmt: skip
        """Join a drafter to a target for sequences of `tokens` tokens; `make_drafter` takes shapes of a `Verified`.

        A batch has `num_rows` (bs) rows, the root included. `max_path` (P) is its longest path and the bonus token.
        `rule` and `dynamic_rows` are those of `verify`. Where `timer` finds that drafts do not pay, rounds are those of
        plain decoding; None drafts always. `draft` is the drafter's model: where it is fed hidden states of the target,
        every round gives them.
        """
        layers = () if draft is None or draft.cfg.features is None else draft.cfg.features.layers
        verified = verified_shapes(target, max_path, layers)
        self.slots = cache_slots(tokens, max(verified.tokens.shape[0], num_rows))
        self.drafter, self.timer = make_drafter(verified), timer
        self._layers = layers
        self.executor: TargetExecutor = make_executor(
            target, self.slots, steps=STEPS_PER_DISPATCH if timer else 0, max_path=max_path, draft=self.drafter.shapes,
            rule=rule, dynamic_rows=dynamic_rows, idle_steps=self.drafter.idle_steps, layers=layers,
        )  # fmt: skip
        self.held = (self.executor.state, self.drafter.state, self.drafter.shapes, self.executor.verified)
        self.programs = (*self.executor.programs, *self.drafter.programs)
        # Programs of one round; where rounds share a dispatch, measurements and traces alone run them.
        self.single = tuple(filter(None, (self.drafter.draft_program, self.executor.verify_program)))
        self.shared_rounds = None
        propose, model = self.drafter.propose, self.drafter.placement
        if propose is not None and self.executor.check is not None and share_dispatches(target, model, num_rows):
            shapes = () if model is None else model.params()
            self.shared_rounds = declare_rounds(
                self.executor, propose, shapes, self.drafter.state, self.drafter.operands
            )
            self.programs = (*(one for one in self.programs if one not in self.single), self.shared_rounds)
        if timer is not None:  # its first rounds are plain
            self.late = frozenset({"draft", "verify", "verify open", "verify close", "rounds"})

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
        if self._layers:
            target, chunks, states = self.executor.feeding().prefill_with_states(
                params.target, state.target, tokens, self._shared_slots
            )
            draft = self.drafter.prefill_with_states(params, state.draft, tokens, chunks)
            return SpeculativeState(target, draft, _with_states(state.verified, states), state.host)
        return dataclasses.replace(
            state,
            target=self.executor.prefill(params.target, state.target, tokens),
            draft=self.drafter.prefill(params, state.draft, tokens),
        )

    def resume(self, params: ModelParams, state: SpeculativeState, tokens: np.ndarray, common: int) -> SpeculativeState:
        if self.timer is not None:
            self.timer.begin_text()
        if self._layers:
            kept, root = self.num_cached(state, common, len(tokens) - 1), int(tokens[-1])
            target, chunks, states = self.executor.feeding().resume_with_states(
                params.target, state.target, tokens, kept, self._shared_slots
            )
            draft = self.drafter.resume_with_states(params, state.draft, tokens, kept, chunks)
            verified = _with_states(first_verified(self.executor.verified, root), states)
            return SpeculativeState(target, draft, verified, HostState())
        return SpeculativeState(
            self.executor.resume(params.target, state.target, tokens, common),
            self.drafter.resume(params, state.draft, tokens, common),
            first_verified(self.executor.verified, int(tokens[-1])),
            HostState(),
        )

    @property
    def _shared_slots(self) -> int:
        """Slots that the chunks of a prompt must fit into, in both caches."""
        return min(self.slots, self.drafter.slots)

    def num_cached(self, state: SpeculativeState, common: int, count: int) -> int:
        if not self._layers:
            return super().num_cached(state, common, count)
        common = min(common, self.drafter.num_rows_kept(state.draft) + 1)
        return kept_with_states(common, count, (self.slots, self.drafter.slots))

    def place_request(self, sampling: SamplingParams, seed: int, prompt_tokens: int = 0) -> Request:
        return self.executor.place_request(sampling, seed, prompt_tokens)

    def round(
        self, params: ModelParams, state: SpeculativeState, request: Request, room: int
    ) -> tuple[SpeculativeState, Round, int]:
        # A round that would wait for programs decodes plainly, and its time says nothing of the rounds to come.
        shares = self.shared_rounds is not None and trace.active is None
        wanted = self.programs if shares else (*self.programs, *self.single)
        loading = self.timer is not None and any(program.is_coming() for program in wanted)
        allowed = not loading and (self.timer is None or self.timer.may_draft())
        state.host.allowed.append(None if loading else allowed)
        if not allowed:
            draft = self.drafter.skip(params, state.draft, state.verified)
            target, verified, round_, least = self.executor.decode(params.target, state.target, request, room)
            return SpeculativeState(target, draft, verified, state.host), round_, least
        if shares:
            count = min(ROUNDS_PER_DISPATCH, room)
            target, draft, verified, rounds = self.dispatch_rounds(
                params, state.target, state.draft, state.verified, request, count
            )
            return SpeculativeState(target, draft, verified, state.host), rounds, count
        target, draft, batch = self.drafter.draft(params, state.target, state.draft, state.verified, request)
        target, verified, round_ = self.executor.verify(params.target, target, batch, request)
        return SpeculativeState(target, draft, verified, state.host), round_, 1

    def dispatch_rounds(
        self, params: ModelParams, target: SequenceState, draft: Any, verified: Verified, request: Request, count: int
    ) -> tuple[SequenceState, Any, Verified, Round]:
        """Dispatch `count` rounds at once; `target` and `draft` are donated."""
        assert self.shared_rounds is not None
        model = () if self.drafter.placement is None else params.draft
        return self.shared_rounds(
            params.target, model, target, draft, verified, request, self.drafter.operands, np.int32(count)
        )

    def observe(self, state: SpeculativeState, outputs: Sequence[StepOutput]) -> None:
        allowed = state.host.allowed.popleft()
        if self.timer is None:
            return
        if allowed is None:
            self.timer.leave_out()
        else:
            self.timer.observe(*outputs, allowed=allowed)


def _with_states(verified: Verified, states: Any) -> Verified:
    """The same with the hidden states before the root; as it is where the root is the first token."""
    return verified if states is None else dataclasses.replace(verified, states=states)
