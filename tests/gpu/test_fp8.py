"""Generation in fp8 on a CUDA device: its kernels, its products, and that log-probs are those of the quantised model. Run with
`make test-gpu`."""

from __future__ import annotations

from typing import Any

import kernels_for_tests as twins
import numpy as np
import pytest
import torch

from posttrain.collect import Prompt, generate_groups
from posttrain.engine import fp8
from posttrain.engine.cuda import CUDABackend
from posttrain.engine.engine import Engine
from posttrain.engine.fp8 import E4M3, Emulation, Precision, quantize, row_product
from posttrain.models.attention import LAYOUT, Packed
from posttrain.models.lora import Lora, add_adapters
from posttrain.models.policy import Policy
from posttrain.ops.logprobs import head_logits
from posttrain.types import Completion
from tests.gpu.test_engine import PROMPTS, alike, backend_of, models, several

able = torch.cuda.is_available() and torch.cuda.get_device_capability() >= fp8.CAPABILITY
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not able, reason="needs a CUDA device with fp8")]
PRODUCTS = Precision("fp8")


def run(
    policy: Policy, precision: Precision, requests: list[Prompt] | None = None, engine: Engine | None = None
) -> list[Completion]:
    engine = engine or Engine(policy, precision=precision)
    answers = [c for group in generate_groups(engine, requests or several()) for c in group]
    backend_of(engine)
    return answers


@torch.no_grad()
def gap(policy: Policy, answers: list[Completion]) -> float:
    """Mean difference of the returned log-probs from those of the module, of the first sample of each prompt."""
    found = []
    for prompt, completion in zip(PROMPTS, answers[::5], strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, completion.ids])).cuda()
        layout = {LAYOUT: Packed((0, len(ids)), ids.device)}
        hidden = policy.hidden(ids[None], torch.arange(len(ids), device="cuda")[None], **layout)[0]
        logprobs = head_logits(hidden, policy.head).log_softmax(-1)[:-1].gather(1, ids[1:, None])[len(prompt) - 1 :, 0]
        found.append(np.abs(logprobs.cpu().numpy() - completion.logprobs))
    return float(np.concatenate(found).mean())


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(("tokens", "width", "inner"), [(1, 64, 96), (37, 896, 4864), (5, 3584, 18944)])
def test_kernels_compute_what_their_twins_compute(tokens: int, width: int, inner: int, keep: bool) -> None:
    from posttrain.engine import triton_fp8

    torch.manual_seed(0)
    make: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    x, weight, both = (
        torch.randn(tokens, width, **make),
        torch.randn(width, **make),
        1e4 * torch.randn(tokens, 2 * inner, **make),
    )
    row = torch.rand(tokens, device="cuda") / 1e4
    added = torch.randn(tokens, 2 * inner, **make)

    def outputs(size: int) -> tuple[torch.Tensor, ...]:
        room = torch.zeros(tokens, size, **make), torch.zeros(tokens, size, device="cuda", dtype=E4M3)
        return *room, torch.zeros(tokens, device="cuda")

    for name, size, given, sizes in (
        ("norm_rows_kernel", width, (x, weight), (width, 1e-6, False, keep, 1 << (width - 1).bit_length(), False)),
        ("gated_rows_kernel", inner, (both, row, added), (inner, False, keep, keep, *fp8.pieces(inner), False)),
    ):
        mine, theirs = outputs(size), outputs(size)
        getattr(triton_fp8, name)[(tokens,)](*given, *mine, *sizes)
        getattr(twins, name)((tokens,), *given, *theirs, *sizes)
        torch.testing.assert_close(mine[2], theirs[2], rtol=0.01, atol=0)
        wide = [q.float() * scale[:, None] for _, q, scale in (mine, theirs)]
        assert float((wide[0] - wide[1]).norm() / wide[1].norm()) < 0.01, "some are rounded the other way"
        torch.testing.assert_close(mine[0], theirs[0], rtol=0.02, atol=1e-2)
    sums = 1e4 * torch.randn(tokens, width, **make)
    other = x.clone()
    triton_fp8.add_rows_kernel[(tokens,)](x, sums, row, width, 1 << (width - 1).bit_length(), False)
    twins.add_rows_kernel((tokens,), other, sums, row)
    torch.testing.assert_close(x, other, rtol=0.01, atol=1e-3)


@pytest.mark.parametrize(("rows", "inner", "outer"), [(1, 64, 96), (37, 896, 9728), (1024, 4864, 896)])
def test_a_product_is_that_of_the_quantised_numbers(rows: int, inner: int, outer: int) -> None:
    torch.manual_seed(0)
    (q, _), (v, _) = (quantize(torch.randn(n, inner, device="cuda")) for n in (rows, outer))
    half = torch.full((), 0.5, device="cuda")
    found = row_product(q, v, half, torch.float32)
    expected = q.double() @ v.double().t() / 2
    assert float((found - expected).norm() / expected.norm()) < 5e-3


@pytest.mark.parametrize("family", ["qwen2", "gemma"])
def test_log_probs_are_near_those_of_the_model_and_those_of_the_quantised_one(family: str) -> None:
    """In float32, where nothing but fp8 rounds. These weights are large: fp8 costs more than in a trained model."""
    _, policy = models(family)
    answers = run(policy, PRODUCTS)
    apart = gap(policy, answers)
    assert 1e-3 < apart < 0.6
    with Emulation(policy):
        assert gap(policy, answers) < 0.2 * apart


def test_bf16_rounds_less_than_fp8_costs() -> None:
    _, policy = models("qwen2", torch.bfloat16)
    assert gap(policy, run(policy, fp8.AS_TRAINED)) < gap(policy, run(policy, PRODUCTS)) < 0.6


def test_a_graph_replays_what_the_step_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    _, policy = models("qwen2", torch.bfloat16)
    captured = run(policy, PRODUCTS)
    monkeypatch.setattr(CUDABackend, "_capture", lambda one, *sizes: twins.Steps(lambda: one._step(*sizes)))
    alike(captured, run(policy, PRODUCTS))


def test_updated_weights_and_adapters_are_sampled_from_at_once() -> None:
    pytest.importorskip("peft")
    _, policy = models("qwen2")
    engine = Engine(policy, precision=PRODUCTS)
    for change in (1.0, 1.2, 0.8):
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.mul_(change)
        answers = run(policy, PRODUCTS, engine=engine)
        with Emulation(policy):
            assert gap(policy, answers) < 0.05
    add_adapters(policy.model, Lora(rank=4, alpha=8.0), 1)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.05)
    answers = run(policy, PRODUCTS)
    with Emulation(policy):
        assert gap(policy, answers) < 0.05
