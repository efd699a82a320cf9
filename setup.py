"""What pyproject.toml cannot say: how the native CPU kernels are built, and where an editable install is looked up.

The kernels are left out where there is no compiler; XLA computes the same then.
"""

import copy
import importlib.util
import os
import platform
import warnings
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command import editable_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path("pallas_kernels")
# One library per instruction set, all from the same sources; the best that a machine has is chosen when it runs.
LEVELS = {"portable": []}
if platform.machine() in ("x86_64", "AMD64"):
    LEVELS["avx2"] = ["-mavx2", "-mfma", "-mf16c"]
    LEVELS["avx512"] = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c"]
    LEVELS["vnni"] = [*LEVELS["avx512"], "-mavx512vnni"]
# Products and sums are fused where the sources say so and nowhere else: results must not depend on the compiler.
FLAGS = ["-std=c++17", "-O3", "-g0", "-ffp-contract=off", "-fvisibility=hidden"]


def extensions() -> list[Extension]:
    """The libraries; none where JAX's headers are missing."""
    jaxlib = importlib.util.find_spec("jaxlib")
    if jaxlib is None or jaxlib.origin is None:
        return []
    headers = Path(jaxlib.origin).parent / "include"
    sources = sorted(str(path) for path in ROOT.glob("*/*.cc"))
    depends = sorted(str(path) for path in ROOT.glob("*/*.h"))
    return [
        Extension(
            f"pallas_kernels.native.cpu_{level}",
            sources,
            include_dirs=[str(headers)],
            depends=depends,
            extra_compile_args=[*FLAGS, *flags],
            language="c++",
            optional=True,
        )
        for level, flags in LEVELS.items()
    ]


class BuildSideBySide(build_ext):
    """Build each library with objects of its own: their sources are the same, what becomes of them is not."""

    def build_extension(self, ext):
        """Build one library; several threads do so at once."""
        own = copy.copy(self)
        own.build_temp = str(Path(self.build_temp) / ext.name)
        build_ext.build_extension(own, ext)


def prefer_install_over_folders() -> None:
    """Let an editable install win over folders that only have its packages' names.

    A folder without `__init__.py`, such as a clone called jaxspec, is an empty namespace package to Python when it
    lies in the working folder. The finder of setuptools is asked after Python's own, which has found that folder by
    then. The finder that is written here is asked first, and answers unless Python's own finds a real package.
    """
    changes = {
        "sys.meta_path.append(_EditableFinder)": "sys.meta_path.insert(0, _EditableFinder)",
        "if fullname in MAPPING:": (
            'if fullname in MAPPING and getattr(PathFinder.find_spec(fullname, path), "loader", None) is None:'
        ),
    }
    template = getattr(editable_wheel, "_FINDER_TEMPLATE", "")
    if any(old not in template for old in changes):
        warnings.warn("this setuptools is not known: run jaxspec from no folder that holds its clone", stacklevel=2)
        return
    for old, new in changes.items():
        template = template.replace(old, new)
    editable_wheel._FINDER_TEMPLATE = template  # pyright: ignore[reportAttributeAccessIssue]


prefer_install_over_folders()
# Side by side, because each library takes a compiler twenty seconds.
setup(
    # configs/ and drafts/ are data of jaxspec, and packages so that an installation can find them.
    packages=[
        *find_packages(include=["jaxspec", "jaxspec.*", "pallas_kernels", "pallas_kernels.*"]),
        "jaxspec_configs",
        "jaxspec_drafts",
    ],
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildSideBySide},
    options={"build_ext": {"parallel": os.cpu_count()}},
)
