"""Held-out evaluation of a model of the run, or of any other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from posttrain.data.text import Decoder
from posttrain.errors import UserError, require
from posttrain.evals.evaluate import Evaluation
from posttrain.evals.statistics import Interval
from posttrain.rollouts import rollout_groups
from posttrain.stages._material import alphabet
from posttrain.stages.base import Context, Stage, load_policy
from posttrain.tasks.base import Task
from posttrain.types import JSON, Problem, Sampler, Sampling


def answer_problems(
    task: Task, sampler: Sampler, tokenizer: object, problems: Sequence[Problem], samples: int, sampling: Sampling, seed: int
) -> Evaluation:
    """Sample answers to problems and score them."""
    seconds = {"generate": 0.0, "score": 0.0}
    groups = rollout_groups(task, sampler, tokenizer, Decoder(tokenizer), problems, samples, sampling, seed, seconds)
    evaluation = Evaluation(tuple(groups))
    if evaluation.failed == problems.__len__() * samples:
        raise UserError(f"no answer could be scored: {groups[0].rollouts[0].score.failure}")
    return evaluation


@dataclass(frozen=True, kw_only=True)
class EvaluateStage(Stage):
    """Answer `problems` held-out problems `samples` times each. Temperature 0 with one sample is greedy accuracy."""

    model: str
    task: Task
    problems: int = 500
    samples: int = 1
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=0.0))

    def __post_init__(self) -> None:
        require(self.problems > 0, f"{self.name}: problems must be positive, not {self.problems}")
        require(self.samples > 0, f"{self.name}: samples must be positive, not {self.samples}")
        argmax = self.sampling.temperature == 0 and self.samples > 1
        require(not argmax, f"{self.name}: {self.samples} samples at temperature 0 are all the same; raise the temperature")

    def alphabet(self) -> str:
        return alphabet([self.task])

    def run(self, context: Context) -> dict[str, JSON]:
        from posttrain.engine.engine import Engine

        policy = load_policy(self.model, context, self.alphabet())
        held_out = self.task.problems("test")
        require(len(held_out) > 0, f"{self.name}: the task has no held-out problems")
        problems = held_out[: self.problems]
        evaluation = answer_problems(
            self.task, Engine(policy, processes=context.threads), policy.tokenizer, problems, self.samples, self.sampling, context.seed
        )
        result = summarise(evaluation)
        context.announce(self.name, [f"{self.model}: accuracy {evaluation.accuracy} on {len(problems)} held-out problems"])
        context.write_lines(self.name, (json.dumps(row) for row in rows(evaluation)))
        return {"model": self.model, **result}


def summarise(evaluation: Evaluation) -> dict[str, JSON]:
    """The figures of an evaluation, each with its interval; format and answer apart."""
    ks = [k for k in (1, 2, 4, 8, 16, 32, 64, 128, 256) if k <= len(evaluation.groups[0].rollouts)]
    parts = {name: evaluation.part(name) for name in evaluation.part_names}
    return {
        "problems": evaluation.problems,
        "accuracy": _interval(evaluation.accuracy),
        "pass_at": {str(k): _interval(evaluation.passed(k)) for k in ks},
        "parts": {name: _interval(value) for name, value in parts.items() if value is not None},
        "reward": None if evaluation.reward is None else _interval(evaluation.reward),
        "length": evaluation.length,
        "failed": evaluation.failed,
    }


def rows(evaluation: Evaluation) -> list[dict[str, JSON]]:
    """One JSON-able row a problem."""
    return [
        {
            "problem": group.problem.id,
            "question": group.problem.question,
            "answer": group.problem.answer,
            "responses": [r.response for r in group.rollouts],
            "values": [r.score.value for r in group.rollouts],
            "outcomes": [r.score.outcome or r.score.failure for r in group.rollouts],
        }
        for group in evaluation.groups
    ]


def _interval(interval: Interval) -> list[float]:
    return [interval.value, interval.low, interval.high]
