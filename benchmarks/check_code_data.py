"""Grades HumanEval and MBPP: every reference solution must pass, and every trivial stub must fail.

    python benchmarks/check_code_data.py FOLDER [--sandbox auto] [--threads 2]

FOLDER holds humaneval.jsonl.gz and mbpp-sanitized.json.gz (or the same names without .gz). Prints one JSON line last. The exit code
is 1 if a verdict is wrong.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from posttrain.rewards.code import extract, grade, read_tests
from posttrain.rewards.sandbox import isolation
from posttrain.rewards.sandbox.limits import Limits
from posttrain.tasks._code_data import fenced
from posttrain.tasks.humaneval import HumanEval
from posttrain.tasks.mbpp import Mbpp
from posttrain.types import Problem

STUBS = ("None", "0", "''", "[]", "True", "False")
SETS = {"humaneval.jsonl": HumanEval.make, "mbpp-sanitized.json": Mbpp.make}


def records(folder: Path, name: str) -> list[dict[str, Any]]:
    packed = folder / f"{name}.gz"
    text = gzip.decompress(packed.read_bytes()).decode() if packed.is_file() else (folder / name).read_text()
    return [json.loads(line) for line in text.splitlines() if line.strip()] if name.endswith("l") else json.loads(text)


def stub(problem: Problem, body: str) -> str:
    """Every function of the solution, with a body that solves nothing."""
    names = [n.name for n in ast.parse(extract(str(problem.facts["solution"])) or "").body if isinstance(n, ast.FunctionDef)]
    return "\n".join(f"def {name}(*args):\n    return {body}\n" for name in names)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sandbox", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    print(isolation.describe(options.sandbox))
    limits = Limits(wall=120.0, cpu=20.0)  # processor time: what others do on the machine must not count
    report: dict[str, Any] = {"sandbox": isolation.choose(options.sandbox).name}
    bad = 0
    for name, read in SETS.items():
        problems = [read(record, name, str(record["task_id"])) for record in records(options.folder, name)]
        jobs = [(p, "reference", str(p.facts["solution"])) for p in problems]
        jobs += [(p, f"return {body}", fenced(stub(p, body))) for p in problems for body in STUBS]
        begin = time.perf_counter()

        def run(job: tuple[Problem, str, str]) -> str:
            return grade(job[2], read_tests(job[0].answer), limits=limits, sandbox=options.sandbox).outcome

        with ThreadPoolExecutor(options.threads) as workers:
            outcomes = list(workers.map(run, jobs))
        seconds = time.perf_counter() - begin
        passed = sum(o == "pass" for o, job in zip(outcomes, jobs, strict=True) if job[1] == "reference")
        fooled = [(job[0].id, job[1]) for o, job in zip(outcomes, jobs, strict=True) if job[1] != "reference" and o == "pass"]
        failed = [(job[0].id, o) for o, job in zip(outcomes, jobs, strict=True) if job[1] == "reference" and o != "pass"]
        print(
            f"{name}: {passed} of {len(problems)} reference solutions pass; {len(fooled)} of {len(problems) * len(STUBS)} stubs do"
        )
        for entry in (*failed[:20], *fooled[:20]):
            print("   ", *entry)
        report[name] = {"problems": len(problems), "references": passed, "stubs": len(fooled), "seconds": round(seconds, 1)}
        bad += len(failed) + len(fooled)
    print(json.dumps(report))
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
