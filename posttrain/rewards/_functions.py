"""The user's own reward functions: called with the parameters that they declare, one response at a time or in lists.

    def short(response): return len(response) < 80                                    # any of prompt, response, answer, columns
    def right(prompt, response, answer, **columns): return answer in response
    def batch(prompts, completions, **columns): return [len(c) for c in completions]   # as TRL calls them

A function returns a number, None (not scored) or a Score; if it takes lists, it returns a list of these. It may be `async`. A
function that is not in a file (a lambda, a closure, a cell of a notebook) has a name that begins with `python:` and exists in
this process only.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from posttrain.errors import STOPS, UserError, raised, require
from posttrain.rewards._loop import run_to_end, step_ends
from posttrain.rewards.compose import as_score, combined
from posttrain.trust import PREFIX, elsewhere, known_as
from posttrain.types import JSON, Problem, Score

# the order of the arguments if a function names none of them
TEXTS = ("prompt", "response", "answer")
LISTS = ("prompts", "completions")
# other names of the same texts, in functions written for TRL and verl
SAME = {"completion": "response", "solution_str": "response", "ground_truth": "answer"}
COLUMNS = "columns"  # the key of a problem's facts that holds its row
_prints: dict[str, JSON] = {}  # fingerprints of this process's rewards and tools
_given: dict[str, Mix] = {}  # this process's functions, by their name in settings


@dataclass(frozen=True, eq=False)
class Function:
    """A reward function, and how it is called. Parameters named like a text or a column get that text or column. A function
    with other names for the texts, such as `lambda p, r: ...`, gets them in order; with a single parameter, such as `len`, it
    gets the response."""

    call: Callable[..., Any]
    label: str
    place: str = ""  # where it is defined
    names: tuple[str, ...] = ()  # the names of its parameters
    required: tuple[str, ...] = TEXTS  # parameters without a default
    positional: tuple[str, ...] = TEXTS
    takes_all: bool = False  # it has **columns

    @classmethod
    def of(cls, call: Callable[..., Any], label: str = "") -> Function:
        require(callable(call), f"a reward is a function or the name of one, not {call!r}")
        inner = inspect.unwrap(call.func if isinstance(call, partial) else call)
        # a torch module is called with the parameters of its `forward`
        module = hasattr(inner, "_forward_hooks")
        written = inspect.unwrap(inner.forward if module else inner)
        written = getattr(written, "__code__", getattr(type(inner).__call__, "__code__", None))
        name = label or getattr(inner, "__name__", type(inner).__name__).strip("<>")
        place = f"{Path(written.co_filename).name} line {written.co_firstlineno}" if written else ""
        try:
            named = inspect.signature(getattr(call, "forward", call) if module else call).parameters
        except (TypeError, ValueError):  # a builtin without a signature
            return cls(call, name, place)
        parameters = [*named.values()]
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        single = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        names = tuple(p.name for p in single if p.kind is not p.POSITIONAL_ONLY)
        required = tuple(p.name for p in single if p.default is p.empty)
        positional = tuple(p.name for p in single if p.kind is not p.KEYWORD_ONLY)
        return cls(call, name, place, names, required, positional, takes_all)

    @property
    def batched(self) -> bool:
        return any(name in LISTS for name in self.names)

    def __str__(self) -> str:
        return f"{self.label} ({self.place})" if self.place else self.label

    def in_order(self, known: Collection[str]) -> bool:
        """Whether it gets the texts in their order: none of the names it requires is known, or it has three parameters."""
        own = [name for name in self.required if name not in known or name not in self.names]
        if not own or not set(own) <= set(self.positional) or len(self.positional) > len(TEXTS):
            return False
        places = zip(self.positional, TEXTS, strict=False)
        in_place = all(name == text or name not in TEXTS for name, text in places)
        return in_place and (len(own) == len(self.required) or len(self.positional) == len(TEXTS))

    def check(self, columns: Sequence[str], answered: bool = True) -> None:
        """Raise an error for parameters that no row can fill. `answered`: some row has an answer."""
        blind = (
            f"reward {self} has no parameter for the response; name one: def {self.label}(response)"
        )
        require(bool(self.positional or self.names or self.takes_all), blind)
        ids = f"reward {self} takes token ids, and a reward gets texts; for a model of transformers"
        texts, own = {*TEXTS, *LISTS, *SAME}, {*self.names} - {*columns}
        model = "input_ids" in own and not own & texts
        require(not model, f"{ids}, save it and give reward_models=[FOLDER]")
        known = {*(LISTS if self.batched else (*TEXTS, *SAME)), "answer", *columns}
        missing = [name for name in self.required if name not in known]
        ordered = self.in_order(known) and not self.batched
        has = f"a column of the data ({', '.join(columns) or 'it has none'})"
        named = ", ".join(LISTS if self.batched else TEXTS)
        asks = f"reward {self} asks for {', '.join(missing)}, which is neither {named} nor {has}"
        require(not missing or ordered, asks)
        asks = f"reward {self} asks for {self.asks_for_answer(columns)}, but no row has an answer"
        fine = answered or not self.asks_for_answer(columns)
        require(fine, f"{asks}: answer=NAME says which is {has}")

    def asks_for_answer(self, columns: Collection[str]) -> str:
        """Return the parameter that gets the answer, and has no default; "" if there is none."""
        known = {*(LISTS if self.batched else (*TEXTS, *SAME)), "answer", *columns}
        ordered = self.in_order(known) and not self.batched
        if ordered and TEXTS.index("answer") < len(self.required):
            return self.positional[TEXTS.index("answer")]
        gold = {
            "answer",
            *(name for name in SAME if SAME[name] == "answer" and name not in columns),
        }
        return ", ".join(name for name in self.required if name in gold)

    def said(self, columns: Sequence[str]) -> str:
        """Return which text each parameter gets, if several are filled by order alone; else ""."""
        if len(self.positional) < 2 or self.batched or not self.in_order({*TEXTS, *SAME, *columns}):
            return ""
        return f"reward {self} is called with " + ", ".join(
            f"{n} = the {text}" for n, text in zip(self.positional, TEXTS, strict=False)
        )

    def scores(self, problems: Sequence[Problem], responses: Sequence[str]) -> Any:
        """Call the function for these responses and return scores, or None where it gives no score; a coroutine if the function
        is async."""
        if self.batched:
            return self._finished(self._listed, problems, responses)
        pairs = zip(problems, responses, strict=True)
        found = [self._finished(self._single, [p], [r]) for p, r in pairs]
        return then(found, lambda lists: [score for [score] in lists])

    def _finished(
        self, call: Callable[..., Any], problems: Sequence[Problem], responses: Sequence[str]
    ) -> Any:
        try:
            found = call(problems, responses)
        except Exception as error:
            return self._failed(error, len(problems))
        if inspect.isawaitable(found):
            return self._awaited(found, problems)
        return self._read(found, problems)

    async def _awaited(self, found: Any, problems: Sequence[Problem]) -> list[Score | None]:
        try:
            value = await found
        except (Exception, asyncio.CancelledError) as error:
            return self._failed(error, len(problems))
        return self._read(value, problems)

    def _single(self, problems: Sequence[Problem], responses: Sequence[str]) -> Any:
        problem, columns = problems[0], columns_of(problems[0])
        texts = {"prompt": problem.question, "response": responses[0], "answer": answer_of(problem)}
        same = {name: texts[text] for name, text in SAME.items()}
        # a column may replace the answer under one of these names, but not the response
        values = {**same, **columns, **texts, **{n: same[n] for n in same if SAME[n] == "response"}}
        if self.in_order(values):
            count = len(self.positional)
            order = TEXTS[:count] if count > 1 else ("response",)
            return self.call(*[_own(values[name]) for name in order])
        wanted = {name for name in values if name in self.names}
        if self.takes_all:
            wanted |= {*TEXTS, *columns}
        first = [n for n in self.positional if n not in self.names and n in values]
        named = {name: _own(values[name]) for name in sorted(wanted - {*first})}
        return self.call(*[_own(values[name]) for name in first], **named)

    def _listed(self, problems: Sequence[Problem], responses: Sequence[str]) -> Any:
        rows = [{**columns_of(p), "answer": answer_of(p)} for p in problems]
        names = {name for row in rows for name in row} - {"prompt"}
        names = names if self.takes_all else names & {*self.names}
        lists: dict[str, list[Any]] = {name: [_own(r.get(name)) for r in rows] for name in names}
        chats = [_own(p.facts.get("messages")) for p in problems]
        lists["prompts"] = [chat or p.question for chat, p in zip(chats, problems, strict=True)]
        # if the prompt is a conversation, so is its completion
        lists["completions"] = [
            [{"role": "assistant", "content": r}] if chat else r
            for chat, r in zip(chats, responses, strict=True)
        ]
        wanted = lists if self.takes_all else {n: lists[n] for n in self.names if n in lists}
        return self.call(**wanted)

    def _read(self, found: Any, problems: Sequence[Problem]) -> list[Score | None]:
        if not self.batched:
            return [self._score(found, problems[0])]
        found = found.tolist() if hasattr(found, "tolist") else found
        fine = isinstance(found, list | tuple) and len(found) == len(problems)
        what = f"{len(found)} values" if isinstance(found, list | tuple) else type(found).__name__
        wanted = f"for {len(problems)} completions; return one for each"
        require(fine, f"reward {self} returned {what} {wanted}")
        return [self._score(value, problem) for value, problem in zip(found, problems, strict=True)]

    def _score(self, value: Any, problem: Problem) -> Score | None:
        if value is None:
            return None
        try:
            return as_score(value)
        except TypeError:
            made = f"reward {self} returned {type(value).__name__} {str(value)[:60]!r} for the row {problem.id}"
            raise UserError(f"{made}; return a number, None (not scored) or a Score") from None

    def _failed(self, error: BaseException, count: int) -> list[Score | None]:
        """Turn an error in the function into a failure, with the line in the user's file where it happened."""
        if isinstance(error, STOPS) or step_ends(error):
            raise error
        return [Score.failed(f"{raised(error)} (reward {self.label})")] * count


