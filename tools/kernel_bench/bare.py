"""A package that a machine with JAX, numpy and a checkout lacks and the benchmark needs: a small stand-in.

Random weights in XLA's dtypes need no file formats, tokenizers or console. What is left are the presets of `configs/`,
which only an installation finds as a package. What is installed is used.
"""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Packages that parts need beyond JAX and numpy: `decode` loads a model.
NEEDED = {"decode": ("gguf", "safetensors", "tokenizers", "transformers")}
_absent: set[str] = set()


def find_missing(part: str) -> str | None:
    """One line that says what to install for a part; None where nothing is missing."""
    missing = [name for name in NEEDED.get(part, ()) if name in _absent or importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(missing)}; pip install {ROOT}" if missing else None


def stand_in() -> None:
    """Make the checkout importable, and stand in for what is not installed."""
    # After what PYTHONPATH names: a copy that somebody asks for by it comes first.
    for folder in (ROOT, ROOT / "tools"):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    if _is_absent("jaxspec_configs"):
        folder = ROOT / "configs"
        # There is no such file: the package has nothing to run, and its resources lie beside it.
        spec = importlib.util.spec_from_file_location(
            "jaxspec_configs", folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        sys.modules["jaxspec_configs"] = importlib.util.module_from_spec(spec)


def _is_absent(name: str) -> bool:
    """Whether a package is not there, or only by this file."""
    if name not in sys.modules and importlib.util.find_spec(name) is None:
        _absent.add(name)
        return True
    return False
