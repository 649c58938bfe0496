"""Simulates the asynchronous loop on a virtual clock: rollout workers, a trainer, weight updates, crashes and resumes, all determined
by a seed.

It runs no model and no process: durations are random, and `Admission` makes the decisions, as in a real run. A run of a few steps
takes less than a millisecond, so tests can check thousands of interleavings for events that must never happen. With rates that were
measured on one GPU, it estimates throughput and staleness.

    report = simulate(Plan(steps=100, batch=64, max_staleness=1, workers=8, generate=40.0, train=60.0))
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Annotated

from posttrain.cluster.admission import Admission, Begun, Staleness
from posttrain.errors import Checked, Count, NotNegative, Positive, Range, Share, Whole
from posttrain.types import JSON

ROUNDS = 4  # how often a step may ask for groups
MANY_EVENTS = 1_000  # events a step: crashes continue even if nothing else happens
DEADLOCK = "nothing is left that could happen, and the run is not at its end"


class Broken(AssertionError):
    """An event that must never happen: a group was lost, trained on twice or too late, or the run made no progress."""


@dataclass(frozen=True, kw_only=True)
class Plan(Checked):
    """A run of `batch` groups a step and `workers` that each generate up to `slots` groups at once. Durations are mean seconds:
    `generate` of a group, whose lengths vary by `spread` (of the logarithm), `train` of a step, `publish` of new weights. Crash
    probabilities are per second."""

    where = "simulator: "

    steps: Count = 10
    batch: Count = 8
    max_staleness: Whole = 0
    workers: Count = 2
    slots: Count = 4
    generate: Positive = 1.0
    spread: NotNegative = 0.5
    train: Positive = 1.0
    publish: NotNegative = 0.0
    # share of groups without a learning signal, which a step replaces by others
    refills: Share = 0.0
    restarts: bool = False  # restart groups at new weights instead of continuing them
    checkpoint_every: Annotated[int, Range(ge=1)] = 5
    worker_crashes: Share = 0.0
    trainer_crashes: Share = 0.0
    recovery: NotNegative = 5.0  # seconds until a crashed worker or trainer has restarted


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a completed run: virtual seconds, groups trained on per second, the staleness of each trained group, and the
    share of time that the trainer and the workers were busy."""

    seconds: float
    trained: tuple[int, ...]  # numbers of the groups, in training order
    staleness: tuple[int, ...]
    crashes: int
    begun: int
    train_busy: float
    generate_busy: float

    @property
    def rate(self) -> float:
        return len(self.trained) / self.seconds


