"""Labels steps without people: the label of a step is the share of completions from its end that solve the problem."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from posttrain.branches import Continued, Key, complete, key_of
from posttrain.data.steps import Step, check_separator, steps_of
from posttrain.engine.random import derive
from posttrain.errors import Whole, many, prefixed, require
from posttrain.models.policy import Policy
from posttrain.stages._answers import AskingStage, ended, listed, seeds
from posttrain.stages._plan import DryRun, fewer
from posttrain.stages.base import Context
from posttrain.tasks._nested import Nested
from posttrain.tasks.base import Task
from posttrain.types import JSON, Group, Problem, Rollout, Score

# outcomes of solutions
KINDS = ("written", "repeated", "truncated", "failed", "empty", "unlabelled")


@dataclass(frozen=True, kw_only=True)
class StepLabelsStage(AskingStage):
    """Sample `samples` solutions to each of `prompts` training problems. From the end of every step except the last, sample
    `completions`. The label of the step is the share of them that solve the problem, or, with `label=any`, 1 if any does (soft and
    hard estimation, Wang et al. 2023, arXiv:2312.08935). The last step has the outcome of the solution itself. Equal prefixes are
    completed once. With `completions=0` a solution is one step, labelled by its outcome, which is what an outcome reward model learns
    from.

    The stage writes `data.jsonl`, for a reward_model stage with algorithm=process_reward_model that names this stage as its data.
    """

    completions: Whole = 8  # sampled from the end of each step
    # share: the share of completions that solve the problem; any: 1 if any does
    label: Literal["share", "any"] = "share"
    steps: str = "\n"  # what ends a step: a text, or pattern:REGEX

    def mistakes(self) -> Iterator[str]:
        yield from super().mistakes()
        with prefixed(self.name):
            check_separator(self.steps)
        if self.sampling.temperature == 0:
            yield "completions at temperature 0 are all the same; raise the temperature"

    def dry_run(self) -> DryRun:
        # a model after a few steps solves nothing, and nothing can be learned from equal labels
        return fewer(self, self.counts, task=EitherOutcome(self.task))

    def run(self, context: Context) -> dict[str, JSON]:
        policy, counts = self.load(context), dict.fromkeys(KINDS, 0)
        seed = seeds(context, self.skip)
        groups = self.ask(context, policy, self.training_problems(), self.samples, seed)
        solutions = [(r, steps) for group in groups for r, steps in self.solutions(group, counts)]
        none = f"{self.name}: no answer of {self.model} could be labelled; raise max_new_tokens, or look at the task's scores"
        require(solutions, none)
        shares, tokens = self.complete(context, policy, solutions)
        rows = [row for r, steps in solutions if (row := self.row(r, steps, shares)) is not None]
        counts["written"], counts["unlabelled"] = len(rows), len(solutions) - len(rows)
        require(rows, none)
        context.write_lines(self.name, rows, "data.jsonl")
        labels = [value for row in rows for value in row["labels"]]
        said = f"{listed(counts)}; {many(len(labels), 'step')}, {sum(labels) / len(labels):.1%} right on average"
        said += f"; {many(len(shares) * self.completions, 'completion')}"
        context.announce(self.name, [said])
        return {
            **counts,
            "steps": len(labels),
            "mean": sum(labels) / len(labels),
            "completions": len(shares) * self.completions,
            "tokens": tokens + sum(rollout.length for rollout, _ in solutions),
        }

    def solutions(
        self, group: Group, counts: dict[str, int]
    ) -> Iterator[tuple[Rollout, list[Step]]]:
        """The different solutions of a problem that can be labelled, with their steps; the others are counted."""
        seen: set[str] = set()
        for rollout in ended(group, counts):
            steps = steps_of(rollout, self.steps) if rollout.response.strip() else []
            kind = "repeated" if rollout.response in seen else "written"
            kind = kind if steps else "empty"
            counts[kind] += 1
            seen.add(rollout.response)
            if kind == "written":
                yield rollout, steps if self.completions else steps[-1:]

    def complete(
        self, context: Context, policy: Policy, solutions: Sequence[tuple[Rollout, list[Step]]]
    ) -> tuple[dict[Key, float], int]:
        """The label of every prefix that ends a step, except the last, and the number of sampled tokens."""

        def seed(first: int) -> int:
            return derive(context.seed, self.skip, first, 1) >> 1

        def ask(begun: list[Problem]) -> Iterator[Group]:
            going_on = replace(self, task=Continued(self.task))
            return going_on.ask(context, policy, begun, self.completions, seed)

        shares, tokens = {}, 0
        for key, group in complete(solutions, ask).items():
            solved = [r.score.solved for r in group.rollouts if r.score.valid]
            if solved:
                share = sum(solved) / len(solved)
                shares[key] = float(share > 0) if self.label == "any" else share
            tokens += sum(rollout.length for rollout in group.rollouts)
        return shares, tokens

    def row(
        self, rollout: Rollout, steps: Sequence[Step], shares: dict[Key, float]
    ) -> dict[str, JSON] | None:
        """A row of data; None if no completion of a step could be scored. A step begins with the separator before it, so that the
        steps can be concatenated."""
        ends = [step.position for step in steps]
        texts = [rollout.response[a:b] for a, b in zip([0, *ends], ends, strict=False)]
        keys = [key_of(rollout, step) for step in steps[:-1]]
        if not all(key in shares for key in keys):
            return None
        labels = [shares[key] for key in keys]
        prompt = [m.row() for m in self.task.prompt(rollout.problem)]
        last = float(rollout.score.solved)
        return {"prompt": prompt, "completions": texts, "labels": [*labels, last], "separator": ""}


@dataclass(frozen=True)
class EitherOutcome(Nested):
    """The problems of a task, with answers of odd length counted as right, for a dry run."""

    has_episodes = False
    isolated = False
    isolates, score_group = Task.isolates, Task.score_group

    task: Task

    def score(self, problem: Problem, response: str) -> Score:
        return Score(float(len(response) % 2))
