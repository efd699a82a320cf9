"""`jaxspec-serve`: a model served through OpenAI's interface."""

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxspec.cli.decode import LLM_OPTIONS, METHOD_CHOICE, METHOD_FLAGS, PROCESS_OPTIONS
from jaxspec.cli.offload import DeviceMemoryOption, OffloadOption, PlanOption, ResidentLayersOption, print_plan
from jaxspec.cli.options import (
    ACTIVATIONS_HELP,
    KERNELS_HELP,
    KV_DTYPE_HELP,
    METHODS_HELP,
    OptionTypes,
    merge_options,
    method_from,
    method_options,
)
from jaxspec.cli.processes import (
    CoordinatorOption,
    DraftProcessOption,
    NumProcessesOption,
    ProcessIdOption,
    is_worker,
    processes_from,
    ran_as_worker,
)
from jaxspec.cli.progress import waiting
from jaxspec.cli.run import VersionOption, run_app, run_command
from jaxspec.config import parse_bytes
from jaxspec.errors import ConfigError

NAME = "jaxspec-serve"
KEY_VARIABLE = "JAXSPEC_API_KEY"
# Where --max-context is absent: a chat's length. A longer one costs memory in every session.
DEFAULT_CONTEXT = 4096
FLAGS: dict[str, OptionTypes] = {**METHOD_CHOICE, **LLM_OPTIONS, **PROCESS_OPTIONS}

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(context_settings={"help_option_names": ["-h", "--help"]})
def serve(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Folder, GGUF file or name on the Hugging Face Hub [the default model]."),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a name on the hub [main].")] = None,
    draft_model: Annotated[str | None, typer.Option(help="Checkpoint of a draft model.")] = None,
    method: Annotated[str | None, typer.Option(help=METHODS_HELP)] = None,
    num_draft_tokens: Annotated[int | None, typer.Option(help="Most drafted tokens of a target pass.")] = None,
    swift_layers: Annotated[str | None, typer.Option(help="File of layer sets that swift reads and writes.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 for all of this machine.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar=KEY_VARIABLE, help="Key that requests under /v1 must carry [none].")
    ] = None,
    served_model_name: Annotated[str | None, typer.Option(help="Name of the model for clients [its file's].")] = None,
    max_active: Annotated[int, typer.Option(min=1, max=64, help="Answers that are decoded in turn.")] = 4,
    max_waiting: Annotated[int, typer.Option(min=0, help="Requests in the queue; more are answered with 429.")] = 64,
    max_body: Annotated[str, typer.Option(help="Largest body of a request in bytes; 2MiB.")] = "1M",
    timeout: Annotated[float, typer.Option(min=1, help="Most seconds from a request to the end of its answer.")] = 600,
    shutdown_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds that answers have to finish once the server is to end.")
    ] = 30,
    session_memory: Annotated[
        str, typer.Option(help="Caches kept of finished conversations; 512M, 2G; 0 computes each prompt anew.")
    ] = "1G",
    dtype: Annotated[str | None, typer.Option(help="auto, float32 or bfloat16.")] = None,
    kernels: Annotated[str | None, typer.Option(help=KERNELS_HELP)] = None,
    activations: Annotated[str | None, typer.Option(help=ACTIVATIONS_HELP)] = None,
    kv_dtype: Annotated[str | None, typer.Option(help=KV_DTYPE_HELP)] = None,
    target_devices: Annotated[int | None, typer.Option(help="Devices that share the model [1].")] = None,
    draft_devices: Annotated[int | None, typer.Option(help="Devices of the draft model alone, for swiftspec.")] = None,
    draft_platform: Annotated[str | None, typer.Option(help="Their platform if not the target's.")] = None,
    offload: OffloadOption = None,
    device_memory: DeviceMemoryOption = None,
    resident_layers: ResidentLayersOption = None,
    plan: PlanOption = False,
    max_context: Annotated[
        int | None, typer.Option(help="Most tokens of prompt plus answer [4096, or the model's own limit if lower].")
    ] = None,
    compile_cache: Annotated[str | None, typer.Option(help='Folder of compiled programs; "" for none.')] = None,
    coordinator: CoordinatorOption = None,
    num_processes: NumProcessesOption = None,
    process_id: ProcessIdOption = None,
    draft_process: DraftProcessOption = None,
    config: Annotated[str | None, typer.Option(help="Preset of a method's options, by name or TOML file.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="name=value as in a preset; repeatable.")] = None,
    version: VersionOption = False,
) -> None:
    """Serve a model: /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics, and a live view at /.

    The first Ctrl-C lets answers finish, the second one aborts them.
    """
    given = {name: context.params.get(name) for name in (*FLAGS, *METHOD_FLAGS)}

    def run() -> None:
        options = merge_options(given, config, set_ or [], FLAGS, method_options)
        most_body = parse_bytes("--max-body", max_body)
        memory = parse_bytes("--session-memory", session_memory, least=0)
        if api_key == "":
            raise ConfigError(f"the API key is empty; leave {KEY_VARIABLE} unset for none")
        decoding = method_from(options)
        arguments = {name: options[name] for name in LLM_OPTIONS if name in options}
        if plan:
            arguments |= {"max_context": _context_of(arguments), "session_memory": memory}
            print_plan(options.get("draft_model"), decoding, arguments, {"--coordinator": options.get("coordinator")})
            return
        _need_extra()
        from jaxspec.llm import LLM  # heavy imports only now: --help and usage errors answer at once
        from jaxspec.serve.app import LOOPBACK, ApiServer, Limits
        from jaxspec.serve.server import open_socket, serve

        arguments["distributed"] = processes_from(options)
        with contextlib.nullcontext() if is_worker(options) else open_socket(host, port) as listening:
            with waiting("loading the model and compiling its programs"):
                arguments["max_context"] = _context_of(arguments)
                llm = LLM(**arguments, draft=options.get("draft_model"), method=decoding, session_memory=memory)
                if ran_as_worker(llm, NAME):
                    return
                llm.engine.traced = True  # the live view shows each round
                llm.engine.prepare()
            assert listening is not None
            name = served_model_name or Path(llm.model_path).stem
            hosts = LOOPBACK if host in ("127.0.0.1", "localhost", "::1") else ("*",)
            limits = Limits(max_active, max_waiting, most_body, timeout)
            where = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
            print(f"{NAME}: {name} at {where}/v1, live view at {where}/", file=sys.stderr, flush=True)
            serve(ApiServer(llm, name, limits, api_key, hosts), listening, shutdown_timeout)

    run_command(NAME, run)


def main() -> None:
    """Entry point."""
    run_app(app, NAME)


def _context_of(arguments: Mapping[str, Any]) -> int:
    """Most tokens of prompt plus answer: as given, else a chat's length, or the model's own limit if that is lower."""
    from jaxspec.checkpoint.pair import open_model

    if (given := arguments.get("max_context")) is not None:
        return given
    limit = open_model("model", arguments.get("model"), arguments.get("revision")).config.max_context
    return min(limit, DEFAULT_CONTEXT)


def _need_extra() -> None:
    missing = []
    for module in ("starlette", "uvicorn", "prometheus_client"):
        try:
            __import__(module)
        except ImportError:
            missing.append(module)
    if missing:
        raise ConfigError(
            f"the server needs {', '.join(missing)}, which are not installed: pip install 'jaxspec-decode[serve]'"
        )
