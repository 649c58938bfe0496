"""Every key of a stage, algorithm, task, reward or recipe with its type, default and meaning, read from the source without imports.

A meaning is the comment of a field or, in the docstring of its class, a row of a table (`beta, kl   KL to the reference`), or
the entry of keys.yaml, or the sentence with the key in backticks.
"""

from __future__ import annotations

import ast
import io
import re
import textwrap
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import get_args

from posttrain import catalogue, errors
from posttrain.catalogue import HOME
from posttrain.data.safe_readers import read_yaml
from posttrain.errors import Range, UserError, require, unknown
from posttrain.trust import code_place

CHOSEN = {"Algorithm": "algorithms", "Task": "tasks", "RewardSource": "rewards"}
TEXTS = ("prompt", "response", "answer")  # arguments of every reward, which are not options
WIDTH = 120


@dataclass(frozen=True, slots=True)
class Key:
    """A setting; if it holds a group, `keys` are those of the group."""

    name: str
    type: str
    default: str  # "": required
    meaning: str
    keys: tuple[Key, ...] = ()

    def lines(self, prefix: str = "", nested: bool = True) -> Iterator[str]:
        """Yield `name: type = default`, with its meaning after it or below."""
        value = f" = {self.default}" if self.default else " (required)"
        head = f"{prefix}{self.name}: {self.type}{value}"
        text = f"{head:<48}  {self.meaning}"
        yield from textwrap.wrap(text, WIDTH, initial_indent="    ", subsequent_indent=" " * 16)
        for key in self.keys if nested else ():
            yield from key.lines(f"{prefix}{self.name}.")


GATE = "a gate pays its second part where the first is passed"
COMPOSE = (  # its options are plain settings, read in rewards/base.py
    Key("how", "weighted | product | gate", "'weighted'", GATE),
    Key("parts", "list of {reward, name, weight, options}", "", "the rewards that are composed"),
    Key("threshold", "float", "1.0", "what passes a gate"),
    Key("otherwise", "float", "0.0", "what is paid where the gate is not passed"),
)


