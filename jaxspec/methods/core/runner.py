"""The contract of runners with the engine, and the runner of all methods that draft and verify in turn.

Longer than 400 lines because the order of a round's dispatches can only be read beside the contract that it keeps.
"""

import abc
import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxspec.config import MOST_TOKENS, SamplingParams
from jaxspec.methods.core.constrained import ConstrainedPasses, ConstrainedSteps
from jaxspec.methods.core.drafter import Drafter, Pending, ProposeBatch
from jaxspec.methods.core.executor import TargetExecutor, make_executor
from jaxspec.methods.core.round import (
    ModelParams,
    Round,
    StepOutput,
    first_verified,
    is_small,
    round_shapes,
    steps_per_dispatch,
    verified_shapes,
)
from jaxspec.methods.core.sequence import PromptStates, SequenceState, cache_slots, fit_kept
from jaxspec.methods.core.timing import RoundTimer
from jaxspec.methods.core.verify import Draft, Rule, chain_draft, has_ended
from jaxspec.pytree import pytree, static
from jaxspec.results import Choice
from jaxspec.runtime import trace
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.program import Program
from jaxspec.runtime.transfer import read_scalar, zeros_of
from jaxspec.sampling.accept import Verified
from jaxspec.sampling.request import Request, request_shapes

if TYPE_CHECKING:
    from jaxspec.structured.matcher import Matcher

# Most rounds of one dispatch, and most rows of a batch: a dispatch is little beside passes of more rows, and tokens
# should not wait for each other.
ROUNDS_PER_DISPATCH, MOST_ROWS = 8, 32


class Runner(abc.ABC):
    """A method bound to models and a capacity: compiled programs and what the host remembers.

    The engine calls

        state = runner.start(root, state)                  # an empty sequence; reuses the buffers of a finished one
        state = runner.resume(params, state, tokens, common)   # a text, after one with the same first tokens
        state, round_, min_tokens = runner.round(params, state, request, room)   # again and again; dispatches only
        runner.observe(state, outputs)                     # once for each dispatch, in order, when it was read
        runner.close(state)                                # the generation has ended

    One dispatch is read while the next one runs. State goes in and comes out and is donated; parameters never are.
    """

    slots: int  # of the target's cache
    held: Any  # shapes of what an answer holds on the devices: state, and what is drafted and verified
    programs: Sequence[Program]  # everything that a generation may call, to be compiled before it starts
    single: Sequence[Program] = ()  # of one round, where `programs` has one for several; a trace shows these
    executor: TargetExecutor  # of the target
    calibrated: bool = True  # False as long as `calibrate` has to choose something before a generation can start
    measures: bool = False  # whether `calibrate` has something to time, beside which nothing should run

    @property
    def in_flight(self) -> int:
        """Dispatches that run or wait on the devices while one is read."""
        return self.executor.in_flight

    def calibrate(self, params: ModelParams, state: Any | None) -> Any:
        """Measure passes with the loaded weights, and settle what depends on their times, as `programs` may.

        The engine calls it once, when the weights are there. `state`, if there is one, is donated; returns the state of
        some sequence, or None.
        """
        return state

    @abc.abstractmethod
    def start(self, root: int, state: Any | None) -> Any:
        """State of an empty sequence whose last verified token is `root`; `state` is donated."""

    @abc.abstractmethod
    def resume(self, params: ModelParams, state: Any, tokens: np.ndarray, common: int) -> Any:
        """Begin a sequence of int32 `tokens` `[n]`, the last of which is the root, computing only what is new.

        `state`, which is donated, is that of a sequence with the same first `common` tokens, below n, whose capacity
        may be smaller.
        """

    def place_request(self, sampling: SamplingParams, seed: int, prompt_tokens: int = 0) -> Any:
        """A generation's request as `round` takes it, on the devices; `min_tokens` counts from the prompt's end."""
        return self.executor.place_request(sampling, seed, prompt_tokens)

    @abc.abstractmethod
    def round(self, params: ModelParams, state: Any, request: Any, room: int) -> tuple[Any, Round, int]:
        """Dispatch one round or a few; returns before they have run.

        `room` is the most tokens that are wanted of rounds without a draft, at least 1. Returns the state, the round or
        rounds (see `read_rounds`), and the minimum number of tokens that they bring.
        """

    @abc.abstractmethod
    def constrain(self) -> ConstrainedPasses | ConstrainedSteps:
        """The passes of rounds under a constraint, declared when first asked for.

        ConfigError: its placement has none.
        """

    @abc.abstractmethod
    def constrained_round(
        self, params: ModelParams, state: Any, request: Any, matcher: "Matcher", root: int
    ) -> tuple[Any, Round]:
        """Dispatch one round; `matcher` has taken every token of the answer, and `root` is the text's last one."""

    def num_cached(self, state: Any, common: int, count: int) -> int:
        """How many of `common` tokens `resume` keeps, of a text with `count` tokens before its root."""
        kept = fit_kept(common, count, self.executor.sequence.chunk_slots)
        return self.executor.sequence.rewindable(getattr(state, "target", state), kept)

    def observe(self, state: Any, outputs: Sequence[StepOutput]) -> None:
        """Take in the rounds of one dispatch, which the host has read; those of one sequence come in order."""
        return None

    def copy_from(self, earlier: np.ndarray) -> None:
        """Copy from these answers, too, in the texts that begin from now on; see `Drafter.earlier`."""
        return None

    def report(self) -> Choice | None:
        """The method's choice and the reasons, for `DecodeStats.choice`."""
        return None

    def close(self, state: Any | None) -> None:
        """A generation has ended, or its caller stopped listening; `state` is None where it failed."""
        return None


