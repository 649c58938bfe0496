"""Shared by tasks of questions and gold answers, from files, the hub or a generator, and by published sets of math questions.

The style of a published set decides where a response keeps its answer.
"""

from __future__ import annotations

import json
import re
import unicodedata
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from posttrain.data.records import header_hint, parse_messages, read_set
from posttrain.errors import Range, UserError, Whole, require
from posttrain.rewards._functions import COLUMNS
from posttrain.rewards.compose import UNPARSEABLE
from posttrain.rewards.math import MathReward, final_answer, grade
from posttrain.rewards.math_verify import math_verify
from posttrain.system.wire import changed_by_json
from posttrain.tasks._procedural import require_split, stable_hash
from posttrain.tasks.base import Task
from posttrain.types import JSON, Message, Problem, Score

STYLES = {
    "direct": "{question}",
    "thinking": "{question}\n\nThink step by step before you answer.",
    "boxed": "{question}\n\nThink step by step, then give the final answer in \\boxed{}.",
    "marked": "{question}\n\nThink step by step, then end with the final answer after {marker}.",
}
HASHES = MathReward(marker="####")
NUMBER = re.compile(
    r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,30})(?:\.[0-9]{1,30})?(?:/[0-9]{1,30})?"
)
SEARCHED = 10_000  # characters from the end that are searched for a number
_THOUSANDS = re.compile(r"-?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")


@dataclass(frozen=True, eq=False)
class Pool:
    """Problems as they were read. Compared by identity, so that results computed from them can be cached."""

    problems: tuple[Problem, ...]


class Questions(Task):
    """A task whose class declares these three fields and provides the problems of a split."""

    styles: ClassVar[tuple[str, ...]] = tuple(STYLES)

    style: str
    system: str
    examples: int  # solved training problems shown before the question: few-shot

    @abstractmethod
    def pool(self, split: str) -> tuple[Problem, ...]:
        """Return every problem of a split; train and test share no question. It is called for every prompt, so the result is
        cached."""

    @property
    def wording(self) -> str:
        """Return the style in which a question is asked."""
        return self.style

    @property
    def answer_marker(self) -> str:
        """Return the text that precedes the answer in the style `marked`."""
        return HASHES.marker

    def __post_init__(self) -> None:
        super().__post_init__()
        known = ", ".join(self.styles)
        self.check(self.wording in self.styles, f"style is one of {known}, not {self.style!r}")

    def problems(self, split: str, level: int | None = None) -> Sequence[Problem]:
        require_split(split)
        return self.pool(split)

    def prompt(self, problem: Problem) -> tuple[Message, ...]:
        before = [Message("system", self.system)] if self.system else []
        if problem.facts.get("messages"):
            return (*before, *self._conversation(problem))
        if self.examples:
            others = [p for p in self.pool("train")[: self.examples + 1] if p.id != problem.id]
            for other in others[: self.examples]:
                before.append(Message("user", self.ask(other.question)))
                before.append(Message("assistant", self.demonstration(other)))
        return (*before, Message("user", self.ask(problem.question)))

    def _conversation(self, problem: Problem) -> list[Message]:
        """Return the turns of a row that holds a conversation. A style in the settings is applied to the user's last turn."""
        where = f"problem {problem.id}"
        turns = list(parse_messages(problem.facts["messages"], where))
        refused = "is a conversation, before which no examples can be shown; set examples to 0"
        require(not self.examples, f"{where} {refused}")
        twice = self.system and any(turn.role == "system" for turn in turns)
        require(not twice, f"{where} has a system message of its own; leave out that or `system`")
        ends = "ends with a turn of the assistant, which the policy would read as its prompt"
        require(turns[-1].role != "assistant", f"{where} {ends}; leave that turn out")
        asked = [place for place, turn in enumerate(turns) if turn.role == "user"]
        if self.style and asked:
            turns[asked[-1]] = replace(turns[asked[-1]], content=self.ask(turns[asked[-1]].content))
        return turns

    def ask(self, question: str) -> str:
        asked = STYLES[self.wording].replace("{marker}", self.answer_marker)
        return asked.replace("{question}", question)


