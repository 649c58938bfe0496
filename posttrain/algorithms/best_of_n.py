"""Best of N: sample N responses, keep the best by reward, and learn it by maximum likelihood."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from posttrain.algorithms._imitation import Imitation
from posttrain.algorithms.base import State
from posttrain.errors import TwoOrMore
from posttrain.ops.kl import best_of_n_kl
from posttrain.types import Group, Metric, Rollout, Selection


@dataclass(frozen=True, kw_only=True)
class BestOfN(Imitation):
    """Distil the policy's own best of N samples into it, prompt by prompt:

        y* = argmax_(y_1 .. y_N ~ pi) r(x, y),    L = - sum_t w_t log pi(y*_t | x, y*_<t),    w_t = 1 / T (token_mean)

    The target of one round is close to its start, whatever the reward: KL(best-of-N || pi) <= log N - (N - 1) / N (`ops/kl.py`), so
    how far a round can move is known before the run. Of several equal bests the first is kept, which favours none; a group without any
    score is left out. It has no critic and no reference, and cannot make a bad response less likely. On a problem that no sample solves
    it learns a wrong answer: use raft with a threshold there.
    Use it to make permanent what sampling N times and picking the best gives at every answer.
    """

    paper = "Stiennon et al. 2020, arXiv:2009.01325; Beirami et al. 2024, arXiv:2401.01879"

    # the paper's N
    group: Annotated[int, TwoOrMore(text="at least 2 (the best of one is any sample)")] = 8

    def select(self, groups: Sequence[Group], state: State) -> Selection:
        kept = [(group, best(group)) for group in groups]
        chosen = [(group, rollout) for group, rollout in kept if rollout is not None]
        best_sum = sum(r.score.value or 0.0 for _, r in chosen)
        # an upper bound on the KL of this round's target, per prompt; groups with failures are smaller
        bound = sum(best_of_n_kl(len(group.rewards)) for group, _ in chosen)
        metrics = (Metric("best", best_sum, len(chosen)), Metric("kl/best", bound, len(chosen)))
        return Selection(tuple(Group(group.problem, (r,)) for group, r in chosen), metrics=metrics)


def best(group: Group) -> Rollout | None:
    """The rollout with the highest score, the first of equals; None if no rollout has a score."""
    scored = [r for r in group.rollouts if r.score.value is not None]
    return max(scored, key=lambda r: r.score.value or 0.0) if scored else None
