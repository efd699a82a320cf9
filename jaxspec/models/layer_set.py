"""Layer sets: which attention and MLP blocks of a model run, and which are skipped (SWIFT, arXiv 2410.06916).

A *unit* is the attention or the MLP block of one layer. A skipped unit passes its input on: its norm, its projections
and, for attention, the writing of keys and values are left out. The first and the last layer always run, so L layers
have 2 (L - 2) units that can be skipped. They are counted attention first: unit u is the attention of layer 1 + u, or
the MLP of layer 1 + u - (L - 2).

As text, a set is the list of its skipped units: `attention=1,3-5;mlp=2`, or `none`.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from jaxspec.errors import ConfigError

NOTHING = "none"
KINDS = ("attention", "mlp")


@dataclasses.dataclass(frozen=True)
class LayerSet:
    """The units that run, for each layer; hashable, so that it can key compiled functions."""

    attention: tuple[bool, ...]
    mlp: tuple[bool, ...]

    def __post_init__(self):
        """Refuse sets that no model can run."""
        if len(self.attention) != len(self.mlp) or not self.attention:
            raise ConfigError(f"a layer set of {len(self.attention)} attention and {len(self.mlp)} MLP blocks")
        if not all((*self.attention[:1], *self.attention[-1:], *self.mlp[:1], *self.mlp[-1:])):
            raise ConfigError(f"the first and the last of {self.num_layers} layers are never skipped, got {self}")

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.attention)

    @property
    def num_skipped(self) -> int:
        """Units that do not run."""
        return 2 * self.num_layers - sum(self.attention) - sum(self.mlp)

    @property
    def skipped(self) -> np.ndarray:
        """Which units do not run, bool [2 (L - 2)], in the order of the module's docstring."""
        return ~np.array([*self.attention[1:-1], *self.mlp[1:-1]], bool)

    @property
    def runs(self) -> np.ndarray:
        """Which units run, bool [L, 2]: attention and MLP of each layer."""
        return np.array([self.attention, self.mlp], bool).T

    @property
    def kept(self) -> tuple[int, ...]:
        """Layers of which something runs."""
        return tuple(index for index, runs in enumerate(self.runs) if runs.any())

    def __str__(self) -> str:
        """As text; `parse_layers` reads it."""
        kinds = {kind: [index for index, runs in enumerate(getattr(self, kind)) if not runs] for kind in KINDS}
        return ";".join(f"{kind}={_format_ranges(skipped)}" for kind, skipped in kinds.items() if skipped) or NOTHING


def num_units(num_layers: int) -> int:
    """Units that can be skipped: 2 (L - 2), none in a model of one or two layers."""
    return 2 * max(0, num_layers - 2)


def count_skipped(num_layers: int, ratio: float) -> int:
    """Units that a skip ratio leaves out: int(2 (L - 2) r)."""
    # 0.29 in binary is a little less than 0.29; 100 * 0.29 must still count as 29.
    return int(num_units(num_layers) * ratio + 1e-9)


def all_layers(num_layers: int) -> LayerSet:
    """Everything runs."""
    return LayerSet((True,) * num_layers, (True,) * num_layers)


def uniform_layers(num_layers: int) -> LayerSet:
    """The set from which a search starts: both units of odd layers are skipped, for any ratio (SWIFT's code)."""
    runs = tuple(index % 2 == 0 or index == num_layers - 1 for index in range(num_layers))
    return LayerSet(runs, runs)


def from_skipped(num_layers: int, skipped: Iterable[bool]) -> LayerSet:
    """A set from `LayerSet.skipped`."""
    runs = [not unit for unit in skipped]
    if len(runs) != num_units(num_layers):
        raise ConfigError(f"{len(runs)} units for a model of {num_layers} layers, which has {num_units(num_layers)}")
    if not runs:
        return all_layers(num_layers)
    half = len(runs) // 2
    return LayerSet((True, *runs[:half], True), (True, *runs[half:], True))


def parse_layers(text: str, num_layers: int) -> LayerSet:
    """A set from its text.

    Raises:
      ConfigError: malformed text, or a layer that a model of `num_layers` layers cannot skip.
    """
    kept = {kind: [True] * num_layers for kind in KINDS}
    if text.strip() != NOTHING:
        for part in text.split(";"):
            kind, equals, ranges = part.strip().partition("=")
            if kind not in KINDS or not equals:
                wanted = "a part is attention=LAYERS or mlp=LAYERS, such as attention=1,3-5;mlp=2"
                raise ConfigError(f"layer set {text!r}: {wanted}")
            for layer in _parse_ranges(ranges, text):
                if not 1 <= layer <= num_layers - 2:
                    problem = f"layer {layer} cannot be skipped in a model of {num_layers} layers"
                    raise ConfigError(f"layer set {text!r}: {problem}, only 1 to {num_layers - 2} can")
                kept[kind][layer] = False
    return LayerSet(tuple(kept["attention"]), tuple(kept["mlp"]))


def _format_ranges(numbers: Sequence[int]) -> str:
    # Numbers of a run of consecutive ones have the same distance to their place.
    runs = [[number for _, number in run] for _, run in itertools.groupby(enumerate(numbers), lambda p: p[1] - p[0])]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _parse_ranges(text: str, whole: str) -> Iterator[int]:
    # One at a time: the first layer that does not exist ends a range, however long.
    for piece in text.split(","):
        first, dash, last = piece.strip().partition("-")
        if len(first) > 6 or len(last) > 6:
            raise ConfigError(f"layer set {whole!r}: {piece!r} is no layer of any model")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise ConfigError(f"layer set {whole!r}: {piece!r} is neither a layer nor a range such as 3-5")
        yield from range(int(first), int(last or first) + 1)
