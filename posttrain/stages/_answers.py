"""What stages that look at a model's own answers share: which problems it is asked, and how it answers them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from posttrain.data.text import Decoder
from posttrain.episodes import rollout_groups
from posttrain.stages.base import Context, load_policy
from posttrain.tasks.base import Task
from posttrain.types import Group, Problem, Sampling

BATCH = 256  # problems answered together


def training_problems(task: Task, skip: int, count: int) -> list[Problem]:
    """`count` training problems after the first `skip`, from the beginning again where they run out."""
    source = task.problems("train")
    return [source[n % len(source)] for n in range(skip, skip + count)]


def answers(
    context: Context,
    model: str,
    task: Task,
    problems: Sequence[Problem],
    samples: int,
    sampling: Sampling,
    skip: int,
    alphabet: str,
) -> Iterator[Group]:
    """`samples` answers of a model to each problem, scored by the task. `skip` makes another round another draw."""
    from posttrain.engine.random import derive

    policy = load_policy(model, context, alphabet)
    sampler, decoder = context.sampler(policy), Decoder(policy.tokenizer)
    for first in range(0, len(problems), BATCH):
        seed, part = derive(context.seed, skip, first) >> 1, problems[first : first + BATCH]
        yield from rollout_groups(
            task, sampler, decoder, part, samples, sampling, seed, context.workers
        )
