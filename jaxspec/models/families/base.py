"""What the families of models differ in, and the strict reader of the values that describe a model."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from jaxspec.errors import CheckpointError, ConfigError

_SLIDING, _FULL = "sliding_attention", "full_attention"


class ConfigValues:
    """Named values of a `config.json` or of GGUF metadata. Errors name the file, the key and the value.

    The object remembers which keys were read: a key that is left over may change the model and is refused.
    """

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = ""):
        """Take the keys that begin with `prefix`, which is cut off. `path` is for errors."""
        self.path, self.prefix = path, prefix
        self._values = {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        """Whether the key is there, with null too."""
        return key in self._values

    def get(self, key: str, default: Any = None) -> Any:
        """A value of any type; the default where the key is absent or null."""
        self._read.add(key)
        value = self._values.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        """An integer from `least` to 2^31 - 1; without a default the key is required."""
        value = self._require(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
            self.refuse(key, f"an integer of at least {least} is needed", CheckpointError)
        return value

    def optional_integer(self, key: str, default: int) -> int | None:
        """A positive integer; the default where the key is absent, None where it is null."""
        return None if key in self and self.get(key) is None else self.integer(key, default)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number; without a default the key is required."""
        value = self._require(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 2**62:
            self.refuse(key, "a finite number is needed", CheckpointError)
        return float(value)

    def flag(self, key: str) -> bool:
        """True or false; an absent key is false."""
        value = self.get(key, False)
        if not isinstance(value, bool):
            self.refuse(key, "true or false is needed", CheckpointError)
        return value

    def refuse(self, key: str, why: str, error: type[ValueError] = ConfigError) -> NoReturn:
        """Raise an error that names the key and its value."""
        text = repr(self._values.get(key))
        raise error(f"{self.path}: {self.prefix}{key} is {text if len(text) <= 60 else text[:60] + '...'}; {why}")

    def refuse_unread(self, is_harmless: Callable[[str, Any], bool]) -> None:
        """Refuse the first key that was not read, unless `is_harmless(key, value)` says that it changes no logit."""
        for key, value in self._values.items():
            if key not in self._read and not is_harmless(key, value):
                self.refuse(key, "this setting is not known to jaxspec and may change the model")

    def _require(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise CheckpointError(f"{self.path}: lacks {self.prefix}{key}")
        return value


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
    # Whether some layers may have a sliding window while others have none.
    layers_differ: ClassVar[bool] = False

    def read_config(self, values: ConfigValues, num_layers: int) -> dict[str, Any]:
        """Fields of `ModelConfig` that `config.json` spells in the family's own way.

        Raises:
          CheckpointError, ConfigError: a value is missing or of the wrong type, or asks for what is not supported.
        """
        embed_dim, num_heads = values.integer("hidden_size"), values.integer("num_attention_heads")
        if values.flag("attention_bias") and not self.features.get("qkv_bias"):
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
            "num_kv_heads": values.integer("num_key_value_heads", default=num_heads if same_heads else None),
            "head_dim": values.integer("head_dim", default=width),
            "sliding_window": window,
            "sliding_layers": layers,
        }

    def read_window(self, values: ConfigValues) -> tuple[int | None, int]:
        """Sliding window in `config.json`, or None, and the first layer that has it."""
        if values.get("sliding_window"):
            values.refuse("sliding_window", f"models of type {self.name} have no sliding windows in jaxspec")
        return None, 0

    def read_gguf(self, values: ConfigValues, max_context: int) -> dict[str, Any]:
        """Fields of `ModelConfig` that the hyperparameters of a GGUF file spell in the family's own way."""
        if 0 < values.integer("attention.sliding_window", default=0, least=0) < max_context:
            values.refuse("attention.sliding_window", f"the file does not say which layers of {self.name} have it")
        return dict(self.features)

    def _read_layers(self, values: ConfigValues, num_layers: int) -> tuple[int | None, tuple[bool, ...]]:
        """`ModelConfig.sliding_window` and `sliding_layers`; a list of layer types wins over a first layer."""
        window, first = self.read_window(values)
        layers = tuple(window is not None and index >= first for index in range(num_layers))
        if (types := values.get("layer_types")) is not None:
            if not isinstance(types, list) or len(types) != num_layers or not set(map(str, types)) <= {_SLIDING, _FULL}:
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
