"""Demonstrations: a task's own, and files in every convention, with errors that name the line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers_for_tests import CHATML_BLOCKS, byte_level, characters

from posttrain.data.demonstrations import from_file, from_task
from posttrain.errors import UserError
from posttrain.tasks.arithmetic import Arithmetic


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


def test_plain_prompts_for_a_tokenizer_without_a_template(tmp_path: Path) -> None:
    tokenizer = byte_level(None)
    (example,) = from_file(write(tmp_path, {"prompt": "12+34=", "completion": "46"}), tokenizer)
    assert tokenizer.decode(example.ids) == "12+34=46<|im_end|>"
    assert tokenizer.decode(example.ids[example.mask]) == "46<|im_end|>"
    (example,) = from_file(write(tmp_path, {"prompt": "", "completion": "46"}), tokenizer)
    assert example.mask.tolist()[0] is False


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "line 2: not JSON"),
        (b"[1]", "line 2: expected a JSON object, not list"),
        (b"[" * 100_000, "line 2: not JSON"),
        (b'{"a": ' + b"1" * 5000 + b"}", "line 2: not JSON: a number of too many digits"),
        (b"{}", "line 2: expected messages, prompt with completion, or text; found nothing"),
        (b'{"question": "a"}', "line 2: expected messages.*found question"),
        (b'{"prompt": "a"}', "line 2: prompt without completion"),
        (b'{"completion": "a"}', "line 2: completion without prompt"),
        (b'{"text": 3}', "line 2: text is not a string"),
        (b'{"messages": []}', "line 2: messages: expected a list of messages"),
        (b'{"messages": [{"role": "user"}]}', "line 2: messages: message 0 has no content"),
        (b'{"messages": [{"role": "bot", "content": "a"}]}', "line 2: messages: message 0 has role 'bot'"),
        (b'{"messages": [{"role": "user", "content": "a"}]}', "line 2: no assistant turn"),
        (b'{"prompt": "a<|im_end|>", "completion": "b"}', "line 2: a user message contains the control token"),
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
