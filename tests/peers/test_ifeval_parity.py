"""IFEval's instructions against those in lm-evaluation-harness: the same verdicts on made-up responses, where both look at the text
alone. Sentences and capital words, which need a model of NLTK's, and languages, which need langdetect, are not compared."""

from __future__ import annotations

import random
from typing import Any

import pytest

from posttrain.tasks._instructions import CHECKS, follows
from tests.tasks.test_ifeval import CASES

APART = ("language:response_language", "change_case:", "length_constraints:number_sentences")
PIECES = [
    *(
        "***",
        "******",
        "* item",
        "- item",
        "**bold**",
        "*hi*",
        "SECTION 1",
        "Section 2",
        "<<title>>",
        "[name]",
        "P.S. x",
        "P.P.S x",
    ),
    *(
        '"',
        "My answer is yes.",
        "WORD",
        "Hello, world.",
        '{"a": 1}',
        "```json",
        "```",
        "peace!",
        "president said.",
        "rock",
        "war",
    ),
    "Write a poem.",
]


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("lm_eval", "langdetect", "immutabledict"):
        pytest.importorskip(name)
    nltk = pytest.importorskip("nltk")
    monkeypatch.setattr(nltk, "download", lambda *_, **__: True)  # it is asked for when the module is imported
    monkeypatch.setattr(nltk.data, "find", lambda *_, **__: True)
    from lm_eval.tasks.ifeval import instructions_registry

    return instructions_registry.INSTRUCTION_DICT


@pytest.mark.peers
def test_verdicts_are_those_of_the_harness(registry: Any) -> None:
    draw = random.Random(0)
    made = [
        "".join(draw.choice(PIECES) + draw.choice(("\n", " ", "\n\n", "")) for _ in range(draw.randint(1, 9)))
        for _ in range(300)
    ]
    texts = [*made, *(text for *_, right, wrong in CASES for text in (*right, *wrong))]
    compared = set()
    for name, asked, *_ in CASES:
        # in place of a sign it takes a letter at random
        if name.startswith(APART) or not asked.get("letter", "a").isalpha():
            continue
        theirs = registry[name](name)
        theirs.build_description(**asked)
        compared.add(name)
        for text in texts:
            expected = bool(text.strip()) and bool(theirs.check_following(text))
            assert follows(name, asked, text) == expected, (name, asked, text)
    assert len(compared) == 20 and compared < set(CHECKS)
