"""The time from response to score of a short correct program, in each sandbox that works on this machine.

    python benchmarks/rewards_code.py [--count 100] [--parallel 2]

Target: under 100 ms with two in parallel. `python` is the lower bound: starting and ending an interpreter without a sandbox. Prints
one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from posttrain.errors import UserError
from posttrain.rewards.code import CallTest, CheckTest, StdioTest, Test, grade
from posttrain.rewards.sandbox import isolation
from posttrain.rewards.sandbox.mechanisms import interpreter
from posttrain.tasks._code_data import fenced

PROGRAM = fenced("def double(n):\n    return 2 * n\n\n\nif __name__ == '__main__':\n    print(double(int(input())))\n")
TESTS: dict[str, list[Test]] = {
    "8 calls": [CallTest("double", [n], 2 * n) for n in range(8)],
    "1 script": [StdioTest("4\n", "8\n")],
    "1 check": [CheckTest("for n in range(8):\n    assert f(n) == 2 * n", ("f",), ("double",))],
}


def timed(work: Callable[[], None], count: int, parallel: int) -> dict[str, float]:
    def once(_: int) -> float:
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    with ThreadPoolExecutor(parallel) as workers:
        list(workers.map(once, range(4 * parallel)))
        begin = time.perf_counter()
        seconds = sorted(workers.map(once, range(count)))
        total = time.perf_counter() - begin
    return {
        "median_ms": round(1000 * seconds[count // 2], 1),
        "p95_ms": round(1000 * seconds[count * 95 // 100], 1),
        "per_second": round(count / total, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--parallel", type=int, default=2)
    options = parser.parse_args()
    report: dict[str, Any] = {
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "user": "root" if os.getuid() == 0 else "ordinary",
        "parallel": options.parallel,
    }

    def bare() -> None:
        subprocess.run([interpreter(), "-I", "-S", "-c", "pass"], check=True)

    rows = [("python", "nothing", timed(bare, options.count, options.parallel))]
    for name in ("landlock", "unsafe"):
        begin = time.perf_counter()
        try:
            print(isolation.describe(name))
        except UserError as error:
            print(f"{name}: {error}")
            continue
        report[f"{name} self_test_ms"] = round(1000 * (time.perf_counter() - begin))
        for kind, tests in TESTS.items():

            def work(tests: list[Test] = tests, name: str = name) -> None:
                assert grade(PROGRAM, tests, sandbox=name).outcome == "pass"

            rows.append((name, kind, timed(work, options.count, options.parallel)))
    print(f"\n{'wall':12}{'tests':10}{'median ms':>10}{'p95 ms':>9}{'per second':>12}   ({options.parallel} in parallel)")
    for wall, kind, figures in rows:
        print(f"{wall:12}{kind:10}{figures['median_ms']:>10}{figures['p95_ms']:>9}{figures['per_second']:>12}")
        report[f"{wall}, {kind}"] = figures
    print(json.dumps(report))


if __name__ == "__main__":
    main()
