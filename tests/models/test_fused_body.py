"""The fused training pass computes what the module computes, and so do its gradients."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import kernels_for_tests  # noqa: F401  kernels run on the CPU too
import pytest
import torch
import transformers
from torch import Tensor

from posttrain.models import fused_body as module
from posttrain.models import nf4
from posttrain.models.attention import LAYOUT, Packed, attend_packed
from posttrain.models.fused_body import FusedBody, fused_body
from posttrain.models.layers import TOLERANCE, LayerDescription, ModelDescription, describe, distance, prove
from posttrain.models.lora import Lora, add_adapters, perturbed_adapters
from posttrain.models.policy import Network, Policy, wrap_model
from posttrain.models.scorer import Scorer, from_policy

SHAPE = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "initializer_range": 0.3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "qwen2-window": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 6,
                                     "layer_types": ["sliding_attention", "full_attention"]}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "gemma": ("GemmaConfig", {"head_dim": 16}),
    "qwen3-moe": ("Qwen3MoeConfig", {"head_dim": 16, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2,
                                     "norm_topk_prob": True, "mlp_only_layers": [1]}),
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
        if family == "qwen3-moe":  # whose experts get none
            targets = targets[:3]
        add_adapters(policy.model, Lora(rank=2, alpha=5.0, targets=targets), 0)
    with perturbed_adapters(policy.body):
        compare(policy, family, checkpointing)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_weights_in_4_bits_take_the_same_way_and_none_is_kept_in_full(family: str) -> None:
    pytest.importorskip("peft")
    policy = make(family)
    nf4.quantize_layers(policy.body, "cpu")
    assert isinstance(describe(policy), ModelDescription), "also the reference, which has no adapters"
    add_adapters(policy.model, Lora(rank=2, alpha=5.0, targets=("q_proj", "down_proj")), 0)
    with perturbed_adapters(policy.body):
        compare(policy, family, False)
        kept: list[torch.Size] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
            FusedBody(described_model(policy)).hidden(IDS, POSITION, 12, attend_packed((12, 8), IDS.device))
    layers = [m for m in policy.body.modules() if isinstance(m, nf4.Linear4bit)]
    whole = {(m.out_features, m.in_features) for m in layers} | {(2 * 48, 32)}
    assert len(layers) == 14 and kept and not whole & {tuple(shape) for shape in kept}


@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_a_scorer_takes_the_same_way(family: str) -> None:
    """A reward model's or a critic's body is a policy's."""
    compare(from_policy(make(family), zero=False), family, False)


def described_model(network: Network) -> ModelDescription:
    described = describe(network)
    assert isinstance(described, ModelDescription), described
    return described


def compare(policy: Policy | Scorer, family: str, checkpointing: bool) -> None:
    described = described_model(policy)
    assert family != "qwen2-window" or {layer.rule.sliding_window for layer in described.layers} == {6, None}
    body, packed = FusedBody(described), Packed(STARTS)
    assert prove(policy, described, "training", lambda: body) == ""
    found = []
    for fused in (False, True):
        policy.model.zero_grad()
        policy.body.gradient_checkpointing = fused and checkpointing
        if fused:
            hidden = body.hidden(IDS, POSITION, 12, attend_packed((12, 8), IDS.device))
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
        "warning: training: the model takes the plain pass through its own module, about 1.5 times slower: "
        "GPT2Model is not built like a Llama"
    ]


def test_what_is_not_a_llama_is_named() -> None:
    assert describe(gpt2()) == "GPT2Model is not built like a Llama"
    llama = make("llama")
    llama.body.layers[0].mlp.up_proj = torch.nn.Sequential(llama.body.layers[0].mlp.up_proj)
    assert describe(llama) == "linear layers that are neither plain matrices nor have a plain adapter"


def test_layers_of_which_some_have_a_bias_are_refused() -> None:
    llama = make("llama")
    llama.body.layers[1].self_attn.k_proj.bias = None
    assert describe(llama) == "layers of which some have a bias and some have none"


def test_a_hook_that_came_later_is_seen() -> None:
    llama = make("llama")
    assert isinstance(describe(llama), ModelDescription)
    hook = llama.body.norm.register_forward_hook(lambda *_: None)
    assert describe(llama) == "the model has hooks"
    hook.remove()
    assert isinstance(describe(llama), ModelDescription)


