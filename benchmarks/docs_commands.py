"""Executes the commands of README.md and docs/ that need one GPU, as they stand but for small settings added at their end.

    MODEL=DIR DATA=FOLDER python benchmarks/docs_commands.py OUT.json [--at-once 6] [--only PATTERN] [--limit 600]
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
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
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
}
FEW = "prompts=4 problems=8 steps=2 tokens=16"
FIT = "compared=64 reward.steps=2 reward.batch=8 reward.min_accuracy=0"
SMALL = {
    "run gsm8k": f"{FEW} group=4",
    "run r1_zero": "prompts=4 problems=8 steps=2 samples=4",
    "run nanochat_rl": "prompts=4 group=4 problems=8 steps=1",
    "run agent": f"{FEW} group=4 demonstrations=0",
    "run code": f"{FEW} group=4 samples=2",
    "run distill": FEW,
    "run dpo": "steps=2 dpo.batch=4",
    "run kto": "steps=2 kto.batch=4",
    "run iterative_dpo": "prompts=32 problems=4 steps=1 tokens=96 rounds=1",
    "run instructgpt": f"{FEW} {FIT} sft.steps=2 demonstrations.min_score=-1",
    "run rlaif": f"{FEW} tokens=48 {FIT} agreement.pairs=4",
    "run summarize": f"{FEW} {FIT}",
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


def execute(line: str, folder: Path, number: int, ends: float) -> dict[str, object]:
    """Runs one command in a folder of its own."""
    model, data = os.environ["MODEL"], os.environ["DATA"]
    sandbox = f" sandbox={os.environ.get('SANDBOX', 'auto')}" if re.search("run (code|agent) ", line) else ""
    text = f"{line} {small(line)}{sandbox}".replace("cuda", os.environ.get("DEVICE", "cuda"))
    text = re.sub(r"\bFOLDER\b|(?<=data=)(DIR\b|\.\.\.)", data, text)
    words = shlex.split(re.sub(r"\b(DIR|JUDGE)\b(?!/)|(?<=model=)\.\.\.", model, text))
    words = [sys.executable, *(["-m", *words] if words[0] == "posttrain" else [str(ROOT / words[1]), *words[2:]])]
    place = folder / str(number)
    place.mkdir()
    for name, row in ROWS.items():
        lines = [json.dumps(row).replace("{n}", str(n)).replace("{answer}", str(11 * n + 9)) for n in range(64)]
        text = "\n".join(line.replace('"{label}"', "true" if n % 2 else "false") for n, line in enumerate(lines))
        (place / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    own = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    began = time.perf_counter()
    if any(word.endswith("=REWARD") for word in words):  # the run of a reward model
        first = f"import posttrain as pt; pt.reward_model({model!r}, 'pairs.jsonl', steps=1, out='REWARD')"
        subprocess.run([sys.executable, "-c", first], cwd=place, env=own, stdout=subprocess.DEVNULL, check=False)
    try:
        done = subprocess.run(
            words,
            cwd=place,
            env=own,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=max(1.0, ends - began),
            check=False,
        )
        code, said = done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        code, said = 124, late.stdout.decode() if isinstance(late.stdout, bytes) else ""
    shutil.rmtree(place)
    found = {"command": line, "added": small(line), "code": code, "seconds": round(time.perf_counter() - began, 1)}
    print(f"{code} {found['seconds']} s  {line}", flush=True)
    return found if code == 0 else {**found, "said": said[-2000:]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--only", default="", help="commands that match this pattern")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds in all; what has not ended then has failed")
    given = parser.parse_args()
    known = json.loads(given.out.read_text())["commands"] if given.out.exists() else []
    done = [one for one in known if not one["code"]]
    left = [line for line in listed() if line not in {one["command"] for one in done} and not elsewhere(line)]
    todo = [line for line in left if re.search(given.only, line)]
    todo.sort(key=lambda line: (line.startswith("python "), -len(small(line))))  # those with many stages first
    if os.environ.get("DEVICE") == "cpu":
        todo = [line for line in todo if line.startswith("posttrain ")]
    results = done
    ends = time.perf_counter() + given.limit
    found = {"date": datetime.now(UTC).date().isoformat(), "device": device()}
    with tempfile.TemporaryDirectory() as made, ThreadPoolExecutor(given.at_once) as pool:
        run = [pool.submit(execute, line, Path(made), n, ends) for n, line in enumerate(todo)]
        for one in as_completed(run):  # written each time: what is cut off later has not been for nothing
            results = sorted([*results, one.result()], key=lambda one: str(one["command"]))
            given.out.write_text(json.dumps({**found, "commands": results}, indent=1) + "\n")
    failed = [str(one["command"]) for one in results if one["code"]]
    print(json.dumps({"run": len(results), "failed": failed}))
    return 1 if failed else 0


def device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    sys.exit(main())
