"""Runner of `Swift`: rounds of a self-draft, and now and then a pass that scores other layer sets."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxspec.methods.core.cost_model import CostModel, pass_costs
from jaxspec.methods.core.round import ModelParams, Round, StepOutput
from jaxspec.methods.core.runner import HostState, SpeculativeRunner, SpeculativeState
from jaxspec.methods.core.timing import RoundTimer
from jaxspec.methods.core.verify import match
from jaxspec.methods.swift.search import LayerSearch, matchness_program
from jaxspec.methods.swift.self_draft import ChainSettings, SelfDrafter
from jaxspec.methods.swift.store import LayerStore
from jaxspec.models.layer_set import LayerSet
from jaxspec.results import Choice
from jaxspec.runtime.placement import Placement
from jaxspec.sampling.request import Request

if TYPE_CHECKING:
    from jaxspec.structured.matcher import Matcher


@dataclasses.dataclass(eq=False)
class HostText(HostState):
    """The host's record of one generation."""

    tokens: list[int] = dataclasses.field(default_factory=list)  # prompt and verified ones, one round late
    prompt: int = 1  # how many of them are the prompt's
    # Of each round that was not read yet, the next one included: whether a scoring pass runs before it.
    scored: collections.deque[bool] = dataclasses.field(default_factory=lambda: collections.deque([False]))


class DraftTimer(RoundTimer):
    """A timer that lets every round draft unless `adaptive`, and none whose draft costs what the target costs."""

    adaptive, draft_cost, passes = True, 0.0, 0

    def may_draft(self) -> bool:
        return not self.adaptive or (super().may_draft() and self.draft_cost < 1)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class SwiftChoice(Choice):
    """The set of skipped layers, and the search that found it.

    Attributes:
      layers: the skipped blocks, as the setting `layers` takes them.
      num_skipped: number of skipped blocks.
      matchness: share of tokens that the set predicts; None for given layers, and before a set was found.
      steps: candidates that were scored; None for given layers.
      stopped: why the search ended; None while it goes on.
      history: step and matchness of every best set so far.
      search_passes: passes that scored a candidate.
      search_share: share of the time that scoring took while the search went on.
      gain: speed of drafted rounds over plain decoding; None before both were measured.
    """

    layers: str
    num_skipped: int
    matchness: float | None = None
    steps: int | None = None
    stopped: str | None = None
    history: tuple[tuple[int, float], ...] = ()
    search_passes: int
    search_share: float
    gain: float | None


