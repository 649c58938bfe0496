"""Bradley-Terry reward models: numbers by hand, an independent NumPy reference, properties, and a preference learned."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
import torch
from material_for_tests import VOCABULARY, material, small_policy
from torch import Tensor

from posttrain.algorithms.reward_model import RewardModel, preferences
from posttrain.errors import UserError
from posttrain.models.scorer import from_policy
from posttrain.train.optimizer import Optimization
from posttrain.train.pack import micro_batches, pack_examples, with_loss
from posttrain.train.rating import last_scores
from posttrain.train.trainer import Trainer
from posttrain.types import Batch, Example, Outputs, Terms

LOG2 = math.log(2)
NAN = float("nan")


def labelled(*units: list[float], length: int = 3) -> Batch:
    """Sequences of `length` tokens with the given labels, unit by unit."""
    examples = [
        Example(np.full(length, 3 + n), np.arange(length) > 0, number, label)
        for number, labels in enumerate(units)
        for n, label in enumerate(labels)
    ]
    return pack_examples(examples)


def outputs(score_N: list[float] | Tensor, batch: Batch, junk: float = NAN) -> Outputs:
    """Scores at the last tokens; elsewhere `junk`, which nobody may read."""
    last = torch.tensor(batch.starts[1:]) - 1
    score_T = torch.full((batch.tokens,), junk, dtype=torch.float64)
    score_T = score_T.index_copy(0, last, torch.as_tensor(score_N, dtype=torch.float64))
    return Outputs(torch.zeros(batch.tokens), torch.zeros(batch.tokens), score_T=score_T)


def total(terms: Terms, name: str | None = None) -> Tensor:
    return torch.stack([(t.weight * t.loss).sum() for t in terms.terms if name in (None, t.name)]).sum()


def loss(algorithm: RewardModel, score_N: list[float] | Tensor, step: Batch) -> Tensor:
    prepared = algorithm.prepare(step, {})
    return total(algorithm.terms(outputs(score_N, prepared), prepared))


def by_numpy(scores: list[float], labels: list[list[float]], margin: bool, centring: float) -> float:
    """The docstring's equation, written with loops over pairs in float64."""
    flat, losses = iter(scores), []
    for unit in labels:
        own = [next(flat) for _ in unit]
        found = []
        for i, j in combinations(range(len(unit)), 2):
            if unit[i] != unit[j] and not math.isnan(unit[i] + unit[j]):
                a, b = (i, j) if unit[i] > unit[j] else (j, i)
                wanted = unit[a] - unit[b] if margin else 0.0
                found.append(np.log1p(np.exp(-(own[a] - own[b] - wanted))) + centring * (own[a] + own[b]) ** 2)
        if found:
            losses.append(np.mean(found))
    return float(np.mean(losses))


@pytest.mark.proves("value")
def test_by_hand() -> None:
    """One pair, scores 2 and 1: -log sigmoid(1) = log(1 + 1/e) = 0.3133; in the other order 1.3133."""
    step = labelled([1.0, 0.0])
    assert float(loss(RewardModel(), [2.0, 1.0], step)) == pytest.approx(0.31326168751822286, abs=1e-9)
    assert float(loss(RewardModel(), [1.0, 2.0], step)) == pytest.approx(1.3132616875182228, abs=1e-9)
    # labels 3 and 1 with a margin: -log sigmoid(1 - 2); centred: + 0.1 * (2 + 1)^2
    step = labelled([3.0, 1.0])
    assert float(loss(RewardModel(margin=True), [2.0, 1.0], step)) == pytest.approx(1.3132616875182228, abs=1e-9)
    assert float(loss(RewardModel(centring=0.1), [2.0, 1.0], step)) == pytest.approx(0.31326168751822286 + 0.9, abs=1e-7)


def test_the_properties_of_bradley_terry() -> None:
    step = labelled([1.0, 0.0], [2.0, 1.0, 0.0])
    assert float(loss(RewardModel(), [0.7] * 5, step)) == pytest.approx(LOG2, abs=1e-7)
    scores = [0.3, -1.2, 2.0, 0.1, 0.4]
    shifted = [s + 5.0 for s in scores]
    assert float(loss(RewardModel(), scores, step)) == pytest.approx(float(loss(RewardModel(), shifted, step)), abs=1e-12)
    assert float(loss(RewardModel(centring=0.01), scores, step)) < float(loss(RewardModel(centring=0.01), shifted, step))
    pair = labelled([1.0, 0.0])
    for margin in (0.2, 1.0, 30.0):  # L(m) - L(-m) = -m
        one, other = (float(loss(RewardModel(), [s, -s], pair)) for s in (margin / 2, -margin / 2))
        assert one - other == pytest.approx(-margin, abs=1e-9)


