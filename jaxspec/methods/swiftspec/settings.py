"""SwiftSpec: draft and target on their own devices, a tree that grows while the target verifies (arXiv 2506.11309)."""

import dataclasses
from typing import ClassVar

from jaxspec.config import check_int
from jaxspec.errors import ConfigError
from jaxspec.methods.base import NO_STORE, Method, Store
from jaxspec.methods.core.draft_passes import RANKINGS, Ranking, tree_proposals
from jaxspec.methods.core.round import Models
from jaxspec.methods.core.runner import Runner
from jaxspec.methods.core.settings import check_branch, check_choice
from jaxspec.methods.swiftspec.draft_tree import Growth
from jaxspec.methods.swiftspec.runner import SwiftSpecRunner

LARGEST_TREE = 4096


@dataclasses.dataclass(frozen=True)
class SwiftSpec(Method):
    """Grow a token tree on the draft's devices while the target verifies the best part of it on its own.

    What the target verifies in one round is chosen from a tree that was grown without knowing the outcome of the round
    before; when that arrives, the root moves and the subtree below it survives. The output is plain decoding's, token
    for token (rule R4), however the tree came about.

    Attributes:
      num_draft_tokens: bs - 1, tokens of a verification batch, the root not counted (the paper's bs counts it).
      width: w, leaves that the draft evaluates in one pass.
      branch: k, proposals per node; None is the larger of `num_draft_tokens` and `width`, with which an evaluated root
        fills a batch. 1, with `width` 1, makes a chain.
      depth: d, draft passes while one batch is verified. None measures both passes once the weights are there, and
        takes as many as fit into a verification, at most `num_draft_tokens` + 1. No draft can have a mean acceptance
        length above `depth`, or above 2 + `refill` if that is more.
      refill: draft passes that a batch waits for after a root that the draft had not evaluated, apart from the one that
        evaluates it. None weighs them by the measured times where `depth` is measured too, and is 0 where it is given.
      ranking: what the tree grows and batches are chosen by: "noise", the chance that the target chooses a prefix with
        the noise of its own draws, which the draft knows; "probability", the draft's plain probabilities, as in the
        paper; "sampling", those at the request's temperature. "noise" accepts more at temperature > 0, and is
        "probability" at 0.
      adaptive: go on growing until the target's result is there, up to four times `depth` passes (`num_draft_tokens` +
        1 if that is None), in place of exactly `depth`. The host waits for the target in every round then.
      overlap: False grows the same trees in turn with verification. Draft and target that share their devices always
        take turns, unless the target's layers are streamed.
      reuse: False drops the tree in every round.
      leaves: whether a batch may hold proposals that the draft has not evaluated; without them growth on demand
        delays the target.
      survivors: most nodes that are kept when the root moves; None is eight times `width`, or bs if that is more.
    """

    num_draft_tokens: int = 7
    width: int = 8
    branch: int | None = None
    depth: int | None = None
    refill: int | None = None
    ranking: Ranking = "noise"
    adaptive: bool = False
    overlap: bool = True
    reuse: bool = True
    leaves: bool = True
    survivors: int | None = None

    name: ClassVar[str] = "swiftspec"
    drafts: ClassVar[bool] = True
    needs_draft: ClassVar[bool] = True
    own_devices: ClassVar[bool] = True

    def __post_init__(self):
        check_int("num_draft_tokens", self.num_draft_tokens, 1, 1023)
        check_int("width", self.width, 1, 1024)
        if self.depth is not None:
            check_int("depth", self.depth, 1, 128)
        if self.refill is not None:
            check_int("refill", self.refill, 0, 128)
        for name, default, low in (
            ("branch", max(self.num_draft_tokens, self.width), 1),
            ("survivors", max(8 * self.width, self.num_rows), 2),
        ):
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
            check_int(name, getattr(self, name), low, LARGEST_TREE)
        check_choice("ranking", self.ranking, RANKINGS)
        if self.adaptive and not self.overlap:
            raise ConfigError("adaptive growth lasts as long as the target verifies: it needs overlap")
        if (rows := self.growth().rows) > LARGEST_TREE:
            raise ConfigError(f"these settings make a draft tree of {rows} rows, at most {LARGEST_TREE}")

    @property
    def num_rows(self) -> int:
        return self.num_draft_tokens + 1

    @property
    def draft_rows(self) -> int:
        return self.width

    def check(self, models: Models) -> None:
        super().check(models)
        assert models.draft is not None and self.branch is not None
        check_branch("branch", self.branch, models)
        target, draft = models.target.plan.devices, models.draft.plan.devices
        if target != draft and set(target) & set(draft):
            raise ConfigError("draft and target must have the same devices or none in common")
        if target == draft and self.adaptive:
            raise ConfigError("adaptive growth needs a draft on devices of its own (draft_devices)")

    def bind(self, models: Models, tokens: int, store: Store = NO_STORE, previous: Runner | None = None) -> Runner:
        assert models.draft is not None and self.branch is not None
        propose = tree_proposals(self.ranking, models.draft.vocab, self.branch)
        taken_over = previous.schedule if isinstance(previous, SwiftSpecRunner) else None
        return SwiftSpecRunner(
            models, self.growth(), propose, tokens, depth=self.depth, refill=self.refill, overlap=self.overlap,
            adaptive=self.adaptive, schedule=taken_over,
        )  # fmt: skip

    def growth(self) -> Growth:
        """How the tree grows; a depth that is measured is the most there is room for."""
        assert self.branch is not None and self.survivors is not None
        refill = self.refill
        if refill is None:
            # A tree of survivors has room for them, and no batch is deeper than that.
            most = min(max(0, self.num_draft_tokens - 1), self.survivors // self.width)
            refill = 0 if self.depth is not None else most

        def grown(room: int) -> Growth:
            return Growth(
                self.num_rows, self.width, self.branch or 1, self.depth or room, self.survivors or 2, room, self.reuse,
                self.leaves, self.refill or 0, refill,
            )  # fmt: skip

        if self.depth is not None:
            return grown(4 * self.depth if self.adaptive else self.depth)
        fitting = (LARGEST_TREE - grown(0).rows) // self.width
        return grown(max(1, min(self.num_rows, fitting)))
