import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from make import random_tensors, tiny_config, write_hf
from native_models import write_tokenizer

from jaxspec.checkpoint import convert as module
from jaxspec.checkpoint.convert import convert, find_leftovers
from jaxspec.checkpoint.load import load_foreign, open_checkpoint
from jaxspec.checkpoint.native.checkpoint import read_leaf, restore_native
from jaxspec.checkpoint.native.manifest import open_native
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.models.families import FAMILIES
from jaxspec.models.quantization import Storage
from jaxspec.runtime.mesh import plan_mesh
from jaxspec.text.tokenizer import save_tokenizer

BF16 = jnp.dtype(jnp.bfloat16)


def write_source(folder, family="llama", **options):
    cfg = tiny_config(family)
    write_hf(folder, cfg, **options)
    write_tokenizer(folder, cfg.vocab_size)
    return folder


@pytest.fixture
def source(tmp_path):
    return write_source(tmp_path / "source")


@pytest.fixture(scope="module", params=FAMILIES)
def converted(request, tmp_path_factory):
    """A checkpoint of each family, and what it was converted to."""
    folder = tmp_path_factory.mktemp(request.param)
    source = write_source(folder / "source", request.param, generation={"eos_token_id": [2, 3]})
    return open_checkpoint(source), convert(source, folder / "native")


@pytest.mark.parametrize("degree", [1, 4])
def test_restored_equals_loaded_from_the_source(converted, degree):
    source, checkpoint = converted
    assert (checkpoint.config, checkpoint.eos_ids) == (source.config, (2, 3))
    assert checkpoint.storage == Storage("float32")
    plan = plan_mesh(degree)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a, b, strict=True),
        restore_native(checkpoint, plan),
        load_foreign(source, plan, jnp.float32),
    )


def test_no_file_names_the_folder_that_it_was_written_in(tmp_path, source):
    checkpoint = convert(source, tmp_path / "native")
    files = [path for path in checkpoint.path.rglob("*") if path.is_file()]
    assert [path.name for path in files if os.fsencode(tmp_path) in path.read_bytes()] == []


@pytest.mark.parametrize(
    ("stored", "asked", "expected"),
    [
        (np.float32, "auto", "float32"),
        (np.float16, "auto", "float16"),
        (BF16, "auto", "bfloat16"),
        (BF16, "float32", "float32"),
    ],
)
def test_dtypes(tmp_path, stored, asked, expected):
    source = write_source(tmp_path / "source", dtype=stored)
    checkpoint = convert(source, tmp_path / "native", asked)
    assert checkpoint.storage == Storage(expected)
    down = random_tensors(tiny_config())["model.layers.1.mlp.down_proj.weight"]
    np.testing.assert_array_equal(
        read_leaf(checkpoint, "layers.1.down"), down.astype(stored).astype(jnp.dtype(expected))
    )
    assert read_leaf(checkpoint, "final_norm").dtype == np.float32


def test_bad_requests_are_refused_before_any_work(tmp_path, source, monkeypatch):
    monkeypatch.setattr(module, "write_arrays", lambda *args: pytest.fail("work began"))
    taken = tmp_path / "taken"
    taken.mkdir()
    monkeypatch.setattr(Path, "mkdir", lambda path, *args, **options: pytest.fail(f"{path} was made"))
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "nowhere")
    new = tmp_path / "new"
    for src, dst, message in [
        (tmp_path / "missing", new, "missing: no such file or folder"),
        (source, taken, f"{taken} exists already; it is not overwritten"),
        (source, dangling, "exists already"),
        (source, source, "are the same place"),
        (source, source / "new", f"{source / 'new'} lies inside {source}"),
        (source, tmp_path / "no" / "new", f"the folder {tmp_path / 'no'} does not exist"),
        (source, tmp_path / ".new.partial-7", "unfinished conversion"),
    ]:
        with pytest.raises(CheckpointError) as caught:
            convert(src, dst)
        assert message in str(caught.value)
    with pytest.raises(ConfigError, match="dtype 'int8' is not supported; use auto, float32 or bfloat16"):
        convert(source, new, "int8")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(CheckpointError, match=r"new: needs \d+ bytes, but the disk of .* has 1000 free"):
        convert(source, new)
    assert not new.exists() and not find_leftovers(new)


class Stop(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "moment"), [(KeyboardInterrupt, 0), (Stop, 7), (OSError(28, "No space left on device"), 15)]
)
def test_an_interrupted_conversion_leaves_nothing(tmp_path, source, error, moment):
    def stop(progress):
        if progress.arrays == moment:
            raise error

    with pytest.raises(CheckpointError if isinstance(error, OSError) else error):
        convert(source, tmp_path / "native", progress=stop)
    assert os.listdir(tmp_path) == ["source"]


def test_damage_found_on_the_way_leaves_nothing(tmp_path, source):
    first = convert(source, tmp_path / "first")
    chunk = next((first.path / "arrays" / "layers.1.down" / "c").rglob("0"))
    while chunk.is_dir():
        chunk = chunk / "0"
    chunk.write_bytes(chunk.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"first/arrays/layers\.1\.down: damaged"):
        convert(tmp_path / "first", tmp_path / "second")
    assert sorted(os.listdir(tmp_path)) == ["first", "source"]


def test_a_source_without_tokenizer_leaves_nothing(tmp_path, source):
    (source / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="tokenizer"):
        convert(source, tmp_path / "native", save_tokenizer=save_tokenizer)
    assert os.listdir(tmp_path) == ["source"]


KILLED = """
import os, signal, sys
from jaxspec.checkpoint import convert as module

def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)

def watch(progress):
    if progress.arrays == moment:
        die()

def write_and_die(*args):
    write_manifest(*args)
    die()

src, dst, moment = sys.argv[1], sys.argv[2], int(sys.argv[3])
write_manifest = module.write_manifest
if moment == 99:
    module.write_manifest = write_and_die  # every file is written
module.convert(src, dst, progress=watch)
"""


@pytest.mark.parametrize("moment", [8, 99])
def test_a_killed_conversion_leaves_nothing_that_loads(tmp_path, source, moment):
    dst = tmp_path / "native"
    done = subprocess.run([sys.executable, "-c", KILLED, source, dst, str(moment)], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert not dst.exists()
    (left,) = find_leftovers(dst)
    assert sorted(os.listdir(tmp_path)) == [left.name, "source"]
    with pytest.raises(CheckpointError):
        open_native(left)
    convert(source, dst)
    assert open_native(dst).config == tiny_config()
