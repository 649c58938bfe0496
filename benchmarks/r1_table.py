"""A table of the effects of R1's four stages, from finished runs of the recipe `r1`, and whether each had its intended effect.

    posttrain run r1 seeds=0,1,2 out=runs/r1
    python benchmarks/r1_table.py runs/r1/*/

A change is compared problem by problem (paired), and counts if it is at least two standard errors. Prints one JSON line last. The
exit code is 1 if a stage did not have its effect.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.evals.statistics import compare, share_interval

MODELS = {"base": "pretrained", "cold_start": "1 cold start", "reasoning": "2 reasoning RL", "mixture": "3 sampled + general SFT",
          "final": "4 final RL"}  # fmt: skip
LEAST_LANGUAGE, MOST_LOST = 0.95, 0.03


def lines(run: Path, stage: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "stages" / stage / "problems.jsonl").read_text().splitlines()]


def read(run: Path) -> tuple[dict[str, dict[str, list[float]]], dict[str, list[str]]]:
    """Of each model, its figures problem by problem; and the prompts of each figure, which may come several times."""
    found: dict[str, dict[str, list[float]]] = {}
    for model in MODELS:
        scores = [row["parts"][0] for row in lines(run, f"{model}_sums")]
        found[model] = {name: [score[name] for score in scores] for name in ("format", "answer", "language")}
        if model != "base":
            pairs = [row["values"] for row in lines(run, f"{model}_general")]
            found[model]["win"] = [0.5 if ours == theirs else float(ours > theirs) for ours, theirs in pairs]
    found["base"]["win"] = [0.5] * len(found["final"]["win"])  # all others are compared with it
    sums, general = ([row["question"] for row in lines(run, f"final_{part}")] for part in ("sums", "general"))
    return found, {**dict.fromkeys(("format", "answer", "language"), sums), "win": general}


def change(first: Sequence[float], second: Sequence[float], asked: Sequence[str]) -> dict[str, float]:
    """How far the second is above the first, also in standard errors over prompts; these are none where all moved alike."""
    found = compare(first, second, asked).difference
    error = (found.value - found.low) / 1.96  # the upper end may be cut off at 1
    return {"by": found.value, "errors": found.value / error if error > 0 else (0.0 if found.value == 0 else 99.0)}


def parts(found: dict[str, dict[str, list[float]]], asked: dict[str, list[str]]) -> list[dict[str, Any]]:
    """What each stage has to show, and whether it did."""

    def moved(figure: str, before: str, after: str) -> dict[str, float]:
        return change(found[before][figure], found[after][figure], asked[figure])

    language = sum(found["reasoning"]["language"]) / len(found["reasoning"]["language"])
    lost = -moved("answer", "reasoning", "mixture")["by"]
    rows = [
        ("1 format up", moved("format", "base", "cold_start"), True, ""),
        (
            "2 accuracy up",
            moved("answer", "cold_start", "reasoning"),
            language >= LEAST_LANGUAGE,
            f"language {language:.3f}",
        ),
        ("3 win rate up", moved("win", "reasoning", "mixture"), lost <= MOST_LOST, f"accuracy down by {lost:.3f}"),
        ("4 win rate up", moved("win", "mixture", "final"), True, ""),
    ]
    return [{"stage": what, **by, "and": more, "done": by["errors"] >= 2 and kept} for what, by, kept, more in rows]


def table(run: Path) -> dict[str, Any]:
    """Of each model its figures, shares with 95% intervals; of each stage its part."""
    found, asked = read(run)
    models = {model: {k: share_interval(v, asked[k]).row() for k, v in figures.items()} for model, figures in found.items()}
    return {"models": models, "stages": parts(found, asked)}


def told(made: dict[str, Any]) -> list[str]:
    """The table and the parts in words."""

    def percent(share: Sequence[float]) -> str:
        return f"{100 * share[0]:.1f} [{100 * share[1]:.1f}, {100 * share[2]:.1f}]"

    said = ["| model | format, % | accuracy, % | language, % | win rate against the base, % |", "|---|---|---|---|---|"]
    for model, name in MODELS.items():
        own = made["models"][model]
        cells = [percent(own[figure]) for figure in ("format", "answer", "language")]
        said.append(f"| {name} | {' | '.join(cells)} | {'50' if model == 'base' else percent(own['win'])} |")
    for row in made["stages"]:
        by = f"{row['stage']}: by {100 * row['by']:.1f} points, {row['errors']:.1f} standard errors"
        said.append(f"{'ok  ' if row['done'] else 'FAIL'} {by}{', ' if row['and'] else ''}{row['and']}")
    return said


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__)
        return 2
    seeds = []
    for run in map(Path, sys.argv[1:]):
        made = table(run)
        print("\n".join(["", str(run), "", *told(made)]))
        seeds.append({"run": str(run), **made})
    print(json.dumps({"runs": seeds}))
    return 0 if all(row["done"] for seed in seeds for row in seed["stages"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
