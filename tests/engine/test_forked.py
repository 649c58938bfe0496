"""Shares of a call in processes of their own: the same answers, in the same order, whatever happens to a child."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from children_for_tests import no_child_left
from material_for_tests import small_policy
from sampler_for_tests import completion

from posttrain.collect import Prompt, generate, generate_groups
from posttrain.engine import forked
from posttrain.engine.engine import Engine
from posttrain.engine.scheduler import Work
from posttrain.system import wire
from posttrain.types import Completion, Request, Sampling, Statistics

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the engine forks on Linux only")


@pytest.fixture(autouse=True)
def nobody_stays() -> Iterator[None]:
    with no_child_left():
        yield


def request(number: int, group: int = 4, tokens: int = 12) -> Prompt:
    return Prompt((3, 4 + number), group, number, Sampling(tokens))


def work(number: int, group: int = 1) -> Work:
    requests = tuple(Request((3, 4 + number), number, Sampling(12), 10 * number + n) for n in range(group))
    return Work(number, requests, np.array([3, 4 + number]))


def same(one: Sequence[tuple[Completion, ...]], other: Sequence[tuple[Completion, ...]]) -> None:
    assert [len(a) for a in one] == [len(a) for a in other]
    for a, b in zip((c for x in one for c in x), (c for x in other for c in x), strict=True):
        assert a.ids.tolist() == b.ids.tolist() and a.finish == b.finish and a.versions.tolist() == b.versions.tolist()
        np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("processes", [2, 3, 7])
def test_the_same_answers_on_any_number_of_cores(processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "MIN_TOKENS", 0)
    policy = small_policy(dtype=torch.float32)
    requests = [request(n, group=1 + n % 3) for n in range(6)]
    engines = Engine(policy, processes=1), Engine(policy, processes=processes)
    for engine in engines:
        engine.publish(5)
    threads = torch.get_num_threads()
    for _ in range(3):  # the workers stay for the next call
        same(*(list(generate_groups(engine, requests)) for engine in engines))
        for engine in engines:
            engine.publish(engine.version + 1)
    assert torch.get_num_threads() == threads and engines[1].pool.workers
    del engine, engines
    gc.collect()


def test_new_weights_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "MIN_TOKENS", 0)
    policy = small_policy(dtype=torch.float32)
    engine, requests = Engine(policy, processes=2), [request(n) for n in range(4)]
    before = list(generate_groups(engine, requests))
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.5)
    after = list(generate_groups(engine, requests))
    same(after, list(generate_groups(Engine(policy, processes=1), requests)))
    policy.model.lm_head.weight = torch.nn.Parameter(policy.model.lm_head.weight.detach() * 3)  # other memory: other workers
    moved = list(generate_groups(engine, requests))
    same(moved, list(generate_groups(Engine(policy, processes=1), requests)))
    assert [c.ids.tolist() for c in moved[-1]] != [c.ids.tolist() for c in after[-1]]
    del engine
    gc.collect()
    assert [c.ids.tolist() for c in after[-1]] != [c.ids.tolist() for c in before[-1]]


class Counting:
    """Stands for a scheduler: answers each request with its seed, after what a test does in the worker."""

    def __init__(self, fault: Callable[[], None] = lambda: None):
        self.fault, self.works, self.statistics = fault, list[Work](), Statistics(sampled=1)

    @property
    def busy(self) -> bool:
        return bool(self.works)

    def submit(self, works: Sequence[Work]) -> None:
        self.works += works

    def cancel(self, sessions: Sequence[int]) -> None:
        self.works = []

    def poll(self) -> wire.Finished:
        self.fault()
        one = self.works.pop(0)
        return [(r, completion([r.seed])) for r in one.requests]


def drained(pool: forked.EngineWorkers) -> tuple[list[int], list[Work]]:
    """Seeds of what is finished, and works that failed."""
    found, failed = list[int](), list[Work]()
    while pool.busy:
        found += [int(c.ids[0]) for _, c in pool.poll(None)]
        failed += pool.failed_works()
    return found, failed


@pytest.mark.parametrize("fault", ["killed", "raised", "hung"])
def test_what_a_worker_could_not_do_is_given_back(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "SILENCE", 0.3)
    monkeypatch.setattr(wire, "LOOK", 0.1)

    def fail() -> None:
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "raised":
            os.close(2)  # what the child would print of its error is not of interest
            raise RuntimeError("on purpose")
        time.sleep(60)

    pool = forked.EngineWorkers()
    for number in range(2):  # the second call has a new worker
        assert pool.past.failed_workers == 2 * number
        pool.submit([work(n) for n in range(5)], 2, lambda: Counting(fail))  # type: ignore[arg-type, return-value]
        found, failed = drained(pool)
        assert not found and sorted(w.number for w in failed) == [0, 1, 2, 3, 4]
    pool.close()


def kill_one(engine: Engine) -> None:
    os.kill(engine.pool.workers[0].pid, signal.SIGKILL)


def test_a_killed_worker_loses_nothing_sessions_included(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two workers dies between two turns and the other in the middle of the second: ids are those of a run without."""
    monkeypatch.setattr(forked, "MIN_TOKENS", 0)
    policy = small_policy(dtype=torch.float32)
    found: list[list[list[int]]] = []
    for kill in (False, True):
        engine = Engine(policy, processes=2)
        turns = [
            [Request((3, 4 + n), 7 + n, Sampling(9, min_new_tokens=9), n, keep=True) for n in range(6)],
            [Request((5, n), 70 + n, Sampling(300, min_new_tokens=300), n, 1) for n in range(6)],
        ]
        first = [c.ids.tolist() for c in generate(engine, turns[0])]
        assert len(engine.pool.workers) == 2
        if kill:
            kill_one(engine)
        engine.submit(turns[1])
        answers: dict[int, list[int]] = {}
        if kill:
            answers |= {r.session: c.ids.tolist() for r, c in engine.poll()}
            kill_one(engine)
        deadline = time.monotonic() + 120
        while len(answers) < 6 and time.monotonic() < deadline:
            answers |= {r.session: c.ids.tolist() for r, c in engine.poll()}
        found.append([*first, *(answers[n] for n in range(6))])
        statistics = engine.statistics
        assert (statistics.failed_workers > 0) == kill == (statistics.recomputed > 0)
        assert not engine.sessions
        engine.close()
    assert found[0] == found[1]


