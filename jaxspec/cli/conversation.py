"""A conversation in the terminal: `jaxspec-decode --interactive`."""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs

from jaxspec.cli.progress import passes_shown
from jaxspec.cli.run import interrupts_noted
from jaxspec.errors import ConfigError

if TYPE_CHECKING:
    from jaxspec.llm import LLM
    from jaxspec.results import Completion, StreamEvent

PROMPT = "> "
HELP = """/reset   forget the conversation
/stats   speed of the latest answer
/help    these lines
/exit    leave, as Ctrl-D does; Ctrl-C ends an answer"""
MOST_LINES = 1000  # of the history that a file keeps


class Conversation:
    """Questions and answers, each with all that was said before."""

    def __init__(
        self, llm: "LLM", sampling: Any, system: str | None, show: Callable[["StreamEvent"], None],
        summary: Callable[["Completion"], str], stats: bool = False, tools: list[Any] | None = None,
    ):  # fmt: skip
        """`show` prints a piece of an answer, `summary` is what /stats prints; with `stats`, after every answer.

        Answers may call `tools`: their results are asked for.
        """
        if not llm.tokenizer.has_chat_template:
            raise ConfigError(f"{llm.model_path} has no chat template, which --interactive needs")
        self._llm, self._sampling, self._show, self._summary = llm, sampling, show, summary
        self._stats = stats
        self._options: Any = {} if tools is None else {"tools": tools}
        self._beginning = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._beginning)
        self._latest: Completion | None = None

    def run(self) -> None:
        """Ask and answer until the input ends."""
        with _line_history():
            while (line := _read_line()) is not None:
                if line.startswith("/"):
                    if not self._command(line):
                        return
                elif line:
                    self._answer(line)

    def _command(self, line: str) -> bool:
        """Do what a line with a slash asks for; False for the end."""
        match line.split()[0]:
            case "/exit" | "/quit" | "/bye":
                return False
            case "/reset" | "/clear":
                self._messages, self._latest = list(self._beginning), None
                _say("the conversation begins anew")
            case "/stats":
                _say("there is no answer yet" if self._latest is None else self._summary(self._latest))
            case "/help" | "/?":
                _say(HELP)
            case other:
                _say(f"unknown command {other}; /help lists them")
        return True

    def _answer(self, question: str) -> None:
        """Stream an answer; an interrupt ends it, and what was said of it stays part of the conversation."""
        messages = [*self._messages, {"role": "user", "content": question}]
        while (answer := self._stream(messages)) is not None:
            self._latest = answer
            self._messages = messages = [*messages, answer.message or {"role": "assistant", "content": answer.text}]
            if self._stats:
                _say(self._summary(answer))
            if not answer.tool_calls:
                return
            for call in answer.tool_calls:
                _say(f"result of {call['function']['name']}({call['function']['arguments']})?")
                result = {"role": "tool", "tool_call_id": call["id"], "content": _read_line("= ") or ""}
                messages = [*messages, result]

    def _stream(self, messages: list[dict[str, Any]]) -> "Completion | None":
        """The answer to a conversation, printed as it comes; None where there is none."""
        try:
            events = self._llm.stream(messages, self._sampling, **self._options)
        except ConfigError as error:
            _say(f"{error}; /reset begins anew")
            return None
        with events, passes_shown(self._llm), interrupts_noted() as interrupted:
            event = None
            while event is None or event.completion is None:
                if interrupted.is_set() and event is None:
                    return None
                if interrupted.is_set():
                    events.abort()
                event = next(events)
                self._show(event)
        print(flush=True)
        return event.completion


def _say(text: str) -> None:
    """Print what is no part of an answer."""
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)


def _read_line(prompt: str = PROMPT) -> str | None:
    """The next line, None at the end of the input; an interrupt begins a new line."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        while True:
            try:
                return input(prompt if sys.stdin.isatty() else "").strip()
            except KeyboardInterrupt:
                print()
            except EOFError:
                if sys.stdin.isatty():
                    print()
                return None
            except UnicodeDecodeError as error:
                raise ConfigError(f"the input is not UTF-8 text: {error.reason} at byte {error.start}") from error
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _line_history() -> Iterator[None]:
    """Editing and a history of lines, kept in a file of the user's, where there is a terminal and readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    if not sys.stdin.isatty():
        yield
        return
    path = Path(platformdirs.user_state_dir("jaxspec")) / "history"
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(MOST_LINES)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            readline.write_history_file(path)
            path.chmod(0o600)
