"""Programs graded by running them: extracted from a response, run in a sandbox, compared outside it.

value = 1 where every test passes, else 0; with `partial`, value = (tests passed) / (tests)

The program never meets what is expected of it: it gets arguments, one call at a time, and sends back plain values, or gets stdin
and prints. A forged message is no more than another wrong answer. Whatever a program does to itself (exit, patched builtins, an
`__eq__`, the harness's memory) it can only change what it says, and what it says is compared here.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.errors import UserError, require
from posttrain.rewards.sandbox import isolation, pool, wire
from posttrain.rewards.sandbox.limits import Limits
from posttrain.rewards.sandbox.mechanisms import Infrastructure
from posttrain.rewards.sandbox.session import Ended, Session
from posttrain.types import JSON, Score

PYTHON = ("python", "python3", "py", "python 3")
FENCE = re.compile(r"[ ]{0,3}+(`{3,}+|~{3,}+)[ \t]*+([^`\n]*+)")  # possessive: linear in the line
RESPONSE_LIMIT = 4_000_000  # characters; what is longer is no answer
REASONING, REASONING_END = "<think>", "</think>"
DEFAULT = Limits()
FORFEIT = ("timeout", "memory", "output")
# a program that ends in good order has still not answered
ENDS = {"stopped": "fail", "syntax": "fail"}
# all else is a plain failure: exit, syntax, missing, ...
REFUSALS = {"error": "crash", "memory": "memory", "large": "output"}
LOG = logging.getLogger(__name__)
Take = Callable[[], Session]


@dataclass(frozen=True, slots=True)
class CallTest:
    """`function(*args)` must return `expected`. A method is named `Class.method`: the class is made without arguments.

    `exact` distinguishes a list from a tuple; `tolerance` is for floats (see `sandbox.wire.same`).
    """

    function: str
    args: Sequence[Any]
    expected: Any
    exact: bool = False
    tolerance: float = 1e-9

    def __post_init__(self) -> None:
        named = all(part.isidentifier() for part in self.function.split("."))
        require(named, f"a test calls a function by its name, not {self.function!r}")
        try:
            for value in (*self.args, self.expected):
                wire.encode(value)
        except wire.Malformed as error:
            raise UserError(f"a test of {self.function} must hold plain values: {error}") from None


@dataclass(frozen=True, slots=True)
class StdioTest:
    """The program, given `stdin`, must print `stdout` and end without error. Whitespace at the end of lines does not count."""

    stdin: str
    stdout: str


@dataclass(frozen=True, slots=True)
class CheckTest:
    """A data set's own check: a program that asserts about functions, which it calls by `names`.

    It runs in a sandbox of its own, away from the program under test; every call crosses over as plain values. It passes where it
    runs to its end and made at least one call. `names[i]` stands for the program's `functions[i]`.
    """

    check: str
    names: tuple[str, ...]
    functions: tuple[str, ...]

    def __post_init__(self) -> None:
        fine = bool(self.names) and len(self.names) == len(self.functions)
        fine = fine and all(name.isidentifier() for name in self.names)
        require(fine, "a check calls at least one function, and every name it uses stands for one")


Test = CallTest | StdioTest | CheckTest


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """(label, body) of every complete fenced block, as CommonMark has them: a fence is closed by a line of its own kind alone."""
    fence, label, body = "", "", list[str]()
    for line in text.replace("\r\n", "\n").split("\n"):
        if not fence:
            if found := FENCE.fullmatch(line):
                fence, label, body = found[1], found[2].strip().lower(), []
            continue
        mark = line.strip()
        if len(mark) >= len(fence) and mark == fence[0] * len(mark) and not line.startswith("    "):
            yield label, "".join(body)
            fence = ""
        else:
            body.append(line + "\n")


def extract(response: str, fenced: bool = True) -> str | None:
    """The program in a response: after the reasoning, the last complete fenced block that says Python, else the last that says
    nothing. Where `fenced` is False, a response without a complete block is a program as it stands.

    >>> extract("A sketch:\\n```python\\nx = 1\\n```\\nIt prints:\\n```\\n1\\n```\\n")
    'x = 1\\n'
    >>> extract("```python\\nx = 1"), extract("x = 1"), extract("x = 1", fenced=False)
    (None, None, 'x = 1')
    """
    if len(response) > RESPONSE_LIMIT:
        return None
    text = response.rpartition(REASONING_END)[2]
    if text.lstrip().startswith(REASONING):
        return None  # still thinking
    found = {label in PYTHON: body for label, body in blocks(text) if not label or label in PYTHON}
    if found:
        return found.get(True, found.get(False))
    return None if fenced else text


def grade(
    response: str,
    tests: Sequence[Test],
    *,
    limits: Limits = DEFAULT,
    sandbox: str = "auto",
    partial: bool = False,
    fresh: bool = False,
    fenced: bool = True,
) -> Score:
    """Run the program of a response against tests.

    Calls share one process, in an order that the program cannot foresee; `fresh` gives each its own. A program that exceeds a
    limit forfeits the tests that are left, so the time is bounded by the limit and not by their number. Our own failures are
    tried again once and then have no value. `sandbox` is as in `sandbox.isolation.choose`.
    """
    require(bool(tests), "a program is graded by at least one test: none were given")
    mechanism = isolation.choose(sandbox).mechanism
    program = extract(response, fenced)
    if program is None or not program.strip() or len(program) > limits.source:
        return _score(["fail"], len(tests), partial)

    def take() -> Session:
        return pool.shared().take(mechanism, limits)

    for attempt in (1, 2):
        try:
            return _score(_run(program, tests, take, partial, fresh), len(tests), partial)
        except (Infrastructure, OSError) as error:
            LOG.warning("the code sandbox failed (attempt %d of 2): %s", attempt, error)
    return Score.failed("infrastructure", outcome="infrastructure")


# Runs in the sandbox. An error of a cell is printed, as in a notebook.
CELLS = """
import ast, io, sys

