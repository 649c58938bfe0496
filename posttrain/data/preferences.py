"""Reads preference data from JSONL files, in the formats of TRL and of OpenAI; formats.py has an example row of each. The first row
decides the format of a file.

A row becomes a unit: examples that begin with the same prompt tokens and whose `reward` says what was preferred. A pair has 1 and
0, its margin and 0, or its two scores; a ranking its scores, or K - 1 for the best down to 0 for the last; an unpaired row 1 or
0; the steps of a row are joined by line breaks, and their labels stand in `steps` at the token that ends each of them.

Skipped and counted, with their lines, in the report: responses that are equal or empty, sequences longer than max_length, a ranking
of one, scores that tie all responses or contradict a pair's chosen and rejected, and prompts that the tokenizer cuts differently
before different responses. Refused, because the file is not what it seems to be: a missing field, a value of the wrong type, a score
that is not finite, numbers of scores or step labels that do not match, a row of another kind. The error names the first such row
and counts the others. So nothing is trained on in silence, and nothing is left out in silence.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.data.chat import Conversation, Tokenizer, or_raise
from posttrain.data.demonstrations import AT_ONCE, Notes, rendered, to_render, unread
from posttrain.data.formats import PREFERENCES, meant, revealed, unrecognised
from posttrain.data.records import Columns, Tools, more_of, parse_tools, read_rows
from posttrain.data.stream import philox
from posttrain.data.text import Decoder
from posttrain.errors import UserError, many, numbered, require
from posttrain.types import Example

Unit = tuple[Example, ...]  # the examples of one prompt
JOINT = "\n"  # between the steps of a response
LARGE = 1e30  # scores are kept in float32
TRIES = 256  # other examples that are looked at for one of another prompt that fits
DIALOGUE = re.compile(r"\n\n(Human|Assistant): ?")
REASONS = {
    "equal": "responses are equal",
    "empty": "a response is empty",
    "overlong": "longer than max_length tokens",
    "single": "a ranking of one",
    "tied": "scores, or a margin of 0, prefer none of the responses",
    "contradictory": "scores or margin contradict chosen and rejected",
    "boundary": "the tokenizer cuts the prompt differently before different responses",
}


@dataclass(frozen=True, slots=True, eq=False)
class Preferences:
    """The units of a file, ready for training: its kind, and the skipped rows with reasons."""

    path: str
    kind: str  # the name of its format
    units: list[Unit]  # of the rows that were kept
    total: int
    max_length: int
    margins: bool  # rewards are the file's own scores or margins, not just an order
    skipped: Mapping[str, list[int]]  # line numbers, by a key of REASONS
    notes: Notes

    def lines(self) -> list[str]:
        """A report for the console."""
        kind, kept = PREFERENCES[self.kind].title, len(self.units)
        examples = [example for unit in self.units for example in unit]
        tokens, loss = (sum(len(e.ids) for e in examples), sum(int(e.mask.sum()) for e in examples))
        longest = max(len(e.ids) for e in examples)
        read = ", with margins (for margin=true of a reward model, labels=soft of dpo)"
        more = read if self.margins and self.kind != "steps" else ""
        good = sum(example.reward == 1.0 for example in examples)
        labels = f"; {good:,} desirable, {kept - good:,} not" if self.kind == "unpaired" else ""
        return [
            f"{self.path}: {kind}{more}; {kept:,} of {many(self.total, 'row')} kept, {many(len(examples), 'sequence')}{labels}",
            f"{tokens:,} tokens, {loss:,} carry loss; longest {longest} (limit {self.max_length})",
            *self.notes.lines(_counted(self.skipped)),
        ]


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    """A row in any format: one prompt, and responses with their labels; the steps of the only response, if it has some."""

    prompt: Any
    responses: list[Any]
    rewards: list[float]
    margins: bool = False
    tools: Tools = None
    steps: list[str] | None = None
    joint: str = JOINT
    labels: list[float] | None = None


def _counted(skipped: Mapping[str, list[int]]) -> list[str]:
    found = ((reason, skipped.get(name, [])) for name, reason in REASONS.items())
    return [f"{len(at):,} skipped: {reason} ({numbered(at)})" for reason, at in found if at]


class _Skip(Exception):
    """A row that is skipped and counted, with the reason."""


def read_preferences(
    path: str | Path, tokenizer: Tokenizer, max_length: int, columns: Columns | None = None
) -> Preferences:
    """Read every row of a JSONL file as a unit of examples, with a report on skipped rows. See the module's docstring for the
    formats."""
    require(max_length >= 2, f"max_length must be at least 2 tokens, not {max_length}")
    kind, total, margins = "", 0, False
    units: list[Unit] = []
    skipped: dict[str, list[int]] = {}
    refused: list[str] = []
    notes = Notes()
    decoder = Decoder(tokenizer)
    rows = read_rows(path, columns)
    while part := list(islice(rows, AT_ONCE)):
        asked = list[tuple[_Row | _Skip | UserError, list[Example | Conversation]]]()
        for where, record in part:
            kind = kind or _detect(record, where)
            try:
                row = _checked(kind, record, where)
                notes.unused |= unread(record, PREFERENCES[kind].columns, where)
                asked.append((row, _responses(row, tokenizer, where, notes)))
            except (_Skip, UserError) as error:
                asked.append((error, []))
        made = iter(rendered(tokenizer, [one for _, said in asked for one in said]))
        for (where, _), (given, said) in zip(part, asked, strict=True):
            total, line = total + 1, int(where.rsplit(" ", 1)[1])
            found = list(islice(made, len(said)))
            try:
                if not isinstance(given, _Row):
                    raise given
                units.append(_unit(given, list(map(or_raise, found)), decoder, max_length, where))
                notes.compare(units[-1], line)
                margins |= given.margins
            except _Skip as skip:
                skipped.setdefault(str(skip), []).append(line)
            except UserError as error:
                refused.append(str(error))
    if refused:
        more = f" ({len(refused) - 1} more rows like it or worse)" if len(refused) > 1 else ""
        raise UserError(f"{refused[0]}{more}")
    require(units, f"{path}: no row is left to train on: " + "; ".join(_counted(skipped)))
    notes.check(tokenizer, [example for unit in units for example in unit])
    return Preferences(str(path), kind, units, total, max_length, margins, skipped, notes)


def read_pairs(path: str | Path, columns: Columns | None = None) -> list[tuple[str, str, str]]:
    """(prompt, preferred response, other response) of every pair of a file, as text, to be judged again. Turns of a conversation
    are written one below the other. Rows that training would skip (equal or empty responses) are left out."""
    found: list[tuple[str, str, str]] = []
    for where, record in read_rows(path, columns):
        kind = _detect(record, where)
        pair = kind in ("pair", "openai")
        require(pair, f"{where}: a row of {PREFERENCES[kind].title}; pairs are needed")
        try:
            row = _checked(kind, record, where)
        except _Skip:
            continue
        texts = [spoken(part) for part in (row.prompt, *row.responses)]
        texts[0] = f"tools: {json.dumps(row.tools)}\n\n{texts[0]}" if row.tools else texts[0]
        if all(text.strip() for text in texts) and texts[1] != texts[2]:
            found.append((texts[0], texts[1], texts[2]))
    require(found, f"{path}: no pair is left to judge")
    return found


def spoken(said: Any) -> str:
    """Text, or messages as text: a single message alone, several with their roles."""
    if not isinstance(said, list):
        return str(said)
    turns = [(str(m.get("role", "")), _words(m)) for m in said if isinstance(m, dict)]
    if len(turns) == 1:
        return turns[0][1]
    return "\n\n".join(f"{role}: {content}" for role, content in turns)


def _words(message: dict[str, Any]) -> str:
    """The text of a message and its further fields."""
    said, more = str(message.get("content") or ""), more_of(message)
    rest = json.dumps(more, ensure_ascii=False, sort_keys=True) if more else ""
    return "\n".join(filter(None, (said, rest)))


def _detect(record: dict[str, Any], where: str) -> str:
    # where none is whole: the format that it has a column of, whose reader says what is missing
    shared = {"prompt", "completions", "completion", "input"}
    partial = (f for f in PREFERENCES.values() if (set(f.choices) - shared) & record.keys())
    found = revealed(record, PREFERENCES.values()) or next(partial, None)
    if found is None:
        raise unrecognised(record, where, PREFERENCES)
    return found.name


def _checked(name: str, record: dict[str, Any], where: str) -> _Row:
    """Read a row of the file's format. An error names a missing field, or the other format that the row has."""
    if missing := PREFERENCES[name].missing(record):
        like = revealed(record, (f for f in PREFERENCES.values() if f.name != name))
        hint = f"; it looks like a row of {like.title}, and a file holds one kind" if like else ""
        field = missing[0].replace("|", " or ")
        raise UserError(f"{where}: no {field} in a row of {PREFERENCES[name].title}{hint}")
    given = record.get("input")
    tools = record.get("tools") or (given.get("tools") if isinstance(given, dict) else None)
    try:
        row = READERS[name](record)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return replace(row, tools=parse_tools(tools, where))


