"""`posttrain run distill` over several seeds, divergences and rates, against SFT on the teacher's samples: a table and a plot.

    python benchmarks/distillation.py OUT [--seeds 0,1,2] [--processes 2] [--only forward]
    python benchmarks/distillation.py OUT --read docs/recipes/distill.png     # of OUT/distillation.json alone

Each run is a directory in OUT; finished runs are not run again. Results are written to OUT/distillation.json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

from recipes import result, run

STAGES = {"before": "start", "after_sft": "SFT on the teacher's samples", "after": "distilled", "of_teacher": "teacher"}
ARMS = (
    "divergence=forward", "divergence=jensen_shannon", "divergence=reverse", "divergence=sampled",
    "divergence=forward lr=1e-3", "divergence=forward lr=4e-3", "divergence=reverse lr=1e-3", "divergence=reverse lr=4e-3",
)  # fmt: skip


def one(arm: str, seed: int, folder: Path) -> dict[str, Any]:
    """The held-out accuracy of all four models, with intervals over problems; an arm that stopped has none."""
    out = folder / f"{arm.replace(' ', '-').replace('=', '-')}-{seed}"
    try:
        seconds = run("distill", seed, out, arm.split())
    except Exception as error:  # one that a monitor stopped must not end the others
        print(f"{arm}, seed {seed}: {error}", flush=True)
        return {"arm": arm, "seed": seed, "stopped": str(error)[:200]}
    found = {stage: result(out, stage)["accuracy"] for stage in STAGES}
    trained = {stage: result(out, stage)["train_seconds"] for stage in ("sft", "distill")}
    print(f"{arm}, seed {seed}: " + ", ".join(f"{STAGES[k]} {v[0]:.3f}" for k, v in found.items()), flush=True)
    return {"arm": arm, "seed": seed, "seconds": seconds, "train_seconds": trained, **found}


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown: the mean over seeds of each accuracy with its range, and the smallest gain of a seed over SFT."""
    lines = [
        "| settings | start | SFT on the teacher's samples | distilled | teacher | gain over SFT, each seed |",
        "|---" * 6 + "|",
    ]
    for arm in dict.fromkeys(row["arm"] for row in rows):
        ran = [row for row in rows if row["arm"] == arm and "stopped" not in row]
        stopped = sum(row["arm"] == arm and "stopped" in row for row in rows)
        if ran:
            values = {stage: [row[stage][0] for row in ran] for stage in STAGES}
            cells = [f"{100 * mean(v):.1f}% ({100 * min(v):.1f} to {100 * max(v):.1f})" for v in values.values()]
            gains = [f"{100 * (row['after'][0] - row['after_sft'][0]):+.1f}" for row in ran]
            lines.append(f"| {arm} | {' | '.join(cells)} | {', '.join(gains)}{'; some stopped' * bool(stopped)} |")
        else:
            lines.append(f"| {arm} | | | stopped by a monitor | | |")
    return lines


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    ran = [row for row in rows if "stopped" not in row and " lr=" not in row["arm"]]
    arms = list(dict.fromkeys(row["arm"] for row in ran))
    bars = [("start", "before", arms[0]), ("SFT", "after_sft", arms[0])]
    bars += [(arm.removeprefix("divergence="), "after", arm) for arm in arms] + [("teacher", "of_teacher", arms[0])]
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    for place, (_, stage, arm) in enumerate(bars):
        values = [row[stage][0] for row in ran if row["arm"] == arm]
        axes.bar(place, mean(values), color="tab:blue" if stage == "after" else "0.75")
        axes.plot([place] * len(values), values, "k.", markersize=4)
    axes.set_xticks(range(len(bars)), [name for name, *_ in bars], fontsize=8)
    axes.set_ylabel("held-out greedy accuracy")
    axes.set_title("Three-digit sums, a student of 0.2M weights; points are seeds", fontsize=9)
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument(
        "--processes", type=int, default=1, help="runs at the same time; with OMP_NUM_THREADS=1 each has one core"
    )
    parser.add_argument("--only", default="", help="of the settings, those with this text")
    parser.add_argument("--read", type=Path, help="run nothing; draw what OUT/distillation.json has")
    options = parser.parse_args()
    file = options.out / "distillation.json"
    if options.read is None:
        options.out.mkdir(parents=True, exist_ok=True)
        wanted = [(arm, int(seed), options.out) for arm in ARMS if options.only in arm for seed in options.seeds.split(",")]
        with ThreadPoolExecutor(options.processes) as pool:
            rows = list(pool.map(lambda words: one(*words), wanted))
        file.write_text(json.dumps({"date": time.strftime("%Y-%m-%d"), "rows": rows}, indent=1))
    rows = json.loads(file.read_text())["rows"]
    print("\n".join(table(rows)))
    if options.read is not None:
        draw(rows, options.read)
    print(json.dumps({"runs": len(rows), "stopped": sum("stopped" in row for row in rows)}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
