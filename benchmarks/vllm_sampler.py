"""vLLM and our engine on the same requests, each in a separate process: tokens a second, and the difference of their log-probs from
the trainer's, also after changed weights were published. At the end one tensor is changed during the transfer; the receipt must name
it. Prints a table, then one JSON line.

POSTTRAIN_VLLM_PYTHON=.vllm/bin/python python benchmarks/vllm_sampler.py                     # tiny, on the CPU
POSTTRAIN_VLLM_PYTHON=... python benchmarks/vllm_sampler.py --device cuda --model DIRECTORY  # a model on a GPU
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import closing

import numpy as np
import torch

from posttrain.cluster import remote
from posttrain.cluster.remote import RemoteSampler, remote_sampler
from posttrain.errors import GuardStop
from posttrain.models.attention import LAYOUT, Packed
from posttrain.models.load import load
from posttrain.models.policy import Policy, wrap_model
from posttrain.models.tiny import character_tokenizer, tiny_model
from posttrain.ops.logprobs import token_logprobs
from posttrain.types import Completion, Request, Sampling


def make_policy(name: str, device: str) -> Policy:
    if name.startswith("tiny:"):
        tokenizer = character_tokenizer("0123456789+-*= ")
        model = tiny_model(tokenizer, name.removeprefix("tiny:"), 0).to(device)
        return wrap_model(model, tokenizer, ())
    loaded = load(name, dtype="bfloat16" if device == "cuda" else "float32", device=device)
    return wrap_model(loaded.model, loaded.tokenizer, (), loaded.source)  # no stop ids: every response has its full length


def sample(sampler: RemoteSampler, requests: list[Request]) -> tuple[float, dict[int, Completion]]:
    began = time.perf_counter()
    sampler.submit(requests)
    found: dict[int, Completion] = {}
    while len(found) < len(requests):
        found |= {request.session: completion for request, completion in sampler.poll(1.0)}
    return time.perf_counter() - began, found


def gap(policy: Policy, requests: list[Request], found: dict[int, Completion]) -> float:
    """The mean distance from the trainer's log-probs, of the first 16 responses."""
    gaps = []
    for request in requests[:16]:
        completion = found[request.session]
        ids = torch.tensor([*request.ids, *completion.ids.tolist()], device=policy.device)
        places = torch.arange(len(ids), device=policy.device)
        with torch.no_grad():
            hidden = policy.hidden(ids[None], places[None], **{LAYOUT: Packed((0, len(ids)), policy.device)})[0]
            first = len(request.ids)
            own, _ = token_logprobs(hidden[first - 1 : -1], ids[first:], policy.head)
        gaps.append(np.abs(own.float().cpu().numpy() - completion.logprobs).mean())
    return float(np.mean(gaps))


def nudge(policy: Policy, seed: int) -> None:
    """Weights as a step of training leaves them: each a little elsewhere."""
    generator = torch.Generator(policy.device).manual_seed(seed)
    with torch.no_grad():
        for weight in policy.model.parameters():
            noise = torch.randn(weight.shape, generator=generator, device=weight.device, dtype=weight.dtype)
            weight.add_(noise * weight.std(), alpha=0.01)


def caught(sampler: RemoteSampler, version: int) -> str:
    """What stops the run when one tensor arrives changed."""
    fill = remote.fill
    remote.fill = lambda given, memory: fill((w * 1.05 if n == 3 else w for n, w in enumerate(given)), memory)
    try:
        sampler.publish(version)
        return "nothing: the wrong weights were served"
    except GuardStop as stop:
        return str(stop)
    finally:
        remote.fill = fill


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", default="tiny:mini")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=4, help="the first one warms up")
    parser.add_argument("--kinds", nargs="+", choices=("process", "vllm"), default=("process", "vllm"))
    given = parser.parse_args()
    policy, rows = make_policy(given.model, given.device), given.prompts * given.group
    vocabulary = policy.model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    shape = (given.prompts, given.prompt_tokens)
    prompts = torch.randint(0, vocabulary, shape, generator=generator).tolist()
    result: dict[str, object] = {"model": given.model, "device": given.device, "rows": rows, "new_tokens": given.new_tokens}
    for kind in given.kinds:
        with closing(remote_sampler(policy, rows, 0, kind, 1)) as sampler:
            began = time.perf_counter()
            sampler.publish(0)
            started = time.perf_counter() - began
            print(f"{kind:8} started in {started:.1f} s", flush=True)
            seconds, published = [], []
            for repeat in range(given.repeats):
                sampling = Sampling(given.new_tokens)
                requests = [
                    Request(tuple(prompts[n // given.group]), repeat * rows + n, sampling, session=n, group=n // given.group)
                    for n in range(rows)
                ]
                took, found = sample(sampler, requests)
                seconds.append(took)
                count = sum(len(completion.ids) for completion in found.values())
                print(f"{kind:8} {count / took:.0f} tokens/s in repeat {repeat}", flush=True)
                distance = gap(policy, requests, found)
                nudge(policy, repeat)
                began = time.perf_counter()
                sampler.publish(repeat + 1)
                published.append(time.perf_counter() - began)
            result[kind] = {
                "start_seconds": round(started, 1),
                "tokens_a_second": round(count / min(seconds[1:])),
                "publish_seconds": round(min(published), 4),
                "logprob_gap": distance,
                "wrong_tensor": caught(sampler, repeat + 2),
            }
            print(f"{kind:8} {result[kind]}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
