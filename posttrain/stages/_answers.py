"""What stages share that look at a model's own answers: which problems it is asked, and how it answers them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from posttrain.collect import rate_groups
from posttrain.data.text import Decoder
from posttrain.episodes import rollout_groups
from posttrain.errors import Count, Whole
from posttrain.stages._material import alphabet
from posttrain.stages._plan import DryRun, fewer
from posttrain.stages.base import Context, Stage, load_reward_model, model_places
from posttrain.tasks.base import Task
from posttrain.types import JSON, Group, Problem, Rollout, Sampling

if TYPE_CHECKING:
    from posttrain.models.policy import Policy

BATCH = 256  # problems answered together


def answers(
    context: Context,
    policy: Policy,
    task: Task,
    problems: Sequence[Problem],
    samples: int,
    sampling: Sampling,
    seed: Callable[[int], int],
    batch: int = BATCH,
) -> Iterator[Group]:
    """`samples` answers of a model to each problem, scored by the task. `seed` gives that of the batch that begins at a problem."""
    sampler, decoder = context.sampler(policy), Decoder(policy.tokenizer)
    for first in range(0, len(problems), batch):
        part, drawn = problems[first : first + batch], seed(first)
        yield from rollout_groups(
            task, sampler, decoder, part, samples, sampling, drawn, context.workers
        )


def rated_by(context: Context, policy: Policy, name: str, groups: Sequence[Group]) -> list[Group]:
    """The groups as the reward models called `name` rate them."""
    from posttrain.train.rating import ModelRating

    scorers = [load_reward_model(place, context) for place in model_places(name, context)]
    return rate_groups(ModelRating(scorers, tokenizer=policy.tokenizer), groups)


def assistant(rollout: Rollout) -> list[dict[str, JSON]]:
    """A response as the turn of a conversation."""
    return [{"role": "assistant", "content": rollout.response}]


@dataclass(frozen=True, kw_only=True)
class AskingStage(Stage):
    """A stage that asks a model training problems: `prompts` of them, `samples` answers to each."""

    model: str
    task: Task
    prompts: Count = 1000
    samples: Count = 4
    skip: Whole = 0  # problems to pass over, so that another round sees new ones
    sampling: Sampling = field(default_factory=Sampling)

    def alphabet(self) -> str:
        return alphabet([self.task])

    def dry_run(self) -> DryRun:
        return fewer(self, "prompts", **self.no_gate())

    def no_gate(self) -> dict[str, Any]:
        """Settings with which any answer will do."""
        return {}

    def training_problems(self) -> list[Problem]:
        """`prompts` training problems after the first `skip`, from the beginning again where they run out."""
        source = self.task.problems("train")
        return [source[n % len(source)] for n in range(self.skip, self.skip + self.prompts)]

    def answers(self, context: Context, problems: Sequence[Problem]) -> Iterator[Group]:
        """Answers of `model`, scored by the task. Another `skip` is another draw."""
        from posttrain.engine.random import derive
        from posttrain.stages.base import load_policy

        policy = load_policy(self.model, context, self.alphabet())
        return answers(
            context,
            policy,
            self.task,
            problems,
            self.samples,
            self.sampling,
            lambda first: derive(context.seed, self.skip, first) >> 1,
        )
