"""What a judge is asked, the form in which it must answer, and the cache of its answers."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from posttrain.types import JSON

Messages = Sequence[JSON]  # {"role": ..., "content": text or a list of parts}


@dataclass(frozen=True, slots=True)
class Form:
    """The only replies there are: a JSON object of one field that holds one of `options`, or a list of `count` of them.

    >>> Form("verdict", ("A", "B")).places()
    [['{"verdict": "A"}', '{"verdict": "B"}']]
    >>> Form("scores", (1, 10), count=2).places()
    [['{"scores": [1,', '{"scores": [10,'], [' 1]}', ' 10]}']]
    """

    field: str
    options: tuple[JSON, ...]
    count: int = 0  # 0: the option itself and no list

    def places(self) -> list[list[str]]:
        """The reply place by place, each with the texts it may hold. None of a place begins another, so that their probabilities
        are those of different replies."""
        opening = json.dumps({self.field: 0})[:-2]
        texts = [json.dumps(option) for option in self.options]
        if not self.count:
            return [[f"{opening}{text}}}" for text in texts]]
        starts = [f"{opening}[", *[" "] * (self.count - 1)]
        ends = [*[","] * (self.count - 1), "]}"]
        return [
            [start + text + end for text in texts] for start, end in zip(starts, ends, strict=True)
        ]

    def schema(self) -> JSON:
        """The same as JSON schema, for servers that can hold a model to one."""
        field: JSON = {"enum": list(self.options)}
        if self.count:
            field = {
                "type": "array",
                "items": field,
                "minItems": self.count,
                "maxItems": self.count,
            }
        parts = {"properties": {self.field: field}, "required": [self.field]}
        return {"type": "object", **parts, "additionalProperties": False}


class Asking(Protocol):
    """Answers chat messages: an endpoint, or a model in this process."""

    def ask(self, conversations: Sequence[Messages], form: Form) -> list[str | None]:
        """The reply to each conversation, in order; None where there is none."""
        ...


@dataclass(slots=True)
class Usage:
    """What was asked and what it cost, summed over a process."""

    requests: int = 0
    cached: int = 0
    retries: int = 0
    failures: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def row(self) -> dict[str, JSON]:
        """As a stage's result keeps it: what is not 0."""
        return {key: value for key, value in asdict(self).items() if value}


@dataclass(frozen=True, slots=True)
class Replies:
    """Replies on disk, one file each, named by a hash of all that decides them. "": none are kept."""

    folder: str

    def place(self, key: JSON) -> Path:
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        return Path(self.folder) / name[:2] / f"{name}.json"

    def recall(self, key: JSON) -> str | None:
        if not self.folder:
            return None
        try:
            text = json.loads(self.place(key).read_text("utf-8"))["text"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return text if isinstance(text, str) else None

    def remember(self, key: JSON, text: str) -> None:
        """Written to a temporary file and renamed: another process never reads half of it."""
        if not self.folder:
            return
        place = self.place(key)
        place.parent.mkdir(parents=True, exist_ok=True)
        partial = place.with_suffix(f".{os.getpid()}.tmp")
        partial.write_text(json.dumps({"text": text}), "utf-8")
        partial.replace(place)
