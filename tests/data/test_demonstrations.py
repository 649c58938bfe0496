"""Demonstrations: a task's own, and files in every convention, with errors that name the line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers_for_tests import (
    CHATML,
    CHATML_BLOCKS,
    CHATML_CALLS_OUTSIDE,
    CHATML_TOOL_BLOCKS,
    CHATML_TOOLS,
    byte_level,
    characters,
    word_marks,
)

from posttrain.data import chat
from posttrain.data.demonstrations import Notes, from_file, from_task
from posttrain.data.formats import DEMONSTRATIONS, Format
from posttrain.data.preferences import read_preferences
from posttrain.data.records import read_rows
from posttrain.errors import UserError
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.tasks.jsonl import Jsonl
from posttrain.tasks.prompts import Prompts


def write(folder: Path, *records: Any) -> Path:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_a_tasks_demonstrations_are_its_answers_in_its_conversation() -> None:
    task, tokenizer = Arithmetic(level=3), characters()
    examples = from_task(task, tokenizer, {1: 5, 3: 7}, seed=1)
    assert len(examples) == 12
    lengths = []
    for example in examples:
        said = tokenizer.decode(example.ids[example.mask])
        text = tokenizer.decode(example.ids[~example.mask])
        assert said.endswith("<|im_end|>")
        a, b = text.split("user\n")[1].split("=")[0].split("+")
        assert int(said.removesuffix("<|im_end|>").split("#")[1]) == int(a) + int(b)
        lengths.append(len(a))
    assert sorted(lengths) == [1] * 5 + [3] * 7
    assert lengths != sorted(lengths)  # levels are shuffled together


def test_the_seed_decides_the_demonstrations() -> None:
    task, tokenizer = Arithmetic(level=3), characters()
    one, same, other = ([e.ids.tolist() for e in from_task(task, tokenizer, {3: 20}, seed=s)] for s in (1, 1, 2))
    assert one == same != other
    assert len({tuple(ids) for ids in one}) > 15


def test_small_splits_give_every_problem_once() -> None:
    task, tokenizer = Arithmetic(level=1), characters()
    count = len(task.problems("test", 1))
    examples = from_task(task, tokenizer, {1: count}, split="test")
    assert len({tuple(e.ids.tolist()) for e in examples}) == count
    with pytest.raises(UserError, match=f"level 1 has {count} test problems"):
        from_task(task, tokenizer, {1: count + 1}, split="test")


def test_each_convention(tmp_path: Path) -> None:
    tokenizer = byte_level(CHATML_BLOCKS)
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path = write(
        tmp_path,
        {"messages": talk},
        {"prompt": "a", "completion": "b"},
        {"prompt": [*talk, *talk[:1]], "completion": "c"},
        {"prompt": talk[:1], "completion": [talk[1], *talk]},
        {"text": "hello"},
    )
    examples = from_file(path, tokenizer)
    said = [tokenizer.decode(e.ids[e.mask]) for e in examples]
    assert said[:4] == ["b<|im_end|>", "b<|im_end|>", "c<|im_end|>", "b<|im_end|>b<|im_end|>"]
    assert tokenizer.decode(examples[4].ids) == "hello<|im_end|>"
    assert examples[4].mask.tolist() == [False] + [True] * (len(examples[4].ids) - 1)
    assert examples[0].ids.tolist() == examples[1].ids.tolist()


def test_the_same_conversation_in_every_format_gives_the_same_tokens(tmp_path: Path) -> None:
    """A file may mix the formats: each row is recognised by its own columns."""
    tokenizer = byte_level(CHATML_BLOCKS)
    system, user, said = ({"role": r, "content": c} for r, c in (("system", "s"), ("user", "do\n\nit"), ("assistant", "b")))
    path = write(
        tmp_path,
        {"messages": [system, user, said], "prompt": "not read"},
        {"prompt": [system, user], "completion": "b"},
        {"instruction": "do", "input": "it", "output": "b", "system": "s", "text": "not read"},
        {"instruction": "do\n\nit", "input": "", "output": "b", "system": "s", "history": []},
        {"conversations": [{"from": "human", "value": "do\n\nit"}, {"from": "gpt", "value": "b"}], "system": "s"},
        {"conversations": [{"from": "system", "value": "s"}, user, said]},
    )
    notes = Notes()
    first, *others = from_file(path, tokenizer, notes)
    assert all(e.ids.tolist() == first.ids.tolist() and e.mask.tolist() == first.mask.tolist() for e in others)
    assert notes.unused == {"prompt", "text", "history"} and tokenizer.decode(first.ids[first.mask]) == "b<|im_end|>"


@pytest.mark.parametrize("format", DEMONSTRATIONS.values(), ids=list(DEMONSTRATIONS))
@pytest.mark.parametrize("template", [CHATML_BLOCKS, None])
def test_every_example_of_the_table_is_read(tmp_path: Path, format: Format, template: str | None) -> None:
    if template is None and format.name in ("messages", "sharegpt"):
        return  # conversations need a template
    tokenizer, notes = byte_level(template), Notes()
    (example,) = from_file(write(tmp_path, format.example), tokenizer, notes)
    assert "3" in tokenizer.decode(example.ids[example.mask]) and not notes.unused and not notes.rows


def test_empty_prompts_and_answers_are_kept_and_named(tmp_path: Path) -> None:
    """In every format, with the lines. A turn that only calls a tool is no empty answer, nor is one that was given."""
    user, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    nothing, call = {**said, "content": " "}, {**said, "content": None, "tool_calls": [CALL]}
    rows: list[dict[str, Any]] = [
        {"prompt": "a", "completion": "\n"},
        {"prompt": "", "completion": "b"},
        {"instruction": "", "input": "", "output": ""},
        {"messages": [user, nothing, user, said]},
        {"messages": [user, call, {"role": "tool", "content": "3"}, said], "tools": TOOLS},
        {"prompt": [user, nothing, user], "completion": [said]},
        {"conversations": [{"from": "human", "value": ""}, {"from": "gpt", "value": "b"}]},
    ]
    notes = Notes()
    examples = from_file(write(tmp_path, *rows), byte_level(CHATML_TOOLS), notes)
    assert len(examples) == len(rows) and notes.lines([]) == [
        "warning: 3 rows with an empty answer (lines 1, 3, 4): the model learns to say nothing",
        "warning: 3 rows with an empty prompt (lines 2, 3, 7): the model learns an answer to nothing",
    ]


def test_rows_that_say_something_else_than_they_mean_are_named(tmp_path: Path) -> None:
    """A completion with its prompt in front, and messages that a table has written as text, of Python or of JSON."""
    asked, talk = "What is the sum of one and one?", [{"role": "user", "content": "a"}]
    rows = [{"prompt": asked, "completion": said} for said in ("two", f"{asked} two", json.dumps(talk), str(talk), "[{x}]")]
    notes = Notes()
    from_file(write(tmp_path, *rows, {"prompt": "a", "completion": "a b"}), byte_level(CHATML), notes)
    assert notes.rows == {"whose answer begins with the prompt": [2], "with messages as text": [3, 4]}
    pairs = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": row["completion"] + "."} for row in rows]
    report = read_preferences(write(tmp_path, *pairs), byte_level(CHATML), 200)
    assert report.notes.rows == notes.rows and report.lines()[-1].startswith(
        "warning: 2 rows with messages as text (lines 3, 4): it is"
    )


def test_a_table_without_names_in_its_first_line_is_recognised(tmp_path: Path) -> None:
    """By the readers of rows and by the tasks; a table whose columns have other names gets the names to use instead."""
    table = tmp_path / "a.csv"
    table.write_text("What is 1+1?,2\nWhat is 2+2?,4\n")
    read = "a.csv line 2: .*What is 1.1.*; the first line was read as names of columns: if it is a row, put a line of names above it"
    asks = (lambda: from_file(table, characters()), Prompts(str(table)).ready, Jsonl(str(table), reward="math").ready)
    for ask in asks:
        with pytest.raises(UserError, match=read):
            ask()
    table.write_text("question,answer\n1+1,2\n")
    with pytest.raises(UserError, match="columns={prompt: question, completion: answer}; see"):
        from_file(table, characters())


def test_an_instruction_without_a_template_has_the_prompt_of_alpaca(tmp_path: Path) -> None:
    tokenizer = byte_level(None)
    rows = [{"instruction": "Add.", "input": given, "output": "3"} for given in ("1 and 2", "")]
    first, second = (tokenizer.decode(e.ids) for e in from_file(write(tmp_path, *rows), tokenizer))
    assert (
        first.endswith("### Instruction:\nAdd.\n\n### Input:\n1 and 2\n\n### Response:\n3<|im_end|>")
        and "paired with an input" in first
    )
    assert second.endswith("### Instruction:\nAdd.\n\n### Response:\n3<|im_end|>") and "paired" not in second


def test_tool_calls_of_a_sharegpt_conversation_reach_the_template(tmp_path: Path) -> None:
    tokenizer = byte_level(CHATML_TOOLS)
    turns = [
        {"from": "human", "value": "1+2"},
        {"from": "gpt", "value": "", "tool_calls": [CALL]},
        {"from": "tool", "value": "3"},
        {"from": "gpt", "value": "it is 3"},
    ]
    one, same = from_file(
        write(tmp_path, {"conversations": turns, "tools": TOOLS}, {"messages": CALLED, "tools": TOOLS}), tokenizer
    )
    assert one.ids.tolist() == same.ids.tolist() and one.mask.tolist() == same.mask.tolist()


def test_plain_prompts_for_a_tokenizer_without_a_template(tmp_path: Path) -> None:
    tokenizer = byte_level(None)
    (example,) = from_file(write(tmp_path, {"prompt": "12+34=", "completion": "46"}), tokenizer)
    assert tokenizer.decode(example.ids) == "12+34=46<|im_end|>"
    assert tokenizer.decode(example.ids[example.mask]) == "46<|im_end|>"
    turns = {"prompt": [{"role": "user", "content": "12+34="}], "completion": [{"role": "assistant", "content": "46"}]}
    (same,) = from_file(write(tmp_path, turns), tokenizer)
    assert same.ids.tolist() == example.ids.tolist() and same.mask.tolist() == example.mask.tolist()
    (example,) = from_file(write(tmp_path, {"prompt": "", "completion": "46"}), tokenizer)
    assert example.mask.tolist()[0] is False


def test_a_completion_follows_its_prompt_without_a_space_between(tmp_path: Path) -> None:
    """A tokenizer with marks on words would begin a text of its own with one: '12+34= 46' would be learned."""
    tokenizer = word_marks()
    rows = [
        {"prompt": asked, "completion": said} for asked, said in (("12+34=", "46"), ("t", "he"), (" h", "e"), ("12=", " he"))
    ]
    for row, example in zip(rows, from_file(write(tmp_path, *rows), tokenizer), strict=True):
        assert tokenizer.decode(example.ids) == f"{row['prompt']}{row['completion']}<|im_end|>"
        given = example.ids[: example.mask.argmax()].tolist()
        assert given == tokenizer(row["prompt"])["input_ids"]  # as where it is sampled from
    assert tokenizer.convert_ids_to_tokens(example.ids[example.mask]) == ["▁he", "<|im_end|>"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "line 2: not JSON"),
        (b"[1]", "line 2: expected a JSON object, not list"),
        (b"[" * 100_000, "line 2: not JSON"),
        (b'{"a": ' + b"1" * 5000 + b"}", "line 2: not JSON: a number of too many digits"),
        (
            b"{}",
            r"line 2: a row of no columns has no format that is read here: messages \(messages\), .* text \(text\); see 'posttrain",
        ),
        (
            b'{"question": "a"}',
            "line 2: a row of question has no.* nearest is prompt_completion, .*: rename question to prompt and add comp",
        ),
        (
            b'{"Question ": "a", "Reply": "b"}',  # quoted, because YAML takes the space away
            "line 2: a row of 'Question ', Reply has .*: rename 'Question ' to prompt, .*: 'Question ', completion: R",
        ),
        (
            b'{"prompt": "a"}',
            "line 2: a row of prompt has no.* nearest is prompt_completion, with prompt and completion: add completion",
        ),
        (b'{"completion": "a"}', "line 2: .* nearest is prompt_completion, .*: add prompt"),
        (
            b'{"mesages": [], "id": 1}',
            "line 2: a row of mesages, id has no.* nearest is messages, with messages: rename mesages to messages",
        ),
        (
            b'{"instruction": "a", "context": "b", "response": "c"}',
            "line 2: .* nearest is alpaca, .*: rename response to output, context to input;",
        ),
        (b'{"conversation": []}', "line 2: .* nearest is sharegpt, .*: rename conversation to conversations;"),
        (
            b'{"data": [{"prompt": "a"}]}',
            "line 2: .* data holds a list of objects: if they are the rows, write that list alone",
        ),
        (b'{"prompt": "a", "completion": 3}', "line 2: completion: expected a list of messages, or text, not int '3'"),
        (b'{"prompt": "a", "completion": "b", "context": "c"}', "line 2: the column context would be dropped"),
        (b'[{"role": "user", "content": "a"}]', "line 2: expected a JSON object, not list; a conversation is"),
        (
            b'{"messages": [{"from": "human", "value": "a"}]}',
            "line 2: .* with from and value are read in the column conversations",
        ),
        (b'{"Instruction": "a", "output": "b"}', "line 2: .* nearest is alpaca, .*: rename Instruction to instruction;"),
        (b'{"chosen": "a", "rejected": "b"}', "line 2: a row of chosen, rejected is one of pairs; use the stage preference"),
        (b'{"instruction": 1, "output": "b"}', "line 2: instruction is not a string"),
        (b'{"instruction": "a", "output": "b", "history": [["c", "d"]]}', "line 2: the column history would be dropped"),
        (b'{"conversations": "a"}', "line 2: conversations: expected a list of turns"),
        (
            b'{"conversations": [{"from": "bot", "value": "a"}]}',
            "line 2: conversations: turn 0 is from 'bot'; expected one of system, human",
        ),
        (b'{"conversations": [{"from": "gpt"}]}', "line 2: conversations: message 0 has no content"),
        (b'{"text": 3}', "line 2: text is not a string"),
        (b'{"messages": []}', "line 2: messages: expected a list of messages"),
        (b'{"messages": [{"role": "user"}]}', "line 2: messages: message 0 has no content"),
        (b'{"messages": [{"role": "bot", "content": "a"}]}', "line 2: messages: message 0 has role 'bot'"),
        (b'{"messages": [{"role": "user", "content": "a"}]}', "line 2: no assistant turn"),
        (b'{"prompt": "a<|im_end|>", "completion": "b"}', "line 2: a message of the user contains the control token"),
        (b'{"prompt": 3, "completion": "b"}', "line 2: prompt: expected a list"),
        (b'{"text": "\xff"}', "line 2: not UTF-8"),
        (b'{"text": "a\\ud83d"}', "line 2: half a character"),
    ],
)
def test_errors_name_the_file_and_the_line(tmp_path: Path, line: bytes, said: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(UserError, match=f"data.jsonl {said}") as caught:
        from_file(path, byte_level(CHATML_BLOCKS))
    assert "\n" not in str(caught.value)


def test_rows_of_no_format_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    rows = ['{"text": "a"}', '{"prompt": "a", "completion": null}', '{"text": "b"}', '{"prompt": "c"}', "{}"]
    path.write_text("\n".join(rows))
    with pytest.raises(UserError, match=r"line 2: .*: add completion \(absent or null here\); .* \(2 later rows like it\)$"):
        from_file(path, byte_level(CHATML_BLOCKS))


def test_empty_and_missing_files(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    with pytest.raises(UserError, match="cannot read"):
        from_file(path, characters())
    for content in ("", "\n \n"):
        path.write_text(content)
        with pytest.raises(UserError, match="is empty"):
            from_file(path, characters())


def test_windows_line_ends_and_byte_order_marks_are_read(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n{"text": "b\xe2\x80\xa8c"}\r\n')
    tokenizer = byte_level(None)
    assert [tokenizer.decode(e.ids) for e in from_file(path, tokenizer)] == ["a<|im_end|>", "b\u2028c<|im_end|>"]


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLED = [
    {"role": "user", "content": "1+2"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "name": None, "refusal": None},
    {"role": "tool", "tool_call_id": "c1", "content": "3"},
    {"role": "assistant", "content": "it is 3", "tool_calls": []},
]


def test_checking_that_calls_are_shown_does_not_grow_with_their_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rendering for each field made a file of long conversations take minutes."""
    asked: list[int] = []
    inner = chat.render_template
    monkeypatch.setattr(
        chat, "render_template", lambda t, rows, *rest, **how: asked.append(len(rows)) or inner(t, rows, *rest, **how)
    )
    counts = []
    for rounds in (1, 12):
        asked.clear()
        from_file(write(tmp_path, {"messages": CALLED * rounds, "tools": TOOLS}), byte_level(CHATML_TOOL_BLOCKS))
        counts.append(sum(asked))
    assert counts[0] == counts[1]


