"""What stages that learn from preferences share: units cut where a rollout would end, and prompts kept apart for judging."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import numpy as np

from posttrain.data.preferences import PreferenceReport, read_preferences
from posttrain.data.stream import permutation
from posttrain.data.units import prompt_length
from posttrain.errors import Range, require
from posttrain.stages.base import Context, data_place
from posttrain.types import Example

Unit = tuple[Example, ...]


# a share of the prompts that is kept apart
HeldOut = Annotated[float, Range(ge=0, lt=1, text="a share of the prompts in [0, 1)")]
# the kinds of rows that a file may hold, by what the algorithm learns from
ROWS = {
    "pairs": ("pair", "openai", "ranking"),
    "labels": ("unpaired", "pair", "openai"),
    "rankings": ("pair", "openai", "ranking"),
    "step_labels": ("steps",),
}


def check_data(stage: str, data: Sequence[str]) -> None:
    require(len(data) > 0, f"{stage}: give at least one JSONL file of preferences as data")


def until_end(example: Example) -> Example:
    """The example up to its last token that carries loss. What a template writes after it is never sampled, and the score of a rollout
    is read where the rollout ends."""
    end = int(np.flatnonzero(example.mask)[-1]) + 1
    steps = None if example.steps is None else example.steps[:end]
    return replace(example, ids=example.ids[:end], mask=example.mask[:end], steps=steps)


def read_units(
    context: Context, stage: str, path: str, tokenizer: object, max_length: int, learns_from: str
) -> tuple[list[Unit], PreferenceReport]:
    """The units of a file, or of an earlier stage, each cut after its response; what became of each row is announced."""
    found = read_preferences(data_place(path, context), tokenizer, max_length)
    context.announce(stage, found.report.lines())
    kind, wanted = found.report.kind, ROWS[learns_from]
    require(
        kind in wanted,
        f"{stage}: {path} holds rows of kind {kind}; this algorithm learns from {' or '.join(wanted)}",
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
