"""Runs the recipe `sentiment` over seeds: win rates of every round, and the over-optimisation curves, one thin line for each seed.

python benchmarks/sentiment.py OUT [--seeds 0,1,2] [--processes 2] [key=value ...]    # OUT/sentiment.json, a table, one JSON line
python benchmarks/sentiment.py OUT --device cuda --processes 3 --scratch /tmp/runs model=DIR     # a real model; weights go to scratch
python benchmarks/sentiment.py --join A/sentiment.json B/sentiment.json OUT.json      # seeds of separate runs
python benchmarks/sentiment.py --draw OUT/sentiment.json docs/sentiment.png

The key=value are the recipe's own settings. OUT/seed-N.json is rewritten after every stage, so that a stopped run keeps its results.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from real_models import arguments  # noqa: E402

DIGITS = 5  # significant ones that are kept
KEPT = ("win_rate", "ties", "reward", "reward_against", "kl", "problems", "perplexity", "perplexity_against")
SHOWN = 12  # answers of each round that are kept, to look at
Job = tuple[str, str, int, str, dict[str, str]]


def one_seed(job: Job) -> dict[str, Any]:
    import torch

    from posttrain.recipes.sentiment import sentiment
    from posttrain.runs.write import RunWriter
    from posttrain.stages.base import Context, run_stages

    torch.set_num_threads(1)
    out, scratch, seed, device, settings = job
    began, recipe, stopped = time.perf_counter(), sentiment(**arguments(sentiment, settings)), ""
    with RunWriter.create(Path(scratch) / f"sentiment-{seed}", {"name": "sentiment", "seed": seed}) as writer:
        context = Context(writer, seed, device, threads=1, say=False)
        for count in range(1, len(recipe.stages) + 1):
            try:
                run_stages(recipe.stages[:count], context)  # those that are done are left out
            except Exception as error:
                traceback.print_exc()
                stopped = f"{recipe.stages[count - 1].name}: {type(error).__name__}: {error}"[:500]
            found = {"seed": seed, "settings": settings, "seconds": time.perf_counter() - began, "cpu_seconds": time.process_time(),
                     "hardware": torch.cuda.get_device_name() if device == "cuda" else "CPU", **figures(context, recipe)}  # fmt: skip
            found |= {"stopped": stopped} if stopped else {}
            (Path(out) / f"seed-{seed}.json").write_text(json.dumps(rounded(found), indent=1))
            if stopped:
                break
    return found


def figures(context: Any, recipe: Any) -> dict[str, Any]:
    """What there is of every stage that is done: win rates, accuracies, curves, some answers with what they were worth."""
    from posttrain.stages.overoptimisation import training_curve, verdict

    results = {stage.name: found for stage in recipe.stages if (found := context.result(stage.name)) is not None}
    if "overoptimisation" in results:
        curves = results["overoptimisation"]["curves"]
    else:
        points = {name: training_curve(context, name) for name in results if name.startswith("rl_")}
        curves = {name: {**verdict(curve), "points": curve} for name, curve in points.items() if curve}
    versus = [name for name in results if name.startswith("versus")]
    tasks = {stage.name: stage.task for stage in recipe.stages if stage.name in versus}
    return {
        "versus": {name: {key: results[name].get(key) for key in KEPT} | parts(context, name, tasks[name]) for name in versus},
        "reward_accuracy": {n: r.get("accuracy") for n, r in results.items() if n.startswith("reward")},
        "rankings": {n: r["written"] + r.get("from_before", 0) for n, r in results.items() if n.startswith("comparisons")},
        "stage_seconds": {name: result["seconds"] for name, result in results.items()},
        "answers": {name: answers(context, name) for name in versus},
        "curves": curves,
    }


def rows_of(context: Any, stage: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (context.folder(stage) / "problems.jsonl").read_text().splitlines()]


def answers(context: Any, stage: str) -> list[list[Any]]:
    """Question, the policy's answer, its worth; question, the first model's answer, its worth."""
    rows = rows_of(context, stage)[:SHOWN]
    return [[row["question"], *pair] for row in rows for pair in zip(row["responses"], row["values"], strict=True)]


def parts(context: Any, stage: str, task: Any) -> dict[str, dict[str, float]]:
    """What the annotator's scores are made of, on average: of the policy's answers, and of the first model's."""
    rows, found = rows_of(context, stage), {}
    problems = task.problems("test")[: len(rows)]
    for number, name in enumerate(("parts", "parts_against")):
        scored = [task.score(p, row["responses"][number]).parts for p, row in zip(problems, rows, strict=True)]
        names = sorted({key for one in scored for key in one})
        found[name] = {key: sum(one.get(key, 0.0) for one in scored) / len(scored) for key in names}
    return found


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
    names = sorted({name for one in found["runs"] for name in one["curves"]})
    kinds = [[n for n in names if not n.startswith("best")], [n for n in names if n.startswith("best")]]
    for row, what in enumerate(("gold", "proxy")):
        for column, (title, wanted) in enumerate(
            zip(("PPO, by round", "best of n, by the reward model of round"), kinds, strict=True)
        ):
            axes = figure.add_subplot(2, 2, 2 * row + column + 1)
            for number, (name, colour) in enumerate(zip(wanted, colours, strict=False)):
                for place, one in enumerate(one for one in found["runs"] if name in one["curves"]):
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
    parser.add_argument("settings", nargs="*", metavar="key=value", help="the recipe's own settings")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--scratch", type=Path, help="where the run directories go, with their weights; OUT where not given")
    parser.add_argument("--draw", nargs=2, type=Path, metavar=("JSON", "PNG"))
    parser.add_argument("--join", nargs="+", type=Path, metavar="JSON", help="the last one is written")
    options = parser.parse_intermixed_args()
    if options.draw:
        draw(json.loads(options.draw[0].read_text()), options.draw[1])
        return 0
    if options.join:
        *sources, target = options.join
        loaded = [json.loads(source.read_text()) for source in sources]
        runs = [one for part in loaded for one in part.get("runs", [part])]
        target.write_text(json.dumps(together(runs), indent=1))
        table(runs)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    settings = dict(pair.split("=", 1) for pair in options.settings)
    jobs: list[Job] = [
        (str(options.out), str(options.scratch or options.out), int(seed), options.device, settings)
        for seed in options.seeds.split(",")
    ]
    runs = []
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for one in pool.imap_unordered(one_seed, jobs):
            runs = sorted([*runs, rounded(one)], key=lambda r: r["seed"])
            (options.out / "sentiment.json").write_text(json.dumps(together(runs), indent=1))
    table(runs)
    print(json.dumps({"benchmark": "sentiment", "seconds": [round(one["seconds"]) for one in runs]}))
    return 0


def together(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"benchmark": "sentiment", "date": time.strftime("%Y-%m-%d"), "runs": sorted(runs, key=lambda r: r["seed"])}


def table(runs: list[dict[str, Any]]) -> None:
    for one in runs:
        if one.get("stopped"):
            print(f"seed {one['seed']} stopped early: {one['stopped']}")
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


if __name__ == "__main__":
    raise SystemExit(main())
