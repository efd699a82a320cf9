"""Parameters: one declaration from which abstract shapes, shardings and restores derive.

Axis letters are those of `ModelConfig`. Weights are stored `[out..., in...]`, as checkpoints have them: a
one-token step is then a row-major matrix-vector product, the fastest form on CPU (docs/decisions.md). Query, key and
value share one tensor grouped by KV head; gate and up share another. Sharding the first named axis then gives each
device whole heads with their keys.

A weight is kept as numbers or in blocks (`jaxspec.models.quantization`). Blocks replace the last dimension `I` by two,
`I / values` and `nbytes`; those before them, and with them the shards, stay what they are. Blocks whose inputs are
permuted come with an array of their name and `_order`, int32 `[I]`: column i of the weight takes input `order[i]`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.models.config import ModelConfig
from jaxspec.models.features import FeatureConfig
from jaxspec.models.heads import KV_ROWS, QKV_ROWS, QUERY_ROWS
from jaxspec.models.quantization import K_QUANTS, PARTS, LeafType, Storage, as_storage, crosses_heads, weight_leaves
from pallas_kernels.linear.blocks import FORMATS, Blocks

Params = dict[str, Any]

# Parameters of a layer's MLP block; the others are its attention's.
MLP_PARAMS = (
    "mlp_norm", "mlp_post_norm", "gate_up", "down", "gate_up_order", "down_order", "router", "shared_gate",
    "shared_gate_up", "shared_down", "router_bias", "router_scale", "gate_up_bias", "down_bias", "input_gate",
    "input_out", "input_norm", "scale", "shared_post_norm", "experts_norm", "experts_post_norm",
)  # fmt: skip

# Those of which a mixture of experts has one for each expert: weights, and all of them.
EXPERT_WEIGHTS = ("gate_up", "down")
ROUTED_PARAMS = (*EXPERT_WEIGHTS, "gate_up_bias", "down_bias")


@dataclasses.dataclass(frozen=True)
class ArrayInfo:
    """One declared array.

    Attributes:
      shape: unpadded.
      dtype: of the numbers; uint8 where they are in blocks.
      axes: one logical axis name per dimension, or None.
      format: name of the block format; None for numbers.
      multiple: a device's part of the split dimension is padded to a multiple of this number.
      group: G, query heads per KV head, where an axis is "kv_heads"; the axis after it says what its rows are.
    """

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str | None, ...]
    format: str | None = None
    multiple: int = 1
    group: int = 0

    def __post_init__(self):
        """Every dimension has a logical name or None."""
        if len(self.shape) != len(self.axes):
            raise ValueError(f"shape {self.shape} and axes {self.axes} differ in length")


def declare_params(cfg: ModelConfig, storage: Storage | Any) -> Params:
    """Declare every parameter of `cfg` as an `ArrayInfo`; layers are a list of per-layer dicts.

    Norm scales stay float32: they are tiny and multiply float32 activations.

    Args:
      cfg: geometry.
      storage: how each weight is kept; a dtype is that of all of them. Weights in blocks are declared as `Blocks`
        around their `ArrayInfo`, a `qkv` of three types as a dict of its query, key and value.

    Raises:
      ValueError: the storage names a leaf that the model does not have, or blocks that do not fill a leaf's rows.
    """
    D, N, V, kinds = cfg.embed_dim, cfg.num_heads, cfg.vocab_size, cfg.kinds
    storage = as_storage(storage)
    if unknown := {leaf for leaf, _ in storage.leaves} - set(weight_leaves(cfg)):
        raise ValueError(f"the storage names {min(unknown)!r}, which is no weight of this model")
    norm, features = ArrayInfo((D,), jnp.float32, (None,)), cfg.features

    def declare_out(leaf: str) -> Any:
        leaf_type, (K, H) = storage.type_of(leaf), cfg.layer_heads(int(leaf.split(".")[1]))
        G = N // K
        shape, axes = (D, K, G, H), ("embed", "kv_heads", QUERY_ROWS, None)
        if crosses_heads(cfg, leaf_type, int(leaf.split(".")[1])):
            shape, axes = (D, 1, K * G * H), ("embed", "uncut", None)
        elif leaf_type in FORMATS:
            shape, axes = (D, K, G * H), ("embed", "kv_heads", QUERY_ROWS)
        return _declare_weight(leaf, leaf_type, shape, axes, group=G)

    def declare_qkv(leaf: str) -> Any:
        index, leaf_type = int(leaf.split(".")[1]), storage.type_of(leaf)
        K, H = cfg.layer_heads(index)
        G = N // K

        def declare(name: str, kind: LeafType, rows: str, n: int) -> Any:
            return _declare_weight(name, kind, (K, n, H, inputs), ("kv_heads", rows, None, "embed"), group=G)

        inputs = cfg.attention_inputs(index)
        if isinstance(leaf_type, str) and cfg.shares_keys(index):
            return declare(leaf, leaf_type, QUERY_ROWS, G)
        if isinstance(leaf_type, str):
            return declare(leaf, leaf_type, QKV_ROWS, G + 2)
        parts = zip(PARTS, leaf_type, (QUERY_ROWS, KV_ROWS, KV_ROWS), (G, 1, 1), strict=True)
        return {part: declare(f"{leaf}.{part}", kind, rows, n) for part, kind, rows, n in parts}

    def declare_orders(name: str, **inputs: int) -> Params:
        """The order of a weight's inputs, for those that have one."""
        kept = {leaf: count for leaf, count in inputs.items() if f"{name}.{leaf}" in storage.ordered}
        return {f"{leaf}_order": ArrayInfo((count,), jnp.int32, (None,)) for leaf, count in kept.items()}

    def declare_attention(index: int) -> Params:
        name, (K, H) = f"layers.{index}", cfg.layer_heads(index)
        G = N // K
        layer = {"qkv": declare_qkv(f"{name}.qkv"), "out": declare_out(f"{name}.out")}
        layer |= declare_orders(name, qkv=cfg.attention_inputs(index), out=K * G * H)
        if cfg.attention_gate:
            gate, axes = f"{name}.attn_gate", ("kv_heads", QUERY_ROWS, None, "embed")
            layer["attn_gate"] = _declare_weight(gate, storage.type_of(gate), (K, G, H, D), axes, group=G)
        if cfg.qkv_bias:
            layer["qkv_bias"] = ArrayInfo((K, G + 2, H), jnp.float32, ("kv_heads", QKV_ROWS, None), group=G)
        if cfg.out_bias:
            layer["out_bias"] = ArrayInfo((D,), jnp.float32, (None,))
        if cfg.attention_sinks:
            layer["sinks"] = ArrayInfo((K, G), jnp.float32, ("kv_heads", QUERY_ROWS), group=G)
        if cfg.wide_qk_norm:
            for leaf, rows, n in (("q_norm", QUERY_ROWS, G), ("k_norm", KV_ROWS, 1)):
                layer[leaf] = ArrayInfo((K, n, H), jnp.float32, ("kv_heads", rows, None), group=G)
        elif cfg.qk_norm:
            layer["q_norm"] = ArrayInfo((H,), jnp.float32, (None,))
            layer |= {} if cfg.shares_keys(index) else {"k_norm": layer["q_norm"]}
        return layer

    def declare_recurrent(index: int) -> Params:
        name, recurrent = f"layers.{index}", cfg.recurrent
        assert recurrent is not None  # see `declare_layer`
        heads, rows, by_head = recurrent.key_heads, recurrent.result_width, ("recurrent_heads", None, "embed")

        def declare(leaf: str, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> Any:
            return _declare_weight(f"{name}.{leaf}", storage.type_of(f"{name}.{leaf}"), shape, axes)

        def numbers(*shape: int) -> ArrayInfo:
            return ArrayInfo((heads, *shape), jnp.float32, ("recurrent_heads", *(None for _ in shape)))

        shape, axes = (D, heads, rows), ("embed", "recurrent_heads", None)
        if crosses_heads(cfg, storage.type_of(f"{name}.out"), index):
            shape, axes = (D, 1, heads * rows), ("embed", "uncut", None)
        layer = {"mix_in": declare("mix_in", (heads, recurrent.projected_width, D), by_head)}
        layer |= {"out": declare("out", shape, axes), "conv": numbers(recurrent.input_width, recurrent.taps)}
        if recurrent.kind == "delta":
            layer["mix_gate"] = declare("mix_gate", (heads, rows, D), by_head)
            layer["mix_rates"] = ArrayInfo((heads, 2 * recurrent.group, D), jnp.float32, by_head)
            layer |= {"decay": numbers(recurrent.group), "decay_bias": numbers(recurrent.group)}
            layer["mix_norm"] = ArrayInfo((recurrent.value_dim,), jnp.float32, (None,))
        return layer | declare_orders(name, out=heads * rows)

    def declare_mlp(index: int) -> Params:
        name, experts = f"layers.{index}", cfg.layer_experts(index)
        if experts is None:
            width = cfg.layer_mlp_dim(index)
            layer = _declare_swiglu(storage, name, "", (), width, D)
            return layer | declare_orders(name, gate_up=D, down=width) | declare_own_inputs(name)
        router = ArrayInfo((experts.count, D), jnp.float32, (None, "embed"))
        layer = {"router": router} | _declare_swiglu(storage, name, "", (experts.count,), experts.dim, D)
        if experts.biases:
            # Their columns are those of the weights, padding included.
            columns = _swiglu_multiple(storage.type_of(f"{name}.down"))
            layer["router_bias"] = ArrayInfo((experts.count,), jnp.float32, (None,))
            shape, axes = (experts.count, 2, experts.dim), ("experts", None, "expert_mlp")
            layer["gate_up_bias"] = ArrayInfo(shape, jnp.float32, axes, multiple=columns)
            layer["down_bias"] = ArrayInfo((experts.count, D), jnp.float32, ("experts", "embed"))
        if experts.beside:
            layer["router_scale"] = ArrayInfo((experts.count,), jnp.float32, (None,))
            layer |= dict.fromkeys(("shared_post_norm", "experts_norm", "experts_post_norm"), norm)
        elif experts.shared_dim:
            layer["shared_gate"] = ArrayInfo((1, D), jnp.float32, (None, "embed"))
        if experts.shared_dim:
            layer |= _declare_swiglu(storage, name, "shared_", (), experts.shared_dim, D)
        return layer | declare_own_inputs(name)

    def declare_own_inputs(name: str) -> Params:
        """What a layer makes of its own inputs, and the number that its result is multiplied by."""
        if kinds is None:
            return {}
        layer: Params = {"scale": ArrayInfo((1,), jnp.float32, (None,))}
        for leaf, shape in {"input_gate": (kinds.inputs_dim, D), "input_out": (D, kinds.inputs_dim)}.items():
            if kinds.inputs_dim:
                layer[leaf] = _declare_weight(f"{name}.{leaf}", storage.type_of(f"{name}.{leaf}"), shape, (None, None))
        return layer | ({"input_norm": norm} if kinds.inputs_dim else {})

    def declare_input_norms(index: int, block: str) -> Params:
        if features is not None and index == 0 and block == "attn":
            # Of the token and of the state; EAGLE-1 has neither.
            norms = {"eagle3": ("attn_norm", "hidden_norm"), "eagle1": ()}
            return dict.fromkeys(norms.get(features.kind, ("attn_norm",)), norm)
        return {f"{block}_norm": norm} if cfg.norms != "post" else {}

    def declare_layer(index: int) -> Params:
        layer: Params = {}
        blocks = {"attn": declare_recurrent if cfg.is_recurrent(index) else declare_attention, "mlp": declare_mlp}
        for (block, declare_block), runs in zip(blocks.items(), cfg.layer_units(index), strict=True):
            if runs:
                layer |= declare_input_norms(index, block)
                layer |= declare_block(index)
                layer |= {f"{block}_post_norm": norm} if cfg.norms != "pre" else {}
                if features is not None and (taps := features.conv_taps):
                    leaf, rows = f"{block}_conv_kernel", 2 * taps * (D // features.conv_group)
                    kind = storage.type_of(f"layers.{index}.{leaf}")
                    layer[f"{block}_conv"] = ArrayInfo((2, taps, D), jnp.float32, (None, None, None))
                    layer[leaf] = _declare_weight(f"layers.{index}.{leaf}", kind, (rows, D), (None, "embed"))
        return layer

    params: Params = {"final_norm": norm, "layers": [declare_layer(index) for index in range(cfg.num_layers)]}
    if features is not None:
        params |= _declare_fusion(cfg, features, storage)
        if features.kind == "eagle1":
            del params["final_norm"]
    if not cfg.shares_embedding:
        params["embed"] = _declare_weight("embed", storage.type_of("embed"), (V, D), ("vocab", "embed"))
    if kinds is not None and kinds.inputs_dim:
        rows, P = cfg.num_layers * kinds.inputs_dim, kinds.inputs_dim
        for leaf, shape, axis in (("inputs_embed", (V, rows), "vocab"), ("inputs_proj", (rows, D), None)):
            params[leaf] = _declare_weight(leaf, storage.type_of(leaf), shape, (axis, None))
        params["inputs_norm"] = ArrayInfo((P,), jnp.float32, (None,))
    if cfg.has_own_head or (features is None and not cfg.shares_embedding and not cfg.tied):
        rows, axis = (len(cfg.head_ids), "head_rows") if cfg.head_ids else (V, "vocab")
        params["head"] = _declare_weight("head", storage.type_of("head"), (rows, D), (axis, "embed"))
    return params


def _declare_fusion(cfg: ModelConfig, features: FeatureConfig, storage: Storage) -> Params:
    """Weights that make the target's hidden states, or a token and a state, as wide as the draft."""
    D, inputs = cfg.embed_dim, features.fusion_inputs(cfg.embed_dim)
    made: Params = {"fc": _declare_weight("fc", storage.type_of("fc"), (D, inputs), (None, "embed"))}
    if features.kind in ("added", "assistant"):
        own = features.own_dim(D)
        made["fc_own"] = _declare_weight("fc_own", storage.type_of("fc_own"), (own, D), (None, "embed"))
    norms = {"block": ("hidden_norm",), "mtp": ("token_norm", "hidden_norm")}.get(features.kind, ())
    made |= dict.fromkeys(norms, ArrayInfo((D,), jnp.float32, (None,)))
    if features.block and features.kind != "block":
        made["mask_hidden"] = ArrayInfo((features.states_dim,), jnp.float32, (None,))
    if rank := features.markov_rank:
        rows, axis = (len(cfg.head_ids), "head_rows") if cfg.head_ids else (cfg.vocab_size, "vocab")
        kinds = {leaf: storage.type_of(leaf) for leaf in ("markov_in", "markov_out")}
        made["markov_in"] = _declare_weight("markov_in", kinds["markov_in"], (cfg.vocab_size, rank), ("vocab", None))
        made["markov_out"] = _declare_weight("markov_out", kinds["markov_out"], (rows, rank), (axis, None))
    if features.markov_gated:
        made["markov_gate"] = ArrayInfo((rank, D + rank), jnp.float32, (None, None))
        made["markov_gate_bias"] = ArrayInfo((rank,), jnp.float32, (None,))
    if rank := features.selector_rank:
        for leaf in ("selector_in", "selector_out"):
            made[leaf] = _declare_weight(leaf, storage.type_of(leaf), (cfg.vocab_size, rank), ("vocab", None))
        made["selector_hidden"] = ArrayInfo((rank, D), jnp.float32, (None, "embed"))
    if features.fc_bias:
        made["fc_bias"] = ArrayInfo((D,), jnp.float32, (None,))
    if features.fc_norm != "none":
        shape = (inputs,) if features.fc_norm == "whole" else (features.num_states, features.target_dim)
        made["fc_norm"] = ArrayInfo(shape, jnp.float32, (None,) * len(shape))
    return made


def declare_shared(cfg: ModelConfig, storage: Storage, target: Params) -> Params:
    """Declare what a draft takes from its target: `embed` with `shares_embedding`, and `head` where it needs one.

    A restricted head (`head_ids`) is a copy of the target's rows, `[len(head_ids), D]`, in the draft's own type, or in
    q8_0 where that is a K-quant, to which nothing is rounded. `cfg` and `storage` are the draft's, `target` is the
    target's declaration.
    """
    if cfg.features is not None and (cfg.has_own_head or not cfg.head_ids):
        shared = {"embed": target["embed"]} if cfg.shares_embedding else {}
        return shared | ({} if cfg.has_own_head else {"head": target.get("head", target["embed"])})
    if cfg.head_ids:
        shape, axes = (len(cfg.head_ids), cfg.embed_dim), ("head_rows", "embed")
        kind = "q8_0" if storage.default in K_QUANTS else storage.default
        return {"embed": target["embed"], "head": _declare_weight("head", kind, shape, axes)}
    return {leaf: target[leaf] for leaf in ("embed", "head") if leaf in target}


def declare_leaves(cfg: ModelConfig, storage: Storage | Any) -> dict[str, ArrayInfo]:
    """Declared arrays by leaf name, in the order of the parameters' leaves; see `declare_params`."""
    leaves, _ = jax.tree.flatten_with_path(declare_params(cfg, storage), is_leaf=is_info)
    return {leaf_name(path): info for path, info in leaves}


def is_info(leaf: Any) -> bool:
    """Tree predicate: stop at declarations."""
    return isinstance(leaf, ArrayInfo)


def leaf_name(path: tuple[Any, ...]) -> str:
    """Dotted name of a leaf, such as `layers.3.qkv`, as in native checkpoints. Blocks have the name of their weight."""
    if isinstance(path[-1], jax.tree_util.GetAttrKey):  # only `Blocks.data` is an attribute
        path = path[:-1]
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _declare_swiglu(storage: Storage, layer: str, prefix: str, outer: tuple[int, ...], F: int, D: int) -> Params:
    """Gate, up and down projections of an MLP of F columns, or of `outer` experts of F columns each."""
    gate_up, down = f"{layer}.{prefix}gate_up", f"{layer}.{prefix}down"
    down_type = storage.type_of(down)
    multiple = _swiglu_multiple(down_type)
    experts, columns = ("experts",) * len(outer), "expert_mlp" if outer else "mlp"
    axes = (*experts, None, columns, "embed")
    return {
        f"{prefix}gate_up": _declare_weight(gate_up, storage.type_of(gate_up), (*outer, 2, F, D), axes, multiple),
        f"{prefix}down": _declare_weight(down, down_type, (*outer, D, F), (*experts, "embed", columns)),
    }


def _swiglu_multiple(down_type: LeafType) -> int:
    """Block size that a device's MLP columns must be a multiple of: 1, or that of the down projection's blocks."""
    return FORMATS[down_type].values if down_type in FORMATS else 1


def _declare_weight(
    leaf: str, leaf_type: LeafType, shape: tuple[int, ...], axes: tuple[str | None, ...], multiple: int = 1,
    group: int = 0,
) -> Any:  # fmt: skip
    """A weight of one type: the array of `shape`, or the blocks that its last dimension is cut into."""
    assert isinstance(leaf_type, str)  # a `Storage` has three types for qkv only
    block_format = FORMATS.get(leaf_type)
    if block_format is None:
        return ArrayInfo(shape, jnp.dtype(leaf_type), axes, multiple=multiple, group=group)
    *outer, inputs = shape
    if inputs % block_format.values:
        whole = f"a whole number of {leaf_type} blocks of {block_format.values}"
        raise ValueError(f"{leaf}: rows of {inputs} values are not {whole}")
    shape = (*outer, inputs // block_format.values, block_format.nbytes)
    info = ArrayInfo(shape, jnp.dtype(jnp.uint8), (*axes, None), format=leaf_type, multiple=multiple, group=group)
    return Blocks(info, leaf_type)  # pyright: ignore[reportArgumentType]
