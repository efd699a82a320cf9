"""The contract of a decoding method: frozen settings that are bound to models, with a default for every hook.

A method is a frozen dataclass that derives from `Method`. `bind` joins it to models and a cache capacity and returns a
`Runner`, which the engine drives (`core/runner.py`). CONTRIBUTING.md shows how to add one.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

from jaxspec.methods.core.round import Models
from jaxspec.methods.core.runner import Runner

# What a method promises: the very tokens of plain decoding (same seed), or their distribution.
Exactness = Literal["tokens", "distribution"]


@dataclasses.dataclass(frozen=True)
class Store:
    """What a method may know of files, and where it may keep what it finds.

    Attributes:
      model_path: the target's checkpoint; None where there is none.
      cache_folder: folder of compiled programs; None where nothing is kept.
      shipped_draft: name of the draft that ships with jaxspec, if that is the one in use.
    """

    model_path: Path | None = None
    cache_folder: Path | None = None
    shipped_draft: str | None = None


NO_STORE = Store()


class Method:
    """Settings of a decoding method.

    Attributes:
      name: what users type.
      drafts: whether it may use a draft model.
      needs_draft: whether it cannot do without one.
      own_devices: whether the draft may live on devices of its own.
    """

    name: ClassVar[str]
    drafts: ClassVar[bool] = False
    needs_draft: ClassVar[bool] = False
    own_devices: ClassVar[bool] = False

    @property
    def exact(self) -> Exactness:
        """What equals plain decoding at temperature > 0; at 0 the tokens always do."""
        return "tokens"

    @property
    def num_rows(self) -> int:
        """bs: rows of a target pass, the root included."""
        raise NotImplementedError

    @property
    def max_path(self) -> int:
        """P: most tokens that a round with a draft can add."""
        return self.num_rows

    @property
    def draft_rows(self) -> int:
        """Rows of a draft pass, but for the first of a round; 0 without a draft model."""
        return 0

    def check(self, models: Models) -> None:
        """Raise `ConfigError` where the settings do not fit the models."""

    def configure(self, models: Models, store: Store) -> "Method":
        """The settings for these models and files, before anything is loaded or compiled.

        Raises:
          ConfigError: a file that a setting names does not fit.
        """
        return self

    def bind(self, models: Models, tokens: int, store: Store = NO_STORE, previous: Runner | None = None) -> Runner:
        """Join the method to its models; compiles nothing yet.

        Args:
          models: the target and the draft, if there is one.
          tokens: longest sequence that the caches have to hold.
          store: see `Store`.
          previous: the runner of a smaller capacity that this one replaces; what it learned is taken over.
        """
        raise NotImplementedError

    def variants(self, models: Models) -> "Sequence[Method]":
        """Settings of this method that `jaxspec-tune` tries on these models."""
        return (self,)
