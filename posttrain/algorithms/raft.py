"""Reward-ranked fine-tuning: rejection sampling, then maximum likelihood on what was accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import ClassVar

from posttrain.algorithms.base import Algorithm, State
from posttrain.errors import require
from posttrain.ops.weights import reduction
from posttrain.types import Batch, Group, Metric, Outputs, Rollout, Selection, Term, Terms


@dataclass(frozen=True, kw_only=True)
class RAFT(Algorithm):
    """Sample G responses a prompt, accept the top share of them that reach a threshold, imitate the accepted:

        A_x = {y : r(x, y) >= threshold and rank(y) <= ceil(share * G)},    L = - sum_(x, y in A_x) sum_t w_t log pi(y_t | x, y_<t)

    w_t = 1 / T over all accepted tokens of the step (token_mean). `share = 1 / G` is the paper's best of G; `share = 1` with
    `threshold = 1` is rejection sampling on a verifier: every right answer is learned, as in expert iteration. Without a threshold
    the best of a bad group is learned too. Equal scores rank in the order they were sampled. A step in which
    nothing is accepted moves nothing. Simple and stable, and blind to why the rejected failed.
    Use it as a first stage before RL, or instead of it where one model and few samples must do.
    """

    paper: ClassVar[str] = "Dong et al. 2023, arXiv:2304.06767"

    group: int = 8
    share: float = 0.25
    threshold: float | None = None  # least reward that is accepted; None: any
    reduction: str = "token_mean"

    def __post_init__(self) -> None:
        require(self.group >= 1, f"raft: group must be at least 1, not {self.group}")
        require(0 < self.share <= 1, f"raft: share must lie in (0, 1], not {self.share}")
        nothing = self.threshold is None and ceil(self.share * self.group) == self.group
        require(
            not nothing,
            f"raft: with no threshold and all {self.group} samples of a group kept, nothing is rejected and nothing "
            "is learned; lower share, or set threshold",
        )
        finite = self.threshold is None or abs(self.threshold) < float("inf")
        require(
            finite,
            f"raft: threshold must be a finite reward, or null for none, not {self.threshold}",
        )
        self.choose("reduction", ("token_mean", "sequence_mean"))

    def accepted(self, group: Group) -> tuple[Rollout, ...]:
        """The top share of a group's scored rollouts, as far as they reach the threshold; in the order they were sampled."""
        scored = [
            (r.score.value, n) for n, r in enumerate(group.rollouts) if r.score.value is not None
        ]
        top = sorted(scored, key=lambda pair: (-pair[0], pair[1]))[: ceil(self.share * len(scored))]
        chosen = sorted(n for value, n in top if self.threshold is None or value >= self.threshold)
        return tuple(group.rollouts[n] for n in chosen)

    def select(self, groups: Sequence[Group], state: State) -> Selection:
        kept = [
            Group(group.problem, chosen) for group in groups if (chosen := self.accepted(group))
        ]
        rollouts, accepted = (
            sum(len(group.rollouts) for group in groups),
            sum(len(group.rollouts) for group in kept),
        )
        metrics = (
            Metric("accepted", accepted, rollouts),
            Metric("reward/accepted", sum(sum(group.rewards) for group in kept), accepted),
        )
        # with nothing accepted the first group stands in, and `prepare` leaves it without loss
        return Selection(tuple(kept) or tuple(groups[:1]), metrics=metrics)

    def prepare(self, step: Batch, state: State) -> Batch:
        taken_N = (
            step.valid_N
            if self.threshold is None
            else step.valid_N & (step.reward_N >= self.threshold)
        )
        mask_T = step.mask_T & taken_N[step.sequence_T]
        return step.replace(
            mask_T=mask_T,
            weight_T=reduction(self.reduction, mask_T, step.sequence_T, step.sequences),
        )

    def terms(self, outputs: Outputs, batch: Batch) -> Terms:
        assert batch.weight_T is not None
        loss_T = (-outputs.logprob_T).where(batch.mask_T, 0.0)
        metrics = (Metric("nll", loss_T.detach().sum(), batch.mask_T.sum()),)
        return Terms((Term("nll", loss_T, batch.weight_T),), metrics)
