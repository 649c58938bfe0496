"""The cases of the GPU benchmarks: model shapes with random weights, prompts, the peak rates of the GPU and the bounds that follow."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from posttrain.collect import Prompt
from posttrain.models.lora import Lora, add_adapters
from posttrain.models.policy import Policy, wrap_model
from posttrain.types import Sampling

STOP = 0


@dataclass(frozen=True)
class Case:
    """A model's shape and the work of one GRPO step: prompts x group, prompt + new tokens."""

    layers: int
    hidden: int
    feed_forward: int
    heads: int
    keys: int
    vocabulary: int
    prompts: int
    group: int
    prompt: int
    new: int
    tied: bool = True
    lora: int = 0  # rank of adapters on frozen weights; 0: all weights learn
    experts: int = 0  # of `feed_forward` each, in every layer; 0: a dense model
    chosen: int = 1  # of which a token has so many

    @property
    def width(self) -> int:
        return self.hidden // self.heads

    @property
    def rows(self) -> int:
        return self.prompts * self.group

    @property
    def block_weights(self) -> int:
        return self._weights(max(1, self.experts))

    @property
    def active_weights(self) -> int:
        """Those that a token is multiplied with."""
        return self._weights(self.chosen)

    def _weights(self, experts: int) -> int:
        attention = 2 * self.hidden * (self.heads + self.keys) * self.width
        router = self.hidden * self.experts
        return self.layers * (attention + router + experts * 3 * self.hidden * self.feed_forward)

    @property
    def head_weights(self) -> int:
        return self.vocabulary * self.hidden


CASES = {
    "a": Case(24, 896, 4864, 14, 2, 151936, 128, 8, 256, 512),
    "b": Case(28, 1536, 8960, 12, 2, 151936, 64, 8, 256, 1024),
    "c": Case(28, 3584, 18944, 28, 4, 152064, 32, 8, 256, 1024, tied=False, lora=16),
    "d": Case(8, 512, 1536, 8, 4, 8192, 256, 16, 64, 128),
    "e": Case(24, 896, 4864, 14, 2, 151936, 16, 8, 256, 8192),
    # 1.0B weights of which a token uses 0.3B, and a dense model of 0.3B
    "moe": Case(16, 1024, 512, 16, 8, 151936, 64, 8, 128, 128, experts=32, chosen=4),
    "moe-dense": Case(16, 1024, 2048, 16, 8, 151936, 64, 8, 128, 128),
}


def make_model(case: Case, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> Any:
    """A Qwen2 of the case's shape, a Qwen3-MoE where it has experts, with random weights, the same at every call."""
    from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

    torch.manual_seed(0)
    experts = {
        "num_experts": case.experts, "num_experts_per_tok": case.chosen, "moe_intermediate_size": case.feed_forward,
        "head_dim": case.width, "norm_topk_prob": True,
    }  # fmt: skip
    config = (Qwen3MoeConfig if case.experts else Qwen2Config)(
        vocab_size=case.vocabulary, hidden_size=case.hidden, intermediate_size=case.feed_forward, num_hidden_layers=case.layers,
        num_attention_heads=case.heads, num_key_value_heads=case.keys, max_position_embeddings=32768,
        tie_word_embeddings=case.tied, rope_theta=1e6, bos_token_id=1, eos_token_id=STOP, **(experts if case.experts else {}),
    )  # fmt: skip
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()


def make_policy(case: Case, dtype: torch.dtype = torch.bfloat16) -> Policy:
    """The case's model, with its adapters where it has some, as if they had learned: B is 0 at the start of training."""
    policy = wrap_model(make_model(case, dtype), None, (STOP,), "a random Qwen2")
    if case.lora:
        add_adapters(policy.model, Lora(rank=case.lora), 0)
        with torch.no_grad():
            for name, parameter in policy.model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0.0, 0.01)
    return policy


