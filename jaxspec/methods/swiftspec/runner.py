"""Runner of SwiftSpec: both sides' programs, dispatched by one thread (SwiftSpec, section 3.2)."""

import dataclasses
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import SamplingParams
from jaxspec.methods.core.constrained import ConstrainedPasses
from jaxspec.methods.core.draft_passes import Propose
from jaxspec.methods.core.executor import make_executor, place_request
from jaxspec.methods.core.round import ModelParams, Models, Round, verified_shapes
from jaxspec.methods.core.runner import Runner
from jaxspec.methods.core.sequence import PromptStates, SequenceState, cache_slots
from jaxspec.methods.core.verify import Draft
from jaxspec.methods.swiftspec.draft_tree import PROBE_PASSES, DraftTreeState, Growth, SwiftSpecDrafter
from jaxspec.methods.swiftspec.messages import batch_shapes, pack_verified, read_batch, unpack_batch
from jaxspec.methods.swiftspec.schedule import Schedule, choose_schedule, longest_mean, time_in_turn
from jaxspec.pytree import pytree
from jaxspec.results import Choice
from jaxspec.runtime import hosts, trace
from jaxspec.runtime.mesh import MeshPlan
from jaxspec.runtime.program import Program
from jaxspec.runtime.transfer import place, replicated, transfer
from jaxspec.sampling.request import Request

if TYPE_CHECKING:
    from jaxspec.structured.matcher import Matcher


class Requests(NamedTuple):
    """One request, on both meshes."""

    target: Request
    draft: Request


@pytree
class SwiftSpecState:
    """State of both sides, and what the last round verified, packed, on the target's devices."""

    target: SequenceState
    draft: DraftTreeState
    verified: Any  # see `pack_verified`


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class SwiftSpecChoice(Choice):
    """The schedule of draft passes, as given or as measured.

    Attributes:
      depth: draft passes during a verification.
      refill: draft passes before a verification whose tree is too small.
      draft_passes_per_verification: draft passes that take as long as a verification; None where it was not measured.
    """

    depth: int
    refill: int
    draft_passes_per_verification: float | None


