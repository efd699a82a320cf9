"""The default: a draft model's chains and copies of earlier text, as far as they pay, else plain decoding.

What a round may gain is estimated from what became of earlier drafts, what it costs from measured or built-in figures
(`tree_round.py` does that round by round). Where the host measures that drafts do not pay after all, rounds are those
of plain decoding for a while (`RoundTimer`).
"""

import dataclasses
import numbers
from pathlib import Path
from typing import Any, ClassVar

from jaxspec.config import check_int
from jaxspec.errors import ConfigError
from jaxspec.methods.auto.costs import BRANCH, PLACE_BRANCH, MeasuringRunner
from jaxspec.methods.auto.profiles import RoundTimes, find_costs, load_costs, weigh_devices
from jaxspec.methods.base import NO_STORE, DeviceChoice, Method, Store
from jaxspec.methods.core.copies import CopySettings
from jaxspec.methods.core.cost_model import (
    ROUND_COST,
    USUAL_RATES,
    CostModel,
    pass_costs,
    relative_draft_cost,
    stream_growth,
    tree_passes,
)
from jaxspec.methods.core.draft_passes import block_rows, num_places, tree_proposals
from jaxspec.methods.core.drafter import Drafter
from jaxspec.methods.core.round import Models
from jaxspec.methods.core.runner import Runner, SpeculativeRunner
from jaxspec.methods.core.sequence import cache_slots
from jaxspec.methods.core.timing import RoundTimer
from jaxspec.methods.core.tree_drafter import TreeDrafter
from jaxspec.methods.core.tree_round import SYNC_ROWS, TreeSettings
from jaxspec.methods.core.verify import match
from jaxspec.methods.specexec import SpecExec
from jaxspec.sampling.accept import Verified

LONGEST_CHAIN = 8
# Streamed passes that take so many times what one row computes are worth a tree of draft tokens.
WORTH_A_TREE = 4.0
# The smallest budget is taken of those that are so nearly as fast as the fastest one.
KNEE = 1.02


