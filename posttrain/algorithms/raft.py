"""Reward-ranked fine-tuning: rejection sampling, then maximum likelihood on the accepted responses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Annotated

from posttrain.algorithms._imitation import Imitation
from posttrain.algorithms.base import State
from posttrain.errors import Range
from posttrain.types import Group, Metric, Rollout, Selection


@dataclass(frozen=True, kw_only=True)
class RAFT(Imitation):
    """Sample G responses a prompt, accept the top share of them that reach a threshold, imitate the accepted:

        A_x = {y : r(x, y) >= threshold and rank(y) <= ceil(share * G)},    L = - sum_(x, y in A_x) sum_t w_t log pi(y_t | x, y_<t)

    w_t = 1 / T over all accepted tokens of the step (token_mean). `share = 1 / G` is the paper's best of G; `share = 1` with
    `threshold = 1` is rejection sampling on a verifier: every right answer is learned, as in expert iteration. Without a threshold
    the best of a bad group is learned too. Equal scores rank in the order they were sampled. If a step accepts nothing, its update is
    skipped. The method is simple and stable, but learns nothing from rejected responses.
    Use it as a first stage before RL, or instead of it where one model and few samples must do.
    """

    paper = "Dong et al. 2023, arXiv:2304.06767"

    share: Annotated[float, Range(gt=0, le=1)] = 0.25
    # the smallest reward that is accepted; None: any
    threshold: Annotated[float, Range(text="a finite reward")] | None = None

    def mistakes(self) -> Iterator[str]:
        if self.threshold is None and ceil(self.share * self.group) == self.group:
            kept = f"with no threshold and all {self.group} samples of a group kept"
            yield f"{kept}, nothing is rejected and nothing is learned; lower share, or set threshold"

    def accepted(self, group: Group) -> tuple[Rollout, ...]:
        """The top share of a group's scored rollouts, without those below the threshold, in the order they were sampled."""
        values = [rollout.score.value for rollout in group.rollouts]
        scored = [(value, n) for n, value in enumerate(values) if value is not None]
        size = ceil(round(self.share * len(scored), 6))  # 0.28 * 25 is above 7 in floating point
        top = sorted(scored, key=lambda pair: (-pair[0], pair[1]))[:size]
        chosen = sorted(n for value, n in top if self.threshold is None or value >= self.threshold)
        return tuple(group.rollouts[n] for n in chosen)

    def select(self, groups: Sequence[Group], state: State) -> Selection:
        kept = [Group(g.problem, chosen) for g in groups if (chosen := self.accepted(g))]
        rollouts, accepted = (sum(len(g.rollouts) for g in some) for some in (groups, kept))
        metrics = (
            Metric("accepted", accepted, rollouts),
            Metric("reward/accepted", sum(sum(group.rewards) for group in kept), accepted),
        )
        return Selection(tuple(kept), metrics=metrics)
