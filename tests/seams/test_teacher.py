"""A distillation algorithm of a few lines: the teacher role gives hidden states and a head, and the policy learns its distribution."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from material_for_tests import VOCABULARY, small_policy

from posttrain.algorithms.base import Algorithm, State
from posttrain.errors import UserError
from posttrain.ops.divergence import vocabulary_divergence
from posttrain.ops.weights import reduction
from posttrain.stages._material import Data
from posttrain.stages.sft import SFTStage
from posttrain.train.optimizer import Optimization
from posttrain.train.pack import pack_examples
from posttrain.train.roles.teacher import Teacher
from posttrain.train.trainer import Trainer
from posttrain.types import Batch, Example, Outputs, Term, Terms


@dataclass(frozen=True, kw_only=True)
class Distillation(Algorithm):
    """L = sum_t w_t KL(p_t || q_t) over the whole vocabulary, w_t = 1 / T."""

    learns_from = "demonstrations"
    direction: str = "reverse"

    @property
    def roles(self) -> frozenset[str]:
        return frozenset({"teacher"})

    def prepare(self, step: Batch, state: State) -> Batch:
        return step.replace(weight_T=reduction("token_mean", step.mask_T, step.sequence_T, step.sequences))

    def terms(self, outputs: Outputs, batch: Batch) -> Terms:
        own, teacher = outputs.predictions["policy"], outputs.predictions["teacher"]
        kl_M = vocabulary_divergence(
            own.hidden_MH, own.head, teacher.hidden_MH, teacher.head, self.direction, batch.temperature
        )
        return Terms((Term("divergence", kl_M, batch.weight_T[own.at_M]),))


def text(seed: int = 0) -> Batch:
    generator = np.random.default_rng(seed)
    lengths = [5 + n % 4 for n in range(12)]
    return pack_examples([Example(generator.integers(3, VOCABULARY, n), np.arange(n) > 0) for n in lengths])


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_the_policy_learns_the_teachers_distribution(direction: str) -> None:
    algorithm, teacher = Distillation(direction=direction), small_policy(1, torch.float32, hidden_size=32)
    policy = small_policy(0, torch.float32)
    trainer = Trainer(policy, algorithm, Optimization(lr=1e-2, token_budget=30), [Teacher(teacher)])
    before = [p.clone() for p in teacher.model.parameters()]
    losses = []
    for _ in range(60):
        update = trainer.update(algorithm.prepare(trainer.fill(text()), {}), 1e-2)
        losses.append(sum(float(m.total) for m in update.metrics if m.name == "loss/divergence"))
    assert losses[-1] < 0.1 * losses[0]
    assert all(torch.equal(a, b) for a, b in zip(before, teacher.model.parameters(), strict=True))
    assert trainer.checksum() is not None, "a teacher that moves is noticed"


def test_a_stage_that_builds_no_teacher_says_so() -> None:
    with pytest.raises(UserError, match="sft: Distillation asks for the role teacher, which this stage does not build"):
        SFTStage(name="sft", model="x", data=(Data(file="a.jsonl"),), algorithm=Distillation())
