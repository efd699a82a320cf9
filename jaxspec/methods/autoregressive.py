"""Plain autoregressive decoding: one target pass, one token."""

import dataclasses
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from jaxspec.config import check_int
from jaxspec.methods.base import NO_STORE, Method, Store
from jaxspec.methods.core.constrained import ConstrainedSteps
from jaxspec.methods.core.executor import make_executor
from jaxspec.methods.core.round import ModelParams, Models, Round, steps_per_dispatch
from jaxspec.methods.core.runner import Runner
from jaxspec.methods.core.sequence import SequenceState, cache_slots
from jaxspec.sampling.request import Request

if TYPE_CHECKING:
    from jaxspec.structured.matcher import Matcher


@dataclasses.dataclass(frozen=True)
class Autoregressive(Method):
    """One token per target pass: the baseline that every other method must reproduce and beat.

    Attributes:
      steps_per_dispatch: tokens that one dispatch decodes; they share the host's work of a round, and arrive together.
        The first token of an answer comes alone. None: 8 of a target of at most 256 MiB on CPUs and TPUs, else 4.
    """

    steps_per_dispatch: int | None = None

    name: ClassVar[str] = "ar"

    def __post_init__(self):
        if self.steps_per_dispatch is not None:
            check_int("steps_per_dispatch", self.steps_per_dispatch, 1, 256)

    @property
    def num_rows(self) -> int:
        return 1

    def bind(self, models: Models, tokens: int, store: Store = NO_STORE, previous: Runner | None = None) -> Runner:
        steps = self.steps_per_dispatch
        return AutoregressiveRunner(models, tokens, steps_per_dispatch(models.target) if steps is None else steps)


class AutoregressiveRunner(Runner):
    """Compiled functions of `Autoregressive` for one placement and capacity."""

    def __init__(self, models: Models, tokens: int, steps: int):
        """Declare the programs; nothing is compiled yet."""
        self.slots = cache_slots(tokens, steps)
        self.executor = make_executor(models.target, self.slots, steps=steps)
        self.held = (self.executor.state, self.executor.verified)
        self.programs = self.executor.programs
        self._steps = steps
        self._constrained: ConstrainedSteps | None = None

    def start(self, root: int, state: SequenceState | None) -> SequenceState:
        return self.executor.sequence.start(root, state)

    def resume(self, params: ModelParams, state: SequenceState, tokens: np.ndarray, common: int) -> SequenceState:
        return self.executor.sequence.resume(params.target, state, tokens, common)[0]

    def round(
        self, params: ModelParams, state: SequenceState, request: Request, room: int
    ) -> tuple[SequenceState, Round, int]:
        state, _, round_, min_tokens = self.executor.decode(params.target, state, request, room)
        return state, round_, min_tokens

    def constrain(self) -> ConstrainedSteps:
        if self._constrained is None:
            self._constrained = ConstrainedSteps(self.executor, self._steps)
        return self._constrained

    def constrained_round(
        self, params: ModelParams, state: SequenceState, request: Request, matcher: "Matcher", root: int
    ) -> tuple[SequenceState, Round]:
        return self.constrain().decode(params.target, state, request, matcher, root)
