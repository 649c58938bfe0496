"""The time of a complete step compared with the generation and the training in it: the stage `rl` in the training loop, with a real
model and tokenizer, its chat template, a math reward, metrics, monitors and written rollouts.

    python benchmarks/product_step.py --model folder --data folder   # with gsm8k-train.jsonl.gz and gsm8k-test.jsonl.gz in it
    python benchmarks/product_step.py --model folder --data folder --algorithm ppo --seconds 30     # no step begins later
    python benchmarks/product_step.py --tiny                         # a toy model on sums, on a CPU: does the script work?

The stage runs as the command line runs it. Its calls of the sampler and the trainer are recorded and then repeated alone: the same
requests, the same prepared batches, and the critic's updates before them. The bare step is the sum of these two times. Prints a
table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from posttrain import config, pipeline  # noqa: E402
from posttrain.engine.engine import Engine  # noqa: E402
from posttrain.runs.read import Run  # noqa: E402
from posttrain.train.trainer import Trainer  # noqa: E402

SKIPPED = 2  # steps before everything is compiled and captured
PARTS = ("seconds/total", "seconds/generate", "seconds/score", "seconds/train")


def clock() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class Noted:
    """What the run asked of the sampler and of the trainer, step by step."""

    def __init__(self) -> None:
        self.requests: list[list[Any]] = []
        self.updates: list[list[tuple[Any, ...]]] = []
        self.filled: tuple[Any, ...] = ()  # what was last asked to be filled
        self.trainer: Trainer | None = None
        self.engine: Engine | None = None

    def watch(self) -> None:
        noted, submit, fill, update = self, Engine.submit, Trainer.fill, Trainer.update

        def noting_submit(engine: Engine, requests: Any) -> None:
            noted.engine = engine
            if not noted.updates or noted.updates[-1]:  # the first of a step
                noted.requests.append([])
                noted.updates.append([])
            noted.requests[-1] += requests
            submit(engine, requests)

        def noting_fill(trainer: Trainer, *given: Any) -> Any:
            noted.filled = given
            return fill(trainer, *given)

        def noting_update(trainer: Trainer, *given: Any, **more: Any) -> Any:
            noted.trainer = trainer
            noted.updates[-1].append((*given[:2], noted.filled if given[0].learned else ()))  # the batch and the rate
            return update(trainer, *given, **more)

        Engine.submit, Trainer.fill, Trainer.update = noting_submit, noting_fill, noting_update  # type: ignore[method-assign]
        self.plain = submit, fill, update

    def again(self) -> list[tuple[float, float]]:
        """Seconds of bare generation and of bare training, step by step."""
        Engine.submit, Trainer.fill, Trainer.update = self.plain  # type: ignore[method-assign]
        assert self.engine is not None and self.trainer is not None
        engine, found = self.engine, []
        for requests, updates in zip(self.requests, self.updates, strict=True):
            began, left = clock(), len(requests)
            engine.submit(requests)
            while left:
                left -= len(engine.poll())
            middle = clock()
            for batch, rate, filled in updates:
                if filled:
                    self.trainer.fill(*filled)
                self.trainer.update(batch, rate)
            found.append((middle - began, clock() - middle))
        return found


def stage(arguments: argparse.Namespace) -> dict[str, Any]:
    """The rl stage of the gsm8k recipe at a rate that leaves the policy where it is, so that a step can be repeated."""
    common = {
        "stage": "rl",
        "name": "rl",
        "evaluate_every": 0,
        "checkpoint_every": 0,
        "watch_kl": True,
        "steps": arguments.steps,
        "seconds": arguments.seconds,
    }
    if arguments.tiny:
        task = {"name": "arithmetic", "level": 1}
        return {**common, "model": "tiny:nano", "task": task, "prompts": 4, "sampling": {"max_new_tokens": 12},
                "algorithm": {"name": arguments.algorithm, "epochs": 1}, "optimizer": {"lr": 1e-12}}  # fmt: skip
    return {**common, "model": arguments.model, "task": {"name": "gsm8k", "data": arguments.data}, "prompts": arguments.prompts,
            "sampling": {"max_new_tokens": arguments.tokens},
            "algorithm": {"name": arguments.algorithm, "group": arguments.group, "beta": 0.0, "epochs": 1},
            "optimizer": {"lr": 1e-12}}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="")
    parser.add_argument("--data", default="")
    parser.add_argument("--algorithm", default="grpo")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=0.0, help="no step begins after so long; 0: all steps are made")
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=320)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    if not arguments.tiny and not (arguments.model and arguments.data):
        parser.error("give --model and --data, or --tiny")
    noted = Noted()
    noted.watch()
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.yaml"
        recipe.write_text(yaml.safe_dump({"seed": 0, "stages": [stage(arguments)]}))
        run = Run(pipeline.start(config.parse(str(recipe), [f"out={Path(folder) / 'run'}"], allow_code=True)))
        rows = [row for row in run.metrics("rl") if "seconds/total" in row.figures]
    bare = noted.again()
    print_table(arguments, rows[SKIPPED:], bare[SKIPPED:])


def print_table(arguments: argparse.Namespace, rows: list[Any], bare: list[tuple[float, float]]) -> None:
    median = {name: statistics.median(float(row.figures.get(name, 0.0)) for row in rows) for name in PARTS}
    generate, train = (statistics.median(part) for part in zip(*bare, strict=True))
    mean = statistics.mean(float(row.figures["seconds/total"]) for row in rows)  # with the steps that write rollouts
    alone = statistics.mean(sum(parts) for parts in bare)
    length = statistics.mean(float(row.figures["length"]) for row in rows)
    print(f"\n| | step | generate | score | train |\n| --- | --- | --- | --- | --- |\n| product | {median['seconds/total']:.3f} s | "
          f"{median['seconds/generate']:.3f} | {median['seconds/score']:.3f} | {median['seconds/train']:.3f} |\n| bare | "
          f"{generate + train:.3f} s | {generate:.3f} | | {train:.3f} |")  # fmt: skip
    print(f"answers of {length:.0f} tokens; mean step, of which every fifth writes rollouts: {mean:.3f} s, "
          f"{mean / alone - 1:+.1%} on the bare step")  # fmt: skip
    result = {"median": median, "bare": {"generate": generate, "train": train}, "mean_step": mean, "mean_bare": alone,
              "over_bare": mean / alone - 1, "length": length, "steps": len(rows), "algorithm": arguments.algorithm,
              "by_step": [[*(round(float(row.figures.get(name, 0.0)), 3) for name in PARTS), *(round(one, 3) for one in parts)]
                          for row, parts in zip(rows, bare, strict=True)]}  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
