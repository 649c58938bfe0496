r"""A mathematical answer graded by the package math-verify, for comparison with published results on MATH or AIME.

The package finds the answer itself (a box, an equation, the last number), computes with sympy, and rounds to six places;
docs/rewards-math.md lists where it and the reward `math` differ. Install it with: pip install 'posttrain[math-verify]'. sympy
evaluates what a model wrote, which may take long, so a task that uses this reward scores in worker processes with a time limit.
"""

from __future__ import annotations

from posttrain.errors import optional
from posttrain.rewards.compose import CORRECT, UNPARSEABLE, WRONG
from posttrain.types import Score


def math_verify(prompt: str, response: str, answer: str) -> Score:
    """Grade the response's final answer against the gold one, with math-verify's defaults."""
    needs = "math_verify needs its package: pip install 'posttrain[math-verify]'"
    package = optional("math_verify", needs)
    # its own time limits use signals, which only a main thread may set
    gold = package.parse(f"\\boxed{{{answer}}}", parsing_timeout=None)
    if not gold:
        return Score.failed(f"gold answer cannot be read: {answer[:80]!r}")
    given = package.parse(response, parsing_timeout=None)
    if not given:
        return UNPARSEABLE
    return CORRECT if package.verify(gold, given, timeout_seconds=None) else WRONG