class SwiftRunner(SpeculativeRunner):
    """Decodes with a self-draft and searches its layers."""

    drafter: SelfDrafter
    timer: DraftTimer

    def __init__(
        self, target: Placement, tokens: int, search: LayerSearch, timer: DraftTimer, chain: ChainSettings, *,
        fixed: LayerSet | None, file: LayerStore | None, task: str,
        share: float, branching: bool,
    ):  # fmt: skip
        """Declare the programs for sequences of up to `tokens` tokens; `search` and `timer` may be in use for long.

        `fixed` layers are not searched for. A search is stored in `file` under the name `task`. Scoring takes at most
        `share` of the time; 1 scores after every round. `branching` skips blocks by branches on the device.
        """
        self.search, self._fixed, self._file, self._task = search, fixed, file, task
        self.share, self._searches = share, fixed is None and share != 0 and search.has_choice
        timer.adaptive = chain.adaptive
        costs = CostModel.of(target, chain.num_rows)
        window = search.settings.window
        layers = fixed or search.layers
        super().__init__(
            target, tokens,
            lambda verified: SelfDrafter(target, self.slots, verified, chain, costs, layers, branching),
            max_path=chain.length + 1, num_rows=max(chain.num_rows, window), rule=match, dynamic_rows=True, timer=timer,
        )  # fmt: skip
        timer.draft_cost, self._pass_cost = self.drafter.cost, float(pass_costs(target, window)[-1])
        self._pending: collections.deque[tuple[HostText, LayerSet, jax.Array]] = collections.deque()
        self.score = matchness_program(target, self.executor.state, window, branching)
        self.programs = (*self.programs, *((self.score,) if self._searches else ()))

    def constrained_round(
        self, params: ModelParams, state: SpeculativeState, request: Request, matcher: "Matcher", root: int
    ) -> tuple[SpeculativeState, Round]:
        """A round that scores no layers: the devices would not be idle meanwhile."""
        _text(state).scored.append(False)
        return super().constrained_round(params, state, request, matcher, root)

    def start(self, root: int, state: SpeculativeState | None) -> SpeculativeState:
        return dataclasses.replace(super().start(root, state), host=HostText(tokens=[root]))

    def resume(self, params: ModelParams, state: SpeculativeState, tokens: np.ndarray, common: int) -> SpeculativeState:
        text = HostText(tokens=tokens.tolist(), prompt=len(tokens))
        return dataclasses.replace(super().resume(params, state, tokens, common), host=text)

    def round(
        self, params: ModelParams, state: SpeculativeState, request: Request, room: int
    ) -> tuple[SpeculativeState, Round, int]:
        """One round; a scoring pass runs after it on the devices."""
        text = _text(state)
        if self._searches and self.drafter.adopt(self.search.layers):
            # What was learned of the other set says nothing of this one.
            state = dataclasses.replace(state, draft=self.drafter.start(0, None))
            self.timer.draft_cost = self.drafter.cost
            self.timer.forget_drafts()
        state, round_, least = super().round(params, state, request, room)
        start = self._find_window(text) if self._searches and self._is_due() else None
        text.scored.append(start is not None)
        if start is not None:
            layers = self.search.propose()
            tokens = np.array(text.tokens[start : start + self.search.settings.window + 1], np.int32)
            target, matches = self.score(params.target, state.target, tokens, np.int32(start), layers.runs)
            matches.copy_to_host_async()
            self._pending.append((text, layers, matches))
            state = dataclasses.replace(state, target=target)
        return state, round_, least

    def observe(self, state: SpeculativeState, outputs: Sequence[StepOutput]) -> None:
        (output,) = outputs
        text, timer, search = _text(state), self.timer, self.search
        (allowed, *_), scored = text.dispatched.popleft(), text.scored.popleft()
        total_s, spent_s = timer.total_s, timer.spent_s
        if allowed is None:
            timer.leave_out()
        else:
            timer.observe(output, allowed=allowed, delayed=scored)
        text.tokens += output.tokens
        if search.stopped is None:
            search.decoded_s += timer.total_s - total_s
            search.spent_s += timer.spent_s - spent_s
        if scored:
            self._read_scores(text)

    def report(self) -> SwiftChoice:
        search, layers = self.search, self._fixed or self.search.layers
        found: dict[str, Any] = {}
        if self._fixed is None:
            found = {name: getattr(search, name) for name in ("matchness", "steps", "stopped")}
            found["history"] = tuple(search.history)
        return SwiftChoice(
            layers=str(layers), num_skipped=layers.num_skipped, search_passes=self.timer.passes,
            search_share=search.spent_s / search.decoded_s if search.decoded_s else 0.0,
            gain=self.timer.total_gain, **found,
        )  # fmt: skip

    def close(self, state: Any | None) -> None:
        """End a generation; stores the search."""
        try:
            self._read_scores()
        finally:
            if self._searches and self._file is not None:
                self._file.save(self._task, self.search)

    def _read_scores(self, text: HostText | None = None) -> None:
        """Take the scores of the oldest pass for a text, and of those before it, which have finished; None: of all."""
        owner = None
        while self._pending and (owner is None or owner is not text):
            owner, layers, matches = self._pending.popleft()
            self.search.tell(layers, int(np.asarray(matches)) / self.search.settings.window)
            self.timer.passes += 1

    def _is_due(self) -> bool:
        search, share, timer = self.search, self.share, self.timer
        if search.stopped is not None:
            return False
        if share == 1:
            return True
        # Before one was measured, by its rows. Where every round drafts, a draft round is the nearest to a plain one.
        usual_s = timer.plain_s or timer.drafted_s
        cost = timer.pass_s or (usual_s and self._pass_cost * usual_s)
        return cost is not None and (1 + len(self._pending)) * cost <= share * search.decoded_s - search.spent_s

    def _find_window(self, text: HostText) -> int | None:
        """First position of the latest tokens to score on; None while the answer has too few."""
        # The last token is the root, or a former one: the keys of all before it are in the cache.
        start = len(text.tokens) - 1 - self.search.settings.window
        return start if start >= text.prompt else None


def _text(state: SpeculativeState) -> HostText:
    assert isinstance(state.host, HostText)
    return state.host