def normalised(text: str) -> str:
    """Return a question in the form in which it is compared with others: one Unicode form, one case, single spaces. Signs stay:
    12+3 is not 12-3.

    >>> normalised("What  is\\n12+3?") == normalised("what is 12+3?") != normalised("what is 12-3?")
    True
    """
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def canonical(answer: str | None) -> str | None:
    r"""Return an answer in the form for majority votes: without the spaces, dollar signs and commas in which two spellings of
    one number differ.

    >>> [canonical(a) for a in ("1,250", " $1250.00$ ", r"\frac{1}{2}", "3, 4", "", None)]
    ['1250', '1250', '\\frac{1}{2}', '3,4', None, None]
    """
    text = "".join((answer or "").split()).replace("\\$", "").strip("$").removesuffix(".")
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    if re.fullmatch(r"-?[0-9]+\.[0-9]+", text):
        text = text.rstrip("0").rstrip(".")
    return text or None


@lru_cache(maxsize=16)
def one_side(pool: Pool, share: float, split: str, where: str) -> tuple[Problem, ...]:
    """Return one side of a set that has no test part. The text of a question decides its side, so a repeated question is on one
    side."""

    def is_test(problem: Problem) -> bool:
        return stable_hash("held out", normalised(problem.question)) % 10_000 < 10_000 * share

    chosen = tuple(p for p in pool.problems if is_test(p) == (split == "test"))
    hint = f"change held_out, which is {share} of {len(pool.problems)}"
    none = f"{where}: no problem is left for {split}; {hint}, or give a test file or split"
    require(chosen, none)
    return chosen


@lru_cache(maxsize=16)
def require_apart(train: Pool, test: Pool, train_name: str, test_name: str) -> None:
    """Raise an error if held-out questions are also trained on."""
    seen = {normalised(p.question) for p in train.problems}
    leaked = [p.id for p in test.problems if normalised(p.question) in seen]
    if leaked:
        said = f"{len(leaked)} questions are also in {train_name}, such as that of {leaked[0]}"
        raise UserError(f"{test_name}: {said}; a score on them would be memory")


def make_problem(
    record: Mapping[str, Any],
    where: str,
    name: str,
    question: str = "question",
    answer: str = "answer",
    answer_after: str = "",
    columns: bool = False,
    chosen: bool = True,
) -> Problem:
    """Make a problem from a record's question and gold answer, and with `columns` all other fields, for the user's own reward.
    A list of messages is the conversation so far; a field may be a path such as `a.b`. `chosen`: settings name the fields."""
    keys = ("question", "answer") if chosen else ("", "")
    asked = pick(record, question, where, keys[0])
    found = pick(record, answer, where, keys[1]) if answer else None
    # tables write a missing value as NaN; the reward then fails, and the failure is counted
    absent = found is None or found != found
    several = isinstance(found, list | dict)  # such as the tests of a program
    solution = "" if absent else json.dumps(found, default=str) if several else str(found)
    gold = solution
    if answer_after:
        _, marker, gold = solution.rpartition(answer_after)
        require(marker, f"{where}: {answer_after!r} is not in the field {answer!r}")
    facts: dict[str, JSON] = {"solution": solution} if gold != solution else {}
    if columns:
        facts[COLUMNS] = {key: value for key, value in record.items() if not changed_by_json(value)}
    if isinstance(asked, list):
        messages = all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in asked)
        require(messages, f"{where}: {question} has no messages")
        facts["messages"] = asked
        asked = parse_messages(asked, f"{where}: {question}")[-1].content if asked else ""
    return Problem(name, _text(asked, question, where), gold.strip(), facts=facts)


def _text(value: Any, name: str, where: str) -> str:
    text = isinstance(value, str) and bool(value.strip())
    require(text, f"{where}: the field {name!r} is empty or no text")
    return str(value)


def pick_text(record: Mapping[str, Any], name: str, where: str) -> str:
    """Return the field called `name`, which must hold text."""
    return _text(pick(record, name, where), name, where)


def pick(record: Mapping[str, Any], name: str, where: str, key: str = "") -> Any:
    """Return the field called `name`, or the one at that path; `key` is the setting that chose it."""
    if name in record:
        return record[name]
    found: Any = record
    for part in name.split("."):
        there = isinstance(found, Mapping) and part in found
        has = ", ".join(sorted(record)) or "nothing"
        hint = f"; the task's key {key} names the field" if key else ""
        hint += "; rows without answers are for the task prompts" if key == "answer" else ""
        hint += header_hint(where)
        require(there, f"{where}: no field {name!r}; it has {has}{hint}")
        found = found[part]
    return found


