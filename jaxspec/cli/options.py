"""Options of a run from three places: a TOML preset, `--set name=value`, the command line; the later wins."""

import dataclasses
import importlib.resources
import tempfile
import tomllib
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxspec.errors import ConfigError, shown, suggest
from jaxspec.methods.registry import METHODS, make_method, setting_fields
from pallas_kernels import KERNEL_NAMES

if TYPE_CHECKING:
    from jaxspec.methods.base import Method

OptionTypes = tuple[type, ...]

# What vLLM, SGLang, llama.cpp, transformers, mlx-lm and SpecExec call these options.
FOREIGN_NAMES = {
    "num_draft_tokens": (
        "num-speculative-tokens", "speculative-num-draft-tokens", "speculative-num-steps", "draft", "draft-max",
        "draft-n", "spec-draft-n-max", "draft-length", "max-budget", "budget", "batch",
    ),
    "draft_model": (
        "model-draft", "-md", "hf-repo-draft", "speculative-model", "speculative-draft-model-path", "assistant-model",
    ),
    "draft_devices": ("speculative-draft-tensor-parallel-size",),
    "method": ("speculative-algorithm", "spec-type", "gen-type"),
    "max_tokens": ("n-predict", "predict", "max-new-tokens", "max-length", "num-predict"),
    "target_devices": ("tensor-parallel-size", "-tp", "tp", "tp-size"),
    "max_context": ("max-model-len", "ctx-size", "-c", "context-length", "num-ctx"),
    "repetition_penalty": ("repeat-penalty",),
    "prompt_file": ("file", "-f"),
    "system": ("system-prompt", "-sys"),
    "stop": ("reverse-prompt", "-r"),
    "min_probability": ("draft-p-min", "spec-draft-p-min"),
    "revision": ("hf-revision", "model-revision"),
    "interactive": ("conversation", "-cnv", "interactive-first"),
    "model": ("model-path", "hf-repo", "-hf"),
    "compile_cache": ("compilation-cache-dir",),
    "kv_dtype": ("kv-cache-dtype", "cache-type-k", "cache-type-v", "-ctk", "-ctv"),
}  # fmt: skip
# What has no single option here: what to write, and an option that the command must have for that.
FOREIGN_HINTS = {
    "--draft": ("use --draft-model for a checkpoint, --num-draft-tokens for a number of tokens", "--draft-model"),
    "--speculative-config": ("use --method, --draft-model and --num-draft-tokens", "--draft-model"),
    "--do-sample": ("give a --temperature above 0", "--temperature"),
    "--device": ("JAX chooses the devices; the variable JAX_PLATFORMS=cpu names a platform", "--kernels"),
    "--quantization": ("the checkpoint says how its weights are quantised; jaxspec-convert quantises", "--dtype"),
    "--prompt": ("give the prompt without an option", "--prompt-file"),
    "-p": ("give the prompt without an option", "--prompt-file"),
    "-ngl": ("all layers run on the devices; --offload says where else they are kept", "--offload"),
}
# Of the commands that run in several processes.
_OF_SEVERAL_PROCESSES = ("--coordinator", "--num-processes", "--process-id", "--draft-process")
_SHORT_FOREIGN = {*(name for names in FOREIGN_NAMES.values() for name in names if name.startswith("-"))}
_FOREIGN = {name.lstrip("-").replace("-", "_"): ours for ours, names in FOREIGN_NAMES.items() for name in names}

METHODS_HELP = f"{', '.join([*METHODS][:-1])} or {[*METHODS][-1]}; --set gives its settings."
ACTIVATIONS_HELP = "What rows are rounded to before weights in blocks: auto, float32, int16 or int8."
KV_DTYPE_HELP = "Of cached keys and values: auto, float32, bfloat16 or float16."
KERNELS_HELP = f"What multiplies and attends: {', '.join(KERNEL_NAMES[:-1])} or {KERNEL_NAMES[-1]}."


def foreign_option_hint(option: str, known: Collection[str]) -> str | None:
    """What to write for another project's option, such as "-md", if this command, which has those `known`, has it.

    Of options of other commands, those of several processes are explained.
    """
    if not option.startswith("-") or (not option.startswith("--") and option not in {*_SHORT_FOREIGN, *FOREIGN_HINTS}):
        return None
    if option in FOREIGN_HINTS:
        hint, needed = FOREIGN_HINTS[option]
        return hint if needed in known else None
    if option in _OF_SEVERAL_PROCESSES:
        return "this command runs in one process"
    ours = _FOREIGN.get(option.lstrip("-").replace("-", "_"))
    if ours is None:
        return None
    flag = "--" + ours.replace("_", "-")
    if flag in known:
        return f"use {flag}"
    return f"use --set {ours}=..." if "--set" in known and "--config" in known else None


def list_presets() -> dict[str, str]:
    """The presets that ship with jaxspec: what each is for, by name."""
    lines = {name: text.partition("\n")[0].lstrip("# ") for name, text in _shipped_presets().items()}
    return dict(sorted(lines.items()))


