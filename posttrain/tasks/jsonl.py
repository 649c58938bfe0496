"""Problems from a JSONL file of your own: which fields hold the question and the answer, how to ask, and which reward judges.

    task = Jsonl("gsm8k-train.jsonl", test_file="gsm8k-test.jsonl", answer_after="####", style="boxed", reward="math")

A reward is one of `posttrain list rewards`, or a plain function of yours, `(prompt, response, answer) -> float | Score`, as
`file.py:name`; it may be `async`. Yours runs in worker processes with a time limit.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from posttrain import catalogue
from posttrain.errors import UserError, require
from posttrain.rewards.compose import Reward, as_score
from posttrain.tasks._procedural import require_split, stable_hash
from posttrain.tasks.base import Task
from posttrain.types import JSON, Code, Message, Problem, Score

STYLES = {
    "direct": "{question}",
    "thinking": "{question}\n\nThink step by step before you answer.",
    "boxed": "{question}\n\nThink step by step, then give the final answer in \\boxed{}.",
}


@dataclass(frozen=True)
class Jsonl(Task):
    """`file` is for training and `test_file` for evaluation; without one, a share of `file` is held out by its content. Files may be
    compressed with gzip."""

    file: str
    test_file: str = ""
    question: str = "question"  # the field that holds it; a list of messages is taken as the conversation so far
    answer: str = "answer"
    answer_after: str = ""  # take what follows the last of these in the answer, such as "####"
    reward: Code = "math"
    options: Mapping[str, JSON] = field(default_factory=dict)  # keyword arguments of the reward
    style: str = "direct"
    system: str = ""
    examples: int = 0  # solved training problems shown before the question
    held_out: float = 0.1  # the share of `file` for evaluation, where there is no test_file
    score_seconds: float = 10.0  # the time limit of a reward of yours

    def __post_init__(self) -> None:
        require(bool(self.file), "jsonl: give a file")
        require(self.style in STYLES, f"jsonl: style is one of {', '.join(STYLES)}, not {self.style!r}")
        require(0 < self.held_out < 1, f"jsonl: held_out is a share between 0 and 1, not {self.held_out}")
        require(self.examples >= 0, f"jsonl: examples must not be negative, not {self.examples}")
        require(self.score_seconds > 0, f"jsonl: score_seconds must be positive, not {self.score_seconds}")

    def problems(self, split: str, level: int | None = None) -> list[Problem]:
        require_split(split)
        if self.test_file:
            other = {p.question for p in self._read(self.file)} if split == "test" else set()
            chosen = self._read(self.file if split == "train" else self.test_file)
            leaked = [p for p in chosen if p.question in other]
            said = f"{len(leaked)} questions are also in {self.file}, such as that of {leaked[0].id}" if leaked else ""
            require(not leaked, f"{self.test_file}: {said}; a score on them would be memory")
            return list(chosen)
        chosen = [p for p in self._read(self.file) if self._is_test(p) == (split == "test")]
        require(bool(chosen), f"{self.file}: no problem is left for {split}; give a test_file or another held_out")
        return chosen

    def _read(self, file: str) -> tuple[Problem, ...]:
        path = Path(file).expanduser()
        require(path.is_file(), f"there is no data file {file}")
        return _read(file, path.stat().st_mtime_ns, self.question, self.answer, self.answer_after)

    def _is_test(self, problem: Problem) -> bool:
        """Decided by the question's text: a question that comes twice is on one side."""
        return stable_hash("held out", problem.question) % 10_000 < 10_000 * self.held_out

    def prompt(self, problem: Problem) -> tuple[Message, ...]:
        before = [Message("system", self.system)] if self.system else []
        given = problem.facts.get("messages")
        if given:
            return (*before, *(Message(str(m["role"]), str(m["content"])) for m in given))
        shown: list[Message] = []
        for other in [p for p in self.problems("train")[: self.examples + 1] if p.id != problem.id][: self.examples]:
            shown += [Message("user", self._ask(other)), Message("assistant", self.demonstration(other))]
        return (*before, *shown, Message("user", self._ask(problem)))

    def _ask(self, problem: Problem) -> str:
        return STYLES[self.style].replace("{question}", problem.question)

    def score(self, problem: Problem, response: str) -> Score:
        found: Any = _reward(self.reward)(problem.question, response, problem.answer, **self.options)
        return _later(found) if hasattr(found, "__await__") else as_score(found)  # type: ignore[return-value]

    def demonstration(self, problem: Problem) -> str:
        """The file's worked answer, with its final part in a box where the style asks for one."""
        worked = str(problem.facts.get("worked") or problem.answer)
        return f"{worked}\n\\boxed{{{problem.answer}}}" if self.style == "boxed" and "\\boxed" not in worked else worked

    @property
    def isolated(self) -> bool:
        return ".py:" in self.reward or self.reward == "code"

    @property
    def seconds(self) -> float:
        return self.score_seconds


async def _later(found: Any) -> Score:
    return as_score(await found)


@lru_cache(maxsize=16)
def _reward(name: str) -> Reward:
    found: Reward = catalogue.load("reward", name)
    return found


@lru_cache(maxsize=8)
def _read(file: str, changed: int, question: str, answer: str, answer_after: str) -> tuple[Problem, ...]:
    found = []
    for where, record in _records(file):
        for name in (question, answer):
            require(name in record, f"{where}: no field {name!r}; it has {', '.join(sorted(record)) or 'nothing'}")
        asked, worked = record[question], str(record[answer])
        gold = worked
        if answer_after:
            _, marker, gold = worked.rpartition(answer_after)
            require(bool(marker), f"{where}: {answer_after!r} is not in the field {answer!r}")
        facts: dict[str, JSON] = {"worked": worked} if gold != worked else {}
        if isinstance(asked, list):
            require(
                all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in asked),
                f"{where}: {question} has no messages",
            )
            facts["messages"] = asked
            asked = str(asked[-1]["content"]) if asked else ""
        require(isinstance(asked, str) and bool(asked.strip()), f"{where}: the field {question!r} is empty or no text")
        found.append(Problem(f"{Path(file).name}:{where.rpartition(' ')[2]}", asked, gold.strip(), facts=facts))
    require(bool(found), f"{file} is empty: expected one JSON object a line")
    return tuple(found)


def _records(file: str) -> Iterator[tuple[str, dict[str, Any]]]:
    path = Path(file).expanduser()
    opened: Any = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{file} line {number}", _object(line, f"{file} line {number}")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {file}: {error}") from error


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{where}: not JSON: {error}") from error
    require(isinstance(record, dict), f"{where}: expected a JSON object, not {type(record).__name__}")
    return dict(record)