@dataclasses.dataclass(frozen=True)
class Auto(Method):
    """Weigh each round what drafting would gain against what it costs, and draft as far as it pays.

    Where the text repeats itself, what followed before is copied (`PromptLookup`); elsewhere a draft model, if there is
    one, drafts a chain that ends where the next token is no longer worth its passes. How often tokens of a given
    probability are accepted is learned while decoding. While nothing pays, rounds are plain decoding, and the draft
    model is tried again now and then. The output is plain decoding's, token for token (rule R4).

    Where the target's layers are streamed (`LLM`'s `offload`) and a pass takes several times what it computes, a draft
    and default settings become `SpecExec`, with as many draft tokens as the measured bandwidth makes worthwhile.

    With several devices, a draft and default settings, what `jaxspec-tune --method swiftspec` measured on them decides:
    `swiftspec` on the best split, or the best of what shares all devices. `stats.choice` says which, and why.

    Attributes:
      num_draft_tokens: most tokens of a target pass, the root not counted.
      length: most tokens drafted by the model in a row, at most `num_draft_tokens`; None is 8, or that. A draft that
        fills a block proposes for all its places.
      ngram: see `PromptLookup`.
      candidates: see `PromptLookup`.
      draft_cost: time of a draft pass over that of a target pass of one row; 0 takes what was measured on this machine,
        or estimates it from the weights.
      pass_cost: times of target passes of 1, 2, ... rows over that of one row; empty takes measured or built-in
        figures.
      round_cost: what a round costs apart from its passes, in target passes of one row; None takes a measured
        figure, or 0.05.
    """

    num_draft_tokens: int = 15
    length: int | None = None
    ngram: int = 8
    candidates: int = 8
    draft_cost: float = 0.0
    pass_cost: tuple[float, ...] = ()
    round_cost: float | None = None

    name: ClassVar[str] = "auto"
    drafts: ClassVar[bool] = True
    takes_blocks: ClassVar[bool] = True

    def __post_init__(self):
        check_int("num_draft_tokens", self.num_draft_tokens, 1, 1023)
        if self.length is None:
            object.__setattr__(self, "length", min(LONGEST_CHAIN, self.num_draft_tokens))
        check_int("length", self.length, 1, self.num_draft_tokens)
        check_int("ngram", self.ngram, 1, 64)
        check_int("candidates", self.candidates, 1, 64)
        object.__setattr__(self, "pass_cost", tuple(self.pass_cost))
        given = [("draft_cost", self.draft_cost), *(("pass_cost", cost) for cost in self.pass_cost)]
        if self.round_cost is not None:
            given.append(("round_cost", self.round_cost))
        for name, value in given:
            if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 <= value < 1e6:
                raise ConfigError(f"{name} must be a time relative to a one-row pass, at least 0, got {value!r}")
        if not all(self.pass_cost):
            raise ConfigError(f"pass_cost must be above 0: passes take time, got {self.pass_cost!r}")

    @property
    def num_rows(self) -> int:
        return self.num_draft_tokens + 1

    @property
    def draft_rows(self) -> int:
        return 1

    def choose_devices(self, profile: Path | None, devices: int) -> DeviceChoice | None:
        # Settings of one's own are to be used as they are.
        return weigh_devices(profile, devices) if self == Auto() else None

    def configure(self, models: Models, store: Store) -> Method:
        """SpecExec with the budget at the knee where the target's layers are streamed and rows are nearly free."""
        if models.draft is None or store.stream_ratio < WORTH_A_TREE or self != Auto():
            return self
        speeds = stream_speeds(models, store.stream_ratio, store.expert_share)
        best = max(speeds.values())
        return SpecExec(next(budget for budget, found in speeds.items() if KNEE * found >= best))

    def costs(self, models: Models, measured: RoundTimes | None = None) -> CostModel:
        """Costs that rounds are weighed with: each figure as given, else as measured, else built in."""
        target, draft = models
        given = {"pass_cost": self.pass_cost, "round_cost": self.round_cost}
        given |= {"draft_cost": self.draft_cost} if draft is not None else {}
        used = {name: value for name, value in given.items() if value != getattr(Auto, name)}  # else the default
        known, rest = ({}, "built in") if measured is None else (measured.figures(), "measured")
        figures: dict[str, Any] = {name: value for name, value in known.items() if name in given} | used
        overhead = known.get("draft_overhead", 0.0)
        source = "given" if len(used) == len(given) else f"given, rest {rest}" if used else rest
        cost = figures.get("draft_cost", 0.0)
        if draft is not None and "draft_cost" not in figures:
            cost = relative_draft_cost(target, draft)
        return CostModel.of(
            target, self.num_rows, figures.get("pass_cost", ()), draft=cost, draft_overhead=overhead, source=source,
            round=figures.get("round_cost", ROUND_COST), one_pass=draft is not None and num_places(draft) > 0,
        )  # fmt: skip

    def bind(self, models: Models, tokens: int, store: Store = NO_STORE, previous: Runner | None = None) -> Runner:
        length, (target, draft) = self.length, models
        assert length is not None
        copies = CopySettings(self.ngram, self.candidates, self.num_draft_tokens)
        # A block proposes for all its places, which costs no more.
        places = 0 if draft is None else min(num_places(draft), self.num_draft_tokens)
        branch = min(PLACE_BRANCH, draft.num_tokens) if draft is not None and places else BRANCH
        shape: dict[str, Any] = {} if draft is None else {"branch": branch, "depth": length, "places": places}
        settings = TreeSettings(self.num_rows, copies=copies, weighs=True, **shape)
        propose = None if draft is None else tree_proposals("noise", draft.vocab, branch)
        profile = find_costs(store.cache_folder, models, self.num_rows)
        times = previous.latest_times() if isinstance(previous, MeasuringRunner) else profile and load_costs(profile)
        rows = 0 if draft is None else block_rows(draft, self.max_path)
        slots, costs = cache_slots(tokens, max(SYNC_ROWS, self.num_rows, rows)), self.costs(models, times)

        def make_drafter(verified: Verified) -> Drafter:
            return TreeDrafter(draft or target, slots, settings, verified, propose=propose, costs=costs)

        timer = previous.timer if isinstance(previous, SpeculativeRunner) else None
        return MeasuringRunner(
            target, tokens, make_drafter, max_path=self.max_path, num_rows=self.num_rows, rule=match, dynamic_rows=True,
            timer=timer or RoundTimer(), profile=profile, times=times, length=0 if draft is None else places or length,
            weigh=lambda times: self.costs(models, times), draft=draft,
            built_in=dataclasses.replace(self, draft_cost=0.0, pass_cost=(), round_cost=None).costs(models),
            worths=previous.worths if isinstance(previous, MeasuringRunner) else (),
        )  # fmt: skip


def stream_speeds(models: Models, ratio: float, expert_share: float) -> dict[int, float]:
    """Speed-up of SpecExec over plain decoding by draft tokens, where a usual draft goes with a streamed target.

    A streamed pass of one row takes `ratio` times what it computes; `expert_share` of its bytes are experts'.
    """
    target, draft = models
    assert draft is not None
    draft_cost, plain = relative_draft_cost(target, draft), max(ratio, 1.0)

    def speed(budget: int) -> float:
        passes, width = pass_costs(target, budget + 1)[-1], SpecExec(budget).draft_rows
        drafting = tree_passes(budget, width) * draft_cost * pass_costs(draft, width)[-1]
        drafting = draft_cost if num_places(draft) else drafting
        reading = ratio * stream_growth(target, budget + 1, expert_share)
        return float(USUAL_RATES[budget] * plain / (max(reading, passes) + drafting))

    return {budget: speed(budget) for budget in USUAL_RATES}
