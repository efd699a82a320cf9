"""The native CPU kernels: built where there is a compiler, left out where there is none (the XLA path needs neither).

Everything else about the package is in pyproject.toml.
"""

import copy
import importlib.util
import os
import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path("pallas_kernels")
# One library per instruction set, all from the same sources; the best that a machine has is chosen when it runs.
LEVELS = {"portable": []}
if platform.machine() in ("x86_64", "AMD64"):
    LEVELS["avx2"] = ["-mavx2", "-mfma", "-mf16c"]
    LEVELS["avx512"] = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c"]
# Products and sums are fused where the sources say so and nowhere else: results must not depend on the compiler's mood.
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


# Side by side, because each library takes a compiler twenty seconds.
setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildSideBySide},
    options={"build_ext": {"parallel": os.cpu_count()}},
)
