"""Runs every recipe with its toy model: does its primary figure change by at least two standard errors on held-out prompts?

    python benchmarks/recipes.py OUT [--recipes instructgpt,dpo] [--seeds 0] [--processes 2]
    python benchmarks/recipes.py OUT --recipes 'star,star hint=false' --seeds 0,1,2      # with settings, as a control

    python benchmarks/recipes.py OUT --read      # the table again, of OUT/recipes.json alone

The headline recipes run over three seeds. Each run is a directory in OUT; finished runs are not run again. --until ends unfinished
runs after this many seconds. Writes OUT/recipes.json and a Markdown table, OUT/recipes.md. The exit code is 1 if a figure did not
change and the page of its recipe does not explain it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, stdev
from typing import Any

VERSUS = {"instructgpt": "versus_sft", "dpo": "versus_sft", "rejection_sampling": "versus_sft", "best_of_n": "versus_sft",
          "kto": "versus_sft", "iterative_dpo": "versus_sft_3", "sentiment": "versus_sft_3", "summarize": "versus_sft",
          "rlaif": "versus_sft"}  # fmt: skip
WITH_BOTH = (
    "quickstart", "agent", "iterate", "calculator", "code", "guess", "nanochat_rl", "safety", "shop", "solver_critic", "star",
    "tictactoe",
)  # fmt: skip
BEFORE_AFTER = {
    "r1_zero": ("base", "trained"),
    "r1": ("base_sums", "final_sums"),
    "distill": ("before", "after"),  # SFT on the teacher's samples beside it: benchmarks/distillation.py
    "process": ("before", "after_process"),
    **dict.fromkeys(WITH_BOTH, ("before", "after")),
}
RECIPES = (*BEFORE_AFTER, *VERSUS)
EXPLAINED = ("agent", "tictactoe")  # negative results: their pages say why
HEADLINE, SEEDS = ("instructgpt", "sentiment", "r1_zero", "r1", "dpo", "summarize", "rlaif", "safety"), "0,1,2"


def run(recipe: str, seed: int, out: Path, given: Sequence[str] = (), timeout: float | None = None) -> float:
    """Run or resume a recipe with the settings that are given; returns its seconds."""
    began = time.perf_counter()
    if not (out / "summary.json").is_file():
        words = (
            ["resume", str(out)] if (out / "config.yaml").is_file() else ["run", recipe, *given, f"seed={seed}", f"out={out}"]
        )
        subprocess.run([sys.executable, "-m", "posttrain", *words], check=True, stdout=subprocess.DEVNULL, timeout=timeout)
    return float(json.loads((out / "summary.json").read_text()).get("seconds", time.perf_counter() - began))


def result(out: Path, stage: str) -> dict[str, Any]:
    return dict(json.loads((out / "stages" / stage / "result.json").read_text()))


def figure(recipe: str, out: Path) -> dict[str, Any]:
    """The primary figure, what it is compared with, and how many standard errors lie between."""
    if recipe in VERSUS:
        found = result(out, VERSUS[recipe])
        value, low, high = found["win_rate"]
        return {"what": "win rate against SFT", "from": 0.5, "to": value, "low": low, "high": high,
                "errors": (value - 0.5) / max(1e-9, (high - low) / 3.92), "problems": found["problems"], "kl": found["kl"],
                "perplexity": [found.get("perplexity_against"), found.get("perplexity")]}  # fmt: skip
    before, after = (result(out, stage) for stage in BEFORE_AFTER[recipe])
    spread = sum(((r["accuracy"][2] - r["accuracy"][1]) / 3.92) ** 2 for r in (before, after)) ** 0.5
    moved = after["accuracy"][0] - before["accuracy"][0]
    value, low, high = after["accuracy"]
    return {"what": "held-out accuracy", "from": before["accuracy"][0], "to": value, "low": low, "high": high,
            "errors": moved / max(1e-9, spread), "problems": after["problems"],
            "pass_at": [{k: v[0] for k, v in r["pass_at"].items()} for r in (before, after)]}  # fmt: skip


def one(recipe: str, seed: int, folder: Path, deadline: float) -> dict[str, Any]:
    """Run it, and what came of it; told as soon as it is known. One that stopped must not end the others."""
    name, *given = recipe.split()
    out = folder / f"{recipe.replace(' ', '-')}-{seed}"
    try:
        seconds = run(name, seed, out, given, max(1.0, deadline - time.monotonic()))
    except subprocess.SubprocessError as error:
        print(f"{recipe:<20}{seed:>5}  {type(error).__name__}", flush=True)
        return {"recipe": recipe, "seed": seed, "stopped": type(error).__name__}
    row = {"recipe": recipe, "seed": seed, "seconds": seconds, **figure(name, out)}
    numbers = f"{row['from']:>7.3f}{row['to']:>7.3f}{row['errors']:>13.1f}{seconds:>9.0f}"
    print(f"{recipe:<20}{seed:>5}  {row['what']:<22}{numbers}", flush=True)
    return row


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown: a line a recipe, its seeds with intervals over held-out prompts, and the mean change over its standard error."""
    lines = ["| recipe | figure | seeds | from | to | standard errors, each seed | over seeds | seconds |", "|---" * 8 + "|"]
    for recipe in dict.fromkeys(row["recipe"] for row in rows):
        ran = [row for row in rows if row["recipe"] == recipe and "stopped" not in row]
        stopped = [row["seed"] for row in rows if row["recipe"] == recipe and "stopped" in row]
        if not ran:
            lines.append(f"| {recipe} | stopped | {', '.join(map(str, stopped))} | | | | | |")
            continue
        change = [row["to"] - row["from"] for row in ran]
        over = mean(change) / max(1e-9, stdev(change) / len(change) ** 0.5) if len(change) > 1 else None
        begun = dict.fromkeys(f"{100 * row['from']:.1f}" for row in ran)
        ended = [f"{100 * row['to']:.1f} [{100 * row['low']:.1f}, {100 * row['high']:.1f}]" for row in ran]
        seeds = ", ".join(str(row["seed"]) for row in ran) + (f" ({len(stopped)} stopped)" if stopped else "")
        cells = [recipe, f"{ran[0]['what']}, %", seeds, ", ".join(begun), ", ".join(ended)]
        cells += [", ".join(f"{row['errors']:.1f}" for row in ran), f"{over:.1f}" if over is not None else ""]
        cells.append(", ".join(f"{row['seconds']:.0f}" for row in ran))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--recipes", default=",".join(RECIPES), help="in the order in which they are begun")
    parser.add_argument("--seeds", help=f"of every recipe; left out, {SEEDS} of {', '.join(HEADLINE)}, and 0 of the others")
    parser.add_argument(
        "--processes", type=int, default=1, help="runs at the same time; with OMP_NUM_THREADS=1 each has one core"
    )
    parser.add_argument("--until", type=float, default=86_400.0, help="seconds after which running recipes are ended")
    parser.add_argument("--read", action="store_true", help="run nothing: OUT/recipes.json is there")
    options = parser.parse_args()
    file, deadline = options.out / "recipes.json", time.monotonic() + options.until
    if not options.read:
        options.out.mkdir(parents=True, exist_ok=True)
        print(f"{'recipe':<20}{'seed':>5}  {'figure':<22}{'from':>7}{'to':>7}{'std. errors':>13}{'seconds':>9}")
        recipes = {recipe: options.seeds or (SEEDS if recipe in HEADLINE else "0") for recipe in options.recipes.split(",")}
        wanted = [(recipe, int(seed), options.out, deadline) for recipe, seeds in recipes.items() for seed in seeds.split(",")]
        with ThreadPoolExecutor(options.processes) as pool:
            found = list(pool.map(lambda words: one(*words), wanted))
        file.write_text(
            json.dumps({"date": time.strftime("%Y-%m-%d"), "processes": options.processes, "rows": found}, indent=1)
        )
    rows = json.loads(file.read_text())["rows"]
    (options.out / "recipes.md").write_text("\n".join(table(rows)) + "\n")
    print("\n".join(table(rows)))
    failed = [row for row in rows if row.get("errors", 0) < 2 and row["recipe"].split()[0] not in EXPLAINED]
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
