"""A GRPO step on the CPU, by posttrain and by TRL: the same model, prompts, lengths, precision and random rewards.

    python benchmarks/cpu_grpo_step.py             # time generation and the whole step at 64 new tokens
    python benchmarks/cpu_grpo_step.py --learn     # time from about 0.77 to 0.90 greedy accuracy on two-digit sums

Each side is a process that makes a step on request; steps alternate. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from addition import finetune, load, make_model, make_tokenizer, save
from arms import PARTS, Settings

WARM, TIMED = 2, 7


class Arm:
    """One side in its own process."""

    def __init__(self, name: str, settings: Settings):
        self.name = name
        environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, str(Path(__file__).parent / "arms.py"), name, json.dumps(asdict(settings))]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        )
        self.answer()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the {self.name} side ended early with code {self.process.wait()}")
        return dict(json.loads(line))

    def ask(self, command: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def gate(folder: Path) -> dict[str, float]:
    """Right before fast: our log-probs against a transformers forward, and one step's loss and gradient norm against plain maths."""
    import torch

    from posttrain.algorithms.grpo import GRPO
    from posttrain.collect import Prompt, generate_groups
    from posttrain.engine.engine import Engine
    from posttrain.models.policy import wrap_model
    from posttrain.train.optimizer import Optimization
    from posttrain.train.pack import pack_groups
    from posttrain.train.trainer import Trainer
    from posttrain.types import Group, Problem, Rollout, Sampling, Score, Segment

    plain, tokenizer = load(folder)
    policy = wrap_model(load(folder)[0], tokenizer, ())
    request = Prompt(tuple(tokenizer("12+34=")["input_ids"]), 8, 0, Sampling(64))
    samples = next(iter(generate_groups(Engine(policy), [request])))
    ids = torch.tensor([[*request.ids, *s.ids.tolist()] for s in samples])
    logprob = plain(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0][:, len(request.ids) - 1 :]
    worst = max(float((logprob[n].detach() - torch.tensor(s.logprobs)).abs().max()) for n, s in enumerate(samples))
    rewards = torch.arange(8.0)
    advantage = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    loss = -((logprob - logprob.detach()).exp() * advantage[:, None]).mean()
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in plain.parameters() if p.grad is not None]).norm()
    prompt = Segment(ids[0, : len(request.ids)].numpy(), "", False)
    answers = [Segment(s.ids, "", True, s.logprobs) for s in samples]
    rollouts = [Rollout(Problem("0", ""), n, (prompt, a), Score(float(n))) for n, a in enumerate(answers)]
    algorithm = GRPO(beta=0.0, reduction="token_mean")
    batch = algorithm.prepare(pack_groups([Group(Problem("0", ""), tuple(rollouts))], 1.0), {})
    update = Trainer(policy, algorithm, Optimization(lr=1e-9)).update(batch, 1e-9)
    found = {"logprob": worst, "norm": abs(update.grad_norm / float(norm) - 1)}
    if found["logprob"] > 1e-4 or found["norm"] > 1e-3:
        raise SystemExit(f"the gate is shut: {found}")
    return found


def speed(threads: int) -> dict[str, Any]:
    """Time both sides, step by step in turn."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = make_tokenizer()
        save(folder, make_model(tokenizer, 0.1), tokenizer)
        passed = gate(folder)
        arms = [Arm(side, Settings(folder=name, threads=threads)) for side in ("ours", "trl")]
        times: dict[str, list[dict[str, float]]] = {arm.name: [] for arm in arms}
        for _ in range(WARM + TIMED):
            for arm in arms:
                times[arm.name] += arm.ask("steps 1")["steps"]
        memory = {arm.name: arm.ask("memory")["peak"] for arm in arms}
        for arm in arms:
            arm.close()
    result: dict[str, Any] = {"gate": passed, "memory": memory}
    print(f"{'':<18}{'ours':>24}{'TRL':>24}{'ratio':>8}")
    for part in PARTS:
        middle = {}
        cells = []
        for side, rows in times.items():
            values = [1e3 * row[part] for row in rows[WARM:]]
            middle[side] = statistics.median(values)
            cells.append(f"{middle[side]:.0f} ms [{min(values):.0f}, {max(values):.0f}]")
        result[part] = middle | {"ratio": middle["trl"] / middle["ours"]}
        print(f"{part:<18}{cells[0]:>24}{cells[1]:>24}{result[part]['ratio']:>7.2f}x")
    print(f"{'peak memory':<18}{memory['ours']:>20.0f} MiB{memory['trl']:>20.0f} MiB")
    return result


def learn(threads: int, goal: float, limit: int) -> dict[str, Any]:
    """Seconds of training until the goal, evaluation not counted, in turns of 50 steps."""
    with tempfile.TemporaryDirectory() as name:
        start = finetune(Path(name))
        print(f"after SFT: {start:.3f} greedy accuracy on 512 held-out sums")
        found: dict[str, Any] = {"start": start}
        for side, lr in (("ours", 3e-5), ("trl", 3e-5), ("ours", 1e-4)):
            label = f"{side}, lr {lr:g}"
            arm = Arm(side, Settings(folder=name, threads=threads, new_tokens=8, exact=False, lr=lr))
            seconds, steps, reached = 0.0, 0, start
            while reached < goal and steps < limit:
                seconds += sum(row["step"] for row in arm.ask("steps 50")["steps"])
                steps += 50
                reached = arm.ask("evaluate")["accuracy"]
            arm.close()
            found[label] = {"seconds": seconds, "steps": steps, "accuracy": reached}
            print(f"{label:<16} {reached:.3f} after {steps} steps, {seconds:.0f} s", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--learn", action="store_true")
    parser.add_argument("--goal", type=float, default=0.90)
    parser.add_argument("--limit", type=int, default=2500, help="steps at most")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    if importlib.util.find_spec("trl") is None:
        print("TRL is not installed: run this with 'make bench', or pip install 'posttrain[bench]'", file=sys.stderr)
        return 2
    result = learn(options.threads, options.goal, options.limit) if options.learn else speed(options.threads)
    print(json.dumps({"date": time.strftime("%Y-%m-%d"), "threads": options.threads, **result}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
