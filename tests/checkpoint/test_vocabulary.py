"""Which drafts fit: tokens are compared as they are written, not counted."""

import pytest

from jaxspec.errors import ConfigError
from jaxspec.loading import count_shared_tokens

TARGET = ["<s>", "</s>", "Ġthe", "Ġsea", "Ġis", "Ġblue"]


@pytest.mark.parametrize(
    ("draft", "shared"),
    [
        (TARGET, 6),
        ([*TARGET, "", "", ""], 6),  # a padded embedding
        ([*TARGET, "<extra>"], 6),  # tokens of its own at the end
        (TARGET[:4], 4),
        ([*TARGET[:4], "", ""], 4),  # ids that it does not use
        ([*TARGET[:3], "", *TARGET[4:]], 3),  # a hole: everything behind it is left to the target
    ],
)
def test_leading_tokens_are_shared(draft, shared):
    assert count_shared_tokens(TARGET, draft) == shared
    assert count_shared_tokens(draft, TARGET) == shared


def test_the_first_difference_is_named():
    other = [*TARGET[:3], "Ġlake", "Ġwas", "Ġblue"]
    with pytest.raises(ConfigError, match=r"token 3 is 'Ġsea' in the target's vocabulary and 'Ġlake' in the draft's"):
        count_shared_tokens(TARGET, other)


def test_a_difference_behind_a_hole_is_still_a_difference():
    with pytest.raises(ConfigError, match="token 5"):
        count_shared_tokens(TARGET, [*TARGET[:2], "", "Ġsea", "Ġis", "Ġred"])


def test_nothing_in_common():
    for draft in ([], ["", *TARGET[1:]]):
        with pytest.raises(ConfigError, match="no token in common"):
            count_shared_tokens(TARGET, draft)
