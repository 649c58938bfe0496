"""Resolves a reward and its options by name, as `posttrain list rewards` shows it, or as FILE.py:NAME.

The options of a shipped reward are the keyword arguments of its function, or the fields of its dataclass. Names, types and ranges are
checked when a config is read, so that a mistake is found before the first response.
"""

from __future__ import annotations

import ast
import inspect
import typing
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from posttrain import catalogue
from posttrain.errors import UserError, many, refuse_unknown, require, unknown
from posttrain.rewards._functions import Function, Mix, answer_of, columns_of, given, of_file
from posttrain.rewards.compose import Gate, Part, Product, Reward, Weighted
from posttrain.rewards.judge import check_options as check_judge_options
from posttrain.trust import PREFIX, code_place
from posttrain.types import JSON, Problem

Options = Mapping[str, JSON]
TEXTS = ("prompt", "response", "answer")  # the arguments of every reward
# a prompt, response and answer for a trial call, in which a reward refuses options out of range
TRIAL = ("1+1=", "", "2")
LISTS = (tuple, list)
TYPES: dict[Any, tuple[type, ...]] = {float: (int, float), Sequence: LISTS, tuple: LISTS}
TYPES[typing.Literal] = (str,)


@lru_cache(maxsize=16)
def _load(name: str) -> Any:
    return catalogue.load("reward", name)


def resolve(name: str, options: Options) -> Reward:
    """Return the reward with its options. For FILE.py:NAME this imports, and so runs, that file."""
    if name == "compose":
        return compose(options)
    found = _load(name)
    settings = not isinstance(found, type) and is_dataclass(found)
    made: Any = replace(found, **options) if settings else partial(found, **options)
    return made  # type: ignore[no-any-return]


def check(name: str, options: Options) -> None:
    """Raise an error for an unknown reward, an unknown option or an invalid value. The user's own code is not run."""
    named = isinstance(options, Mapping)
    require(named, f"the options of the reward {name} are not a mapping: {str(options)[:80]}")
    if code_place(name) is not None:
        return
    if name.startswith(PREFIX):
        given(name)
    elif name == "compose":
        for part, its_options in parts_of(name, options):
            if part and isinstance(its_options, Mapping):
                check(part, its_options)
        compose(options)
    elif name == "judge":
        check_judge_options(**options)
    else:
        _check_types(name, options)
        if name != "code":  # it would run a program
            resolve(name, options)(*TRIAL)


def _check_types(name: str, options: Options) -> None:
    found = _load(name)
    kind = type(found) if is_dataclass(found) else found
    hints = typing.get_type_hints(kind)
    known = [k for k in inspect.signature(kind).parameters if k not in TEXTS]
    for key, value in options.items():
        refuse_unknown(f"option of the reward {name}:", [key], known, [name])
        wanted = typing.get_origin(hints[key]) or hints[key]
        accepted = TYPES.get(wanted, (wanted,))
        fine = isinstance(value, accepted) and (bool in accepted or not isinstance(value, bool))
        require(fine, f"{name}: {key} must be {accepted[-1].__name__}, not {value!r}")


def own_function(name: str, options: Options) -> Mix | None:
    """Return the reward if it is the user's own function, in a file or in this process; None if it is a shipped one."""
    if name.startswith(PREFIX):
        return given(name)
    return of_file(resolve(name, options), name) if code_place(name) is not None else None


def check_function(name: str, options: Options, problems: Sequence[Problem]) -> list[str]:
    """Raise an error if the user's own reward does not exist, is not a function, or has a parameter that no row of these
    problems can fill. Returns how the parameters are filled, if they have names of the user's own. The file is parsed and not
    run: a name that the source does not show (imported or computed) is checked when it is called."""
    looked = problems if isinstance(problems, list | tuple) else problems[:1]
    columns = [*columns_of(problems[0])]
    answered = "answer" in columns or any(problem.answer for problem in looked)
    functions = given(name).functions if name.startswith(PREFIX) else ()
    place = None if functions else code_place(name)
    if place is not None and (found := check_code(name, *place)) is not None:
        if not found.takes_all:
            refuse_unknown(f"option of the reward {name}:", options, found.names)
        required = tuple(key for key in found.required if key not in options)
        positional = tuple(key for key in found.positional if key not in options)
        functions = (replace(found, required=required, positional=positional),)
    for function in functions:
        function.check(columns, answered)
    lines = [line for function in functions if (line := function.said(columns))]
    asking = [f"reward {f}" for f in functions if f.asks_for_answer(columns)][:1]
    lacking = [problem for problem in looked if answer_of(problem) is None]
    count = f"{len(lacking)} of {many(len(looked), 'prompt')} to train on have no answer"
    lines += [f"{count}, such as {lacking[0].id}: {f} gets None for it" for f in asking if lacking]
    numbers = [gold for p in looked if isinstance(gold := answer_of(p), int | float)][:1]
    typed = "gets a number as the answer, such as {!r}, and the response as text"
    return [*lines, *(f"{f} {typed.format(gold)}" for f in asking for gold in numbers)]


