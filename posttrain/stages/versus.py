"""Two models on the same held-out prompts: who wins, how far one has moved from the other, and what it paid in perplexity."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from posttrain.data.text import Decoder
from posttrain.errors import require
from posttrain.evals.statistics import Interval, mean_interval
from posttrain.rollouts import rate_groups, rollout_groups
from posttrain.stages._material import Data, alphabet
from posttrain.stages._measure import kl_known, kl_to, perplexity
from posttrain.stages.base import Context, Stage, load_policy, load_reward_model, model_places
from posttrain.tasks.base import Task
from posttrain.types import JSON, Group, Sampling

if TYPE_CHECKING:
    from posttrain.models.policy import Policy


@dataclass(frozen=True, kw_only=True)
class VersusStage(Stage):
    """`model` against `against`, one answer each to `problems` held-out problems, judged by the task's own score or, where one is
    named, by a reward model. A tie is half a win. KL(model || against) is in nats a response, estimated on the model's answers; there
    is none where they are not samples (temperature 0).
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
            "kl": kl_to(ours, policies[1], self.sampling).value if kl_known(self.sampling) else None,
        }
        if self.text:
            result["perplexity"], result["perplexity_against"] = (
                perplexity(policy, self.text, context.seed) for policy in policies
            )
        context.write_lines(self.name, (json.dumps(_line(a, b)) for a, b in zip(ours, theirs, strict=True)))
        said = f"{self.model} wins {rate} of {len(decided)} against {self.against}"
        said += "" if result["kl"] is None else f", at a KL of {result['kl']:.2f} nats"
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
