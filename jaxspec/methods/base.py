"""The contract of a decoding method: frozen settings that are bound to models, with a default for every hook.

A method is a frozen dataclass that derives from `Method`. `bind` joins it to models and a cache capacity and returns a
`Runner`, which the engine drives (`core/runner.py`). CONTRIBUTING.md shows how to add one.
"""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from jaxspec.errors import ConfigError
from jaxspec.methods.core.round import Models
from jaxspec.methods.core.runner import Runner
from jaxspec.methods.core.settings import check_draft, check_layers, check_same_devices, check_settings
from pallas_kernels.exact_rows import MOST_ROWS

# What a method promises: the very tokens of plain decoding (same seed), or their distribution.
Exactness = Literal["tokens", "distribution"]


@dataclasses.dataclass(frozen=True)
class Store:
    """Files that a method may know of, and the folder where it may keep measurements."""

    model_path: Path | None = None  # the target's checkpoint; None where there is none
    cache_folder: Path | None = None  # folder of compiled programs; None where nothing is kept
    # Of a target whose layers are streamed, the least time of a pass of one row over what that would take to compute.
    stream_ratio: float = 0.0
    expert_share: float = 0.0  # of the bytes of such a pass, the part of experts that are read as rows need them


NO_STORE = Store()


@dataclasses.dataclass(frozen=True)
class Measured:
    """One method on one placement.

    Attributes:
      method: its name.
      settings: those that are not defaults.
      target_devices: that share the target.
      draft_devices: of the draft's own; None where it shares the target's, or there is none.
      tokens_per_s: mean over the prompts, relative to the same plain decoding for all placements.
    """

    method: str
    settings: Mapping[str, Any]
    target_devices: int
    draft_devices: int | None
    tokens_per_s: float

    def __str__(self) -> str:
        """Such as "swiftspec on 6/2 devices, 31.2 tokens/s"."""
        own = "" if self.draft_devices is None else f"/{self.draft_devices}"
        return f"{self.method} on {self.target_devices}{own} devices, {self.tokens_per_s:.1f} tokens/s"


@dataclasses.dataclass(frozen=True)
class DeviceChoice:
    """The measured choice of method and devices.

    Attributes:
      best: the chosen placement; None where nothing was measured.
      why: the reason, in words.
      next: the best placement of the other kind (draft on devices of its own, or on the target's), in words.
    """

    best: Measured | None
    why: str
    next: str | None = None


class Method(abc.ABC):
    """Settings of a decoding method."""

    name: ClassVar[str]  # what users type
    drafts: ClassVar[bool] = False  # whether it may use a draft model
    needs_draft: ClassVar[bool] = False  # whether it cannot do without one
    own_layers: ClassVar[bool] = False  # whether it drafts with the target's own layers, which cannot be streamed then
    own_devices: ClassVar[bool] = False  # whether the draft may live on devices of its own
    takes_blocks: ClassVar[bool] = False  # whether its draft may fill a block in one pass

    def __init_subclass__(cls, **keywords: object) -> None:
        """Run the checks that all settings share before a method's own `__post_init__`."""
        super().__init_subclass__(**keywords)
        own = cls.__dict__.get("__post_init__")
        if own is not None:

            def check_all(self: Method) -> None:
                check_settings(self, lambda: own(self))

            cls.__post_init__ = check_all  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def exact(self) -> Exactness:
        """Whether tokens or their distribution equal plain decoding's at temperature > 0; at 0 the tokens always do."""
        return "tokens"

    @property
    @abc.abstractmethod
    def num_rows(self) -> int:
        """bs: rows of a target pass, the root included."""

    @property
    def max_path(self) -> int:
        """P: most tokens that a round with a draft can add."""
        return self.num_rows

    @property
    def draft_rows(self) -> int:
        """Rows of a draft pass, but for the first of a round; 0 without a draft model."""
        return 0

    def check(self, models: Models) -> None:
        """Raise `ConfigError` where the settings do not fit the models; the default looks at draft and devices."""
        check_layers(self, models)
        if self.needs_draft:
            check_draft(self.name, models.draft is not None)
        features = None if models.draft is None else models.draft.cfg.features
        if self.drafts and not self.takes_blocks and features is not None and features.block:
            raise ConfigError(
                f"method {self.name!r} cannot use a draft that fills a block in one pass: use 'auto', 'chain', "
                "'specexec' or 'specinfer'"
            )
        if self.drafts and not self.own_devices:
            check_same_devices(self.name, models)
        if models.target.plan.kernels.exact and self.num_rows > MOST_ROWS:
            raise ConfigError(
                f"numerics 'exact' holds for passes of up to {MOST_ROWS} rows, {self.name!r} has {self.num_rows}: "
                f"use at most {MOST_ROWS - 1} draft tokens, or numerics 'fast'"
            )

    def choose_devices(self, profile: Path | None, devices: int) -> DeviceChoice | None:
        """Another method or placement where that was measured to be faster; None where the method weighs none.

        `profile` is the file of the pair's measured speeds (`auto/profiles.py`), on the `devices` at hand.
        """
        return None

    def configure(self, models: Models, store: Store) -> "Method":
        """The settings for these models and files, before anything is loaded or compiled; may raise `ConfigError`."""
        return self

    @abc.abstractmethod
    def bind(self, models: Models, tokens: int, store: Store = NO_STORE, previous: Runner | None = None) -> Runner:
        """Join the method to its models, for sequences of `tokens` tokens; compiles nothing yet.

        `previous` is the runner of a smaller capacity that this one replaces; what it measured is taken over.
        """

    def variants(self) -> "Sequence[Method]":
        """Settings of this method that `jaxspec-tune` tries."""
        return (self,)
