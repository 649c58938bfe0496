"""Argmax ids equal to those of `transformers.generate`, and log-probs to those of a full forward, family by family."""

from __future__ import annotations

import copy
from functools import cache

import numpy as np
import pytest
import torch
import transformers
from families_for_tests import EVERY, HEADS, IDS, PADDED, SHAPE, STOP, models, stock_model

from posttrain.collect import Prompt, generate_groups
from posttrain.engine.cpu import CPUBackend
from posttrain.engine.cuda import CUDABackend
from posttrain.engine.engine import Engine
from posttrain.errors import UserError
from posttrain.models import attention
from posttrain.models.policy import wrap_model
from posttrain.train.forward import forward
from posttrain.train.pack import pack_examples
from posttrain.types import Example, Sampling

pytestmark = pytest.mark.usefixtures("every_way")
PROMPTS = [(5,), (7, 8, 9), (3, 4, 5, 6, 7, 8, 9, 10, 11), (20, 19, 18, 17)]
LENGTH = 24  # far past every sliding window


@cache
def greedy_ids(family: str, prompt: tuple[int, ...]) -> list[int]:
    """What transformers continues a prompt with."""
    ids = stock_model(family).generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=LENGTH, eos_token_id=STOP, pad_token_id=0,
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
    )  # fmt: skip
    return ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", EVERY)
def test_greedy_ids_are_those_of_transformers(family: str) -> None:
    """All prompts at once here, one by one there. Log-probs of a sampled continuation agree with the stock model's forward."""
    _, policy = models(family)
    requests = [Prompt(prompt, 1, 0, Sampling(LENGTH, temperature=0.0)) for prompt in PROMPTS]
    for prompt, (completion,) in zip(PROMPTS, generate_groups(Engine(policy), requests), strict=True):
        expected = greedy_ids(family, prompt)
        assert completion.ids.tolist() == expected
        assert completion.logprobs.tolist() == [0.0] * len(expected)


@pytest.mark.parametrize("family", EVERY)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_a_full_forward(family: str, temperature: float) -> None:
    """The engine's own, transformers' softmax of the whole sequence, and the trainer's: three ways, one number."""
    stock, policy = models(family)
    near = 1e-4 if family in PADDED else 2e-5  # transformers computes a state in pieces, and token by token
    requests = [Prompt(prompt, 2, n, Sampling(LENGTH, temperature)) for n, prompt in enumerate(PROMPTS)]
    for request, completions in zip(requests, generate_groups(Engine(policy), requests), strict=True):
        for completion in completions:
            ids = np.concatenate([request.ids, completion.ids])
            first = len(request.ids)
            with torch.no_grad():
                logits = stock(torch.tensor(ids)[None]).logits[0].float() / temperature
                batch = pack_examples([Example(ids, np.arange(len(ids)) >= first)]).replace(temperature=temperature)
                trained = forward(policy, batch).logprob_T[first:]
            full = torch.log_softmax(logits[first - 1 : -1], -1).gather(1, torch.tensor(completion.ids)[:, None])[:, 0]
            np.testing.assert_allclose(completion.logprobs, full.numpy(), rtol=0, atol=near)
            np.testing.assert_allclose(completion.logprobs, trained.numpy(), rtol=0, atol=near)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3-moe"])
def test_neither_decoder_leaves_the_family_to_its_module(family: str, every_way: str) -> None:
    """Also a mixture of experts has the fast path."""
    _, policy = models(family)
    engine = Engine(policy, processes=1)
    list(generate_groups(engine, [Prompt((5, 6), 1, 0, Sampling(4))]))
    assert engine.scheduler is not None
    backend = engine.scheduler.backend
    if every_way == "pages":
        assert isinstance(backend, CUDABackend)
    else:
        assert isinstance(backend, CPUBackend) and (backend.make_decoder(1) is None) == (every_way in ("module", "batches"))


def test_dropout_is_off_where_a_family_has_it() -> None:
    """GPT-2 trains with dropout by default: the trainer's distribution would not be the one that was sampled from."""
    _, policy = models("gpt2")
    batch = pack_examples([Example(np.arange(3, 15), np.arange(12) > 0)])
    policy.model.train()
    with torch.no_grad():
        assert torch.equal(forward(policy, batch).logprob_T, forward(policy, batch).logprob_T)


def test_an_attention_that_ours_does_not_know_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here as if sinks were unknown."""
    monkeypatch.setattr(attention, "SUPPORTED", attention.SUPPORTED - {"s_aux"})
    assert wrap_model(copy.deepcopy(stock_model("gpt-oss")), None, (STOP,)).padded


def test_a_model_that_is_not_causal_is_refused() -> None:
    """One clear line instead of a model that trains wrongly."""
    config = transformers.BertConfig(**SHAPE | HEADS | IDS)
    with pytest.raises(
        UserError,
        match=r"^BertLMHeadModel: this architecture is not supported: outputs differ from the model's own by .* "
        r"\(at most 0.0002 is rounding\); with its own attention: outputs differ",
    ):
        wrap_model(transformers.AutoModelForCausalLM.from_config(config).eval(), None, (STOP,))
