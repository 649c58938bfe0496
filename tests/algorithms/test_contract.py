"""The contract of an algorithm: what others may ask of it, and how deep its classes inherit."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from material_for_tests import CASES

import posttrain
from posttrain.algorithms.base import Algorithm, Reuse
from posttrain.stages.train import STAGES
from posttrain.types import Metric, Sampling

PACKAGE = Path(posttrain.__file__).parent
# the check of dead coefficients reads every setting, by the dataclass's own list of them
FILES = [p for p in sorted(PACKAGE.rglob("*.py")) if p.parent.name != "algorithms" and p.name != "coefficients.py"]


@pytest.mark.parametrize("algorithm", CASES)
def test_every_algorithm_keeps_to_the_words_of_the_contract(algorithm: Algorithm) -> None:
    family = [kind for kind in type(algorithm).__mro__ if issubclass(kind, Algorithm)]
    assert len(family) <= 3, "base, family, class"
    assert algorithm.learns_from in STAGES and algorithm.trains in ("policy", "scorer")
    assert algorithm.unit in ("sequence", "pair", "ranking")
    assert algorithm.roles <= {"reference", "critic", "proximal", "pretraining", "teacher"}
    assert set(algorithm.additions) <= algorithm.roles | {"pretraining"}
    drawn = Sampling(max_new_tokens=7)
    greedy = replace(drawn, temperature=0.0)
    assert drawn in algorithm.samples(drawn) and set(algorithm.samples(drawn)) <= {drawn, greedy}
    assert len(algorithm.samples(drawn)) == algorithm.group_size


def test_nothing_outside_asks_for_the_class_or_a_field_of_an_algorithm() -> None:
    asked = re.compile(r"(?:getattr|hasattr|isinstance)\((?:\w+\.)*algorithm\b")
    assert [path.name for path in FILES if asked.search(path.read_text())] == []


def test_a_reuse_stops_where_the_mean_of_its_metric_exceeds_the_limit() -> None:
    metrics = [Metric("kl", 1.0, 10), Metric("kl", 2.0, 10), Metric("other", 9.0, 1)]
    assert Reuse(metric="kl", limit=0.1).stop(metrics) and not Reuse(metric="kl", limit=0.2).stop(metrics)
    assert not Reuse(epochs=4).stop(metrics) and Reuse().once and not Reuse(mini_batches=2).once
