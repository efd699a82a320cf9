"""Options of commands, made from the fields of `EngineConfig` and `SamplingParams`, and where their values come from.

Values come from three places: a TOML preset, `--set name=value`, the command line; the later wins.
"""

import dataclasses
import importlib.resources
import inspect
import re
import tempfile
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from jaxspec.config import EngineConfig, SamplingParams, StructuredOutputs, check_path
from jaxspec.errors import ConfigError, shown, suggest
from jaxspec.foreign import own_name
from jaxspec.methods.registry import METHODS, make_method, setting_fields

if TYPE_CHECKING:
    from jaxspec.methods.base import Method

OptionTypes = tuple[type, ...]


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of a command: the types that a preset may give it as, its help, its flags beside its own name."""

    types: OptionTypes
    help: str
    flags: tuple[str, ...] = ()
    default: Any = None  # None: not given

    def parameter(self, name: str) -> inspect.Parameter:
        """The option as a parameter of a function that typer reads. A list's option is repeated, of one value each."""
        flag = "--" + name.replace("_", "-")
        order = (list, bool, str, float, int)  # a number of bytes is a text, a share may be whole
        kind: Any = next(known for known in order if known in self.types)
        if kind is list:
            kind = list[int] if name.endswith("_ids") else list[str]
        elif kind is bool:
            flag = f"{flag}/--no-{flag[2:]}"
        whole = "/" in "".join(self.flags) or name.endswith("_ids") or self.flags == (flag.partition("/")[0],)
        flags = self.flags if whole else (flag, *self.flags)
        option = typer.Option(*flags, help=self.help)
        return inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=self.default, annotation=Annotated[kind | None, option]
        )


Options = Mapping[str, Option]


def options_of(cls: Any, *names: str, **defaults: Any) -> dict[str, Option]:
    """Options for the fields of a dataclass that have a help text, or for those of these `names`.

    `defaults` are the command's own: its help shows them, and a value that is absent everywhere takes them.
    """
    hints, options = typing.get_type_hints(cls), {}
    for field in dataclasses.fields(cls):
        if "help" not in field.metadata or (names and field.name not in names):
            continue
        text = field.metadata["help"]
        if field.name in defaults:
            text = re.sub(r" \[[^]]*\]\.$", ".", text)
        default = defaults.get(field.name)
        options[field.name] = Option(_types_of(hints[field.name]), text, field.metadata["flags"], default)
    return options


def _types_of(hint: Any) -> OptionTypes:
    """Types that TOML may give for a field of this type."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        parts = (_types_of(part) for part in typing.get_args(hint) if part is not types.NoneType)
        return tuple(dict.fromkeys(kind for part in parts for kind in part))
    if origin is Literal:
        return (str,)
    return {float: (int, float), int: (int,), bool: (bool,), str: (str,)}.get(hint, (list,))


METHODS_HELP = f"{', '.join([*METHODS][:-1])} or {[*METHODS][-1]}; --set gives its settings."

MODEL: Options = {
    "model": Option((str,), "Folder, GGUF file or name on the Hugging Face Hub [the default model].", ("-m",)),
    "revision": Option((str,), "Branch, tag or commit of a name on the hub [main]."),
    "draft_model": Option(
        (str,),
        "Checkpoint of a draft model, none, or mtp: the layer in the model's own checkpoint [mtp or a shipped one, if "
        "there is one]; self:attention=1,3;mlp=2 is the model without these.",
    ),
}
METHOD: Options = {
    "method": Option((str,), METHODS_HELP),
    "num_draft_tokens": Option((int,), "Most drafted tokens of a target pass."),
    "swift_layers": Option((str,), "File of layer sets that swift reads and writes [beside the compiled programs]."),
}
ENGINE: Options = {**options_of(EngineConfig), "exact": Option((bool,), "The same as --numerics exact.", ("--exact",))}
# Commands that measure or compare keep no caches of one answer for the next.
MEASURED_ENGINE: Options = {name: option for name, option in ENGINE.items() if name != "session_memory"}
SAMPLING: Options = options_of(SamplingParams)
# The shape of the answer: exclusive, and of `StructuredOutputs`.
SHAPES: Options = {
    "json_schema": Option((str,), "File of a JSON schema that the answer must match."),
    "regex": Option((str,), "Regular expression that the whole answer must match."),
    "grammar": Option((str,), "File of a grammar that the answer must match, in llguidance's Lark syntax."),
}
PROCESSES: Options = {
    "coordinator": Option((str,), "HOST:PORT where several processes meet, or auto (Slurm, MPI, Kubernetes, TPU)."),
    "num_processes": Option((int,), "How many processes there are."),
    "process_id": Option((int,), "Which one this is; 0 has the prompt and the output."),
    "draft_process": Option((int,), "Process whose devices the draft of swiftspec has [the last]."),
}

# Titles of options in --help, in this order, after those of the command itself.
GROUPS: Mapping[str, Options] = {
    "Model": MODEL, "Method": METHOD, "Sampling": SAMPLING, "Shape of the answer": SHAPES,
    "Devices and memory": ENGINE, "Several processes": PROCESSES,
}  # fmt: skip

PlanOption = Annotated[bool, typer.Option("--plan", help="With --offload, print what would stream, and end.")]
PresetOption = Annotated[
    str | None, typer.Option("--config", help="Preset of these options, by name or TOML file; list shows the names.")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="name=value as in a preset, or of a method; repeatable.")
]
ReportOption = Annotated[
    Path | None, typer.Option("--json", help="Write one JSON object with every number here; - is standard output.")
]


def model_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `LLM` among options that were given, but for its method and its processes."""
    names = ("model", "revision", *ENGINE)
    found = {name: options[name] for name in names if options.get(name) is not None}
    if options.get("draft_model") is not None:
        found["draft"] = options["draft_model"]
    return found


