"""The ways in which families of models differ."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from jaxspec.models.families.rope_settings import PARTIAL, find_rope, read_settings
from jaxspec.models.families.values import ConfigValues, all_but_every

if TYPE_CHECKING:
    from jaxspec.models.config import ModelConfig

_SLIDING, _FULL = "sliding_attention", "full_attention"
# What llama.cpp assumes of files that do not say which layers have a window: every fourth one has none.
_GGUF_PATTERN = 4


class Family:
    """A family of models: how its files describe a model, beyond what all families spell alike.

    A family is a subclass in a module of its own, with an instance called `FAMILY`. The defaults fit a family with one
    kind of attention layer and without biases.
    """

    # `model_type` in `config.json`, as transformers goes by it, and `ModelConfig.family`.
    name: ClassVar[str]
    # `general.architecture` of its GGUF files; None where GGUF files are not supported.
    gguf_architecture: ClassVar[str | None] = None
    # Whether its GGUF files hold the two halves of a rotary pair in neighbouring rows of query and key.
    gguf_interleaves: ClassVar[bool] = False
    # Fields of `ModelConfig` that all of its models share.
    features: ClassVar[Mapping[str, Any]] = {}
    # Added to the norm scales of a Hugging Face folder (Gemma's are stored less one).
    norm_offset: ClassVar[float] = 0.0
    # Whether an absent `num_key_value_heads` means as many as there are heads; else the key is required.
    optional_kv_heads: ClassVar[bool] = False
    # What an absent `head_dim` means; None is the width divided by the number of heads.
    default_head_dim: ClassVar[int | None] = None
    # Whether query, key and value have biases where `attention_bias` is absent; None where all models agree (see
    # `features`). GGUF files say it by their tensors.
    default_bias: ClassVar[bool | None] = None
    # Whether some layers may have a sliding window while others have none.
    layers_differ: ClassVar[bool] = False
    # Every how many layers one sees everything, in families whose other layers have a window of `default_window`; or 0.
    pattern: ClassVar[int] = 0
    default_window: ClassVar[int] = 4096
    # What `layer_types` calls the layers with a recurrence in place of attention; None for families without any.
    recurrent_type: ClassVar[str | None] = None
    # The name of the final norm.
    final_norm: ClassVar[str] = "model.norm"
    # Whether the MLP's gate and up projections are one tensor in a Hugging Face folder.
    fuses_gate_up: ClassVar[bool] = False
    # The part of each head that turns where `partial_rotary_factor` is absent; None where all of it must.
    default_partial: ClassVar[float | None] = None
    # Keys of the rotary settings that change nothing for text.
    unused_rope_keys: ClassVar[tuple[str, ...]] = ()
    # Whether files hold the two halves of a rotary pair in neighbouring rows of query and key, in every format.
    rotary_neighbours: ClassVar[bool] = False
    # Whether published folders bring code (`auto_map`) that has become transformers' own; it is not run.
    has_published_code: ClassVar[bool] = False
    # Whether a Hugging Face folder has the experts of a layer together (`jaxspec.checkpoint.experts_together`).
    experts_together: ClassVar[bool] = False
    # Whether it has them together as `[E, 2F, D]`, gates first, and `[E, D, F]`.
    experts_by_rows: ClassVar[bool] = False
    # Whether the projections of recurrent layers are two tensors, with the rows of a key head together.
    fuses_recurrent: ClassVar[bool] = False
    # Whether its Hugging Face folders may hold layers for multi-token prediction (`jaxspec.checkpoint.mtp`).
    has_mtp: ClassVar[bool] = False
    # Whether the band of yarn scaling of its GGUF files, which do not say it, ends at whole pairs.
    yarn_truncates: ClassVar[bool] = True
    # What transformers' class of the family assumes, for drafts whose files say only what differs; empty where no draft
    # has layers of this family.
    class_defaults: ClassVar[Mapping[str, Any]] = {}
    # What absent keys of `config.json` mean.
    default_eps: ClassVar[float] = 1e-6
    default_theta: ClassVar[float] = 10000.0
    default_tied: ClassVar[bool] = False
    # Keys of the MLP's activation in `config.json`, and the names that mean the one in `features`.
    activation_keys: ClassVar[tuple[str, ...]] = ("hidden_act",)
    activations: ClassVar[tuple[str, ...]] = ("silu", "swish")
    # Names of a layer's tensors in a Hugging Face folder, less `model.layers.N.` and `.weight`, where they are not
    # those of Llama (`mlp.down_proj`) or of a mixture of experts in Qwen's spelling (`mlp.experts.N.down_proj`).
    # The norms of results, which Llama has not, are `attention_post_norm` and `mlp_post_norm`.
    tensor_names: ClassVar[Mapping[str, str]] = {}
    # Names of a layer's tensors in a GGUF file, less `blk.N.` and `.weight`, where they mean others than in Llama's.
    gguf_names: ClassVar[Mapping[str, str]] = {}

    # Hyperparameters of a GGUF file that may be lists of unequal numbers, which `read_gguf` reads by layer.
    gguf_lists: ClassVar[tuple[str, ...]] = ()

    def read_config(self, values: ConfigValues, num_layers: int) -> dict[str, Any]:
        """Fields of `ModelConfig` that `config.json` spells in the family's own way.

        Raises:
          CheckpointError, ConfigError: a value is missing or of the wrong type, or asks for what is not supported.
        """
        embed_dim, num_heads = values.integer("hidden_size"), values.integer("num_attention_heads")
        for key in self.activation_keys:
            if values.get(key, self.activations[0]) not in self.activations:
                values.refuse(key, f"only {self.activations[0]} is supported")
        biases = values.flag("attention_bias", default=bool(self.default_bias))
        if biases and self.default_bias is None and not self.features.get("qkv_bias"):
            values.refuse("attention_bias", f"attention biases are not supported for models of type {self.name}")
        same_heads = self.optional_kv_heads or "num_key_value_heads" in values
        width = None if embed_dim % num_heads else embed_dim // num_heads
        if "head_dim" not in values:
            width = self.default_head_dim or width
        if width is None and values.get("head_dim") is None:
            values.refuse("head_dim", f"hidden_size {embed_dim} is not a multiple of num_attention_heads {num_heads}")
        window, layers = self._read_layers(values, num_layers)
        return {
            **self.features,
            **({} if self.default_bias is None else {"qkv_bias": biases}),
            "num_kv_heads": values.integer("num_key_value_heads", default=num_heads if same_heads else None),
            "head_dim": values.integer("head_dim", default=width),
            "sliding_window": window,
            "sliding_layers": layers,
        }

    def read_mlp_dim(self, values: ConfigValues) -> int:
        """F, which some families compute."""
        return values.integer("intermediate_size")

    def read_rope(self, values: ConfigValues, max_context: int) -> dict[str, Any]:
        """The rotary embedding in `config.json`, as fields of `ModelConfig`."""
        name, rope = find_rope(values)
        rope = {key: value for key, value in rope.items() if key not in self.unused_rope_keys}
        theta = values.number("rope_theta", default=self.default_theta)
        settings = read_settings(values, name, rope, max_context, theta, whole=self.default_partial is None)
        if self.default_partial is None:
            return {"rope": settings}
        partial = values.number(PARTIAL, default=self.default_partial)
        partial = ConfigValues(values.path, rope).number(PARTIAL, default=partial)
        return {"rope": dataclasses.replace(settings, partial=partial)}

    def tensor_name(self, part: str) -> str:
        """The name of a layer's tensor in a Hugging Face folder; see `tensor_names`."""
        return self.tensor_names.get(part, part)

    def fused_tensors(self, cfg: "ModelConfig") -> Mapping[str, Sequence[tuple[str, int]]]:
        """Tensors of a layer in a file that hold several: the parts in order, and the leading entries of each.

        Both are named as in `tensor_names`. GGUF files hold the experts of a layer together.
        """
        if cfg.experts is None:
            return self.fused_gate_up(cfg) if self.fuses_gate_up else {}
        names = ("gate_proj", "up_proj", "down_proj")
        count = cfg.experts.count
        fused = {f"mlp.experts.{n}": [(f"mlp.experts.{i}.{n}", 1) for i in range(count)] for n in names}
        both = [(f"mlp.experts.{i}.{n}", 1) for i in range(count) for n in names[:2]]
        return fused | {"mlp.experts.gate_up_proj": both}

    def fused_gate_up(self, cfg: "ModelConfig") -> Mapping[str, Sequence[tuple[str, int]]]:
        """`fused_tensors` of an MLP whose gate and up projections are one tensor."""
        return {"mlp.gate_up_proj": [("mlp.gate_proj", cfg.mlp_dim), ("mlp.up_proj", cfg.mlp_dim)]}

    def read_window(self, values: ConfigValues) -> tuple[int | None, int]:
        """Sliding window in `config.json`, or None, and the first layer that has it."""
        if values.get("sliding_window"):
            values.refuse("sliding_window", f"models of type {self.name} have no sliding windows in jaxspec")
        return None, 0

    def sliding_layers(self, values: ConfigValues, num_layers: int) -> tuple[int | None, tuple[bool, ...]]:
        """The sliding window, and the layers that have it where `config.json` lists none."""
        if self.pattern:
            for key in ("sliding_window_pattern", "_sliding_window_pattern"):
                if values.get(key, self.pattern) != self.pattern and values.get("layer_types") is None:
                    values.refuse(key, f"only {self.pattern} is supported for models of type {self.name}")
            window = values.optional_integer("sliding_window", default=self.default_window)
            return window, all_but_every(self.pattern if window else 1, num_layers)
        window, first = self.read_window(values)
        return window, tuple(window is not None and index >= first for index in range(num_layers))

    def read_gguf(self, values: ConfigValues, max_context: int) -> dict[str, Any]:
        """Fields of `ModelConfig` that the hyperparameters of a GGUF file spell in the family's own way."""
        if 0 < values.integer("attention.sliding_window", default=0, minimum=0) < max_context:
            values.refuse("attention.sliding_window", f"the file does not say which layers of {self.name} have it")
        return dict(self.features)

    def read_gguf_window(self, values: ConfigValues) -> dict[str, Any]:
        """The window in a GGUF file that says which layers have it; empty where it names none."""
        num_layers = values.integer("block_count")
        window = values.integer("attention.sliding_window", default=0, minimum=0)
        layers = values.layer_flags("attention.sliding_window_pattern", num_layers)
        layers = all_but_every(_GGUF_PATTERN, num_layers) if layers is None else layers
        if not window or not any(layers):
            return {}
        return {"sliding_window": window, "sliding_layers": () if all(layers) else layers}

    def _read_layers(self, values: ConfigValues, num_layers: int) -> tuple[int | None, tuple[bool, ...]]:
        """`ModelConfig.sliding_window` and `sliding_layers`; a list of layer types wins over a first layer."""
        window, layers = self.sliding_layers(values, num_layers)
        if (types := values.get("layer_types")) is not None:
            names = {_SLIDING, _FULL, "attention", self.recurrent_type}
            known = isinstance(types, list) and set(map(str, types)) <= names
            if not known or len(types) != num_layers:
                values.refuse("layer_types", f"a list of {num_layers} of {_SLIDING!r} and {_FULL!r} is supported")
            listed = tuple(kind == _SLIDING for kind in types)
            if window is None and any(listed):
                values.refuse("layer_types", "but the config sets no sliding window")
            if listed != layers and not self.layers_differ:
                values.refuse("layer_types", f"all layers of a {self.name} model are alike")
            layers = listed
        if not any(layers):
            return None, ()
        return window, () if all(layers) else layers
