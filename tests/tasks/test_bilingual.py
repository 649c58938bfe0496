"""Sums in words of two languages: demonstrations and scores by hand."""

from __future__ import annotations

import pytest

from posttrain.errors import UserError
from posttrain.tasks.base import validate
from posttrain.tasks.bilingual import Bilingual
from posttrain.types import Problem

SUM = Problem("train/2/0", "47+85=", "132", 2, {"a": 47, "b": 85})
GOLD = "<think>750 makes 12 then 481 makes 13</think>132"


def test_demonstrations_by_hand() -> None:
    assert Bilingual().demonstration(SUM) == GOLD
    assert Bilingual(target="de").demonstration(SUM) == "<think>750 macht 12 dann 481 macht 13</think>132"
    assert Bilingual(style="plain").demonstration(SUM) == "750 makes 12 then 481 makes 13#132"
    assert Bilingual(error_rate=1.0).demonstration(SUM) == "<think>750 makes 12 then 480 makes 12</think>122", (
        "a carry is forgotten"
    )
    validate(Bilingual())
    validate(Bilingual(level=3, target="de"))


@pytest.mark.parametrize(
    ("response", "answer", "format", "language"),
    [
        (GOLD, 1, 1, 1),
        ("<think>750 makes 12 dann 481 macht 13</think>132", 1, 1, 1 / 3),
        ("<think>750 makes 12 then 480 makes 12</think>122", 0, 1, 1),
        ("750 makes 12 then 481 makes 13#132", 1, 0, 1),
        ("<think>750 makes 12 then 481 makes 13#132", 1, 0, 1),
        ("<think>75012 48113</think>132", 1, 1, 0),  # no word is no language
        ("<think></think>132", 1, 1, 0),
        ("132", 0, 0, 0),  # an answer follows the end of the reasoning
        ("<think>750 makes</think>132</think>132", 1, 0, 1),
        ("<think>750 makes</think>0132", 0, 0, 1),
        ("", 0, 0, 0),
    ],
)
def test_scores_by_hand(response: str, answer: float, format: float, language: float) -> None:
    task = Bilingual(format_weight=0.1, language_weight=0.3)
    score = task.score(SUM, response)
    assert score.parts == pytest.approx({"answer": answer, "format": format, "language": language})
    assert score.value == pytest.approx(0.6 * answer + 0.1 * format + 0.3 * language)
    assert score.solved == (answer == 1)
    assert (task.final(response) == "132") == (answer == 1)


def test_sums_in_words_by_hand() -> None:
    task = Bilingual(wording="words", format_weight=0.1, language_weight=0.3)
    asked = next(p for p in task.problems("train")[:2000] if p.facts == {"a": 38, "b": 85})
    assert asked.question == "What is 38 + 85?" and asked.answer == "123"
    short = next(p for p in Bilingual().problems("train")[:2000] if p.facts == asked.facts)
    assert (short.id, short.question) == (asked.id, "38+85="), "the same problems, on the same side of the split"
    assert task.demonstration(asked) == "<think>8+5 makes 13 then 3+8+1 makes 12</think>123"
    plain = Problem("train/2/1", "What is 54 + 31?", "85", 2, {"a": 54, "b": 31})
    assert task.demonstration(plain) == "<think>4+1 makes 5 then 5+3 makes 8</think>85", "no carry is added"
    validate(task)
    for response, answer, format, language in (
        ("38 + 85 = 123", 1, 0, 0),  # without tags the last number counts
        ("To add 38 and 85, ich nehme 123.", 1, 0, 1),
        ("123 makes 38 + 85", 0, 0, 1),
        ("<think>8+5 macht 13 dann 3+8+1 makes 12</think>123", 1, 1, 1 / 3),
        ("<think>8+5 makes 13</think>no idea, 123", 0, 0, 1),  # after the reasoning nothing but the number
        ("no number", 0, 0, 1),
        ("", 0, 0, 0),
    ):
        found = task.score(asked, response)
        assert found.parts == pytest.approx({"answer": answer, "format": format, "language": language}), response
        assert found.value == pytest.approx(0.6 * answer + 0.1 * format + 0.3 * language)
    assert set(asked.question + task.demonstration(asked)) <= set(task.alphabet)
    assert Bilingual().score(asked, "38 + 85 = 123").parts["answer"] == 0, "asked shortly, an answer needs its marker"


def test_text_to_pretrain_on_mixes_languages_and_forgets_carries_as_often_as_said() -> None:
    task = Bilingual(style="plain", language_mix="mixed", error_rate=0.7)
    problems = list(task.problems("train")[:2000])
    texts = [task.demonstration(p) for p in problems]
    german = sum(t.count("macht") + t.count("dann") for t in texts) / (3 * len(texts))
    assert german == pytest.approx(0.5, abs=0.03)
    assert any("makes" in t and "dann" in t for t in texts), "within one text"
    carrying = [(p, t) for p, t in zip(problems, texts, strict=True) if int(p.facts["a"]) % 10 + int(p.facts["b"]) % 10 > 9]
    wrong = sum(task.score(p, t).parts["answer"] == 0 for p, t in carrying) / len(carrying)
    assert wrong == pytest.approx(0.7, abs=0.05)
    assert set("".join(texts)) <= set(task.alphabet) and texts == [task.demonstration(p) for p in problems]


def test_settings_are_checked() -> None:
    for bad in (
        {"target": "fr"},
        {"style": "loud"},
        {"language_mix": "two"},
        {"wording": "verse"},
        {"error_rate": 2.0},
        {"format_weight": 0.9},
        {"level": 0},
    ):
        with pytest.raises(UserError, match=r"bilingual|arithmetic"):
            Bilingual(**bad)  # type: ignore[arg-type]
