"""Runs the recipes that learn from feedback over several seeds: Markdown tables, and a plot for each page.

    python benchmarks/feedback.py OUT [--arms summarize,safety] [--seeds 0,1,2] [--processes 2] [--pages docs/recipes]

An arm is a shipped command, `posttrain run rlaif labels=people`. Each run is a directory in OUT; finished runs are not run again.
Results are written to OUT/feedback.json. `--read` makes tables and plots from that file alone, without the runs.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

from environments import BEGIN, END, cell, over_seeds
from recipes import result, run

WIN, EQUAL = "win_rate", "win_rate_at_equal_length"
# of each arm, the figures of its table: what they are called, and the stage and the key of its result that have them
FIGURES = {
    "summarize": {
        "accuracy of the reward model": ("reward", "accuracy"),
        "win rate, held-out reader": ("versus_sft", WIN),
        "at equal length": ("versus_sft", EQUAL),
        "win rate, writer": ("versus_writer", WIN),
        "at equal length, writer": ("versus_writer", EQUAL),
    },
    "rlaif": {
        "judge agrees with people": ("agreement", "agreement"),
        "accuracy of the reward model": ("reward", "accuracy"),
        "win rate by people": ("versus_sft", WIN),
        "at equal length": ("versus_sft", EQUAL),
    },
    "safety": {
        "right, before": ("before", "accuracy"),
        "right, after": ("after", "accuracy"),
        "harmful refused, before": ("before", "refused_harmful"),
        "harmful refused, after": ("after", "refused_harmful"),
        "harmless refused, before": ("before", "refused_harmless"),
        "harmless refused, after": ("after", "refused_harmless"),
    },
}
ARMS = ("summarize", "rlaif", "rlaif labels=people", "safety")
MEAN = 3  # seeds at least, for a mean and its interval
CURVES = ("reward", "reward/task", "kl", "length")


def one(arm: str, seed: int, folder: Path) -> dict[str, Any]:
    recipe, *given = arm.split()
    out = folder / f"{arm.replace(' ', '-')}-{seed}"
    seconds = run(recipe, seed, out, ["threads=1", *given])
    found = {}
    for name, (stage, key) in FIGURES[recipe].items():
        figures = result(out, stage)
        found[name] = figures[key] if key in figures else figures["parts"][key]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line.get("stage") == "rl" and line.get("step")]
    curves = {key: [[line["step"], round(line[key], 4)] for line in steps if key in line] for key in CURVES}
    kept = {stage: {k: v for k, v in result(out, stage).items() if k in ("kl", "length", "swayed", "ties", "judged", "problems")}
            for stage in dict.fromkeys(stage for stage, _ in FIGURES[recipe].values())}  # fmt: skip
    print(
        f"{arm} seed {seed}: {', '.join(f'{name} {cell(value)}' for name, value in found.items())}, {seconds:.0f} s", flush=True
    )
    return {"arm": arm, "seed": seed, "seconds": seconds, "figures": found, "kept": kept, "curves": curves}


def table(arm: str, rows: list[dict[str, Any]]) -> str:
    rows = sorted((row for row in rows if row["arm"] == arm), key=lambda row: row["seed"])
    names = list(FIGURES[arm.split()[0]])
    lines = [["", *(f"seed {row['seed']}" for row in rows), "mean"], ["---"] * (len(rows) + 2)]
    for name in names:
        values = [row["figures"][name] for row in rows]
        lines.append([name, *map(cell, values), cell(over_seeds([v[0] for v in values])) if len(rows) >= MEAN else ""])
    kl = [next((one["kl"] for one in row["kept"].values() if one.get("kl") is not None), None) for row in rows]
    if None not in kl:
        lines.append(["KL from SFT, nats a response", *(f"{value:.2f}" for value in kl), f"{mean(kl):.2f}"])
    if arm == "summarize":
        sizes = [row["kept"]["versus_sft"]["length"] for row in rows]
        lines.append(["length, SFT to RL, characters", *(f"{was:.1f} to {now:.1f}" for now, was in sizes), ""])
    if arm.startswith("rlaif"):
        asked = [row["kept"]["agreement"] for row in rows]
        lines.append(["pairs decided by the order alone", *(f"{one['swayed']} of {one['judged']}" for one in asked), ""])
    lines.append(["seconds", *(f"{row['seconds']:.0f}" for row in rows), ""])
    columns = len(rows) + (2 if len(rows) >= MEAN else 1)
    return "\n".join(f"| {' | '.join(line[:columns])} |" for line in lines)


def draw(recipe: str, rows: list[dict[str, Any]], folder: Path) -> None:
    """The figures of each seed with their intervals, and the simulated people's own score while PPO learns."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [row for row in rows if row["arm"].split()[0] == recipe]
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), gridspec_kw={"width_ratios": [1.4, 1]})
    names = list(FIGURES[recipe])
    for n, row in enumerate(rows):
        for place, name in enumerate(names):
            value, low, high = (100 * number for number in row["figures"][name])
            at = place + 0.6 * ((n + 0.5) / len(rows) - 0.5)
            left.errorbar(at, value, [[value - low], [high - value]], fmt="o", ms=3, lw=1, color=f"C{arms.index(row['arm'])}")
    left.axhline(50, color="#999", lw=0.6, ls=":")
    left.set_xticks(
        range(len(names)), [name.replace(", ", "\n").replace(" of the ", "\nof the ") for name in names], fontsize=6
    )
    left.set_ylim(0, 102)
    left.set_ylabel("%, each seed, 95% over prompts")
    for row in rows:
        label = row["arm"] if row["seed"] == min(r["seed"] for r in rows if r["arm"] == row["arm"]) else None
        if points := row["curves"]["reward/task"]:
            right.plot(*zip(*points, strict=True), lw=1, color=f"C{arms.index(row['arm'])}", label=label)
    right.set_xlabel("step of PPO")
    right.set_ylabel("score by the rules, not trained on")
    right.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(folder / f"{recipe}.png", dpi=110)
    plt.close(figure)


