"""Your own function: FILE.py:NAME, with type hints and a docstring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from posttrain import catalogue
from posttrain.errors import Positive, require
from posttrain.rewards._functions import note, same_function
from posttrain.tasks.tools.base import Signature, Tool
from posttrain.trust import PREFIX, code_place, elsewhere, known_as

_given: dict[str, Any] = {}  # this process's functions, by their name in settings


@dataclass(frozen=True)
class Function(Tool):
    """`function` names it, or your own `Tool`, which may keep state within an episode. A plain function is called in its own
    thread, so several calls may run at once; a coroutine runs in the event loop."""

    shorthand: ClassVar[str] = "function"
    blocks: ClassVar[bool] = True

    function: str
    limit: Positive = 30.0  # the time limit of one call, in seconds

    def __post_init__(self) -> None:
        super().__post_init__()
        made = self.made
        if not isinstance(made, Tool):
            Signature.of(made)

    @property
    def made(self) -> Any:
        """Return the function, or the tool."""
        if self.function.startswith(PREFIX):
            require(self.function in _given, elsewhere("tool", self.function, "function"))
            return _given[self.function]
        named = code_place(self.function) is not None
        require(named, f"a tool of yours is FILE.py:NAME, not {self.function!r}")
        found = catalogue.load("tool", self.function)
        if isinstance(found, type) and issubclass(found, Tool):
            return found()
        require(callable(found), f"tool {self.function}: it is no function")
        return found

    @property
    def seconds(self) -> float:
        return self.limit

    def begin(self) -> Callable[..., Any]:
        made = self.made
        begun: Callable[..., Any] = made.begin() if isinstance(made, Tool) else made
        return begun


def give(function: Any) -> Function:
    """Register a function, or a tool, of this process and return it as a setting."""
    fine = callable(function) or isinstance(function, Tool)
    require(fine, f"a tool is a function, not {function!r}")
    place = getattr(function, "__qualname__", type(function).__qualname__)
    module = getattr(function, "__module__", "")
    name = known_as(
        _given, f"{module}.{place}", lambda one: one == function or same_function(one, function)
    )
    _given[name] = function
    note(name, [function])
    return Function(name)
