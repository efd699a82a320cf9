"""Model geometry: what a network is, and nothing of meshes, dtypes or sampling.

As plain data, a geometry is what TOML presets and native checkpoints hold: the keys are the field names. No value is
converted, and an unknown key is an error.
"""

import dataclasses
import itertools
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from jaxspec.errors import ConfigError, suggest
from jaxspec.models.families import FAMILIES
from jaxspec.models.layer_set import LayerSet

# The mesh axis over which weights, heads, vocabulary and caches are split.
TENSOR_AXIS = "tensor"


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise ConfigError(problem)


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding.

    `scaling` "linear" divides positions by `factor`; "llama3" is Llama 3.1's frequency-dependent
    scaling, which needs all four of its numbers.
    """

    theta: float = 10000.0
    scaling: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192

    def __post_init__(self):
        """Refuse frequencies that cannot be computed."""
        low, high = self.low_freq_factor, self.high_freq_factor
        known = self.scaling in ("default", "linear", "llama3")
        _require(self.theta > 0, f"rope theta must be positive, got {self.theta}")
        _require(known, f"rope scaling {self.scaling!r} is not supported (default, linear, llama3 are)")
        _require(self.factor >= 1, f"rope scaling factor must be at least 1, got {self.factor}")
        ordered = self.scaling != "llama3" or low < high
        _require(ordered, f"rope low_freq_factor {low} must be below high_freq_factor {high}")


def rope_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:  # float32 [H / 2]
    """Radians per position of each rotated pair."""
    frequency = (1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)).astype(np.float32)
    if rope.scaling == "linear":
        return frequency / np.float32(rope.factor)
    if rope.scaling == "default":
        return frequency
    # Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, the band between interpolated.
    wavelength = 2 * math.pi / frequency
    longest = rope.original_context / rope.low_freq_factor
    shortest = rope.original_context / rope.high_freq_factor
    blend = (rope.original_context / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    stretched = frequency / rope.factor
    scaled = np.where(wavelength > longest, stretched, (1 - blend) * stretched + blend * frequency)
    return np.where(wavelength < shortest, frequency, scaled).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Geometry of a decoder-only transformer with RMS norm, rotary positions and a SwiGLU MLP.

    Letters used across jaxspec: D `embed_dim`, F `mlp_dim`, N `num_heads`, K `num_kv_heads`,
    G = N // K query heads per KV head, H `head_dim`, V `vocab_size`, L `num_layers`.

    `sliding_window` counts the positions a query sees, itself included, in the layers that `sliding_layers` marks (all
    layers when it is empty). `embed_scale` multiplies the embedding of each token.

    A draft may be made for one target and share its vocabulary (`shares_embedding`): it has no embedding and no head of
    its own. Such a draft may score some tokens only: `head_ids`, ascending; empty for all of them.

    A draft that consists of its target's layers may lack attention or MLP blocks: `units` are those it has.
    """

    family: str
    num_layers: int
    embed_dim: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    rope: RopeConfig = RopeConfig()
    norm_eps: float = 1e-5
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = ()
    shares_embedding: bool = False
    head_ids: tuple[int, ...] = ()
    units: LayerSet | None = None
    embed_scale: float = 1.0

    def __post_init__(self):
        """Refuse geometries that cannot be built, naming both numbers."""
        supported = ", ".join(FAMILIES)
        _require(self.family in FAMILIES, f"model family {self.family!r} is not supported; supported: {supported}")
        for name in (
            "num_layers", "embed_dim", "mlp_dim", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "max_context",
        ):  # fmt: skip
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
                raise ConfigError(f"{name} must be a positive integer, got {value!r}")
        N, K, L, window, ids = self.num_heads, self.num_kv_heads, self.num_layers, self.sliding_window, self.head_ids
        _require(N % K == 0, f"num_heads {N} is not a multiple of num_kv_heads {K}")
        _require(self.head_dim % 2 == 0, f"head_dim {self.head_dim} is odd; rotary embedding needs pairs")
        _require(0 < self.norm_eps < 1, f"norm_eps must lie between 0 and 1, got {self.norm_eps}")
        _require(self.embed_scale > 0, f"embed_scale must be positive, got {self.embed_scale}")
        _require(window is None or window >= 1, f"sliding_window must be at least 1, got {window}")
        listed = len(self.sliding_layers)
        _require(listed in (0, L), f"sliding_layers names {listed} layers, the model has {L}")
        blocks = self.units.num_layers if self.units is not None else L
        _require(blocks == L, f"units are of {blocks} layers, the model has {L}")
        if ids:
            problem = "head_ids restricts the head of a draft with shares_embedding; this model has its own"
            _require(self.shares_embedding, problem)
            ascending = 0 <= ids[0] <= ids[-1] < self.vocab_size and all(a < b for a, b in itertools.pairwise(ids))
            _require(ascending, f"head_ids must be ascending token ids below {self.vocab_size}, each once")

    @property
    def group(self) -> int:
        """G: query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers that have an attention block: those with keys and values."""
        return tuple(index for index in range(self.num_layers) if self.layer_units(index)[0])

    def layer_units(self, layer: int) -> tuple[bool, bool]:
        """Whether a layer has attention and whether it has an MLP."""
        return (True, True) if self.units is None else (self.units.attention[layer], self.units.mlp[layer])

    def window(self, layer: int) -> int | None:
        """Sliding window of one layer in positions, or None where it sees everything."""
        return None if self.sliding_layers and not self.sliding_layers[layer] else self.sliding_window


