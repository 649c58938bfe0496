"""The studio on a run of 1,000,000 metric points and 100,000 rollouts (1 GB): the time to index it, to show the first page, to filter
and to search, and the server's memory. `python benchmarks/studio.py [FOLDER]` keeps the run in FOLDER; it prints one JSON line last.

`python benchmarks/studio.py --many [COUNT]` makes 10,000 small runs and measures `posttrain studio` on them over HTTP: the first page
after the server starts, before and after the runs have an index, searches, and the memory of the process.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from posttrain.runs.index import Filter, Index
from posttrain.runs.read import Run

STEPS, FIGURES, FILES, EACH, WORDS = 20_000, 50, 1_000, 100, 1_600


def make(directory: Path) -> None:
    """A run of that size, with text of random words."""
    directory.mkdir(parents=True)
    stages = [{"stage": "rl", "name": "rl", "model": "tiny:nano", "steps": STEPS}]
    (directory / "config.yaml").write_text(yaml.safe_dump({"format": 2, "name": "big", "stages": stages}))
    draw = random.Random(0)
    with (directory / "metrics.jsonl").open("w") as file:
        for step in range(1, STEPS + 1):
            row = {"step": step, "stage": "rl", "attempt": 1, "time": 1.7e9 + step, "reward": step / STEPS + draw.random()}
            row |= {f"figure/{n}": draw.random() for n in range(FIGURES - 1)}
            file.write(json.dumps(row) + "\n")
    events = [{"kind": "open", "time": 1.7e9, "attempt": 1}, {"kind": "stage", "time": 1.7e9, "attempt": 1, "stage": "rl"}]
    (directory / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    folder = directory / "rollouts" / "rl"
    folder.mkdir(parents=True)
    lexicon = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(30_000)]
    for number in range(1, FILES + 1):
        step = number * STEPS // FILES
        with (folder / f"step-{step:06d}.jsonl").open("w") as file:
            for sample in range(EACH):
                row = {"problem": f"train/{sample // 8}", "level": 1, "question": f"question {sample // 8} of step {step}"}
                row |= {"answer": "7", "sample": sample % 8, "response": " ".join(draw.choices(lexicon, k=WORDS))}
                reward = float(draw.random() < step / STEPS)
                row |= {"reward": reward, "parts": {"answer": reward, "format": 1.0}, "failure": None, "finish": "stop"}
                row |= {"outcome": "correct" if reward else "wrong", "length": WORDS, "version": step - 1, "attempt": 1}
                file.write(json.dumps(row | {"advantage": draw.gauss(0, 1)}) + "\n")


def timed(call) -> float:
    began = time.perf_counter()
    call()
    return round(time.perf_counter() - began, 3)


def read_all(index: Index) -> None:
    while index.read_rollouts(2.0):
        pass


def main(root: Path) -> None:
    directory = root / "big"
    if not directory.exists():
        make(directory)
    size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file() and ".studio" not in path.parts)
    index = Index(Run(directory))
    print(f"{size / 1e9:.2f} GB", flush=True)
    seconds = {"metrics": timed(index.read_metrics), "rollouts": timed(lambda: read_all(index))}
    print(seconds, f"index {index.path.stat().st_size / 1e6:.0f} MB", flush=True)
    names = [*index.figures("rl")][:16]
    seconds["16 charts"] = timed(lambda: [index.series("rl", name) for name in names])
    asked = {
        "reward": Filter(reward_from=0.5, step_from=5_000),
        "part": Filter(part="answer", part_to=0.5),
        "word": Filter(text=index.text(index.find(Filter(), limit=1))[0].response.split()[3]),
        "several words": Filter(text=f"question 3 of step {STEPS // 2}"),
        "two letters": Filter(text="ab"),
    }
    for name, wanted in asked.items():
        seconds[name] = timed(lambda wanted=wanted: (index.count(wanted), index.text(index.find(wanted, "reward", True))))
        print(name, index.count(wanted), seconds[name], flush=True)
    memory = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(json.dumps({"bytes": size, "seconds": seconds, "memory_mb": int(memory.split()[1]) // 1024}))


def make_many(root: Path, count: int) -> None:
    """Small runs in folders of 100, most of them finished."""
    draw = random.Random(0)
    stages = [{"stage": "rl", "name": "rl", "model": "tiny:nano", "steps": 20}]
    config = yaml.safe_dump({"format": 2, "name": "small", "stages": stages})
    for number in range(count):
        directory = root / f"group-{number // 100}" / f"run-{number}"
        directory.mkdir(parents=True)
        (directory / "config.yaml").write_text(config)
        began = 1.7e9 + 100 * number
        rows = [
            {"step": n, "stage": "rl", "attempt": 1, "time": began + n, "reward": n / 20 + draw.random()} for n in range(1, 21)
        ]
        (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        kinds = ["open", "stage", *(["ended"] if number % 10 else [])]
        events = [{"kind": kind, "time": began, "attempt": 1, "stage": "rl"} for kind in kinds]
        (directory / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


@contextmanager
def studio(root: Path) -> Iterator[tuple[str, int]]:
    """The address and the process of a studio that has just been started."""
    command = [sys.executable, "-m", "posttrain", "studio", str(root), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[1].rstrip("/")
        try:
            yield address, process.pid
        finally:
            process.terminate()


def ask(address: str) -> Any:
    with urllib.request.urlopen(address, timeout=60) as answer:
        return json.loads(answer.read())


def many(root: Path, count: int) -> None:
    make_many(root, count)
    print("made", flush=True)
    seconds: dict[str, float] = {}
    for when in ("never seen", "indexed"):
        with studio(root) as (address, process):
            seconds[f"first page, {when}"] = timed(lambda: ask(f"{address}/api/runs"))
            begun = time.perf_counter()
            while when == "never seen" and ask(f"{address}/api/runs?status=waiting")["left"]:
                pass  # a filter by status looks at all of them
            if when == "never seen":
                seconds["all are indexed"] = round(time.perf_counter() - begun, 1)
                continue
            for name, query in {
                "again": "",
                "search": "?text=run-777",
                "label page": "/../label",
                "models": "/../models",
            }.items():
                place = f"{address}/api/runs{query}".replace("/runs/..", "")
                seconds[name] = timed(lambda place=place: ask(place))
            begun = time.perf_counter()
            while ask(f"{address}/api/runs?status=waiting")["left"]:
                pass
            seconds["by status"] = round(time.perf_counter() - begun, 1)
            seconds["by status, again"] = timed(lambda: ask(f"{address}/api/runs?status=waiting"))
            memory = next(line for line in Path(f"/proc/{process}/status").read_text().splitlines() if line.startswith("VmHWM"))
            files = len([*Path(f"/proc/{process}/fd").iterdir()])
            found = {"runs": count, "seconds": seconds, "memory_mb": int(memory.split()[1]) // 1024, "open_files": files}
            print(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--many"]:
        with tempfile.TemporaryDirectory() as folder:
            many(Path(folder), int(sys.argv[2]) if len(sys.argv) > 2 else 10_000)
    elif len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(Path(folder))
