"""Coefficients that do nothing are found; those that act, in whatever way, are not blamed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from material_for_tests import CASES, material, shared_policy, trainer_for

from posttrain.algorithms.base import Algorithm, Reuse, State
from posttrain.algorithms.grpo import GRPO
from posttrain.algorithms.ppo import PPO
from posttrain.monitor.coefficients import coefficients, dead_coefficients
from posttrain.ops.weights import reduction
from posttrain.train.optimizer import Optimization
from posttrain.types import Batch, Metric, Outputs, Term, Terms


def dead(algorithm: Algorithm) -> list[str] | None:
    step = material(algorithm)
    with torch.no_grad():
        outputs = trainer_for(algorithm, shared_policy(), Optimization()).outputs(step)
    found = algorithm.terms(outputs, algorithm.prepare(step, algorithm.start())).metrics
    reward = Metric("reward", 3.0, 7)
    return dead_coefficients(
        algorithm, step, outputs, algorithm.start(), metrics=(*found, reward, Metric("responses", 7, None))
    )


@pytest.mark.parametrize("algorithm", CASES)
def test_no_shipped_setting_is_blamed(algorithm: Algorithm) -> None:
    """But for those that act on the groups, which this material does not have: which of them to keep. With one update a rollout and a
    correction the ratio is 1, and a clip has nothing to cut."""
    corrected = getattr(algorithm, "correction", "none") != "none" or getattr(algorithm, "mask_high", 0.0)
    again = replace(algorithm, epochs=2) if corrected and hasattr(algorithm, "epochs") else algorithm
    assert set(dead(again) or ()) <= {"share", "threshold"}


@dataclass(frozen=True, kw_only=True)
class Odd(Algorithm):
    """Coefficients that act in several ways, and one that does not."""

    learns_from: ClassVar[str] = "demonstrations"
    plain: float = 1.5
    below: float = 0.3  # cuts log-prob differences, as a clip does
    forgotten: float = 0.5
    unused: float = 0.0  # not set
    moving: float = 0.9  # in the state alone
    chosen: float = 2.0  # in the selection alone
    stopping: float = 0.2  # in `enough` alone

    def prepare(self, step: Batch, state: State) -> Batch:
        return step.replace(weight_T=reduction("token_mean", step.mask_T, step.sequence_T, step.sequences))

    def terms(self, outputs: Outputs, batch: Batch) -> Terms:
        logprob_T = outputs.logprob_T.where(batch.mask_T, 0.0)
        centred_T = logprob_T - logprob_T.detach().mean()
        loss_T = -self.plain * centred_T.clamp(-self.below, self.below) + 0.0 * self.forgotten * logprob_T
        return Terms((Term("nll", loss_T, batch.weight_T),))

    def finish(self, state: State, metrics: object) -> State:
        return {"mean": self.moving * 0.5}

    @property
    def reuse(self) -> Reuse:
        return Reuse(metric="reward", limit=self.stopping)

    def start(self) -> State:
        return {"chosen": self.chosen}


def test_one_that_is_multiplied_away_is_found_and_the_others_are_not() -> None:
    assert coefficients(Odd()) == ["plain", "below", "forgotten", "moving", "chosen", "stopping"]
    assert dead(Odd()) == ["forgotten"]


def test_defaults_of_shipped_algorithms_are_left_to_the_tests() -> None:
    assert coefficients(GRPO()) == [] and coefficients(GRPO(beta=0.1, clip_low=0.3)) == ["clip_low", "beta"]


@dataclass(frozen=True, kw_only=True)
class Variant(GRPO):
    """A user's variant of GRPO that does not scale, so that the inherited epsilon does nothing."""

    gain: float = 2.0
    clip_high: float = 0.28

    def advantages(self, step: Batch, mask_T: torch.Tensor, state: State) -> torch.Tensor:
        return self.gain * self.group_relative(step, mask_T, scale="none")


def test_a_variant_of_a_shipped_algorithm_is_checked_in_what_it_sets() -> None:
    assert coefficients(Variant()) == ["clip_high", "gain"] and dead(Variant()) == []


def test_where_no_response_is_better_than_another_the_check_waits() -> None:
    """The KL alone has a gradient then, and no setting of the advantages could change it."""
    flat = material(Variant()).replace(reward_N=torch.ones(11))
    with torch.no_grad():
        outputs = trainer_for(Variant(), shared_policy(), Optimization()).outputs(flat)
    assert dead_coefficients(Variant(), flat, outputs, {}) is None


def test_a_step_without_a_gradient_says_nothing() -> None:
    flat = material(GRPO(beta=0.0)).replace(reward_N=torch.ones(11))
    outputs = Outputs(torch.zeros(flat.tokens), torch.zeros(flat.tokens))
    assert dead_coefficients(GRPO(beta=0.0, clip_low=0.1), flat, outputs, {}) is None


def test_while_a_critic_warms_up_the_policys_settings_wait() -> None:
    algorithm = PPO(critic_warmup=3, clip=0.1)
    assert dead(algorithm) is None
    step = material(algorithm)
    with torch.no_grad():
        outputs = trainer_for(algorithm, shared_policy(), Optimization()).outputs(step)
    later = {**algorithm.start(), "steps": 3}
    assert dead_coefficients(algorithm, step, outputs, later) == []
