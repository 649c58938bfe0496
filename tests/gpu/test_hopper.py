"""quack's gated product and FlashAttention 4 on a Hopper GPU, where they are installed (`pip install -e '.[hopper]'`): against plain
torch in float32, and in the engine and the trainer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers

from posttrain.collect import Prompt, generate_groups
from posttrain.engine.engine import Engine
from posttrain.models import attention
from posttrain.models.attention import Packed, Rule, attend_packed
from posttrain.models.policy import wrap_model
from posttrain.ops import hopper
from posttrain.ops.hopper import flash, fuses_gate, gated_product
from posttrain.train.forward import forward
from posttrain.train.pack import pack_groups
from posttrain.types import Group, Problem, Rollout, Sampling, Score, Segment

CUDA = torch.device("cuda")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def needs(library: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not hopper._installed(library), reason=f"needs {library}")


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.detach().double() - expected.detach().double()).norm() / expected.detach().double().norm())


@needs("quack.gemm_interface")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize(("rows", "width", "inner"), [(128, 64, 96), (300, 520, 200), (1024, 896, 4864), (5000, 896, 4864)])
def test_the_gated_product_and_its_gradients(rows: int, width: int, inner: int, tanh: bool, dtype: torch.dtype) -> None:
    assert fuses_gate(CUDA)
    torch.manual_seed(0)
    x = torch.randn(rows, width, device=CUDA).to(dtype)
    weight = (torch.randn(2 * inner, width, device=CUDA) * width**-0.5).to(dtype)
    weighting, found = torch.randn(rows, inner, device=CUDA).to(dtype), []
    for exact in (False, True):
        taken = [(t.float() if exact else t).clone().requires_grad_() for t in (x, weight)]
        gate, up = taken[1].split(inner)
        if exact:
            before = taken[0] @ gate.t()
            out = (F.gelu(before, approximate="tanh") if tanh else F.silu(before)) * (taken[0] @ up.t())
        else:
            out = gated_product(taken[0], taken[1], tanh)
            with torch.no_grad():
                assert torch.equal(out, gated_product(taken[0], taken[1], tanh)), "the same with nothing kept"
        (out * (weighting.float() if exact else weighting)).sum().backward()
        found.append([out.detach(), *(t.grad for t in taken)])
    assert max(relative(a, b) for a, b in zip(*found, strict=True)) < 0.01


@needs("flash_attn.cute")
@pytest.mark.parametrize(("width", "heads"), [(64, (14, 2)), (128, (12, 2)), (128, (4, 4))])
@pytest.mark.parametrize("new", [None, (5, 17, 1, 300, 2000)])
def test_flash_attention_4_gives_what_torchs_flash_gives(
    width: int, heads: tuple[int, int], new: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    lengths = (5, 129, 64, 300, 2048)
    assert flash(CUDA, width) is not None
    sizes = ((sum(new or lengths), heads[0]), (sum(lengths), heads[1]), (sum(lengths), heads[1]))
    tensors = [torch.randn(n, h, width, device=CUDA).bfloat16().requires_grad_() for n, h in sizes]
    weighting, found = torch.randn_like(tensors[0]), []
    for ours in (True, False):
        if not ours:
            monkeypatch.setattr(attention, "flash", lambda *_: None)
        out = attend_packed(lengths, CUDA, new)(0, *tensors, Rule(width**-0.5))
        found.append([out.detach(), *torch.autograd.grad(out, tensors, weighting)])
    assert max(relative(a, b) for a, b in zip(*found, strict=True)) < 0.006


@needs("flash_attn.cute")
def test_a_width_that_flash_attention_4_computes_wrongly_is_found() -> None:
    """4.0.0b36 is off by 1.2 for heads of 80; where a later one is right, it is used."""
    torch.manual_seed(0)
    tensors = [torch.randn(400, heads, 80, device=CUDA).bfloat16().requires_grad_() for heads in (4, 2, 2)]
    wide = [t.detach().float().requires_grad_() for t in tensors]
    out = attend_packed((150, 250), CUDA)(0, *tensors, Rule(80**-0.5))
    rows = [t.transpose(0, 1)[None] for t in wide]
    exact = Packed((0, 150, 400), CUDA).attend(0, rows[0], rows[1], rows[2], Rule(80**-0.5))[0]
    weighting = torch.randn_like(exact)
    found, expected = torch.autograd.grad(out, tensors, weighting.bfloat16()), torch.autograd.grad(exact, wide, weighting)
    assert max(relative(a, b) for a, b in zip((out, *found), (exact, *expected), strict=True)) < 0.01


@needs("quack.gemm_interface")
@pytest.mark.parametrize("family", ["Qwen2", "Gemma"])
def test_sampler_and_trainer_agree_with_many_rows(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As near as by the usual kernels, in graphs of 128 rows and more and, at the end, of fewer."""
    config = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "head_dim": 64, "eos_token_id": 0, "initializer_range": 0.1}  # fmt: skip
    torch.manual_seed(0)
    made = getattr(transformers, f"{family}Config")(**config)
    policy = wrap_model(transformers.AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16).to(CUDA), None, (0,))
    limits = np.random.default_rng(0).integers(8, 60, 192)

    def apart() -> float:
        engine, groups = Engine(policy, max_rows=192), []
        prompts = [
            Prompt(tuple(range(3, 40)), 1, n, Sampling(int(limit), min_new_tokens=int(limit))) for n, limit in enumerate(limits)
        ]
        for number, (prompt, (answer,)) in enumerate(zip(prompts, generate_groups(engine, prompts), strict=True)):
            asked = Segment(np.array(prompt.ids), "", False)
            problem, given = Problem(str(number), ""), Segment(answer.ids, "", True, answer.logprobs)
            groups.append(Group(problem, (Rollout(problem, 0, (asked, given), Score(0.0)),)))
        batch = pack_groups(groups, 1.0, CUDA)
        with torch.no_grad():
            logprob_T = forward(policy, batch).logprob_T
        return float((logprob_T - batch.behaviour_T)[batch.mask_T].abs().mean())

    fused = apart()
    for module in ("posttrain.engine.fused", "posttrain.models.fused_body"):
        monkeypatch.setattr(f"{module}.gated_product", lambda x, weight, tanh: hopper.gated(F.linear(x, weight), tanh))
    assert fused < 1.1 * apart() + 1e-3
