"""A sampler in another process on the same GPU: weights by CUDA IPC, with receipts. Run with `make test-gpu`."""

from __future__ import annotations

import time
from contextlib import closing

import numpy as np
import pytest
import torch
import transformers

from posttrain.cluster import remote as remote_module
from posttrain.cluster.publish import Buckets, hashes
from posttrain.cluster.remote import RemoteSampler, worker_settings
from posttrain.engine.engine import Engine
from posttrain.errors import GuardStop
from posttrain.models.policy import Policy, wrap_model
from posttrain.types import Completion, Request, Sampler, Sampling

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def make_policy(seed: int, dtype: torch.dtype = torch.bfloat16) -> Policy:
    torch.manual_seed(seed)
    config = transformers.Qwen2Config(
        vocab_size=3000, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=512, tie_word_embeddings=True, initializer_range=0.05, eos_token_id=1,
    )  # fmt: skip
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return wrap_model(model.eval(), None, (1,))


def finished(sampler: Sampler, count: int) -> dict[int, Completion]:
    found: dict[int, Completion] = {}
    deadline = time.monotonic() + 120
    while len(found) < count and time.monotonic() < deadline:
        found |= {request.session: completion for request, completion in sampler.poll(0.1)}
    assert len(found) == count
    return found


def test_the_hash_on_the_device_is_that_of_the_cpu() -> None:
    weights = dict(make_policy(0).model.named_parameters())
    assert hashes(weights) == hashes({name: weight.cpu() for name, weight in weights.items()})


def test_weights_go_by_cuda_ipc_and_what_is_sampled_is_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy(0)
    requests = [Request((5, 6, 7 + n), n, Sampling(20), session=n) for n in range(8)]
    engine = Engine(policy, 64)
    with closing(RemoteSampler(policy, worker_settings(policy, 64))) as sampler:
        assert all(memory.is_cuda for memory in sampler.buckets.memory)
        for version in range(3):
            with torch.no_grad():
                for weight, other in zip(policy.model.parameters(), make_policy(version).model.parameters(), strict=True):
                    weight.copy_(other)
            sampler.publish(version)
            engine.publish(version)
            for one in (engine, sampler):
                one.submit(requests)
            here, there = finished(engine, 8), finished(sampler, 8)
            for session, completion in here.items():
                assert completion.ids.tolist() == there[session].ids.tolist()
                np.testing.assert_allclose(completion.logprobs, there[session].logprobs, atol=1e-3)
                assert set(there[session].versions.tolist()) == {version}
        fill = remote_module.fill
        monkeypatch.setattr(remote_module, "fill", lambda given, memory: fill((weight * 1.01 for weight in given), memory))
        with pytest.raises(GuardStop, match="has other weights than the trainer at version 3"):
            sampler.publish(3)


def test_buckets_of_a_gpu_cost_twice_their_size() -> None:
    before = torch.cuda.memory_allocated()
    buckets = Buckets(1 << 20, torch.device("cuda", 0))
    assert torch.cuda.memory_allocated() - before == 2 << 20
    buckets.close()
    assert torch.cuda.memory_allocated() == before
