"""The compile cache can be named, moved and switched off, also after its first use."""

import errno

import jax
import pytest

from jaxspec.errors import ConfigError
from jaxspec.runtime.store import folder, limit, program_files
from jaxspec.runtime.store.folder import enable_compile_cache


@pytest.fixture(autouse=True)
def restore(monkeypatch):
    monkeypatch.delenv(folder.ENVIRONMENT, raising=False)
    yield
    enable_compile_cache(None)


def test_a_folder_and_off_and_on_again(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    assert enable_compile_cache(str(one)) == one
    assert enable_compile_cache("") is None and not program_files.is_used()
    assert enable_compile_cache(str(other)) == other and other.is_dir()


def test_none_means_environment_then_caller_then_user(tmp_path, monkeypatch):
    enable_compile_cache(str(tmp_path / "explicit"))
    monkeypatch.setattr(folder, "_callers_folder", str(tmp_path / "caller"))
    assert enable_compile_cache(None) == tmp_path / "caller"
    monkeypatch.setenv(folder.ENVIRONMENT, str(tmp_path / "environment"))
    assert enable_compile_cache(None) == tmp_path / "environment"
    monkeypatch.setenv(folder.ENVIRONMENT, "")
    assert enable_compile_cache(None) is None


def test_a_named_folder_that_cannot_be_written_is_refused():
    with pytest.raises(ConfigError, match="/proc/nowhere cannot be written"):
        enable_compile_cache("/proc/nowhere")


def test_programs_of_a_folder_that_cannot_be_written_are_used(tmp_path, monkeypatch):
    """As those of a container's image."""
    (tmp_path / "ready").mkdir()

    def refuse(**_):
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(folder.tempfile, "TemporaryFile", refuse)
        assert enable_compile_cache(str(tmp_path)) == tmp_path and program_files._folder == tmp_path / "ready"


def test_jaxs_own_cache_of_several_processes_has_the_limit(tmp_path, monkeypatch):
    names = ("compilation_cache_dir", "persistent_cache_min_compile_time_secs", "compilation_cache_max_size",
             "persistent_cache_min_entry_size_bytes", "enable_compilation_cache")  # fmt: skip
    before = {f"jax_{name}": getattr(jax.config, f"jax_{name}") for name in names}
    with monkeypatch.context() as patch:
        patch.setattr(folder.hosts, "several", lambda: True)
        patch.setenv(limit.ENVIRONMENT, "2GiB")
        enable_compile_cache(str(tmp_path))
        found = jax.config.jax_compilation_cache_max_size
        for name, value in before.items():
            jax.config.update(name, value)
        assert found == 2**31 and not program_files.is_used()
