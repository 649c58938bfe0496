"""What tasks made of questions and gold answers share, wherever the records come from: files, the hub, a generator."""

from __future__ import annotations

import re
import unicodedata
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from posttrain.data.records import parse_messages, read_jsonl
from posttrain.errors import UserError, require
from posttrain.tasks._procedural import require_split, stable_hash
from posttrain.tasks.base import Task
from posttrain.types import JSON, Message, Problem

STYLES = {
    "direct": "{question}",
    "thinking": "{question}\n\nThink step by step before you answer.",
    "boxed": "{question}\n\nThink step by step, then give the final answer in \\boxed{}.",
}
SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz")
_THOUSANDS = re.compile(r"-?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")


class Questions(Task):
    """A task whose class declares these three fields and says where the problems of a split are."""

    style: str
    system: str
    examples: int  # solved training problems shown before the question: few-shot

    @abstractmethod
    def pool(self, split: str) -> tuple[Problem, ...]:
        """Every problem of a split; train and test have no question in common."""

    def check_style(self, task: str) -> None:
        require(
            self.style in STYLES, f"{task}: style is one of {', '.join(STYLES)}, not {self.style!r}"
        )
        require(self.examples >= 0, f"{task}: examples must not be negative, not {self.examples}")

    def problems(self, split: str, level: int | None = None) -> Sequence[Problem]:
        require_split(split)
        return self.pool(split)

    def prompt(self, problem: Problem) -> tuple[Message, ...]:
        before = [Message("system", self.system)] if self.system else []
        given = problem.facts.get("messages")
        if given:
            return (*before, *parse_messages(given, f"problem {problem.id}"))
        shown: list[Message] = []
        if self.examples:
            others = [p for p in self.pool("train")[: self.examples + 1] if p.id != problem.id]
            for other in others[: self.examples]:
                shown += [
                    Message("user", self.ask(other)),
                    Message("assistant", self.demonstration(other)),
                ]
        return (*before, *shown, Message("user", self.ask(problem)))

    def ask(self, problem: Problem) -> str:
        return STYLES[self.style].replace("{question}", problem.question)

    def demonstration(self, problem: Problem) -> str:
        """The worked answer, with its final part in a box where the style asks for one."""
        worked = str(problem.facts.get("worked") or problem.answer)
        return (
            f"{worked}\n\\boxed{{{problem.answer}}}"
            if self.style == "boxed" and "\\boxed" not in worked
            else worked
        )


def normalised(text: str) -> str:
    """A question as it is compared with others: one Unicode form, one case, single spaces. Signs stay: 12+3 is not 12-3.

    >>> normalised("What  is\\n12+3?") == normalised("what is 12+3?") != normalised("what is 12-3?")
    True
    """
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def canonical(answer: str | None) -> str | None:
    r"""An answer as it votes: without the spaces, dollar signs and commas that two spellings of one number differ by.

    >>> [canonical(a) for a in ("1,250", " $1250.00$ ", r"\frac{1}{2}", "3, 4", "", None)]
    ['1250', '1250', '\\frac{1}{2}', '3,4', None, None]
    """
    text = "".join((answer or "").split()).replace("\\$", "").strip("$").removesuffix(".")
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    if re.fullmatch(r"-?[0-9]+\.[0-9]+", text):
        text = text.rstrip("0").rstrip(".")
    return text or None


def one_side(
    problems: Sequence[Problem], share: float, split: str, where: str
) -> tuple[Problem, ...]:
    """One side of a set that has no test part, decided by each question's text: a question that comes twice is on one side."""

    def is_test(problem: Problem) -> bool:
        return stable_hash("held out", normalised(problem.question)) % 10_000 < 10_000 * share

    chosen = tuple(p for p in problems if is_test(p) == (split == "test"))
    require(
        bool(chosen),
        f"{where}: no problem is left for {split}; give a test file or split, or another held_out",
    )
    return chosen


def require_apart(
    train: Sequence[Problem], test: Sequence[Problem], train_name: str, test_name: str
) -> None:
    """Refuse held-out questions that are also trained on."""
    seen = {normalised(p.question) for p in train}
    leaked = [p for p in test if normalised(p.question) in seen]
    said = (
        f"{len(leaked)} questions are also in {train_name}, such as that of {leaked[0].id}"
        if leaked
        else ""
    )
    require(not leaked, f"{test_name}: {said}; a score on them would be memory")


