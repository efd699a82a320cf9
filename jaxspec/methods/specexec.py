"""SpecExec: a massive draft tree as a cache of the target's distributions (arXiv 2406.02532)."""

import dataclasses
import math
import numbers
from collections.abc import Sequence
from typing import ClassVar

from jaxspec.config import check_int
from jaxspec.errors import ConfigError
from jaxspec.methods.base import NO_STORE, Method, Store
from jaxspec.methods.core.draft_passes import RANKINGS, Ranking, block_rows, num_places, tree_proposals
from jaxspec.methods.core.drafter import Drafter
from jaxspec.methods.core.round import Models
from jaxspec.methods.core.runner import Runner, SpeculativeRunner
from jaxspec.methods.core.sequence import cache_slots
from jaxspec.methods.core.settings import check_branch, check_choice, log_threshold
from jaxspec.methods.core.tree_drafter import TreeDrafter
from jaxspec.methods.core.tree_round import TreeSettings, tree_rows
from jaxspec.methods.core.verify import match
from jaxspec.sampling.accept import Verified

MOST_DRAFT_TOKENS = LARGEST_DEPTH = 4096
# Rows of the draft's tree: its ancestor relation holds the square of them, one byte each.
LARGEST_TREE = 16384


@dataclasses.dataclass(frozen=True)
class SpecExec(Method):
    """Verify the most probable prefixes of a draft in one target pass, and sample along them until one is missing.

    The draft is searched best-first by cumulative log-probability, `width` prefixes a pass, until no further pass can
    change the result (paper, section 4). Each emitted token is the target's own draw (rule R4): at any temperature the
    output equals plain sampling with the same seed.

    Attributes:
      num_draft_tokens: K, the paper's budget: tokens of the tree, the root not counted.
      width: prefixes evaluated in one draft pass; None is an eighth of `num_draft_tokens`, 64 at most. A draft that
        fills a block has one pass, whatever the width.
      branch: children of a prefix; None is `num_draft_tokens`, 32 at most.
      depth: most draft passes and so the longest path; None is `num_draft_tokens`, 32 at most. A search that it ends is
        counted (`stats.speculative_decoding.tree_truncated`).
      ranking: what prefixes are ranked by: "noise", the chance that the target chooses them with the noise of its own
        draws, which the draft knows; "probability", the draft's plain probabilities, as in the paper; "sampling", those
        at the request's temperature. "noise" accepts more at temperature > 0, and is "probability" at 0.
      decay: factor on a prefix's probability per token (the authors' code has 0.95); 1 is off.
      min_probability: prefixes that the draft finds less probable are not searched further.
    """

    num_draft_tokens: int = 16
    width: int | None = None
    branch: int | None = None
    depth: int | None = None
    ranking: Ranking = "noise"
    decay: float = 1.0
    min_probability: float = 0.0

    name: ClassVar[str] = "specexec"
    drafts: ClassVar[bool] = True
    needs_draft: ClassVar[bool] = True
    takes_blocks: ClassVar[bool] = True

    def __post_init__(self):
        check_int("num_draft_tokens", self.num_draft_tokens, 1, MOST_DRAFT_TOKENS)
        for name, default in (
            ("width", min(64, max(1, self.num_draft_tokens // 8))),
            ("branch", min(32, self.num_draft_tokens)),
            ("depth", min(32, self.num_draft_tokens)),
        ):
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
            check_int(name, getattr(self, name), 1)
        check_int("depth", self.depth, 1, LARGEST_DEPTH)
        assert self.width is not None and self.depth is not None
        if (rows := tree_rows(self.width, self.depth)) > LARGEST_TREE:
            raise ConfigError(
                f"width {self.width} and depth {self.depth} make a draft tree of {rows} rows, at most {LARGEST_TREE}"
            )
        check_choice("ranking", self.ranking, RANKINGS)
        if isinstance(self.decay, bool) or not isinstance(self.decay, numbers.Real) or not 0 < self.decay <= 1:
            raise ConfigError(f"decay must lie above 0 and be at most 1, got {self.decay!r}")
        log_threshold("min_probability", self.min_probability)

    @property
    def num_rows(self) -> int:
        return self.num_draft_tokens + 1

    @property
    def max_path(self) -> int:
        """P: a path of `depth` tokens, and the bonus token."""
        assert self.depth is not None
        return self.depth + 1

    @property
    def draft_rows(self) -> int:
        assert self.width is not None
        return self.width

    def check(self, models: Models) -> None:
        super().check(models)
        assert self.branch is not None
        check_branch("branch", self.branch, models)

    def bind(self, models: Models, tokens: int, store: Store = NO_STORE, previous: Runner | None = None) -> Runner:
        draft, width, branch, depth = models.draft, self.width, self.branch, self.depth
        assert draft is not None and width is not None and branch is not None and depth is not None
        propose = tree_proposals(self.ranking, draft.vocab, branch, loss=math.log(self.decay))

        settings = TreeSettings(
            self.num_rows, width, branch, depth, min_score=log_threshold("min_probability", self.min_probability),
            places=min(depth, num_places(draft)),
        )  # fmt: skip
        rows = block_rows(draft, self.max_path) or settings.tree_rows + self.max_path
        slots = cache_slots(tokens, max(rows, self.max_path))

        def make_drafter(verified: Verified) -> Drafter:
            return TreeDrafter(draft, slots, settings, verified, propose=propose)

        return SpeculativeRunner(
            models.target, tokens, make_drafter, max_path=self.max_path, num_rows=self.num_rows, rule=match,
            dynamic_rows=self.min_probability > 0, draft=draft,
        )  # fmt: skip

    def variants(self) -> Sequence[Method]:
        return [SpecExec(num_draft_tokens=count) for count in (8, 16)]
