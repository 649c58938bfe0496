"""The message channel of a run: the code that works emits events; terminal, files and trackers subscribe.

events = Events()                                  # without a console, messages go to stderr
events.subscribe(writer.record)                    # every event, also those without a text for a person
events.emit("memory", "token_budget is halved", "warning", stage="rl", step=3)
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from posttrain.types import JSON

Level = Literal["info", "warning", "stop"]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened once. `text` is for a person; an event without text is stored and not shown."""

    kind: str
    text: str = ""
    level: Level = "info"
    stage: str = ""
    step: int | None = None
    data: Mapping[str, JSON] = field(default_factory=dict)

    def line(self) -> str:
        r"""The line that a terminal shows.

        >>> Event("alarm", "kl: 6 nats\x07", "warning", stage="rl").line()
        'rl: warning: kl: 6 nats\\x07'
        """
        level = "" if self.level == "info" else f"{self.level}: "
        return printable(f"{self.stage}: {level}{self.text}" if self.stage else level + self.text)


Subscriber = Callable[[Event], None]


def printable(text: str, lines: bool = False) -> str:
    r"""Text that is safe to print in a terminal: control, format and unassigned characters become visible escapes.

    That covers ANSI sequences, bells, carriage returns that overwrite a line, bidirectional overrides and zero-width
    characters. `lines` keeps line ends and tabs.

    >>> printable("ok\x1b[31mred")
    'ok\\x1b[31mred'
    >>> printable("a\nb"), printable("a\nb", lines=True)
    ('a\\nb', 'a\nb')
    """
    kept = "\n\t" if lines else ""
    return "".join(
        c if c.isprintable() or c in kept or unicodedata.category(c) == "Zs" else ascii(c)[1:-1]
        for c in text
    )


def to_stderr(event: Event) -> None:
    sys.stderr.write(event.line() + "\n")
    sys.stderr.flush()


class Events:
    """Delivers each event to the terminal, if it has a text, and to every subscriber.

    `stage` and `step` are where the run is now: an event that names no place of its own gets this one.
    """

    def __init__(self, show: Subscriber = to_stderr) -> None:
        self.show, self.stage = show, ""
        self.step: int | None = None
        self._subscribers: list[Subscriber] = []

    def subscribe(self, subscriber: Subscriber) -> None:
        """Deliver every later event to the subscriber."""
        self._subscribers.append(subscriber)

    @contextmanager
    def shown_by(self, show: Subscriber) -> Iterator[None]:
        """Replace the function that shows messages, as a live panel must while it is on the screen."""
        before, self.show = self.show, show
        try:
            yield
        finally:
            self.show = before

    @contextmanager
    def at(self, stage: str, step: int | None = None) -> Iterator[None]:
        """Set the stage and step of events within the block."""
        before = self.stage, self.step
        self.stage, self.step = stage, step
        try:
            yield
        finally:
            self.stage, self.step = before

    def emit(
        self,
        kind: str,
        text: str = "",
        level: Level = "info",
        *,
        stage: str | None = None,
        step: int | None = None,
        data: Mapping[str, JSON] | None = None,
    ) -> None:
        """Deliver an event, with the current stage and step unless `stage` and `step` are given."""
        if stage is None:
            stage, step = self.stage, self.step if step is None else step
        event = Event(kind, text, level, stage, step, data or {})
        if text:
            self.show(event)
        for subscriber in self._subscribers:
            subscriber(event)
