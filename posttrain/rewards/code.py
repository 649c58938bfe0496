"""Grades a program by running it: extracts it from the response, runs it in a sandbox, and compares the results outside.

value = 1 if every test passes, else 0; with `partial`, value = (tests passed) / (tests)

The program never sees the expected values. It gets arguments, one call at a time, and sends back plain values, or it gets stdin
and prints. A forged message is only another wrong answer. Whatever a program changes in its own process (exit, patched
builtins, an `__eq__`, the harness's memory), it can only change what it sends, and the comparison happens here.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.errors import UserError, require
from posttrain.rewards.sandbox import isolation, pool, wire
from posttrain.rewards.sandbox.limits import Limits
from posttrain.rewards.sandbox.mechanisms import Infrastructure, Mechanism
from posttrain.rewards.sandbox.session import Budget, Ended, Session
from posttrain.types import JSON, Score

# possessive, so that matching is linear in the line. A fence may be indented, quoted, or in a list
FENCE = re.compile(
    r"([ \t]*+(?:>[ \t]?+){0,8}+[ \t]*+(?:(?:[-*+]|[0-9]{1,9}+[.)])[ \t]++)?+)(`{3,}+|~{3,}+)[ \t]*+([^`\n]*+)"
)
QUOTE = re.compile(r"[ \t]*+>[ \t]?")
PYTHON = re.compile(r"[{.]*+(?:[ic]?python|py)[ -]?[0-9]*+(?:\.[0-9]++)*+(?![\w.+-])")
READS = re.compile(r"\binput\s*\(|\bstdin\b(?!\s*=)|\bopen\(0\b|\bfileinput\b")
DEFINED = re.compile(
    r"^(?:(?:async[ \t]+)?def|class)[ \t]+(\w++)|^(\w++)[ \t]*(?::[^=\n]*)?=(?!=)", re.MULTILINE
)
RESPONSE_LIMIT = 4_000_000  # characters; a longer response is not read
REASONING, REASONING_END = "<think>", "</think>"
DEFAULT = Limits()
TOLERANCE = 1e-9
STARTING = 60.0  # the longest that the interpreters of a program may take to start, in seconds
FORFEIT = ("timeout", "memory", "output")
# a program that exits without an error has still not answered
ENDS = {"stopped": "fail", "syntax": "fail"}
# any other end is a plain failure: exit, syntax, missing, ...
REFUSALS = {"error": "crash", "memory": "memory", "large": "output"}
NO_NAMES: Mapping[str, Any] = {}
LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CallTest:
    """`function(*args)` must return `expected`. A method is named `Class.method`; the class is instantiated without arguments.

    `exact` distinguishes a list from a tuple, and True from 1; `tolerance` is for floats (see `sandbox.wire.same`).
    """

    function: str
    args: Sequence[Any]
    expected: Any
    exact: bool = False
    tolerance: float = TOLERANCE

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
    """The program, given `stdin`, must print `stdout` and end without error. Whitespace at the ends of lines is ignored."""

    stdin: str
    stdout: str


@dataclass(frozen=True, slots=True)
class CheckTest:
    """A data set's own check: a program with assertions about functions, which it calls by `names`.

    It runs in its own sandbox, separate from the program under test; every call passes plain values between the two. It passes
    if it runs to its end and made at least one call. `names[i]` stands for the program's `functions[i]`.
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
    """Yield (label, body) of every complete fenced block, by the rules of CommonMark: only a line with a fence of the same kind
    closes one."""
    fence, label, body, quotes, indent = "", "", list[str](), 0, 0
    for line in text.replace("\r\n", "\n").split("\n"):
        if not fence:
            if found := FENCE.fullmatch(line):
                fence, label, body = found[2], found[3].strip().lower(), []
                quotes = found[1].count(">")
                indent = len(_unquoted(found[1], quotes).expandtabs(4))
            continue
        line = _unquoted(line, quotes)
        mark, bare = line.strip(), line.lstrip(" \t")
        column = len(line[: len(line) - len(bare)].expandtabs(4))
        if len(mark) >= len(fence) and mark == fence[0] * len(mark) and column < indent + 4:
            yield label, _straight(body)
            fence = ""
        else:
            body.append((" " * (column - indent) + bare if 0 < indent <= column else line) + "\n")


def _unquoted(line: str, quotes: int) -> str:
    found = QUOTE.match(line) if quotes else None
    return _unquoted(line[found.end() :], quotes - 1) if found else line


def _straight(lines: list[str]) -> str:
    """Remove the indentation of a program whose first line is indented."""
    text = "".join(lines)
    first = next((line for line in lines if line.strip()), "")
    return textwrap.dedent(text) if first[:1] in (" ", "\t") else text


