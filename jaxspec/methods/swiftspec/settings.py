"""SwiftSpec: draft and target on their own devices, a tree that grows while the target verifies (arXiv 2506.11309)."""

import dataclasses
import logging
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.config import SamplingParams
from jaxspec.errors import ConfigError
from jaxspec.methods.base import ROUND_HEADER, Exactness, ModelParams, Models, Round, place_request
from jaxspec.methods.core.chunks import cache_slots
from jaxspec.methods.core.proposals import most_probable
from jaxspec.methods.core.sequence import TargetSide, TargetState
from jaxspec.methods.core.settings import check_branch, check_draft, check_range
from jaxspec.methods.core.verify import Draft, match, verify
from jaxspec.methods.swiftspec.draft_tree import DraftTreeState, Growth, TreeDrafter
from jaxspec.methods.swiftspec.messages import pack_verified, unpack_batch
from jaxspec.runtime import trace as recording
from jaxspec.runtime.mesh import MeshPlan
from jaxspec.runtime.program import Program
from jaxspec.runtime.transfer import replicated, transfer
from jaxspec.sampling.request import Request

LARGEST_TREE = 4096


@dataclasses.dataclass(frozen=True)
class SwiftSpec:
    """Grow a token tree on the draft's devices while the target verifies the best part of it on its own.

    What the target verifies in one round is chosen from a tree that was grown without knowing the outcome of the round
    before; when that arrives, the root moves and the subtree below it survives. The output is plain decoding's, token
    for token (rule R4), however the tree came about.

    Attributes:
      batch: bs, rows of a verification batch, the root included.
      width: w, leaves that the draft evaluates in one pass.
      branch: k, proposals per node; None is the larger of `batch` - 1 and `width`, with which an evaluated root fills
        a batch. 1, with `width` 1, makes a chain.
      depth: d, draft passes while one batch is verified.
      adaptive: go on growing until the target's result is there, up to four times `depth` passes, in place of exactly
        `depth`. The host waits for the target in every round then.
      overlap: False grows the same trees in turn with verification. Draft and target that share their devices always
        take turns.
      reuse: False drops the tree in every round.
      leaves: whether a batch may hold proposals that the draft has not evaluated; without them growth on demand
        delays the target (ALGORITHMS A1).
      survivors: most nodes that are kept when the root moves; None is eight times `width`, or `batch` if that is more.
      branch_free: one draft pass between two batches in every round, in place of a branch on whether there is something
        to catch up with; None where a branch makes the host wait, on accelerators. Growth on demand, which comes with
        `leaves=False`, branches all the same.
    """

    batch: int = 8
    width: int = 8
    branch: int | None = None
    depth: int = 2
    adaptive: bool = False
    overlap: bool = True
    reuse: bool = True
    leaves: bool = True
    survivors: int | None = None
    branch_free: bool | None = None

    name: ClassVar[str] = "swiftspec"
    drafts: ClassVar[bool] = True
    needs_draft: ClassVar[bool] = True
    own_devices: ClassVar[bool] = True

    def __post_init__(self):
        """Check ranges, and fill in what follows from other settings."""
        check_range("batch", self.batch, 2, 1024)
        check_range("width", self.width, 1, 1024)
        check_range("depth", self.depth, 1, 128)
        for name, default, low in (
            ("branch", max(self.batch - 1, self.width), 1),
            ("survivors", max(8 * self.width, self.batch), 2),
        ):
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
            check_range(name, getattr(self, name), low, LARGEST_TREE)
        for name in ("adaptive", "overlap", "reuse", "leaves", "branch_free"):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (name == "branch_free" and value is None):
                raise ConfigError(f"{name} must be true or false, got {value!r}")
        if self.adaptive and not self.overlap:
            raise ConfigError("adaptive growth lasts as long as the target verifies: it needs overlap")
        if (rows := self._growth(False).rows) > LARGEST_TREE:
            raise ConfigError(f"these settings make a draft tree of {rows} rows, at most {LARGEST_TREE}")

    @property
    def exact(self) -> Exactness:
        """See `Method.exact`."""
        return "tokens"

    @property
    def batch_rows(self) -> int:
        """bs."""
        return self.batch

    @property
    def longest_path(self) -> int:
        """P: a whole batch in a row, and the bonus token."""
        return self.batch

    @property
    def draft_rows(self) -> int:
        """w."""
        return self.width

    def check(self, models: Models) -> None:
        """See `Method.check`."""
        check_draft(self.name, models.draft is not None)
        assert models.draft is not None and self.branch is not None
        check_branch("branch", self.branch, models)
        target, draft = models.target.plan.devices, models.draft.plan.devices
        if target != draft and set(target) & set(draft):
            raise ConfigError("draft and target must have the same devices or none in common")
        if target == draft and self.adaptive:
            raise ConfigError("adaptive growth needs a draft on devices of its own (draft_devices)")

    def bind(self, models: Models, tokens: int) -> "SwiftSpecRunner":
        """See `Method.bind`."""
        return SwiftSpecRunner(models, self, tokens)

    def _growth(self, branch_free: bool) -> Growth:
        assert self.branch is not None and self.survivors is not None
        room = 4 * self.depth if self.adaptive else self.depth
        return Growth(
            self.batch, self.width, self.branch, self.depth, self.survivors, room, self.reuse, self.leaves, branch_free
        )

    def growth(self, models: Models) -> Growth:
        """How the tree grows on these devices."""
        assert models.draft is not None
        platform = models.draft.plan.devices[0].platform
        return self._growth(platform != "cpu" if self.branch_free is None else self.branch_free)


