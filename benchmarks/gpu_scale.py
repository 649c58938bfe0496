"""Measures the time of a token as a step grows: microseconds a token of generation and of training, from 64 to 4,096 sequences of a
0.5B model, and from 30M to 7B parameters, compared with the roofline of the GPU's memory and matrix rates.

    python benchmarks/gpu_scale.py > OUT.txt                  # its last line is JSON
    python benchmarks/gpu_scale.py --draw OUT.json OUT.png    # of that line

Prompts of 128 tokens in groups of 8, 128 new tokens; 4,096 sequences of the 30M model, 512 of the 7B one, which trains adapters.
Needs a CUDA device, torch, transformers and triton. Prints a table, then one JSON line.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu_cases import CASES, Case, ceilings, decode_bound, settle, train_flops
from gpu_grpo_step import BUDGETS, Ours

SEQUENCES = (64, 256, 1024, 4096)
SIZES = {"d": ("30M", 4096), "a": ("0.5B", 1024), "b": ("1.5B", 1024), "c": ("7B, LoRA", 512)}


def measure(name: str, sequences: int, ceiling: tuple[float, float], repeats: int = 3) -> dict[str, Any]:
    case: Case = replace(CASES[name], prompts=sequences // 8, group=8, prompt=128, new=128)
    ours = Ours(case, BUDGETS[name])
    ours.step(0)
    settle()
    steps = [ours.step(1 + n) for n in range(repeats)]
    tokens, (bytes_s, flops_s) = sequences * case.new, ceiling
    found = {key: statistics.median(step[key] for step in steps) / tokens * 1e6 for key in ("generate", "train")}
    bounds = {
        "generate_bound": decode_bound(case, bytes_s, flops_s, shared=True) / tokens * 1e6,
        "train_bound": train_flops(case, True) / flops_s / tokens * 1e6,
    }
    del ours
    gc.collect()
    torch.cuda.empty_cache()
    return {"case": name, "sequences": sequences, "parameters": case.block_weights + case.head_weights, **found, **bounds}


def draw(rows: list[dict[str, Any]], sizes: list[dict[str, Any]], target: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.6))
    for axis, found, key, label in (
        (axes[0], rows, "sequences", "sequences of a step (0.5B)"),
        (axes[1], sizes, "parameters", "parameters"),
    ):
        for what, colour in (("generate", "C0"), ("train", "C1")):
            places = [row[key] for row in found]
            axis.plot(places, [row[what] for row in found], "o-", color=colour, label=what)
            axis.plot(places, [row[f"{what}_bound"] for row in found], "--", color=colour, label=f"{what}: bound")
        axis.set(xscale="log", yscale="log", xlabel=label, ylabel="microseconds a new token")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(target, dpi=110)


def main() -> None:
    if sys.argv[1:2] == ["--draw"]:
        known = json.loads(Path(sys.argv[2]).read_text())
        return draw(known["sequences"], known["sizes"], sys.argv[3])
    ceiling = ceilings()
    rows = [measure("a", count, ceiling) for count in SEQUENCES]
    sizes = [measure(name, count, ceiling) for name, (_, count) in SIZES.items() if name != "a"]
    sizes = sorted([*sizes, next(row for row in rows if row["sequences"] == SIZES["a"][1])], key=lambda row: row["parameters"])
    print(f"{'model':10} {'sequences':>9} {'generate':>9} {'bound':>7} {'train':>7} {'bound':>7}   microseconds a new token")
    for row in [*rows, *sizes]:
        cells = " ".join(f"{row[key]:7.2f}" for key in ("generate", "generate_bound", "train", "train_bound"))
        print(f"{SIZES[row['case']][0]:10} {row['sequences']:9} {cells}")
    gpu = torch.cuda.get_device_name()
    print(json.dumps({"gpu": gpu, "torch": torch.__version__, "ceilings": ceiling, "sequences": rows, "sizes": sizes}))


if __name__ == "__main__":
    main()
