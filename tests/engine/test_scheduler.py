"""One scheduler for both backends: requests that arrive late, sessions of several turns, caches that are dropped, cancelled requests
and new weights change when something is computed, and never what is sampled."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from families_for_tests import sample_padded
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels_for_tests import decode_in_pages
from material_for_tests import small_policy

from posttrain.collect import generate
from posttrain.engine import cpu, cuda
from posttrain.engine.cpu import CPUBackend
from posttrain.engine.cuda import CUDABackend
from posttrain.engine.engine import Engine
from posttrain.engine.padded import PaddedBackend
from posttrain.errors import UserError
from posttrain.models.policy import Policy
from posttrain.types import Completion, Request, Sampling

BACKENDS = ["module", "decoder", "pages", "batches"]


@pytest.fixture(params=BACKENDS)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        use(request.param, patch)
        yield request.param


def use(way: str, patch: pytest.MonkeyPatch) -> None:
    decode_in_pages(patch, way == "pages")
    if way == "batches":
        sample_padded(patch)
    if way == "module":
        patch.setattr(cpu, "cpu_decoder", lambda policy, pack: None)
    patch.setattr(cpu, "DECODER_TOKENS", 0)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return small_policy(dtype=torch.float32)


def engine_of(policy: Policy, rows: int = 256, keep_caches: bool = False) -> Engine:
    return Engine(policy, rows, processes=1, keep_caches=keep_caches)


def drain(engine: Engine) -> dict[tuple[int, int], Completion]:
    found: dict[tuple[int, int], Completion] = {}
    while any(session.waits for session in engine.sessions.values()):
        for request, completion in engine.poll():
            assert (request.session, request.turn) not in found
            found[request.session, request.turn] = completion
    return found


def alike(one: Completion, other: Completion) -> None:
    assert one.ids.tolist() == other.ids.tolist() and one.finish == other.finish
    np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=1e-5)


def all_free(engine: Engine) -> None:
    """No row, output slot, page or kept cache is left."""
    scheduler = engine.scheduler
    assert not engine.sessions
    if scheduler is None:
        return
    assert not (scheduler.rows.count or scheduler.waiting or scheduler.members or scheduler.kept)
    assert sorted(scheduler.free) == list(range(len(scheduler.tokens[0])))
    backend = scheduler.backend
    if isinstance(backend, CUDABackend):
        assert sorted(backend.pages.free.tolist()) == list(range(1, backend.pages.pages))
        assert not backend.prompts and backend.promised == 0
    else:
        assert isinstance(backend, CPUBackend) and backend.kept_bytes == 0


def first_turns(count: int, sampling: Sampling, keep: bool = False) -> list[Request]:
    """Prompts of different lengths; the ends differ by sampling."""
    return [Request(tuple(3 + (n + i) % 20 for i in range(1 + 3 * n)), 100 + n, sampling, n, keep=keep) for n in range(count)]


def alone(policy: Policy, request: Request) -> Completion:
    return next(iter(generate(engine_of(policy), [request])))


def test_requests_that_arrive_while_others_decode_get_what_they_get_alone(policy: Policy, way: str) -> None:
    requests = first_turns(9, Sampling(40))
    engine, found = engine_of(policy, 4), dict[int, Completion]()
    for n in range(0, 9, 3):
        engine.submit(requests[n : n + 3])
        for _ in range(2):
            found |= {r.session: c for r, c in engine.poll()}
    found |= {session: c for (session, _), c in drain(engine).items()}
    for request in requests:
        alike(found[request.session], alone(policy, request))
    all_free(engine)


def test_more_rows_longer_prompts_and_larger_groups_may_come_later(policy: Policy, way: str) -> None:
    """What the first requests needed is too small for those that come while they are decoded."""
    engine = engine_of(policy, 64)
    early = [Request((5, 6), 1, Sampling(200, min_new_tokens=200), 0)]
    late = [Request(tuple(3 + n % 20 for n in range(150)), n, Sampling(90, top_k=5), 1 + n, group=0) for n in range(40)]
    engine.submit(early)
    engine.poll()
    engine.submit(late)
    found = drain(engine)
    for request in (*early, *late[::13]):
        alike(found[request.session, 0], alone(policy, request))
    all_free(engine)


def turns(policy: Policy, engine: Engine, count: int, sampling: Sequence[Sampling]) -> list[list[Completion]]:
    """So many sessions of several turns each, all turns of a round together."""
    rounds = []
    for turn, one in enumerate(sampling):
        keep = turn + 1 < len(sampling)
        rounds.append(
            [
                Request((5 + n, 6, *range(7, 7 + n)), 1000 * turn + n, one, n, turn, keep=keep) if turn
                else Request((4, *range(3, 4 + n)), n, one, n, keep=keep)
                for n in range(count)
            ]
        )  # fmt: skip
    return [list(generate(engine, requests)) for requests in rounds]


def test_a_second_turn_on_a_kept_cache_is_the_turn_computed_from_scratch(policy: Policy, way: str) -> None:
    """Three turns; the log-probs of the last are those of the whole conversation as one prompt."""
    engine = engine_of(policy)
    found = turns(policy, engine, 5, [Sampling(30), Sampling(70), Sampling(20)])
    statistics = engine.statistics
    assert statistics.dropped_sessions == 0 and (statistics.recomputed == 0) == (way != "batches")
    for n in range(5):
        given = [(4, *range(3, 4 + n)), (5 + n, 6, *range(7, 7 + n)), (5 + n, 6, *range(7, 7 + n))]
        history: list[int] = []
        for turn, ids in enumerate(given):
            history += ids
            whole = Request(tuple(history), 1000 * turn + n, [Sampling(30), Sampling(70), Sampling(20)][turn])
            alike(found[turn][n], alone(policy, whole))
            history += found[turn][n].ids.tolist()
    # what was given, and with it the last token of the turn before, or two
    given_tokens = sum(2 + n + 2 * (2 + n) for n in range(5))
    assert given_tokens + 10 <= statistics.prefilled <= given_tokens + 20
    assert statistics.sampled == sum(len(c.ids) for answers in found for c in answers)
    all_free(engine)


def test_a_group_may_be_kept_and_its_prompt_shared(policy: Policy, way: str) -> None:
    engine = engine_of(policy)
    first = [Request((5, 6, 7), n, Sampling(12), n, group=0, keep=True) for n in range(4)]
    written = list(generate(engine, first))
    second = [Request((8,), 50 + n, Sampling(12), n, 1) for n in range(4)]
    for n, again in enumerate(generate(engine, second)):
        whole = Request((5, 6, 7, *written[n].ids.tolist(), 8), 50 + n, Sampling(12))
        alike(again, alone(policy, whole))
    all_free(engine)


def test_a_dropped_session_is_computed_again_and_counted(policy: Policy, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the bytes are bounded, on a GPU the pages: there three sessions leave too few for the next request. Batches keep
    none."""
    expected = turns(policy, engine_of(policy), 4, [Sampling(30, min_new_tokens=30), Sampling(20)])
    monkeypatch.setattr(cpu, "KEPT_BYTES", 5000)
    monkeypatch.setattr(CUDABackend, "room", lambda _: 9)
    engine = engine_of(policy)
    found = turns(policy, engine, 4, [Sampling(30, min_new_tokens=30), Sampling(20)])
    for one, other in zip((c for r in found for c in r), (c for r in expected for c in r), strict=True):
        alike(one, other)
    statistics = engine.statistics
    assert (statistics.dropped_sessions > 0) == (way != "batches") and statistics.recomputed > 0
    all_free(engine)


