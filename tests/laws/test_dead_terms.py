"""Every coefficient has an effect: for every algorithm and every number in its settings, another value gives another gradient."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, ClassVar, get_args, get_type_hints

import pytest
import torch
from material_for_tests import CASES, algorithm_class, gradients, material

from posttrain import catalogue
from posttrain.algorithms.base import Algorithm, State
from posttrain.errors import UserError
from posttrain.ops.weights import reduction
from posttrain.types import Batch, Outputs, Term, Terms

# Numbers that act elsewhere than in the gradient of a given step, and where.
ELSEWHERE = {
    "group": "how many samples are drawn",
    "epochs": "how often a rollout is reused",
    "mini_batches": "into how many optimizer steps a rollout is cut",
    "completions": "how many of them the value of a step is the mean of, in `branches`",
    "share": "which samples `select` keeps",
    "threshold": "which samples `select` keeps",
    "decay": "how the State's baseline moves, in `finish`",
    "ptx": "the weight of the pretraining batch, which is a batch of its own",
    "target_kl": "when the reuse of a rollout ends, in `Reuse.stop`",
    "kl_target": "how the State's beta moves, in `finish`",
    "kl_horizon": "how the State's beta moves, in `finish`",
}
# Numbers that belong to a choice: they are tried with it. Where the choice is refused, so is every other value of the number.
CHOICES: dict[str, dict[str, Any]] = {
    "constant": {"reduction": "constant_mean", "constant": 7.0},
    "cap": {"correction": "token"},
    "bound": {"drop": "mean", "bound": 0.1},
    "dual_clip": {"dual_clip": 1.001, "correction": "none", "beta": 0.5},
    "mask_low": {"mask_low": 0.9, "mask_high": 1.1},
    "mask_high": {"mask_low": 0.9, "mask_high": 1.1},
}


def numbers(kind: type[Algorithm]) -> list[str]:
    """Fields that hold a number, or one of several numbers."""
    hints = get_type_hints(kind)

    def number(hint: Any) -> bool:
        return hint in (int, float) or any(number(a) or type(a) is int for a in get_args(hint))

    return [f.name for f in fields(kind) if number(hints[f.name])]


def others(value: Any) -> list[Any]:
    """Values to try: smaller and larger by a little and by a lot, of the same type; of several numbers, the first is another."""
    if isinstance(value, tuple):
        return [(v, *value[1:]) for v in others(value[0])] if value else [(0.5, 1.0)]
    value = 0.0 if value is None else value
    near = [value * 0.5, value * 0.1, value * 2, value * 0.01, value + 0.1, value + 1, value - 0.1]
    return list(dict.fromkeys(type(value)(v) for v in near if type(value)(v) != value))


def changed(algorithm: Algorithm, name: str) -> Iterator[Algorithm]:
    for value in others(getattr(algorithm, name)):
        with suppress(UserError):  # not a value that this setting may have
            yield replace(algorithm, **{name: value})


@lru_cache
def gradient(algorithm: Algorithm) -> torch.Tensor:
    found = gradients(algorithm, algorithm.prepare(material(algorithm, noise=0.3), {}))[1]
    return torch.cat([found[name].flatten() for name in sorted(found)])


def dead(settings: list[Algorithm], name: str) -> bool:
    """Whether a number can be set to something else, and never matters."""
    settable = False
    for algorithm in settings:
        one = gradient(algorithm)
        for other in changed(algorithm, name):
            settable, two = True, gradient(other)
            if two.shape != one.shape or float((one - two).norm()) > 1e-6 * float(one.norm()):
                return False
    return settable


@pytest.mark.proves("coefficients")
@pytest.mark.parametrize("name", catalogue.names("algorithm"))
def test_every_number_changes_the_gradient(name: str) -> None:
    """With the algorithm's defaults, or with one of the settings that it is tested with (a cap needs something to cut)."""
    kind, found = algorithm_class(name), []
    for field in numbers(kind):
        settings = [c.values[0] for c in CASES if catalogue.name_of(c.values[0]) == name]
        if field in CHOICES:
            with suppress(UserError):
                settings.append(kind(**CHOICES[field]))
        if field not in ELSEWHERE and dead(settings, field):
            found.append(field)
    assert not found, f"{name}: no other value of {', '.join(found)} changes the gradient; if it acts elsewhere, say so above"


def test_every_exception_is_used() -> None:
    known = {field for name in catalogue.names("algorithm") for field in numbers(algorithm_class(name))}
    assert set(ELSEWHERE) <= known, f"no algorithm has {sorted(set(ELSEWHERE) - known)}"


@dataclass(frozen=True, kw_only=True)
class Forgetful(Algorithm):
    """Has two coefficients and uses one."""

    learns_from: ClassVar[str] = "demonstrations"
    used: float = 1.0
    forgotten: float = 1.0
    small: float = 0.0

    def prepare(self, step: Batch, state: State) -> Batch:
        return step.replace(weight_T=reduction("token_mean", step.mask_T, step.sequence_T, step.sequences))

    def terms(self, outputs: Outputs, batch: Batch) -> Terms:
        loss_T = (-outputs.logprob_T).where(batch.mask_T, 0.0)
        return Terms((Term("nll", self.used * loss_T + self.small * loss_T**2, batch.weight_T),))


@pytest.mark.parametrize(("name", "expected"), [("used", False), ("forgotten", True), ("small", False)])
def test_the_check_can_fail(name: str, expected: bool) -> None:
    assert name in numbers(Forgetful)
    assert dead([Forgetful()], name) == expected


def test_values_are_tried_of_the_fields_own_type() -> None:
    tried: list[Any] = others(8)
    assert tried == [4, 0, 16, 9, 7] and others(0.0) == [0.1, 1.0, -0.1]
