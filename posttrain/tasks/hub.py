"""Any data set of the hub, or one in a local folder, through `datasets`: which fields hold question and answer, how to ask, who judges.

    task = Hub("openai/gsm8k", config="main", answer_after="####", style="boxed")

Needs the package `datasets`: pip install 'posttrain[data]'. Only data is read: a data set that brings code is refused by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from posttrain.errors import require
from posttrain.tasks._judged import Judged
from posttrain.tasks._questions import load_hub, make_problem
from posttrain.types import Problem


@dataclass(frozen=True)
class Hub(Judged):
    """`dataset` is a name on the hub, a folder of data files, or what `save_to_disk` wrote. Without a `test_split` a share of the
    training split is held out by its content."""

    dataset: str
    config: str = ""
    revision: str = ""  # a commit or tag, so that the data cannot change under a run
    train_split: str = "train"
    test_split: str = "test"

    def __post_init__(self) -> None:
        require(bool(self.dataset), "hub: give a dataset, such as openai/gsm8k")
        require(bool(self.train_split), "hub: give a train_split")
        require(
            self.train_split != self.test_split,
            f"hub: train and test are both {self.train_split!r}; leave test_split empty",
        )
        self.check_settings("hub")

    def parts(self) -> tuple[str, str]:
        return self.train_split, self.test_split

    def called(self, part: str) -> str:
        return f"{self.dataset} split {part}"

    def read(self, part: str) -> tuple[Problem, ...]:
        return _problems(
            self.dataset,
            self.config,
            part,
            self.revision,
            self.question,
            self.answer,
            self.answer_after,
        )


@lru_cache(maxsize=8)
def _problems(
    dataset: str,
    config: str,
    split: str,
    revision: str,
    question: str,
    answer: str,
    answer_after: str,
) -> tuple[Problem, ...]:
    found = tuple(
        make_problem(
            row,
            f"{dataset} {split} row {number}",
            f"{split}/{number}",
            question,
            answer,
            answer_after,
        )
        for number, row in enumerate(load_hub(dataset, config, split, revision, "hub"))
    )
    require(bool(found), f"hub: {dataset} split {split!r} has no rows")
    return found