def test_the_oldest_sessions_are_dropped_first(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    use("decoder", monkeypatch)
    engine = engine_of(policy)
    monkeypatch.setattr(cpu, "KEPT_BYTES", 0)
    requests = first_turns(3, Sampling(5), keep=True)
    list(generate(engine, requests))
    assert engine.statistics.dropped_sessions == 3
    monkeypatch.setattr(cpu, "KEPT_BYTES", 1 << 30)
    list(generate(engine, [Request((5,), n, Sampling(5), n, 1, keep=True) for n in (1, 0, 2)]))
    scheduler = engine.scheduler
    assert scheduler is not None and set(scheduler.kept) == {0, 1, 2}
    assert scheduler._drop_oldest() and set(scheduler.kept) == {0, 2}
    engine.cancel(range(3))
    all_free(engine)


def test_cancel_frees_everything(policy: Policy, way: str) -> None:
    """Sessions that wait, that are decoded and that are kept; others are not disturbed."""
    engine = engine_of(policy, 4)
    list(generate(engine, first_turns(3, Sampling(8), keep=True)))
    late = [Request((5, 6), n, Sampling(60, min_new_tokens=60), 10 + n) for n in range(8)]
    engine.submit(late)
    engine.poll()
    engine.cancel([0, 1, 2, *range(10, 15), *range(16, 18), 999])
    found = drain(engine)
    assert set(found) == {(15, 0)}
    alike(found[15, 0], alone(policy, late[5]))
    all_free(engine)
    engine.submit(late)
    engine.poll()
    engine.cancel(range(10, 18))
    assert engine.poll() == []
    all_free(engine)


def test_new_weights_while_requests_are_decoded_and_wait(way: str) -> None:
    """Tokens before `publish` carry the old version and are those of the old weights; those after it are what the new weights give
    after them. Rows in flight and kept sessions are computed again."""
    policy = small_policy(dtype=torch.float32)
    length = 150
    requests = [Request((5, 6, 7), n, Sampling(length, min_new_tokens=length), n) for n in range(4)]
    old = list(generate(engine_of(policy), requests))
    engine = engine_of(policy, 2)
    list(generate(engine, [Request((9, 8), 3, Sampling(6), 77, keep=True)]))
    engine.submit(requests)
    engine.poll()
    engine.poll()
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.4)
    engine.publish(5)
    found = drain(engine)
    for n, request in enumerate(requests):
        got = found[n, 0]
        before = int((got.versions == 0).sum())
        assert got.versions.tolist() == [0] * before + [5] * (length - before)
        assert (0 < before < length) == (n < 2), "two rows were being decoded, two requests waited"
        assert got.ids[:before].tolist() == old[n].ids[:before].tolist()
        with torch.no_grad():
            ids = torch.tensor([[*request.ids, *got.ids.tolist()]])
            logits = policy.model(ids, use_cache=False).logits[0, 2 + before : -1]
            expected = torch.log_softmax(logits, -1).gather(1, ids[0, 3 + before :, None])[:, 0]
        np.testing.assert_allclose(got.logprobs[before:], expected.numpy(), rtol=0, atol=1e-4)
    assert engine.statistics.recomputed > 0
    earlier = engine.statistics.recomputed
    (again,) = generate(engine, [Request((4,), 3, Sampling(6), 77, 1)])
    assert engine.statistics.recomputed > earlier and set(again.versions.tolist()) == {5}
    all_free(engine)


