"""The contract between the engine and a decoding method.

A method is a frozen dataclass of settings. `bind` joins it to a placement and a cache capacity and returns a
`Runner`: compiled functions, no state of its own. The engine then calls

    state = runner.start(root, state)        # a new sequence; reuses the buffers of a finished one
    state = runner.prefill(params, state, tokens)    # every prompt token but the last, the root
    state, round_ = runner.round(params, state, request)   # again and again; nothing is read inside

and reads each `Round` while the next one runs. State goes in and comes out and is donated; parameters never are.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import numpy as np
from flax import struct

from jaxspec.methods.program import Program
from jaxspec.models.params import Params
from jaxspec.placement import Placement
from jaxspec.sampling.request import Request


@struct.dataclass
class Round:
    """What the host reads of a round, one round late.

    Attributes:
      packed: int32 `[1 + P]`, the number of new tokens, then the tokens.
      logprob: float32 `[P]`, log-probability of each new token under the processed distribution.
    """

    packed: jax.Array
    logprob: jax.Array


class Runner(Protocol):
    """A method bound to models and a capacity."""

    @property
    def slots(self) -> int:
        """Capacity of the cache."""
        ...

    @property
    def programs(self) -> Sequence[Program]:
        """Everything that a generation may call, to be compiled before it starts."""
        ...

    def start(self, root: int, state: Any | None) -> Any:
        """State of an empty sequence whose last verified token is `root`; `state` is donated."""
        ...

    def prefill(self, params: Params, state: Any, tokens: np.ndarray) -> Any:
        """Commit int32 `tokens` `[n]` to the cache."""
        ...

    def round(self, params: Params, state: Any, request: Request) -> tuple[Any, Round]:
        """Dispatch one round; returns before it has run."""
        ...


@runtime_checkable
class Method(Protocol):
    """Settings of a decoding method."""

    name: ClassVar[str]

    def window(self) -> int:
        """Cache slots that a round writes behind the committed prefix."""
        ...

    def bind(self, target: Placement, slots: int) -> Runner:
        """Join the method to a target's placement and a cache of `slots` slots; compiles nothing yet."""
        ...
