"""The material of stages that do not sample. Demonstrations of tasks and JSONL files are mixed by weight. Sequences of preference
data are cut where a rollout would end. Some prompts are held out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

import numpy as np

from posttrain.data import demonstrations
from posttrain.data.preferences import Unit, prompt_length
from posttrain.data.stream import permutation
from posttrain.errors import NotNegative, Range, require
from posttrain.models.load import Reader
from posttrain.models.policy import Policy
from posttrain.stages._naming import DataName, Naming
from posttrain.stages.base import Context, data_place
from posttrain.tasks.base import Task
from posttrain.types import Example

FEW = 4  # demonstrations of a task that are rendered before a run
# a share of the prompts that is not trained on
HeldOut = Annotated[float, Range(ge=0, lt=1, text="a share of the prompts in [0, 1)")]
# the kinds of rows that a file may hold, by what the algorithm learns from
ROWS = {
    "pairs": ("pair", "openai", "ranking"),
    "labels": ("unpaired", "pair", "openai"),
    "rankings": ("pair", "openai", "ranking"),
    "step_labels": ("steps",),
}


@dataclass(frozen=True, kw_only=True)
class Data(Naming):
    """One source of examples: a `file` in JSONL, or a `task` with the number of demonstrations of each level. Instead of a file,
    name an earlier stage that writes data, such as a sample stage.

    `weight` is its share of the draws from all sources; 0 means in proportion to its size. `columns` has the file's own names of
    columns: {prompt: question, completion: reply}.
    """

    where: ClassVar[str] = "data: "
    shorthand: ClassVar[str] = "file"  # a name alone is a file

    file: DataName = ""
    task: Task | None = None
    counts: Mapping[int, int] = field(default_factory=dict)
    weight: NotNegative = 0.0
    columns: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.file) != (self.task is not None), "data: give either a file or a task")
        counted = self.task is None or bool(self.counts)
        require(counted, "data: a task needs counts, such as {1: 200, 2: 1000}")

    def few(self) -> Data:
        """The source with few demonstrations of its task, for a check: demonstrations are alike, and a task makes them without
        reading data. Raises an error if a level has fewer problems than requested."""
        if self.task is None:
            return self
        for level, count in self.counts.items():
            demonstrations.check_count(self.task, level, count)
        counts = {level: min(count, FEW) for level, count in self.counts.items()}
        return replace(self, counts=counts)

    def examples(self, tokenizer: Any, seed: int, notes: demonstrations.Notes) -> list[Example]:
        if self.task is None:
            return demonstrations.from_file(self.file, tokenizer, notes, self.columns)
        return demonstrations.from_task(self.task, tokenizer, dict(self.counts), seed)

    def __str__(self) -> str:
        if self.task is None:
            return self.file
        counts = ", ".join(f"{n} of level {k}" for k, n in self.counts.items())
        return f"{type(self.task).__name__} demonstrations, {counts}"


def check_sources(
    sources: Sequence[Data], reader: Reader, before: Collection[str], limit: int
) -> None:
    """Raise the errors that reading the sources would raise. The data of the stages `before` does not exist yet."""
    there = [source.few() for source in sources if source.file not in before]
    if there and reader.tokenizer is not None:
        gather(there, reader.tokenizer, 0, limit, all_tokens=True)


def placed(sources: Sequence[Data], context: Context) -> tuple[Data, ...]:
    """The sources, with names of this run's stages replaced by the files that they wrote."""
    return tuple(
        replace(source, file=data_place(source.file, context)) if source.file else source
        for source in sources
    )


@dataclass(frozen=True, slots=True, eq=False)
class Material:
    """Examples for training, set by set, with reports on those left out."""

    sets: tuple[list[Example], ...]
    weights: tuple[float, ...]
    reports: tuple[demonstrations.DataReport, ...]
    held_out: tuple[Unit, ...] = ()

    @property
    def size(self) -> int:
        """The number of examples to train on."""
        return sum(map(len, self.sets))


