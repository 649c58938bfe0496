r"""Verifies steps of arithmetic exactly: which statements of a response are true and lead from the question to its answer.

A step is a line (or what `separator` cuts off). It makes a statement if it holds an equation of plain numbers: `3*4 = 12`,
`(12+8)/5 = 4`, `1,250 - 0.5*100 = 1,200`, or a chain of equals. Each statement gets one of three verdicts:

    wrong  0   its sides are not exactly equal, or one has no value (a division by zero)
    right  1   it is true, gives a number that was not known yet, uses a number of the question or of an earlier right step,
               and its result is the response's answer or is used by a later right step
    idle   -   any other true statement (7 = 7, a repeated step, 1+1 = 2 from nowhere, work that the answer does not need,
               a consequence of an error) or an unreadable one: no value, so it is neither rewarded nor punished

`Score.steps` holds the values at the characters where the steps end, and the answer's own 0 or 1 as the last; process
supervision trains on them. As an outcome, value = answer * right / (right + wrong), where right + wrong counts as at least
`min_steps`: an answer without work earns less.

`form="columns"` reads the scratchpads of the arithmetic task instead (`75012,48113#132` or `7+5+0=12,4+8+1=13#132`), digit by
digit against the question; a step that is wrong only because of an earlier wrong carry is idle.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from posttrain.errors import UserError, require
from posttrain.rewards.math import STRICT, MathReward, final_answer, grade
from posttrain.rewards.mathematics.latex import read
from posttrain.rewards.mathematics.numbers import Exhausted, Meter, Undefined, evaluate
from posttrain.rewards.mathematics.tokens import Unevaluated, Unreadable
from posttrain.types import Score

FORMS = ("equations", "columns")
LIMIT = 100_000  # characters of a response that are read
STATEMENTS = 500  # statements that are read
LENGTH = 200  # characters of one statement
SIGNS = str.maketrans({"×": "*", "·": "*", "⋅": "*", "÷": "/", "−": "-", "–": "-", "$": " "})
COMMANDS = re.compile(r"\\(times|cdot|div|left|right|[,;! ()\[\]])|(?<=[0-9)])\s*[xX]\s*(?=[0-9(])")
BULLET = re.compile(r"\s*(?:step\s+[0-9]{1,3}\s*[:.)]|[0-9]{1,3}[.)]\s|[-*]\s)", re.IGNORECASE)
# Markdown's bold, which is not a power
EMPHASIS = re.compile(r"(?:^|(?<=:)|(?<=: ))\*\*|\*\*(?=[\s.,;:!]*$)")
RUN = re.compile(r"[-+*/().,0-9 \t=%]+")
LABEL = re.compile(r"\S:$")  # followed by a space; 12:30 and 12 : 4 are something else
BINDING = "^!:_{}|~\\"  # next to a number, these make it part of something else
SCALE = re.compile(r"(?i:hundred|thousand|million|billion|dozen|percent|half|halves|third|quarter)")
APART = re.compile(r",(?![0-9]{3}(?![0-9]))|;")  # a comma before three digits belongs to a number
NUMBER = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?")
QUESTION = re.compile(r"\s*([0-9]{1,30})\s*([-+])\s*([0-9]{1,30})\s*=?\s*")
COLUMN = re.compile(r"([0-9])([-+]?)([0-9])\2([01])(=?)([01])([0-9])")


@dataclass(slots=True)
class Statement:
    """An equation: the numbers it uses and its result, which is None if its sides differ. `plain`: there is nothing to
    compute."""

    end: int
    operands: frozenset[Fraction]
    result: Fraction | None
    plain: bool
    verdict: float | None = None


def statements(text: str, separator: str) -> list[Statement]:
    """Return the statements of a text, in order, each with the position at which its step ends."""
    found: list[Statement] = []
    start = tried = 0
    for step in text.split(separator):
        end = start + len(step)
        start = end + len(separator)
        if "=" not in step:
            continue
        line = COMMANDS.sub(_sign, step.translate(SIGNS))
        if bullet := BULLET.match(line):
            line = line[bullet.end() :]
        line = EMPHASIS.sub("", line)
        for run in RUN.finditer(line):
            for sides in _equations(line, run):
                tried += 1
                statement = _statement(sides, end)
                if statement is not None:
                    found.append(statement)
                if tried == STATEMENTS:
                    return found
    return found


def _sign(match: re.Match[str]) -> str:
    return {"times": "*", "cdot": "*", "div": "/", None: "*"}.get(match[1], " ")


def _equations(line: str, run: re.Match[str]) -> list[list[str]]:
    """Return the equations in a run of numbers and signs, as lists of sides. The first and the last side are left out if the
    text around continues them: `x^2 = 4` is no statement about 2, `3 apples + 4 = 7` none about 4, `= 3 dozen` none about 3. A
    label (`Total: 3+4 = 7`) ends before the equation, and parentheses may enclose the whole."""
    pieces = [piece.split("=") for piece in APART.split(run[0]) if len(piece) <= LENGTH]
    pieces = [sides for sides in pieces if 2 <= len(sides) <= 8]
    equations = [[side.strip(" \t.,") for side in sides] for sides in pieces]
    if not equations:
        return []
    before, after = line[max(0, run.start() - 1) : run.start()], line[run.end() : run.end() + 12]
    if LABEL.search(line[: run.start()]) and run[0][0] in " \t":
        before = ""
    first, last = equations[0], equations[-1]
    glued = (before.isalpha() and run[0][0] not in " \t") or before in BINDING
    continued = first[0][:1] in tuple("+-*/)") or (before.isalnum() and first[0].isdigit())
    if (before and (glued or continued)) or not first[0]:
        del first[0]
    glued = after[:1] in tuple(BINDING) or (after[:1].isalpha() and run[0][-1] not in " \t.,")
    if last and (glued or SCALE.match(after) or not last[-1]):
        del last[-1]
    if first and first[0].startswith("(") and first[0].count("(") > first[0].count(")"):
        first[0] = first[0][1:]
    if last and last[-1].endswith(")") and last[-1].count(")") > last[-1].count("("):
        last[-1] = last[-1][:-1]
    return [sides for sides in equations if len(sides) > 1 and all(sides)]


def _statement(sides: Sequence[str], end: int) -> Statement | None:
    """Parse an equation, or return None if it cannot be read."""
    if any(mark in side for side in sides for mark in ("**", "//")):
        return None
    meter = Meter()
    try:
        trees = [read(side) for side in sides]
        values = [evaluate(tree, {}, meter) for tree in trees]
    except (Unreadable, Unevaluated):
        return None
    except Undefined:
        several = any(tree.kind in ("list", "interval", "tuple") for tree in trees)
        return None if several else Statement(end, frozenset(), None, False)
    except Exhausted:
        return Statement(end, frozenset(), None, False)
    numbers = [v for v in values if isinstance(v, Fraction)]
    result = numbers[0] if len(numbers) == len(values) and len(set(numbers)) == 1 else None
    work = [tree for tree in trees if tree.kind not in ("number", "negative", "percent")]
    operands = (place.value for tree in work for place in tree.walk() if place.kind == "number")
    return Statement(end, frozenset(operands), result, not work)


def judge_statements(
    found: Sequence[Statement], question: str, answer: Fraction | None, max_steps: int
) -> None:
    """Set the verdicts in place: forward for the numbers that are known, backward from the answer for those that are needed."""
    asked = NUMBER.findall(question.translate(SIGNS)[:LIMIT])
    known = {Fraction(number.replace(",", "")) for number in asked}
    able: list[Statement] = []
    for statement in found:
        if statement.result is None:
            statement.verdict = 0.0
        elif not statement.plain and statement.result not in known and statement.operands & known:
            known.add(statement.result)
            able.append(statement)
    needed = set() if answer is None else {answer}
    for statement in reversed(able):
        if statement.result in needed:
            statement.verdict = 1.0
            needed |= statement.operands
    right = [s for s in able if s.verdict is not None]
    for statement in right[max_steps:]:
        statement.verdict = None


def columns(text: str, question: str, separator: str) -> list[tuple[int, float | None]]:
    """Return (end, verdict) of each column of a scratchpad for `a+b` or `a-b`, from the last digits on."""
    asked = QUESTION.fullmatch(question)
    if asked is None:
        wanted = "columns are for questions such as 47+85="
        raise UserError(f"arithmetic_steps: {wanted}, not {question[:40]!r}")
    a, sign, b = int(asked[1]), asked[2], int(asked[3])
    found: list[tuple[int, float | None]] = []
    start, true_carry, said_carry = 0, 0, 0
    for place, step in enumerate(text.split(separator)[:STATEMENTS]):
        end = start + len(step)
        start = end + len(separator)
        x, y = a // 10**place % 10, b // 10**place % 10
        verdict: float | None = 0.0
        column = COLUMN.fullmatch(step.strip())
        if column and column[2] == (sign if column[5] else ""):
            written = tuple(int(column[group]) for group in (1, 3, 4, 6, 7))
            if place >= max(len(asked[1]), len(asked[3])):
                verdict = None  # nothing is left to add
            elif written == (x, y, true_carry, *_sum(sign, x, y, true_carry)):
                verdict = 1.0
            elif written == (x, y, said_carry, *_sum(sign, x, y, said_carry)):
                verdict = None
            said_carry = written[3]
        true_carry = _sum(sign, x, y, true_carry)[0]
        found.append((end, verdict))
    return found


def _sum(sign: str, x: int, y: int, carry: int) -> tuple[int, int]:
    """Return (outgoing carry or borrow, digit)."""
    total = x + y + carry if sign == "+" else x - y - carry
    return (total // 10 if sign == "+" else int(total < 0)), total % 10


def arithmetic_steps(
    prompt: str,
    response: str,
    answer: str,
    form: str = "equations",
    separator: str = "\n",
    marker: str = "",
    max_steps: int = 20,
    min_steps: int = 1,
) -> Score:
    r"""The reward. The answer is the last box or, with a `marker`, the text after it. At most `max_steps` steps count as right,
    so that a longer way earns no more.

    >>> score = arithmetic_steps("3 boxes of 4 pens, 5 are lost.", "3*4 = 12\n12-5 = 7\n\\boxed{7}", "7")
    >>> score.value, score.steps
    (1.0, ((8, 1.0), (17, 1.0), (27, 1.0)))
    >>> arithmetic_steps("47+85=", "75012,48113#132", "132", form="columns", separator=",", marker="#").steps
    ((5, 1.0), (11, 1.0), (15, 1.0))
    """
    require(form in FORMS, f"arithmetic_steps: form is one of {', '.join(FORMS)}, not {form!r}")
    require(separator, "arithmetic_steps: steps need a separator that is not empty")
    fine = min(max_steps, min_steps) >= 1
    require(fine, "arithmetic_steps: max_steps and min_steps are at least 1")
    reward = MathReward(marker=marker) if marker else STRICT
    judged = grade(response, answer, reward, prompt)
    if not judged.valid:
        return judged
    text = response[:LIMIT]
    if form == "columns":
        verdicts = columns(text.partition(marker)[0] if marker else text, prompt, separator)
    else:
        found = statements(text, separator)
        judge_statements(found, prompt, _value(final_answer(response, reward)), max_steps)
        verdicts = [(s.end, s.verdict) for s in found]
    right, wrong = (sum(v == value for _, v in verdicts) for value in (1.0, 0.0))
    share, correct = right / max(min_steps, right + wrong), judged.value or 0.0
    steps = {len(response): correct} if response else {}
    for end, verdict in verdicts:  # if a step has several verdicts, the worst counts
        if verdict is not None:
            steps[end] = min(verdict, steps.get(end, 1.0))
    parts = {"answer": correct, "steps": share, "idle": float(len(verdicts) - right - wrong)}
    return Score(correct * share, parts, tuple(sorted(steps.items())), judged.outcome)


def _value(answer: str | None) -> Fraction | None:
    """Return the value of an answer that is a number; else None."""
    try:
        value = evaluate(read(answer or ""), {}, Meter())
    except (Unreadable, Unevaluated, Undefined, Exhausted, KeyError):
        return None
    return value if isinstance(value, Fraction) else None
