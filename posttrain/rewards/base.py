"""Resolves a reward by its name, as `posttrain list rewards` shows it, or as FILE.py:NAME, with its options.

The options of a shipped reward are the keyword arguments of its function, or the fields where it is a dataclass. Names, types and
ranges are checked when a config is read, so that a mistake is found before the first response and not at every one of them.
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
from posttrain.errors import UserError, require, unknown
from posttrain.rewards._functions import PREFIX, Mix, given, of_file
from posttrain.rewards.compose import Gate, Part, Product, Reward, Weighted
from posttrain.rewards.judge import check_options as check_judge_options
from posttrain.trust import code_place
from posttrain.types import JSON

Options = Mapping[str, JSON]
TEXTS = ("prompt", "response", "answer")  # what every reward is called with
# a prompt, response and answer with which every reward refuses options out of range
TRIAL = ("1+1=", "", "2")
LISTS = (tuple, list)
TYPES: dict[Any, tuple[type, ...]] = {float: (int, float), Sequence: LISTS, tuple: LISTS}
TYPES[typing.Literal] = (str,)


@lru_cache(maxsize=16)
def _load(name: str) -> Any:
    return catalogue.load("reward", name)


def resolve(name: str, options: Options) -> Reward:
    """The reward with its options. FILE.py:NAME is loaded, which runs that file."""
    if name == "compose":
        return compose(options)
    found = _load(name)
    settings = not isinstance(found, type) and is_dataclass(found)
    made: Any = replace(found, **options) if settings else partial(found, **options)
    return made  # type: ignore[no-any-return]


def check(name: str, options: Options) -> None:
    """Refuse an unknown reward, an unknown option, and a value that the reward does not take. Code of the user's is not run."""
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
        if key not in known:
            raise unknown(f"option of the reward {name}:", key, known, [name])
        wanted = typing.get_origin(hints[key]) or hints[key]
        accepted = TYPES.get(wanted, (wanted,))
        fine = isinstance(value, accepted) and (bool in accepted or not isinstance(value, bool))
        require(fine, f"{name}: {key} must be {accepted[-1].__name__}, not {value!r}")


def own_function(name: str, options: Options) -> Mix | None:
    """The reward where it is a function of the user's, in a file or in this process; None where it is a shipped one."""
    if name.startswith(PREFIX):
        return given(name)
    return of_file(resolve(name, options), name) if code_place(name) is not None else None


def check_code(name: str, path: Path) -> None:
    """Refuse FILE.py:NAME where the file is not there or is no Python; nothing in it is run."""
    try:
        ast.parse(path.read_bytes())
    except OSError as error:
        raise UserError(f"reward {name}: cannot read {path}: {error.strerror}") from None
    except (SyntaxError, ValueError, RecursionError) as error:
        line = f" line {error.lineno}" if isinstance(error, SyntaxError) else ""
        reason = getattr(error, "msg", error)
        raise UserError(f"reward {name}: {path}{line} is not Python: {reason}") from None


def parts_of(name: str, options: Options) -> list[tuple[str, Options]]:
    """The reward, or those that it is composed of at any depth, with the options of each."""
    if name != "compose" or not isinstance(options, Mapping):
        return [(name, options)]
    given, found = options.get("parts"), list[tuple[str, Options]]()
    for part in given if isinstance(given, list | tuple) else ():
        if isinstance(part, Mapping):
            found += parts_of(str(part.get("reward", "")), part.get("options", {}))
    return found


def compose(options: Options) -> Weighted | Product | Gate:
    """The reward `compose` from plain settings: how (weighted, product, gate) and parts, each with a reward and, as needed, a name,
    a weight and options. A gate has two parts: what must be passed, and what is then paid.

    >>> mix = compose({"how": "gate", "parts": [{"reward": "format"}, {"reward": "math"}]})
    >>> mix("1+1?", "so \\\\boxed{2}", "2").value
    0.0
    """
    known = ("how", "parts", "threshold", "otherwise")
    for name in options:
        if name not in known:
            raise unknown("option of the reward compose:", name, known, ["compose"])
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
    # a list of pairs would hide what it names from trust.py
    fine = fine and isinstance(settings.get("options", {}), Mapping)
    form = "a part is a reward with, as needed, a name, a weight and options"
    require(fine, f"compose: {form}, not {str(settings)[:80]}")
    name = str(settings["reward"])
    # options may come from any file, and code may not: a mix with a function of yours is a function of yours
    hint = "mix it in a file of yours, and name that"
    require(":" not in name, f"compose: a part is a shipped reward, not {name!r}; {hint}")
    reward = resolve(name, settings.get("options", {}))
    return Part(str(settings.get("name", name)), reward, float(settings.get("weight", 1.0)))
