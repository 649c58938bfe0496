"""The shape that recipes of small agents share: SFT on the play of a random player, evaluation, RL, evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from posttrain.algorithms.base import Algorithm
from posttrain.algorithms.grpo import GRPO
from posttrain.recipes.base import Recipe
from posttrain.stages._material import Data
from posttrain.stages.evaluate import EvaluateStage
from posttrain.stages.rl import RLStage
from posttrain.stages.sft import SFTStage
from posttrain.tasks.base import Task
from posttrain.train.optimizer import Optimization
from posttrain.types import Sampling


@dataclass(frozen=True, kw_only=True)
class Agent:
    """An agent that begins as a random player. `tokens` is how many a turn may have."""

    task: Task
    tokens: int
    demonstrations: int = 4000
    sft_steps: int = 400
    steps: int = 100
    lr: float = 1e-3
    prompts: int = 16
    algorithm: Algorithm = field(
        default_factory=lambda: GRPO(group=16, beta=0.0, reduction="token_mean")
    )
    evaluated: Task | None = None  # where it is measured on another task than it trains on

    def recipe(self, size: str, command: str) -> Recipe:
        evaluate = EvaluateStage(
            name="before",
            model="sft",
            task=self.evaluated or self.task,
            problems=1000,
            sampling=Sampling(self.tokens, temperature=0.0),
        )
        stages = (
            SFTStage(
                name="sft",
                model=f"tiny:{size}",
                data=(Data(task=self.task, counts={0: self.demonstrations}),),
                steps=self.sft_steps,
                optimizer=Optimization(lr=3e-3, warmup=20, schedule="cosine"),
            ),
            evaluate,
            RLStage(
                name="rl",
                model="sft",
                task=self.task,
                steps=self.steps,
                prompts=self.prompts,
                algorithm=self.algorithm,
                sampling=Sampling(max_new_tokens=self.tokens),
                watch_kl=True,
                optimizer=Optimization(lr=self.lr, warmup=10, schedule="linear", final=0.1),
            ),
            replace(evaluate, name="after", model="rl"),
        )
        return Recipe(stages, "before", "after", command)
