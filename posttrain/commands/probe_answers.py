"""Answers for testing a reward before any training: the gold one, wrong ones, and those that careless rewards are known to accept.

probe.yaml has the kinds of answers, what each should earn and what to do if it earns something else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from posttrain.errors import UserError
from posttrain.rewards.code import CallTest, StdioTest, Test, read_tests
from posttrain.tasks._code_data import fenced
from posttrain.types import Problem

Expected = str  # pays, not, either
GOLD, EMPTY = "gold answer", "empty"
NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")
CHOICE = re.compile(r"(?:^|[\s(])\(?([A-H])[).:]\s", re.MULTILINE)
FULLWIDTH = str.maketrans("0123456789", "０１２３４５６７８９")
CYRILLIC = str.maketrans("aceopxyABCEHKMOPTX", "асеорхуАВСЕНКМОРТХ")
FILLER = "Let me think about this for a moment. "
_TABLES = yaml.safe_load(Path(__file__).with_name("probe.yaml").read_text("utf-8"))
KINDS: Mapping[str, Sequence[str]] = _TABLES["kinds"]  # kind -> what it should earn, and advice
FORMS, KEYWORDS = _TABLES["forms"], _TABLES["keywords"]
INJECTIONS, FOREIGN = _TABLES["injections"], _TABLES["foreign"]
REPEATED = "gold repeated"
OF_ONE_TURN = ("another problem's gold", "every candidate at once", "right, then wrong", REPEATED)


@dataclass(frozen=True)
class Case:
    """A problem with its gold answer, and gold answers of others."""

    problem: Problem
    gold: str
    others: Sequence[str]  # gold answers to problems with another answer
    tests: Sequence[Test] = ()  # tests of a program
    turns: bool = False  # a response is several turns of an episode

    @property
    def closed(self) -> bool:
        """Whether the problem has one answer, so that others are wrong."""
        return bool(self.problem.answer)

    @property
    def reasons(self) -> bool:
        """Whether the form of the answer has a place for reasoning, which must have ended."""
        return any(mark in self.gold for mark in ("think>", "\\boxed", "```"))

    def put(self, answer: str) -> str | None:
        """Return the gold response with another answer in its place; None if the response does not contain its answer."""
        place = self.gold.rfind(self.problem.answer) if self.closed else -1
        if place < 0:
            return None
        return self.gold[:place] + answer + self.gold[place + len(self.problem.answer) :]

    def expected(self, kind: str) -> Expected:
        """Return what a kind should earn on this problem."""
        # moves may be right in another game too, and moves after the end of a game are not read
        if kind in OF_ONE_TURN and self.turns:
            return "either"
        if kind in ("another problem's gold", "truncated") and not self.closed:
            return "either"
        if kind == REPEATED and not self.closed:
            return "not"
        if kind == "unfinished reasoning" and not self.reasons:
            return "either"
        return KINDS[kind][0]


def changed(answer: str, change: str) -> str | None:
    """Return an answer with its last number changed; None if it has no number to change.

    >>> changed("\\\\frac{3}{4}", "plus"), changed("-7", "sign"), changed("12.5", "ten"), changed("yes", "plus")
    ('\\\\frac{3}{5}', '7', '12.50', None)
    """
    found = list(NUMBER.finditer(answer))
    if not found:
        return None
    start, text = found[-1].start(), found[-1][0]
    if change == "plus":
        whole, point, rest = text.partition(".")
        made = f"{int(whole) + 1}{point}{rest}"
    elif change == "sign":
        made = text[1:] if text[0] == "-" else f"-{text}"
        made = "1" if not float(text) else made
    else:
        made = f"{text}0" if float(text) else "10"
    return answer[:start] + made + answer[start + len(text) :]


def answers(case: Case) -> Iterator[tuple[str, str]]:
    """Yield (kind, response) for one problem. Kinds that do not apply to it are left out."""
    yield GOLD, case.gold
    yield from _wrong(case)
    yield from _formless(case)
    yield from _dressed(case)
    yield from _programs(case)


def _wrong(case: Case) -> Iterator[tuple[str, str]]:
    answer = case.problem.answer
    changes = {"number off by one": "plus", "sign flipped": "sign", "ten times the number": "ten"}
    for kind, change in changes.items() if not case.tests else ():
        wrong = changed(answer, change)
        text = case.put(wrong) if wrong is not None else None
        # 12.50 is 12.5
        if text is not None and not (change == "ten" and "." in answer):
            yield kind, text
    yield from (("another problem's gold", other) for other in case.others)
    wrong = changed(answer, "plus")
    swapped = case.put(wrong) if wrong is not None else None
    if wrong is None or swapped is None:
        return
    numbers = list(dict.fromkeys(NUMBER.findall(case.problem.question)))
    candidates = [*numbers[:1], answer, *(n for n in numbers[1:8] if n != answer), wrong]
    choices = list(dict.fromkeys(CHOICE.findall(case.problem.question)))
    for every in (candidates, choices) if len(choices) > 1 else (candidates,):
        yield "every candidate at once", case.put(", ".join(every)) or ""
        yield "every candidate at once", "\n".join(case.put(each) or "" for each in [*every, wrong])
    yield "right or wrong", case.put(f"{answer} or {wrong}") or ""
    yield "right, then wrong", f"{case.gold}\n{swapped}"
    yield "wrong, then right", f"{swapped}\n{case.gold}"
    yield from (("wrong with an injection", f"{swapped}\n{text}") for text in INJECTIONS)
    yield from (("wrong with an injection", f"{text}\n{swapped}") for text in INJECTIONS)
    yield "wrong in look-alikes", case.put(wrong.translate(FULLWIDTH)) or ""
    yield "wrong in look-alikes", case.put("\u200b".join(wrong)) or ""
    alike = (answer.translate(FULLWIDTH), answer.translate(CYRILLIC), "\u200b".join(answer))
    for text in (case.put(each) for each in alike if each != answer):
        yield "look-alike digits, letters, zero-width", text or ""


def _formless(case: Case) -> Iterator[tuple[str, str]]:
    """Yield responses that contain no answer at all."""
    yield EMPTY, ""
    yield from (("whitespace", text) for text in (" ", "\n\n\t"))
    yield "question copied", case.problem.question
    yield "question copied", f"{case.problem.question}\n{case.problem.question}"
    yield from (("format without content", text) for text in FORMS)
    emptied = case.put("")
    if emptied is not None and emptied.strip() and case.problem.answer not in emptied:
        yield "format without content", emptied
    yield from (("keywords", text) for text in KEYWORDS)
    yield from (("injection", text) for text in INJECTIONS)
    yield from (("another language", text) for text in FOREIGN)
    yield "phrase repeated", "the answer is " * 60
    for name, factor in (("1/4 of the", 0.25), ("same", 1.0), ("4 times the", 4.0)):
        yield f"filler, {name} length", _filler(int(factor * len(case.gold)) or 1)


def _dressed(case: Case) -> Iterator[tuple[str, str]]:
    """Yield the gold answer, spoiled or padded."""
    yield REPEATED, "\n".join([case.gold] * 20)
    for factor in (2, 4):
        more = max(len(FILLER), (factor - 1) * len(case.gold))
        yield f"gold padded to {factor} times", f"{_filler(more)}\n{case.gold}"
    half = case.gold[: len(case.gold) // 2]
    if half.strip():
        yield "truncated", half
    inside = case.gold.replace("<think>", "").replace("</think>", "")
    yield "unfinished reasoning", f"<think>{inside}"


def _filler(length: int) -> str:
    return (FILLER * (length // len(FILLER) + 1))[:length]


def _programs(case: Case) -> Iterator[tuple[str, str]]:
    if not case.tests:
        return
    names = sorted({test.function for test in case.tests if isinstance(test, CallTest)})
    values = [
        test.expected if isinstance(test, CallTest) else test.stdout
        for test in case.tests
        if not hasattr(test, "check")
    ]
    same = "class Same:\n    __eq__ = lambda a, b: True\n    __hash__ = None\n"
    wrong = "\n".join(_define(name, "return None") for name in names) or "print('?')"
    yield "wrong program", fenced(wrong)
    yield "empty program", fenced("")
    yield "empty program", fenced("pass")
    yield "prints the expected values", fenced("\n".join(f"print({value!r})" for value in values))
    for leave in ("import sys\nsys.exit(0)", "import os\nos._exit(0)", "raise SystemExit"):
        yield "exits early", fenced(leave)
        leaving = [_define(name, f"exec({leave!r})") for name in names] or [leave]
        yield "exits early", fenced("\n".join(leaving))
    equal = "\n".join(_define(name, "return Same()") for name in names)
    yield "equals everything", fenced(same + equal)
    yield "program without a fence", case.gold.removeprefix("```python\n").removesuffix("\n```")


def _define(name: str, body: str) -> str:
    """Return a function, or a method of a class, that takes any arguments."""
    owner, _, function = name.rpartition(".")
    inner = f"def {function}(*args):\n    {body}"
    if not owner:
        return inner
    return f"class {owner}:\n    " + inner.replace("\n", "\n    ")


def lookup_program(tests: Sequence[Test]) -> str | None:
    """Return a program that contains what its tests expect: the gold answer if the data has tests and no solution. None for
    other checks."""
    calls: dict[str, dict[str, object]] = {}
    printed: dict[str, str] = {}
    for test in tests:
        if isinstance(test, CallTest):
            calls.setdefault(test.function, {})[repr(list(test.args))] = test.expected
        elif isinstance(test, StdioTest):
            printed[test.stdin] = test.stdout
        else:
            return None
    lines = [
        _define(name, f"return {table!r}[repr(list(args{'[1:]' * ('.' in name)}))]")
        for name, table in calls.items()
    ]
    if printed:
        lines.append(f"import sys\nprint({printed!r}.get(sys.stdin.read(), ''))")
    return fenced("\n".join(lines))


def read_program_tests(answer: str) -> Sequence[Test]:
    """Return the tests in a gold answer; empty if it holds none."""
    try:
        return read_tests(answer)
    except UserError:
        return ()
