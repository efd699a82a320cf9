"""A model on its mesh: geometry, devices and dtype, and every shape and sharding that follows."""

import bisect
import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec.config import ActivationsSetting, KVDType
from jaxspec.errors import ConfigError
from jaxspec.models.config import TENSOR_AXIS, ModelConfig
from jaxspec.models.heads import HeadLayout, head_layout
from jaxspec.models.kv_cache import KVCache
from jaxspec.models.params import Params, declare_params, declare_shared, leaf_name
from jaxspec.models.quantization import Storage, as_storage, parts_of
from jaxspec.models.recurrent import rows_shapes
from jaxspec.models.vocab import VocabShard
from jaxspec.runtime.mesh import MeshPlan
from jaxspec.runtime.sharding import placed_shapes, round_up
from pallas_kernels.linear.blocks import COLUMNS, FORMATS, Blocks, find_format, packed_name
from pallas_kernels.linear.columns import MULTIPLE, columns_name
from pallas_kernels.linear.planes import planes_name
from pallas_kernels.registry import Kernels

# How rows are multiplied by weights in blocks: as they are, or as integers of 8 or 16 bits, which takes packed blocks.
Activations = Literal["float32", "int16", "int8"]


class SharedEmbedding(NamedTuple):
    """The target whose embedding a draft shares: its geometry, how its weights are kept, and how it multiplies."""

    cfg: ModelConfig
    storage: Storage
    activations: Activations = "float32"


