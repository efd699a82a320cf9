"""A model on its mesh: geometry, devices and dtype, and every shape and sharding that follows."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec.cache import KVCache
from jaxspec.mesh.padding import round_up
from jaxspec.mesh.plan import TENSOR_AXIS, MeshPlan
from jaxspec.mesh.rules import placed_shapes
from jaxspec.models.config import ModelConfig
from jaxspec.models.params import Params, declare_params
from jaxspec.sampling.vocab import VocabShard


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where and in which dtype a model of one geometry lives; everything but the weights.

    Attributes:
      cfg: geometry, unpadded.
      plan: devices.
      dtype: of weights and cache.
    """

    cfg: ModelConfig
    plan: MeshPlan
    dtype: Any

    @property
    def vocab(self) -> VocabShard:
        """This mesh's split of the vocabulary."""
        padded = round_up(self.cfg.vocab_size, self.plan.tensor)
        axis = TENSOR_AXIS if self.plan.tensor > 1 else None
        return VocabShard(self.cfg.vocab_size, padded // self.plan.tensor, axis)

    @property
    def local_kv_heads(self) -> int:
        """KV heads of one shard, padding included."""
        return round_up(self.cfg.num_kv_heads, self.plan.tensor) // self.plan.tensor

    def params(self) -> Params:
        """Padded, sharded shapes of the parameters."""
        return placed_shapes(declare_params(self.cfg, self.dtype), self.plan)

    def array(self, shape: tuple[int, ...], dtype: Any, *axes: str | None) -> jax.ShapeDtypeStruct:
        """Shape on this mesh, replicated unless `axes` names mesh axes."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.plan.mesh, PartitionSpec(*axes)))

    def vocab_array(self, dtype: Any) -> jax.ShapeDtypeStruct:
        """One value per (padded) vocabulary entry, split like the vocabulary."""
        return self.array((self.vocab.local_size * self.plan.tensor,), dtype, TENSOR_AXIS)

    def cache(self, slots: int) -> KVCache:
        """Shapes of a KV cache, split by (padded) KV heads."""
        layer = self.array((self.local_kv_heads * self.plan.tensor, slots, self.cfg.head_dim), self.dtype, TENSOR_AXIS)
        layers = (layer,) * self.cfg.num_layers
        return KVCache(layers, layers, self.array((), jnp.int32))



def resolve_dtype(name: str, plan: MeshPlan) -> Any:
    """Weight and cache dtype from its name; "auto" is float32 on CPU, where bfloat16 is slower, else bfloat16."""
    if name == "auto":
        name = "float32" if plan.devices[0].platform == "cpu" else "bfloat16"
    return jnp.dtype(name)
