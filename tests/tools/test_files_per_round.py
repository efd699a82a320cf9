"""The table of files per round in docs/architecture.md is what the tool counts."""

from pathlib import Path

import files_per_round
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"


@pytest.mark.parametrize("name", ["specexec", "auto"])
def test_the_page_shows_what_a_round_enters(name):
    assert files_per_round.read_table(PAGE.read_text())[name] == files_per_round.marks_of(name)


def test_a_table_is_read_as_it_is_written():
    found = {
        "chain": {"tree/grow.py": "x", "models/feature_draft.py": "f", "tree/tree.py": "p"},
        "ar": {"models/transformer.py": "x"},
    }
    assert files_per_round.read_table(f"# A page\n\n{files_per_round.table(found)}\n") == found
    assert [files_per_round.num_files(marks) for marks in found.values()] == [2, 1]
