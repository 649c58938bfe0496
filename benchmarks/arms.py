"""The two sides of the CPU benchmark as worker processes, so that neither's memory, allocator or imports affect the other. Each makes
a step on request and replies with its time and memory."""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from addition import Addition, accuracy, load

PARTS = ("generation", "forward_backward", "optimizer", "step")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What both sides are told alike."""

    folder: str  # the model and tokenizer
    prompts: int = 8
    group: int = 8
    new_tokens: int = 64
    exact: bool = True  # every response has exactly `new_tokens`, and rewards are random
    lr: float = 1e-6
    threads: int = 2
    seed: int = 0

    def arguments(self) -> list[str]:
        return [json.dumps(asdict(self))]


class Clock:
    """Seconds by part."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """Count the time spent in a method of one object."""
        inner = getattr(owner, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return inner(*arguments, **options)
            finally:
                self.seconds[part] += time.perf_counter() - began

        setattr(owner, name, timed)

    def take(self) -> dict[str, float]:
        taken, self.seconds = self.seconds, dict.fromkeys(PARTS, 0.0)
        return taken


class Line:
    """The wire to the parent: commands in, one JSON object out for each. What libraries print goes to stderr."""

    def __init__(self) -> None:
        self.out: TextIO = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def receive(self) -> list[str]:
        return sys.stdin.readline().split() or ["quit"]

    def send(self, **answer: Any) -> None:
        self.out.write(json.dumps(answer) + "\n")
        self.out.flush()


def peak_memory() -> float:
    """The most memory this process has held, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def serve(line: Line, one_step: Callable[[], dict[str, float]], model: Any, tokenizer: Any) -> None:
    """Answer commands: `steps N`, `evaluate`, `memory`, `quit`."""
    line.send(ready=True)
    while True:
        match line.receive():
            case ["steps", count]:
                line.send(steps=[one_step() for _ in range(int(count))])
            case ["evaluate"]:
                line.send(accuracy=accuracy(model, tokenizer))
            case ["memory"]:
                line.send(peak=peak_memory())
            case _:
                return


def ours(settings: Settings) -> None:
    """posttrain, through the same source, algorithm and trainer as its loop."""
    import torch

    from posttrain.collect import Rollouts
    from posttrain.data.curriculum import Curriculum, CurriculumState
    from posttrain.engine.engine import Engine
    from posttrain.models.policy import wrap_model
    from posttrain.runs.metrics import merge
    from posttrain.train.optimizer import Optimization
    from posttrain.train.trainer import Trainer
    from posttrain.types import Sampling

    line, clock = Line(), Clock()
    torch.set_num_threads(settings.threads)
    random.seed(settings.seed)
    model, tokenizer = load(Path(settings.folder))
    policy = wrap_model(model, tokenizer, (tokenizer.eos_token_id,))
    task = Addition(random_reward=settings.exact)
    algorithm = grpo(settings)
    trainer = Trainer(policy, algorithm, Optimization(lr=settings.lr, beta2=0.999))
    engine = Engine(policy, processes=settings.threads)
    sampling = Sampling(settings.new_tokens, min_new_tokens=settings.new_tokens if settings.exact else 0)
    curriculum_state = CurriculumState(task.levels, [len(task.problems("train"))], Curriculum(), settings.seed)
    source = Rollouts(task, engine, tokenizer, curriculum_state, settings.prompts, sampling, settings.seed, policy.device)
    clock.wrap(trainer.optimizer, "step", "optimizer")
    clock.wrap(trainer, "forward_backward", "forward_backward")
    number = 0

    def one_step() -> dict[str, float]:
        nonlocal number
        began = time.perf_counter()
        collected = source.collect(number, algorithm, {})
        trainer.update(algorithm.prepare(collected.batch, {}), settings.lr)
        number += 1
        engine.publish(number)
        return clock.take() | {"generation": merge(collected.metrics)["seconds/generate"], "step": time.perf_counter() - began}

    serve(line, one_step, model, tokenizer)


def grpo(settings: Settings) -> Any:
    """GRPO as TRL computes it by default: advantages over the group's standard deviation, every token the same weight."""
    from posttrain.algorithms.grpo import GRPO

    return GRPO(group=settings.group, beta=0.0, reduction="token_mean")


def trl(settings: Settings) -> None:
    """TRL's GRPOTrainer, stepping in its own training loop; a callback at the end of each step waits for the next command."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    line, clock = Line(), Clock()
    torch.set_num_threads(settings.threads)
    random.seed(settings.seed)
    model, tokenizer = load(Path(settings.folder))
    task = Addition(random_reward=settings.exact)
    problems = task.problems("train")
    by_prompt = {p.question: p for p in problems}
    exact = {"min_new_tokens": settings.new_tokens} if settings.exact else {}
    arguments = GRPOConfig(
        output_dir=str(Path(settings.folder) / "trl"), max_steps=10**6, learning_rate=settings.lr, lr_scheduler_type="constant",
        per_device_train_batch_size=settings.prompts * settings.group, num_generations=settings.group, beta=0.0,
        max_completion_length=settings.new_tokens, generation_kwargs=exact, temperature=1.0, seed=settings.seed,
        use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none", save_strategy="no", logging_steps=10**6,
        disable_tqdm=True,
    )  # fmt: skip

    def reward(prompts: list[str], completions: list[str], **others: Any) -> list[float]:
        return [task.score(by_prompt[p], c).value or 0.0 for p, c in zip(prompts, completions, strict=True)]

    class Bridge(TrainerCallback):
        """Turns TRL's loop into single steps."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            clock.wrap(others["optimizer"], "step", "optimizer")
            line.send(ready=True)
            self.wait(control)

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            self.steps.append(clock.take() | {"step": time.perf_counter() - self.began})
            if len(self.steps) == self.wanted:
                line.send(steps=self.steps)
                self.wait(control)
            self.began = time.perf_counter()

        def wait(self, control: Any) -> None:
            while True:
                match line.receive():
                    case ["steps", count]:
                        self.steps: list[dict[str, float]] = []
                        self.wanted, self.began = int(count), time.perf_counter()
                        return
                    case ["evaluate"]:
                        line.send(accuracy=accuracy(model, tokenizer))
                    case ["memory"]:
                        line.send(peak=peak_memory())
                    case _:
                        control.should_training_stop = True
                        return

    dataset = Dataset.from_list([{"prompt": p.question} for p in problems])
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=reward,
        args=arguments,
        train_dataset=dataset,
        callbacks=[Bridge()],
    )
    clock.wrap(trainer, "_generate_single_turn", "generation")
    clock.wrap(trainer, "compute_loss", "forward_backward")
    clock.wrap(trainer.accelerator, "backward", "forward_backward")
    clock.wrap(trainer.accelerator, "clip_grad_norm_", "optimizer")
    trainer.train()


if __name__ == "__main__":
    {"ours": ours, "trl": trl}[sys.argv[1]](Settings(**json.loads(sys.argv[2])))
