"""Errors that a user can fix, and checks of settings that raise them. The terminal shows them as one line; all other errors keep
their traceback."""

from __future__ import annotations

import difflib
import importlib
import json
import math
import sysconfig
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import cache, partial
from numbers import Integral, Real
from pathlib import Path
from types import MemberDescriptorType, NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

LONGEST_LINE = 2000  # characters of an error
SHOWN = 5  # line numbers that a message names
PACKAGES = (*map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), str(Path(__file__).parent))


class UserError(Exception):
    """Bad input. The message says what is wrong, where, and what to do. The command line prints only the message and exits with 2.
    Quoted input is cut to about a page."""

    def __init__(self, message: str = "") -> None:
        part = LONGEST_LINE // 2
        cut = f"{message[:part]} ... {message[-part:]}"
        super().__init__(cut if len(message) > LONGEST_LINE else message)


class GuardStop(Exception):
    """A guard stopped a run that would have wasted compute. Exit code 3; the checkpoint before it is intact."""


# errors in a task's code that end the run: a missing option, a judge that prefers a canary
STOPS = (UserError, GuardStop)


class Interrupted(Exception):
    """The user asked to stop; the loop stopped at a step boundary with a checkpoint in `directory`. Exit code 130, or 129 if
    its terminal was closed."""

    directory: Path | None = None
    code = 130


class Waiting(Interrupted):
    """The run ends until people have done their part; then `resume` goes on. Exit code 0."""


class PeerFailed(Exception):
    """Another process of the run has ended or does not answer. Exit code 75."""


class OutOfMemory(Exception):
    """Memory ran out in a pass that other processes take part in. Exit code 76: the launcher starts all processes again."""


_NAMES = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
# Names of earlier versions, and what to use instead: keys of a stage, task or algorithm, parameters of a recipe, names of rewards.
RENAMED: dict[str, str] = _NAMES["renamed"]
# Names of TRL, transformers and others that people type here, and what they are called here; a text with a space explains it.
ELSEWHERE: dict[str, str] = _NAMES["elsewhere"]


def called_here(name: str) -> str:
    """A sentence that says what TRL's name is called here; "" if it is not one of TRL's names.

    >>> called_here("learning_rate"), called_here("lr")
    ('learning_rate is called lr here', '')
    """
    new = ELSEWHERE.get(name, "")
    if not new:
        return ""
    if new.startswith("left out"):
        return f"{name} is {new}"
    return f"{name} is called {new}" + ("" if " here" in new else " here")


LISTED = 30  # names in an error


def unknown(kind: str, name: str, known: Iterable[str], owners: Iterable[str] = ()) -> UserError:
    """An error for a name that is not among `known`, with the nearest known names. If one of its `owners` had the name in an
    earlier version, the error says what replaces it.

    >>> str(unknown("recipe", "quickstrat", ["quickstart"]))
    "unknown recipe 'quickstrat'; did you mean 'quickstart'?"
    >>> str(unknown("algorithm", "PPO", ["ppo", "sft"]))
    "unknown algorithm 'PPO'; did you mean 'ppo'?"
    >>> str(unknown("key", "judge_rubric", ["steps"], ["rl"]))
    "unknown key 'judge_rubric'; an earlier version had it, use reward.rubric, with reward.name=judge"
    """
    renamed = [RENAMED[key] for owner in owners if (key := f"{owner}.{name}") in RENAMED]
    if renamed:
        return UserError(f"unknown {kind} {name!r}; an earlier version had it, use {renamed[0]}")
    choices = sorted(set(known))
    if (called := called_here(name)) and name not in choices:
        return UserError(f"unknown {kind} {name!r}; {called}")
    lowered = {choice.lower(): choice for choice in choices}
    near = [lowered[n] for n in difflib.get_close_matches(name.lower(), lowered, n=3, cutoff=0.6)]
    hint = f"known: {', '.join(choices[:LISTED])}" if choices else "none exist here"
    if len(choices) > LISTED:
        hint += f" and {len(choices) - LISTED} more; posttrain list shows all that are shipped"
    if near:
        hint = f"did you mean {' or '.join(map(repr, near))}?"
    return UserError(f"unknown {kind} {name!r}; {hint}")


def refuse_unknown(
    kind: str, names: Iterable[Any], known: Collection[str], owners: Iterable[str] = ()
) -> None:
    """Raise the error `unknown` for the first of the `names` that is not among `known`.

    >>> refuse_unknown("GPU", ["h100"], ["h100", "a100"])
    >>> refuse_unknown("GPU", ["h100", "h10"], ["h100", "a100"])
    Traceback (most recent call last):
    posttrain.errors.UserError: unknown GPU 'h10'; did you mean 'h100'?
    """
    for name in names:
        if name not in known:
            raise unknown(kind, str(name), known, owners)


