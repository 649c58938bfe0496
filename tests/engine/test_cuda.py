"""The CUDA backend, run on the CPU: the merge of partial attentions, which row has which page, how rows are compacted, and when the
plain path is taken."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from kernels_for_tests import decode_in_pages, merge
from material_for_tests import copies_that_wait, small_policy

from posttrain.collect import Prompt, generate_groups
from posttrain.engine import cuda
from posttrain.engine import engine as engine_module
from posttrain.engine import fused as fused_module
from posttrain.engine.cuda import CUDABackend, Pages, bucket
from posttrain.engine.engine import Engine
from posttrain.engine.fused import Fused
from posttrain.engine.rows import PAGE, Drawn, Rows, pages_of
from posttrain.engine.scheduler import Work
from posttrain.errors import UserError
from posttrain.models import nf4
from posttrain.models.lora import Lora, add_adapters, merge_adapters
from posttrain.models.policy import Policy, wrap_model
from posttrain.ops.logprobs import Head
from posttrain.train.forward import forward
from posttrain.train.pack import pack_examples
from posttrain.types import Completion, Example, Request, Sampling


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    decode_in_pages(monkeypatch)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return small_policy(dtype=torch.float32)


def ids(answers: list[tuple[Completion, ...]]) -> list[list[list[int]]]:
    return [[c.ids.tolist() for c in group] for group in answers]


def plain(policy: Policy, requests: list[Prompt]) -> list[tuple[Completion, ...]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "PAGED_DEVICES", set())
        return list(generate_groups(Engine(policy, processes=1), requests))


def pages_backend(engine: Engine) -> CUDABackend:
    assert engine.scheduler is not None and isinstance(engine.scheduler.backend, CUDABackend)
    return engine.scheduler.backend


def copied_bytes(decoder: Fused) -> int:
    """Memory of the weights and adapters that are copied side by side."""
    return sum(target.nbytes for product in decoder.products for target, _ in product.copies())


def all_free(engine: Engine) -> bool:
    """Every page was given back, once."""
    backend = pages_backend(engine)
    return sorted(backend.pages.free.tolist()) == list(range(1, backend.pages.pages)) and not backend.promised


def work(prompt: Prompt) -> Work:
    requests = tuple(Request(prompt.ids, n, prompt.sampling, n) for n in range(prompt.samples))
    return Work(0, requests, np.array(prompt.ids))


def test_two_parts_merge_to_attention_over_both() -> None:
    """Against a softmax over all keys at once, in float64."""
    generator = np.random.default_rng(0)
    score, value = generator.normal(0, 3, (2, 5, 9)), generator.normal(0, 1, (2, 9, 4))
    weight = np.exp(score - score.max(-1, keepdims=True))
    expected = np.einsum("hql,hld->hqd", weight / weight.sum(-1, keepdims=True), value)

    def part(keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
        s, v = torch.tensor(score[..., keys]), torch.tensor(value[:, keys])
        return (s.softmax(-1) @ v)[None], torch.logsumexp(s, -1)[None]

    out, lse = merge(part(slice(0, 3)), part(slice(3, 9)))
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-12)
    np.testing.assert_allclose(lse.numpy(), np.log(np.exp(score).sum(-1)), rtol=1e-12)


def test_a_part_without_keys_weighs_nothing() -> None:
    nothing = torch.full((1, 1, 2), float("nan")), torch.tensor([[-torch.inf]])
    something = torch.tensor([[[3.0, 4.0]]]), torch.tensor([[0.5]])
    for pair in ((nothing, something), (something, nothing)):
        out, lse = merge(*pair)
        assert out.tolist() == [[3.0, 4.0]] and lse.tolist() == [0.5]


def test_pages_are_given_once_and_page_0_never() -> None:
    pages = Pages(6)
    first = pages.take(3)
    assert sorted(first.tolist()) == [1, 2, 3]
    pages.give(first[:1])
    pages.grow(9)
    rest = pages.take(len(pages.free))
    assert sorted([*first[1:], *rest]) == list(range(1, 9))


def test_buckets_hold_their_rows() -> None:
    for capacity in (1, 7, 256, 1000):
        sizes = [bucket(n, capacity) for n in range(1, capacity + 1)]
        assert all(n <= size <= min(capacity, max(4, 1.25 * n + 1)) for n, size in enumerate(sizes, 1))
        assert sizes == sorted(sizes) and len(set(sizes)) <= 8 * max(1, capacity).bit_length()


@pytest.mark.parametrize("rows", [5, 8, 64])
def test_long_responses_cross_pages_while_others_leave(policy: Policy, rows: int) -> None:
    """Prompts and responses of more than one page, groups larger than a tile, rows that stop and rows that do not."""
    generator = np.random.default_rng(0)
    requests = [
        Prompt(tuple(generator.integers(3, 24, length).tolist()), group, n, sampling)
        for n, (length, group, sampling) in enumerate(
            [
                (PAGE + 3, 3, Sampling(PAGE + 9, min_new_tokens=PAGE + 9)),
                (2, 5, Sampling(40)),
                (PAGE, 1, Sampling(2 * PAGE + 1)),
                (5, 4, Sampling(30, 0.7)),
                (1, 2, Sampling(3, top_k=4)),
            ]
        )
    ]
    engine = Engine(policy, rows)
    found = list(generate_groups(engine, requests))
    assert ids(found) == ids(plain(policy, requests))
    assert [c.finish for g in found for c in g] == [c.finish for g in plain(policy, requests) for c in g]
    assert all_free(engine)


def test_a_group_beyond_a_tile_is_cut(policy: Policy) -> None:
    """Forty rows of two query heads a key head do not fit into one program's 64 queries."""
    request = Prompt((5, 6, 7), 40, 3, Sampling(12))
    engine = Engine(policy)
    assert ids(list(generate_groups(engine, [request]))) == ids(plain(policy, [request]))
    backend = entered(engine, [request])
    backend.tile_size = 16
    assert backend._tiles(np.arange(backend.rows.count)).tolist() == [[0, 16, 32], [16, 16, 8], [3, 3, 3]]


