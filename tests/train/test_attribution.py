"""The parts of a gradient: those of units sum to the step's, those of tokens to their unit's; what is planted is the largest."""

from __future__ import annotations

import pytest
import torch
from material_for_tests import CASES, material, shared_policy, shared_trainer, small_policy, trainer_for

from posttrain.algorithms.base import Algorithm
from posttrain.algorithms.grpo import GRPO
from posttrain.algorithms.ppo import PPO
from posttrain.train import attribution
from posttrain.train.attribution import dot, gradient, norm, token_spans, unit_parts, whole_gradient
from posttrain.train.optimizer import Optimization
from posttrain.train.pack import take, unit_ends


@pytest.mark.parametrize("algorithm", CASES)
def test_parts_of_units_and_tokens_sum_to_the_gradient(algorithm: Algorithm) -> None:
    trainer, prepared = shared_trainer(algorithm), algorithm.prepare(material(algorithm), {})
    if "policy" in prepared.resting:
        pytest.skip("nothing moves the policy")
    whole = whole_gradient(trainer, prepared)
    parts = list(unit_parts(trainer, prepared, whole))
    assert [part.last for part in parts] == unit_ends(prepared)
    assert sum(part.share for part in parts) == pytest.approx(1, abs=1e-9)
    largest = max(parts, key=lambda part: abs(part.share))
    spans = token_spans(trainer, prepared, largest, whole)
    assert sum(span.share for span in spans) == pytest.approx(largest.share, abs=1e-9)


def test_the_gradients_of_units_add_up_to_that_of_the_step() -> None:
    """Not their shares alone: every number of the vector, in float64."""
    algorithm = GRPO()
    trainer = trainer_for(algorithm, small_policy(), Optimization(token_budget=20), shared_policy(1))
    prepared = algorithm.prepare(material(algorithm), {})
    whole, total = whole_gradient(trainer, prepared), dict[str, torch.Tensor]()
    for n in range(prepared.sequences):
        piece = take(prepared, n, n + 1)
        own = gradient(trainer, lambda piece=piece: trainer.forward_backward(piece))  # type: ignore[misc]
        total = {name: total.get(name, 0) + grad for name, grad in own.items()}
    assert norm(whole) > 0 and total.keys() == whole.keys()
    assert all(torch.allclose(total[name], whole[name], rtol=0, atol=1e-9) for name in whole)
    assert not any(list(learner.optimizer.gradients()) for learner in trainer.learners), "none is left behind"


def test_the_planted_sequence_has_the_largest_share() -> None:
    algorithm = GRPO(beta=0.0)
    trainer, prepared = shared_trainer(algorithm), algorithm.prepare(material(algorithm), {})
    advantage_T = prepared.advantage_T.where(prepared.sequence_T != 2, 50.0)
    planted = prepared.replace(advantage_T=advantage_T)
    parts = list(unit_parts(trainer, planted, whole_gradient(trainer, planted)))
    assert max(parts, key=lambda part: part.share).first == 2
    assert parts[2].share > 0.8


def test_of_ppo_the_parts_are_those_of_the_policy_alone() -> None:
    algorithm = PPO(group=4)
    trainer, prepared = shared_trainer(algorithm), algorithm.prepare(material(algorithm), {})
    whole = whole_gradient(trainer, prepared)
    louder = prepared.replace(return_T=prepared.return_T + 100)  # the critic's loss
    assert dot(whole, whole) == dot(*[whole_gradient(trainer, louder)] * 2)


def test_many_tokens_are_taken_together(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = GRPO(beta=0.0)
    trainer, prepared = shared_trainer(algorithm), algorithm.prepare(material(algorithm), {})
    whole = whole_gradient(trainer, prepared)
    part = max(unit_parts(trainer, prepared, whole), key=lambda part: prepared.starts[part.last] - prepared.starts[part.first])
    alone = token_spans(trainer, prepared, part, whole)
    monkeypatch.setattr(attribution, "MAX_SPANS", 2)
    spans = token_spans(trainer, prepared, part, whole)
    assert len(alone) > 2 >= len(spans)
    assert (spans[0].first, spans[-1].last) == (alone[0].first, alone[-1].last)
    assert sum(span.share for span in spans) == pytest.approx(part.share, abs=1e-9)


def test_parts_are_summed_in_float32_where_weights_are_narrower() -> None:
    algorithm = GRPO(beta=0.0)
    trainer = trainer_for(algorithm, small_policy(dtype=torch.bfloat16), Optimization(token_budget=20))
    prepared = algorithm.prepare(material(algorithm), {})
    whole = whole_gradient(trainer, prepared)
    assert {grad.dtype for grad in whole.values()} == {torch.float32}
    assert sum(part.share for part in unit_parts(trainer, prepared, whole)) == pytest.approx(1, abs=0.02)
