"""Programs stored ready to run: a start needs neither to trace nor to lower them.

A file's name is a digest (`fingerprint`) of the source from which a program is made, or of the lowered program; two
names may belong to one file. The second one serves a start after a change of version that left the program as it was.
A file holds a SHA-256, and the program as JAX serializes it. Files are code: the folder must be the user's own.
"""

import contextlib
import hashlib
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax

from jaxspec.files import write_whole
from jaxspec.runtime.store import limit

LOG = logging.getLogger(__name__)

MAGIC = b"jaxspec program 1\n"

disabled = False  # tests that change functions under way store nothing
_folder: Path | None = None
_early: dict[str, Future[Any]] = {}  # programs that are loaded before their arguments are described, by digest
_thread = threading.local()


def use(folder: Path | None) -> None:
    """Keep programs in a folder, which is made when the first one comes; None keeps none."""
    global _folder
    _folder = folder


def is_used() -> bool:
    """Whether programs are stored at all."""
    return _folder is not None and not disabled


def compile_with(compile_it: Callable[[], Any]) -> tuple[Any, bool]:
    """Compile a program; returns it, and whether it can be stored, which only one that was compiled anew can be.

    One that JAX's own cache or memory gave would be stored without its kernels: it would load, and fail when it runs.
    """
    _thread.is_new = _thread.is_hit = False
    return compile_it(), _thread.is_new


def _note_hit(event: str, **_: Any) -> None:
    if event == "/jax/compilation_cache/cache_hits":
        _thread.is_hit = True


def _note_end(event: str, *_: Any, **__: Any) -> None:
    # Where a compilation failed, for an option that XLA does not know, the next one counts.
    if event == "/jax/core/compile/backend_compile_duration":
        _thread.is_new, _thread.is_hit = not getattr(_thread, "is_hit", False), False


jax.monitoring.register_event_listener(_note_hit)
jax.monitoring.register_event_duration_secs_listener(_note_end)


def size(digest: str) -> int | None:
    """Bytes of a program's file; None where there is none."""
    try:
        return None if _folder is None else (_folder / digest).stat().st_size
    except OSError:
        return None


def expect(name: str, submit: Callable[..., Future[Any]]) -> None:
    """Begin to load the program that `remember` noted; `submit` runs a function in the background.

    It is the largest one, which drafts: its loading takes as long as everything else of a start.
    """
    if _folder is None or disabled:
        return
    with contextlib.suppress(OSError, ValueError, IndexError):
        digest, *places = (_folder / f"{name}.first").read_text("ascii").split()
        if places and digest not in _early and digest.isalnum() and (_folder / digest).is_file():
            devices = tuple(jax.devices()[int(place)] for place in places)
            _early[digest] = submit(_read, _folder / digest, _AsStored(), None, devices)


def remember(name: str, digest: str, devices: tuple[Any, ...]) -> None:
    """Let `expect` begin with a program at the next start of the same model with the same settings.

    `devices` are those that it runs on; of another platform than JAX's default one they are not remembered.
    """
    if _folder is None or disabled:
        return
    path = _folder / f"{name}.first"
    with contextlib.suppress(OSError, ValueError):
        noted = " ".join([digest, *(str(jax.devices().index(device)) for device in devices)])
        if path.is_file() and path.read_text("ascii") == noted:
            os.utime(path)
        elif (_folder / digest).is_file():
            write_whole(path, noted)


class _AsStored:
    """Stands for the tree of a program's arguments as long as it is not known."""

    def unflatten(self, leaves: Any) -> Any:
        return leaves


def load(digest: str, in_tree: Any, out_tree: Any, devices: tuple[Any, ...]) -> Any | None:
    """A compiled program, or None where there is none that is whole; a file that is of no use is removed."""
    early = _early.pop(digest, None)
    # One that has not begun may wait for this call, in the same thread.
    if early is not None and not early.cancel() and (found := early.result()) is not None:
        # JAX makes it of both trees at once; where its inner names are others, the file is read again.
        with contextlib.suppress(AttributeError, TypeError, ValueError):
            described = in_tree.unflatten(found.args_info)
            return jax.stages.Compiled(found._executable, [], described, out_tree, no_kwargs=found._no_kwargs)
    return None if _folder is None else _read(_folder / digest, in_tree, out_tree, devices)


def _read(path: Path, in_tree: Any, out_tree: Any, devices: tuple[Any, ...]) -> Any | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    payload = content[len(MAGIC) + 32 :]
    from jax.experimental import serialize_executable

    try:
        if content[: -len(payload)] != _head(payload):
            raise ValueError("it is damaged")
        loaded = serialize_executable.deserialize_and_load(payload, in_tree, out_tree, execution_devices=list(devices))
    except Exception as error:  # whatever a file of another world raises: the program is compiled anew
        LOG.info("the stored program %s is not usable: %s", path.name, error)
        with contextlib.suppress(OSError):
            path.unlink()
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # it was used
    return loaded


def save(digest: str, compiled: Any, in_tree: Any, out_tree: Any) -> None:
    """Store a program that was compiled anew (`compile_with`)."""
    if _folder is None or compiled.in_tree != in_tree or compiled.out_tree != out_tree:
        return
    from jax.experimental import serialize_executable

    try:
        payload, *_ = serialize_executable.serialize(compiled)
        _folder.mkdir(exist_ok=True, mode=0o700)
        write_whole(_folder / digest, _head(payload) + payload)
        limit.trim(_folder.parent)
    except Exception as error:  # some programs cannot be serialized, and some folders take nothing
        LOG.info("a program is not stored: %s", error)


def _head(payload: bytes) -> bytes:
    return MAGIC + hashlib.sha256(payload).digest()


def link(digest: str, other: str) -> None:
    """Let a stored program have another digest, too."""
    if _folder is None or digest == other:
        return
    name = _folder / f".part-{other}-{os.getpid()}-{threading.get_ident()}"
    with contextlib.suppress(OSError):
        os.link(_folder / digest, name)
        os.replace(name, _folder / other)
        name.unlink(missing_ok=True)  # which stays where both names were the same file
