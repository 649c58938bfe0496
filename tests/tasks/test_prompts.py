"""Prompts of one's own as a task: small files, what is held out, columns for the reward, and a reward in a file."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from posttrain import config, config_tree, pipeline
from posttrain.errors import UserError
from posttrain.runs.read import Run
from posttrain.stages.base import Stage
from posttrain.tasks.base import Task
from posttrain.tasks.prompts import Prompts
from posttrain.types import Score

MINE = "def reward(prompt, response, style, limit=3):\n    return len(response) / 10 if style == 'long' else -1.0\n"


def written(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("count", "held_out", "kept"), [(4, 0.1, 0), (4, 0.25, 1), (10, 0.1, 1), (4, 2, 2), (4, 0, 0), (1, 0.1, 0)]
)
def test_a_share_or_a_number_is_held_out_of_small_files(tmp_path: Path, count: int, held_out: float, kept: int) -> None:
    task = Prompts(written(tmp_path, [{"prompt": f"say {n}"} for n in range(count)]), held_out=held_out)
    train, test = task.problems("train"), task.problems("test")
    assert len(test) == kept and len(train) == count - kept and not {p.question for p in train} & {p.question for p in test}
    assert not task.verifiable and not task.scores


def test_a_prompt_that_comes_twice_is_on_one_side(tmp_path: Path) -> None:
    task = Prompts(written(tmp_path, [{"prompt": f"say {n % 5}"} for n in range(20)]), held_out=2)
    assert len(task.problems("test")) == 8 and len(task.problems("train")) == 12
    assert task.ready() == ("12 prompts to train on (3 different), 8 held out",)


def test_every_column_is_kept_and_the_answer_is_optional(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    file = written(tmp_path, [{"prompt": chat, "style": "x"}, {"question": "2+2=", "answer": 4}])
    first, second = Prompts(file).problems("train")
    assert [m.content for m in Prompts(file).prompt(first)] == ["be brief", "hello"]
    assert (first.answer, first.facts["columns"]["style"]) == ("", "x")
    assert (second.question, second.answer) == ("2+2=", "4")
    assert second.facts["columns"] == {"prompt": None, "style": None, "question": "2+2=", "answer": 4}


def test_a_second_system_message_is_refused(tmp_path: Path) -> None:
    chats = [[{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}], "hello"]
    task = Prompts(written(tmp_path, [{"prompt": chat} for chat in chats]), system="be long")
    first, second = task.problems("train")
    with pytest.raises(UserError, match="problem .*:1 has a system message of its own; leave out that or `system`"):
        task.prompt(first)
    assert [message.role for message in task.prompt(second)] == ["system", "user"]


def test_rows_without_an_answer_are_counted_before_a_reward_that_asks_for_it(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "def right(response, answer): return 1.0\ndef length(response, **columns): return 1.0\n"
        "def own(response, ground_truth, target): return 1.0 if target is None else 0.0\n"
    )
    rows = [{"prompt": "a"}, {"prompt": "b", "answer": "1", "target": 2}, {"prompt": "c", "answer": ""}]
    file = written(tmp_path, rows)
    for name, says in (("right", True), ("length", False), ("own", True)):
        task = Prompts(file, reward=f"{mine}:{name}", held_out=0)
        lines = [line for line in task.ready() if "no answer" in line]
        count = f"2 of 3 prompts to train on have no answer, such as prompts.jsonl:1: reward {name}"
        assert [line.startswith(count) and line.endswith("gets None for it") for line in lines] == [True] * says
    score = task.score(task.problems("train")[0], "x")  # the first row has no target, and gets None
    assert isinstance(score, Score) and score.value == 1.0


def test_answers_that_are_numbers_are_said_to_be(tmp_path: Path) -> None:
    """`response == answer` would be false for all."""
    mine = tmp_path / "mine.py"
    mine.write_text("def right(response, answer): return response == answer\ndef length(response): return 1.0\n")
    for answer, name, says in ((42, "right", True), ("42", "right", False), (42, "length", False)):
        task = Prompts(written(tmp_path, [{"prompt": f"{answer!r}", "answer": answer}]), reward=f"{mine}:{name}", held_out=0)
        line = "reward right (mine.py line 1) gets a number as the answer, such as 42, and the response as text"
        assert [line for line in task.ready() if "as text" in line] == [line] * says


def test_without_a_reward_it_scores_nothing_and_a_stage_must(tmp_path: Path) -> None:
    task = Prompts(written(tmp_path, [{"prompt": "a"}]))
    assert not task.score(task.problems("train")[0], "b").valid
    tree = {"stage": "rl", "name": "rl", "model": "tiny:nano", "task": {"name": "prompts", "file": task.file}}
    with pytest.raises(UserError, match="rl: the task scores nothing by itself; give it a reward"):
        config_tree.from_tree(tree, Stage, "rl")
    with pytest.raises(UserError, match="eval: the task scores nothing by itself"):
        config_tree.from_tree({**tree, "stage": "evaluate", "name": "eval"}, Stage, "eval")


def test_the_name_of_a_file_is_enough(tmp_path: Path) -> None:
    file = written(tmp_path, [{"prompt": "a"}])
    assert config_tree.from_tree({"name": f"prompts:{file}"}, Task, "task") == Prompts(file)


def test_a_shipped_reward_judges_answers(tmp_path: Path) -> None:
    task = Prompts(written(tmp_path, [{"prompt": "2+2=", "answer": "4"}]), reward="math")
    problem = task.problems("train")[0]
    assert task.verifiable and task.score(problem, "\\boxed{4}") == Score(1.0, outcome="correct")
    assert "boxed" in task.prompt(problem)[0].content


def test_a_recipe_in_yaml_names_the_file_and_a_function(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    file = written(tmp_path, [{"prompt": f"say {n}", "style": "long" if n % 2 else "short"} for n in range(12)])
    recipe = tmp_path / "own.yaml"
    task = f'{{name: prompts, file: {file}, reward: "{tmp_path}/mine.py:reward", held_out: 3}}'
    recipe.write_text(
        f"""