@pytest.mark.proves("extremes")
def test_no_difference_overflows() -> None:
    score_N = torch.tensor([-1e4, 1e4], dtype=torch.float64, requires_grad=True)
    value = loss(RewardModel(), score_N, labelled([1.0, 0.0]))
    (slope,) = torch.autograd.grad(value, score_N)
    assert float(value.detach()) == pytest.approx(2e4) and slope.tolist() == [-1.0, 1.0]


@pytest.mark.proves("value")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("margin", "centring"), [(False, 0.0), (True, 0.0), (False, 0.3), (True, 0.05)])
def test_against_numpy(seed: int, margin: bool, centring: float) -> None:
    """Pairs and rankings of several sizes, with ties, a missing label and a unit that prefers nothing."""
    generator = np.random.default_rng(seed)
    labels = [[1.0, 0.0], [0.5, 0.5], [3.0, 2.0, 2.0, 0.0], [1.0, NAN, 4.0], [2.0, 0.0, 1.0, 3.0, 4.0], [7.0]]
    scores = generator.normal(0, 2, sum(map(len, labels))).tolist()
    found = loss(RewardModel(margin=margin, centring=centring), scores, labelled(*labels))
    assert float(found) == pytest.approx(by_numpy(scores, labels, margin, centring), rel=1e-6)  # weights are float32


@pytest.mark.parametrize("algorithm", [RewardModel(), RewardModel(margin=True, centring=0.1)])
def test_finite_differences(algorithm: RewardModel) -> None:
    step = labelled([1.0, 0.0], [2.0, 0.5, 1.0, 1.0])
    score_N = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.autograd.gradcheck(lambda s: loss(algorithm, s, step), (score_N,), eps=1e-6, atol=1e-6)


