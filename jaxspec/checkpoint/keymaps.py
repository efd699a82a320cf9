"""From Hugging Face names to jaxspec's parameters: which tensors make each leaf, and how.

Letters are those of `ModelConfig`. The leaves are those of `declare_params`, unpadded. Blocks move as numbers do, in
whole rows: `[out, in]` is then `[out, in / values, nbytes]`.

This file exceeds 400 lines because one place names the tensors of every leaf.
"""

import dataclasses
import functools
import itertools
import mmap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import jax.numpy as jnp
import numpy as np

from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.models.config import ModelConfig
from jaxspec.models.families import FAMILIES
from jaxspec.models.features import FeatureConfig
from jaxspec.models.params import ArrayInfo, declare_leaves
from jaxspec.models.quantization import PARTS, LeafType, Storage, collect_storage, leaf_inputs, weight_leaves
from jaxspec.models.recurrent import RecurrentConfig
from jaxspec.models.rope import rotary_order
from jaxspec.runtime.sharding import Part

Shape = tuple[int, ...]
Tensor = TypeVar("Tensor", bound="Located")
Assemble = Callable[[Sequence[np.ndarray]], np.ndarray]

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_MAX_LISTED = 8
# The norms of a layer: leaves, and the names of their tensors, which families may spell otherwise.
_NORMS = {
    "attn_norm": "input_layernorm", "attn_post_norm": "attention_post_norm",
    "mlp_norm": "post_attention_layernorm", "mlp_post_norm": "mlp_post_norm",
}  # fmt: skip


