"""Training steps on one GPU, without generation: SFT, DPO, GRPO and PPO on random weights and tokens.

    python benchmarks/gpu_train.py                                # every part, median of five steps after two
    python benchmarks/gpu_train.py --parts sft,dpo                # 64 rows of 1,024 tokens; 32 pairs of 512 + 512 tokens
    python benchmarks/gpu_train.py --parts a,d:64                 # the training of these GRPO cases (gpu_grpo_step.py); of d 64 groups
    python benchmarks/gpu_train.py --parts gsm8k,ppo              # GRPO and PPO with a critic of the same size, on lengths as gsm8k's
    python benchmarks/gpu_train.py --parts sft --profile          # and which kernels a step consists of, with the device's idle time
    python benchmarks/gpu_train.py --tiny                         # a tiny model on a CPU: does the script work?

A step is what the loop asks of the trainer: the roles' columns, the advantages, forward and backward of all micro-batches, and the
update. Prints a line and a JSON line for each part.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from gpu_cases import CASES, STOP, Case, make_model  # noqa: E402

from posttrain.algorithms.base import Algorithm  # noqa: E402
from posttrain.algorithms.dpo import DPO  # noqa: E402
from posttrain.algorithms.grpo import GRPO  # noqa: E402
from posttrain.algorithms.ppo import PPO  # noqa: E402
from posttrain.algorithms.sft import SFT  # noqa: E402
from posttrain.models.policy import Policy, wrap_model  # noqa: E402
from posttrain.models.scorer import from_policy  # noqa: E402
from posttrain.train.optimizer import Optimization  # noqa: E402
from posttrain.train.pack import pack_examples, pack_groups  # noqa: E402
from posttrain.train.roles.base import Role  # noqa: E402
from posttrain.train.roles.critic import Critic  # noqa: E402
from posttrain.train.roles.reference import Reference  # noqa: E402
from posttrain.train.trainer import Trainer  # noqa: E402
from posttrain.types import Batch, Example, Group, Problem, Rollout, Score, Segment  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY = Case(2, 64, 192, 4, 2, 512, 4, 4, 16, 24)
RATE = 1e-6


@dataclass(frozen=True)
class Part:
    """What is trained, on which tokens, in micro-batches of at most so many tokens."""

    case: str
    algorithm: Algorithm
    make: Callable[[Case], Batch]
    budget: int | str = "auto"


def tokens(generator: np.random.Generator, case: Case, count: int) -> np.ndarray:
    return generator.integers(3, min(2000, case.vocabulary), count)


def demonstrations(case: Case) -> Batch:
    """Rows of equal length, of which every token but the first carries loss."""
    generator, (rows, length) = np.random.default_rng(0), (64, 1024) if case.vocabulary > 512 else (8, 32)
    return pack_examples([Example(tokens(generator, case, length), np.arange(length) > 0) for _ in range(rows)], DEVICE)


def pairs(case: Case) -> Batch:
    """Pairs of answers to one prompt, both as long as it."""
    generator, (count, length) = np.random.default_rng(0), (32, 512) if case.vocabulary > 512 else (4, 16)
    examples = []
    for unit in range(count):
        prompt = tokens(generator, case, length)
        for reward in (1.0, 0.0):
            ids = np.concatenate([prompt, tokens(generator, case, length)])
            examples.append(Example(ids, np.arange(2 * length) >= length, unit, reward))
    return pack_examples(examples, DEVICE)


def answers(case: Case, system: int = 0, unequal: bool = False) -> Batch:
    """Groups of answers to a prompt; `system`: tokens that all prompts begin with; unequal: from half to one and a half times as
    long."""
    generator, groups = np.random.default_rng(0), []
    common = tokens(generator, case, system)
    for number in range(case.prompts):
        prompt = Segment(np.concatenate([common, tokens(generator, case, case.prompt - system)]), "", False)
        problem, rollouts = Problem(str(number), ""), []
        for sample in range(case.group):
            length = int(generator.integers(case.new // 2, case.new + case.new // 2 + 1)) if unequal else case.new
            said = Segment(tokens(generator, case, length), "", True, np.zeros(length, np.float32))
            rollouts.append(Rollout(problem, sample, (prompt, said), Score(float(generator.random()))))
        groups.append(Group(problem, tuple(rollouts)))
    return pack_groups(groups, 1.0, DEVICE)


def like_gsm8k(case: Case) -> Batch:
    sizes = {"prompt": 100, "new": 263} if case.vocabulary > 512 else {}
    return answers(replace(case, **sizes), 40 if sizes else 8, unequal=True)


PARTS = {
    "sft": Part("a", SFT(), demonstrations),
    "dpo": Part("a", DPO(), pairs),
    "a": Part("a", GRPO(beta=0.0, group=8), answers, 49152),
    "d": Part("d", GRPO(beta=0.0, group=16), answers, 196608),
    "gsm8k": Part("a", GRPO(beta=0.0, group=8), like_gsm8k),
    "ppo": Part("a", PPO(beta=0.0, group=8, epochs=1), like_gsm8k),
}


def clock() -> float:
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def make_policy(case: Case) -> Policy:
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    return wrap_model(make_model(case, dtype, DEVICE), None, (STOP,), "a random Qwen2")


def make_trainer(part: Part, case: Case, budget: int | str) -> Trainer:
    policy, settings = make_policy(case), Optimization(lr=RATE, token_budget=budget)  # type: ignore[arg-type]
    roles: list[Role] = []
    if "reference" in part.algorithm.roles:
        frozen = make_policy(case)
        frozen.model.requires_grad_(False)
        roles.append(Reference(frozen))
    if "critic" in part.algorithm.roles:
        roles.append(Critic(from_policy(policy), settings))
    return Trainer(policy, part.algorithm, settings, roles)


class Step:
    """One step of a part, as often as it is asked for."""

    def __init__(self, part: Part, case: Case, budget: int | str):
        self.trainer, self.batch = make_trainer(part, case, budget), part.make(case)
        if part.algorithm.learns_from == "rollouts":  # sampled by the model as it is, so that nothing is clipped
            logprob_T = self.trainer.logprobs(self.batch)
            self.batch = self.batch.replace(behaviour_T=logprob_T.where(self.batch.mask_T, 0.0))

    def __call__(self) -> dict[str, float]:
        algorithm, marks = self.trainer.algorithm, [clock()]
        filled = self.trainer.fill(self.batch, state=algorithm.start())
        marks.append(clock())
        prepared = algorithm.prepare(filled, algorithm.start())
        marks.append(clock())
        assert self.trainer.update(prepared, RATE).moved
        marks.append(clock())
        names = ("fill", "prepare", "update")
        return {"step": marks[-1] - marks[0]} | {n: b - a for n, a, b in zip(names, marks, marks[1:], strict=False)}


def profile(step: Step) -> dict[str, Any]:
    """Milliseconds and launches of each kernel of a step, and how long none ran."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watch

    with watch(activities=[ProfilerActivity.CUDA]) as seen:
        seconds = step()["step"]
    kernels = sorted(
        (e.time_range.start, e.time_range.end, e.name[:50]) for e in seen.events() if str(e.device_type).endswith("CUDA")
    )
    gaps, reached, before = [], kernels[0][0], ""
    for start, end, name in kernels:
        gaps.append((max(0.0, start - reached) / 1000, before, name))
        reached, before = (end, name) if end > reached else (reached, before)
    rows = sorted(((e.key[:100], e.self_device_time_total / 1000, e.count) for e in seen.key_averages()), key=lambda r: -r[1])
    idle, short = sum(gap for gap, *_ in gaps), sum(gap for gap, *_ in gaps if gap < 0.02)
    return {"seconds": seconds, "busy_ms": (reached - kernels[0][0]) / 1000 - idle, "idle_ms": idle, "idle_below_20us_ms": short,
            "kernels": len(kernels), "longest_gaps": sorted(gaps, reverse=True)[:10], "by_kernel": rows[:45]}  # fmt: skip


