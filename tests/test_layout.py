"""The layout of the sources: imports have an order, files a readable length, and packages a budget of lines."""

import ast
import functools
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("jaxspec", "pallas_kernels")
LONGEST_FILE = 400  # lines
REASON = re.compile("([Ll]onger than|exceeds) 400 lines because")
# Most lines of each part. A change that needs more says why in docs/decisions.md.
BUDGETS = {
    "jaxspec": 37_930,
    "jaxspec/*.py": 3_385,
    "jaxspec/methods": 7_790,
    "jaxspec/sampling jaxspec/tree": 1_455,
    "jaxspec/models": 5_160,
    "jaxspec/offload": 2_200,
    "jaxspec/checkpoint": 5_220,
    "jaxspec/runtime": 2_470,
    "jaxspec/text": 2_300,
    "jaxspec/tune jaxspec/bench jaxspec/check jaxspec/serve jaxspec/cli jaxspec/trace": 7_300,
    "pallas_kernels": 7_100,
    "pallas_kernels/*/*.cc pallas_kernels/*/*.h": 4_506,
    "tools": 8_540,
    "tests": 38_655,
}
MOST_ENTRIES = {"jaxspec/methods": 12, "jaxspec/methods/core": 15}


def is_type_checking(node):
    """Whether a statement is `if TYPE_CHECKING:`."""
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imported_names(tree):
    """Names that a module imports, also inside functions; type-checking blocks do not count."""
    for node in ast.iter_child_nodes(tree):
        if is_type_checking(node):
            for other in node.orelse:
                yield from imported_names(other)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used here"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            yield from imported_names(node)


def import_graph(sources):
    """Each module's imports among `sources`, a dict of module names and texts."""
    return {
        module: {name for name in imported_names(ast.parse(text)) if name in sources and name != module}
        for module, text in sources.items()
    }


def graph_of_children(graph, folder):
    """The graph of a folder's files and sub-folders: one imports another if any file in it does."""
    inside = f"{folder}."
    children = {}
    for module, imports in graph.items():
        # A folder's own `__init__` is a child of that folder, so that what it gathers is no cycle.
        if module.startswith(inside):
            child = module.removeprefix(inside).partition(".")[0]
            others = {name.removeprefix(inside).partition(".")[0] for name in imports if name.startswith(inside)}
            children.setdefault(child, set()).update(others - {child})
    return children


def find_cycle(graph):
    """A cycle as a list of names, or None."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
FOLDERS = [module for module, path in FILES.items() if path.name == "__init__.py"]


@functools.cache
def graph():
    """Imports of all sources; every worker collects this file, and one needs them."""
    return import_graph({module: path.read_text() for module, path in FILES.items()})


def test_no_file_imports_itself_through_others():
    assert find_cycle(graph()) is None


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_children_of_a_folder_have_an_order(folder):
    assert find_cycle(graph_of_children(graph(), folder)) is None


def test_kernels_know_nothing_of_the_package():
    wrong = {m: i for m, i in graph().items() if m.startswith("pallas_kernels") and any("jaxspec" in n for n in i)}
    assert wrong == {}


def test_cycles_are_found():
    """In files, inside functions, and between folders whose files have none."""
    sources = {"p": "", "p.a": "import p.b", "p.b": "def f():\n    from p import a"}
    assert set(find_cycle(import_graph(sources))) == {"p.a", "p.b"}
    sources["p.b"] = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import p.a"
    assert find_cycle(import_graph(sources)) is None
    sources = {
        "p": "",
        "p.x": "",
        "p.x.one": "import p.y.one",
        "p.x.two": "",
        "p.y.one": "",
        "p.y.two": "import p.x.two",
    }
    graph = import_graph(sources)
    assert find_cycle(graph) is None
    assert set(find_cycle(graph_of_children(graph, "p"))) == {"x", "y"}


def lines_of(parts):
    """Lines of Python below folders, or of the files of a pattern."""
    paths = set()
    for part in parts.split():
        paths |= set(ROOT.glob(part) if "*" in part else (ROOT / part).rglob("*.py"))
    return sum(len(path.read_text().splitlines()) for path in paths)


@pytest.mark.parametrize("parts", BUDGETS)
def test_lines_stay_within_the_budget(parts):
    assert 0 < lines_of(parts) <= BUDGETS[parts]


@pytest.mark.parametrize("folder", MOST_ENTRIES)
def test_a_folder_shows_few_entries(folder):
    entries = [e for e in (ROOT / folder).iterdir() if e.name not in ("__init__.py", "__pycache__")]
    assert len(entries) <= MOST_ENTRIES[folder]


def test_long_files_say_why():
    long = {}
    for path in FILES.values():
        text = path.read_text()
        if len(text.splitlines()) > LONGEST_FILE:
            says = " ".join((ast.get_docstring(ast.parse(text)) or "").split())
            long[path.relative_to(ROOT)] = bool(REASON.search(says))
    assert all(long.values()), long