@dataclass(frozen=True, eq=False)
class Mix:
    """r = sum_k w_k r_k over the functions that gave a score; a function that returned None is left out. An error in one of
    them is a failure of the whole. A mix of a single function returns its score unchanged."""

    functions: tuple[Function, ...]
    weights: tuple[float, ...]

    @property
    def batched(self) -> bool:
        return any(function.batched for function in self.functions)

    def scores(self, problems: Sequence[Problem], responses: Sequence[str]) -> Any:
        """Return a score for each response, or a coroutine of them."""
        found = [function.scores(problems, responses) for function in self.functions]
        return then(found, lambda lists: [self.mixed(own) for own in zip(*lists, strict=True)])

    def mixed(self, scores: Sequence[Score | None]) -> Score:
        named = zip(self.functions, self.weights, scores, strict=True)
        kept = [(function, weight, score) for function, weight, score in named if score is not None]
        if not kept:
            labels = ", ".join(function.label for function in self.functions)
            return Score.failed(f"not scored: {labels} returned None")
        if len(self.functions) == 1 and (self.weights[0] == 1 or not kept[0][2].valid):
            return kept[0][2]
        value = sum(weight * (score.value or 0.0) for _, weight, score in kept)
        return combined({function.label: score for function, _, score in kept}, value)


