"""Mining failures: what is kept, asked again and made up for; rl on what was kept; and a recipe of rounds of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from posttrain.algorithms.grpo import GRPO
from posttrain.errors import UserError
from posttrain.recipes.iterate import iterate
from posttrain.runs.read import Run
from posttrain.runs.write import RunWriter
from posttrain.stages.base import Context, Stage, run_stages
from posttrain.stages.mine import Chosen, MineStage, read_problems
from posttrain.stages.rl import RLStage
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.tasks.base import Task
from posttrain.tasks.guess import Guess
from posttrain.types import Problem, Sampling, Score


@dataclass(frozen=True)
class Numbers(Task):
    """Problem n is solved whatever one says, unless n is a multiple of `hard`; problem 5 cannot be scored."""

    hard: int = 3
    alphabet = "0123456789 "

    def problems(self, split: str, level: int | None = None) -> Sequence[Problem]:
        return [Problem(f"{split}/{n}", f"{n + 100 * (split == 'test')} ", str(n), 0, {"n": n}) for n in range(20)]

    def score(self, problem: Problem, response: str) -> Score:
        number = problem.facts["n"]
        return Score.failed("lost") if number == 5 else Score(float(number % self.hard > 0))


def run(directory: Path, *stages: Stage) -> Context:
    with RunWriter.create(directory, {}) as writer:
        context = Context(writer, 0, threads=1, say=False)
        run_stages(stages, context)
    return context


def mine(**settings: object) -> MineStage:
    few = {
        "name": "mine",
        "model": "tiny:nano",
        "task": Numbers(),
        "prompts": 10,
        "samples": 2,
        "min_problems": 2,
        "sampling": Sampling(3),
    }
    return MineStage(**(few | settings))  # type: ignore[arg-type]


def kept(context: Context, stage: str = "mine") -> list[int]:
    rows = (context.folder(stage) / "data.jsonl").read_text().splitlines()
    return [json.loads(row)["facts"]["n"] for row in rows]


def test_a_file_that_no_mine_stage_wrote_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
    with pytest.raises(UserError, match="x.jsonl line 1: no id, level, facts; give a mine stage"):
        read_problems(str(tmp_path / "x.jsonl"))


def test_failures_are_kept_and_asked_again(tmp_path: Path) -> None:
    later = mine(name="later", task=Numbers(hard=6), skip=10, prompts=5, again="mine")
    context = run(tmp_path, mine(), later)
    assert kept(context) == [0, 3, 6, 9]
    assert context.result("mine") is not None
    result = {k: v for k, v in (context.result("mine") or {}).items() if k not in ("seconds", "lineage")}
    assert result == {"problems": 9, "failed": 4, "kept": 4, "solved": pytest.approx(5 / 9), "unscored": 1}
    assert kept(context, "later") == [0, 6, 12], "3 and 9 were learned since; 12 is fresh"


def test_where_fewer_are_asked_than_must_be_kept_all_are_kept(tmp_path: Path) -> None:
    """As in a dry run of `iterate`, which asks 32."""
    assert kept(run(tmp_path, mine(min_problems=200))) == [0, 3, 6, 9, 1, 2, 4, 7, 8]


def test_where_nearly_all_is_solved_the_hardest_make_up_for_it(tmp_path: Path) -> None:
    context = run(tmp_path, mine(task=Numbers(hard=100), min_problems=3))
    assert kept(context) == [0, 1, 2]
    with pytest.raises(UserError, match="only 9 of 10 problems could be scored"):
        run(tmp_path / "two", mine(min_problems=10))
    for bad, words in (
        ({"max_solved": 1.0}, "max_solved must be a share of the answers in"),
        ({"samples": 0}, "samples must be at least 1"),
        ({"skip": -1}, "skip"),
    ):
        with pytest.raises(UserError, match=words):
            mine(**bad)


def test_rl_trains_on_what_was_kept(tmp_path: Path) -> None:
    one = RLStage(
        name="rl", model="tiny:nano", task=Numbers(), steps=3, prompts=3, algorithm=GRPO(group=2), sampling=Sampling(3),
        problems="mine", evaluate_every=0, rollouts_every=1,
    )  # fmt: skip
    run(tmp_path, mine(), one)
    rows = [row for step in (1, 2, 3) for row in Run(tmp_path).rollouts("rl", step)]
    assert {row.problem for row in rows} == {"train/0", "train/3", "train/6", "train/9"}


def test_chosen_problems_are_the_tasks_own_in_all_else() -> None:
    task = Arithmetic(level=3, format_weight=0.5)
    problem = task.problems("train", 2)[7]
    chosen = Chosen(task, (problem,))
    assert chosen.levels == (3,) and list(chosen.problems("train", 3)) == [problem]
    assert chosen.problems("test")[0] == task.problems("test")[0]
    answer = task.demonstration(problem)
    assert chosen.score(problem, answer) == task.score(problem, answer) and chosen.prompt(problem) == task.prompt(problem)


def test_chosen_problems_may_be_of_a_task_with_episodes_of_its_own() -> None:
    task = Guess()
    problem = task.problems("train")[3]
    assert list(Chosen(task, (problem,)).problems("train")) == [problem]


def test_problems_survive_the_file(tmp_path: Path) -> None:
    context = run(tmp_path, mine(task=Arithmetic(level=2), prompts=4, max_solved=0.9))
    read = read_problems(str(context.folder("mine") / "data.jsonl"))
    source = Arithmetic(level=2).problems("train")
    assert read == [source[n] for n in range(4)]


def test_the_recipe_moves_model_reference_and_prompts_along() -> None:
    stages = {stage.name: stage for stage in iterate(rounds=2).stages}
    assert list(stages) == ["sft", "before", "mine_1", "train_1", "check_1", "mine_2", "train_2", "check_2", "best", "after"]
    first, second = stages["mine_1"], stages["mine_2"]
    assert isinstance(first, MineStage) and isinstance(second, MineStage)
    assert (first.model, first.again, first.skip) == ("sft", "", 0)
    assert (second.model, second.again, second.skip) == ("train_1", "mine_1", 400)
    train = stages["train_2"]
    assert isinstance(train, RLStage)
    assert (train.model, train.problems, train.reference) == ("train_1", "mine_2", ""), "the reference is where the round began"
    assert "reference" in train.algorithm.roles
    held, chosen = replace(stages["after"], name="x").task, stages["check_1"].task  # type: ignore[attr-defined]
    shown = [{p.question for p in task.problems("test")[:n]} for task, n in ((held, 1000), (chosen, 500))]
    assert len(shown[0] & shown[1]) < 25, "rounds are chosen on other problems than they are judged on"
