"""A channel of messages that keeps what was emitted, and shows nothing."""

from __future__ import annotations

from typing import Any

from posttrain.events import Event, Events


class Emitted(Events):
    def __init__(self) -> None:
        super().__init__(show=lambda event: None)
        self.all: list[Event] = []
        self.subscribe(self.all.append)

    @property
    def texts(self) -> list[str]:
        return [event.text for event in self.all]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [{"stage": e.stage, "step": e.step, "text": e.text, **e.data} for e in self.all if e.kind == kind]
