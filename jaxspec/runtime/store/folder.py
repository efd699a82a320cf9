"""The folder of the compile cache: on by default, in the user's cache folder.

One process keeps its programs in the store (`program_files`). Several processes use JAX's own compile cache, as a
stored program belongs to the devices of one process.
"""

import importlib.util
import logging
import os
import tempfile
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxspec.errors import ConfigError
from jaxspec.runtime import hosts
from jaxspec.runtime.store import limit, program_files

ENVIRONMENT = "JAXSPEC_COMPILE_CACHE"

# JAX's setting before jaxspec changed anything: the caller's own choice, which None goes back to.
_callers_folder: str | None = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]


def enable_compile_cache(folder: str | None) -> Path | None:
    """Point JAX at a folder of compiled programs; returns the folder in use, or None.

    "" switches the cache off. None takes `JAXSPEC_COMPILE_CACHE`, else what JAX itself was told
    (`JAX_COMPILATION_CACHE_DIR`), else the user's cache folder, else none if that cannot be written. A folder with
    programs that cannot be written is read; another one that was named raises `ConfigError`. Cached programs are code:
    the folder must be the user's own.
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
        if isinstance(error, OSError) and (path / limit.PROGRAMS).is_dir():
            return _use(path)  # such as of a container's image: what is there is used, and nothing is kept
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
    several = hosts.several()
    foreign = path is not None and _callers_folder is not None and path == Path(_callers_folder)
    # JAX's own cache, where the caller has chosen a folder for it, serves the caller's code: it is left as it is.
    jax.config.update("jax_enable_compilation_cache", path is not None)
    if path is not None and several:
        jax.config.update("jax_compilation_cache_dir", str(path))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        if not foreign and importlib.util.find_spec("filelock") is not None:  # JAX needs it for a limit
            jax.config.update("jax_compilation_cache_max_size", limit.most_bytes())
    # JAX opens its cache once; without this a later choice would be ignored.
    compilation_cache.reset_cache()
    program_files.use(None if path is None or several else path / limit.PROGRAMS)
    if path is not None:
        limit.trim(path, with_jax=not foreign)
    return path
