"""What can be read in one sitting: lengths of files, of the README, and of lines of prose."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LONGEST_FILE, LONGEST_README = 400, 120  # lines
WIDEST_LINE = 100  # characters of prose
REASON = re.compile("([Ll]onger than|exceeds) 400 lines because")
SOURCES = [path for package in ("jaxspec", "pallas_kernels") for path in sorted((ROOT / package).rglob("*.py"))]
PROSE = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def lines_of_prose(text):
    """Numbered lines outside tables and blocks of code, without the addresses of links and pictures."""
    code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            code = not code
        elif not code and not line.lstrip().startswith("|"):
            yield number, re.sub(r"\]\([^)]*\)", "]()", line)


def test_prose_without_tables_code_and_addresses():
    text = "a\n```sh\nlong\n```\n| b |\n[c](address)"
    assert list(lines_of_prose(text)) == [(1, "a"), (6, "[c]()")]


@pytest.mark.parametrize("path", PROSE, ids=lambda path: str(path.relative_to(ROOT)))
def test_lines_of_prose_are_narrow(path):
    assert [n for n, line in lines_of_prose(path.read_text()) if len(line) > WIDEST_LINE] == []


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= LONGEST_README


def test_long_files_say_why():
    long = {}
    for path in SOURCES:
        text = path.read_text()
        if len(text.splitlines()) > LONGEST_FILE:
            says = " ".join((ast.get_docstring(ast.parse(text)) or "").split())
            long[path.relative_to(ROOT)] = bool(REASON.search(says))
    assert all(long.values()), long