before: before
after: after
stages:
  - {{stage: evaluate, name: before, model: "tiny:nano", task: {task}, sampling: {{max_new_tokens: 4, temperature: 0}}}}
  - stage: rl
    name: rl
    model: tiny:nano
    task: {task}
    algorithm: {{name: grpo, group: 2, beta: 0.0}}
    sampling: {{max_new_tokens: 4}}
    steps: 1
    prompts: 2
    evaluate_every: 1
  - {{stage: evaluate, name: after, model: rl, task: {task}, sampling: {{max_new_tokens: 4, temperature: 0}}}}
"""
    )
    with pytest.raises(UserError, match="would run code from a file; pass --allow-code"):
        config.parse(str(recipe), [])
    out = tmp_path / "run"
    settings = config.parse(str(recipe), [f"out={out}", "device=cpu", "threads=1"], allow_code=True)
    assert asyncio.run(settings.recipe.stages[1].task.scored(Prompts(file, reward="").problems("train")[0], "abc")).valid
    pipeline.start(settings)
    run = Run(out)
    rows = run.rollouts("rl", 1)
    style = {f"say {n}": n % 2 for n in range(12)}
    assert rows and all(row.reward == (len(row.response) / 10 if style[row.question] else -1.0) for row in rows)
    first, last = run.metrics("rl")[0].figures, run.metrics("rl")[-1].figures
    assert first["reward/test_low"] <= first["reward/test"] <= first["reward/test_high"] and "accuracy/test" not in last
    assert (run.summary or {})["stages"]["rl"]["best_score"]["figure"] == "reward/test"
    assert (run.summary or {})["before"] == (run.summary or {})["stages"]["before"]["reward"]
    out_text = capsys.readouterr().out
    assert "tiny:nano: reward " in out_text and "answer right" not in out_text and "before: accuracy" not in out_text


def test_what_a_style_adds_to_own_prompts_is_said(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text("".join(f'{{"prompt": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(4)))
    (line,) = [line for line in Prompts(str(file), reward="answer").ready() if "ends with" in line]
    assert line.startswith("each prompt ends with 'Think step by step, then end with the final answer after #.'")
    assert not [line for line in Prompts(str(file), reward="answer", style="direct").ready() if "ends with" in line]
