r"""A mathematical answer as the package math-verify grades it: for figures to be compared with those of others on MATH or AIME.

It finds the answer itself (a box, an equation, the last number), computes with sympy, and rounds to six places; docs/rewards-math.md
says where it and the reward `math` differ. Needs the package: pip install 'posttrain[math-verify]'. sympy computes what a model wrote,
which may take long: a task that uses it scores in worker processes with a time limit.
"""

from __future__ import annotations

from posttrain.errors import UserError
from posttrain.rewards.compose import CORRECT, UNPARSEABLE, WRONG
from posttrain.types import Score


def math_verify(prompt: str, response: str, answer: str) -> Score:
    """Whether the response's final answer is the gold one, by math-verify's defaults."""
    try:
        from math_verify import parse, verify
    except ImportError:
        needs = "math_verify needs its package: pip install 'posttrain[math-verify]'"
        raise UserError(needs) from None
    # its own time limits are signals, which only a main thread may set
    gold = parse(f"\\boxed{{{answer}}}", parsing_timeout=None)
    if not gold:
        return Score.failed(f"gold answer cannot be read: {answer[:80]!r}")
    given = parse(response, parsing_timeout=None)
    if not given:
        return UNPARSEABLE
    return CORRECT if verify(gold, given, timeout_seconds=None) else WRONG
