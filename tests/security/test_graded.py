"""Code rewards under attack: no hostile program is paid, none has itself masked, and what honest programs do is understood.

A masked score is one without a value: it escapes the negative advantage of a wrong answer. Only our own failure may be masked.
"""

from __future__ import annotations

import ast
import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from posttrain.errors import UserError
from posttrain.rewards import code
from posttrain.rewards.code import StdioTest, grade
from posttrain.rewards.sandbox import isolation, pool
from posttrain.rewards.sandbox.limits import Limits
from posttrain.rewards.sandbox.session import Budget
from posttrain.system.workers import WorkerPool
from posttrain.tasks._code_data import fenced
from posttrain.tasks.jsonl import Jsonl
from tests.rewards.test_escapes import grader, lacking
from tests.security.graded import honest, hostile
from tests.security.honest_programs import HONEST
from tests.security.hostile_actions import ALL, CASES, CLASSES

PACKAGE = Path(code.__file__).parents[1]


def usable() -> str:
    try:
        isolation.choose()
    except UserError as error:
        return str(error)
    return ""


pytestmark = pytest.mark.skipif(bool(usable()), reason=usable())


def test_there_are_enough() -> None:
    assert len(ALL) >= 500 and len(HONEST) >= 100
    assert all(sum(case.outcomes == kind for case in CASES) >= 5 for kind in CLASSES)
    assert len({case.program for case in ALL}) >= 500


@pytest.mark.parametrize("kind", CLASSES)
def test_no_hostile_program_is_paid_or_masked(kind: str, tmp_path: Path) -> None:
    """Five of each class, from all over it; `make test-security` runs all."""
    cases = [case for case in CASES if case.outcomes == kind]
    assert hostile(cases[:: len(cases) // 5][:5], str(tmp_path)) == []


def test_every_honest_program_is_paid() -> None:
    assert honest() == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hostile", "honest"])
@pytest.mark.parametrize("user", ["root", "user"])
def test_all_programs_as_root_and_as_an_ordinary_user(user: str, kind: str) -> None:
    if reason := lacking(user, "landlock"):
        pytest.skip(reason)
    said, errors = grader(user, kind, module="tests.security.graded").communicate(timeout=900)
    assert said, errors
    count, *wrong = json.loads(said)
    assert count >= {"hostile": 500, "honest": 100}[kind] and wrong == []


NAPS = {
    "sleeps a little less than the limit in each test": "import time\ntime.sleep(0.3)\nprint(input())",
    "computes so long": "import time\nend = time.monotonic() + 0.3\nwhile time.monotonic() < end: pass\nprint(input())",
    "makes dictionaries collide": "while True: {i * (2**61 - 1): 0 for i in range(300)}",
    "stops itself": "import os\nos.kill(os.getpid(), 19)\nprint(input())",
    "waits for what does not come": "import os, threading\nprint(input(), flush=True)\nos.close(1)\nthreading.Event().wait()",
    "prints slowly": "import time\nfor _ in range(99): print(1, flush=True); time.sleep(0.01)",
}


@pytest.mark.parametrize("program", NAPS.values(), ids=NAPS)
def test_time_is_one_budget_for_all_tests_of_a_program(program: str) -> None:
    tests = [StdioTest(str(n), str(n)) for n in range(4)]
    score = grade(fenced(program), tests, limits=Limits(wall=0.5))
    assert (score.value, score.valid, score.outcome) == (0.0, True, "timeout")


def test_a_worker_waits_longer_than_any_program_can_take(tmp_path: Path) -> None:
    """Also where the time limit of the task is shorter than the budget; a slow program that keeps to it is paid."""
    file = tmp_path / "programs.jsonl"
    tests = json.dumps([[str(n), str(n)] for n in range(6)])
    file.write_text("\n".join(json.dumps({"question": f"Echo, version {n}.", "answer": tests}) for n in range(20)))
    nap = "import time\ntime.sleep({})\nprint(input())"
    task = Jsonl(str(file), reward="code", options={"wall": 1.2}, score_seconds=0.1)
    problem = task.problems("train")[0]
    with WorkerPool([task], 2) as workers:

        async def scores() -> list[tuple[float | None, str]]:
            responses = [fenced(nap.format(seconds)) for seconds in (0.5, 0.02)]
            found = await asyncio.gather(*(workers.score(task, problem, text) for text in responses))
            return [(score.value, score.outcome) for score in found]

        assert asyncio.run(scores()) == [(0.0, "timeout"), (1.0, "pass")]
    composed = {"parts": [{"reward": "format"}, {"reward": "code", "options": {"wall": 700}}]}
    assert Jsonl(str(file), reward="compose", options=composed).seconds > 2 * 700


def test_a_budget_counts_only_while_a_program_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr("posttrain.rewards.sandbox.session.time.monotonic", lambda: now[0])
    budget = Budget(5.0)
    assert budget.start() == 15.0 and budget.start() == 15.0  # a check has two interpreters
    now[0] = 12.0
    budget.stop()
    now[0] = 100.0  # another interpreter starts
    assert budget.start() == 103.0
    now[0] = 104.0
    budget.stop()
    budget.stop()
    assert budget.left == -1.0


def raises(source: str, name: str) -> list[str]:
    """The functions that raise this, by name."""
    return [
        function.name
        for function in ast.walk(ast.parse(source))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Raise) and node.exc is not None and name in ast.unparse(node.exc)
    ]


def test_only_what_comes_before_a_program_can_be_our_failure() -> None:
    """Infrastructure is raised where interpreters start, and the one score without a value follows from it."""
    found = {
        (path.name, function)
        for path in (PACKAGE / "rewards").rglob("*.py")
        if path.name in ("code.py", "session.py", "pool.py", "mechanisms.py", "wire.py", "isolation.py")
        for function in raises(path.read_text(), "Infrastructure")
    }
    assert found == {("session.py", "_await"), ("pool.py", "take"), ("mechanisms.py", "spawn"), ("mechanisms.py", "start")}
    assert Path(code.__file__).read_text().count("Score.failed(") == 1


@pytest.mark.skipif(not sys.platform.startswith("linux") or os.getuid() != 0, reason="needs root")
def test_memory_of_the_machine_runs_out_for_programs_first() -> None:
    """A program is what the kernel ends where memory is short, not the grader: else it could have itself masked."""
    text = "import os\nprint(os.getpid())\nimport time\ntime.sleep(1)"
    with pool.shared().take(isolation.choose().mechanism, Limits(wall=5.0)) as session:
        session.begin("stdio", text)
        assert Path(f"/proc/{session.child.pid}/oom_score_adj").read_text() == "1000\n"
