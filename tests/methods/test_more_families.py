"""Mixtures of experts and the families beyond Llama's: greedy tokens of every method are those of plain decoding."""

import dataclasses
import itertools

import pytest
import swift_cases
import swiftspec_cases
from marks import fast_part
from method_cases import LONG_PROMPT, PROMPT, Case, decode, plain, tokens_of
from swift_cases import EAGER, engine_of, plain_tokens
from tiny_models import MORE_FAMILIES

from jaxspec.methods.chain import Chain
from jaxspec.methods.lookup import PromptLookup
from jaxspec.methods.specexec import SpecExec
from jaxspec.methods.swiftspec.settings import SwiftSpec

pytestmark = pytest.mark.thorough

METHODS = {"lookup": ("none", PromptLookup()), "chain": ("same", Chain(4)), "specexec": ("layer", SpecExec(7))}
# One for each kind of layer: experts, layers of several kinds, recurrent layers, two norms around a part, sinks. That
# chains and trees of every family have the bits of plain decoding is tested without methods.
FAST = [("mixtral", "chain"), ("gemma4", "chain"), ("lfm2", "specexec"), ("gemma2", "chain"), ("gpt-oss", "specexec")]
# Four devices, on which neither heads nor experts divide.
WIDE = [
    *(("mixtral", "chain"), ("qwen2-moe", "chain"), ("gemma2", "chain"), ("olmo2", "chain"), ("gemma3", "specexec")),
    *(("gpt-oss", "chain"), ("exaone4", "chain"), ("lfm2", "chain"), ("qwen3.5", "chain")),
]


def check(tokens_by, family, **sampling):
    for prompt in (PROMPT, LONG_PROMPT):
        assert tokens_by(prompt, **sampling) == tokens_of(plain(family, prompt, 30, 3, **sampling))


@pytest.mark.parametrize(
    ("family", "method"),
    # Copies are verified as the rows of a chain are: one family tells.
    fast_part(
        [case for case in itertools.product(MORE_FAMILIES, METHODS) if case[1] != "lookup" or case[0] == "mixtral"],
        lambda *case: case in FAST,
    ),
)
def test_tokens_of_plain_decoding(family, method):
    geometry, made = METHODS[method]
    case = Case(family, 1, geometry, made)
    drafts = ("copy",) if geometry == "none" else ("copy", "random")
    for draft, sampling in itertools.product(drafts, ({}, {"temperature": 0.9})):
        check(lambda prompt, d=draft, **s: tokens_of(decode(case, prompt, 30, d, 3, **s)), family, **sampling)
    if geometry == "same":
        # A copy of the target is always right.
        assert sum(emitted.accepted for emitted in decode(case, PROMPT, 30, "copy")) >= 22


@pytest.mark.parametrize(("family", "method"), fast_part(WIDE, lambda family, method: family == "qwen2-moe"))
def test_tokens_on_four_devices(family, method):
    geometry, made = METHODS[method]
    case = Case(family, 4, geometry, made)
    check(lambda prompt, **s: tokens_of(decode(case, prompt, 30, "copy", 3, **s)), family)


@pytest.mark.parametrize("family", fast_part(MORE_FAMILIES, lambda family: family == "qwen3-moe"))
def test_tokens_of_swiftspec(family):
    case = swiftspec_cases.Case(family, 1, 1, "layer", SwiftSpec(7, 4, depth=2))
    for draft in ("copy", "random"):
        check(lambda p, d=draft, **s: tokens_of(swiftspec_cases.decode(case, p, 30, d, 3, **s)), family)


LAYERS_ALIKE = [family for family, cfg in MORE_FAMILIES.items() if cfg.recurrent is None and cfg.kinds is None]


@pytest.mark.parametrize("family", fast_part(LAYERS_ALIKE, lambda family: family == "mixtral"))
def test_tokens_of_swift(family):
    engine = engine_of(dataclasses.replace(EAGER), family)
    params = swift_cases.params_of(family)
    for prompt in (PROMPT, LONG_PROMPT):
        rounds = swift_cases.run(engine, params, prompt, 40)
        assert swift_cases.tokens_of(rounds) == plain_tokens(family, prompt, 40)
