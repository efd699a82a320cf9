"""Native checkpoints: files that were changed, cut, removed or added.

Beside the errors there is a right answer. What opens and restores has the arrays that were written, and a folder of
which any listed file has changed is never verified.
"""

import json
import random
import shutil
import tempfile
from functools import cache
from pathlib import Path

import jax
import numpy as np

from fuzz.gguf_files import METADATA, make_tensors, pack_file
from fuzz.wild import TEXTS, mutate_bytes, mutate_json
from jaxspec.checkpoint.convert import convert
from jaxspec.checkpoint.native.checkpoint import restore_native
from jaxspec.checkpoint.native.manifest import MANIFEST, open_native, verify_native
from jaxspec.errors import CheckpointError
from jaxspec.models.params import leaf_name
from jaxspec.runtime.mesh import plan_mesh
from jaxspec.text.tokenizer import load_tokenizer, save_tokenizer


@cache
def make_source() -> tuple[Path, dict[str, np.ndarray]]:
    """A whole checkpoint, and its arrays."""
    folder = Path(tempfile.mkdtemp(prefix="jaxspec-fuzz-native-"))
    (folder / "model.gguf").write_bytes(pack_file(random.Random(0), METADATA, make_tensors()))
    convert(folder / "model.gguf", folder / "native", save_tokenizer=save_tokenizer)
    return folder / "native", read_arrays(folder / "native")


def read_arrays(folder: Path) -> dict[str, np.ndarray]:
    """All arrays by name."""
    restored = restore_native(open_native(folder), plan_mesh(1))
    return {leaf_name(path): np.asarray(leaf) for path, leaf in jax.tree.flatten_with_path(restored)[0]}


def damage(rng: random.Random, folder: Path) -> bool:
    """Change one thing; whether a listed file, or the list, is no longer what it was."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    file = rng.choice(files)
    if rng.random() < 0.4:
        file = rng.choice([path for path in files if path.suffix == ".json" or path.parent == folder])
    before = file.read_bytes()
    match rng.randrange(6):
        case 0:
            file.unlink()
            return True
        case 1:
            new = folder / rng.choice(("chat_template.jinja", "x.json", "notes.txt", "arrays/x", "arrays/embed/c/9"))
            new.parent.mkdir(parents=True, exist_ok=True)
            new.write_text(rng.choice(TEXTS[:12]))
            return new.suffix != ".txt"
        case 2 if file.suffix == ".json":
            file.write_text(json.dumps(mutate_json(rng, json.loads(before), rng.randrange(1, 3))))
        case 3:
            file.unlink()
            rng.choice((file.mkdir, lambda: file.symlink_to("/dev/zero"), lambda: file.symlink_to(file.name)))()
            return True
        case 4:
            shutil.rmtree(folder / rng.choice(("arrays", "arrays/embed")))
            return True
        case _:
            file.write_bytes(mutate_bytes(rng, before))
    if file.name != MANIFEST or not file.is_file():
        return not file.is_file() or file.read_bytes() != before
    try:
        return json.loads(file.read_bytes()) != json.loads(before)
    except ValueError:
        return True


def run(rng: random.Random, folder: Path) -> None:
    """One checkpoint."""
    source, arrays = make_source()
    copy = folder / "native"
    shutil.copytree(source, copy)
    changed = damage(rng, copy)
    try:
        verify_native(copy)
    except CheckpointError:
        pass
    else:
        assert not changed, "a checkpoint that was changed passes for whole"
    open_native(copy)
    load_tokenizer(copy).encode("a")
    if rng.random() < 0.3:
        found = read_arrays(copy)
        same = found.keys() == arrays.keys() and all(np.array_equal(found[name], arrays[name]) for name in arrays)
        assert same or not changed, "a checkpoint that was changed gives other weights"
