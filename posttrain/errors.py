"""Errors that a user can fix. The terminal shows them as one line; everything else keeps its traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


class UserError(Exception):
    """Bad input: says what was wrong, where, and what to do. The command line prints it alone and exits with 2."""


class GuardStop(Exception):
    """A guard stopped a run that would have wasted compute. Exit code 3; the checkpoint before it is intact."""


class Interrupted(Exception):
    """The user asked to stop; the loop stopped at a step boundary with a checkpoint in `directory`. Exit code 130."""

    directory: Path | None = None


def unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    """An error for a name that is not among `known`, with the nearest ones.

    >>> str(unknown("recipe", "quickstrat", ["quickstart"]))
    "unknown recipe 'quickstrat'; did you mean 'quickstart'?"
    """
    choices = sorted(set(known))
    near = difflib.get_close_matches(name, choices, n=3, cutoff=0.5)
    if near:
        hint = "did you mean " + " or ".join(repr(n) for n in near) + "?"
    elif choices:
        hint = "known: " + ", ".join(choices)
    else:
        hint = "none exist here"
    return UserError(f"unknown {kind} {name!r}; {hint}")


def require(condition: bool, message: str) -> None:
    """Raise `UserError(message)` unless `condition` holds: the one way settings are refused."""
    if not condition:
        raise UserError(message)
