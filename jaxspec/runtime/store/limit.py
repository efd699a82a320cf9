"""One limit of size for what jaxspec keeps in its cache folder: programs, weights, measurements; and their ages.

`JAXSPEC_CACHE_SIZE` is the limit. What was not used for longest goes first. A file that is used has its time of change
set anew.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from jaxspec.config import parse_bytes

ENVIRONMENT = "JAXSPEC_CACHE_SIZE"
DEFAULT = "4GiB"
PROGRAMS, WEIGHTS, PROFILES = "ready", "weights", "profiles"  # folders
JAX_SUFFIXES = ("-cache", "-atime")  # of the files of JAX's own cache, beside the folders
# Seconds after which a file that is being written was left by a process that died, and a measurement is of no use: each
# version of jaxspec and JAX makes new ones.
LONGEST_WRITE_S, OLD_S = 3600, 90 * 24 * 3600


def most_bytes() -> int:
    """The limit in bytes; ConfigError where the environment names none."""
    return parse_bytes(ENVIRONMENT, os.environ.get(ENVIRONMENT) or DEFAULT)


def used_bytes(cache: Path) -> int:
    """Bytes of the kept files; those of JAX's own cache included."""
    return sum(size for _, size, _ in _kept(cache, True))


def trim(cache: Path, most: int | None = None, *, with_jax: bool = False) -> None:
    """Remove old measurements, and what was not used for longest, until at most `most` bytes are left; None: the limit.

    A file with two names is counted once, and loses both. What another process is writing stays. `with_jax` counts and
    removes the entries of JAX's own cache, too.
    """
    most, now = most_bytes() if most is None else most, time.time()
    kept = list(_kept(cache, with_jax))
    total = sum(size for _, size, _ in kept)
    for used, size, paths in sorted(kept):
        name, age = paths[0].name, now - used
        unused = age > OLD_S and paths[0].parent.name == PROFILES and name.startswith(("costs-", "rates-"))
        if total > most or unused or ".part-" in name:
            for path in paths:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
            total -= size


def _kept(cache: Path, with_jax: bool) -> Iterator[tuple[float, int, list[Path]]]:
    """When each file was last used, its bytes, and its names; one that is being written is none of them."""
    found: dict[object, tuple[float, int, list[Path]]] = {}
    for folder in (*(cache / name for name in (PROGRAMS, WEIGHTS, PROFILES)), *([cache] if with_jax else [])):
        with contextlib.suppress(OSError):
            for path in folder.iterdir():
                if folder == cache and not path.name.endswith(JAX_SUFFIXES):
                    continue
                with contextlib.suppress(OSError):
                    stat = path.stat()
                    if ".part-" in path.name and time.time() - stat.st_mtime < LONGEST_WRITE_S:
                        continue
                    # JAX notes in a file of its own when an entry was used.
                    key = path.name[: -len(JAX_SUFFIXES[0])] if folder == cache else (stat.st_dev, stat.st_ino)
                    used, size, paths = found.get(key, (0.0, 0, []))
                    size = size + stat.st_size if folder == cache else stat.st_size
                    found[key] = max(used, stat.st_mtime), size, [*paths, path]
    yield from found.values()
