"""Sends weights from a trainer to a sampler in another process. Measures the seconds from the call of `publish` until the sampler
samples with the weights, until `publish` returns after comparing the receipt's hashes, and until the trainer has its own log-probs of
the probe, which it computes while the sampler works. Prints a table, then one JSON line.

python benchmarks/publish.py                    # 1 GB in float32 through shared memory of this host; target under 1 s
python benchmarks/publish.py --device cuda      # 0.5B parameters in bfloat16 on one GPU, by CUDA IPC; target under 50 ms
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import closing

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from posttrain.cluster.publish import Receipts, fill, hashes
from posttrain.cluster.remote import RemoteSampler, probe_logprobs, published_weights, worker_settings
from posttrain.models.policy import Policy, wrap_model

# Qwen2.5-0.5B; and 250M parameters, which are 1 GB in float32
SHAPES = {"cuda": (151936, 896, 24, 14, 2, 4864), "cpu": (32000, 1024, 20, 16, 4, 2752)}


def make_policy(device: str) -> Policy:
    vocabulary, width, layers, heads, key_value_heads, feed_forward = SHAPES[device]
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        intermediate_size=feed_forward,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    return wrap_model(model.eval(), None, (0,))


def timed(function, *given, clock=time.perf_counter) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = clock()
    function(*given)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--times", type=int, default=5)
    given = parser.parse_args()
    policy = make_policy(given.device)
    weights = published_weights(policy.model, True)
    size = sum(weight.numel() * weight.element_size() for weight in weights.values())
    settings = worker_settings(policy, 8, processes=1)
    with closing(RemoteSampler(policy, settings)) as sampler:
        began = time.perf_counter()
        sampler.publish(0)
        started = time.perf_counter() - began
        seconds, placed, proven, copies = [], [], [], []
        source, target = torch.zeros(2, size, dtype=torch.uint8, device=policy.device)
        target.copy_(source)
        for version in range(1, 1 + given.times):
            sampler.release()  # it has answered the probe of the version before

            def expect(*given):  # it is called when the sampler has read the last bucket
                placed.append(time.perf_counter())
                Receipts.expect(sampler.receipts, *given)

            sampler.receipts.expect = expect
            began = time.perf_counter()
            seconds.append(timed(sampler.publish, version))
            placed[-1] -= began
            del sampler.receipts.expect
            proven.append(seconds[-1] + timed(sampler.prove))
            copies.append(timed(target.copy_, source))  # by this process, within its own memory
        # of this process's cores alone: the same where others keep them busy
        sampler.release()
        used = timed(sampler.publish, 1 + given.times, clock=time.process_time)
        copied = timed(target.copy_, source, clock=time.process_time)
        parts = {
            "fill": timed(lambda: list(fill(weights.values(), sampler.buckets.memory))),
            "hash": timed(hashes, weights),
            "probe": timed(probe_logprobs, policy, settings.vocabulary),
        }
    found = {
        "device": torch.cuda.get_device_name() if given.device == "cuda" else "cpu",
        "bytes": size,
        "tensors": len(weights),
        "start_seconds": round(started, 3),
        "in_place_seconds": round(statistics.median(placed), 4),
        "in_place_slowest": round(max(placed), 4),
        "publish_seconds": round(statistics.median(seconds), 4),
        "publish_slowest": round(max(seconds), 4),
        "publish_and_probe_seconds": round(statistics.median(proven), 4),
        "publish_and_probe_slowest": round(max(proven), 4),
        "megabytes_a_second": round(size / 1e6 / statistics.median(seconds)),
        "plain_copy_seconds": round(statistics.median(copies), 4),
        "ratio_to_plain_copy": round(statistics.median(seconds) / statistics.median(copies), 2),
        "trainer_cpu_seconds": round(used, 4),
        "plain_copy_cpu_seconds": round(copied, 4),
        "trainer_alone_seconds": {name: round(value, 4) for name, value in parts.items()},
    }
    for name, value in found.items():
        print(f"{name:26} {value}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
