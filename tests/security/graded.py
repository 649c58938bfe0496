"""A grader of its own, as root or as an ordinary user: python -m tests.security.graded hostile|honest prints [name, outcome, value] of
each program whose score is not what it must be, after how many there were, as one line of JSON."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from posttrain.rewards.code import CallTest, StdioTest, Test, grade
from posttrain.rewards.sandbox.limits import MEGABYTE, Limits
from posttrain.tasks._code_data import fenced
from posttrain.types import Score
from tests.rewards.hostile_programs import Case
from tests.security.honest_programs import HONEST
from tests.security.hostile_actions import ALL, WALL

TASKS: dict[str, list[Test]] = {
    "calls": [CallTest("double", [n], 2 * n) for n in (3, 10, -4, 7, 0, 1, 49, -100)],
    "stdio": [StdioTest("3\n", "6\n"), StdioTest("-50\n", "-100\n")],
}
SHORT, PATIENT = (Limits(wall=wall, memory=256 * MEGABYTE) for wall in (WALL, 20.0))
Wrong = list[tuple[str, str, float | None]]


def hostile(cases: Sequence[Case], folder: str, parallel: int = 3) -> Wrong:
    """Those that are paid, or have no score."""

    def score(case: Case) -> Score:
        program = case.program
        for name, value in {"host_file": f"{folder}/x", "host_folder": folder, "pid": "1", "port": "9"}.items():
            program = program.replace("{" + name + "}", value)
        return grade(fenced(program), TASKS[case.kind], limits=SHORT)

    with ThreadPoolExecutor(parallel) as threads:
        scores = threads.map(score, cases)
    pairs = zip(cases, scores, strict=True)
    return [(case.name, score.outcome, score.value) for case, score in pairs if score.value != 0.0 or not score.valid]


def honest(parallel: int = 3) -> Wrong:
    """Those that are not paid."""
    with ThreadPoolExecutor(parallel) as threads:
        scores = threads.map(lambda one: grade(*one, limits=PATIENT), HONEST)
    return [(text, score.outcome, score.value) for (text, _), score in zip(HONEST, scores, strict=True) if score.value != 1.0]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        kind = sys.argv[1]
        print(json.dumps([len(ALL), *hostile(ALL, made)] if kind == "hostile" else [len(HONEST), *honest()]))
