"""Settings of the decoding methods, as presets and `--set` name them; written out so that --help needs no JAX."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxspec.cli.options import OptionTypes
from jaxspec.errors import ConfigError

if TYPE_CHECKING:
    from jaxspec.methods.base import Method

METHOD_NAMES = "auto, ar, chain, lookup, specexec, specinfer, swift or swiftspec"

METHOD_OPTIONS: dict[str, OptionTypes] = {
    "budget": (int,), "width": (int,), "branch": (int,), "depth": (int,), "score_temperature": (str,),
    "decay": (int, float), "min_probability": (int, float), "length": (int,), "rule": (str,), "batch": (int,),
    "ngram": (int,), "candidates": (int,), "adaptive": (bool,), "expansion": (list,), "replacement": (bool,),
    "overlap": (bool,), "reuse": (bool,), "leaves": (bool,), "survivors": (int,), "branch_free": (bool,),
    "draft_cost": (int, float), "pass_cost": (list,), "round_cost": (int, float),
    "ratio": (int, float), "threshold": (int, float), "siblings": (list,), "layers": (str,), "context": (str,),
    "window": (int,), "interval": (int,), "steps": (int,), "tolerance": (int,), "max_score": (int, float),
    "share": (int, float), "programs": (str,), "task": (str,), "layers_file": (str,),
}  # fmt: skip


def method_from(options: Mapping[str, Any]) -> "Method":
    """The method that merged options ask for, its settings included.

    Raises:
      ConfigError: an unknown method, or a setting that it does not have.
    """
    from jaxspec.methods.registry import make_method

    settings = {name: options[name] for name in METHOD_OPTIONS if name in options}
    method = options.get("method", "auto")
    if "swift_layers" in options:
        if method != "swift":
            raise ConfigError(f"--swift-layers is for method swift, not {method}")
        if "layers_file" in settings:
            raise ConfigError("--swift-layers and layers_file both name a file of layer sets: give one")
        settings["layers_file"] = options["swift_layers"]
    return make_method(method, settings)
