"""The persistent compile cache: on by default, in the user's cache folder."""

import os
from pathlib import Path

import jax
import platformdirs

from jaxspec.errors import ConfigError

ENVIRONMENT = "JAXSPEC_COMPILE_CACHE"


def enable_compile_cache(folder: str | None) -> Path | None:
    """Point JAX at a folder of compiled programs.

    Args:
      folder: the folder; "" switches the cache off; None takes `JAXSPEC_COMPILE_CACHE`, else what JAX itself was
        told (`JAX_COMPILATION_CACHE_DIR`), else the user's cache folder.

    Returns:
      The folder in use, or None. Cached programs are code: the folder must be the user's own.

    Raises:
      ConfigError: the folder cannot be made.
    """
    if folder is None:
        folder = os.environ.get(ENVIRONMENT)
    if folder is None and jax.config.jax_compilation_cache_dir:
        return Path(jax.config.jax_compilation_cache_dir)
    if folder == "":
        jax.config.update("jax_enable_compilation_cache", False)
        return None
    path = Path(folder).expanduser() if folder else Path(platformdirs.user_cache_dir("jaxspec")) / "compiled"
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(
            f"the compile cache {path} cannot be made ({error.strerror}); --compile-cache moves it"
        ) from error
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return path
