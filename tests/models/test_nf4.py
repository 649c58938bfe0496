"""Weights in 4 bits: the nearest level of each, gradients through them, and a policy that is trained, merged and exported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from material_for_tests import small_policy
from torch import nn

from posttrain import config, pipeline
from posttrain.errors import UserError
from posttrain.models import nf4
from posttrain.models.load import load
from posttrain.models.lora import Lora, add_adapters, merge_adapters, share_weights
from posttrain.models.nf4 import BLOCK, LEVELS, Linear4bit, dequantize, quantize
from posttrain.models.scorer import from_policy
from posttrain.recipes.base import Recipe
from posttrain.runs.read import Run
from posttrain.stages._material import Data
from posttrain.stages.sft import SFTStage
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.train.optimizer import Optimization


def test_every_weight_becomes_the_nearest_level_of_its_block() -> None:
    torch.manual_seed(0)
    weight = torch.randn(8, 2 * BLOCK)
    weight[0, :BLOCK] = 0.0  # a block without any scale
    code, scale = quantize(weight)
    assert code.dtype == torch.uint8 and code.numel() == weight.numel() // 2 and scale.numel() == weight.numel() // BLOCK
    found, largest = dequantize(code, scale, torch.empty(16, BLOCK)), weight.view(-1, BLOCK).abs().amax(1)
    grid = largest[:, None, None] * torch.tensor(LEVELS)
    nearest = (weight.view(-1, BLOCK, 1) - grid).abs().argmin(-1, keepdim=True)
    torch.testing.assert_close(found, grid.expand(-1, BLOCK, -1).gather(2, nearest)[..., 0])
    assert torch.equal(torch.stack(quantize(found.view_as(weight))[:1]), code[None]), "what is on the grid stays there"
    assert 0.05 < float((found.view_as(weight) - weight).norm() / weight.norm()) < 0.12, "seen 0.09"


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_and_its_gradient_are_those_of_the_weight_it_stands_for(bias: bool) -> None:
    torch.manual_seed(0)
    layer = Linear4bit(nn.Linear(BLOCK, 6, bias=bias), "cpu")
    x, plain = torch.randn(3, BLOCK, requires_grad=True), layer.plain()
    y = x.detach().clone().requires_grad_()
    kept: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        out = layer(x)
    assert kept == [], "nothing of the weight's size waits for the backward pass"
    torch.testing.assert_close(out, plain(y))
    (out**2).sum().backward()
    (plain(y) ** 2).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_reference_and_critic_share_the_codes_and_merging_leaves_a_plain_model() -> None:
    pytest.importorskip("peft")
    policy = small_policy(dtype=torch.float32)
    ids = torch.arange(3, 12)[None]
    before = {name for name, _ in policy.model.named_parameters()}
    nf4.quantize_layers(policy.body, "cpu")
    layers = [m for m in policy.body.modules() if isinstance(m, Linear4bit)]
    assert layers and len(layers) == len(Lora().layers(policy.body))
    reference, critic = share_weights(policy), from_policy(policy, share=True)
    codes = {m.code.data_ptr() for m in layers}
    for other in (reference, critic):
        assert {m.code.data_ptr() for m in other.body.modules() if isinstance(m, Linear4bit)} == codes
    add_adapters(policy.model, Lora(rank=2, targets=("q_proj",)), 0)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            parameter.add_(0.05 if "lora_" in name else 0)
        expected = policy.model(ids).logits
        merge_adapters(policy.model)
        torch.testing.assert_close(policy.model(ids).logits, expected, rtol=1e-4, atol=1e-4)
    assert {name for name, _ in policy.model.named_parameters()} == before


def test_a_stage_with_4_bits_learns_and_a_cpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal apart, nothing in it needs CUDA."""
    pytest.importorskip("peft")
    one = SFTStage(
        name="sft", model="tiny:nano", data=(Data(task=Arithmetic(level=1), counts={1: 20}),), steps=12, batch=8, checkpoint_every=4,
        optimizer=Optimization(lr=1e-2), lora=Lora(rank=2, load_in_4bit=True),
    )  # fmt: skip
    settings = config.Settings(Recipe((one,)), "test", threads=1, device="cpu", out=str(tmp_path / "run"))
    with pytest.raises(UserError, match="lora: load_in_4bit saves the memory of a GPU, and the device is cpu; leave it out"):
        pipeline.start(settings)
    monkeypatch.setattr(Lora, "ready", lambda self, device: None)
    directory = pipeline.start(settings)
    rows = Run(directory).metrics("sft")
    assert rows[-1].figures["loss"] < rows[0].figures["loss"] - 0.3
    assert not any(isinstance(m, Linear4bit) for m in load(str(directory / "export")).model.modules())
