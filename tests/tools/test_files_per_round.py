"""The table of files per round in docs/architecture.md is what the tool counts."""

import gc

import files_per_round
import pytest


@pytest.mark.parametrize("name", [pytest.param("specexec", marks=pytest.mark.slow), "auto"])
def test_the_page_shows_what_a_round_enters(name):
    gc.collect()  # a generator that an earlier test left would end while rounds are watched
    assert files_per_round.read_table(files_per_round.PAGE.read_text())[0][name] == files_per_round.marks_of(name)


def test_a_table_is_read_as_it_is_written():
    found = {
        "chain": {"tree/reroot.py": "x", "models/feature_draft.py": "f", "tree/tree.py": "p"},
        "ar": {"models/transformer.py": "x"},
    }
    words = {"tree/reroot.py": "its next root", "models/transformer.py": "the pass"}
    read, others = files_per_round.read_table(f"# A page\n\n{files_per_round.table(found, words)}\n")
    assert read == found and words.items() <= others.items() and all(others.values())
    assert [files_per_round.num_files(marks) for marks in found.values()] == [2, 1]
