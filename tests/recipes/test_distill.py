"""The recipe distill: both students have the same budget, and real models come in pairs."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.errors import UserError
from posttrain.recipes.distill import distill


@pytest.mark.parametrize("models", [{}, {"model": "org/small", "teacher": "org/large"}])
def test_both_students_begin_alike_and_have_as_many_responses_steps_and_the_same_rate(models: dict[str, str]) -> None:
    stages: dict[str, Any] = {stage.name: stage for stage in distill(steps=7, prompts=5, **models).stages}
    own, other, samples = stages["distill"], stages["sft"], stages["samples"]
    assert own.model == other.model == models.get("model", "start") and own.optimizer == other.optimizer
    assert (own.steps, own.prompts * own.algorithm.group_size) == (other.steps, other.batch) == (7, 5)
    assert samples.prompts * samples.samples == 35 and samples.min_score == 0, "every one of them, right or wrong"
    assert own.teacher == samples.model == stages["of_teacher"].model == models.get("teacher", "teacher")
    assert own.task == samples.task == stages["after"].task and own.sampling == samples.sampling


@pytest.mark.parametrize("models", [{"model": "org/small"}, {"teacher": "org/large"}])
def test_one_model_without_the_other_is_refused(models: dict[str, str]) -> None:
    with pytest.raises(UserError, match="^distill: model and teacher go together; give both, or none for the toy"):
        distill(**models)
