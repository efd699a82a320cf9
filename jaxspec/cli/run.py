"""How every jaxspec command starts and ends: `--version`, one line per error, an exit status, a clean terminal.

Exit status: 0 done, 1 the run failed, 2 usage error, 130 interrupted.
"""

import contextlib
import errno
import gc
import inspect
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NoReturn

import typer
import typer.core

from jaxspec import __version__
from jaxspec.cli.options import GROUPS, Options
from jaxspec.cli.start import INTERRUPTED, STDERR, STDOUT, begin, leave_interrupted
from jaxspec.errors import ConfigError, JaxspecError, one_line
from jaxspec.foreign import option_hint


class _GroupedHelp(typer.core.TyperCommand):
    """A command whose help lists options below the titles of `GROUPS`."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        titles = {name: title for title, group in GROUPS.items() for name in group}
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": [], **{title: [] for title in GROUPS}}
        for parameter in self.get_params(ctx):
            title = titles.get(str(parameter.name), "Options")
            record = parameter.get_help_record(ctx)
            if record is not None:
                sections["Arguments" if parameter.param_type_name == "argument" else title].append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def _print_version(context: typer.Context, wanted: bool) -> None:
    if wanted:
        typer.echo(f"{context.info_name} {__version__}")
        raise typer.Exit


def command(name: str, *groups: Options, extra_words: bool = False) -> Callable[[Callable[..., None]], typer.Typer]:
    """Make a function the command `name`, whose errors are one line and an exit status.

    The function's parameter `given` takes the options of `groups` as a dict of those that have a value. With
    `extra_words`, arguments that are too many are in `context.args`.
    """
    generated = {option: each for group in groups for option, each in group.items()}

    def decorate(function: Callable[..., None]) -> typer.Typer:
        own = inspect.signature(function, eval_str=True).parameters

        def body(**values: Any) -> None:
            del values["version"]
            if generated:
                taken = {option: values.pop(option) for option in generated}
                values["given"] = {option: value for option, value in taken.items() if value not in (None, [])}
            run_command(name, lambda: function(**_settle_exact(values)))

        parameters: list[inspect.Parameter] = []
        for parameter in own.values():
            if parameter.name == "given":
                parameters += [each.parameter(option) for option, each in generated.items()]
            else:
                parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        option = typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
        parameters.append(
            inspect.Parameter(
                "version", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, option]
            )
        )
        body.__doc__ = function.__doc__
        body.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess] # typer reads it
        body.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        settings = {"help_option_names": ["-h", "--help"], "allow_extra_args": extra_words}
        app.command(cls=_GroupedHelp, context_settings=settings)(body)
        return app

    return decorate


def _settle_exact(values: dict[str, Any]) -> dict[str, Any]:
    """The values with `--exact` as the setting that it stands for; ConfigError: `--numerics` says something else."""
    given = values.get("given", {})
    if given.pop("exact", False) and given.setdefault("numerics", "exact") != "exact":
        raise ConfigError(f"--exact and --numerics {given['numerics']} exclude each other: give one of them")
    return values


def run_app(app: typer.Typer, name: str) -> None:
    """Run a command line; an option that other projects use is refused with the name of the right one."""
    begin()
    with _reporting_errors(name):
        known = {
            option
            for parameter in typer.main.get_command(app).params
            for option in (*parameter.opts, *parameter.secondary_opts)
        }
        for word in sys.argv[1:]:
            if word == "--":
                break
            option = word.partition("=")[0]
            if option not in known and (hint := option_hint(option, known)):
                _fail(name, f"no such option: {option}; {hint}", 2)
        try:
            app(prog_name=name)
        finally:
            sys.stdout.flush()  # here, where a full disk is an error of one line


def run_command(name: str, command: Callable[[], object]) -> None:
    """Run a command's body and exit with its status; `name` begins error lines. An interrupt ends the process."""
    warnings.showwarning = lambda message, *_: print(f"{name}: warning: {one_line(message)}", file=sys.stderr)
    begin()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue] # what a terminal lacks
    with _reporting_errors(name):
        command()
        sys.stdout.flush()


@contextlib.contextmanager
def _reporting_errors(name: str) -> Iterator[None]:
    """Turn errors that a user can cause into one line and an exit status."""
    try:
        yield
    except KeyboardInterrupt:
        leave_interrupted()
    except BrokenPipeError:
        # The reader of the pipe has left, as `head` does.
        _drop_output()
        sys.exit(0)
    except ConfigError as error:
        _fail(name, error, 2)
    except MemoryError as error:
        _fail(name, f"out of memory: {error}" if str(error) else "out of memory", 1)
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):  # XLA's own, which cannot be named without loading it
            raise
        _fail(name, f"out of memory: {str(error).splitlines()[0]}", 1)
    except (JaxspecError, OSError) as error:
        _fail(name, _named(error), 1)


@contextlib.contextmanager
def interrupts_noted(matters: Callable[[], bool] = lambda: True) -> Iterator[threading.Event]:
    """Within, the first interrupt only sets the event that is yielded; a second one ends the process at once.

    While there is nothing to finish or to undo (`matters` says so), the first one ends it, too. No interrupt raises an
    exception, which a library that is being imported or calls back could lose.
    """
    noted = threading.Event()

    def note(number: int, frame: object) -> None:
        if noted.is_set() or not matters():
            leave_interrupted()
        noted.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Within, Python looks for no garbage: it finds none while modules are imported, and takes a fifth of that time.

    What is there at the end stays, and is never looked at again.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def leave_after_interrupt() -> NoReturn:
    """End the process of a command that was interrupted and has finished its work, with the status of an interrupt."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if (distributed := sys.modules.get("jaxspec.runtime.distributed")) is not None:
        distributed.shut_down()
    os._exit(INTERRUPTED)


def _named(error: Exception) -> object:
    """The error; where standard output takes no more, it says so, as the system names files that were opened alone."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
        try:
            print(flush=True)
        except OSError:
            return f"standard output cannot be written: {error.strerror}"
    return error


def _fail(name: str, error: object, status: int) -> NoReturn:
    try:
        print(f"{name}: error: {one_line(error)}", file=sys.stderr, flush=True)
    except OSError:
        status = status or 1  # standard error is full or gone: the status alone has to say it
    _drop_output()
    if (distributed := sys.modules.get("jaxspec.runtime.distributed")) is not None:
        distributed.end_failed(status)
    sys.exit(status)


def _drop_output() -> None:
    """Let what Python writes out at exit go nowhere, if it cannot go where it should."""
    for stream, descriptor in ((sys.stdout, STDOUT), (sys.stderr, STDERR)):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
