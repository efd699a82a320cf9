"""What a person at a terminal sees while there is no output yet; nothing is shown anywhere else."""

import contextlib
import sys
from collections.abc import Callable, Iterator


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
