"""SWIFT: the target drafts for itself with some of its layers skipped, and finds out which (arXiv 2410.06916)."""

import dataclasses
import functools
import numbers
from typing import Any, ClassVar

from jaxspec.errors import ConfigError
from jaxspec.methods.base import Exactness, Models
from jaxspec.methods.core.cost_model import pass_costs
from jaxspec.methods.core.settings import check_range, log_threshold
from jaxspec.methods.core.timing import RoundTimer
from jaxspec.methods.swift.runner import SwiftRunner
from jaxspec.methods.swift.search import LayerSearch, SearchSettings
from jaxspec.methods.swift.self_draft import LEVELS, SpineSettings
from jaxspec.methods.swift.store import LayerStore
from jaxspec.models.layer_set import LayerSet, parse_layers
from jaxspec.runtime.placement import Placement

# What a round costs besides its passes, in target passes of one row.
ROUND_COST = 0.05
LONGEST = 64
# Rows of a batch where only those are drafted that pay; what is left empty costs a little too.
ADAPTIVE_ROWS = 32
# Confidence below which a draft ends: the paper's, and where costs decide what else is drafted. A model of which much
# can be skipped and whose text is hard to predict gained 1.50 with the latter where it gained 1.35 with the former.
THRESHOLD, ADAPTIVE_THRESHOLD = 0.8, 0.1
# Settings of the search, which a fixed set does not need.
SEARCHING = (
    "ratio", "context", "window", "interval", "steps", "tolerance", "max_score", "share", "candidates", "task",
    "layers_file",
)  # fmt: skip


@dataclasses.dataclass
class Session:
    """What outlives the caches of a runner, which are bound anew when texts get longer.

    Attributes:
      meter: of the rounds.
      search: of the layers; None before it was needed.
      file: where the search's findings are kept; None for nowhere.
    """

    meter: RoundTimer = dataclasses.field(default_factory=RoundTimer)
    search: LayerSearch | None = None
    file: LayerStore | None = None