@dataclasses.dataclass
class HostState:
    """The host's part of one generation's state."""

    # Of each dispatch that was not read yet, whether it could draft, None where its time says nothing; and whether it
    # waits for the draft to take the prompt.
    dispatched: collections.deque[tuple[bool | None, bool]] = dataclasses.field(default_factory=collections.deque)
    pending: Pending | None = None  # what the draft has still to take
    begun: bool = False  # whether a round was dispatched
    law: int = 0  # 1 where the answer is sampled, once that is known
    # How the draft begins the text, once the first token is under way: with its state, and what it takes in at once.
    begin: Callable[[Any, Verified | None], Any] | None = None
    filled: bool = False  # whether the draft takes the prompt before the next dispatch
    # Of the next round under a constraint, already drafted: the draft has taken in what was verified, whose count is 0.
    ahead: Draft | None = None
    read: int = 0  # tokens of rounds that were read
    copied: int = 0  # those of rounds that verified copies alone
    gained: float = 0.0  # tokens that drafts brought less those of their time, where the method knows


@pytree
class SpeculativeState:
    """State of both halves, what the last round verified, and what the host knows."""

    target: SequenceState
    draft: Any
    verified: Verified
    host: HostState = static()


class SpeculativeRunner(Runner):
    """Drafts and verifies in turn on one set of devices: two programs a round, or one for several rounds."""

    most_taken: int = MOST_TOKENS  # last tokens of a prompt that a draft takes which is fed hidden states

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
        max_path = max(max_path, steps_per_dispatch(target))  # a round without a draft needs room, too
        verified = verified_shapes(target, max_path, layers)
        self.slots = cache_slots(tokens, max(verified.tokens.shape[0], num_rows))
        self.drafter, self.timer, self.steps = make_drafter(verified), timer, steps_per_dispatch(target)
        self._is_fed = bool(layers)
        self._constrained: ConstrainedPasses | None = None
        self._law = 0  # of the latest text
        rows = self.drafter.shapes.batch.rows
        self._constraint = functools.partial(ConstrainedPasses, num_rows=rows, dynamic_rows=dynamic_rows, layers=layers)
        self.executor: TargetExecutor = make_executor(
            target, self.slots, steps=self.steps if timer else 0, max_path=max_path, draft=self.drafter.shapes,
            rule=rule, dynamic_rows=dynamic_rows, idle_steps=self.steps if self.drafter.idles else 0, layers=layers,
            chunk_slots=self.drafter.slots if layers else 0,
        )  # fmt: skip
        self.held = (self.executor.state, self.drafter.state, self.drafter.shapes, self.executor.verified)
        self.programs = (*self.executor.programs, *self.drafter.programs)
        # Programs of one round; where rounds share a dispatch, traces run them.
        self.single = tuple(filter(None, (*self.drafter.draft_programs, self.executor.verify_program)))
        self.shared_rounds = None
        propose, model = self.drafter.propose, self.drafter.placement
        if propose is not None and self.executor.check is not None and share_dispatches(target, model, num_rows):
            shapes = () if model is None else model.params()
            self.shared_rounds = declare_rounds(
                self.executor, propose, shapes, self.drafter.state, self.drafter.operands
            )
            self.programs = (*(one for one in self.programs if one not in self.single), self.shared_rounds)

    def start(self, root: int, state: SpeculativeState | None) -> SpeculativeState:
        if self.timer is not None:
            self.timer.begin_text()
        return SpeculativeState(
            self.executor.sequence.start(root, None if state is None else state.target),
            self.drafter.start(root, None if state is None else state.draft),
            first_verified(self.executor.verified, root),
            HostState(),
        )

    def resume(self, params: ModelParams, state: SpeculativeState, tokens: np.ndarray, common: int) -> SpeculativeState:
        if self.timer is not None:
            self.timer.begin_text()
        if common and state.host.begin is not None:
            state = dataclasses.replace(state, draft=state.host.begin(state.draft, None))
        count, draft, host = len(tokens) - 1, state.draft, state.host
        kept, known = self._plan_kept(state, common, count)
        if self._is_fed and known and not host.begun and host.pending is not None:
            draft = self.drafter.fill(params, draft, host.pending)
        elif self._is_fed and known and host.begun and self.drafter.num_rows_kept(draft) < known:
            draft = self.drafter.skip(params, draft, state.verified, flush=True)
        target, states = self.executor.sequence.resume(params.target, state.target, tokens, kept)
        begun, rows, same = HostState(), 0, common > 0 and not host.begun
        if self._begins_later and not known:
            begun.begin = lambda draft, taken: self.drafter.resume(params, draft, tokens, 0, None, same, taken)[0]
        else:
            draft, rows = self.drafter.resume(params, draft, tokens, known, states, same)
        verified = _with_states(first_verified(self.executor.verified, int(tokens[-1])), states)
        pending = Pending(tokens[kept - known : -1], states, rows, kept - known)
        before = max(0, len(pending.tokens) - self.most_taken)
        if states is not None and not rows and before:
            pending = Pending(pending.tokens[before:], states.of_last(before), 0, pending.begins + before)
        if self.timer is not None and self.drafter.defers:
            begun.pending = pending
        else:
            draft = self.drafter.fill(params, draft, pending)
        return SpeculativeState(target, draft, verified, begun)

    @property
    def _begins_later(self) -> bool:
        """Whether the draft begins a text beside its first token; where it has no rest, it may lack no token of it."""
        return self.timer is not None and self.drafter.drops and (self.drafter.rests or not self.drafter.defers)

    def worth_taking(self, law: int, tokens: int, most: float) -> float:
        """After how many tokens of an answer, at most `most`, a draft takes the `tokens` that it lacks."""
        return 1.0

    def _take_prompt(
        self, params: ModelParams, state: SpeculativeState, room: float = math.inf, paused: bool = False
    ) -> tuple[Any, bool]:
        """The draft's state before a dispatch, and whether its model rests in it.

        Short answers end before a draft has paid for the prompt. It takes it once that is little beside the answer and
        it is not `paused`.
        """
        host, drafter, draft, resting = state.host, self.drafter, state.draft, False
        if host.begin is not None:
            draft, host.begin = host.begin(draft, None), None
        if host.pending is not None:
            # What was decoded meanwhile, too, as far as it is kept for a draft that is fed hidden states.
            missing = len(host.pending.tokens) - host.pending.known + min(host.read, drafter.unfed_rows or host.read)
            own = host.read - host.copied
            resting = drafter.rests and (paused or own < self.worth_taking(host.law, missing, host.read + room))
            if not resting:
                draft, host.pending = drafter.fill(params, draft, host.pending), None
        return draft, resting

    def num_cached(self, state: SpeculativeState, common: int, count: int) -> int:
        return self._plan_kept(state, common, count)[0]

    def _plan_kept(self, state: SpeculativeState, common: int, count: int) -> tuple[int, int]:
        """How many of `common` tokens the target keeps of a text, see `num_cached`, and how many the draft."""
        host, drafter, cached = state.host, self.drafter, super().num_cached
        if not self._is_fed or not common:
            kept = cached(state, common, count)
            return kept, kept
        # A draft that lacks tokens of which it has the states, and goes on with more capacity.
        lacks = drafter.unfed_rows or (host.pending is not None and not host.begun)
        outgrows = bool(lacks) and state.target.cache.slots < self.slots
        if outgrows and not drafter.rests:
            return 0, 0  # the positions of such a draft's keys have no gap
        # States are not kept beyond a text, or a piece of a prompt: that of the token before the first one that the
        # draft takes is computed again, unless the draft's text begins within what is new.
        unread = None if host.begun else host.pending  # of an interrupted prompt, or of the piece before
        fresh = cached(state, min(common, count - 1), count)
        begins = 0 if unread is None else unread.begins
        missing = host.begun and drafter.num_missing(state.draft)
        if outgrows or missing or fresh < begins or count - fresh >= self.most_taken:
            return fresh, 0
        if unread is not None:
            rows = begins + max(0, len(unread.tokens) - 1)
        else:
            rows = drafter.num_rows_kept(state.draft)
            if host.begun and drafter.unfed_rows:
                rows += drafter.num_unfed(state.draft) + read_scalar(state.verified.count)
        kept = cached(state, min(common - 1, rows), count)
        known = kept - begins
        # Where it would take some of them again, their states were not kept.
        fits = not begins or fit_kept(known, count, self.executor.sequence.chunk_slots) == known
        return kept, known if fits and known > 0 else 0

    def round(
        self, params: ModelParams, state: SpeculativeState, request: Request, room: int
    ) -> tuple[SpeculativeState, Round, int]:
        # A round that would wait for programs decodes plainly, and its time says nothing of the rounds to come.
        shared = self._shared
        wanted = self.single if shared is None else (shared,)
        loading = self.timer is not None and any(program.is_coming() for program in wanted)
        # The first token waits for no others, and not for the draft.
        host, first = state.host, not state.host.begun
        plain_first = first and self.timer is not None and self.drafter.drops
        self._begin_rounds(host, request)
        unread = host.pending
        unsettled = loading or plain_first
        paused = self.timer is not None and not unsettled and not self.timer.may_draft()
        draft, resting = (state.draft, False) if plain_first else self._take_prompt(params, state, room, paused)
        delayed, host.filled = host.filled or host.pending is not unread, False
        # Rounds that share a dispatch on a CPU decode several tokens without a draft: a pause needs no other program.
        kernels = self.executor.placement.plan.kernels
        several = shared is not None and self.drafter.rests and kernels.takes_cpu_forms
        if unsettled or (paused and not several):
            target, verified, round_, min_tokens = self.executor.decode(params.target, state.target, request, room)
            if host.begin is not None:
                draft, host.begin = host.begin(draft, state.verified), None
            else:
                if plain_first:
                    draft, resting = self._take_prompt(params, state, room)
                    host.filled = host.pending is not unread
                draft = self.drafter.skip(params, draft, state.verified)
            self.drafter.rest(resting)
            host.dispatched.append((None if unsettled else False, delayed))
            return SpeculativeState(target, draft, verified, host), round_, min_tokens
        self.drafter.rest(resting or paused)
        host.dispatched.append((not paused, delayed))
        count = 1 if shared is None else min(ROUNDS_PER_DISPATCH, room)
        target = decode_one(state.target) if first else state.target
        target, draft, verified, rounds = self.dispatch_rounds(params, target, draft, state.verified, request, count)
        return SpeculativeState(target, draft, verified, host), rounds, count

    def _begin_rounds(self, host: HostState, request: Request) -> None:
        """Before a round; the first one of a text says its law. Times of drafts of another law say nothing of it."""
        if self.timer is not None and not host.begun:
            temperature: Any = request.processors.temperature
            host.law = int(np.asarray(temperature.addressable_data(0)).item() > 0)
            if host.law != self._law:
                self.timer.forget_drafts()
            self._law = host.law
        host.begun = True

    def constrain(self) -> ConstrainedPasses:
        if self._constrained is None:
            self._constrained = self._constraint(self.executor)
            # Where rounds share a dispatch, no other round has a program that drafts alone.
            self._constrained.programs = (*self._constrained.programs, *self.drafter.draft_programs)
        return self._constrained

    def constrained_round(
        self, params: ModelParams, state: SpeculativeState, request: Request, matcher: "Matcher", root: int
    ) -> tuple[SpeculativeState, Round]:
        passes, drafter, host = self.constrain(), self.drafter, state.host
        self._begin_rounds(host, request)
        draft, resting = self._take_prompt(params, state)
        drafter.rest(resting)
        # Its time says nothing of rounds without a constraint.
        host.dispatched.append((None, False))
        forced = matcher.chain(min(passes.num_rows, passes.max_path) - 1) if drafter.skips else []
        target, ahead = state.target, host.ahead
        if not forced and ahead is None:
            target, draft, ahead = drafter.draft(params, target, draft, state.verified, request)
        # Rule R4 holds for every tree: where drafts are rejected by chance otherwise, the rule needs no more of it.
        if forced or ahead is None:
            batch = chain_draft([root, *forced], passes.num_rows)
        else:
            batch = Draft(ahead.batch, ahead.passes)
        target, verified, round_ = passes.verify(params.target, target, batch, request, matcher)
        if forced:
            draft = drafter.drop(draft) if ahead is not None else drafter.skip(params, draft, state.verified)
        if drafter.drops:
            # While the host reads the round; where forced tokens follow, it is not used.
            target, draft, host.ahead = drafter.draft(params, target, draft, verified, request)
            verified = dataclasses.replace(verified, count=zeros_of(verified.count))
        return SpeculativeState(target, draft, verified, host), round_

    @property
    def _shared(self) -> Program | None:
        """The program of several rounds; a trace shows those of one."""
        return None if trace.active is not None else self.shared_rounds

    def dispatch_rounds(
        self, params: ModelParams, target: SequenceState, draft: Any, verified: Verified, request: Request, count: int
    ) -> tuple[SequenceState, Any, Verified, Round]:
        """Dispatch up to `count` rounds at once, or one by two programs; the states and `verified` are donated."""
        shared = self._shared
        if shared is None:
            target, draft, batch = self.drafter.draft(params, target, draft, verified, request)
            target, verified, round_ = self.executor.verify(params.target, target, batch, request)
            return target, draft, verified, round_
        model = () if self.drafter.placement is None else params.draft
        return shared(params.target, model, target, draft, verified, request, self.drafter.operands, np.int32(count))

    def copy_from(self, earlier: np.ndarray) -> None:
        self.drafter.earlier = earlier

    def observe(self, state: SpeculativeState, outputs: Sequence[StepOutput]) -> None:
        allowed, delayed = state.host.dispatched.popleft()
        for output in outputs:
            state.host.read += len(output.tokens)
            state.host.copied += 0 if output.draft_passes or not output.drafted else len(output.tokens)
        if self.timer is None:
            return
        if allowed is None:
            self.timer.leave_out()
        else:
            self.timer.observe(*outputs, allowed=allowed, delayed=delayed)


