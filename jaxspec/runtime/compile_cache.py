"""The persistent compile cache: on by default, in the user's cache folder."""

import logging
import os
import tempfile
from pathlib import Path

import jax
import platformdirs
from jax.experimental.compilation_cache import compilation_cache

from jaxspec.errors import ConfigError

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
    path = Path(named).expanduser() if named else Path(platformdirs.user_cache_dir("jaxspec")) / "compiled"
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        if named:
            raise ConfigError(f"the compile cache {path} cannot be written: {error.strerror}") from error
        logging.getLogger(__name__).warning(
            "no compile cache: %s cannot be written (%s); every start compiles anew. %s names another folder",
            path, error.strerror, ENVIRONMENT,
        )  # fmt: skip
        return _use(None)
    return _use(path)


def _use(path: Path | None) -> Path | None:
    jax.config.update("jax_enable_compilation_cache", path is not None)
    if path is not None:
        jax.config.update("jax_compilation_cache_dir", str(path))
    # JAX opens its cache once; without this a later choice would be ignored.
    compilation_cache.reset_cache()
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return path
