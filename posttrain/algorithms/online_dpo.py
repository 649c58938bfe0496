"""Online DPO: pairs from the policy's own samples, the best against the worst of each group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from posttrain.algorithms.base import Algorithm, State
from posttrain.algorithms.dpo import DPO
from posttrain.errors import TwoOrMore
from posttrain.types import Batch, Group, Metric, Outputs, Rollout, Selection, Terms


@dataclass(frozen=True, kw_only=True)
class OnlineDPO(Algorithm):
    """Sample G responses a prompt, score them, and learn from the pair of the best and the worst:

        y_w = argmax_i r(y_i),    y_l = argmin_i r(y_i),    L = sum_pairs w l(y_w, y_l),    w = 1 / P

    with l the pairwise loss of `loss`, a DPO unless another is named (ipo, simpo, orpo). Responses without a score are ignored; a group
    whose rewards are all equal is dropped and counted. With G = 2 this is the paper's method; a larger group makes the pair differ
    more. With `loss.labels = "soft"` the optimum is ref exp(r / beta), that of RL with a KL penalty.
    Use it where a reward can score samples, but PPO's critic is too much: pairs stay on-policy, which offline pairs do not.
    """

    paper = "Guo et al. 2024, arXiv:2402.04792"
    unit = "pair"

    group: Annotated[int, TwoOrMore(text="at least 2 (a pair needs two responses)")] = 8
    loss: Algorithm = field(default_factory=DPO)

    def mistakes(self) -> Iterator[str]:
        if self.loss.learns_from != "pairs" or self.loss.trains != "policy":
            yield f"loss must learn a policy from pairs, as dpo does, unlike {type(self.loss).__name__}"

    @property
    def roles(self) -> frozenset[str]:
        return self.loss.roles

    def select(self, groups: Sequence[Group], state: State) -> Selection:
        pairs = [Group(g.problem, pair) for g in groups if (pair := best_and_worst(g)) is not None]
        tied = Metric("groups/tied", len(groups) - len(pairs), len(groups))
        return Selection(tuple(pairs), metrics=(tied,))

    def prepare(self, step: Batch, state: State) -> Batch:
        return self.loss.prepare(step, state)

    def terms(self, outputs: Outputs, batch: Batch) -> Terms:
        return self.loss.terms(outputs, batch)


def best_and_worst(group: Group) -> tuple[Rollout, Rollout] | None:
    """The rollouts with the highest and the lowest reward, the first of equals; None if all rewards are equal or fewer than two."""
    scored = [(r.score.value, r) for r in group.rollouts if r.score.value is not None]
    if not scored or max(v for v, _ in scored) == min(v for v, _ in scored):
        return None
    return max(scored, key=lambda pair: pair[0])[1], min(scored, key=lambda pair: pair[0])[1]
