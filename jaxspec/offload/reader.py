"""Reads from files past the page cache, by several threads, with what they are asked for counted."""

import contextlib
import errno
import mmap
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxspec.errors import CheckpointError

# Direct reads begin and end at multiples of this: a page, which is a multiple of every disk's block.
PAGE = 4096
# A read of one thread: large enough for a disk's full speed, small enough for several at once. Twice as many threads as
# plain reads need keep the disk at work while some of them wait for a core or for the interpreter's lock.
PIECE = 2 << 20
NUM_THREADS = 8


class Stamp(NamedTuple):
    """Attributes of a file that must not change while it is in use."""

    device: int
    inode: int
    size: int
    modified_ns: int


class OpenFile:
    """A file while it is read: `direct` reads past the page cache where the file system can, `buffered` always does."""

    def __init__(self, path: Path, *, direct: bool = True):
        """Open it; CheckpointError where that fails. Without `direct` only `buffered` is tried."""
        self.path = path
        try:
            self.buffered = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            self._descriptors = [self.buffered]
            # A file is also closed where an interrupted read leaves no caller to do it.
            self.close = weakref.finalize(self, _close_all, self._descriptors)
            self.stamp = _stamp(os.fstat(self.buffered))
            self.direct: int | None = None
            if direct and hasattr(os, "O_DIRECT"):
                # A file system in memory has no direct reads.
                with contextlib.suppress(OSError):
                    self.direct = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
                    self._descriptors.append(self.direct)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error

    def check(self) -> None:
        """CheckpointError where the file at this path is not the one that was opened, or was written since."""
        try:
            now = _stamp(os.stat(self.path))
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read any more: {error.strerror or error}") from error
        if now != self.stamp:
            raise CheckpointError(f"{self.path}: was changed while it was in use: load the model again")

    def read(self, view: memoryview, offset: int) -> None:
        """Fill `view` from `offset`; both are aligned, and the end of the file may come before that of `view`."""
        done = 0
        while done < len(view) and offset + done < self.stamp.size:
            count = self._read_some(view[done:], offset + done)
            if count == 0:
                break
            done += count
        if done < min(len(view), self.stamp.size - offset):
            raise CheckpointError(f"{self.path}: ends at byte {offset + done} of {self.stamp.size}: truncated")

    def _read_some(self, view: memoryview, offset: int) -> int:
        # After a short read the rest may begin within a page, where direct reads cannot.
        if self.direct is not None and offset % PAGE == 0:
            try:
                return os.preadv(self.direct, [view], offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.direct = None
        count = os.preadv(self.buffered, [view], offset)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.buffered, offset, count, os.POSIX_FADV_DONTNEED)
        return count


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class DirectReader:
    """Reads ranges of files; what is asked for is read by several threads at once.

    Called as `reader(path, offset, nbytes)` it gives a new writable uint8 array `[nbytes]`. Within `reusing()` arrays
    lie in memory of the calling thread that the next `reusing()` uses again. `bytes_read` counts bytes that were asked
    for, `reads` the calls, `busy_s` the seconds in which any call was running.

    Raises:
      CheckpointError: the file cannot be read, ends too early, or has changed since it was first read.
      MemoryError: there is no memory for what is read; the message names the file.
    """

    def __init__(self, threads: int = NUM_THREADS):
        """Files are open only while they are read: a checkpoint may have more of them than a process may open."""
        self._pool = start_threads(threads, "jaxspec-read")
        self._stamps: dict[Path, Stamp] = {}  # of each file when it was first read
        self._buffered: set[Path] = set()  # those that cannot be read past the page cache
        self._lock = threading.Lock()
        self._local = threading.local()
        self.bytes_read = self.reads = 0
        self.busy_s = 0.0
        self._running, self._since = 0, 0.0

    def __call__(self, path: Path, offset: int, nbytes: int) -> np.ndarray:
        file = self._open(path)
        start = offset - offset % PAGE
        stop = -(-(offset + nbytes) // PAGE) * PAGE
        try:
            buffer = self._take(stop - start)
        except (OSError, MemoryError) as error:  # a map that fails is an OSError
            raise MemoryError(f"{path}: no memory for {nbytes} bytes of it") from error
        view = memoryview(buffer)
        with self.counting(nbytes):
            pieces: Sequence[Future[Any]] = [
                self._pool.submit(file.read, view[at : min(at + PIECE, stop - start)], start + at)
                for at in range(0, stop - start, PIECE)
            ]
            failed: BaseException | None = None
            for piece in pieces:
                # All of them have to end before the memory is used again.
                failed = piece.exception() or failed
        if file.direct is None:
            self._buffered.add(path)
        file.close()
        if isinstance(failed, OSError):
            raise CheckpointError(f"{path}: cannot be read: {failed.strerror or failed}") from failed
        if failed is not None:
            raise failed
        file.check()
        if offset + nbytes > file.stamp.size:
            raise CheckpointError(f"{path}: has {file.stamp.size} bytes, {offset + nbytes} are needed: truncated")
        return np.frombuffer(buffer, np.uint8)[offset - start : offset - start + nbytes]

    @contextlib.contextmanager
    def reusing(self) -> Iterator[None]:
        """Within, arrays lie in this thread's memory, which is used again when it is entered the next time."""
        self._local.used = 0
        try:
            yield
        finally:
            self._local.used = None

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def _open(self, path: Path) -> OpenFile:
        file = OpenFile(path, direct=path not in self._buffered)
        with self._lock:
            # The file of the first read is the one that all others have to be of.
            file.stamp = self._stamps.setdefault(path, file.stamp)
        return file

    def _take(self, nbytes: int) -> mmap.mmap:
        used = getattr(self._local, "used", None)
        if used is None:
            return map_memory(nbytes)
        kept: list[mmap.mmap] = self._local.__dict__.setdefault("kept", [])
        if used == len(kept):
            kept.append(map_memory(nbytes))
        elif len(kept[used]) < nbytes:
            kept[used] = map_memory(nbytes)
        self._local.used = used + 1
        return kept[used]

    @contextlib.contextmanager
    def counting(self, nbytes: int) -> Iterator[None]:
        """Count so many bytes that are read within."""
        with self._lock:
            self._running += 1
            if self._running == 1:
                self._since = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                self.reads += 1
                self.bytes_read += nbytes
                if self._running == 0:
                    self.busy_s += time.perf_counter() - self._since


def start_threads(count: int, name: str) -> ThreadPoolExecutor:
    """A pool whose threads all run already; MemoryError where the system has no more of them.

    A pool that starts them one by one may fail while it is given work, and does that work all the same: it would write
    into memory that is in use for something else by then.
    """
    pool, all_run = ThreadPoolExecutor(count, thread_name_prefix=name), threading.Barrier(count)
    try:
        for _ in range(count):
            pool.submit(all_run.wait)
    except RuntimeError as error:
        all_run.abort()
        pool.shutdown()
        raise MemoryError(f"{count} threads that read cannot be started: {error}") from error
    return pool


def map_memory(nbytes: int) -> mmap.mmap:
    """New memory that begins at a page, in large pages where the system has them: those cost a read less."""
    memory = mmap.mmap(-1, max(nbytes, PAGE))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel may be built without large pages.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _stamp(found: os.stat_result) -> Stamp:
    return Stamp(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