def _responses(
    row: _Row, tokenizer: Tokenizer, where: str, notes: Notes
) -> list[Example | Conversation]:
    """The responses of a row after its prompt, to be rendered if there is a chat template."""
    texts = [_text(response) for response in row.responses]
    if any(not text.strip() for text in texts):
        raise _Skip("empty")
    if len(set(texts)) < len(texts):
        raise _Skip("equal")
    if len(row.rewards) > 1 and max(row.rewards) == min(row.rewards):
        raise _Skip("tied")
    return [to_render(row.prompt, r, tokenizer, where, row.tools, notes) for r in row.responses]


def _unit(
    row: _Row, examples: Sequence[Example], decoder: Decoder, max_length: int, where: str
) -> Unit:
    """The examples of a row, which begin with the same prompt tokens."""
    examples = [replace(e, reward=reward) for e, reward in zip(examples, row.rewards, strict=True)]
    if not all(e.mask.any() for e in examples):
        raise _Skip("empty")
    if any(len(e.ids) > max_length for e in examples):
        raise _Skip("overlong")
    if len({e.ids[: prompt_length(e)].tobytes() for e in examples}) > 1:
        raise _Skip("boundary")
    # texts that the tokenizer reads as the same
    if len({e.ids.tobytes() for e in examples}) < len(examples):
        raise _Skip("equal")
    if row.steps is not None and row.labels is not None:
        labels = _step_labels(examples[0], row, decoder, where)
        return (replace(examples[0], steps=labels),)
    return tuple(examples)


