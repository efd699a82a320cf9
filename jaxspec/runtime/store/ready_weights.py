"""Weights kept as they lie in memory: a start neither opens the checkpoint's own formats again nor packs.

The files lie beside the compiled programs, one for a target and its draft. A file holds a header, and the bytes of each
array, on multiples of 64 bytes. Its name is a digest of everything that shapes them: the checkpoints' files (size and
time of change), the placements, and the code. Every array has a SHA-256, which is compared when it is mapped. A file is
written once and never changed: it is replaced or removed as a whole, which leaves those who have mapped it what it was.
"""

import contextlib
import hashlib
import json
import logging
import mmap
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxspec.files import digest_text, file_stamps, replacing
from jaxspec.models.params import Params
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.store import limit, program_files
from jaxspec.runtime.store.fingerprint import UnknownError, describe, surroundings

LOG = logging.getLogger(__name__)

MAGIC = b"jaxspec weights 2\n"
ALIGNMENT = 64  # of arrays that XLA takes over without a copy
LONGEST_HEADER = 1 << 24
# Larger models are read from their checkpoints: there the start is the time of the disk, and a copy would fill it.
LARGEST_BYTES = 2**30
_NUM_THREADS = 2


class ReadyWeights:
    """The file of one pair of models; where there is none, or it is damaged, `load` gives None."""

    def __init__(self, folder: Path, name: str, target: Placement, draft: Placement | None):
        """Use `find`."""
        self._folder, self._path = folder, folder / name
        self._writing: Future[None] | None = None
        self._shapes = [target.params(), None if draft is None else draft.params()]

    @staticmethod
    def find(
        cache: Path | None, paths: Sequence[Path], target: Placement, draft: Placement | None
    ) -> "ReadyWeights | None":
        """The file of models with checkpoints at `paths`; None where weights are not kept.

        That is without a cache folder, on other devices than one CPU, and where nothing is packed.
        """
        placements = [target] if draft is None else [target, draft]
        single = all(len(p.plan.devices) == 1 and p.plan.devices[0].platform == "cpu" for p in placements)
        if cache is None or not program_files.is_used() or not single or target.activations == "float32":
            return None
        try:
            words = [surroundings(), *map(_describe, placements), *map(file_stamps, paths)]
        except (UnknownError, OSError) as error:
            LOG.info("ready weights are not kept: %s", error)
            return None
        name = digest_text(repr(words))
        return ReadyWeights(cache / limit.WEIGHTS, name, target, draft)

    def load(self) -> tuple[Params, Params | None] | None:
        """Parameters of target and draft, or None; a damaged file is removed."""
        try:
            with open(self._path, "rb", buffering=0) as file:
                header, data = _map(file)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            LOG.info("the ready weights %s are not usable: %s", self._path.name, error)
            with contextlib.suppress(OSError):
                self._path.unlink()
            return None
        shapes, treedef = jax.tree.flatten(self._shapes)
        made: dict[int, jax.Array] = {}
        leaves = []
        for shape, place in zip(shapes, header["places"], strict=True):
            if place not in made:
                size = int(np.prod(shape.shape)) * shape.dtype.itemsize
                array = data[place : place + size].view(shape.dtype).reshape(shape.shape)
                made[place] = jax.device_put(array, shape.sharding)
            leaves.append(made[place])
        with contextlib.suppress(OSError):
            os.utime(self._path)  # it was used
        return tuple(jax.tree.unflatten(treedef, leaves))

    def save(self, params: Params, draft_params: Params | None) -> None:
        """Write the file in the background, unless the process ends before."""
        leaves, treedef = jax.tree.flatten([params, draft_params])
        shapes, wanted = jax.tree.flatten(self._shapes)
        unlike = treedef != wanted or any(
            (leaf.shape, leaf.dtype) != (shape.shape, shape.dtype) or not isinstance(leaf.sharding, NamedSharding)
            for leaf, shape in zip(leaves, shapes, strict=True)
        )
        # What fills the cache would be removed again, or leave no room for programs.
        largest = min(LARGEST_BYTES, limit.most_bytes() // 2)
        if unlike or sum({id(leaf): leaf.nbytes for leaf in leaves}.values()) > largest:
            return
        pool = ThreadPoolExecutor(1, "jaxspec-weights")
        self._writing = pool.submit(self._write, leaves)
        pool.shutdown(wait=False)

    def settle(self) -> None:
        """Wait until what `save` began is written."""
        if self._writing is not None:
            self._writing.result()

    def _write(self, leaves: list[jax.Array]) -> None:
        arrays = {id(leaf): leaf for leaf in leaves}
        starts, size = {}, 0
        for key, array in arrays.items():
            starts[key], size = size, size + _round_up(array.nbytes)
        try:
            parts = [(starts[key], array.nbytes, _digest(_bytes(array))) for key, array in arrays.items()]
            header = {"places": [starts[id(leaf)] for leaf in leaves], "size": size, "parts": parts}
            text = json.dumps(header).encode()
            head = MAGIC + len(text).to_bytes(8, "little") + hashlib.sha256(text).digest() + text
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with replacing(self._path) as file:
                for data in (np.frombuffer(head, np.uint8), *map(_bytes, arrays.values())):
                    if not threading.main_thread().is_alive():
                        raise OSError("the process ends")
                    file.write(data.data)
                    file.write(bytes(_round_up(len(data)) - len(data)))
            limit.trim(self._folder.parent)
        except OSError as error:
            LOG.info("the weights are not kept: %s", error)


def _bytes(array: jax.Array) -> np.ndarray:
    """The bytes of an array; nothing is copied on a CPU."""
    return np.asarray(array).reshape(-1).view(np.uint8)


def _digest(data: np.ndarray) -> str:
    return hashlib.sha256(data.data).hexdigest()


def _map(file: BinaryIO) -> tuple[dict[str, Any], np.ndarray]:
    """Header and bytes of a file, mapped; ValueError where they are not as they were written."""
    start = len(MAGIC)
    head = file.read(start + 40)
    length = int.from_bytes(head[start : start + 8], "little")
    if head[:start] != MAGIC or length > LONGEST_HEADER:
        raise ValueError("it begins otherwise")
    text = file.read(length)
    if hashlib.sha256(text).digest() != head[start + 8 :]:
        raise ValueError("its header is damaged")
    header, begin = json.loads(text), _round_up(start + 40 + length)
    if os.fstat(file.fileno()).st_size != begin + header["size"]:
        raise ValueError("its size is another")
    # A copy in memory of its own would take several times as long, most of it in page faults.
    data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8, offset=begin)

    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        digests = pool.map(lambda part: _digest(data[part[0] : part[0] + part[1]]), header["parts"])
        if [*digests] != [part[2] for part in header["parts"]]:
            raise ValueError("its bytes are damaged")
    return header, data


def _round_up(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _describe(placement: Placement) -> str:
    shapes, tree = jax.tree.flatten(placement.params())
    return repr((placement.plan.kernels, describe(shapes), str(tree)))