def test_a_ranking_is_its_pairs() -> None:
    """K responses in one unit have the loss and gradient of the mean over K (K - 1) / 2 units of two."""
    score_N = torch.tensor([0.3, -1.0, 2.0, 0.7], dtype=torch.float64, requires_grad=True)
    rank = [3.0, 2.0, 1.0, 0.0]
    whole = loss(RewardModel(margin=True, centring=0.1), score_N, labelled(rank))
    pairs = list(combinations(range(4), 2))
    chosen = torch.tensor([i for pair in pairs for i in pair])
    apart = loss(RewardModel(margin=True, centring=0.1), score_N[chosen], labelled(*[[rank[i], rank[j]] for i, j in pairs]))
    assert float(whole.detach()) == pytest.approx(float(apart.detach()), rel=1e-6)
    ours, theirs = torch.autograd.grad(whole, score_N)[0], torch.autograd.grad(apart, score_N)[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_weights_are_exact() -> None:
    """Three units that prefer something: each pair of a unit with k of them weighs 1/(3k), and all of them together 1."""
    step = labelled([1.0, 0.0], [1.0, 1.0], [2.0, 1.0, 0.0], [0.0, 1.0, 1.0])
    prepared = RewardModel().prepare(step, {})
    assert prepared.weight_N is not None
    third = [1 / 3] * 2 + [0.0] * 2 + [1 / 9] * 3 + [1 / 6] * 3
    assert prepared.weight_N.tolist() == pytest.approx(third)
    terms = RewardModel().terms(outputs([0.0] * 10, prepared), prepared)
    assert float(terms.terms[0].weight.sum()) == pytest.approx(1.0, abs=1e-7)
    carries = [bool(prepared.mask_T[prepared.sequence_T == n].any()) for n in range(10)]
    assert carries == [True, True, False, False, *[True] * 6], "a unit without a preference carries no loss"
    assert with_loss(prepared).sequences == 8


def test_ties_and_missing_labels_make_no_pair() -> None:
    better, worse = preferences(labelled([1.0, 1.0, NAN, 0.0], [0.0, 2.0]))
    assert list(zip(better.tolist(), worse.tolist(), strict=True)) == [(0, 3), (1, 3), (5, 4)]


def test_only_the_last_token_is_read() -> None:
    """Whatever stands at the others, the loss is the same to the last bit; and the order of examples within a unit does not matter."""
    algorithm = RewardModel()
    prepared = algorithm.prepare(labelled([1.0, 0.0], length=4), {})
    for junk in (NAN, math.inf, 1e9):
        terms = algorithm.terms(outputs([2.0, 1.0], prepared, junk), prepared)
        assert float(total(terms)) == pytest.approx(0.31326168751822286, abs=1e-9)
    assert float(loss(algorithm, [1.0, 2.0], labelled([0.0, 1.0]))) == pytest.approx(0.31326168751822286, abs=1e-9)


def test_metrics_are_ratios_of_sums() -> None:
    """Pairs: 2-0 right, 2-1 wrong, 1-0 right; then a tie of scores, which is half right. The last unit prefers nothing."""
    prepared = RewardModel().prepare(labelled([2.0, 1.0, 0.0], [1.0, 0.0], [0.5, 0.5]), {})
    scores = [1.0, 1.5, -1.0, 3.0, 3.0, 100.0, 100.0]
    terms = RewardModel().terms(outputs(scores, prepared), prepared)
    found = {m.name: (float(m.total), float(m.count)) for m in terms.metrics if m.count is not None}
    assert found == {"accuracy": (2.5, 4.0), "margin": (-0.5 + 2.0 + 2.5 + 0.0, 4.0), "score": (7.5, 5.0)}


def test_micro_batches_cut_between_rankings() -> None:
    prepared = RewardModel().prepare(material(RewardModel()), {})
    assert [piece.sequences for piece in micro_batches(prepared, 1)] == [4, 4]


@pytest.mark.proves("refusals")
def test_contract_and_refusals() -> None:
    assert (RewardModel.trains, RewardModel.unit, RewardModel.learns_from) == ("scorer", "ranking", "rankings")
    assert RewardModel().roles == frozenset()
    for bad in (-0.1, NAN, math.inf):
        with pytest.raises(UserError, match="^reward_model: centring must be (finite and )?at least 0"):
            RewardModel(centring=bad)


def synthetic(count: int, seed: int) -> list[tuple[Example, ...]]:
    """Rankings of three responses by how many tokens above 12 they hold: the prompt of two tokens says nothing."""
    generator = np.random.default_rng(seed)
    units = []
    while len(units) < count:
        prompt = generator.integers(3, VOCABULARY, 2)
        ids = [np.concatenate([prompt, generator.integers(3, VOCABULARY, 6), [2]]) for _ in range(3)]
        labels = [float((i[2:] > 12).sum()) for i in ids]
        if len(set(labels)) > 1:
            units.append(tuple(Example(i, np.arange(9) >= 2, reward=r) for i, r in zip(ids, labels, strict=True)))
    return units


@pytest.mark.proves("learns")
def test_it_learns_what_is_preferred() -> None:
    """From chance to nearly always on rankings it has not seen, over fixed seeds; centring holds the mean score near 0."""
    scorer = from_policy(small_policy(dtype=torch.float32), zero=False)
    algorithm = RewardModel(centring=0.01)
    trainer = Trainer(scorer, algorithm, Optimization(lr=1e-2, warmup=5, schedule="cosine"))
    train, held_out = synthetic(400, 0), synthetic(100, 1)

    def accuracy() -> float:
        scores = iter(last_scores(scorer, [e.ids for unit in held_out for e in unit]))
        own = [[(e.reward, next(scores)) for e in unit] for unit in held_out]
        right = [float(s > t) for unit in own for a, s in unit for b, t in unit if a > b]
        return sum(right) / len(right)

    before, generator = accuracy(), np.random.default_rng(2)
    for number in range(120):
        drawn = generator.choice(len(train), 16, replace=False)
        examples = [Example(e.ids, e.mask, n, e.reward) for n, i in enumerate(drawn) for e in train[i]]
        trainer.update(algorithm.prepare(pack_examples(examples), {}), trainer.settings.rate(number, 120))
    assert before < 0.75
    assert accuracy() > 0.9
    assert abs(np.mean(last_scores(scorer, [e.ids for unit in held_out for e in unit]))) < 1.0
