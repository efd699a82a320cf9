"""Programs stored ready to run: a start needs neither to trace nor to lower them.

They lie beside JAX's own cache of compiled programs, whose keys need the lowered program. A file is the program's
digest (`fingerprint`), a SHA-256 of what follows, and what JAX's serialization gives. Files are code, as all compiled
programs are: the folder must be the user's own.
"""

import contextlib
import dataclasses
import hashlib
import io
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from jaxspec.files import write_whole

LOG = logging.getLogger(__name__)

MAGIC = b"jaxspec program 1\n"
MOST_BYTES = 2**30  # of all files; the ones that were not used for longest go first
_MISS, _HIT = "/jax/compilation_cache/cache_misses", "/jax/compilation_cache/cache_hits"

disabled = False  # tests that change functions under way store nothing
_folder: Path | None = None
_seen = threading.local()  # what JAX's cache said and gave for the compilation under way in this thread
_listens = False


def use(folder: Path | None) -> None:
    """Keep programs in a folder, which is made when the first one comes; None keeps none."""
    global _folder, _listens
    _folder = folder
    if folder is not None and not _listens:
        _listens = True
        jax.monitoring.register_event_listener(_note)


def is_used() -> bool:
    """Whether programs are stored at all."""
    return _folder is not None and not disabled


def _note(event: str, **_: Any) -> None:
    if event in (_MISS, _HIT):
        getattr(_seen, "events", []).append(event)


def note_entry(entry: bytes) -> None:
    """JAX's cache gives a program, as it stores them, to a compilation in this thread."""
    getattr(_seen, "entries", []).append(entry)


@dataclasses.dataclass
class Origin:
    """Where compilations took their programs from: events of JAX's cache, and the entries that it gave."""

    events: list[str] = dataclasses.field(default_factory=list)
    entries: list[bytes] = dataclasses.field(default_factory=list)


@contextlib.contextmanager
def compiling() -> Iterator[Origin]:
    """Within, what JAX's cache says and gives in this thread is noted in what is yielded."""
    origin = Origin()
    _seen.events, _seen.entries = origin.events, origin.entries
    try:
        yield origin
    finally:
        _seen.events, _seen.entries = [], []


def size(digest: str) -> int | None:
    """Bytes of a program's file; None where there is none."""
    if _folder is None:
        return None
    try:
        return (_folder / digest).stat().st_size
    except OSError:
        return None


def load(digest: str, in_tree: Any, out_tree: Any, devices: tuple[Any, ...]) -> Any | None:
    """A compiled program, or None where there is none that is whole; a file that is of no use is removed."""
    if _folder is None:
        return None
    path = _folder / digest
    try:
        content = path.read_bytes()
    except OSError:
        return None
    head = len(MAGIC) + 32
    payload = content[head:]
    if content[: len(MAGIC)] != MAGIC or hashlib.sha256(payload).digest() != content[len(MAGIC) : head]:
        _remove(path)
        return None
    from jax.experimental import serialize_executable

    try:
        loaded = serialize_executable.deserialize_and_load(payload, in_tree, out_tree, execution_devices=list(devices))
    except Exception as error:  # whatever a file of another world raises: the program is compiled anew
        LOG.info("the stored program %s is not usable: %s", digest, error)
        _remove(path)
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # it was used
    return loaded


def save(digest: str, compiled: Any, in_tree: Any, out_tree: Any, origin: Origin) -> None:
    """Store a program that was compiled just now; `origin` is that of its compilation.

    What came out of JAX's cache cannot be serialized again: then the cache's own entry is stored.
    """
    if _folder is None or compiled.in_tree != in_tree or compiled.out_tree != out_tree:
        return
    try:
        if _HIT not in origin.events and _MISS in origin.events:
            from jax.experimental import serialize_executable

            payload, *_ = serialize_executable.serialize(compiled)
        elif origin.events == [_HIT] and len(origin.entries) == 1:
            payload = _repack(compiled, origin.entries[0])
        else:
            return
    except Exception as error:  # some programs cannot be serialized
        LOG.info("a program is not stored: %s", error)
        return
    try:
        _folder.mkdir(exist_ok=True, mode=0o700)
        write_whole(_folder / digest, MAGIC + hashlib.sha256(payload).digest() + payload)
        trim(_folder, MOST_BYTES)
    except OSError as error:
        LOG.info("a program is not stored: %s", error)


def _repack(compiled: Any, entry: bytes) -> bytes:
    """What `serialize_executable.serialize` gives, with the executable as an entry of JAX's cache holds it."""
    from jax._src import compilation_cache as jax_cache
    from jax.experimental import serialize_executable

    executable, _ = jax_cache.extract_executable_and_time(jax_cache.decompress_executable(entry))

    class Pickler(serialize_executable._JaxPjrtPickler):
        def persistent_id(self, obj: Any) -> Any:
            if type(obj).__name__ in ("LoadedExecutable", "Executable"):
                return "exec", executable
            return super().persistent_id(obj)

    unloaded = compiled._executable._unloaded_executable
    if unloaded is None or getattr(unloaded, "mut", None) and unloaded.mut.in_mut or compiled._params.const_args:
        raise ValueError("its executable alone does not make it")
    with io.BytesIO() as file:
        Pickler(file).dump((unloaded, jax.tree.leaves(compiled.args_info), compiled._no_kwargs))
        return file.getvalue()


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def trim(folder: Path, most: int) -> None:
    """Remove the files that were not used for longest, until all together have at most `most` bytes."""
    found = []
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            found.append((path.stat().st_mtime, path.stat().st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found, key=lambda file: file[0]):
        if total <= most:
            return
        path.unlink(missing_ok=True)
        total -= size
