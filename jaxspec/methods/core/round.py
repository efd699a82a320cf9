"""The data of a round, on the devices and on the host.

Letters: P `max_path`, the most tokens that a round can add.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxspec.models.params import Params
from jaxspec.pytree import pytree
from jaxspec.results import TopTokens
from jaxspec.runtime.placement import Placement
from jaxspec.sampling.accept import Verified, num_ranked

# Tokens that plain decoding computes in one dispatch, and those of a small target where loops cost nothing: they share
# what a round costs apart from its passes, and arrive together. The bytes of the largest target that is small.
STEPS_PER_DISPATCH, STEPS_OF_SMALL, SMALL_BYTES = 4, 8, 256 << 20
# Integers before the tokens in `Round.packed`.
ROUND_HEADER = 4
# Added to the draft passes of a round whose search was cut short, see `StepOutput.truncated`.
TRUNCATED = 1 << 16


class Models(NamedTuple):
    """Placements of the models of a method."""

    target: Placement
    draft: Placement | None = None


class ModelParams(NamedTuple):
    """Placed parameters of the models of a method."""

    target: Params
    draft: Params | None = None


def is_small(target: Placement) -> bool:
    """Whether the host's work for a dispatch is much beside a pass of a target: on CPUs and TPUs, with few weights."""
    return target.plan.kernels.loops_are_free and count_bytes(target.params()) <= SMALL_BYTES


def count_bytes(tree: Any) -> int:
    """Bytes of arrays, or of their shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def steps_per_dispatch(target: Placement) -> int:
    """Tokens that plain decoding computes in one dispatch."""
    return STEPS_OF_SMALL if is_small(target) else STEPS_PER_DISPATCH


class DraftCounts(NamedTuple):
    """Counts of a draft whose tree outlives the rounds, since the batch before; all int32."""

    passes: Array | int  # of the draft model
    exposed: Array | int  # passes of these that the target had to wait for: catching up, and growth on demand
    computed: Array | int  # tokens that went through the draft
    caught_up: Array | int  # tokens of these that were verified before the draft had seen them, 0 to 2
    kept: Array | int  # evaluated nodes that survived the re-rooting, the new root included
    committed: Array | int  # evaluated nodes that joined the prefix
    dropped: Array | int  # evaluated nodes that were lost
    token_hit: Array | int  # 1 if the new root's token was in the tree, evaluated or not
    # 1 if it was evaluated, so that nothing had to be computed before the batch was chosen.
    evaluated_hit: Array | int
    nodes: Array | int  # evaluated nodes of the tree that the batch was chosen from


@pytree
class Round:
    """Results of a round that the host reads, one round late."""

    # int32 `[ROUND_HEADER + P]`: number of new tokens, number of drafted tokens that were verified, depth of their
    # tree, draft passes with `TRUNCATED`; then the new tokens. Several tokens without a drafted one took a pass each.
    packed: Array
    logprob: Array  # float32 `[P]`, log-probability of each new token under the processed distribution
    # The most probable tokens in the place of each, see `Verified.top`; None once the host does not want them.
    top: tuple[Array, Array] | None = None
    draft: Array | None = None  # what a draft on devices of its own counted, int32 `[n]`; see `DraftCounts`


def pack_round(verified: Verified, drafted: Any, depth: Any, passes: Any) -> Round:
    """A `Round` from what was verified and its counts, which are integers or int32 []."""
    header = jnp.stack([jnp.asarray(x, jnp.int32) for x in (verified.count, drafted, depth, passes)])
    return Round(jnp.concatenate([header, verified.tokens]), verified.logprob, verified.top)


def round_shapes(target: Placement, max_path: int) -> Round:
    """Shapes of a `Round` on the target's devices."""
    ranked = (max_path, num_ranked(target.vocab))
    top = target.array(ranked, jnp.int32), target.array(ranked, jnp.float32)
    return Round(target.array((ROUND_HEADER + max_path,), jnp.int32), target.array((max_path,), jnp.float32), top)


