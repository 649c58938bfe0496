"""The fused way through a model computes what the module computes, and so do its gradients."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from posttrain.errors import UserError
from posttrain.models.attention import LAYOUT, Packed, Rule
from posttrain.models.fused_body import PROVED, FusedBody, fused_body
from posttrain.models.layers import rules_of, unsupported_reason
from posttrain.models.lora import Lora, add_adapters, perturbed_adapters
from posttrain.models.policy import Policy, wrap_model
from posttrain.models.scorer import Scorer, from_policy

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


def make(family: str, dtype: torch.dtype = torch.float32, **more: Any) -> Policy:
    name, changes = FAMILIES[family]
    torch.manual_seed(1)
    config = getattr(transformers, name)(**(SHAPE | changes | more))
    return wrap_model(transformers.AutoModelForCausalLM.from_config(config, dtype=dtype), None, (1,))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("targets", [None, (), ("k_proj", "v_proj", "o_proj", "gate_proj")])
def test_hidden_states_and_gradients_are_the_modules(family: str, checkpointing: bool, targets: tuple[str, ...] | None) -> None:
    """Of every weight; with adapters, on all layers or on some, of those that learn."""
    policy = make(family)
    if targets is not None:
        pytest.importorskip("peft")
        add_adapters(policy.model, Lora(rank=2, alpha=5.0, targets=targets), 0)
    with perturbed_adapters(policy.body):
        compare(policy, family, checkpointing)


def test_a_scorer_takes_the_same_way() -> None:
    """A reward model's or a critic's body is a policy's."""
    compare(from_policy(make("llama"), zero=False), "llama", False)


def compare(policy: Policy | Scorer, family: str, checkpointing: bool) -> None:
    assert unsupported_reason(policy) is None
    rules, _, packed = rules_of(policy, IDS, POSITION, STARTS)
    assert rules is not None and (family != "qwen2-window" or {r.sliding_window for r in rules} == {6, None})

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        return packed.attend(layer, *(t.transpose(0, 1)[None] for t in (query, key, value)), rule)[0]

    assert FusedBody(policy, rules).proved(policy, IDS, POSITION, packed, attend)
    found = []
    for fused in (False, True):
        policy.model.zero_grad()
        policy.body.gradient_checkpointing = fused and checkpointing
        if fused:
            hidden = FusedBody(policy, rules).hidden(IDS, POSITION, 12, attend)
        else:
            hidden = policy.hidden(IDS[None], POSITION[None], **{LAYOUT: packed})[0]
        hidden.sin().sum().backward()
        found.append([hidden.detach(), *(p.grad.clone() for p in policy.body.parameters() if p.requires_grad)])
    assert len(found[0]) > 8
    for mine, expected in zip(*found, strict=True):
        assert float((mine - expected).norm()) <= 1e-5 * float(expected.norm())


def gpt2() -> Policy:
    config = transformers.GPT2Config(vocab_size=40, n_positions=64, n_embd=32, n_head=4, n_layer=1)
    return wrap_model(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32), None, (1,), "the model")


def test_who_takes_the_plain_pass_on_a_gpu_says_so_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = gpt2()
    assert fused_body(policy) is None and capsys.readouterr().err == ""
    monkeypatch.setattr("posttrain.models.fused_body.available", lambda *_: True)  # as if it were there
    assert fused_body(policy) is None and fused_body(policy) is None
    assert capsys.readouterr().err.splitlines() == [
        "training: the model takes the plain pass through its own module, about 1.5 times slower: GPT2Model is not built like a Llama"
    ]


def test_what_is_not_a_llama_is_named() -> None:
    assert unsupported_reason(gpt2()) == "GPT2Model is not built like a Llama"
    llama = make("llama")
    llama.body.layers[0].mlp.up_proj = torch.nn.Sequential(llama.body.layers[0].mlp.up_proj)
    assert unsupported_reason(llama) == "layers that are neither plain matrices nor plain adapters beside them"


def test_stirred_adapters_do_something_and_go_back_to_their_bits() -> None:
    pytest.importorskip("peft")
    policy = make("qwen3")
    add_adapters(policy.model, Lora(rank=2), 0)
    before, (_, plain, _) = [p.detach().clone() for p in policy.model.parameters()], rules_of(policy, IDS, POSITION, STARTS)
    with perturbed_adapters(policy.body), torch.no_grad():
        assert float((rules_of(policy, IDS, POSITION, STARTS)[1] - plain).abs().max()) > 0.01
    assert all(torch.equal(p, b) for p, b in zip(policy.model.parameters(), before, strict=True))


@pytest.mark.parametrize("part", ["mlp.up_proj", "self_attn.o_proj", "post_attention_layernorm"])
def test_a_layer_that_is_not_the_modules_is_found_behind_any_number_of_others(part: str) -> None:
    """In bf16, where rounding from end to end is as large as this: the last of 24 layers reads a weight that is twice too large."""
    policy = make("llama", num_hidden_layers=24, dtype=torch.bfloat16)
    rules, _, packed = rules_of(policy, IDS, POSITION, STARTS)
    assert rules is not None

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        return packed.attend(layer, *(t.transpose(0, 1)[None] for t in (query, key, value)), rule)[0]

    mine = FusedBody(policy, rules)
    assert mine.proved(policy, IDS, POSITION, packed, attend)
    plain = mine._layer

    def wrong(number: int, layer: torch.nn.Module, *rest: Any) -> tuple[Tensor, Tensor]:
        weight = layer.get_submodule(part).weight
        if number == 23:
            weight.data.mul_(2.0)
        found = plain(number, layer, *rest)
        if number == 23:
            weight.data.div_(2.0)
        return found

    mine._layer = wrong  # type: ignore[method-assign]
    assert not mine.proved(policy, IDS, POSITION, packed, attend)


def test_a_model_that_was_proved_can_go() -> None:
    policy = make("llama")
    rules, _, _ = rules_of(policy, IDS, POSITION, STARTS)
    assert rules is not None
    PROVED[policy.body] = (False, FusedBody(policy, rules))
    seen = weakref.ref(policy.body)
    del policy
    gc.collect()
    assert seen() is None


def test_it_is_for_cuda() -> None:
    assert fused_body(make("llama")) is None


def test_rules_need_every_layer() -> None:
    policy = make("llama")
    rules, hidden, layout = rules_of(policy, IDS, POSITION, STARTS)
    assert rules is not None and len(rules) == 2 and hidden.shape == (20, 32) and isinstance(layout, Packed)


@pytest.mark.parametrize("seed", range(3))
def test_half_precision_is_told_from_a_wrong_attention(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """24 layers in bf16, where single logits are far off by rounding: taken. One whose second sequence sees the first: refused."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**(SHAPE | {"num_hidden_layers": 24}))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    wrap_model(copy.deepcopy(model), None, (1,))
    monkeypatch.setattr("posttrain.models.policy.Packed", lambda starts, device: Packed((0, starts[-1]), device))
    with pytest.raises(UserError, match="logits with our attention differ from the model's own"):
        wrap_model(model, None, (1,))


def test_a_layer_without_an_mlp_is_named_too() -> None:
    config = transformers.GraniteMoeConfig(**(SHAPE | {"num_local_experts": 2, "num_experts_per_tok": 1}))
    policy = wrap_model(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32), None, (1,))
    assert unsupported_reason(policy) == "GraniteMoeDecoderLayer is not the layer of a Llama"
