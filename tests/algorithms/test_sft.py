"""Supervised fine-tuning: numbers by hand, transformers' own loss, and a small thing learned."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from material_for_tests import VOCABULARY, gradients, shared_policy, small_policy

from posttrain.algorithms.sft import SFT
from posttrain.errors import UserError
from posttrain.train.forward import forward
from posttrain.train.optimizer import Optimization
from posttrain.train.pack import pack_examples
from posttrain.train.trainer import Trainer
from posttrain.types import Batch, Example, Outputs


def two_examples() -> Batch:
    """Three loss tokens in the first, one in the second."""
    first = Example(np.array([5, 6, 7, 8, 9]), np.array([False, True, False, True, True]))
    second = Example(np.array([10, 11]), np.array([False, True]))
    return pack_examples([first, second])


LOGPROB = torch.tensor([float("nan"), -1.0, float("-inf"), -2.0, -3.0, float("nan"), -6.0], dtype=torch.float64)


@pytest.mark.proves("value")
@pytest.mark.parametrize(
    ("reduction", "weights", "loss"),
    [
        ("token_mean", [0, 1 / 4, 0, 1 / 4, 1 / 4, 0, 1 / 4], (1 + 2 + 3 + 6) / 4),
        ("sequence_mean", [0, 1 / 6, 0, 1 / 6, 1 / 6, 0, 1 / 2], (1 + 2 + 3) / 6 + 6 / 2),
    ],
)
def test_by_hand(reduction: str, weights: list[float], loss: float) -> None:
    algorithm = SFT(reduction=reduction)
    prepared = algorithm.prepare(two_examples(), {})
    assert prepared.weight_T is not None and prepared.weight_T.tolist() == pytest.approx(weights)
    terms = algorithm.terms(Outputs(LOGPROB, torch.ones_like(LOGPROB)), prepared)
    assert [t.name for t in terms.terms] == ["nll"]
    assert float((terms.terms[0].weight * terms.terms[0].loss).sum()) == pytest.approx(loss)


def test_metrics_are_ratios_of_sums() -> None:
    """Over loss tokens alone, whatever the reduction; masked positions (NaN here) are not in them."""
    algorithm = SFT(reduction="sequence_mean")
    entropy = torch.where(torch.isfinite(LOGPROB), 0.5, float("nan"))
    terms = algorithm.terms(Outputs(LOGPROB, entropy), algorithm.prepare(two_examples(), {}))
    assert {m.name: (float(m.total), float(m.count)) for m in terms.metrics} == {"nll": (12.0, 4.0), "entropy": (2.0, 4.0)}


@pytest.mark.proves("value")
def test_the_loss_is_that_of_transformers() -> None:
    """An independent mean: transformers' logits of each sequence alone, summed over labels, divided by all loss tokens."""
    from transformers import AutoModelForCausalLM

    policy = shared_policy()
    stock = AutoModelForCausalLM.from_config(
        copy.deepcopy(policy.model.config), attn_implementation="eager", dtype=torch.float64
    ).eval()
    stock.load_state_dict(policy.model.state_dict())
    total, count = torch.zeros((), dtype=torch.float64), 0
    batch = two_examples()
    for start, end in zip(batch.starts, batch.starts[1:], strict=False):
        logits = stock(batch.ids_T[None, start:end]).logits[0]
        for t in range(1, end - start):
            if batch.mask_T[start + t]:
                total = total - torch.log_softmax(logits[t - 1], -1)[batch.ids_T[start + t]]
                count += 1
    (total / count).backward()
    loss, found = gradients(SFT(), SFT().prepare(batch, {}))
    assert loss == pytest.approx(float(total.detach()) / count, rel=1e-6)  # the weights are float32
    for name, parameter in stock.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-6)  # so are their norms


@pytest.mark.proves("refusals")
def test_refusal() -> None:
    with pytest.raises(UserError, match="^sft: reduction must be token_mean or sequence_mean, not 'mean'$"):
        SFT(reduction="mean")


def test_it_samples_nothing_and_needs_nobody() -> None:
    assert SFT.learns_from == "demonstrations"
    assert SFT().roles == frozenset()
    assert SFT().reuse.once
    assert SFT().start() == {} and SFT().finish({"a": 1}, []) == {"a": 1}


@pytest.mark.proves("learns")
def test_it_learns_a_rule_and_generalises() -> None:
    """Counting upwards, from starts it has not seen: from worse than chance (3.2 nats) to near certainty."""
    examples = [Example((start + np.arange(8)) % VOCABULARY, np.arange(8) >= 2) for start in range(VOCABULARY)]
    held_out, train = examples[::4], [e for i, e in enumerate(examples) if i % 4]
    policy = small_policy(dtype=torch.float32)
    algorithm = SFT()
    trainer = Trainer(policy, algorithm, Optimization(lr=2e-2, warmup=5, schedule="cosine"))

    def nll() -> float:
        batch = pack_examples(held_out)
        with torch.no_grad():
            return -float(forward(policy, batch).logprob_T[batch.mask_T].mean())

    before, generator = nll(), np.random.default_rng(0)
    for step in range(80):
        chosen = [train[i] for i in generator.choice(len(train), 12, replace=False)]
        trainer.update(algorithm.prepare(pack_examples(chosen), {}), trainer.settings.rate(step, 80))
    after = nll()
    assert before > math.log(VOCABULARY)
    assert after < 0.3  # seen: 0.13
