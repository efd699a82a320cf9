"""SpecInfer: sampled token trees with multi-round rejection (arXiv 2305.09781)."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from jaxspec.config import check_int
from jaxspec.errors import ConfigError
from jaxspec.methods.base import NO_STORE, Exactness, Method, Store
from jaxspec.methods.core.draft_passes import block_rows, num_places
from jaxspec.methods.core.drafter import Drafter
from jaxspec.methods.core.round import Models
from jaxspec.methods.core.runner import Runner, SpeculativeRunner
from jaxspec.methods.core.sequence import cache_slots
from jaxspec.methods.core.settings import check_branch
from jaxspec.methods.sampled_tree import SampledDrafter, SampledShape, rejection
from jaxspec.sampling.accept import Verified

LARGEST_TREE = 1024


@dataclasses.dataclass(frozen=True)
class SpecInfer(Method):
    """A tree of draft samples, accepted by multi-round rejection: equal to plain sampling in distribution.

    At temperature 0 children are the draft's most probable tokens and the output is that of greedy decoding.

    Attributes:
      expansion: children of a node at each level below the root, <k_1 .. k_m> in the paper.
      replacement: siblings are drawn independently (R3, the paper), or without replacement (R3').
    """

    expansion: Sequence[int] = (2, 2, 1, 1)
    replacement: bool = True

    name: ClassVar[str] = "specinfer"
    drafts: ClassVar[bool] = True
    needs_draft: ClassVar[bool] = True
    takes_blocks: ClassVar[bool] = True

    def __post_init__(self):
        if isinstance(self.expansion, str) or not isinstance(self.expansion, Sequence) or not self.expansion:
            raise ConfigError(f"expansion must list the children per level, such as (2, 2, 1), got {self.expansion!r}")
        object.__setattr__(
            self, "expansion", tuple(check_int("every entry of expansion", k, 1, 2**63) for k in self.expansion)
        )
        if self.num_rows - 1 > LARGEST_TREE:
            raise ConfigError(f"expansion {self.expansion} has {self.num_rows - 1} tokens, at most {LARGEST_TREE}")

    @property
    def _shape(self) -> SampledShape:
        return SampledShape(tuple(self.expansion))

    @property
    def exact(self) -> Exactness:
        return "distribution"

    @property
    def num_rows(self) -> int:
        return self._shape.rows

    @property
    def max_path(self) -> int:
        """P: one token a level, and the bonus token."""
        return len(self.expansion) + 1

    @property
    def draft_rows(self) -> int:
        return self._shape.width

    def check(self, models: Models) -> None:
        super().check(models)
        check_branch("expansion", self._shape.draws, models)
        places = 0 if models.draft is None else num_places(models.draft)
        if 0 < places < len(self.expansion):
            raise ConfigError(f"expansion has {len(self.expansion)} levels, the draft fills {places} places")

    def bind(self, models: Models, tokens: int, store: Store = NO_STORE, previous: Runner | None = None) -> Runner:
        draft, shape = models.draft, self._shape
        assert draft is not None
        rows = max(shape.inner_rows + shape.width + self.max_path, block_rows(draft, self.max_path))
        slots = cache_slots(tokens, rows)

        def make_drafter(verified: Verified) -> Drafter:
            return SampledDrafter(draft, slots, shape, verified, replacement=self.replacement, min_score=-float("inf"))

        return SpeculativeRunner(
            models.target, tokens, make_drafter, max_path=self.max_path, num_rows=self.num_rows,
            rule=rejection(shape, replacement=self.replacement), dynamic_rows=False, draft=draft,
        )  # fmt: skip
