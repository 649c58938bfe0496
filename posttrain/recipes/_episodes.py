"""Shared by recipes of environments: SFT on a scripted player's episodes, RL in the environment, success before and after."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from posttrain.algorithms.base import Algorithm
from posttrain.algorithms.grpo import GRPO
from posttrain.algorithms.ppo import PPO
from posttrain.recipes._toys import imitating
from posttrain.recipes.base import Recipe, evaluate, falling
from posttrain.stages._material import Data
from posttrain.stages.base import Stage
from posttrain.stages.rl import RLStage
from posttrain.tasks.base import Task
from posttrain.train.optimizer import Optimization
from posttrain.types import Sampling

Name = Literal["grpo", "ppo"]


def episodes(
    name: str,
    size: str,
    task: Task,
    tokens: int,
    *,
    algorithm: Name = "grpo",
    lr: float = 1e-3,
    steps: int = 100,
    prompts: int = 16,
    shown: int = 4000,
    sft_steps: int = 400,
    measured: Mapping[str, Task] | None = None,
    **more: Any,
) -> Recipe:
    """A turn has at most `tokens` tokens. SFT sees `shown` episodes. GRPO samples `prompts` x 16 of them a step; PPO, which
    makes four updates with each, samples half as many, at half the learning rate. Success is measured with samples in
    the task, or in the tasks of `measured`, by the suffixes of their stages' names; `more` is for the RL stage."""
    critic: Optimization | None = None
    chosen: Algorithm = GRPO(group=16, beta=0.0, reduction="token_mean")
    if algorithm == "ppo":
        chosen = PPO(group=16, beta=0.0, epochs=2, mini_batches=2, lam=1.0, critic_warmup=5)
        prompts, lr, critic = prompts // 2, lr / 2, Optimization(lr=1e-3)
    policy = falling(lr)

    def evaluations(when: str, model: str) -> list[Stage]:
        tasks = (measured or {"": task}).items()
        return [evaluate(when + end, model, one, 1000, Sampling(tokens)) for end, one in tasks]

    stages = (
        imitating(size, Data(task=task, counts={0: shown}), steps=sft_steps),
        *evaluations("before", "sft"),
        RLStage(
            name="rl",
            model="sft",
            task=task,
            steps=steps,
            prompts=prompts,
            algorithm=chosen,
            sampling=Sampling(tokens),
            watch_kl=True,
            optimizer=policy,
            critic_optimizer=critic,
            **more,
        ),
        *evaluations("after", "rl"),
    )
    return Recipe(stages, "before", "after", f"posttrain run {name} seed=1")
