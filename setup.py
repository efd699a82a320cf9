"""What pyproject.toml cannot say: how the native CPU kernels are built, and where an editable install is looked up.

The kernels are left out where there is no compiler; XLA computes the same then.
"""

import importlib.util
import sys
import warnings
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command import editable_wheel
from setuptools.command.build_ext import build_ext


class BuildNative(build_ext):
    """Compile the native kernels with `pallas_kernels/native/build.py`, however the installation is made."""

    def run(self):
        spec = importlib.util.spec_from_file_location("native_build", "pallas_kernels/native/build.py")
        assert spec is not None and spec.loader is not None
        native = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(native)
        folder = Path("." if self.editable_mode or self.inplace else self.build_lib) / "pallas_kernels/native"
        try:
            self.built = native.build(folder.absolute(), lambda line: print(line, file=sys.stderr, flush=True))
        except native.BuildError as error:
            if str(error).startswith("JAXSPEC_BUILD_LEVELS"):
                raise SystemExit(str(error)) from None
            print(f"the native kernels are left out, XLA computes the same: {error}", file=sys.stderr, flush=True)

        if not self.editable_mode and not self.inplace:
            for stamp in folder.glob(".*.objects"):  # a wheel has no use for them
                stamp.unlink()

    def get_outputs(self):
        return [] if self.editable_mode else [str(path) for path in getattr(self, "built", [])]

    def get_output_mapping(self):
        return {}


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
setup(
    # configs/ and drafts/ are data of jaxspec, and packages so that an installation can find them.
    packages=[
        *find_packages(include=["jaxspec", "jaxspec.*", "pallas_kernels", "pallas_kernels.*"]),
        "jaxspec_configs",
        "jaxspec_drafts",
    ],
    # What makes a wheel one of this platform; `BuildNative` knows the sources.
    ext_modules=[Extension("pallas_kernels.native.cpu_portable", [])],
    cmdclass={"build_ext": BuildNative},
)
