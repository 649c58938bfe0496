"""The engine's schedule changes nothing of what a request gets: who else is there, how many rows, in what order they leave."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from material_for_tests import STOP, small_policy

from posttrain.collect import Prompt, generate_groups
from posttrain.engine import cpu, cuda
from posttrain.engine.cache import GROWTH, Cache
from posttrain.engine.cpu import CPUBackend
from posttrain.engine.cuda import CUDABackend
from posttrain.engine.engine import Engine
from posttrain.engine.padded import PaddedBackend
from posttrain.engine.scheduler import Scheduler
from posttrain.errors import UserError
from posttrain.models.policy import Policy
from posttrain.types import Completion, Sampler, Sampling, Statistics

pytestmark = pytest.mark.usefixtures("every_way")
NARROW = torch.float32


@pytest.fixture(scope="module")
def policy() -> Policy:
    return small_policy(dtype=NARROW)


def several(count: int = 7) -> list[Prompt]:
    """Prompts of different lengths, groups of different sizes, settings of every kind."""
    generator = np.random.default_rng(0)
    settings = [
        Sampling(12),
        Sampling(20, temperature=0.6),
        Sampling(1),
        Sampling(30, temperature=1.5, top_k=9),
        Sampling(9, temperature=0.0),
        Sampling(25, top_p=0.8),
        Sampling(16, min_new_tokens=4),
    ]
    return [
        Prompt(tuple(generator.integers(3, 24, 1 + 5 * n % 11).tolist()), 1 + n % 3, 100 + n, settings[n % 7])
        for n in range(count)
    ]


def run(policy: Policy, requests: list[Prompt], rows: int = 256) -> list[tuple[Completion, ...]]:
    return list(generate_groups(Engine(policy, rows), requests))


def assert_same(one: list[tuple[Completion, ...]], other: list[tuple[Completion, ...]]) -> None:
    assert [len(group) for group in one] == [len(group) for group in other]
    for ours, theirs in ((a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)):
        assert ours.ids.tolist() == theirs.ids.tolist()
        assert ours.finish == theirs.finish
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, rtol=0, atol=1e-5)


def test_positions_beyond_the_model_are_refused(policy: Policy) -> None:
    limit = policy.model.config.max_position_embeddings
    with pytest.raises(UserError, match=f"{limit + 1} tokens"):
        run(policy, [Prompt((3, 4), 1, 0, Sampling(limit - 1))])


def test_it_is_a_sampler(policy: Policy) -> None:
    assert isinstance(Engine(policy), Sampler)


def test_every_way_is_really_taken(policy: Policy, every_way: str) -> None:
    backend = Engine(policy)._backend()
    assert isinstance(backend, CUDABackend) == (every_way == "pages")
    if isinstance(backend, CUDABackend):
        return
    assert type(backend) is (PaddedBackend if every_way == "batches" else CPUBackend)
    decoder = backend.make_decoder(300)
    assert (decoder is None) == (every_way in ("module", "batches"))
    if decoder is not None:
        assert decoder.layers[0].qkv.weight.is_contiguous() == (every_way == "packed")


def test_shapes_and_types(policy: Policy) -> None:
    for request, group in zip(several(), run(policy, several()), strict=True):
        assert len(group) == request.samples
        for c in group:
            assert c.ids.dtype == np.int64 and c.logprobs.dtype == np.float32
            assert 1 <= len(c.ids) == len(c.logprobs) <= request.sampling.max_new_tokens
            assert bool((c.logprobs <= 0).all()) and bool(np.isfinite(c.logprobs).all())


def test_alone_and_in_a_crowd(policy: Policy) -> None:
    """Randomness belongs to the request: the same ids whoever else is sampled, log-probs to 1e-5."""
    crowd = run(policy, several())
    alone = [run(policy, [request])[0] for request in several()]
    assert_same(crowd, alone)


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 8])
def test_fewer_rows_than_requests(policy: Policy, rows: int) -> None:
    """Rows leave when they are done and waiting requests take their place; a group larger than the rows still fits."""
    assert_same(run(policy, several(14)), run(policy, several(14), rows))


def test_order_of_requests_is_the_order_of_answers(policy: Policy) -> None:
    requests = several()
    backwards = run(policy, requests[::-1])
    assert_same(run(policy, requests), backwards[::-1])


def test_requests_enter_in_order(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later request never enters before an earlier one, even if it alone would fit."""
    entered: list[int] = []
    live: list[int] = []
    admit = Scheduler._admit

    def watched(scheduler: Any) -> None:
        before = list(scheduler.waiting)
        admit(scheduler)
        entered.extend(work.number for work in before[: len(before) - len(scheduler.waiting)])
        live.append(scheduler.rows.count)

    monkeypatch.setattr(Scheduler, "_admit", watched)
    big, small = Sampling(20, min_new_tokens=20), Sampling(2)
    requests = [Prompt((3,), 2, 0, big), Prompt((4,), 3, 1, big), Prompt((5,), 1, 2, small)]
    assert [len(group) for group in generate_groups(Engine(policy, 3), requests)] == [2, 3, 1]
    assert entered == [0, 1, 2] and max(live) <= 3
    assert live[0] == 2, "the second does not fit beside the first, and the third may not overtake it"


