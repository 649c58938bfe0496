"""Executes the commands of README.md and docs/ that need one GPU, as they stand but for small settings added at their end.

    MODEL=DIR DATA=FOLDER python benchmarks/docs_commands.py OUT.json [--at-once 4] [--only PATTERN] [--limit 600]
    MODEL=DIR DATA=FOLDER DEVICE=cpu python benchmarks/docs_commands.py OUT.json         # the recipes' commands, on a CPU

DIR is a model with a chat template, FOLDER has the files of GSM8K, MBPP and HumanEval that the recipes name; other files that a command
names are made here. Commands that ran according to OUT.json are left out. It then has for each command the settings that were added,
its exit code, its seconds and, where it failed, its last lines. benchmarks/results/docs_commands.json is what tests/test_docs.py reads.
SANDBOX=unsafe is for a machine on which the sandbox does not start. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMMAND = re.compile(r"^(?: {4})?((?:POSTTRAIN_\w+=\S+ )?(?:posttrain|python|torchrun|make|pip) (?:\\\n|[^\n])+)", re.M)
GPU = re.compile(r"device[= ]cuda|/gpu_(generate|grpo_step)\.py|/sequence_ratio_mismatch\.py|sampler=vllm")
# what one GPU and the files of a test cannot give
ELSEWHERE = {
    "processes=": "needs two GPUs",
    "parallel=": "needs two GPUs",
    "cluster=": "needs a Ray cluster with GPUs",
    "Qwen/": "needs the hub",
    "--trl": "needs TRL beside it",
    "vllm": "needs vLLM for CUDA",
    "stories15M": "needs a model of its own",
    "run rlaif": "needs a judge that gives nothing to an empty answer and tells two answers apart, which a model of 0.5B does not",
}
FEW = "prompts=4 problems=8 steps=2 tokens=16"
FIT = "compared=64 reward.steps=2 reward.batch=8 reward.min_accuracy=0"
SMALL = {
    "run gsm8k": f"{FEW} group=4",
    "run r1_zero": "prompts=4 problems=8 steps=2 samples=4",
    "run nanochat_rl": "prompts=4 group=4 problems=8 steps=1",
    "run agent": f"{FEW} group=4 demonstrations=0",
    "run code": f"{FEW} group=4 samples=2",
    "run distill": "prompts=4 problems=4 steps=2 tokens=320 samples.min_score=-1",
    "run dpo": "steps=2 dpo.batch=4",
    "run kto": "steps=2 kto.batch=4",
    "run iterative_dpo": "prompts=32 problems=4 steps=1 tokens=96 rounds=1",
    "run instructgpt": f"{FEW} {FIT} sft.steps=2 demonstrations.min_score=-1 "
    "demonstrations.prompts=32 ordinary.prompts=8 unseen.prompts=8",
    "run rlaif": f"{FEW} tokens=48 {FIT} agreement.pairs=4",
    "run summarize": f"{FEW} {FIT} sft.steps=2",
    "run safety": "prompts=4 problems=8 steps=2 tokens=48 compared=64 agreement.pairs=8 "
    "helpful.steps=2 harmless.steps=2 helpful.min_accuracy=0 harmless.min_accuracy=0",
    "run sentiment": f"{FEW} rounds=1 comparisons=64 fresh=64 reward_1.steps=2 reward_1.min_accuracy=0",
    "run r1": "problems=8 reasoning_steps=1 final_steps=1 favourites.min_score=-1 cold_start.steps=2 mixture.steps=2 "
    "preferences.steps=2 preferences.min_accuracy=0 comparisons.prompts=64 sampled.prompts=64 sampled.min_score=-1 "
    "favourites.prompts=64",
    "multi_turn.py": "--only turns",
    "publish.py": "--times 1",
    "sequence_ratio_mismatch.py": "--tiny",
    "plan_accuracy.py": "--steps 2",
    "gpu_generate.py": "--cases a --repeats 1 --no-lognormal",
    "gpu_grpo_step.py": "--cases a --repeats 1",
}
PAIR = {"prompt": "Name a colour ({n}).", "chosen": "Blue is a colour.", "rejected": "No."}
POST = {"prompt": "My cat sleeps {n} hours a day. Summarise this."}
ROWS = {
    "pairs.jsonl": PAIR,
    "PEOPLE.jsonl": PAIR,
    "COMPARISONS.jsonl": PAIR,
    "harmless-base-test.jsonl.gz": PAIR,
    "prompts.jsonl": {"prompt": "What is 11 * {n} + 9?", "answer": "{answer}"},
    "PROMPTS.jsonl": POST,
    "POSTS.jsonl": POST,
    "REFERENCES.jsonl": {**POST, "completion": "A cat sleeps {n} hours."},
    "feedback.jsonl": {**POST, "completion": "A cat.", "label": "{label}"},
}


def commands(page: str) -> list[str]:
    """Those of a page, without their comments."""
    found = [re.sub(r"\s+#.*", "", line.replace("\\\n", " ")) for line in COMMAND.findall(page)]
    return [" ".join(line.split()) for line in found]


def needs_gpu(line: str) -> bool:
    return bool(GPU.search(line)) and " plan " not in line


def elsewhere(line: str) -> str:
    """Why one GPU is not enough; empty where it is."""
    return next((why for word, why in ELSEWHERE.items() if word in line), "")


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def listed() -> list[str]:
    """Every command of the docs that needs a GPU, once."""
    return sorted({line for path in pages() for line in commands(path.read_text()) if needs_gpu(line)})


def small(line: str) -> str:
    return next((more for start, more in SMALL.items() if f"{start} " in f"{line} "), "")


class Lane:
    """A process that executes one command after the other: what is imported and compiled once serves all of them."""

    def __init__(self) -> None:
        own = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        words = [sys.executable, __file__, "--lane"]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=own)

    def ask(self, line: str, place: Path) -> tuple[int, str]:
        assert self.process.stdin and self.process.stdout
        try:
            self.process.stdin.write(json.dumps([words_of(line), str(place)]) + "\n")
            self.process.stdin.flush()
            code, said = json.loads(self.process.stdout.readline())
        except (OSError, ValueError):
            return 124, "its process was ended: out of time, or a crash"
        return int(code), str(said)


def end_all(lanes: list[Lane]) -> None:
    for lane in lanes:
        lane.process.kill()


def serve() -> None:
    """The other side of a lane: a command a line from standard input, its exit code and last words to standard output."""
    from posttrain import cli

    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        words, place = json.loads(line)
        os.chdir(place)
        log = os.open("log.txt", os.O_CREAT | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            if words[0] == "posttrain":
                code: object = cli.main(words[1:])
            else:
                sys.argv = [str(ROOT / words[1]), *words[2:]]
                runpy.run_path(sys.argv[0], run_name="__main__")
                code = 0
        except SystemExit as end:
            code = end.code or 0
        except Exception:  # what a command raises is its result, and the next one is to run
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os.close(log)
        said = Path("log.txt").read_text(errors="replace")[-2000:]
        answers.write(json.dumps([code if isinstance(code, int) else 1, said]) + "\n")
        answers.flush()


def words_of(line: str) -> list[str]:
    """A command with its small settings, and what is there in place of DIR, FOLDER and the like."""
    model, data = os.environ["MODEL"], os.environ["DATA"]
    sandbox = f" sandbox={os.environ.get('SANDBOX', 'auto')}" if re.search("run (code|agent) ", line) else ""
    text = f"{line} {small(line)}{sandbox}".replace("cuda", os.environ.get("DEVICE", "cuda"))
    text = re.sub(r"\bFOLDER\b|(?<=data=)(DIR\b|\.\.\.)", data, text)
    text = re.sub(r"\b(JUDGE|OTHER)\b", "tiny:nano", text)  # a small real model gives points to an empty answer, and is refused
    return shlex.split(re.sub(r"\bDIR\b(?!/)|(?<=model=)\.\.\.", model, text))


def make_files(place: Path) -> None:
    place.mkdir()
    for name, row in ROWS.items():
        lines = [json.dumps(row).replace("{n}", str(n)).replace("{answer}", str(11 * n + 9)) for n in range(64)]
        text = "\n".join(line.replace('"{label}"', "true" if n % 2 else "false") for n, line in enumerate(lines))
        (place / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())


def execute(lane: Lane, line: str, place: Path) -> dict[str, object]:
    """One command in a folder of its own."""
    make_files(place)
    began = time.perf_counter()
    code, said = 0, ""
    if "=REWARD" in line:  # the run of a reward model
        device = os.environ.get("DEVICE", "cuda")
        stage = {"stage": "reward_model", "name": "reward", "model": "DIR", "data": ["pairs.jsonl"], "steps": 1}
        (place / "reward.yaml").write_text(json.dumps({"stages": [stage]}).replace("DIR", os.environ["MODEL"]))
        code, said = lane.ask(f"posttrain run reward.yaml out=REWARD device={device}", place)
    if code == 0:
        code, said = lane.ask(line, place)
    shutil.rmtree(place)
    found = {"command": line, "added": small(line), "code": code, "seconds": round(time.perf_counter() - began, 1)}
    print(f"{code} {found['seconds']} s  {line}", flush=True)
    return found if code == 0 else {**found, "said": said}


def main() -> int:
    if "--lane" in sys.argv:
        serve()
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--only", default="", help="commands that match this pattern")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds in all; what has not ended then has failed")
    given = parser.parse_args()
    known = json.loads(given.out.read_text())["commands"] if given.out.exists() else []
    results = [one for one in known if not one["code"]]
    left = [line for line in listed() if line not in {one["command"] for one in results} and not elsewhere(line)]
    todo = [line for line in left if re.search(given.only, line)]
    todo.sort(key=lambda line: (line.startswith("python "), len(small(line))))  # those with few stages first
    if os.environ.get("DEVICE") == "cpu":
        todo = [line for line in todo if line.startswith("posttrain ")]
    lanes = [Lane() for _ in range(min(given.at_once, len(todo)))]
    found = {"date": datetime.now(UTC).date().isoformat(), "device": device()}
    waiting, lock = iter(list(enumerate(todo))), threading.Lock()

    def drain(lane: Lane, folder: Path) -> None:
        while True:
            with lock:
                number, line = next(waiting, (0, ""))
            if not line or lane.process.poll() is not None:
                return
            one = execute(lane, line, folder / str(number))
            with lock:  # written each time: what is cut off later has not been for nothing
                results.append(one)
                rows = sorted(results, key=lambda one: str(one["command"]))
                pending = [line for line in left if line not in {one["command"] for one in rows if not one["code"]}]
                given.out.write_text(json.dumps({**found, "commands": rows, "pending": pending}, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as made:
        clock = threading.Timer(given.limit, end_all, args=[lanes])
        clock.start()
        threads = [threading.Thread(target=drain, args=(lane, Path(made))) for lane in lanes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        clock.cancel()
        end_all(lanes)
    ran = {str(one["command"]) for one in results if not one["code"]}
    failed = [line for line in todo if line not in ran]
    print(json.dumps({"run": len(ran), "failed": failed}))
    return 1 if failed else 0


def device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    sys.exit(main())
