"""The persistent compile cache: on by default, in the user's cache folder.

The entries are JAX's own. Beside each lies its SHA-256, by which a damaged one is known: it is removed, compiled again
and written again, without a word. JAX itself would warn of it at every start and never replace it.
"""

import contextlib
import functools
import hashlib
import logging
import os
import tempfile
from pathlib import Path

import jax
from jax._src import compilation_cache as jax_cache
from jax._src.lru_cache import LRUCache
from jax.experimental.compilation_cache import compilation_cache

from jaxspec.errors import ConfigError
from jaxspec.files import write_whole
from jaxspec.runtime import hosts, program_store

ENVIRONMENT = "JAXSPEC_COMPILE_CACHE"

# What JAX was told before jaxspec changed anything: the caller's own choice, which None goes back to.
_callers_folder: str | None = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]


def enable_compile_cache(folder: str | None) -> Path | None:
    """Point JAX at a folder of compiled programs; returns the folder in use, or None.

    "" switches the cache off. None takes `JAXSPEC_COMPILE_CACHE`, else what JAX itself was told
    (`JAX_COMPILATION_CACHE_DIR`), else the user's cache folder, else none if that cannot be written. A folder that was
    named and cannot be written raises `ConfigError`. Cached programs are code: the folder must be the user's own.
    """
    named = os.environ.get(ENVIRONMENT) if folder is None else folder
    if named == "":
        return _use(None)
    if named is None:
        named = _callers_folder
    path = Path(named).expanduser() if named else _users_folder() / "compiled"
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=path):
            pass
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        if named:
            raise ConfigError(f"the compile cache {path} cannot be written: {reason}") from error
        logging.getLogger(__name__).warning(
            "no compile cache: %s cannot be written (%s); every start compiles anew. %s names another folder",
            path, reason, ENVIRONMENT,
        )  # fmt: skip
        return _use(None)
    return _use(path)


def _users_folder() -> Path:
    # Imported where it is needed: a machine that only measures has no such package.
    import platformdirs

    return Path(platformdirs.user_cache_dir("jaxspec"))


def _use(path: Path | None) -> Path | None:
    jax.config.update("jax_enable_compilation_cache", path is not None)
    if path is not None:
        jax.config.update("jax_compilation_cache_dir", str(path))
    # JAX opens its cache once; without this a later choice would be ignored.
    compilation_cache.reset_cache()
    # A stored program belongs to the devices of one process.
    program_store.use(None if path is None or hosts.several() else path / "ready")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if path is not None:
        _check_entries(path)
    return path


class _CheckedCache(LRUCache):
    """JAX's cache without a limit of size, whose entries are checked when they are read and replaced when written."""

    def get(self, key: str) -> bytes | None:
        """An entry that is as it was written, or None."""
        entry, checksum = self._paths(key)
        try:
            value = entry.read_bytes()
        except OSError:
            return None
        try:
            if checksum.read_text(encoding="ascii") == hashlib.sha256(value).hexdigest():
                program_store.note_entry(value)
                return value
        except FileNotFoundError:
            # JAX alone wrote the entry.
            if _can_be_decompressed(value):
                with contextlib.suppress(OSError):  # without a checksum the next start decompresses it again
                    write_whole(checksum, hashlib.sha256(value).hexdigest().encode())
                program_store.note_entry(value)
                return value
        except (OSError, ValueError):
            pass  # a checksum that cannot be read is no better than a wrong one
        for path in (checksum, entry):
            with contextlib.suppress(OSError):
                path.unlink()
        return None

    def put(self, key: str, value: bytes) -> None:
        """Write an entry, also in place of one that is there."""
        entry, checksum = self._paths(key)
        try:
            write_whole(entry, value)
            write_whole(checksum, hashlib.sha256(value).hexdigest().encode())
        except OSError as error:
            _say_full(self._path, error.strerror)

    def _paths(self, key: str) -> tuple[Path, Path]:
        folder = Path(str(self._path))
        return folder / f"{key}-cache", folder / f"{key}-sha256"


def _can_be_decompressed(value: bytes) -> bool:
    """Whether an entry is whole, as far as the compression's own checks tell."""
    try:
        jax_cache.decompress_executable(value)
    except Exception:  # each of the libraries that JAX may compress with has errors of its own
        return False
    return True


@functools.cache
def _say_full(folder: object, reason: str) -> None:
    logging.getLogger(__name__).warning("compiled programs are not kept: %s cannot be written (%s)", folder, reason)


def _check_entries(path: Path) -> None:
    """Let JAX use a `_CheckedCache`, unless it was told to bound the cache or to verify it."""
    plain = jax_cache.get_file_cache(str(path))
    if plain is not None and type(plain[0]) is LRUCache and not plain[0].eviction_enabled:
        # What `_initialize_cache` of JAX sets; there is no public way to name another cache.
        jax_cache._cache, jax_cache._cache_initialized = _CheckedCache(str(path), max_size=-1), True
