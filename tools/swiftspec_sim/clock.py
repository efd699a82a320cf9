"""Two clocks over a replay: when each side works, and when it waits."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.errors import ConfigError
from jaxspec.methods.swiftspec.schedule import longest_mean
from jaxspec.methods.swiftspec.settings import SwiftSpec
from swiftspec_sim.replay import RoundCounts, Table, begin, grow, growth_of, turn
from swiftspec_sim.times import Split, Times


@dataclasses.dataclass(frozen=True)
class Setting:
    """One point of the grid; a shared split takes turns, whatever the method says."""

    split: Split
    method: SwiftSpec
    branch_free: bool = False

    @property
    def overlap(self) -> bool:
        """Whether the draft grows while the target verifies."""
        return self.method.overlap and self.split.draft is not None

    @property
    def depth(self) -> int:
        """Passes of growth; a simulation measures none, so the method names them."""
        assert self.method.depth is not None
        return self.method.depth


@dataclasses.dataclass(frozen=True)
class Steps:
    """What a setting's steps take, in milliseconds.

    Attributes:
      target: a verification pass.
      draft: a pass of growth.
      first: a draft pass that catches up, or that a branch-free turn always has.
      message: to the other side.
      walk: after the target's pass.
      turn: beside the draft's passes.
      host: before a batch is chosen, dispatch and reading that delay it.
    """

    target: float
    draft: float
    first: float
    message: float
    walk: float
    turn: float
    host: float = 0.0


def steps_of(times: Times, setting: Setting) -> Steps:
    """Look a setting's steps up."""
    split, method = setting.split, setting.method
    return Steps(
        target=times.target_pass(split, method.num_rows),
        draft=times.draft_pass(split, method.width),
        first=times.draft_pass(split, max(2, method.width) if setting.branch_free else 2),
        message=0.0 if split.draft is None else times.message,
        walk=times.walk,
        turn=times.turn,
        host=times.host,
    )


def longest_length(setting: Setting) -> int:
    """The largest mean acceptance length that the schedule can have, whatever the draft (docs/algorithms.md)."""
    method = setting.method
    refill = method.refill or 0
    if not method.leaves:
        return method.num_rows  # a batch of nodes grows on demand until it is full
    if setting.overlap:
        return longest_mean(method.num_rows, setting.depth, refill, branch_free=setting.branch_free)
    # A fresh tree has a level for each pass; one that outlives its round has more, which nothing but the batch bounds.
    return min(method.num_rows, 2 + refill + setting.depth) if not method.reuse else method.num_rows


def check_length(setting: Setting, length: float) -> None:
    """Refuse to pair a length with a schedule that cannot produce it: `ConfigError`."""
    if length > (most := longest_length(setting)):
        raise ConfigError(
            f"a length of {length} cannot come from depth {setting.depth} on {setting.split}: with these settings no "
            f"draft exceeds {most} tokens per target pass"
        )


@dataclasses.dataclass
class Clocks:
    """Both sides of one text, in milliseconds from the first turn on.

    Attributes:
      verified: when the target's last tokens came out.
      free: when the draft's last growth ended.
      target_busy: time that the target computed.
      draft_busy: likewise, re-rooting included.
      rounds: length of each round, from one verified path to the next.
    """

    verified: float = 0.0
    free: float = 0.0
    target_busy: float = 0.0
    draft_busy: float = 0.0
    rounds: list[float] = dataclasses.field(default_factory=list)

    def turn(self, steps: Steps, first_passes: int, growth_passes: int) -> None:
        """The draft takes in what was verified and sends a batch; the target verifies it.

        Args:
          steps: times.
          first_passes: exposed passes that catch up, 0 or 1.
          growth_passes: other exposed passes.
        """
        # What was verified before the first turn, the prompt, is at hand on both sides.
        arrived = self.verified + steps.message * bool(self.rounds)
        work = steps.turn + first_passes * steps.first + growth_passes * steps.draft
        sent = max(arrived + steps.host, self.free) + work
        done = sent + steps.message + steps.target + steps.walk
        self.rounds.append(done - self.verified)
        self.verified, self.free = done, sent
        self.draft_busy += work
        self.target_busy += steps.target + steps.walk

    def grow(self, steps: Steps, passes: int) -> None:
        """The draft grows from the moment on that its batch was sent."""
        self.free += passes * steps.draft
        self.draft_busy += passes * steps.draft

    def passes_until_verified(self, steps: Steps, most: int) -> int:
        """Passes of adaptive growth, which looks for the target's result after each of them."""
        waiting = self.verified - self.free
        return max(1, min(most, math.ceil(waiting / steps.draft) if steps.draft else most))


