"""Models with recurrent layers: every method's tokens over many blocks and turns, rewinds, and what is refused."""

import functools

import pytest
from marks import fast_part, quick_part
from method_cases import PROMPT, Case, models_of, params_of, run, tokens_of
from test_prefix_reuse import answer
from tiny_models import ALL_FAMILIES
from tiny_pairs import draft_placement

from jaxspec.engine import Engine
from jaxspec.errors import ConfigError
from jaxspec.methods.auto.settings import Auto
from jaxspec.methods.autoregressive import Autoregressive
from jaxspec.methods.chain import Chain
from jaxspec.methods.core.round import Models
from jaxspec.methods.lookup import PromptLookup
from jaxspec.methods.specexec import SpecExec
from jaxspec.methods.specinfer import SpecInfer
from jaxspec.methods.swift.settings import Swift
from jaxspec.methods.swiftspec.settings import SwiftSpec
from jaxspec.models.recurrent import BLOCK
from jaxspec.offload.plan import stream_layers

HYBRIDS = [family for family, cfg in ALL_FAMILIES.items() if cfg.recurrent is not None]
METHODS = {
    "auto": Auto(), "lookup": PromptLookup(), "chain": Chain(5), "specexec": SpecExec(12, width=3),
    "specinfer": SpecInfer((2, 2, 1)), "swiftspec": SwiftSpec(7, 4, depth=2, adaptive=False),
}  # fmt: skip
FED = [f"mtp {name}" for name in METHODS if name != "lookup"]
CONTEXT = 6 * BLOCK


@functools.cache
def case_of(family, method, degree=1):
    """`method` may begin with "mtp", for a draft that reads the target's states."""
    fed, name = method.startswith("mtp "), method.removeprefix("mtp ")
    made = Autoregressive() if name == "ar" else METHODS[name]
    return Case(family, degree, "none" if name in ("ar", "lookup") else "fed mtp" if fed else "layer", made)


@functools.cache
def engine_of(case):
    engine = Engine(models_of(case), case.method, CONTEXT)
    engine.prepare()
    return engine


@functools.cache
def expected(family, count, sampled, degree=1):
    case = case_of(family, "ar", degree)
    return tokens_of(run(engine_of(case), params_of(case), PROMPT, count, 3, **sampled_by(sampled)))


def sampled_by(sampled):
    return {"temperature": 0.9} if sampled else {}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "method"),
    fast_part(
        [(f, m) for f in HYBRIDS for m in METHODS] + [("qwen3.5", m) for m in FED],
        lambda family, method: (
            (family, method) in (("qwen3.5", "chain"), ("lfm2", "swiftspec"), ("qwen3.5", "mtp specexec"))
        ),
    ),
)
def test_tokens_over_many_blocks(family, method):
    case = case_of(family, method)
    for draft in ("copy", "random"):
        for sampled in (False, True)[: 1 + (case.method.exact == "tokens")]:
            params = params_of(case, draft)
            rounds = run(engine_of(case), params, PROMPT, 4 * BLOCK, 3, **sampled_by(sampled))
            assert tokens_of(rounds) == expected(family, 4 * BLOCK, sampled)


SPLIT = [("mtp specexec", 4), ("mtp chain", 4), ("mtp auto", 4), ("mtp chain", 2)]


@pytest.mark.thorough
@pytest.mark.parametrize(("method", "degree"), fast_part(SPLIT, lambda method, _: method == "mtp specexec"))
def test_a_layer_for_multi_token_prediction_on_several_devices(method, degree):
    case = case_of("qwen3.5", method, degree)
    for sampled, draft in ((False, "copy"), (True, "random")):
        rounds = run(engine_of(case), params_of(case, draft), PROMPT, 3 * BLOCK, 3, **sampled_by(sampled))
        assert tokens_of(rounds) == expected("qwen3.5", 3 * BLOCK, sampled, degree)
        assert any(one.drafted for one in rounds) or method == "mtp auto"


TURNS = [*((f, m) for f in HYBRIDS for m in ("ar", "chain")), ("qwen3.5", "mtp chain")]


@pytest.mark.parametrize(
    ("family", "method"), quick_part(TURNS, lambda family, method: (family, method) == ("lfm2", "chain"))
)
def test_turns_go_on_where_they_can(family, method, monkeypatch):
    """Texts that go on from others, or turn off within a block or before it: the tokens of empty caches."""
    case = case_of(family, method)
    engine, params = engine_of(case), params_of(case, "random")
    monkeypatch.setattr(engine, "_idle", [])
    text = [*PROMPT, *expected(family, 3 * BLOCK, False)]
    turns = [text[:70], text[:90], [*text[:86], 1, 2], [*text[:50], 3], text[:100]]
    monkeypatch.setattr(engine, "session_memory", 0)
    cold = [tokens_of(answer(engine, params, turn, 8)[0]) for turn in turns]
    monkeypatch.setattr(engine, "session_memory", 1)  # one text is kept, and taken by the next
    cached = []
    for turn, tokens in zip(turns, cold, strict=True):
        rounds, kept = answer(engine, params, turn, 8)
        assert tokens_of(rounds) == tokens
        cached.append(kept)
    # The second goes on from the first; the third turns off within the last block, the fourth before it.
    assert cached[1] >= 69 and cached[2] == 0 or cached[2] >= 80
    assert cached[3] == 0 and cached[0] == 0


@pytest.mark.parametrize("family", HYBRIDS)
def test_what_recurrent_layers_cannot_do_yet_is_refused(family):
    models = Models(models_of(case_of(family, "ar")).target)
    with pytest.raises(ConfigError, match="the target has recurrent layers, which method 'swift', which leaves out"):
        Engine(models, Swift(), CONTEXT)
    with pytest.raises(ConfigError, match="the target has recurrent layers, which offload does not support yet"):
        Engine(models._replace(target=stream_layers(models.target, 0)), Autoregressive(), CONTEXT)
    large = models._replace(draft=draft_placement(family, 1, "layer"))
    with pytest.raises(ConfigError, match="rows for drafted tokens, this method needs 2001: draft a smaller tree"):
        Engine(large, SpecExec(2000), CONTEXT)
