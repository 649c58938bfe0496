r"""The speed of grading answers, compared with math-verify alone. Prints a table, then one JSON line.

python benchmarks/rewards.py [--seconds 2] [--processes 2]

A response is 600 characters of reasoning and a box. math-verify runs as its README shows: parse and verify, in the main thread of a
separate process, with its time limits. Both sides see the same pairs; half of the answers are right.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import cycle
from math import gcd
from multiprocessing import get_context

from posttrain.rewards.math import grade

Pair = tuple[str, str]  # gold, response
Grader = Callable[[Pair], bool]
REASONING = "First we set up the equation $2x + 3 = 17$, so that $x = 7$ and $\\frac{x}{2} = 3.5$. " * 7
BOMBS = [
    r"\boxed{10^{10^{10}}}",
    r"\boxed{(((10!)!)!)!}",
    r"\boxed{\binom{10^9}{5\cdot10^8}}",
    r"\boxed{" + "(" * 2000 + "5" + ")" * 2000 + "}",
]


def answered(gold: str, other: str, draw: random.Random) -> Pair:
    return gold, rf"{REASONING} The answer is $\boxed{{{gold if draw.random() < 0.5 else other}}}$."


def workloads(count: int = 500, seed: int = 0) -> dict[str, list[Pair]]:
    """Pairs by kind; every gold answer is another, so that nothing is remembered."""
    draw = random.Random(seed)
    kinds: dict[str, list[Pair]] = {kind: [] for kind in ("integers", "literals", "expressions", "collections")}
    for number in range(count):
        a, b, c = number + 2, draw.randrange(2, 99), draw.choice([2, 3, 5, 7])
        kinds["integers"].append(answered(str(a * 13), str(a * 13 + b), draw))
        top, below = a // gcd(a, 97), 97 // gcd(a, 97)
        literals = [
            (rf"\frac{{{top}}}{{{below}}}", f"{top}/{below + 1}"),
            (f"{a}.{b}", f"{a}.{b + 1}"),
            (rf"{a}\sqrt{{{c}}}", rf"{a + 1}\sqrt{{{c}}}"),
        ]
        literals += [
            (f"{a * 1000:,}", str(a * 1000 + 1)),
            (rf"{a}\pi", rf"{a + 1}\pi"),
            (rf"{a}\text{{ cm}}", rf"{a}\text{{ kg}}"),
            (rf"{a}\%", str(b)),
        ]
        kinds["literals"].append(answered(*literals[number % len(literals)], draw))
        kinds["expressions"].append(answered(f"{a}x^2+{b}x+{c}", f"x({a}x+{b})-{c}", draw))
        collections = [
            (rf"\{{{a},{b + 900},{c}\}}", f"{c},{b},{a}"),
            (f"({a},{b})", f"({b},{a + 1})"),
            (rf"[{-a},\infty)", f"x > {-a}"),
        ]
        kinds["collections"].append(answered(*collections[number % len(collections)], draw))
    return kinds


def ours(pair: Pair) -> bool:
    return grade(pair[1], pair[0]).outcome == "correct"


def math_verify(pair: Pair) -> bool:
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)  # it logs every answer that it could not grade in time
    return bool(verify(parse(rf"\boxed{{{pair[0]}}}"), parse(pair[1])))


def rate(grader: Grader, pairs: list[Pair], seconds: float) -> float:
    """Grades a second of processor time: what others do on the machine at the same time must not count."""
    for pair in pairs[:5]:
        grader(pair)
    began = time.process_time()
    for done, pair in enumerate(cycle(pairs), 1):
        grader(pair)
        if time.process_time() - began > seconds:
            return done / (time.process_time() - began)
    raise AssertionError("no pairs")


def fresh_rate(task: tuple[Grader, str, float]) -> float:
    grader, kind, seconds = task
    return rate(grader, workloads(20_000 if grader is ours else 500)[kind], seconds)


def rate_of_processes(grader: Grader, kind: str, seconds: float, processes: int) -> float:
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        return sum(pool.map(fresh_rate, [(grader, kind, seconds)] * processes))


def slowest_bomb(grader: Grader, bombs: list[str]) -> float:
    worst = 0.0
    for bomb in bombs:
        began = time.perf_counter()
        grader(("5", bomb))
        worst = max(worst, time.perf_counter() - began)
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    graders: dict[str, Grader] = {"posttrain": ours}
    try:
        math_verify(("1", r"\boxed{1}"))
        graders["math-verify"] = math_verify
    except ImportError:
        print("math-verify is not installed: ours alone (pip install math-verify==0.9.0)")
    result: dict[str, dict[str, float]] = {}
    print(
        f"grades a second of processor time, {options.processes} processes together, and the slowest of {len(BOMBS)} hostile answers"
    )
    for name, grader in graders.items():
        rows = {kind: rate_of_processes(grader, kind, options.seconds, options.processes) for kind in workloads(1)}
        rows["slowest hostile answer, seconds"] = slowest_bomb(grader, BOMBS)
        result[name] = {kind: float(f"{value:.4g}") for kind, value in rows.items()}
    for kind in result["posttrain"]:
        line = "  ".join(f"{name} {figures[kind]:>10,.4g}" for name, figures in result.items())
        print(f"{kind:32} {line}")
    if len(result) == 2:
        kinds = list(workloads(1))
        ratio = statistics.geometric_mean(result["posttrain"][k] / result["math-verify"][k] for k in kinds)
        print(f"ours is {ratio:.1f} times as fast (geometric mean over the kinds)")
    print(json.dumps({"benchmark": "rewards.math", "processes": options.processes, **result}))


if __name__ == "__main__":
    main()
