"""The effect of a sampler's rounding on sequence ratios: its log-probs against the trainer's, for a policy that has not changed.

    python benchmarks/sequence_ratio_mismatch.py --out mismatch.json                # random weights of a 0.5B shape, CUDA, bfloat16
    python benchmarks/sequence_ratio_mismatch.py --model DIRECTORY --out real.json  # a real model's distributions, on real questions
    python benchmarks/sequence_ratio_mismatch.py --tiny                             # a small shape and short answers, also on a CPU

With d_t = log pi(y_t) - log old(y_t) at the trainer, which would be 0 in exact arithmetic, the table has for each length: the mean of
|d| over tokens; bias and spread over answers of the mean of d, which is the log of GSPO's ratio, and the share of answers whose ratio
is outside GSPO's default clip, below and above; the spread of the sum of d, the log of RLOO's ratio, and the share of answers whose
ratio is outside [1 / 1.2, 1.2]. `old` is the sampler's log-prob, the trainer's own recomputed in the same micro-batches, or the
trainer's own in micro-batches of half the size, because an update on a mini-batch has other micro-batches than the pass before the
step. Random weights have flat distributions: `--sharpen` multiplies the logits.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from gpu_cases import CASES, STOP, Case, make_model, make_requests  # noqa: E402

from posttrain.algorithms.gspo import GSPO  # noqa: E402
from posttrain.collect import Prompt, generate_groups  # noqa: E402
from posttrain.commands.models import open_policy  # noqa: E402
from posttrain.engine.engine import Engine  # noqa: E402
from posttrain.models.policy import Policy, wrap_model  # noqa: E402
from posttrain.ops.weights import sequence_means, sequence_sums  # noqa: E402
from posttrain.train.optimizer import Optimization  # noqa: E402
from posttrain.train.pack import pack_groups  # noqa: E402
from posttrain.train.trainer import Trainer  # noqa: E402
from posttrain.types import Batch, Group, Problem, Rollout, Score, Segment  # noqa: E402

TINY = Case(2, 64, 128, 4, 2, 2048, 4, 4, 16, 32)
QUESTIONS = (
    "Explain how a refrigerator works.", "Write a short story about a lighthouse keeper.", "How do I solve 3x + 7 = 22?",
    "List the causes of the French Revolution.", "Describe the life cycle of a star.", "Write a Python function that sorts a list.",
    "What should I look at when I buy a used car?", "Compare the novels of Austen and Dickens.",
)  # fmt: skip
BUDGET, BAND = 32768, math.log(1.2)


def make_policy(arguments: argparse.Namespace, case: Case, device: str) -> Policy:
    if arguments.model:
        return open_policy(arguments.model, device)
    model = make_model(case, torch.bfloat16 if device == "cuda" else torch.float32, device)
    with torch.no_grad():
        model.model.norm.weight.mul_(arguments.sharpen)
    return wrap_model(model, None, (STOP,), "a random Qwen2")


def requests_of(policy: Policy, case: Case, seed: int) -> list[Prompt]:
    """Answers of exactly the case's length, whatever is drawn."""
    made = make_requests(case, seed)
    if policy.tokenizer is None:
        return made
    ids = [tuple(policy.tokenizer(text)["input_ids"]) for text in QUESTIONS]
    return [replace(request, ids=ids[n % len(ids)]) for n, request in enumerate(made)]


def sample(engine: Engine, requests: list[Prompt], device: str) -> Batch:
    groups = []
    for number, (request, completions) in enumerate(zip(requests, generate_groups(engine, requests), strict=True)):
        prompt, problem = Segment(np.array(request.ids), "", False), Problem(str(number), "")
        parts = [(prompt, Segment(c.ids, "", True, c.logprobs)) for c in completions]
        groups.append(Group(problem, tuple(Rollout(problem, n, both, Score(float(n % 2))) for n, both in enumerate(parts))))
    return pack_groups(groups, 1.0, device)


def figures(logprob_T: torch.Tensor, old_T: torch.Tensor, batch: Batch) -> dict[str, float]:
    """What the docstring names, of one length."""
    apart_T = (logprob_T.double() - old_T.double()).where(batch.mask_T, 0.0)
    mean_N, sum_N = (f(apart_T, batch.mask_T, batch.sequence_T, batch.sequences) for f in (sequence_means, sequence_sums))
    gspo, ratio_N = GSPO(), mean_N.exp()
    return {
        "token_abs": float(apart_T.abs().sum() / batch.mask_T.sum()),
        "token_max": float(apart_T.abs().max()),
        "mean_bias": float(mean_N.mean()),
        "mean_std": float(mean_N.std()),
        "gspo_below": float((ratio_N < 1 - gspo.clip_low).double().mean()),
        "gspo_above": float((ratio_N > 1 + gspo.clip_high).double().mean()),
        "sum_std": float(sum_N.std()),
        "rloo_outside": float((sum_N.abs() > BAND).double().mean()),
    }


def measure(policy: Policy, case: Case, device: str, seed: int) -> dict[str, dict[str, float]]:
    """The figures of one length, by whose log-probs are `old`."""
    batch = sample(Engine(policy, max_rows=case.rows), requests_of(policy, case, seed), device)
    budget = min(BUDGET, batch.tokens)
    trainer = Trainer(policy, GSPO(group=case.group), Optimization(lr=1e-6, token_budget=budget))
    logprob_T, again_T = trainer.logprobs(batch), trainer.logprobs(batch)
    trainer.token_budget = budget // 2
    return {
        "sampler": figures(logprob_T, batch.behaviour_T, batch),
        "trainer, same micro-batches": figures(logprob_T, again_T, batch),
        "trainer, other micro-batches": figures(logprob_T, trainer.logprobs(batch), batch),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="a model's directory or name; without one, random weights")
    parser.add_argument("--tiny", action="store_true", help="a small shape and short answers")
    parser.add_argument("--lengths", default="", help="numbers of new tokens, with commas")
    parser.add_argument("--answers", type=int, default=0, help="answers of each length, a multiple of 8")
    parser.add_argument("--sharpen", type=float, default=1.0, help="multiplies the logits of random weights")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", default="", help="a file for the figures, as JSON")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    case = TINY if arguments.tiny else replace(CASES["a"], prompts=32)
    if arguments.answers:
        case = replace(case, prompts=max(1, arguments.answers // case.group))
    lengths = [int(text) for text in (arguments.lengths or ("16,32" if arguments.tiny else "128,256,512,1024")).split(",")]
    began = time.perf_counter()
    policy = make_policy(arguments, case, device)
    found: dict[str, dict[str, dict[str, float]]] = {}
    names = ("token_abs", "token_max", "mean_bias", "mean_std", "gspo_below", "gspo_above", "sum_std", "rloo_outside")
    print(f"{'tokens':>6}  {'old log-probs of':<30}" + "".join(f"{name:>13}" for name in names))
    for length in lengths:
        found[str(length)] = measure(policy, replace(case, new=length), device, arguments.seed)
        for whose, row in found[str(length)].items():
            print(f"{length:>6}  {whose:<30}" + "".join(f"{row[name]:>13.3g}" for name in names), flush=True)
    result = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu", "dtype": str(policy.model.dtype),
        "model": arguments.model or "random weights", "sharpen": arguments.sharpen, "answers": case.rows,
        "clip": [GSPO().clip_low, GSPO().clip_high], "seconds": time.perf_counter() - began, "lengths": found,
    }  # fmt: skip
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['seconds']:.0f} s")


if __name__ == "__main__":
    main()
