"""Progress at a terminal while there is no output yet, and the tables and the report at the end."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from jaxspec.llm import LLM

# A pass over streamed weights is shown once it has taken so long.
_LONG_PASS_S = 0.5


class Bar:
    """A progress bar of the commands that measure."""

    def __enter__(self) -> "Bar":
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        columns = (MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
        # Drawn twice a second: the machine is to be busy with the measurement.
        self._progress = Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal, refresh_per_second=2
        )
        self._task = self._progress.add_task("", total=None)
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, what: str, done: int, total: int) -> None:
        self._progress.update(self._task, description=what.replace("[", "\\["), completed=done, total=total)


def table_console(json_: Path | None = None, width: int = 132) -> "Console":
    """The console for tables: standard error if the report takes standard output; `width` is for files and pipes."""
    from rich.console import Console

    stderr = str(json_) == "-"
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=width)


def write_report(report: Any, path: Path | None) -> None:
    """Write one JSON object to a file, or to standard output for "-"; None writes nothing."""
    if path is not None:
        text = json.dumps(report, ensure_ascii=False, allow_nan=False, default=str)
        print(text) if str(path) == "-" else path.write_text(text + "\n", encoding="utf-8")


@contextlib.contextmanager
def waiting(what: str) -> Iterator[Callable[[str | None], None]]:
    """Show `what` is going on until the call that is yielded says something else, or None: that the output begins."""
    if not sys.stderr.isatty():
        yield lambda what: None
        return
    from rich.console import Console
    from rich.markup import escape

    # Drawn four times a second: the machine is to be busy with the model.
    status = Console(stderr=True).status(escape(what), refresh_per_second=4)
    with status:
        yield lambda what: status.stop() if what is None else status.update(escape(what))


@contextlib.contextmanager
def passes_shown(llm: "LLM") -> Iterator[None]:
    """Show how far a long pass over streamed weights is, while nothing else is printed: after the text so far."""
    from jaxspec.llm import internals

    stream = internals(llm).layer_stream
    if stream is None or not sys.stderr.isatty():
        yield
        return
    drawn = False

    def draw(layers: int, total: int, nbytes: int, seconds: float) -> None:
        nonlocal drawn
        if layers == total:
            if drawn:
                _write("\x1b[K")
            drawn = False
        elif seconds > _LONG_PASS_S:
            # Saves the cursor and puts it back; what does not fit into the line is cut off.
            _write(f"\x1b7\x1b[?7l\x1b[K  {layers}/{total} layers, {nbytes / seconds / 1e9:.2f} GB/s\x1b[?7h\x1b8")
            drawn = True

    stream.progress = draw
    try:
        yield
    finally:
        stream.progress = None


def _write(text: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(text)
    sys.stderr.flush()