class Requests(NamedTuple):
    """One request, on both meshes."""

    target: Request
    draft: Request


@struct.dataclass
class SwiftSpecState:
    """State of both sides, and what the last round verified, packed, on the target's devices."""

    target: TargetState
    draft: DraftTreeState
    verified: jax.Array


class SwiftSpecRunner:
    """Compiled functions of both sides; one thread dispatches them."""

    def __init__(self, models: Models, method: SwiftSpec, tokens: int):
        """Declare the programs; nothing is compiled yet."""
        target, draft = models
        assert draft is not None and method.branch is not None
        growth, steps = method.growth(models), method.longest_path
        self._target_model, self._draft_model = target, draft
        self._adaptive, self._most_passes = method.adaptive, growth.room
        self._overlap = method.overlap and target.plan.devices != draft.plan.devices
        if method.overlap and not self._overlap:
            logging.getLogger(__name__).warning(
                "draft and target share their devices: they take turns (%s)", _why_shared(target.plan)
            )
        self.slots = cache_slots(tokens, method.batch)
        self._side = TargetSide(target, self.slots)
        propose = most_probable(draft.vocab, method.branch)
        self._growing = TreeDrafter(draft, cache_slots(tokens, growth.rows + steps), propose, growth, steps=steps)
        self._verified = target.array((1 + steps,), jnp.int32)

        def check(params, state, packed, request):
            drafted = Draft(unpack_batch(packed), jnp.int32(0))
            state, outcome, round_ = verify(
                params, target, state, drafted, request, steps=steps, rule=match, varies=True
            )
            return state, pack_verified(outcome), round_

        batch = target.array((1 + 2 * method.batch,), jnp.int32)
        round_ = Round(target.array((ROUND_HEADER + steps,), jnp.int32), target.array((steps,), jnp.float32))
        args = [target.params(), self._side.state, batch, target.request()]
        out = (self._side.state, self._verified, round_)
        self._verify = Program("verify", check, target.plan, args, out, donate=[1])
        side = self._growing
        if not self._overlap:
            growing = [side.turn_and_grow]
        else:
            growing = [side.turn, side.grow_once if self._adaptive else side.grow]
        self.programs = (*self._side.programs, *side.programs, *growing, self._verify)

    def start(self, root: int, state: SwiftSpecState | None) -> SwiftSpecState:
        """See `Runner.start`."""
        # What a sequence begins with: its root, verified by definition.
        verified = np.zeros(self._verified.shape, np.int32)
        verified[:2] = 1, root
        return SwiftSpecState(
            self._side.start(root, None if state is None else state.target),
            self._growing.start(root, None if state is None else state.draft),
            jax.device_put(verified, replicated(self._target_model.plan)),
        )

    def prefill(self, params: ModelParams, state: SwiftSpecState, tokens: np.ndarray) -> SwiftSpecState:
        """See `Runner.prefill`; both sides at the same time."""
        assert params.draft is not None
        return dataclasses.replace(
            state,
            target=self._side.prefill(params.target, state.target, tokens),
            draft=self._growing.prefill(params.draft, state.draft, tokens),
        )

    def place_request(self, sampling: SamplingParams, seed: int) -> Requests:
        """See `Runner.place_request`."""
        models, size = (self._target_model, self._draft_model), self._target_model.cfg.vocab_size
        return Requests(*(place_request(model, sampling, seed, size) for model in models))

    def round(self, params: ModelParams, state: SwiftSpecState, request: Requests) -> tuple[SwiftSpecState, Round]:
        """See `Runner.round`."""
        assert params.draft is not None
        turn = self._growing.turn if self._overlap else self._growing.turn_and_grow
        outcome = transfer(state.verified, self._draft_model.plan)
        draft, batch, counts = turn(params.draft, state.draft, outcome, request.draft)
        sent = transfer(batch, self._target_model.plan)
        target, verified, round_ = self._verify(params.target, state.target, sent, request.target)
        if self._overlap:
            draft = self._grow(params, draft, verified, request.draft)
        return SwiftSpecState(target, draft, verified), dataclasses.replace(round_, draft=counts)

    def _grow(
        self, params: ModelParams, draft: DraftTreeState, verified: jax.Array, request: Request
    ) -> DraftTreeState:
        assert params.draft is not None
        if not self._adaptive:
            return self._growing.grow(params.draft, draft, request)[0]
        for _ in range(self._most_passes):
            draft, size = self._growing.grow_once(params.draft, draft, request)
            recording.wait(size)
            if verified.is_ready():  # pyright: ignore[reportAttributeAccessIssue]
                break
        return draft


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
