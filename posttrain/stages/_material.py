"""The examples a supervised stage learns from: demonstrations of tasks and JSONL files, mixed by weight."""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from posttrain.data.demonstrations import from_file, from_task
from posttrain.data.report import DataReport, prepare
from posttrain.errors import Checked, NotNegative, require
from posttrain.stages.base import Context, data_place
from posttrain.tasks.base import Task
from posttrain.types import Example

if TYPE_CHECKING:
    from posttrain.models.policy import Policy


@dataclass(frozen=True, kw_only=True)
class Data(Checked):
    """One source of examples: a `file` in JSONL, or a `task` with how many demonstrations of each level. In place of a file, an earlier
    stage that has written data, such as a sample stage, can be named.

    `weight` is its share of the draws from all sources; 0 means in proportion to its size.
    """

    where: ClassVar[str] = "data: "

    file: str = ""
    task: Task | None = None
    counts: Mapping[int, int] = field(default_factory=dict)
    weight: NotNegative = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.file) != (self.task is not None), "data: give either a file or a task")
        require(
            self.task is None or bool(self.counts),
            "data: a task needs counts, such as {1: 200, 2: 1000}",
        )

    def examples(self, tokenizer: Any, seed: int, unused: set[str] | None = None) -> list[Example]:
        if self.task is None:
            return from_file(self.file, tokenizer, unused)
        return from_task(self.task, tokenizer, dict(self.counts), seed)

    def __str__(self) -> str:
        if self.task is None:
            return self.file
        return f"{type(self.task).__name__} demonstrations, " + ", ".join(
            f"{n} of level {k}" for k, n in self.counts.items()
        )


def placed(sources: Sequence[Data], context: Context) -> tuple[Data, ...]:
    """The sources with the names of this run's stages replaced by the files that those wrote."""
    return tuple(
        replace(source, file=data_place(source.file, context)) if source.file else source
        for source in sources
    )


@dataclass(frozen=True, slots=True, eq=False)
class Material:
    """Examples ready for training, set by set, with what happened to those left out."""

    sets: tuple[list[Example], ...]
    weights: tuple[float, ...]
    reports: tuple[DataReport, ...]


def gather(
    sources: Sequence[Data], tokenizer: Any, seed: int, max_length: int, all_tokens: bool
) -> Material:
    """Read every source, drop and count what cannot be trained on, and settle the weights of the mixture."""
    require(bool(sources), "a supervised stage needs data")
    sets, reports = [], []
    for source in sources:
        unused: set[str] = set()
        examples = source.examples(tokenizer, seed, unused)
        if all_tokens:
            examples = [replace(e, mask=np.arange(len(e.ids)) > 0) for e in examples]
        kept, report = prepare(examples, max_length)
        sets.append(kept)
        reports.append(replace(report, unused=tuple(sorted(unused))))
    tokens = [
        len(s) if source.weight == 0 else source.weight
        for s, source in zip(sets, sources, strict=True)
    ]
    mixed = {source.weight == 0 for source in sources}
    require(len(mixed) == 1, "data: give every source a weight, or none")
    return Material(tuple(sets), tuple(float(t) for t in tokens), tuple(reports))


def check_lengths(policy: Policy, sets: Iterable[Iterable[Example]], setting: str) -> None:
    """Refuse examples beyond the positions that the model was made for; `setting` is what leaves them out."""
    policy.check_length(
        max(len(example.ids) for examples in sets for example in examples), f"lower {setting}"
    )


def alphabet(tasks: Sequence[Task | None]) -> str:
    """The characters a tiny tokenizer needs: what the tasks declare, or all of printable ASCII where one declares nothing."""
    declared = [getattr(task, "alphabet", None) for task in tasks]
    if not declared or any(a is None for a in declared):
        return string.printable[:95] + "\n"
    return "".join(sorted(set("".join(a for a in declared if a))))