@dataclass(frozen=True, eq=False)
class Source:
    """A parsed file, with its comments by line."""

    path: Path
    tree: ast.Module
    comments: Mapping[int, tuple[str, bool]]  # text, and whether it is alone on its line

    @classmethod
    @cache
    def of(cls, path: Path) -> Source:
        text = path.read_text("utf-8")
        try:
            parsed = ast.parse(text)
        except SyntaxError as error:
            raise UserError(catalogue.place_of(error, path)) from None
        found = {
            token.start[0]: (token.string.lstrip("# "), token.line.lstrip().startswith("#"))
            for token in tokenize.generate_tokens(io.StringIO(text).readline)
            if token.type == tokenize.COMMENT and not token.string.startswith(("# type:", "# noqa"))
        }
        return cls(path, parsed, found)

    def comment(self, first: int, last: int) -> str:
        """Return the comment after the lines of a field, or in the lines above it."""
        after = [self.comments[n][0] for n in range(first, last + 1) if n in self.comments]
        above: list[str] = []
        line = first - 1
        while line in self.comments and self.comments[line][1]:
            above.insert(0, self.comments[line][0])
            line -= 1
        return " ".join([*above, *after])

    def find(self, name: str) -> tuple[Source, ast.ClassDef | ast.expr] | None:
        """Return the class or the type that a name or MODULE.NAME refers to, here or in the module it is imported from."""
        module, _, last = name.rpartition(".")
        first = module or name
        for node in self.tree.body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                return self, node
            if isinstance(node, ast.Assign) and name in map(ast.unparse, node.targets):
                return self, node.value
            if isinstance(node, ast.AnnAssign) and name == ast.unparse(node.target) and node.value:
                return self, node.value
            if isinstance(node, ast.ImportFrom) and first in [one.name for one in node.names]:
                package, *inner = f"{node.module}.{module}".rstrip(".").split(".")
                path = HOME.joinpath(*inner).with_suffix(".py")
                ours = package == "posttrain" and path.is_file()
                return Source.of(path).find(last) if ours else None
        return None

    def keys(self, name: str) -> dict[str, Key]:
        """Return the fields of a class and of its base classes."""
        source, node = self.find(name) or (self, None)
        if not isinstance(node, ast.ClassDef):
            return {}
        made: dict[str, Key] = {}
        for base in reversed(node.bases):
            made |= source.keys(ast.unparse(base))
        text = ast.get_docstring(node) or ""
        for key, old in made.items():
            plain = old.meaning in ("", meanings().get(key))
            meaning = documented(text, key) or old.meaning
            made[key] = replace(old, meaning=meaning) if plain else old
        for field in node.body:
            if not isinstance(field, ast.AnnAssign) or "ClassVar" in ast.unparse(field.annotation):
                continue
            key = ast.unparse(field.target)
            if not key.startswith("_"):
                meaning = meanings().get(f"{node.name}.{key}", "")
                meaning = meaning or source.comment(field.lineno, field.end_lineno or field.lineno)
                meaning = meaning or documented(text, key) or getattr(made.get(key), "meaning", "")
                made[key] = source.key(key, field.annotation, field.value, meaning)
        return made

    def constant(self, default: str) -> str:
        """Return the value of a default that names a constant, or a field of one: NAME or NAME.field."""
        name, _, field = default.partition(".")
        found = self.find(name) if re.fullmatch("[A-Z_]+", name) else None
        if found and not field and isinstance(found[1], ast.Constant):
            return ast.unparse(found[1])
        if found and field.isidentifier() and isinstance(found[1], ast.Call):
            return found[0].keys(ast.unparse(found[1].func))[field].default
        return default

    def key(self, name: str, kind: ast.expr, value: ast.expr | None, meaning: str) -> Key:
        group, default = "", "" if value is None else ast.unparse(value)
        if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("field"):
            words = {word.arg: word.value for word in value.keywords}
            factory = words.get("default_factory") or words.get("default")
            value = factory.body if isinstance(factory, ast.Lambda) else factory
            default = "" if value is None else ast.unparse(value)
            default = {"dict": "{}", "list": "[]"}.get(default, default)
        default = self.constant(default)
        for word in re.findall(r"[A-Z]\w+", ast.unparse(kind)):
            found = None if hasattr(errors, word) else self.find(word)
            if word in CHOSEN or (found and isinstance(found[1], ast.ClassDef)):
                group = word
        keys: dict[str, Key] = {}
        if group in CHOSEN:
            default = re.sub(r"(?<=[a-z])Reward$", "", default.partition("(")[0])
            default = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", default).lower()
            meaning = meaning or f"a name or settings; see posttrain list {CHOSEN[group]}"
        elif group:
            given = {w.arg: ast.unparse(w.value) for w in getattr(value, "keywords", ())}
            own = self.keys(group).items()
            keys = {n: replace(k, default=given.get(n, k.default)) for n, k in own}
            default = default if default in ("", "None", "()") else "as below"
        default = "[]" if default == "()" else default
        return Key(name, self.type_text(kind), default, meaning, tuple(keys.values()))

    def type_text(self, kind: ast.expr) -> str:
        """Return a type in words: bounds for a number, choices for a Literal."""
        text = ast.unparse(kind)
        if isinstance(kind, ast.Name):
            known = getattr(errors, text, None)
            if known is not None and get_args(known):
                return _bounded(get_args(known)[0].__name__, known.__metadata__[0])
            found = self.find(text)
            alias = found is not None and not isinstance(found[1], ast.ClassDef)
            return found[0].type_text(found[1]) if alias and found else text  # type: ignore[arg-type]
        if isinstance(kind, ast.BinOp):
            return f"{self.type_text(kind.left)} or {self.type_text(kind.right)}"
        if not isinstance(kind, ast.Subscript):
            return text
        head, inner = ast.unparse(kind.value), kind.slice
        parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
        if head == "Literal":
            return " | ".join(str(ast.literal_eval(part)) for part in parts)
        if head == "Annotated":
            call = parts[1]
            if ast.unparse(call).startswith("Names("):
                return self.type_text(parts[0])
            given = {w.arg: w.value for w in getattr(call, "keywords", ()) if w.arg}
            known = {k: ast.literal_eval(v) for k, v in given.items() if _literal(v)}
            return _bounded(self.type_text(parts[0]), Range(**known))
        if head == "tuple":
            return f"list of {self.type_text(parts[0])}"
        return text


def _bounded(kind: str, bounds: Range) -> str:
    return kind if str(bounds) == str(Range()) else f"{kind} {bounds}"


def _literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return True


@cache
def meanings() -> dict[str, str]:
    """Return the shipped table."""
    path = Path(__file__).with_suffix(".yaml")
    return dict(read_yaml(path.read_text("utf-8"), str(path)))


