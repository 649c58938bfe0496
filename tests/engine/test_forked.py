"""Shares of a call in processes of their own: the same answers, in the same order, whatever happens to a child."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from children_for_tests import children, no_child_left
from material_for_tests import small_policy

from posttrain.collect import Prompt, generate_groups
from posttrain.engine import forked
from posttrain.engine.engine import Engine
from posttrain.engine.work import Work
from posttrain.types import Completion, Sampling

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the engine forks on Linux only")


@pytest.fixture(autouse=True)
def nobody_stays() -> Iterator[None]:
    with no_child_left():
        yield


def request(number: int, group: int = 4, tokens: int = 12) -> Prompt:
    return Prompt((3, 4 + number), group, number, Sampling(tokens))


def work(number: int, group: int = 1) -> Work:
    return Work((3, 4 + number), (number,) * group, Sampling(12))


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
    for _ in range(3):  # the helpers stay for the next call
        same(*(list(generate_groups(engine, requests)) for engine in engines))
        for engine in engines:
            engine.publish(engine.version + 1)
    assert torch.get_num_threads() == threads and children()
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
    policy.model.lm_head.weight = torch.nn.Parameter(policy.model.lm_head.weight.detach() * 3)  # other memory: other helpers
    moved = list(generate_groups(engine, requests))
    same(moved, list(generate_groups(Engine(policy, processes=1), requests)))
    assert [c.ids.tolist() for c in moved[-1]] != [c.ids.tolist() for c in after[-1]]
    del engine
    gc.collect()
    assert [c.ids.tolist() for c in after[-1]] != [c.ids.tolist() for c in before[-1]]


def answers(requests: Sequence[Work], version: int = 0) -> Iterator[tuple[Completion, ...]]:
    for one in requests:
        yield (Completion(np.array([one.seeds[0]]), np.zeros(1, np.float32), np.zeros(1, np.int32), "stop"),)


def seeds(found: Sequence[tuple[Completion, ...]]) -> list[int]:
    return [int(c.ids[0]) for answer in found for c in answer]


@pytest.mark.parametrize("fault", ["killed", "raised", "hung"])
def test_what_a_child_could_not_do_is_done_here(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "SILENCE", 0.3)
    monkeypatch.setattr(forked, "LOOK", 0.1)
    parent = os.getpid()

    def faulty(requests: Sequence[Work], version: int) -> Iterator[tuple[Completion, ...]]:
        if os.getpid() != parent:
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "raised":
                os.close(2)  # what the child would print of its error is not of interest
                raise RuntimeError("on purpose")
            time.sleep(60)
        yield from answers(requests)

    crew = forked.Crew(2)
    for number in range(2):  # the second call has a new helper
        assert crew.lost == 2 * number
        assert seeds(list(crew.generate(faulty, [work(n) for n in range(5)], 0))) == [0, 1, 2, 3, 4]
    crew.close()


def test_a_caller_who_stops_listening_leaves_no_child() -> None:
    began = time.monotonic()

    def slow(requests: Sequence[Work], version: int) -> Iterator[tuple[Completion, ...]]:
        yield from answers(requests[:1])
        time.sleep(60)

    crew = forked.Crew(2)
    going = crew.generate(slow, [work(n) for n in range(4)], 0)
    next(going)
    going.close()
    assert not crew.helpers
    assert time.monotonic() - began < 10


def test_shares_are_even_whole_and_in_order() -> None:
    requests = [work(n, group) for n, group in enumerate((8, 1, 1, 1, 1, 4, 8))]
    cut = forked.shares(requests, 3)
    assert [r for share in cut for r in share] == requests and len(cut) == 3 and all(cut)
    assert [sum(r.group for r in share) for share in cut] == [8, 8, 8]
    assert forked.shares(requests[:1], 4) == [requests[:1]]


def test_bytes_that_are_not_all_there_are_no_answer() -> None:
    (one,), (two,) = answers([work(3), work(9)])
    data = forked.encode((one, two))
    assert seeds([forked.decode(data) or ()]) == [3, 9]
    for cut in (0, 5, 20, len(data) - 1):
        assert forked.decode(data[:cut]) is None


def test_work_that_takes_long_is_waited_for_and_answers_come_as_they_are_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "SILENCE", 0.3)
    monkeypatch.setattr(forked, "LOOK", 0.05)

    def busy(requests: Sequence[Work], version: int) -> Iterator[tuple[Completion, ...]]:
        for n, answer in enumerate(answers(requests)):
            until = time.process_time() + (1.0 if n else 0.0)
            while time.process_time() < until:
                pass
            yield answer

    crew = forked.Crew(2)
    going = crew.generate(busy, [work(n) for n in range(4)], 0)
    first, began = next(going), time.process_time()
    assert seeds([first, *going]) == [0, 1, 2, 3] and crew.lost == 0
    assert time.process_time() - began < 0.5  # this process only listens
    crew.close()
