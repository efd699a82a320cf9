"""Faults while layers are read: an error that names file and tensor, no wrong token, and the next request works."""

import errno
import gc
import os
import random
import re
import shutil
import threading
import time
from pathlib import Path

import pytest
from marks import quick_part
from offload_cases import checkpoint, decode, make_pair, stream_of

from jaxspec.checkpoint.native import checkpoint as native_checkpoint
from jaxspec.errors import CheckpointError
from jaxspec.methods.autoregressive import Autoregressive
from jaxspec.offload.layout import LeafLayout
from jaxspec.offload.reader import DirectReader, OpenFile, start_threads

KINDS = ("float32", "q4_0", "native q8_0")
# Prompt and four tokens: five passes of five layers.
COUNT = 4


class Streamed:
    """A model that is streamed from a copy of its files, which a fault may damage."""

    def __init__(self, kind, folder):
        source = checkpoint(folder, kind)
        self.path = folder / "copies" / kind.replace(" ", "-") / source.name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        self.path.parent.mkdir(parents=True)
        copy(source, self.path)
        self.pair = make_pair(self.path, Autoregressive(), offload="disk", resident=1)
        self.expected = decode(self.pair, count=COUNT)
        # TensorStore reads native checkpoints: a fault comes before an array of it is opened.
        self.is_native = source.is_dir() and kind.startswith("native")
        files = stream_of(self.pair).store._reader._stamps
        if self.is_native:
            streamed = stream_of(self.pair).store.layouts
            files = [f for i in streamed for f in self.path.glob(f"arrays/layers.{i}.*/c/**/*") if f.is_file()]
        self.kept = {path: (path.read_bytes(), os.stat(path).st_mtime_ns) for path in files}
        self._calls = {}

    def num_calls(self, monkeypatch, owner, name):
        """How often an undisturbed request calls a method; how many reads it takes depends on the file system."""
        if (owner, name) not in self._calls:
            with monkeypatch.context() as patch:
                calls = at_call(patch, owner, name, None, None)
                assert decode(self.pair, count=COUNT) == self.expected
            self._calls[owner, name] = len(calls)
        return self._calls[owner, name]

    def restore(self):
        """Put the files back in place, with the time of their last change."""
        stream_of(self.pair).reset()
        for path, (data, modified) in self.kept.items():
            moved = path.with_name(path.name + ".moved")
            if moved.exists():
                moved.rename(path)
            with open(path, "r+b") as file:
                file.truncate(0)
                file.write(data)
            os.utime(path, ns=(modified, modified))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def models(folder):
    return {kind: Streamed(kind, folder) for kind in KINDS}


def at_call(monkeypatch, owner, name, number, fault):
    """Count the calls of a method; the one with this number runs a fault: before it, or in its place if it raises."""
    original, calls = getattr(owner, name), []

    def called(self, *args):
        calls.append(None)
        if len(calls) == number:
            fault(self, *args)
        return original(self, *args)

    monkeypatch.setattr(owner, name, called)
    return calls


def read_error(self, *_):
    raise OSError(errno.EIO, os.strerror(errno.EIO), str(self.path))


def out_of_memory(*_):
    raise MemoryError


def no_map(*_):
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def truncate(model, rng):
    path = rng.choice(list(model.kept))
    os.truncate(path, rng.randrange(os.stat(path).st_size))


def flip_bit(model, rng):
    path = rng.choice(list(model.kept))
    with open(path, "r+b") as file:
        file.seek(rng.randrange(len(model.kept[path][0])))
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1 << rng.randrange(8)]))


def remove(model, rng):
    path = rng.choice(list(model.kept))
    path.rename(path.with_name(path.name + ".moved"))


