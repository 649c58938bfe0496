r"""Grades answer pairs made from real data, with our grader and with math-verify, and explains every difference.

python benchmarks/check_data.py DATA [--pairs 6000] [--seed 0]

DATA holds gsm8k-*.jsonl.gz, math-train.json.gz and math-500.jsonl.gz. Every gold answer gives pairs: with itself, with the same value
in another notation, and with wrong answers close to it. Our verdict must be the intended one. If math-verify (version 0.9.0) differs,
the pair must belong to a class of EXPLAINED, or the run fails. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from posttrain.rewards.math import grade

INTEGER = re.compile(r"-?(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)")
FRACTION = re.compile(r"(-?)\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}")
FEW_UNITS = re.compile(r"(.*?)\\(?:text|mbox)\{ *([a-z ]+)\}(\^2|\^3)?$")


@dataclass(frozen=True)
class Pair:
    """A gold answer, a prediction, how the prediction was made, and whether it is right."""

    gold: str
    given: str
    made: str
    right: bool


def golds(data: Path) -> list[str]:
    """Final answers of GSM8K and MATH, without the ones that are missing."""
    found: list[str] = []
    for path in sorted(data.glob("gsm8k-*.jsonl.gz")):
        with gzip.open(path, "rt") as lines:
            found += [json.loads(line)["answer"].rpartition("####")[2].strip() for line in lines]
    with gzip.open(data / "math-train.json.gz", "rt") as file:
        found += [row["answer"] for row in json.load(file)]
    with gzip.open(data / "math-500.jsonl.gz", "rt") as lines:
        found += [json.loads(line)["answer"] for line in lines]
    return [gold.strip() for gold in found if gold and gold.strip()]


def rewritten(gold: str) -> Iterator[tuple[str, str]]:
    """The same answer, written otherwise."""
    yield "itself", gold
    if INTEGER.fullmatch(gold):
        value = int(gold.replace(",", ""))
        yield "grouped", f"{value:,}"
        yield "decimal", f"{value}.00"
        yield "named", f"x = {value}"
        yield "dollars", rf"\${value}"
        yield "unit added", rf"{value}\text{{ apples}}"
    found = FRACTION.fullmatch(gold)
    if found:
        sign, above, below = found[1], int(found[2]), int(found[3])
        yield "slash", f"{sign}{above}/{below}"
        yield "unreduced", rf"{sign}\frac{{{3 * above}}}{{{3 * below}}}"
        if not set(_primes(Fraction(above, below).denominator)) - {2, 5}:
            yield "exact decimal", f"{sign}{_decimal(Fraction(above, below))}"
    unit = FEW_UNITS.fullmatch(gold)
    if unit and unit[1].strip():
        yield "unit left out", unit[1].strip()
    if re.fullmatch(r"[-0-9.]+\^\\circ(, ?[-0-9.]+\^\\circ)*", gold):
        yield "degrees left out", gold.replace(r"^\circ", "")
    if "\\frac" in gold:
        yield "display style", re.sub(r"\\[dt]?frac", r"\\dfrac", gold)
    if re.fullmatch(r"\([^()]*,[^()]*\)", gold):
        yield "sized brackets", rf"\left{gold[:-1]}\right)"
    if re.fullmatch(r"-?[^,=()\[\]]+(, ?-?[^,=()\[\]]+)+", gold) and not re.search(
        r"\{,|\\!|text|[0-9],[0-9]{3}(?![0-9])|\\[{}]", gold
    ):
        yield "reversed list", ", ".join(reversed([piece.strip() for piece in gold.split(",")]))
    yield from _rewritten_expression(gold)


def _rewritten_expression(gold: str) -> Iterator[tuple[str, str]]:
    found = re.fullmatch(r"([0-9]+) ?\\sqrt\{?([0-9]+)\}?", gold)
    if found:
        yield "under the root", rf"\sqrt{{{int(found[1]) ** 2 * int(found[2])}}}"
    found = re.fullmatch(r"([0-9a-z]+) ?([+-]) ?([0-9a-z\\{} ]+)", gold)
    if found and "text" not in gold:
        yield "commuted sum", f"{found[3]} + {found[1]}" if found[2] == "+" else f"-{found[3]} + {found[1]}"
    if "pmatrix" in gold:
        yield "square matrix brackets", gold.replace("pmatrix", "bmatrix")
    found = re.fullmatch(r"([(\[])([^,\[\]()]*),([^,\[\]()]*)([)\]])", gold)
    if found and (found[1], found[4]) != ("(", ")"):
        low, high = ("<" if found[1] == "(" else r"\le"), ("<" if found[4] == ")" else r"\le")
        if "infty" not in gold:
            yield "as an inequality", f"{found[2]} {low} x {high} {found[3]}"
    found = re.fullmatch(r"([0-9]+) ?\\%", gold)
    if found:
        yield "percent as a fraction", rf"\frac{{{found[1]}}}{{100}}"
    found = re.fullmatch(r"\\text\{\(?([A-Z])\)?\}", gold)
    if found:
        yield "bare choice", found[1]
    if re.fullmatch(r"[-0-9a-z+^ {}]*[a-z][-0-9a-z+^ {}]*", gold) and "y" not in gold:
        yield "named expression", f"y = {gold}"


def _decimal(value: Fraction) -> str:
    whole, rest = divmod(value.numerator * 10**20 // value.denominator, 10**20)
    return f"{whole}.{rest:020d}".rstrip("0").rstrip(".")


def _primes(number: int) -> Iterator[int]:
    factor = 2
    while number > 1:
        if number % factor:
            factor += 1
        else:
            yield factor
            number //= factor


def spoiled(gold: str, other: str) -> Iterator[tuple[str, str]]:
    """Answers that are wrong, each in a way that some grader pays."""
    if other != gold:
        yield "another problem's", other
    if INTEGER.fullmatch(gold):
        value = int(gold.replace(",", ""))
        yield "off by one", str(value + 1)
        yield "chain", f"x = {value + 1} = {value}"
        yield "unworked sum", f"{value - 1} + 1"
        yield "one of several", f"{value}, {value + 1}"
        yield "unworked root", rf"\sqrt{{{value**2}}}"
        yield "unworked logarithm", rf"\log_{{10}} 10^{{{value}}}"
        yield "restated with words", rf"{value} \text{{ or }} {value + 2}"
        if value:
            yield "in a set", rf"\{{{value}\}}"
            yield "sign", str(-value)
            yield "percent", rf"{value}\%"
    found = FRACTION.fullmatch(gold)
    if found and found[2] != found[3]:
        yield "upside down", rf"{found[1]}\frac{{{found[3]}}}{{{found[2]}}}"
        value = Fraction(int(found[2]), int(found[3]))
        if set(_primes(value.denominator)) - {2, 5}:
            yield "rounded", f"{found[1]}{float(value):.6f}"
    unit = FEW_UNITS.fullmatch(gold)
    if unit and unit[1].strip():
        yield "other unit", rf"{unit[1]}\text{{ kilograms}}"
    pair = re.fullmatch(r"\(([^(),]*),([^(),]*)\)", gold)
    if pair and pair[1].strip() != pair[2].strip():
        yield "swapped", f"({pair[2]},{pair[1]})"
        yield "other brackets", f"[{pair[1]},{pair[2]}]"
    if re.fullmatch(r"[0-9]{2,}_\{?[2-9]\}?", gold):
        yield "value of another base", str(int(*_based(gold)))


def _based(gold: str) -> tuple[str, int]:
    digits, _, base = gold.replace("{", "").replace("}", "").partition("_")
    return digits, int(base)


def make_pairs(answers: list[str], count: int, seed: int = 0) -> list[Pair]:
    """`count` pairs that spread evenly over the ways of making one."""
    draw = random.Random(seed)
    by_way: dict[str, list[Pair]] = defaultdict(list)
    for gold in draw.sample(answers, len(answers)):
        for way, given in rewritten(gold):
            by_way[way].append(Pair(gold, given, way, True))
        for way, given in spoiled(gold, draw.choice(answers)):
            by_way[way].append(Pair(gold, given, way, False))
    chosen: list[Pair] = []
    while len(chosen) < count and any(by_way.values()):
        for way in sorted(by_way):
            if by_way[way] and len(chosen) < count:
                chosen.append(by_way[way].pop())
    return chosen


# Where math-verify 0.9.0 (its defaults) and this package differ: way of making the pair -> why. docs/rewards-math.md says more.
EXPLAINED = {
    "chain": "math-verify takes the last side of x = 6 = 5; an equality chain is not an answer",
    "in a set": "math-verify unpacks a set of one; the question asked for a number",
    "rounded": "math-verify rounds to six places; 0.333333 is not 1/3 unless the data set says so (rounding=6)",
    "unworked sum": "math-verify evaluates 30 + 1; a question restated is not an answer",
    "unworked root": "math-verify evaluates the root of 961; see above",
    "unworked logarithm": "math-verify evaluates the logarithm; see above",
    "percent": "math-verify takes 31% for 31 and for 0.31; here it is 0.31 (percent='bare' drops the sign)",
    "other unit": "math-verify drops every unit; 18 kilograms are not 18 degrees",
    "other brackets": "math-verify reads (3,-1) and [3,-1] as one tuple, because 3 is not below -1; (1,2) and [1,2] it tells apart",
    "as an inequality": "math-verify never takes an inequality for a gold interval; a solved one says the same",
    "commuted sum": "math-verify reads 12 + 10t as 12 + 10 (t is a unit) and \\frac\\pi 2 + 2007 as 2007",
    "named expression": "math-verify reads a + b + c as 'a +' (b and c are units)",
}


def theirs() -> Callable[[Pair], bool] | None:
    """math-verify's verdict on a pair, or None where it is not installed."""
    try:
        from math_verify import parse, verify
    except ImportError:
        return None
    return lambda pair: bool(verify(parse(rf"\boxed{{{pair.gold}}}"), parse(rf"\boxed{{{pair.given}}}")))


