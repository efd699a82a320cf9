"""SWIFT: the target drafts for itself, some of its layers skipped, which are searched (arXiv 2410.06916)."""

import dataclasses
import math
from pathlib import Path
from typing import ClassVar

from jaxspec.config import check_int
from jaxspec.errors import ConfigError
from jaxspec.files import checkpoint_digest
from jaxspec.methods.base import NO_STORE, Method, Store
from jaxspec.methods.core.round import Models
from jaxspec.methods.core.runner import Runner
from jaxspec.methods.core.settings import log_threshold
from jaxspec.methods.swift.runner import DraftTimer, SwiftRunner
from jaxspec.methods.swift.search import LayerSearch, SearchSettings
from jaxspec.methods.swift.self_draft import LEVELS, ChainSettings
from jaxspec.methods.swift.store import LayerStore
from jaxspec.models.config import ModelConfig
from jaxspec.models.layer_set import LayerSet, parse_layers
from jaxspec.runtime.placement import Placement

LONGEST = 64
ADAPTIVE_ROWS = 32  # most of a target pass where only tokens that pay are drafted: empty rows cost a little, too
# Confidence below which a draft ends: the paper's, and where costs decide about the rest. With a model of which much
# can be skipped, and a text that is hard to predict, the gain was 1.50 with the latter and 1.35 with the former.
THRESHOLD, ADAPTIVE_THRESHOLD = 0.8, 0.1
# Settings of the search, which a fixed set does not need.
SEARCHING = ("ratio", "steps", "share", "task", "layers_file")
LAYER_STORE = "swift-layers.json"  # in the cache folder


