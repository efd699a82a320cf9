"""What layers without a sliding window have otherwise than those with one, and layers that share keys (Gemma 4).

Letters as in `ModelConfig`: H head width, K KV heads, F width of the MLP, D width of the model, L layers.
"""

import dataclasses

from jaxspec.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class LayerKinds:
    """Layers of two kinds. Every layer also norms its values, without a scale, and multiplies its result by a number.

    Attributes:
      full_head_dim: H of layers without a window.
      full_kv_heads: K of layers without a window.
      sharing: the last so many layers compute no keys and values: they use those of the last earlier layer of their
        kind.
      sharing_mlp_dim: F of these.
      keys_are_values: whether layers without a window take their projected keys, before norm and rotation, as values.
      inputs_dim: P. Each layer has inputs of its own, `[T, P]`, made of the token and its embedding; 0 for none.
    """

    full_head_dim: int
    full_kv_heads: int
    sharing: int = 0
    sharing_mlp_dim: int = 0
    keys_are_values: bool = False
    inputs_dim: int = 0

    def __post_init__(self):
        """Refuse widths that cannot be built."""
        for name in ("full_head_dim", "full_kv_heads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("sharing", "sharing_mlp_dim", "inputs_dim"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.full_head_dim % 2:
            raise ConfigError(f"full_head_dim {self.full_head_dim} is odd; rotary embedding needs pairs")
        if bool(self.sharing) != bool(self.sharing_mlp_dim):
            raise ConfigError("sharing layers and the width of their MLP go together")
