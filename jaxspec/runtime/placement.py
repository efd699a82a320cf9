"""A model on its mesh: geometry, devices and dtype, and every shape and sharding that follows."""

import bisect
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec.config import SamplingParams
from jaxspec.models.config import TENSOR_AXIS, ModelConfig
from jaxspec.models.kv_cache import KVCache
from jaxspec.models.params import Params, declare_params, declare_shared
from jaxspec.models.quantization import Storage, as_storage
from jaxspec.runtime.mesh import MeshPlan
from jaxspec.runtime.sharding import placed_shapes, round_up
from jaxspec.sampling.processors import History, history_specs, init_history, processor_specs
from jaxspec.sampling.request import Request, make_request
from jaxspec.sampling.vocab import VocabShard


class SharedEmbedding(NamedTuple):
    """The target whose embedding a draft shares: its geometry, and how its weights are kept."""

    cfg: ModelConfig
    storage: Storage


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where and in which dtype a model of one geometry lives; everything but the weights."""

    cfg: ModelConfig  # geometry, unpadded
    plan: MeshPlan  # devices
    dtype: Any  # of the cache, and of the weights where `storage` is None
    # Least number of vocabulary rows: a draft and its target need equally many, so that each device holds the same
    # tokens of both.
    vocab_rows: int = 0
    vocab_limit: int | None = None  # ids from here on are never proposed; None is the vocabulary's size
    storage: Storage | None = None  # how each weight is kept, fitted to the plan (see `fit_storage`)
    # The target whose embedding this model shares; None for a model with its own.
    shared_embedding: SharedEmbedding | None = None

    @property
    def weights(self) -> Storage:
        """How each weight is kept."""
        return as_storage(self.dtype) if self.storage is None else self.storage

    @property
    def padded_vocab(self) -> int:
        """Vocabulary entries over all shards, padding included."""
        return round_up(max(self.cfg.vocab_size, self.vocab_rows), self.plan.tensor)

    @property
    def vocab(self) -> VocabShard:
        """This mesh's split of the vocabulary."""
        axis, head_ids = TENSOR_AXIS if self.plan.tensor > 1 else None, self.cfg.head_ids
        columns = round_up(len(head_ids), self.plan.tensor) if head_ids else self.padded_vocab
        return VocabShard(self._limit, columns // self.plan.tensor, axis, head_ids)

    @property
    def text_vocab(self) -> VocabShard:
        """This mesh's split of all ids, those included that the model cannot propose."""
        axis = TENSOR_AXIS if self.plan.tensor > 1 else None
        return VocabShard(self._limit, self.padded_vocab // self.plan.tensor, axis)

    @property
    def num_tokens(self) -> int:
        """Ids that the model can propose."""
        return bisect.bisect_left(self.cfg.head_ids, self._limit) if self.cfg.head_ids else self._limit

    @property
    def local_kv_heads(self) -> int:
        """KV heads of one shard, padding included."""
        return round_up(self.cfg.num_kv_heads, self.plan.tensor) // self.plan.tensor

    def params(self) -> Params:
        """Padded, sharded shapes of the parameters, those that the model shares included."""
        return self.own_params() | self.shared_params()

    def own_params(self) -> Params:
        """Shapes of what the model's checkpoint holds."""
        return placed_shapes(declare_params(self.cfg, self.weights), self.plan, {"vocab": self.vocab_rows})

    def shared_params(self) -> Params:
        """Shapes of what the model has of its target."""
        if self.shared_embedding is None:
            return {}
        target = declare_params(self.shared_embedding.cfg, self.shared_embedding.storage)
        return placed_shapes(declare_shared(self.cfg, self.weights, target), self.plan, {"vocab": self.vocab_rows})

    def replicated(self, tree: Any) -> Any:
        """Shapes of a pytree of arrays, a whole copy on every device."""
        return jax.tree.map(lambda leaf: self.array(leaf.shape, leaf.dtype), tree)

    def array(self, shape: tuple[int, ...], dtype: Any, *axes: str | None) -> Any:
        """Shape on this mesh, replicated unless `axes` names mesh axes."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.plan.mesh, PartitionSpec(*axes)))

    def history(self) -> History:
        """Shapes of a token history, split like the vocabulary."""
        vocab = VocabShard(self.cfg.vocab_size, self.padded_vocab)
        return self._place(jax.eval_shape(lambda: init_history(vocab)), history_specs(TENSOR_AXIS))

    def request(self) -> Request:
        """Shapes of a request."""
        example = make_request(SamplingParams(), 0, self.cfg.vocab_size, self.padded_vocab)
        return self._place(example, Request(processor_specs(TENSOR_AXIS), PartitionSpec(), PartitionSpec()))  # pyright: ignore[reportArgumentType]

    def cache(self, slots: int) -> KVCache:
        """Shapes of a KV cache, split by (padded) KV heads."""
        layer = self.array((self.local_kv_heads * self.plan.tensor, slots, self.cfg.head_dim), self.dtype, TENSOR_AXIS)
        layers = (layer,) * len(self.cfg.attention_layers)
        return KVCache(layers, layers, self.array((), jnp.int32))

    @property
    def _limit(self) -> int:
        return self.vocab_limit or self.cfg.vocab_size

    def _place(self, tree: Any, specs: Any) -> Any:
        return jax.tree.map(lambda leaf, spec: self.array(leaf.shape, leaf.dtype, *spec), tree, specs)


def resolve_dtype(name: str, plan: MeshPlan) -> Any:
    """Weight and cache dtype from its name; "auto" is float32 on CPU, where bfloat16 is slower, else bfloat16."""
    if name == "auto":
        name = "float32" if plan.devices[0].platform == "cpu" else "bfloat16"
    return jnp.dtype(name)
