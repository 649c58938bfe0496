"""The asynchronous loop on a virtual clock: in any interleaving no group is lost, trained on twice or too late, and no run hangs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from benchmarks.simulator import DEADLOCK, Broken, Plan, Simulation, simulate
from posttrain.cluster.admission import Admission, Begun, Staleness
from posttrain.errors import UserError

INTERLEAVINGS = 10_000


def plan_of(seed: int) -> Plan:
    """Any small run: slow or fast trainers, long and short answers, crashes of workers and of the trainer."""
    chance = random.Random(seed)
    return Plan(
        steps=chance.randint(2, 5),
        batch=chance.randint(1, 3),
        max_staleness=chance.choice([0, 0, 1, 2, 4]),
        workers=chance.randint(1, 3),
        slots=chance.randint(1, 2),
        spread=chance.choice([0.0, 0.5, 1.5]),
        train=chance.choice([0.1, 1.0, 5.0]),
        publish=chance.choice([0.0, 0.3]),
        refills=chance.choice([0.0, 0.0, 0.5]),
        restarts=chance.random() < 0.3,
        checkpoint_every=chance.randint(1, 3),
        worker_crashes=chance.choice([0.0, 0.1]),
        trainer_crashes=chance.choice([0.0, 0.05]),
        recovery=chance.choice([0.1, 3.0]),
    )


def test_in_ten_thousand_interleavings_nothing_is_lost_doubled_or_too_old() -> None:
    """Each is checked after every event; a run that stands still raises."""
    crashes, oldest = 0, [0] * 5
    for seed in range(INTERLEAVINGS):
        plan = plan_of(seed)
        report = simulate(plan, seed)
        least = plan.steps * plan.batch
        assert len(report.trained) >= least and (plan.refills or len(report.trained) == least)
        crashes += report.crashes
        oldest[plan.max_staleness] = max(oldest[plan.max_staleness], *report.staleness)
    assert crashes > 1000 and [oldest[s] for s in (0, 1, 2, 4)] == [0, 1, 2, 4], "the bound is reached, and kept"


def test_the_same_seed_is_the_same_run() -> None:
    assert simulate(plan_of(7), 3) == simulate(plan_of(7), 3) != simulate(plan_of(7), 4)


class Impatient(Admission):
    """Trains on any groups that have finished, however old others become."""

    def next_step(self, count: int | None = None, taken: Sequence[Begun] = ()) -> tuple[Begun, ...] | None:
        count = count or self.settings.batch
        done = sorted({*self.finished.values()} - {*taken}, key=lambda one: -one.version)
        return tuple(done[:count]) if len(done) >= count else None


class Greedy(Admission):
    """Begins what a step asks for besides, and takes nothing more for it: less room is left for the next steps."""

    def next_step(self, count: int | None = None, taken: Sequence[Begun] = ()) -> tuple[Begun, ...] | None:
        return super().next_step(count, taken) if not taken else ()


class Forgetful(Admission):
    """Does not begin the groups of a failed worker again."""

    def fail(self, group: Begun) -> None:
        self.running.pop(group.number, None)


class Careless(Admission):
    """Takes what a worker of an earlier attempt brings."""

    def finish(self, group: Begun) -> bool:
        self.running.pop(group.number, None)
        self.finished[group.number] = group
        return True


class Ahead(Admission):
    """Saves how far problems were drawn, and not which of them are not trained on yet."""

    def state(self) -> Any:
        return {**super().state(), "again": [], "finished": []}


@pytest.mark.parametrize("kind", [Impatient, Greedy, Forgetful, Careless, Ahead])
def test_a_wrong_rule_is_found(kind: type[Admission]) -> None:
    found = 0
    for seed in range(300):
        simulation = Simulation(plan_of(seed), seed)
        simulation.admission = kind(simulation.admission.settings)
        try:
            simulation.run()
        except Broken:
            found += 1
    assert found > 5


def test_a_run_that_stands_still_is_found() -> None:
    simulation = Simulation(Plan(), 0)
    simulation.admission.next_step = lambda *_: None  # type: ignore[method-assign]
    with pytest.raises(Broken, match=DEADLOCK):
        simulation.run()


def test_staleness_0_is_synchronous() -> None:
    """By hand: two workers of one slot, groups of 1 s, steps of 1 s: 4 groups take 2 s, and the step 1 s."""
    report = simulate(Plan(steps=50, batch=4, workers=2, slots=1, spread=0.0), 0)
    assert report.seconds == pytest.approx(50 * 3.0, rel=0.02)
    assert set(report.staleness) == {0}
    assert report.train_busy == pytest.approx(1 / 3, rel=0.02) and report.generate_busy == pytest.approx(2 / 3, rel=0.02)


def test_with_staleness_1_both_sides_work_at_once() -> None:
    """The slower side is generation, at 2 groups a second: more than 90% of that is reached."""
    report = simulate(Plan(steps=200, batch=4, workers=2, slots=1, spread=0.0, max_staleness=1), 0)
    assert report.rate > 0.9 * 2.0


def test_long_answers_are_trained_on_as_often_as_short_ones() -> None:
    """Every group that was begun is trained on, in about its order: dropping the late ones would starve the long."""
    report = simulate(Plan(steps=100, batch=8, workers=4, slots=8, spread=1.5, max_staleness=2), 1)
    assert set(range(99 * 8)) <= set(report.trained) | set(range(97 * 8, 100 * 8))
    behind = [max(0, a - b) for a, b in pairwise(report.trained)]
    assert max(behind) <= 3 * 8, "never more than the room for it"


def test_admission_by_hand() -> None:
    admission = Admission(Staleness(batch=2, max_staleness=1))
    begun = [admission.begin() for _ in range(5)]
    assert [one and one.number for one in begun] == [0, 1, 2, 3, None], "room for two steps"
    for one in (begun[1], begun[3]):
        assert one is not None and admission.finish(one)
    chosen = admission.next_step()
    assert chosen == (begun[1], begun[3]), "0 and 2 are due at the next step, and two fit into it"
    admission.trained(chosen)
    more = [admission.begin() for _ in range(2)]
    assert [one and (one.number, one.version) for one in more] == [(4, 1), (5, 1)]
    for one in more:
        assert one is not None and admission.finish(one)
    assert admission.next_step() is None, "0 and 2 must be in this step"
    assert begun[0] is not None and begun[2] is not None
    admission.fail(begun[0])
    again = admission.begin()
    assert again is not None and again.number == 0 and not admission.finish(begun[0]), "the first attempt is not taken"
    assert admission.finish(again) and admission.finish(begun[2])
    assert [one.number for one in admission.next_step() or ()] == [2, 0]
    restored = Admission(admission.settings)
    restored.restore(admission.state())
    assert restored.next_step() == admission.next_step() and restored.drawn == 6


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"max_staleness": -1}, {"generate": 0.0}, {"worker_crashes": 2.0}])
def test_a_plan_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        Plan(**wrong)
