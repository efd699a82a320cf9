"""README and docs: links, lengths, settings tables, and the files that they name."""

import re
import subprocess
from pathlib import Path

import files_per_round
import make_settings
import pytest

from jaxspec.methods.registry import METHODS, method_class

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("drafts/**/*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
WIDTH, README_LINES = 100, 120
ROUND_FILES, MOST_ROUND_FILES = {"specexec": 24}, 27
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FILE = re.compile(r"`((?:jaxspec|pallas_kernels|configs|tests|tools|docs|drafts|examples)/[\w./-]*\w/?)`")
# Files that the pages tell to create.
EXAMPLES = {
    "jaxspec/models/families/acorn.py", "configs/models/acorn-7b.toml", "jaxspec/methods/repeat.py",
    "docs/methods/repeat.md", "pallas_kernels/swiglu/mosaic.py", "tests/kernels/test_swiglu_mosaic.py",
    "pallas_kernels/tuned/",
}  # fmt: skip
# Texts that are no part of the repository. Written in parts, so that this file does not hold them.
ELSEWHERE = [
    "ALGO" + "RITHMS",
    "JAX_" + "NOTES",
    "DESIGN" + ".md",
    "REVIEW" + ".md",
    "first " + "plan",
    "/shared" + "/",
]


def prose(text):
    """Numbered lines outside code blocks and tables."""
    code = False
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("```"):
            code = not code
        elif not code and not line.lstrip().startswith("|"):
            yield number, line


def anchors(page):
    """Names of a page's headings, as GitHub spells them."""
    heads = [line.lstrip("#").strip() for _, line in prose(page.read_text()) if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_lines_are_short(page):
    long = {number: line for number, line in prose(page.read_text()) if len(line) > WIDTH and "http" not in line}
    assert not long


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page):
    for target in LINK.findall("\n".join(line for line in page.read_text().splitlines())):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        file, _, anchor = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_named_files_exist(page):
    named = {name for name in FILE.findall(page.read_text()) if "/NAME/" not in name}
    assert not [name for name in named - EXAMPLES if not (ROOT / name).exists()]


def test_the_distribution_has_its_own_name():
    """`jaxspec` on PyPI is another library."""
    for page in PAGES:
        assert not re.search(r"pip install [^\n]*\bjaxspec(?!-decode)\b", page.read_text()), page


def test_no_text_outside_the_repository_is_cited():
    files = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if files.returncode:
        pytest.skip("not a checkout of git")
    kinds = (".py", ".md", ".toml", ".cc", ".h", ".yml", "Makefile")
    cited = []
    for name in files.stdout.splitlines():
        if not name.endswith(kinds) or not (ROOT / name).is_file():
            continue
        text = (ROOT / name).read_text(encoding="utf-8")
        cited += [f"{name}: {words}" for words in ELSEWHERE if words in text]
    assert not cited


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_page_with_its_settings(name):
    text = (ROOT / "docs" / "methods" / f"{name}.md").read_text()
    assert f"<!-- settings: {method_class(name).__name__} -->" in text
    assert make_settings.with_tables(text) == text, "run python tools/make_settings.py"
    assert f"]({name}.md)" in (ROOT / "docs" / "methods" / "README.md").read_text()


def test_a_settings_table_by_hand():
    table = make_settings.settings_table(method_class("chain")).splitlines()
    assert table[0] == "| setting | type | default | meaning |"
    assert table[2].startswith("| `num_draft_tokens` | `int` | `4` | ")


@pytest.mark.parametrize("name", METHODS)
def test_a_round_is_read_in_few_files(name):
    """`tests/tools/test_files_per_round.py` counts them."""
    marks = files_per_round.read_table(files_per_round.PAGE.read_text())[0][name]
    assert 0 < files_per_round.num_files(marks) <= ROUND_FILES.get(name, MOST_ROUND_FILES)
    assert all((ROOT / "jaxspec" / file).is_file() for file in marks)


def test_the_site_has_every_page():
    """`make docs` builds it and checks its links; the pages of results need no entry."""
    listed = re.findall(r"^ +- (?:[A-Z]\w+: )?([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = [str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")]
    made = ["index.md", "examples.md", "api.md", "contributing.md"]
    assert sorted(listed) == sorted([*made, *(page for page in pages if not page.startswith("results/"))])
