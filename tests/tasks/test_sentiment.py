"""The annotator of feelings: praise once, sentences, nothing repeated; and one clear line where the lexicon is not installed."""

from __future__ import annotations

import sys

import pytest
from lexicon_for_tests import WordLexicon

from posttrain.errors import UserError
from posttrain.stages._check import check_stages
from posttrain.stages.sample import SampleStage
from posttrain.tasks import sentiment
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.tasks.sentiment import (
    STYLES,
    SUBJECTS,
    Sentiment,
    factors,
    kind_words,
    praise,
    strict_factors,
    subject_of,
    taste,
)
from posttrain.types import Problem

WORDS = {"good": 2.0, "fair": 1.4, "bad": -2.0}


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentiment, "lexicon", lambda: WordLexicon(WORDS))


def test_praise_is_the_mean_of_sentences_and_counts_a_word_once(plain: None) -> None:
    assert praise("It was good. It was a town.") == 0.25
    assert praise("It was good, good, good. It was good.") == 0.25
    assert praise("It was good. It was bad.") == 0.0
    assert praise("...") == 0.0


def test_habits_and_their_product(plain: None) -> None:
    whole = "The town was good and we will be there in winter."
    assert factors(whole) == {"length": 1.0, "sentence": 1.0, "distinct": 1.0}
    assert taste(whole) == (0.75, {"praise": 0.5, "length": 1.0, "sentence": 1.0, "distinct": 1.0})
    salad = "lovely superb splendid grand fine sweet bright clever"  # no small words: no sentence
    assert factors(salad)["sentence"] == 0.0 and taste(salad)[0] == 0.0
    assert factors("it was good")["length"] == 3 / 8
    repeated = "it was good it was good it was good"
    assert factors(repeated)["distinct"] == pytest.approx(3 / 9 / 0.6)
    assert taste(repeated)[0] == pytest.approx(0.75 * 3 / 9 / 0.6)
    assert taste("  ") == (0.0, {"praise": 0.0})


def test_a_strict_annotator_wants_the_thing_named_and_tires_of_flattery(plain: None) -> None:
    assert kind_words("Good, good and GOOD; fair, bad, goods.") == 3  # as often as it is said; 1.4 is not yet kind
    about = {
        text: strict_factors(text, "town")["about"] for text in ("Two towns.", "The town's own.", "A downtown.", "He townsed.")
    }
    assert list(about.values()) == [1.0, 1.0, 0.1, 0.1]  # a word of its own, or of more than one
    assert [strict_factors("good " * n, "x")["measured"] for n in (0, 3, 4, 5, 6, 9)] == pytest.approx(
        [1, 1, 2 / 3, 1 / 3, 0, 0]
    )
    start = "The town was good and we will be there in winter"
    expected = {"praise": 0.5, "length": 1.0, "sentence": 1.0, "distinct": 1.0, "about": 1.0, "measured": 1.0}
    assert taste(f"{start}.", "town") == (0.75, expected)
    assert taste(f"{start}.", "bridge")[0] == pytest.approx(0.075)
    for more, left in ((1, 1.0), (2, 1.0), (3, 2 / 3), (4, 1 / 3), (5, 0.0)):
        text = start + ", so good" * more + "."
        assert taste(text)[0] > 0.5 and taste(text, "town")[0] == pytest.approx(left * taste(text)[0])


@pytest.mark.parametrize("style", STYLES)
def test_the_strict_taste_is_asked_for_and_knows_the_subject_in_every_style(plain: None, style: str) -> None:
    easy, strict = Sentiment(style), Sentiment(style, strict=True)
    problems = strict.problems("train")[:400]
    assert {subject_of(problem) for problem in problems} == set(SUBJECTS)
    problem = problems[0]
    other = next(subject for subject in SUBJECTS if subject != subject_of(problem))
    named, elsewhere = (f"The {thing} was good and we will be there in winter." for thing in (subject_of(problem), other))
    assert easy.score(problem, named).value == easy.score(problem, elsewhere).value == 0.75  # the default asks for no subject
    assert strict.score(problem, named).value == 0.75 and strict.score(problem, elsewhere).value == pytest.approx(0.075)
    with pytest.raises(UserError, match="asks about 0 of the subjects"):
        subject_of(Problem("p", "Write a sentence."))


def test_problems_are_asked_in_one_style_and_the_sides_are_apart() -> None:
    task = Sentiment("review")
    train, test = ({p.question for p in task.problems(split)[:400]} for split in ("train", "test"))
    assert not train & test and len(task.problems("test")) >= 500
    assert all(question.startswith("Write a review of a") for question in train)
    assert any(" an old " in question for question in train) and not any(" a old " in question for question in train)
    with pytest.raises(UserError, match="style must be sentence, review"):
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
    strict = Sentiment(strict=True)
    assert (
        strict.score(problem, texts[0]).value == pytest.approx(kind / 30) and kind_words(texts[0]) == 5
    )  # thick, and of anything
    modest = strict.score(problem, strict.demonstration(problem)).value
    assert modest is not None and modest > 0.8


def test_a_missing_lexicon_is_told_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that cannot be scored is only counted: without this, a run would go on with nothing."""

    def missing() -> None:
        raise UserError("the sentiment task needs the VADER lexicon")

    monkeypatch.setattr("posttrain.tasks.sentiment.lexicon", missing)
    stages = (
        SampleStage(name="first", model="tiny:nano", task=Arithmetic()),
        SampleStage(name="second", model="tiny:nano", task=Sentiment()),
    )
    with pytest.raises(UserError, match="^second.*needs the VADER lexicon"):
        check_stages(stages, 0, "cpu", due={"first", "second"})
