"""Small functions graded by running them: the right program passes, one with a bug fails, and supervised training reads both."""

from __future__ import annotations

import pytest

from posttrain.tasks.base import validate
from posttrain.tasks.programs import Programs

pytestmark = pytest.mark.usefixtures("sandbox")


def test_the_demonstration_passes_the_tests_and_splits_are_apart() -> None:
    task = Programs()
    validate(task, count=2)
    train, test = ({p.question for p in task.problems(split)[:200]} for split in ("train", "test"))
    assert len(train) > 150 and not train & test and task.isolated


def test_half_of_what_supervised_training_reads_has_a_bug_that_the_tests_see() -> None:
    task = Programs()
    problems = list(task.problems("train")[:400])
    wrong = [(p, said) for p in problems if (said := task.conversation(p)[-1].content) != task.demonstration(p)]
    assert 150 < len(wrong) < 250 and not any(set(said) - set(task.alphabet) for _, said in wrong)
    outcomes = {task.score(p, said).outcome for p, said in wrong[:12]}
    assert "pass" not in outcomes and outcomes <= {"fail", "crash"}
    assert all(Programs(bugs=0.0).conversation(p)[-1].content == task.demonstration(p) for p in problems[:20])
