"""The effect of stale samples: accuracy of the quickstart by `max_staleness`, and the speed of both sides at the same time.

    python benchmarks/staleness.py learn OUT [recipe=quickstart] [seeds=0,1,2] [arms=0-none,1-token,4-token,1-none,4-none]
                                             [processes=12] [key=value ...]
    python benchmarks/staleness.py speed [steps=30]

`learn`: an arm is a staleness and a correction; the recipe has stages `before`, `rl` and `after`; other keys are its own.
`speed`: a sampler and a trainer that sleep, in turn and at the same time, compared with the simulator's estimate.
Prints a table, then one JSON line.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.simulator import Plan, simulate
from posttrain.algorithms.grpo import GRPO
from posttrain.cluster.admission import Staleness
from posttrain.cluster.asynchronous import Asynchronous
from posttrain.data.curriculum import Curriculum, CurriculumState
from posttrain.models.tiny import character_tokenizer
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.types import Completion, Request, Sampling, Statistics

TASK = Arithmetic(level=2)
ARMS = "0-none,1-token,4-token,1-none,4-none"
LONGEST = 275.0  # seconds of all runs together: what is not done by then is left out
BEGAN = time.monotonic()


def start(folder: Path, seed: int, arm: str, recipe: str, keys: Sequence[str]) -> None:
    """One run of the recipe in a process of its own, with another that samples where it does so ahead."""
    staleness, correction = arm.split("-")
    ahead = ["rl.sampler=process", f"rl.max_staleness={staleness}", f"rl.staleness_correction={correction}"]
    command = [sys.executable, "-m", "posttrain", "run", recipe, f"seed={seed}", f"out={folder}", "device=cpu", "threads=1",
               "rl.evaluate_every=0", *(ahead if int(staleness) else []), *keys]  # fmt: skip
    with open(f"{folder}.log", "w") as log, suppress(subprocess.TimeoutExpired):
        left = max(0.1, LONGEST - (time.monotonic() - BEGAN))
        subprocess.run(command, stdout=log, stderr=log, timeout=left)


def result(folder: Path, seed: int, arm: str) -> dict[str, Any]:
    summary = json.loads((folder / "summary.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["stage"] == "rl" and row["step"]]

    def average(name: str) -> float | None:
        found = [row[name] for row in rows if isinstance(row.get(name), float) and row[name] == row[name]]
        return round(mean(found), 4) if found else None

    names = ("staleness/mean", "correction", "mismatch/stale", "seconds/trainer_idle", "seconds/sampler_idle")
    stages = summary["stages"]
    return {
        "seed": seed, "arm": arm, "before": stages["before"]["accuracy"][0], "after": stages["after"]["accuracy"][0],
        "seconds": round(stages["rl"]["train_seconds"], 1), "oldest": max((row.get("staleness/max", 0) for row in rows), default=0),
        "means": {name: average(name) for name in names},
    }  # fmt: skip


def learn(
    out: Path, recipe: str, seeds: Sequence[int], arms: Sequence[str], processes: int, keys: Sequence[str]
) -> dict[str, Any]:
    """All runs, never more than `processes` at once."""
    slots, turn = threading.Semaphore(processes), threading.Lock()
    out.mkdir(parents=True, exist_ok=True)
    runs = [(out / f"{seed}-{arm}", seed, arm) for arm in sorted(arms, reverse=True) for seed in seeds]

    def one(run: tuple[Path, int, str]) -> None:
        cost = 1 if run[2].startswith("0") else min(2, processes)
        with turn:
            for _ in range(cost):
                slots.acquire()
        try:
            start(*run, recipe, keys)
        finally:
            slots.release(cost)

    with ThreadPoolExecutor(len(runs)) as pool:
        list(pool.map(one, runs))
    found = [result(*run) for run in runs if (run[0] / "summary.json").is_file()]
    print(
        "| max_staleness | correction | before | after, by seed | mean | minus staleness 0 | mean age | oldest | mean weight | s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    base = mean([100 * r["after"] for r in found if r["arm"].startswith("0")] or [float("nan")])
    for arm in arms:
        own = sorted((r for r in found if r["arm"] == arm), key=lambda r: r["seed"])
        if own:
            after, age = [100 * r["after"] for r in own], mean([r["means"]["staleness/mean"] or 0.0 for r in own])
            weight = mean([r["means"]["correction"] or 1.0 for r in own])
            print(
                f"| {' | '.join(arm.split('-'))} | {100 * mean([r['before'] for r in own]):.1f}% | "
                f"{', '.join(f'{a:.1f}' for a in after)} | {mean(after):.1f}% | {mean(after) - base:+.1f} | {age:.2f} | "
                f"{max(r['oldest'] for r in own):.0f} | {weight:.3f} | {mean([r['seconds'] for r in own]):.0f} |"
            )
    return {"results": found, "missing": len(runs) - len(found)}


class Timed:
    """A sampler elsewhere that takes `seconds` for an answer and writes `capacity` at once, by the clock: also while nobody polls."""

    statistics = Statistics()

    def __init__(self, seconds: float, capacity: int):
        self.seconds, self.capacity, self.version = seconds, capacity, 0
        self.free = [0.0] * capacity  # when each row is free
        self.open: list[tuple[float, Request]] = []

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            row = self.free.index(min(self.free))
            self.free[row] = max(self.free[row], time.monotonic()) + self.seconds
            self.open.append((self.free[row], request))

    def poll(self, timeout: float | None = None) -> list[tuple[Request, Completion]]:
        wait = min((end for end, _ in self.open), default=0.0) - time.monotonic()
        time.sleep(min(max(wait, 0.0), timeout or 1.0))
        now, before = time.monotonic(), self.open
        self.open = [one for one in before if one[0] > now]
        ids, zeros = np.array([1]), np.zeros(1, np.float32)
        versions = np.full(1, self.version, np.int32)
        return [(request, Completion(ids, zeros, versions, "stop")) for end, request in before if end <= now]

    def cancel(self, sessions: Any) -> None:
        self.open = [one for one in self.open if one[1].session not in sessions]

    def publish(self, version: int, weights: Any = None) -> None:
        self.version = version

    def release(self) -> None: ...

    def close(self) -> None: ...


def rate(staleness: int, generate: float, train: float, steps: int, batch: int = 4) -> float:
    """Steps a second of the source with a sampler and a trainer that sleep."""
    tokenizer = character_tokenizer(str(TASK.alphabet))
    state = CurriculumState([2], [1000], Curriculum(), 0)
    given = (TASK, Timed(generate, 2 * batch), tokenizer, state, batch, Sampling(4), 0, torch.device("cpu"))
    problems = {2: TASK.problems("train", 2)[:1000]}
    bound = Staleness(batch=batch, max_staleness=staleness)
    source = Asynchronous(*given, problems=problems, staleness=bound, steps=steps)
    began, algorithm = time.monotonic(), GRPO(group=2)
    for step in range(steps):
        found = source.collect(step, algorithm, {})
        time.sleep(train)
        source.publish(step + 1)
        source.observe(found.groups)
    seconds = time.monotonic() - began
    source.close()
    return steps / seconds


def speed(steps: int) -> dict[str, Any]:
    print("| generation s a step | training s a step | max_staleness | steps/s | of the slower side's limit | simulated |")
    print("|---|---|---|---|---|---|")
    found = []
    for generate, train in ((0.4, 0.2), (0.2, 0.4), (0.3, 0.3)):
        for staleness in (0, 1, 4):
            measured, limit = rate(staleness, generate, train, steps), 1 / max(generate, train)
            settings: dict[str, Any] = {"steps": steps, "batch": 4, "workers": 1, "slots": 4, "spread": 0.0}
            estimate = simulate(Plan(**settings, generate=generate, train=train, max_staleness=staleness)).rate / 4
            print(f"| {generate} | {train} | {staleness} | {measured:.2f} | {measured / limit:.0%} | {estimate / limit:.0%} |")
            found.append({"generate": generate, "train": train, "staleness": staleness, "share": measured / limit,
                          "simulated": estimate / limit})  # fmt: skip
    return {"results": found, "least_share_ahead": min(r["share"] for r in found if r["staleness"])}


def main() -> int:
    what = sys.argv[1] if len(sys.argv) > 1 else ""
    if what == "learn" and len(sys.argv) > 2:
        given = {"recipe": "quickstart", "seeds": "0,1,2", "arms": ARMS, "processes": "12"}
        given |= dict(one.split("=", 1) for one in sys.argv[3:])
        seeds, arms, processes = given.pop("seeds").split(","), given.pop("arms").split(","), int(given.pop("processes"))
        recipe = given.pop("recipe")
        keys = [f"{name}={value}" for name, value in given.items()]
        found = learn(Path(sys.argv[2]), recipe, [*map(int, seeds)], arms, processes, keys)
        print(json.dumps(found))
        return 1 if found["missing"] else 0
    elif what == "speed":
        given = dict(one.split("=", 1) for one in sys.argv[2:])
        print(json.dumps(speed(int(given.get("steps", 30)))))
    else:
        print(__doc__)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
