"""Data sets through `datasets`, from a local folder that it wrote or reads: fields, splits, and its absence."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain import config_tree
from posttrain.data import records as reader
from posttrain.errors import UserError
from posttrain.tasks.base import Task, validate
from posttrain.tasks.gsm8k import Gsm8k
from posttrain.tasks.hub import Hub

ROWS = [{"qa": {"ask": f"What is {n} plus {n}?"}, "gold": f"so #### {2 * n}"} for n in range(40)]


@pytest.fixture
def saved(tmp_path: Path, data_set: Callable[[Any], str]) -> str:
    folder = data_set({"train": ROWS[:30], "test": ROWS[30:]})
    datasets = pytest.importorskip("datasets")
    datasets.load_dataset(folder, cache_dir=str(tmp_path / "cache")).save_to_disk(str(tmp_path / "saved"))
    return str(tmp_path / "saved")


def hub(place: str, **settings: Any) -> Hub:
    return Hub(place, **{"question": "qa.ask", "answer": "gold", "answer_after": "####", "style": "boxed"} | settings)


def test_fields_splits_and_gold_answers(saved: str) -> None:
    task = hub(saved)
    assert [len(task.problems(split)) for split in ("train", "test")] == [30, 10]
    first = task.problems("test")[0]
    assert (first.id, first.question, first.answer) == ("test/0", "What is 30 plus 30?", "60")
    validate(task)
    assert task.score(first, "\\boxed{61}").outcome == "wrong" and task.final("\\boxed{ 61 }") == "61"


def test_without_a_test_split_a_share_is_held_out(saved: str) -> None:
    task = hub(saved, test_split="", held_out=0.3)
    train, test = ({p.question for p in task.problems(split)} for split in ("train", "test"))
    assert len(train) + len(test) == 30 and not train & test and test


def test_a_folder_of_files(data_set: Callable[[Any], str]) -> None:
    task = hub(data_set({"train": ROWS[:3], "test": [ROWS[1]]}))
    assert len(task.problems("train")) == 3
    with pytest.raises(UserError, match="1 questions are also in .* split train"):
        task.problems("test")


def test_what_is_not_there_is_one_line(saved: str) -> None:
    for settings, said in (
        ({"test_split": "dev"}, "no split 'dev'; it has train, test"),
        ({"answer": "solution"}, "row 0: no field 'solution'; it has gold, qa"),
        ({"answer_after": "%%"}, "'%%' is not in the field 'gold'"),
    ):
        with pytest.raises(UserError, match=said):
            hub(saved, **settings).problems("test")
    with pytest.raises(UserError, match="both 'train'"):
        hub(saved, test_split="train")


def test_without_the_package_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    reader.load_hub.cache_clear()
    for task in (Hub("nobody/nothing"), Gsm8k()):
        with pytest.raises(UserError, match=r"needs the package datasets: pip install 'posttrain\[data\]'"):
            task.problems("train")


def test_a_published_set_that_cannot_be_reached_says_where_else_it_may_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def unreachable(*given: Any, **more: Any) -> Any:
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    reader.load_hub.cache_clear()
    with pytest.raises(
        UserError, match=r"gsm8k: cannot load .*no network; or name a folder that holds the files: task.data=FOLDER"
    ):
        Gsm8k().problems("train")


def test_it_can_be_written_in_a_configuration() -> None:
    task = config_tree.from_tree({"name": "hub", "dataset": "a/b", "reward": "answer"}, Task, "task")
    assert isinstance(task, Hub) and config_tree.to_tree(task)["test_split"] == "test"