def sampling_options(options: Mapping[str, Any]) -> SamplingParams:
    """The sampling parameters among options that were given, the shape of the answer included."""
    given = {name: options[name] for name in SAMPLING if options.get(name) is not None}
    shapes = [name for name in SHAPES if options.get(name) is not None]
    if len(shapes) > 1:
        raise ConfigError(f"--{' and --'.join(shapes).replace('_', '-')} both say what an answer is: give one of them")
    for name in shapes:
        text = options[name] if name == "regex" else _read_shape(name, options[name])
        shape: dict[str, Any] = {"json" if name == "json_schema" else name: text}
        given["structured_outputs"] = StructuredOutputs(**shape)
    return SamplingParams(**given)


def _read_shape(name: str, file: str) -> str:
    try:
        return check_path(name, file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"--{name.replace('_', '-')} {file} cannot be read: {error}") from error


def is_streamed(options: Mapping[str, Any]) -> bool:
    """Whether the options ask for a target whose layers are streamed."""
    return options.get("offload") not in (None, "none")


def has_own_devices(options: Mapping[str, Any]) -> bool:
    """Whether the options ask for devices of the draft's own."""
    return any(options.get(name) is not None for name in ("draft_devices", "draft_platform"))


def finds_draft(options: Mapping[str, Any]) -> bool:
    """Whether there is a draft model for these options."""
    from jaxspec.loading import has_draft

    return has_draft(options.get("model"), options.get("draft_model"), options.get("revision"))


def print_plan(options: Mapping[str, Any], method: Any, without: Mapping[str, Any]) -> None:
    """Print what `LLM` would stream with these options; ConfigError names a true one of `without`."""
    for name, value in without.items():
        if value:
            raise ConfigError(f"--plan prints a plan and ends: it does not go with {name}")
    from jaxspec.loading import explain_offload

    print("\n".join(explain_offload(method=method, **model_options(options))))


def list_presets() -> dict[str, str]:
    """The presets that ship with jaxspec: what each is for, by name."""
    lines = {name: text.partition("\n")[0].lstrip("# ") for name, text in _shipped_presets().items()}
    return dict(sorted(lines.items()))


def merge_options(
    given: Mapping[str, Any],
    preset: str | Path | None,
    assignments: Iterable[str],
    known: Options | Mapping[str, OptionTypes],
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
    known = {name: each.types if isinstance(each, Option) else each for name, each in known.items()}
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
    return {field.name: _types_of(field.type) for field in dataclasses.fields(method)}


def method_options() -> dict[str, OptionTypes]:
    """The settings of all methods, with their types. Imports the methods, and so JAX."""
    known: dict[str, OptionTypes] = {}
    for method in METHODS:
        for name, field in setting_fields(method).items():
            known[name] = tuple(dict.fromkeys(known.get(name, ()) + _types_of(field.type)))
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
            ours = own_name(name)
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
