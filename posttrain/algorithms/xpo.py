"""Exploratory preference optimisation: online DPO with a bonus for responses that are unlikely under the reference."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch

from posttrain.algorithms.base import State
from posttrain.algorithms.online_dpo import OnlineDPO
from posttrain.errors import NotNegative, Range, TwoOrMore
from posttrain.ops.weights import sequence_lengths, sequence_sums
from posttrain.types import Batch, Group, Metric, Outputs, Selection, Term, Terms


@dataclass(frozen=True, kw_only=True)
class XPO(OnlineDPO):
    """Sample pairs of responses, prefer the one with the higher reward, and make responses of the reference less likely. This optimism
    makes the next samples explore what neither model has tried.

        L = sum_pairs w l(y_w, y_l) + alpha E_(y ~ ref) log pi(y | x)
        E_(y ~ ref) log pi(y | x) = E_(y ~ mu) [ ref(y | x) / mu(y | x) ] log pi(y | x)
          about 1/N sum_i min(max_weight, ref(y_i | x) / mu(y_i | x)) log pi(y_i | x)

    with l the pairwise loss of `loss`, a DPO unless another is named, and mu the policy that sampled. The paper draws y from the
    reference, and one member of each pair too. Here the policy samples both members, and importance weights estimate the expectation
    under the reference; they are exact up to the bound `max_weight` and need no second sampler. Samples are paired in the order they
    were drawn. A pair with equal rewards has no preference and takes part in the bonus alone. The bonus has no lower bound by itself;
    the preferences limit it, so alpha is small (the paper: 1e-5 and 5e-6). alpha = 0 is online DPO on pairs.
    Use it where online DPO stops at the best of what the first model already says.
    """

    paper = "Xie et al. 2024, arXiv:2405.21046"

    group: Annotated[int, TwoOrMore(text="at least 2 and even (responses are paired)")] = 2
    alpha: NotNegative = 1e-5  # coefficient of the bonus
    max_weight: Annotated[float, Range(ge=1)] = 10.0  # bound of ref / mu

    def mistakes(self) -> Iterator[str]:
        if self.group % 2:
            yield f"group must be even, as responses are paired, not {self.group}"
        yield from super().mistakes()

    @property
    def roles(self) -> frozenset[str]:
        return super().roles | {"reference"}

    def select(self, groups: Sequence[Group], state: State) -> Selection:
        scored = [(g, [r for r in g.rollouts if r.score.value is not None]) for g in groups]
        pairs = [
            Group(g.problem, pair)
            for g, valid in scored
            for pair in zip(valid[::2], valid[1::2], strict=False)
        ]
        tied = sum(len(set(pair.rewards)) < 2 for pair in pairs)
        return Selection(tuple(pairs), metrics=(Metric("pairs/tied", tied, len(pairs)),))

    def prepare(self, step: Batch, state: State) -> Batch:
        scored_N, sequence_T, count = torch.isfinite(step.reward_N), step.sequence_T, step.sequences
        # pairs with equal rewards keep their tokens, for the bonus
        mask_T = step.mask_T & scored_N[sequence_T]
        ratio_T = step.reference_T.where(mask_T, 0.0) - step.behaviour_T.where(mask_T, 0.0)
        ratio_N = sequence_sums(ratio_T, mask_T, sequence_T, count)
        ratio_N = ratio_N.clamp(max=math.log(self.max_weight))
        filled_N = sequence_lengths(mask_T, sequence_T, count) > 0
        bonus_N = ratio_N.exp().where(filled_N, 0.0) / filled_N.sum().clamp(min=1)
        return super().prepare(step, state).replace(mask_T=mask_T, bonus_N=bonus_N)

    def terms(self, outputs: Outputs, batch: Batch) -> Terms:
        found, logprob_T = super().terms(outputs, batch), outputs.logprob_T
        logprob_N = sequence_sums(logprob_T, batch.mask_T, batch.sequence_T, batch.sequences)
        bonus = Term("exploration", logprob_N, self.alpha * batch.bonus_N)
        return Terms((*found.terms, bonus), found.metrics)
