"""Generators of reasoning_gym: splits that share nothing, its own verifiers, and its absence."""

from __future__ import annotations

import builtins
import json
from dataclasses import asdict
from typing import Any

import pytest

from posttrain import config_tree
from posttrain.errors import UserError
from posttrain.tasks import reasoning_gym
from posttrain.tasks.base import Task, validate
from posttrain.tasks.reasoning_gym import ReasoningGym


@pytest.fixture
def package() -> None:
    pytest.importorskip("reasoning_gym", reason="needs the package reasoning_gym: pip install 'posttrain[gym]'")


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("generator", ["leg_counting", "basic_arithmetic", "letter_counting"])
def test_gold_answers_score_one_and_splits_share_nothing(generator: str) -> None:
    task = ReasoningGym(generator, train=40, test=10)
    train, test = task.problems("train"), task.problems("test")
    assert (len(train), len(test)) == (40, 10)
    assert len({p.question for p in [*train, *test]}) == 50
    validate(task, "train", 5)
    validate(task, "test", 5)
    assert json.loads(json.dumps(asdict(train[0])))["facts"] == train[0].facts, "worker processes get problems as JSON"
    assert ReasoningGym(generator, train=41, test=10).problems("train")[:40] == train, "more of them are the same and more"


@pytest.mark.usefixtures("package")
def test_answers_are_found_and_judged() -> None:
    task = ReasoningGym("leg_counting", train=4, test=2, system="Count.")
    problem = task.problems("test")[0]
    wrong = str(int(problem.answer) + 1)
    said = [f"<answer>{wrong}</answer> no, <answer> {problem.answer}\n</answer>", f"<answer>{wrong}</answer>", problem.answer]
    assert [task.score(problem, s).outcome for s in said] == ["correct", "wrong", "unparseable"]
    assert [task.final(s) for s in said] == [problem.answer, wrong, None]
    direct = ReasoningGym("leg_counting", train=4, test=2, style="direct")
    assert direct.score(problem, problem.answer).value == 1.0 and direct.prompt(problem)[0].content == problem.question
    assert [m.role for m in task.prompt(problem)] == ["system", "user"] and task.isolated


@pytest.mark.usefixtures("package")
def test_a_generator_that_only_verifies() -> None:
    task = ReasoningGym("graph_color", train=3, test=1)
    problem = task.problems("train")[0]
    assert problem.answer == ""
    judged = task.score(problem, "<answer>{}</answer>")
    assert judged.outcome == "wrong" and judged.value == 0.01, "what its verifier pays for an attempt"
    with pytest.raises(UserError, match="no worked answers"):
        task.demonstration(problem)


@pytest.mark.usefixtures("package")
def test_a_small_generator_is_exhausted_and_not_repeated() -> None:
    task = ReasoningGym(
        "leg_counting", {"min_animals": 1, "max_animals": 1, "min_instances": 1, "max_instances": 1}, train=900, test=100
    )
    train, test = task.problems("train"), task.problems("test")
    assert 1 < len(train) < 900 and 0 < len(test) < 100 and not {p.question for p in train} & {p.question for p in test}


@pytest.mark.usefixtures("package")
def test_bad_settings_are_one_line() -> None:
    with pytest.raises(UserError, match="did you mean 'leg_counting'"):
        ReasoningGym("leg_conting").problems("train")
    with pytest.raises(UserError, match="refuses its options"):
        ReasoningGym("leg_counting", {"wings": 2}).problems("train")


def test_the_short_name_says_the_generator() -> None:
    task = config_tree.from_tree({"name": "reasoning_gym:leg_counting", "test": 7}, Task, "task")
    assert task == ReasoningGym("leg_counting", test=7)
    assert config_tree.from_tree(config_tree.to_tree(task), Task, "task") == task
    with pytest.raises(UserError, match="takes no value after its name"):
        config_tree.from_tree({"name": "arithmetic:3"}, Task, "task")
    with pytest.raises(UserError, match="not for options"):
        ReasoningGym("leg_counting", {"seed": 1})


def test_without_the_package_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *rest: Any) -> Any:
        if name == "reasoning_gym":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", absent)
    reasoning_gym._drawn.cache_clear()
    with pytest.raises(UserError, match=r"pip install 'posttrain\[gym\]'"):
        ReasoningGym("leg_counting").problems("train")