@dataclasses.dataclass(frozen=True)
class Swift(Method):
    """Draft with the target's own parameters and cache, some attention and MLP blocks skipped; needs no draft model.

    The blocks are searched while decoding, on the text at hand. A step of the search costs one pass over tokens that
    are verified already. The output is plain decoding's, token for token (rule R4), whatever is skipped.

    Attributes:
      ratio: r, share of the 2 (L - 2) blocks of all layers but the first and last that candidates skip.
      length: N_D, most tokens drafted in a row.
      threshold: a draft ends after a token that the skipped model finds less probable. None is the paper's 0.8, or 0.1
        if the method is `adaptive`, which learns what unsure tokens are worth.
      siblings: children per drafted step where that probability is at least 0.95, 0.8, 0.5, and below. The drafted
        token is one of them.
      num_draft_tokens: most tokens of a target pass, the root not counted, at least `length`; the least probable ones
        are left out. None is all that a draft can hold (82 by default), or 31 if the method is `adaptive`.
      adaptive: draft only what pays, by the costs of passes and by what was accepted so far, and nothing while the
        measured gain is below 1. False drafts in every round, as the paper does.
      layers: a fixed set, such as "attention=1,3-5;mlp=2", or "none"; empty to search for one. Settings of the search
        are refused beside it.
      steps: S, most steps of the search.
      share: most of the time that the search may take. 1 takes a step in every round, as the paper does; 0 searches
        nothing.
      task: name under which the set is stored: sets found on one task are poor on another.
      layers_file: JSON file in which sets are stored; empty is one file beside the compiled programs.
    """

    ratio: float = 0.45
    length: int = 25
    threshold: float | None = None
    siblings: tuple[int, ...] = (1, 3, 5, 10)
    num_draft_tokens: int | None = None
    adaptive: bool = True
    layers: str = ""
    steps: int = 1000
    share: float = 0.025
    task: str = "default"
    layers_file: str = ""

    name: ClassVar[str] = "swift"
    own_layers: ClassVar[bool] = True
    search_settings: ClassVar[SearchSettings] = SearchSettings()  # the paper's figures

    def __post_init__(self):
        check_int("length", self.length, 1, LONGEST)
        check_int("steps", self.steps, 1, 10**6)
        if self.num_draft_tokens is not None:
            check_int("num_draft_tokens", self.num_draft_tokens, self.length, 1023)
        for name in ("ratio", "share", *(() if self.threshold is None else ("threshold",))):
            log_threshold(name, getattr(self, name))
        if self.ratio >= 1:
            raise ConfigError(f"ratio must be below 1: something has to run, got {self.ratio}")
        object.__setattr__(self, "siblings", tuple(self.siblings))
        if len(self.siblings) != len(LEVELS) + 1:
            raise ConfigError(f"siblings has {len(self.siblings)} numbers, one for each of {len(LEVELS) + 1} levels")
        for count in self.siblings:
            check_int("siblings", count, 1, 32)
        for name in ("layers", "task", "layers_file"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{name} must be text, got {getattr(self, name)!r}")
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        idle = [name for name in SEARCHING if getattr(self, name) != defaults[name]]
        if self.layers and idle:
            raise ConfigError(f"layers names the set, so nothing is searched: leave out {', '.join(idle)}")
        if not self.task:
            raise ConfigError("task must not be empty")

    @property
    def num_rows(self) -> int:
        return self._chain.num_rows

    @property
    def max_path(self) -> int:
        return self.length + 1  # the chain and the bonus token

    @property
    def _chain(self) -> ChainSettings:
        threshold = (ADAPTIVE_THRESHOLD if self.adaptive else THRESHOLD) if self.threshold is None else self.threshold
        # All steps but the last have some confidence, and so no more children than that allows.
        bounds = zip(self.siblings, (math.inf, *LEVELS), strict=True)
        rows = 1 + (self.length - 1) * max(count for count, below in bounds if below > threshold) + max(self.siblings)
        most = max(ADAPTIVE_ROWS, self.length + 1) if self.adaptive else rows
        most = most if self.num_draft_tokens is None else self.num_draft_tokens + 1
        return ChainSettings(self.length, threshold, self.siblings, self.adaptive, min(rows, most))

    def check(self, models: Models) -> None:
        if models.target.resident_layers is not None:
            raise ConfigError("method swift drafts with the target's own layers, which offload streams: use another")
        super().check(models)
        self._fixed(models.target)
        if max(self.siblings) > models.target.num_tokens:
            raise ConfigError(
                f"siblings {max(self.siblings)} exceed the {models.target.num_tokens} tokens of the vocabulary"
            )

    def configure(self, models: Models, store: Store) -> "Swift":
        """The method itself; the layer file is checked."""
        if (file := self._file(models.target, store)) is not None:
            file.check()
            file.load(self.task, self._begin_search(models.target))
        return self

    def bind(self, models: Models, tokens: int, store: Store = NO_STORE, previous: Runner | None = None) -> SwiftRunner:
        """The runner; its search goes on from that of `previous`, else from the layer file."""
        target, file = models.target, self._file(models.target, store)
        if isinstance(previous, SwiftRunner):
            search, timer = previous.search, previous.timer
        else:
            search, timer = self._begin_search(target), DraftTimer()
            if file is not None:
                file.load(self.task, search)
        return SwiftRunner(
            target, tokens, search, timer, self._chain, fixed=self._fixed(target), file=file, task=self.task,
            share=self.share, branching=self._branches(target),
        )  # fmt: skip

    def _fixed(self, target: Placement) -> LayerSet | None:
        return parse_layers(self.layers, target.cfg.num_layers) if self.layers else None

    def _begin_search(self, target: Placement) -> LayerSearch:
        settings = dataclasses.replace(self.search_settings, ratio=self.ratio, steps=self.steps)
        return LayerSearch(target.cfg.num_layers, settings)

    def _branches(self, target: Placement) -> bool:
        return branches(target)

    def _file(self, target: Placement, store: Store) -> LayerStore | None:
        return None if self.layers else layer_store(store, target.cfg, self.layers_file)


def layer_store(store: Store, cfg: ModelConfig, named: str | Path = "") -> LayerStore | None:
    """The layer file of a model: the `named` one, else that in the cache folder; None where there is neither."""
    if store.model_path is None or not (named or store.cache_folder):
        return None
    path = Path(named).expanduser() if named else (store.cache_folder or Path()) / LAYER_STORE
    return LayerStore(path, checkpoint_digest(store.model_path, cfg), store.model_path.name, strict=bool(named))


def branches(target: Placement) -> bool:
    """Whether a program should skip blocks by branches on the device: not on a GPU, see `Kernels`."""
    return target.plan.kernels.loops_are_free
