"""Packages that a machine with JAX, numpy and a checkout lacks and the benchmark needs: two small stand-ins.

Random weights in XLA's dtypes need no file formats, tokenizers or console. What is left are the classes of
`flax.struct`, and the presets of `configs/`, which only an installation finds as a package. What is installed is used.
"""

import dataclasses
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Packages that parts need beyond JAX and numpy: `decode` loads a model.
NEEDED = {"decode": ("flax", "gguf", "safetensors", "tokenizers", "transformers")}
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
    if _is_absent("flax"):
        struct = types.ModuleType("flax.struct")
        struct.__dict__.update(dataclass=_dataclass, field=_field)
        flax = types.ModuleType("flax")
        flax.__dict__.update(struct=struct)
        sys.modules |= {"flax": flax, "flax.struct": struct}
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


def _dataclass(cls: type) -> type:
    """As `flax.struct.dataclass`: frozen, a pytree, with a method `replace`."""
    import jax

    made = dataclasses.dataclass(frozen=True)(cls)
    fields: dict[bool, list[str]] = {True: [], False: []}
    for field in dataclasses.fields(made):
        fields[field.metadata.get("pytree_node", True)].append(field.name)
    made.replace = dataclasses.replace  # pyright: ignore[reportAttributeAccessIssue]
    return jax.tree_util.register_dataclass(made, fields[True], fields[False])


def _field(pytree_node: bool = True, **options: Any) -> Any:
    """As `flax.struct.field`."""
    return dataclasses.field(metadata={"pytree_node": pytree_node}, **options)
