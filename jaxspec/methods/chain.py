"""Chain speculation: one branch (arXiv 2211.17192, 2302.01318)."""

import dataclasses
import math
from typing import ClassVar, Literal

from jaxspec.errors import ConfigError
from jaxspec.methods.base import Exactness, Models
from jaxspec.methods.core.best_first import BestFirstDrafter, tree_rows
from jaxspec.methods.core.chunks import cache_slots
from jaxspec.methods.core.proposals import same_draw
from jaxspec.methods.core.runner import SpeculativeRunner
from jaxspec.methods.core.sampled_tree import SampledDrafter, SampledShape, rejection
from jaxspec.methods.core.settings import check_draft, check_range, check_same_devices, log_threshold
from jaxspec.methods.core.verify import match

LONGEST = 64


@dataclasses.dataclass(frozen=True)
class Chain:
    """A draft model proposes a few tokens in a row; the target verifies them in one pass.

    Attributes:
      length: most tokens drafted in a round.
      rule: "match" (R4): the draft simulates the target's draw, processors and noise included, so that at temperature
        > 0 it agrees with the target whenever the two distributions nearly do; the output equals plain sampling with
        the same seed. "rejection" (R2): the classic form with independent draft noise, equal in distribution.
      min_probability: the chain ends behind a prefix that the draft finds less probable than this, so its length
        follows the text; 0 drafts `length` tokens always. Draft passes that are not needed are not run, and the target
        pass costs less (on CPU, where rows cost).
    """

    length: int = 4
    rule: Literal["match", "rejection"] = "match"
    min_probability: float = 0.0

    name: ClassVar[str] = "chain"
    drafts: ClassVar[bool] = True
    needs_draft: ClassVar[bool] = True
    own_devices: ClassVar[bool] = False

    def __post_init__(self):
        """Check ranges."""
        check_range("length", self.length, 1, LONGEST)
        if self.rule not in ("match", "rejection"):
            raise ConfigError(f"rule must be 'match' or 'rejection', got {self.rule!r}")
        log_threshold("min_probability", self.min_probability)

    @property
    def exact(self) -> Exactness:
        """See `Method.exact`."""
        return "tokens" if self.rule == "match" else "law"

    @property
    def batch_rows(self) -> int:
        """bs: the root and the chain."""
        return self.length + 1

    @property
    def longest_path(self) -> int:
        """P: the chain and the bonus token."""
        return self.length + 1

    @property
    def draft_rows(self) -> int:
        """One token at a time."""
        return 1

    def check(self, models: Models) -> None:
        """See `Method.check`."""
        check_draft(self.name, models.draft is not None)
        check_same_devices(self.name, models)

    def bind(self, models: Models, tokens: int) -> SpeculativeRunner:
        """See `Method.bind`."""
        assert models.draft is not None
        least = log_threshold("min_probability", self.min_probability)
        varies, steps = self.min_probability > 0, self.longest_path
        slots = cache_slots(tokens, 2 * steps)
        if self.rule == "rejection":
            shape = SampledShape((1,) * self.length)
            drafter = SampledDrafter(models.draft, slots, shape, replacement=True, least=least)
            rule = rejection(shape, replacement=True)
            return SpeculativeRunner(models.target, tokens, drafter, steps=steps, rule=rule, varies=varies)
        assert tree_rows(1, self.length) == self.length
        drafter = BestFirstDrafter(
            models.draft,
            slots,
            same_draw(models.draft.vocab, scored=least > -math.inf),
            rows=self.batch_rows,
            width=1,
            branch=1,
            depth=self.length,
            least=least,
            steps=steps,
        )
        return SpeculativeRunner(models.target, tokens, drafter, steps=steps, rule=match, varies=varies)