def require(condition: object, message: str) -> None:
    """Raise `UserError(message)` unless `condition` holds."""
    if not condition:
        raise UserError(message)


def optional(module: str, absent: str) -> Any:
    """A module of a package that need not be installed; `absent` says what to do if it is not."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(absent) from None


def many(number: float, word: str) -> str:
    """A count with its noun.

    >>> many(1, "step"), many(2000, "step"), many(0.5, "epoch"), many(2, "micro-batch")
    ('1 step', '2,000 steps', '0.5 epochs', '2 micro-batches')
    """
    ending = "es" if word.endswith(("tch", "ss")) else "s"
    return f"{round(number, 3):,}".removesuffix(".0") + f" {word}{ending * (number != 1)}"


def numbered(lines: Sequence[int]) -> str:
    """The first of the numbers of lines, in words.

    >>> numbered([3]), numbered([1, 2, 3, 4, 5, 6])
    ('line 3', 'lines 1, 2, 3, 4, 5, ...')
    """
    more = ", ..." if len(lines) > SHOWN else ""
    return f"line{'s' * (len(lines) > 1)} {', '.join(map(str, lines[:SHOWN]))}{more}"


def first_line(error: BaseException) -> str:
    """The first non-empty line of an error's message, shortened, because messages of other packages run to paragraphs.

    >>> first_line(ValueError("\\nno\\nbecause")), first_line(ValueError())
    ('no', 'ValueError')
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."


def named(error: BaseException) -> str:
    """The type of an error and its text, which may be a user's code and raise another."""
    with suppress(Exception):
        return f"{type(error).__name__}: {error}"
    return f"{type(error).__name__}: "


def raised(error: BaseException) -> str:
    """The same with the place where a user's own code raised it: "at FILE line N"; without one if only code of packages ran."""
    frames = [(f.f_code.co_filename, line) for f, line in traceback.walk_tb(error.__traceback__)]
    own = [frame for frame in frames if not frame[0].startswith(PACKAGES)]
    return named(error)[:500] + (f" at {own[-1][0]} line {own[-1][1]}" if own else "")


@contextmanager
def prefixed(where: str) -> Iterator[None]:
    """Prefix the message of a user's error with the stage or key that it is about, unless it begins with it."""
    try:
        yield
    except UserError as error:
        stage = where.partition(".")[0]
        named = str(error).startswith((f"{stage}:", f"{stage}."))
        raise error if named else UserError(f"{where}: {error}") from error.__cause__


@dataclass(frozen=True, slots=True)
class Range:
    """The bounds of a number field: `Annotated[float, Range(ge=0, lt=1)]`. NaN is in no range. `text` describes the accepted values
    if the bounds do not.

    >>> print(Range(ge=1), "|", Range(gt=0), "|", Range(gt=0, le=1), "|", Range(ge=0, text="0 (never) or a number of steps"))
    at least 1 | above 0 | in (0, 1] | 0 (never) or a number of steps
    """

    ge: float = -math.inf
    gt: float = -math.inf
    le: float = math.inf
    lt: float = math.inf
    text: str = ""
    infinite: bool = False  # whether infinity is accepted

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, Real):
            return False
        try:
            # a whole number as it is: as a float, 2**63 - 1 would be 2**63
            number = int(value) if isinstance(value, Integral) else float(value)
        except OverflowError:  # a fraction beyond all floats
            return False
        below = number < self.lt or (self.infinite and number == math.inf)
        return below and self.gt < number and self.ge <= number <= self.le

    def __str__(self) -> str:
        low, high, closed = max(self.ge, self.gt), min(self.le, self.lt), self.ge > self.gt
        if self.text or low == -math.inf:
            return self.text or "a finite number"
        if high == math.inf:
            return f"{'at least' if closed else 'above'} {low}"
        return f"in {'[' if closed else '('}{low}, {high}{']' if self.le < self.lt else ')'}"

    def asked(self, value: object) -> str:
        """The values that the range accepts, for an error about `value`. For infinity the lower bound alone would mislead."""
        bounded = min(self.le, self.lt) < math.inf or max(self.ge, self.gt) == -math.inf
        misleading = isinstance(value, float) and value == math.inf and not bounded
        return f"finite and {self}" if misleading else str(self)


