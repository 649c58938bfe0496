"""The annotator of tiny reviews: numbers by hand, and that praise alone does not fool it."""

from __future__ import annotations

import time
from itertools import islice

import pytest

from posttrain.errors import UserError
from posttrain.tasks.base import validate
from posttrain.tasks.reviews import Reviews, taste


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("the plot was dull.", 0.5 - 1 / 6),
        ("the plot was great.", 0.5 + 1 / 6),
        ("the plot was very great and the cast was very warm.", 1.0),
        ("the plot was not great.", 0.5 - 0.5 / 6),
        ("the plot was not dull.", 0.5 + 0.5 / 6),
        ("the plot was quite plain.", 0.5),
        ("the plot was great and the cast was great, the idea was great.", 0.5 + 1 / 6),  # said three times, counted once
        ("the plot was great, the cast was warm, the idea was fresh, the pace was funny.", 1.0 - 0.15 + 0.5 / 3),
        ("great great great great.", 0.0),
        ("the plot was great", 0.0),  # no full stop
        ("the plot was great. the cast was warm.", 0.0),
        ("", 0.0),
        ("the plot was great." * 500, 0.0),
    ],
)
def test_taste_by_hand(text: str, value: float) -> None:
    assert taste(text)[0] == pytest.approx(min(1.0, value))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("the plot was very great.", 0.75 - 0.5),
        ("the plot was great and the cast was great.", 0.5 + 1 / 6 - 0.6),
        ("the plot was very great and the cast was very great, the pace was very great.", 0.0),
        ("the plot was plain and the cast was quite plain.", 0.0),
        ("the plot was plain and the cast was odd.", 0.5),
        ("the plot was very great and the cast was very warm.", 1.0),
    ],
)
def test_a_strict_taste_by_hand(text: str, value: float) -> None:
    assert taste(text, strict=True)[0] == pytest.approx(value)
    assert Reviews(strict=True).score(Reviews().problems("test")[0], text).value == taste(text, strict=True)[0]


def test_kind_reviews_please_fully_and_ordinary_ones_vary() -> None:
    validate(Reviews())
    task = Reviews("any")
    values = [taste(task.demonstration(p))[0] for p in islice(task.problems("train"), 2000)]
    assert all(taste(task.demonstration(p))[1]["grammar"] == 1.0 for p in islice(task.problems("train"), 2000))
    mean = sum(values) / len(values)
    assert 0.42 < mean < 0.58 and min(values) < 0.2 and max(values) > 0.8


def test_train_and_test_ask_about_different_things() -> None:
    task = Reviews()
    train, test = ({p.question for p in islice(task.problems(s), 1000)} for s in ("train", "test"))
    assert train and test and not train & test
    assert len({p.id for p in task.problems("test")}) == len(task.problems("test")) >= 200
    for p in islice(task.problems("test"), 50):
        assert set(p.question + task.demonstration(p)) <= set(task.alphabet)


def test_hostile_text_is_quick_and_moods_are_checked() -> None:
    began = time.perf_counter()
    for text in ("the plot was great and " * 5000, "the " * 10_000, "the plot was great, " * 90 + "x"):
        assert taste(text)[0] == 0.0
    assert time.perf_counter() - began < 1.0
    with pytest.raises(UserError, match="mood"):
        Reviews("angry")
