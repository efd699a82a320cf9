"""The contract between the engine and a decoding method.

A method is a frozen dataclass of settings. `bind` joins it to a placement and a cache capacity and returns a
`Runner`: compiled functions, no state of its own. The engine then calls

    state = runner.start(root, state)        # a new sequence; reuses the buffers of a finished one
    state = runner.prefill(params, state, tokens)    # every prompt token but the last, the root
    state, round_ = runner.round(params, state, request)   # again and again; nothing is read inside

and reads each `Round` while the next one runs. State goes in and comes out and is donated; parameters never are.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.config import SamplingParams
from jaxspec.models.params import Params
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.program import Program
from jaxspec.sampling.request import Request, make_request

# Integers in front of the tokens in `Round.packed`.
ROUND_HEADER = 4


class Models(NamedTuple):
    """Where the models of a method live."""

    target: Placement
    draft: Placement | None = None


class ModelParams(NamedTuple):
    """Placed parameters of the models of a method."""

    target: Params
    draft: Params | None = None


@struct.dataclass
class Round:
    """What the host reads of a round, one round late.

    Attributes:
      packed: int32 `[ROUND_HEADER + P]`: number of new tokens, number of drafted tokens that were verified, depth of
        their tree, draft passes; then the new tokens. Several tokens where none was drafted took a pass each.
      logprob: float32 `[P]`, log-probability of each new token under the processed distribution.
      draft: what a draft on devices of its own counted, int32 `[n]`; see `messages.DraftCounts`.
    """

    packed: jax.Array
    logprob: jax.Array
    draft: jax.Array | None = None


def pack_round(tokens: jax.Array, count: Any, drafted: Any, depth: Any, passes: Any, logprob: jax.Array) -> Round:
    """A `Round` from its parts; the counts are integers or int32 []."""
    header = jnp.stack([jnp.asarray(x, jnp.int32) for x in (count, drafted, depth, passes)])
    return Round(jnp.concatenate([header, tokens]), logprob)


class Runner(Protocol):
    """A method bound to models and a capacity."""

    @property
    def slots(self) -> int:
        """Slots of the target's cache."""
        ...

    @property
    def programs(self) -> Sequence[Program]:
        """Everything that a generation may call, to be compiled before it starts."""
        ...

    def start(self, root: int, state: Any | None) -> Any:
        """State of an empty sequence whose last verified token is `root`; `state` is donated."""
        ...

    def prefill(self, params: ModelParams, state: Any, tokens: np.ndarray) -> Any:
        """Commit int32 `tokens` `[n]` to the caches."""
        ...

    def place_request(self, sampling: SamplingParams, seed: int) -> Any:
        """What `round` needs to know of a generation, on the devices."""
        ...

    def round(self, params: ModelParams, state: Any, request: Any) -> tuple[Any, Round]:
        """Dispatch one round; returns before it has run."""
        ...


def place_request(placement: Placement, sampling: SamplingParams, seed: int, vocab_size: int) -> Request:
    """A request on a model's devices; `vocab_size` is the target's, whose tokens a bias may name."""
    request = make_request(sampling, seed, vocab_size, placement.padded_vocab)
    return jax.tree.map(lambda leaf, shape: jax.device_put(leaf, shape.sharding), request, placement.request())


# What a method promises: the very tokens of plain decoding (same seed), or their distribution.
Exactness = Literal["tokens", "law"]


@runtime_checkable
class Method(Protocol):
    """Settings of a decoding method."""

    name: ClassVar[str]
    drafts: ClassVar[bool]  # may use a draft model
    needs_draft: ClassVar[bool]  # cannot do without one
    own_devices: ClassVar[bool]  # the draft may live on devices of its own

    @property
    def exact(self) -> Exactness:
        """What is equal to plain decoding at temperature > 0; at 0 the tokens always are."""
        ...

    @property
    def batch_rows(self) -> int:
        """bs: rows of a target pass."""
        ...

    @property
    def longest_path(self) -> int:
        """P: most tokens that a round can add."""
        ...

    @property
    def draft_rows(self) -> int:
        """Rows of a draft pass, but for the first of a round; 0 without a draft model."""
        ...

    def check(self, models: Models) -> None:
        """Raise `ConfigError` where the settings do not fit the models."""
        ...

    def bind(self, models: Models, tokens: int) -> Runner:
        """Join the method to its models, with caches for sequences of `tokens` tokens; compiles nothing yet."""
        ...
