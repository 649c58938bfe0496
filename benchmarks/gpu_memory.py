"""Peak memory and time of a step of what is large for one GPU, beside what `posttrain plan` says of it; random weights.

    python benchmarks/gpu_memory.py                                   # every case, each in a process of its own
    python benchmarks/gpu_memory.py --cases qlora7b --limit 24        # as on a GPU of 24 GiB
    python benchmarks/gpu_memory.py --device cpu --small              # a tiny model, to try the script

    qlora7b   GRPO on a 7B model in 4 bits with adapters: 16 prompts x 8 answers, 256 + 512 tokens; as on a GPU of 18 GiB
    dpo7b     DPO on the same: 16 pairs of 256 + 512 tokens, the reference is the frozen weights
    full7b    GRPO on all weights of a 7B model, moments in 8 bits: 16 x 8, 256 + 512
    long32k   GRPO on a 0.5B model, sequences of 32,768 tokens: 2 x 4, 32,256 + 512

Each case makes a step on answers of 64 tokens first, which compiles and captures. Peak: of torch's allocator over both steps, used
and held. Needs a CUDA device, triton, peft (LoRA) and torchao (full7b). Prints a line a case, then one JSON line; the exit code is 1
where the plan is off by more than 15%.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from gpu_cases import CASES as SHAPES  # noqa: E402
from gpu_cases import STOP, Case, clock, make_model  # noqa: E402
from gpu_grpo_step import Ours, backend_of  # noqa: E402

from posttrain.algorithms.dpo import DPO  # noqa: E402
from posttrain.algorithms.grpo import GRPO  # noqa: E402
from posttrain.engine.engine import Engine  # noqa: E402
from posttrain.models import nf4  # noqa: E402
from posttrain.models.lora import Lora, add_adapters, share_weights  # noqa: E402
from posttrain.models.policy import Policy, wrap_model  # noqa: E402
from posttrain.stages import _plan  # noqa: E402
from posttrain.stages.rl import RLStage  # noqa: E402
from posttrain.tasks.arithmetic import Arithmetic  # noqa: E402
from posttrain.train.optimizer import Optimization  # noqa: E402
from posttrain.train.pack import pack_examples  # noqa: E402
from posttrain.train.roles.reference import Reference  # noqa: E402
from posttrain.train.trainer import Trainer  # noqa: E402
from posttrain.types import Batch, Example, Sampling  # noqa: E402

BOUND = 0.15
UNITS = {"KiB": 2.0**-20, "MiB": 2.0**-10, "GiB": 1.0}
QLORA = Lora(rank=16, load_in_4bit=True)


@dataclass(frozen=True)
class Setup:
    """A shape, its settings, and the GiB of the GPU that it is run as if on; 0: those of this one."""

    case: Case
    lora: Lora | None = None
    moments: Literal["float32", "int8"] = "float32"
    limit: float = 0.0


large, small = replace(SHAPES["c"], prompts=16, new=512), replace(SHAPES["a"], prompts=2, group=4, prompt=32256, new=512)
CASES = {
    "qlora7b": Setup(large, QLORA, limit=18.0),
    "dpo7b": Setup(large, QLORA, limit=18.0),
    "full7b": Setup(large, moments="int8"),
    "long32k": Setup(small),
}


@dataclass(frozen=True, kw_only=True)
class Sized(RLStage):
    """A stage whose prompts have the length of the case; it is planned, not run."""

    prompt: int

    def longest(self, tokenizer: object) -> int:
        return self.prompt + self.sampling.max_new_tokens


class Step(Ours):
    """A step as the stage would make it: token budget and checkpointing are chosen by memory."""

    def __init__(self, case: Case, policy: Policy, stage: Sized):
        self.case, self.policy, self.algorithm, self.random = case, policy, stage.algorithm, random.Random(0)
        self.engine = Engine(policy, max_rows=case.rows)
        reserved = stage.cache_bytes(policy) + stage.sampler_bytes(policy)
        self.trainer = Trainer(policy, self.algorithm, stage.optimizer, (), reserved, longest=stage.longest(None))


def pairs(case: Case, device: str) -> Batch:
    """Random pairs: one prompt, two answers."""
    generator, examples = np.random.default_rng(0), []
    for unit in range(case.prompts):
        prompt = generator.integers(3, 2000, case.prompt)
        for reward in (1.0, 0.0):
            ids = np.concatenate([prompt, generator.integers(3, 2000, case.new)])
            examples.append(Example(ids, np.arange(len(ids)) >= case.prompt, unit, reward))
    return pack_examples(examples, device)


def dpo_steps(
    case: Case, policy: Policy, reference: Policy, optimizer: Optimization, device: str
) -> tuple[Trainer, list[float]]:
    algorithm, both = DPO(), 2 * (case.prompt + case.new)
    trainer = Trainer(policy, algorithm, optimizer, [Reference(reference)], longest=both)
    seconds = []
    for _ in range(2):
        began = clock()
        batch = trainer.fill(pairs(case, device))
        assert trainer.update(algorithm.prepare(batch, algorithm.start()), 1e-6).moved
        seconds.append(clock() - began)
    return trainer, seconds


def plan_lines(setup: Setup, stage: Sized, policy: Policy, preferences: bool) -> list[str]:
    """What `posttrain plan` says of the stage; of pairs, what it says of their memory."""
    if not preferences:
        return _plan.rl_plan(stage, policy, {})
    both = 2 * stage.longest(None)
    way = _plan.planned_way(stage, policy, both)
    tokens = min(max(way.tokens, both), stage.prompts * both)
    return [_plan.training_memory(policy, tokens, stage.optimizer, setup.lora, layered=way.layered).line()]


def planned_gib(lines: list[str]) -> float:
    (found,) = [match for line in lines if (match := re.match(r"memory: about ([\d.]+) (\w+)", line))]
    return float(found[1]) * UNITS[found[2]]


def run_case(name: str, setup: Setup, limit: float, device: str) -> dict[str, Any]:
    case, cuda, preferences = setup.case, device == "cuda", name.startswith("dpo")
    policy = wrap_model(make_model(case, torch.bfloat16 if cuda else torch.float32, device), None, (STOP,), "a random Qwen2")
    if cuda:
        torch.cuda.empty_cache()
        whole = torch.cuda.get_device_properties(0).total_memory / 2**30
        torch.cuda.set_per_process_memory_fraction(min(1.0, (limit or whole) / whole))
    stage = Sized(
        name=name, model="random", task=Arithmetic(), prompts=case.prompts, prompt=case.prompt, evaluate_every=0,
        algorithm=GRPO(beta=0.0, group=case.group), sampling=Sampling(case.new), lora=setup.lora,
        optimizer=Optimization(lr=1e-6, moments=setup.moments),
    )  # fmt: skip
    lines = plan_lines(setup, stage, policy, preferences)
    print("\n".join(f"  plan: {line}" for line in lines), flush=True)
    reference = policy
    if setup.lora is not None:
        if setup.lora.load_in_4bit:
            nf4.quantize_layers(policy.body, device)
        reference = share_weights(policy)
        add_adapters(policy.model, setup.lora, 0)
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    result: dict[str, Any] = {"case": name, "limit_gib": limit, "plan_gib": planned_gib(lines), "plan": lines}
    if preferences:
        trainer, (result["warm_up"], result["step"]) = dpo_steps(case, policy, reference, stage.optimizer, device)
    else:
        ours = Step(case, policy, stage)
        trainer, ours.case = ours.trainer, replace(case, new=min(64, case.new))
        result["warm_up"] = ours.step(0)["step"]
        ours.case = case
        result |= ours.step(1)
        if cuda:
            result["cache_gib"] = sum(t.nbytes for pair in backend_of(ours.engine).stores for t in pair) / 2**30
    result |= {"token_budget": trainer.token_budget, "checkpointed": trainer.checkpointed}
    if cuda:
        peaks = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
        result["peak_gib"], result["held_gib"] = (size / 2**30 for size in peaks)
        result["plan_error"] = result["plan_gib"] / result["peak_gib"] - 1
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--limit", type=float, help="GiB of the GPU that the case is run as if on")
    parser.add_argument("--new", type=int, help="tokens of an answer, in place of the case's")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    names = options.cases.split(",")
    if len(names) > 1:  # a process each: torch's allocator keeps what the one before has taken
        given = [word for word in sys.argv[1:] if word not in ("--cases", options.cases)]
        codes = [subprocess.run([sys.executable, __file__, "--cases", name, *given]).returncode for name in names]
        return max(codes)
    (name,) = names
    setup = CASES[name]
    if options.new:
        setup = replace(setup, case=replace(setup.case, new=options.new))
    if options.small:
        case = replace(
            setup.case, layers=2, hidden=64, feed_forward=128, heads=4, keys=2, vocabulary=2048, prompts=2, prompt=24, new=8
        )
        setup = replace(setup, case=case, moments="float32")
    result = run_case(name, setup, setup.limit if options.limit is None else options.limit, options.device)
    keys = ("peak_gib", "held_gib", "plan_gib", "plan_error", "cache_gib", "generate", "train", "step", "warm_up", "mismatch")
    shown = {key: round(result[key], 3) for key in keys if key in result}
    print(f"{name}: {shown}, {result['token_budget']} tokens, checkpointed: {result['checkpointed']}", flush=True)
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    about = {"benchmark": "gpu_memory", "date": datetime.date.today().isoformat(), "gpu": gpu, "torch": torch.__version__}
    print(json.dumps(about | result))
    return int(abs(result.get("plan_error", 0.0)) > BOUND)


if __name__ == "__main__":
    sys.exit(main())
