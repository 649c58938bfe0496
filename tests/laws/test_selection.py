"""Properties of the selection from a step's rollouts, for every online algorithm of the catalogue."""

from __future__ import annotations

import pytest
import torch
from material_for_tests import CASES, group, parted, rollout, segment

from posttrain.algorithms.base import Algorithm
from posttrain.train.pack import pack_groups
from posttrain.types import Batch, Group, Sampling

SAMPLING = [case for case in CASES if case.values[0].learns_from == "rollouts"]
# those whose responses are all sampled alike; else the first is one that the others are compared with (test_remax.py)
ALIKE = [case for case in SAMPLING if len(set(case.values[0].samples(Sampling()))) == 1]


def step(failed: bool) -> list[Group]:
    """Two prompts; where `failed`, two more responses that could not be scored, and a prompt of which none could."""
    scored = {"p0": [1.0, 0.0, 0.5], "p1": [0.0, 1.0]}
    made = []
    for name, rewards in scored.items():
        members = [
            rollout([segment([5, 6], False), segment([7 + n] * (n + 1), True)], r, name, n) for n, r in enumerate(rewards)
        ]
        lost = [rollout([segment([5, 6], False), segment([20 + n] * 4, True)], None, name, 8 + n) for n in range(2)]
        made.append(group([lost[0], *members, lost[1]] if failed else members, name))
    nothing = [rollout([segment([5, 9], False), segment([22] * 3, True)], None, "p2", n) for n in range(2)]
    return [*made, group(nothing, "p2")] if failed else made


def prepared(algorithm: Algorithm, groups: list[Group]) -> Batch:
    together = algorithm.unit in ("pair", "ranking")
    batch = pack_groups(algorithm.select(groups, algorithm.start()).groups, 1.0, together=together)
    zeros_T = torch.zeros(batch.tokens)
    steps_T = batch.reward_N[batch.sequence_T].where(batch.mask_T, torch.nan)
    return algorithm.prepare(
        parted(batch).replace(
            reference_T=zeros_T - 0.5, proximal_T=zeros_T, teacher_T=zeros_T - 0.5, value_T=zeros_T, step_T=steps_T
        ),
        algorithm.start(),
    )


def weights(batch: Batch) -> dict[int, list[float]]:
    """The weight of every token that carries loss, by its id: each response has one of its own."""
    weight_T = batch.weight_T if "weight_T" in batch.columns else batch.weight_N[batch.sequence_T]
    found: dict[int, list[float]] = {}
    for token, weight, loss in zip(batch.ids_T.tolist(), weight_T.tolist(), batch.mask_T.tolist(), strict=True):
        if loss:
            found.setdefault(token, []).append(weight)
    return found


@pytest.mark.proves("unscored")
@pytest.mark.parametrize("algorithm", ALIKE)
def test_an_unscored_rollout_does_not_change_the_selection(algorithm: Algorithm) -> None:
    """Not trained on, not counted, and nobody else weighs less for it, whichever way rollouts are selected."""
    without, with_failures = weights(prepared(algorithm, step(False))), weights(prepared(algorithm, step(True)))
    assert without and all(token < 20 for token in with_failures)
    assert with_failures.keys() == without.keys()
    for token, values in without.items():
        assert with_failures[token] == pytest.approx(values, rel=1e-6), f"response of {token}s"


@pytest.mark.parametrize("algorithm", SAMPLING)
def test_a_step_in_which_nothing_could_be_scored_has_no_loss(algorithm: Algorithm) -> None:
    nothing = step(True)[-1:]
    kept = algorithm.select(nothing, algorithm.start()).groups
    if kept:
        assert not bool(prepared(algorithm, nothing).mask_T.any())
