"""Any data set of the hub, or one in a local folder, through `datasets`: which fields hold question and answer, how to ask, who judges.

    task = Hub("openai/gsm8k", config="main", answer_after="####")

Needs the package `datasets`: pip install 'posttrain[data]'. Only data is read: a data set that brings code is refused by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.data.hub import load_hub
from posttrain.errors import require
from posttrain.tasks._judged import Judged


@dataclass(frozen=True, slots=True)
class Split:
    """One split of a data set."""

    dataset: str
    config: str
    split: str
    revision: str

    @property
    def name(self) -> str:
        return f"{self.dataset} split {self.split}"

    def rows(self) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
        found = load_hub(self.dataset, self.config, self.split, self.revision, "hub")
        require(bool(found), f"hub: {self.dataset} split {self.split!r} has no rows")
        for number, row in enumerate(found):
            yield f"{self.dataset} {self.split} row {number}", f"{self.split}/{number}", row


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
        same = self.train_split == self.test_split
        require(
            not same, f"hub: train and test are both {self.train_split!r}; leave test_split empty"
        )
        self.check_settings("hub")

    def parts(self) -> tuple[Split, Split | None]:
        train, test = (
            Split(self.dataset, self.config, s, self.revision)
            for s in (self.train_split, self.test_split)
        )
        return train, test if self.test_split else None