def entered(engine: Engine, prompts: list[Prompt]) -> CUDABackend:
    """The backend with rows for these prompts, of which nothing is computed."""
    scheduler = engine._scheduler()
    works = [work(prompt) for prompt in prompts]
    scheduler.rows.reserve(64)
    scheduler.backend.prepare(works, 64, True)
    for one in works:
        scheduler.rows.count += len(one.requests)
        scheduler.backend.enter(one, scheduler.rows.count - len(one.requests))
    scheduler._enter(works, 0)
    return pages_backend(engine)


def test_tiles_follow_the_rows_that_stay(policy: Policy) -> None:
    backend = entered(Engine(policy), [Prompt((5, 6), 3, 0, Sampling(4)), Prompt((7,), 2, 1, Sampling(4))])
    rows = backend.rows
    rows.take(backend.remove(np.array([1, 3])))
    assert backend._tiles(np.arange(backend.rows.count)).tolist() == [[0, 2], [2, 1], [2, 1]]
    assert rows["seed"][:3].tolist() == [0, 2, 1] and rows["done"][:5].tolist() == [0, 0, 0, 1, 1]


def test_the_pool_grows_and_keeps_what_it_holds(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "AHEAD", 1)
    requests = [Prompt((5, 6, 7), 3, n, Sampling(3 * PAGE, min_new_tokens=3 * PAGE)) for n in range(2)]
    engine = Engine(policy)
    found = list(generate_groups(engine, requests))
    assert ids(found) == ids(plain(policy, requests))
    assert pages_backend(engine).pages.pages > 1 + 2 + 6