def documented(docstring: str, key: str) -> str:
    """Return what a docstring says about a key: the row of a table that begins with it, or the sentence with it in
    backticks."""
    plain, names, begin = list[str](), list[str](), 0
    rows: dict[str, str] = {}
    for line in docstring.splitlines():
        row = re.match(r" *((?:\w+, )*\w+) {2,}(\S.*)", line)
        if row:
            names, begin = row[1].split(", "), row.start(2)
            rows |= dict.fromkeys(names, row[2])
        elif names and begin and line.startswith(" " * begin):
            rows |= {name: f"{rows[name]} {line.strip()}" for name in names}
        else:
            names = []
            plain.append(line)
    if key in rows:
        return rows[key]
    if key in meanings():
        return meanings()[key]
    flat = " ".join(" ".join(plain).partition(">>>")[0].split())
    sentences = re.split(r"(?<!Dr[.])(?<=[.:;]) (?=[A-Z`])", flat)
    found = next((s.rstrip(".:;") for s in sentences if re.search(rf"`{key}[`= ]", s)), "")
    return textwrap.shorten(found, 160, placeholder=" ...")


def keys_of(kind: str, name: str) -> list[Key]:
    """Return the keys of a shipped stage, algorithm, task, reward or recipe, or of a user's FILE.py:NAME."""
    place = code_place(name)
    if place is None and name not in catalogue.names(kind):
        raise unknown(kind, name, catalogue.names(kind), [kind])
    path = place[0] if place else HOME / catalogue.KINDS[kind] / f"{name}.py"
    require(path.is_file(), f"{kind} file '{path}' does not exist")
    source, wanted = Source.of(path), place[1] if place else name
    if kind == "reward" and name == "compose":
        return list(COMPOSE)
    if kind == "reward" and name == "judge":
        options = source.keys("_asking.EndpointSettings").values()
        return [*options, *(_parameters(source, "check_options") or ())]
    if (parameters := _parameters(source, wanted)) is not None:
        return [key for key in parameters if kind != "reward" or key.name not in TEXTS]
    own = owner_of(source, kind, wanted)
    return list(source.keys(own.name).values()) if own else []


def owner_of(source: Source, kind: str, name: str) -> ast.ClassDef | None:
    """Return the class of a file whose fields are the keys: the one of this name, or the first public one."""
    classes = [node for node in source.tree.body if isinstance(node, ast.ClassDef)]
    public = [node for node in classes if node.name[0] != "_" and node.bases]
    plain = name.replace("_", "").lower()
    own = [one for one in public if one.name.lower().removesuffix(kind) == plain]
    return next(iter(own or public), None)


def _parameters(source: Source, name: str) -> list[Key] | None:
    """Return the parameters of the function of this name, or None without one."""
    for node in source.tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            given, text = node.args, ast.get_docstring(node) or ""
            args = [*given.posonlyargs, *given.args]
            defaults = [None] * (len(args) - len(given.defaults)) + list(given.defaults)
            pairs = [*zip(args, defaults, strict=True)]
            pairs += list(zip(given.kwonlyargs, given.kw_defaults, strict=True))
            return [
                source.key(a.arg, a.annotation or ast.Name("Any"), default, meaning)
                for a, default in pairs
                for meaning in [meanings().get(f"{name}.{a.arg}") or documented(text, a.arg)]
            ]
    return None


def lines(kind: str, name: str, nested: bool = True) -> Iterator[str]:
    """Yield all keys of one entry; if `nested`, with those of its groups."""
    for key in keys_of(kind, name):
        yield from key.lines(nested=nested)


def recipe_lines(recipe: str, stages: Mapping[str, str]) -> Iterator[str]:
    """Yield the keys of `posttrain run RECIPE`: its own, those of every run, and those of its stages, given as name: kind."""
    if recipe in catalogue.names("recipe") or code_place(recipe):
        yield "keys of the recipe:"
        yield from lines("recipe", recipe)
    yield "keys of every run:"
    for key in Source.of(HOME / "config.py").keys("Settings").values():
        if key.name not in ("recipe", "name", "trust"):
            yield from key.lines(nested=False)
    for kind in dict.fromkeys(stages.values()):
        named = [name for name, one in stages.items() if one == kind]
        yield f"keys of {kind} stages, here {', '.join(named)}; as in {named[-1]}.KEY=VALUE:"
        yield from lines("stage", kind)