space = {"__name__": "__main__"}

def cell(source):
    printed = sys.stdout = io.StringIO()
    try:
        tree = ast.parse(source)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "cell", "exec"), space)
        value = None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), space)
        if value is not None:
            print(repr(value))
    except BaseException as error:
        if isinstance(error, MemoryError):
            raise
        print(f"{type(error).__name__}: {error}")
    return printed.getvalue()
"""


def run_cells(cells: Sequence[str], limits: Limits = DEFAULT, sandbox: str = "auto") -> str:
    """What the last of these programs prints, with the value of its last expression, after the others ran in the same interpreter.
    `Ended` where it exceeds a limit or ends the interpreter; our own failures are tried again once and then raised."""
    mechanism = isolation.choose(sandbox).mechanism
    if sum(map(len, cells)) > limits.source:
        raise Ended("source")
    for attempt in (1, 2):
        try:
            with pool.shared().take(mechanism, limits) as session:
                session.begin("calls", CELLS)
                _expect(session.receive(), "loaded")
                printed = [_call(session, "cell", [cell])[1] for cell in cells]
                return str(printed[-1])
        except (Infrastructure, OSError):
            if attempt == 2:
                raise
    raise AssertionError


def _score(outcomes: Sequence[str], count: int, partial: bool) -> Score:
    passed = sum(outcome == "pass" for outcome in outcomes)
    first_bad = next((outcome for outcome in outcomes if outcome != "pass"), "pass")
    if partial:
        return Score(passed / count, parts={"tests": passed / count}, outcome=first_bad)
    return Score(float(passed == count), outcome=first_bad)


def _run(program: str, tests: Sequence[Test], take: Take, partial: bool, fresh: bool) -> list[str]:
    """The outcomes of the tests that were run, in the order they were run: up to the first failure, or all where `partial`."""
    outcomes: list[str] = []
    for some in _one_by_one(program, tests, take, partial, fresh):
        outcomes += some
        if any(outcome in FORFEIT or (outcome != "pass" and not partial) for outcome in some):
            break
    return outcomes


def _one_by_one(
    program: str, tests: Sequence[Test], take: Take, partial: bool, fresh: bool
) -> Iterator[list[str]]:
    def unforeseeable(test: tuple[int, Test]) -> bytes:
        # the same for the same program, so that a run can be repeated; another for every other program
        return hashlib.sha256(f"{test[0]}\n{program}".encode("utf-8", "surrogatepass")).digest()

    ordered = [test for _, test in sorted(enumerate(tests), key=unforeseeable)]
    calls = [test for test in ordered if isinstance(test, CallTest)]
    for some in [[call] for call in calls] if fresh else [calls] if calls else []:
        yield _calls(program, some, take, partial)
    for test in ordered:
        if isinstance(test, StdioTest):
            yield [_stdio(program, test, take)]
        elif isinstance(test, CheckTest):
            yield [_check(program, test, take)]


def _calls(program: str, tests: Sequence[CallTest], take: Take, partial: bool) -> list[str]:
    outcomes: list[str] = []
    with take() as session:
        try:
            session.begin("calls", program)
            _expect(session.receive(), "loaded")
            for test in tests:
                try:
                    kind, value = _call(session, test.function, test.args)
                    right = wire.same(value, test.expected, test.exact, test.tolerance)
                    outcomes.append("pass" if right and kind == "value" else "fail")
                except _Refused as refused:
                    outcomes.append(refused.outcome)
                if outcomes[-1] != "pass" and not partial:
                    break
        except Ended as ended:
            outcomes.append(ENDS.get(ended.outcome, ended.outcome))
    return outcomes


class _Refused(Ended):
    """The program is there but gave no value; `outcome` says what it did instead."""


def _expect(message: list[Any], word: str) -> list[Any]:
    if message[0] != word:
        raise _Refused(REFUSALS.get(message[0], "fail"))
    return message


def _call(session: Session, function: str, args: Sequence[Any]) -> list[Any]:
    """The program's reply to a call; one that is not a value in good form is refused."""
    session.send([function, [wire.tagged(value) for value in args]])
    message = session.receive()
    if len(message) == 2 and message[0] == "opaque" and isinstance(message[1], bool):
        return message
    _expect(message, "value")
    try:
        return ["value", wire.decode(message[1])]
    except (wire.Malformed, IndexError):
        raise _Refused("fail") from None


