"""VinePPO: the value of an intermediate state is the mean reward of completions sampled from it, in place of a critic's estimate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.algorithms._policy_gradient import PolicyGradient
from posttrain.algorithms.base import Branches, State
from posttrain.errors import Several
from posttrain.ops.advantages import group_advantages, step_advantages
from posttrain.types import Batch


@dataclass(frozen=True, kw_only=True)
class VinePPO(PolicyGradient):
    """A response is cut into steps. From the end of each step but the last, the policy samples K = `completions` completions, and
    a step is worth what it changes:

        A_it = V(s_k) - V(s_k-1) for the tokens of step k,    V(s_0) = 1 / (G - 1) sum_{j != i} r_j
        V(s_k) = mean reward of K completions from the end of step k; of the last step, r_i

    and then PPO's clipped loss. Every V is an unbiased estimate, whatever K is, where a critic's is only as good as its training. With
    one step this is RLOO's advantage. With `kl_in = "reward"` a token is also charged for the KL of later tokens, as in ReMax.
    A response of S steps needs K (S - 1) completions of half its length on average, so that sampling takes about K S / 2 times as
    long. A reward must score a response by itself. Use it where single steps decide and rewards are verifiable.
    """

    paper = "Kazemnejad et al. 2024, arXiv:2410.01679"
    learns_steps = True

    completions: Several = 8  # sampled from the end of each step but the last
    steps: str = "\n"  # what ends a step: a text, or pattern:REGEX

    @property
    def branches(self) -> Branches:
        return Branches(self.completions, self.steps, self.truncated == "zero")

    def advantages(self, step: Batch, mask_T: Tensor, state: State) -> Tensor:
        whole_N, episode_N = self.rewards(step, mask_T), step.columns.get("episode_N")
        members = (step.valid_N, step.group_N)
        ahead_N = group_advantages(
            whole_N, *members, baseline="leave_one_out", scale="none", episode_N=episode_N
        )
        none_T = torch.full_like(step.behaviour_T, torch.nan)
        values = step.columns.get("step_T", none_T), whole_N - ahead_N, step.reward_N
        changes_T = step_advantages(*values, mask_T, step.sequence_T)
        return self.less_kl(changes_T, step, mask_T)