def _own(value: JSON) -> JSON:
    """Copy a value of a row for one call, so that a function that changes a list or a mapping affects no other call."""
    return deepcopy(value) if isinstance(value, list | dict) else value


def finished(found: Any) -> Any:
    """Return the result of a call, or of the coroutine that it returned."""
    awaited = then([found], lambda values: values[0])
    return run_to_end(awaited) if inspect.isawaitable(found) else found


def then(found: Sequence[Any], use: Callable[[Sequence[Any]], Any]) -> Any:
    """Return `use` applied to all results. If some of them must be awaited, return a coroutine, which awaits them together."""

    async def together() -> Any:
        tasks = {n: asyncio.ensure_future(f) for n, f in enumerate(found) if inspect.isawaitable(f)}
        return use([await tasks[n] if n in tasks else f for n, f in enumerate(found)])

    return together() if any(map(inspect.isawaitable, found)) else use(found)


def columns_of(problem: Problem) -> Mapping[str, JSON]:
    """Return the row that a problem was made from."""
    columns: Mapping[str, JSON] = problem.facts.get(COLUMNS, {})
    return columns


def answer_of(problem: Problem) -> JSON:
    """Return the answer as the task reads it, which may be a part of the column; a column that is not text is returned
    unchanged. None if there is none: every response has an empty text in it."""
    column = columns_of(problem).get("answer")
    return (problem.answer or None) if isinstance(column, str | None) else column


