"""Hooks of the documentation's site (mkdocs.yml): pages that are made of files outside docs/, and links to them.

The front page is README.md. The reference lists what `jaxspec` exports, with its docstrings. Examples are shown whole.
"""

import ast
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports]

ROOT = Path(__file__).parents[1]
MOVED = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "examples/": "examples.md"}


def on_config(config: Any) -> Any:
    """List the pages of results, which need no place by hand."""
    pages = sorted(path.name for path in (ROOT / "docs" / "results").glob("*.md") if path.name != "README.md")
    for entry in config.nav:
        if "Results" in entry:
            entry["Results"] = [f"results/{name}" for name in ["README.md", *pages]]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not in docs/."""
    made = {moved: read_page(name) for name, moved in MOVED.items() if name.endswith(".md")}
    made |= {"examples.md": list_examples(), "api.md": list_api()}
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links of pages in docs/ to what lies outside of it."""
    for name, moved in MOVED.items():
        markdown = re.sub(rf"\]\(\.\./{re.escape(name)}(?=[#)])", f"]({moved}", markdown)
    return markdown


def read_page(name: str) -> str:
    """A page of the repository's root, with links as the site has them."""
    text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
    for other, moved in MOVED.items():
        text = re.sub(rf"\]\({re.escape(other)}(?=[#)])", f"]({moved}", text)
    return text


def list_examples() -> str:
    """Each example's first line, and its source."""
    parts = ["# Examples\n"]
    for path in sorted((ROOT / "examples").glob("*.py")):
        source = path.read_text(encoding="utf-8")
        summary = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
        parts.append(f"## {path.name}\n\n{summary}\n\n```python\n{source}```\n")
    return "\n".join(parts)


def list_api() -> str:
    """What `import jaxspec` gives, in the order of the alphabet."""
    homes: dict[str, str] = {}
    for node in ast.walk(ast.parse((ROOT / "jaxspec" / "__init__.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            homes |= {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    lines = ["# API", "Names of `import jaxspec`. Everything else may change.\n"]
    return "\n".join([*lines, *(f"::: {homes[name]}\n" for name in sorted(homes, key=str.lower))])
