"""Model geometry: what a network is, and nothing of meshes, dtypes or sampling.

As plain data, a geometry is what TOML presets and native checkpoints hold: the keys are the field names. No value is
converted, and an unknown key is an error.
"""

import dataclasses
import itertools
import math
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from jaxspec.errors import ConfigError, suggest
from jaxspec.models.experts import ExpertsConfig
from jaxspec.models.families import FAMILIES
from jaxspec.models.features import NORMED, FeatureConfig, keys_state
from jaxspec.models.layer_kinds import LayerKinds
from jaxspec.models.layer_set import LayerSet
from jaxspec.models.recurrent import RecurrentConfig
from jaxspec.models.rope import RopeConfig, rotary_width

# The mesh axis over which weights, heads, vocabulary and caches are split.
TENSOR_AXIS = "tensor"
_STILL = RopeConfig(partial=0.0)
# A context in steps of `rope.original_context`; it bounds what a hostile file makes a program hold.
_MOST_GROWTHS = 4096


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise ConfigError(problem)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Geometry of a decoder-only transformer with RMS norm, rotary positions and a SwiGLU MLP.

    Letters used across jaxspec: D `embed_dim`, F `mlp_dim`, N `num_heads`, K `num_kv_heads`,
    G = N // K query heads per KV head, H `head_dim`, V `vocab_size`, L `num_layers`.

    `sliding_window` counts the positions a query sees, itself included, in the layers that `sliding_layers` marks (all
    layers when it is empty). `embed_scale` multiplies the embedding of each token.

    A draft may be made for one target and share its vocabulary (`shares_embedding`): it has no embedding and no head of
    its own. Such a draft may score some tokens only: `head_ids`, ascending; empty for all of them.

    A feature draft says which ones in `features`. It may have a head of its own for some
    tokens only (`head_ids`), with its own embedding or the target's.

    A draft that consists of its target's layers may lack attention or MLP blocks: `units` are those it has.

    What families differ in beyond that:

    * `activation` of the MLP: "silu", or "gelu", its approximation by tanh.
    * `norms`: where the norms of a block are. "pre" before it, "post" on its result, or "both".
    * `qk_norm` of each query and key head; with `wide_qk_norm` one norm goes over all query heads, one over all keys.
    * `query_scale` multiplies queries, before the division by the root of the head width.
    * `attention_softcap` and `logit_softcap` bound scores and logits x to c tanh(x / c).
    * `local_rope` is the rotary embedding of layers with a sliding window, where it differs from `rope`.
    * `nope_layers` have no rotary embedding; empty for none.
    * `query_growth`: queries at position p are multiplied by 1 + query_growth log(1 + floor(p / C)), C being
      `rope.original_context`.
    * `residual_scale` multiplies the result of each block, `logit_scale` the logits.
    * `experts` replaces the MLP.
    * `attention_sinks`: each query head has a score beside those of its keys, which weighs no value.
    * `out_bias` of attention's output projection.
    * `recurrent` replaces attention in some layers.
    * `kinds`: layers without a sliding window have other widths, and the last ones share keys.
    * `attention_gate`: each query head's result is multiplied by the sigmoid of a projection of its own.
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
    activation: Literal["silu", "gelu"] = "silu"
    norms: Literal["pre", "post", "both"] = "pre"
    wide_qk_norm: bool = False
    query_scale: float = 1.0
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    local_rope: RopeConfig | None = None
    experts: ExpertsConfig | None = None
    attention_sinks: bool = False
    out_bias: bool = False
    features: FeatureConfig | None = None
    nope_layers: tuple[bool, ...] = ()
    query_growth: float = 0.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    recurrent: RecurrentConfig | None = None
    kinds: LayerKinds | None = None
    attention_gate: bool = False

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
        scales = ("embed_scale", "query_scale", "residual_scale", "logit_scale")
        for name in (*scales, "attention_softcap", "logit_softcap"):
            factor = getattr(self, name)
            _require(factor is None or factor > 0, f"{name} must be positive, got {factor}")
        known = self.activation in ("silu", "gelu")
        _require(known, f"activation {self.activation!r} is not supported (silu, gelu are)")
        _require(self.norms in ("pre", "post", "both"), f"norms {self.norms!r} is not one of pre, post, both")
        _require(self.qk_norm or not self.wide_qk_norm, "wide_qk_norm says how qk_norm is done; it needs qk_norm")
        _require(window is None or window >= 1, f"sliding_window must be at least 1, got {window}")
        for name in ("sliding_layers", "nope_layers"):
            listed = len(getattr(self, name))
            _require(listed in (0, L), f"{name} names {listed} layers, the model has {L}")
        steps = self.max_context // self.rope.original_context
        grows = f"query_growth must not be negative, got {self.query_growth}, nor grow more than {_MOST_GROWTHS} times"
        _require(self.query_growth == 0 or (self.query_growth > 0 and steps <= _MOST_GROWTHS), grows)
        blocks = self.units.num_layers if self.units is not None else L
        _require(blocks == L, f"units are of {blocks} layers, the model has {L}")
        for rope in (self.rope, self.local_rope):
            if rope is None:
                continue
            H = self.head_dim if self.kinds is None or rope is not self.rope else self.kinds.full_head_dim
            pairs, divisors = rotary_width(rope, H) // 2, len(rope.divisors)
            _require(divisors in (0, pairs), f"rope longrope has {divisors} factors for {pairs} pairs")
        if self.kinds is not None:
            self._check_kinds(self.kinds)
        if self.recurrent is not None:
            listed, mixes = len(self.recurrent.layers), any(self.recurrent.layers) and not all(self.recurrent.layers)
            _require(listed == L, f"recurrent layers names {listed} layers, the model has {L}")
            _require(mixes, "a model with recurrent layers needs some of them and some with attention")
            plain = self.features is None and self.units is None and self.norms == "pre"
            problem = "recurrent layers are no part of a fed draft or of one made of some layers, and have norms 'pre'"
            _require(plain, problem)
        if self.experts is not None:
            beside = self.experts.beside
            known = self.activation == ("gelu" if beside else "silu") and beside == (self.kinds is not None)
            _require(known, f"experts with activation {self.activation!r} are not supported")
            listed = len(self.experts.layers)
            _require(listed in (0, L), f"experts layers names {listed} layers, the model has {L}")
        if ids:
            problem = "head_ids restricts the head of a draft with shares_embedding; this model has its own"
            _require(self.shares_embedding or self.has_own_head, problem)
            ascending = 0 <= ids[0] <= ids[-1] < self.vocab_size and all(a < b for a, b in itertools.pairwise(ids))
            _require(ascending, f"head_ids must be ascending token ids below {self.vocab_size}, each once")

        if self.features is not None:
            mixes = self.experts is not None and self.features.kind != "mtp"
            is_assistant = self.features.kind == "assistant"
            plain = self.units is None and not mixes and (self.norms == "pre" or is_assistant) and not self.tied
            _require(plain, "a draft that is fed hidden states has plain layers and an untied head")
            lends = self.features.kind in ("added", "block") and self.shares_embedding
            problem = "head_ids restricts a feature draft's own head; it has the target's"
            _require(self.has_own_head or lends or not ids, problem)
            if self.shares_embedding and not is_assistant:
                widths = f"an embedding of width {self.features.target_dim}, the draft has {self.embed_dim}"
                _require(self.embed_dim == self.features.target_dim, f"features and shares_embedding need {widths}")
            if not self.features.own_head:
                as_wide = self.embed_dim == self.features.target_dim
                _require(as_wide, "a feature draft with its target's head is as wide as the target")

    def _check_kinds(self, kinds: LayerKinds) -> None:
        plain = self.units is None and self.recurrent is None
        fed, borrows = self.features is not None, self.keys_are_lent
        problem = "layers of two kinds are no part of a fed draft or of one made of some layers"
        _require(plain and fed == borrows, problem)
        K, L = kinds.full_kv_heads, self.num_layers
        _require(self.num_heads % K == 0, f"num_heads {self.num_heads} is not a multiple of full_kv_heads {K}")
        _require(borrows == (kinds.sharing == L), "an assistant, and no other model, has no layer with keys of its own")
        if borrows:
            return
        known = {self.window(index) for index in range(L - kinds.sharing)}
        shares = all(self.window(index) in known for index in range(max(0, L - kinds.sharing), L))
        _require(shares, f"{kinds.sharing} of {L} layers share keys of earlier ones, which there are not of each kind")

    @property
    def has_own_head(self) -> bool:
        """Whether it is a feature draft with a head of its own, maybe for some tokens only."""
        return self.features is not None and self.features.own_head

    @property
    def borrows(self) -> bool:
        """Whether it has the embedding or the head of its target."""
        return self.shares_embedding or (self.features is not None and not self.features.own_head)

    @property
    def group(self) -> int:
        """G: query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers that have an attention block: those with keys and values. Of an assistant, the first of each kind."""
        if self.keys_are_lent:
            return tuple(sorted({self.window(i): i for i in reversed(range(self.num_layers))}.values()))
        own = range(self.num_layers - (0 if self.kinds is None else self.kinds.sharing))
        return tuple(i for i in own if self.layer_units(i)[0] and not self.is_recurrent(i))

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """Layers that have a recurrent block in place of attention."""
        return tuple(index for index in range(self.num_layers) if self.is_recurrent(index))

    def is_recurrent(self, layer: int) -> bool:
        """Whether a layer has a recurrent block in place of attention."""
        return self.recurrent is not None and self.recurrent.layers[layer]

    @property
    def keys_are_lent(self) -> bool:
        """Whether keys and values of all layers are those of the target, two of whose layers fill the cache."""
        return self.features is not None and self.features.kind == "assistant"

    def states_dim(self, layers: Iterable[int]) -> int:
        """Width of the hidden states of `FeatureConfig.layers` beside each other, where this is the target."""
        keys = {keys_state(index): 2 * math.prod(self.layer_heads(index)) for index in range(self.num_layers)}
        return sum(self.embed_dim if layer >= NORMED else keys[layer] for layer in layers)

    def shares_keys(self, layer: int) -> bool:
        """Whether a layer uses the keys and values of an earlier one."""
        return self.kinds is not None and layer >= self.num_layers - self.kinds.sharing

    def keys_of(self, layer: int) -> int:
        """The layer whose keys and values a layer uses: itself, or the last one of its kind that has its own."""
        if not self.shares_keys(layer):
            return layer
        return max(index for index in self.attention_layers if self.window(index) == self.window(layer))

    def layer_heads(self, layer: int) -> tuple[int, int]:
        """K and H of one layer."""
        if self.kinds is None or self.window(layer) is not None:
            return self.num_kv_heads, self.head_dim
        return self.kinds.full_kv_heads, self.kinds.full_head_dim

    def cache_heads(self, kv_heads: int, layer: int) -> tuple[int, int]:
        """KV heads and H of a layer's cache on a device that holds `kv_heads` of the layers with a window."""
        K, H = self.layer_heads(layer)
        return (kv_heads if K == self.num_kv_heads else K), H

    def layer_mlp_dim(self, layer: int) -> int:
        """F of one layer that has no experts."""
        return self.kinds.sharing_mlp_dim if self.kinds is not None and self.shares_keys(layer) else self.mlp_dim

    def attention_inputs(self, layer: int) -> int:
        """Width of what a layer's attention projects: D, or twice that where a token and a state lie side by side."""
        joins = layer == 0 and self.features is not None and self.features.kind == "eagle3"
        return self.embed_dim * (2 if joins else 1)

    def layer_units(self, layer: int) -> tuple[bool, bool]:
        """Whether a layer has attention and whether it has an MLP."""
        return (True, True) if self.units is None else (self.units.attention[layer], self.units.mlp[layer])

    def layer_experts(self, layer: int) -> ExpertsConfig | None:
        """The experts of one layer, or None where it has an MLP."""
        if self.experts is None or (self.experts.layers and not self.experts.layers[layer]):
            return None
        return self.experts

    def layer_rope(self, layer: int) -> RopeConfig:
        """The rotary embedding of one layer."""
        if self.nope_layers and self.nope_layers[layer]:
            return _STILL
        return self.rope if self.local_rope is None or self.window(layer) is None else self.local_rope

    def window(self, layer: int) -> int | None:
        """Sliding window of one layer in positions, or None where it sees everything."""
        return None if self.sliding_layers and not self.sliding_layers[layer] else self.sliding_window


