"""`jaxspec-check` finds rules broken on purpose inside the real methods, and passes them unbroken."""

import jax.numpy as jnp
import pytest

from jaxspec.methods.core import sampled_tree as sampled
from jaxspec.sampling import accept
from jaxspec.sampling.accept import children_mask, match_rule

pytestmark = pytest.mark.slow


@pytest.fixture
def check(command, tiny_model):
    """Check a method in this process; the model is its own draft."""

    def check(method, *settings):
        words = ["--model", tiny_model, "--raw", "-n", "12", "--samples", "400", "--method", method]
        words += [] if method == "lookup" else ["--draft-model", tiny_model]
        words += [word for setting in settings for word in ("--set", setting)]
        return command("check", *words, "w1 w2 w1 w2 w1", "w3")

    return check


def raw_bonus(logits, batch, request, position, vocab):
    """The token after a fully accepted path is drawn at temperature 1, without cuts."""
    right = match_rule(logits, batch, request, position, vocab)
    neutral = request.processors.replace(temperature=jnp.where(request.processors.temperature > 0, 1.0, 0.0))
    wrong = match_rule(logits, batch, request.replace(processors=neutral), position, vocab)

    def decide(row, history):
        is_leaf = ~children_mask(batch, row).any()
        return tuple(jnp.where(is_leaf, w, r) for w, r in zip(wrong(row, history), right(row, history), strict=True))

    return decide


def accepted_pad(logits, batch, request, position, vocab):
    """A row that is not in use counts as a child that was confirmed."""
    right = match_rule(logits, batch, request, position, vocab)

    def decide(row, history):
        token, logprob, child = right(row, history)
        pad = (child < 0) & (batch.count < batch.rows) & (row < batch.count)
        return jnp.where(pad, 0, token), logprob, jnp.where(pad, batch.count, child)

    return decide


def picked_children(logprob, key, position, draws, replacement, processors, vocab):
    """Children are the most probable tokens; the rule divides by q all the same."""
    value, token = vocab.top_k(logprob, draws)
    return token, value > -jnp.inf


PLANTS = {
    "bonus token at the wrong temperature": (accept, "match_rule", raw_bonus, "chain", "num_draft_tokens=2"),
    "pad accepted": (accept, "match_rule", accepted_pad, "lookup", "num_draft_tokens=7"),
    "p / q on top-k children": (sampled, "draw_children", picked_children, "specinfer", "expansion=[2, 1]"),
}


@pytest.mark.parametrize("name", PLANTS)
def test_a_broken_rule_is_found(check, monkeypatch, name):
    module, function, broken, method, setting = PLANTS[name]
    monkeypatch.setattr(module, function, broken)
    status, out, _ = check(method, setting)
    assert status == 1 and f"{method}: NOT LOSSLESS" in out


@pytest.mark.parametrize(("method", "setting"), sorted({plant[3:] for plant in PLANTS.values()}))
def test_the_same_methods_pass_unbroken(check, method, setting):
    status, out, _ = check(method, setting)
    assert status == 0 and f"{method}: lossless here" in out


def test_what_follows_from_a_setting_follows_it(check):
    """The method that is checked is the one that the same words decode with."""
    status, out, _ = check("specexec", "num_draft_tokens=48")
    assert status == 0 and "num_draft_tokens=48 width=6 branch=32 depth=32" in out
