"""Models that our attention cannot compute are trained and scored as their sequences are one by one."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import transformers
from families_for_tests import HEADS, IDS, SHAPE, STOP, models, stock_model

from posttrain.engine import padded
from posttrain.engine.engine import Engine
from posttrain.engine.padded import PaddedBackend, plain_backend
from posttrain.errors import UserError
from posttrain.models.policy import wrap_model
from posttrain.models.scorer import from_policy
from posttrain.train.forward import forward, scores
from posttrain.train.pack import pack_examples
from posttrain.train.sharding import Sharded
from posttrain.types import Batch, Example, Request, Sampling

# beginnings in common, of which attention alone would compute one; all lengths, and all the same
COMMON = [np.array([3, 4, 5, 6, 7, 8, 9, 10, 11, *rest]) for rest in ([12], [13, 14, 15, 16], [], [12, 13])]
ALIKE = [np.arange(3 + n, 12 + n) for n in range(3)]


@pytest.fixture(params=["qwen3.5", "lfm2", "mamba", "falcon-h1", "bloom", "gptj", "stablelm", "diffllama", "qwen2-moe"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def packed(sequences: list[np.ndarray]) -> Batch:
    return pack_examples([Example(ids, np.arange(len(ids)) > 0) for ids in sequences])


def test_a_state_is_known_where_no_number_shows_it(family: str) -> None:
    """In bfloat16, of small random weights, such as samplers of other processes and pretraining begin with."""
    config = copy.deepcopy(stock_model(family).config)
    config.initializer_range = 0.005
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert wrap_model(model.eval(), None, (STOP,)).padded


@pytest.mark.parametrize("sequences", [COMMON, ALIKE], ids=["common", "alike"])
def test_gradients_are_those_of_the_sequences_one_by_one(family: str, sequences: list[np.ndarray]) -> None:
    stock, policy = models(family)
    stock, batch = copy.deepcopy(stock), packed(sequences)
    logprob_T = forward(policy, batch).logprob_T
    logprob_T[~torch.isin(torch.arange(batch.tokens), torch.tensor(batch.starts))].sum().backward()
    for start, ids in zip(batch.starts, sequences, strict=False):
        one = torch.from_numpy(ids)
        own = torch.log_softmax(stock(one[None]).logits[0], -1)[:-1].gather(1, one[1:, None])[:, 0]
        np.testing.assert_allclose(logprob_T[start + 1 : start + len(ids)].detach(), own.detach(), rtol=0, atol=1e-4)
        own.sum().backward()
    expected = dict(stock.named_parameters())
    for name, parameter in policy.model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["qwen3.5", "lfm2", "mamba"])
def test_scores_are_those_of_the_sequences_one_by_one(name: str) -> None:
    """transformers has a model with a score for the first alone."""
    _, policy = models(name)
    scorer = from_policy(policy, zero=False)
    assert scorer.padded and scorer.model.config._attn_implementation == "eager"
    together = scores(scorer, packed(COMMON))
    alone = torch.cat([scores(scorer, packed([ids])) for ids in COMMON])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)


def test_it_is_not_spread_over_processes() -> None:
    _, policy = models("lfm2")
    with pytest.raises(
        UserError,
        match="^Lfm2ForCausalLM keeps its own attention, whose weights cannot be spread over processes; use parallel=ddp$",
    ):
        Sharded(policy)


def test_a_cache_of_another_kind_is_refused_where_it_samples() -> None:
    """MiniMax trains; its own cache is none of transformers' common ones."""
    layers = {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 4, "head_dim": 8}
    config = transformers.MiniMaxConfig(**(SHAPE | HEADS | IDS | layers))
    policy = wrap_model(transformers.AutoModelForCausalLM.from_config(config).eval(), None, (STOP,))
    assert forward(policy, packed(COMMON)).logprob_T.isfinite().all()
    with pytest.raises(
        UserError, match=r"MiniMaxForCausalLM cannot be sampled token by token here: .*; let vLLM sample \(sampler=vllm\)$"
    ):
        plain_backend(policy)


