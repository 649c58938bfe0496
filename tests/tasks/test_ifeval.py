"""IFEval: for every instruction responses that follow it and that do not, strict and loose, and the four figures of an evaluation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from material_for_tests import rollout, segment

from posttrain.errors import UserError
from posttrain.evals.evaluate import Evaluation
from posttrain.tasks._instructions import CHECKS, follows, sentences
from posttrain.tasks.ifeval import IFEval, make
from posttrain.types import Group

# the instruction, what it asks for, responses that follow it, responses that do not
CASES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    ("keywords:existence", {"keywords": ["Argentinian", "war"]}, ["the argentinian and the warden"], ["the argentinian", " "]),
    (
        "keywords:frequency",
        {"keyword": "war", "frequency": 2, "relation": "at least"},
        ["War and warfare", "war war war"],
        ["a war"],
    ),
    ("keywords:frequency", {"keyword": "war", "frequency": 2, "relation": "less than"}, ["one war", "peace"], ["war, war"]),
    ("keywords:forbidden_words", {"forbidden_words": ["rock"]}, ["rocket science"], ["Rock!", "a rock."]),
    ("keywords:letter_frequency", {"letter": "!", "let_frequency": 2, "let_relation": "at least"}, ["a! b!"], ["a!"]),
    ("keywords:letter_frequency", {"letter": "e", "let_frequency": 2, "let_relation": "less than"}, ["Eat"], ["Eel"]),
    (
        "language:response_language",
        {"language": "de"},
        ["Das ist ein Haus und wir sind dort."],
        ["This is a house and we are there."],
    ),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, ["One. Two!"], ["Dr. One said so."]),
    ("length_constraints:number_sentences", {"num_sentences": 3, "relation": "less than"}, ["One. Two"], ["One. Two. Three."]),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["a\n\n***\n\nb", "***\na\n***\nb\n***"],
        ["a\n\nb", "a***\n***b", "a***b***c"],
    ),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, ["one two three", "it's 3"], ["one two"]),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, ["one two"], ["one two three"]),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "president"},
        ["One.\n\nPresident Doe", 'One.\n\n"President," he'],
        ["One.\n\nA president", "President one.\n\nTwo", "One.\n\nPresident\n\nthree", "President"],
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        ["[name] of [city], [zip]"],
        ["[name] of city", "[a\nb] [c]"],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        ["Bye.\nP.S. more", "Bye. p. s. more"],
        ["Bye. PS more", "ups. so"],
    ),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["x\nP.P.S. more", "x\np. p. s more"], ["x\nP.S. more"]),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["* a\n* b", "x\n- a\n  * b"],
        ["* a", "* a\n* b\n- c", "**a**\n* b"],
    ),
    (
        "detectable_format:constrained_response",
        {},
        ["Well. My answer is maybe."],
        ["My answer is perhaps.", "my answer is yes."],
    ),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*a* and **b c**", "*a* *b*"],
        ["*a* and b", "** ** *a*", "*a\nb* *c*"],
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        ["Section 1\na\nSection 2\nb"],
        ["Section 1\na", "Section\na\nSection\nb"],
    ),
    (
        "detectable_format:json_format",
        {},
        ['{"a": [1]}', '```json\n{"a": 1}\n```', "```\n[]\n```"],
        ['{"a": 1', 'Here: {"a": 1}'],
    ),
    ("detectable_format:title", {}, ["<<A poem>>\nx", "x << y >>"], ["<<>> x", "<poem>", "<<a\nb>>", "<< >>"]),
    (
        "combination:two_responses",
        {},
        ["a\n******\nb", "******a******b******"],
        ["a\n******\na", "a", "a******b******c", "a************b"],
    ),
    (
        "combination:repeat_prompt",
        {"prompt_to_repeat": "Write a poem."},
        ["write a poem.\nRoses"],
        ["Sure: Write a poem. Roses"],
    ),
    ("startend:end_checker", {"end_phrase": "Peace!"}, ['"So it is. PEACE!"', "peace! "], ["Peace! Bye."]),
    ("startend:quotation", {}, ['"Hello."', ' "a" and "b" '], ['"Hello.', '"', "'Hello.'"]),
    (
        "change_case:capital_word_frequency",
        {"capital_relation": "at least", "capital_frequency": 2},
        ["AN ALL-OUT win"],
        ["A win 12"],
    ),
    ("change_case:capital_word_frequency", {"capital_relation": "less than", "capital_frequency": 2}, ["I won"], ["I WON"]),
    (
        "change_case:english_capital",
        {},
        ["THIS IS THE ANSWER, AND 12 MORE."],
        ["THIS is THE ANSWER", "DAS IST DIE ANTWORT UND NICHT MEHR"],
    ),
    (
        "change_case:english_lowercase",
        {},
        ["this is the answer."],
        ["This is the answer.", "das ist die antwort und nicht mehr", "12"],
    ),
    ("punctuation:no_comma", {}, ["a; b"], ["a, b"]),
]


@pytest.mark.parametrize(("name", "asked", "right", "wrong"), CASES, ids=[f"{n}-{c[0]}" for n, c in enumerate(CASES)])
def test_an_instruction_is_followed_or_not(name: str, asked: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    assert [follows(name, asked, response) for response in right] == [True] * len(right)
    assert [follows(name, asked, response) for response in wrong] == [False] * len(wrong)
    assert not follows(name, asked, "") and not follows(name, asked, " \n")


def test_every_instruction_of_the_paper_has_a_case() -> None:
    assert {name for name, *_ in CASES} == set(CHECKS) and len(CHECKS) == 25


def test_sentences_by_hand() -> None:
    texts = {
        "": 0,
        "no end": 1,
        "One. Two? Three!": 3,
        "He is 3.5 m tall.": 1,
        'He said "Go." Then he went.': 2,
        "Wait... what? Yes": 2,
    }
    assert {text: sentences(text) for text in texts} == texts


def row(*instructions: tuple[str, dict[str, Any]], key: int = 1) -> dict[str, Any]:
    names, given = zip(*instructions, strict=True)
    return {"key": key, "prompt": "Say it.", "instruction_id_list": list(names), "kwargs": list(given)}


NO_COMMA, WORDS = ("punctuation:no_comma", {}), ("length_constraints:number_words", {"num_words": 3, "relation": "less than"})


def test_loose_overlooks_a_first_line_a_last_line_and_asterisks() -> None:
    problem = make(row(NO_COMMA, WORDS), "row 0")
    score = IFEval().score(problem, "Sure, gladly!\n*two* words\nHope, it helps.")
    assert dict(score.parts) == {"prompt_strict": 0, "prompt_loose": 1, "instruction_strict": 0, "instruction_loose": 1}
    assert (score.value, score.outcome) == (0.0, "wrong")
    half = IFEval().score(problem, "one two three")
    assert half.parts["instruction_strict"] == 0.5 and not half.solved
    assert IFEval().score(problem, "two words").solved


def test_instruction_accuracy_is_over_instructions_and_its_interval_over_prompts() -> None:
    """3 of 3 instructions of one prompt and 0 of 1 of another: 3/4 of the instructions, half of the prompts."""
    three = make(row(NO_COMMA, WORDS, ("startend:quotation", {}), key=1), "row 0")
    one = replace(make(row(("startend:quotation", {}), key=2), "row 1"), question="Say that.")
    groups = []
    for problem, response in ((three, '"two words"'), (one, "no")):
        made = replace(rollout([segment([1], False), segment([2], True)], 0.0), score=IFEval().score(problem, response))
        groups.append(Group(problem, (replace(made, problem=problem),)))
    found = Evaluation(tuple(groups))
    by_prompt, by_instruction = found.part("prompt_strict"), found.part("instruction_strict")
    assert by_prompt is not None and by_prompt == found.accuracy and by_prompt.value == 0.5
    assert by_instruction is not None and by_instruction.value == 0.75
    assert by_instruction.high - by_instruction.low > 0.5, "two prompts, not four"


@pytest.mark.parametrize(
    ("instruction", "complaint"),
    [
        (("keywords:exist", {}), "unknown instruction 'keywords:exist'"),
        (("punctuation:no_comma", {"x": 1}), r"takes nothing, not \['x'\]"),
        (("keywords:existence", {}), r"takes keywords, not \[\]"),
        (("keywords:existence", {"keywords": "word"}), "keywords of keywords:existence is 'word', not a list"),
        (("length_constraints:number_paragraphs", {"num_paragraphs": "2"}), "is '2', not a int"),
        (("length_constraints:number_words", {"num_words": 2, "relation": "about"}), "is at least or less than, not 'about'"),
        (("language:response_language", {"language": "tlh"}), "unknown language 'tlh'"),
    ],
)
def test_a_row_that_cannot_be_verified_is_refused(instruction: tuple[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=f"row 3: .*{complaint}|{complaint}"):
        make(row(instruction), "row 3")


def test_a_file_and_a_folder_are_read_and_nothing_is_to_train_on(tmp_path: Path) -> None:
    all_columns = row(("length_constraints:number_paragraphs", {"num_paragraphs": 2.0, "num_words": None}))
    (tmp_path / "ifeval.jsonl").write_text(json.dumps(all_columns) + "\n" + json.dumps(row(NO_COMMA, key=2)) + "\n")
    for data in (tmp_path, tmp_path / "ifeval.jsonl"):
        task = IFEval(data=str(data))
        assert [p.id for p in task.problems("test")] == ["ifeval/1", "ifeval/2"] and task.problems("train") == ()
        assert task.problems("test")[0].facts["instructions"] == [
            ["length_constraints:number_paragraphs", {"num_paragraphs": 2}]
        ]
    with pytest.raises(UserError, match="ifeval: there is no folder or file nowhere"):
        IFEval(data="nowhere").problems("test")