def run(name: str, options: argparse.Namespace) -> dict[str, Any]:
    name, _, prompts = name.partition(":")
    part = PARTS[name]
    case = TINY if options.tiny else CASES[part.case]
    case = replace(case, prompts=int(prompts or case.prompts))
    step = Step(part, case, options.budget or part.budget)
    for _ in range(2):
        step()
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    timed = [step() for _ in range(options.repeats)]
    found: dict[str, Any] = {key: statistics.median(one[key] for one in timed) for key in timed[0]}
    found |= {"part": name, "fastest": min(one["step"] for one in timed), "slowest": max(one["step"] for one in timed),
              "tokens": step.batch.tokens, "tokens_s": step.batch.tokens / found["step"], "budget": step.trainer.token_budget,
              "checkpointed": step.trainer.checkpointed}  # fmt: skip
    if DEVICE == "cuda":
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        if options.profile:
            found["profile"] = profile(step)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--budget", type=int, help="tokens of a micro-batch")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    where = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
    header = {"benchmark": "gpu_train", "date": datetime.date.today().isoformat(), "gpu": where, "torch": torch.__version__}
    for name in options.parts.split(","):
        found = run(name, options)
        print(f"{name}: {found['step']:.4f} s a step ({found['fastest']:.4f} to {found['slowest']:.4f}; fill {found['fill']:.4f}, "
              f"prepare {found['prepare']:.4f}, update {found['update']:.4f}), {found['tokens']:,} tokens, micro-batches of "
              f"{found['budget']}{', checkpointed' * found['checkpointed']}, peak {found.get('peak_gib', 0):.1f} GiB")  # fmt: skip
        if seen := found.get("profile"):
            print(f"  busy {seen['busy_ms']:.1f} ms, idle {seen['idle_ms']:.1f}, in gaps below 20 us {seen['idle_below_20us_ms']:.1f}; "
                  f"{seen['kernels']} kernels; longest gaps: {seen['longest_gaps']}")  # fmt: skip
            for key, milliseconds, launches in seen["by_kernel"]:
                print(f"  {milliseconds:9.3f} ms {launches:5d}  {key}")
        print(json.dumps(header | found), flush=True)
        if DEVICE == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
