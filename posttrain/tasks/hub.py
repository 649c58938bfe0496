"""Any data set of the hub, or one in a local folder, through `datasets`: which fields hold question and answer, how to ask, who judges.

    task = Hub("openai/gsm8k", config="main", answer_after="####", style="boxed")

Needs the package `datasets`: pip install 'posttrain[data]'. Only data is read: a data set that brings code is refused by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from posttrain.errors import require
from posttrain.tasks._judged import Judged
from posttrain.tasks._questions import load_hub, make_problem, one_side, require_apart
from posttrain.types import JSON, Code, Problem


@dataclass(frozen=True)
class Hub(Judged):
    """`dataset` is a name on the hub, a folder of data files, or what `save_to_disk` wrote. Without a `test_split` a share of the
    training split is held out by its content."""

    dataset: str
    config: str = ""
    revision: str = ""  # a commit or tag, so that the data cannot change under a run
    train_split: str = "train"
    test_split: str = "test"
    question: str = "question"  # the field that holds it, or a path such as `qa.question`; a list of messages is a conversation
    answer: str = "answer"
    answer_after: str = ""  # take what follows the last of these in the answer, such as "####"
    reward: Code = "math"
    options: Mapping[str, JSON] = field(default_factory=dict)  # keyword arguments of the reward
    style: str = "direct"
    system: str = ""
    examples: int = 0  # solved training problems shown before the question: few-shot
    held_out: float = 0.1  # the share for evaluation, where there is no test_split
    score_seconds: float = 10.0  # the time limit of a reward of yours

    def __post_init__(self) -> None:
        require(bool(self.dataset), "hub: give a dataset, such as openai/gsm8k")
        require(bool(self.train_split), "hub: give a train_split")
        require(
            self.train_split != self.test_split, f"hub: train and test are both {self.train_split!r}; leave test_split empty"
        )
        self.check_style("hub")
        require(0 < self.held_out < 1, f"hub: held_out is a share between 0 and 1, not {self.held_out}")
        require(self.score_seconds > 0, f"hub: score_seconds must be positive, not {self.score_seconds}")

    def pool(self, split: str) -> tuple[Problem, ...]:
        train = self._read(self.train_split)
        if not self.test_split:
            return one_side(train, self.held_out, split, self.dataset)
        if split == "train":
            return train
        test = self._read(self.test_split)
        require_apart(train, test, f"split {self.train_split}", f"{self.dataset} split {self.test_split}")
        return test

    def _read(self, split: str) -> tuple[Problem, ...]:
        return _problems(self.dataset, self.config, split, self.revision, self.question, self.answer, self.answer_after)


@lru_cache(maxsize=8)
def _problems(
    dataset: str, config: str, split: str, revision: str, question: str, answer: str, answer_after: str
) -> tuple[Problem, ...]:
    found = tuple(
        make_problem(row, f"{dataset} {split} row {number}", f"{split}/{number}", question, answer, answer_after)
        for number, row in enumerate(load_hub(dataset, config, split, revision, "hub"))
    )
    require(bool(found), f"hub: {dataset} split {split!r} has no rows")
    return found
