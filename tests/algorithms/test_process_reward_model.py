"""Process reward models: cross-entropy at the ends of steps by hand and by NumPy, and a rule about steps learned."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from material_for_tests import VOCABULARY, small_policy
from torch import Tensor

from posttrain.algorithms.process_reward_model import ProcessRewardModel
from posttrain.errors import UserError
from posttrain.models.scorer import from_policy
from posttrain.train.forward import scores
from posttrain.train.optimizer import Optimization
from posttrain.train.pack import pack_examples
from posttrain.train.trainer import Trainer
from posttrain.types import Batch, Example, Outputs, Terms

NAN = float("nan")


def labelled(*rows: list[float]) -> Batch:
    """One sequence for each row: a prompt token, then a token for each label; NaN where no step ends."""
    examples = [
        Example(np.full(len(row) + 1, 3 + n), np.arange(len(row) + 1) > 0, steps=np.array([NAN, *row], np.float32))
        for n, row in enumerate(rows)
    ]
    return pack_examples(examples)


def outputs(score_T: list[float] | Tensor) -> Outputs:
    tensor = torch.as_tensor(score_T, dtype=torch.float64)
    return Outputs(torch.zeros(len(tensor)), torch.zeros(len(tensor)), score_T=tensor)


def total(terms: Terms) -> Tensor:
    return torch.stack([(t.weight * t.loss).sum() for t in terms.terms]).sum()


STEP = ([NAN, 1.0, 0.0], [0.25])
SCORES = [NAN, math.inf, 2.0, -1.0, NAN, 0.5]  # NaN and infinity where no step ends


def entropy(score: float, label: float) -> float:
    p = 1 / (1 + math.exp(-score))
    return -label * math.log(p) - (1 - label) * math.log(1 - p)


@pytest.mark.proves("value")
@pytest.mark.parametrize(("reduction", "weights"), [("token_mean", [1 / 3] * 3), ("sequence_mean", [1 / 4, 1 / 4, 1 / 2])])
def test_by_hand(reduction: str, weights: list[float]) -> None:
    algorithm = ProcessRewardModel(reduction=reduction)
    prepared = algorithm.prepare(labelled(*STEP), {})
    assert prepared.mask_T.tolist() == [False, False, True, True, False, True]
    expected = [entropy(2.0, 1.0), entropy(-1.0, 0.0), entropy(0.5, 0.25)]
    assert expected[:2] == pytest.approx([0.126928011, 0.313261688])
    found = total(algorithm.terms(outputs(SCORES), prepared))
    assert float(found) == pytest.approx(sum(w * e for w, e in zip(weights, expected, strict=True)), abs=1e-7)


def test_a_soft_label_is_a_mixture_and_its_minimum_is_there() -> None:
    """The loss is linear in the label, and smallest where sigmoid(score) is the label."""
    algorithm = ProcessRewardModel()

    def at(score: float, label: float) -> float:
        prepared = algorithm.prepare(labelled([label]), {})
        return float(total(algorithm.terms(outputs([0.0, score]), prepared)))

    for score in (-3.0, 0.4, 2.0):
        assert at(score, 0.3) == pytest.approx(0.3 * at(score, 1.0) + 0.7 * at(score, 0.0), abs=1e-7)
    best = math.log(0.25 / 0.75)
    assert at(best, 0.25) < min(at(best - 0.01, 0.25), at(best + 0.01, 0.25))
    assert at(0.0, 0.25) == pytest.approx(math.log(2), abs=1e-9)


@pytest.mark.proves("extremes")
def test_finite_differences_and_no_overflow() -> None:
    algorithm = ProcessRewardModel()
    prepared = algorithm.prepare(labelled([1.0, NAN, 0.4], [0.0, 1.0]), {})
    score_T = torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.autograd.gradcheck(lambda s: total(algorithm.terms(outputs(s), prepared)), (score_T,), eps=1e-6, atol=1e-6)
    far = torch.tensor([NAN, -1e4, NAN, 1e4, NAN, 1e4, -1e4], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(total(algorithm.terms(outputs(far), prepared)), far)
    assert slope.tolist() == pytest.approx([0, -1 / 4, 0, 0.6 / 4, 0, 1 / 4, -1 / 4], abs=1e-7)


@pytest.mark.proves("value")
def test_metrics_by_hand() -> None:
    """Steps: right, right | wrong found too late | a first error where there is none | no labels at all. Of 7 steps 5 are judged as
    labelled, and of 3 solutions only the first has its first error, or lack of it, found."""
    step = labelled([1.0, 1.0], [1.0, 0.0, 0.0], [1.0, 1.0], [NAN, NAN])
    prepared = ProcessRewardModel().prepare(step, {})
    score_T = [9.0, 1.0, 2.0, 9.0, 1.0, 1.0, -1.0, 9.0, 3.0, -2.0, 9.0, 9.0, 9.0]
    terms = ProcessRewardModel().terms(outputs(score_T), prepared)
    found = {m.name: (float(m.total), float(m.count)) for m in terms.metrics if m.count is not None}
    assert found == {"accuracy": (5.0, 7.0), "accuracy/first_error": (1.0, 3.0), "score": (5.0, 7.0)}


@pytest.mark.proves("refusals")
def test_refusals() -> None:
    with pytest.raises(UserError, match="^process_reward_model: these examples have no labels of steps$"):
        ProcessRewardModel().prepare(pack_examples([Example(np.array([3, 4]), np.array([False, True]))]), {})
    with pytest.raises(UserError, match=r"^process_reward_model: a label lies in \[0, 1\], not \[1.5\]$"):
        ProcessRewardModel().prepare(labelled([0.0, 1.5]), {})
    with pytest.raises(UserError, match="^process_reward_model: reduction must be token_mean or sequence_mean, not 'x'$"):
        ProcessRewardModel(reduction="x")
    assert ProcessRewardModel.trains == "scorer" and ProcessRewardModel.learns_from == "step_labels"


@pytest.mark.proves("learns")
def test_it_learns_which_steps_are_right() -> None:
    """Steps of two tokens, right where the second is above the first; held-out steps from chance to nearly all judged right."""
    generator = np.random.default_rng(0)

    def solution() -> Example:
        ids = generator.integers(3, VOCABULARY, 9)
        label_T = np.full(9, NAN, np.float32)
        label_T[2::2] = ids[2::2] > ids[1::2]
        return Example(ids, np.arange(9) > 0, steps=label_T)

    held_out = pack_examples([solution() for _ in range(100)])
    scorer = from_policy(small_policy(dtype=torch.float32), zero=False)
    algorithm = ProcessRewardModel()
    trainer = Trainer(scorer, algorithm, Optimization(lr=1e-2, warmup=5, schedule="cosine"))

    def accuracy() -> float:
        with torch.no_grad():
            terms = algorithm.terms(
                Outputs(torch.empty(0), torch.empty(0), score_T=scores(scorer, held_out)), algorithm.prepare(held_out, {})
            )
        return next(m.value for m in terms.metrics if m.name == "accuracy")

    before = accuracy()
    for number in range(150):
        fresh = pack_examples([solution() for _ in range(24)])
        trainer.update(algorithm.prepare(fresh, {}), trainer.settings.rate(number, 150))
    after = accuracy()
    assert before < 0.65
    assert after > 0.85
