"""A GRPO step of each tiny model on this CPU, with one thread and with all threads. Prints a table, then one JSON line.

python benchmarks/threads.py
"""

from __future__ import annotations

import json
import statistics
import time

import torch

from posttrain.algorithms.grpo import GRPO
from posttrain.collect import Rollouts
from posttrain.data.curriculum import Curriculum, CurriculumState
from posttrain.engine.engine import Engine
from posttrain.models.load import stop_ids
from posttrain.models.policy import wrap_model
from posttrain.models.tiny import character_tokenizer, tiny_model
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.train.optimizer import Optimization
from posttrain.train.trainer import Trainer
from posttrain.types import Sampling


def main() -> None:
    everyone = torch.get_num_threads()
    rows = []
    for size in ("nano", "micro", "mini"):
        task = Arithmetic(level=3, steps_weight=0.9)
        tokenizer = character_tokenizer(task.alphabet)
        model = tiny_model(tokenizer, size, 0)
        policy = wrap_model(model, tokenizer, stop_ids(model, tokenizer))
        algorithm = GRPO(group=8, beta=0.0)
        trainer = Trainer(policy, algorithm, Optimization(lr=1e-9))
        curriculum_state = CurriculumState((3,), [1000], Curriculum(), 0)
        source = Rollouts(task, Engine(policy), tokenizer, curriculum_state, 32, Sampling(20), 0, policy.device)
        seconds: dict[int, list[float]] = {1: [], everyone: []}
        for step in range(8):
            for threads in seconds:
                torch.set_num_threads(threads)
                began = time.perf_counter()
                batch = algorithm.prepare(source.collect(step, algorithm, {}).batch, {})
                trainer.update(batch.replace(mask_T=batch.mask_T), 1e-9)
                seconds[threads].append(time.perf_counter() - began)
        medians = {threads: statistics.median(values[2:]) for threads, values in seconds.items()}
        rows.append({"size": size, "parameters": policy.parameters, "seconds": medians})
        print(
            f"{size:<6} {policy.parameters:>9,} parameters  "
            + "  ".join(f"{t} thread(s) {s:.3f} s" for t, s in medians.items())
        )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
