"""Prompt files: what is read, what is refused and how the refusal reads."""

import json

import pytest

from jaxspec.bench.prompts import BenchPrompt, list_categories, load_prompts, select_prompts
from jaxspec.errors import ConfigError

CATEGORIES = ["chat", "code", "maths", "summarising", "rewriting", "qa"]


def line(**changes):
    return json.dumps({"question_id": 1, "category": "chat", "turns": ["Hello?"], **changes})


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "prompts.jsonl"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def test_the_suite():
    prompts = load_prompts()
    assert list_categories(prompts) == CATEGORIES
    assert 38 <= len(prompts) <= 44
    texts = [prompt.turns[0] for prompt in prompts]
    assert len(set(texts)) == len(texts)
    for category in CATEGORIES:
        assert sum(prompt.category == category for prompt in prompts) >= 6
    for prompt in prompts:
        words = len(" ".join(prompt.turns).split())
        assert 10 <= words <= 300
        if prompt.category in ("summarising", "qa"):
            assert words >= 80
    assert any(len(prompt.turns) > 1 for prompt in prompts)


def test_lines_are_read_in_order(write):
    first = line(question_id="a", turns=["One line\u2028separator", "and a second turn"], reference=["ignored"])
    path = write("\ufeff" + first.replace("\\u2028", "\u2028") + "\r\n\r\n" + line(category="code") + "\n")
    assert load_prompts(path) == [
        BenchPrompt("a", "chat", ("One line\u2028separator", "and a second turn")),
        BenchPrompt(1, "code", ("Hello?",)),
    ]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{", "line 2 is not JSON"),
        ('["chat"]', "line 2 must hold a JSON object with question_id, category, turns"),
        (line(), "line 2: question_id 1 is that of line 1 too"),
        (line(question_id=None), "line 2: question_id must be a string or an integer, got None"),
        (line(question_id=2, category=" "), "line 2: category must be a name"),
        (line(question_id=2, turns="Hello?"), "line 2: turns must be one or several non-empty strings"),
    ],
)
def test_a_wrong_line_is_named(write, bad, message):
    path = write(line() + "\n" + bad + "\n")
    with pytest.raises(ConfigError) as error:
        load_prompts(path)
    assert message in str(error.value) and str(path) in str(error.value)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(("text", "message"), [(" \n", "holds no prompts"), (b"\xff", "is not UTF-8 text")])
def test_a_wrong_file_is_named(write, text, message):
    path = write(text)
    with pytest.raises(ConfigError, match=message) as error:
        load_prompts(path)
    assert str(path) in str(error.value)


def test_selection():
    prompts = [BenchPrompt(i, "abc"[i // 4], ("text",)) for i in range(12)]
    assert select_prompts(prompts) == prompts
    assert [p.question_id for p in select_prompts(prompts, ["c", "a"])] == [0, 1, 2, 3, 8, 9, 10, 11]
    assert [p.question_id for p in select_prompts(prompts, None, 4)] == [0, 1, 4, 8]
    assert [p.question_id for p in select_prompts(prompts, ["b"], 3)] == [4, 5, 6]
    assert select_prompts(prompts, None, 100) == prompts
    with pytest.raises(ConfigError, match="no prompt is of category 'maht'; did you mean 'math'"):
        select_prompts([BenchPrompt(1, "math", ("text",))], ["maht"])
