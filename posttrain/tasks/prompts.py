"""Your own prompts, with or without answers: your reward gets every column of a row.

    task = Prompts("prompts.jsonl", reward="mine.py:reward")      # def reward(prompt, response, style): ...

A row is {"prompt": text or messages, ...}. Without a reward here, the stage must have one: reward models, or a Python function.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import Any, ClassVar

from posttrain.data.records import header_hint
from posttrain.errors import many, require
from posttrain.tasks._procedural import stable_hash
from posttrain.tasks._questions import Pool, make_problem, normalised
from posttrain.tasks.jsonl import Jsonl
from posttrain.types import Problem, Score

ASKED = ("prompt", "question", "messages")  # the column of the prompt if none is named


@dataclass(frozen=True)
class Prompts(Jsonl):
    """`file` is for training and `test_file` for evaluation. Without one, `held_out` prompts are kept for evaluation: below 1 a
    share, from 2 on a number; 0 keeps none, and nothing is measured during training. The text of a prompt decides, so the same
    prompts are chosen each time."""

    shorthand: ClassVar[str] = "file"
    by_number: ClassVar[bool] = True

    _: KW_ONLY
    question: str = ""  # the column of the prompt; "": prompt, question or messages
    answer: str = ""  # the column of the answer; "": answer, if there is one
    reward: str = ""

    @staticmethod
    def make(row: Mapping[str, Any], where: str, name: str, *fields: Any) -> Problem:
        question, answer, answer_after, _ = fields
        asked = question or next((column for column in ASKED if column in row), "")
        has = (", ".join(map(str, row)) or "nothing") + header_hint(where)
        lacking = f"{where}: no column prompt, question or messages; it has {has}"
        require(asked, f"{lacking}; question=NAME names the column of the prompt")
        gold = answer or ("answer" if row.get("answer") is not None else "")
        return make_problem(row, where, name, asked, gold, answer_after if gold else "", True)

    @property
    def scores(self) -> bool:
        return bool(self.reward)

    def pool(self, split: str) -> tuple[Problem, ...]:
        first, second = self.parts()
        if second is not None:
            return super().pool(split)
        return _sides(self._read(first), float(self.held_out), first.name)[split == "test"].problems

    def score(self, problem: Problem, response: str) -> Score:
        if not self.reward:
            return Score.failed("no reward: the task has none of its own", outcome="")
        return super().score(problem, response)

    def ready(self) -> tuple[str, ...]:
        problems = self.pool("train")
        count = len(self.pool("test"))
        kept = f"{count:,} held out" if count else "none held out: nothing is measured on others"
        different = len({f"{p.facts.get('messages', '')}{p.question}" for p in problems})
        among = f" ({different:,} different)" if different < len(problems) else ""
        lines = [f"{many(len(problems), 'prompt')} to train on{among}, {kept}", *super().ready()]
        if not self.style and self.wording != "direct":
            added = " ".join(self.ask("").split())
            lines.append(
                f"each prompt ends with '{added}', where the reward {self.reward} looks; style=direct leaves it as it is"
            )
        return tuple(lines)


@lru_cache(maxsize=16)
def _sides(pool: Pool, held_out: float, where: str) -> tuple[Pool, Pool]:
    """Return (train, held out); a repeated prompt is on one side."""
    asked = [normalised(f"{p.facts.get('messages', '')}{p.question}") for p in pool.problems]
    texts = sorted(set(asked), key=lambda text: stable_hash("held out", text))
    count = int(held_out) if held_out > 1 else round(held_out * len(texts))
    some = f"{where}: held_out={held_out:g} of {len(texts)} different prompts"
    require(count < len(texts), f"{some} leaves none to train on")
    aside = set(texts[:count])
    both = list(zip(pool.problems, asked, strict=True))
    kept, held = (tuple(p for p, text in both if (text in aside) == out) for out in (False, True))
    return Pool(kept), Pool(held)
