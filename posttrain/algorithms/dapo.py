"""DAPO: GRPO with a higher upper clip, a token-level mean, dynamic sampling and a soft punishment of overlong responses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from posttrain.algorithms._policy_gradient import PolicyGradient
from posttrain.algorithms.base import State
from posttrain.ops.advantages import overlong_punishment
from posttrain.ops.weights import sequence_lengths
from posttrain.types import Batch, Group, Sampling, Selection


@dataclass(frozen=True, kw_only=True)
class DAPO(PolicyGradient):
    """Four changes to GRPO, for long reasoning:

        L      = -1 / T sum_i sum_t min(rho_it A_i, clip(rho_it, 1 - clip_low, 1 + clip_high) A_i)       over all T tokens
        A_i    = (R_i - mean(R)) / (std(R) + 1e-4),    R_i = r_i + R_length(y_i)
        R_length(y) = 0 up to l_max - l_cache tokens, then ((l_max - l_cache) - |y|) / l_cache, and -1 from l_max on

    Clip-higher lets rare tokens grow. There is no KL. `dynamic` sampling trains only on prompts whose samples differ in score
    before the length punishment (0 < right < G in the paper), and asks for as many new prompts as it dropped; after a bounded
    number of rounds the step trains on the groups that it has. `l_max` and `l_cache` count tokens of the response: set l_max to the
    limit on new tokens (both 0: no punishment); the defaults are the paper's. `truncated = "mask"` is the paper's overlong
    filtering.
    Use it for long reasoning with a verifier, where many prompts are solved always or never.
    """

    paper = "Yu et al. 2025, arXiv:2503.14476"

    clip_high: float = 0.28
    dynamic: bool = True
    l_max: int = 20480
    l_cache: int = 4096

    def mistakes(self) -> Iterator[str]:
        yield from super().mistakes()
        if not (0 < self.l_cache <= self.l_max or self.l_cache == self.l_max == 0):
            given = f"not {self.l_cache} with l_max {self.l_max}"
            yield f"l_cache must lie in [1, l_max], {given}; both 0 punish no length"

    def warnings(self, sampling: Sampling) -> tuple[str, ...]:
        free, limit = self.l_max - self.l_cache, sampling.max_new_tokens
        if not self.l_max or limit > free:
            return ()
        begins = f"the punishment begins after l_max - l_cache = {free}; set l_max to max_new_tokens, or both to 0"
        return (f"no response of {limit} tokens or fewer is overlong: {begins}",)

    def select(self, groups: Sequence[Group], state: State) -> Selection:
        found = super().select(groups, state)
        if not self.dynamic:
            return found
        teaching = tuple(group for group in groups if not self.zero_variance(group))
        return replace(found, groups=teaching, refill=len(groups) - len(teaching))

    def rewards(self, step: Batch, mask_T: Tensor) -> Tensor:
        reward_N = super().rewards(step, mask_T)
        if not self.l_max:
            return reward_N
        length_N = sequence_lengths(mask_T, step.sequence_T, step.sequences)
        return reward_N + overlong_punishment(length_N, self.l_max, self.l_cache).to(reward_N.dtype)
