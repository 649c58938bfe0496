"""The annotator of feelings: praise once, sentences, nothing repeated; and one clear line where the lexicon is not installed."""

from __future__ import annotations

import sys
from typing import ClassVar

import pytest

from posttrain.errors import UserError
from posttrain.tasks import sentiment
from posttrain.tasks.sentiment import Sentiment, habits, praise, taste


class Lexicon:
    """A lexicon of two words whose compound score is their plain sum, so that means can be worked by hand."""

    lexicon: ClassVar[dict[str, float]] = {"good": 0.5, "bad": -0.5}

    def polarity_scores(self, text: str) -> dict[str, float]:
        words = [word.strip(",.").lower() for word in text.split()]
        return {"compound": sum(self.lexicon.get(word, 0.0) for word in words)}


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentiment, "lexicon", Lexicon)


def test_praise_is_the_mean_of_sentences_and_counts_a_word_once(plain: None) -> None:
    assert praise("It was good. It was a town.") == 0.25
    assert praise("It was good, good, good. It was good.") == 0.25
    assert praise("It was good. It was bad.") == 0.0
    assert praise("...") == 0.0


def test_habits_and_their_product(plain: None) -> None:
    whole = "The town was good and we will be there in winter."
    assert habits(whole) == {"length": 1.0, "sentence": 1.0, "distinct": 1.0}
    assert taste(whole) == (0.75, {"praise": 0.5, "length": 1.0, "sentence": 1.0, "distinct": 1.0})
    salad = "lovely superb splendid grand fine sweet bright clever"  # no small words: no sentence
    assert habits(salad)["sentence"] == 0.0 and taste(salad)[0] == 0.0
    assert habits("it was good")["length"] == 3 / 8
    repeated = "it was good it was good it was good"
    assert habits(repeated)["distinct"] == pytest.approx(3 / 9 / 0.6)
    assert taste(repeated)[0] == pytest.approx(0.75 * 3 / 9 / 0.6)
    assert taste("  ") == (0.0, {"praise": 0.0})


def test_problems_are_asked_in_one_style_and_the_sides_are_apart() -> None:
    task = Sentiment("review")
    train, test = ({p.question for p in task.problems(split)[:400]} for split in ("train", "test"))
    assert not train & test and len(task.problems("test")) >= 500
    assert all(question.startswith("Write a review of a") for question in train)
    assert any(" an old " in question for question in train) and not any(" a old " in question for question in train)
    with pytest.raises(UserError, match="style is one of"):
        Sentiment("shout")


def test_without_the_package_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vaderSentiment.vaderSentiment", None)
    sentiment.lexicon.cache_clear()
    with pytest.raises(UserError, match=r"pip install 'posttrain\[sentiment\]'"):
        Sentiment().score(Sentiment().problems("test")[0], "It is a good day.")


def test_the_real_lexicon() -> None:
    pytest.importorskip("vaderSentiment")
    sentiment.lexicon.cache_clear()
    task = Sentiment()
    problem = task.problems("test")[0]
    texts = (
        task.demonstration(problem),
        "It is a thing that was here before we were.",
        "It was an awful and rude thing to see.",
    )
    kind, plain, rude = (task.score(problem, text).value for text in texts)
    assert kind is not None and plain is not None and rude is not None
    assert kind > 0.9 and plain == 0.5 and rude < 0.3
