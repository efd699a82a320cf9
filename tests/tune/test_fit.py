"""What `jaxspec-tune --quick` says of invented rates of acceptance."""

import pytest

from jaxspec.tune.fit import Fit

WELL, PLAINLY = (0.75, 0.7, 0.6), (0.7, 0.7, 0.7)


@pytest.mark.parametrize(
    ("reads_states", "chats", "plain", "verdict"),
    [
        (True, WELL, PLAINLY, "the draft fits this target"),
        (False, (0.5, 0.2, 0.0), (), "the draft fits this target"),
        (True, (0.4, 0.3, 0.3), (0.45, 0.3, 0.3), "below what is usual"),
        (True, (0.4, 0.3, 0.3), PLAINLY, "another chat template"),
        (False, (0.1, 0.3, 0.3), PLAINLY, "another chat template"),
        (True, (0.1, 0.0, 0.0), (0.12, 0.0, 0.0), "eagle_aux_hidden_state_layer_ids"),
        (False, (0.0, 0.0, 0.0), (0.02, 0.0, 0.0), "another model's"),
    ],
)
def test_the_likely_cause(reads_states, chats, plain, verdict):
    *_, last = Fit(reads_states, chats, plain).lines()
    assert verdict in last


def test_the_likely_cause_of_a_draft_inside_the_checkpoint():
    low = (0.1, 0.0, 0.0)
    assert "trained further than its layer" in Fit(True, low, low, is_mtp=True).lines()[-1]


def test_accepted_tokens_are_those_of_a_chain():
    fit = Fit(False, (0.5, 0.5, 1.0), ())
    assert fit.accepted == 0.5 + 0.25 + 0.25
    assert "has 1.00 tokens accepted" in fit.lines()[0] and "50%" in fit.lines()[1]