def _step_labels(example: Example, row: _Row, decoder: Decoder, where: str) -> np.ndarray:
    """Each label at the token where its step ends, NaN elsewhere."""
    steps, joint = row.steps or [], row.joint
    at = np.flatnonzero(example.mask)
    text, offsets = decoder.decode(example.ids[at])
    begin = text.find(joint.join(steps))
    missing = f"{where}: the steps are not found in the text that the tokenizer makes of them"
    require(begin >= 0, missing)
    label_T = np.full(len(example.ids), np.nan, np.float32)
    end = begin - len(joint)
    for number, (step, label) in enumerate(zip(steps, row.labels or [], strict=True)):
        end += len(joint) + len(step)
        token = at[int(np.searchsorted(offsets, end))]  # the first token that reaches this far
        free = bool(np.isnan(label_T[token]))
        require(free, f"{where}: steps {number} and {number + 1} end in the same token")
        label_T[token] = label
    return label_T


def _read_pair(record: dict[str, Any]) -> _Row:
    prompt, chosen, rejected = _prompt_of_pair(record)
    rewards, given = [1.0, 0.0], False
    for better, worse in (("score_chosen", "score_rejected"), ("chosen_score", "rejected_score")):
        if better in record and worse in record:
            rewards, given = [_number(record[name], name) for name in (better, worse)], True
    if "margin" in record:
        rewards, given = [_number(record["margin"], "margin"), 0.0], True
    if rewards[0] < rewards[1]:
        raise _Skip("contradictory")
    return _Row(prompt, [chosen, rejected], rewards, given)


