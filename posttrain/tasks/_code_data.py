"""Records of the usual data sets of programming problems as tests: HumanEval and MBPP.

An assertion that a call of literals equals a literal becomes a `CallTest`, compared by the grader itself. All others (loops, sets,
tolerances, helper functions) stay as the data set wrote them, in a `CheckTest`, which runs in a sandbox of its own. The text of a
record is parsed, never run here.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.errors import require
from posttrain.rewards.code import CallTest, CheckTest, Test
from posttrain.rewards.sandbox.wire import Malformed, encode

TEXT_LIMIT = 200_000


@dataclass(frozen=True, slots=True)
class CodeProblem:
    """A problem with its tests and a reference solution (a whole program)."""

    id: str
    question: str
    solution: str
    tests: tuple[Test, ...]


def fenced(program: str) -> str:
    """A response that consists of this program alone, within a fence longer than any in it.

    >>> fenced("x = 1")
    '```python\\nx = 1\\n```'
    """
    mark = "```"
    while mark in program:
        mark += "`"
    return f"{mark}python\n{program}\n{mark}"


def humaneval(record: Mapping[str, Any]) -> CodeProblem:
    """task_id, prompt (the beginning of a program), entry_point, canonical_solution (its rest), test (defines `check`)."""
    fields = ("task_id", "prompt", "entry_point", "canonical_solution", "test")
    identity, prompt, function, solution, test = (_text(record, field) for field in fields)
    tests: list[Test] = []
    for statement in _parse(test, identity).body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "check":
            lines = [line for line in statement.body if not _says_nothing(line)]
            found = [_literal_call(line, {"candidate": function}) for line in lines]
            tests = [call for call in found if call is not None] if None not in found else []
    if not tests:
        # helpers of the prompt are at hand; the function itself has no body there, so its name stands for the one under test
        check = f"{prompt}\n{function} = candidate\n{test}\ncheck(candidate)\n"
        tests = [CheckTest(check, ("candidate",), (function,))]
    question = f"Complete this program and give all of it:\n\n{fenced(prompt.rstrip())}"
    return CodeProblem(identity, question, prompt + solution, tuple(tests))


def mbpp(record: Mapping[str, Any]) -> CodeProblem:
    """task_id, prompt (or text), code, test_list (assertions), test_imports (or test_setup_code)."""
    identity = str(record.get("task_id"))
    question = _text(record, "prompt" if "prompt" in record else "text")
    solution = _text(record, "code")
    lines = record.get("test_list")
    require(
        isinstance(lines, list) and bool(lines),
        f"MBPP {identity}: test_list must be a list of assertions",
    )
    program = _parse(solution, identity).body
    defined = {n.name for n in program if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    # some assertions use a module that only the solution imports
    imports = [ast.unparse(n) for n in program if isinstance(n, ast.Import | ast.ImportFrom)]
    imports += map(str, record.get("test_imports") or [record.get("test_setup_code") or ""])
    tests: list[Test] = []
    left: list[str] = []
    used: set[str] = set()
    for line in lines:  # type: ignore[union-attr]
        tree = _parse(str(line), identity)
        called = [n.func for n in ast.walk(tree) if isinstance(n, ast.Call)]
        used |= {function.id for function in called if isinstance(function, ast.Name)} & defined
        if len(tree.body) == 1:
            call = _literal_call(tree.body[0], {name: name for name in defined})
        else:
            call = None
        if call is None:
            left.append(str(line))
        else:
            tests.append(call)
    require(bool(used), f"MBPP {identity}: no assertion calls a function of the reference solution")
    if left:
        names = tuple(sorted(used))
        tests.append(CheckTest("\n".join([*imports, *left]) + "\n", names, names))
    question = f"{question}\nName it {' and '.join(sorted(used))}."
    return CodeProblem(identity, question, solution, tuple(tests))


def _text(record: Mapping[str, Any], field: str) -> str:
    value = record.get(field)
    require(
        isinstance(value, str) and len(value) <= TEXT_LIMIT,
        f"a record needs the text {field!r}; it has {sorted(record)[:8]}",
    )
    return str(value)


def _parse(text: str, identity: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        require(False, f"problem {identity}: its tests are not Python ({error})")
        raise


def _says_nothing(statement: ast.stmt) -> bool:
    """`assert True`, with or without a message, a docstring, or pass."""
    if isinstance(statement, ast.Assert):
        return isinstance(statement.test, ast.Constant) and statement.test.value is True
    return isinstance(statement, ast.Pass) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )


def _literal_call(statement: ast.stmt, functions: Mapping[str, str]) -> CallTest | None:
    """`assert function(literals) == literal` as a test, else None."""
    match statement:
        case ast.Assert(
            ast.Compare(ast.Call(ast.Name(name), arguments, []), [ast.Eq()], [right])
        ) if name in functions:
            values = _literals([*arguments, right])
            if values is not None:
                return CallTest(functions[name], tuple(values[:-1]), values[-1], exact=True)
    return None


def _literals(nodes: Sequence[ast.expr]) -> list[Any] | None:
    values = []
    for node in nodes:
        try:
            values.append(ast.literal_eval(node))
            encode(values[-1])
        except (ValueError, TypeError, RecursionError, Malformed):
            return None
    return values
