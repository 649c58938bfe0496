r"""Hostile answers from a LaTeX-like grammar, graded in a process of its own: `python math_fuzzer.py SEED COUNT` prints one JSON line.

A run reports how long the slowest took (processor time), how large the process grew, and the verdicts; run twice it must say the same.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import resource
import sys
import time
from collections import Counter
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from posttrain.rewards.math import grade

NUMBERS = [
    "0",
    "1",
    "2",
    "7",
    "10",
    "999999999",
    "0.5",
    "1e300",
    "1e2000",
    "1,000",
    r"0.\overline{3}",
    "12_3",
    "7!",
    "99!",
    "9" * 300,
]
NAMES = ["x", "y", "n", "i", "e", r"\pi", r"\infty", r"\alpha", "x_1", "A", "abc"]
ODD = [
    r"\text{ cm}",
    r"\text{ or }",
    "word",
    r"\emptyset",
    r"\sum",
    r"\int_0^1",
    r"\lim_{x\to0}",
    r"\mathbb{R}",
    r"\%",
    r"^\circ",
    r"\$",
    r"\text{ million}",
    r"\mathbb{R}\setminus\{0\}",
    r"\{x\mid x<1\}",
    "all real numbers except ",
    "twenty-five ",
    "(B) ",
    "3:30 pm",
    "&",
    r"\\",
]
SIGNS = ["+", "-", "*", "/", "^", r"\cdot ", r"\pm ", " "]
ODD_SIGNS = [
    r"\setminus ",
    r"\mid ",
    r"\not=",
    r"\notin ",
    "=",
    "<",
    r"\le ",
    ",",
    ";",
    ":",
    r"\cup ",
    "|",
    "!",
    "**",
    r"\ne ",
    "_",
    "'",
]
FUNCTIONS = ["sin", "cos", "tan", "log", "ln", "arcsin", "arctan", "exp", "cot", "sinh", "tanh"]
GOLDS = [
    "5",
    r"\frac13",
    "x^2+2x+1",
    r"\{1,2\}",
    "(1,2)",
    "2^{100}",
    r"\sin x",
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
    "x+y=3",
    r"1\pm\sqrt5",
]
GOLDS += [
    "10!",
    r"\text{east}",
    r"10\text{ cm}",
    r"50\%",
    r"\log_2 3",
    r"\lfloor x\rfloor",
    r"\binom{10}{3}",
    r"x^{y}+\sqrt{n}",
    "A",
    "3:4",
    "[0,1)",
    r"x\neq0",
    "(x,y)=(1,2)",
    "x_1=1,x_2=2",
    "(B) 5",
    "3:30 pm",
]
EVALUATED = [
    r"e^{x}+x^{n}+y!+\tan(y)+\log(x)-|n|+2^{5}\lfloor x\rfloor",
    r"e^{x}+x^{n}+\tan(y)+\log(x)-|n|+2^{5}\lfloor x\rfloor",
]
NOISE = ["", "{", "}", "\\", "(", ")", r"\boxed{", "\x00", "∑", "-", "--", "\n"]


def expression(draw: random.Random, depth: int, odd: float) -> str:
    """A string of the grammar; `odd` is the share of places where something stands that does not belong there."""
    if depth <= 0:
        return draw.choice(ODD) if draw.random() < odd else draw.choice(NUMBERS if draw.random() < 0.5 else NAMES)
    one, two = (expression(draw, depth - 1 - draw.randrange(3), odd) for _ in range(2))
    shapes = [
        rf"\frac{{{one}}}{{{two}}}", rf"\sqrt{{{one}}}", rf"\sqrt[{two}]{{{one}}}", f"({one})", f"{one}^{{{two}}}",
        rf"\binom{{{one}}}{{{two}}}",
        rf"\{draw.choice(FUNCTIONS)}({one})", f"|{one}|", rf"\lfloor {one} \rfloor", f"({one})!", rf"\log_{{{one}}}({two})",
    ]  # fmt: skip
    if draw.random() < odd:
        shapes = [
            rf"\{{{one},{two}\}}",
            f"[{one},{two})",
            rf"\begin{{pmatrix}}{one}&{two}\\{two}&{one}\end{{pmatrix}}",
            one + draw.choice(ODD_SIGNS) + two,
        ]
    return draw.choice(shapes) if draw.random() < 0.5 else one + draw.choice(SIGNS) + two


def hostile(draw: random.Random) -> str:
    """Up to 8 kB: a deep or a long expression, sometimes broken."""
    text = expression(draw, draw.choice([1, 2, 3, 4, 5, 6, 9]), draw.choice([0.0, 0.0, 0.1, 0.4]))
    if draw.random() < 0.1:
        text += (draw.choice(["+", "^", "!", "-", ",", r"\cdot "]) + text) * draw.randrange(1, 30)
    for _ in range(draw.choice([0, 0, 0, 1, 3])):
        where = draw.randrange(len(text) + 1)
        text = text[:where] + draw.choice(NOISE) + text[where + draw.randrange(3) :]
    return text[: draw.choice([300, 1_900, 8_000])]


def most_memory() -> float:
    """The most memory this program has held, in MiB. What `getrusage` says on Linux includes whoever started it."""
    status = Path("/proc/self/status")
    if status.is_file():
        return int(re.findall(r"VmHWM:\s+(\d+)", status.read_text())[0]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2


def main(seed: int, count: int) -> dict[str, object]:
    outcomes: Counter[str] = Counter()
    verdicts = hashlib.sha256()
    slowest, culprit, faults = 0.0, "", []
    for number in range(count):
        draw = random.Random(f"{seed}/{number}")
        answer, gold = hostile(draw), draw.choice(GOLDS)
        if number % 3 == 0:  # names and operations of the gold answer, so that the answer must be evaluated
            answer, gold = "x+y+n+" + re.sub(r"\\alpha|x_1|A|abc|\\infty", "x", answer), draw.choice(EVALUATED)
        began = time.process_time()
        score = grade(rf"\boxed{{{answer}}}", gold)
        took = time.process_time() - began
        outcomes[score.outcome] += 1
        verdicts.update(score.outcome.encode())
        if score.failure:
            faults.append(f"{score.failure}: {gold} against {answer}")
        if took > slowest:
            slowest, culprit = took, answer[:200]
    megabytes = most_memory()
    found = {
        "outcomes": dict(sorted(outcomes.items())),
        "verdicts": verdicts.hexdigest(),
        "slowest": slowest,
        "culprit": culprit,
    }
    return {**found, "megabytes": megabytes, "faults": faults[:5]}


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]))))
