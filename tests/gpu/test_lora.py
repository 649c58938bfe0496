"""Adapters on a CUDA device: sampled inside the graphs, trained by the fused pass, and both agree. Run with `make test-gpu`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from posttrain.algorithms.sft import SFT
from posttrain.collect import Prompt, generate_groups
from posttrain.engine.cuda import CUDABackend
from posttrain.engine.engine import Engine
from posttrain.models import nf4
from posttrain.models.fused_body import fused_body
from posttrain.models.lora import Lora, add_adapters, perturbed_adapters, share_weights
from posttrain.models.policy import Policy, wrap_model
from posttrain.train.forward import forward
from posttrain.train.optimizer import Optimization
from posttrain.train.pack import pack_examples
from posttrain.train.trainer import Trainer
from posttrain.types import Batch, Completion, Example, Sampling

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
PROMPTS = [(5, 9, 7), tuple(range(3, 90)), (20, 19)]


def make(
    dtype: torch.dtype, targets: tuple[str, ...] = (), spread: float = 0.05, load_in_4bit: bool = False
) -> tuple[Policy, Policy]:
    """A policy with adapters, and the same frozen weights without them; the wider its weights spread, the more rounding shows."""
    pytest.importorskip("peft")
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=3000, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=512, tie_word_embeddings=True, initializer_range=spread, eos_token_id=1,
    )  # fmt: skip
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().to(dtype)
    policy = wrap_model(model, None, (1,))
    if load_in_4bit:
        nf4.quantize_layers(policy.body, "cuda")
    below = share_weights(policy)
    add_adapters(policy.model, Lora(rank=8, alpha=16.0, targets=targets), 1)
    return policy, below


def batch_of(prompt: tuple[int, ...], completion: Completion) -> Batch:
    ids = np.concatenate([prompt, completion.ids])
    return pack_examples([Example(ids, np.arange(len(ids)) >= len(prompt))], "cuda")


@pytest.mark.parametrize("targets", [(), ("q_proj", "v_proj", "down_proj")])
def test_what_is_sampled_after_an_update_has_the_log_probs_of_the_new_adapters(targets: tuple[str, ...]) -> None:
    """Against the trainer's own pass (its mismatch gate is 0.1) and, apart from it, against the weights below the adapters."""
    policy, below = make(torch.bfloat16, targets, spread=0.1)
    engine, requests = Engine(policy), [Prompt(p, 4, n, Sampling(60, min_new_tokens=60)) for n, p in enumerate(PROMPTS)]
    trainer = Trainer(policy, SFT(), Optimization(lr=2e-2))
    apart = []
    for _ in range(3):
        answers = list(generate_groups(engine, requests))
        assert engine.scheduler is not None and fused_body(policy) is not None
        backend = engine.scheduler.backend
        assert isinstance(backend, CUDABackend)
        ours, others = [], []
        for prompt, group in zip(PROMPTS, answers, strict=True):
            batch = batch_of(prompt, group[0])
            with torch.no_grad():
                trained, frozen = (forward(p, batch).logprob_T[len(prompt) :].cpu().numpy() for p in (policy, below))
            ours.append(np.abs(trained - group[0].logprobs).mean())
            others.append(np.abs(frozen - group[0].logprobs).mean())
        assert max(ours) < 0.05, ours
        apart.append(min(others))
        kept = backend.decoder
        for _ in range(4):
            trainer.update(SFT().prepare(batch_of(PROMPTS[1], answers[1][0]), {}), 2e-2)
    assert apart[0] < 0.03 and apart[1] > 0.1 and apart[2] > 0.1, apart
    assert backend.decoder is kept and len(backend.graphs) > 0


def test_adapters_on_weights_in_4_bits_are_trained_and_sampled() -> None:
    """On the fast paths of both: the weights in a bit more than 4 bits, a loss that falls, and samples with the log-probs of the
    trainer's own pass."""
    policy, below = make(torch.bfloat16, load_in_4bit=True)
    layers = [m for m in policy.body.modules() if isinstance(m, nf4.Linear4bit)]
    size = sum(p.numel() * p.element_size() for m in layers for p in (m.code, m.scale))
    assert len(layers) == 7 * 3 and fused_body(policy) is not None and fused_body(below) is not None
    codes = layers[0].code.cpu(), layers[0].scale.cpu()
    expected = nf4.dequantize(*codes, torch.empty(256, 256, dtype=torch.bfloat16))
    assert torch.equal(layers[0].weight.cpu(), expected)
    assert size == sum(m.in_features * m.out_features for m in layers) * (0.5 + 2 / nf4.BLOCK)
    ids = np.random.default_rng(0).integers(3, 3000, 60)
    batch = SFT().prepare(pack_examples([Example(ids, np.arange(60) > 9)], "cuda"), {})
    trainer = Trainer(policy, SFT(), Optimization(lr=1e-2))
    losses = [next(float(m.value) for m in trainer.update(batch, 1e-2).metrics if m.name == "loss") for _ in range(12)]
    assert losses[-1] < losses[0] - 1, losses
    engine = Engine(policy)
    ((answer, *_),) = generate_groups(engine, [Prompt(PROMPTS[0], 2, 0, Sampling(30, min_new_tokens=30))])
    assert engine.scheduler is not None and isinstance(engine.scheduler.backend, CUDABackend)
    with torch.no_grad():
        ours, frozen = (forward(p, batch_of(PROMPTS[0], answer)).logprob_T[3:].cpu().numpy() for p in (policy, below))
    assert np.abs(ours - answer.logprobs).mean() < 0.05 < np.abs(frozen - answer.logprobs).mean()


def gradients(policy: Policy) -> tuple[torch.Tensor, torch.Tensor]:
    generator, examples = np.random.default_rng(0), []
    for length in (70, 9):
        prompt = generator.integers(3, 3000, length)
        for answer in (40, 5, 130):
            ids = np.concatenate([prompt, generator.integers(3, 3000, answer)])
            examples.append(Example(ids, np.arange(len(ids)) >= length))
    policy.model.zero_grad()
    with perturbed_adapters(policy.body):
        outputs = forward(policy, pack_examples(examples, "cuda"))
        outputs.logprob_T.sum().backward()
    learning = [p.grad for p in policy.model.parameters() if p.requires_grad]
    assert all(g is not None for g in learning) and len(learning) == 2 * 7 * 3
    return outputs.logprob_T.detach(), torch.cat([g.flatten().float() for g in learning if g is not None])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_fused_pass_with_adapters_against_the_module_in_float32(checkpointing: bool) -> None:
    policy, exact = make(torch.bfloat16)[0], make(torch.float32)[0]
    policy.body.gradient_checkpointing = checkpointing
    assert fused_body(policy) is not None and fused_body(exact) is None
    with torch.no_grad():
        for mine, theirs in zip(exact.model.parameters(), policy.model.parameters(), strict=True):
            mine.copy_(theirs)
    (logprob, gradient), (expected, slope) = gradients(policy), gradients(exact)
    assert float((logprob - expected).abs().mean()) < 0.015
    assert float((gradient - slope).norm() / slope.norm()) < 0.03