def extract(response: str, fenced: bool = True, tests: Sequence[Test] = ()) -> str | None:
    """Extract the program of a response: after the reasoning, the last complete fenced block that defines what the tests need
    (a usage example after it does not). Among several, a block marked as Python comes before an unmarked one. With `fenced`
    False, a response without a complete block is taken as the program.

    >>> extract("A sketch:\\n```python\\nx = 1\\n```\\nIt prints:\\n```\\n1\\n```\\n")
    'x = 1\\n'
    >>> extract("```python\\nx = 1"), extract("x = 1"), extract("x = 1", fenced=False)
    (None, None, 'x = 1')
    >>> extract("```py\\ndef f(): return 1\\n```\\nTry:\\n```py\\nprint(f())\\n```", tests=[CallTest("f", [], 1)])
    'def f(): return 1\\n'
    """
    if len(response) > RESPONSE_LIMIT:
        return None
    text = response.rpartition(REASONING_END)[2]
    if text.lstrip().startswith(REASONING):
        return None  # the reasoning did not end
    found = [
        (_fitting(body, tests), bool(PYTHON.match(label)), number, body)
        for number, (label, body) in enumerate(blocks(text))
        if not label or PYTHON.match(label)
    ]
    if found:
        return max(found)[-1]
    return None if fenced else text


def _fitting(program: str, tests: Sequence[Test]) -> int:
    """Return how many of the names that the tests need a program defines at its top level; for a script, whether it reads
    input."""
    names = {
        name.partition(".")[0]
        for test in tests
        if not isinstance(test, StdioTest)
        for name in ([test.function] if isinstance(test, CallTest) else test.functions)
    }
    if not names:
        reading = any(isinstance(test, StdioTest) and test.stdin.strip() for test in tests)
        return int(reading and bool(READS.search(program)))
    return len(names & {name for found in DEFINED.findall(program) for name in found if name})


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

    Calls share one process, in an order that the program cannot predict; `fresh` gives each call its own process. A program
    that exceeds a limit fails the remaining tests; one time limit covers all tests. A failure of the grader is retried once,
    and then the score has no value. `sandbox` is as in `sandbox.isolation.choose`.
    """
    require(tests, "a program is graded by at least one test: none were given")
    mechanism = isolation.choose(sandbox).mechanism
    program = extract(response, fenced, tests)
    if program is None or not program.strip() or len(program) > limits.source:
        return _score(["fail"], len(tests), partial)

    for attempt in (1, 2):
        run = _Run(program, mechanism, limits, partial, fresh)
        try:
            return _score(run.outcomes(tests), len(tests), partial)
        except (Infrastructure, OSError) as error:
            LOG.warning("the code sandbox failed (attempt %d of 2): %s", attempt, error)
    return Score.failed("infrastructure", outcome="infrastructure")


# Runs in the sandbox. An error in a cell is printed, as in a notebook.
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
    """Return what the last of these programs prints, with the value of its last expression, after the others ran in the same
    interpreter. Raises `Ended` if it exceeds a limit or ends the interpreter. A failure of the sandbox itself is retried once
    and then raised."""
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


@dataclass(slots=True)
class _Run:
    """One program and its tests, with one time budget for all of them."""

    program: str
    mechanism: Mechanism
    limits: Limits
    partial: bool
    fresh: bool
    budget: Budget = field(init=False)

    def __post_init__(self) -> None:
        self.budget = Budget(self.limits.wall)

    def outcomes(self, tests: Sequence[Test]) -> list[str]:
        """Return the outcomes of the tests, in the order in which they ran: up to the first failure, or all with `partial`."""
        outcomes: list[str] = []
        end = time.monotonic() + self.limits.wall + STARTING / 2
        for some in self._one_by_one(tests):
            outcomes += some
            if any(one in FORFEIT or (one != "pass" and not self.partial) for one in some):
                break
            self.budget.stop()
            if time.monotonic() > end:  # with very many tests: score now, before a worker gives up
                return [*outcomes, "timeout"]
        return outcomes

    def _take(self) -> Session:
        return pool.shared().take(self.mechanism, self.limits)

    def _one_by_one(self, tests: Sequence[Test]) -> Iterator[list[str]]:
        def unforeseeable(test: tuple[int, Test]) -> bytes:
            # the same order for the same program, so that a run can be repeated, and another for any other program
            text = f"{test[0]}\n{self.program}"
            return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()

        ordered = [test for _, test in sorted(enumerate(tests), key=unforeseeable)]
        calls = [test for test in ordered if isinstance(test, CallTest)]
        for some in [[call] for call in calls] if self.fresh else [calls] if calls else []:
            yield self._calls(some)
        for test in ordered:
            if isinstance(test, StdioTest):
                yield [self._stdio(test)]
            elif isinstance(test, CheckTest):
                yield [self._check(test)]

    def _calls(self, tests: Sequence[CallTest]) -> list[str]:
        outcomes: list[str] = []
        with self._take() as session:
            try:
                session.begin("calls", self.program, budget=self.budget)
                _expect(session.receive(), "loaded")
                for test in tests:
                    try:
                        kind, value = _call(session, test.function, test.args)
                        right = wire.same(value, test.expected, test.exact, test.tolerance)
                        outcomes.append("pass" if right and kind == "value" else "fail")
                    except _Refused as refused:
                        outcomes.append(refused.outcome)
                    if outcomes[-1] != "pass" and not self.partial:
                        break
            except Ended as ended:
                outcomes.append(ENDS.get(ended.outcome, ended.outcome))
        return outcomes

    def _stdio(self, test: StdioTest) -> str:
        with self._take() as session:
            try:
                session.begin("stdio", self.program, budget=self.budget)
                session.write(test.stdin.encode("utf-8", "surrogatepass"), last=True)
                printed = session.read_all()
            except Ended as ended:
                return ENDS.get(ended.outcome, ended.outcome)
        try:
            return "pass" if _lines(printed.decode()) == _lines(test.stdout) else "fail"
        except UnicodeDecodeError:
            return "fail"

    def _check(self, test: CheckTest) -> str:
        with self._take() as candidate, self._take() as judge:
            try:
                judge.begin("check", test.check, test.names, self.budget)
                candidate.begin("calls", self.program, budget=self.budget)
                _expect(candidate.receive(), "loaded")
                stands_for, calls = dict(zip(test.names, test.functions, strict=True)), 0
                while (message := judge.receive())[0] == "call":
                    calls += 1
                    _, name, trees, pairs = message
                    values = [wire.decode(tree) for tree in trees]
                    named = {str(word): wire.decode(tree) for word, tree in pairs}
                    kind, value = _call(candidate, stands_for[name], values, named)
                    judge.send([kind, wire.tagged(value)])
                return "pass" if message == ["done"] and calls else "fail"
            except (wire.Malformed, KeyError, TypeError, ValueError):
                # the check sent a message in a wrong form
                return "fail"
            except Ended as ended:
                return ENDS.get(ended.outcome, ended.outcome)


class _Refused(Ended):
    """The program ran but returned no value; `outcome` says what it did instead."""


def _expect(message: list[Any], word: str) -> list[Any]:
    if message[0] != word:
        raise _Refused(REFUSALS.get(message[0], "fail"))
    return message


def _call(
    session: Session, function: str, args: Sequence[Any], named: Mapping[str, Any] = NO_NAMES
) -> list[Any]:
    """Return the program's reply to a call. A reply that is not a well-formed value is refused."""
    pairs = [(name, wire.tagged(value)) for name, value in named.items()]
    session.send([function, [wire.tagged(value) for value in args], pairs])
    message = session.receive()
    if len(message) == 2 and message[0] == "opaque" and isinstance(message[1], bool):
        return message
    _expect(message, "value")
    try:
        return ["value", wire.decode(message[1])]
    except (wire.Malformed, IndexError):
        raise _Refused("fail") from None


