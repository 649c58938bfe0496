"""Checks whether held-out problems were trained on: the same question after normalisation, or one that shares most of its n-grams.

Exact overlap is counted by content hashes of the normalised question. Near overlap is reported, not refused. It is the share of the
word n-grams of a held-out question that occur in any training question:

    share(q) = |ngrams(q) in train| / |ngrams(q)|

N-grams that most training questions have are not counted: they are an instruction or a system message, not the question.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from posttrain.errors import UserError
from posttrain.tasks._questions import normalised
from posttrain.tasks.base import Task
from posttrain.types import Problem

N = 13  # consecutive words and signs, as in the GPT-3 paper (arXiv:2005.14165)
NEAR = 0.5  # a question with at least this share of n-grams is near
# problems of each level to compare if problems are made on demand; a hash of their content keeps the splits apart
LAZY = 500
SCANNED = 100_000  # training questions whose n-grams are read; hashes cover all
_WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True, slots=True)
class Overlap:
    """The overlap of two sets of questions. Pairs are indices in (held out, train)."""

    train: int
    held_out: int
    exact: tuple[tuple[int, int], ...]
    # (index in held out, share of its n-grams), without exact matches
    near: tuple[tuple[int, float], ...]

    def lines(self) -> list[str]:
        """Lines of the report; none if nothing is shared."""
        said = []
        of = f"of {self.held_out} held-out questions"
        if self.exact:
            said.append(f"{len(self.exact)} {of} are among the {self.train} trained on")
        if self.near:
            worst = max(share for _, share in self.near)
            shared = f"share at least {NEAR:.0%} of their {N}-grams with training questions (at most {worst:.0%})"
            look = "look whether they are the same problem in other words"
            said.append(f"{len(self.near)} {of} {shared}: {look}")
        return said


def content_hash(question: str) -> str:
    """64 bits of a question's content, in hexadecimal: the same on every machine.

    >>> content_hash("What is 2+2?") == content_hash(" what  is 2+2? ") != content_hash("What is 2-2?")
    True
    """
    return hashlib.blake2b(normalised(question).encode(), digest_size=8).hexdigest()


def ngrams(question: str, n: int = N) -> set[tuple[str, ...]]:
    """Every n words or signs in a row of the normalised question.

    >>> sorted(ngrams("Is 2+2 four?", 4))
    [('+', '2', 'four', '?'), ('2', '+', '2', 'four'), ('is', '2', '+', '2')]
    """
    words = _WORD.findall(normalised(question))
    return {tuple(words[place : place + n]) for place in range(len(words) - n + 1)}


def overlap(
    train: Sequence[str], held_out: Sequence[str], n: int = N, near: float = NEAR
) -> Overlap:
    """Compare two lists of questions."""
    places = {content_hash(question): place for place, question in reversed(list(enumerate(train)))}
    hashes = [content_hash(question) for question in held_out]
    exact = [(place, places[own]) for place, own in enumerate(hashes) if own in places]
    wanted = [ngrams(question, n) for question in held_out]
    every = set().union(*wanted) if wanted else set()
    seen = Counter(gram for question in train[:SCANNED] for gram in ngrams(question, n) & every)
    often = max(2, min(len(train), SCANNED) / 2)  # an instruction that most prompts share
    wanted = [{gram for gram in own if seen[gram] <= often} for own in wanted]
    taken = {place for place, _ in exact}
    open_ = [(place, own) for place, own in enumerate(wanted) if own and place not in taken]
    shares = [(place, len(own & seen.keys()) / len(own)) for place, own in open_]
    similar = tuple((place, share) for place, share in shares if share >= near)
    return Overlap(len(train), len(held_out), tuple(exact), similar)


def sample(task: Task, split: str) -> list[Problem]:
    """The problems of a task's split: all that are in memory; if they are made on demand, the first of every level."""
    found: list[Problem] = []
    for level in task.levels:
        problems = task.problems(split, level)
        found += problems if isinstance(problems, list | tuple) else problems[:LAZY]
    return found


def text(problem: Problem) -> str:
    """The question of a problem. For a conversation, the text of all its turns. For the start of an environment, its question and its
    hidden state, the fact `state`."""
    given, state = problem.facts.get("messages"), problem.facts.get("state")
    asked = "\n".join(str(m["content"]) for m in given) if given else problem.question
    return asked if state is None else f"{asked}\n{state}"


def require_clean(task: Task, where: str, refuse: bool = True) -> Overlap:
    """Refuse a task whose training and held-out problems share a question with a gold answer. Without an answer there is nothing to
    memorise: an open-ended prompt may be in both splits, and the overlap is only reported."""
    train, held_out = sample(task, "train"), sample(task, "test")
    found = overlap([text(p) for p in train], [text(p) for p in held_out])
    leaked = [held_out[place] for place, _ in found.exact if held_out[place].answer]
    if leaked and refuse:
        example = " ".join(text(leaked[0]).split())[:60]
        hint = "a score on them would be memory: remove them from one side"
        if type(task).run is not Task.run:
            hint += ", or, where they begin alike and hide different things, name what is hidden: facts={'state': ...}"
        raise UserError(f"{where}: {found.lines()[0]}, such as {example!r}; {hint}")
    return found


def known(held_out: Iterable[Problem], hashes: frozenset[str]) -> list[bool]:
    """Which held-out problems have a content hash among those that were trained on."""
    return [content_hash(text(problem)) in hashes for problem in held_out]
