"""Preference files: every convention gives the units it should, and no bad row is trained on or dropped in silence."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers_for_tests import CHATML, CHATML_BLOCKS, CHATML_TOOLS, byte_level, word_marks

from posttrain.data.preferences import Preferences, read_pairs, read_preferences
from posttrain.errors import UserError

ASK, YES, NO = ({"role": r, "content": c} for r, c in (("user", "hi"), ("assistant", "hello"), ("assistant", "the fox")))
END = "<|im_end|>"


def read(folder: Path, *records: Any, template: str | None = CHATML, limit: int = 200) -> Preferences:
    path = folder / "prefs.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return read_preferences(path, byte_level(template), limit)


def said(found: Preferences) -> list[list[tuple[str, float]]]:
    tokenizer = byte_level(CHATML)
    return [[(tokenizer.decode(e.ids[e.mask]), e.reward) for e in unit] for unit in found.units]


PAIRS: list[dict[str, Any]] = [
    {"prompt": "hi", "chosen": "hello", "rejected": "the fox"},
    {"prompt": [ASK], "chosen": [YES], "rejected": [NO]},
    {"prompt": [ASK], "chosen": "hello", "rejected": "the fox"},
    {"prompt": "hi", "chosen": [YES], "rejected": [NO]},
    {"chosen": [ASK, YES], "rejected": [ASK, NO]},
    {"prompt": "hi", "chosen": [ASK, YES], "rejected": [ASK, NO]},
    {"prompt": [ASK], "chosen": [ASK, YES], "rejected": [ASK, NO]},
    {"chosen": "\n\nHuman: hi\n\nAssistant: hello", "rejected": "\n\nHuman: hi\n\nAssistant: the fox"},
    {"input": {"messages": [ASK]}, "preferred_output": [YES], "non_preferred_output": [NO]},
]


@pytest.mark.parametrize("template", [CHATML, CHATML_BLOCKS])
@pytest.mark.parametrize("record", PAIRS)
def test_every_convention_of_pairs_gives_the_same_unit(tmp_path: Path, record: dict[str, Any], template: str) -> None:
    found = read(tmp_path, record, template=template)
    assert said(found) == [[("hello" + END, 1.0), ("the fox" + END, 0.0)]]
    chosen, rejected = found.units[0]
    begin = int(chosen.mask.argmax())
    assert begin == int(rejected.mask.argmax()) > 0 and (chosen.ids[:begin] == rejected.ids[:begin]).all()
    whole = byte_level(CHATML).decode(chosen.ids)
    assert whole == f"<|im_start|>user\nhi{END}\n<|im_start|>assistant\nhello{END}\n"


def test_a_packed_file_is_the_same_file(tmp_path: Path) -> None:
    plain, packed = tmp_path / "pairs.jsonl", tmp_path / "pairs.jsonl.gz"
    plain.write_text(json.dumps(PAIRS[0]) + "\n")
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    one, other = (read_preferences(path, byte_level(CHATML), 100) for path in (plain, packed))
    assert said(one) == said(other) == [[("hello" + END, 1.0), ("the fox" + END, 0.0)]]
    assert read_pairs(packed) == [("hi", "hello", "the fox")]


def test_columns_of_other_names_are_read_as_they_are_told(tmp_path: Path) -> None:
    table = tmp_path / "pairs.csv"
    table.write_text("question,better,worse\nhi,hello,the fox\n")
    names = {"prompt": "question", "chosen": "better", "rejected": "worse"}
    assert said(read_preferences(table, byte_level(CHATML), 100, names)) == [[("hello" + END, 1.0), ("the fox" + END, 0.0)]]
    with pytest.raises(UserError, match="or give columns={chosen: better, rejected: worse, prompt: question}; see"):
        read_preferences(table, byte_level(CHATML), 100)
    both = tmp_path / "both.jsonl"
    both.write_text(json.dumps({"question": "hi", **PAIRS[0]}) + "\n")
    with pytest.raises(UserError, match="line 1: the column question is to be read as prompt, which is there too; rename"):
        read_preferences(both, byte_level(CHATML), 100, names)


def test_the_prompt_inside_a_conversation_reaches_to_the_last_common_turn(tmp_path: Path) -> None:
    """Nothing of the common beginning carries loss, and nothing of either response is lost."""
    again = {"role": "user", "content": "again"}
    found = read(tmp_path, {"chosen": [ASK, YES, again, NO], "rejected": [ASK, YES, again, YES]})
    assert said(found) == [[("the fox" + END, 1.0), ("hello" + END, 0.0)]]


def test_without_a_template_texts_are_laid_end_to_end(tmp_path: Path) -> None:
    found = read(tmp_path, {"prompt": "12+34", "chosen": "=46", "rejected": "=12"}, template=None)
    tokenizer = byte_level(None)
    assert [tokenizer.decode(e.ids) for e in found.units[0]] == ["12+34=46" + END, "12+34=12" + END]
    begin = len(tokenizer("12+34")["input_ids"])
    assert all(int(e.mask.argmax()) == begin for e in found.units[0])


@pytest.mark.parametrize(
    ("extra", "rewards"),
    [
        ({"margin": 2.5}, [2.5, 0.0]),
        ({"score_chosen": 7, "score_rejected": 4.5}, [7.0, 4.5]),
        ({"chosen_score": 1, "rejected_score": -1}, [1.0, -1.0]),
        ({"margin": None}, [1.0, 0.0]),
    ],
)
def test_margins_and_scores_of_pairs(tmp_path: Path, extra: dict[str, Any], rewards: list[float]) -> None:
    found = read(tmp_path, {**PAIRS[0], **extra})
    assert [e.reward for e in found.units[0]] == rewards
    assert found.margins == (rewards != [1.0, 0.0])
    # a reward model ignores them by default; TRL's reads them
    assert found.margins == ("with margins (for margin=true of a reward model, labels=soft of dpo)" in found.lines()[0])


@pytest.mark.parametrize(
    ("extra", "rewards"),
    [
        ({"responses": ["a", "b", "c"], "scores": [0.5, 2, -1]}, [0.5, 2.0, -1.0]),
        ({"completions": ["a", "b", "c"], "ranking": [2, 1, 3]}, [1.0, 2.0, 0.0]),
        ({"responses": ["a", "b", "c"], "ranking": [1, 1, 3]}, [2.0, 2.0, 0.0]),
        ({"responses": [[YES], [NO]], "ranking": [2, 1]}, [0.0, 1.0]),
    ],
)
def test_rankings(tmp_path: Path, extra: dict[str, Any], rewards: list[float]) -> None:
    found = read(tmp_path, {"prompt": "hi", **extra})
    assert found.kind == "ranking" and sum(map(len, found.units)) == len(rewards)
    assert [e.reward for e in found.units[0]] == rewards


def test_single_responses_with_a_label(tmp_path: Path) -> None:
    rows = [{"prompt": "hi", "completion": c, "label": v} for c, v in (("a", True), ("b", False), ([YES], 1), ("a", 0))]
    found = read(tmp_path, *rows)
    assert said(found) == [[("a" + END, 1.0)], [("b" + END, 0.0)], [("hello" + END, 1.0)], [("a" + END, 0.0)]]
    assert "2 desirable, 2 not" in found.lines()[0]


def test_labels_and_scores_of_a_table_are_text(tmp_path: Path) -> None:
    table = tmp_path / "prefs.csv"
    table.write_text("prompt,completion,label\nhi,a,TRUE\nhi,b,0\nhi,c,false\nhi,d,1\n")
    assert [unit[0].reward for unit in read_preferences(table, byte_level(CHATML), 100).units] == [1.0, 0.0, 0.0, 1.0]
    table.write_text("prompt;chosen;rejected;margin\nhi;a;b;1.5\n")
    assert [e.reward for e in read_preferences(table, byte_level(CHATML), 100).units[0]] == [1.5, 0.0]


def test_labels_that_cannot_be_read_are_not_left_out_of_the_count(tmp_path: Path) -> None:
    """Thumbs down written as -1: not "all labelled responses are good"."""
    table = tmp_path / "thumbs.csv"
    table.write_text("prompt,completion,label\nhi,a,1\nhi,b,-1\n")
    with pytest.raises(UserError, match="thumbs.csv line 3: label must be true or false, or 1 or 0, not -1"):
        read_preferences(table, byte_level(CHATML), 100)


def test_steps_are_joined_by_the_separator_of_their_row(tmp_path: Path) -> None:
    for steps, separator in ((["ab", ",c"], ""), (["ab", "c"], ",")):
        ((example,),) = read(tmp_path, {"prompt": "hi", "completions": steps, "labels": [1, 0], "separator": separator}).units
        assert example.steps is not None
        ends = [int(t) for t in np.flatnonzero(~np.isnan(example.steps))]
        begin, tokenizer = int(example.mask.argmax()), byte_level(CHATML)
        assert [tokenizer.decode(example.ids[begin : t + 1]) for t in ends] == ["ab", "ab,c"]


@pytest.mark.parametrize("template", [CHATML, CHATML_BLOCKS, None])
def test_labels_of_steps_stand_where_the_steps_end(tmp_path: Path, template: str | None) -> None:
    steps = ["12+34=46", "你好 fox", "x"]
    found = read(tmp_path, {"prompt": "hi", "completions": steps, "labels": [True, 0.25, False]}, template=template)
    ((example,),) = found.units
    assert example.steps is not None and math.isnan(example.reward)
    tokenizer = byte_level(template)
    begin = int(example.mask.argmax())
    ends = [int(t) for t in np.flatnonzero(~np.isnan(example.steps))]
    assert example.steps[ends].tolist() == [1.0, 0.25, 0.0]
    written = [tokenizer.decode(example.ids[begin : t + 1]) for t in ends]
    assert written == ["12+34=46", "12+34=46\n你好 fox", "12+34=46\n你好 fox\nx"]
    assert example.mask[ends].all()


def test_labels_of_steps_with_a_tokenizer_that_drops_the_first_space(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text(json.dumps({"prompt": "a", "completions": ["he is", "here"], "labels": [1, 0]}))
    ((example,),) = read_preferences(path, word_marks(), 100).units
    assert example.steps is not None
    (first, last) = np.flatnonzero(~np.isnan(example.steps))
    assert word_marks().decode(example.ids[example.mask.argmax() : first + 1]).strip() == "he is"
    assert last == len(example.ids) - 2  # before the end of the sequence


GOOD = {"prompt": "hi", "chosen": "fine", "rejected": "bad"}
SKIPPED = [
    ({"prompt": "hi", "chosen": "same", "rejected": "same"}, "equal", "responses are equal"),
    ({"chosen": [ASK, YES], "rejected": [ASK, YES]}, "equal", "responses are equal"),
    ({"prompt": "hi", "chosen": "", "rejected": "no"}, "empty", "a response is empty"),
    ({"prompt": "hi", "chosen": "yes", "rejected": " \n"}, "empty", "a response is empty"),
    ({"prompt": "hi", "chosen": [{"role": "assistant", "content": ""}], "rejected": [NO]}, "empty", "a response is empty"),
    ({"prompt": "hi", "chosen": "yes " * 99, "rejected": "no"}, "overlong", "longer than max_length"),
    ({**GOOD, "margin": 0}, "tied", "prefer none"),
    ({**GOOD, "score_chosen": 2**24 + 1, "score_rejected": 2**24}, "tied", "prefer none"),  # the same in float32
    ({**GOOD, "margin": -1.5}, "contradictory", "contradict"),
    ({**GOOD, "score_chosen": 1, "score_rejected": 2}, "contradictory", "contradict"),
]


@pytest.mark.parametrize(("record", "reason", "words"), SKIPPED)
def test_what_cannot_teach_is_skipped_counted_and_named(
    tmp_path: Path, record: dict[str, Any], reason: str, words: str
) -> None:
    found = read(tmp_path, GOOD, record, GOOD, record, limit=60)
    assert said(found) == [[("fine" + END, 1.0), ("bad" + END, 0.0)]] * 2
    assert (found.total, len(found.units), sum(map(len, found.units))) == (4, 2, 4)
    assert found.skipped == {reason: [2, 4]}
    assert words in found.lines()[-1] and found.lines()[-1].endswith("(lines 2, 4)")
    with pytest.raises(UserError, match="no row is left to train on: 1 skipped: "):
        read(tmp_path, record, limit=60)


def test_opposite_rows_are_kept_and_named(tmp_path: Path) -> None:
    """Annotators may disagree; the report says where. The same pair again, or with another margin, is no contradiction."""
    swapped = {**GOOD, "chosen": GOOD["rejected"], "rejected": GOOD["chosen"]}
    rows = [GOOD, swapped, {**GOOD, "margin": 2}, {**swapped, "prompt": "other"}, swapped]
    found = read(tmp_path, *rows)
    assert len(found.units) == 5
    assert found.lines()[-1].startswith(
        "warning: 2 rows with the opposite preference of an earlier row (lines 2, 5): prompt and"
    )
    found = read(tmp_path, LABEL, {**LABEL, "completion": "c"}, {**LABEL, "label": not LABEL["label"]})
    assert len(found.units) == 3 and "1 row with the opposite preference of an earlier row (line 3)" in found.lines()[-1]
    assert not read(tmp_path, STEPS, STEPS).notes.rows and not read(tmp_path, RANKING, RANKING).notes.rows


def test_a_ranking_of_one_is_skipped(tmp_path: Path) -> None:
    good = {"prompt": "hi", "responses": ["a", "b"], "scores": [1, 2]}
    found = read(tmp_path, good, {"prompt": "hi", "responses": ["a"], "scores": [1]}, {**good, "scores": [2, 2]})
    assert found.skipped == {"single": [2], "tied": [3]}


def test_long_lists_of_lines_are_cut(tmp_path: Path) -> None:
    found = read(tmp_path, GOOD, *[{**GOOD, "rejected": "fine"}] * 9)
    assert found.lines()[-1] == "9 skipped: responses are equal (lines 2, 3, 4, 5, 6, ...)"


RANKING = {"prompt": "hi", "responses": ["a", "b"], "scores": [1, 2]}
STEPS = {"prompt": "hi", "completions": ["a", "b"], "labels": [True, False]}
LABEL = {"prompt": "hi", "completion": "a", "label": True}
REFUSED = [
    (GOOD, {"prompt": "hi", "chosen": "a"}, "line 2: no rejected in a row of pairs$"),
    (GOOD, {"chosen": "a", "rejected": "b"}, "line 2: no prompt, and chosen or rejected is text without turns"),
    (
        GOOD,
        {"question": "hi", "chosen": "a", "rejected": "b"},
        "line 2: no prompt, and .* turns; rename question to prompt, or give columns={prompt: question}$",
    ),
    (GOOD, {**GOOD, "prompt": ""}, "line 2: no prompt, or an empty one"),
    (GOOD, {**GOOD, "rejected": None}, "line 2: no rejected in a row of pairs"),
    (GOOD, {**GOOD, "rejected": [NO]}, "line 2: chosen and rejected must both be"),
    (GOOD, {**GOOD, "chosen": 3, "rejected": 4}, "line 2: chosen and rejected must both be text, or both lists of messages"),
    (GOOD, {**GOOD, "margin": math.nan}, "line 2: NaN is not JSON"),
    (GOOD, {**GOOD, "margin": "two"}, "line 2: margin must be a finite number, not 'two'"),
    (GOOD, {**GOOD, "margin": 10**400}, "line 2: margin must be a finite number, not 1000"),
    (GOOD, {**GOOD, "chosen": "\ud800"}, "line 2: half a character"),
    (GOOD, {**GOOD, "score_chosen": math.inf, "score_rejected": 0}, "line 2: Infinity is not JSON"),
    (GOOD, LABEL, "line 2: no chosen in a row of pairs; it looks like a row of single responses with a label"),
    (
        GOOD,
        {"chosen": [YES], "rejected": [NO]},
        "line 2: no prompt: chosen and rejected are not conversations that begin alike",
    ),
    (GOOD, {"prompt": "else", "chosen": [ASK, YES], "rejected": [ASK, NO]}, "line 2: the prompt is 'else', but chosen"),
    (GOOD, {**GOOD, "chosen": "a<|im_end|>"}, "line 2: a message of the assistant contains the control token"),
    (PAIRS[8], {**PAIRS[8], "input": {}}, "line 2: input has no messages"),
    (RANKING, {**RANKING, "scores": [1]}, "line 2: 1 scores for 2 responses"),
    (RANKING, {**RANKING, "scores": [1, math.nan]}, "line 2: NaN is not JSON"),
    (RANKING, {**RANKING, "scores": [1, None]}, "line 2: scores must be a finite number, not None"),
    (RANKING, {"prompt": "hi", "responses": ["a", "b"], "ranking": [0, 1]}, r"line 2: a ranking gives .* not \[0, 1\]"),
    (RANKING, {"prompt": "hi", "scores": [1, 2]}, "line 2: no responses or completions in a row of rankings"),
    (LABEL, {**LABEL, "label": 0.5}, "line 2: label must be true or false, or 1 or 0, not 0.5"),
    (LABEL, {**LABEL, "label": "ja"}, "line 2: label must be true or false, or 1 or 0, not 'ja'"),
    (LABEL, {**LABEL, "label": "[" * 10**5}, "line 2: label must be true or false, or 1 or 0, not '\\[\\["),
    (LABEL, {"prompt": "hi", "completion": "a"}, "line 2: no label"),
    (STEPS, {**STEPS, "labels": [True]}, "line 2: 1 labels for 2 steps"),
    (STEPS, {**STEPS, "labels": [True, 2]}, "line 2: labels of steps lie between 0 and 1"),
    (STEPS, {**STEPS, "separator": 3}, "line 2: separator must be a text, not 3"),
    (STEPS, {**STEPS, "completions": "a"}, "line 2: completions must be a list of texts"),
]


@pytest.mark.parametrize(("first", "record", "words"), REFUSED)
def test_what_is_not_as_it_seems_is_refused(tmp_path: Path, first: Any, record: Any, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        read(tmp_path, first, record)
    assert "\n" not in str(caught.value) and "prefs.jsonl line 2" in str(caught.value)


def test_whole_characters_may_be_escaped(tmp_path: Path) -> None:
    """json.dumps writes an emoji as two escapes, which are one character."""
    found = read(tmp_path, {"prompt": "hi 🙂", "chosen": "🙃", "rejected": "no"})
    assert said(found)[0][0] == ("🙃" + END, 1.0)


def test_refused_rows_are_counted(tmp_path: Path) -> None:
    bad = {"prompt": "hi", "chosen": "a"}
    with pytest.raises(UserError, match=r"line 2: no rejected in a row of pairs \(2 more rows like it or worse\)$"):
        read(tmp_path, GOOD, bad, bad, GOOD, bad)


def test_files_of_something_else(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="line 1: a row of prompt, completion is one of prompts with a completion; use the stage sft for it"
    ):
        read(tmp_path, {"prompt": "a", "completion": "b"})
    with pytest.raises(
        UserError, match="line 1: a row of question has no format that is read here; nearest is .*: rename question to prompt"
    ):
        read(tmp_path, {"question": "a"})
    with pytest.raises(UserError, match="line 1: no rejected in a row of pairs"):
        read(tmp_path, {"prompt": "a", "chosen": "b"})


def test_a_boundary_that_the_tokenizer_moves_is_skipped(tmp_path: Path) -> None:
    """A template without control tokens at the turn's start: the prompt's last letters may join the response's first ones."""
    loose = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
    tokenizer = byte_level(loose)
    path = tmp_path / "prefs.jsonl"
    word = "quick brown"
    pieces = [len(tokenizer(word[:n])["input_ids"]) + len(tokenizer(word[n:])["input_ids"]) for n in range(1, len(word))]
    cut = 1 + max(range(len(pieces)), key=pieces.__getitem__)
    assert len(tokenizer(word)["input_ids"]) < pieces[cut - 1]
    path.write_text(
        "".join(
            json.dumps({"prompt": word[:cut], "chosen": c, "rejected": r}) + "\n"
            for c, r in ((word[cut:], "=46"), ("=4", "=6"))
        )
    )
    report = read_preferences(path, tokenizer, 100)
    assert report.skipped == {"boundary": [1]}