SAID = {"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]}


@pytest.mark.parametrize("template", [CHATML_TOOLS, CHATML_TOOL_BLOCKS])
def test_the_rows_of_a_file_are_rendered_together(template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To ask the process that renders takes longer than to render a row."""
    rows: list[Any] = [{"prompt": f"{n}", "completion": f"{n}"} for n in range(40)]
    rows[7] = {"messages": CALLED, "tools": TOOLS}
    rows[9:11] = [SAID, {"text": "1+1=2"}]
    path, tokenizer = write(tmp_path, *rows), byte_level(template)
    alone = []
    for row in rows:
        alone += from_file(write(tmp_path, row), tokenizer)
    path, asked, inner = write(tmp_path, *rows), [], chat.render_template
    monkeypatch.setattr(
        chat, "render_template", lambda t, rows, *rest, **how: asked.append(len(rows)) or inner(t, rows, *rest, **how)
    )
    together = from_file(path, tokenizer)
    assert [(e.ids.tolist(), e.mask.tolist()) for e in together] == [(e.ids.tolist(), e.mask.tolist()) for e in alone]
    assert len(asked) < 10 and max(asked) > 30


def test_long_conversations_are_rendered_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A template without blocks shows a conversation again for each turn, and the process that renders has little memory."""
    turn = [{"role": "user", "content": "x" * 2_500}, {"role": "assistant", "content": "y" * 2_500}]
    rows = [{"messages": turn * 20}] * 6
    shown, inner = [], chat.render_template

    def counted(*given: Any, **how: Any) -> Any:
        found = inner(*given, **how)
        shown.append(sum(len(text) for text, _ in found))
        return found

    monkeypatch.setattr(chat, "render_template", counted)
    examples = from_file(write(tmp_path, *rows), byte_level(CHATML))
    assert len({(e.ids.tobytes(), e.mask.tobytes()) for e in examples}) == 1 and len(examples) == 6
    assert sum(shown) > 2 * chat.TOGETHER > 2 * max(shown) and len(shown) < 6


def test_of_rows_that_are_read_together_the_first_wrong_one_is_named(tmp_path: Path) -> None:
    """Whether its columns are wrong or the template refuses it."""
    refusing = CHATML.replace(
        "{% for", "{% if messages[0].content == '9' %}{{ raise_exception('no nines') }}{% endif %}{% for", 1
    )
    assert refusing != CHATML
    good, nine, odd = ({"prompt": "1", "completion": "1"}, {"prompt": "9", "completion": "1"}, {"completion": "1"})
    for rows, told in (([good, nine, odd], "line 2: .* no nines"), ([good, odd, nine], "line 2")):
        with pytest.raises(UserError, match=told) as caught:
            from_file(write(tmp_path, *rows), byte_level(refusing))
        assert ("no nines" in str(caught.value)) == (rows[1] is nine)


@pytest.mark.parametrize("template", [CHATML_TOOLS, CHATML_TOOL_BLOCKS])
@pytest.mark.parametrize("as_text", [False, True])
def test_tool_calls_are_shown_and_learned(tmp_path: Path, template: str, as_text: bool) -> None:
    """Tools, and the arguments of a call, may be written as a text of JSON."""
    tokenizer = byte_level(template)
    call = {**CALL, "function": {"name": "add", "arguments": '{"a": 1}' if as_text else {"a": 1}}}
    talk = [CALLED[0], {**CALLED[1], "tool_calls": [call]}, *CALLED[2:]]
    (example,) = from_file(write(tmp_path, {"messages": talk, "tools": json.dumps(TOOLS) if as_text else TOOLS}), tokenizer)
    text = tokenizer.decode(example.ids)
    assert '"parameters"' in text and text.count("<tool_call>") == 1
    said = tokenizer.decode(example.ids[example.mask])
    assert said == '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>it is 3<|im_end|>'
    (last,) = from_file(write(tmp_path, {"prompt": talk[:3], "completion": talk[3:], "tools": TOOLS}), tokenizer)
    assert last.ids.tolist() == example.ids.tolist() and tokenizer.decode(last.ids[last.mask]) == "it is 3<|im_end|>"


SPOKEN = {"role": "assistant", "content": "b"}
FAILED: list[tuple[str, dict[str, Any], str]] = [
    (CHATML, {"messages": CALLED}, r"does not show the tool_calls of message 1 \(assistant\)"),
    (CHATML_BLOCKS, {"messages": CALLED}, "does not show the tool_calls of message 1"),
    (CHATML_CALLS_OUTSIDE, {"messages": CALLED}, "writes the tool_calls of message 1 .* outside of its generation block"),
    (CHATML, {"messages": [CALLED[0], SPOKEN], "tools": TOOLS}, "does not show the tools"),
    (CHATML, {"prompt": "a", "completion": "b", "tools": TOOLS}, "does not show the tools"),
    (CHATML, {"messages": [{**CALLED[0], "name": "ann"}, SPOKEN]}, r"does not show the name of message 0 \(user\)"),
    (CHATML, {"messages": [CALLED[0], {**SPOKEN, "reasoning_content": "hm"}]}, "does not show the reasoning_content of message 1"),
    (CHATML_TOOLS, {"messages": [CALLED[0], {**SPOKEN, "function_call": {"name": "f"}}]}, "does not show the function_call"),
    (CHATML, {"messages": [{**CALLED[0], "tool_call_id": "c1"}, SPOKEN]}, "does not show the tool_call_id of message 0"),
    (CHATML_TOOLS, {"messages": [CALLED[0], {**SPOKEN, "weight": 0}]}, "does not show the weight of message 1"),
    (CHATML_TOOLS.replace("{{ m.content }}", "{{ m.content if not m.tool_calls }}"),
     {"messages": [CALLED[0], {**CALLED[1], "content": "let me see"}]}, "does not show the content of message 1"),
    (CHATML_TOOLS, {"messages": [CALLED[0], {**CALLED[1], "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
     "message 1: the arguments of f: not JSON"),
    (CHATML_TOOLS, {"messages": [CALLED[0], {**CALLED[1], "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}]},
     "message 1: the arguments of f are not an object"),
    (CHATML_TOOLS, {"messages": [CALLED[0], {**CALLED[1], "tool_calls": [{"function": {}}]}]}, "no function with a name"),
    (CHATML_TOOLS, {"messages": [CALLED[0], {**CALLED[1], "tool_calls": {"a": 1}}]}, "tool_calls: expected a list of objects"),
    (CHATML_TOOLS, {"messages": CALLED, "tools": {"name": "add"}}, "tools: expected a list of objects"),
    (CHATML_TOOLS, {"messages": [CALLED[0], {**CALLED[1], "tool_calls": [{"function": {"name": "<|im_end|>", "arguments": {}}}]}]},
     "a message of the assistant contains the control token"),
    (CHATML_TOOLS, {"messages": CALLED, "tools": [{"name": "<|im_end|>"}]}, "the tools contain the control token"),
    (CHATML_TOOLS, {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}, SPOKEN]}, "no content that is a string"),
    (CHATML_TOOLS, {"text": "a", "tools": TOOLS}, "tools with a plain text would be dropped"),
    (CHATML_TOOLS, {"messages": CALLED, "system": "be brief"}, "the column system would be dropped"),
    (CHATML_TOOLS, {"prompt": "a", "completion": "b", "images": ["x.png"]}, "the column images would be dropped"),
]  # fmt: skip


@pytest.mark.parametrize(("template", "record", "said"), FAILED)
def test_what_would_be_lost_is_refused_with_its_line(tmp_path: Path, template: str, record: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=f"data.jsonl line 2: .*({said})") as caught:
        from_file(write(tmp_path, {"text": "fine"}, record), byte_level(template))
    assert "\n" not in str(caught.value)


def test_what_a_template_shows_and_what_says_nothing_is_read(tmp_path: Path) -> None:
    tokenizer = byte_level(CHATML_TOOLS)
    talk = [{"role": "user", "name": "ann", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "reasoning_content": "hm", "content": "c", "tool_calls": None}]  # fmt: skip
    row, notes = {"messages": talk, "tools": None, "id": 7, "system": None, "source": "x"}, Notes()
    (example,) = from_file(write(tmp_path, row), tokenizer, notes)
    assert tokenizer.decode(example.ids).startswith("<|im_start|>user ann\nab<|im_end|>")
    assert notes.unused == {"id", "source"}
    assert tokenizer.decode(example.ids[example.mask]) == "<think>hm</think>c<|im_end|>"


def test_fields_that_a_table_fills_with_null_are_not_shown(tmp_path: Path) -> None:
    """Parquet and `datasets` give every call the arguments of all calls. A null that JSON text holds is meant."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    kinds = [{"name": name, "parameters": {"properties": {of: {"type": "text"}}}} for name, of in (("add", "a"), ("len", "b"))]
    rows = [
        {"messages": [CALLED[0], {**SPOKEN, "tool_calls": [{"name": name, "arguments": {of: "1"}}]}], "tools": kinds}
        for name, of in (("add", "a"), ("len", "b"))
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert next(read_rows(tmp_path / "a.parquet"))[1] != rows[0]
    tokenizer = byte_level(CHATML_TOOLS)
    found, expected = (from_file(place, tokenizer) for place in (tmp_path / "a.parquet", write(tmp_path, *rows)))
    assert [tokenizer.decode(e.ids) for e in found] == [tokenizer.decode(e.ids) for e in expected]
    rows[0]["messages"][1]["tool_calls"][0]["arguments"] = '{"a": null}'
    (example,) = from_file(write(tmp_path, rows[0]), tokenizer)
    assert '{"a": null}' in tokenizer.decode(example.ids)


def test_a_tools_answer_need_not_name_its_call(tmp_path: Path) -> None:
    """Its name and tool_call_id say which call it belongs to, and the order says so too."""
    answer = {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "3"}
    tokenizer = byte_level(CHATML)
    (example,) = from_file(write(tmp_path, {"messages": [CALLED[0], SPOKEN, answer, SPOKEN]}), tokenizer)
    assert "<|im_start|>tool\n3<|im_end|>" in tokenizer.decode(example.ids)