def test_after_a_publish_the_prompt_of_a_group_is_computed_once(policy: Policy, way: str) -> None:
    """And what each of its rows has sampled, but for the last token. Rows that have ended by then are not."""
    prompt, lengths = tuple(range(3, 20)), (4, 200, 200, 250)
    requests = [Request(prompt, n, Sampling(k, min_new_tokens=k), n, group=0) for n, k in enumerate(lengths)]
    expected = list(generate(engine_of(policy), requests))
    engine = engine_of(policy)
    engine.submit(requests)
    found: dict[tuple[int, int], Completion] = {}
    while not found:
        found |= {(r.session, r.turn): c for r, c in engine.poll()}
    engine.publish(1)
    found |= drain(engine)
    before = [int((found[n, 0].versions == 0).sum()) for n in range(4)]
    assert before[0] == 4 and before[1] == before[2] == before[3] < 200
    assert engine.statistics.recomputed == len(prompt) + sum(n - 1 for n in before[1:])
    assert engine.statistics.prefilled == len(prompt) and engine.statistics.sampled == sum(lengths)
    for n, one in enumerate(expected):
        alike(found[n, 0], one)
    all_free(engine)


def test_caches_that_are_kept_are_those_of_the_weights_before(way: str) -> None:
    """Tokens after `publish` are of the new weights over keys and values of the old ones, as of a model whose weights are changed
    between two calls with one cache. Nothing is computed again."""
    policy, length = small_policy(dtype=torch.float32), 250
    requests = [Request((5, 6, 7), n, Sampling(length, min_new_tokens=length), n, group=0) for n in range(3)]
    late = Request((9, 8), 7, Sampling(8), 9)
    old = copy.deepcopy(policy.model)
    old.set_attn_implementation("sdpa")
    engine = engine_of(policy, keep_caches=True)
    engine.submit(requests)
    engine.poll()
    engine.poll()
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.1)
    engine.publish(5)
    engine.submit([late])
    found = drain(engine)
    alike(found[9, 0], alone(policy, late))
    new = copy.deepcopy(old)
    new.load_state_dict(policy.model.state_dict())
    for n, request in enumerate(requests):
        got = found[n, 0]
        before = int((got.versions == 0).sum())
        assert got.versions.tolist() == [0] * before + [5] * (length - before) and 0 < before < length
        ids = torch.tensor([[*request.ids, *got.ids.tolist()]])
        split = len(request.ids) + before - 1  # the last token before is computed with the new weights
        with torch.no_grad():
            cached = old(ids[:, :split], use_cache=True)
            rest = new(ids[:, split:], past_key_values=cached.past_key_values, use_cache=True).logits
            logits = torch.cat([cached.logits, rest], 1)[0, len(request.ids) - 1 : -1]
            expected = torch.log_softmax(logits, -1).gather(1, ids[0, len(request.ids) :, None])[:, 0]
        np.testing.assert_allclose(got.logprobs, expected.numpy(), rtol=0, atol=1e-4)
    assert engine.statistics.recomputed == 0
    all_free(engine)