class SwiftSpecRunner(Runner):
    """Compiled functions of both sides; one thread dispatches them."""

    def __init__(
        self, models: Models, growth: Growth, propose: Propose, tokens: int, *, depth: int | None, refill: int | None,
        overlap: bool, adaptive: bool, schedule: Schedule | None = None,
    ):  # fmt: skip
        """Declare the programs for sequences of `tokens` tokens; nothing is compiled yet.

        `propose` gives a node `growth.branch` children. With `overlap` the tree grows while the target verifies, where
        the devices differ or the target's layers are streamed; with `adaptive` until the target's result is there.
        `depth` and `refill` are those of the settings; where one is None, `calibrate` chooses it and declares the
        programs of a round, unless an earlier runner's `schedule` is taken over.
        """
        target, draft = models
        assert draft is not None
        self._target, self._draft, self._growth = target, draft, growth
        self._adaptive = adaptive
        # Devices that wait for the target's layers have time for the draft.
        idle = target.resident_layers is not None
        self._overlap = overlap and (idle or target.plan.devices != draft.plan.devices)
        # What a user should know of devices that both models share; `calibrate` says it.
        self.note: str | None = None
        if overlap and not self._overlap:
            self.note = f"draft and target share their devices: they take turns ({_why_shared(target.plan)})"
        path = verified_shapes(target, growth.num_rows).tokens.shape[0]
        self._layers = layers = () if draft.cfg.features is None else draft.cfg.features.layers
        self._is_fed, self._constrained = bool(layers), None
        self.slots, slots = cache_slots(tokens, path), cache_slots(tokens, growth.rows + path)
        self.executor = make_executor(
            target, self.slots, steps=0, max_path=path, draft=batch_shapes(target, growth.num_rows), dynamic_rows=True,
            receive=lambda packed: Draft(unpack_batch(packed), jnp.int32(0)), reply=pack_verified,
            layers=layers, chunk_slots=slots if layers else 0,
        )  # fmt: skip
        self.drafter = SwiftSpecDrafter(draft, slots, propose, growth, path=path)
        self.held = (self.executor.state, self.drafter.state, self.executor.verified)
        # Nothing is left open where a given depth comes without a refill, and where adaptive growth ends by itself.
        open_refill = refill is None and growth.most_refill > 0
        self._given = growth.room if adaptive and depth is None else depth, None if open_refill else refill or 0
        self.programs: Sequence[Program] = (*self.executor.programs, *self.drafter.programs)
        self.schedule: Schedule | None = None
        if schedule is None and None not in self._given:
            schedule = Schedule(*self._given)  # pyright: ignore[reportArgumentType]
        if schedule is None:
            self.programs = (*self.programs, self.drafter.probe)
        else:
            self._follow(schedule)

    def _follow(self, schedule: Schedule) -> None:
        """Declare the programs of a round."""
        self.schedule, drafter = schedule, self.drafter
        drafter.declare_rounds(schedule.depth, schedule.refill)
        growing = [drafter.advance_and_expand]
        if self._overlap:
            growing = [drafter.advance, drafter.expand_once if self._adaptive else drafter.expand]
        self.programs = (*self.executor.programs, *drafter.programs, *growing)

    @property
    def room(self) -> int:
        """Most draft passes between two batches."""
        return self._growth.room

    @property
    def calibrated(self) -> bool:
        return self.schedule is not None

    def calibrate(self, params: ModelParams, state: SwiftSpecState | None) -> SwiftSpecState:
        """Time a verification and a draft pass, choose what the settings leave open, and declare the rest.

        A depth that was given is kept. A warning says so where it caps the acceptance length while more passes would
        fit into a verification.
        """
        if self.note is not None:
            logging.getLogger(__name__).warning(self.note)
        state = self.start(0, state)
        known = self.schedule is not None and (self.schedule.ratio is not None or not self._overlap)
        if known:
            return state
        state, ratio = self._measure(params, state)
        growth, given = self._growth, self.schedule
        schedule = choose_schedule(
            ratio, *(self._given if given is None else (given.depth, given.refill)), most_depth=growth.room,
            most_refill=growth.most_refill, overlap=self._overlap,
        )  # fmt: skip
        if given is None:
            self._follow(schedule)
        self.schedule = schedule
        length = longest_mean(growth.num_rows, schedule.depth, schedule.refill)
        # What is dropped or grown on demand does not depend on the depth.
        capped = self._overlap and not self._adaptive and growth.reuse and growth.leaves
        if capped and length < growth.num_rows and schedule.depth + 1 <= ratio:
            fitting = min(growth.num_rows, int(ratio))
            logging.getLogger(__name__).warning(
                "depth %d caps the acceptance length at %d tokens per target pass, whatever the draft; %d draft passes "
                "fit into a verification here: leave depth out, or raise it", schedule.depth, length, fitting,
            )  # fmt: skip
        return state

    def _measure(self, params: ModelParams, state: SwiftSpecState) -> tuple[SwiftSpecState, float]:
        """Time of a verification over that of a draft pass, each alone and with short caches."""
        assert params.draft is not None
        requests, rows, held = self.place_request(SamplingParams(), 0), self._growth.num_rows, [state]
        chain = np.concatenate([[rows], np.zeros(rows), np.maximum(np.arange(rows) - 1, 0)]).astype(np.int32)
        batch = place(chain, replicated(self._target.plan))
        passes, expand = PROBE_PASSES, self.drafter.probe
        if self.schedule is not None:
            passes, expand = (
                (1, self.drafter.expand_once) if self._adaptive else (self.schedule.depth, self.drafter.expand)
            )

        def verify() -> Any:
            # From the start each time: a round commits what it accepts.
            held[0] = dataclasses.replace(held[0], target=self.executor.sequence.start(0, held[0].target))
            jax.block_until_ready(held[0].target)

            def dispatch() -> Any:
                target, verified, _ = self.executor.verify(params.target, held[0].target, batch, requests.target)
                held[0] = dataclasses.replace(held[0], target=target)
                return verified

            return dispatch

        def grow() -> Any:
            def dispatch() -> Any:
                draft, size = expand(params.draft, held[0].draft, requests.draft)
                held[0] = dataclasses.replace(held[0], draft=draft)
                return size

            return dispatch

        seconds = time_in_turn({"verify": verify, "grow": grow})
        return held[0], seconds["verify"] * passes / max(seconds["grow"], 1e-9)

    def report(self) -> SwiftSpecChoice | None:
        schedule = self.schedule
        if schedule is None:
            return None
        ratio = None if schedule.ratio is None else round(schedule.ratio, 2)
        return SwiftSpecChoice(depth=schedule.depth, refill=schedule.refill, draft_passes_per_verification=ratio)

    def start(self, root: int, state: SwiftSpecState | None) -> SwiftSpecState:
        return SwiftSpecState(
            self.executor.sequence.start(root, None if state is None else state.target),
            self.drafter.start(root, None if state is None else state.draft),
            self._first_verified(root),
        )

    def resume(self, params: ModelParams, state: SwiftSpecState, tokens: np.ndarray, common: int) -> SwiftSpecState:
        kept = self.num_cached(state, common, len(tokens) - 1)
        target, states = self.executor.sequence.resume(params.target, state.target, tokens, kept)
        draft, _ = self.drafter.resume(params, state.draft, tokens, kept, self._send(states))
        return SwiftSpecState(target, draft, _with_states(self._first_verified(int(tokens[-1])), states))

    def place_request(self, sampling: SamplingParams, seed: int, prompt_tokens: int = 0) -> Requests:
        size = self._target.cfg.vocab_size
        return Requests(
            *(place_request(model, sampling, seed, size, prompt_tokens) for model in (self._target, self._draft))
        )

    def constrain(self) -> ConstrainedPasses:
        if self._constrained is None:
            self._constrained = ConstrainedPasses(
                self.executor, self._growth.num_rows, dynamic_rows=True, layers=self._layers
            )
        return self._constrained

    def round(
        self, params: ModelParams, state: SwiftSpecState, request: Requests, room: int
    ) -> tuple[SwiftSpecState, Round, int]:
        return *self._round(params, state, request), 1

    def constrained_round(
        self, params: ModelParams, state: SwiftSpecState, request: Requests, matcher: "Matcher", root: int
    ) -> tuple[SwiftSpecState, Round]:
        return self._round(params, state, request, matcher)

    def _round(
        self, params: ModelParams, state: SwiftSpecState, request: Requests, matcher: "Matcher | None" = None
    ) -> tuple[SwiftSpecState, Round]:
        assert params.draft is not None
        advance = self.drafter.advance if self._overlap else self.drafter.advance_and_expand
        verified = jax.tree.map(lambda array: transfer(array, self._draft.plan), state.verified)
        draft, batch, counts = advance(params.draft, state.draft, verified, request.draft)
        if self._overlap and not self._adaptive:
            # It needs nothing of the target, and comes before anything that may keep this thread.
            draft, _ = self.drafter.expand(params.draft, draft, request.draft)
        growth = AdaptiveGrowth(self, params, draft, request.draft) if self._overlap and self._adaptive else None
        if matcher is None:
            # While layers are streamed, this thread comes by between them.
            target, verified, round_ = self.executor.verify(
                params.target, state.target, transfer(batch, self._target.plan), request.target,
                None if growth is None else growth.come_by,
            )  # fmt: skip
        else:
            drafted = Draft(read_batch(np.asarray(batch)), np.int32(0))  # pyright: ignore[reportArgumentType]
            target, verified, round_ = self.constrain().verify(
                params.target, state.target, drafted, request.target, matcher
            )
        if growth is not None:
            draft = growth.until(verified[0] if self._is_fed else verified)
        return SwiftSpecState(target, draft, verified), dataclasses.replace(round_, draft=counts)

    def num_cached(self, state: SwiftSpecState, common: int, count: int) -> int:
        if self._is_fed and common:
            # The hidden state of the last of them is needed and was not kept, so it runs again.
            common = min(common - 1, self.drafter.num_rows_kept(state.draft))
        return super().num_cached(state, common, count)

    def _send(self, states: PromptStates | None) -> PromptStates | None:
        """The hidden states of a prompt, on the draft's devices."""
        plan = self._draft.plan
        return None if states is None else states._replace(chunks=[transfer(one, plan) for one in states.chunks])

    def _first_verified(self, root: int) -> Any:
        """The message that a sequence begins with: its root, packed, on the target's devices."""
        shapes = self.executor.verified
        verified = np.zeros((shapes[0] if self._is_fed else shapes).shape, np.int32)
        verified[:2] = 1, root
        packed = place(verified, replicated(self._target.plan))
        if not self._is_fed:
            return packed
        return packed, place(np.zeros(shapes[1].shape, np.float32), replicated(self._target.plan))


