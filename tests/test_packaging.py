"""The files of an installation and of a source distribution."""

import ast
import importlib.metadata
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

import jaxspec

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

# Imports that an extra brings, and those that are called otherwise than their distribution.
OF_EXTRAS = {"llguidance", "starlette", "uvicorn", "prometheus_client", "jax_triton", "triton", "matplotlib"}
DISTRIBUTIONS = {"orbax": "orbax-checkpoint"}


def test_the_version_is_that_of_the_installation():
    assert importlib.metadata.version("jaxspec-decode") == jaxspec.__version__


def test_importing_jaxspec_loads_nothing_heavy(tmp_path):
    """Also where a clone called jaxspec lies in the folder, a namespace package to Python's own finder."""
    (tmp_path / "jaxspec").mkdir()
    code = """
import sys
import jaxspec
assert jaxspec.__file__.endswith("jaxspec/__init__.py"), jaxspec.__file__
assert not {"jax", "numpy", "transformers", "tokenizers", "rich", "typer"} & set(sys.modules), sorted(sys.modules)
jaxspec.LLM
assert not {"transformers", "sklearn", "bayes_opt", "optax", "torch", "matplotlib"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_what_the_package_imports_is_a_dependency():
    """Everything but the standard library, whatever brings it along."""
    imported = set()
    for path in (path for top in ("jaxspec", "pallas_kernels") for path in (ROOT / top).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                imported.add(node.module.partition(".")[0])
    declared = {re.split(r"[\[>=<]", line)[0] for line in PROJECT["project"]["dependencies"]}
    known = {*sys.stdlib_module_names, "jaxspec", "pallas_kernels", "jaxlib", *OF_EXTRAS, *declared}
    assert imported - known <= set(DISTRIBUTIONS) and {DISTRIBUTIONS[name] for name in imported - known} <= declared


@pytest.mark.slow
def test_the_source_distribution_holds_what_git_holds(tmp_path):
    """And so everything that the README links to, and what the tests read."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("this is no clone: there is no list of files to compare with")
    code = "from setuptools import build_meta; import sys; print(build_meta.build_sdist(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {name for name in tracked.stdout.splitlines() if (ROOT / name).exists()} - held == {".ci/run", ".gitignore"}
