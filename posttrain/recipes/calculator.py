"""A small model learns when to call a calculator: for sums that it cannot do alone, and for those alone."""

from __future__ import annotations

from dataclasses import replace

from posttrain.algorithms.grpo import GRPO
from posttrain.recipes.base import Recipe
from posttrain.stages._material import Data
from posttrain.stages.evaluate import EvaluateStage
from posttrain.stages.rl import RLStage
from posttrain.stages.sft import SFTStage
from posttrain.tasks.calculator import CalculatorSums
from posttrain.train.optimizer import Optimization
from posttrain.types import Sampling

TOKENS = 16  # of a turn


def calculator(size: str = "nano") -> Recipe:
    """Half of the sums need only be copied, half have three digits that carry. SFT shows calls and answers by chance; a call costs 0.1,
    so RL keeps those that pay."""
    task = CalculatorSums()
    greedy = Sampling(TOKENS, temperature=0.0)
    before = EvaluateStage(name="before", model="sft", task=task, problems=1000, sampling=greedy)
    stages = (
        SFTStage(
            name="sft",
            model=f"tiny:{size}",
            data=(Data(task=task, counts={0: 4000}),),
            steps=400,
            optimizer=Optimization(lr=3e-3, warmup=20, schedule="cosine"),
        ),
        before,
        RLStage(
            name="rl",
            model="sft",
            task=task,
            steps=100,
            prompts=16,
            algorithm=GRPO(group=16, beta=0.0, reduction="token_mean"),
            sampling=Sampling(max_new_tokens=TOKENS),
            watch_kl=True,
            optimizer=Optimization(lr=1e-3, warmup=10, schedule="linear", final=0.1),
        ),
        replace(before, name="after", model="rl"),
    )
    return Recipe(stages, "before", "after", "posttrain run calculator seed=1")
