"""Reads examples to imitate from a task's own demonstrations or from JSONL files, and reports which were kept.

What a line of a file may hold is in formats.py. Columns that are not read are named in the report.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from posttrain.data.chat import (
    Conversation,
    Tokenizer,
    following_ids,
    is_text,
    or_raise,
    render_examples,
    text_ids,
    unended,
)
from posttrain.data.formats import DEMONSTRATIONS, revealed, unrecognised
from posttrain.data.records import Columns, Row, Tools, parse_messages, parse_tools, read_rows
from posttrain.data.stream import permutation, philox
from posttrain.data.text import unknown_tokens
from posttrain.errors import UserError, many, numbered, require
from posttrain.types import Example, Message, Problem

# columns of other formats: without them the model would learn to answer from less than it should see
NEEDED = {
    "system",
    "functions",
    "function_call",
    "weight",
    "chat_template_kwargs",
    "history",
    "context",
}
NEEDED |= {f"{kind}{s}" for kind in ("image", "video", "audio") for s in ("", "s")}
# speakers in a ShareGPT conversation, and our roles
SPEAKERS = {"system": "system", "human": "user", "user": "user"}
SPEAKERS |= dict.fromkeys(("gpt", "chatgpt", "assistant", "model"), "assistant")
SPEAKERS |= dict.fromkeys(("tool", "observation", "function_response"), "tool")
# the text that Stanford's Alpaca writes around an instruction, for models without a chat template
ALPACA = (
    "Below is an instruction that describes a task{}. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{}\n\n{}### Response:\n"
)


AT_ONCE = 512  # conversations that are rendered together
# what may be a mistake in a row, and what the model then learns
OPPOSITE = "with the opposite preference of an earlier row"
NOTED = {
    "with an empty prompt": "the model learns an answer to nothing",
    "with an empty answer": "the model learns to say nothing",
    "whose answer begins with the prompt": "the model learns to repeat it",
    "with messages as text": "it is learned as text; write the list itself, as JSONL or parquet can",
    OPPOSITE: "prompt and responses are the same, so each undoes what the other teaches",
}
LONG = 24  # characters of a prompt that an answer hardly begins with by chance
AS_TEXT = re.compile(r"""\s*\[\s*\{\s*["'](role|content|from|value)["']\s*:""")
# messages that are given, and those whose answers are learned
Turns = tuple[tuple[Message, ...], tuple[Message, ...]]


@dataclass(slots=True)
class Notes:
    """What the report says of the rows of a file, besides counts."""

    unused: set[str] = field(default_factory=set)  # columns that were not read
    rows: dict[str, list[int]] = field(default_factory=dict)  # line numbers, by a key of NOTED
    texts: list[str] = field(default_factory=list)  # on the texts of all rows
    # what pairs and labels prefer, by their texts
    preferred: dict[frozenset[int], tuple[int, float]] = field(default_factory=dict)

    def look(self, turns: Turns, where: str) -> None:
        """Note a row that may be a mistake. An answer that is a call is not empty."""
        every, line = (*turns[0], *turns[1]), int(where.rsplit(" ", 1)[1])
        said = [m.content for m in turns[1] if m.role == "assistant" and not m.more]
        prompt = turns[0][-1].content if turns[0] else ""
        found = (
            any(m.role == "user" and not m.content.strip() for m in every),
            any(not text.strip() for text in said),
            len(prompt) >= LONG and any(text.startswith(prompt) for text in said),
            any(AS_TEXT.match(m.content) for m in every),
        )
        for what, is_so in zip(NOTED, found, strict=False):
            if is_so and line not in self.rows.get(what, [])[-1:]:
                self.rows.setdefault(what, []).append(line)

    def compare(self, unit: Sequence[Example], line: int) -> None:
        """Note a pair or a label that is the opposite of an earlier one."""
        if len(unit) > 2 or unit[0].steps is not None:
            return
        names = [hash(example.ids.tobytes()) for example in unit]
        reward, best = max((e.reward, name) for e, name in zip(unit, names, strict=True))
        said = best, reward * (len(unit) == 1)
        if self.preferred.setdefault(frozenset(names), said) != said:
            self.rows.setdefault(OPPOSITE, []).append(line)

    def check(self, tokenizer: Tokenizer, examples: Sequence[Example]) -> None:
        """Note answers without an end, and text outside of the vocabulary."""
        self.texts = unended(tokenizer, examples)
        self.texts += unknown_tokens(tokenizer, (example.ids for example in examples))

    def lines(self, between: Iterable[str]) -> list[str]:
        """Lines for the console, with those of the caller before the warnings."""
        rows = [
            f"{many(len(at), 'row')} {what} ({numbered(at)}): {NOTED[what]}"
            for what, at in self.rows.items()
        ]
        unused = ", ".join(sorted(self.unused))
        said = [f"columns that are not used: {unused}"] if unused else []
        return [*said, *between, *(f"warning: {line}" for line in (*rows, *self.texts))]


class Teaching(Protocol):
    """The part of a task that is needed here; this package does not import tasks."""

    def problems(self, split: str, level: int | None = None) -> Sequence[Problem]: ...
    def prompt(self, problem: Problem) -> tuple[Message, ...]: ...
    def conversation(self, problem: Problem) -> tuple[Message, ...]: ...
    def shown_tools(self, template: str) -> Tools: ...


def from_task(
    task: Teaching,
    tokenizer: Tokenizer,
    counts: Mapping[int, int],
    seed: int = 0,
    split: str = "train",
) -> list[Example]:
    """The demonstrations of `counts[level]` problems of each level, shuffled together, without problems that have none. Problems
    have different indices, though in a small level not always different texts."""
    drawn: list[Problem] = []
    for level, count in sorted(counts.items()):
        problems = check_count(task, level, count, split)
        drawn += [problems[i] for i in _distinct(len(problems), count, seed, level)]
    tools = task.shown_tools(str(tokenizer.chat_template or ""))
    order = permutation(len(drawn), "demonstrations", seed)
    shown = ((drawn[i], task.conversation(drawn[i])) for i in order)
    said = (
        Conversation(turns, f"the demonstration of {one.id}", len(task.prompt(one)), tools)
        for one, turns in shown
        if turns
    )
    examples = list[Example]()
    while part := list(islice(said, AT_ONCE)):
        examples += map(or_raise, rendered(tokenizer, part))
    return examples


def check_count(task: Teaching, level: int, count: int, split: str = "train") -> Sequence[Problem]:
    """The problems of a level; an error if there are fewer than `count`."""
    problems = task.problems(split, level)
    fine = count <= len(problems)
    require(fine, f"level {level} has {len(problems)} {split} problems, not {count}")
    return problems


def _distinct(size: int, count: int, seed: int, level: int) -> list[int]:
    """`count` different indices below `size`, in random order, without permuting all of them if few are asked for."""
    if 4 * count >= size:
        return [int(i) for i in permutation(size, "problems", seed, level)[:count]]
    chosen: dict[int, None] = {}
    source = philox("problems", seed, level)
    while len(chosen) < count:
        chosen.update(dict.fromkeys(int(word) % size for word in source.random_raw(count)))
    return list(chosen)[:count]


def from_file(
    path: str | Path,
    tokenizer: Tokenizer,
    notes: Notes | None = None,
    columns: Columns | None = None,
) -> list[Example]:
    """Every line of a JSONL file as an Example; `notes` gets what the report says of them. An error names the file and the line."""
    notes = Notes() if notes is None else notes
    examples, rows = list[Example](), read_rows(path, columns)
    while True:
        said, error = list[Example | Conversation](), None
        try:
            for where, record in islice(rows, AT_ONCE):
                said.append(_read(record, tokenizer, where, notes, rows))
        except UserError as refused:
            error = refused
        examples += map(or_raise, rendered(tokenizer, said))  # an earlier row is refused first
        if error is not None:
            raise error
        if not said:
            return examples


def _read(
    record: dict[str, Any], tokenizer: Tokenizer, where: str, notes: Notes, later: Iterable[Row]
) -> Example | Conversation:
    kind = revealed(record, DEMONSTRATIONS.values())
    if kind is None:
        others = sum(revealed(row, DEMONSTRATIONS.values()) is None for _, row in later)
        more = f" ({many(others, 'later row')} like it)" if others else ""
        raise UserError(f"{unrecognised(record, where, DEMONSTRATIONS)}{more}")
    notes.unused |= unread(record, kind.columns, where)
    tools = parse_tools(record.get("tools"), where)
    if kind.name == "text":
        return _text(record["text"], tokenizer, where, tools)
    turns = READERS[kind.name](record, tokenizer, where)
    notes.look(turns, where)
    return _taught(turns, tokenizer, where, tools)


def rendered(
    tokenizer: Tokenizer, said: Sequence[Example | Conversation]
) -> list[Example | UserError]:
    """The examples, with conversations rendered, or why there is none of them."""
    found = iter(render_examples(tokenizer, [s for s in said if isinstance(s, Conversation)]))
    return [next(found) if isinstance(one, Conversation) else one for one in said]


def unread(record: Mapping[str, Any], known: Collection[str], where: str) -> set[str]:
    """The columns of a row that are not read. Columns that the model would see in another format are an error."""
    extra = record.keys() - {*known, ""}  # an index has no name in CSV
    for name in sorted(extra & NEEDED):
        hint = "write it into the prompt or the messages, or remove it"
        require(not record[name], f"{where}: the column {name} would be dropped; {hint}")
    return extra


def _sharegpt(row: dict[str, Any], tokenizer: Tokenizer, where: str) -> Turns:
    turns = row["conversations"]
    fine = isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns)
    require(fine, f"{where}: conversations: expected a list of turns with from and value")
    said: list[dict[str, Any]] = _system(row)
    for number, turn in enumerate(turns):
        who, at = turn.get("from", turn.get("role")), f"{where}: conversations: turn {number}"
        require(who in SPEAKERS, f"{at} is from {who!r}; expected one of {', '.join(SPEAKERS)}")
        rest = {k: v for k, v in turn.items() if k not in ("from", "role", "value")}
        content = {"content": turn["value"]} if "value" in turn else {}
        said.append({**rest, "role": SPEAKERS[who], **content})
    return (), parse_messages(said, f"{where}: conversations")


def _alpaca(row: dict[str, Any], tokenizer: Tokenizer, where: str) -> Turns:
    asked, given, said = (row.get(name, "") for name in ("instruction", "input", "output"))
    for name, text in (("instruction", asked), ("input", given), ("output", said)):
        require(isinstance(text, str), f"{where}: {name} is not a string")
    system = _system(row)
    if tokenizer.chat_template or row.get("tools") or system:
        user = {"role": "user", "content": f"{asked}\n\n{given}" if given else asked}
        return _turns([*system, user], said, where)
    pairing = ", paired with an input that provides further context" if given else ""
    prompt = ALPACA.format(pairing, asked, f"### Input:\n{given}\n\n" if given else "")
    return _turns(prompt, said, where)


def _system(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The column `system` as the first message."""
    return [{"role": "system", "content": row["system"]}] if row.get("system") else []


def _text(text: Any, tokenizer: Tokenizer, where: str, tools: Tools) -> Example:
    require(not tools, f"{where}: tools with a plain text would be dropped; give messages")
    require(isinstance(text, str), f"{where}: text is not a string")
    return plain_example(list(tokenizer(text)["input_ids"]), 0, tokenizer)


READERS: Mapping[str, Callable[[dict[str, Any], Tokenizer, str], Turns]] = {
    "messages": lambda row, _, where: ((), parse_messages(row["messages"], f"{where}: messages")),
    "sharegpt": _sharegpt,
    "prompt_completion": lambda row, _, where: _turns(row["prompt"], row["completion"], where),
    "alpaca": _alpaca,
}


def completion_example(prompt: Any, completion: Any, tokenizer: Tokenizer, where: str) -> Example:
    """A prompt and its completion, each text or messages, with loss on the completion."""
    said = _taught(_turns(prompt, completion, where), tokenizer, where, None)
    return or_raise(rendered(tokenizer, [said])[0])


def to_render(
    prompt: Any, completion: Any, tokenizer: Tokenizer, where: str, tools: Tools, notes: Notes
) -> Example | Conversation:
    """A row of a file as for `completion_example`, which `rendered` renders together with others."""
    turns = _turns(prompt, completion, where)
    notes.look(turns, where)
    return _taught(turns, tokenizer, where, tools)


def _turns(prompt: Any, completion: Any, where: str) -> Turns:
    def turns(said: Any, role: str, name: str) -> tuple[Message, ...]:
        given = [{"role": role, "content": said}] if isinstance(said, str) else said
        return parse_messages(given, f"{where}: {name}")

    return turns(prompt, "user", "prompt"), turns(completion, "assistant", "completion")


def _taught(turns: Turns, tokenizer: Tokenizer, where: str, tools: Tools) -> Example | Conversation:
    before, after = turns
    said = [(m.role, bool(m.more)) for m in after] == [("assistant", False)]
    if (said and is_text(before, tools)) and not tokenizer.chat_template:
        ids = text_ids(tokenizer, before[0].content)
        rest = following_ids(tokenizer, before[0].content, after[0].content)
        return plain_example(ids + rest, len(ids), tokenizer)
    return Conversation(before + after, where, len(before), tools)


def plain_example(ids: list[int], given: int, tokenizer: Tokenizer) -> Example:
    """Ids closed by the end-of-sequence token, with loss after the first `given`."""
    end = tokenizer.eos_token_id
    if end is not None and ids and ids[-1] != end:
        ids = [*ids, end]
    return Example(np.asarray(ids, dtype=np.int64), np.arange(len(ids)) >= max(given, 1))


@dataclass(frozen=True, slots=True)
class DataReport:
    """Counts of examples and tokens, and of dropped examples by reason."""

    total: int
    kept: int
    # overlong, masked (no token carries loss), empty (nothing is predicted)
    dropped: Mapping[str, int]
    tokens: int  # of what is kept
    loss_tokens: int
    max_length: int
    percentiles: tuple[int, ...]  # length at 50, 90, 99 and 100 percent of what is kept
    notes: Notes = field(default_factory=Notes)

    def lines(self) -> list[str]:
        """Lines for the console."""
        share = f"{100 * self.loss_tokens / self.tokens:.0f}%" if self.tokens else "none"
        half, ninety, ninety_nine, longest = self.percentiles
        said = [
            f"{self.kept:,} of {many(self.total, 'example')} kept; {self.tokens:,} tokens, {self.loss_tokens:,} ({share}) carry loss",
            f"lengths: median {half}, 90% up to {ninety}, 99% up to {ninety_nine}, longest {longest} (limit {self.max_length})",
        ]
        reasons = {
            "overlong": f"for being longer than {self.max_length} tokens",
            "masked": "because no token carries loss",
            "empty": "because they are empty",
        }
        counted = ((self.dropped[name], reason) for name, reason in reasons.items())
        dropped = (f"{count:,} dropped {reason}" for count, reason in counted if count)
        return [*said, *self.notes.lines(dropped)]


def prepare(examples: Iterable[Example], max_length: int) -> tuple[list[Example], DataReport]:
    """The examples that can be trained on, and a report on the others. Examples are checked one by one, in order.

    Those longer than `max_length` are dropped: a cut demonstration teaches not to finish.
    """
    require(max_length >= 2, f"max_length must be at least 2 tokens, not {max_length}")
    kept: list[Example] = []
    dropped = dict.fromkeys(("overlong", "masked", "empty"), 0)
    for example in examples:
        if fate := _fate(example, max_length):
            dropped[fate] += 1
        else:
            kept.append(example)
    total = len(kept) + sum(dropped.values())
    require(total > 0, "the data set is empty")
    long = f"of {total}, {dropped['overlong']} are longer than max_length={max_length}"
    short = f"{dropped['masked']} have no token that carries loss, {dropped['empty']} are empty"
    require(kept, f"no example is left to train on: {long}, {short}")
    lengths = np.array([len(example.ids) for example in kept])
    tokens, loss = int(lengths.sum()), sum(int(example.mask.sum()) for example in kept)
    quantiles = np.percentile(lengths, [50, 90, 99, 100], method="inverted_cdf")
    percentiles = tuple(int(length) for length in quantiles)
    counts = total, len(kept), dropped, tokens, loss
    return kept, DataReport(*counts, max_length, percentiles)


def _fate(example: Example, max_length: int) -> str:
    """Why an example is dropped; "" if it is kept."""
    if len(example.ids) < 2:
        return "empty"
    if len(example.ids) > max_length:
        return "overlong"
    return "" if example.mask[1:].any() else "masked"