def test_a_session_stays_with_its_worker_and_publish_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "MIN_TOKENS", 0)
    engine = Engine(small_policy(dtype=torch.float32), processes=2)
    list(generate(engine, [Request((3, 4), n, Sampling(5), n, keep=True) for n in range(4)]))
    assert engine.statistics.recomputed == 0 and all(s.worker is not None for s in engine.sessions.values())
    engine.release()
    engine.publish(3)
    (again,) = generate(engine, [Request((9,), 1, Sampling(4), 2, 1)])
    assert again.versions.tolist() == [3] * len(again.ids) and engine.statistics.recomputed > 0
    engine.cancel(range(4))
    assert not engine.sessions
    engine.close()


@pytest.mark.parametrize("keep", [False, True])
def test_workers_stand_still_between_pause_and_publish(keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They read the weights that the trainer changes: tokens of the old version must be those of the old weights."""
    monkeypatch.setattr(forked, "MIN_TOKENS", 0)
    policy, length = small_policy(dtype=torch.float32), 60
    requests = [Request((3, 4 + n), n, Sampling(length, min_new_tokens=length), n) for n in range(4)]
    old = list(generate(Engine(policy, processes=1), requests))
    engine = Engine(policy, processes=2, keep_caches=keep)
    engine.submit(requests)
    engine.poll(0.0)
    engine.pause()
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.4)
    time.sleep(0.2)  # in which a worker that goes on would decode
    engine.publish(5)
    found: dict[int, Completion] = {}
    while len(found) < len(requests):
        found |= {r.session: c for r, c in engine.poll(1.0)}
    for n, one in enumerate(old):
        before = int((found[n].versions == 0).sum())
        assert before < length, "paused before the end"
        assert found[n].ids[:before].tolist() == one.ids[:before].tolist()
        np.testing.assert_allclose(found[n].logprobs[:before], one.logprobs[:before], rtol=0, atol=1e-5)
    assert not (keep and engine.statistics.recomputed)
    engine.close()


def test_cancelled_requests_leave_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "MIN_TOKENS", 0)
    engine = Engine(small_policy(dtype=torch.float32), processes=2)
    requests = [Request((3, 4), n, Sampling(400, min_new_tokens=400), n) for n in range(4)]
    engine.submit(requests)
    engine.cancel(range(4))
    assert not engine.pool.busy
    again = list(generate(engine, [Request((3, 4), 50 + n, Sampling(4), n) for n in range(4)]))
    alone = Engine(engine.policy, processes=1)
    for one, two in zip(again, generate(alone, [Request((3, 4), 50 + n, Sampling(4), n) for n in range(4)]), strict=True):
        assert one.ids.tolist() == two.ids.tolist(), "the number of a session that was cancelled can be used again"
    engine.close()


def test_shares_are_even_whole_and_in_order() -> None:
    works = [work(n, group) for n, group in enumerate((8, 1, 1, 1, 1, 4, 8))]
    cut = forked.shares(works, 3)
    assert [w for share in cut for w in share] == works and len(cut) == 3 and all(cut)
    assert [sum(len(w.requests) for w in share) for share in cut] == [8, 8, 8]
    assert forked.shares(works[:1], 4) == [works[:1]]


def test_arrays_arrive_to_the_bit_and_messages_may_come_in_pieces() -> None:
    numbers = np.array([-0.1, -1e-30, -17.25], np.float32)
    made = Completion(np.array([3, 4, 5]), numbers, np.array([5, 5, 6], np.int32), "stop")
    request, finished = Request((3,), 0, Sampling(), 7, 1), list[tuple[Request, Completion]]()
    out, into = os.pipe()
    worker = forked.EngineWorker(pid=0, into=0, out=out, finished=finished, sent=2)
    worker.works[7, 1] = (2, Work(0, (request,), np.array([3])))
    data = wire.to_line(forked._reply(2, Statistics(sampled=3), [(request, made)]))
    for piece in (data[:5], data[5:]):
        assert not finished
        os.write(into, piece)
        worker.read()
    ((back, found),) = finished
    assert back is request and (found.ids.tolist(), found.versions.tolist()) == ([3, 4, 5], [5, 5, 6])
    assert found.logprobs.tobytes() == numbers.tobytes() and worker.statistics.sampled == 3 and not worker.works
    os.close(into)
    worker.read()
    assert worker.gone
    os.close(out)


def test_a_completion_of_before_a_cancel_is_not_that_of_the_next_session_of_the_number() -> None:
    out, into = os.pipe()
    finished: list[tuple[Request, Completion]] = []
    worker = forked.EngineWorker(pid=0, into=0, out=out, finished=finished, sent=3)
    worker.works[7, 0] = (3, Work(0, (Request((3,), 0, Sampling(), 7),), np.array([3])))
    os.write(into, wire.to_line(forked._reply(1, Statistics(), [(Request((3,), 0, Sampling(), 7), completion([9]))])))
    worker.read()
    assert not finished and (7, 0) in worker.works
    os.close(into)
    os.close(out)


def test_work_that_takes_long_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "SILENCE", 2.0)
    monkeypatch.setattr(wire, "LOOK", 0.05)

    def compute() -> None:
        until = time.process_time() + 2.5
        while time.process_time() < until:
            pass

    pool = forked.EngineWorkers()
    pool.submit([work(n) for n in range(2)], 2, lambda: Counting(compute))  # type: ignore[arg-type, return-value]
    began = time.process_time()
    found, failed = drained(pool)
    assert sorted(found) == [0, 1] and not failed and pool.past.failed_workers == 0
    assert time.process_time() - began < 0.5, "this process only waits"
    assert pool.statistics.sampled == 2
    pool.close()