def _stdio(program: str, test: StdioTest, take: Take) -> str:
    with take() as session:
        try:
            session.begin("stdio", program)
            session.write(test.stdin.encode("utf-8", "surrogatepass"), last=True)
            printed = session.read_all()
        except Ended as ended:
            return ENDS.get(ended.outcome, ended.outcome)
    try:
        return "pass" if _lines(printed.decode()) == _lines(test.stdout) else "fail"
    except UnicodeDecodeError:
        return "fail"


def _lines(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.replace("\r\n", "\n").split("\n")).rstrip("\n")


def _check(program: str, test: CheckTest, take: Take) -> str:
    with take() as candidate, take() as judge:
        try:
            candidate.begin("calls", program)
            _expect(candidate.receive(), "loaded")
            judge.begin("check", test.check, test.names)
            stands_for, calls = dict(zip(test.names, test.functions, strict=True)), 0
            while (message := judge.receive())[0] == "call":
                calls += 1
                _, name, trees = message
                values = [wire.decode(tree) for tree in trees]
                kind, value = _call(candidate, stands_for[name], values)
                judge.send([kind, wire.tagged(value)])
            return "pass" if message == ["done"] and calls else "fail"
        except (wire.Malformed, KeyError, TypeError, ValueError):
            # a check that does not keep to the form it is given
            return "fail"
        except Ended as ended:
            return ENDS.get(ended.outcome, ended.outcome)


def read_tests(text: str) -> list[Test]:
    """Tests as JSON: a list of [function, arguments, expected], [stdin, stdout] and {check, names, functions}.

    >>> read_tests('[["add", [1, 2], 3], ["4 5", "9"]]')
    [CallTest(function='add', args=[1, 2], expected=3, exact=False, tolerance=1e-09), StdioTest(stdin='4 5', stdout='9')]
    """
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError):
        entries = None
    some = isinstance(entries, list) and bool(entries)
    require(some, "the tests of a program are a JSON list that is not empty")
    return [_read_test(entry) for entry in entries]


def _read_test(entry: JSON) -> Test:
    match entry:
        case [str(function), list(arguments), expected]:
            return CallTest(function, arguments, expected)
        case [str(stdin), str(stdout)]:
            return StdioTest(stdin, stdout)
        case {"check": str(check), "names": list(names), "functions": list(functions)}:
            return CheckTest(check, tuple(names), tuple(functions))
    known = "[function, arguments, expected], [stdin, stdout] or {check, names, functions}"
    raise UserError(f"a test is {known}, not {str(entry)[:80]}")


def code(
    prompt: str,
    response: str,
    answer: str,
    sandbox: str = "auto",
    partial: bool = False,
    fresh: bool = False,
    fenced: bool = True,
    wall: float = DEFAULT.wall,
    memory: int = DEFAULT.memory,
) -> Score:
    """The plain reward: the answer holds the tests, as `read_tests` has them. Settings are those of `grade` and of `Limits`."""
    limits, tests = Limits(wall=wall, memory=memory), read_tests(answer)
    return grade(
        response, tests, limits=limits, sandbox=sandbox, partial=partial, fresh=fresh, fenced=fenced
    )