def test_a_group_shares_its_prompt_and_differs_in_samples(policy: Policy) -> None:
    """Sample n of a group is the same whatever the size of the group, and samples are not copies of each other."""
    (large,) = run(policy, [Prompt((5, 6, 7), 6, 9, Sampling(15))])
    (small,) = run(policy, [Prompt((5, 6, 7), 2, 9, Sampling(15))])
    assert_same([large[:2]], [small])
    assert len({tuple(c.ids.tolist()) for c in large}) > 1


def test_seeds_decide(policy: Policy) -> None:
    one, again, other = (run(policy, [Prompt((5, 6), 3, seed, Sampling(20))]) for seed in (1, 1, 2))
    assert_same(one, again)
    assert [c.ids.tolist() for c in one[0]] != [c.ids.tolist() for c in other[0]]


def test_global_random_state_plays_no_part(policy: Policy) -> None:
    torch.manual_seed(0)
    one = run(policy, several())
    state = torch.get_rng_state()
    torch.manual_seed(99)
    assert_same(one, run(policy, several()))
    torch.manual_seed(0)
    assert torch.equal(state, torch.get_rng_state())


def test_a_prompt_is_computed_once_for_its_group(policy: Policy) -> None:
    engine = Engine(policy)
    list(generate_groups(engine, [Prompt(tuple(range(3, 13)), 5, 0, Sampling(1))]))
    assert engine.statistics == Statistics(prefilled=10, sampled=5)