def test_a_history_that_grows_leaves_what_graphs_read_where_it_is(policy: Policy) -> None:
    """Each turn adds a page to what is before the next one. Device memory that moved would throw every captured graph away."""
    engine, states = Engine(policy), list[object]()
    for turn in range(4):
        engine.submit([Request((5,) * PAGE, turn, Sampling(4, min_new_tokens=4), n, turn, keep=True) for n in range(3)])
        while not engine.poll():
            pass
        states.append(pages_backend(engine).state)
    assert all(state is states[0] for state in states)
    engine.close()


def test_without_logits_in_memory_the_same_ids_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hot and cold rows; where the support is cut, logits are made."""
    rows, generator = Rows(6, 1, 1, 1, torch.device("cpu")), torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=generator).bfloat16() for n in (6, 40))
    rows["seed"].copy_(torch.arange(6) * 7919)
    rows.temperature.copy_(torch.tensor([1.0, 0.0, 0.7, 1.0, 1.0, 2.0]))
    rows.top_p.fill_(1.0)
    made: list[int] = []
    monkeypatch.setattr(
        fused_module, "head_logits", lambda h, head: (made.append(1), (h.float() @ head.weight_VH.float().t()))[1]
    )
    expected = fused_module.sample(hidden, Head(weight), rows, False)
    monkeypatch.setattr(fused_module, "_head_fits", lambda hidden, head: True)
    monkeypatch.setattr(fused_module, "TALL", 6)
    found = fused_module.sample(hidden, Head(weight), rows, False)
    assert len(made) == 1 and fused_module.sample(hidden, Head(weight), rows, True) and len(made) == 2
    assert found[0].tolist() == expected[0].tolist() and torch.allclose(found[1], expected[1], atol=1e-5)


def test_the_sampler_rounds_where_the_trainer_rounds() -> None:
    """In bf16 its log-probs are nearer to the trainer's than those are to a float32 forward."""
    policy = small_policy(dtype=torch.bfloat16, hidden_size=64, initializer_range=0.3)
    prompt = Prompt((5, 6, 7), 1, 1, Sampling(60, min_new_tokens=60))
    answer = next(generate_groups(Engine(policy), [prompt]))[0]
    every = np.concatenate([prompt.ids, answer.ids])
    batch = pack_examples([Example(every, np.arange(len(every)) >= 3)])
    with torch.no_grad():
        trained = forward(policy, batch).logprob_T[3:].float().numpy()
        logits = policy.model.float()(torch.tensor(every)[None]).logits[0, 2:-1]
    exact = torch.log_softmax(logits, -1).gather(1, torch.tensor(answer.ids)[:, None])[:, 0].numpy()
    assert np.abs(answer.logprobs - trained).mean() < 0.9 * np.abs(trained - exact).mean()


def test_a_bias_of_the_mlp_is_added_after_the_norm() -> None:
    policy = biased_policy()
    decoder, reason = fused_module.fused(policy)
    assert decoder is not None and not reason
    requests = [Prompt((5, 6, 7), 2, 1, Sampling(12, min_new_tokens=12))]
    assert ids(list(generate_groups(Engine(policy), requests))) == ids(plain(policy, requests))


def biased_policy() -> Policy:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        mlp_bias=True, eos_token_id=1, initializer_range=0.2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "bias" in name:
            torch.nn.init.normal_(parameter)
    return wrap_model(model, None, (1,))