def test_angles_are_kept_shared_and_usable_for_gradients() -> None:
    """The engine may ask for them first, in inference mode."""
    policy = make("llama")
    with torch.inference_mode():
        table = described_model(policy).rope_table(7)
    assert described_model(policy).rope_table(1024) is table and len(described_model(policy).rope_table(1025)[0]) == 2048
    hidden = FusedBody(described_model(policy)).hidden(IDS, POSITION, 12, attend_packed((12, 8), IDS.device))
    hidden.sum().backward()  # type: ignore[no-untyped-call]


def test_perturbed_adapters_do_something_and_go_back_to_their_bits() -> None:
    pytest.importorskip("peft")
    policy = make("qwen3")
    add_adapters(policy.model, Lora(rank=2), 0)
    before = [p.detach().clone() for p in policy.model.parameters()]
    with torch.no_grad():
        plain = policy.hidden(IDS[None], POSITION[None], **{LAYOUT: Packed(STARTS)})
        with perturbed_adapters(policy.body):
            perturbed = policy.hidden(IDS[None], POSITION[None], **{LAYOUT: Packed(STARTS)})
    assert float((perturbed - plain).abs().max()) > 0.01
    assert all(torch.equal(p, b) for p, b in zip(policy.model.parameters(), before, strict=True))


@pytest.mark.parametrize("part", ["gate_up", "out", "post_norm"])
def test_a_layer_that_is_not_the_modules_is_found_behind_any_number_of_others(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16, where rounding from end to end is as large as this: the last of 24 layers reads a weight that is twice too large."""
    policy = make("llama", num_hidden_layers=24, dtype=torch.bfloat16)
    mine, plain = FusedBody(described_model(policy)), module._layer
    assert distance(policy, mine) <= TOLERANCE[torch.bfloat16]

    def wrong(layer: LayerDescription, *rest: Any) -> tuple[Tensor, Tensor]:
        described = getattr(layer, part)
        weight = described.weight if part == "post_norm" else described.modules[-1].weight
        if layer.number == 23:
            weight.data.mul_(2.0)
        found = plain(layer, *rest)
        if layer.number == 23:
            weight.data.div_(2.0)
        return found

    monkeypatch.setattr(module, "_layer", wrong)
    assert distance(policy, mine) > TOLERANCE[torch.bfloat16]
    assert "differs from the module's own" in prove(policy, mine.described, "training", lambda: mine)


def test_a_model_that_was_proved_can_go() -> None:
    def proved() -> weakref.ref[torch.nn.Module]:
        policy = make("llama")
        described = described_model(policy)
        described.rope_table(7)
        assert prove(policy, described, "training", lambda: FusedBody(described)) == ""
        return weakref.ref(policy.body)

    seen = proved()
    gc.collect()
    assert seen() is None


def test_it_is_for_cuda() -> None:
    assert fused_body(make("llama")) is None


def test_layers_that_attend_in_another_way_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make("llama")
    monkeypatch.setattr(policy.body.layers[1].self_attn, "layer_idx", 0)
    assert describe(policy) == "layers that do not call our attention once each"


@pytest.mark.parametrize("seed", range(3))
def test_half_precision_is_told_from_a_wrong_attention(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """24 layers in bf16, where single logits are far off by rounding: ours. One whose second sequence sees
    the first: its own attention."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**(SHAPE | {"num_hidden_layers": 24}))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert not wrap_model(copy.deepcopy(model), None, (1,)).padded

    class Joined(Packed):
        def __init__(self, starts: tuple[int, ...], device: torch.device, *shared: torch.Tensor):
            super().__init__((0, len(shared[0]) if shared else starts[-1]), device)

    monkeypatch.setattr("posttrain.models.policy.Packed", Joined)
    assert wrap_model(model, None, (1,)).padded


def test_a_layer_without_an_mlp_is_named_too() -> None:
    config = transformers.GraniteMoeConfig(**(SHAPE | {"num_local_experts": 2, "num_experts_per_tok": 1}))
    policy = wrap_model(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32), None, (1,))
    assert describe(policy) == "GraniteMoeDecoderLayer is not the layer of a Llama"