class TensorSource(Protocol):
    """An open Hugging Face folder or GGUF file, already checked, with tensors under Hugging Face names.

    Opening reads headers only. Tensors are laid out as Hugging Face lays them out: `[out, in]`, rotary halves.
    """

    path: Path
    config: ModelConfig
    eos_ids: tuple[int, ...]

    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def weight_type(self, name: str) -> str:
        """How one tensor can be kept without loss: one of `jaxspec.models.quantization.WEIGHT_TYPES`."""
        ...

    def nbytes(self, name: str) -> int:
        """Bytes that one tensor takes in its file."""
        ...

    def release_pages(self) -> None:
        """Give back the memory that holds what was read of the files; they can be read again."""
        ...

    def reading(self, read_bytes: Callable[[Path, int, int], np.ndarray]) -> "TensorSource":
        """The same tensors, read by a function of path, offset and size that gives writable uint8 arrays."""
        ...

    def read(self, name: str, keep_blocks: bool = False, part: tuple[int, int, int] | None = None) -> np.ndarray:
        """One whole tensor in its own dtype, blocks dequantised to float32; or the values of one dimension in `part`.

        With `keep_blocks`, blocks of the format that `weight_type` names are uint8 `[out, in / values, nbytes]`, their
        inputs in the order of `input_order`.
        """
        ...

    def input_order(self, name: str) -> np.ndarray | None:
        """int64 `[in]`: which input each column of a tensor's blocks takes; None where they are in order."""
        ...


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to make one leaf: `assemble` takes the tensors that `sources` names, in that order and of those shapes.

    The result is reshaped to the declared shape of the leaf, `info`. With `is_order`, the leaf is the order of the
    inputs of the first source.
    """

    sources: tuple[tuple[str, Shape], ...]
    assemble: Assemble
    info: ArrayInfo
    is_order: bool = False

    def read(self, source: TensorSource, named: str = "", part: Part | None = None) -> np.ndarray:
        """The leaf from an open checkpoint, rounded to nearest where its dtype is narrower; one leaf of memory.

        With `part`, which must not be empty, only that of its split axis; `named` is the leaf's name then.

        Raises:
          ConfigError: blocks of a format are asked for, and a tensor is not kept in it.
        """
        if self.is_order:
            order = source.input_order(self.sources[0][0])
            assert order is not None  # see `source_storage`
            return order.astype(np.int32)
        block_format = self.info.format
        for name, _ in self.sources:
            if block_format is not None and (found := source.weight_type(name)) != block_format:
                raise ConfigError(f"{source.path}: {name} is kept as {found}, it cannot be loaded as {block_format}")
        read = source.read if block_format is None else functools.partial(source.read, keep_blocks=True)
        declared = self.info.shape
        if part is None:
            arrays = [read(name) for name, _ in self.sources]
        else:
            if part.is_of_experts(self.info):
                each = len(self.sources) // declared[part.axis]
                arrays = [read(name) for name, _ in self.sources[part.start * each : part.stop * each]]
            else:
                arrays = [read(name, part=part.of_tensor(named, self.info, shape)) for name, shape in self.sources]
            declared = tuple(part.stop - part.start if i == part.axis else n for i, n in enumerate(declared))
        if len({array.dtype for array in arrays}) > 1:
            # Half formats have no common type of their own.
            arrays = [array.astype(np.float32, copy=False) for array in arrays]
        # Values beyond the range of a narrower type become infinite, as in every other framework.
        with np.errstate(over="ignore"):
            leaf = self.assemble(arrays).astype(self.info.dtype, copy=False).reshape(declared)
        # Read-only means a view of the mapped file: a parameter must not change, or fault, when the file does.
        return leaf if leaf.flags.writeable else leaf.copy()


def sinks_name(layer: int | str) -> str:
    """Hugging Face's name of a layer's attention sinks."""
    return f"model.layers.{layer}.self_attn.sinks"


def recipes(cfg: ModelConfig, storage: Storage | Any = jnp.float32) -> dict[str, Recipe]:
    """One recipe per leaf of `declare_params(cfg, storage)`, by leaf name such as `layers.3.qkv`."""
    D, V, kinds = cfg.embed_dim, cfg.vocab_size, cfg.kinds
    infos, family = declare_leaves(cfg, storage), FAMILIES[cfg.family]
    made: dict[str, Recipe] = {}

    def group_heads(arrays: Sequence[np.ndarray], H: int, order: np.ndarray | None, per_head: int = 1) -> np.ndarray:
        """q `[N*H, ...]`, k and v `[K*H, ...]` -> `[K, G+2, H, ...]`: each KV head's queries, key and value.

        The last array holds `per_head` rows of heads of H entries for each of the K heads, maybe some of the model's.
        The entries of each head are put in `order`, but for those of a third array.
        """
        heads = arrays[-1].shape[0] // (per_head * H)
        grouped = [a.reshape(heads, -1, H, *a.shape[1:]) for a in arrays]
        if order is not None:
            grouped[:2] = [a[:, :, order] for a in grouped[:2]]
        return np.concatenate(grouped, axis=1)

    def add(leaf: str, *sources: tuple[str, Shape], assemble: Assemble = lambda arrays: arrays[0]) -> None:
        made[leaf] = Recipe(sources, assemble, infos[leaf])
        if f"{leaf}_order" in infos:
            made[f"{leaf}_order"] = Recipe(sources, assemble, infos[f"{leaf}_order"], is_order=True)

    def add_swiglu(layer: int, leaf: str, parts: Sequence[str], width: int) -> None:
        """The MLP in one part, or the experts in several."""

        def tensors(*names: str) -> list[tuple[str, Shape]]:
            shapes = {"down_proj": (D, width)}
            return [(name_of(layer, f"{part}.{n}"), shapes.get(n, (width, D))) for part in parts for n in names]

        add(f"layers.{layer}.{leaf}gate_up", *tensors("gate_proj", "up_proj"), assemble=np.stack)
        # One tensor stays a view of the file.
        stack = {} if len(parts) == 1 else {"assemble": np.stack}
        add(f"layers.{layer}.{leaf}down", *tensors("down_proj"), **stack)

    def name_of(layer: int, part: str, kind: str = "weight") -> str:
        return f"model.layers.{layer}.{family.tensor_name(part)}.{kind}"

    beside: dict[str, tuple[str, Shape]] = {
        "embed": (EMBED, (V, D)), "final_norm": (f"{family.final_norm}.weight", (D,)), "head": (HEAD, (V, D)),
        "fc_bias": ("fc.bias", (D,)),
        "hidden_norm": ("hidden_norm.weight", (D,)), "token_norm": ("token_norm.weight", (D,)),
        "layers.0.hidden_norm": (name_of(0, "hidden_norm"), (D,)),
    }  # fmt: skip
    if cfg.head_ids:
        beside["head"] = (HEAD, (len(cfg.head_ids), D))
    if cfg.features is not None and cfg.features.block:
        beside |= _block_tensors(cfg, cfg.features)
    for name, source in beside.items():
        if name in infos:
            add(name, source)
    if cfg.features is not None:
        rows = leaf_inputs(cfg, "fc")
        add("fc", ("fc.weight", (D, rows)))
        if "fc_own" in infos:
            add("fc_own", ("fc_own.weight", (cfg.features.own_dim(D), D)))
        if cfg.features.fc_norm == "whole":
            add("fc_norm", ("input_norm.weight", (rows,)))
        elif cfg.features.fc_norm == "each":
            width = (cfg.features.target_dim,)
            add("fc_norm", *((f"fc_norm.{i}.weight", width) for i in range(cfg.features.num_states)), assemble=np.stack)

    def add_recurrent(layer: int, recurrent: RecurrentConfig) -> None:
        """The block of a layer in place of attention."""
        leaf, heads, width = f"layers.{layer}", recurrent.key_heads, recurrent.result_width

        def by_head(*parts: int) -> Assemble:
            """Rows of several kinds, one after the other, `parts` of each head -> those of each head together."""
            ends = np.cumsum([0, *(heads * rows for rows in parts)])

            def assemble(arrays: Sequence[np.ndarray]) -> np.ndarray:
                whole = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
                cuts = [whole[a:b].reshape(heads, -1, *whole.shape[1:]) for a, b in itertools.pairwise(ends)]
                return np.concatenate(cuts, axis=1)

            return assemble

        rows, channels = heads * recurrent.projected_width, heads * recurrent.input_width
        if recurrent.kind == "delta":
            part, count, values = "linear_attn", recurrent.value_heads, heads * width
            split = by_head(recurrent.key_dim, recurrent.key_dim, width)
            vector = {"assemble": lambda arrays: -np.exp(arrays[0].astype(np.float64))}
            if family.fuses_recurrent:
                both = (name_of(layer, f"{part}.in_proj_qkvz"), (rows + values, D))
                heads_of = lambda arrays: arrays[0].reshape(heads, -1, *arrays[0].shape[1:])  # noqa: E731
                ends = recurrent.projected_width
                add(f"{leaf}.mix_in", both, assemble=lambda arrays: heads_of(arrays)[:, :ends])
                add(f"{leaf}.mix_gate", both, assemble=lambda arrays: heads_of(arrays)[:, ends:])
                add(f"{leaf}.mix_rates", (name_of(layer, f"{part}.in_proj_ba"), (2 * count, D)))
            else:
                add(f"{leaf}.mix_in", (name_of(layer, f"{part}.in_proj_qkv"), (rows, D)), assemble=split)
                add(f"{leaf}.mix_gate", (name_of(layer, f"{part}.in_proj_z"), (values, D)))
                rates = [(name_of(layer, f"{part}.in_proj_{name}"), (count, D)) for name in "ba"]
                add(f"{leaf}.mix_rates", *rates, assemble=by_head(recurrent.group, recurrent.group))
            add(f"{leaf}.conv", (name_of(layer, f"{part}.conv1d"), (channels, 1, recurrent.taps)), assemble=split)
            add(f"{leaf}.decay", (f"model.layers.{layer}.{part}.A_log", (count,)), **vector)
            add(f"{leaf}.decay_bias", (f"model.layers.{layer}.{part}.dt_bias", (count,)))
            add(f"{leaf}.mix_norm", (name_of(layer, f"{part}.norm"), (recurrent.value_dim,)))
            add(f"{leaf}.out", (name_of(layer, f"{part}.out_proj"), (D, values)))
            return
        add(f"{leaf}.mix_in", (name_of(layer, "conv.in_proj"), (rows, D)), assemble=by_head(*(width,) * 3))
        add(f"{leaf}.conv", (name_of(layer, "conv.conv"), (channels, 1, recurrent.taps)))
        add(f"{leaf}.out", (name_of(layer, "conv.out_proj"), (D, heads * width)))

    def add_attention(index: int) -> None:
        """The attention of a layer."""
        leaf, inputs, (K, H) = f"layers.{index}", cfg.attention_inputs(index), cfg.layer_heads(index)
        G = cfg.num_heads // K
        order = rotary_order(cfg.layer_rope(index), H, family.rotary_neighbours)
        group: Callable[..., np.ndarray] = functools.partial(group_heads, H=H, order=order)
        heads = {"q_proj": K * G * H, "k_proj": K * H, "v_proj": K * H}
        qkv = [(name_of(index, f"self_attn.{name}"), (rows, inputs)) for name, rows in heads.items()]
        if kinds is not None and kinds.keys_are_values and cfg.window(index) is None:
            qkv[2] = qkv[1]
        if cfg.attention_gate:  # per head a query, then a gate
            both, ungated = (qkv[0][0], (2 * K * G * H, inputs)), group
            qkv[0] = both
            halves = lambda array: array.reshape(K * G, 2, H, *array.shape[1:]).swapaxes(0, 1)  # noqa: E731
            take = lambda array, half: halves(array)[half].reshape(K * G * H, *array.shape[1:])  # noqa: E731
            add(f"{leaf}.attn_gate", both, assemble=lambda arrays: take(arrays[0], 1))

            def group_queries(arrays: Sequence[np.ndarray], **how: Any) -> np.ndarray:
                queries = len(arrays) == 3 or how.get("per_head", 1) == G and arrays[0].shape[0] == 2 * K * G * H
                return ungated([take(arrays[0], 0), *arrays[1:]] if queries else arrays, **how)

            group = group_queries
        if cfg.shares_keys(index):
            add(f"{leaf}.qkv", qkv[0], assemble=functools.partial(group, per_head=G))
        elif f"{leaf}.qkv" in infos:
            add(f"{leaf}.qkv", *qkv, assemble=group)
        else:
            for part, tensor in zip(PARTS, qkv, strict=True):
                per_head, turns = G if part == PARTS[0] else 1, order if part != PARTS[2] else None
                add(f"{leaf}.qkv.{part}", tensor, assemble=functools.partial(group, order=turns, per_head=per_head))
        add(f"{leaf}.out", (name_of(index, "self_attn.o_proj"), (D, K * G * H)))
        if cfg.out_bias:
            add(f"{leaf}.out_bias", (name_of(index, "self_attn.o_proj", "bias"), (D,)))
        if cfg.attention_sinks:
            add(f"{leaf}.sinks", (sinks_name(index), (K * G,)))
        if cfg.qkv_bias:
            biases = [(name_of(index, f"self_attn.{name}", "bias"), (rows,)) for name, rows in heads.items()]
            add(f"{leaf}.qkv_bias", *biases, assemble=group)
        if cfg.qk_norm:
            for name, rows in (("q_norm", K * G), ("k_norm", K))[: 1 if cfg.shares_keys(index) else 2]:
                width = rows * H if cfg.wide_qk_norm else H
                turn = {} if order is None else {"assemble": lambda arrays, o=order: arrays[0].reshape(-1, H)[:, o]}
                add(f"{leaf}.{name}", (name_of(index, f"self_attn.{name}"), (width,)), **turn)

    def add_own_inputs(index: int, P: int) -> None:
        """What a layer makes of its own inputs, and its scale."""
        add(f"layers.{index}.scale", (f"model.layers.{index}.layer_scalar", (1,)))
        if P:
            add(f"layers.{index}.input_gate", (name_of(index, "per_layer_input_gate"), (P, D)))
            add(f"layers.{index}.input_out", (name_of(index, "per_layer_projection"), (D, P)))
            add(f"layers.{index}.input_norm", (name_of(index, "post_per_layer_input_norm"), (D,)))

    def add_beside(index: int, count: int) -> None:
        """What experts beside an MLP have more; the router takes the factors of its inputs in."""
        layer, root = f"model.layers.{index}", np.float32(D**-0.5)
        add(f"layers.{index}.router", (f"{layer}.router.proj.weight", (count, D)), (f"{layer}.router.scale", (D,)),
            assemble=lambda arrays: arrays[0].astype(np.float32) * (arrays[1].astype(np.float32) * root))  # fmt: skip
        add(f"layers.{index}.router_scale", (f"{layer}.router.per_expert_scale", (count,)))
        norms = {"shared_post": "post_feedforward_layernorm_1", "experts": "pre_feedforward_layernorm_2"}
        for leaf, name in (norms | {"experts_post": "post_feedforward_layernorm_2"}).items():
            add(f"layers.{index}.{leaf}_norm", (name_of(index, name), (D,)))

    if kinds is not None and kinds.inputs_dim:
        rows = cfg.num_layers * kinds.inputs_dim
        add("inputs_embed", ("model.embed_tokens_per_layer.weight", (V, rows)))
        add("inputs_proj", ("model.per_layer_model_projection.weight", (rows, D)))
        add("inputs_norm", ("model.per_layer_projection_norm.weight", (kinds.inputs_dim,)))
    for index in range(cfg.num_layers):
        if kinds is not None:
            add_own_inputs(index, kinds.inputs_dim)
        leaf, experts = f"layers.{index}", cfg.layer_experts(index)
        for norm, part in _NORMS.items():
            if f"{leaf}.{norm}" in infos:
                add(f"{leaf}.{norm}", (name_of(index, part), (D,)))
        if cfg.recurrent is not None and cfg.is_recurrent(index):
            add_recurrent(index, cfg.recurrent)
        else:
            add_attention(index)
        if experts is None:
            add_swiglu(index, "", ("mlp",), cfg.layer_mlp_dim(index))
        else:
            if experts.beside:
                add_beside(index, experts.count)
            else:
                add(f"{leaf}.router", (name_of(index, "mlp.gate"), (experts.count, D)))
            add_swiglu(index, "", [f"mlp.experts.{i}" for i in range(experts.count)], experts.dim)
            if experts.biases:
                E, F = experts.count, experts.dim
                projections = [(name_of(index, f"mlp.experts.{n}_proj", "bias"), (E, F)) for n in ("gate", "up")]
                add(f"{leaf}.router_bias", (name_of(index, "mlp.gate", "bias"), (E,)))
                add(f"{leaf}.gate_up_bias", *projections, assemble=functools.partial(np.stack, axis=1))
                add(f"{leaf}.down_bias", (name_of(index, "mlp.experts.down_proj", "bias"), (E, D)))
            if experts.shared_dim:
                if not experts.beside:
                    add(f"{leaf}.shared_gate", (name_of(index, "mlp.shared_expert_gate"), (1, D)))
                add_swiglu(index, "shared_", ("mlp" if experts.beside else "mlp.shared_expert",), experts.shared_dim)
    # In the order of the declaration.
    return {name: made[name] for name in infos}


def _block_tensors(cfg: ModelConfig, features: FeatureConfig) -> dict[str, tuple[str, Shape]]:
    """Tensors that drafts have which fill a block in one pass, by leaf; as far as a kind of them has it."""
    D, V, rank, rows = cfg.embed_dim, cfg.vocab_size, features.markov_rank, len(cfg.head_ids) or cfg.vocab_size
    found = {
        "mask_hidden": ("mask_hidden", (1, 1, features.states_dim)),
        "markov_in": ("markov_head.markov_w1.weight", (V, rank)),
        "markov_out": ("markov_head.markov_w2.weight", (rows, rank)),
        "markov_gate": ("markov_head.gate_proj.weight", (rank, D + rank)),
        "markov_gate_bias": ("markov_head.gate_proj.bias", (rank,)),
        "selector_in": ("candidate_selector.predecessor_codebook", (V, features.selector_rank)),
        "selector_out": ("candidate_selector.successor_codebook", (V, features.selector_rank)),
        "selector_hidden": ("candidate_selector.hidden_projection.weight", (features.selector_rank, D)),
    }
    for index in range(cfg.num_layers if features.conv_taps else 0):
        shapes = (2, features.conv_taps, D), (2 * features.conv_taps * (D // features.conv_group), D)
        for block, part in (("attn", "attention_conv"), ("mlp", "mlp_conv")):
            tensors = (f"model.layers.{index}.{part}.{name}" for name in ("base_kernel", "kernel_projection.weight"))
            leaves = (f"layers.{index}.{block}_{name}" for name in ("conv", "conv_kernel"))
            found |= dict(zip(leaves, zip(tensors, shapes, strict=True), strict=True))
    return found


def release_pages(file: np.memmap) -> None:
    """Give back the memory of a mapped file. What it holds is read from disk again when it is needed."""
    # Else a model is in memory twice while it is packed: once as pages of its file.
    if isinstance(file.base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        file.base.madvise(mmap.MADV_DONTNEED)


def source_storage(source: TensorSource) -> Storage:
    """How every weight of a checkpoint can be kept without loss, each in the type of its tensors.

    A query, key and value of different types are kept apart; gate and up projections that differ meet in float32. So
    do weights that share their inputs and have them in different orders, and an embedding or head with an order.
    """
    types: dict[str, LeafType] = {}
    ordered: set[str] = set()
    made = recipes(source.config)
    for leaf in weight_leaves(source.config):
        names = [name for name, _ in made[leaf].sources]
        kinds = tuple(source.weight_type(name) for name in names)
        alike = "float32" if len(set(kinds)) > 1 else kinds[0]
        types[leaf] = kinds if len(set(kinds)) > 1 and leaf.endswith(".qkv") else alike
        orders = [source.input_order(name) for name in names]
        if any(order is not None for order in orders):
            first = orders[0]
            same = first is not None and all(order is not None and np.array_equal(order, first) for order in orders)
            if same and types[leaf] == alike and _may_have_order(source.config, leaf):
                ordered.add(leaf)
            else:
                types[leaf] = "float32"
    return collect_storage(types, ordered)


def _may_have_order(cfg: ModelConfig, leaf: str) -> bool:
    """Whether the model can take a weight's inputs in another order: in attention and in an MLP without experts."""
    match leaf.split("."):
        case ["layers", _, "qkv" | "out"]:
            return True
        case ["layers", index, "gate_up" | "down"]:
            return cfg.layer_experts(int(index)) is None
    return False