def test_the_next_burst_is_launched_before_the_last_one_is_read(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the rows stay; where one of four ends, three go on beside its place, which others' pages do not mind."""
    calls: list[str] = []
    for name in ("launch", "_replay", "collect"):
        method = getattr(CUDABackend, name)
        monkeypatch.setattr(
            CUDABackend, name, lambda one, *given, name=name, method=method: (calls.append(name), method(one, *given))[1]
        )
    lengths = [3 * PAGE, 3 * PAGE - 1, 3 * PAGE - 3, 40]
    requests = [Prompt((5, 6, n), 1, n, Sampling(length, min_new_tokens=length)) for n, length in enumerate(lengths)]
    engine = Engine(policy)
    assert ids(list(generate_groups(engine, requests))) == ids(plain(policy, requests)) and all_free(engine)
    assert calls == ["launch", "_replay", *["_replay", "collect"] * 3, "collect"]


def test_rows_that_are_done_leave_before_the_host_has_read_what_they_drew(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In groups, of which some rows go on: in the third call, whose graphs are there, nothing waits for the host."""
    launches: list[int] = []
    launch = CUDABackend.launch
    monkeypatch.setattr(CUDABackend, "launch", lambda one: (launches.append(one.rows.count), launch(one))[1])
    monkeypatch.setattr(cuda, "FEW", 0)
    requests = [Prompt((5, 6, n), 3, n, Sampling(2 * PAGE)) for n in range(3, 7)]
    engine = Engine(policy)
    expected = ids(plain(policy, requests))
    assert len({len(one) for group in expected for one in group}) > 6
    assert ids(list(generate_groups(engine, requests))) == expected and len(launches) > 2
    assert ids(list(generate_groups(engine, requests))) == expected
    launches.clear()
    assert ids(list(generate_groups(engine, requests))) == expected and all_free(engine) and launches == [12]


def test_the_host_looks_while_the_device_has_steps_left(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of a burst; a row that ends in them goes on as one that is done, and what it drew is right."""
    looks: list[int] = []
    look = Drawn.look
    monkeypatch.setattr(Drawn, "look", lambda one: (looks.append(int(one.source.step)), look(one))[1])
    lengths = [64, 33, 32, 31, 18, 17]  # the first token is the prefill's
    requests = [Prompt((5, 6, n), 1, n, Sampling(length, min_new_tokens=length)) for n, length in enumerate(lengths)]
    monkeypatch.setattr(cuda, "BURST", 16)
    monkeypatch.setattr(cuda, "FEW", 0)
    engine = Engine(policy)
    for _ in range(2):
        looks.clear()
        assert ids(list(generate_groups(engine, requests))) == ids(plain(policy, requests)) and all_free(engine)
    assert looks == [14, 14, 14, 9, 2], "the last burst is short, so that little is left to be written down after it"


def test_a_burst_of_rows_that_had_all_ended_is_nothing(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows stop by themselves, most of them after the host's look; between calls weights are published, memory is given back, or
    a call is left half-way."""
    monkeypatch.setattr(cuda, "STOPPABLE", 3)
    generator, engine = np.random.default_rng(0), Engine(policy, 6)
    for version in range(8):
        prompts = [
            Prompt((5, int(n)), int(generator.integers(1, 4)), 10 * version + int(n), Sampling(int(generator.integers(2, 30))))
            for n in generator.integers(3, 9, generator.integers(1, 4))
        ]
        engine.publish(version)
        found = list(generate_groups(engine, prompts))
        assert ids(found) == ids(plain(policy, prompts)) and all_free(engine)
        assert {int(v) for group in found for c in group for v in c.versions} == {version}
        if version % 3 == 1:
            engine.release()
        if version % 3 == 2:
            half = generate_groups(engine, [Prompt((7, 8), 3, version, Sampling(20)), *prompts])
            next(half)
            half.close()
            assert all_free(engine)
    engine.close()


def test_a_caller_who_stops_half_way_leaves_the_pool_free(policy: Policy) -> None:
    engine = Engine(policy, 4)
    requests = [Prompt((5, n), 2, n, Sampling(20, min_new_tokens=20)) for n in range(3, 8)]
    expected = ids(plain(policy, requests))
    half = generate_groups(engine, requests)
    assert ids([next(half)]) == expected[:1]
    half.close()
    assert all_free(engine) and ids(list(generate_groups(engine, requests))) == expected


def test_memory_given_back_is_taken_anew(policy: Policy) -> None:
    engine, requests = Engine(policy), [Prompt((5, 6), 2, 0, Sampling(20))]
    before = ids(list(generate_groups(engine, requests)))
    backend = pages_backend(engine)
    copied = copied_bytes(backend.decoder)
    assert backend.stores and copied == 4 * 2 * 16 * (16 + 8 + 8 + 24 + 24), "q, k, v, gate and up of two layers of width 16"
    engine.release()
    assert not backend.stores and backend.state is None
    assert all(product.weight.numel() == 0 for product in backend.decoder.products)
    assert ids(list(generate_groups(engine, requests))) == before and copied_bytes(backend.decoder) == copied


def test_rows_in_flight_go_on_after_their_memory_was_given_back(policy: Policy) -> None:
    engine = Engine(policy, 2)
    requests = [Prompt((5, n), 2, n, Sampling(100, min_new_tokens=100)) for n in range(3, 6)]
    half = generate_groups(engine, requests)
    first = next(half)
    engine.release()
    assert ids([first, *half]) == ids(plain(policy, requests)) and all_free(engine)
    assert engine.statistics.recomputed > 0


def test_too_little_memory_for_a_group_says_what_to_lower(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    request = Prompt(tuple(range(3, 3 + PAGE)), 8, 0, Sampling(4 * PAGE))
    backend = Engine(policy)._backend()
    assert isinstance(backend, CUDABackend)
    monkeypatch.setattr(CUDABackend, "page_bytes", 1 << 30)
    monkeypatch.setattr(CUDABackend, "room", lambda _: 10)
    with pytest.raises(
        UserError, match=r"needs 33 GiB of cache, and there is room for 10 GiB: lower max_new_tokens to 64, or the group to 2"
    ):
        backend.check_room([work(request)])
    monkeypatch.setattr(CUDABackend, "room", lambda _: 3)  # less than a page for each of the eight
    with pytest.raises(UserError, match="there is room for 3 GiB: the device's memory is taken; end what else runs on it"):
        backend.check_room([work(request)])
    monkeypatch.setattr(CUDABackend, "room", lambda _: 34)
    backend.check_room([work(request)] * 9)


def prompt(pages: int) -> tuple[int, ...]:
    return tuple(3 + n % 7 for n in range(pages * PAGE))


def exactly(pages: int) -> Sampling:
    return Sampling(pages * PAGE, min_new_tokens=pages * PAGE)


CROWDS: dict[str, tuple[list[Prompt], int]] = {  # requests, and the pages that there is room for, one of them nobody's
    "rows of different length": ([Prompt((5,), 8, 0, exactly(1)), Prompt((6,), 1, 1, exactly(2))], 13),
    # where one row of a group is left, so is its prompt, of five pages
    "stragglers": ([Prompt(prompt(5), 2, n, Sampling(PAGE)) for n in range(12)], 29),
    # as many rows as the largest group has, each as long as the longest
    "a large group among long ones": (
        [Prompt((5,), 8, 0, Sampling(2)), *(Prompt((5, n), 1, n, exactly(3)) for n in range(3, 11))], 10),
    "no page to spare": ([Prompt(prompt(2), 3, n, exactly(2)) for n in range(4)], 9),
}  # fmt: skip


@pytest.mark.parametrize("name", CROWDS)
def test_the_pool_never_grows_past_its_room(name: str, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for room is answered as if there were enough; and the room is used."""
    requests, room = CROWDS[name]
    monkeypatch.setattr(cuda, "AHEAD", PAGE)
    monkeypatch.setattr(CUDABackend, "room", lambda _: room)
    engine, sizes, live = Engine(policy), [], []
    grow, launch = CUDABackend.grow, CUDABackend.launch
    monkeypatch.setattr(CUDABackend, "grow", lambda one, pool: (sizes.append(pool), grow(one, pool))[1])
    monkeypatch.setattr(CUDABackend, "launch", lambda one: (live.append(len(one.prompts)), launch(one))[1])
    found = list(generate_groups(engine, requests))
    assert sizes and max(sizes) <= room and max(live) > 1 - (name == "no page to spare")
    assert ids(found) == ids(plain(policy, requests))


def test_a_quarter_more_is_cut_at_the_room(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of 23 pages are taken, a quarter of them is 5, and there is room for 3."""
    monkeypatch.setattr(cuda, "AHEAD", PAGE)
    monkeypatch.setattr(CUDABackend, "room", lambda _: 26)
    backend = entered(Engine(policy), [Prompt((5,), 8, 0, exactly(3))])
    pages = backend.pages
    backend._take(23 - pages.pages + len(pages.free))
    assert pages.pages == 23
    assert len(backend._take(1)) == 1 and pages.pages == 26, "not 28"
    assert len(backend._take(2)) == 2 and pages.pages == 26


def test_random_crowds_stay_within_their_room(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(0)
    for _ in range(12):
        requests = [
            Prompt(prompt(1)[: generator.integers(1, PAGE)] + prompt(generator.integers(0, 3)), int(generator.integers(1, 5)), n,
                    Sampling(int(generator.integers(1, 3 * PAGE))))
            for n in range(generator.integers(1, 7))
        ]  # fmt: skip
        need = [pages_of(len(r.ids)) + r.samples * pages_of(r.sampling.max_new_tokens) for r in requests]
        room = max(need) + 1 + int(generator.integers(0, 4))
        monkeypatch.setattr(CUDABackend, "room", lambda _, room=room: room)
        engine = Engine(policy)
        assert ids(list(generate_groups(engine, requests))) == ids(plain(policy, requests))
        assert pages_backend(engine).pages.pages <= room and all_free(engine)


def test_new_weights_are_sampled_from_at_once() -> None:
    """In place, as an optimizer writes them, and in a new place, as loading does."""
    policy = small_policy(dtype=torch.float32)
    engine, requests = Engine(policy), [Prompt((5, 6), 4, 0, Sampling(20))]
    old = ids(list(generate_groups(engine, requests)))
    kept = pages_backend(engine).decoder
    for change in ("place", "data"):
        with torch.no_grad():
            for parameter in policy.model.parameters():
                if change == "place":
                    parameter.mul_(1.3)
                else:
                    parameter.data = parameter.data * 0.8
        new = ids(list(generate_groups(engine, requests)))
        assert new == ids(plain(policy, requests)) and new != old
        assert (pages_backend(engine).decoder is kept) == (change == "place")
        old = new


RANK, INPUTS = 3, {"q_proj": 16, "k_proj": 16, "v_proj": 16, "o_proj": 16, "gate_proj": 16, "up_proj": 16, "down_proj": 24}


@pytest.mark.parametrize(
    ("targets", "narrow"),
    [(tuple(INPUTS), False), (tuple(INPUTS), True), (("q_proj", "v_proj", "down_proj"), True), (("up_proj",), False)],
)
def test_adapters_are_sampled_beside_the_weights_and_an_update_is_seen_at_once(targets: tuple[str, ...], narrow: bool) -> None:
    """In the same pages, with the log-probs of the adapted policy; after merging, as a plain model. 4 bits are not copied."""
    pytest.importorskip("peft")
    policy = small_policy(dtype=torch.float32)
    if narrow:
        nf4.quantize_layers(policy.body, "cpu")
    add_adapters(policy.model, Lora(rank=RANK, alpha=6.0, targets=targets), 1)
    engine, requests = Engine(policy), [Prompt((5, 6, 7), 8, 0, Sampling(20)), Prompt((9,), 8, 1, Sampling(20))]
    bits = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    old = ids(list(generate_groups(engine, requests)))
    assert all(torch.equal(p, bits[name]) for name, p in policy.model.named_parameters()), "the proof left no trace"
    kept = pages_backend(engine).decoder
    assert old == ids(plain(policy, requests))
    copied = sum(INPUTS[name] * RANK for name in targets) + sum(OUTPUTS[name] * RANK for name in targets)
    assert copied_bytes(kept) == 4 * 2 * ((not narrow) * 16 * (16 + 8 + 8 + 24 + 24) + copied)
    assert not narrow or all(product.weight.numel() == 0 for product in kept.products)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.3 * torch.sin(torch.arange(parameter.numel()).view_as(parameter) + 1.0))
    found = list(generate_groups(engine, requests))
    assert pages_backend(engine).decoder is kept and ids(found) == ids(plain(policy, requests)) != old
    for completion in found[0]:
        sequence = np.concatenate([(5, 6, 7), completion.ids])
        with torch.no_grad():
            batch = pack_examples([Example(sequence, np.arange(len(sequence)) > 2)])
            expected = forward(policy, batch).logprob_T[3:].numpy()
        np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=1e-4)
    merge_adapters(policy.model)
    assert ids(list(generate_groups(engine, requests))) == ids(found) and pages_backend(engine).decoder is not kept


OUTPUTS = {"q_proj": 16, "k_proj": 8, "v_proj": 8, "o_proj": 16, "gate_proj": 24, "up_proj": 24, "down_proj": 16}


def test_adapters_of_another_kind_take_the_plain_path(capsys: pytest.CaptureFixture[str]) -> None:
    peft = pytest.importorskip("peft")
    policy = small_policy(dtype=torch.float32)
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True), policy.body)
    engine, requests = Engine(policy), [Prompt((5, 6), 2, 0, Sampling(8))]
    assert ids(list(generate_groups(engine, requests))) == ids(plain(policy, requests))
    assert "linear layers that are neither plain matrices nor have a plain adapter" in capsys.readouterr().err


def test_too_little_memory_reaches_the_caller_before_anything_is_computed(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six pages at hand, one of which is nobody's, and a group of three of 100 tokens: a page for the prompt and two for each."""
    engine = Engine(policy)
    monkeypatch.setattr(CUDABackend, "room", lambda _: 6)
    with pytest.raises(UserError, match="lower max_new_tokens to 64, or the group to 2"):
        list(generate_groups(engine, [Prompt((5, 6), 3, 0, Sampling(100))]))
    assert not pages_backend(engine).stores and not engine.sessions


@pytest.mark.parametrize(("name", "changes", "reason"), [
    ("GPT2Config", {"n_positions": 64, "n_embd": 32, "n_head": 4, "n_layer": 2}, "GPT2Model is not built like a Llama"),
    ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}, "MixtralSparseMoeBlock is not the MLP of a Llama|not built"),
])  # fmt: skip
def test_other_families_take_the_plain_path_and_say_so_once(
    name: str, changes: dict[str, int], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = {"vocab_size": 24, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1}  # fmt: skip
    torch.manual_seed(0)
    config = getattr(transformers, name)(**(shape | changes))
    policy = wrap_model(
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval(), None, (1,), "the model"
    )
    engine, requests = Engine(policy), [Prompt((5, 6), 2, 0, Sampling(8))]
    found = [ids(list(generate_groups(engine, requests))) for _ in range(2)]
    said = capsys.readouterr().err.splitlines()
    assert found[0] == found[1] == ids(plain(policy, requests))
    assert len(said) == 1 and said[0].startswith(
        "warning: engine: the model generates on the plain path, without CUDA graphs, several times slower: "
    )
    assert any(part in said[0] for part in reason.split("|"))


def test_nothing_that_is_sent_to_the_device_waits_for_it(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, the state of the rows, what a second turn copies, and rows that go on after new weights."""
    engine, waited = Engine(policy, 4), copies_that_wait(monkeypatch)
    for turn in range(2):
        engine.submit([Request((5, 6, 7), n, Sampling(9, min_new_tokens=9), n, turn, keep=True) for n in range(3)])
        while len(engine.poll()) < 3:
            pass
    engine.submit([Request((5, 6), 9, Sampling(90, min_new_tokens=90), 9)])
    engine.poll()
    engine.publish(1)
    while not engine.poll():
        pass
    engine.close()
    assert not waited
