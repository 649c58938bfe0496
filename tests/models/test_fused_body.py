"""The fused way through a model computes what the module computes, and so do its gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from posttrain.models.attention import LAYOUT, Packed, Rule
from posttrain.models.familiar import rules_of, strangeness
from posttrain.models.fused_body import FusedBody, fused_body
from posttrain.models.policy import Policy, adopt

SHAPE = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "initializer_range": 0.3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "qwen2-window": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 6,
                                     "layer_types": ["sliding_attention", "full_attention"]}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "gemma": ("GemmaConfig", {"head_dim": 16}),
}  # fmt: skip
IDS, POSITION, STARTS = torch.arange(3, 23), torch.cat([torch.arange(12), torch.arange(8)]), (0, 12, 20)


def make(family: str) -> Policy:
    name, changes = FAMILIES[family]
    torch.manual_seed(1)
    config = getattr(transformers, name)(**(SHAPE | changes))
    return adopt(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32), None, (1,))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_hidden_states_and_gradients_are_the_modules(family: str, checkpointing: bool) -> None:
    policy = make(family)
    assert strangeness(policy) is None
    rules, _, packed = rules_of(policy, IDS, POSITION, STARTS)
    assert rules is not None and (family != "qwen2-window" or {r.sliding_window for r in rules} == {6, None})

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        return packed.attend(layer, *(t.transpose(0, 1)[None] for t in (query, key, value)), rule)[0]

    found = []
    for fused in (False, True):
        policy.model.zero_grad()
        policy.body.gradient_checkpointing = fused and checkpointing
        if fused:
            hidden = FusedBody(policy, rules).hidden(IDS, POSITION, 12, attend)
        else:
            hidden = policy.hidden(IDS[None], POSITION[None], **{LAYOUT: packed})[0]
        hidden.sin().sum().backward()
        found.append([hidden.detach(), *(p.grad.clone() for p in policy.body.parameters())])
    for mine, expected in zip(*found, strict=True):
        assert float((mine - expected).norm()) <= 1e-5 * float(expected.norm())


def test_what_is_not_a_llama_is_named() -> None:
    policy = adopt(
        transformers.AutoModelForCausalLM.from_config(
            transformers.GPT2Config(vocab_size=40, n_positions=64, n_embd=32, n_head=4, n_layer=1), dtype=torch.float32
        ), None, (1,),
    )  # fmt: skip
    assert strangeness(policy) == "GPT2Model is not built like a Llama"
    llama = make("llama")
    llama.body.layers[0].mlp.up_proj = torch.nn.Sequential(llama.body.layers[0].mlp.up_proj)
    assert strangeness(llama) == "layers that are not plain matrices, as adapters are"


def test_it_is_for_cuda() -> None:
    assert fused_body(make("llama")) is None


def test_rules_need_every_layer() -> None:
    policy = make("llama")
    rules, hidden, layout = rules_of(policy, IDS, POSITION, STARTS)
    assert rules is not None and len(rules) == 2 and hidden.shape == (20, 32) and isinstance(layout, Packed)
