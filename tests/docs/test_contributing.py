"""The worked examples of CONTRIBUTING.md do what the page says, exactly as they stand there."""

import json
import os
import re
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import pytest
from tiny_models import FAMILIES, place, tiny_params

import jaxspec
from jaxspec import methods
from jaxspec.config import EngineConfig, EngineSettings
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


# Reports what `LLM` and each command would open a model with, and goes no further.
REPORTING = """
import contextlib, json, sys
sys.meta_path.sort(key=lambda finder: "Editable" in str(finder))  # the copy comes before the installed package
import jaxspec.llm
from jaxspec.cli import start
from jaxspec.errors import ConfigError

def report(config, method, opened):
    raise ConfigError(f"warm_up is {config.warm_up}")

jaxspec.llm.open_models = lambda *arguments: None
jaxspec.llm.plan_meshes = report
try:
    jaxspec.LLM(warm_up=3)
except ConfigError as error:
    print("LLM:", error, file=sys.stderr)
for name, words in json.loads(sys.argv[1]).items():
    sys.argv = [f"jaxspec-{name}", *words]
    with contextlib.suppress(SystemExit):
        start.run(name)
"""
WORDS = {
    "decode": ["--warm-up", "3", "w1"],
    "serve": ["--set", "warm_up=3", "--max-context", "64", "--port", "0"],
    "bench": ["--warm-up", "3", "--draft-model", "none", "--methods", "ar"],
    "check": ["--warm-up", "3", "--draft-model", "none", "--method", "ar"],
    "tune": ["--warm-up", "3", "--draft-model", "none", "--method", "lookup"],
}


@pytest.fixture(scope="module")
def with_warm_up(tmp_path_factory):
    """A folder with a copy of the package in which the example setting was declared as the page says."""
    folder = tmp_path_factory.mktemp("setting")
    source = Path(jaxspec.__file__).parent
    shutil.copytree(source, folder / "jaxspec", ignore=shutil.ignore_patterns("__pycache__"))
    attribute, field, check, typed = re.findall(
        r"^\| .*(?:EngineConfig|EngineSettings).* \| `(.*)` \|$", PAGE, re.MULTILINE
    )
    path = folder / "jaxspec" / "config.py"
    text = path.read_text()
    config = text.index("class EngineConfig")
    for before, line in (
        ('    """\n\n    dtype: DType = ', attribute),
        ("    dtype: DType = ", field),
        ("        for name, hint in get_type_hints(EngineConfig)", check),
        ("    dtype: DType\n", typed),
    ):
        place = text.index(before, config)
        text = f"{text[:place]}{line}\n{text[place:]}"
    path.write_text(text)
    return folder


def test_the_example_setting_reaches_everything(with_warm_up):
    words = [sys.executable, "-c", REPORTING, json.dumps(WORDS)]
    environment = {**os.environ, "PYTHONPATH": str(with_warm_up)}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=with_warm_up, timeout=120)
    for name in ("LLM", *(f"jaxspec-{name}: error" for name in WORDS)):
        assert f"{name}: warm_up is 3\n" in done.stderr, done.stderr


def test_editors_know_every_setting():
    hints = typing.get_type_hints
    assert hints(EngineSettings) == hints(EngineConfig)