class AdaptiveGrowth:
    """One round's growth that goes on until the target's result is there, one draft pass at a time."""

    def __init__(self, runner: SwiftSpecRunner, params: ModelParams, draft: DraftTreeState, request: Request):
        """Nothing is dispatched yet."""
        self._runner, self._params, self._draft, self._request = runner, params.draft, draft, request
        self._left = runner.room
        self._size: Any = None  # of the tree after the last pass that was dispatched

    def come_by(self) -> None:
        """Dispatch a pass, unless one runs; does not wait for it."""
        if self._left and (self._size is None or all(hosts.gather("grown", _is_ready(self._size)))):
            self._expand()

    def until(self, verified: jax.Array) -> DraftTreeState:
        """Dispatch passes until `verified` is there or the tree has no room; returns the draft's state."""
        while self._left:
            self._expand()
            trace.wait(self._size)
            if all(hosts.gather("verified", _is_ready(verified))):
                break
        return self._draft

    def _expand(self) -> None:
        assert self._params is not None
        self._draft, self._size = self._runner.drafter.expand_once(self._params, self._draft, self._request)
        self._left -= 1


def _with_states(verified: Any, states: PromptStates | None) -> Any:
    """The same message with the hidden states before the root; as it is where the root is the first token."""
    return verified if states is None or states.last is None else (verified[0], states.last)


def _is_ready(array: Any) -> bool:
    """Whether this process's part of an array is there; a process without a part has nothing to wait for."""
    return all(shard.data.is_ready() for shard in array.addressable_shards)


def _why_shared(plan: MeshPlan) -> str:
    """Why a draft has the target's devices, as far as one can tell from them, and what helps."""
    used, there = len(plan.devices), len(jax.devices())
    if used < there:
        return "load the model with method='swiftspec', and the draft gets its own"
    if there > 1:
        return f"the target has all {there} devices: fewer target_devices leave the draft its own"
    if plan.devices[0].platform == "cpu":
        return "there is one device only"
    return "there is one device only: draft_platform='cpu' puts the draft on the CPU"
