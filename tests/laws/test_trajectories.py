"""Pinned trajectories: 30 optimizer steps of every algorithm, in float64 on one thread, with their losses in hexadecimal.

An unintended change of a loss, a weight, an optimizer or a reduction changes these numbers. They are exact if torch and the
instruction set are those that trajectories.json names, and within 1e-9 elsewhere. After an intended change, or for a new algorithm,

    PIN_TRAJECTORIES=1 python -m pytest tests/laws/test_trajectories.py

writes the file again; say in the commit why its numbers changed.
"""

from __future__ import annotations

import copy
import json
from dataclasses import fields, replace
from functools import cache, lru_cache
from pathlib import Path
from unittest import mock

import material_for_tests
import numpy as np
import pytest
import torch
from material_for_tests import WIDE, algorithm_class, small_policy, trainer_for
from pins_for_tests import WRITE, place
from torch import Tensor, nn

from posttrain import catalogue
from posttrain.algorithms.base import Algorithm
from posttrain.models.policy import Policy
from posttrain.models.scorer import Scorer, from_policy
from posttrain.runs.metrics import merge
from posttrain.train import checkpoint
from posttrain.train.optimizer import Optimization
from posttrain.train.trainer import Trainer
from posttrain.types import Batch, Metric

FILE = Path(__file__).with_name("trajectories.json")
STEPS, BATCHES = 30, 3
SETTINGS = Optimization(lr=3e-3, warmup=5, schedule="cosine")
COMMAND = f"PIN_TRAJECTORIES=1 python -m pytest tests/laws/{Path(__file__).name}"
NAMES = catalogue.names("algorithm")
# their ratio to the policy at the start of a step is 1 throughout a single update: that to the sampler has something to say
SETTINGS_OF = {"gspo": {"correction": "none"}, "rloo": {"correction": "none"}}


class WideRotary(nn.Module):
    """Rotary angles in float64: those of transformers are rounded to float32, by instructions that differ in the last bit."""

    def __init__(self, size: int, theta: float = 10_000.0):
        super().__init__()
        self.frequencies = theta ** (-torch.arange(0, size, 2, dtype=WIDE) / size)

    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angle = position_ids[..., None].to(WIDE) * self.frequencies
        return torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()