def _lines(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.replace("\r\n", "\n").split("\n")).rstrip("\n")


def read_tests(text: str, exact: bool = False, tolerance: float = TOLERANCE) -> list[Test]:
    """Read tests from JSON: a list of [function, arguments, expected], [stdin, stdout] and {check, names, functions}. `exact`
    and `tolerance` are those of `CallTest`.

    >>> read_tests('[["add", [1, 2], 3], ["4 5", "9"]]')
    [CallTest(function='add', args=[1, 2], expected=3, exact=False, tolerance=1e-09), StdioTest(stdin='4 5', stdout='9')]
    """
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError):
        entries = None
    some = isinstance(entries, list) and bool(entries)
    require(some, "the tests of a program are a JSON list that is not empty")
    return [_read_test(entry, exact, tolerance) for entry in entries]


def _read_test(entry: JSON, exact: bool, tolerance: float) -> Test:
    match entry:
        case [str(function), list(arguments), expected]:
            return CallTest(function, arguments, expected, exact, tolerance)
        case [str(stdin), str(stdout)]:
            return StdioTest(stdin, stdout)
        case {"check": str(check), "names": list(names), "functions": list(functions)}:
            return CheckTest(check, tuple(names), tuple(functions))
    known = "[function, arguments, expected], [stdin, stdout] or {check, names, functions}"
    raise UserError(f"a test is {known}, not {str(entry)[:80]}")


def patience(options: Mapping[str, JSON]) -> float:
    """Return how many seconds a worker waits for the reward `code` with these options. After that, the grader itself has
    failed: each of its two attempts keeps to the program's time budget, so no program can use up this time.

    >>> patience({"wall": 5}), patience({})
    (70.0, 80.0)
    """
    wall = options.get("wall", DEFAULT.wall)
    return 2 * (wall if isinstance(wall, int | float) else DEFAULT.wall) + STARTING


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
    exact: bool = False,
    tolerance: float = TOLERANCE,
) -> Score:
    """The reward `code`: the answer holds the tests, in the form of `read_tests`. Its settings are those of `grade` and of
    `Limits`."""
    limits, tests = Limits(wall=wall, memory=memory), read_tests(answer, exact, tolerance)
    return grade(
        response, tests, limits=limits, sandbox=sandbox, partial=partial, fresh=fresh, fenced=fenced
    )
