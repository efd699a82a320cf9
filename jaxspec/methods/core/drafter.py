"""The draft's half of a round: the contract of drafters, and the drafter with a model."""

import abc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxspec.methods.core.copies import NO_ANSWERS
from jaxspec.methods.core.cost_model import CostModel
from jaxspec.methods.core.round import ModelParams
from jaxspec.methods.core.sequence import ModelSequence, PromptStates, SequenceState
from jaxspec.methods.core.verify import Draft, draft_shapes
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.program import Program
from jaxspec.runtime.transfer import read_scalar
from jaxspec.sampling.accept import Verified
from jaxspec.sampling.processors import history_shapes
from jaxspec.sampling.request import Request, request_shapes

# How a drafter makes a batch, for one shard: (parameters of the draft, state, what the last round verified, history,
# request, further operands) -> state, batch.
ProposeBatch = Callable[..., tuple[Any, Draft]]


class Pending(NamedTuple):
    """A prompt that a draft model may take after the first token."""

    tokens: np.ndarray  # int32 [n], all but the root
    states: PromptStates | None  # the target's, of those of them that it computed, for a feature draft
    known: int = 0  # tokens that the draft's cache holds already
    begins: int = 0  # tokens of the text before them, which are not there for the draft


class Drafter(abc.ABC):
    """The draft's half of a method."""

    shapes: Draft  # of what `draft` gives
    state: Any  # shapes of what `start` gives
    programs: Sequence[Program]  # everything that it may call
    idles: bool = False  # whether a round decodes several tokens where it proposed none; else the root is a batch
    slots: int = 0  # of the draft's cache; 0 without a model
    defers: bool = False  # whether its model takes a prompt with `fill`, which may come after the first token
    rests: bool = False  # whether rounds may come before that, see `rest`
    unfed_rows: int = 0  # W, hidden states of the latest tokens that are kept for a model that is not asked
    propose: ProposeBatch | None = None  # what `draft` runs; None where rounds have a dispatch each
    skips: bool = False  # whether `skip` works after every round: it takes in tokens that it did not propose
    drops: bool = False  # whether a round may verify another batch than `draft` proposed
    placement: Placement | None = None  # of its model
    operands: Any = ()  # what else `propose` takes
    learned: Any = None  # `AcceptanceStats.all` of an earlier process, which the first text begins with
    draft_programs: Sequence[Program] = ()  # each of which `draft` may dispatch
    earlier: np.ndarray = NO_ANSWERS  # answers that copies may come from, each with -1 at its end

    @abc.abstractmethod
    def start(self, root: int, state: Any | None) -> Any:
        """State of an empty sequence; `state` is donated."""

    def resume(
        self, params: ModelParams, state: Any, tokens: np.ndarray, common: int, states: PromptStates | None = None,
        same_text: bool = False, taken: Verified | None = None,
    ) -> tuple[Any, int]:  # fmt: skip
        """See `Runner.resume`; the default, of a drafter without a model, begins anew.

        `states` are the target's, for a feature draft. `same_text`: no round has run on `state`, whose prompt goes on;
        what was learned keeps its weight. A drafter that `drops` takes in `taken` at once, as by `skip`. The second
        result counts the tokens that `fill` need not take, where the drafter `defers`; nothing is waited for.
        """
        return state if same_text else self.start(int(tokens[-1]), state), 0

    @abc.abstractmethod
    def draft(
        self, params: ModelParams, target: SequenceState, state: Any, verified: Verified, request: Request
    ) -> tuple[SequenceState, Any, Draft]:
        """Take in what the last round verified, and propose a batch for the next; dispatches only.

        `state` is donated. A draft made of the target's own layers runs in the target's cache: so is `target` then.
        """

    def fill(self, params: ModelParams, state: Any, pending: Pending) -> Any:
        """Run the rest of a prompt through the draft model, where `resume` leaves it to be done later."""
        return state

    def use_costs(self, costs: CostModel) -> None:
        """Weigh drafts with these figures from now on; the default weighs nothing."""
        return None

    def rest(self, resting: bool) -> None:
        """Whether the model has no part in the drafts that follow; the default always has a part."""
        return None

    def skip(self, params: ModelParams, state: Any, verified: Verified, flush: bool = False) -> Any:
        """Take in what the last round verified, and propose nothing: the next round decodes plainly.

        With `flush` a draft that is fed hidden states takes all that are kept for it.
        """
        raise NotImplementedError

    def drop(self, state: Any) -> Any:
        """Another batch is verified than `draft` proposed last: nothing is to be learned from what becomes of that."""
        return state

    def num_rows_kept(self, state: Any) -> int:
        """Rows of the draft's cache; waits for what runs on `state`."""
        raise NotImplementedError

    def num_unfed(self, state: Any) -> int:
        """Tokens whose hidden states are kept until the draft takes them; waits for what runs on `state`."""
        return 0

    def num_missing(self, state: Any) -> int:
        """Tokens of the text whose hidden states the draft did not take, and never will; waits likewise."""
        return 0


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
        self._draft = Program("draft", draft, placement.plan, args, (state, self.shapes), donate=[1])
        self.propose = lambda *arguments: draft(*arguments[:-1])
        self.draft_programs = (self._draft,)
        self.programs = (*self.programs, self._draft)

    def declare_begin(self, state: Any, begin: Callable[[SequenceState], Any]) -> None:
        """Declare how the state of an empty sequence is made."""
        plan = self.placement.plan
        self._begin = Program("draft begin", begin, plan, [self._sequence.state], state, donate=[0])
        self.programs = (*self.programs, self._begin)

    def start(self, root: int, state: Any | None) -> Any:
        return self._begin(self._sequence.start(root, None if state is None else state.sequence))

    def resume(
        self, params: ModelParams, state: Any, tokens: np.ndarray, common: int, states: PromptStates | None = None,
        same_text: bool = False, taken: Verified | None = None,
    ) -> tuple[Any, int]:  # fmt: skip
        assert params.draft is not None
        return self._begin(self._sequence.resume(params.draft, state.sequence, tokens, common, states)[0]), 0

    def num_rows_kept(self, state: Any) -> int:
        return read_scalar(state.sequence.cache.length)

    def draft(
        self, params: ModelParams, target: SequenceState, state: Any, verified: Verified, request: Request
    ) -> tuple[SequenceState, Any, Draft]:
        return target, *self._draft(params.draft, state, verified, target.history, request)