@dataclass(frozen=True)
class Published(Questions):
    """Train and test as published. `data` is a folder, or the training file if `test_data` is the other; without it the hub's
    copy is read. The style `boxed` asks for the answer in a box. The other styles ask for no form, so the answer is the last
    box, else the text after the last ####, else the last number."""

    # the hub's data set and configuration of each split
    sources: ClassVar[dict[str, tuple[str, str]]]
    files: ClassVar[dict[str, tuple[str, ...]]]  # possible names of a split's file
    styles: ClassVar[tuple[str, ...]] = ("direct", "thinking", "boxed")

    data: str = ""  # a folder with the published files, or the training file; "": the hub's copy
    test_data: str = ""  # the held-out file, if data is a file
    # boxed, thinking (the last number counts) or direct (likewise; demonstrations are the answer alone)
    style: str = "boxed"
    system: str = ""
    examples: Whole = 0  # solved training problems shown before the question: few-shot
    # math is this package's grader; math_verify is that of the package math-verify, for comparison with published results
    grader: Literal["math", "math_verify"] = "math"
    # this share of the training part replaces the test part, chosen by a hash of the question, to tune settings; 0: the test
    # part itself
    held_out: Annotated[float, Range(ge=0, lt=1)] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        paired = bool(self.data) or not self.test_data
        self.check(paired, "test_data goes with data, the training file")

    @classmethod
    @abstractmethod
    def make(cls, row: dict[str, Any], where: str, name: str) -> Problem:
        """Make the problem of a row."""

    def pool(self, split: str) -> tuple[Problem, ...]:
        train, test = read_published(type(self), self.data, self.test_data)
        if self.held_out:
            return one_side(train, self.held_out, split, f"{self.known_as()}'s training part")
        return (test if split == "test" else train).problems

    def score(self, problem: Problem, response: str) -> Score:
        """Compare the extracted answer with the gold one, by the math grader; math_verify extracts it itself."""
        if self.grader == "math_verify":
            return math_verify(problem.question, response, problem.answer)
        if self.style == "boxed":
            return grade(response, problem.answer, question=problem.question)
        answer = found_answer(self.style, response)
        if answer is None:
            return UNPARSEABLE if problem.answer.strip() else grade("", problem.answer)
        return grade(f"\\boxed{{{answer}}}", problem.answer, question=problem.question)

    @property
    def isolated(self) -> bool:
        return self.grader == "math_verify"

    def ready(self) -> tuple[str, ...]:
        if self.grader == "math_verify":
            math_verify("", "\\boxed{1}", "1")  # raises an error if the package is missing
        return super().ready()

    def final(self, response: str) -> str | None:
        return canonical(found_answer(self.style, response))


@lru_cache(maxsize=8)
def read_published(task: type[Published], data: str, test_data: str) -> tuple[Pool, Pool]:
    name, pools = task.known_as(), list[Pool]()
    alone = Path(data).expanduser().is_file() and not test_data
    require(not alone, f"{name}: give test_data, the held-out file, with data")
    for split, place in (("train", data), ("test", test_data or data)):
        rows = read_set(name, place, task.files[split], *task.sources[split], split)
        made = (task.make(row, where, f"{split}/{n}") for n, (where, row) in enumerate(rows))
        pools.append(Pool(tuple(made)))
    require_apart(*pools, "the training part", f"{name}'s test part")
    return pools[0], pools[1]


def found_answer(style: str, response: str) -> str | None:
    r"""Return the text of the answer, or None.

    >>> found_answer("boxed", "so 12"), found_answer("direct", "so 12 - 5 = 7."), found_answer("direct", r"7 is \boxed{x}")
    (None, '7', 'x')
    >>> found_answer("thinking", "5 and 6\n#### 1,234"), found_answer("marked", "so 12")
    ('1,234', None)
    """
    if style == "marked":
        return final_answer(response, HASHES)
    boxed = final_answer(response)
    if boxed or style == "boxed":
        return boxed
    marked = final_answer(response, HASHES)
    if marked:
        return marked
    said = response.rpartition("</think>")[2][-SEARCHED:]
    numbers = [] if "<think>" in said else NUMBER.findall(said)
    return numbers[-1] if numbers else None