def gather(
    sources: Sequence[Data],
    tokenizer: Any,
    seed: int,
    max_length: int,
    all_tokens: bool,
    share: float = 0.0,
) -> Material:
    """Read every source, drop and count unusable rows, hold out a share of the prompts, and compute the weights of the mixture."""
    found: list[list[Unit]] = []
    reports = []
    for source in sources:
        notes = demonstrations.Notes()
        examples = source.examples(tokenizer, seed, notes)
        notes.check(tokenizer, examples)
        if all_tokens:
            examples = [replace(e, mask=np.arange(len(e.ids)) > 0) for e in examples]
        kept, report = demonstrations.prepare(examples, max_length)
        found.append([(example,) for example in kept])
        reports.append(replace(report, notes=notes))
    mixed = {source.weight == 0 for source in sources}
    require(len(mixed) == 1, "data: give every source a weight, or none")
    parts, held_out = split_sources(found, share, seed)
    sets = [[unit[0] for unit in part] for part in parts]
    weights = (float(d.weight or len(s)) for s, d in zip(sets, sources, strict=True))
    return Material(tuple(sets), tuple(weights), tuple(reports), tuple(held_out))


def check_lengths(policy: Policy | Reader, sets: Iterable[Iterable[Example]], setting: str) -> None:
    """Raise an error for examples longer than the model's positions; `setting` is the key that leaves them out."""
    longest = max(len(example.ids) for examples in sets for example in examples)
    policy.check_length(longest, f"lower {setting}")


def until_end(example: Example) -> Example:
    """The example up to its last loss token. The policy never samples what a template writes after it, and a rollout is scored at
    its end."""
    end = int(np.flatnonzero(example.mask)[-1]) + 1
    steps = None if example.steps is None else example.steps[:end]
    return replace(example, ids=example.ids[:end], mask=example.mask[:end], steps=steps)


def numbered_prompts(units: Sequence[Unit]) -> list[int]:
    """The index of each unit's prompt, equal for units with the same prompt, because their labels are not independent. A text
    without a prompt, with loss on all tokens, counts as its own prompt."""
    numbers: dict[bytes, int] = {}
    firsts = [(unit[0].ids, prompt_length(unit[0]), len(unit)) for unit in units]
    prompts = (ids if begin < 2 and size == 1 else ids[:begin] for ids, begin, size in firsts)
    return [numbers.setdefault(prompt.tobytes(), len(numbers)) for prompt in prompts]


def measured_units(context: Context, stage: str, units: Sequence[Unit], count: int) -> list[Unit]:
    """All held-out units or, if there are more than `count`, a sample of them. It is announced, random because files are often
    sorted, and the same each time."""
    if len(units) <= count:
        return list(units)
    drawn = f"measured on {count:,} of the {len(units):,} held out, drawn by the seed"
    context.announce(stage, [f"{drawn} (evaluate_units)"])
    chosen = permutation(len(units), "measured", context.seed)[:count]
    return [units[n] for n in sorted(chosen.tolist())]


def split_sources(
    sources: Sequence[Sequence[Unit]], share: float, seed: int
) -> tuple[list[list[Unit]], list[Unit]]:
    """(training units by source, held-out units). Of every source, `share` of the prompts, at least one, are held out with all
    their units. Each source keeps at least one prompt for training, so a source with a single prompt holds out nothing."""
    if share == 0:
        return [list(units) for units in sources], []
    numbers = iter(numbered_prompts([unit for units in sources for unit in units]))
    numbered = [[(next(numbers), unit) for unit in units] for units in sources]
    different = len({number for part in numbered for number, _ in part})
    count = min(max(1, round(share * different)), different - 1)
    aside = {int(number) for number in permutation(different, "held_out", seed)[:count]}
    for own in ({number for number, _ in part} for part in numbered):
        if own and own <= aside:
            aside.remove(min(own))
    train = [[unit for number, unit in part if number not in aside] for part in numbered]
    return train, [unit for part in numbered for number, unit in part if number in aside]
