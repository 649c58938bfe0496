"""Your own function: FILE.py:NAME, with type hints and a docstring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from posttrain import catalogue
from posttrain.errors import Positive, require
from posttrain.rewards._functions import note, same_function
from posttrain.tasks.tools.base import Plain, Tool
from posttrain.trust import PREFIX, code_place, elsewhere, known_as

_given: dict[str, Any] = {}  # this process's functions, by their name in settings


@dataclass(frozen=True)
class Function(Tool):
    """`function` names it, or your own `Tool`, which may keep state within an episode. A plain function is called in its own
    thread, so several calls may run at once; a coroutine runs in the event loop."""

    shorthand: ClassVar[str] = "function"

    function: str
    limit: Positive | None = None  # seconds of one call; None: those of your Tool, or 30

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(made := self.made, Plain):
            made.ready()

    @property
    def made(self) -> Tool:
        """Return the tool, or the function as one."""
        if self.function.startswith(PREFIX):
            require(self.function in _given, elsewhere("tool", self.function, "function"))
            return _tool(_given[self.function])
        named = code_place(self.function) is not None
        require(named, f"a tool of yours is FILE.py:NAME, not {self.function!r}")
        return _tool(catalogue.load("tool", self.function))

    @property
    def ends(self) -> bool:
        return self.made.ends

    @property
    def seconds(self) -> float:
        return self.made.seconds if self.limit is None else self.limit

    def ready(self) -> tuple[str, ...]:
        return self.made.ready()

    def begin(self) -> Callable[..., Any]:
        return self.made.begin()


def _tool(found: Any) -> Tool:
    """Return a tool, an instance of a class of tools, or a function as a tool."""
    made = found() if isinstance(found, type) and issubclass(found, Tool) else found
    return made if isinstance(made, Tool) else Plain(made)


def give(function: Any) -> Function:
    """Register a function, or a tool, of this process and return it as a setting."""
    place = getattr(function, "__qualname__", type(function).__qualname__)
    module = getattr(function, "__module__", "")
    name = known_as(
        _given, f"{module}.{place}", lambda one: one == function or same_function(one, function)
    )
    _given[name] = function
    made = Function(name)  # or it is refused
    note(name, [function])
    return made
