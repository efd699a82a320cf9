"""Chain speculation: one branch (arXiv 2211.17192, 2302.01318)."""

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar, Literal

from jaxspec.config import check_int
from jaxspec.errors import ConfigError
from jaxspec.methods.base import NO_STORE, Exactness, Method, Store
from jaxspec.methods.core.draft_passes import block_rows, num_places, same_draw
from jaxspec.methods.core.drafter import Drafter
from jaxspec.methods.core.round import Models
from jaxspec.methods.core.runner import Runner, SpeculativeRunner
from jaxspec.methods.core.sequence import cache_slots
from jaxspec.methods.core.settings import log_threshold
from jaxspec.methods.core.tree_drafter import TreeDrafter
from jaxspec.methods.core.tree_round import TreeSettings
from jaxspec.methods.core.verify import match
from jaxspec.methods.sampled_tree import SampledDrafter, SampledShape, rejection
from jaxspec.sampling.accept import Verified

LONGEST = 64


@dataclasses.dataclass(frozen=True)
class Chain(Method):
    """A draft model proposes a few tokens in a row; the target verifies them in one pass.

    Attributes:
      num_draft_tokens: most tokens drafted in a round.
      rule: "match" (R4): the draft simulates the target's draw, processors and noise included, so that at temperature
        > 0 it agrees with the target whenever the two distributions nearly do; the output equals plain sampling with
        the same seed. "rejection" (R2): the classic form with independent draft noise, equal in distribution.
      min_probability: the chain ends after a prefix that the draft finds less probable than this, so its length
        follows the text; 0 drafts `num_draft_tokens` always. Draft passes that are not needed are not run, and the
        target pass costs less (on CPU, where rows cost).
    """

    num_draft_tokens: int = 4
    rule: Literal["match", "rejection"] = "match"
    min_probability: float = 0.0

    name: ClassVar[str] = "chain"
    drafts: ClassVar[bool] = True
    needs_draft: ClassVar[bool] = True
    takes_blocks: ClassVar[bool] = True

    def __post_init__(self):
        check_int("num_draft_tokens", self.num_draft_tokens, 1, LONGEST)
        if self.rule not in ("match", "rejection"):
            raise ConfigError(f"rule must be 'match' or 'rejection', got {self.rule!r}")
        log_threshold("min_probability", self.min_probability)

    @property
    def exact(self) -> Exactness:
        return "tokens" if self.rule == "match" else "distribution"

    @property
    def num_rows(self) -> int:
        return self.num_draft_tokens + 1

    @property
    def draft_rows(self) -> int:
        return 1

    def bind(self, models: Models, tokens: int, store: Store = NO_STORE, previous: Runner | None = None) -> Runner:
        draft = models.draft
        assert draft is not None
        min_score = log_threshold("min_probability", self.min_probability)
        places = min(self.num_draft_tokens, num_places(draft))
        slots = cache_slots(tokens, max(2 * self.num_rows, block_rows(draft, self.max_path)))
        # A block has no further places.
        shape = SampledShape((1,) * (places or self.num_draft_tokens))

        def sampled(verified: Verified) -> Drafter:
            return SampledDrafter(draft, slots, shape, verified, replacement=True, min_score=min_score)

        def matched(verified: Verified) -> Drafter:
            settings = TreeSettings(shape.rows, depth=self.num_draft_tokens, min_score=min_score, places=places)
            propose = same_draw(draft.vocab, scored=min_score > -math.inf)
            return TreeDrafter(draft, slots, settings, verified, propose=propose)

        exact = self.rule == "match"
        return SpeculativeRunner(
            models.target, tokens, matched if exact else sampled, max_path=self.max_path,
            num_rows=shape.rows, rule=match if exact else rejection(shape, replacement=True),
            dynamic_rows=self.min_probability > 0, draft=draft,
        )  # fmt: skip

    def variants(self) -> Sequence[Method]:
        return [dataclasses.replace(self, num_draft_tokens=count) for count in (1, 2, 3, 4, 6, 8)]
