"""What stages that learn from preferences share: units cut where a rollout would end, and prompts kept apart for judging."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import numpy as np

from posttrain.data.preferences import PreferenceReport, read_preferences
from posttrain.data.stream import permutation
from posttrain.data.units import prompt_length
from posttrain.errors import Count, Interval, Range, require
from posttrain.loop import LoopSchedule
from posttrain.monitor.rules import MonitorSettings
from posttrain.stages._material import alphabet
from posttrain.stages.base import Context, Stage, data_place
from posttrain.train.optimizer import Optimization
from posttrain.types import Example

Unit = tuple[Example, ...]


@dataclass(frozen=True, kw_only=True)
class PreferenceLearner(Stage):
    """What a stage that learns from files of preferences is told."""

    model: str
    data: tuple[str, ...]
    batch: Count = 32  # units an optimizer step
    optimizer: Optimization = field(
        default_factory=lambda: Optimization(lr=1e-6, warmup=20, schedule="cosine")
    )
    steps: Count = 300
    max_length: int = 1024
    held_out: Annotated[float, Range(ge=0, lt=1, text="a share of the prompts in [0, 1)")] = 0.1
    evaluate_every: Interval = 50
    checkpoint_every: Count = 100
    monitor: MonitorSettings = field(default_factory=MonitorSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            len(self.data) > 0, f"{self.name}: give at least one JSONL file of preferences as data"
        )

    def alphabet(self) -> str:
        return alphabet([])

    @abstractmethod
    def read(self, context: Context, tokenizer: object, paths: Sequence[str]) -> list[Unit]:
        """The units of some files, in the shape that the algorithm learns from."""

    def schedule(self, held_out: Sequence[Unit]) -> LoopSchedule:
        every = self.evaluate_every if held_out else 0
        return LoopSchedule(
            steps=self.steps, evaluate_every=every, checkpoint_every=self.checkpoint_every
        )


def until_end(example: Example) -> Example:
    """The example up to its last token that carries loss. What a template writes after it is never sampled, and the score of a rollout
    is read where the rollout ends."""
    end = int(np.flatnonzero(example.mask)[-1]) + 1
    steps = None if example.steps is None else example.steps[:end]
    return replace(example, ids=example.ids[:end], mask=example.mask[:end], steps=steps)


def read_units(
    context: Context,
    stage: str,
    path: str,
    tokenizer: object,
    max_length: int,
    wanted: Sequence[str],
) -> tuple[list[Unit], PreferenceReport]:
    """The units of a file, or of an earlier stage, each cut after its response; what became of each row is announced."""
    found = read_preferences(data_place(path, context), tokenizer, max_length)
    context.announce(stage, found.report.lines())
    kind, needed = found.report.kind, " or ".join(wanted)
    require(
        kind in wanted,
        f"{stage}: {path} holds rows of kind {kind}; this algorithm learns from {needed}",
    )
    return [tuple(until_end(example) for example in unit) for unit in found.units], found.report


def numbered_prompts(units: Sequence[Unit]) -> list[int]:
    """The number of each unit's prompt, the same for units that share one: what was said of those is not independent."""
    numbers: dict[bytes, int] = {}
    return [
        numbers.setdefault(unit[0].ids[: prompt_length(unit[0])].tobytes(), len(numbers))
        for unit in units
    ]


def split_by_prompt(
    units: Sequence[Unit], share: float, seed: int, where: str
) -> tuple[list[Unit], list[Unit]]:
    """(to train on, held out): `share` of the prompts, at least one, are held out with all that was said of them."""
    if share == 0:
        return list(units), []
    prompts = numbered_prompts(units)
    different = list(dict.fromkeys(prompts))
    count = max(1, round(share * len(different)))
    require(
        count < len(different),
        f"{where}: {len(different)} different prompts are too few to hold some out; add data, or set "
        "held_out=0",
    )
    aside = {different[i] for i in permutation(len(different), "held_out", seed)[:count]}
    train = [unit for unit, prompt in zip(units, prompts, strict=True) if prompt not in aside]
    return train, [unit for unit, prompt in zip(units, prompts, strict=True) if prompt in aside]