def config_to_data(cfg: ModelConfig) -> dict[str, Any]:
    """Plain data that `config_from_data` reads back; tuples become lists, as in JSON."""
    data = dataclasses.asdict(cfg)
    data["sliding_layers"] = list(cfg.sliding_layers)
    data["head_ids"] = list(cfg.head_ids)
    if cfg.units is not None:
        data["units"] = {"attention": list(cfg.units.attention), "mlp": list(cfg.units.mlp)}
    # Older versions of jaxspec know neither field: they are left out where they say nothing.
    return {key: value for key, value in data.items() if (key, value) not in (("units", None), ("embed_scale", 1.0))}


def config_from_data(data: Mapping[str, Any], where: str) -> ModelConfig:
    """Read a geometry strictly from the field names and values in TOML or JSON; `where` names the place in errors.

    Raises:
      ConfigError: a key is missing, unknown (the nearest known one is named) or of the wrong type, or the geometry
        cannot be built.
    """
    return _read_dataclass(ModelConfig, data, where)


def _read_dataclass(kind: type, data: Any, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where}: must be a table of named values, got {data!r}")
    hints = typing.get_type_hints(kind)
    for key in data:
        if key not in hints:
            raise ConfigError(f"{where}: unknown key {key!r}; {suggest(key, hints)}")
    fields = [field for field in dataclasses.fields(kind) if field.name not in data]
    if missing := [field.name for field in fields if field.default is dataclasses.MISSING]:
        raise ConfigError(f"{where}: missing {', '.join(missing)}")
    values = {key: _read_value(hints[key], value, f"{where}: {key}") for key, value in data.items()}
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _read_value(hint: Any, value: Any, where: str) -> Any:
    """One value as its annotation says; JSON's integers pass as floats, but booleans never as numbers."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _read_dataclass(hint, value, where)
    if hint is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if hint in (int, bool, str) and type(value) is hint:
        return value
    origin, choices = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal and isinstance(value, str) and value in choices:
        return value
    if origin is types.UnionType and types.NoneType in choices:
        return None if value is None else _read_value(choices[0], value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(_read_value(choices[0], item, where) for item in value)
    wanted = f"one of {', '.join(choices)}" if origin is Literal else getattr(hint, "__name__", str(hint))
    raise ConfigError(f"{where} must be {wanted}, got {value!r}")
