"""The training pass on a CUDA device: flash attention of packed sequences, fused kernels, shared prompts. Run with `make test-gpu`."""

from __future__ import annotations

import kernels_for_tests  # noqa: F401  kernels run on the CPU too
import numpy as np
import pytest
import torch
import transformers

from posttrain.models.attention import Packed, Rule, attend_packed
from posttrain.models.fused_body import FusedBody, fused_body
from posttrain.models.layers import ModelDescription, describe
from posttrain.models.policy import Policy, wrap_model
from posttrain.models.scorer import from_policy
from posttrain.ops import fused
from posttrain.ops.experts import Routes
from posttrain.ops.logprobs import Head, token_logprobs
from posttrain.train import forward as forward_module
from posttrain.train.forward import forward, scores
from posttrain.train.pack import pack_examples
from posttrain.types import Batch, Example

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = torch.device("cuda")
EXPERTS = {"head_dim": 64, "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    expected = expected.to(found.device)
    return float((found.detach().double() - expected.detach().double()).norm() / expected.detach().double().norm())


@pytest.mark.parametrize("lengths", [(5, 300, 64, 129), (129,) * 8])
@pytest.mark.parametrize(("width", "window"), [(64, None), (128, None), (256, None), (64, 50)])
def test_packed_attention_and_its_gradient(width: int, window: int | None, lengths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    rule = Rule(width**-0.5, window)
    narrow = [torch.randn(sum(lengths), h, width, device=CUDA).bfloat16().requires_grad_() for h in (6, 2, 2)]
    wide = [t.detach().float().requires_grad_() for t in narrow]
    out = attend_packed(lengths, CUDA, None, len(set(lengths)) == 1)(0, *narrow, rule)
    starts = tuple(np.cumsum([0, *lengths]).tolist())
    expected = Packed(starts, CUDA).attend(0, *(t.transpose(0, 1)[None] for t in wide), rule)[0]
    weight = torch.randn_like(out)
    out.backward(weight)
    expected.backward(weight.float())
    assert relative(out, expected) < 0.01
    assert max(relative(a.grad, b.grad) for a, b in zip(narrow, wide, strict=True)) < 0.01


@pytest.mark.parametrize("tanh", [False, True])
def test_fused_pieces_are_those_of_torch(tanh: bool) -> None:
    """The same functions on the two devices, in float32: Triton there, torch here."""
    torch.manual_seed(0)
    angle = torch.arange(50)[:, None] * torch.rand(32).repeat(2)
    position, x, y = torch.randint(0, 50, (300,)), torch.randn(300, 640), torch.randn(300, 640)
    weight, both = torch.randn(640), torch.randn(300, 1400)
    kept, source = torch.arange(300) * 2, torch.arange(600) // 2  # each is read twice, one 100 times more
    source = torch.cat([source, torch.full((100,), 7)])
    found = []
    for device in ("cuda", "cpu"):
        inputs = [t.detach().to(device).requires_grad_() for t in (x, y, weight, both)]
        total, normal = fused.add_norm(inputs[0], inputs[1], inputs[2], 1e-5, tanh)
        sharing = fused.Sharing.of(source.to(device), kept.to(device)) if tanh else None
        rope = (angle.cos().to(device), angle.sin().to(device))
        heads = fused.attention_heads(normal * 1.0, (6, 2, 64), rope, position.to(device), sharing)
        acted = fused.gated(inputs[3], tanh)
        ((total * total.detach().sin()).sum() + sum((t * t.detach().sin()).sum() for t in (*heads, acted))).backward()
        found.append([t.cpu() for t in (*heads, acted, *(i.grad for i in inputs))])
    assert max(relative(a, b) for a, b in zip(*found, strict=True)) < 1e-5


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 9001), (torch.bfloat16, 9001), (torch.bfloat16, 9000)])
def test_log_probs_and_entropies(dtype: torch.dtype, size: int, temperature: float) -> None:
    """With rows of a multiple of 16 bytes, logits are summed in the tiles of their product. One row's target is very unlikely."""
    torch.manual_seed(0)
    hidden, weight, target = torch.randn(70, 64).to(dtype), torch.randn(size, 64).to(dtype), torch.randint(0, size, (70,))
    hidden[5] *= 8
    found = []
    for device, kind in (("cuda", dtype), ("cpu", torch.float64)):
        for entropic in (0.3, 0.0):
            h, w = (t.to(device, kind).requires_grad_() for t in (hidden, weight))
            logprob, entropy = token_logprobs(h, target.to(device), Head(w), temperature, chunk_logits=size * 32)
            loss = (logprob * torch.linspace(-1, 1, 70).to(logprob)).sum()
            (loss + entropic * entropy.sum() if entropic else loss).backward()
            found.append([logprob, entropy, h.grad, w.grad])
    assert float(found[3][0].detach().min()) < -100
    bounds = (1e-5, 1e-4, 1e-4, 1e-4) if dtype == torch.float32 else (1e-5, 1e-3, 1e-2, 1e-2)
    for which in (0, 1):
        for mine, expected, bound in zip(found[which], found[2 + which], bounds, strict=True):
            assert relative(mine.cpu(), expected) < bound


