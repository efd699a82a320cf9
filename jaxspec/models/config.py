"""Model geometry: what a network is, and nothing of meshes, dtypes or sampling."""

import dataclasses
import itertools
from typing import Literal

from jaxspec.errors import ConfigError
from jaxspec.models.layer_set import LayerSet

# The mesh axis over which weights, heads, vocabulary and caches are split.
TENSOR_AXIS = "tensor"

Family = Literal["llama", "mistral", "qwen2", "qwen3"]
FAMILIES: tuple[Family, ...] = ("llama", "mistral", "qwen2", "qwen3")


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
        if self.theta <= 0:
            raise ConfigError(f"rope theta must be positive, got {self.theta}")
        if self.scaling not in ("default", "linear", "llama3"):
            raise ConfigError(f"rope scaling {self.scaling!r} is not supported (default, linear, llama3 are)")
        if self.factor < 1:
            raise ConfigError(f"rope scaling factor must be at least 1, got {self.factor}")
        if self.scaling == "llama3" and not self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                f"rope low_freq_factor {self.low_freq_factor} must be below high_freq_factor {self.high_freq_factor}"
            )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Geometry of a decoder-only transformer with RMS norm, rotary positions and a SwiGLU MLP.

    Letters used across jaxspec: D `embed_dim`, F `mlp_dim`, N `num_heads`, K `num_kv_heads`,
    G = N // K query heads per KV head, H `head_dim`, V `vocab_size`, L `num_layers`.

    `sliding_window` counts the positions a query sees, itself included, in the layers that
    `sliding_layers` marks (all layers when it is empty).

    A draft may be made for one target and share its vocabulary (`shares_embedding`): it has no embedding and no head of
    its own. Such a draft may score some tokens only: `head_ids`, ascending; empty for all of them.

    A draft that consists of its target's layers may lack attention or MLP blocks: `units` are those it has.
    """

    family: Family
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

    def __post_init__(self):
        """Refuse geometries that cannot be built, naming both numbers."""
        if self.family not in FAMILIES:
            raise ConfigError(f"model family {self.family!r} is not supported; supported: {', '.join(FAMILIES)}")
        for name in (
            "num_layers", "embed_dim", "mlp_dim", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "max_context",
        ):  # fmt: skip
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
                raise ConfigError(f"{name} must be a positive integer, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim {self.head_dim} is odd; rotary embedding needs pairs")
        if not 0 < self.norm_eps < 1:
            raise ConfigError(f"norm_eps must lie between 0 and 1, got {self.norm_eps}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ConfigError(f"sliding_window must be at least 1, got {self.sliding_window}")
        if self.sliding_layers and len(self.sliding_layers) != self.num_layers:
            raise ConfigError(
                f"sliding_layers names {len(self.sliding_layers)} layers, the model has {self.num_layers}"
            )
        if self.units is not None and self.units.num_layers != self.num_layers:
            raise ConfigError(f"units are of {self.units.num_layers} layers, the model has {self.num_layers}")
        if self.head_ids:
            if not self.shares_embedding:
                raise ConfigError(
                    "head_ids restricts the head of a draft with shares_embedding; this model has its own"
                )
            ids = self.head_ids
            if not 0 <= ids[0] <= ids[-1] < self.vocab_size or any(a >= b for a, b in itertools.pairwise(ids)):
                raise ConfigError(f"head_ids must be ascending token ids below {self.vocab_size}, each once")

    @property
    def group(self) -> int:
        """G: query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers that have an attention block: those with keys and values."""
        return tuple(index for index in range(self.num_layers) if self.blocks(index)[0])

    def blocks(self, layer: int) -> tuple[bool, bool]:
        """Whether a layer has an attention and an MLP block."""
        return (True, True) if self.units is None else (self.units.attention[layer], self.units.mlp[layer])

    def window(self, layer: int) -> int | None:
        """Sliding window of one layer in positions, or None where it sees everything."""
        if self.sliding_layers and not self.sliding_layers[layer]:
            return None
        return self.sliding_window
