"""A GRPO step on one GPU: generation, scoring, forward and backward, update; compared with TRL and HF generate if TRL is installed.

    python benchmarks/gpu_grpo_step.py                       # cases a, b and d, prompts computed once and plain
    python benchmarks/gpu_grpo_step.py --cases a --trl       # and TRL's step of case a, in a process of its own, same weights
    python benchmarks/gpu_grpo_step.py --cases a --profile   # where the time of forward and backward goes
    python benchmarks/gpu_grpo_step.py --cases c,e --brief   # long ones: one step after a warm-up on short answers
    python benchmarks/gpu_grpo_step.py --cases moe,moe+replay,moe-dense # a mixture of experts, with its
                                                             # choices replayed, and a dense model of its active size
    python benchmarks/gpu_grpo_step.py --cases b --gate-only # the gradient against float32, without timing

Needs a CUDA device, torch, transformers and triton. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from gpu_cases import CASES, Case, ceilings, clock, decode_bound, make_policy, make_requests, settle, train_flops  # noqa: E402

from posttrain.algorithms.grpo import GRPO  # noqa: E402
from posttrain.collect import generate_groups, group_requests  # noqa: E402
from posttrain.engine.cuda import CUDABackend  # noqa: E402
from posttrain.engine.engine import Engine  # noqa: E402
from posttrain.engine.rows import pages_of  # noqa: E402
from posttrain.engine.scheduler import Work  # noqa: E402
from posttrain.loop import collect_garbage, manual_garbage_collection  # noqa: E402
from posttrain.ops.hopper import fuses_gate  # noqa: E402
from posttrain.train import forward as forward_module  # noqa: E402
from posttrain.train.optimizer import Optimization  # noqa: E402
from posttrain.train.pack import micro_batches, pack_groups  # noqa: E402
from posttrain.train.trainer import Trainer  # noqa: E402
from posttrain.types import Batch, Completion, Group, Problem, Rollout, Score, Segment  # noqa: E402

BUDGETS = {
    "a": 49152,
    "b": 20480,
    "c": 10240,
    "d": 196608,
    "e": 33792,
    "moe": 32768,
    "moe-dense": 32768,
}  # tokens of a micro-batch


class Ours:
    """The engine and the trainer on one policy, a step at a time."""

    def __init__(self, case: Case, budget: int, replay: bool = False):
        self.case, self.policy = case, make_policy(case)
        self.policy.router_replay = replay
        self.engine = Engine(self.policy, max_rows=case.rows)
        self.algorithm = GRPO(beta=0.0, group=case.group)
        self.trainer = Trainer(self.policy, self.algorithm, Optimization(lr=1e-6, token_budget=budget))
        self.random = random.Random(0)
        self.answered = 0.0  # when the last answer of a step was there

    def step(self, seed: int) -> dict[str, float]:
        """Seconds of its parts; `pack` is the end of `generate`, in which the device has nothing to do."""
        marks = [clock()]
        batch = self.rollout(seed)
        marks.append(clock())
        prepared = self.algorithm.prepare(batch, self.algorithm.start())
        marks.append(clock())
        update = self.trainer.update(prepared, 1e-6, collect_garbage)
        marks.append(clock())
        figures = {m.name: m for m in update.metrics}
        assert update.moved and figures["mismatch"] is not None
        return {"generate": marks[1] - marks[0], "pack": marks[1] - self.answered, "prepare": marks[2] - marks[1],
                "train": marks[3] - marks[2], "step": marks[3] - marks[0],
                "grad_norm": update.grad_norm, "mismatch": mean(update.metrics, "mismatch"),
                **{n: mean(update.metrics, n) for n in ("router/balance", "router/mismatch") if n in figures}}  # fmt: skip

    @torch.inference_mode()
    def warm_up(self) -> None:
        """What a first full step would pay for once: kernels on short answers, the cache's memory at full length, the graph, and a
        micro-batch at full length, for which cuDNN chooses a kernel."""
        whole, self.case = self.case, replace(self.case, new=64)
        with torch.inference_mode(False):
            self.step(0)
        backend, asked = backend_of(self.engine), make_requests(whole, 0)
        works = [Work(n, tuple(group_requests([p])), np.array(p.ids)) for n, p in enumerate(asked)]
        backend.prepare(works, whole.rows, True)
        pool = 1 + whole.prompts * (pages_of(whole.prompt) + whole.group * pages_of(whole.new))
        if pool > backend.pages.pages:
            backend.grow(pool)
        with torch.inference_mode(False):
            long = self.rollout(1, max(1, whole.new // 64))
            self.case = whole
            prepared = self.algorithm.prepare(long, self.algorithm.start())
            self.trainer.forward_backward(next(iter(micro_batches(prepared, self.trainer.settings.token_budget))))
            self.trainer.optimizer.zero()

    def rollout(self, seed: int, times: int = 1) -> Batch:
        """Sampled groups with random rewards, packed; each answer `times` over."""
        requests, groups = make_requests(self.case, seed), []
        answers = list(generate_groups(self.engine, requests))
        if times > 1:
            answers = [tuple(repeated(one, times) for one in group) for group in answers]
        self.answered = time.perf_counter()
        for number, (request, completions) in enumerate(zip(requests, answers, strict=True)):
            prompt = Segment(np.array(request.ids), "", False)
            problem = Problem(str(number), "")
            rollouts = tuple(
                Rollout(
                    problem,
                    n,
                    (prompt, Segment(c.ids, "", True, c.logprobs)),
                    Score(self.random.random()),
                    routes=c.routes,
                )
                for n, c in enumerate(completions)
            )
            groups.append(Group(problem, rollouts))
        return pack_groups(groups, 1.0, self.policy.device)


def repeated(answer: Completion, times: int) -> Completion:
    return replace(answer, ids=np.tile(answer.ids, times), logprobs=np.tile(answer.logprobs, times))


def allocations() -> dict[str, int]:
    """How often memory was taken from the device so far, how often it had to be given back first, and how often pinned memory was taken
    from the host. In a step like the one before it, none should be."""
    device, host = torch.cuda.memory_stats(), torch.cuda.host_memory_stats()
    names = {"device_allocations": "num_device_alloc", "retries": "num_alloc_retries"}
    return {own: int(device.get(name, 0)) for own, name in names.items()} | {"pinned": int(host.get("num_host_alloc", 0))}


def backend_of(engine: Engine) -> CUDABackend:
    assert engine.scheduler is not None and isinstance(engine.scheduler.backend, CUDABackend), "the plain path was taken"
    return engine.scheduler.backend


def mean(metrics: tuple[Any, ...], name: str) -> float:
    """Of a figure of a step: `mismatch` is the absolute difference between the sampler's and the trainer's log-probs."""
    pairs = [(float(m.total), float(m.count)) for m in metrics if m.name == name]
    return sum(v for v, _ in pairs) / sum(c for _, c in pairs)


def gate(ours: Ours, batch: Batch) -> dict[str, float]:
    """Loss gradient of one micro-batch by the fused way against the plain module with float32 weights: relative error, cosine; and how
    far the sampled log-probs are from that module's, mean and largest."""
    sequences = 1 if ours.case.lora else 8  # the large model's activations in float32 must fit
    piece = next(
        iter(
            micro_batches(ours.algorithm.prepare(batch, ours.algorithm.start()), (ours.case.prompt + ours.case.new) * sequences)
        )
    )
    ours.trainer.optimizer.zero()
    ours.trainer.forward_backward(piece)
    fast = {n: m.grad.clone() for n, m in ours.trainer.optimizer.masters.items()}
    ours.trainer.optimizer.zero()
    exact = make_policy(ours.case, torch.float32)
    exact.router_replay = ours.policy.router_replay
    with torch.no_grad():
        for mine, theirs in zip(exact.model.parameters(), ours.policy.model.parameters(), strict=True):
            mine.copy_(theirs)
    exact.body.gradient_checkpointing = bool(ours.case.lora)
    exact.model.train()
    outputs = forward_module.forward(exact, piece)
    # at the point of sampling the ratio's gradient is that of the log-prob: no clipping by rounding differences
    loss = -(outputs.logprob_T * piece.advantage_T * piece.weight_T).where(piece.mask_T, 0.0).sum()
    loss.backward()
    apart_M = (outputs.logprob_T.detach() - piece.behaviour_T)[piece.mask_T].abs()
    dot = error = norm = other = 0.0
    for name, found in fast.items():
        expected = exact.model.get_parameter(name).grad
        dot += float((found * expected).sum())
        error += float((found - expected).pow(2).sum())
        norm, other = norm + float(expected.pow(2).sum()), other + float(found.pow(2).sum())
    result = {
        "relative_error": (error / norm) ** 0.5,
        "cosine": dot / (norm * other) ** 0.5,
        "norm_ratio": (other / norm) ** 0.5,
        "logprob_mean": float(apart_M.mean()),
        "logprob_max": float(apart_M.max()),
    }
    assert result["cosine"] > 0.98, result
    return result


