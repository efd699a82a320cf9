"""`jaxspec-serve`: a model served through OpenAI's interface."""

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxspec.cli.options import (
    ENGINE,
    METHOD,
    MODEL,
    PROCESSES,
    Options,
    PlanOption,
    PresetOption,
    SetOption,
    merge_options,
    method_from,
    method_options,
    model_options,
    print_plan,
)
from jaxspec.cli.processes import is_worker, processes_from, ran_as_worker
from jaxspec.cli.progress import waiting
from jaxspec.cli.run import command
from jaxspec.config import parse_bytes
from jaxspec.errors import ConfigError, suggest
from jaxspec.text.families import FAMILIES

NAME = "jaxspec-serve"
KEY_VARIABLE = "JAXSPEC_API_KEY"
# Where --max-context is absent: a chat's length. A longer one costs memory in every session.
DEFAULT_CONTEXT = 4096
FLAGS: Options = {**MODEL, **METHOD, **ENGINE, **PROCESSES}


@command(NAME, FLAGS)
def app(
    given: dict[str, Any],
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
    allow_origin: Annotated[
        list[str] | None, typer.Option(help="Web site whose pages may ask (CORS), or *; repeatable.")
    ] = None,
    tool_parser: Annotated[
        str | None, typer.Option(help="How the model writes calls of tools [what its chat template says].")
    ] = None,
    shutdown_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds that answers have to finish once the server is to end.")
    ] = 30,
    plan: PlanOption = False,
    config: PresetOption = None,
    set_: SetOption = None,
) -> None:
    """Serve a model: /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics, and a live view at /.

    The context is 4096 tokens, or the model's own limit if that is lower, unless --max-context says otherwise; 1 GiB
    of caches of finished conversations is kept, unless --session-memory does. The first Ctrl-C lets answers finish,
    the second one aborts them.
    """
    options = {"session_memory": "1G"} | merge_options(given, config, set_ or [], FLAGS, method_options)
    most_body = parse_bytes("--max-body", max_body)
    options["session_memory"] = parse_bytes("--session-memory", options["session_memory"], minimum=0)
    if api_key == "":
        raise ConfigError(f"the API key is empty; leave {KEY_VARIABLE} unset for none")
    if tool_parser is not None and tool_parser not in FAMILIES:
        raise ConfigError(f"--tool-parser is {tool_parser!r}; {suggest(tool_parser, FAMILIES)}")
    decoding = method_from(options)
    if plan:
        options["max_context"] = _context_of(options)
        print_plan(options, decoding, {"--coordinator": options.get("coordinator")})
        return
    _need_extra()
    from jaxspec.llm import LLM, internals  # heavy imports only now: --help and usage errors answer at once
    from jaxspec.serve.app import LOOPBACK, ApiServer, Limits
    from jaxspec.serve.server import open_socket, serve

    distributed = processes_from(options)
    with contextlib.nullcontext() if is_worker(options) else open_socket(host, port) as listening:
        doing = "loading the model and compiling its programs"
        if not sys.stderr.isatty():  # a terminal shows it while it lasts
            print(f"{NAME}: {doing}; a first start takes a minute", file=sys.stderr, flush=True)
        with waiting(doing):
            options["max_context"] = _context_of(options)
            llm = LLM(**model_options(options), method=decoding, distributed=distributed)
            if ran_as_worker(llm, NAME):
                return
            engine = internals(llm).engine
            engine.traced = True  # the live view shows each round
            engine.prepare()
        assert listening is not None
        name = served_model_name or Path(llm.model_path).stem
        hosts = LOOPBACK if host in ("127.0.0.1", "localhost", "::1") else ("*",)
        limits = Limits(max_active, max_waiting, most_body, timeout)
        where = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
        print(f"{NAME}: {name} at {where}/v1, live view at {where}/", file=sys.stderr, flush=True)
        api = ApiServer(llm, name, limits, api_key, hosts, allow_origin or (), tool_parser)
        serve(api, listening, shutdown_timeout)


def _context_of(arguments: Mapping[str, Any]) -> int:
    """Most tokens of prompt plus answer: as given, else a chat's length, or the model's own limit if that is lower."""
    from jaxspec.loading import open_model

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
