"""Programs graded for real: honest ones pass, hostile ones gain nothing, and the host is as it was after each."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import UserError
from posttrain.rewards import code
from posttrain.rewards.code import CallTest, CheckTest, StdioTest, extract, grade, read_tests
from posttrain.rewards.sandbox import isolation, mechanisms, pool, seccomp, session, wire
from posttrain.rewards.sandbox.limits import MEGABYTE, Limits
from posttrain.rewards.sandbox.mechanisms import Infrastructure
from posttrain.system.workers import WorkerPool
from posttrain.tasks._code_data import fenced
from posttrain.tasks.jsonl import Jsonl
from tests.rewards.hostile_programs import CONTROLS, ESCAPE, GAIN, GREED, HONEST, HONEST_STDIO, HOSTILE, Case, strangers

WALL = 0.6
LIMITS = Limits(wall=WALL, memory=256 * MEGABYTE)
PATIENT = Limits(wall=20.0, memory=256 * MEGABYTE)  # for programs that end by themselves, on a busy machine
CALLS = [CallTest("double", [n], 2 * n) for n in (3, 10, -4, 7, 0, 1, 49, -100)]
STDIO = [StdioTest("3\n", "6\n"), StdioTest("-50\n", "-100\n")]


def usable(name: str) -> str:
    """'' where this mechanism works here, else why not."""
    try:
        isolation.choose(name)
    except UserError as error:
        return str(error).partition(". Install")[0]
    return ""


REASON = usable("landlock")
needs_wall = pytest.mark.skipif(bool(REASON), reason=REASON)


class Host:
    """What a program must not change, looked at before and after."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folder.chmod(0o777)  # and so are all above it: only the wall is in the way
        self.file = self.folder / "secret"
        self.file.write_text("6")
        self.file.chmod(0o666)
        self.listener = socket.socket()
        self.listener.bind(("127.0.0.1", 0))
        self.listener.listen()
        self.listener.setblocking(False)
        self.datagrams = socket.socket(type=socket.SOCK_DGRAM)
        self.datagrams.bind(("127.0.0.1", self.listener.getsockname()[1]))
        self.datagrams.setblocking(False)
        self.before = self.state()
        self.size = resident()

    def fill(self, program: str) -> str:
        facts = {"host_file": self.file, "host_folder": self.folder, "pid": os.getpid(), "port": self.listener.getsockname()[1]}
        for name, value in facts.items():
            program = program.replace("{" + name + "}", str(value))
        return program

    def state(self) -> dict[str, Any]:
        return {
            "cwd": os.getcwd(),
            "files here": sorted(os.listdir(".")),
            "environment": {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
            "handlers": [
                signal.getsignal(s) for s in (signal.SIGALRM, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE)
            ],
            "limits": [resource.getrlimit(r) for r in (resource.RLIMIT_NOFILE, resource.RLIMIT_AS, resource.RLIMIT_CORE)],
            "secret": (self.file.read_text(), *self.file.stat()[:6], self.file.stat().st_mtime_ns, os.listxattr(self.file)),
            "folder": [*sorted(os.listdir(self.folder)), oct(self.folder.stat().st_mode)],
        }

    def check(self) -> None:
        assert self.state() == self.before
        for endpoint in (self.listener.accept, lambda: self.datagrams.recv(1)):
            with pytest.raises(BlockingIOError):
                endpoint()
        assert resident() - self.size < 50 * MEGABYTE
        left, end = strangers(), time.monotonic() + 1
        while left and time.monotonic() < end:  # one that is just being started is not known yet
            time.sleep(0.01)
            left &= strangers()
        assert not left


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@needs_wall
def test_a_process_that_is_left_would_be_seen() -> None:
    child = isolation.choose().mechanism.start(PATIENT)
    mechanisms._alive.discard(child)
    os.read(child.stdout, 6)
    try:
        assert child.pid in strangers()
    finally:
        child.finish(0)
    assert child.pid not in strangers()


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.chdir(tmp_path)
    with tempfile.TemporaryDirectory() as folder:
        host = Host(Path(folder))
        yield host
        host.listener.close()
        host.datagrams.close()


def verdict(case: Case, host: Host, **settings: Any) -> str:
    tests = CALLS if case.kind == "calls" else STDIO
    limits = LIMITS if case.slow else PATIENT
    score = grade(fenced(host.fill(case.program)), tests, limits=limits, sandbox="landlock", **settings)
    assert (score.value == 1.0) == (score.outcome == "pass")
    assert score.valid
    return score.outcome


def identify(case: Case) -> str:
    return f"{case.kind}-{case.name}"


@needs_wall
def test_honest_programs_pass(host: Host) -> None:
    outcomes = {case.name: verdict(case, host) for case in CONTROLS}
    assert set(outcomes.values()) == {"pass"}, outcomes
    host.check()


@needs_wall
@pytest.mark.parametrize("case", HOSTILE, ids=identify)
def test_a_hostile_program_gains_nothing(case: Case, host: Host) -> None:
    begin = time.monotonic()
    outcome = verdict(case, host)
    assert time.monotonic() - begin < (WALL if case.slow else PATIENT.wall) + 2
    assert outcome in case.outcomes.split()
    host.check()
    assert verdict(CONTROLS[0], host) == "pass"


@needs_wall
def test_without_namespaces_they_are_stopped_too(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "choose", lambda name: isolation.Isolation(mechanisms.Landlock(private=False)))
    wrong = {}
    for case in (CONTROLS[0], *GREED, *ESCAPE):
        if not case.slow or case is GREED[0]:
            outcome = verdict(case, host)
            if outcome not in case.outcomes.split() and "threads" not in case.name:
                wrong[case.name] = outcome
            host.check()
    assert not wrong


# What each hole looks like when it is open: how to open it, and which programs then get a verdict that they must not have.


def accept_a_clean_exit(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(code.ENDS, "stopped", "pass")


def compare_as_python_does(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(wire, "same", lambda given, expected, exact, tolerance: given == expected)


def keep_the_order_of_the_tests(patch: pytest.MonkeyPatch) -> None:
    class Plain:
        def __init__(self, data: bytes) -> None:
            self.data = data

        def digest(self) -> bytes:
            return self.data

    patch.setattr(code.hashlib, "sha256", Plain)


def ignore_exit_codes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(session.Session, "_how", staticmethod(lambda end: "stopped"))


def believe_refusals(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(code, "REFUSALS", dict.fromkeys(("error", "exit", "missing", "syntax", "opaque"), "pass"))


def read_more_than_the_library(patch: pytest.MonkeyPatch) -> None:
    paths = mechanisms.readable()
    patch.setattr(mechanisms, "readable", lambda: [*paths, tempfile.gettempdir()])


def no_limit_on_memory(patch: pytest.MonkeyPatch) -> None:
    line = mechanisms.command

    def unlimited(limits: Limits, *arguments: Any, **options: Any) -> list[str]:
        return line(replace(limits, memory=64 << 30), *arguments, **options)

    patch.setattr(mechanisms, "command", unlimited)


def looser(**changes: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """Interpreters with other limits than were asked for."""
    original = pool.Pool.take
    return lambda patch: patch.setattr(
        pool.Pool, "take", lambda self, wall, limits: original(self, wall, replace(limits, **changes))
    )


def no_limit_on_processes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(seccomp, "supported", lambda: False)


def no_limit_on_output(patch: pytest.MonkeyPatch) -> None:
    looser(output=1 << 30)(patch)


def time_without_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(session.Budget, "start", lambda self: time.monotonic() + 20.0)


def accept_answers_in_advance(patch: pytest.MonkeyPatch) -> None:
    def send(self: session.Session, tree: Any) -> None:
        data = json.dumps(tree).encode()
        self.write(b"%08x" % len(data) + data)

    patch.setattr(session.Session, "send", send)


def believe_any_form(patch: pytest.MonkeyPatch) -> None:
    """What cannot be sent is taken for what was expected."""
    patch.setattr(code, "_call", lambda session, *call: ["value", 1])


IN_ADVANCE = """
import os
def double(n):
    frame = b'["value",1]'
    for fd in range(3, 9):
        try: os.write(fd, (b"%08x" % len(frame) + frame) * 2)
        except OSError: pass
    while True: pass
"""
TRUTHS = [CallTest("double", [n], 1) for n in (1, 2)]
LARGE = "def double(n):\n    x = bytes(1 << 29)\n    return 2 * n"
READS = "def double(n):\n    open('{host_file}').read()\n    return 2 * n"
HOLES: list[tuple[Callable[[pytest.MonkeyPatch], None], str, str, list[Any]]] = [
    (accept_a_clean_exit, "import os\nos._exit(0)", "fail", CALLS),
    (compare_as_python_does, "def double(n):\n    return True", "fail", [replace(test, exact=True) for test in TRUTHS]),
    (keep_the_order_of_the_tests, next(c.program for c in GAIN if c.name == "a counter of calls"), "fail", CALLS),
    (ignore_exit_codes, HONEST_STDIO + "1 / 0", "crash", STDIO),
    (believe_refusals, "def double(n):\n    raise ValueError", "crash", CALLS),
    (read_more_than_the_library, READS, "crash", CALLS),
    (no_limit_on_memory, LARGE, "memory", CALLS),
    (no_limit_on_processes, "import os\nif os.fork() == 0:\n    os._exit(0)\n" + HONEST, "crash", CALLS),
    (no_limit_on_output, "import sys\nfor _ in range(99): sys.stderr.write('x' * 99_999)\n" + HONEST, "output", CALLS),
    (time_without_end, "import time\ntime.sleep(0.8)\n" + HONEST, "timeout", CALLS),
    (accept_answers_in_advance, IN_ADVANCE, "fail", TRUTHS),
    (believe_any_form, "class Equal:\n    def __eq__(self, other): return True\ndef double(n): return Equal()", "fail", TRUTHS),
]


@needs_wall
@pytest.mark.parametrize(("hole", "program", "closed", "tests"), HOLES, ids=lambda v: getattr(v, "__name__", None) or "")
def test_a_hole_would_be_seen(hole: Any, program: str, closed: str, tests: list[Any], host: Host, monkeypatch: Any) -> None:
    response, limits = fenced(host.fill(program)), LIMITS if hole is time_without_end else PATIENT
    assert grade(response, tests, limits=limits, sandbox="landlock").outcome == closed
    hole(monkeypatch)
    own = pool.Pool(spare=0)  # no interpreter that was started while the hole was closed
    monkeypatch.setattr(pool, "shared", lambda: own)
    assert grade(response, tests, limits=limits, sandbox="landlock").outcome == "pass"
    own.close()


@needs_wall
def test_partial_credit_is_the_share_of_tests() -> None:
    half = fenced("def double(n):\n    return 2 * n if n > 0 else None")  # 3, 10, 7, 1, 49 of eight
    score = grade(half, CALLS, partial=True)
    assert (score.value, score.parts["tests"], score.outcome) == (0.625, 0.625, "fail")
    raising = fenced("def double(n):\n    return 2 * n if n > 0 else 1 / 0")
    assert grade(raising, CALLS, partial=True).value == 0.625
    assert grade(fenced(HONEST_STDIO), [*STDIO, StdioTest("1", "1")], partial=True).value == pytest.approx(2 / 3)
    assert grade(half, CALLS).value == 0.0
    assert grade(fenced(HONEST), CALLS, partial=True).outcome == "pass"


@needs_wall
def test_who_exceeds_a_limit_forfeits_what_is_left() -> None:
    begin = time.monotonic()
    score = grade(fenced("import time\ntime.sleep(99)"), [StdioTest("", str(i)) for i in range(9)], limits=LIMITS, partial=True)
    assert (score.value, score.outcome) == (0.0, "timeout")
    assert time.monotonic() - begin < WALL + 2


@needs_wall
def test_time_in_which_this_process_stood_still_is_not_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        """It jumps by an hour in every tenth wait for the program."""

        hours = waits = 0

        def monotonic(self) -> float:
            return time.monotonic() + 3600 * self.hours

    ticking, select = Clock(), session.selectors.DefaultSelector.select

    def stopped(selector: Any, timeout: float | None = None) -> Any:
        found = select(selector, timeout)
        ticking.waits += 1
        ticking.hours = ticking.waits // 10
        return found

    monkeypatch.setattr(session, "time", ticking)
    monkeypatch.setattr(session.selectors.DefaultSelector, "select", stopped)
    assert grade(fenced(HONEST), CALLS, fresh=True).outcome == "pass" and ticking.hours > 1


@needs_wall
def test_fresh_processes_remember_nothing() -> None:
    counting = fenced("calls = []\ndef f():\n    calls.append(1)\n    return len(calls)")
    tests = [CallTest("f", [], 1), CallTest("f", [], 1)]
    assert grade(counting, tests).outcome == "fail"
    assert grade(counting, tests, fresh=True).outcome == "pass"


@needs_wall
def test_methods_and_several_kinds_of_tests() -> None:
    program = fenced(
        "class Solution:\n    def double(self, n):\n        return 2 * n\nif __name__ == '__main__':\n    print('main')"
    )
    tests = [
        CallTest("Solution.double", [4], 8),
        StdioTest("", "main"),
        CheckTest("assert f(2) == 4", ("f",), ("Solution.double",)),
    ]
    assert grade(program, tests).outcome == "pass"
    assert grade(program, [*tests, CallTest("Solution.double", [4], 9)]).outcome == "fail"


@needs_wall
def test_a_check_runs_away_from_the_program() -> None:
    sums = CheckTest("import math\nfor n in range(5):\n    assert math.isclose(f(n), 2 * n)", ("f",), ("double",))
    assert grade(fenced(HONEST), [sums]).outcome == "pass"
    for program in (
        "def double(n):\n    return 0",
        EQUAL,
        "import math, builtins\nmath.isclose = lambda *a: True\nbuiltins.range = lambda n: []\ndef double(n):\n    return 'x'",
        "import os\ndef double(n):\n    os._exit(0)",
        "def double(n):\n    raise SystemExit",
    ):
        assert grade(fenced(program), [sums]).outcome == "fail", program
    assert grade(fenced(HONEST), [CheckTest("pass", ("f",), ("double",))]).outcome == "fail"  # nothing was called
    assert grade(fenced("import re\ndef f(t):\n    return re.match('a', t)"), [TRUTH]).outcome == "pass"
    assert grade(fenced(EQUAL.replace("double", "f")), [CheckTest("assert f(1) == 2", ("f",), ("f",))]).outcome == "fail"
    looping = CheckTest("f(1)\nwhile True: pass", ("f",), ("double",))
    assert grade(fenced(HONEST), [looping], limits=LIMITS).outcome == "timeout"


EQUAL = "class Z:\n    def __eq__(self, other):\n        return True\ndef double(n):\n    return Z()"
TRUTH = CheckTest("assert f('ab')\nassert not f('b')", ("f",), ("f",))


@needs_wall
def test_in_threads_at_once() -> None:
    programs = [HONEST, "def double(n):\n    return n", "import os\nos._exit(0)", "1 / 0"] * 6
    with ThreadPoolExecutor(4) as workers:
        outcomes = list(workers.map(lambda program: grade(fenced(program), CALLS, limits=PATIENT).outcome, programs))
    assert outcomes == ["pass", "fail", "fail", "crash"] * 6
    assert threading.active_count() < 10


class Broken:
    """A mechanism that fails so often before it works."""

    def __init__(self, failures: int) -> None:
        self.left, self.name = failures, "broken"

    def start(self, limits: Limits) -> Any:
        self.left -= 1
        if self.left >= 0:
            raise Infrastructure("no process could be started")
        return mechanisms.Unsafe().start(limits)


@pytest.mark.parametrize(("failures", "outcome"), [(0, "pass"), (1, "pass"), (2, "infrastructure")])
def test_our_own_failures_are_tried_again_and_then_masked(failures: int, outcome: str, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(isolation, "choose", lambda name: isolation.Isolation(Broken(failures)))
    own = pool.Pool(spare=0)
    monkeypatch.setattr(pool, "shared", lambda: own)
    score = grade(fenced(HONEST), CALLS, limits=PATIENT)
    own.close()
    assert score.outcome == outcome
    assert score.valid == (outcome == "pass")
    assert len(caplog.records) == failures  # nothing fails in silence
    if not score.valid:
        assert (score.value, score.failure) == (None, "infrastructure")


PYTHON_LABELS = ("python3.11", "python title=x", "Python 3", "py3", "{.python .numbered}", "python:a.py")
OTHER_LABELS = ("pycon", "python-repl", "pytb", "cython", "pythonic", "text", "c++", "python.txt-x")
EXTRACTIONS = [
    ("```python\nx = 1\n```", "x = 1\n"),
    ("```\nx = 1\n```", "x = 1\n"),
    ("~~~py\nx = 1\n~~~", "x = 1\n"),
    ("```python\na\n```\nbetter:\n```python\nb\n```", "b\n"),
    ("```python\na\n```\nrun it:\n```bash\npython a.py\n```\n```\n3\n```", "a\n"),
    ("```python\na\n```\nand\n```python\nb", "a\n"),  # the last is not complete
    ("<think>```python\na\n```</think>\n```python\nb\n```", "b\n"),
    ("<think>```python\na\n```</think> done", None),
    ("<think>```python\na\n```\nwait", None),
    ("```python\nx = '<think>'\n```", "x = '<think>'\n"),
    ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''\n"),
    ("```python\r\nx = 1\r\n```", "x = 1\n"),
    ("  ```python\nx = 1\n  ```", "x = 1\n"),
    *(
        (f"```{label}\nx = 1\n```", "x = 1\n")
        for label in ("python3.11", "python title=x", "Python 3", "py3", "{.python .numbered}", "python:a.py")
    ),
    *(
        (f"```{label}\nx = 1\n```", None)
        for label in ("pycon", "python-repl", "pytb", "cython", "pythonic", "text", "c++", "python.txt-x")
    ),
    ("1. So:\n\n    ```python\n    if x:\n        y\n    ```", "if x:\n    y\n"),
    ("\t```python\n\tif x:\n\t\ty\n\t```", "if x:\n    y\n"),
    ("* ```py\n  x = 1\n  ```", "x = 1\n"),
    ("> ```py\n> if x:\n>     y\n>\n> ```", "if x:\n    y\n\n"),
    ("```python\n    def f():\n        pass\n```", "def f():\n    pass\n"),
    (
        "```python\ndef f():\n    '''\n    ```\n    x\n    ```\n    '''\n```",
        "def f():\n    '''\n    ```\n    x\n    ```\n    '''\n",
    ),
    ("```python x = 1```", None),
    ("```javascript\nx\n```", None),
    ("text only", None),
    ("", None),
    ("```python\n" + "x" * 5_000_000 + "\n```", None),
]


@pytest.mark.parametrize(("response", "program"), EXTRACTIONS)
def test_extraction(response: str, program: str | None) -> None:
    assert extract(response) == program


SOLUTION, EXAMPLE = "```python\ndef f(n):\n    return n\n```\n", "```python\nprint(f(3))\n```\n"
CHOSEN = [
    (SOLUTION + EXAMPLE, "def f(n)"),
    (EXAMPLE + SOLUTION, "def f(n)"),
    (SOLUTION.replace("python", "") + EXAMPLE, "def f(n)"),
    (SOLUTION + SOLUTION.replace("f(n)", "f(m)") + EXAMPLE, "def f(m)"),
    (SOLUTION.replace("def f(n):\n    return n", "f = lambda n: n") + EXAMPLE, "f = lambda"),
    (SOLUTION + "```python\nresult = f(3)\nassert f == result\n```", "def f(n)"),
    (SOLUTION + "```python\nfrom solution import f\n```", "def f(n)"),
    ("```python\nfrom math import gcd as f\n```", "from math"),  # nothing better
    ("```python\nclass A:\n    def f(self): pass\n```\n" + SOLUTION.replace("f(n)", "g(n)"), "def g(n)"),
]


@pytest.mark.parametrize(("response", "beginning"), CHOSEN)
def test_the_solution_is_taken_and_not_a_usage_example(response: str, beginning: str) -> None:
    tests = [CallTest("f", [3], 3)]
    assert str(extract(response, tests=tests)).startswith(beginning)
    assert str(extract(response, tests=[CheckTest("assert g(3)", ("g",), ("f",))])).startswith(beginning)


def test_the_solution_of_a_script_reads_its_input() -> None:
    reads, shown = "```python\nprint(int(input()))\n```\n", "```python\nn = 3\nprint(n)\n```\n"
    faked = "```python\nimport io, sys\nsys.stdin = io.StringIO('3')\nmain()\n```"
    for tests, chosen in (([StdioTest("3", "3")], "print(int"), ([StdioTest("", "3")], "n = 3")):
        assert str(extract(reads + shown, tests=tests)).startswith(chosen)
    assert str(extract(reads + faked, tests=[StdioTest("3", "3")])).startswith("print(int")


def test_extraction_takes_time_linear_in_the_response() -> None:
    begin = time.monotonic()
    for text in (
        "```" * 300_000,
        "```python\n" * 100_000,
        "`" * 1_000_000,
        "~~~\n" * 200_000,
        " " * 1_000_000,
        "</think>" * 100_000,
        "> " * 500_000 + "```",
        "> ```\n" + "> " * 500_000,
        "```python\n" + "f :" * 300_000 + "\n```",
        "```python\n" + "f" * 1_000_000 + "\n```",
        "1. " * 300_000,
    ):
        extract(text, tests=CALLS)
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: CallTest("f(", [1], 1), "calls a function by its name"),
        (lambda: CallTest("f", [object()], 1), "must hold plain values"),
        (lambda: CallTest("f", [1], lambda: 1), "must hold plain values"),
        (lambda: grade("", []), "at least one test"),
        (lambda: grade("", CALLS, sandbox="dokcer"), "unknown sandbox"),
        (lambda: read_tests("{}"), "a JSON list"),
        (lambda: read_tests('[["f", 1, 2]]'), "a test is"),
        (lambda: read_tests('[{"check": "f()"}]'), "a test is"),
        (lambda: CheckTest("", (), ()), "calls at least one function"),
    ],
)
def test_mistakes_of_the_user(make: Callable[[], Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        make()


@needs_wall
def test_a_task_chooses_the_wall_before_its_workers_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, in the process that forks them; and it says which. A wall that does not work is refused there, not once a response."""
    file = tmp_path / "programs.jsonl"
    rows = [json.dumps({"question": f"Write double, version {n}.", "answer": '[["double", [4], 8]]'}) for n in range(20)]
    file.write_text("\n".join(rows))
    task = Jsonl(str(file), reward="code")
    monkeypatch.setattr(isolation, "_chosen", {})
    tested: list[int] = []
    choose = isolation._choose
    monkeypatch.setattr(isolation, "_choose", lambda name: tested.append(os.getpid()) or choose(name))
    with WorkerPool([task], 2) as workers:

        async def scores(*responses: str) -> list[str]:
            problem = task.problems("train")[0]
            return [s.outcome for s in await asyncio.gather(*(workers.score(task, problem, fenced(r)) for r in responses))]

        assert asyncio.run(scores(HONEST, "def double(n): return n", HONEST)) == ["pass", "fail", "pass"]
    assert tested == [os.getpid()]
    assert task.ready() == (isolation.describe(),)
    mixed = {"parts": [{"reward": "format"}, {"reward": "code", "options": {"sandbox": "podman:nothing"}}]}
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(UserError, match="podman is not on PATH"):
        Jsonl(str(file), reward="compose", options=mixed).ready()


@needs_wall
def test_the_plain_reward() -> None:
    tests = '[["double", [4], 8], ["double", [[1]], [1, 1]]]'
    assert code.code("", fenced(HONEST), tests).solved
    assert not code.code("", fenced("def double(n): return 8"), tests).solved
    pair, third = '[["double", [4], [8, true]]]', '[["double", [4], 0.333]]'
    answers = [fenced(f"def double(n): return {value}") for value in ("(8, 1)", "[8, True]", "1 / 3")]
    assert [code.code("", a, pair).value for a in answers[:2]] == [1.0, 1.0]
    assert [code.code("", a, pair, exact=True).value for a in answers[:2]] == [0.0, 1.0]
    assert [code.code("", answers[2], third, tolerance=t).value for t in (1e-9, 1e-3)] == [0.0, 1.0]
