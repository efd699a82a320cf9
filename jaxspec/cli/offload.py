"""The options of a command whose target's layers may be streamed."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from jaxspec.cli.options import OptionTypes
from jaxspec.errors import ConfigError

OffloadOption = Annotated[
    str | None, typer.Option(help="Where the model's layers are kept: none (on the devices), host or disk.")
]
DeviceMemoryOption = Annotated[
    str | None, typer.Option(help="With --offload, memory to take on each device, such as 6GiB.")
]
ResidentLayersOption = Annotated[
    int | None, typer.Option(help="With --offload, layers that stay on the devices [what fits, or 0].")
]
PlanOption = Annotated[bool, typer.Option("--plan", help="With --offload, print what would stream, and end.")]

OFFLOAD_OPTIONS: dict[str, OptionTypes] = {"offload": (str,), "device_memory": (str, int), "resident_layers": (int,)}


def offload_from(options: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `LLM` about streamed layers among options, those that were given."""
    return {name: options[name] for name in OFFLOAD_OPTIONS if options.get(name) is not None}


def print_plan(draft: str | None, method: Any, arguments: Mapping[str, Any], without: Mapping[str, Any]) -> None:
    """Print what would stream; `arguments` are those of `LLM`, and ConfigError names a true one of `without`."""
    for name, value in without.items():
        if value:
            raise ConfigError(f"--plan prints a plan and ends: it does not go with {name}")
    from jaxspec.opening import explain_offload

    print("\n".join(explain_offload(draft=draft, method=method, **arguments)))