MESSAGE = st.dictionaries(
    st.sampled_from(["role", "content", "name"]), st.sampled_from(["user", "assistant", "tool", "hi", "", None, 3])
)
LEAF = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["hi", "\n\nHuman: a\n\nAssistant: b"]),
)
VALUE = st.one_of(LEAF, MESSAGE, st.lists(st.one_of(LEAF, MESSAGE, st.sampled_from([ASK, YES, NO])), max_size=4))
KEYS = ["prompt", "chosen", "rejected", "margin", "score_chosen", "score_rejected", "input", "preferred_output", "responses",
        "non_preferred_output", "completions", "scores", "ranking", "completion", "label", "labels"]  # fmt: skip


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    first=st.sampled_from([GOOD, PAIRS[8], RANKING, STEPS, LABEL, {}]),
    changes=st.dictionaries(st.sampled_from(KEYS), VALUE, max_size=4),
    template=st.sampled_from([CHATML, CHATML_BLOCKS, None]),
)
def test_any_row_is_read_skipped_or_refused_in_one_line(tmp_path: Path, first: Any, changes: Any, template: str | None) -> None:
    """And what is read has rewards that say something, and loss somewhere."""
    try:
        found = read(tmp_path, first, {**first, **changes}, template=template)
    except UserError as refusal:
        said_once = str(refusal)
    else:
        said_once = ""
        check(found)
    assert "\n" not in said_once