def _prompt_of_pair(record: dict[str, Any]) -> tuple[Any, Any, Any]:
    """The prompt and the two responses, wherever the row stores the prompt: separately, inside both conversations, or both."""
    prompt, chosen, rejected = record.get("prompt"), record["chosen"], record["rejected"]
    fine = type(chosen) is type(rejected) and isinstance(chosen, str | list)
    require(fine, "chosen and rejected must both be text, or both lists of messages")
    if prompt is None and isinstance(chosen, str):
        asked = meant("prompt", record)
        hint = f"; rename {asked} to prompt, or give columns={{prompt: {asked}}}" if asked else ""
        chosen, rejected = _dialogue(chosen, hint), _dialogue(rejected, hint)
    if not isinstance(chosen, list):
        return _given_prompt(prompt), chosen, rejected
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    if isinstance(prompt, list) and chosen[: len(prompt)] == rejected[: len(prompt)] == prompt:
        return prompt, chosen[len(prompt) :], rejected[len(prompt) :]
    first = chosen[0] if shared and isinstance(chosen[0], dict) else {}
    inside = first.get("role") in ("system", "user")
    if prompt is None or (isinstance(prompt, str) and inside):
        require(inside, "no prompt: chosen and rejected are not conversations that begin alike")
        if shared == len(chosen) == len(rejected):
            raise _Skip("equal")
        said = [m.get("content") if isinstance(m, dict) else None for m in chosen[:shared]]
        other = f"the prompt is {str(prompt)[:40]!r}, but chosen and rejected go on from {str(said[-1])[:40]!r}"
        require(prompt is None or prompt in said, other)
        return chosen[:shared], chosen[shared:], rejected[shared:]
    return _given_prompt(prompt), chosen, rejected


def _dialogue(text: str, hint: str) -> list[dict[str, str]]:
    """Anthropic's format of a conversation as one text; `hint` says what another text lacks."""
    parts = DIALOGUE.split(text)
    turns = not parts[0].strip() and len(parts) > 3
    require(turns, f"no prompt, and chosen or rejected is text without turns{hint}")
    roles = {"Human": "user", "Assistant": "assistant"}
    said = zip(parts[1::2], parts[2::2], strict=True)
    return [{"role": roles[who], "content": text} for who, text in said]


def _read_openai(record: dict[str, Any]) -> _Row:
    given = record["input"]
    require(isinstance(given, dict) and "messages" in given, "input has no messages")
    responses = [record["preferred_output"], record["non_preferred_output"]]
    return _Row(given["messages"], responses, [1.0, 0.0])


def _read_ranking(record: dict[str, Any]) -> _Row:
    responses = record.get("responses", record.get("completions"))
    if not isinstance(responses, list):
        raise UserError("responses must be a list")
    name = "scores" if "scores" in record else "ranking"
    values = record[name]
    require(isinstance(values, list), f"{name} must be a list of numbers")
    count = len(responses)
    require(len(values) == count, f"{len(values)} {name} for {count} responses")
    rewards = [_number(v, name) for v in values]
    if count < 2:
        raise _Skip("single")
    if name == "ranking":
        places = f"a ranking gives each response its place, 1 (the best) to {count}, not {values}"
        require(all(r == int(r) and 1 <= r <= count for r in rewards), places)
        rewards = [count - place for place in rewards]
    return _Row(_given_prompt(record["prompt"]), responses, rewards, margins=name == "scores")


def _read_unpaired(record: dict[str, Any]) -> _Row:
    label = _cell(record["label"])
    known = isinstance(label, bool | int | float) and label in (0, 1)
    require(known, f"label must be true or false, or 1 or 0, not {repr(label)[:40]}")
    return _Row(_given_prompt(record["prompt"]), [record["completion"]], [float(label)])


def _read_steps(record: dict[str, Any]) -> _Row:
    steps, labels = record["completions"], record["labels"]
    texts = isinstance(steps, list) and all(isinstance(s, str) for s in steps)
    require(texts, "completions must be a list of texts")
    require(isinstance(labels, list), "labels must be a list")
    require(len(steps) == len(labels), f"{len(labels)} labels for {len(steps)} steps")
    values = [float(v) if isinstance(v, bool) else _number(v, "labels") for v in labels]
    inside = all(0 <= v <= 1 for v in values)
    require(inside, f"labels of steps lie between 0 and 1, unlike {labels}")
    if not all(step.strip() for step in steps) or not steps:
        raise _Skip("empty")
    joint = record.get("separator", JOINT)
    require(isinstance(joint, str), f"separator must be a text, not {joint!r}")
    prompt, response = _given_prompt(record["prompt"]), joint.join(steps)
    return _Row(prompt, [response], [math.nan], steps=steps, joint=joint, labels=values)