def fill(recipe: str, found: dict[str, Any], folder: Path) -> None:
    """Write the figures into the page of a recipe, between its two marks."""
    arms = list(dict.fromkeys(row["arm"] for row in found["rows"] if row["arm"].split()[0] == recipe))
    seeds = sorted({row["seed"] for row in found["rows"] if row["arm"] in arms})
    last = (
        "the last column is the mean over seeds, with Student's interval" if len(seeds) >= MEAN else "too few seeds for a mean"
    )
    how = f"{found['date']}, {found['machine']}; `python benchmarks/feedback.py OUT --seeds {','.join(map(str, seeds))}`"
    lines = [f"Held-out prompts, sampled at temperature 1, with 95% intervals over prompts; {last}", f"({how})."]
    for arm in arms:
        lines += ["", f"`posttrain run {arm} seed=N`:", "", table(arm, found["rows"])]
    text = (folder / f"{recipe}.md").read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    plot = f"![Figures of each seed, and the score while training]({recipe}.png)"
    (folder / f"{recipe}.md").write_text(before + "\n".join([BEGIN, "", *lines, "", plot, "", END]) + after)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--arms", default=",".join(ARMS), help=f"of: {', '.join(ARMS)}")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--processes", type=int, default=1, help="runs at the same time, of one thread each")
    parser.add_argument("--pages", type=Path, help="the folder of NAME.md, whose figures and plots are made anew")
    parser.add_argument("--machine", default=f"{os.cpu_count()} CPU cores, one thread a process", help="in words")
    parser.add_argument("--read", action="store_true", help="run nothing: OUT/feedback.json is there")
    options = parser.parse_args()
    file = options.out / "feedback.json"
    if not options.read:
        options.out.mkdir(parents=True, exist_ok=True)
        wanted = [(arm, int(seed), options.out) for seed in options.seeds.split(",") for arm in options.arms.split(",")]
        with ThreadPoolExecutor(options.processes) as pool:
            rows = list(pool.map(lambda words: one(*words), wanted))
        file.write_text(json.dumps({"date": time.strftime("%Y-%m-%d"), "machine": options.machine, "rows": rows}))
    found = json.loads(file.read_text())
    for arm in dict.fromkeys(row["arm"] for row in found["rows"]):
        print(f"\nposttrain run {arm} seed=N\n\n{table(arm, found['rows'])}")
    for recipe in dict.fromkeys(row["arm"].split()[0] for row in found["rows"]) if options.pages else ():
        draw(recipe, found["rows"], options.pages)
        fill(recipe, found, options.pages)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
