"""Finds algorithms, tasks and recipes by name. A file registers itself: its module name is the name. Reward sources are the classes
of one file, each with its `name`.

`list` must not import torch, so descriptions are read from the source with `ast`; only `load` imports.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from contextvars import ContextVar
from dataclasses import dataclass, is_dataclass
from functools import lru_cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from traceback import extract_tb
from types import CodeType, ModuleType
from typing import Any

from posttrain.errors import UserError, require, unknown
from posttrain.system.processes import on_import
from posttrain.trust import PREFIX, active, code_place, elsewhere

HOME = Path(__file__).parent
KINDS = {
    "algorithm": "algorithms",
    "task": "tasks",
    "tool": "tasks/tools",
    "recipe": "recipes",
    "reward": "rewards",
    "stage": "stages",
    "command": "cli",
    "reward_source": "stages/reward_sources.py",
}
UNDECORATED = "write @dataclass(frozen=True) above the class, so that its settings are known"
NOT_ENTRIES = ("base", "reward_sources", "toolbox", "train")
# users' files that are being run
reading: ContextVar[tuple[Path, ...]] = ContextVar("reading", default=())


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of `posttrain list`."""

    name: str
    summary: str
    paper: str
    file: str


def names(kind: str) -> list[str]:
    """The names of one kind: file names without a leading underscore, or the names of the classes in one file."""
    place = KINDS[kind]
    if place.endswith(".py"):
        return [name for node in _parsed(place).body if (name := _constant(node, "name"))]
    stems = (path.stem for path in (HOME / place).glob("*.py"))
    return sorted(stem for stem in stems if stem[0] != "_" and stem not in NOT_ENTRIES)


def describe(kind: str) -> list[Entry]:
    """Entries of one kind of file, read from their source without importing it."""
    entries = []
    for name in names(kind):
        file = f"{KINDS[kind]}/{name}.py"
        tree = _parsed(file)
        summary = (ast.get_docstring(tree) or "").split("\n")[0]
        paper = next((found for n in tree.body if (found := _constant(n, "paper"))), "")
        entries.append(Entry(name, summary, paper, f"posttrain/{file}"))
    return entries


def _parsed(file: str) -> ast.Module:
    return ast.parse((HOME / file).read_text())


def _constant(owner: ast.stmt, name: str) -> str:
    """The value of a string constant assigned to `name` in the body of a class."""
    for node in owner.body if isinstance(owner, ast.ClassDef) else ():
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(t, ast.Name) and t.id == name for t in targets):
                return str(node.value.value)
    return ""


def check_name(kind: str, name: str) -> None:
    """Raise an error for a name that is not in the catalogue. Imports nothing, so a mistyped name is reported at once."""
    require(not name.startswith(PREFIX), elsewhere(kind, name, "class"))
    ruled = kind == "reward_source" and name in names("reward") and name not in names(kind)
    require(not ruled, f"reward: {name} is a rule, the reward of a task: task.reward={name}")
    if code_place(name) is None and name not in names(kind):
        require(not name.endswith(".py"), f"{kind} {name}: say which of it, as in {name}:NAME")
        raise unknown(kind, name, names(kind), [kind])


def check_recipe(name: str) -> None:
    """The same of a recipe, which may also be a YAML file."""
    if name.endswith((".yaml", ".yml")):
        require(Path(name).is_file(), f"recipe file {name} does not exist")
    else:
        check_name("recipe", name)


def load(kind: str, name: str, base: type | None = None) -> Any:
    """The class (or, for a recipe, the function) called `name`, or the one in a user's `file.py:Name`.

    A shipped module defines exactly one public subclass of `base`; a recipe module defines a function of its own name.
    """
    if (place := code_place(name)) is not None:
        active().require_code(kind, name)
        found = _from_file(kind, *place)
        fits = base is None or (isinstance(found, type) and issubclass(found, base))
        made = getattr(base, "__name__", "")
        more = f", or the function as task.reward={name}" if kind == "reward_source" else ""
        require(fits, f"{name} is no {kind.replace('_', ' ')}: give a subclass of {made}{more}")
        own = getattr(found, "__dict__", {})
        # a field that a class without a decorator adds to those of its base is no setting
        kinds = map(str, own.get("__annotations__", {}).values())
        lost = "__dataclass_fields__" not in own and any("ClassVar" not in one for one in kinds)
        require(base is None or (is_dataclass(found) and not lost), f"{name}: {UNDECORATED}")
        return found
    check_name(kind, name)
    if KINDS[kind].endswith(".py"):
        module = importlib.import_module(f"posttrain.{KINDS[kind][:-3].replace('/', '.')}")
        return next(c for c in vars(module).values() if name == getattr(c, "name", None))
    module = importlib.import_module(f"posttrain.{KINDS[kind].replace('/', '.')}.{name}")
    if base is None:
        return getattr(module, name)
    classes = [c for c in vars(module).values() if isinstance(c, type) and issubclass(c, base)]
    own = [c for c in classes if c.__module__ == module.__name__]
    if len(own) != 1:
        raise TypeError(f"{module.__name__} must define one {base.__name__}, found {len(own)}")
    return own[0]