@dataclasses.dataclass(frozen=True)
class Swift:
    """Draft with the target's own parameters and cache, skipping attention and MLP blocks; no draft model is needed.

    Which blocks are skipped is searched while decoding, on the text at hand: a step costs a pass over tokens that are
    verified already, and steps are as rare as `share` asks for. The output is plain decoding's, token for token (rule
    R4), whatever is skipped and whenever that changes.

    Attributes:
      ratio: r, share of the 2 (L - 2) blocks of all layers but the first and last that candidates skip.
      length: N_D, most tokens drafted in a row.
      threshold: a draft ends behind a token that the skipped model finds less probable. None is the paper's 0.8, or 0.1
        where it is `adaptive`: what unsure tokens are worth is learned there.
      siblings: children per drafted step where that probability is at least 0.95, 0.8, 0.5, and where it is less; the
        drafted token is one of them.
      batch: bs, most rows of a target pass, the root included, more than `length`; the least probable tokens are left
        out. None is all that a draft can hold (83 by default), or 32 where it is `adaptive`.
      adaptive: draft only what pays by the costs of passes and by what was accepted so far, and nothing while measured
        gain is below 1; False drafts in every round, as the paper does.
      layers: a fixed set, such as "attention=1,3-5;mlp=2", or "none"; empty to search for one. Settings of the search
        are refused beside it.
      context: what candidates are scored on: the "recent" tokens, or the "first" ones of a response.
      window: gamma, tokens on which a candidate is scored.
      interval: beta, every how many steps a proposal is Bayesian; the others are random.
      steps: S, most steps of the search.
      tolerance: steps without a better set after which it ends.
      max_score: share of predicted tokens above which it ends.
      share: most of the time that the search may take; 0 searches nothing.
      candidates: sets scored in one pass; 0 is one where the device can leave out what is skipped (CPU), else 8.
      programs: "one" program for all sets, which branches on the device; one for "each" adopted set, compiled aside;
        "auto" takes the former on CPU and the latter where branches make the host wait.
      task: name under which the set is kept: sets of one task are poor on another.
      layers_file: JSON file in which sets are kept; empty is one per model beside the compile cache.
    """

    ratio: float = 0.45
    length: int = 25
    threshold: float | None = None
    siblings: tuple[int, ...] = (1, 3, 5, 10)
    batch: int | None = None
    adaptive: bool = True
    layers: str = ""
    context: str = "recent"
    window: int = 32
    interval: int = 25
    steps: int = 1000
    tolerance: int = 300
    max_score: float = 0.95
    share: float = 0.025
    candidates: int = 0
    programs: str = "auto"
    task: str = "default"
    layers_file: str = ""

    name: ClassVar[str] = "swift"
    drafts: ClassVar[bool] = False
    needs_draft: ClassVar[bool] = False
    own_devices: ClassVar[bool] = False

    def __post_init__(self):
        """Check ranges."""
        for name, low, high in (
            ("length", 1, LONGEST), ("window", 1, 256), ("interval", 1, 10**6), ("steps", 1, 10**6),
            ("tolerance", 1, 10**6), ("candidates", 0, 64),
        ):  # fmt: skip
            check_range(name, getattr(self, name), low, high)
        for name in ("ratio", "threshold", "max_score", "share"):
            if name != "threshold" or self.threshold is not None:
                log_threshold(name, getattr(self, name))
        if self.ratio >= 1:
            raise ConfigError(f"ratio must be below 1: something has to run, got {self.ratio}")
        object.__setattr__(self, "siblings", tuple(self.siblings))
        if len(self.siblings) != len(LEVELS) + 1:
            raise ConfigError(f"siblings has {len(self.siblings)} numbers, one for each of {len(LEVELS) + 1} levels")
        for count in self.siblings:
            if isinstance(count, bool) or not isinstance(count, numbers.Integral):
                raise ConfigError(f"siblings must be integers, got {count!r}")
            check_range("siblings", count, 1, 32)
        for name, choices in (("context", ("recent", "first")), ("programs", ("auto", "one", "each"))):
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        for name in ("layers", "task", "layers_file"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{name} must be text, got {getattr(self, name)!r}")
        idle = [f.name for f in dataclasses.fields(self) if f.name in SEARCHING and getattr(self, f.name) != f.default]
        if self.layers and idle:
            raise ConfigError(f"layers names the set, so nothing is searched: leave out {', '.join(idle)}")
        if not self.task:
            raise ConfigError("task must not be empty")
        if not isinstance(self.adaptive, bool):
            raise ConfigError(f"adaptive must be true or false, got {self.adaptive!r}")
        if self.batch is not None:
            check_range("batch", self.batch, self.length + 1, 1024)
        if self.programs == "one" and self.candidates > 1:
            raise ConfigError(f"one program for all sets scores one at a time, not {self.candidates} candidates")

    @functools.cached_property
    def session(self) -> Session:
        """Of this object; one with the same settings has its own."""
        return Session()

    @property
    def exact(self) -> Exactness:
        """See `Method.exact`."""
        return "tokens"

    @property
    def spine(self) -> SpineSettings:
        """How drafts are grown."""
        rows, threshold = (
            (max(ADAPTIVE_ROWS, self.length + 1), ADAPTIVE_THRESHOLD) if self.adaptive else (None, THRESHOLD)
        )
        return SpineSettings(
            self.length,
            threshold if self.threshold is None else self.threshold,
            self.siblings,
            self.adaptive,
            rows if self.batch is None else self.batch,
        )

    @property
    def batch_rows(self) -> int:
        """bs."""
        return self.spine.batch_rows

    @property
    def longest_path(self) -> int:
        """P: the spine and the bonus token."""
        return self.length + 1

    @property
    def draft_rows(self) -> int:
        """No draft model runs."""
        return 0

    def check(self, models: Models) -> None:
        """See `Method.check`."""
        if self.layers:
            parse_layers(self.layers, models.target.cfg.num_layers)
        if self.spine.branch > models.target.num_tokens:
            raise ConfigError(
                f"siblings {self.spine.branch} exceed the {models.target.num_tokens} tokens of the vocabulary"
            )

    def fixed(self, num_layers: int) -> LayerSet | None:
        """The set that was asked for, if one was."""
        return parse_layers(self.layers, num_layers) if self.layers else None

    def keep_in(self, file: LayerStore) -> None:
        """Read what the search starts from, and write what it finds, in a file.

        Raises:
          ConfigError: the file is none of ours, or cannot be written where it is named.
        """
        file.check()
        self.session.file = file

    def search(self, models: Models) -> LayerSearch:
        """The search, the same one for every runner."""
        session = self.session
        if session.search is None:
            settings = SearchSettings(
                self.ratio, self.window, self.interval, self.steps, self.tolerance, self.max_score
            )
            session.search = LayerSearch(models.target.cfg.num_layers, settings)
            if session.file is not None and not self.layers:
                session.file.load(self.task, session.search)
        return session.search

    def bind(self, models: Models, tokens: int) -> SwiftRunner:
        """See `Method.bind`."""
        branching = self.programs == "one" or (self.programs == "auto" and branches(models.target))
        costs = pass_costs(models.target, self.batch_rows) + ROUND_COST
        return SwiftRunner(
            models.target,
            tokens,
            self.search(models),
            fixed=self.fixed(models.target.cfg.num_layers),
            spine=self.spine,
            costs=costs,
            branching=branching,
            sets=self.candidates or sets_per_pass(branching),
            context=self.context,
            share=self.share,
            meter=self.session.meter,
        )

    def finish(self) -> None:
        """A generation has ended, or nobody listens any more: keep what was found, if something was."""
        session = self.session
        if session.search is not None and session.file is not None and not self.layers:
            session.file.save(self.task, session.search)

    def explain(self, models: Models) -> dict[str, Any]:
        """What was adopted, what that rests on and what it brought, for the statistics of a generation.

        `layers` that are skipped; `matchness` of the set, the `steps` of the search, its `history`, the sets `adopted`
        and whether it has `stopped`; `search_share` of the time while it went on, and `gain` over plain decoding as
        measured in rounds with a draft (None where there were none to compare).
        """
        search = self.search(models)
        fixed = self.fixed(models.target.cfg.num_layers)
        layers = fixed or search.incumbent.layers
        known = {"layers": str(layers), "num_skipped": layers.num_skipped}
        if fixed is None:
            known |= {
                "matchness": search.incumbent.matchness, "steps": search.steps, "stopped": search.stopped,
                "history": search.history, "adopted": search.adopted,
            }  # fmt: skip
        share = {"search_share": search.spent_s / search.decoded_s if search.decoded_s else 0.0}
        return known | self.session.meter.report() | share


def branches(target: Placement) -> bool:
    """Whether a program had better leave out what is skipped by branches: not where the host waits for each of them."""
    return target.plan.devices[0].platform == "cpu"


def sets_per_pass(branching: bool) -> int:
    """Sets to score in one pass: what branches is about one set; what computes everything has rows to spare."""
    return 1 if branching else 8
