"""Any data set of the hub, or a local one, through `datasets`: which fields hold question and answer, how to ask, how to score.

    task = Hub("openai/gsm8k", config="main", answer_after="####")

Needs the package `datasets`: pip install 'posttrain[data]'. Only data is read: `datasets` refuses a data set that brings code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from posttrain.data.records import load_hub
from posttrain.errors import require
from posttrain.tasks._judged import Judged, Part, Row


@dataclass(frozen=True)
class Hub(Judged):
    """`dataset` is a name on the hub, a folder of data files, or a folder that `save_to_disk` wrote. Without a `test_split` a
    share of the training split is held out by a hash of the questions."""

    dataset: str
    config: str = ""
    revision: str = ""  # a commit or tag, so that the data cannot change during a run
    train_split: str = "train"
    test_split: str = "test"

    def __post_init__(self) -> None:
        require(self.dataset, "hub: give a dataset, such as openai/gsm8k")
        train, test = self.train_split, self.test_split
        require(train, "hub: give a train_split")
        require(train != test, f"hub: train and test are both {train!r}; leave test_split empty")
        super().__post_init__()

    def parts(self) -> tuple[Part, Part | None]:
        train, test = (
            Part(f"{self.dataset} split {split}", (self.config, split, self.revision), self.rows)
            for split in (self.train_split, self.test_split)
        )
        return train, test if self.test_split else None

    def rows(self, part: Part) -> Iterator[Row]:
        config, split, revision = part.version
        found = load_hub(self.dataset, config, split, revision, "hub")
        require(found, f"hub: {self.dataset} split {split!r} has no rows")
        for number, row in enumerate(found):
            yield f"{self.dataset} {split} row {number}", f"{split}/{number}", row
