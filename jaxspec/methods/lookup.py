"""Prompt lookup: drafts copied from where the text's last tokens occurred before; no draft model."""

import dataclasses
from typing import ClassVar

from jaxspec.errors import ConfigError
from jaxspec.methods.base import Exactness, Models
from jaxspec.methods.core.chunks import cache_slots
from jaxspec.methods.core.cost_model import pass_costs
from jaxspec.methods.core.lookup import LookupSettings, NGramDrafter
from jaxspec.methods.core.runner import SpeculativeRunner
from jaxspec.methods.core.settings import check_range
from jaxspec.methods.core.verify import match


@dataclasses.dataclass(frozen=True)
class PromptLookup(LookupSettings):
    """Propose what followed earlier occurrences of the text's last tokens, in prompt and output.

    The longest matches count most, the most recent first among equals; several are merged into one tree. Tokens are
    drafted as long as they are worth their rows: the chance that a match of n tokens goes on is estimated while
    decoding, and a round without a promising match verifies the root alone, at the cost of plain decoding.

    Attributes:
      batch: bs, most rows of a target pass, the root included.
      ngram: longest suffix that is compared; longer matches count as this long.
      candidates: earlier occurrences that are merged.
      length: most tokens copied from each.
      adaptive: False always drafts as much as the batch holds.
    """

    batch: int = 16
    ngram: int = 8
    candidates: int = 8
    length: int = 15
    adaptive: bool = True

    name: ClassVar[str] = "lookup"
    drafts: ClassVar[bool] = False
    needs_draft: ClassVar[bool] = False
    own_devices: ClassVar[bool] = False

    def __post_init__(self):
        """Check ranges."""
        check_range("batch", self.batch, 2, 1024)
        check_range("ngram", self.ngram, 1, 64)
        check_range("candidates", self.candidates, 1, 64)
        check_range("length", self.length, 1, 128)
        if not isinstance(self.adaptive, bool):
            raise ConfigError(f"adaptive must be True or False, got {self.adaptive!r}")

    @property
    def exact(self) -> Exactness:
        """See `Method.exact`."""
        return "tokens"

    @property
    def batch_rows(self) -> int:
        """bs."""
        return self.batch

    @property
    def draft_rows(self) -> int:
        """There is no draft model."""
        return 0

    def check(self, models: Models) -> None:
        """Every model fits."""

    def bind(self, models: Models, tokens: int) -> SpeculativeRunner:
        """See `Method.bind`."""
        costs = pass_costs(models.target, self.batch)
        drafter = NGramDrafter(models.target, cache_slots(tokens, self.batch), self, costs)
        return SpeculativeRunner(models.target, tokens, drafter, steps=self.longest_path, rule=match, varies=True)
