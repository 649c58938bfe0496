"""The recipe `process` over seeds: outcome against process reward in RL and in search, a table in Markdown and a plot.

    python benchmarks/process_reward.py OUT [--seeds 0,1,2] [--processes 3] [--plot docs/recipes/process.png] [key=value ...]
    python benchmarks/process_reward.py OUT --read --plot docs/recipes/process.png

Each run is a directory in OUT; finished runs are not run again. Results are written to OUT/process.json. `--read` makes the table and
the plot from that file alone, without the runs. The key=value are settings of the recipe.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from statistics import mean
from typing import Any

from environments import cell, over_seeds
from recipes import result, run

ARMS = {"outcome": "outcome reward", "process": "process reward", "outcome_longer": "outcome reward, longer"}
METHODS = {"majority": "majority vote", "outcome": "best of N, outcome model", "process_min": "best of N, PRM, min",
           "process_product": "best of N, PRM, product", "process_last": "best of N, PRM, last", "beam": "beam search, PRM",
           "pass": "pass@N (a perfect choice)"}  # fmt: skip


def one(seed: int, folder: Path, given: Sequence[str]) -> dict[str, Any]:
    out = folder / f"process-{seed}"
    seconds = run("process", seed, out, ["threads=1", *given])
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    curves = {
        arm: [[x["step"], x["accuracy/test"]] for x in lines if x.get("stage") == arm and "accuracy/test" in x] for arm in ARMS
    }
    ends = {arm: result(out, f"after_{arm}")["accuracy"] for arm in ARMS}
    labels, search = result(out, "labels"), result(out, "search")
    row = {
        "seed": seed,
        "seconds": seconds,
        "before": result(out, "before")["accuracy"],
        "after": ends,
        "steps": {arm: result(out, arm)["steps"] for arm in ARMS},
        "curves": curves,
        "labels": {key: labels[key] for key in ("written", "steps", "mean", "completions", "tokens")},
        "models": {name: result(out, name)["accuracy"] for name in ("prm", "orm")},
        "search": search["accuracy"],
        "tokens": search["tokens"],
        "problems": search["problems"],
    }
    print(
        f"seed {seed}: {cell(row['before'])}, after {json.dumps({a: v[0] for a, v in ends.items()})}, {seconds:.0f} s",
        flush=True,
    )
    return row


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """RL by arm and search by method, one column a seed and their mean."""
    rows = sorted(rows, key=lambda row: row["seed"])
    top = max(map(int, rows[0]["search"]["pass"]))
    seeds = [f"seed {row['seed']}" for row in rows]
    lines = [["RL", "steps", *seeds, "mean"], ["---"] * (len(seeds) + 3)]
    lines.append(["before", "", *(cell(row["before"]) for row in rows), cell(over_seeds([r["before"][0] for r in rows]))])
    for arm, name in ARMS.items():
        values = [row["after"][arm] for row in rows]
        lines.append([name, str(rows[0]["steps"][arm]), *map(cell, values), cell(over_seeds([v[0] for v in values]))])
    lines += [
        [],
        ["choice", f"N = {top // 4}, mean", *(f"N = {top}, {seed}" for seed in seeds), "mean"],
        ["---"] * (len(seeds) + 3),
    ]
    for method, name in METHODS.items():
        found = [row["search"][method] for row in rows]
        values = [one[str(top)] for one in found]
        fewer = f"{100 * mean(one[str(top // 4)][0] for one in found):.1f}%" if str(top // 4) in found[0] else ""
        lines.append([name, fewer, *map(cell, values), cell(over_seeds([v[0] for v in values]))])
    several = len(rows) > 1  # a mean of one has no interval
    return "\n".join(f"| {' | '.join(line if several else line[:-1])} |" if line else "" for line in lines)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Left: held-out accuracy over steps of RL, one thin line a seed. Right: accuracy of search over N, means over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6))
    for number, arm in enumerate(("outcome_longer", "process")):
        for n, row in enumerate(rows):
            steps, values = zip(*row["curves"][arm], strict=True)
            left.plot(steps, [100 * v for v in values], color=f"C{number}", lw=1, label=ARMS[arm] if n == 0 else None)
    spent = rows[0]["steps"]["outcome_longer"] - rows[0]["steps"]["outcome"]
    left.set_title(f"RL; the labels cost as much as at most {spent} steps", fontsize=10)
    left.set_xlabel("step of RL")
    for number, (method, name) in enumerate(METHODS.items()):
        ns = sorted(map(int, rows[0]["search"][method]))
        values = [100 * mean(row["search"][method][str(n)][0] for row in rows) for n in ns]
        right.plot(
            ns, values, "*" if len(ns) == 1 else ".-", color=f"C{number}", lw=1, ms=10 if len(ns) == 1 else 5, label=name
        )
    right.set_xscale("log", base=2)
    right.set_title("search with the SFT model", fontsize=10)
    right.set_xlabel("N, samples of a problem")
    for axes in (left, right):
        axes.set_ylabel("% of held-out sums right")
        axes.legend(frameon=False, fontsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--processes", type=int, default=1, help="runs at the same time; each has one thread")
    parser.add_argument("--plot", type=Path, help="where to draw it")
    parser.add_argument("--read", action="store_true", help="run nothing: OUT/process.json is there")
    parser.add_argument("settings", nargs="*")
    options = parser.parse_intermixed_args()
    file = options.out / "process.json"
    if not options.read:
        options.out.mkdir(parents=True, exist_ok=True)
        rows: list[dict[str, Any]] = []
        with ThreadPoolExecutor(options.processes) as pool:
            jobs = [pool.submit(one, int(seed), options.out, options.settings) for seed in options.seeds.split(",")]
            for done in as_completed(jobs):
                rows.append(done.result())
                file.write_text(json.dumps({"date": time.strftime("%Y-%m-%d"), "settings": options.settings, "rows": rows}))
    found = json.loads(file.read_text())
    print(tables(found["rows"]))
    if options.plot:
        draw(found["rows"], options.plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