def settle(model: nn.Module, seed: int) -> None:
    """Weights from whole numbers, which are the same to the bit everywhere; drawing normal ones is not."""
    generator = np.random.default_rng(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.from_numpy(generator.integers(-(2**20), 2**20, parameter.shape) / 2**20)
            parameter.copy_(0.4 * drawn if parameter.ndim > 1 else 1.0 + 0.1 * drawn)


@lru_cache
def fixed_policy(seed: int = 0) -> Policy:
    policy = small_policy(dtype=WIDE)
    policy.body.rotary_emb = WideRotary(policy.model.config.head_dim)
    settle(policy.model, seed)
    return policy


def fixed_teacher() -> Policy:
    return fixed_policy(5)


@lru_cache
def fixed_scorer() -> Scorer:
    scorer = from_policy(fixed_policy(), zero=False)
    settle(scorer.model, 2)
    return scorer


@cache
def batches(algorithm: Algorithm) -> list[Batch]:
    """Steps in float64 throughout, about the policies above."""
    with (
        mock.patch.object(material_for_tests, "shared_policy", fixed_policy),
        mock.patch.object(material_for_tests, "shared_scorer", fixed_scorer),
        mock.patch.object(material_for_tests, "shared_teacher", fixed_teacher),
    ):
        made = [material_for_tests.make_material(algorithm, seed) for seed in range(BATCHES)]
    tensors = [{**{f.name: getattr(b, f.name) for f in fields(b)}, **b.columns} for b in made]
    wide = [{k: v.to(WIDE) for k, v in own.items() if isinstance(v, Tensor) and v.is_floating_point()} for own in tensors]
    return [b.replace(**changes) for b, changes in zip(made, wide, strict=True)]


def begin(name: str, settings: Optimization) -> Trainer:
    """An algorithm's trainer with weights that are the same everywhere."""
    algorithm = algorithm_class(name)(**SETTINGS_OF.get(name, {}))
    policy = copy.deepcopy(fixed_policy())
    with mock.patch.object(material_for_tests, "shared_teacher", fixed_teacher):
        trainer = trainer_for(algorithm, policy, settings)
    for number, other in enumerate(learner.network for learner in trainer.learners if learner.network is not policy):
        settle(other.model, 3 + number)
    return trainer


@cache
def trajectory(name: str, settings: Optimization = SETTINGS) -> list[float]:
    return walk(name, settings)


def walk(name: str, settings: Optimization, count: int = STEPS, stop: int = 0, folder: Path | None = None) -> list[float]:
    """The losses of some of 30 steps on three batches by turns, with the algorithm's state carried on. What is sampled is sampled by a
    policy that stays as far from the present one as it was: an unclipped ratio would otherwise grow without end. After step `stop`,
    all is forgotten but what a checkpoint in `folder` holds."""
    trainer = begin(name, settings)
    algorithm = trainer.algorithm
    steps = batches(algorithm)
    apart = [batch.behaviour_T - trainer.logprobs(batch) if algorithm.learns_from == "rollouts" else None for batch in steps]
    state, losses = algorithm.start(), []
    for number in range(count):
        if folder is not None and number == stop:
            made = checkpoint.Checkpoint(number, trainer.weights(), trainer.moments(), {"algorithm": state})
            saved = checkpoint.load(checkpoint.save(folder, made))
            trainer = begin(name, settings)
            algorithm, state = trainer.algorithm, saved.state["algorithm"]
            trainer.restore(saved.model, saved.optimizer)
        batch, apart_T = steps[number % BATCHES], apart[number % BATCHES]
        if apart_T is not None:
            batch = batch.replace(behaviour_T=(trainer.logprobs(batch) + apart_T).where(batch.mask_T, 0.0))
        update = trainer.update(algorithm.prepare(batch, state), trainer.settings.rate(number, STEPS))
        figures = [*update.metrics, *usual(batch)]
        state = algorithm.finish(state, figures)
        losses.append(merge(figures)["loss"])
    return losses


def usual(batch: Batch) -> list[Metric]:
    """What the loop knows of a step besides the update: rewards, and how many responses there were."""
    scored_N = batch.valid_N & batch.reward_N.isfinite()
    return [
        Metric("reward", batch.reward_N[scored_N].double().sum(), scored_N.sum()),
        Metric("responses", batch.sequences, None),
    ]


@lru_cache
def pinned() -> dict[str, dict]:
    return json.loads(FILE.read_text()) if FILE.is_file() else {}


@pytest.fixture(scope="module", autouse=True)
def one_thread():  # type: ignore[no-untyped-def]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    if WRITE:
        write()
    yield
    torch.set_num_threads(threads)


def write() -> None:
    """Pin all trajectories anew: PIN_TRAJECTORIES=1 asks for it."""
    lines = [f"{json.dumps(name)}: {json.dumps([loss.hex() for loss in trajectory(name)])}" for name in NAMES]
    FILE.write_text(f'{{"place": {json.dumps(place())},\n"losses": {{\n' + ",\n".join(lines) + "\n}}\n")


@pytest.mark.parametrize("name", NAMES)
def test_the_losses_are_those_that_were_pinned(name: str) -> None:
    expected = pinned().get("losses", {}).get(name)
    assert expected is not None, f"{name} has no trajectory yet: {COMMAND}"
    found = trajectory(name)
    assert len(found) == len(expected) == STEPS
    if pinned()["place"] == place():
        assert [loss.hex() for loss in found] == expected, f"{name}: another trajectory; if that is meant: {COMMAND}"
    assert found == pytest.approx([float.fromhex(text) for text in expected], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_trajectory_is_the_same(name: str, tmp_path: Path) -> None:
    """The weights, the moments and the algorithm's state go through a checkpoint on the disk, into a trainer made anew."""
    found = walk(name, SETTINGS, 7, stop=4, folder=tmp_path)
    assert [loss.hex() for loss in found] == [loss.hex() for loss in trajectory(name)[:7]]


def test_a_trajectory_goes_somewhere_and_is_the_same_twice() -> None:
    found = trajectory("sft")
    assert found == walk("sft", SETTINGS)
    assert len(set(found)) == STEPS and sum(found[-3:]) < 0.8 * sum(found[:3]), "it learns"


def test_pinned_are_the_algorithms_there_are() -> None:
    assert set(pinned()["losses"]) == set(NAMES)


def test_a_small_change_is_seen() -> None:
    """A rate that is wrong by 1e-6 of itself is far outside what another instruction set may do."""
    moved = trajectory("dpo", replace(SETTINGS, lr=SETTINGS.lr * (1 + 1e-6)))
    assert moved != pytest.approx([float.fromhex(text) for text in pinned()["losses"]["dpo"]], rel=1e-9, abs=1e-12)
