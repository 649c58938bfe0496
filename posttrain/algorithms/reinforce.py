"""REINFORCE: the policy gradient itself, with a baseline that needs no group and no critic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from posttrain.algorithms._policy_gradient import KLIn, PolicyGradient, Reduction
from posttrain.algorithms.base import State, mean_of
from posttrain.errors import Range, Several
from posttrain.ops.advantages import group_advantages
from posttrain.types import Batch, Metric


@dataclass(frozen=True, kw_only=True)
class Reinforce(PolicyGradient):
    """Make responses with a reward above the baseline b likelier, and the others less likely:

        grad L = -1 / N sum_i sum_t rho_it A_it grad log pi(y_it | x, y_i<t),    A_it = r_i - b - beta sum_{s >= t} KL_is

    with KL_is = log mu - log pi_ref, a penalty of every token: a token is charged for its own KL and that of later tokens. rho = pi
    / mu is 1 on-policy, and is not clipped unless `clip_low` and `clip_high` are set. `baseline`: `none`, b = 0; `batch`, the mean
    reward of the optimizer step (a part of the rollouts, with several `mini_batches`); `running`, an average over earlier steps, kept
    in the State: b <- decay b + (1 - decay) mean(r), starting with the mean of the first step. With `truncated = "zero"` each
    mean is of the rewards that are paid, the metric `reward_paid`. One sample a prompt is enough.
    Use it to see what the others add: on a reused rollout it goes too far where PPO's clip stops.
    """

    paper = (
        "Williams 1992 (Simple statistical gradient-following algorithms), doi:10.1007/BF00992696"
    )
    min_group = 1
    may_unclip = True

    group: Several = 1
    clip_low: float = 0.0
    clip_high: float = 0.0
    kl_in: KLIn = "reward"
    reduction: Reduction = "sequence_sum"
    # none: 0; batch: the mean reward of the step; running: an average over earlier steps
    baseline: Literal["none", "batch", "running"] = "batch"
    decay: Annotated[float, Range(ge=0, lt=1)] = 0.9

    def mistakes(self) -> Iterator[str]:
        yield from super().mistakes()
        if self.baseline != "running" and self.decay != type(self).decay:
            yield "decay is that of baseline=running, which is not chosen"

    def start(self) -> State:
        return {"baseline": None} if self.baseline == "running" else {}

    def advantages(self, step: Batch, mask_T: Tensor, state: State) -> Tensor:
        running = state.get("baseline")
        if self.baseline == "none":
            advantage_N = step.reward_N
        elif self.baseline == "running" and running is not None:
            advantage_N = step.reward_N - running
        else:  # treat the whole step as one group
            group_N, episode_N = torch.zeros_like(step.group_N), step.columns.get("episode_N")
            advantage_N = group_advantages(
                step.reward_N, step.valid_N, group_N, scale="none", episode_N=episode_N
            )
        return self.less_kl(advantage_N[step.sequence_T], step, mask_T)

    def finish(self, state: State, metrics: Sequence[Metric]) -> State:
        name = "reward_paid" if self.truncated == "zero" else "reward"
        seen = any(m.count for m in metrics if m.name == name)
        if self.baseline != "running" or not seen:
            return state
        mean, before = mean_of(metrics, name), state.get("baseline")
        if before is not None:
            mean = self.decay * before + (1 - self.decay) * mean
        return {"baseline": mean}
