"""MATH: GRPO on a real instruct model, rewarded only for the right answer in a box."""

from __future__ import annotations

from dataclasses import replace

from posttrain.recipes.base import Recipe
from posttrain.recipes.gsm8k import gsm8k
from posttrain.stages.base import Stage
from posttrain.stages.evaluate import EvaluateStage
from posttrain.stages.rl import RLStage
from posttrain.tasks.math import Math


def math(
    model: str = "Qwen/Qwen2.5-1.5B-Instruct",
    data: str = "",
    max_level: int = 3,
    steps: int = 100,
    prompts: int = 128,
    group: int = 8,
    lr: float = 3e-6,
    tokens: int = 512,
    problems: int = 500,
    held_out: float = 0.05,
    seconds: float = 0.0,
) -> Recipe:
    """The stages of gsm8k with competition problems of levels 1 to `max_level`. It needs one GPU with 80 GB or more. `model` is a
    hub name, a directory or a GGUF file; `data` a folder with math-train.json and math-500.jsonl, without which the hub's
    copies are read. `seconds` ends RL early.

    The curve is greedy accuracy on a share `held_out` of the training problems, which are not trained on. `before` and `after`
    are greedy answers to the problems of MATH-500 of these levels, and decide nothing.
    """
    words = gsm8k(
        model,
        steps=steps,
        prompts=prompts,
        group=group,
        lr=lr,
        tokens=tokens,
        problems=problems,
        seconds=seconds,
    )
    task, stages = Math(data=data, max_level=max_level), list[Stage]()
    for stage in words.stages:
        assert isinstance(stage, EvaluateStage | RLStage)
        share = held_out if isinstance(stage, RLStage) else 0.0
        stages.append(replace(stage, task=replace(task, held_out=share)))
    return Recipe(tuple(stages), "before", "after", "posttrain run math max_level=5 tokens=1024")
