"""Two models on the same held-out prompts: who wins, how far one has moved from the other, and what it paid in perplexity."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from posttrain.data.text import Decoder
from posttrain.errors import require
from posttrain.evals.statistics import Interval, mean_interval
from posttrain.rollouts import rate_groups, rollout_groups
from posttrain.stages._material import Data, alphabet, gather
from posttrain.stages.base import Context, Stage, load_policy, load_reward_model, model_places
from posttrain.tasks.base import Task
from posttrain.types import JSON, Group, Sampling

if TYPE_CHECKING:
    from posttrain.models.policy import Policy


@dataclass(frozen=True, kw_only=True)
class VersusStage(Stage):
    """`model` against `against`, one answer each to `problems` held-out problems, judged by the task's own score or, where one is
    named, by a reward model. A tie is half a win. KL(model || against) is in nats a response, estimated on the model's answers.
    `text` gives the perplexity of both on data that neither was tuned for: the alignment tax.
    """

    model: str
    against: str
    task: Task
    problems: int = 500
    sampling: Sampling = field(default_factory=Sampling)
    reward_model: str = ""
    text: tuple[Data, ...] = ()

    def __post_init__(self) -> None:
        require(self.problems > 1, f"{self.name}: problems must be at least 2, not {self.problems}")

    def alphabet(self) -> str:
        return alphabet([self.task])

    def run(self, context: Context) -> dict[str, JSON]:
        policies = [load_policy(name, context, self.alphabet()) for name in (self.model, self.against)]
        ours, theirs = (self.answers(context, policy) for policy in policies)
        wins = [_win(a, b) for a, b in zip(ours, theirs, strict=True)]
        decided = [w for w in wins if w is not None]
        require(len(decided) > 1, f"{self.name}: hardly any answer could be judged")
        rate = mean_interval(decided)
        result: dict[str, JSON] = {
            "problems": len(decided),
            "win_rate": _row(rate),
            "ties": sum(w == 0.5 for w in decided),
            "reward": _row(mean_interval([g.rewards[0] for g in ours if g.rewards])),
            "reward_against": _row(mean_interval([g.rewards[0] for g in theirs if g.rewards])),
            "kl": self.kl(ours, policies[1]),
        }
        if self.text:
            result["perplexity"], result["perplexity_against"] = (self.perplexity(context, policy) for policy in policies)
        context.write_lines(self.name, (json.dumps(_line(a, b)) for a, b in zip(ours, theirs, strict=True)))
        said = f"{self.model} wins {rate} of {len(decided)} against {self.against}, at a KL of {result['kl']:.2f} nats"
        context.announce(self.name, [said])
        return result

    def answers(self, context: Context, policy: Policy) -> list[Group]:
        from posttrain.engine.engine import Engine
        from posttrain.train.rating import ModelRating

        seconds = {"generate": 0.0, "score": 0.0}
        problems = self.task.problems("test")[: self.problems]
        engine, decoder = Engine(policy, processes=context.threads), Decoder(policy.tokenizer)
        groups = rollout_groups(self.task, engine, policy.tokenizer, decoder, problems, 1, self.sampling, context.seed, seconds)
        if not self.reward_model:
            return groups
        scorers = [load_reward_model(place, context) for place in model_places(self.reward_model, context)]
        return rate_groups(ModelRating(scorers, tokenizer=policy.tokenizer), groups, seconds)

    def kl(self, groups: list[Group], other: Policy) -> float:
        import torch

        from posttrain.train.forward import forward
        from posttrain.train.pack import micro_batches, pack_groups

        batch = pack_groups(groups, self.sampling.temperature or 1.0, other.device)
        with torch.no_grad():
            theirs_T = torch.cat([forward(other, piece).logprob_T for piece in micro_batches(batch, 8192)])
        return float((batch.behaviour_T - theirs_T).where(batch.mask_T, 0.0).sum()) / batch.sequences

    def perplexity(self, context: Context, policy: Policy) -> float:
        import torch

        from posttrain.train.forward import forward
        from posttrain.train.pack import micro_batches, pack_examples

        material = gather(self.text, policy.tokenizer, context.seed, 4096, all_tokens=True)
        batch = pack_examples([e for examples in material.sets for e in examples], policy.device)
        with torch.no_grad():
            logprob = sum(float(forward(policy, piece).logprob_T.sum()) for piece in micro_batches(batch, 8192))
        return float(torch.tensor(-logprob / int(batch.mask_T.sum())).exp())


def _win(ours: Group, theirs: Group) -> float | None:
    """1, 0 or, of a tie, one half; None where one of the two has no score."""
    if not ours.rewards or not theirs.rewards:
        return None
    difference = ours.rewards[0] - theirs.rewards[0]
    return 0.5 if difference == 0 else float(difference > 0)


def _line(ours: Group, theirs: Group) -> dict[str, JSON]:
    one, other = ours.rollouts[0], theirs.rollouts[0]
    return {
        "problem": ours.problem.id,
        "question": ours.problem.question,
        "responses": [one.response, other.response],
        "values": [one.score.value, other.score.value],
    }


def _row(interval: Interval) -> list[float]:
    return [interval.value, interval.low, interval.high]