def check_code(name: str, path: Path, attribute: str) -> Function | None:
    """Raise an error if the file of FILE.py:NAME is missing, is not Python, or has no function of that name. Returns the signature
    of the function, or None if the source does not show it. The file is not run."""
    tree = _parse(name, path)
    known: dict[str, ast.stmt] = {}
    for node in tree.body:
        known |= dict.fromkeys(_bound(node), node)
    if "*" in known or any(isinstance(n, ast.Try | ast.If | ast.With | ast.For) for n in tree.body):
        return None
    if attribute not in known:
        public = [word for word, node in known.items() if isinstance(node, FUNCTIONS)]
        raise unknown(f"name in {path}:", attribute, public or known)
    node = known[attribute]
    value = getattr(node, "value", None)
    plain = isinstance(value, ast.Constant | ast.List | ast.Dict | ast.Tuple | ast.JoinedStr)
    require(not plain, f"reward {name}: {attribute} at {path} line {node.lineno} is no function")
    if not isinstance(node, FUNCTIONS) or node.decorator_list:
        return None
    given, label = node.args, f"{path.name} line {node.lineno}"
    positional = [one.arg for one in (*given.posonlyargs, *given.args)]
    first = positional[: len(positional) - len(given.defaults)]
    pairs = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    keywords = [one.arg for one, default in pairs if default is None]
    names = (*(one.arg for one in given.args), *(one.arg for one in given.kwonlyargs))
    parts = (names, (*first, *keywords), tuple(positional), given.kwarg is not None)
    return Function(_not_run, attribute, label, *parts)


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _not_run(*given: Any, **more: Any) -> Any:
    raise AssertionError


def _bound(node: ast.stmt) -> list[str]:
    """The names that a statement defines."""
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    return [one.id for one in ast.walk(node) if isinstance(one, ast.Name)]


def _parse(name: str, path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes())
    except OSError as error:
        raise UserError(f"reward {name}: cannot read {path}: {error.strerror}") from None
    except (SyntaxError, ValueError, RecursionError) as error:
        line = f" line {error.lineno}" if isinstance(error, SyntaxError) else ""
        reason = getattr(error, "msg", error)
        raise UserError(f"reward {name}: {path}{line} is not Python: {reason}") from None


def parts_of(name: str, options: Options) -> list[tuple[str, Options]]:
    """(name, options) of the reward or, for `compose`, of all its parts at any depth."""
    if name != "compose" or not isinstance(options, Mapping):
        return [(name, options)]
    given, found = options.get("parts"), list[tuple[str, Options]]()
    for part in given if isinstance(given, list | tuple) else ():
        if isinstance(part, Mapping):
            found += parts_of(str(part.get("reward", "")), part.get("options", {}))
    return found


def compose(options: Options) -> Weighted | Product | Gate:
    """Build the reward `compose` from plain settings: `how` (weighted, product, gate) and `parts`, each with a reward and
    optionally a name, a weight and options. A gate has two parts: the second counts only if the first is passed.

    >>> mix = compose({"how": "gate", "parts": [{"reward": "format"}, {"reward": "math"}]})
    >>> mix("1+1?", "so \\\\boxed{2}", "2").value
    0.0
    """
    known = ("how", "parts", "threshold", "otherwise")
    refuse_unknown("option of the reward compose:", options, known, ["compose"])
    how, parts = options.get("how", "weighted"), options.get("parts", [])
    given = isinstance(parts, list | tuple) and bool(parts)
    require(given, "compose: give a list of parts, each with a reward")
    made = tuple(_part(part) for part in parts)
    fine = how in ("weighted", "product", "gate")
    require(fine, f"compose: how is weighted, product or gate, not {how!r}")
    if how != "gate":
        return Weighted(made) if how == "weighted" else Product(made)
    count = f"compose: a gate has two parts, the gate and what is behind it, not {len(made)}"
    require(len(made) == 2, count)
    threshold, otherwise = options.get("threshold", 1.0), options.get("otherwise", 0.0)
    return Gate(made[0], made[1], float(threshold), float(otherwise))


def _part(settings: JSON) -> Part:
    fine = isinstance(settings, Mapping) and "reward" in settings
    fine = fine and set(settings) <= {"reward", "name", "weight", "options"}
    # trust.py looks for names in mappings, and would not find them in a list of pairs
    fine = fine and isinstance(settings.get("options", {}), Mapping)
    form = "a part is a reward with, as needed, a name, a weight and options"
    require(fine, f"compose: {form}, not {str(settings)[:80]}")
    name = str(settings["reward"])
    # options may come from any file, and code may not: a mix that contains a user's function counts as a user's function
    hint = "mix it in a file of yours, and name that"
    require(":" not in name, f"compose: a part is a shipped reward, not {name!r}; {hint}")
    reward = resolve(name, settings.get("options", {}))
    return Part(str(settings.get("name", name)), reward, float(settings.get("weight", 1.0)))
