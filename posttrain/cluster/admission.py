"""Decides which groups may start and which are trained on next, when generation runs ahead of training.

A step trains on `batch` groups. A group that started with weights of version i is trained on at version i + max_staleness at the
latest. This holds for every group. No group is dropped for its age, so long answers are trained on as often as they are started.

    started and not trained on                       <= (max_staleness + 1) * batch
    of those, due within k steps after the next one  <= k * batch,  for every k

To keep the first bound, no further groups start. To keep the second, a step waits until enough of the oldest groups have finished.
With max_staleness 0 this is synchronous training: all groups start with the current weights, and the step waits for all of them.

A step that asks for k more groups (dynamic sampling) starts k and takes the k oldest, so as many groups remain after it as without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from posttrain.errors import Checked, Count, Whole
from posttrain.types import JSON


@dataclass(frozen=True, kw_only=True)
class Staleness(Checked):
    """The number of groups in a step, and how many versions a group may be older than the step that trains on it."""

    batch: Count
    max_staleness: Whole = 0

    @property
    def room(self) -> int:
        return (self.max_staleness + 1) * self.batch


@dataclass(frozen=True, slots=True)
class Begun:
    """A group that was started: its number in the stream of problems, its weight version at the start, and how often it was
    started."""

    number: int
    version: int
    attempt: int


class Admission:
    """The state of all groups between the stream of problems and the trainer. `version` is the number of finished training steps."""

    def __init__(self, settings: Staleness):
        self.settings, self.version, self.drawn = settings, 0, 0
        self.running: dict[int, Begun] = {}  # by number
        self.finished: dict[int, Begun] = {}
        # groups of a failed worker, or of an earlier attempt of the run; started before new ones
        self.waiting: list[int] = []
        self.attempts = 0
        self.asked = 0  # groups that the step being collected wants in addition to `batch`

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
        """Mark a group as complete. False if it is not needed any more, because it was restarted meanwhile."""
        if self.running.get(group.number) != group:
            return False
        self.finished[group.number] = self.running.pop(group.number)
        return True

    def fail(self, group: Begun) -> None:
        """Handle the failure of a group's worker: the group will restart, with the weights of that time."""
        if self.running.get(group.number) == group:
            del self.running[group.number]
            self.waiting.append(group.number)

    def ask(self, count: int) -> None:
        """Allow `count` more groups, because the step being collected asks for more."""
        self.asked += count

    def next_step(
        self, count: int | None = None, taken: Sequence[Begun] = ()
    ) -> tuple[Begun, ...] | None:
        """The groups of the next step, oldest first; None while they are not finished. With `count`, this many further groups, in
        addition to `taken`."""
        batch, room = self.settings.batch, self.settings.max_staleness
        count = batch if count is None else count
        ready = [one for one in self.finished.values() if one not in taken]
        if len(ready) < count:
            return None
        ready.sort(key=lambda one: (one.version, one.number))
        chosen = ready[:count]
        left = [one.version for one in (*self.running.values(), *ready[count:])]
        # they restart with the current weights at the earliest
        left += [self.version] * len(self.waiting)
        for later in range(room + 1):  # due within this many steps after the next one
            if sum(version + room <= self.version + later for version in left) > later * batch:
                return None
        return tuple(chosen)

    def trained(self, groups: Sequence[Begun]) -> None:
        """Called after a step was trained on these groups."""
        for group in groups:
            del self.finished[group.number]
        self.version, self.asked = self.version + 1, 0

    def state(self) -> JSON:
        """The state for a checkpoint. Running groups cannot be saved; they restart from their first turn."""
        again = [*self.waiting, *sorted(self.running)]
        kept = [asdict(group) for group in self.finished.values()]
        return {"version": self.version, "drawn": self.drawn, "again": again, "finished": kept}

    def restore(self, state: JSON) -> None:
        """Restore a checkpoint's state. Groups that workers still generate belong to another attempt and are ignored."""
        self.version, self.drawn = state["version"], state["drawn"]
        self.waiting = list(state["again"])
        self.finished = {row["number"]: Begun(**row) for row in state["finished"]}
        self.running, self.asked = {}, 0
