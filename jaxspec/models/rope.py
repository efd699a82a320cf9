"""Rotary position embedding: its settings, and the frequencies that follow from them."""

import dataclasses
import math
from typing import Literal

import numpy as np

from jaxspec.errors import ConfigError

SCALINGS = ("default", "linear", "llama3", "yarn", "longrope", "proportional")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding.

    `scaling` "linear" divides positions by `factor`. "llama3" is Llama 3.1's frequency-dependent scaling, which needs
    all four numbers from `factor` on. "yarn" (arXiv 2309.00071) divides the frequencies that turn less than `beta_slow`
    times within `original_context`, keeps those that turn more than `beta_fast` times, and interpolates between them;
    `truncate` rounds the ends of that band to whole pairs. "longrope" (arXiv 2402.13753) divides each frequency by its
    own number in `divisors`. `attention_factor` multiplies cosines and sines (yarn and longrope). `partial` is the part
    of each head that turns, from 0 (none) to 1 (all). With "proportional" scaling its frequencies are the first ones of
    a whole head, and checkpoints hold the pairs i and i + H / 2 as they are used here.
    """

    theta: float = 10000.0
    scaling: Literal["default", "linear", "llama3", "yarn", "longrope", "proportional"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    divisors: tuple[float, ...] = ()
    partial: float = 1.0

    def __post_init__(self):
        """Refuse frequencies that cannot be computed."""
        low, high = self.low_freq_factor, self.high_freq_factor
        known = self.scaling in SCALINGS
        _require(self.theta > 0, f"rope theta must be positive, got {self.theta}")
        _require(known, f"rope scaling {self.scaling!r} is not supported ({', '.join(SCALINGS)} are)")
        _require(self.factor >= 1, f"rope scaling factor must be at least 1, got {self.factor}")
        ordered = self.scaling != "llama3" or low < high
        _require(ordered, f"rope low_freq_factor {low} must be below high_freq_factor {high}")
        turns = f"rope beta_slow {self.beta_slow} must be positive and below beta_fast {self.beta_fast}"
        _require(self.scaling != "yarn" or 0 < self.beta_slow < self.beta_fast, turns)
        _require(self.scaling != "yarn" or self.theta > 1, f"rope scaling yarn needs a theta above 1, got {self.theta}")
        _require(self.original_context > 0, f"rope original_context must be positive, got {self.original_context}")
        _require(self.attention_factor > 0, f"rope attention_factor must be positive, got {self.attention_factor}")
        _require(0 <= self.partial <= 1, f"rope partial must lie between 0 and 1, got {self.partial}")
        fits = bool(self.divisors) == (self.scaling == "longrope") and all(d > 0 for d in self.divisors)
        _require(fits, "rope divisors are positive numbers of longrope scaling, and of no other")


def rope_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:  # float32 [H / 2]
    """Radians per position of each pair; those that stand still come last and have 0."""
    width = rotary_width(rope, head_dim)
    if rope.scaling == "proportional":
        turning = _turning_frequencies(rope, head_dim)[: width // 2]
    else:
        turning = _turning_frequencies(rope, width)
    return np.pad(turning, (0, head_dim // 2 - len(turning)))


def rotary_width(rope: RopeConfig, head_dim: int) -> int:
    """Entries of a head that turn, an even number.

    Raises:
      ConfigError: `partial` asks for another number.
    """
    width = round(rope.partial * head_dim)
    whole = abs(width - rope.partial * head_dim) < 1e-6 and width % 2 == 0
    _require(whole, f"rope partial {rope.partial} of a head of {head_dim} is not an even number of entries")
    return width


def rotary_order(rope: RopeConfig, head_dim: int, neighbours: bool) -> np.ndarray | None:
    """Which entry of a head, as checkpoints order them, each one is here, int [H]; None where the orders agree.

    Here the pairs are i and i + H / 2, and those that turn come first. In checkpoints the first `rotary_width` entries
    turn, their first half against their second, or each even one against its neighbour.
    """
    if rope.scaling == "proportional":
        return None
    width = rotary_width(rope, head_dim)
    turning = np.arange(width).reshape(-1, 2).T if neighbours else np.arange(width).reshape(2, -1)
    order = np.concatenate([turning, np.arange(width, head_dim).reshape(2, -1)], axis=1).reshape(-1)
    return None if np.array_equal(order, np.arange(head_dim)) else order


def _turning_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:  # float32 [H / 2]
    """Radians per position of the pairs of a head that turns as a whole; longrope has a divisor for each."""
    frequency = (1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)).astype(np.float32)
    match rope.scaling:
        case "default" | "proportional":
            return frequency
        case "linear":
            return frequency / np.float32(rope.factor)
        case "longrope":
            return frequency / np.array(rope.divisors, np.float32)
        case "yarn":
            kept = 1 - _yarn_ramp(rope, head_dim)
            return (frequency / np.float32(rope.factor) * (1 - kept) + frequency * kept).astype(np.float32)
    # Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, the band between interpolated.
    wavelength = 2 * math.pi / frequency
    longest = rope.original_context / rope.low_freq_factor
    shortest = rope.original_context / rope.high_freq_factor
    blend = (rope.original_context / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    stretched = frequency / rope.factor
    scaled = np.where(wavelength > longest, stretched, (1 - blend) * stretched + blend * frequency)
    return np.where(wavelength < shortest, frequency, scaled).astype(np.float32)


def yarn_attention_factor(factor: float) -> float:
    """The factor of cosines and sines that YaRN's paper recommends."""
    return 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0


def longrope_attention_factor(factor: float, original_context: int) -> float:
    """The factor of cosines and sines that LongRoPE's paper recommends; `factor` is that of the context."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_context))


def _yarn_ramp(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """How far each pair is interpolated, from 0 (kept) to 1 (divided by the factor); float32 [H / 2]."""

    def pair_of(turns: float) -> float:
        """The pair, as a real number, that turns so many times within the original context."""
        return head_dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high += 0.001 if low == high else 0.0
    return np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low), 0, 1).astype(np.float32)


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise ConfigError(problem)