@pytest.mark.parametrize("keep", [False, True])
def test_a_row_goes_on_in_its_random_numbers(policy: Policy, way: str, keep: bool) -> None:
    """Weights that did not change: publishing in the middle changes no id."""
    requests = first_turns(5, Sampling(120, min_new_tokens=30))
    expected = list(generate(engine_of(policy), requests))
    engine = engine_of(policy, 3, keep)
    engine.submit(requests)
    found: dict[tuple[int, int], Completion] = {}
    for version in range(1, 4):
        found |= {(r.session, r.turn): c for r, c in engine.poll()}
        engine.publish(version)
    found |= drain(engine)
    for n, one in enumerate(expected):
        alike(found[n, 0], one)
    all_free(engine)


def test_weights_may_be_given(way: str) -> None:
    policy, other = small_policy(dtype=torch.float32), small_policy(dtype=torch.float32)
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.mul_(1.4)
    engine, request = engine_of(policy), Request((5, 6), 0, Sampling(20))
    list(generate(engine, [request]))
    engine.publish(1, other.model.named_parameters())
    (found,) = generate(engine, [request])
    alike(found, alone(other, request))
    with pytest.raises(UserError, match="the policy has no parameter 'nothing'"):
        engine.publish(2, [("nothing", torch.zeros(1))])


