"""Finds problems worth training on: a model answers training problems, and those that it fails are kept."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Annotated

from posttrain.data.records import read_jsonl
from posttrain.errors import Count, Range, many, require
from posttrain.models.load import Reader
from posttrain.models.policy import Policy
from posttrain.stages._answers import AskingStage
from posttrain.stages._naming import DataName
from posttrain.stages.base import Context, Stage, data_place
from posttrain.tasks._nested import Nested
from posttrain.tasks.base import Task
from posttrain.types import JSON, Problem


@dataclass(frozen=True, kw_only=True)
class MineStage(AskingStage):
    """Answer `prompts` new training problems, and those that an earlier mine stage kept (`again`), `samples` times each. A problem is
    kept if at most a share `max_solved` of its answers is right. The kept problems are written to `data.jsonl`, for an rl stage that
    names this stage as its `problems`. A problem without any score is counted and left out, because it says nothing about the
    model."""

    writes_responses = False

    max_solved: Annotated[float, Range(ge=0, lt=1, text="a share of the answers in [0, 1)")] = 0.5
    again: DataName = ""  # an earlier mine stage, or a file, whose problems are asked again
    # if fewer problems qualify, the hardest of the others are also kept
    min_problems: Count = 16

    def check_data(self, reader: Reader, context: Context, before: Collection[str]) -> None:
        if self.again and self.again not in before:
            read_problems(self.again)

    def plan(self, policy: Policy, context: Context, before: Mapping[str, Stage]) -> list[str]:
        again = f", after those that {self.again} kept" if self.again else ""
        asked = f"{many(self.prompts, 'training problem')}{again}, x {many(self.samples, 'answer')}"
        kept = f"those solved at most {self.max_solved:.0%} are kept, at least {self.min_problems}"
        return [f"{asked}; {kept}"]

    def run(self, context: Context) -> dict[str, JSON]:
        fresh = self.training_problems()
        before = read_problems(data_place(self.again, context)) if self.again else []
        problems = list({problem.id: problem for problem in [*before, *fresh]}.values())
        shares = self.solved(context, problems)
        scored = [p for p in problems if p.id in shares]
        few = f"{self.name}: only {len(scored)} of {len(problems)} problems could be scored"
        # fewer than `min_problems` were asked in a dry run, for example: then all are kept
        needed = self.min_problems if len(problems) >= self.min_problems else 1
        require(len(scored) >= needed, few)
        kept = failed = [p for p in scored if shares[p.id] <= self.max_solved]
        if len(failed) < self.min_problems:
            kept = sorted(scored, key=lambda p: shares[p.id])[: self.min_problems]
        rows = ({**asdict(p), "solved": shares[p.id]} for p in kept)
        context.write_lines(self.name, rows, "data.jsonl")
        solved = sum(shares.values()) / len(scored)
        old = sum(p.id in {q.id for q in before} for p in failed)
        said = f"{self.model} fails {len(failed):,} of {many(len(scored), 'problem')} ({old:,} of {len(before):,} from before)"
        said += f", solves {solved:.1%} of the answers; {len(kept):,} kept"
        context.announce(self.name, [said])
        return {
            "problems": len(scored),
            "failed": len(failed),
            "kept": len(kept),
            "solved": solved,
            "unscored": len(problems) - len(scored),
        }

    def solved(self, context: Context, problems: Sequence[Problem]) -> Mapping[str, float]:
        """The share of right answers to each problem that could be scored."""
        right = {
            g.problem.id: [float(r.score.solved) for r in g.rollouts if r.score.valid]
            for g in self.answers(context, problems)
        }
        return {name: sum(marks) / len(marks) for name, marks in right.items() if marks}


def read_problems(path: str) -> list[Problem]:
    """Read the problems that a mine stage wrote."""
    made, names = [], [f.name for f in fields(Problem)]
    for where, row in read_jsonl(path):
        lacking = ", ".join(name for name in names if name not in row)
        require(not lacking, f"{where}: no {lacking}; give a mine stage, or a file that one wrote")
        made.append(Problem(**{name: row[name] for name in names}))
    return made


@dataclass(frozen=True)
class Chosen(Nested):
    """A task with other training problems. Episodes and scores are the task's own."""

    task: Task
    chosen: tuple[Problem, ...]

    has_episodes = False

    @property
    def levels(self) -> tuple[int, ...]:
        # the chosen problems are not sorted by level, so there is no curriculum
        return self.task.levels[-1:]

    def problems(self, split: str, level: int | None = None) -> Sequence[Problem]:
        return self.chosen if split == "train" else self.task.problems(split, level)
