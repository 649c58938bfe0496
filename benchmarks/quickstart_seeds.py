"""Runs the quickstart over several seeds, with its control: SFT continued for as long as RL took. Prints a table, then one JSON line.

    python benchmarks/quickstart_seeds.py OUT [SEEDS] [key=value ...]

OUT is a directory for the runs; SEEDS is a list such as 0,1,2. A seed whose run is complete in OUT is not run again.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def run(out: Path, seed: int, settings: list[str]) -> dict[str, Any]:
    """One run in a process of its own; what its stages found."""
    directory = out / f"seed-{seed}"
    command = [sys.executable, "-m", "posttrain", "run", "quickstart", "control=true", f"seed={seed}", f"out={directory}"]
    if not (directory / "summary.json").is_file():
        subprocess.run([*command, *settings], check=True, stdout=subprocess.DEVNULL)
    summary = json.loads((directory / "summary.json").read_text())
    stages = summary["stages"]
    names = {"sft": "before", "rl": "after", "control": "after_control"}
    return {
        "seed": seed,
        "accuracy": {name: stages[stage]["accuracy"] for name, stage in names.items()},
        "format": {name: stages[stage]["parts"]["format"] for name, stage in names.items()},
        "problems": stages["after"]["problems"],
        "seconds": {name: round(stages[name]["train_seconds"], 1) for name in ("sft", "rl", "control")},
        "wall": summary["seconds"],
    }


def cell(interval: list[float]) -> str:
    return f"{100 * interval[0]:.1f}% [{100 * interval[1]:.1f}, {100 * interval[2]:.1f}]"


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__)
        return 2
    out, seeds = Path(sys.argv[1]), [int(s) for s in (sys.argv[2] if len(sys.argv) > 2 else "0,1,2").split(",")]
    results = []
    for seed in seeds:
        results.append(run(out, seed, sys.argv[3:]))
        print(f"seed {seed}: {results[-1]}", file=sys.stderr)
    print(
        "| seed | answer right after SFT | after RL | after SFT continued as long | format right after SFT | after RL | RL took |"
    )
    print("|---|---|---|---|---|---|---|")
    for r in results:
        a, f = r["accuracy"], r["format"]
        parts = [
            cell(a["sft"]),
            cell(a["rl"]),
            cell(a["control"]),
            cell(f["sft"]),
            cell(f["rl"]),
            f"{r['seconds']['rl']:.0f} s",
        ]
        print(f"| {r['seed']} | " + " | ".join(parts) + " |")
    print(
        json.dumps(
            {"results": results, "machine": platform.processor() or platform.machine(), "date": time.strftime("%Y-%m-%d")}
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
