"""Prompt lookup: drafts copied from where the text's last tokens occurred before; no draft model."""

import dataclasses
from typing import ClassVar

from jaxspec.config import check_int
from jaxspec.methods.base import NO_STORE, Method, Store
from jaxspec.methods.core.copies import CopySettings
from jaxspec.methods.core.cost_model import CostModel
from jaxspec.methods.core.drafter import Drafter
from jaxspec.methods.core.round import Models
from jaxspec.methods.core.runner import Runner, SpeculativeRunner
from jaxspec.methods.core.sequence import cache_slots
from jaxspec.methods.core.tree_drafter import TreeDrafter
from jaxspec.methods.core.tree_round import TreeSettings
from jaxspec.methods.core.verify import match
from jaxspec.sampling.accept import Verified


@dataclasses.dataclass(frozen=True)
class PromptLookup(Method):
    """Propose what followed earlier occurrences of the text's last tokens, in prompt and output.

    The longest matches count most, the most recent first among equals; several are merged into one tree. Tokens are
    drafted as long as they are worth their rows: the chance that a match of n tokens goes on is estimated while
    decoding, and a round without a promising match decodes plainly.

    Attributes:
      num_draft_tokens: most tokens of a target pass, the root not counted.
      ngram: longest suffix that is compared; longer matches count as this long.
      candidates: earlier occurrences that are merged.
      length: most tokens copied from each.
      adaptive: False always drafts `num_draft_tokens`, as far as there are matches.
    """

    num_draft_tokens: int = 15
    ngram: int = 8
    candidates: int = 8
    length: int = 15
    adaptive: bool = True

    name: ClassVar[str] = "lookup"

    def __post_init__(self):
        check_int("num_draft_tokens", self.num_draft_tokens, 1, 1023)
        check_int("ngram", self.ngram, 1, 64)
        check_int("candidates", self.candidates, 1, 64)
        check_int("length", self.length, 1, 128)

    @property
    def num_rows(self) -> int:
        return self.num_draft_tokens + 1

    @property
    def max_path(self) -> int:
        """P: a copied passage, as far as a pass holds it, and the bonus token."""
        return min(self.length, self.num_draft_tokens) + 1

    def bind(self, models: Models, tokens: int, store: Store = NO_STORE, previous: Runner | None = None) -> Runner:
        target = models.target
        costs = CostModel.of(target, self.num_rows) if self.adaptive else None
        copies = CopySettings(self.ngram, self.candidates, self.max_path - 1)
        settings = TreeSettings(self.num_rows, copies=copies, weighs=self.adaptive)

        def make_drafter(verified: Verified) -> Drafter:
            return TreeDrafter(target, cache_slots(tokens, self.num_rows), settings, verified, costs=costs)

        return SpeculativeRunner(
            target, tokens, make_drafter, max_path=self.max_path, num_rows=self.num_rows, rule=match, dynamic_rows=True
        )
