"""What runs in the guarded process: chat templates, and tokenizers that may hang or crash.

`jaxspec.text.guard` starts it and talks to it. A request and its reply are JSON with their length in eight bytes before
them. Each request brings its limits of processor time and address space. The system ends the process where one is
exceeded, also inside a library's own code.
"""

import io
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

_KEPT_TOKENIZERS = 4

_tokenizers: dict[str, Any] = {}  # by key, the latest last


def serve() -> None:
    """Answer requests from standard input until it ends."""
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    # What a library prints must not end up among the replies.
    for descriptor in (0, 1, 2):
        os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
    # Before the first request, which then need not wait for it.
    from jaxspec.text import render  # noqa: F401

    while (request := read_frame(requests)) is not None:
        write_frame(replies, _answer(request))
    os._exit(0)


def read_frame(stream: BinaryIO) -> Any:
    """The next request or reply; None where the stream ends."""
    length = stream.read(8)
    if len(length) < 8:
        return None
    content = stream.read(int.from_bytes(length, "little"))
    return json.loads(content) if len(content) == int.from_bytes(length, "little") else None


def write_frame(stream: BinaryIO, value: Any) -> None:
    """Write a request or a reply."""
    content = json.dumps(value).encode()
    stream.write(len(content).to_bytes(8, "little") + content)
    stream.flush()


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    number = request.pop("number")
    _limit(request.pop("seconds"), request.pop("bytes"))
    operation = _OPERATIONS[request.pop("operation")]
    try:
        reply = {"value": operation(**request)}
    except MemoryError:
        reply = {"error": "it needs more memory than the limit allows"}
    except BaseException as error:  # a panic of a Rust library is no Exception
        reply = {"error": str(error) or type(error).__name__}
    _limit(0, -1)
    return {"number": number} | reply


def _limit(seconds: float, num_bytes: int) -> None:
    """Bound processor time and address space; 0 and -1 take the limits away. Systems without them set none."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
    try:
        import resource

        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes if num_bytes >= 0 else hard, hard))
    except (ImportError, ValueError, OSError):
        return


def _render(source: str, variables: dict[str, Any]) -> str:
    from jaxspec.text.render import render

    return render(source, variables)


def _load(key: str, tokenizer: str, added: Sequence[dict[str, Any]] = ()) -> None:
    from tokenizers import AddedToken, Tokenizer

    _tokenizers.pop(key, None)
    while len(_tokenizers) >= _KEPT_TOKENIZERS:
        del _tokenizers[next(iter(_tokenizers))]
    _tokenizers[key] = Tokenizer.from_str(tokenizer)
    _tokenizers[key].add_tokens([AddedToken(**token) for token in added])


def _encode(key: str, text: str, add_special_tokens: bool) -> list[int] | None:
    """None where the tokenizer is not loaded here."""
    if key not in _tokenizers:
        return None
    return _tokenizers[key].encode(text, add_special_tokens=add_special_tokens).ids


def _convert(folder: str) -> dict[str, Any]:
    """Let transformers convert a tokenizer of an older format: its JSON, and its special tokens."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    sys.stdout = sys.stderr = io.StringIO()
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(Path(folder), local_files_only=True, trust_remote_code=False)
    backend = getattr(found, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise TypeError(f"its {type(found).__name__} has no fast tokenizer")
    tokens = {name: str(token) for name, token in found.special_tokens_map.items() if isinstance(token, str)}
    return {"tokenizer": backend.to_str(), "special_tokens": tokens}


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "start": lambda: None,
    "render": _render,
    "load": _load,
    "encode": _encode,
    "convert": _convert,
}
