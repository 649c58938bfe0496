"""Tools that a policy may call: Python functions with type hints and a docstring, which the model reads as a JSON schema."""

from __future__ import annotations

import inspect
import re
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin

from posttrain.errors import Checked, UserError, require
from posttrain.types import JSON

KINDS: dict[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    tuple: "array",
    dict: "object",
}
ACCEPTED = {name: kind for kind, name in KINDS.items()} | {"number": int | float, "array": list}
ARGUMENT = re.compile(r"\s{2,}(\w+)(?: \([^)]*\))?: (.+)")


class ToolError(Exception):
    """The message that the model reads in place of a result."""


class ToolFailure(Exception):
    """The tool itself failed. The model did not cause it, so its episode is not scored, and is counted."""


class Malformed(Exception):
    """A call that cannot be made as it is written."""


class Tool(Checked, ABC):
    """A frozen dataclass whose fields are its settings; every episode begins its own."""

    blocks: ClassVar[bool] = True  # it may take long, so it is called in its own thread

    @abstractmethod
    def begin(self) -> Callable[..., Any]:
        """Return the function that an episode calls, by its name, with type hints and a docstring. It may keep state between
        calls. If it raises `ToolError`, the model reads that instead of a result."""

    @property
    def ends(self) -> bool:
        """Return whether a call ends the episode, with its result as the answer."""
        return False

    @property
    def seconds(self) -> float:
        """Return the time limit of one call."""
        return 30.0

    def ready(self) -> tuple[str, ...]:
        """Prepare what calls need, or raise an error; returns lines to show."""
        Signature.of(self.begin())
        return ()


@dataclass(frozen=True, slots=True)
class Signature:
    """The description of a function for the model, and how its arguments are read."""

    name: str
    description: str
    parameters: Mapping[str, JSON]  # JSON schemas
    required: tuple[str, ...]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Signature:
        """Return the signature of a function. Raises an error if it has no docstring, or a parameter without a JSON type.

        >>> def add(a: int, b: int = 0) -> int:
        ...     '''Add two numbers.
        ...
        ...     Args:
        ...         a: the first
        ...     '''
        >>> Signature.of(add).parameters["a"]
        {'type': 'integer', 'description': 'the first'}
        """
        require(inspect.isroutine(function), f"a tool is a function (def), not {function!r}")
        name, text = function.__name__, inspect.getdoc(function) or ""
        where = f"tool {name}"
        require(text.strip(), f"{where}: the model reads its docstring; give it one")
        parsed = inspect.signature(function).parameters.values()
        try:
            hints = typing.get_type_hints(function)
        except Exception as error:  # a name that is not defined
            raise UserError(f"{where}: its type hints cannot be read: {error}") from None
        described = {m[1]: m[2].strip() for m in map(ARGUMENT.match, text.splitlines()) if m}
        parameters: dict[str, JSON] = {}
        for one in parsed:
            odd = "*args, **kwargs and positional-only parameters cannot be called"
            require(one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY), f"{where}: {odd}")
            require(one.name in hints, f"{where}: the parameter {one.name} needs a type hint")
            schema = _schema(hints[one.name], f"{where}: the parameter {one.name}")
            more = {"description": described[one.name]} if one.name in described else {}
            parameters[one.name] = {**schema, **more}
        required = tuple(one.name for one in parsed if one.default is one.empty)
        summary = re.split(r"\n\s*(?:Args|Arguments|Parameters|Returns|Raises):", text)[0].strip()
        return cls(name, summary, parameters, required)

    @property
    def schema(self) -> dict[str, JSON]:
        """Return the schema in the form of chat templates and OpenAI's interface."""
        properties = dict(self.parameters)
        whole = {"type": "object", "properties": properties, "required": [*self.required]}
        about = {"name": self.name, "description": self.description, "parameters": whole}
        return {"type": "function", "function": about}

    def __str__(self) -> str:
        """Return the signature as a line of Python.

        >>> print(Signature("add", "Add.", {"a": {"type": "integer"}}, ("a",)))
        add(a: integer): Add.
        """
        kinds = (f"{name}: {one.get('type', 'any')}" for name, one in self.parameters.items())
        return f"{self.name}({', '.join(kinds)}): {' '.join(self.description.split())}"

    def bind(self, given: Mapping[str, JSON] | str) -> dict[str, JSON]:
        """Return the arguments of a call; plain text is the first parameter. Raises `Malformed` if they do not fit."""
        if not given and not self.required:
            given = {}
        elif isinstance(given, str):
            if len(self.required) > 1 or not self.parameters:
                raise Malformed(f"{self.name} takes {', '.join(self.parameters) or 'nothing'}")
            first = (*self.required, *self.parameters)[0]
            given = {first: _read(given, self.parameters[first])}
        unknown = [name for name in given if name not in self.parameters]
        missing = [name for name in self.required if name not in given]
        for problem, names in (("has no argument", unknown), ("needs the argument", missing)):
            if names:
                raise Malformed(f"{self.name} {problem} {', '.join(map(str, names))[:80]}")
        for name, value in given.items():
            if problem := _unlike(value, self.parameters[name]):
                raise Malformed(f"{name} of {self.name} must be {problem}")
        return dict(given)


@dataclass(frozen=True)
class Plain(Tool):
    """A function, which all episodes call."""

    function: Any

    def begin(self) -> Callable[..., Any]:
        begun: Callable[..., Any] = self.function
        return begun


def _schema(hint: Any, where: str) -> dict[str, JSON]:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        texts = all(isinstance(i, str) for i in inner)
        return {**({"type": "string"} if texts else {}), "enum": [*inner]}
    if origin in (Union, UnionType):
        some = [i for i in inner if i is not NoneType]
        require(len(some) == 1, f"{where} has several types; give one")
        return _schema(some[0], where)
    kind = KINDS.get(origin or hint)
    known = "str, int, float, bool, list, dict and Literal can be called with JSON"
    if kind is None:
        raise UserError(f"{where} is {getattr(hint, '__name__', hint)}; {known}")
    items = [i for i in inner if i is not ...] if kind == "array" else []
    return {"type": kind, **({"items": _schema(items[0], where)} if items else {})}


def _read(text: str, schema: JSON) -> JSON:
    """Read a value that is written as plain text."""
    kind = schema.get("type")
    try:
        return int(text) if kind == "integer" else float(text) if kind == "number" else text
    except ValueError:
        return text


def _unlike(value: JSON, schema: JSON) -> str:
    """Return what a value must be, if it is something else; else ""."""
    if "enum" in schema:
        return "" if value in schema["enum"] else f"one of {', '.join(map(str, schema['enum']))}"
    kind = schema["type"]
    fine = isinstance(value, ACCEPTED[kind]) and (kind == "boolean" or not isinstance(value, bool))
    if fine and kind == "array" and "items" in schema:
        return next((f"an array of {p}" for v in value if (p := _unlike(v, schema["items"]))), "")
    return "" if fine else f"{'an' if kind[0] in 'aio' else 'a'} {kind}"
