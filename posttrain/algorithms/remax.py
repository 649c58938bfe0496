"""ReMax: REINFORCE whose baseline is the reward of the greedy answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from posttrain.algorithms._policy_gradient import KLIn, PolicyGradient, Reduction
from posttrain.algorithms.base import State
from posttrain.errors import NotNegative
from posttrain.types import Batch, Group, Metric, Rollout, Sampling, Selection


@dataclass(frozen=True, kw_only=True)
class ReMax(PolicyGradient):
    """One sample a prompt. The baseline is the reward of the policy's greedy answer. It depends on the prompt and not on the sample,
    so the gradient is unbiased:

        grad L = -1 / N sum_i sum_t rho_it A_it grad log pi(y_it | x, y_i<t)
        A_it   = r(x, y_i) - r(x, g) - beta sum_{s >= t} KL_is,    g_t = argmax_v pi(v | x, g_<t)

    with KL_is = log mu - log pi_ref, a penalty of every token: a token is charged for its own KL and that of later tokens. The first
    response of a group is g, sampled at temperature 0. It is scored but carries no loss; its reward is the metric `baseline`. A group
    whose g has no score is left out. rho = pi / mu is 1 on-policy, and is not clipped unless `clip_low` and `clip_high` are set. Use it
    in place of PPO where a critic is too much memory, and as rloo where two answers a prompt are all there is time for.
    """

    paper = "Li et al. 2023, arXiv:2310.10505"
    may_unclip = True

    group: int = 2  # answers a prompt, the greedy one among them
    clip_low: float = 0.0
    clip_high: float = 0.0
    beta: NotNegative = 0.05
    kl_in: KLIn = "reward"
    reduction: Reduction = "sequence_sum"

    def samples(self, sampling: Sampling) -> tuple[Sampling, ...]:
        return (replace(sampling, temperature=0.0), *(sampling,) * (self.group - 1))

    def select(self, groups: Sequence[Group], state: State) -> Selection:
        """The sampled answers, with r(x, y) - r(x, g) as their scores."""
        paid = [replace(g, rollouts=tuple(map(self.unpaid, g.rollouts))) for g in groups]
        found = [(group, greedy_value(group)) for group in paid]
        kept = [(group, value) for group, value in found if value is not None]
        metrics = (
            Metric("baseline", sum(value for _, value in kept), len(kept)),
            Metric("groups/no_baseline", len(groups) - len(kept), len(groups)),
        )
        return Selection(tuple(relative(group, value) for group, value in kept), metrics=metrics)

    def unpaid(self, rollout: Rollout) -> Rollout:
        """The rollout with a reward of at most 0 if it was cut off and `truncated = "zero"`; the greedy answer, too."""
        cut = self.truncated == "zero" and rollout.finish == "length"
        return rescored(rollout, 0.0) if cut and (rollout.score.value or 0.0) > 0 else rollout

    def paid(self, step: Batch) -> Batch:
        return step  # scores are differences here: `select` has limited the rewards

    def advantages(self, step: Batch, mask_T: Tensor, state: State) -> Tensor:
        return self.less_kl(step.reward_N[step.sequence_T], step, mask_T)


def greedy_value(group: Group) -> float | None:
    """The reward of the first answer (the mean, if its episode has several sequences), or None if it has no score."""
    values = [r.score.value for r in group.rollouts if r.sample == 0 and r.score.value is not None]
    return sum(values) / len(values) if values else None


def relative(group: Group, baseline: float) -> Group:
    """The other answers, with the baseline subtracted from their scores."""
    found = [(r, r.score.value) for r in group.rollouts if r.sample > 0]
    others = [r if value is None else rescored(r, value - baseline) for r, value in found]
    return replace(group, rollouts=tuple(others))


def rescored(rollout: Rollout, value: float) -> Rollout:
    return replace(rollout, score=replace(rollout.score, value=value))