def make(dtype: torch.dtype, experts: bool = False) -> Policy:
    torch.manual_seed(0)
    kind = transformers.Qwen3MoeConfig if experts else transformers.Qwen2Config
    config = kind(
        vocab_size=3000, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=512, tie_word_embeddings=True, initializer_range=0.05, **(EXPERTS if experts else {}),
    )  # fmt: skip
    with CUDA:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().to(dtype)
    return wrap_model(model, None, (1,))


def groups(equal: bool = False) -> Batch:
    """Two prompts with answers, of different lengths, or all of one: then attention is that of a batch."""
    generator, examples = np.random.default_rng(0), []
    for length in (70, 70 if equal else 9):
        prompt = generator.integers(3, 3000, length)
        for answer in (90, 90, 90, 90) if equal else (40, 5, 130):
            ids = np.concatenate([prompt, generator.integers(3, 3000, answer)])
            examples.append(Example(ids, np.arange(len(ids)) >= length))
    return pack_examples(examples, "cuda")


def gradients(policy: Policy, equal: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    policy.model.zero_grad()
    outputs = forward(policy, groups(equal))
    (outputs.logprob_T.sum() + 0.1 * outputs.entropy_T.sum()).backward()
    return outputs.logprob_T.detach(), torch.cat([p.grad.flatten().float() for p in policy.model.parameters()])


@pytest.mark.parametrize(("checkpointing", "equal"), [(False, False), (True, False), (False, True), (True, True)])
def test_the_fused_pass_against_the_module_in_float32(
    checkpointing: bool, equal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts computed once and prompts computed each time, log-probs and the whole gradient."""
    policy, exact = make(torch.bfloat16), make(torch.float32)
    policy.body.gradient_checkpointing = checkpointing
    assert fused_body(policy) is not None and fused_body(exact) is None
    expected = gradients(exact, equal)
    for shared in (4, 10**9):
        monkeypatch.setattr(forward_module, "SHARED", shared)
        logprob, gradient = gradients(policy, equal)
        assert float((logprob - expected[0]).abs().mean()) < 0.01
        assert relative(gradient, expected[1]) < 0.03


def test_a_mixture_of_experts_against_the_module_with_the_same_choices_in_float32() -> None:
    """By torch's grouped product in bfloat16. Rounding decides between nearly equal experts: choices are replayed."""
    policy, exact = make(torch.bfloat16, experts=True), make(torch.float32, experts=True)
    body, described = fused_body(policy), describe(exact)
    assert body is not None and isinstance(described, ModelDescription)
    batch, found, chosen = groups(), [], Routes()
    lengths = tuple(np.diff(batch.starts).tolist())
    place = torch.cat([torch.arange(n) for n in lengths]).to(CUDA)
    for one in (body, FusedBody(described)):
        one.described.body.zero_grad()
        hidden = one.hidden(batch.ids_T, place, max(lengths), attend_packed(lengths, CUDA), chosen)
        (hidden.float() * torch.linspace(-1, 1, hidden.shape[1], device=CUDA)).sum().backward()
        found.append((hidden, torch.cat([p.grad.flatten().float() for p in one.described.body.parameters()])))
        chosen = chosen.replay()
    assert all(relative(mine, exact) < 0.03 for mine, exact in zip(*found, strict=True))


def test_the_fused_pass_of_a_scorer_against_its_module_in_float32() -> None:
    """A reward model or a critic takes the same way as a policy: its scores and their gradient."""
    batch, found = groups(), []
    for dtype in (torch.bfloat16, torch.float32):
        scorer = from_policy(make(dtype), zero=False)
        assert (fused_body(scorer) is None) == (dtype == torch.float32)
        score_T = scores(scorer, batch)
        (score_T * torch.linspace(-1, 1, batch.tokens, device="cuda")).sum().backward()
        found.append((score_T.detach(), torch.cat([p.grad.flatten().float() for p in scorer.model.parameters()])))
    assert all(relative(mine, exact) < 0.03 for mine, exact in zip(*found, strict=True))


def test_what_is_kept_of_the_logits_gives_the_gradient_of_logits_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """All chunks, some, none; and none where the entropy is learned from too."""
    torch.manual_seed(0)
    hidden, target = torch.randn(2000, 64, device=CUDA).bfloat16(), torch.randint(0, 3000, (2000,), device=CUDA)
    weight, factor = (torch.randn(3000, 64, device=CUDA) * 0.3).bfloat16(), torch.randn(2, 2000, device=CUDA)

    def gradients(room: float, entropy: bool) -> list[torch.Tensor]:
        monkeypatch.setattr("posttrain.ops.logprobs.kept_room", lambda device: room)
        given = [t.clone().requires_grad_() for t in (hidden, weight)]
        logprob, spread = token_logprobs(given[0], target, Head(given[1]), 0.7, chunk_logits=512 * 3000)
        loss = (logprob * factor[0]).sum()
        (loss + (spread * factor[1]).sum() if entropy else loss).backward()
        return [logprob.detach(), *(t.grad for t in given if t.grad is not None)]

    for entropy in (False, True):
        again = gradients(0.0, entropy)
        for room in (1e9, 2 * 2 * 512 * 3000.0):
            found = gradients(room, entropy)
            assert torch.equal(found[0], again[0]) and len(found) == 3
            assert max(relative(a, b) for a, b in zip(found, again, strict=True)) < (0.006 if not entropy else 1e-6)
