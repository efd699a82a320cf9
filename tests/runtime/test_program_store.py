"""Programs stored ready to run: what tells them apart, and what becomes of damaged files."""

import dataclasses
import os
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from tiny_models import FAMILIES, place

from jaxspec.errors import ConfigError
from jaxspec.methods.core.sequence import ModelSequence
from jaxspec.models.quantization import Storage
from jaxspec.runtime import program
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.program import Program, compile_programs
from jaxspec.runtime.store import fingerprint, folder, limit, program_files
from jaxspec.sampling.processors import GREEDY

PLACEMENT = place(FAMILIES["llama"])


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(program_files, "disabled", False)
    folder.enable_compile_cache(str(tmp_path / "cache"))
    jax.config.update("jax_enable_compilation_cache", False)  # what comes out of it cannot be stored
    yield tmp_path / "cache" / "ready"
    program_files.use(None)


def programs_of(slots=64, role="target"):
    return ModelSequence(PLACEMENT, slots, role).programs


def test_a_stored_program_is_neither_traced_nor_lowered(store, monkeypatch):
    first = programs_of()
    compile_programs(first)
    assert {str(program.digest()) for program in first} <= {path.name for path in store.iterdir()}
    wanted = first[0](np.int32(7))
    monkeypatch.setattr(Program, "lower", lambda self: pytest.fail("lowered"))
    again = programs_of()
    compile_programs(again)
    for one, other in zip(jax.tree.leaves(wanted), jax.tree.leaves(again[0](np.int32(7))), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_largest_program_is_loaded_before_its_arguments_are_described(store, monkeypatch):
    first = programs_of()
    compile_programs(first)
    program.remember_program("start", PLACEMENT.plan, first)
    largest, *places = (store / "start.first").read_text().split()
    assert places == ["0"]
    assert (store / largest).stat().st_size == max(path.stat().st_size for path in store.iterdir())
    monkeypatch.setattr(Program, "lower", lambda self: pytest.fail("lowered"))
    program.expect_program("start")
    assert [*program_files._early] == [largest]
    again = programs_of()
    compile_programs(again)
    assert program_files._early == {} and [one.digest() for one in first] == [one.digest() for one in again]
    for one, other in zip(first, again, strict=True):
        assert one._compiled.keys() == other._compiled.keys()
        assert one._compiled[None].in_tree == other._compiled[None].in_tree
        assert one._compiled[None].out_tree == other._compiled[None].out_tree
    np.testing.assert_array_equal(*(jax.tree.leaves(each[0](np.int32(7)))[0] for each in (first, again)))
    # What is not there, or no name of a program, is nothing to begin with.
    for noted in ("0" * 64, largest, "../x 0", "\xff 0", f"{largest} 99", f"{largest} x"):
        (store / "start.first").write_text(noted, "latin-1")
        program.expect_program("start")
        assert program_files._early == {}


def test_a_program_that_a_change_of_version_left_as_it_was_is_not_compiled_again(store, monkeypatch):
    """Its file has the digest of the new version from then on."""
    first = programs_of()
    compile_programs(first)
    wanted = jax.tree.leaves(first[0](np.int32(7)))
    digests = [str(program.digest()) for program in first]
    fingerprint.surroundings.cache_clear()
    monkeypatch.setattr(fingerprint, "__version__", "another")
    again = programs_of()
    assert not {str(each.digest()) for each in again} & set(digests)
    monkeypatch.setattr(program, "compile_lowered", lambda *_: pytest.fail("compiled"))
    compile_programs(again)
    for one, other in zip(wanted, jax.tree.leaves(again[0](np.int32(7))), strict=True):
        np.testing.assert_array_equal(one, other)
    assert all(each.load(str(each.digest())) for each in programs_of())
    fingerprint.surroundings.cache_clear()


def test_lowered_programs_differ_by_text_options_and_settings():
    lowered = [each.lower(each.fit(GREEDY)) for each in programs_of()]
    devices = PLACEMENT.plan.devices
    digests = {fingerprint.lowered_digest(each, devices, None) for each in lowered}
    assert len(digests) == len({each.as_text() for each in lowered})
    assert fingerprint.lowered_digest(lowered[0], devices, {"option": True}) not in digests
    constants = [jax.jit(lambda x, c=c: x + c).lower(jnp.zeros(4096)) for c in (np.arange(4096.0), -np.arange(4096.0))]
    assert len({fingerprint.lowered_digest(each, devices, None) for each in constants}) == 2
    x = jnp.zeros(3)
    others = [jax.jit(lambda a, b, i=i: (a, b)[i] + 1).lower(x, x) for i in (0, 1)]
    assert len({fingerprint.lowered_digest(each, devices, None) for each in others}) == 2


def test_a_program_does_not_wait_for_an_early_load_that_waits_for_it(store):
    """Several models of one process may queue the same file; one thread loads all of them."""
    first, hold = programs_of(), threading.Event()
    compile_programs(first)
    program.remember_program("start", PLACEMENT.plan, first)
    program._background.submit(hold.wait, 30)
    again = programs_of()
    compile_programs(again, background=True)
    program.expect_program("start")  # after them in the queue
    hold.set()
    futures = [future for each in again for _, future in each._coming.values()]
    assert all(future.result(timeout=60) for future in futures)


def test_programs_are_loaded_in_the_background(store):
    """A call loads what has not begun to load; a useless file is compiled again."""
    first = programs_of()
    compile_programs(first)
    wanted = jax.tree.leaves(first[0](np.int32(7)))
    hold, again = threading.Event(), programs_of()
    program._background.submit(hold.wait, 30)
    compile_programs(again, background=True)
    assert all(each.is_coming() and not each.is_ready() for each in again)
    jax.tree.map(np.testing.assert_array_equal, wanted, jax.tree.leaves(again[0](np.int32(7))))
    hold.set()
    for each in again:
        each.wait()
        loaded = dict(each._compiled)
        each.wait()  # what was loaded is not loaded again
        assert loaded and each._compiled == loaded and not each.is_coming()
    damaged = programs_of()[0]
    (store / str(damaged.digest())).write_bytes(b"no program")
    compile_programs([damaged], background=True)
    damaged.wait()
    assert not damaged.is_ready()
    jax.tree.map(np.testing.assert_array_equal, wanted, jax.tree.leaves(damaged(np.int32(7))))
    assert programs_of()[0].load(str(damaged.digest()))


@pytest.mark.thorough
def test_what_jax_had_compiled_is_not_stored(store, tmp_path, monkeypatch):
    """It comes out of JAX's own cache, or out of memory: serialized again, it would lack its kernels."""
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "jax"))
    compilation_cache.reset_cache()
    with monkeypatch.context() as patch:
        patch.setattr(program_files, "disabled", True)
        compile_programs(programs_of())
    first = programs_of()
    compile_programs(first)
    assert not store.exists()
    with monkeypatch.context() as patch:
        patch.setattr(program_files, "disabled", True)
        lowered = first[0].lower()
        first[0].finish(lowered)
    first[0].finish(lowered, digest=first[0].digest())
    assert not store.exists()
    compile_programs(again := programs_of())
    for one, other in zip(jax.tree.leaves(first[0](np.int32(7))), jax.tree.leaves(again[0](np.int32(7))), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_damaged_file_is_replaced(store):
    compile_programs(programs_of())
    digest = str(programs_of()[0].digest())
    whole = (store / digest).read_bytes()
    for content in (b"", whole[:-1], whole[:-1] + b"\0", b"other" + whole):
        for path in store.iterdir():
            path.write_bytes(content)
        damaged = programs_of()[0]
        assert not damaged.load(digest)
        compile_programs([damaged])
        assert damaged.is_ready() and programs_of()[0].load(digest)


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
    """Of programs, weights and JAX's own entries together; a file with two names loses both."""
    for name in ("ready", "weights", "profiles"):
        (tmp_path / name).mkdir()
    now = time.time()
    for age, name in enumerate(("ready/a", "weights/b", "ready/c", "jit_d-cache")):
        (tmp_path / name).write_bytes(b"1" * 10)
        os.utime(tmp_path / name, (now - age, now - age))
    os.link(tmp_path / "ready/c", tmp_path / "ready/c, too")  # takes no place
    (tmp_path / "jit_d-atime").write_bytes(b"")  # used just now
    (tmp_path / "own.txt").write_bytes(b"1" * 100)  # the user's

    def names():
        return {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} - {"own.txt"}

    everything = names()
    assert limit.used_bytes(tmp_path) == 40
    limit.trim(tmp_path, 40, with_jax=True)
    assert names() == everything
    limit.trim(tmp_path, 30, with_jax=True)
    assert names() == everything - {"ready/c", "ready/c, too"}
    limit.trim(tmp_path, 10)
    assert names() == {"ready/a", "jit_d-cache", "jit_d-atime"} and (tmp_path / "own.txt").exists()
    limit.trim(tmp_path, 5, with_jax=True)
    assert names() == set()


def test_what_is_being_written_stays_and_old_measurements_go(tmp_path):
    old = time.time() - 100 * 24 * 3600
    young = (".x.part-1", "costs-2")
    for name in ("ready", "profiles"):
        (tmp_path / name).mkdir()
    for path in ("ready/.x.part-1", "ready/.y.part-2", "profiles/costs-1", "profiles/rates-1", "profiles/costs-2",
                 "profiles/3.json"):  # fmt: skip
        (tmp_path / path).write_bytes(b"1")
        if not path.endswith(young):
            os.utime(tmp_path / path, (old, old))
    limit.trim(tmp_path, 5)
    # What another process writes is not counted; what jaxspec-tune has measured is not old by its age alone.
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {".x.part-1", "costs-2", "3.json"}
    limit.trim(tmp_path, 0)
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {".x.part-1"}


def test_the_limit_is_of_the_environment(store, monkeypatch):
    monkeypatch.setenv(limit.ENVIRONMENT, "1KiB")
    store.mkdir()
    (store / "older").write_bytes(b"1" * 2000)
    folder.enable_compile_cache(str(store.parent))
    assert list(store.iterdir()) == []
    monkeypatch.setenv(limit.ENVIRONMENT, "much")
    with pytest.raises(ConfigError, match="JAXSPEC_CACHE_SIZE must be a number of bytes"):
        folder.enable_compile_cache(str(store.parent))


def test_two_processes_that_name_one_program_leave_no_other_name(store):
    store.mkdir()
    (store / "stored").write_bytes(b"1")
    for _ in range(2):  # renaming one name of a file to another of its names does nothing
        program_files.link("stored", "own")
    assert sorted(path.name for path in store.iterdir()) == ["own", "stored"]