def make_problem(
    record: Mapping[str, Any],
    where: str,
    name: str,
    question: str = "question",
    answer: str = "answer",
    answer_after: str = "",
) -> Problem:
    """A record's question and gold answer. A list of messages is the conversation so far; a field may be a path such as `a.b`."""
    asked, worked = pick(record, question, where), str(pick(record, answer, where))
    gold = worked
    if answer_after:
        _, marker, gold = worked.rpartition(answer_after)
        require(bool(marker), f"{where}: {answer_after!r} is not in the field {answer!r}")
    facts: dict[str, JSON] = {"worked": worked} if gold != worked else {}
    if isinstance(asked, list):
        told = all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in asked)
        require(told, f"{where}: {question} has no messages")
        facts["messages"] = asked
        asked = parse_messages(asked, f"{where}: {question}")[-1].content if asked else ""
    require(
        isinstance(asked, str) and bool(asked.strip()),
        f"{where}: the field {question!r} is empty or no text",
    )
    return Problem(name, asked, gold.strip(), facts=facts)


def pick(record: Mapping[str, Any], name: str, where: str) -> Any:
    """The field called `name`, or the one at the path that it spells."""
    if name in record:
        return record[name]
    found: Any = record
    for part in name.split("."):
        there = isinstance(found, Mapping) and part in found
        require(
            there, f"{where}: no field {name!r}; it has {', '.join(sorted(record)) or 'nothing'}"
        )
        found = found[part]
    return found


def read_sides(
    task: str,
    data: str,
    test_data: str,
    sources: Mapping[str, tuple[str, str]],
    files: Mapping[str, Sequence[str]],
    make: Callable[[dict[str, Any], str, str], Problem],
) -> tuple[tuple[Problem, ...], ...]:
    """(train, test) of a published data set: from a folder or a training file beside `test_data`, else from the hub. `sources` has the
    hub's data set and configuration of each split, `files` what its file may be called, `make` a problem of a row."""
    sides = []
    for split in ("train", "test"):
        if not data:
            rows = [
                (f"{sources[split][0]} {split} row {n}", row)
                for n, row in enumerate(load_hub(*sources[split], split, "", task))
            ]
        else:
            folder = Path(data).expanduser().is_dir()
            require(
                folder or Path(data).expanduser().is_file(),
                f"{task}: there is no folder or file {data}",
            )
            file = data_file(data, files[split], task) if folder else data
            require(
                folder or bool(test_data), f"{task}: give test_data, the held-out file, beside data"
            )
            rows = list(
                read_jsonl(test_data if test_data and split == "test" else file, lists=True)
            )
        sides.append(
            tuple(make(row, where, f"{split}/{number}") for number, (where, row) in enumerate(rows))
        )
    require_apart(sides[0], sides[1], "the training part", f"{task}'s test part")
    return tuple(sides)


def data_file(folder: str, stems: Iterable[str], task: str) -> str:
    """The first file in `folder` that is called one of `stems`, with any of the known endings."""
    names = [f"{stem}{suffix}" for stem in stems for suffix in SUFFIXES]
    found = next((Path(folder, name) for name in names if Path(folder, name).is_file()), None)
    require(
        found is not None,
        f"{task}: {folder} holds none of {', '.join(names[:4])}, ...; name the files with data and test_data",
    )
    return str(found)


@lru_cache(maxsize=8)
def load_hub(
    dataset: str, config: str, split: str, revision: str, task: str
) -> tuple[dict[str, Any], ...]:
    """The records of a data set's split through `datasets`: from the hub, its cache, a local folder, or what `save_to_disk` wrote."""
    try:
        import datasets
    except ImportError:
        hint = "" if task == "hub" else "; or name a folder that holds the files: task.data=FOLDER"
        raise UserError(
            f"{task}: reading {dataset} needs the package datasets: pip install 'posttrain[data]'{hint}"
        ) from None
    place = Path(dataset).expanduser()
    # a bare name may be that of a builder (text, json, csv, ...), which would read all such files of the working directory
    named = re.fullmatch(r"[\w.-]+/[\w.-]+", dataset) is not None
    require(
        named or place.is_dir(),
        f"{task}: {dataset!r} is no folder here; a data set of the hub is called org/name, such as "
        "openai/gsm8k",
    )
    try:
        if (place / "dataset_dict.json").is_file() or (place / "state.json").is_file():
            whole: Any = datasets.load_from_disk(str(place))
        else:
            whole = datasets.load_dataset(
                str(place) if place.is_dir() else dataset, config or None, revision=revision or None
            )
    except Exception as error:  # the network, a hub's answer, files of others: none of them ours
        raise UserError(
            f"{task}: cannot load {dataset}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        ) from error
    if not hasattr(whole, "keys"):
        require(
            split == "train",
            f"{task}: {dataset} has no splits; leave test_split empty to hold out a share of it",
        )
        return tuple(dict(row) for row in whole)
    require(split in whole, f"{task}: {dataset} has no split {split!r}; it has {', '.join(whole)}")
    return tuple(dict(row) for row in whole[split])
