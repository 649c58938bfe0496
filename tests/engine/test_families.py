"""Argmax ids equal to those of `transformers.generate`, and log-probs to those of a full forward, family by family."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from material_for_tests import VOCABULARY

from posttrain.collect import Prompt, generate_groups
from posttrain.engine.cpu import CPUBackend
from posttrain.engine.cuda import CUDABackend
from posttrain.engine.engine import Engine
from posttrain.models.policy import Policy, wrap_model
from posttrain.train.forward import forward
from posttrain.train.pack import pack_examples
from posttrain.types import Example, Sampling

pytestmark = pytest.mark.usefixtures("every_way")
STOP = 1
SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "initializer_range": 0.3}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
IDS = {"bos_token_id": 0, "eos_token_id": STOP, "pad_token_id": 0}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"attention_bias": True}),
    "smollm": (
        "LlamaConfig",
        {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
    ),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 6, **LAYERS}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "qwen3-moe": ("Qwen3MoeConfig", {"head_dim": 16, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}),
    "gemma2": (
        "Gemma2Config",
        {"head_dim": 8, "sliding_window": 6, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0, **LAYERS},
    ),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 8, "sliding_window": 6, **LAYERS}),
    "mistral": ("MistralConfig", {"sliding_window": 6}),
    "granite": ("GraniteConfig", {"logits_scaling": 4.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5}),
    "cohere": ("CohereConfig", {"logit_scale": 0.5}),
    "gpt2": ("GPT2Config", {"n_positions": 128}),
}
PROMPTS = [(5,), (7, 8, 9), (3, 4, 5, 6, 7, 8, 9, 10, 11), (20, 19, 18, 17)]
LENGTH = 24  # far past every sliding window


@cache
def stock_model(family: str) -> Any:
    """A random model as transformers runs it, with eager attention."""
    name, changes = FAMILIES[family]
    config = getattr(transformers, name)(**(SHAPE | HEADS | IDS | changes))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()


def models(family: str) -> tuple[Any, Policy]:
    """The same random model twice: as transformers runs it, and with our attention in it."""
    stock = stock_model(family)
    policy = wrap_model(copy.deepcopy(stock), None, (STOP,))
    assert stock.config._attn_implementation == "eager" and policy.model.config._attn_implementation == "posttrain"
    return stock, policy


@cache
def greedy_ids(family: str, prompt: tuple[int, ...]) -> list[int]:
    """What transformers continues a prompt with."""
    ids = stock_model(family).generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=LENGTH, eos_token_id=STOP, pad_token_id=0,
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
    )  # fmt: skip
    return ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_ids_are_those_of_transformers(family: str) -> None:
    """All prompts at once here, one by one there. Log-probs of a sampled continuation agree with the stock model's forward."""
    _, policy = models(family)
    requests = [Prompt(prompt, 1, 0, Sampling(LENGTH, temperature=0.0)) for prompt in PROMPTS]
    for prompt, (completion,) in zip(PROMPTS, generate_groups(Engine(policy), requests), strict=True):
        expected = greedy_ids(family, prompt)
        assert completion.ids.tolist() == expected
        assert completion.logprobs.tolist() == [0.0] * len(expected)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_a_full_forward(family: str, temperature: float) -> None:
    """The engine's own, transformers' softmax of the whole sequence, and the trainer's: three ways, one number."""
    stock, policy = models(family)
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
            np.testing.assert_allclose(completion.logprobs, full.numpy(), rtol=0, atol=2e-5)
            np.testing.assert_allclose(completion.logprobs, trained.numpy(), rtol=0, atol=2e-5)


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
        assert isinstance(backend, CPUBackend) and (backend.make_decoder(1) is None) == (every_way == "module")


def test_dropout_is_off_where_a_family_has_it() -> None:
    """GPT-2 trains with dropout by default: the trainer's distribution would not be the one that was sampled from."""
    _, policy = models("gpt2")
    batch = pack_examples([Example(np.arange(3, 15), np.arange(12) > 0)])
    policy.model.train()
    with torch.no_grad():
        assert torch.equal(forward(policy, batch).logprob_T, forward(policy, batch).logprob_T)


def test_an_attention_we_do_not_know_is_refused() -> None:
    """GPT-OSS asks for attention sinks: one clear line instead of a model that trains wrongly."""
    from posttrain.errors import UserError

    sizes = {"num_local_experts": 4, "head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    model = transformers.AutoModelForCausalLM.from_config(transformers.GptOssConfig(**(SHAPE | HEADS | IDS | sizes))).eval()
    with pytest.raises(UserError, match="does not work with packed attention: GptOssAttention asks its attention for s_aux"):
        wrap_model(model, None, (STOP,))