def check(found: Preferences) -> None:
    assert found.total == 2 and len(found.units) + sum(map(len, found.skipped.values())) == 2
    for unit in found.units:
        assert all(e.mask.any() and not e.mask[0] and len(e.ids) <= 200 for e in unit)
        assert len(unit) == 1 or max(e.reward for e in unit) > min(e.reward for e in unit)


def test_tool_calls_are_part_of_what_is_preferred(tmp_path: Path) -> None:
    """Two responses that differ in their calls alone are a pair; tools are shown, and a column that is not read is named."""
    tokenizer = byte_level(CHATML_TOOLS)
    asked = [{"role": "user", "content": "1+2"}]
    calls = [
        [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": name, "arguments": {}}}]}]
        for name in ("add", "sub")
    ]
    tools = [{"name": "add"}]
    rows = [{"prompt": asked, "chosen": calls[0], "rejected": calls[1], "tools": tools, "id": 3}]
    rows += [{"input": {"messages": asked, "tools": tools}, "preferred_output": calls[0], "non_preferred_output": calls[1]}]
    for number, row in enumerate(rows):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(json.dumps(row) + "\n")
        found = read_preferences(path, tokenizer, 1000)
        texts = [tokenizer.decode(e.ids[e.mask]) for e in found.units[0]]
        assert ['"add"' in texts[0], '"sub"' in texts[1]] == [True, True]
        assert '[{"name": "add"}]' in tokenizer.decode(found.units[0][0].ids)
        ((prompt, better, worse),) = read_pairs(path)
        assert '"add"' in prompt and '"add"' in better and '"sub"' in worse
    report = read_preferences(tmp_path / "0.jsonl", tokenizer, 1000)
    assert report.notes.unused == {"id"} and "columns that are not used: id" in report.lines()
    with pytest.raises(UserError, match="0.jsonl line 1: the chat template does not show the tools"):
        read_preferences(tmp_path / "0.jsonl", byte_level(CHATML), 1000)
