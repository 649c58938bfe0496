"""Records of common data sets of programming problems: a program with assertions becomes the test of a problem.

The text of a record is parsed, never run here: a data set's own check runs in its own sandbox, separate from the program under
test.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path

from posttrain.data.records import find_file
from posttrain.errors import UserError
from posttrain.tasks._judged import Part
from posttrain.tasks.jsonl import Jsonl
from posttrain.types import Problem


def local(data: str, name: str, task: str) -> tuple[Part, Part | None]:
    """Return the records of a file, or of the file called `name` in a folder, in place of the hub's."""
    folder = Path(data).expanduser().is_dir()
    return Jsonl(find_file(data, (name,), task) if folder else data).parts()


def fenced(program: str) -> str:
    """Return a response that consists of this program alone, within a fence longer than any in it.

    >>> fenced("x = 1")
    '```python\\nx = 1\\n```'
    """
    mark = "```"
    while mark in program:
        mark += "`"
    return f"{mark}python\n{program}\n{mark}"


def parsed(text: str, where: str) -> list[ast.stmt]:
    try:
        return ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"{where}: its tests are not Python ({error})") from None


def checked(
    name: str, question: str, solution: str, check: str, names: list[str], functions: list[str]
) -> Problem:
    """Make a problem whose answer is a `CheckTest` for the reward `code`, and whose demonstration is a reference solution."""
    tests = json.dumps([{"check": check, "names": names, "functions": functions}])
    return Problem(name, question, tests, facts={"solution": fenced(solution)})
