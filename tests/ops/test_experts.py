"""The mixture of experts against transformers' own block."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from posttrain.models.layers import Experts
from posttrain.ops import experts as module
from posttrain.ops.experts import Routes, route


def block(dtype: torch.dtype, normalised: bool = True) -> Qwen3MoeSparseMoeBlock:
    """Four experts, of which a token has two; transformers' loop over the experts, which it has for every type."""
    config = transformers.Qwen3MoeConfig(
        hidden_size=16, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2, norm_topk_prob=normalised
    )
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    made = Qwen3MoeSparseMoeBlock(config).to(dtype)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.3)
    return made


def activation(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, 1)
    return F.silu(gate) * up


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outputs_and_gradients_are_those_of_transformers(dtype: torch.dtype, normalised: bool) -> None:
    """By torch's grouped product in float32, by every expert on every token in float64; one token in seven has an expert alone."""
    made = block(dtype, normalised)
    x = torch.randn(7, 16, dtype=dtype)
    found = []
    for ours in (False, True):
        made.zero_grad()
        given = x.clone().requires_grad_()
        out = Experts.of(0, made)(given, activation) if ours else made(given[None])[0]
        out.sin().sum().backward()  # type: ignore[no-untyped-call]
        found.append([out.detach(), given.grad, *(p.grad.clone() for p in made.parameters() if p.grad is not None)])
    assert len(found[0]) == 5
    tolerance = 1e-5 if dtype == torch.float32 else 1e-7  # the router's softmax is in float32
    for mine, expected in zip(*found, strict=True):
        assert float((mine - expected).norm()) <= tolerance * float(expected.norm())


def test_both_ways_to_compute_agree_and_an_idle_expert_has_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    made, x, found = block(torch.float32), torch.randn(9, 16), []
    index, weight = torch.tensor([[0, 3], [3, 1], [1, 0]] * 3), torch.rand(9, 2)
    for grouped in (True, False):
        monkeypatch.setattr(module, "_groups", lambda *_, grouped=grouped: grouped)
        made.zero_grad()
        out = module.mixture(x, weight, index, made.experts.gate_up_proj, made.experts.down_proj, activation)
        out.square().sum().backward()
        assert not made.experts.down_proj.grad[2].any() and made.experts.down_proj.grad[[0, 1, 3]].any(-1).any(-1).all()
        found.append((out.detach(), made.experts.gate_up_proj.grad.clone()))
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_replayed_experts_are_taken_with_the_weights_of_now() -> None:
    """p = (0.1, 0.2, 0.3, 0.4): the router takes 3 and 2; replayed 0 and 1 weigh 1/3 and 2/3; a row of -1 is the router's own."""
    logit = torch.tensor([[0.1, 0.2, 0.3, 0.4]] * 2).log()
    routes = Routes({5: torch.tensor([[0, 1], [-1, -1]], dtype=torch.int16)})
    weight, index = route(logit, 2, True, 5, routes)
    assert index.tolist() == [[0, 1], [3, 2]] and routes.index_TK[5].tolist() == [[3, 2], [3, 2]]
    torch.testing.assert_close(weight, torch.tensor([[1 / 3, 2 / 3], [4 / 7, 3 / 7]]))