def _given_prompt(prompt: Any) -> Any:
    require(prompt not in (None, "", []), "no prompt, or an empty one")
    return prompt


def _cell(value: Any) -> Any:
    """The value of a cell: CSV has text alone, such as 1.5 or TRUE."""
    with suppress(ValueError, RecursionError):
        return json.loads(value.lower()) if isinstance(value, str) else value
    return value


def _number(value: Any, what: str) -> float:
    value = _cell(value)
    numeric = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGE
    require(numeric, f"{what} must be a finite number, not {repr(value)[:40]}")
    return float(np.float32(value))  # rounded as in a batch, so that ties are the same


def _text(response: Any) -> str:
    """The text of a response, to find empty and equal ones. Its type is checked where it is rendered."""
    if isinstance(response, list):
        said = [(m.get("role"), _words(m)) if isinstance(m, dict) else m for m in response]
        turns = [m for m in response if isinstance(m, dict) and m.get("role") == "assistant"]
        return repr(said) if any(_words(m).strip() for m in turns) else ""
    return response if isinstance(response, str) else repr(response)


READERS: Mapping[str, Callable[[dict[str, Any]], _Row]] = {
    "pair": _read_pair,
    "openai": _read_openai,
    "steps": _read_steps,
    "ranking": _read_ranking,
    "unpaired": _read_unpaired,
}


def as_pairs(units: Sequence[Unit]) -> list[Unit]:
    """Pairs unchanged; a ranking of K as all of its pairs with a preference, K (K - 1) / 2 without ties."""
    return [(a, b) for unit in units for a in unit for b in unit if a.reward > b.reward]


def as_singles(units: Sequence[Unit]) -> list[Unit]:
    """Labelled examples unchanged; the two of a pair separately, the preferred as good (1) and the other as bad (0)."""
    ranking = "a ranking says which response is better, not which are good; make pairs or labels"
    require(all(len(unit) < 3 for unit in units), ranking)
    singles: list[Unit] = []
    for unit in units:
        best = max(example.reward for example in unit)
        apart = [replace(example, reward=float(example.reward == best)) for example in unit]
        singles += [unit] if len(unit) == 1 else [(example,) for example in apart]
    return singles


def with_mismatched(
    singles: Sequence[Unit], pool: Sequence[Unit], max_length: int, seed: int
) -> list[Unit]:
    """Pair each example with a second one: its prompt with a response to another prompt, out of `pool`, without a label (NaN).

    Which response is a matter of the seed and the example's place alone. One that no response of another prompt fits to stands alone.
    """
    others = [unit[0] for unit in pool]
    begins = [prompt_length(other) for other in others]
    prompts = [other.ids[:begin].tobytes() for other, begin in zip(others, begins, strict=True)]
    several = len(set(prompts)) > 1
    require(several, "mismatched examples need at least two different prompts in the data")
    starts = philox("mismatched", seed).random_raw(len(singles))
    units: list[Unit] = []
    for (example,), start in zip(singles, starts, strict=True):
        begin = prompt_length(example)
        own = example.ids[:begin].tobytes()
        for step in range(min(TRIES, len(others))):
            n = (int(start) + step) % len(others)
            response, mask = others[n].ids[begins[n] :], others[n].mask[begins[n] :]
            if prompts[n] != own and begin + len(response) <= max_length:
                ids = np.concatenate([example.ids[:begin], response])
                masks = np.concatenate([example.mask[:begin], mask])
                units.append((example, Example(ids, masks, reward=math.nan)))
                break
        else:
            units.append((example,))
    return units


def prompt_length(example: Example) -> int:
    """The number of tokens before the first loss token."""
    return int(example.mask.argmax())
