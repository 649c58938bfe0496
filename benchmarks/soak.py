"""A soak test: GRPO on a tiny model for N minutes, while rewards fail, hang and kill their workers, trackers fail, and the run itself
is killed and resumed. Memory, file handles, threads and processes must not grow, and the run must stay intact.

    python benchmarks/soak.py 30

In the first 60% of the time the run is not killed, to measure its memory. Then it is killed at random times, with SIGKILL or SIGTERM,
and resumed. Prints a table, and one JSON line last. The exit code is 1 if something leaked or was lost.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from posttrain.runs.read import Run  # noqa: E402
from posttrain.tasks.base import Task  # noqa: E402
from posttrain.types import Problem, Score  # noqa: E402

# seconds, and share of the time, at the start that do not count: caches, histories that fill, the allocator's pools
WARM, SHARE = 20.0, 0.4
FLAT = 2.0  # MB a minute that count as flat
SAVE_EVERY = 10


@dataclass(frozen=True)
class Flaky(Task):
    """Reward: the share of letters before m. One score in a hundred goes wrong, in one of three ways."""

    def problems(self, split: str, level: int | None = None) -> Sequence[Problem]:
        return [Problem(f"{split}-{n}", f"say {n}", "a") for n in (range(64) if split == "train" else range(100, 108))]

    def score(self, problem: Problem, response: str) -> Score:
        trouble = random.SystemRandom().random()
        if trouble < 0.004:
            raise ConnectionError("the endpoint stopped answering")
        if trouble < 0.007:
            time.sleep(60)
        if trouble < 0.010:
            os.kill(os.getpid(), signal.SIGKILL)
        return Score(sum(c in "abcdefghijklm" for c in response) / max(1, len(response)))

    @property
    def isolated(self) -> bool:
        return True

    @property
    def seconds(self) -> float:
        return 0.5


class FlakyTracker:
    """A service that is gone after a while."""

    def __init__(self, directory: Path, config: object) -> None:
        self.left = random.SystemRandom().randint(5, 200)

    def log(self, row: object) -> None:
        self.left -= 1
        if self.left < 0:
            raise ConnectionError("the server is gone")

    def close(self) -> None:
        raise ConnectionError("still gone")


def train(directory: Path) -> int:
    """One attempt, in a process of its own."""
    from posttrain import catalogue, pipeline
    from posttrain.algorithms.grpo import GRPO
    from posttrain.config import Settings
    from posttrain.errors import Interrupted
    from posttrain.recipes.base import Recipe
    from posttrain.runs import trackers
    from posttrain.stages.rl import RLStage
    from posttrain.train.optimizer import Optimization
    from posttrain.types import Sampling

    trackers.KINDS["flaky"] = FlakyTracker  # type: ignore[index]
    trackers._require_installed = lambda name: None
    try:
        if (directory / "config.yaml").is_file():
            pipeline.resume(directory, allow_code=True)
            return 0
        task = catalogue.load("task", f"{Path(__file__).resolve()}:Flaky")()
        stage = RLStage(
            name="rl", model="tiny:nano", task=task, steps=10_000_000, prompts=4, algorithm=GRPO(group=4), sampling=Sampling(8),
            # hardly any learning: what a soak looks at is the machinery, and a solved task would give it nothing to do
            optimizer=Optimization(lr=1e-7, warmup=0, schedule="constant"), evaluate_every=0, checkpoint_every=SAVE_EVERY,
        )  # fmt: skip
        pipeline.start(Settings(Recipe((stage,)), "soak", device="cpu", threads=1, out=str(directory), trackers=("flaky",)))
    except Interrupted:
        return 130
    return 0


@dataclass
class Samples:
    """What was seen of the training process, once a second."""

    seconds: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)  # MB that are the process's own: not of files, which come and go with use
    handles: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    children: list[int] = field(default_factory=list)

    def take(self, pid: int, now: float) -> None:
        folder = Path(f"/proc/{pid}")
        status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line)
        found = (
            int(status["RssAnon"].split()[0]) / 1024,
            len(os.listdir(folder / "fd")),
            int(status["Threads"]),
            len((folder / "task" / str(pid) / "children").read_text().split()),
        )
        self.seconds.append(now)
        for store, value in zip((self.memory, self.handles, self.threads, self.children), found, strict=True):
            store.append(value)  # type: ignore[arg-type]

    @property
    def warm(self) -> float:
        return max(WARM, SHARE * (self.seconds[-1] if self.seconds else 0.0))

    def slope(self) -> float:
        """MB a minute, by least squares over what came after the warm-up."""
        kept = [(s / 60, m) for s, m in zip(self.seconds, self.memory, strict=True) if s > self.warm]
        return float(np.polyfit(*np.array(kept).T, 1)[0]) if len(kept) > 10 else float("nan")

    def growth(self, values: list[int]) -> int:
        """The most of the last third less the most of the first third after the warm-up: what comes and goes is no leak."""
        kept = [v for s, v in zip(self.seconds, values, strict=True) if s > self.warm]
        third = len(kept) // 3
        return max(kept[-third:]) - max(kept[:third]) if third else 0


def launch(directory: Path) -> subprocess.Popen[bytes]:
    log = (directory.parent / "said.txt").open("ab")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, __file__, "--child", str(directory)]
    with log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)


def watch(process: subprocess.Popen[bytes], seconds: float, samples: Samples) -> None:
    """Take samples for a while, or until the process ends."""
    began = time.monotonic()
    while time.monotonic() - began < seconds and process.poll() is None:
        try:
            samples.take(process.pid, time.monotonic() - began)
        except (FileNotFoundError, ProcessLookupError, KeyError):
            return
        time.sleep(min(1.0, max(0.01, seconds - (time.monotonic() - began))))


def relatives(session: int) -> list[int]:
    """Processes of a session that are alive."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def end(process: subprocess.Popen[bytes], by: int) -> tuple[int, int]:
    """(exit code, processes that outlived it)."""
    process.send_signal(by)
    code = process.wait(120)
    deadline = time.monotonic() + 3
    while relatives(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return code, len(relatives(process.pid))


def last_step(directory: Path) -> int:
    return max((row.step for row in Run(directory).metrics("rl")), default=0)


def soak(minutes: float, directory: Path, seed: int) -> dict[str, float | int | str]:
    chance, began, limit = random.Random(seed), time.monotonic(), minutes * 60
    samples, orphans, lost, unexpected = Samples(), 0, 0, 0
    process = launch(directory)
    watch(process, 0.6 * limit, samples)
    if process.poll() is not None:
        raise SystemExit(f"the run ended by itself with {process.returncode}; see {directory.parent / 'said.txt'}")
    ends = {signal.SIGKILL: 0, signal.SIGTERM: 0}
    while True:
        by = signal.SIGKILL if chance.random() < 0.75 else signal.SIGTERM
        before = last_step(directory)
        code, left = end(process, by)
        ends[by] += 1
        orphans += left
        unexpected += code != (-signal.SIGKILL if by == signal.SIGKILL else 130)
        if time.monotonic() - began > limit:
            break
        process = launch(directory)
        watch(process, chance.uniform(8.0, 25.0), Samples())
        events = [e for e in Run(directory).events() if e.kind == "resume"]
        lost = max(lost, before - int(events[-1].details["step"])) if events else before
    return summary(directory, samples, time.monotonic() - began) | {
        "sigkills": ends[signal.SIGKILL], "sigterms": ends[signal.SIGTERM], "orphans": orphans, "unexpected_ends": unexpected,
        "most_steps_lost": lost, "most_that_may_be_lost": 2 * SAVE_EVERY + 1,
    }  # fmt: skip


def summary(directory: Path, samples: Samples, seconds: float) -> dict[str, float | int | str]:
    run = Run(directory)
    rows = run.metrics("rl")
    steps = [row.step for row in rows]
    events = run.events()
    writes = [e.details for e in events if e.kind == "checkpoint"]
    return {
        "benchmark": "soak", "minutes": round(seconds / 60, 2), "steps": max(steps),
        "steps_missing": max(steps) - len(set(steps) - {0}), "steps_doubled": len(steps) - len(set(steps)),
        "failed_scores": round(sum(r.figures.get("failed", 0) for r in rows) * 16),
        "tracker_failures": sum(e.kind == "warning" and "tracker" in e.details for e in events),
        "damaged_checkpoints": sum(e.kind == "damaged" for e in events), "checkpoints": len(writes),
        "checkpoint_ms": round(1000 * float(np.median([w["seconds"] for w in writes])), 1),
        "checkpoint_wait_ms": round(1000 * float(np.median([w["waited"] for w in writes])), 1),
        "memory_mb": round(samples.memory[-1], 1), "memory_slope_mb_per_minute": round(samples.slope(), 3),
        "handles": max(samples.handles), "handles_growth": samples.growth(samples.handles),
        "threads": max(samples.threads), "threads_growth": samples.growth(samples.threads),
        "children": max(samples.children), "children_growth": samples.growth(samples.children),
    }  # fmt: skip


def verdict(found: dict[str, float | int | str]) -> list[str]:
    zero = ("steps_missing", "steps_doubled", "damaged_checkpoints", "orphans", "unexpected_ends")
    problems = [f"{name} is {found[name]}, not 0" for name in zero if found[name]]
    problems += [f"{name} is {found[name]}" for name in ("handles_growth", "threads_growth") if int(found[name]) > 1]
    if not float(found["memory_slope_mb_per_minute"]) < FLAT:
        problems.append(f"memory grows by {found['memory_slope_mb_per_minute']} MB a minute")
    if int(found["most_steps_lost"]) > int(found["most_that_may_be_lost"]):
        problems.append(f"{found['most_steps_lost']} steps were lost at once")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("minutes", nargs="?", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return train(options.child)
    with tempfile.TemporaryDirectory() as folder:
        found = soak(options.minutes, Path(folder) / "run", options.seed)
    for name, value in found.items():
        print(f"{name:<28} {value}")
    problems = verdict(found)
    print("\n".join(problems) or "flat and whole")
    print(json.dumps(found | {"ok": not problems}))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
