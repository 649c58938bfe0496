"""The recipe `sentiment` over seeds: win rates of every round, and the curves of over-optimisation, one thin line a seed.

python benchmarks/sentiment.py OUT [--seeds 0,1,2] [--processes 2]    # writes OUT/sentiment.json, prints a table and one JSON line
python benchmarks/sentiment.py --draw OUT/sentiment.json docs/sentiment.png
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
DIGITS = 5  # significant ones that are kept


def one_seed(job: tuple[str, int]) -> dict[str, Any]:
    import torch

    from posttrain.recipes.sentiment import sentiment
    from posttrain.runs.write import RunWriter
    from posttrain.stages.base import Context, run_stages

    torch.set_num_threads(1)
    out, seed = job
    began, recipe = time.perf_counter(), sentiment()
    with RunWriter.create(Path(out) / f"sentiment-{seed}", {"name": "sentiment", "seed": seed}) as writer:
        context = Context(writer, seed, threads=1, say=False)
        run_stages(recipe.stages, context)
    results = {stage.name: context.result(stage.name) or {} for stage in recipe.stages}
    return {
        "seed": seed, "seconds": time.perf_counter() - began, "cpu_seconds": time.process_time(),
        "versus": {n: {k: r[k] for k in ("win_rate", "ties", "reward", "reward_against", "kl", "problems", "perplexity",
                                         "perplexity_against")} for n, r in results.items() if n.startswith("versus")},
        "reward_accuracy": {n: r["accuracy"] for n, r in results.items() if n.startswith("reward")},
        "curves": results["overoptimisation"]["curves"],
    }  # fmt: skip


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def draw(found: dict[str, Any], path: Path) -> None:
    """Gold above, proxy below, of PPO by round and of best of n by reward model, against the square root of KL."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    colours = ("#cf3f4f", "#e08214", "#2f6fde", "#2a9d5c")
    figure = Figure(figsize=(11, 7), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    names = list(found["runs"][0]["curves"])
    kinds = [[n for n in names if not n.startswith("best")], [n for n in names if n.startswith("best")]]
    for row, what in enumerate(("gold", "proxy")):
        for column, (title, wanted) in enumerate(
            zip(("PPO, by round", "best of n, by the reward model of round"), kinds, strict=True)
        ):
            axes = figure.add_subplot(2, 2, 2 * row + column + 1)
            for number, (name, colour) in enumerate(zip(wanted, colours, strict=False)):
                for place, one in enumerate(found["runs"]):
                    points = one["curves"][name]["points"]
                    root = [math.sqrt(max(0.0, p["kl"])) for p in points]
                    label = f"round {number + 1}" if place == 0 else None
                    axes.plot(root, [p[what] for p in points], ".-", color=colour, alpha=0.7, linewidth=1, label=label)
            axes.set_title(title if row == 0 else "", loc="left", fontsize=11)
            axes.set_ylabel(f"{what}: {'the annotator' if what == 'gold' else 'the reward model'}")
            axes.set_xlabel("square root of KL from the start, nats a response" if row else "")
            axes.spines[["top", "right"]].set_visible(False)
            if what == "gold":
                axes.set_ylim(0, 1)
                axes.legend(frameon=False, fontsize=8)
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, nargs="?", default=Path("runs/sentiment"))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--draw", nargs=2, type=Path, metavar=("JSON", "PNG"))
    options = parser.parse_args()
    if options.draw:
        draw(json.loads(options.draw[0].read_text()), options.draw[1])
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    runs: list[dict[str, Any]] = []
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for one in pool.imap_unordered(one_seed, [(str(options.out), int(seed)) for seed in options.seeds.split(",")]):
            runs = sorted([*runs, rounded(one)], key=lambda r: r["seed"])
            found = {"benchmark": "sentiment", "date": time.strftime("%Y-%m-%d"), "runs": runs}
            (options.out / "sentiment.json").write_text(json.dumps(found, indent=1))
    for one in runs:
        for name, v in one["versus"].items():
            value, low, high = v["win_rate"]
            errors = (value - 0.5) / max(1e-9, (high - low) / 3.92)
            print(f"seed {one['seed']} {name:<14} win rate {value:.3f} [{low:.3f}, {high:.3f}] {errors:+6.1f} errors, "
                  f"gold {v['reward_against'][0]:.3f} to {v['reward'][0]:.3f}, KL {v['kl']:.1f}")  # fmt: skip
        for name, curve in one["curves"].items():
            best, last, first = curve["best"], curve["last"], curve["points"][0]
            ends = f"best {best['gold']:.3f} (KL {best['kl']:.1f}) last {last['gold']:.3f} (KL {last['kl']:.1f})"
            over = "over-optimised" if curve["turned_down"] else ""
            print(f"seed {one['seed']} {name:<22} gold {first['gold']:.3f} {ends} {over}")
    print(json.dumps({"benchmark": "sentiment", "seconds": [round(one["seconds"]) for one in runs]}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
