"""The GPU benchmark where there is nothing but JAX, numpy and a checkout."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import gpu_bench
import pytest
from kernel_bench import bare
from kernel_bench.checks import list_implementations

ROOT = Path(gpu_bench.__file__).resolve().parents[1]
# JAX's own dependencies come with it.
PACKAGES = ("jax", "jaxlib", "numpy", "scipy", "ml_dtypes", "opt_einsum")


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """A folder of these packages alone, of the versions that are installed."""
    folder = tmp_path_factory.mktemp("bare")
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None
        package = Path(spec.origin).parent
        for found in (package, package.with_name(f"{name}.libs")):
            if found.exists():
                (folder / found.name).symlink_to(found)
    return folder


def run(packages, *arguments, **options):
    """Run the tool without the packages of this Python, but with those of the folder."""
    environment = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "TMPDIR")}
    return subprocess.run(
        [sys.executable, "-S", str(ROOT / "tools" / "gpu_bench.py"), *map(str, arguments)],
        env=environment | {"PYTHONPATH": str(packages), "JAX_PLATFORMS": "cpu", "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=packages, capture_output=True, text=True, **options,
    )  # fmt: skip


def test_a_part_that_needs_more_says_so_in_one_line(packages):
    ran = run(packages, "--smoke", "--parts", "decode")
    assert ran.returncode == 2 and "Traceback" not in ran.stderr
    missing = "gguf, safetensors, tokenizers, transformers"
    assert f"part 'decode' is not possible here: not installed: {missing}; pip install {ROOT}" in ran.stderr


@pytest.mark.slow
def test_dry_run(packages, tmp_path):
    """All other parts: kernels' own checks in the place of tests, kernels, steps and rounds."""
    run(packages, "--smoke", "--json", tmp_path / "out.json", "--minutes", 60, check=True)
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["error"] is None and list(result["parts"]) == list(gpu_bench.DEFAULT_PARTS)
    for part in result["parts"].values():
        assert part["error"] is None and part["rows"]
        assert not [row for row in part["rows"] if row.get("error") or row.get("errors")]
    # The walk accepts as many tokens as it is told.
    rows = [row for row in result["parts"]["rounds"]["rows"] if row["name"].startswith("rounds, specexec, ")]
    assert [(row["accepted"], row["tokens"]) for row in rows] == [(0, 1), (2, 3)]
    assert all(row["seconds"] > 0 and row["idle"] is None for row in rows)
    checks = result["parts"]["tests"]["rows"][-1]
    triton = [operation for operation, implementation in list_implementations() if implementation == "triton"]
    assert checks["failed"] == 0 and checks["passed"] == len(triton)


def test_what_is_installed_is_used():
    configs = sys.modules.get("jaxspec_configs")
    bare.stand_in()
    assert sys.modules.get("jaxspec_configs") is configs
    assert bare.find_missing("decode") is None and bare.find_missing("steps") is None
