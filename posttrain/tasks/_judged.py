"""Tasks whose fields, wording and reward are settings, whatever the source of their records."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Annotated, Any, ClassVar

from posttrain.errors import Range, UserError, Whole
from posttrain.rewards._functions import COLUMNS, columns_of, given, then
from posttrain.rewards.answer import MARKER, after_marker
from posttrain.rewards.base import Options, check, check_function, own_function, parts_of, resolve
from posttrain.rewards.code import patience
from posttrain.rewards.compose import as_score
from posttrain.rewards.judge import check_judge, judged
from posttrain.rewards.math import MathReward, final_answer
from posttrain.rewards.sandbox import isolation
from posttrain.tasks import _questions
from posttrain.trust import PREFIX, code_place
from posttrain.types import JSON, Problem, Score

# rewards that decide right or wrong
JUDGING = ("answer", "arithmetic_steps", "code", "math", "math_verify")
# rewards that look for a box unless they have a marker
BOXED = ("math", "math_verify", "arithmetic_steps")
# rewards that give 1 for the gold answer in the form that they look for
CERTAIN = ("math", "math_verify", "answer")
TRIED = 8  # demonstrations that are scored before a run


# (the place of a record, for messages; the id of its problem; the record)
Row = tuple[str, str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Part:
    """Records of one file or split. `version` changes when the records do."""

    name: str
    version: Any
    read: Callable[[Part], Iterator[Row]] = field(compare=False)


@dataclass(frozen=True, kw_only=True)
class Judged(_questions.Questions):
    """Questions from records in one or two parts; the class provides the parts."""

    # makes a problem from a record
    make: ClassVar[Callable[..., Problem]] = staticmethod(_questions.make_problem)
    by_number: ClassVar[bool] = False  # whether `held_out` may be a number of problems

    # the field of the question, or a path such as `qa.question`; a list of messages is a conversation
    question: str = "question"
    answer: str = "answer"
    answer_after: str = ""  # take the text after the last of these in the answer, such as "####"
    reward: str = "math"
    options: Mapping[str, JSON] = field(default_factory=dict)  # options of the reward
    # direct, thinking, boxed or marked; "": boxed or marked if the reward looks for a box or a marker, else direct
    style: str = ""
    system: str = ""
    examples: Whole = 0  # solved training problems shown before the question: few-shot
    held_out: float = 0.1  # the share for evaluation, if there is no part for it; 1: all
    # the time limit of your own reward, in seconds
    score_seconds: Annotated[float, Range(gt=0, text="positive")] = 10.0

    def __post_init__(self) -> None:
        if self.scores:
            check(self.reward, self.options)
        super().__post_init__()
        kept = self.held_out
        fine = 0 <= kept < 1 or (kept > 1 and kept % 1 == 0 if self.by_number else kept == 1)
        # 1 could be one prompt, or all of them
        number = ", or a number of prompts from 2 on" if self.by_number else ", 1 for all"
        self.check(fine, f"held_out is a share, 0 for none{number}, not {kept}")

    @abstractmethod
    def parts(self) -> tuple[Part, Part | None]:
        """Return the part for training and the one for evaluation; without the second, a share of the first is held out by a
        hash of the questions."""

    def pool(self, split: str) -> tuple[Problem, ...]:
        first, second = self.parts()
        train = self._read(first)
        if second is None and self.held_out in (0, 1):
            return train.problems if (split == "test") == bool(self.held_out) else ()
        if second is None:
            return _questions.one_side(train, self.held_out, split, first.name)
        if split == "train":
            return train.problems
        test = self._read(second)
        _questions.require_apart(train, test, first.name, second.name)
        return test.problems

    def _read(self, part: Part) -> _questions.Pool:
        own = code_place(self.reward) is not None or self.reward.startswith(PREFIX)
        single = next((name for name, _ in self.rewards() if name in CERTAIN), "")
        question, answer, after = self.question, self.answer, self.answer_after
        return _read(part, type(self).make, single, question, answer, after, own)

    @property
    def form(self) -> str | None:
        """Return where the reward looks for the answer: "" in a box, else after this marker; None if it reads the whole
        response."""
        for name, options in self.rewards():
            if name == "answer":
                return str(options.get("marker", MARKER))
            if name in BOXED:
                return str(options.get("marker", ""))
        return None

    @property
    def verifiable(self) -> bool:
        return any(name in JUDGING for name, _ in self.rewards())

    @property
    def wording(self) -> str:
        return self.style or {None: "direct", "": "boxed"}.get(self.form, "marked")

    @property
    def answer_marker(self) -> str:
        return self.form or MARKER

    def demonstration(self, problem: Problem) -> str:
        """Return the solution, with the answer where the reward looks for it, whatever the style."""
        solution, form = str(problem.facts.get("solution") or problem.answer), self.form
        if form is None:
            return solution
        if not form:
            return solution if "\\boxed" in solution else f"{solution}\n\\boxed{{{problem.answer}}}"
        there = after_marker(solution, form) == problem.answer
        return solution if there else f"{solution}\n{form} {problem.answer}"

    def score(self, problem: Problem, response: str) -> Score:
        """Return the reward's score; the scorer awaits one that is `async`. A judge's options may apply to groups only."""
        if self.reward == "judge":
            return judged(problem.question, [response], **self.options)[0]
        own = own_function(self.reward, self.options)
        if own is None:
            shipped = resolve(self.reward, self.options)
            return as_score(shipped(problem.question, response, problem.answer))
        found = [own.scores([problem], [response])]
        return then(found, lambda lists: lists[0][0])  # type: ignore[no-any-return]

    def score_group(self, problem: Problem, responses: Sequence[str]) -> Sequence[Score] | None:
        """Score all responses to a problem together: a judge asks its endpoint in parallel, and a function that takes lists
        gets them in one call."""
        if self.reward.startswith(PREFIX) and (own := given(self.reward)).batched:
            return own.scores([problem] * len(responses), responses)  # type: ignore[no-any-return]
        if self.reward != "judge":
            return None
        return judged(problem.question, responses, **self.options)

    def final(self, response: str) -> str | None:
        """Return the final answer that a shipped reward would read; None if the reward reads the whole response."""
        if self.reward in ("math", "math_verify"):
            return _questions.canonical(final_answer(response, MathReward(**self.options)))
        if self.reward == "answer":
            return after_marker(response, str(self.options.get("marker", MARKER)))
        return None

    def ready(self) -> tuple[str, ...]:
        """If programs are run, choose and test their sandbox before the first of them: workers inherit the choice. The user's
        own reward must at least parse; workers find other mistakes only with the first answer."""
        lines = []
        for name, options in self.rewards():
            if code_place(name) is not None or name.startswith(PREFIX):
                if problems := self.problems("train"):
                    lines += check_function(name, options, problems)
            elif name == "judge":
                check_judge(**options)
            elif name == "code":
                lines.append(isolation.describe(str(options.get("sandbox", "auto"))))
        if self.reward in CERTAIN:
            self._check_demonstrations()
            if self.wording in ("direct", "thinking") and not self.system:
                where = f"after {self.form}" if self.form else "in a box"
                unlike = f"which the style {self.wording} does not ask for"
                lines.append(f"the reward {self.reward} pays an answer {where}, {unlike}")
        return tuple(lines)

    def _check_demonstrations(self) -> None:
        """Raise an error if the reward gives 0 to the data's own gold answers: no response could earn anything."""
        refused = []
        for problem in self.pool("train")[:TRIED]:
            score = self.score(problem, self.demonstration(problem))
            if score.value == 1.0:
                return
            refused.append((problem, score.failure or score.outcome))
        for problem, why in refused[:1]:
            raise UserError(
                f"the reward {self.reward} does not pay the gold answers of the task: that of problem {problem.id}, "
                f"{problem.answer[:60]!r}, is {why}; choose another reward, or the fields answer and answer_after so "
                "that they hold the answer alone"
            )

    def rewards(self) -> list[tuple[str, Options]]:
        """Return the reward, or the parts of a composed one, each with its options."""
        return parts_of(self.reward, self.options)

    @property
    def isolated(self) -> bool:
        slow = ("code", "math_verify")
        return any(code_place(name) is not None or name in slow for name, _ in self.rewards())

    @property
    def seconds(self) -> float:
        """Programs have their own time budget, `wall`, and are scored when it ends: a worker waits longer than that."""
        programs = [patience(options) for name, options in self.rewards() if name == "code"]
        return self.score_seconds + sum(programs)


@lru_cache(maxsize=8)
def _read(
    part: Part, make: Callable[..., Problem], single: str, question: str, answer: str, *fields: Any
) -> _questions.Pool:
    """Return the problems of a part; `single` is a reward that compares with one text."""
    problems, column = [], answer or "answer"
    for where, name, row in part.read(part):
        problems.append(make(row, where, name, question, answer, *fields))
        there = single and (column in row or column.partition(".")[0] in row)
        gold = _questions.pick(row, column, where) if there else None
        if isinstance(gold, list | dict):
            one = f"the reward {single} compares with one text; a function of yours gets it whole"
            raise UserError(f"{where}: the answer is a {type(gold).__name__}, but {one}")
    every = dict.fromkeys(name for problem in problems for name in columns_of(problem))
    return _questions.Pool(tuple(_filled(problem, every) for problem in problems))


def _filled(problem: Problem, columns: Mapping[str, None]) -> Problem:
    """Return the problem with None in the columns that only other rows have, as a table would."""
    row = columns_of(problem)
    if len(row) == len(columns):
        return problem
    return replace(problem, facts={**problem.facts, COLUMNS: {**columns, **row}})
