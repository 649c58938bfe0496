"""Shared by stages that sample a model's answers: asking problems, and measuring KL and perplexity."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch

from posttrain.collect import rate_groups
from posttrain.data.text import Decoder
from posttrain.engine.random import derive
from posttrain.episodes import rollout_groups
from posttrain.errors import Count, Several, Whole, require
from posttrain.evals.evaluate import prompts
from posttrain.evals.statistics import Interval, mean_interval, score_interval
from posttrain.models.policy import Policy
from posttrain.ops.weights import sequence_sums
from posttrain.stages._material import Data, gather
from posttrain.stages._naming import ModelName
from posttrain.stages._plan import DryRun, fewer
from posttrain.stages.base import Context, Stage, load_reward_models
from posttrain.tasks.base import Task
from posttrain.train.forward import forward
from posttrain.train.pack import micro_batches, pack_examples, pack_groups
from posttrain.train.rating import ModelRating
from posttrain.types import JSON, Example, Group, Problem, Rollout, Sampling

BATCH = 256  # problems answered together
# tokens of a text that are predicted together; fewer if the model has fewer positions
WINDOW = 4096
UNLIMITED = sys.maxsize
BUDGET = 8192  # tokens in one forward pass


@dataclass(frozen=True, kw_only=True)
class AnswerStage(Stage):
    """A stage in which models answer problems of a task. A dry run asks fewer; `counts` is the setting with their number."""

    counts: ClassVar[str] = "problems"
    leaves: ClassVar[str | None] = ""

    model: ModelName
    task: Task
    sampling: Sampling = field(default_factory=Sampling)

    def splits(self) -> list[tuple[str, int | None]]:
        return [("test", None)]

    def asks(self, split: str, problems: Sequence[Problem]) -> Sequence[Problem]:
        return problems[: getattr(self, self.counts)]

    def dry_run(self) -> DryRun:
        return fewer(self, self.counts)

    def ask(
        self,
        context: Context,
        policy: Policy,
        problems: Sequence[Problem],
        samples: int,
        seed: Callable[[int], int],
        batch: int = BATCH,
    ) -> Iterator[Group]:
        """Yield groups of `samples` answers to each problem, scored by the task. `seed` gives the seed of the batch that begins at
        a problem."""
        sampler, decoder = context.sampler(policy), Decoder(policy.tokenizer)
        for first in range(0, len(problems), batch):
            asked = (problems[first : first + batch], samples, self.sampling, seed(first))
            yield from rollout_groups(self.task, sampler, decoder, *asked, context.workers)


@dataclass(frozen=True, kw_only=True)
class AskingStage(AnswerStage):
    """A stage that asks a model `prompts` training problems and samples `samples` answers to each."""

    counts = "prompts"
    leaves = "data"
    writes_responses: ClassVar[bool] = True  # whether its data holds responses, one turn each

    prompts: Count = 1000  # training problems to answer
    samples: Several = 4
    skip: Whole = 0  # problems to pass over, so that another round sees new ones

    def mistakes(self) -> Iterator[str]:
        yield from super().mistakes()
        if self.writes_responses and self.task.observation_roles(""):
            yield "the episodes of this task have several turns, which are not written as data yet; use an rl stage"

    def splits(self) -> list[tuple[str, int | None]]:
        return [("train", None)]

    def asks(self, split: str, problems: Sequence[Problem]) -> Sequence[Problem]:
        end = self.skip + self.prompts
        return problems[self.skip : end] if end <= len(problems) else problems

    def training_problems(self) -> list[Problem]:
        """`prompts` training problems after the first `skip`, starting over when they run out."""
        source = self.task.problems("train")
        return [source[n % len(source)] for n in range(self.skip, self.skip + self.prompts)]

    def answers(self, context: Context, problems: Sequence[Problem]) -> Iterator[Group]:
        """Answers of `model`, scored by the task. Another `skip` gives other samples."""
        seed = seeds(context, self.skip)
        return self.ask(context, self.load(context), problems, self.samples, seed)


def seeds(context: Context, *drawn: int) -> Callable[[int], int]:
    """A function that gives the seed of the batch that begins at a problem; `drawn` makes the seeds of different uses differ."""
    return lambda first: derive(context.seed, *drawn, first) >> 1


def listed(counts: Mapping[str, int]) -> str:
    """
    >>> listed({"written": 1200, "failed": 0, "empty": 3})
    '1,200 written, 3 empty'
    """
    return ", ".join(f"{count:,} {what}" for what, count in counts.items() if count) or "none"


def ended(group: Group, counts: dict[str, int], scored: bool = True) -> list[Rollout]:
    """The answers that were not cut off and, if `scored`, have a score; the others are counted."""
    whole = [r for r in group.rollouts if r.finish != "length"]
    counts["truncated"] += len(group.rollouts) - len(whole)
    if not scored:
        return whole
    kept = [r for r in whole if r.score.valid]
    counts["failed"] += len(whole) - len(kept)
    return kept


def assistant(rollout: Rollout) -> list[dict[str, JSON]]:
    """A response as an assistant message."""
    return [{"role": "assistant", "content": rollout.response}]


def rated_by(context: Context, policy: Policy, name: str, groups: Sequence[Group]) -> list[Group]:
    """The groups with scores of the reward models called `name`."""
    scorers = load_reward_models(name, context)
    return rate_groups(ModelRating(scorers, tokenizer=policy.tokenizer), groups)


def kl_known(sampling: Sampling) -> bool:
    """Whether the KL can be estimated from answers with this sampling: argmax is not a sample, and a truncated vocabulary is
    another distribution."""
    return sampling.temperature > 0 and not sampling.truncated


def kl_to(groups: Sequence[Group], other: Policy, sampling: Sampling) -> Interval:
    """KL(sampler || other) in nats a response, from the sampler's own answers: the mean of sum_t log p(a_t) - log q(a_t).

    The estimate is unbiased, so it can be negative by chance if the two models are close. The interval is over prompts.
    """
    text = "a KL is estimated from samples: it needs a temperature above 0, and no top_k or top_p"
    require(kl_known(sampling), text)
    batch = pack_groups(groups, sampling.temperature, other.device)
    with torch.no_grad():
        pieces = [forward(other, piece).logprob_T for piece in micro_batches(batch, BUDGET)]
    ratio_T = (batch.behaviour_T - torch.cat(pieces)).double()
    ratio_N = sequence_sums(ratio_T, batch.mask_T, batch.sequence_T, batch.sequences)
    members = [ratio_N[batch.group_N == g].tolist() for g in range(len(groups))]
    return mean_interval([sum(values) / len(values) for values in members], prompts(groups))


def proxy_gold_kl(
    groups: Sequence[Group], reference: Policy, sampling: Sampling
) -> dict[str, Interval]:
    """Figures of over-optimisation from rated samples: the reward that was trained for (proxy), the task's own score (gold), and
    the KL to `reference` in nats a response. Samples without a score do not count in the rewards."""
    scored = [
        (rollout.score, key)
        for group, key in zip(groups, prompts(groups), strict=True)
        for rollout in group.rollouts
        if rollout.score.valid
    ]
    proxy = [(score.value, key) for score, key in scored if score.value is not None]
    gold = [(score.parts["task"], key) for score, key in scored if "task" in score.parts]
    text = "hardly any sample could be scored: proxy and gold reward need at least 2"
    require(len(proxy) > 1 and len(gold) > 1, text)
    (rewards, asked), (golds, gold_asked) = zip(*proxy, strict=True), zip(*gold, strict=True)
    return {
        "proxy": mean_interval(rewards, asked),
        "gold": score_interval(golds, gold_asked),
        "kl": kl_to(groups, reference, sampling),
    }


def perplexity(policy: Policy, sources: Sequence[Data], seed: int) -> float:
    """exp(-mean log p) over every token of the sources except the first of each text. A long text is cut into windows that overlap
    by one token, so that each token is predicted once."""
    size = min(WINDOW, policy.positions or WINDOW)
    material = gather(sources, policy.tokenizer, seed, UNLIMITED, all_tokens=True)
    texts = [e.ids for examples in material.sets for e in examples]
    pieces = [window for ids in texts for window in windows(ids, size)]
    batch = pack_examples([Example(ids, np.arange(len(ids)) > 0) for ids in pieces], policy.device)
    with torch.no_grad():
        outputs = (forward(policy, piece) for piece in micro_batches(batch, BUDGET))
        logprob = sum(float(one.logprob_T.sum()) for one in outputs)
    return float(torch.tensor(-logprob / int(batch.mask_T.sum())).exp())


def windows(ids: np.ndarray, size: int) -> list[np.ndarray]:
    """Windows of at most `size` tokens in which each token except the first is predicted once.

    >>> [piece.tolist() for piece in windows(np.arange(6), 3)]
    [[0, 1, 2], [2, 3, 4], [4, 5]]
    """
    return [ids[start : start + size] for start in range(0, max(1, len(ids) - 1), size - 1)]
