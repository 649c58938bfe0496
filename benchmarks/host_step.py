"""CPU time of the host's work in a step of gsm8k, in one process, without a GPU and without a model.

    python benchmarks/host_step.py --tokenizer folder --data folder       # of a model; the folder with gsm8k-train.jsonl.gz
    python benchmarks/host_step.py --tiny                                 # characters and sums: does the script work?

Episodes are those of the rl stage: prompts, requests, text, math reward, groups, packing. The sampler returns given answers: boxed
solutions of the training set, as long as a policy's (253 tokens on average, 39% cut off at 320), each after as many bursts of 16
tokens as its length needs. A GPU is idle before the requests are submitted and after the last answer has arrived; the work in
between, and the background work, overlaps with its computation. Prints a line for each part, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from posttrain.algorithms.grpo import GRPO
from posttrain.collect import Collected, Rollouts
from posttrain.data.curriculum import Curriculum, CurriculumState
from posttrain.loop import manual_garbage_collection
from posttrain.models.tiny import character_tokenizer
from posttrain.monitor.monitor import Monitor
from posttrain.monitor.rules import MonitorSettings
from posttrain.runs.metrics import group_metrics
from posttrain.stages.base import PRINTABLE
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.tasks.base import Task
from posttrain.tasks.gsm8k import Gsm8k
from posttrain.train.pack import micro_batches, with_loss
from posttrain.types import Completion, Request, Sampling, Statistics

BURST, CUT, SKIPPED = 16, 0.42, 3


class Ended(Rollouts):
    """Turns are delivered as they come, as on a GPU."""

    ordered = False  # type: ignore[assignment]


class Written:
    """A sampler whose answers were written before; it notes when it was asked first and last."""

    statistics = Statistics()

    def __init__(self, answers: Sequence[tuple[np.ndarray, str]], capacity: int):
        self.answers, self.capacity, self.random = answers, capacity, random.Random(0)
        self.rows: list[tuple[int, Request, Completion]] = []

    def submit(self, requests: Sequence[Request]) -> None:
        self.asked, self.bursts = time.process_time(), 0
        for request in requests:
            ids, finish = self.random.choice(self.answers)
            measured = np.full(len(ids), -0.5, np.float32), np.zeros(len(ids), np.int32)
            self.rows.append((-(-len(ids) // BURST), request, Completion(ids.copy(), *measured, finish)))
        self.began = time.process_time()

    def poll(self, timeout: float | None = None) -> list[tuple[Request, Completion]]:
        self.bursts += 1
        found = [(request, made) for end, request, made in self.rows if end <= self.bursts]
        self.rows = [row for row in self.rows if row[0] > self.bursts]
        self.last = time.process_time()
        return found

    def cancel(self, sessions: object) -> None: ...

    def publish(self, version: int, weights: object = None) -> None: ...

    def release(self) -> None: ...

    def close(self) -> None: ...


def answers(task: Task, tokenizer: Any, tokens: int, count: int = 600) -> list[tuple[np.ndarray, str]]:
    """Solutions, repeated until they are long enough: some with their box and the end, some cut off."""
    generator, found = random.Random(0), []
    for problem in task.problems("train")[:count]:
        worked, box = (tokenizer(text)["input_ids"] for text in (task.demonstration(problem), f"\n\\boxed{{{problem.answer}}}"))
        cut = generator.random() < CUT
        length = tokens if cut else generator.randint(2 * tokens // 5, tokens - 10)
        body = worked * (1 + length // len(worked))
        ids = body[:length] if cut else [*body[: max(0, length - len(box) - 1)], *box, tokenizer.eos_token_id]
        found.append((np.array(ids, np.int64), "length" if cut else "stop"))
    return found


def timed(parts: dict[str, float], name: str, work: Callable[[], Any]) -> Any:
    began = time.process_time()
    found = work()
    parts[name] = 1000 * (time.process_time() - began)
    return found


def one_step(source: Rollouts, sampler: Written, monitor: Monitor, step: int) -> dict[str, float]:
    """Milliseconds of each part."""
    algorithm, parts = GRPO(group=8, beta=0.0), dict[str, float]()
    timed(parts, "side work: prompts of the next step", source.look_ahead)
    began = time.process_time()
    collected: Collected = source.collect(step, algorithm, algorithm.start())
    marks = (began, sampler.asked, sampler.began, sampler.last, time.process_time())
    names = ("before the requests are submitted", "", "between bursts", "after the last answer, with packing")
    parts |= {name: 1000 * (b - a) for name, a, b in zip(names, marks, marks[1:], strict=False) if name}
    timed(parts, "check of the rollouts", lambda: monitor.check_rollouts(step, collected.groups))
    prepared = algorithm.prepare(collected.batch, algorithm.start())
    timed(parts, "cut into micro-batches", lambda: micro_batches(with_loss(prepared), 32768))
    timed(parts, "side work: metrics", lambda: group_metrics(collected.groups))
    timed(parts, "side work: monitor", lambda: monitor.measure(collected.groups))
    source.observe(collected.groups)
    return parts


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", default="")
    parser.add_argument("--data", default="")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args(arguments)
    if not given.tiny and not (given.tokenizer and given.data):
        parser.error("give --tokenizer and --data, or --tiny")
    tokenizer, task, tokens = character_tokenizer(PRINTABLE), Arithmetic(level=1), 40
    if not given.tiny:
        from transformers import AutoTokenizer

        tokenizer, task, tokens = AutoTokenizer.from_pretrained(given.tokenizer), Gsm8k(data=given.data), 320
    torch.set_num_threads(1)
    prompts = 4 if given.tiny else given.prompts
    sampler = Written(answers(task, tokenizer, tokens), 8 * prompts)
    level = task.levels[0]
    state = CurriculumState([level], [len(task.problems("train", level))], Curriculum(), 0)
    source = Ended(task, sampler, tokenizer, state, prompts, Sampling(tokens), 0, torch.device("cpu"))  # type: ignore[arg-type]
    monitor, rows = Monitor(MonitorSettings()), list[dict[str, float]]()
    for step in range(given.steps):
        with manual_garbage_collection():
            rows.append(one_step(source, sampler, monitor, step))
    median = {name: statistics.median(row[name] for row in rows[SKIPPED:]) for name in rows[0]}
    for name, milliseconds in median.items():
        print(f"{milliseconds:8.1f} ms  {name}")
    length = statistics.mean(len(ids) for ids, _ in sampler.answers)
    print(json.dumps({"benchmark": "host_step", "milliseconds": median, "episodes": 8 * prompts, "length": length}))


if __name__ == "__main__":
    main()