class Located(Protocol):
    """A tensor's place in a file: its shape, slowest dimension first, and its bytes."""

    @property
    def shape(self) -> Shape: ...
    @property
    def offset(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


def split_fused(
    tensors: dict[str, Tensor], cfg: ModelConfig, cut: Callable[[Tensor, Shape, int, int], Tensor]
) -> dict[str, Tensor]:
    """The tensors of a file, with those that hold several of the family's cut into them.

    A tensor is left whole, for `check_accounted` to list, where its leading dimension is not that of its parts, or
    another one holds a part of it.

    Args:
      tensors: by Hugging Face name.
      cfg: geometry.
      cut: makes a part from a tensor, the part's shape, and the part's offset and size in bytes.
    """
    family, split = FAMILIES[cfg.family], {}
    fused = {family.tensor_name(whole): parts for whole, parts in family.fused_tensors(cfg).items()}
    for name, tensor in tensors.items():
        prefix, index, part, kind = _layer_part(name)
        pieces = fused.get(part, ()) if kind == "weight" else ()
        made = [f"{prefix}.{index}.{family.tensor_name(piece)}.{kind}" for piece, _ in pieces]
        count, whole = sum(rows for _, rows in pieces), tensor.shape
        if len(whole) == 3 and count == 2 * whole[0] and whole[1] % 2 == 0:
            # Gate and up projection of an expert, one after the other.
            whole = (count, whole[1] // 2, whole[2])
        if not pieces or not whole or whole[0] != count or any(piece in split or piece in tensors for piece in made):
            split[name] = tensor
            continue
        offset, each = tensor.offset, tensor.nbytes // count
        for piece, (_, rows) in zip(made, pieces, strict=True):
            # One of several matrices is a matrix.
            shape = whole[1:] if len(whole) == 3 else (rows, *whole[1:])
            split[piece] = cut(tensor, shape, offset, rows * each)
            offset += rows * each
    return split


def _layer_part(name: str) -> tuple[str, str, str, str]:
    """`model.layers`, N, the part and the kind of a layer's tensor; empty strings for any other."""
    pieces = name.split(".")
    if len(pieces) < 5 or pieces[:2] != ["model", "layers"]:
        return "", "", "", ""
    return "model.layers", pieces[2], ".".join(pieces[3:-1]), pieces[-1]


def check_accounted(source: TensorSource) -> None:
    """Check that the tensors of a checkpoint are those of the model that its config describes.

    Raises:
      CheckpointError: some are missing, unexpected or of another shape; all of them are in the one message.
    """
    cfg, found = source.config, source.shapes()
    # Before anything as long as the config claims is built.
    if cfg.num_layers > len(found):
        held = f"the checkpoint holds only {len(found)} tensors"
        raise CheckpointError(f"{source.path}: the config asks for {cfg.num_layers} layers, but {held}")

    routed = sum(cfg.layer_experts(index) is not None for index in range(cfg.num_layers))
    if cfg.experts is not None and routed * cfg.experts.count > len(found):
        held = f"the checkpoint holds only {len(found)} tensors"
        raise CheckpointError(f"{source.path}: the config asks for {cfg.experts.count} experts a layer, but {held}")

    def is_harmless(name: str, shape: Shape) -> bool:
        """Whether a tensor adds nothing to the config: saved rotary frequencies, and the head of a tied model."""
        tied_head = name == HEAD and cfg.tied and shape == (cfg.vocab_size, cfg.embed_dim)
        _, layer, part, _ = _layer_part(name)
        keys = part in ("self_attn.k_proj", "self_attn.v_proj", "self_attn.k_norm")
        if keys and layer.isdecimal() and int(layer) < cfg.num_layers and cfg.shares_keys(int(layer)):
            return True  # of a layer that takes those of an earlier one
        return tied_head or name.endswith(".rotary_emb.inv_freq")

    expected = {name: shape for recipe in recipes(cfg).values() for name, shape in recipe.sources}
    differ = (f"{n} is {list(found[n])}, not {list(s)}" for n, s in expected.items() if n in found and found[n] != s)
    problems = [
        _list_some("missing", (name for name in expected if name not in found)),
        _list_some("unexpected", (n for n, s in found.items() if n not in expected and not is_harmless(n, s))),
        _list_some("of the wrong shape", differ),
    ]
    if any(problems):
        listed = "; ".join(filter(None, problems))
        raise CheckpointError(f"{source.path}: tensors do not match the {cfg.family} config: {listed}")


def _list_some(what: str, names: Iterable[str]) -> str:
    """`3 missing (a, b, c)`, with at most a few of them spelled out; empty where there are none."""
    if not (items := list(names)):
        return ""
    more = f" and {len(items) - _MAX_LISTED} more" if len(items) > _MAX_LISTED else ""
    return f"{len(items)} {what} ({', '.join(items[:_MAX_LISTED])}{more})"
