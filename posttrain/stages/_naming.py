"""Types of settings that name models, reward models, data and stages. The checks before a run find these settings by the types of the
fields."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import chain
from typing import Annotated, Any, get_args, get_origin

from posttrain.errors import Checked, field_types


@dataclass(frozen=True, slots=True)
class Names:
    """Marks a setting whose text is a name. A model is an earlier stage, a directory or a hub name. Data is an earlier stage that
    writes it, or a file."""

    kind: str


ModelName = Annotated[str, Names("model")]
ScorerName = Annotated[str, Names("reward model")]
DataName = Annotated[str, Names("data")]
StageName = Annotated[str, Names("stage")]


@dataclass(frozen=True, kw_only=True)
class Naming(Checked):
    """Settings that may name models, reward models, data and stages; see `Names`."""

    def named(self, kind: str) -> list[tuple[str, str]]:
        """(key, name) of every name of one kind in these settings. Names in the settings of a task are not included."""
        own: type = type(self)
        hints = dict(field_types(own))
        given = [f for f in fields(self) if f.init and getattr(self, f.name) != f.default]
        words = ((f.name, _words(getattr(self, f.name), hints[f.name], kind)) for f in given)
        return [(key, word) for key, own_words in words for word in own_words]


def _words(value: Any, hint: Any, kind: str) -> Iterator[str]:
    """The texts in a setting that are names of one kind."""
    if isinstance(value, Naming):
        yield from (word for _, word in value.named(kind))
    elif get_origin(hint) is tuple:
        yield from chain(*(_words(one, get_args(hint)[0], kind) for one in value))
    elif Names(kind) in getattr(hint, "__metadata__", ()):
        yield value
