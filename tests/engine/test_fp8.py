"""Generation in fp8: what is rounded, and that the returned log-probs are those of the rounded model; in pages as on CUDA, and by the
emulation of the plain path."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kernels_for_tests import decode_in_pages
from material_for_tests import small_policy
from torch import Tensor

from posttrain.collect import Prompt, generate_groups, group_requests
from posttrain.engine import fp8
from posttrain.engine.engine import Engine
from posttrain.engine.fp8 import E4M3, Emulation, Precision
from posttrain.engine.fused import Fused
from posttrain.errors import UserError
from posttrain.models.attention import LAYOUT, Packed
from posttrain.models.layers import describe, distance
from posttrain.models.lora import Lora, add_adapters
from posttrain.models.policy import Policy
from posttrain.ops.logprobs import head_logits
from posttrain.types import Completion, Request, Sampling

PRODUCTS = Precision("fp8")
REQUESTS = [Prompt((5, 6, 7), 2, 0, Sampling(66, min_new_tokens=66)), Prompt((9,), 2, 1, Sampling(20, 0.7))]
NEAR = 0.1  # mean difference of log-prob from the unquantised model: what e4m3 costs these weights


@pytest.fixture(params=["pages", "plain"], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    decode_in_pages(monkeypatch, on=request.param == "pages")
    return str(request.param)


def policy_of(**shape: Any) -> Policy:
    return small_policy(dtype=torch.float32, hidden_size=32, intermediate_size=48, **shape)


def sampled(policy: Policy, precision: Precision, engine: Engine | None = None) -> list[Completion]:
    engine = engine or Engine(policy, processes=1, precision=precision)
    return [c for group in generate_groups(engine, REQUESTS) for c in group]


def logprobs(policy: Policy, prompt: Prompt, completion: Completion) -> np.ndarray:
    """Of a response's tokens in one forward pass of the module."""
    ids = torch.from_numpy(np.concatenate([prompt.ids, completion.ids]))
    layout: Any = Packed((0, len(ids)), ids.device)
    with torch.no_grad():
        hidden = policy.hidden(ids[None], torch.arange(len(ids))[None], **{LAYOUT: layout})[0]
        heat = prompt.sampling.temperature
        found = (head_logits(hidden, policy.head) / heat).log_softmax(-1)
    return found[:-1].gather(1, ids[1:, None])[len(prompt.ids) - 1 :, 0].numpy()


def gap(policy: Policy, answers: list[Completion]) -> float:
    """Mean difference of the returned log-probs from those of the module."""
    pairs = zip([p for p in REQUESTS for _ in range(p.samples)], answers, strict=True)
    return float(np.concatenate([np.abs(logprobs(policy, p, c) - c.logprobs) for p, c in pairs]).mean())


def test_a_row_is_scaled_to_the_largest_number_and_rounded_to_three_bits() -> None:
    q, scale = fp8.quantize(torch.tensor([[448.0, 17.0, -18.9, 0.0], [-1.0, 0.5, 0.28, 2e-3], [0.0] * 4]))
    assert q.dtype == E4M3 and scale.tolist() == [1.0, pytest.approx(1 / 448), pytest.approx(1e-12 / 448)]
    # steps of 2 from 16 on, ties to even; 0.28 * 448 = 125.4 in steps of 8, 0.896 in steps of 1/16
    assert q.float().tolist() == [[448.0, 16.0, -18.0, 0.0], [-448.0, 224.0, 128.0, 0.875], [0.0] * 4]


def test_matrices_share_the_scale_of_the_largest() -> None:
    (one, other), scale = fp8.quantize_weights([torch.tensor([[1.0, -0.5]]), torch.tensor([[-4.0, 0.01]])])
    assert float(scale) == pytest.approx(4 / 448)
    # 0.01 * 448 / 4 = 1.12 in steps of 1/8
    assert one.float().tolist() == [[112.0, -56.0]] and other.float().tolist() == [[-448.0, 1.125]]
    assert float(fp8.quantize_weights([torch.zeros(2, 2)])[1]) > 0