# Fields that older versions of jaxspec do not know: they are left out where they say nothing.
_LATER_FIELDS = (
    "units", "embed_scale", "activation", "norms", "wide_qk_norm", "query_scale", "attention_softcap", "logit_softcap",
    "local_rope", "experts", "attention_sinks", "out_bias", "features", "nope_layers", "query_growth", "residual_scale",
    "logit_scale", "recurrent", "kinds", "attention_gate",
)  # fmt: skip
_LATER_ROPE_FIELDS = ("beta_fast", "beta_slow", "truncate", "attention_factor", "divisors", "partial")
_LATER_EXPERTS_FIELDS = ("chosen_scores", "biases", "limit", "alpha", "beside")


def config_to_data(cfg: ModelConfig) -> dict[str, Any]:
    """Plain data that `config_from_data` reads back; tuples become lists, as in JSON."""
    data = _as_lists(dataclasses.asdict(cfg))
    for name in ("rope", "local_rope"):
        if data[name] is not None:
            data[name] = _without_defaults(RopeConfig, data[name], _LATER_ROPE_FIELDS)
    if data["experts"] is not None:
        data["experts"] = _without_defaults(ExpertsConfig, data["experts"], _LATER_EXPERTS_FIELDS)
    return _without_defaults(ModelConfig, data, _LATER_FIELDS)