def make_requests(case: Case, seed: int, endless: bool = True) -> list[Prompt]:
    """Prompts of random tokens. `endless`: exactly `new` tokens, whatever is drawn."""
    generator = np.random.default_rng(seed)
    sampling = Sampling(case.new, min_new_tokens=case.new if endless else 0)
    ids = generator.integers(3, 2000, (case.prompts, case.prompt))
    return [Prompt(tuple(row.tolist()), case.group, seed * 100003 + n, sampling) for n, row in enumerate(ids)]


def lognormal_lengths(case: Case, mean: int, longest: int, seed: int = 0) -> np.ndarray:
    """A length for each row, lognormal with sigma 0.8, cut at `longest` and scaled so that the mean holds after the cut."""
    draws = np.random.default_rng(seed).lognormal(0.0, 0.8, case.rows)
    scale = mean / draws.mean()
    for _ in range(50):
        scale *= mean / np.clip(draws * scale, 1, longest).mean()
    lengths = np.clip(draws * scale, 1, longest).astype(int)
    lengths[lengths.argmax()] = longest
    return lengths


def ceilings() -> tuple[float, float]:
    """Bytes and bf16 operations a second of this GPU: a large copy, and a large product of random matrices."""
    pair = torch.empty(2, 1 << 31, dtype=torch.int8, device="cuda")
    copied = pair.numel() / timed(lambda: pair[1].copy_(pair[0]), 10)
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return copied, 2 * 8192**3 / timed(lambda: a @ b, 20)


def timed(work: Callable[[], Any], repeats: int) -> float:
    """Median seconds of one call, by device events."""
    for _ in range(3):
        work()
    seconds = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1000)
    return statistics.median(seconds)


def graphed(work: Callable[[], Any], repeats: int = 20) -> float:
    """Microseconds of one call in a graph of many."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            work()
    return timed(graph.replay, 5) * 1e6 / repeats


def run_parts(parts: Mapping[str, Callable[[], dict[str, Any]]], about: str | None) -> None:
    """Those that `--parts` names, one JSON line each; one that fails does not end the others, and the exit code is then 1."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(parts))
    failed = []
    for name in parser.parse_args().parts.split(","):
        began = time.perf_counter()
        try:
            result = parts[name]()
        except Exception:
            result = {"failed": traceback.format_exc()[-1500:]}
            failed.append(name)
        print(json.dumps({"part": name, "seconds": round(time.perf_counter() - began, 1), "found": result}), flush=True)
        torch.cuda.empty_cache()
    if failed:
        raise SystemExit(1)


def decode_bound(case: Case, bytes_s: float, flops_s: float, shared: bool = False) -> float:
    """Seconds below which no decoding can go: in each step the larger of the bytes it must read (weights, and keys and values of all
    rows; with `shared` a prompt's once a group) and of the products it must compute."""
    token_bytes = 2 * case.layers * case.keys * case.width * 2
    weights, total = 2 * (case.block_weights + case.head_weights), 0.0
    for step in range(case.new):
        prompts = (case.prompts if shared else case.rows) * case.prompt
        moved = weights + token_bytes * (prompts + case.rows * step)
        attention = 4 * case.layers * case.heads * case.width * (case.prompt + step)
        total += max(moved / bytes_s, case.rows * (2 * (case.active_weights + case.head_weights) + attention) / flops_s)
    return total


def train_flops(case: Case, shared: bool) -> float:
    """Operations of forward and backward, without recomputation; with `shared` a prompt is computed once a group. Frozen weights
    have no gradient of their own: two products of theirs in place of three (those of adapters are left out)."""
    tokens = (case.prompts * case.prompt if shared else case.rows * case.prompt) + case.rows * case.new
    both = case.prompt + case.new
    pairs = case.rows * both * both / 2
    if shared:
        pairs = case.prompts * case.prompt**2 / 2 + case.rows * (case.prompt * case.new + case.new**2 / 2)
    heads = 3.5 * 4 * case.layers * case.heads * case.width * pairs
    each = 4 if case.lora else 6
    return each * (case.active_weights * tokens + case.head_weights * case.rows * case.new) + heads


def settle() -> None:
    """After the warm-up: what Python's collector has seen so far it need not look through again, 0.3 s at a time."""
    gc.collect()
    gc.freeze()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def clock() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