def give(mix: Mix) -> str:
    """Register a reward in this process and return the name for settings. Different functions with the same name are numbered;
    a function that is defined again unchanged, as when a notebook cell runs twice, is the same."""

    def same(before: Mix) -> bool:
        pairs = zip(before.functions, mix.functions, strict=True)
        alike = all(same_function(a.call, b.call) for a, b in pairs)
        return alike and before.weights == mix.weights

    name = known_as(_given, ", ".join(map(str, mix.functions)), same)
    _given[name] = mix
    note(name, [function.call for function in mix.functions])
    return name


def same_function(first: Any, second: Any) -> bool:
    """Whether two functions have the same code, defaults and captured values."""
    if first is second:
        return True
    try:
        kept = ("__code__", "__defaults__", "__kwdefaults__")
        cells = [[cell.cell_contents for cell in f.__closure__ or ()] for f in (first, second)]
        same = all(getattr(first, k) == getattr(second, k) for k in kept)
        return same and bool(cells[0] == cells[1])
    # not a Python function, an empty cell, or an array that has no truth value
    except (AttributeError, ValueError):
        return False


def without_places(name: str) -> str:
    """Return the name of this process's functions without their line numbers, which change when lines are added above them.

    >>> without_places("python:right (mine.py line 12), len #2")
    'python:right, len #2'
    """
    return re.sub(r" \([^()]* line [0-9]+\)", "", name) if name.startswith(PREFIX) else name


def fingerprint(call: Any) -> JSON:
    """Return what decides the result of a function, as far as that is certain: its source without comments, and captured values
    that cannot change. An object or a list may change with every call, so it is left out."""
    if isinstance(call, partial):
        return [fingerprint(call.func), _plain(call.args), _plain((*call.keywords.items(),))]
    made = inspect.unwrap(call)
    function = made if inspect.isroutine(made) else type(made)
    cells = getattr(function, "__closure__", None) or ()
    kept = [_plain(cell.cell_contents) for cell in cells if cell != type(cell)()]
    named = (*(getattr(function, "__kwdefaults__", None) or {}).items(),)
    return [_text(function), kept, _plain(getattr(function, "__defaults__", None)), _plain(named)]


def class_code(kind: type) -> JSON:
    """Return the source of a user's class and of the classes of the user's that it is based on."""
    foreign = (*sys.stdlib_module_names, "posttrain")
    return [_text(base) for base in kind.__mro__ if base.__module__.split(".")[0] not in foreign]


def _text(function: Any) -> JSON:
    """Return the source of a function or a class; for a lambda, without the code around it. Without source, return the compiled
    code."""
    name, code = getattr(function, "__qualname__", ""), getattr(function, "__code__", None)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        if isinstance(function, type):  # in a notebook, methods have a source and classes have none
            return [name, *_methods(function)]
        parts = () if code is None else (code.co_code, code.co_names, code.co_consts)
        return [name, _plain(parts)]
    inner = [one for one in ast.walk(tree) if isinstance(one, ast.Lambda)]
    return [ast.unparse(one) for one in (inner if name.endswith("<lambda>") else [tree])]


def _methods(kind: type) -> list[JSON]:
    """Return the source of the methods in the body of a class. Those that `dataclass` adds come from no file."""
    inner = (getattr(one, "fget", getattr(one, "__func__", one)) for one in vars(kind).values())
    made = [inspect.unwrap(one) for one in inner if inspect.isfunction(one)]
    return [_text(one) for one in made if one.__code__.co_filename != "<string>"]


def _plain(value: Any) -> JSON:
    """Return an immutable value as text that is the same in every process; for other values, the type."""
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if isinstance(value, frozenset):
        return sorted(map(repr, value))
    plain = isinstance(value, str | bytes | int | float | complex | None)
    return repr(value) if plain else type(value).__name__


def note(name: str, calls: Sequence[Any]) -> None:
    """Store the fingerprints of functions when they are registered, before any of them runs."""
    _prints[name] = [*map(fingerprint, calls)]


def code_of(name: str) -> JSON:
    """Return the fingerprints that `note` stored under that name, or None."""
    return _prints.get(name)


def given(name: str) -> Mix:
    """Return the reward registered under a name with `PREFIX`."""
    require(name in _given, elsewhere("reward", name, "function"))
    return _given[name]


def of_file(call: Callable[..., Any], name: str) -> Mix:
    """Return the function FILE.py:NAME as a mix of one."""
    return Mix((Function.of(call, name.rpartition(":")[2]),), (1.0,))
