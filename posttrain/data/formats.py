"""The formats of rows: which columns each has, which stage reads it, and one example. The readers in demonstrations.py and
preferences.py recognise a row by this table; `posttrain list formats` and docs/data-formats.md print it."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from posttrain.errors import UserError
from posttrain.types import JSON

SFT = "sft, pretrain"
PAIRS, LABELS, STEPS = "preference, reward_model", "preference", "reward_model"
ASKED, ANSWERED = {"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}
# columns of other conventions, by the column of ours that holds the same
ALIKE = {
    "prompt": "question query problem instruction input user human",
    "completion": "answer response output solution target assistant reply",
    "messages": "conversation chat dialog dialogue turns message",
    "text": "content document sentence body",
    "chosen": "preferred accepted better winner positive",
    "rejected": "dispreferred worse loser negative",
}


@dataclass(frozen=True, slots=True)
class Format:
    """A row has every column of `fields`, where "a|b" is one of the two, and may have those of `optional`."""

    name: str
    title: str
    stages: str  # that read it
    fields: tuple[str, ...]
    example: Mapping[str, JSON]
    optional: tuple[str, ...] = ()
    # a row with all of these is of this format; () where all of its fields are needed
    revealing: tuple[str, ...] = ()
    note: str = ""

    @property
    def choices(self) -> list[str]:
        return [choice for field in self.fields for choice in field.split("|")]

    @property
    def columns(self) -> set[str]:
        """Every column that is read."""
        return {"tools", *self.choices, *self.optional}

    def missing(self, row: Collection[str]) -> list[str]:
        """The fields that a row lacks."""
        return [f for f in self.fields if not any(choice in row for choice in f.split("|"))]

    def shown(self) -> str:
        """Its columns in words."""
        return " and ".join(field.replace("|", " or ") for field in self.fields)


SCORES = ("score_chosen", "score_rejected", "chosen_score", "rejected_score")
# in the order in which a row is compared with them
FORMATS = (
    Format(
        "messages",
        "conversations",
        SFT,
        ("messages",),
        {"messages": [ASKED, ANSWERED]},
        note="Loss on every assistant turn. A message may have more fields (tool_calls, name, reasoning_content, ...), and a row "
        "`tools`: the chat template is given them, and what it does not show is refused.",
    ),
    Format(
        "sharegpt",
        "conversations (ShareGPT)",
        SFT,
        ("conversations",),
        {"conversations": [{"from": "human", "value": "1+2="}, {"from": "gpt", "value": "3"}]},
        ("system",),
        note="`from` is human, gpt, system or tool (or user, assistant, observation, ...); loss on every turn of gpt.",
    ),
    Format(
        "prompt_completion",
        "prompts with a completion",
        SFT,
        ("prompt", "completion"),
        {"prompt": "1+2=", "completion": "3"},
        note="Text or messages; loss on the completion. Text becomes a user and an assistant turn where the tokenizer has a chat "
        "template; where it has none, the two are joined as they are.",
    ),
    Format(
        "alpaca",
        "instructions (Alpaca)",
        SFT,
        ("instruction", "output"),
        {"instruction": "Add the numbers.", "input": "1 and 2", "output": "3"},
        ("input", "system"),
        note="Loss on the output. With a chat template the user's turn is the instruction, an empty line and the input; without one, "
        "the prompt is that of Stanford's Alpaca.",
    ),
    Format(
        "text",
        "plain text",
        SFT,
        ("text",),
        {"text": "1+2=3"},
        note="Loss on every token; taken as it is, so control tokens written in it count as such.",
    ),
    Format(
        "pair",
        "pairs",
        PAIRS,
        ("chosen", "rejected"),
        {"prompt": "1+2=", "chosen": "3", "rejected": "4"},
        ("prompt", "margin", *SCORES),
        note="Text or messages. Without a prompt, chosen and rejected are conversations that begin alike, or texts such as "
        '"\\n\\nHuman: ...\\n\\nAssistant: ..." (hh-rlhf). `margin`, or `score_chosen` with `score_rejected`, say by how much.',
    ),
    Format(
        "openai",
        "pairs (OpenAI)",
        PAIRS,
        ("input", "preferred_output", "non_preferred_output"),
        {
            "input": {"messages": [ASKED]},
            "preferred_output": [ANSWERED],
            "non_preferred_output": [{"role": "assistant", "content": "4"}],
        },
        ("prompt",),
        ("preferred_output", "non_preferred_output"),
    ),
    Format(
        "steps",
        "labelled steps",
        STEPS,
        ("prompt", "completions", "labels"),
        {"prompt": "1+2+3=", "completions": ["1+2=3", "3+3=7"], "labels": [True, False]},
        revealing=("completions", "labels"),
        note="For algorithm=process_reward_model. Labels are 0 to 1, one for each step; the steps are joined by line breaks.",
    ),
    Format(
        "ranking",
        "rankings",
        PAIRS,
        ("prompt", "responses|completions", "scores|ranking"),
        {"prompt": "1+2=", "responses": ["3", "three", "4"], "scores": [1.0, 0.5, 0.0]},
        revealing=("prompt", "scores"),
        note="Higher scores are better. `ranking` in place of `scores` is the place of each response, 1 the best.",
    ),
    Format(
        "unpaired",
        "single responses with a label",
        LABELS,
        ("prompt", "completion", "label"),
        {"prompt": "1+2=", "completion": "3", "label": True},
        revealing=("completion", "label"),
        note="For algorithm=kto: `label` says good (true) or bad (false).",
    ),
)
DEMONSTRATIONS = {f.name: f for f in FORMATS if f.stages == SFT}
PREFERENCES = {f.name: f for f in FORMATS if f.stages != SFT}


def revealed(row: Collection[str], formats: Iterable[Format] = FORMATS) -> Format | None:
    """The first of the formats that a row is of."""
    return next((f for f in formats if set(f.revealing or f.fields) <= set(row)), None)


def unrecognised(row: Collection[str], where: str, known: Mapping[str, Format]) -> UserError:
    """An error for a row of none of the `known` formats: its columns, the nearest format and what to change, or who reads such rows.

    >>> text = str(unrecognised(["question", "answer"], "f line 1", DEMONSTRATIONS))
    >>> print(text.replace("; ", "\\n"))
    f line 1: a row of question, answer has no format that is read here
    nearest is prompt_completion, with prompt and completion: rename question to prompt, answer to completion
    see 'posttrain list formats'
    """
    given = f"{where}: a row of {', '.join(row) or 'no columns'}"
    other = revealed(row)
    if other is not None:
        stage = other.stages.partition(",")[0]
        return UserError(f"{given} is one of {other.title}; use the stage {stage} for it")
    none = f"{given} has no format that is read here"
    renames = {f.name: _renames(f, row) for f in known.values()}

    def likeness(f: Format) -> float:
        return 1 - (len(f.missing(row)) - 0.9 * len(renames[f.name])) / len(f.fields)

    nearest = max(known.values(), key=likeness)
    if likeness(nearest) == 0:
        names = ", ".join(f"{f.name} ({f.shown()})" for f in known.values())
        return UserError(f"{none}: {names}; see 'posttrain list formats'")
    found = renames[nearest.name]
    advice = f"rename {', '.join(f'{was} to {to}' for to, was in found.items())}" if found else ""
    added = [f.replace("|", " or ") for f in nearest.missing(row) if f not in found]
    advice = " and ".join(filter(None, (advice, f"add {', '.join(added)}" if added else "")))
    near = f"nearest is {nearest.name}, with {nearest.shown()}: {advice}"
    return UserError(f"{none}; {near}; see 'posttrain list formats'")


def _renames(format: Format, row: Collection[str]) -> dict[str, str]:
    """For missing fields, the column of a row that seems to be meant."""
    free = {name.lower(): name for name in row if name not in format.columns}
    found: dict[str, str] = {}
    for field in format.missing(row):
        choices = [word for f in field.split("|") for word in (f, *ALIKE.get(f, "").split())]
        near = [n for word in choices for n in difflib.get_close_matches(word, free, 1, 0.8)]
        if near:
            found[field] = free.pop(near[0])
    return found
