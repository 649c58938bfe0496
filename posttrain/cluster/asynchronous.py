"""Asynchronous rollouts: sampling continues while the model is trained. A step trains on groups that were started up to
`max_staleness` steps before it.

The trainer's thread decides everything: which problems are drawn, which groups are begun and which are trained on (`Admission`). A
second thread, the producer, runs episodes and is the only one that uses the sampler; they exchange groups through a queue. A sampler
in another process works while the model learns, with weights that were published. The engine of this process, which reads the weights
that are trained, stands still meanwhile: responses that a step did not wait for continue in the next one.

Several processes that train decide the same, each by itself: they begin the same groups, each runs the episodes of its own share, and
what has finished comes to all of them in the same order.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import chain, count
from queue import Empty, SimpleQueue
from typing import Any, Literal

from posttrain.algorithms.base import Algorithm, State
from posttrain.cluster.admission import Admission, Begun, Staleness
from posttrain.cluster.remote import RemoteSampler
from posttrain.collect import Collected, Rollouts
from posttrain.engine.random import derive
from posttrain.episodes import Episodes
from posttrain.errors import GuardStop
from posttrain.system.world import current
from posttrain.tasks._rollouts import group_of_rows, rollout_row
from posttrain.train.pack import token_versions
from posttrain.train.processes import LONGEST_WAIT
from posttrain.turns import Seconds
from posttrain.types import JSON, Group, Metric, Problem, Sampler, Sampling

SESSIONS = 1 << 24  # conversations that a group may have
POLL_SECONDS = 0.005  # how long a poll may wait for a completion: a publish waits for the poll
CHECK_SECONDS = 1.0  # between two looks at a producer that is waited for
# how long a process waits for its own groups before it asks the others for theirs
SHARE_SECONDS = 0.02
InFlight = Literal["continue", "keep", "restart"]
Together = tuple[Begun, ...]  # groups whose episodes run together
Made = Sequence[Sequence[Group]]  # of each problem: one group for each role


@dataclass(frozen=True, slots=True)
class Drawn:
    """A problem that was drawn. Its randomness depends on (seed, step, attempt, place), as in a synchronous run."""

    problem: Problem
    level: int
    index: int
    step: int
    attempt: int
    place: int

    def row(self) -> list[int]:
        return [self.level, self.index, self.step, self.attempt, self.place]


class Producer:
    """Runs episodes in a thread of its own. Only this thread uses the sampler."""

    def __init__(self, sampler: Sampler, longest_wait: float = LONGEST_WAIT):
        self.sampler, self.longest_wait = sampler, longest_wait
        self.results: SimpleQueue[tuple[Together, Made | BaseException]] = SimpleQueue()
        self.numbers = count()
        # by number; sessions of a unit begin at its number times SESSIONS
        self.units: dict[int, Episodes] = {}
        self.tasks: dict[Together, asyncio.Task[Made]] = {}
        self.idle = self.reported = 0.0  # seconds in which nothing was asked of the sampler
        self.active = time.monotonic()  # when a group was begun or a turn came last
        self.error: BaseException | None = None
        self.ends = False
        self.loop = asyncio.new_event_loop()
        self.submitted = asyncio.Event()
        self.thread = threading.Thread(target=self._run, name="producer", daemon=True)
        self.thread.start()

    # --- called by the trainer's thread ---------------------------------------------------------------------------------

    def begin(self, groups: Together, make: Callable[[int], Episodes]) -> None:
        """Run the episodes of some groups. `make` creates them, given the number of their first session."""
        self.active = time.monotonic()
        self._soon(self._begin, groups, make)

    def cancel(self, groups: Together) -> None:
        self._soon(self._cancel, groups)

    def next(self, seconds: float) -> tuple[Together, Made]:
        """The next finished groups, or none if there are none within `seconds`. Raises errors of their episodes."""
        try:
            groups, made = self.results.get(timeout=seconds)
        except Empty:
            self._check()
            return (), ()
        if isinstance(made, BaseException):
            raise self.error or made
        return groups, made

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Give the caller exclusive use of the sampler: the thread pauses between two polls."""
        entered, left = threading.Event(), threading.Event()

        def stand_still() -> None:
            entered.set()
            left.wait()

        self.active = time.monotonic()
        self._soon(stand_still)
        while not entered.wait(CHECK_SECONDS):
            self._check()
        try:
            yield
        finally:
            left.set()
            self.active = time.monotonic()

    def idle_seconds(self) -> float:
        """How long the sampler was idle since the last call."""
        before, self.reported = self.reported, self.idle
        return self.reported - before

    def close(self) -> None:
        """Stop the thread and its episodes."""
        if self.thread.is_alive():
            self._soon(self._end)
            self.thread.join(10)

    def _check(self) -> None:
        """Raise an error if the producer will not return anything any more."""
        if self.error is not None:
            raise self.error
        if not self.thread.is_alive():
            raise GuardStop("the thread that generates has ended")
        silent = time.monotonic() - self.active if self.tasks else 0.0
        if silent > self.longest_wait:
            where = f"the sampler has finished nothing for {silent:.0f} s, and groups wait for it"
            raise GuardStop(f"{where}; resume the run, or allow more with POSTTRAIN_WAIT (seconds)")

    def _soon(self, what: Callable[..., None], *given: Any) -> None:
        if not self.loop.is_closed():  # otherwise `_check` raises the error
            self.loop.call_soon_threadsafe(what, *given)

    # --- in the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self.loop.run_until_complete(self._pump())
        self.loop.close()
        if self.error is not None:
            self.results.put(((), self.error))

    async def _pump(self) -> None:
        """Poll the sampler for all episodes, while any of them awaits a turn."""
        try:
            while not self.ends:
                await asyncio.sleep(0)  # coroutines go on as far as they can
                if any(unit.turns.submitted for unit in self.units.values()):
                    self._poll()
                    continue
                began = time.perf_counter()
                await self.submitted.wait()
                self.submitted.clear()
                self.idle += time.perf_counter() - began
        except BaseException as error:  # raised again where somebody waits
            self.error = error
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)

    def _poll(self) -> None:
        for request, completion in self.sampler.poll(POLL_SECONDS):
            self.active = time.monotonic()
            unit = self.units.get(request.session // SESSIONS)
            if unit is not None:  # it may have been cancelled
                unit.turns.receive([(request, completion)])
                unit.turns.changed.set()

    def _begin(self, groups: Together, make: Callable[[int], Episodes]) -> None:
        number = next(self.numbers)
        self.units[number] = unit = make(number * SESSIONS)
        self.tasks[groups] = task = self.loop.create_task(unit.run())
        task.add_done_callback(lambda done: self._finished(number, groups, done))

    def _finished(self, number: int, groups: Together, task: asyncio.Task[Made]) -> None:
        del self.units[number], self.tasks[groups]
        if not task.cancelled():
            self.results.put((groups, task.exception() or task.result()))

    def _cancel(self, groups: Together) -> None:
        if groups in self.tasks:
            self.tasks[groups].cancel()

    def _end(self) -> None:
        self.ends = True
        self.submitted.set()


class Asynchronous(Rollouts):
    """`Rollouts` that are sampled ahead of the trainer. `steps` is the number of steps of the run, after which no group is started.
    `in_flight` says whether groups in progress continue with new weights, their caches recomputed or kept, or are restarted.

    With `max_staleness` 0 the same requests are made in the same order as by `Rollouts`. Beyond it every problem that was drawn is
    trained on once, also in a run that was killed and resumed: the checkpoint holds the groups that are finished and the numbers of
    those that are not, which are begun again.
    """

    def __init__(
        self,
        *given: Any,
        staleness: Staleness,
        steps: int,
        in_flight: InFlight = "continue",
        longest_wait: float = LONGEST_WAIT,
        **more: Any,
    ):
        super().__init__(*given, **more)
        self.admission, self.steps, self.in_flight = Admission(staleness), steps, in_flight
        self.drawn: dict[int, Drawn] = {}  # by number: started and not trained on yet
        self.ready: dict[int, Sequence[Group]] = {}  # by number: finished groups
        self.taken: tuple[Begun, ...] = ()  # groups of the current step
        self.planned = 0  # problems drawn, those that a step asked for besides apart
        self.samples: Sequence[Sampling] = ()
        self.waited, self.longest_wait = 0.0, longest_wait
        self.running: Producer | None = None
        # of a sampler that reads the trainer's weights itself, for a process that replaces a failed one: held while they change
        self.changing: threading.Lock | None = getattr(self.sampler, "changing", None)
        # of a sampler in this process: stops it while the weights change, from the end of `collect` until `publish`
        self.pause: Callable[[], None] | None = getattr(self.sampler, "pause", None)
        self.learning = ExitStack()

    @property
    def producer(self) -> Producer:
        """The producer, started with the first step: before that there are no weights to sample with."""
        if self.running is None:
            self.running = Producer(self.sampler, self.longest_wait)
        return self.running

    @property
    def ahead(self) -> bool:
        return self.admission.settings.max_staleness > 0

    def collect(self, step: int, algorithm: Algorithm, state: State) -> Collected:
        self.waited = 0.0
        found = super().collect(step, algorithm, state)
        batch = found.batch
        age_T = (step - token_versions(found.groups, batch)).where(batch.mask_T, 0)
        metrics = [
            Metric("staleness/mean", age_T.sum(), batch.mask_T.sum()),
            Metric("queue", len(self.admission.finished) - len(self.taken), None),
            Metric("seconds/trainer_idle", self.waited, None),
            Metric("seconds/sampler_idle", self.producer.idle_seconds(), None),
        ]
        if batch.sequences:
            metrics.append(Metric("staleness/max", age_T.max(), None, largest=True))
        if self.in_flight == "keep":  # tokens after older ones have read their cache
            old_N, of_T = age_T.new_zeros(batch.sequences), batch.sequence_T
            age_T = old_N.scatter_reduce(0, of_T, age_T, "amax")[of_T].where(batch.mask_T, 0)
        if self.ahead:
            batch = batch.replace(stale_T=age_T > 0)
        if self.changing is not None:
            self.changing.acquire(timeout=self.longest_wait)
        if self.pause is not None:
            self.learning.enter_context(self.producer.exclusive())
            self.pause()
        return Collected(batch, found.groups, (*found.metrics, *metrics))

    def sample_groups(
        self, step: int, attempt: int, wanted: int, samples: Sequence[Sampling], seconds: Seconds
    ) -> Sequence[Group]:
        """Wait until enough groups are finished, and take the oldest."""
        began, self.samples = time.perf_counter(), samples
        if attempt:
            self.admission.ask(wanted)
            self.begin([(step, attempt, place) for place in range(wanted)])
        else:
            self.begin_planned()
        while (chosen := self.admission.next_step(wanted, self.taken)) is None:
            self.receive()
        self.taken += chosen
        self.waited += time.perf_counter() - began
        seconds.generate = self.waited
        return [group for one in chosen for group in self.ready[one.number]]

    def begin_planned(self) -> None:
        """Start as many groups as there is room for, up to the end of the run."""
        batch = self.admission.settings.batch
        end = self.steps * batch
        last = min(end, self.planned + self.admission.settings.room - self.admission.outstanding)
        drawn = [(n // batch, 0, n % batch) for n in range(self.planned, last)]
        self.planned = max(self.planned, last)
        self.begin(drawn)

    def begin(self, places: Sequence[tuple[int, int, int]]) -> None:
        """Restart groups that must be restarted, and start new ones with these steps, attempts and places."""
        begun = []
        left = iter(places)
        for _ in range(len(self.admission.waiting) + len(places)):
            group = self.admission.begin()
            assert group is not None
            if group.number not in self.drawn:
                ((level, index),) = self.curriculum_state.draw(1)
                problem = self.problems[level][index]
                self.drawn[group.number] = Drawn(problem, level, index, *next(left))
            begun.append(group)
        together = [tuple(begun)] if begun and not self.ahead else [(one,) for one in begun]
        for groups in together:
            if groups[0].number % current().size == current().rank:
                self.producer.begin(groups, self.episodes(groups))

    def episodes(self, groups: Together) -> Callable[[int], Episodes]:
        """A function that creates the episodes of groups that run together."""
        drawn, samples = [self.drawn[group.number] for group in groups], self.samples
        seed = derive(self.seed, drawn[0].step, drawn[0].attempt)

        def make(session: int) -> Episodes:
            return Episodes(
                self.task,
                self.sampler,
                self.decoder,
                [one.problem for one in drawn],
                samples,
                seed,
                self.workers,
                Seconds(),
                self.ordered and not self.ahead,
                drawn[0].place,
                session=session,
                shared=self.producer.submitted,
            )

        return make

    def receive(self) -> None:
        """Record groups that the producer has finished; with several processes, those of all."""
        world = current()
        if world.size == 1:
            for group, found in zip(*self.producer.next(CHECK_SECONDS), strict=True):
                if self.admission.finish(group):  # it may have been restarted meanwhile
                    self.ready[group.number] = found
            return
        own = zip(*self.producer.next(SHARE_SECONDS), strict=True)
        shared = world.gather([[asdict(group), rows_of(found)] for group, found in own])
        for row, rows in chain(*shared):
            group = Begun(**row)
            if self.admission.finish(group):
                self.ready[group.number] = self.groups_of(group.number, rows)

    def observe(self, groups: Sequence[Group]) -> None:
        """After a step was made and its weights were published, start as many groups as it took."""
        super().observe(groups)
        self.admission.trained(self.taken)
        for one in self.taken:
            del self.drawn[one.number], self.ready[one.number]
        self.taken = ()
        if self.in_flight == "restart":
            for one in list(self.admission.running.values()):
                self.admission.fail(one)
                self.producer.cancel((one,))
        self.begin_planned()

    def look_ahead(self) -> None:
        """Nothing to do: prompts are rendered during training anyway."""

    def publish(self, version: int) -> None:
        """Send the trainer's weights to the sampler. Responses in progress continue with them."""
        alone = self.learning.pop_all()
        if self.pause is None and self.running is not None:
            alone.enter_context(self.running.exclusive())
        with alone:
            if self.changing is not None and self.changing.locked():
                self.changing.release()  # not before: a process replaced now would have these weights as the version before
            self.sampler.publish(version)
            if isinstance(self.sampler, RemoteSampler):
                self.sampler.prove()  # while it samples, and before the weights change

    @contextmanager
    def drained(self) -> Iterator[None]:
        """Wait until all started groups are finished, so that others may use the sampler, the task and its workers."""
        while self.admission.running:
            self.receive()
        yield

    def close(self) -> None:
        self.learning.close()
        if self.running is not None:
            self.running.close()

    def state(self) -> JSON:
        return {
            "curriculum": super().state(),
            "admission": self.admission.state(),
            "planned": self.planned,
            "drawn": [[number, *one.row()] for number, one in self.drawn.items()],
            "finished": [[number, rows_of(groups)] for number, groups in self.ready.items()],
        }

    def restore(self, state: JSON) -> None:
        super().restore(state["curriculum"])
        self.admission.restore(state["admission"])
        self.planned = state["planned"]
        self.drawn = {
            number: Drawn(self.problems[row[0]][row[1]], *row) for number, *row in state["drawn"]
        }
        self.ready = {number: self.groups_of(number, rows) for number, rows in state["finished"]}

    def groups_of(self, number: int, rows: JSON) -> list[Group]:
        """The groups of the problem with this number, from the result of `rows_of`."""
        return [group_of_rows(self.drawn[number].problem, *group) for group in rows]


def rows_of(groups: Sequence[Group]) -> JSON:
    return [[group.role, [rollout_row(r) for r in group.rollouts]] for group in groups]
