"""Files that are compiled, and files that are not compiled again."""

import shutil

import pytest

from pallas_kernels.native import build, library


def test_levels_are_those_that_the_library_chooses_from():
    assert set(build.LEVELS) <= set(library.LEVELS)


def test_an_unknown_level_is_an_error_before_anything_is_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSPEC_BUILD_LEVELS", "portable,avx3")
    with pytest.raises(build.BuildError, match="JAXSPEC_BUILD_LEVELS: 'avx3' is not one of all, portable"):
        build.build(tmp_path)


def test_a_missing_compiler_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler no-such-compiler"):
        build.build(tmp_path)


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Two sources of three lines in place of the kernels."""
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("no C++ compiler")
    root = tmp_path / "kernels"
    for name in ("native", "one"):
        (root / name).mkdir(parents=True)
    for name in ("level.cc", "amx.h"):
        (root / "native" / name).write_text((build.ROOT / "native" / name).read_text())
    (root / "one/one.h").write_text("int one();\n")
    (root / "one/one.cc").write_text('#include "one.h"\nint one() { return 1; }\n')
    (root / "one/two.cc").write_text("int two() { return 2; }\n")
    monkeypatch.setattr(build, "ROOT", root)
    monkeypatch.setenv("JAXSPEC_BUILD_LEVELS", "portable")
    monkeypatch.setenv("JAXSPEC_NATIVE_CACHE", str(tmp_path / "cache"))
    return root


def test_only_what_changed_is_compiled(small, tmp_path):
    def compiled(folder):
        lines = []
        assert all(path.is_file() for path in build.build(tmp_path / folder, lines.append))
        return sorted(line.split(": ")[1].split()[0] for line in lines)

    assert compiled("first") == ["native/level.cc", "one/one.cc", "one/two.cc"]
    assert compiled("first") == compiled("second clone") == []
    (small / "one/one.h").write_text("int one();  // changed\n")
    assert compiled("first") == ["one/one.cc"]