def test_an_error_leaves_a_scheduler_that_works(policy: Policy, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, requests = engine_of(policy), first_turns(3, Sampling(12))
    expected = [c.ids.tolist() for c in generate(engine, requests)]
    with monkeypatch.context() as patch:
        for kind in (CPUBackend, CUDABackend, PaddedBackend):
            patch.setattr(kind, "launch", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            list(generate(engine, requests))
    assert [c.ids.tolist() for c in generate(engine, requests)] == expected
    all_free(engine)


@pytest.mark.parametrize(("requests", "message"), [
    ([Request((3,), 0, Sampling(4), 0, 1)], "turn 1 of session 0 needs turn 0 finished and kept"),
    ([Request((3,), 0, Sampling(4), 5)], "session 5 is there already"),
    ([Request((3,), 0, Sampling(4), 6, 2)], "turn 2 of session 6 needs turn 1 finished and kept"),
    ([Request((3,), 0, Sampling(4)), Request((3,), 1, Sampling(4))], "must be of different sessions"),
    ([Request((3,), 0, Sampling(4), model="opponent")], "no model 'opponent'"),
])  # fmt: skip
def test_requests_that_cannot_be_are_refused(policy: Policy, requests: list[Request], message: str) -> None:
    engine = engine_of(policy)
    list(generate(engine, [Request((3,), 0, Sampling(4), 6, keep=True)]))
    engine.submit([Request((3,), 0, Sampling(50), 5)])
    with pytest.raises(UserError, match=message):
        engine.submit(requests)


@pytest.mark.parametrize("way", ["decoder", "pages"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_whatever_happens_every_completion_comes_once_and_all_is_free(way: str, data: st.DataObject) -> None:
    """Random arrivals, groups, turns, cancels, publishes and releases on few rows and little memory."""
    with pytest.MonkeyPatch.context() as patch:
        use(way, patch)
        patch.setattr(cpu, "KEPT_BYTES", data.draw(st.sampled_from([0, 4000, 1 << 30])))
        room = data.draw(st.sampled_from([14, 20, 200]))
        patch.setattr(CUDABackend, "room", lambda _: room)
        patch.setattr(cuda, "STOPPABLE", 5)
        engine = engine_of(POLICY, data.draw(st.integers(1, 5)), data.draw(st.booleans()))
        open_sessions: dict[int, int] = {}  # those that may go on, and their last turn
        expected, found = set[tuple[int, int]](), list[tuple[int, int]]()
        number = 0
        for _ in range(data.draw(st.integers(1, 12))):
            what = data.draw(st.sampled_from(["first", "next", "poll", "poll", "cancel", "publish", "release"]))
            keep, limit = data.draw(st.booleans()), data.draw(st.integers(1, 80))
            if what == "first":
                size = data.draw(st.integers(1, 4))
                ids = tuple(data.draw(st.lists(st.integers(3, 23), min_size=1, max_size=70)))
                engine.submit(
                    [Request(ids, number + n, Sampling(limit), number + n, group=number, keep=keep) for n in range(size)]
                )
                expected |= {(number + n, 0) for n in range(size)}
                number += size
            elif what == "next" and open_sessions:
                session = data.draw(st.sampled_from(sorted(open_sessions)))
                turn = open_sessions.pop(session) + 1
                if turn < 4:
                    engine.submit([Request((5, 6), number, Sampling(limit), session, turn, keep=keep)])
                    expected.add((session, turn))
            elif what == "cancel":
                gone = data.draw(st.sets(st.integers(0, max(0, number - 1))))
                engine.cancel(gone)
                expected = {key for key in expected if key[0] not in gone or key in found}
                open_sessions = {s: t for s, t in open_sessions.items() if s not in gone}
            elif what == "publish":
                engine.publish(number)
            elif what == "release":
                engine.release()
            for request, completion in engine.poll():
                found.append((request.session, request.turn))
                assert 1 <= len(completion.ids) == len(completion.versions) <= request.sampling.max_new_tokens
                if request.keep:
                    open_sessions[request.session] = request.turn
        found += list(drain(engine))
        assert sorted(found) == sorted(expected)
        engine.cancel(range(number))
        all_free(engine)


POLICY = small_policy(dtype=torch.float32)