@pytest.mark.parametrize("name", ["qwen3.5", "lfm2", "mamba"])
def test_a_long_prompt_does_not_widen_the_batch_of_short_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch as wide as its longest prompt would take a hundred times the memory. Answers are those of each prompt alone, also of rows
    that were computed again in the middle."""
    _, policy = models(name)
    monkeypatch.setattr(padded, "PREFILL_TOKENS", 150)
    made = list[tuple[int, int]]()
    begin = padded.Batch.__init__
    monkeypatch.setattr(padded.Batch, "__init__", lambda *a: made.append((len(a[2]), max(map(len, a[2])))) or begin(*a))
    ids = [np.arange(n, n + length) % 20 + 3 for n, length in enumerate((9, 90, 5, 7, 4, 80, 6))]
    requests = [Request(tuple(one), 7 * n + m, Sampling(12), 9 * n + m, 0, n) for n, one in enumerate(ids) for m in (0, 1)]
    alone = {r.session: finished(Engine(policy, processes=1), [r])[r.session] for r in requests}
    for again in (False, True):
        made.clear()
        engine = Engine(policy, processes=1, bursts=1)
        assert finished(engine, requests, again) == alone
        assert made[:3] == [(5, 9), (1, 80), (1, 90)]
        assert all(count * width <= 150 for count, width in made) and (len(made) > 3) == again


def finished(engine: Engine, requests: list[Request], again: bool = False) -> dict[int, list[int]]:
    """The sampled ids by session; `again` publishes the same weights after some tokens."""
    engine.submit(requests)
    found = dict[int, list[int]]()
    for poll in range(200):
        found |= {request.session: completion.ids.tolist() for request, completion in engine.poll(0.0)}
        if again and poll == 3:
            engine.publish(1)
    return found


def test_a_body_that_decodes_otherwise_than_it_trains_is_refused() -> None:
    _, policy = models("olmo")
    attention = policy.body.layers[1].self_attn
    attention.layer_idx = 0  # both layers write one cache
    with pytest.raises(
        UserError, match=r"OlmoForCausalLM cannot be sampled token by token here: outputs differ by .* is rounding"
    ):
        plain_backend(policy)


def test_keys_for_many_tokens_are_of_one_sequence(long: list[np.ndarray]) -> None:
    """DeepSeek-V4 makes one key of 128 tokens: end to end, of its neighbours'. Padded on the left, of padding."""
    config = transformers.DeepseekV4Config(**(SHAPE | HEADS | IDS | {"max_position_embeddings": 512}))
    stock = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    policy, batch = wrap_model(copy.deepcopy(stock), None, (STOP,)), packed(long)
    with torch.no_grad():
        logprob_T = forward(policy, batch).logprob_T
        for start, ids in zip(batch.starts, long, strict=False):
            one = torch.from_numpy(ids)
            own = torch.log_softmax(stock(one[None], use_cache=False).logits[0], -1)[:-1].gather(1, one[1:, None])[:, 0]
            np.testing.assert_allclose(logprob_T[start + 1 : start + len(ids)], own, rtol=0, atol=1e-4)
        assert torch.equal(scores(from_policy(policy), batch), torch.zeros(batch.tokens))
    with pytest.raises(
        UserError, match=r"DeepseekV4ForCausalLM cannot be sampled token by token here: what its keys stand for"
    ):
        plain_backend(policy)


@pytest.fixture
def long() -> list[np.ndarray]:
    draws = np.random.default_rng(0)
    return [draws.integers(3, SHAPE["vocab_size"], length) for length in (150, 300, 17)]


@pytest.mark.parametrize("name", ["mamba", "qwen3.5", "falcon-h1"])
def test_half_precision_is_trained_and_sampled(name: str) -> None:
    """Mamba's states are float32, also where its head is not."""
    policy = wrap_model(copy.deepcopy(stock_model(name)).bfloat16(), None, (STOP,))
    forward(policy, packed(COMMON)).logprob_T.sum().backward()
    assert plain_backend(policy) is PaddedBackend


def test_a_cache_whose_rows_do_not_move_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _, policy = models("lfm2")
    monkeypatch.setattr(transformers.DynamicCache, "reorder_cache", lambda *_: None)
    with pytest.raises(UserError, match="cannot be sampled token by token here: outputs differ"):
        plain_backend(policy)
