"""What is kept and what is dropped, counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from posttrain.data.demonstrations import prepare
from posttrain.errors import UserError
from posttrain.types import Example


def example(length: int, loss: int, unit: int = 0) -> Example:
    """`length` tokens, the last `loss` of which carry loss."""
    return Example(np.arange(length), np.arange(length) >= length - loss, unit)


MIXED = [example(4, 2), example(10, 3), example(11, 3), example(5, 0), example(1, 1), example(0, 0), example(6, 6)]


def test_overlong_examples_are_dropped_and_counted() -> None:
    kept, report = prepare(MIXED, 10)
    assert [len(e.ids) for e in kept] == [4, 10, 6]
    assert (report.total, report.kept) == (7, 3) and report.dropped == {"overlong": 1, "masked": 1, "empty": 2}
    assert (report.tokens, report.loss_tokens) == (20, 2 + 3 + 6)
    assert report.percentiles == (6, 10, 10, 10)


def test_a_loss_on_the_first_token_alone_is_no_loss() -> None:
    with pytest.raises(UserError, match="1 have no token that carries loss"):
        prepare([Example(np.arange(3), np.array([True, False, False]))], 10)


def test_units_survive() -> None:
    kept, _ = prepare([example(3, 1, unit=7), example(8, 5, unit=8)], 10)
    assert [e.unit for e in kept] == [7, 8]


def test_nothing_left_is_an_error_that_says_why() -> None:
    with pytest.raises(UserError, match="of 2, 2 are longer than max_length=10"):
        prepare([example(11, 1), example(12, 1)], 10)
    with pytest.raises(UserError, match="the data set is empty"):
        prepare([], 10)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(UserError, match="max_length"):
        prepare(MIXED, 1)


def test_the_words_name_every_loss_of_data() -> None:
    lines = prepare(MIXED, 10)[1].lines()
    assert lines[0] == "3 of 7 examples kept; 20 tokens, 11 (55%) carry loss"
    assert lines[1] == "lengths: median 6, 90% up to 10, 99% up to 10, longest 10 (limit 10)"
    assert lines[2:] == [
        "1 dropped for being longer than 10 tokens",
        "1 dropped because no token carries loss",
        "2 dropped because they are empty",
    ]
    assert len(prepare([example(4, 2)], 10)[1].lines()) == 2
