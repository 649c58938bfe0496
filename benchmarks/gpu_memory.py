"""Peak memory and time of a step for cases that are large for one GPU, compared with `posttrain plan`; random weights.

    python benchmarks/gpu_memory.py                                   # every case, each in a process of its own
    python benchmarks/gpu_memory.py --cases qlora7b --limit 24        # as on a GPU of 24 GiB
    python benchmarks/gpu_memory.py --device cpu --small              # a tiny model, to try the script

    qlora7b   GRPO on a 7B model in 4 bits with adapters, 16 prompts x 8 answers, 256 + 512 tokens; then, as dpo7b, DPO on 16 pairs of
              256 + 512 tokens, whose reference is the frozen weights; as on a GPU of 18 GiB
    long32k   GRPO on all weights of a 0.5B model, sequences of 32,768 tokens: 1 x 4, 32,256 + 512; as on a GPU of 24 GiB
    full7b    GRPO on all weights of a 7B model, moments in 8 bits: 16 x 8, 256 + 512

Each case first makes a step on answers of 64 tokens, which compiles kernels and captures graphs. The peak is that of torch's
allocator over both steps, allocated and reserved. Needs a CUDA device, triton, peft (LoRA) and torchao (full7b). Prints a line for
each case, then one JSON line. The exit code is 1 if the plan is off by more than 15%.
"""

from __future__ import annotations

import argparse
import datetime
import fcntl
import gc
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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


