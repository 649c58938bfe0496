"""The cost of several processes on one machine: a step of quickstart by one process with two threads and by two processes with one.

    taskset -c 0,1 python benchmarks/processes.py [--repeats 3] [--steps 40]

Both do the same work on two cores: the same problems, and the same numbers of samples and updates. Runs alternate. Prints the median
seconds of an RL step after the first five, with its parts, and the ratio; one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from posttrain.runs.read import Run

WAYS = {"one process": ["threads=2"], "two processes": ["processes=2", "threads=1"]}
PARTS = ("seconds/total", "seconds/generate", "seconds/score", "seconds/train")
SETTINGS = ["sft.steps=300", "rl.evaluate_every=0", "before.problems=16", "after.problems=16"]
SKIPPED = 5  # steps until every process has warmed up


def steps_of(way: str, steps: int, folder: Path) -> list[dict[str, float]]:
    words = [
        sys.executable,
        "-m",
        "posttrain",
        "run",
        "quickstart",
        *WAYS[way],
        *SETTINGS,
        f"rl.steps={steps}",
        f"out={folder}",
    ]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    rows = [row.figures for row in Run(folder).metrics("rl") if "seconds/total" in row.figures]
    return [{part: float(row.get(part, 0.0)) for part in PARTS} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args()
    found: dict[str, list[list[dict[str, float]]]] = {way: [] for way in WAYS}
    for repeat in range(given.repeats):
        for way in WAYS:
            with tempfile.TemporaryDirectory() as folder:
                found[way].append(steps_of(way, given.steps, Path(folder) / "run"))
            total = statistics.median(row["seconds/total"] for row in found[way][-1][SKIPPED:])
            print(f"{way}, run {repeat + 1}: {total:.3f} s a step", flush=True)
    made = {
        way: {part: round(statistics.median(row[part] for run in runs for row in run[SKIPPED:]), 4) for part in PARTS}
        for way, runs in found.items()
    }
    ratio = made["two processes"]["seconds/total"] / made["one process"]["seconds/total"]
    print("\n| | step | generate | score | train |\n| --- | --- | --- | --- | --- |")
    for way, parts in made.items():
        print(f"| {way} | " + " | ".join(f"{parts[part]:.3f} s" for part in PARTS) + " |")
    print(f"two processes take {ratio:.2f} times the step of one")
    print(json.dumps({"medians": made, "ratio": round(ratio, 3)}))


if __name__ == "__main__":
    main()