@pytest.mark.parametrize("budget", [1, 4, 9])
def test_prompts_longer_than_a_prefill(policy: Policy, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(policy, several())
    for module in (cpu, cuda):
        monkeypatch.setattr(module, "PREFILL_TOKENS", budget)
    assert_same(expected, run(policy, several()))


def test_the_cache_grows_across_its_boundary(policy: Policy) -> None:
    """Past one and two allocations, ids are still those of the model's own full forward."""
    length = 2 * GROWTH + 40
    quiet = Policy(policy.model, None, ())
    (group,) = run(quiet, [Prompt((5, 6, 7), 2, 0, Sampling(length))])
    for completion in group:
        assert len(completion.ids) == length and completion.finish == "length"
        ids = torch.tensor([[5, 6, 7, *completion.ids.tolist()]])
        with torch.no_grad():
            logits = policy.model(ids, use_cache=False).logits[0, 2:-1]
        full = torch.log_softmax(logits, -1).gather(1, ids[0, 3:, None])[:, 0]
        np.testing.assert_allclose(completion.logprobs, full.numpy(), rtol=0, atol=1e-4)


def test_cache_keeps_what_it_holds() -> None:
    cache = Cache(3, NARROW, torch.device("cpu"))
    cache.reserve(1)
    store = cache.layer(0, 2, 4)
    assert store.shape == (3, 2, 2, GROWTH, 4)
    keys, values = store.unbind(2)
    keys.fill_(1.0)
    values.fill_(2.0)
    cache.reserve(GROWTH)
    assert cache.layer(0, 2, 4) is store, "nothing to do"
    cache.reserve(GROWTH + 1)
    grown = cache.layer(0, 2, 4)[:, :, 0]
    assert cache.length % GROWTH == 0 and cache.length >= GROWTH + 1
    assert bool((grown[:, :, :GROWTH] == 1).all()) and not grown[:, :, GROWTH:].any()
    grown[2] = 7.0
    cache.move([2], [0], 5)
    assert bool((grown[0, :, :5] == 7).all()) and bool((grown[0, :, 5:GROWTH] == 1).all())


def test_stop_ids(policy: Policy) -> None:
    """Any of several ends a response and is its last token; where there is none, length does."""
    many = Policy(policy.model, None, (4, 7, STOP, 12))
    none = Policy(policy.model, None, ())
    request = Prompt((5, 6), 16, 3, Sampling(30))
    for completion in run(many, [request])[0]:
        inside = [i for i, token in enumerate(completion.ids.tolist()) if token in (4, 7, STOP, 12)]
        assert inside == ([len(completion.ids) - 1] if completion.finish == "stop" else [])
    assert "stop" in {c.finish for c in run(many, [request])[0]}
    assert {(c.finish, len(c.ids)) for c in run(none, [request])[0]} == {("length", 30)}


def test_a_stop_id_as_the_very_last_token_is_a_stop(policy: Policy) -> None:
    everything = Policy(policy.model, None, tuple(range(24)))
    (group,) = run(everything, [Prompt((5,), 3, 0, Sampling(1))])
    assert [(c.finish, len(c.ids)) for c in group] == [("stop", 1)] * 3


@pytest.mark.parametrize("count", [0, 1, 5])
def test_min_new_tokens(policy: Policy, count: int) -> None:
    """With every id a stop id, a response ends with the first token after the min number."""
    everything = Policy(policy.model, None, tuple(range(24)))
    (group,) = run(everything, [Prompt((5,), 3, 0, Sampling(10, min_new_tokens=count))])
    assert [len(c.ids) for c in group] == [count + 1] * 3


def test_versions(policy: Policy) -> None:
    engine = Engine(policy)
    assert {v for c in next(generate_groups(engine, several(1))) for v in c.versions.tolist()} == {0}
    engine.publish(17)
    assert {v for group in generate_groups(engine, several(3)) for c in group for v in c.versions.tolist()} == {17}


def test_no_requests(policy: Policy) -> None:
    assert run(policy, []) == []


@pytest.mark.parametrize("training", [True, False])
def test_the_models_mode_is_put_back(policy: Policy, training: bool) -> None:
    policy.model.train(training)
    run(policy, several(2))
    assert policy.model.training is training
    answers = generate_groups(Engine(policy, 2), several(6))
    next(answers)
    answers.close()
    assert policy.model.training is training
    policy.model.eval()


def test_an_abandoned_generation_leaves_the_model_usable(policy: Policy) -> None:
    expected = run(policy, several(4))
    answers = generate_groups(Engine(policy, 2), several(6))
    next(answers)
    del answers
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    assert_same(expected, run(policy, several(4)))
    loss = policy.model(torch.tensor([[5, 6, 7]]), use_cache=False).logits.sum()
    loss.backward()
    policy.model.zero_grad()


def test_gradients_can_be_taken_between_answers(policy: Policy) -> None:
    """The caller scores and may train between completions: inference mode holds only inside the engine."""
    for _ in generate_groups(Engine(policy, 2), several(4)):
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        policy.model(torch.tensor([[5, 6, 7]]), use_cache=False).logits.sum().backward()
    policy.model.zero_grad()


def test_the_models_own_generate_is_refused(policy: Policy) -> None:
    """With our attention in it, transformers' cache would be read wrongly without a word."""
    with pytest.raises(NotImplementedError, match="sample with its engine, not with model.generate"):
        policy.model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, pad_token_id=0)
