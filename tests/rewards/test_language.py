"""Languages of one script, told apart by their common words: shares by hand."""

from __future__ import annotations

import pytest

from posttrain.errors import UserError
from posttrain.rewards.language import WORDS, language, share


@pytest.mark.parametrize(
    ("text", "target", "expected"),
    [
        ("750 makes 12 then 481 makes 13", "en", 1.0),
        ("750 makes 12 dann 481 macht 13", "en", 1 / 3),
        ("750 makes 12 dann 481 macht 13", "de", 2 / 3),
        ("Macht THEN", "en", 1 / 2),  # whatever the case
        ("so in der summe", "en", 2 / 4),  # `so` and `in` are English too
        ("qwertz makes", "en", 1.0),  # a word of neither list is the script's
        ("dann да", "de", 1 / 2),  # another script is foreign as ever
    ],
)
def test_shares_by_hand(text: str, target: str, expected: float) -> None:
    others = tuple(name for name in WORDS if name != target)
    assert share(text, target, others) == pytest.approx(expected)
    assert language("", text, "", target, others).parts["language"] == pytest.approx(expected)


def test_without_others_a_script_is_one_language() -> None:
    assert share("makes dann macht", "en") == 1.0


def test_a_language_without_words_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="fr"):
        share("x", "en", ("fr",))
    with pytest.raises(UserError, match="ru"):
        share("x", "ru", ("en",))
