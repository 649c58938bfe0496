"""Examples to imitate: from a task's own worked answers, or from JSONL files.

A line of a file is one of
    {"messages": [{"role": "user", "content": ...}, ...]}     loss on every assistant turn
    {"prompt": text or messages, "completion": text or messages}     loss on the completion alone
    {"text": ...}     loss on every token, for pretraining; taken as it is, so control tokens written in it count as such
A prompt and completion that are plain text become a user and an assistant turn where the tokenizer has a chat template, and are
laid end to end, closed by the end-of-sequence token, where it has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from posttrain.data.chat import Tokenizer, render_example
from posttrain.data.stream import permutation, philox
from posttrain.errors import UserError, require
from posttrain.records import read_jsonl
from posttrain.types import Example, Message, Problem

ROLES = ("system", "user", "assistant", "tool")


class Teaching(Protocol):
    """The part of a task that is needed here: this room does not import tasks."""

    def problems(self, split: str, level: int | None = None) -> Sequence[Problem]: ...
    def prompt(self, problem: Problem) -> tuple[Message, ...]: ...
    def demonstration(self, problem: Problem) -> str: ...


def from_task(
    task: Teaching, tokenizer: Tokenizer, counts: Mapping[int, int], seed: int = 0, split: str = "train"
) -> list[Example]:
    """Worked answers to `counts[level]` problems of each level, shuffled together. Problems have different indices, though in a
    small level not always different texts."""
    drawn: list[Problem] = []
    for level, count in sorted(counts.items()):
        problems = task.problems(split, level)
        require(count <= len(problems), f"level {level} has {len(problems)} {split} problems, not {count}")
        drawn += [problems[i] for i in _distinct(len(problems), count, seed, level)]
    order = permutation(len(drawn), "demonstrations", seed)
    return [_demonstration_example(task, tokenizer, drawn[i]) for i in order]


def _demonstration_example(task: Teaching, tokenizer: Tokenizer, problem: Problem) -> Example:
    messages = (*task.prompt(problem), Message("assistant", task.demonstration(problem)))
    return render_example(tokenizer, messages, f"the demonstration of {problem.id}", given=len(messages) - 1)


def _distinct(size: int, count: int, seed: int, level: int) -> list[int]:
    """`count` different indices below `size`, in random order, without a permutation of all of them where few are asked for."""
    if 4 * count >= size:
        return [int(i) for i in permutation(size, "problems", seed, level)[:count]]
    chosen: dict[int, None] = {}
    source = philox("problems", seed, level)
    while len(chosen) < count:
        chosen.update(dict.fromkeys(int(word) % size for word in source.random_raw(count)))
    return list(chosen)[:count]


def from_file(path: str | Path, tokenizer: Tokenizer) -> list[Example]:
    """Every line of a JSONL file as an Example. An error names the file and the line."""
    return [_example(record, tokenizer, where) for where, record in read_jsonl(path)]


def _example(record: dict[str, Any], tokenizer: Tokenizer, where: str) -> Example:
    if "messages" in record:
        return render_example(tokenizer, parse_messages(record["messages"], f"{where}: messages"), where)
    if "prompt" in record and "completion" in record:
        return completion_example(record["prompt"], record["completion"], tokenizer, where)
    if "text" in record:
        require(isinstance(record["text"], str), f"{where}: text is not a string")
        ids = list(tokenizer(record["text"])["input_ids"])
        return plain_example(ids, 0, tokenizer)
    missing = {"prompt": "completion", "completion": "prompt"}
    for present, absent in missing.items():
        require(present not in record, f"{where}: {present} without {absent}")
    names = ", ".join(sorted(record)) or "nothing"
    raise UserError(f"{where}: expected messages, prompt with completion, or text; found {names}")


def completion_example(prompt: Any, completion: Any, tokenizer: Tokenizer, where: str) -> Example:
    """A prompt and its completion, each text or messages, with loss on the completion."""
    plain = isinstance(prompt, str) and isinstance(completion, str)
    if plain and not tokenizer.chat_template:
        ids = list(tokenizer(prompt)["input_ids"])
        if ids and ids[-1] == tokenizer.eos_token_id:  # some tokenizers close every text
            ids.pop()
        return plain_example(ids + list(tokenizer(completion, add_special_tokens=False)["input_ids"]), len(ids), tokenizer)
    before = parse_messages([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt, f"{where}: prompt")
    reply = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
    after = parse_messages(reply, f"{where}: completion")
    return render_example(tokenizer, before + after, where, given=len(before))


def plain_example(ids: list[int], given: int, tokenizer: Tokenizer) -> Example:
    """Ids closed by the end-of-sequence token, with loss after the first `given`."""
    end = tokenizer.eos_token_id
    if end is not None and ids and ids[-1] != end:
        ids = [*ids, end]
    mask = np.arange(len(ids)) >= max(given, 1)
    return Example(np.asarray(ids, dtype=np.int64), mask)


def parse_messages(value: Any, where: str) -> tuple[Message, ...]:
    """A conversation as a file writes it, checked."""
    require(isinstance(value, list) and len(value) > 0, f"{where}: expected a list of messages")
    messages = []
    for number, item in enumerate(value):
        require(isinstance(item, dict), f"{where}: message {number} is not an object")
        role, content = item.get("role"), item.get("content")
        require(role in ROLES, f"{where}: message {number} has role {role!r}; expected one of {', '.join(ROLES)}")
        require(isinstance(content, str), f"{where}: message {number} has no content that is a string")
        messages.append(Message(str(role), str(content)))
    return tuple(messages)