def short_form(kind: str, text: str, base: type) -> dict[str, Any]:
    """The settings that a name is short for: `NAME`, or `NAME:VALUE` if its class says which setting the value is
    (reasoning_gym:leg_counting)."""
    if kind == "tool" and code_place(text) is not None:  # a function, or a class
        return {"name": "function", "function": text}
    name, colon, value = text.partition(":")
    if not colon or name.endswith(".py") or name not in names(kind):
        return {"name": text}
    key = getattr(load(kind, name, base), "shorthand", "")
    require(key, f"{text}: the {kind} {name} takes no value after its name")
    return {"name": name, key: value}


def make(kind: str, text: str, base: type) -> Any:
    """An instance by name, with default settings."""
    settings = short_form(kind, text, base)
    try:
        return load(kind, settings.pop("name"), base)(**settings)
    except TypeError as error:
        raise UserError(f"{kind} {text}: {error}") from None


def name_of(thing: type | object) -> str:
    """The catalogue name of a shipped class or instance; of a user's, `file.py:Name`, or `python:Name` for a class that a program
    defines."""
    cls = thing if isinstance(thing, type) else type(thing)
    origin = getattr(sys.modules.get(cls.__module__), "__posttrain_file__", None)
    if origin:
        return f"{origin}:{cls.__name__}"
    if not cls.__module__.startswith("posttrain."):
        return f"{PREFIX}{cls.__qualname__}"
    module = cls.__module__.rsplit(".", 1)[-1]
    return str(getattr(cls, "name", module)) if module == "reward_sources" else module


def _from_file(kind: str, path: Path, attribute: str) -> Any:
    require(path.is_file(), f"{kind} file '{path}' does not exist")
    about = path.stat()
    module = _module(path, about.st_mtime_ns, about.st_size)
    if not hasattr(module, attribute):
        public = [n for n in vars(module) if not n.startswith("_")]
        raise unknown(f"name in {path}", attribute, public)
    return getattr(module, attribute)


class _SourceOnly(SourceFileLoader):
    """Compiles the current source: bytecode is neither read, because it may be older, nor written to the file's folder."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def outside_files(path: Path | None = None) -> None:
    """Raise an error while a user's file, or the one at `path`, is run for what it defines: a run that it begins there would read
    the file again, which begins another."""
    for one in reading.get():
        apart = "or what it defines into a file of its own"
        text = f"{one} is read for what it defines, and begins a run: put that below"
        require(path not in (None, one), f'{text} `if __name__ == "__main__":`, {apart}')


@lru_cache(maxsize=64)
def _module(path: Path, changed: int, size: int) -> ModuleType:
    """The only place that runs a user's file: once in a process, and again if it was edited since."""
    outside_files(path)
    module_name = f"posttrain_user_{path.stem}_{abs(hash(str(path))) % 10**8}"
    loader = _SourceOnly(module_name, str(path))
    spec = importlib.util.spec_from_file_location(module_name, path, loader=loader)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} is not Python")
    module = importlib.util.module_from_spec(spec)
    module.__posttrain_file__ = str(path)  # type: ignore[attr-defined]
    sys.modules[module_name] = module
    folder = str(path.parent)
    # the file may import its neighbours: they come first while it runs, and after installed packages later
    sys.path.insert(0, folder)
    for tell in on_import:
        tell(True)
    token = reading.set((*reading.get(), path))
    try:
        spec.loader.exec_module(module)
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:
        del sys.modules[module_name]
        raise UserError(place_of(error, path)) from error
    finally:
        reading.reset(token)
        sys.path.remove(folder)
        if folder not in sys.path:
            sys.path.append(folder)
        for tell in on_import:
            tell(False)
    return module


def place_of(error: BaseException, path: Path) -> str:
    """An error in a user's file as one line: the file, the line and what happened."""
    frames = extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    where = error.filename if isinstance(error, SyntaxError) else path
    what = error.msg if isinstance(error, SyntaxError) else error
    return f"{where} line {line}: {type(error).__name__}: {what}"