LARGEST = 10_000_000  # the largest integer of a field without bounds of its own
Count = Annotated[int, Range(ge=1)]
# counts of things that one step, or one problem, holds in memory at once
Several = Annotated[int, Range(ge=1, le=65_536, text="at least 1 and at most 65,536")]
# the same of what is compared with others: the range of a field, with a text of its own
TwoOrMore = partial(Range, ge=2, le=65_536)
Seed = Annotated[int, Range(ge=0, lt=2**63, text="a whole number, 0 or more and below 2**63")]
Whole = Annotated[int, Range(ge=0)]
Positive = Annotated[float, Range(gt=0)]
NotNegative = Annotated[float, Range(ge=0)]
Share = Annotated[float, Range(ge=0, le=1)]
Interval = Annotated[int, Range(ge=0, text="0 (never) or a number of steps")]


def check_fields(settings: Any, where: str = "") -> None:
    """Raise an error if a field of a dataclass has a value outside its type: a `Range`, the choices of a `Literal`, or an integer
    beyond `LARGEST`, also inside an optional field, a tuple or a mapping. `where` precedes the field's name in the message."""
    kind: type = type(settings)
    own = kind.__module__.startswith("posttrain.")
    ignored = ", ".join(_ignored(kind))
    unread = f"{where}{kind.__name__} sets {ignored} in a way that dataclasses do not read"
    hint = "write @dataclass(frozen=True) above the class, and NAME: TYPE = VALUE"
    require(not ignored, f"{unread}: {hint}")
    types: tuple[tuple[str, Any], ...] = ()
    with suppress(NameError):  # a user's annotation may name a type imported for type checking only
        types = field_types(kind)
    for name, hint in types:
        value = getattr(settings, name)
        accepted = _accepted(hint, value)
        if hint is int and not own and isinstance(value, int) and abs(value) < 2**63:
            accepted = ""  # how large a user's number may be is not known
        require(not accepted, f"{where}{name} must be {accepted}, not {value!r}")


class Checked:
    """A base class of settings that are checked when an instance is made: each field by its type, then all together."""

    __slots__ = ()

    @property
    def where(self) -> str:
        """The beginning of every error message."""
        return ""

    def __post_init__(self) -> None:
        check_fields(self, self.where)
        for mistake in self.mistakes():
            raise UserError(f"{self.where}{mistake}")

    def mistakes(self) -> Iterator[str]:
        """Contradictions between settings that are valid by themselves. The first becomes the error."""
        yield from ()


@cache
def field_types(kind: type) -> tuple[tuple[str, Any], ...]:
    """The fields of a dataclass with their types."""
    hints = get_type_hints(kind, include_extras=True)
    return tuple((f.name, hints[f.name]) for f in fields(kind))


@cache
def _ignored(kind: type) -> list[str]:
    """Fields whose default a subclass changes without effect: it is no dataclass itself, or gives no type."""
    values = [(f, getattr(kind, f.name, f.default)) for f in fields(kind)]
    slots = MemberDescriptorType
    return [f.name for f, v in values if v is not f.default and not isinstance(v, slots)]


def _mistyped(hint: Any, value: object) -> str:
    """What a field takes in place of a fraction (int) or of a text, which would count as true (bool); None may be its default."""
    if hint is int and value is not None and not isinstance(value, Integral):
        return "a whole number"
    true = type(value).__name__.startswith("bool") or value in (None, 0, 1)
    return "true or false" if hint is bool and not true else ""


def _accepted(hint: Any, value: object) -> str:
    """The values that a field of this type accepts, if `value` is not one of them; else ""."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        ranges = [m for m in hint.__metadata__ if isinstance(m, Range)]
        broken = [m for m in ranges if value not in m]
        if broken:
            return broken[0].asked(value)
        bounded = any(min(m.le, m.lt) < math.inf for m in ranges)
        return _mistyped(inner[0], value) if bounded else _accepted(inner[0], value)
    if hint is int and isinstance(value, int) and abs(value) > LARGEST:
        return f"at most {LARGEST:,}"
    if hint in (int, bool):
        return _mistyped(hint, value)
    if origin is Literal:
        *others, last = map(str, inner)
        choices = f"{', '.join(others)} or {last}" if others else last
        return "" if value in inner else choices
    if origin in (Union, UnionType):
        if value is None and NoneType in inner:
            return ""
        found = [_accepted(choice, value) for choice in inner if choice is not NoneType]
        return "" if "" in found else found[0]
    if origin is tuple and inner[1:] == (...,) and isinstance(value, tuple | list):
        return next((text for item in value if (text := _accepted(inner[0], item))), "")
    if isinstance(value, Mapping) and len(inner) == 2:
        items = (
            _accepted(kind, item)
            for pair in value.items()
            for kind, item in zip(inner, pair, strict=True)
        )
        return next(filter(None, items), "")
    return ""