def test_returned_log_probs_are_those_of_the_quantised_model() -> None:
    policy = policy_of()
    answers = sampled(policy, PRODUCTS)
    assert 1e-3 < gap(policy, answers) < NEAR
    with Emulation(policy):
        assert gap(policy, answers) < 1e-3, "a flip of one rounding here and there"


def test_updated_weights_are_quantised_anew() -> None:
    """In place, and after the memory of the copies was given back."""
    policy = policy_of()
    engine = Engine(policy, processes=1, precision=PRODUCTS)
    sampled(policy, PRODUCTS, engine)
    for version, change in enumerate((1.3, 0.8), 1):
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.mul_(change)
        engine.publish(version)
        if version == 2:
            engine.release()
        answers = sampled(policy, PRODUCTS, engine)
        with Emulation(policy):
            assert gap(policy, answers) < 1e-3


def test_updated_weights_are_quantised_anew_while_caches_are_kept() -> None:
    """A request after the publish, while an older one is in flight."""
    policy = policy_of()
    engine = Engine(policy, processes=1, precision=PRODUCTS, keep_caches=True)
    engine.submit([Request((3, 4, 5), 0, Sampling(250, min_new_tokens=250), 99)])
    engine.poll()
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.3)
    engine.publish(1)
    late = group_requests(REQUESTS)
    engine.submit(late)
    found: dict[int, Completion] = {}
    while engine.sessions:
        found |= {request.session: completion for request, completion in engine.poll()}
    assert engine.statistics.recomputed == 0 and set(found[99].versions.tolist()) == {0, 1}
    with Emulation(policy):
        assert gap(policy, [found[request.session] for request in late]) < 1e-3


def test_adapters_are_added_unrounded() -> None:
    pytest.importorskip("peft")
    policy = policy_of()
    add_adapters(policy.model, Lora(rank=3, alpha=6.0), 1)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.2, generator=torch.Generator().manual_seed(0))
    answers = sampled(policy, PRODUCTS)
    with Emulation(policy):
        assert gap(policy, answers) < 2e-3
    assert gap(policy, answers) < 2 * NEAR


def test_a_layer_in_fp8_passes_the_wider_tolerance_and_not_the_module_s() -> None:
    policy = policy_of()
    described = describe(policy)
    assert not isinstance(described, str)
    assert 0.002 < distance(policy, Fused(policy, described, PRODUCTS)) < fp8.TOLERANCE


def test_products_that_are_wrong_are_refused_where_they_are_compared_with_the_module(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scale that is lost is no rounding."""
    policy, product = policy_of(), fp8.row_product
    if backend == "plain":
        pytest.skip("the emulation is compared in every test here")

    def wrong(*given: Any) -> Tensor:
        return product(*given) * 1.5

    monkeypatch.setattr(fp8, "row_product", wrong)
    with pytest.raises(UserError, match="sampler_quantization=fp8 .* differs from the module's own by"):
        sampled(policy, PRODUCTS)


@pytest.mark.parametrize(
    ("sizes", "reason"), [({"mlp_bias": True}, "an MLP with a bias"), ({"intermediate_size": 40}, "of 16")]
)
def test_models_that_cannot_be_quantised_are_refused(sizes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=f"sampler_quantization=fp8 .*{reason}.*; leave it out"):
        sampled(small_policy(dtype=torch.float32, **({"hidden_size": 32, "intermediate_size": 48} | sizes)), PRODUCTS)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0)])
def test_a_gpu_without_fp8_is_refused(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    fp8.AS_TRAINED.check_device("cuda")
    if capability >= (8, 9):
        PRODUCTS.check_device("cuda")
        return
    with pytest.raises(
        UserError, match=r"sampler_quantization=fp8 needs a GPU of compute capability 8\.9 .* has 8\.0; leave it out"
    ):
        PRODUCTS.check_device("cuda")
