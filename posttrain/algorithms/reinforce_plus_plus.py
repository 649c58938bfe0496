"""REINFORCE++: PPO without the critic: KL per token in the reward, advantages whitened over the batch, and the clip."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from posttrain.algorithms._policy_gradient import KLIn, PolicyGradient
from posttrain.algorithms.base import State
from posttrain.errors import NotNegative, Several
from posttrain.ops.advantages import group_advantages, whiten
from posttrain.types import Batch


@dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlus(PolicyGradient):
    """One sample a prompt. Advantages are normalised over the whole batch instead of within a group:

        A_it = r_i - beta sum_{s >= t} KL_is,    KL_is = log mu(y_is) - log pi_ref(y_is)
        A    = (A - mean(A)) / std(A) over all tokens of the optimizer step
        L    = -1 / T sum_i sum_t min(rho_it A_it, clip(rho_it, 1 - clip_low, 1 + clip_high) A_it)

    `baseline = "group"` first subtracts the mean reward of the prompt's samples from r_i (the paper's variant for several samples a
    prompt, which is safer if prompts differ in difficulty). std is that of the population, over tokens. Use it where one sample a
    prompt is all there is time for, or where groups often agree.
    """

    paper = "Hu et al. 2025, arXiv:2501.03262"
    min_group = 1

    group: Several = 1
    beta: NotNegative = 0.01
    kl_in: KLIn = "reward"
    # group: first subtract the mean reward of the prompt's samples
    baseline: Literal["none", "group"] = "none"

    def mistakes(self) -> Iterator[str]:
        yield from super().mistakes()
        if self.baseline == "group" and self.group < 2:
            yield "baseline=group needs a group of at least 2: the mean of one sample is that sample"

    @property
    def compares_episodes(self) -> bool:
        return self.baseline == "group"

    def advantages(self, step: Batch, mask_T: Tensor, state: State) -> Tensor:
        reward_N = step.reward_N
        if self.baseline == "group":
            given, episode_N = (step.valid_N, step.group_N), step.columns.get("episode_N")
            reward_N = group_advantages(reward_N, *given, scale="none", episode_N=episode_N)
        return whiten(self.less_kl(reward_N[step.sequence_T], step, mask_T), mask_T)
