"""Which groups may be begun and which are trained on next, where generation goes on while the model learns.

A step trains on `batch` groups. A group that was begun with the weights of version i is trained on at version i + max_staleness at the
latest: every one of them, not most. Nothing is dropped for its age, so that long answers are trained on as often as they are begun.

    begun and not trained      <= (max_staleness + 1) * batch
    of those, due within k steps after the next one  <= k * batch,  for every k

The first is kept by beginning no more, the second by waiting, before a step, until enough of the oldest have finished. With
max_staleness 0 that is synchronous training: all are begun with the present weights, and all are waited for.

A step that asks for k groups more (dynamic sampling) begins k and takes the k oldest: what is left after it is as many as without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from posttrain.errors import Checked, Count, Whole
from posttrain.types import JSON


@dataclass(frozen=True, kw_only=True)
class Staleness(Checked):
    """How many groups a step has, and how many versions may come between the beginning of a group and the step that trains on it."""

    batch: Count
    max_staleness: Whole = 0

    @property
    def room(self) -> int:
        return (self.max_staleness + 1) * self.batch


@dataclass(frozen=True, slots=True)
class Begun:
    """A group that was begun: its number in the stream of problems, the version it began with, and how often it was begun."""

    number: int
    version: int
    attempt: int


class Admission:
    """The state of all groups between the stream of problems and the trainer. `version` is the number of steps that were trained."""

    def __init__(self, settings: Staleness):
        self.settings, self.version, self.drawn = settings, 0, 0
        self.running: dict[int, Begun] = {}  # by number
        self.finished: dict[int, Begun] = {}
        # of a failed worker, or of an earlier attempt of the run: begun again before new ones
        self.waiting: list[int] = []
        self.attempts = 0
        self.asked = 0  # groups that the step being put together wants beyond `batch`

    @property
    def outstanding(self) -> int:
        return len(self.running) + len(self.finished) + len(self.waiting)

    def begin(self) -> Begun | None:
        """The next group to generate; None while there are enough."""
        if self.waiting:
            number = self.waiting.pop(0)
        elif self.outstanding < self.settings.room + self.asked:
            number, self.drawn = self.drawn, self.drawn + 1
        else:
            return None
        self.attempts += 1
        self.running[number] = made = Begun(number, self.version, self.attempts)
        return made

    def finish(self, group: Begun) -> bool:
        """A group is complete. False where it is not wanted any more: it was begun again meanwhile."""
        if self.running.get(group.number) != group:
            return False
        self.finished[group.number] = self.running.pop(group.number)
        return True

    def fail(self, group: Begun) -> None:
        """The worker of a group is gone: it is begun again, with the weights of then."""
        if self.running.get(group.number) == group:
            del self.running[group.number]
            self.waiting.append(group.number)

    def ask(self, count: int) -> None:
        """The step being put together wants so many groups more: as many may be begun."""
        self.asked += count

    def next_step(
        self, count: int | None = None, taken: Sequence[Begun] = ()
    ) -> tuple[Begun, ...] | None:
        """The groups of the next step, oldest first; None while they must be waited for. With `count` as many as were asked for
        besides those it has `taken`."""
        batch, room = self.settings.batch, self.settings.max_staleness
        count = batch if count is None else count
        ready = [one for one in self.finished.values() if one not in taken]
        if len(ready) < count:
            return None
        ready.sort(key=lambda one: (one.version, one.number))
        chosen = ready[:count]
        left = [one.version for one in (*self.running.values(), *ready[count:])]
        # begun again with the present weights, at the earliest
        left += [self.version] * len(self.waiting)
        for later in range(room + 1):  # due within so many steps after this one
            due = sum(version + room <= self.version + later for version in left)
            if due > later * batch:
                return None
        return tuple(chosen)

    def trained(self, groups: Sequence[Begun]) -> None:
        """A step was made on these groups."""
        for group in groups:
            del self.finished[group.number]
        self.version, self.asked = self.version + 1, 0

    def state(self) -> JSON:
        """For a checkpoint. What is running cannot be saved: it is begun again from its first turn."""
        again = [*self.waiting, *sorted(self.running)]
        kept = [asdict(group) for group in self.finished.values()]
        return {"version": self.version, "drawn": self.drawn, "again": again, "finished": kept}

    def restore(self, state: JSON) -> None:
        """Go on as a checkpoint says. What workers are still at is of another attempt, and is not taken."""
        self.version, self.drawn = state["version"], state["drawn"]
        self.waiting = list(state["again"])
        self.finished = {row["number"]: Begun(**row) for row in state["finished"]}
        self.running, self.asked = {}, 0