def decode_one(state: SequenceState) -> SequenceState:
    """The state whose next round decodes one token where nothing is proposed."""
    one: Any = np.int32(1)  # the next program takes it
    return dataclasses.replace(state, most=one)


def _with_states(verified: Verified, states: PromptStates | None) -> Verified:
    """The same with the hidden states before the root; as it is where the root is the first token, or none are fed."""
    return verified if states is None or states.last is None else dataclasses.replace(verified, states=states.last)


def share_dispatches(target: Placement, draft: Placement | None, num_rows: int) -> bool:
    """Whether rounds of batches of `num_rows` rows share dispatches.

    Not on GPUs, on which each operation of a loop that ends where the text does is a launch; nor on several devices.
    """
    alone = len(target.plan.devices) == 1 and (draft is None or draft.plan.mesh == target.plan.mesh)
    return alone and num_rows <= MOST_ROWS and is_small(target)


def declare_rounds(executor: TargetExecutor, propose: ProposeBatch, params: Any, state: Any, operands: Any) -> Program:
    """The program of up to `ROUNDS_PER_DISPATCH` rounds, until they brought as many tokens as a plain dispatch.

    More would wait for each other. After the text's end, none follows.

    `params` and `state` are shapes of what `propose` takes, `operands` arrays. The program takes parameters of target
    and draft, state of both, what was verified, the request, the operands and the number of rounds. It returns both
    states, what was verified, and a `Round` whose arrays have the rounds in front; those that did not run have no
    tokens.
    """
    target, check, steps = executor.placement, executor.check, steps_per_dispatch(executor.placement)
    assert check is not None
    one = round_shapes(target, executor.verified.tokens.shape[0])
    several = jax.tree.map(lambda leaf: target.array((ROUNDS_PER_DISPATCH, *leaf.shape), leaf.dtype), one)

    def rounds(params, draft_params, target_state, draft_state, verified, request, operands, count):
        def goes_on(done: tuple) -> Array:
            number, state, *_ = done
            few = state.generated - target_state.generated < steps
            goes_on = few & (state.generated < request.max_tokens) & ~has_ended(state, request, target.vocab)
            # The first one runs in any case: it may have been launched ahead.
            return (number < count) & ((number == 0) | goes_on)

        def run(done: tuple) -> tuple:
            number, target_state, draft_state, verified, found = done
            draft_state, batch = propose(draft_params, draft_state, verified, target_state.history, request, operands)
            target_state, verified, round_ = check(params, target_state, batch, request, verified.states)
            found = jax.tree.map(lambda all_, new: all_.at[number].set(new), found, round_)
            return number + 1, target_state, draft_state, verified, found

        blank = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), several)
        start = jnp.int32(0), target_state, draft_state, verified, blank
        return jax.lax.while_loop(goes_on, run, start)[1:]

    args = [
        target.params(), params, executor.state, state, executor.verified, request_shapes(target),
        jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), operands),
        target.array((), jnp.int32),
    ]  # fmt: skip
    out = executor.state, state, executor.verified, several
    return Program("rounds", rounds, target.plan, args, out, donate=[2, 3, 4])