def run_fault(model, kind, rng, monkeypatch):
    """A request in the middle of which a fault happens; returns its error, or None where it was over before."""
    at = {
        read_error: (OpenFile, "_read_some"), out_of_memory: (LeafLayout, "write"), no_map: (DirectReader, "_take"),
    }  # fmt: skip
    owner, name = at.get(kind, (native_checkpoint, "open_array") if model.is_native else (OpenFile, "read"))
    fault = kind if kind in at else lambda *_: kind(model, rng)
    # A few calls may come after the last pass, for a further one: faults there do not reach this request.
    number = rng.randrange(1, model.num_calls(monkeypatch, owner, name) * 5 // 4)
    with monkeypatch.context() as patch:
        at_call(patch, owner, name, number, fault)
        try:
            found = decode(model.pair, count=COUNT)
        except (CheckpointError, MemoryError) as error:
            return error
        assert found == model.expected, "a fault changed a token"
    return None


# The first two happen in the reader, which does not read native checkpoints.
FAULTS = (read_error, no_map, out_of_memory, truncate, flip_bit, remove)


CASES = [*((KINDS[i % 3], fault) for i, fault in enumerate(FAULTS)), ("native q8_0", flip_bit)]


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "fault"), quick_part(CASES, lambda kind, _: kind != "float32"))
def test_the_error_says_what_and_where(models, kind, fault, monkeypatch):
    """The next request gives the tokens of an undisturbed one."""
    model, errors = models[kind], []
    for seed in range(100):
        if len(errors) == 3:
            break
        error = run_fault(model, fault, random.Random(seed), monkeypatch)
        errors += [error] if error is not None else []
        model.restore()
        assert decode(model.pair, count=COUNT) == model.expected
    assert len(errors) == 3, "the seeds hit too few reads"
    for error in errors:
        assert isinstance(error, MemoryError if fault in (out_of_memory, no_map) else CheckpointError)
        assert str(model.path) in str(error)
        assert re.search(r"layers\.\d\.\w+", str(error)), f"no tensor is named: {error}"


def test_a_flipped_bit_of_a_native_checkpoint_is_noticed_by_its_checksum(models):
    """Also where size and time of the file are those of before."""
    model = models["native q8_0"]
    streamed = max(stream_of(model.pair).store.layouts)
    path = next(path for path in model.kept if f"layers.{streamed}.gate_up" in str(path))
    flip_bit_at = len(model.kept[path][0]) // 2
    with open(path, "r+b") as file:
        file.seek(flip_bit_at)
        file.write(bytes([model.kept[path][0][flip_bit_at] ^ 4]))
    os.utime(path, ns=(model.kept[path][1],) * 2)
    stream_of(model.pair).reset()
    with pytest.raises(CheckpointError, match="damaged or incomplete"):
        decode(model.pair, count=COUNT)
    model.restore()
    assert decode(model.pair, count=COUNT) == model.expected


def test_threads_that_cannot_be_started_are_an_error_of_loading(models, monkeypatch):
    """Later no thread is started, so work that is given to a pool is never both refused and done."""
    stream = stream_of(models["q4_0"].pair)
    for pool in (stream._pool, stream.store._reader._pool):
        assert len(pool._threads) == pool._max_workers
    start, started = threading.Thread.start, []

    def refuse(thread):
        started.append(thread)
        if len(started) == 3:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(MemoryError, match="threads that read cannot be started"):
        start_threads(4, "few")
    assert not any(thread.is_alive() for thread in started)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are counted in /proc")
def test_files_are_open_only_while_they_are_read(models):
    """A native checkpoint of 80 layers has more files than a process may open."""
    model = models["native q8_0"]
    stream_of(model.pair).reset()
    kept = {str(path) for path in model.kept}

    def opened():
        links = [link.path for link in os.scandir("/proc/self/fd") if os.path.lexists(link.path)]
        return kept & {os.readlink(link) for link in links if os.path.lexists(link)}

    # An interrupted read leaves its file to a finalizer, which an exception of an earlier test may hold up.
    end = time.monotonic() + 20
    while opened() and time.monotonic() < end:
        gc.collect()
        time.sleep(0.05)
    assert len(kept) > 10 and not opened()