def compare(pairs: list[Pair], other: Callable[[Pair], bool] | None) -> dict[str, object]:
    """Count, for every way of making a pair, how often we are right and how often the other differs; print what is unexplained."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    examples: dict[str, Pair] = {}
    seconds = Counter[str]()
    for pair in pairs:
        began = time.perf_counter()
        ours = grade(rf"\boxed{{{pair.given}}}", pair.gold).outcome == "correct"
        seconds["posttrain"] += time.perf_counter() - began
        counts[pair.made]["pairs"] += 1
        if ours != pair.right:
            counts[pair.made]["mistakes"] += 1
            print(f"MISTAKE  {pair}")
        if other is None:
            continue
        began = time.perf_counter()
        differs = other(pair) != ours
        seconds["math-verify"] += time.perf_counter() - began
        if differs:
            counts[pair.made]["differ"] += 1
            examples.setdefault(pair.made, pair)
    print(f"{'pair made as':26} {'right?':>6} {'pairs':>6} {'mistakes':>8} {'differ':>6}  an example of a difference")
    rightness = {pair.made: pair.right for pair in pairs}
    for way, count in sorted(counts.items()):
        shown = f"gold {examples[way].gold}, answer {examples[way].given}" if way in examples else ""
        print(
            f"{way:26} {'yes' if rightness[way] else 'no':>6} {count['pairs']:>6} {count['mistakes']:>8} {count['differ']:>6}  {shown}"
        )
    return {
        "pairs": len(pairs),
        "mistakes": sum(count["mistakes"] for count in counts.values()),
        "differ": {way: count["differ"] for way, count in sorted(counts.items()) if count["differ"]},
        "unexplained": sorted(way for way in examples if way not in EXPLAINED),
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--pairs", type=int, default=6_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if not (options.data / "math-train.json.gz").is_file():
        print(f"{options.data} has no math-train.json.gz; give the folder that holds GSM8K and MATH", file=sys.stderr)
        return 2
    answers = golds(options.data)
    unreadable = sorted({gold for gold in answers if grade(r"\boxed{0}", gold).failure})
    print(f"{len(answers)} gold answers, {len(unreadable)} that cannot be read: {unreadable}")
    other = theirs()
    if other is None:
        print("math-verify is not installed: only our own verdicts are checked (pip install math-verify==0.9.0)")
    made = [pair for pair in make_pairs(answers, options.pairs, options.seed) if pair.gold not in unreadable]
    result = compare(made, other)
    print(json.dumps({"golds": len(answers), "unreadable": unreadable, **result}))
    return int(bool(result["mistakes"] or result["unexplained"]))


if __name__ == "__main__":
    sys.exit(main())