def verified_shapes(target: Placement, max_path: int, layers: Sequence[int] = ()) -> Verified:
    """Shapes of a `Verified` on the target's devices.

    `layers` are the hidden states that a draft takes of the target.
    """
    row = target.array((max_path,), jnp.int32)
    states = target.array((max_path, target.cfg.states_dim(layers)), jnp.float32) if layers else None
    return Verified(row, target.array((), jnp.int32), row, target.array((max_path,), jnp.float32), states=states)


def first_verified(shapes: Verified, root: int) -> Verified:
    """The `Verified` that a sequence begins with: its root, on the host, from where the first programs take it."""
    blank: Any = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    blank.tokens[0] = root
    return dataclasses.replace(blank, count=np.int32(1))  # pyright: ignore[reportArgumentType]


@dataclasses.dataclass(frozen=True)
class StepOutput:
    """Tokens of one round, on the host."""

    tokens: tuple[int, ...]  # new tokens; those beyond the asked-for length are cut off
    logprobs: tuple[float, ...]  # of each of them
    accepted: int = 0  # how many of them, the first ones, a draft proposed
    drafted: int = 0  # tokens that the target verified; those that a cut hides are not counted
    depth: int = 0  # of their tree
    draft_passes: int = 0  # passes of the draft model
    truncated: bool = False  # whether a limit of depth or size ended the search before its best tokens were certain
    draft: DraftCounts | None = None  # counts of a draft whose tree outlives the rounds; None elsewhere
    # For each of `tokens`, the most probable ones in its place; None where they were not asked for.
    top: tuple[TopTokens, ...] | None = None

    def cut(self, count: int) -> "StepOutput":
        """The first `count` tokens; the others are counted nowhere."""
        if count >= len(self.tokens):
            return self
        accepted = min(self.accepted, count)
        return dataclasses.replace(
            self, tokens=self.tokens[:count], logprobs=self.logprobs[:count],
            accepted=accepted, drafted=accepted, depth=accepted, top=None if self.top is None else self.top[:count],
        )  # fmt: skip

    def passes(self) -> Iterator["StepOutput"]:
        """One for each target pass: tokens without a draft took one each."""
        if self.drafted or len(self.tokens) == 1:
            yield self
            return
        for index, (token, logprob) in enumerate(zip(self.tokens, self.logprobs, strict=True)):
            yield StepOutput((token,), (logprob,), draft_passes=0 if index else self.draft_passes)


def read_rounds(round_: Round) -> list[StepOutput]:
    """Wait for the rounds of one dispatch and read them: one, or as many as its arrays have in front."""
    leaves = round_.packed, round_.logprob, round_.draft, *(round_.top or (None, None))
    # Whole arrays become lists at once: to read one element of an array takes as long.
    parts = [None if leaf is None else np.asarray(leaf).tolist() for leaf in leaves]
    if round_.packed.ndim == 1:
        return [_read(*parts)]
    ran = [number for number, packed in enumerate(parts[0] or ()) if packed[0] > 0]
    return [_read(*(part and part[number] for part in parts)) for number in ran]


def _read(packed: Any, logprob: Any, draft: Any, ranked: Any, ranked_logprob: Any) -> StepOutput:
    count, drafted, depth, passes = packed[:ROUND_HEADER]
    truncated, passes = divmod(passes, TRUNCATED)
    tokens, logprobs = tuple(packed[ROUND_HEADER : ROUND_HEADER + count]), tuple(logprob[:count])
    counts = None if draft is None else DraftCounts(*draft)
    passes += 0 if counts is None else counts.passes
    top = None if ranked is None else tuple(map(_possible, ranked[:count], ranked_logprob[:count]))
    accepted = count - 1 if drafted else 0
    return StepOutput(tokens, logprobs, accepted, drafted, depth, passes, bool(truncated), counts, top)


def _possible(tokens: list[int], logprobs: list[float]) -> TopTokens:
    return tuple((token, p) for token, p in zip(tokens, logprobs, strict=True) if p > -np.inf)
