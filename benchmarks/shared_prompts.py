"""Training steps with shared prefixes computed once, and with everything computed: tokens, seconds, log-probs.

    python benchmarks/shared_prompts.py   # CUDA: Qwen2.5-0.5B's shape, 128 groups of 8 as in gsm8k; CPU: a tiny model, 16 groups

Random weights and tokens: a system prompt that all groups share, then a question for each group, then its answers. Prints a table,
then one JSON line.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from gpu_cases import CASES, STOP, Case, make_model  # noqa: E402

from posttrain.algorithms.grpo import GRPO  # noqa: E402
from posttrain.models.policy import wrap_model  # noqa: E402
from posttrain.train import forward as forward_module  # noqa: E402
from posttrain.train.optimizer import Optimization  # noqa: E402
from posttrain.train.pack import micro_batches, pack_groups  # noqa: E402
from posttrain.train.trainer import Trainer  # noqa: E402
from posttrain.types import Batch, Group, Problem, Rollout, Score, Segment  # noqa: E402

WAYS = (("each beginning once", forward_module.SHARED), ("everything", 1 << 60))  # least number of equal tokens that are shared
TINY = Case(2, 64, 192, 4, 2, 512, 16, 8, 0, 0)


def make_batch(case: Case, system: int, question: int, answer: int, device: str) -> Batch:
    """Groups of random tokens with random rewards; answers are between half and one and a half times `answer` tokens long."""
    generator, groups = np.random.default_rng(0), []
    common = generator.integers(3, 500, system)
    for number in range(case.prompts):
        prompt = Segment(np.concatenate([common, generator.integers(3, 500, question)]), "", False)
        problem, rollouts = Problem(str(number), ""), []
        for sample in range(case.group):
            ids = generator.integers(3, 500, generator.integers(answer // 2, answer + answer // 2 + 1))
            said = Segment(ids, "", True, np.zeros(len(ids), np.float32))
            rollouts.append(Rollout(problem, sample, (prompt, said), Score(float(generator.random()))))
        groups.append(Group(problem, tuple(rollouts)))
    return pack_groups(groups, 1.0, device)


def clock(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(trainer: Trainer, batch: Batch, least: int, repeats: int, device: str) -> dict[str, Any]:
    """Tokens that go through the model in a step and seconds of one, the first of them left out; the log-probs before."""
    forward_module.SHARED = least
    logprob_T = trainer.logprobs(batch)
    algorithm = trainer.algorithm
    prepared = algorithm.prepare(batch.replace(behaviour_T=logprob_T.where(batch.mask_T, 0.0)), algorithm.start())
    pieces = micro_batches(prepared, trainer.token_budget)
    computed = sum(len(forward_module.shared_beginnings(piece)[0]) for piece in pieces)
    seconds = []
    for _ in range(repeats + 1):
        began = clock(device)
        assert trainer.update(prepared, 1e-12).moved  # a rate at which both ways train the same model
        seconds.append(clock(device) - began)
    timed = seconds[1:]
    return {"computed": computed, "pieces": len(pieces), "seconds": statistics.median(timed), "fastest": min(timed),
            "slowest": max(timed), "logprob_T": logprob_T}  # fmt: skip


def main() -> None:
    on_cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=128 if on_cuda else TINY.prompts)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--system", type=int, default=40, help="tokens that all prompts begin with")
    parser.add_argument("--question", type=int, default=60)
    parser.add_argument("--answer", type=int, default=263, help="mean number of tokens")
    parser.add_argument("--budget", type=int, default=49152 if on_cuda else 8192, help="tokens of a micro-batch")
    parser.add_argument("--repeats", type=int, default=5 if on_cuda else 3)
    options = parser.parse_args()
    device = "cuda" if on_cuda else "cpu"
    case = replace(CASES["a"] if on_cuda else TINY, prompts=options.groups, group=options.group)
    policy = wrap_model(make_model(case, torch.bfloat16 if on_cuda else torch.float32, device), None, (STOP,), "a random Qwen2")
    algorithm = GRPO(beta=0.0, group=case.group)
    trainer = Trainer(policy, algorithm, Optimization(lr=1e-6, token_budget=options.budget))
    batch = make_batch(case, options.system, options.question, options.answer, device)
    found = {way: measure(trainer, batch, least, options.repeats, device) for way, least in WAYS}
    first, second = (figures.pop("logprob_T")[batch.mask_T] for figures in found.values())
    apart = (first - second).abs()
    print(
        f"{case.prompts} groups of {case.group}, {batch.tokens:,} tokens, {options.system} of them common to all prompts; {device}"
    )
    for way, figures in found.items():
        print(f"{way:<20} {figures['computed']:>9,} tokens computed in {figures['pieces']} micro-batches, {figures['seconds']:.3f} s a "
              f"step ({figures['fastest']:.3f} to {figures['slowest']:.3f})")  # fmt: skip
    print(f"log-probs apart by {float(apart.mean()):.2g} in the mean, {float(apart.max()):.2g} at most")
    print(json.dumps({
        "benchmark": "shared_prompts", "date": datetime.date.today().isoformat(), "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if on_cuda else "cpu", "settings": vars(options), "tokens": batch.tokens,
        "apart_mean": float(apart.mean()), "apart_max": float(apart.max()), "results": found,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
