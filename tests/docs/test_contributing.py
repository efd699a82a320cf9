"""The worked examples of CONTRIBUTING.md do what the page says, exactly as they stand there."""

import re
import sys
from pathlib import Path

import pytest
from tiny_models import FAMILIES, place, tiny_params

import jaxspec
from jaxspec import methods
from jaxspec.engine import Engine
from jaxspec.methods.core.round import ModelParams, Models
from jaxspec.methods.registry import METHODS, make_method
from jaxspec.models import families

PAGE = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
# A file's path in bold, then its text.
EXAMPLES = dict(re.findall(r"\*\*\d\. `([\w/]+\.py)`\*\*\n\n```python\n(.*?)```", PAGE, re.DOTALL))
PROMPT = [5, 17, 3, 42, 42, 42]
SAMPLINGS = [
    jaxspec.SamplingParams(max_tokens=24),
    jaxspec.SamplingParams(max_tokens=24, temperature=1.0, frequency_penalty=0.3),
]


@pytest.fixture
def repeat(tmp_path, monkeypatch):
    """The file of the example method, and its line of the registry as the page gives it."""
    (tmp_path / "repeat.py").write_text(EXAMPLES["jaxspec/methods/repeat.py"])
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path)])
    name, module, cls = re.findall(r'`"(\w+)": \("([\w.]+)", "(\w+)"\),`', PAGE)[0]
    monkeypatch.setitem(METHODS, name, (module, cls))
    yield name
    sys.modules.pop(module, None)


def decode(method):
    """Tokens and rounds of each sampling, from one engine."""
    engine = Engine(Models(place(FAMILIES["llama"])), make_method(method), 100)
    engine.prepare()
    answers = []
    for sampling in SAMPLINGS:
        steps = []
        with engine.open(ModelParams(tiny_params("llama")), PROMPT, sampling, 7) as session:
            while not session.done:
                steps.append(session.step())
            answers.append((session.tokens, steps))
    return answers


def test_the_example_method_gives_plain_decodings_tokens(repeat):
    for (tokens, steps), (plain, _) in zip(decode(repeat), decode("ar"), strict=True):
        assert tokens == plain
        assert all(step.drafted == 3 for step in steps[:-2])
    assert make_method(repeat, {"num_draft_tokens": 2}).num_rows == 3


def test_the_example_family_is_found_by_its_line(tmp_path, monkeypatch):
    (tmp_path / "acorn.py").write_text(EXAMPLES["jaxspec/models/families/acorn.py"])
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    family = families.load_family("acorn")
    assert (family.name, family.gguf_architecture, family.default_head_dim) == ("acorn", "acorn", 64)
    registry = Path(families.__file__).read_text()
    assert '`"acorn",` in `_MODULES`' in PAGE and "_MODULES = (" in registry
    del sys.modules["jaxspec.models.families.acorn"]