large, small = replace(SHAPES["c"], prompts=16, new=512), replace(SHAPES["a"], prompts=1, group=4, prompt=32256, new=512)
CASES = {
    "qlora7b": Setup(large, QLORA, limit=18.0),
    "long32k": Setup(small, limit=24.0),
    "full7b": Setup(large, moments="int8"),
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


def pairs(case: Case, device: torch.device) -> Batch:
    """Random pairs: one prompt, two answers."""
    generator, examples = np.random.default_rng(0), []
    for unit in range(case.prompts):
        prompt = generator.integers(3, 2000, case.prompt)
        for reward in (1.0, 0.0):
            ids = np.concatenate([prompt, generator.integers(3, 2000, case.new)])
            examples.append(Example(ids, np.arange(len(ids)) >= case.prompt, unit, reward))
    return pack_examples(examples, device)


def pairs_plan(stage: Sized, policy: Policy) -> list[str]:
    """What `posttrain plan` says of the memory of pairs of such sequences."""
    both = 2 * stage.longest(None)
    way = _plan.planned_way(stage, policy, both)
    tokens = min(max(way.tokens, both), stage.prompts * both)
    return [_plan.training_memory(stage, policy, tokens, way.layered, {}).line()]


def planned_gib(lines: list[str]) -> float:
    (found,) = [match for line in lines if (match := re.match(r"memory: about ([\d.]+) (\w+)", line))]
    return float(found[1]) * UNITS[found[2]]


def limit_to(gib: float) -> None:
    """Let this process have so much of the GPU; 0: all of it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        whole = torch.cuda.get_device_properties(0).total_memory / 2**30
        torch.cuda.set_per_process_memory_fraction(min(1.0, (gib or whole) / whole))
        torch.cuda.reset_peak_memory_stats()


@contextmanager
def turn(lock: str) -> Iterator[None]:
    """Until it is left, no other process that names the same file times a step."""
    with open(lock or os.devnull, "w") as file:
        if lock:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def peaks(found: dict[str, Any], trainer: Trainer) -> dict[str, Any]:
    found |= {"token_budget": trainer.token_budget, "checkpointed": trainer.checkpointed}
    if torch.cuda.is_available():
        sizes = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
        found["peak_gib"], found["held_gib"] = (size / 2**30 for size in sizes)
        found["plan_error"] = found["plan_gib"] / found["peak_gib"] - 1
    return found


def rl_steps(case: Case, policy: Policy, stage: Sized, lines: list[str], lock: str) -> dict[str, Any]:
    found: dict[str, Any] = {"plan_gib": planned_gib(lines), "plan": lines}
    ours = Step(replace(case, new=min(64, case.new)), policy, stage)
    found["warm_up"] = ours.step(0)["step"]
    ours.case = case
    with turn(lock):
        found |= ours.step(1)
    if torch.cuda.is_available():
        found["cache_gib"] = sum(t.nbytes for pair in backend_of(ours.engine).stores for t in pair) / 2**30
    found = peaks(found, ours.trainer)
    ours.engine.close()
    return found


def dpo_steps(case: Case, policy: Policy, reference: Policy, stage: Sized, lines: list[str], lock: str) -> dict[str, Any]:
    found: dict[str, Any] = {"plan_gib": planned_gib(lines), "plan": lines}
    algorithm = DPO()
    trainer = Trainer(policy, algorithm, stage.optimizer, [Reference(reference)], longest=2 * stage.longest(None))
    for name in ("warm_up", "step"):
        with turn(lock):
            began = clock()
            batch = trainer.fill(pairs(case, policy.device))
            assert trainer.update(algorithm.prepare(batch, algorithm.start()), 1e-6).moved
            found[name] = clock() - began
    return peaks(found, trainer)


def tiny(setup: Setup) -> Setup:
    """The same of a model that a CPU can train at once."""
    shape = {"layers": 2, "hidden": 64, "feed_forward": 128, "heads": 4, "keys": 2, "vocabulary": 2048}
    return replace(setup, case=replace(setup.case, **shape, prompts=2, prompt=24, new=8), moments="float32")


def run_case(name: str, setup: Setup, limit: float, device: str, lock: str) -> dict[str, dict[str, Any]]:
    case, dtype = setup.case, torch.bfloat16 if device == "cuda" else torch.float32
    policy = wrap_model(make_model(case, dtype, device), None, (STOP,), "a random Qwen2")
    stage = Sized(
        name=name, model="random", task=Arithmetic(), prompts=case.prompts, prompt=case.prompt, evaluate_every=0,
        algorithm=GRPO(beta=0.0, group=case.group), sampling=Sampling(case.new), lora=setup.lora,
        optimizer=Optimization(lr=1e-6, moments=setup.moments),
    )  # fmt: skip
    limit_to(limit)
    lines, pair_lines = stage.plan(policy, None, {}), pairs_plan(stage, policy)
    print("\n".join(f"  plan: {line}" for line in lines), flush=True)
    if setup.lora is None:
        return {name: rl_steps(case, policy, stage, lines, lock)}
    limit_to(0)  # a stage reads the model into the host's memory, and the GPU has no more of it than this leaves
    nf4.quantize_layers(policy.body, device)
    layer = policy.body.layers[0].self_attn.k_proj
    bits = nf4.dequantize(layer.code.cpu(), layer.scale.cpu(), torch.empty(layer.out_features, layer.in_features, dtype=dtype))
    assert torch.equal(layer.weight.cpu(), bits), "the kernel gives other weights than plain torch"
    reference = share_weights(policy)
    add_adapters(policy.model, setup.lora, 0)
    limit_to(limit)
    found = {name: rl_steps(case, policy, stage, lines, lock)}
    limit_to(limit)
    print(f"  plan: {pair_lines[0]}", flush=True)
    return found | {name.replace("qlora", "dpo"): dpo_steps(case, policy, reference, stage, pair_lines, lock)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--limit", type=float, help="GiB of the GPU that the case is run as if on")
    parser.add_argument("--new", type=int, help="tokens of an answer, in place of the case's")
    parser.add_argument("--layers", type=int, help="layers of the model, in place of the case's: for a smaller GPU")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--turns", default="", help="a file: processes that name it time their steps one after the other")
    options = parser.parse_args()
    names = options.cases.split(",")
    if len(names) > 1:  # a process each: torch's allocator keeps what the one before has taken
        given = [word for word in sys.argv[1:] if word not in ("--cases", options.cases)]
        codes = [subprocess.run([sys.executable, __file__, "--cases", name, *given]).returncode for name in names]
        return max(codes)
    (name,) = names
    setup = CASES[name]
    case = setup.case
    setup = replace(setup, case=replace(case, new=options.new or case.new, layers=options.layers or case.layers))
    if options.small:
        setup = tiny(setup)
    limit = setup.limit if options.limit is None else options.limit
    results = run_case(name, setup, limit, options.device, options.turns)
    keys = ("peak_gib", "held_gib", "plan_gib", "plan_error", "cache_gib", "generate", "train", "step", "warm_up", "mismatch")
    for label, result in results.items():
        shown = {key: round(result[key], 3) for key in keys if key in result}
        print(f"{label}: {shown}, {result['token_budget']} tokens, checkpointed: {result['checkpointed']}", flush=True)
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    about = {"benchmark": "gpu_memory", "date": datetime.date.today().isoformat(), "gpu": gpu, "torch": torch.__version__}
    print(json.dumps(about | {"limit_gib": limit, "layers": setup.case.layers, "results": results}))
    return int(any(abs(result.get("plan_error", 0.0)) > BOUND for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