@dataclass(eq=False)
class Simulation:
    """One run. Events happen in the order of their times; events at the same time are in random order."""

    plan: Plan
    seed: int
    clock: float = 0.0
    events: list[tuple[float, float, int, Callable[[], None]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        plan = self.plan
        self.chance, self.order, self.happened = random.Random(self.seed), count(), count()
        self.admission = Admission(Staleness(batch=plan.batch, max_staleness=plan.max_staleness))
        self.at_work: list[dict[int, Begun]] = [{} for _ in range(plan.workers)]  # by attempt
        self.alive = [True] * plan.workers
        self.training = False
        self.taken: tuple[Begun, ...] = ()  # by the step that is being collected or trained
        self.wanted, self.rounds = plan.batch, 0
        self.paused = False  # while new weights are published
        self.life = 0  # counts restarts of the trainer; events of an earlier life are ignored
        self.trained: list[int] = []
        self.staleness: list[int] = []
        self.saved: tuple[JSON, int] = (self.admission.state(), 0)
        self.crashes, self.train_busy, self.generate_busy = 0, 0.0, 0.0

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.clock + seconds, self.chance.random(), next(self.order), what))

    def run(self) -> Report:
        plan = self.plan
        for worker in range(plan.workers):
            self._crash_later(plan.worker_crashes, lambda worker=worker: self._worker_crash(worker))  # type: ignore[misc]
        self._crash_later(plan.trainer_crashes, self._trainer_crash)
        self._go_on()
        while self.admission.version < plan.steps:
            if not self.events or next(self.happened) > MANY_EVENTS * plan.steps:
                raise Broken(DEADLOCK)
            self.clock, _, _, what = heapq.heappop(self.events)
            what()
            self._go_on()
            self._check()
        return Report(
            self.clock,
            tuple(self.trained),
            tuple(self.staleness),
            self.crashes,
            self.admission.attempts,
            self.train_busy / self.clock,
            self.generate_busy / (self.clock * plan.workers * plan.slots),
        )

    def _go_on(self) -> None:
        """Start whatever can start: a step, and groups in free slots."""
        if not (self.training or self.paused):
            self._collect()
        while not self.paused and (worker := self._free()) is not None:
            group = self.admission.begin()
            if group is None:
                return
            self.at_work[worker][group.attempt] = group
            seconds = self._length()
            self.after(seconds, lambda w=worker, g=group, s=seconds: self._finish(w, g, s))  # type: ignore[misc]

    def _collect(self) -> None:
        """Take groups for the next step. Start it when it asks for no more."""
        chosen = self.admission.next_step(self.wanted, self.taken)
        if chosen is None:
            return
        self.taken += chosen
        self.rounds += 1
        self.wanted = sum(self.chance.random() < self.plan.refills for _ in chosen)
        if self.wanted and self.rounds < ROUNDS:
            self.admission.ask(self.wanted)
            return
        self.training, self.rounds, self.wanted = True, 0, self.plan.batch
        seconds = self.plan.train * self.chance.uniform(0.9, 1.1)
        groups, life = self.taken, self.life
        self.after(seconds, lambda: self._step(groups, seconds, life))

    def _free(self) -> int | None:
        """The worker with the fewest groups among those with a free slot."""
        able = [n for n, up in enumerate(self.alive) if up and len(self.at_work[n]) < self.plan.slots]
        return min(able, key=lambda n: len(self.at_work[n]), default=None)

    def _length(self) -> float:
        spread = self.plan.spread
        return self.plan.generate * math.exp(self.chance.gauss(0.0, spread) - spread**2 / 2)

    def _finish(self, worker: int, group: Begun, seconds: float) -> None:
        if self.at_work[worker].pop(group.attempt, None) is not None:
            self.generate_busy += seconds
            self.admission.finish(group)

    def _step(self, groups: tuple[Begun, ...], seconds: float, life: int) -> None:
        if life != self.life:
            return
        for group in groups:
            self.staleness.append(self.admission.version - group.version)
            self.trained.append(group.number)
        self.admission.trained(groups)
        self.taken = ()
        self.training, self.train_busy = False, self.train_busy + seconds
        if self.admission.version % self.plan.checkpoint_every == 0:
            self.saved = self.admission.state(), len(self.trained)
        if self.plan.publish:
            self.paused = True
            self.after(self.plan.publish, lambda: self._published(life))

    def _published(self, life: int) -> None:
        if life != self.life:
            return
        self.paused = False
        if self.plan.restarts:
            for working in self.at_work:
                for group in working.values():
                    self.admission.fail(group)
                working.clear()

    def _crash_later(self, chance: float, crash: Callable[[], None]) -> None:
        if chance > 0:
            self.after(self.chance.expovariate(chance), crash)

    def _worker_crash(self, worker: int) -> None:
        """Restart the worker's groups, on other workers or on itself after it has recovered."""
        if self.alive[worker]:
            self.crashes, self.alive[worker] = self.crashes + 1, False
            for group in self.at_work[worker].values():
                self.admission.fail(group)
            self.at_work[worker].clear()
            self.after(self.plan.recovery, lambda: self._recovered(worker))
        self._crash_later(self.plan.worker_crashes, lambda: self._worker_crash(worker))

    def _recovered(self, worker: int) -> None:
        self.alive[worker] = True

    def _trainer_crash(self) -> None:
        """Go back to the last checkpoint. The weights no longer include training since then."""
        self.crashes, self.life = self.crashes + 1, self.life + 1
        state, length = self.saved
        self.admission.restore(state)
        del self.trained[length:], self.staleness[length:]
        self.training, self.paused = False, True  # until it has recovered
        self.taken, self.wanted, self.rounds = (), self.plan.batch, 0
        life = self.life
        self.after(self.plan.recovery, lambda: self._resumed(life))
        self._crash_later(self.plan.trainer_crashes, self._trainer_crash)

    def _resumed(self, life: int) -> None:
        if life == self.life:
            self.paused = False
            for working in self.at_work:  # groups from before the crash are not needed any more
                working.clear()

    def _check(self) -> None:
        """Check what must hold after every event."""
        admission, settings = self.admission, self.admission.settings
        if self.staleness and max(self.staleness) > settings.max_staleness:
            raise Broken(f"a group was trained on {max(self.staleness)} versions after it began")
        room = settings.room + admission.asked
        if admission.outstanding > room:
            raise Broken(f"{admission.outstanding} groups are begun, and there is room for {room}")
        open_groups = {*admission.running, *admission.finished, *admission.waiting}
        every = [*self.trained, *open_groups]
        if len(set(every)) != len(every):
            raise Broken("a group was trained on twice")
        if len(every) != admission.drawn:
            raise Broken("a group was drawn and is neither trained on nor begun")


def simulate(plan: Plan, seed: int = 0) -> Report:
    """Run a plan to its end. Raises `Broken` if something happens that must not."""
    return Simulation(plan, seed).run()
