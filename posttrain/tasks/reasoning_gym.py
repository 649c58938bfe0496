"""Problems of the package reasoning_gym: about a hundred generators, each with its own verifier (`reasoning_gym:leg_counting`).

    task = ReasoningGym("leg_counting", options={"max_animals": 4})

Needs the package: pip install 'posttrain[gym]'. Problems are drawn from one seeded sequence; the text of a question decides
whether it is for training or held out, so the two never share one. Some verifiers parse answers with sympy, which evaluates
what it reads: scoring runs in worker processes with a time limit, but not in a sandbox. A config file may name such a verifier
only with the user's permission.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar, Literal

from posttrain.errors import Count, Seed, UserError, refuse_unknown
from posttrain.tasks._packaged import packaged
from posttrain.tasks._procedural import require_split, side
from posttrain.tasks._questions import canonical, normalised
from posttrain.tasks.base import Task
from posttrain.trust import active
from posttrain.types import JSON, Message, Problem, Score

STYLES = {
    "direct": "{question}",
    "tagged": "{question}\n\nThink step by step, then give the final answer between <answer> and </answer>.",
}
TAGGED = re.compile(r"<answer>((?:(?!<answer>)[\s\S])*?)</answer>")
SEARCHED = 20_000  # characters from the end that are searched for an answer
# found in the source of a verifier that evaluates text, or that calls another verifier
EVALUATES = re.compile(r"\b(sympy|eval|exec|create_dataset)\b")
PATIENCE = 20  # draws per wanted problem before the generator counts as exhausted


@dataclass(frozen=True)
class ReasoningGym(Task):
    """`generator` is its name in the package, `options` its configuration. The verifier gives the score; solved means 1."""

    shorthand: ClassVar[str] = "generator"  # `reasoning_gym:NAME` sets it
    isolated = True

    generator: str
    options: Mapping[str, JSON] = field(default_factory=dict)
    # tagged: the answer is between tags; direct: the response is the answer
    style: Literal["direct", "tagged"] = "tagged"
    system: str = ""
    train: Count = 2000  # the most problems of each split
    test: Count = 500
    seed: Seed = 0
    score_seconds: float = 10.0

    def __post_init__(self) -> None:
        self.check(bool(self.generator), "give a generator, such as reasoning_gym:leg_counting")
        super().__post_init__()
        reserved = " and ".join(sorted({"seed", "size"} & set(self.options)))
        decide = "seed, train and test decide what is drawn"
        self.check(not reserved, f"{reserved} is not for options; {decide}")

    def problems(self, split: str, level: int | None = None) -> list[Problem]:
        require_split(split)
        found = self._source().sides[split]
        none = f"{self.generator} gave no {split} problem with these options; widen them"
        self.check(bool(found), none)
        return found

    def _source(self) -> _Source:
        options = json.dumps(dict(self.options), sort_keys=True)
        return _drawn(self.generator, options, self.train, self.test, self.seed)

    def prompt(self, problem: Problem) -> tuple[Message, ...]:
        before = (Message("system", self.system),) if self.system else ()
        asked = STYLES[self.style].replace("{question}", problem.question)
        return (*before, Message("user", asked))

    def score(self, problem: Problem, response: str) -> Score:
        given = self._given(response)
        if given is None:
            return Score(0.0, outcome="unparseable")
        source = self._source()
        entry = source.entries[int(problem.facts["index"])]
        value = float(source.dataset.score_answer(given, entry))
        if not isfinite(value):
            return Score.failed(f"the verifier of {self.generator} returned {value}")
        return Score(value, outcome="correct" if value >= 1 else "wrong")

    def final(self, response: str) -> str | None:
        return canonical(self._given(response))

    def _given(self, response: str) -> str | None:
        if self.style == "direct":
            return response.strip() or None
        found = TAGGED.findall(response[-SEARCHED:])
        return found[-1].strip() or None if found else None

    def demonstration(self, problem: Problem) -> str:
        none = f"{self.generator} gives no solutions; it can be trained by reward only"
        self.check(bool(problem.answer), none)
        return problem.answer if self.style == "direct" else f"<answer>{problem.answer}</answer>"

    def ready(self) -> tuple[str, ...]:
        """Refuse a verifier that evaluates what the model writes, if only a file names it: the model may be untrusted too."""
        modules = (sys.modules[kind.__module__] for kind in type(self._source().dataset).__mro__)
        own = [module for module in modules if module.__name__.startswith("reasoning_gym.")]
        files = [str(module.__file__) for module in own]
        if any(EVALUATES.search(Path(file).read_text("utf-8")) for file in files):
            active().require_evaluation(self.generator)
        return ()

    @property
    def seconds(self) -> float:
        return self.score_seconds


@dataclass
class _Source:
    """A generator with the entries drawn from it. Entries stay here: their metadata, which the verifier needs, is not always
    JSON."""

    dataset: Any
    entries: dict[int, Any]
    sides: dict[str, list[Problem]]


@lru_cache(maxsize=4)
def _drawn(generator: str, options: str, train: int, test: int, seed: int) -> _Source:
    wanted = {"train": train, "test": test}
    dataset = _dataset(generator, json.loads(options), PATIENCE * (train + test), seed)
    drawn = _Source(dataset, {}, {split: [] for split in wanted})
    seen: set[str] = set()
    for index in range(len(dataset)):
        if all(len(drawn.sides[split]) == count for split, count in wanted.items()):
            break
        entry = dataset[index]
        question, answer = str(entry["question"]), entry["answer"]
        text = normalised(question)
        split = side("reasoning_gym", generator, text)
        if len(drawn.sides[split]) == wanted[split] or text in seen:
            continue
        seen.add(text)
        drawn.entries[index] = entry
        gold = "" if answer is None else str(answer)  # a few generators have only a verifier
        made = Problem(f"{generator}/{index}", question, gold, facts={"index": index})
        drawn.sides[split].append(made)
    return drawn


def _dataset(generator: str, options: Mapping[str, JSON], size: int, seed: int) -> Any:
    package = packaged("reasoning_gym", "reasoning_gym", "gym")
    known = packaged("reasoning_gym.factory", "reasoning_gym", "gym").DATASETS
    refuse_unknown("generator of reasoning_gym", [generator], known)
    try:
        return package.create_dataset(generator, seed=seed, size=size, **options)
    except (TypeError, ValueError, AssertionError) as error:  # its own check of the options
        raise UserError(f"reasoning_gym: {generator} refuses its options: {error}") from None
