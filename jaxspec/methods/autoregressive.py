"""Plain autoregressive decoding: one target pass, one token."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from jaxspec.config import SamplingParams
from jaxspec.methods.base import ROUND_HEADER, Exactness, ModelParams, Models, Round, pack_round, place_request
from jaxspec.methods.core.chunks import cache_slots
from jaxspec.methods.core.sequence import TargetSide, TargetState, next_token
from jaxspec.runtime.program import Program
from jaxspec.sampling.request import Request


@dataclasses.dataclass(frozen=True)
class Autoregressive:
    """One token per round: the baseline that every other method must reproduce and beat."""

    name: ClassVar[str] = "ar"
    drafts: ClassVar[bool] = False
    needs_draft: ClassVar[bool] = False
    own_devices: ClassVar[bool] = False

    @property
    def exact(self) -> Exactness:
        """See `Method.exact`."""
        return "tokens"

    @property
    def batch_rows(self) -> int:
        """See `Method.batch_rows`."""
        return 1

    @property
    def longest_path(self) -> int:
        """See `Method.longest_path`."""
        return 1

    @property
    def draft_rows(self) -> int:
        """See `Method.draft_rows`."""
        return 0

    def check(self, models: Models) -> None:
        """Every model fits."""

    def bind(self, models: Models, tokens: int) -> "AutoregressiveRunner":
        """See `Method.bind`."""
        return AutoregressiveRunner(models, cache_slots(tokens, 1))


class AutoregressiveRunner:
    """Compiled functions of `Autoregressive` for one placement and capacity."""

    def __init__(self, models: Models, slots: int):
        """See `Autoregressive.bind`."""
        target = models.target
        self.slots = slots
        self._side = TargetSide(target, slots)

        def step(params, state, request):
            state, logprob = next_token(params, target, state, request)
            return state, pack_round(state.root[None], 1, 0, 0, 0, logprob[None])

        round_ = Round(target.array((ROUND_HEADER + 1,), jnp.int32), target.array((1,), jnp.float32))
        args = [target.params(), self._side.state, target.request()]
        self._step = Program("round", step, target.plan, args, (self._side.state, round_), donate=[1])
        self.programs = (*self._side.programs, self._step)

    def start(self, root: int, state: TargetState | None) -> TargetState:
        """See `Runner.start`."""
        return self._side.start(root, state)

    def prefill(self, params: ModelParams, state: TargetState, tokens: np.ndarray) -> TargetState:
        """See `Runner.prefill`."""
        return self._side.prefill(params.target, state, tokens)

    def place_request(self, sampling: SamplingParams, seed: int) -> Request:
        """See `Runner.place_request`."""
        placement = self._side.placement
        return place_request(placement, sampling, seed, placement.cfg.vocab_size)

    def round(self, params: ModelParams, state: TargetState, request: Request) -> tuple[TargetState, Round]:
        """See `Runner.round`."""
        return self._step(params.target, state, request)