@dataclasses.dataclass(frozen=True)
class Placement:
    """Devices, dtypes and shapes of a model of one geometry; everything but the weights."""

    cfg: ModelConfig  # geometry, unpadded
    plan: MeshPlan  # devices
    dtype: Any  # of the weights where `storage` is None, and of the cache where `cache_dtype` is
    # Least number of vocabulary rows: a draft and its target need equally many, so that each device holds the same
    # tokens of both.
    vocab_rows: int = 0
    vocab_limit: int | None = None  # ids from here on are never proposed; None is the vocabulary's size
    storage: Storage | None = None  # how each weight is kept, fitted to the plan (see `fit_storage`)
    # The target whose embedding this model shares; None for a model with its own.
    shared_embedding: SharedEmbedding | None = None
    # Integers: weights in blocks are packed after they are loaded, and rows are rounded before they are multiplied by
    # them. Other weights are multiplied in float32.
    activations: Activations = "float32"
    cache_dtype: Any = None  # of keys and values
    # Layers whose weights stay on the devices while the others pass by (`jaxspec/offload`); None keeps all of them.
    resident_layers: int | None = None
    # Of each streamed mixture, experts that stay on the devices from pass to pass, those used last.
    kept_experts: int = 0
    # The `TargetExecutor` that runs the passes of a target whose layers are streamed; None keeps all weights resident.
    executor: Callable[..., Any] | None = None

    @property
    def kv_dtype(self) -> Any:
        """The dtype of the KV cache."""
        return self.dtype if self.cache_dtype is None else self.cache_dtype

    @property
    def streamed(self) -> tuple[int, ...]:
        """Layers whose weights pass by, spread evenly, so that reading goes on while resident layers compute."""
        if self.resident_layers is None:
            return ()
        layers, count = self.cfg.num_layers, self.cfg.num_layers - self.resident_layers
        return tuple(i for i in range(layers) if (i + 1) * count // layers > i * count // layers)

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
    def heads(self) -> HeadLayout:
        """How the attention heads lie on the devices."""
        return head_layout(self.cfg.num_kv_heads, self.cfg.group, self.plan.tensor)

    @property
    def local_kv_heads(self) -> tuple[int, ...]:
        """KV heads of one shard by kind, padding included: those with all of their queries, and shared ones."""
        return self.heads.slots

    @property
    def local_recurrent_heads(self) -> int:
        """Key heads of recurrent layers of one shard, padding included; 0 without such layers."""
        heads, degree = 0 if self.cfg.recurrent is None else self.cfg.recurrent.key_heads, self.plan.tensor
        return round_up(heads, degree) // degree

    def params(self) -> Params:
        """Padded, sharded shapes of the parameters as programs take them, those that the model shares included."""
        own, shared = self.own_params(), self.shared_params()
        own = pack_shapes(own, self.activations, self.plan.kernels)
        lender = self.shared_embedding
        for leaf in shared:
            # A head of some of the target's rows is the model's own copy.
            copied = leaf == "head" and bool(self.cfg.head_ids)
            activations = self.activations if copied or lender is None else lender.activations
            shared[leaf] = pack_shapes(shared[leaf], activations, self.plan.kernels)
        return own | shared

    def own_params(self) -> Params:
        """Shapes of what the model's checkpoint holds, before anything is packed."""
        return placed_shapes(declare_params(self.cfg, self.weights), self.plan, {"vocab": self.vocab_rows})

    def shared_params(self) -> Params:
        """Shapes of what the model has of its target, before anything is packed."""
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

    def cache(self, slots: int) -> KVCache:
        """Shapes of a KV cache, split by KV heads: padded or replicated where the devices do not divide them."""
        degree = self.plan.tensor
        layers = tuple(
            self.array((heads * degree, slots, H), self.kv_dtype, TENSOR_AXIS)
            for kind in self.local_kv_heads
            for heads, H in (self.cfg.cache_heads(kind, index) for index in self.cfg.attention_layers)
        )
        recurrent = ()
        if self.cfg.recurrent is not None:
            shapes = rows_shapes(self.cfg.recurrent, self.local_recurrent_heads * degree)
            split = lambda shape: self.array(shape, jnp.float32, TENSOR_AXIS)  # noqa: E731
            rows = jax.tree.map(split, shapes, is_leaf=lambda leaf: isinstance(leaf, tuple))
            recurrent = (rows,) * len(self.cfg.recurrent_layers)
        return KVCache(layers, layers, self.array((), jnp.int32), recurrent)

    def shapes(self, tree: Any, specs: Any) -> Any:
        """Shapes of a pytree of arrays, split as the partition specs of another say."""
        return jax.tree.map(lambda leaf, spec: self.array(leaf.shape, leaf.dtype, *spec), tree, specs)

    @property
    def _limit(self) -> int:
        return self.vocab_limit or self.cfg.vocab_size


def pack_shapes(tree: Any, activations: Activations, kernels: Kernels) -> Any:
    """Shapes of the same parameters as kernels take them; each device packs its own shard.

    Blocks are packed for integers, laid out in planes for GPU kernels, or in columns for those of TPUs. A TPU has
    output projections of numbers as matrices.
    """

    def pack(path: Any, leaf: Any) -> Any:
        is_out = bool(path) and leaf_name(path).split(".")[-1] == "out"
        if is_out and not isinstance(leaf, Blocks) and kernels.platform == "tpu":
            return matrix_shape(leaf)
        name = _packed_format(leaf.format, activations, kernels) if isinstance(leaf, Blocks) else None
        if name is None:
            return leaf
        packed_format, data = find_format(name), leaf.data
        assert packed_format is not None
        if name in COLUMNS:
            # Of an output projection all dimensions after the first are inputs, of any other weight the last one.
            outputs = 1 if is_out else data.ndim - 2
            return _column_shapes(data, outputs, name, packed_format.nbytes)
        shape = (*data.shape[:-1], packed_format.nbytes)
        packed: Any = jax.ShapeDtypeStruct(shape, data.dtype, sharding=data.sharding)
        return Blocks(packed, name)

    return jax.tree.map_with_path(pack, tree, is_leaf=lambda leaf: isinstance(leaf, Blocks))


def matrix_shape(leaf: Any) -> Any:
    """`[D, ...inputs]` as `[D, I]`: a TPU keeps heads in other tiles, which XLA would move in each pass."""
    sharding = NamedSharding(leaf.sharding.mesh, PartitionSpec(*leaf.sharding.spec[:2]))
    return jax.ShapeDtypeStruct((leaf.shape[0], math.prod(leaf.shape[1:])), leaf.dtype, sharding=sharding)


def _column_shapes(data: Any, outputs: int, name: str, nbytes: int) -> Blocks:
    """Columns of blocks, of which the first dimensions are outputs; each device has those of its own shard."""
    shape, local, spec = data.shape, data.sharding.shard_shape(data.shape), data.sharding.spec
    axes = (*spec, *[None] * (len(shape) - len(spec)))
    cut = [axis if whole != part else None for axis, whole, part in zip(axes, shape, local, strict=True)]
    inputs = slice(outputs, -1)
    blocks = round_up(math.prod(local[inputs]), MULTIPLE) * (math.prod(shape[inputs]) // math.prod(local[inputs]))
    shared = [next(filter(None, part), None) for part in (cut[inputs], cut[:outputs])]
    free = next((index for index in range(outputs) if cut[index]), 0)
    columns: Any = jax.ShapeDtypeStruct(
        (nbytes, blocks, math.prod(shape[:outputs])), data.dtype,
        sharding=NamedSharding(data.sharding.mesh, PartitionSpec(None, *shared)),
    )  # fmt: skip
    return Blocks(columns, name, tuple(None if index == free else shape[index] for index in range(outputs)))


def _packed_format(name: str, activations: Activations, kernels: Kernels) -> str | None:
    """The format that blocks of a format are packed to, or None."""
    if activations != "float32":
        return packed_name(name, activations) if FORMATS[name].has_integers else None
    if not kernels.reads_planes:
        return None
    return columns_name(name) if kernels.platform == "tpu" else planes_name(name)


def resolve_dtype(name: str, plan: MeshPlan) -> Any:
    """Weight and cache dtype from its name; "auto" is float32 on CPU, where bfloat16 is slower, else bfloat16."""
    if name == "auto":
        name = "float32" if plan.devices[0].platform == "cpu" else "bfloat16"
    return jnp.dtype(name)


def formats_of(storage: Storage) -> set[str]:
    """Names of the types and formats of a model's weights."""
    types = (storage.default, *(leaf_type for _, leaf_type in storage.leaves))
    return {part for leaf_type in types for part in parts_of(leaf_type)}


def resolve_numbers(
    placement: Placement, activations: ActivationsSetting, kv_dtype: KVDType, best: Activations
) -> Placement:
    """A placement with the types of activations and of the cache; `best` is what "auto" is for weights in integers.

    Raises:
      ConfigError: integers or float16 are asked for without the kernels that take them.
    """
    kernels = placement.plan.kernels
    possible = kernels.native and any(
        name in FORMATS and FORMATS[name].has_integers for name in formats_of(placement.weights)
    )
    if activations in ("int8", "int16") and not possible:
        reason = f"kernels {kernels.name!r} have no such products"
        reason = "these weights are numbers or FP8" if kernels.native else reason
        raise ConfigError(
            f"activations {activations!r} need native CPU kernels and weights in blocks of integer codes: {reason}"
        )
    if activations == "auto":
        activations = best if possible else "float32"
    if kv_dtype == "float16" and not kernels.native:
        raise ConfigError(f"kv_dtype 'float16' needs native CPU kernels, not {kernels.name!r}")
    if kv_dtype == "auto":
        cache_dtype = jnp.dtype("float16") if activations != "float32" else placement.dtype
    else:
        cache_dtype = jnp.dtype(kv_dtype)
    return dataclasses.replace(placement, activations=activations, cache_dtype=cache_dtype)
