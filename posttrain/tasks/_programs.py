"""Makes Python programs from worked solutions whose steps have calculator notes, as in GSM8K."""

from __future__ import annotations

import re
from fractions import Fraction

from posttrain.rewards._expression import Unparseable, evaluate

# <<48/2=24>>24: the expression, its result, and the result again as it is read
NOTE = re.compile(r"<<([^<>=]*)=([^<>=]*)>>(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)?")
NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?|\.[0-9]+")
# the same expression in words before the note: 48 / 2 = $
SPELLED = re.compile(
    r"(?:[0-9.,$%()*/+\-\s×÷]|(?<=[0-9\s)])[xX](?=[0-9\s$(]))+=\s*\$?\s*(?=step[0-9]+\b)"
)


def as_program(worked: str, question: str, answer: str) -> tuple[str, str] | None:
    """Return a program that computes the answer step by step and prints it, and its output; None if the notes do not lead to
    the answer.

    A number that an earlier step computed, and that the question does not give, becomes the name of that step.

    >>> found = as_program("48/2 = <<48/2=24>>24 in May.\\n48+24 = <<48+24=72>>72 in all.\\n#### 72", "48 in April", "72")
    >>> print(found[0])
    # step1 in May.
    step1 = 48/2
    # step2 in all.
    step2 = 48+step1
    print(step2)
    >>> found[1]
    '72.0'
    """
    given = {_exact(n) for n in NUMBER.findall(question.replace(",", ""))}
    values, whole, lines = list[Fraction](), list[bool](), list[str]()
    for line in worked.rpartition("####")[0].splitlines():
        code = []
        for found in NOTE.finditer(line):
            expression = re.sub(r"(?<![0-9])\.", "0.", re.sub(r"[\s,$]", "", found[1]))
            try:
                value, _ = evaluate(expression, decimals=True)
            except Unparseable:
                return None
            used = list[int]()

            def named(number: re.Match[str], used: list[int] = used) -> str:
                earlier = [n for n, one in enumerate(values) if one == _exact(number[0])]
                if not earlier or _exact(number[0]) in given:
                    return number[0]
                used.append(earlier[-1])
                return f"step{earlier[-1] + 1}"

            written = NUMBER.sub(named, expression)
            values.append(value)
            # in Python a quotient, and a result of decimals, is a float
            whole.append("/" not in written and "." not in written and all(whole[n] for n in used))
            code.append(f"step{len(values)} = {written}")
        numbered = iter(range(len(values) - len(code) + 1, len(values) + 1))
        said = NOTE.sub(lambda _: f"step{next(numbered)}", line)  # noqa: B023
        said = SPELLED.sub(lambda m: " " if NUMBER.search(m[0]) else m[0], said)
        lines += [f"# {' '.join(said.split())}", *code] if code else []
    if not values or values[-1] != _exact(answer.replace(",", "")):
        return None
    printed = str(values[-1].numerator) if whole[-1] else repr(float(values[-1]))
    return "\n".join([*lines, f"print(step{len(values)})"]), printed


def _exact(number: str) -> Fraction | None:
    try:
        return Fraction(number)
    except (ValueError, ZeroDivisionError):
        return None
