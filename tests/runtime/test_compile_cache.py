"""The compile cache can be named, moved and switched off, also after its first use."""

import errno
import hashlib
import os
import warnings

import jax
import jax.numpy as jnp
import pytest

from jaxspec.errors import ConfigError
from jaxspec.runtime import compile_cache
from jaxspec.runtime.compile_cache import enable_compile_cache


@pytest.fixture(autouse=True)
def restore(monkeypatch):
    monkeypatch.delenv(compile_cache.ENVIRONMENT, raising=False)
    yield
    enable_compile_cache(None)


def compile_something(number):
    jax.jit(lambda x: x * number + 1)(jnp.ones(3)).block_until_ready()


def test_folders_and_off_and_on_again(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    assert enable_compile_cache(str(one)) == one
    compile_something(1.5)
    filled = len(list(one.iterdir()))
    assert filled > 0
    assert enable_compile_cache("") is None
    compile_something(2.5)
    assert len(list(one.iterdir())) == filled
    assert enable_compile_cache(str(other)) == other
    compile_something(3.5)
    assert len(list(one.iterdir())) == filled and list(other.iterdir())


def test_none_means_environment_then_caller_then_user(tmp_path, monkeypatch):
    enable_compile_cache(str(tmp_path / "explicit"))
    monkeypatch.setattr(compile_cache, "_callers_folder", str(tmp_path / "caller"))
    assert enable_compile_cache(None) == tmp_path / "caller"
    monkeypatch.setenv(compile_cache.ENVIRONMENT, str(tmp_path / "environment"))
    assert enable_compile_cache(None) == tmp_path / "environment"
    monkeypatch.setenv(compile_cache.ENVIRONMENT, "")
    assert enable_compile_cache(None) is None


def test_a_named_folder_that_cannot_be_written_is_refused():
    with pytest.raises(ConfigError, match="/proc/nowhere cannot be written"):
        enable_compile_cache("/proc/nowhere")


def flip(entry):
    content = bytearray(entry.read_bytes())
    content[len(content) // 2] ^= 1
    entry.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        flip,
        lambda entry: entry.write_bytes(entry.read_bytes()[:-5]),
        lambda entry: entry.write_bytes(b""),
        lambda entry: checksum_of(entry).write_bytes(b"\xff"),
        lambda entry: (flip(entry), checksum_of(entry).unlink()),
    ],
)
def test_a_damaged_entry_is_replaced_silently(tmp_path, damage):
    enable_compile_cache(str(tmp_path))
    compile_something(7.5)
    for entry in tmp_path.glob("*-cache"):
        damage(entry)
    replaced = compile_again(tmp_path)
    assert all(hashlib.sha256(content).hexdigest() == checksum for content, checksum, _ in replaced)
    assert compile_again(tmp_path) == replaced


def compile_again(folder):
    """What is in the folder after a start that finds it: content, checksum and time of each entry."""
    jax.clear_caches()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        compile_something(7.5)
    assert [str(warning.message) for warning in said if "cache" in str(warning.message)] == []
    entries = sorted(folder.glob("*-cache"))
    assert entries and not list(folder.glob(".*"))
    return [(e.read_bytes(), checksum_of(e).read_text(), e.stat().st_mtime_ns) for e in entries]


def checksum_of(entry):
    return entry.with_name(entry.name.replace("-cache", "-sha256"))


def test_an_entry_that_jax_wrote_alone_is_used(tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compile_cache.compilation_cache.reset_cache()
    compile_something(9.5)
    entries = sorted(tmp_path.glob("*-cache"))
    before = [entry.stat().st_mtime_ns for entry in entries]
    assert entries and not list(tmp_path.glob("*-sha256"))
    enable_compile_cache(str(tmp_path))
    jax.clear_caches()
    compile_something(9.5)
    assert [entry.stat().st_mtime_ns for entry in entries] == before
    assert all(checksum_of(entry).exists() for entry in entries)


def test_a_full_disk_costs_no_entry(tmp_path, monkeypatch):
    """Where the checksum of JAX's own entry cannot be written, the entry is used and stays."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compile_cache.compilation_cache.reset_cache()
    compile_something(10.5)
    entries = sorted(tmp_path.glob("*-cache"))
    assert entries

    def refuse(path, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    cache = compile_cache._CheckedCache(str(tmp_path), max_size=-1)
    monkeypatch.setattr(compile_cache, "write_whole", refuse)
    for entry in entries:
        assert cache.get(entry.name.removesuffix("-cache")) == entry.read_bytes()
        assert not checksum_of(entry).exists()