def run_case(
    name: str, repeats: int, budget: int | None, do_gate: bool, replay: bool, ways: str = "shared,plain"
) -> dict[str, Any]:
    case = CASES[name]
    result: dict[str, Any] = {"case": name, "budget": budget or BUDGETS[name], "replay": replay}
    ours = Ours(case, result["budget"], replay)
    ours.step(0)
    if do_gate:
        result["gate"] = gate(ours, ours.rollout(1))
        torch.cuda.empty_cache()
    for way in ways.split(","):
        forward_module.SHARED = {"shared": 4, "plain": 1 << 60}[way]
        ours.step(2)
        settle()
        before = allocations()
        with manual_garbage_collection():  # as in the training loop
            steps = [ours.step(10 + n) for n in range(repeats)]
        result[way] = {key: statistics.median(s[key] for s in steps) for key in steps[0]}
        result[way] |= {name: count - before[name] for name, count in allocations().items()}
        result[way] |= {"fastest": min(s["step"] for s in steps), "slowest": max(s["step"] for s in steps),
                        "peak_gib": torch.cuda.max_memory_allocated() / 2**30}  # fmt: skip
    forward_module.SHARED = 4
    result["ours"] = ours
    return result


def run_brief(name: str, budget: int | None) -> dict[str, Any]:
    """One timed step, prompts computed once. Its generation and its training are reported as of one call."""
    ours = Ours(CASES[name], budget or BUDGETS[name])
    began = clock()
    ours.warm_up()
    settle()
    result: dict[str, Any] = {"case": name, "budget": ours.trainer.settings.token_budget, "warm_up": clock() - began}
    with manual_garbage_collection():
        result["shared"] = ours.step(10)
    backend = backend_of(ours.engine)
    step, peak = result["shared"]["step"], torch.cuda.max_memory_allocated() / 2**30
    copies = sum(target.nbytes for product in backend.decoder.products for target, _ in product.copies())
    result["shared"] |= {"fastest": step, "slowest": step, "peak_gib": peak}
    result |= {"checkpointed": ours.trainer.checkpointed, "cache_gib": sum(t.nbytes for pair in backend.stores for t in pair) / 2**30,
               "copies_gib": copies / 2**30, "ours": ours}  # fmt: skip
    return result


