"""Group relative policy optimisation: the group is the baseline, no critic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from posttrain.algorithms._policy_gradient import PolicyGradient, Reduction, Supervision
from posttrain.algorithms.base import State
from posttrain.errors import NotNegative
from posttrain.types import Batch


@dataclass(frozen=True, kw_only=True)
class GRPO(PolicyGradient):
    """Sample G responses a prompt, score them, and push up those above their group's mean:

        A_i = (r_i - mean(r)) / (std(r) + epsilon)
        L   = sum_i sum_t w_it [ -min(rho_it A_i, clip(rho_it, 1 - clip_low, 1 + clip_high) A_i) + beta KL_it ]
        rho_it = pi(y_it | x, y_i<t) / mu(y_it | x, y_i<t),    w_it = 1 / (N |y_i|)

    with mu the policy that sampled. `supervision = "process"` takes the rewards of steps instead (section 4.1.3): all step rewards
    of a group are normalised together, and a token's advantage is the sum over the steps that end at it or later. `kl` names the
    estimator (see ops/kl.py: the paper's k3 has the gradient of the forward KL; `corrected` has that of the reverse KL).
    `scale = "none"` and `reduction = "constant_mean"` remove the biases that Dr. GRPO points out; `reduction = "token_mean"` and a
    larger `clip_high` are DAPO's. beta = 0 needs no reference model. The paper does not say how std divides: `ddof = 1` is torch's.
    A response cut off by the length limit stays in the loss and in its group's baseline, judged by its reward like any other.
    Use it with verifiable rewards, where several samples of a prompt differ in score.
    """

    paper = "Shao et al. 2024 (DeepSeekMath), arXiv:2402.03300"

    beta: NotNegative = 0.04
    scale: Literal["group", "batch", "none"] = "group"
    ddof: Literal[0, 1] = 1
    epsilon: NotNegative = 1e-4
    supervision: Supervision = "outcome"
    reduction: Reduction = "sequence_mean"

    def mistakes(self) -> Iterator[str]:
        yield from super().mistakes()
        yield from self.supervision_mistakes(self.supervision)

    @property
    def learns_steps(self) -> bool:
        return self.supervision != "outcome"

    def advantages(self, step: Batch, mask_T: Tensor, state: State) -> Tensor:
        scaling = {"scale": self.scale, "ddof": self.ddof, "epsilon": self.epsilon}
        return self.group_relative(step, mask_T, self.supervision, **scaling)