def _without_defaults(kind: type, data: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The data without those of the named fields that have their default."""
    defaults = {field.name: _as_lists(field.default) for field in dataclasses.fields(kind) if field.name in names}
    return {key: value for key, value in data.items() if key not in defaults or value != defaults[key]}


def _as_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_lists(item) for key, item in value.items()}
    return [_as_lists(item) for item in value] if isinstance(value, tuple | list) else value


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


def keep_layers(cfg: ModelConfig, kept: Iterable[int]) -> ModelConfig:
    """The geometry of a model with only some of the layers, by number."""
    kept = list(kept)
    sliding = tuple(cfg.sliding_layers[i] for i in kept) if cfg.sliding_layers else ()
    nope = tuple(cfg.nope_layers[i] for i in kept) if cfg.nope_layers else ()
    experts, recurrent = cfg.experts, cfg.recurrent
    if experts is not None and experts.layers:
        experts = dataclasses.replace(experts, layers=tuple(experts.layers[i] for i in kept))
    if recurrent is not None:
        recurrent = dataclasses.replace(recurrent, layers=tuple(recurrent.layers[i] for i in kept))
    return dataclasses.replace(
        cfg, num_layers=len(kept), sliding_layers=sliding, nope_layers=nope, experts=experts, recurrent=recurrent
    )
