"""Runner of SwiftSpec: both sides' programs, dispatched by one thread (SwiftSpec, section 3.2)."""

import dataclasses
import logging
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.config import SamplingParams
from jaxspec.methods.core.executor import ResidentExecutor, place_request
from jaxspec.methods.core.proposals import most_probable
from jaxspec.methods.core.round import ModelParams, Models, Round, verified_shapes
from jaxspec.methods.core.runner import Runner
from jaxspec.methods.core.sequence import SequenceState, cache_slots
from jaxspec.methods.core.verify import Draft
from jaxspec.methods.swiftspec.draft_tree import DraftTreeState, Growth, TreeDrafter
from jaxspec.methods.swiftspec.messages import batch_shapes, pack_verified, unpack_batch
from jaxspec.runtime import trace
from jaxspec.runtime.mesh import MeshPlan
from jaxspec.runtime.transfer import replicated, transfer
from jaxspec.sampling.request import Request


class Requests(NamedTuple):
    """One request, on both meshes."""

    target: Request
    draft: Request


@struct.dataclass
class SwiftSpecState:
    """State of both sides, and what the last round verified, packed, on the target's devices."""

    target: SequenceState
    draft: DraftTreeState
    verified: jax.Array


class SwiftSpecRunner(Runner):
    """Compiled functions of both sides; one thread dispatches them."""

    def __init__(self, models: Models, growth: Growth, tokens: int, *, overlap: bool, adaptive: bool):
        """Declare the programs for sequences of `tokens` tokens; nothing is compiled yet.

        With `overlap` the tree grows while the target verifies, where the devices differ; with `adaptive` until the
        target's result is there.
        """
        target, draft = models
        assert draft is not None
        self._target, self._draft, self._growth = target, draft, growth
        self._adaptive = adaptive
        self._overlap = overlap and target.plan.devices != draft.plan.devices
        if overlap and not self._overlap:
            logging.getLogger(__name__).warning(
                "draft and target share their devices: they take turns (%s)", _why_shared(target.plan)
            )
        path = verified_shapes(target, growth.num_rows).tokens.shape[0]
        self.slots = cache_slots(tokens, path)
        self.executor = ResidentExecutor(
            target, self.slots, steps=0, max_path=path, draft=batch_shapes(target, growth.num_rows), dynamic_rows=True,
            receive=lambda packed: Draft(unpack_batch(packed), jnp.int32(0)), reply=pack_verified,
        )  # fmt: skip
        slots = cache_slots(tokens, growth.rows + path)
        self.drafter = TreeDrafter(draft, slots, most_probable(draft.vocab, growth.branch), growth, path=path)
        if not self._overlap:
            growing = [self.drafter.advance_and_expand]
        else:
            growing = [self.drafter.advance, self.drafter.expand_once if adaptive else self.drafter.expand]
        self.programs = (*self.executor.programs, *self.drafter.programs, *growing)

    def start(self, root: int, state: SwiftSpecState | None) -> SwiftSpecState:
        # What a sequence begins with: its root, verified by definition.
        verified = np.zeros(self.executor.verified.shape, np.int32)  # pyright: ignore[reportAttributeAccessIssue]
        verified[:2] = 1, root
        return SwiftSpecState(
            self.executor.start(root, None if state is None else state.target),
            self.drafter.start(root, None if state is None else state.draft),
            jax.device_put(verified, replicated(self._target.plan)),
        )

    def prefill(self, params: ModelParams, state: SwiftSpecState, tokens: np.ndarray) -> SwiftSpecState:
        """See `Runner.prefill`; both sides at the same time."""
        assert params.draft is not None
        return dataclasses.replace(
            state,
            target=self.executor.prefill(params.target, state.target, tokens),
            draft=self.drafter.prefill(params.draft, state.draft, tokens),
        )

    def place_request(self, sampling: SamplingParams, seed: int, prompt_tokens: int = 0) -> Requests:
        size = self._target.cfg.vocab_size
        return Requests(
            *(place_request(model, sampling, seed, size, prompt_tokens) for model in (self._target, self._draft))
        )

    def round(
        self, params: ModelParams, state: SwiftSpecState, request: Requests, room: int
    ) -> tuple[SwiftSpecState, Round, int]:
        assert params.draft is not None
        advance = self.drafter.advance if self._overlap else self.drafter.advance_and_expand
        verified = transfer(state.verified, self._draft.plan)
        draft, batch, counts = advance(params.draft, state.draft, verified, request.draft)
        sent = transfer(batch, self._target.plan)
        target, verified, round_ = self.executor.verify(params.target, state.target, sent, request.target)
        if self._overlap:
            draft = self._expand(params, draft, verified, request.draft)
        return SwiftSpecState(target, draft, verified), dataclasses.replace(round_, draft=counts), 1

    def _expand(
        self, params: ModelParams, draft: DraftTreeState, verified: jax.Array, request: Request
    ) -> DraftTreeState:
        assert params.draft is not None
        if not self._adaptive:
            return self.drafter.expand(params.draft, draft, request)[0]
        for _ in range(self._growth.room):
            draft, size = self.drafter.expand_once(params.draft, draft, request)
            trace.wait(size)
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
