"""Programs stored ready to run: what tells them apart, and what becomes of damaged files."""

import dataclasses
import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import FAMILIES, place

from jaxspec.methods.core.sequence import ModelSequence
from jaxspec.models.quantization import Storage
from jaxspec.runtime import compile_cache, fingerprint, program_store
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.program import Later, Program, compile_programs

PLACEMENT = place(FAMILIES["llama"])


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(program_store, "disabled", False)
    compile_cache.enable_compile_cache(str(tmp_path / "cache"))
    yield tmp_path / "cache" / "ready"
    program_store.use(None)


def programs_of(slots=64, role="target"):
    return ModelSequence(PLACEMENT, slots, role).programs


def test_a_stored_program_is_neither_traced_nor_lowered(store, monkeypatch):
    first = programs_of()
    compile_programs(first)
    assert len(list(store.iterdir())) == len(first)
    wanted = first[0](np.int32(7))
    monkeypatch.setattr(Program, "lower", lambda self: pytest.fail("lowered"))
    again = programs_of()
    compile_programs(again)
    for one, other in zip(jax.tree.leaves(wanted), jax.tree.leaves(again[0](np.int32(7))), strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_comes_from_jaxs_own_cache_is_stored_too(store):
    compile_programs(programs_of())
    names = {path.name for path in store.iterdir()}
    for path in store.iterdir():
        path.unlink()
    compile_programs(programs_of())
    assert {path.name for path in store.iterdir()} == names
    again = programs_of()
    assert all(program.load(str(program.digest())) for program in again)
    assert jax.tree.leaves(again[0](np.int32(7)))


def test_programs_are_loaded_in_the_background(store):
    """A call loads what has not begun to load; what is named waits for its event; a useless file is compiled again."""
    first = programs_of()
    compile_programs(first)
    wanted = jax.tree.leaves(first[0](np.int32(7)))
    begin = threading.Event()
    again = programs_of()
    compile_programs(again, later=Later(frozenset(program.name for program in again), begin))
    assert all(program.is_coming() and not program.is_ready() for program in again)
    for one, other in zip(wanted, jax.tree.leaves(again[0](np.int32(7))), strict=True):
        np.testing.assert_array_equal(one, other)
    begin.set()
    for program in again:
        program.wait()
        assert program.is_ready() and not program.is_coming()
    damaged = programs_of()[0]
    (store / str(damaged.digest())).write_bytes(b"no program")
    compile_programs([damaged], later=Later(frozenset(), begin))
    damaged.wait()
    assert not damaged.is_ready()
    for one, other in zip(wanted, jax.tree.leaves(damaged(np.int32(7))), strict=True):
        np.testing.assert_array_equal(one, other)
    assert programs_of()[0].load(str(damaged.digest()))


def test_a_damaged_file_is_replaced(store):
    compile_programs(programs_of())
    path = next(store.iterdir())
    for content in (b"", path.read_bytes()[:-1], path.read_bytes()[:-1] + b"\0", b"other" + path.read_bytes()):
        path.write_bytes(content)
        program = next(p for p in programs_of() if p.digest() == path.name)
        assert not program.load(path.name)
        compile_programs([program])
        assert program.is_ready()


def test_what_shapes_a_program_is_part_of_its_digest(monkeypatch):
    fingerprint.surroundings.cache_clear()
    digests = [program.digest() for program in (*programs_of(), *programs_of(128), *programs_of(role="draft"))]
    assert None not in digests and len(set(digests)) == len(digests)
    assert [program.digest() for program in programs_of()] == digests[: len(programs_of())]
    program = programs_of()[0]
    with jax.default_matmul_precision("highest"):
        assert program.digest() != digests[0]
    fingerprint.surroundings.cache_clear()
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    assert program.digest() != digests[0]
    fingerprint.surroundings.cache_clear()


def test_programs_of_weights_in_blocks_can_be_stored():
    cfg = dataclasses.replace(FAMILIES["llama"], embed_dim=32, mlp_dim=64, num_heads=2, num_kv_heads=1, head_dim=16)
    storages = Storage("q8_0"), Storage("q8_0", ordered=frozenset({"layers.0.down", "layers.1.down"}))
    placements = [Placement(cfg, PLACEMENT.plan, jnp.dtype("float32"), storage=storage) for storage in storages]
    digests = [ModelSequence(placement, 64, "target").programs[-1].digest() for placement in placements]
    assert None not in digests and digests[0] != digests[1]


def test_what_cannot_be_told_apart_is_not_stored():
    """A function of elsewhere, and a value without a name."""
    scalar = PLACEMENT.array((), jnp.int32)
    assert Program("own", lambda x: x + 1, PLACEMENT.plan, [scalar], scalar).digest() is None
    with pytest.raises(fingerprint.UnknownError):
        fingerprint.program_digest("p", None, (), object())


def test_what_was_not_used_for_longest_goes_first(tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    for age, name in enumerate("abc"):
        (folder / name).write_bytes(b"1" * 10)
        os.utime(folder / name, (1000 - age, 1000 - age))
    program_store.trim(folder, 20)
    assert sorted(path.name for path in folder.iterdir()) == ["a", "b"]
