"""Pairs made by hand, a preference to learn, and an enumerable problem with its known optimum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from material_for_tests import VOCABULARY, small_policy, trainer_for
from torch import Tensor

from posttrain.algorithms.base import Algorithm
from posttrain.models.policy import Policy
from posttrain.train.forward import forward
from posttrain.train.optimizer import Optimization
from posttrain.train.pack import pack_examples
from posttrain.types import Batch, Example, Outputs, Terms

WIDE = torch.float64
BOTH_WAYS = [(0, True), (1, True), (2, True), (0, False)]  # seeds, and which direction is preferred
JUNK = math.nan  # stands wherever no loss is


def hand_batch(
    logprobs: Sequence[Sequence[float]], references: Sequence[Sequence[float]], rewards: Sequence[float], units: Sequence[int]
) -> tuple[Batch, Outputs]:
    """Sequences of a one-token prompt and responses with the given log-probs; NaN at every prompt token."""
    examples = [
        Example(np.arange(len(row) + 1) + 3, np.arange(len(row) + 1) > 0, unit, reward)
        for row, unit, reward in zip(logprobs, units, rewards, strict=True)
    ]
    logprob_T, reference_T = (
        torch.tensor([value for row in rows for value in (JUNK, *row)], dtype=WIDE) for rows in (logprobs, references)
    )
    batch = pack_examples(examples).replace(reference_T=reference_T)
    return batch, Outputs(logprob_T.requires_grad_(), torch.ones_like(logprob_T))


# Two pairs; the second has its preferred response last. Sums: -3 and -1; -8 and -2; references -4, -0.5; -6 and -4.
LOGPROBS = [[-1.0, -2.0], [-1.0], [-3.0, -4.0, -1.0], [-2.0]]
REFERENCES = [[-2.0, -2.0], [-0.5], [-1.0, -2.0, -3.0], [-4.0]]
RATIOS = [1.0, -0.5, -2.0, 2.0]
LENGTHS = [2, 1, 3, 1]


def hand_pairs(rewards: Sequence[float] = (1.0, 0.0, 0.0, 1.0)) -> tuple[Batch, Outputs]:
    return hand_batch(LOGPROBS, REFERENCES, rewards, [0, 0, 1, 1])


def total(terms: Terms) -> Tensor:
    return torch.stack([(t.weight * t.loss).sum() for t in terms.terms]).sum()


def loss_and_slope(algorithm: Algorithm, batch: Batch, outputs: Outputs) -> tuple[float, list[float]]:
    """The loss, and its derivative by the log-prob of every token that carries loss."""
    prepared = algorithm.prepare(batch, {})
    loss = total(algorithm.terms(outputs, prepared))
    (slope,) = torch.autograd.grad(loss, outputs.logprob_T)
    assert not slope[~batch.mask_T].any()
    return float(loss.detach()), slope[batch.mask_T].tolist()


def figures(algorithm: Algorithm, batch: Batch, outputs: Outputs) -> dict[str, float]:
    return {m.name: m.value for m in algorithm.terms(outputs, algorithm.prepare(batch, {})).metrics}


def counting(start: int, direction: int, reward: float) -> Example:
    """Counting up or down from a start: five tokens that carry loss after a prompt of one."""
    ids = (start + direction * np.arange(6)) % VOCABULARY
    return Example(ids.astype(np.int64), np.arange(6) > 0, -1, reward)


def learn_to_count(
    algorithm: Algorithm, up: bool, seed: int, steps: int = 20, lr: float = 6e-3, single: bool = False
) -> tuple[float, float]:
    """Train on starts with either direction preferred; the mean log-ratio of up over down on held-out starts, before and after.

    `single` gives labelled examples apart, with a mismatched one for each: the response to another start.
    """
    policy, reference = small_policy(seed, torch.float32), small_policy(seed, torch.float32)
    trainer = trainer_for(algorithm, policy, Optimization(lr=lr, warmup=5), reference)
    held_out = range(0, VOCABULARY, 4)
    train = [s for s in range(VOCABULARY) if s % 4]
    generator = np.random.default_rng(seed)
    before = preference_for_up(policy, held_out)
    for step in range(steps):
        starts = generator.choice(train, 8, replace=False)
        units = [(counting(s, 1, float(up)), counting(s, -1, float(not up))) for s in starts]
        if single:
            units = [(e,) for unit in units for e in unit]
            others = [replace(e, ids=np.r_[e.ids[:1] + 5, e.ids[1:]] % VOCABULARY, reward=math.nan) for (e,) in units]
            units += [(e,) for e in others]
        batch = pack_examples([replace(e, unit=n) for n, unit in enumerate(units) for e in unit])
        prepared = algorithm.prepare(trainer.fill(batch), {})
        trainer.update(prepared, trainer.settings.rate(step, steps))
    return before, preference_for_up(policy, held_out)


def gain(algorithm: Algorithm, up: bool, seed: int, single: bool = False) -> float:
    """By how many nats the preferred direction gained on the other, on starts that were not trained on."""
    before, after = learn_to_count(algorithm, up, seed, single=single)
    return after - before if up else before - after


def preference_for_up(policy: Policy, starts: Sequence[int]) -> float:
    """Mean over starts of log pi(up) - log pi(down)."""
    batch = pack_examples([counting(s, d, 0.0) for s in starts for d in (1, -1)])
    with torch.no_grad():
        logprob_T = forward(policy, batch).logprob_T.where(batch.mask_T, 0.0)
    sums = torch.stack([logprob_T[a:b].sum() for a, b in zip(batch.starts, batch.starts[1:], strict=False)])
    return float((sums[::2] - sums[1::2]).mean())


REFERENCE = np.array([0.1, 0.2, 0.3, 0.25, 0.15])
REWARD = np.array([1.0, 0.0, 0.5, -0.5, 0.25])


def tabular_optimum(
    algorithm: Algorithm, pairs: Sequence[tuple[int, int]], rewards: Sequence[tuple[float, float]]
) -> np.ndarray:
    """The policy over five one-token responses that minimises a pairwise loss on the given pairs, from the reference on."""
    examples = [
        Example(np.array([9, y]), np.array([False, True]), unit, value)
        for unit, (pair, values) in enumerate(zip(pairs, rewards, strict=True))
        for y, value in zip(pair, values, strict=True)
    ]
    reference_V = torch.from_numpy(np.log(REFERENCE))
    batch = pack_examples(examples)
    answer_T = batch.ids_T.clamp(max=len(REFERENCE) - 1)
    prepared = algorithm.prepare(batch.replace(reference_T=reference_V[answer_T]), {})
    logits_V = reference_V.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [logits_V], max_iter=500, tolerance_grad=1e-12, tolerance_change=1e-15, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        logprob_T = logits_V.log_softmax(0)[answer_T]
        loss = total(algorithm.terms(Outputs(logprob_T, torch.zeros_like(logprob_T)), prepared))
        loss.backward()
        return loss

    optimizer.step(closure)
    return logits_V.detach().softmax(0).numpy()


def divergence(p: np.ndarray, q: np.ndarray) -> float:
    return float((p * np.log(p / q)).sum())


def boltzmann(beta: float) -> np.ndarray:
    """pi* = ref exp(reward / beta) / Z: where every KL-anchored method should end."""
    weight = REFERENCE * np.exp(REWARD / beta)
    return weight / weight.sum()