def merge_options(
    given: Mapping[str, Any],
    preset: str | Path | None,
    assignments: Iterable[str],
    known: Mapping[str, OptionTypes],
    more: Callable[[], Mapping[str, OptionTypes]] = dict,
) -> dict[str, Any]:
    """Merge the options `given` on the command line, where None means not given, a preset and "name=value" pairs.

    A preset is a TOML file or the name of one that ships with jaxspec. Values of pairs are written as in TOML; a bare
    word is a string. The names `known` may be set, with these types; where one is unknown, `more` is called for others.
    ConfigError: an unreadable preset, an unknown name, a value of another type or a malformed pair.
    """
    sources: list[tuple[str, Mapping[str, Any]]] = []
    if preset is not None:
        sources.append((f"preset {preset}", _read_preset(preset)))
    for pair in assignments:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--set {pair!r} must have the form name=value")
        sources.append(("--set", {name.strip(): _parse(value.strip())}))
    merged: dict[str, Any] = {}
    for where, options in sources:
        options = {name.replace("-", "_"): value for name, value in options.items()}
        if not options.keys() <= known.keys():
            known = {**known, **more()}
        _check_options(options, known, where)
        merged.update(options)
    merged.update({name: value for name, value in given.items() if value is not None})
    return merged


def setting_types(method: Any) -> dict[str, OptionTypes]:
    """Types that a method's settings may be given as: by its class, as some values are derived."""
    return {field.name: _field_types(field) for field in dataclasses.fields(method)}


def method_options() -> dict[str, OptionTypes]:
    """The settings of all methods, with their types. Imports the methods, and so JAX."""
    known: dict[str, OptionTypes] = {}
    for method in METHODS:
        for name, field in setting_fields(method).items():
            known[name] = tuple(dict.fromkeys(known.get(name, ()) + _field_types(field)))
    return known


def method_from(options: Mapping[str, Any]) -> "Method":
    """The method that merged options ask for; ConfigError for an unknown one, or a setting that it does not have."""
    settings = {name: options[name] for name in method_options() if name in options}
    method = options.get("method", "auto")
    if "swift_layers" in options:
        if method != "swift":
            raise ConfigError(f"--swift-layers is for method swift, not {method}")
        if "layers_file" in settings:
            raise ConfigError("--swift-layers and layers_file both name a file of layer sets: give one")
        settings["layers_file"] = options["swift_layers"]
    return make_method(method, settings)


def _field_types(field: Any) -> OptionTypes:
    default = field.default
    if default is None:
        known = typing.get_args(field.type)
        return (bool,) if bool in known else (int, float) if float in known else (int,)
    if isinstance(default, float):
        return (int, float)
    return (list,) if isinstance(default, tuple) else (type(default),)


def check_output(path: Path | None, what: str = "--json") -> Path | None:
    """ConfigError, before minutes of work, for a path that cannot be written; None and "-", standard output, can."""
    if path is not None and str(path) != "-" and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ConfigError(f"{what} {path} cannot be written: it must be a file in a folder that exists")
    return path


def check_new_file(path: Path | None, what: str) -> Path | None:
    """As `check_output`, for a file that is written beside its place, to be there whole; "-" is refused, too."""
    if path is None:
        return None
    if str(path) == "-":
        raise ConfigError(f"{what} needs a file of its own: standard output has the text")
    check_output(path, what)
    if not path.exists() or path.is_file():
        try:
            with tempfile.TemporaryFile(dir=path.resolve().parent):
                pass
        except OSError as error:
            raise ConfigError(f"{what} {path} cannot be written: {error.strerror}") from error
    return path


def _shipped_presets() -> dict[str, str]:
    folder = importlib.resources.files("jaxspec_configs").joinpath("decode")
    files = [file for file in folder.iterdir() if file.name.endswith(".toml")]
    return {file.name.removesuffix(".toml"): file.read_text(encoding="utf-8") for file in files}


def _read_preset(preset: str | Path) -> dict[str, Any]:
    shipped = _shipped_presets()
    path = Path(preset)
    try:
        if str(preset) not in shipped:
            return tomllib.loads(path.read_text(encoding="utf-8"))
        return tomllib.loads(shipped[str(preset)])
    except OSError as error:
        if path.suffix or path.name != str(preset):
            raise ConfigError(f"preset {preset} cannot be read: {error.strerror}") from error
        raise ConfigError(f"preset {preset!r} is no file and no name; {suggest(preset, sorted(shipped))}") from error
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, a number of 5,000 digits, brackets without end
        raise ConfigError(f"preset {preset} is not TOML: {error}") from error


def _check_options(options: Mapping[str, Any], known: Mapping[str, OptionTypes], where: str) -> None:
    for name, value in options.items():
        if name not in known:
            ours = _FOREIGN.get(name)
            hint = f"use {ours!r}" if ours in known else suggest(name, known)
            raise ConfigError(f"{where}: unknown option {name!r}; {hint}")
        types = known[name]
        # In Python, but not to a user, True is an integer.
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            wanted = " or ".join("list (written [2,2])" if t is list else t.__name__ for t in types)
            raise ConfigError(f"{where}: {name} must be of type {wanted}, got {shown(value)}")


def _parse(value: str) -> Any:
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError):  # as in presets
        return value