@dataclasses.dataclass
class Replayed:
    """One text under one setting: counts and clocks of its rounds."""

    tokens: int
    rounds: list[RoundCounts]
    clocks: Clocks


def replay(table: Table, length: int, setting: Setting, steps: Steps, room: int = 0) -> Replayed:
    """Decode a recorded text.

    Args:
      table: of its trace.
      length: L.
      setting: what to do.
      steps: how long it takes.
      room: passes that trees have room for, if that is to be more than needed: settings that differ in `depth` alone
        share their compiled functions then.
    """
    method = setting.method
    needed = 4 * setting.depth if method.adaptive else setting.depth
    growth = growth_of(method, max(room, needed), setting.branch_free)
    state, clocks, rounds, written = _begin(growth), Clocks(), [], 0
    exposed_depth = 0 if setting.overlap else setting.depth
    while written < length:
        state, counts = turn(table, state, jnp.int32(exposed_depth), growth)
        counts = jax.tree.map(int, jax.device_get(counts))
        first = 1 if setting.branch_free else int(counts.draft.caught_up > 0)
        clocks.turn(steps, first, counts.draft.exposed - first)
        counts = dataclasses.replace(counts, verified=min(counts.verified, length - written))
        rounds.append(counts)
        written += counts.verified
        if setting.overlap and written < length:
            passes = clocks.passes_until_verified(steps, needed) if method.adaptive else setting.depth
            state = grow(table, state, jnp.int32(passes), growth)
            clocks.grow(steps, passes)
    return Replayed(length, rounds, clocks)


_begin = functools.cache(begin)


@dataclasses.dataclass(frozen=True)
class Summary:
    """Texts under one setting, taken together.

    Attributes:
      tokens_per_s: of the whole texts, prompts not counted.
      length: mean accepted length, the bonus included.
      round_ms: mean.
      steady_ms: the round of the plain formula, max(target, d drafts) + exposed passes + the rest.
      exposed: draft passes per round that the target waits for.
      target_idle: share of the time.
      draft_idle: likewise; where both share their devices, of the same devices.
      token_hit: turns that find the new root in the tree; the first turn of a text is left out.
      evaluated_hit: turns that find it evaluated.
      computed: tokens per round that the draft runs.
      dropped: of these, those that are lost when the root moves.
      stood_in: share of the draft's tokens that were approximated.
    """

    tokens_per_s: float
    length: float
    round_ms: float
    steady_ms: float
    exposed: float
    target_idle: float
    draft_idle: float
    token_hit: float
    evaluated_hit: float
    computed: float
    dropped: float
    stood_in: float


def summarise(replays: Sequence[Replayed], setting: Setting, steps: Steps) -> Summary:
    """Sum up."""
    rounds = [r for replayed in replays for r in replayed.rounds]
    later = [r for replayed in replays for r in replayed.rounds[1:]]
    total = sum(replayed.clocks.verified for replayed in replays)
    tokens = sum(replayed.tokens for replayed in replays)
    computed = sum(int(r.draft.computed) for r in rounds)

    def mean(values: list[Any]) -> float:
        return float(np.mean(values)) if values else math.nan

    exposed = mean([r.draft.exposed for r in rounds])
    caught_up = 1.0 if setting.branch_free else mean([r.draft.caught_up > 0 for r in rounds])
    waits = caught_up * steps.first + (exposed - caught_up) * steps.draft
    # A batch sent at once, its verification, and the way back; all the while the draft grows.
    there_and_back = steps.target + steps.walk + 2 * steps.message + steps.host
    grown = (mean([r.draft.passes for r in later]) - mean([r.draft.exposed for r in later])) if later else 0.0
    beside = grown * steps.draft if setting.overlap else 0.0
    return Summary(
        tokens_per_s=1000 * tokens / total if total else math.inf,
        length=tokens / len(rounds),
        round_ms=total / len(rounds),
        steady_ms=max(there_and_back, beside) + waits + steps.turn,
        exposed=exposed,
        target_idle=1 - sum(r.clocks.target_busy for r in replays) / total if total else 0.0,
        draft_idle=1 - sum(r.clocks.draft_busy for r in replays) / total if total else 0.0,
        token_hit=mean([r.draft.token_hit for r in later]),
        evaluated_hit=mean([r.draft.evaluated_hit for r in later]),
        computed=computed / len(rounds),
        dropped=sum(int(r.draft.dropped) for r in later) / len(rounds),
        stood_in=sum(int(r.stood_in) for r in rounds) / computed if computed else 0.0,
    )