def run_gate(name: str, budget: int | None, replay: bool) -> dict[str, Any]:
    ours = Ours(CASES[name], budget or BUDGETS[name], replay)
    return {"case": name, "gate": gate(ours, ours.rollout(1)), "ours": ours}


def profile(ours: Ours) -> list[tuple[str, float, int]]:
    """Milliseconds and launches of each kernel in forward and backward of one micro-batch."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watch

    prepared = ours.algorithm.prepare(ours.rollout(5), ours.algorithm.start())
    pieces = list(micro_batches(prepared, ours.trainer.settings.token_budget))[:2]
    ours.trainer.forward_backward(pieces[0])
    with watch(activities=[ProfilerActivity.CUDA]) as seen:
        began = clock()
        ours.trainer.forward_backward(pieces[1])
        seconds = clock() - began
    ours.trainer.optimizer.zero()
    rows = sorted(((e.key[:90], e.self_device_time_total / 1000, e.count) for e in seen.key_averages()), key=lambda r: -r[1])
    return [(f"all, of {pieces[1].tokens} tokens, by the clock", seconds * 1000, 1), *rows[:28]]


def trl_step(name: str, micro_batch: int, steps: int) -> dict[str, Any] | None:
    """Seconds of TRL's steps in a process of its own, or None where TRL cannot be imported."""
    case = CASES[name]
    command = [sys.executable, str(HERE / "gpu_trl.py"), "grpo", name, f"--micro-batch={micro_batch}", f"--steps={steps}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        print("TRL did not run:", done.stderr.strip().splitlines()[-1:] or done.returncode, flush=True)
        return None
    found: dict[str, Any] = json.loads(lines[-1])
    print(f"TRL, {name}: {found}", f"({case.rows} rows)", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="a,b,d")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--budget", type=int)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--trl", action="store_true")
    parser.add_argument("--trl-steps", type=int, default=4, help="the first is its warm-up")
    parser.add_argument("--no-gate", action="store_true")
    parser.add_argument("--gate-only", action="store_true")
    parser.add_argument("--brief", action="store_true")
    parser.add_argument("--ways", default="shared,plain", help="prompts computed once, and plain")
    options = parser.parse_args()
    import transformers

    bytes_s, flops_s = ceilings()
    print(f"ceilings: {bytes_s / 1e12:.2f} TB/s, {flops_s / 1e12:.0f} TFLOP/s", flush=True)
    results = []
    for asked in options.cases.split(","):
        name, _, more = asked.partition("+")
        case, replay = CASES[name], more == "replay"
        if options.brief:
            result = run_brief(name, options.budget)
        elif options.gate_only:
            result = run_gate(name, options.budget, replay)
        else:
            result = run_case(name, options.repeats, options.budget, not options.no_gate, replay, options.ways)
        ours, result["hopper"] = result.pop("ours"), fuses_gate(torch.device("cuda"))
        for way in (way for way in ("shared", "plain") if way in result):
            figures, flops = result[way], train_flops(case, way == "shared")
            figures["mfu"] = flops / figures["train"] / flops_s
            figures["bound_s"] = decode_bound(case, bytes_s, flops_s, way == "shared") + flops / flops_s
            print(f"{asked} {way}: {json.dumps({k: round(v, 4) for k, v in figures.items()})}", flush=True)
        print(f"{asked} gate: {result.get('gate')}", flush=True)
        if options.profile:
            result["profile"] = profile(ours)
            for key, milliseconds, launches in result["profile"]:
                print(f"  {milliseconds:8.3f} ms {launches:5d}  {key}")
        del ours
        torch.cuda.empty_cache()
        if options.trl:
            result["trl"] = trl_step(name, 32, options.trl_steps)
        results.append(result)
    print(json.dumps({
        "benchmark": "gpu_grpo_step", "date": datetime.date.today().isoformat(), "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__, "transformers": transformers.__version__, "bytes_s": bytes_s, "flops_s": flops_s,
        "results": results,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
