"""Chooses the next problems: levels that rise as the policy masters them, each with a resumable stream of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from posttrain.data.stream import Stream, philox
from posttrain.errors import Checked, Count, Range, require
from posttrain.types import JSON


@dataclass(frozen=True, kw_only=True)
class Curriculum(Checked):
    """Problems come from the current level, and a share `review` of them from lower levels. When the mean solve rate of the last
    `window` problems of the current level reaches `threshold`, the next level opens. `start = 0` begins at the lowest."""

    where: ClassVar[str] = "curriculum: "

    start: int = 0
    threshold: Annotated[float, Range(gt=0, le=1)] = 0.8
    window: Count = 32
    review: Annotated[float, Range(ge=0, lt=1)] = 0.25


class CurriculumState:
    """The position of a curriculum in the levels of a task. `sizes` are the numbers of problems of the levels."""

    def __init__(
        self, levels: Sequence[int], sizes: Sequence[int], settings: Curriculum, seed: int
    ):
        known = settings.start == 0 or settings.start in levels
        require(known, f"curriculum: start must be one of the levels {list(levels)}")
        self.levels, self.settings, self.seed = list(levels), settings, seed
        self.streams = [Stream(size, seed + 1000003 * n) for n, size in enumerate(sizes)]
        self.top = self.levels.index(settings.start) if settings.start else 0
        self.recent: list[float] = []
        self.drawn = 0

    @property
    def level(self) -> int:
        return self.levels[self.top]

    def draw(self, count: int) -> list[tuple[int, int]]:
        """The next `count` problems as (level, index)."""
        chosen = []
        for _ in range(count):
            word, pick = philox("curriculum", self.seed, counter=self.drawn).random_raw(2).tolist()
            below = self.top > 0 and word / 2**64 < self.settings.review
            number = pick % self.top if below else self.top
            chosen.append((self.levels[number], self.streams[number].take(1)[0]))
            self.drawn += 1
        return chosen

    def observe(self, level: int, solved: float) -> bool:
        """Record the share of solved samples of a problem. Returns True if this opened the next level."""
        if level != self.level:
            return False
        self.recent = [*self.recent, solved][-self.settings.window :]
        full = len(self.recent) == self.settings.window
        mastered = full and sum(self.recent) / len(self.recent) >= self.settings.threshold
        if not mastered or self.top + 1 == len(self.levels):
            return False
        self.top += 1
        self.recent = []
        return True

    def state(self) -> JSON:
        streams = [stream.state() for stream in self.streams]
        return {"top": self.top, "recent": self.recent, "drawn": self.drawn, "streams": streams}

    def restore(self, state: JSON) -> None:
        self.top, self.recent, self.drawn = state["top"], list(state["recent"]), state["drawn"]
        same = len(state["streams"]) == len(self.streams)
        require(same, "cannot resume the curriculum: the task's levels have changed")
        for stream, saved in zip(self.streams, state["streams"], strict=True):
            stream.restore(saved)
