"""The default: a draft model's chains and copies of earlier text, as far as they pay, else plain decoding."""

import dataclasses
import numbers
from typing import Any, ClassVar

from jaxspec.errors import ConfigError
from jaxspec.methods.base import Exactness, Models
from jaxspec.methods.core.auto import SYNC_ROWS, AutoDrafter, RoundCosts
from jaxspec.methods.core.chunks import cache_slots
from jaxspec.methods.core.cost_model import pass_costs, relative_draft_cost
from jaxspec.methods.core.lookup import LookupSettings, NGramDrafter
from jaxspec.methods.core.runner import SpeculativeRunner
from jaxspec.methods.core.settings import check_range, check_same_devices
from jaxspec.methods.core.verify import match

LONGEST_CHAIN = 8


@dataclasses.dataclass(frozen=True)
class Auto:
    """Weigh each round what drafting would gain against what it costs, and draft as far as it pays.

    Where the text repeats itself, what followed before is copied (`PromptLookup`); elsewhere a draft model, if there is
    one, drafts a chain that ends where the next token is no longer worth its passes. How often tokens of a given
    probability are accepted is learned while decoding. While nothing pays, rounds are plain decoding, and the draft
    model is tried again now and then. The output is plain decoding's, token for token (rule R4).

    Attributes:
      batch: bs, most rows of a target pass, the root included.
      length: most tokens drafted by the model in a row, below `batch`; None is 8, or what `batch` holds.
      ngram: see `PromptLookup`.
      candidates: see `PromptLookup`.
      draft_cost: time of a draft pass over that of a target pass of one row; 0 estimates it from the weights.
      pass_cost: times of target passes of 1, 2, ... rows over that of one row; empty takes built-in figures.
      round_cost: what a round costs besides its passes, in target passes of one row.
    """

    batch: int = 16
    length: int | None = None
    ngram: int = 8
    candidates: int = 8
    draft_cost: float = 0.0
    pass_cost: tuple[float, ...] = ()
    round_cost: float = 0.05

    name: ClassVar[str] = "auto"
    drafts: ClassVar[bool] = True
    needs_draft: ClassVar[bool] = False
    own_devices: ClassVar[bool] = False

    def __post_init__(self):
        """Check ranges."""
        check_range("batch", self.batch, 2, 1024)
        if self.length is None:
            object.__setattr__(self, "length", min(LONGEST_CHAIN, self.batch - 1))
        check_range("length", self.length, 1, self.batch - 1)
        check_range("ngram", self.ngram, 1, 64)
        check_range("candidates", self.candidates, 1, 64)
        object.__setattr__(self, "pass_cost", tuple(self.pass_cost))
        for name, value in (
            ("round_cost", self.round_cost),
            ("draft_cost", self.draft_cost),
            *(("pass_cost", cost) for cost in self.pass_cost),
        ):
            if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 <= value < 1e6:
                raise ConfigError(f"{name} must be a time relative to a one-row pass, at least 0, got {value!r}")

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
        """One token at a time."""
        return 1

    def check(self, models: Models) -> None:
        """See `Method.check`."""
        check_same_devices(self.name, models)

    def costs(self, models: Models) -> RoundCosts:
        """What rounds are taken to cost: as given, else built-in figures and an estimate from the weights' sizes."""
        target, draft = models
        cost = self.draft_cost
        if cost == 0 and draft is not None:
            cost = relative_draft_cost(target, draft)
        return RoundCosts(pass_costs(target, self.batch, self.pass_cost) + self.round_cost, cost, self.round_cost)

    def bind(self, models: Models, tokens: int) -> SpeculativeRunner:
        """See `Method.bind`."""
        assert self.length is not None
        target, draft = models
        lookup = LookupSettings(self.batch, self.ngram, self.candidates, self.batch - 1)
        slots, steps, costs = cache_slots(tokens, max(SYNC_ROWS, self.batch)), self.longest_path, self.costs(models)
        if draft is None:
            drafter = NGramDrafter(target, slots, lookup, costs.batch)
        else:
            drafter = AutoDrafter(draft, slots, lookup, self.length, steps, costs)
        return SpeculativeRunner(target, tokens, drafter, steps=steps, rule=match, varies=True)

    def explain(self, models: Models) -> dict[str, Any]:
        """What its choices rest on, for the statistics of a generation: the costs, in target passes of one row."""
        costs = self.costs(models)
        known = {"pass_cost": (costs.batch - self.round_cost).round(3).tolist(), "round_cost": self.round_cost}
        return known if models.draft is None else known | {"draft_cost": round(costs.draft, 4)}
