"""Every recipe with its toy model: does its one primary figure move by at least two standard errors on held-out prompts?

    python benchmarks/recipes.py OUT [--recipes instructgpt,dpo] [--seeds 0] [--processes 2]
    python benchmarks/recipes.py OUT --recipes 'star,star hint=false' --seeds 0,1,2      # with settings, as a control

The headline recipes run over three seeds. Each run is a directory in OUT; finished ones are not run again. Prints a table and one
JSON line; exit code 1 where one did not move whose page does not explain it.
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
from typing import Any

VERSUS = {"instructgpt": "versus_sft", "dpo": "versus_sft", "rejection_sampling": "versus_sft", "best_of_n": "versus_sft",
          "kto": "versus_sft", "iterative_dpo": "versus_sft_3", "sentiment": "versus_sft_3", "summarize": "versus_sft",
          "rlaif": "versus_sft"}  # fmt: skip
WITH_BOTH = ("quickstart", "iterate", "calculator", "code", "guess", "safety", "shop", "solver_critic", "star", "tictactoe")
BEFORE_AFTER = {
    "r1_zero": ("base", "trained"),
    "r1": ("base_sums", "final_sums"),
    "distill": ("after_sft", "after"),
    **dict.fromkeys(WITH_BOTH, ("before", "after")),
}
RECIPES = (*BEFORE_AFTER, *VERSUS)
EXPLAINED = ("distill", "summarize")  # negative results: their pages say why
HEADLINE, SEEDS = ("instructgpt", "sentiment", "r1_zero", "r1", "dpo", "summarize", "rlaif", "safety"), "0,1,2"


def run(recipe: str, seed: int, out: Path, given: Sequence[str] = ()) -> float:
    """Run or resume a recipe with the settings that are given; returns its seconds."""
    began = time.perf_counter()
    if not (out / "summary.json").is_file():
        words = (
            ["resume", str(out)] if (out / "config.yaml").is_file() else ["run", recipe, *given, f"seed={seed}", f"out={out}"]
        )
        subprocess.run([sys.executable, "-m", "posttrain", *words], check=True, stdout=subprocess.DEVNULL)
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


def one(recipe: str, seed: int, folder: Path) -> dict[str, Any]:
    """Run it, and what came of it; told as soon as it is known."""
    name, *given = recipe.split()
    out = folder / f"{recipe.replace(' ', '-')}-{seed}"
    seconds = run(name, seed, out, given)
    row = {"recipe": recipe, "seed": seed, "seconds": seconds, **figure(name, out)}
    numbers = f"{row['from']:>7.3f}{row['to']:>7.3f}{row['errors']:>13.1f}{seconds:>9.0f}"
    print(f"{recipe:<20}{seed:>5}  {row['what']:<22}{numbers}", flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--seeds", help=f"of every recipe; left out, {SEEDS} of {', '.join(HEADLINE)}, and 0 of the others")
    parser.add_argument(
        "--processes", type=int, default=1, help="runs at the same time; with OMP_NUM_THREADS=1 each has one core"
    )
    options = parser.parse_args()
    print(f"{'recipe':<20}{'seed':>5}  {'figure':<22}{'from':>7}{'to':>7}{'std. errors':>13}{'seconds':>9}")
    recipes = {recipe: options.seeds or (SEEDS if recipe in HEADLINE else "0") for recipe in options.recipes.split(",")}
    wanted = [(recipe, int(seed), options.out) for recipe, seeds in recipes.items() for seed in seeds.split(",")]
    with ThreadPoolExecutor(options.processes) as pool:
        rows = list(pool.map(lambda words: one(*words), wanted))
    print(json.dumps({"date": time.strftime("%Y-%m-%d"), "rows": rows}))
    return 0 if all(row["errors"] >= 2 or row["recipe"].split()[0] in EXPLAINED for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
