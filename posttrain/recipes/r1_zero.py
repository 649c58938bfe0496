"""R1-Zero: pure RL from a base model, with rewards of accuracy and format alone."""

from __future__ import annotations

from posttrain.algorithms.grpo import GRPO
from posttrain.data.curriculum import Curriculum
from posttrain.recipes.base import Recipe
from posttrain.stages._material import Data
from posttrain.stages.evaluate import EvaluateStage
from posttrain.stages.pretrain import PretrainStage
from posttrain.stages.rl import RLStage
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.train.optimizer import Optimization
from posttrain.types import Sampling


def r1_zero(size: str = "nano", steps: int = 400, samples: int = 64) -> Recipe:
    """DeepSeek-R1-Zero on three-digit sums, on a CPU: a base model pretrained on worked sums, most of them easier, then GRPO without
    any fine-tuning between. pass@k of base and trained model up to `samples` tells what RL created and what it only made likelier.
    """
    task = Arithmetic(level=3, format_weight=0.1)
    text = (
        Data(task=Arithmetic(level=2), counts={1: 200, 2: 1000}),
        Data(task=Arithmetic(level=3, carry="none"), counts={3: 1000}),
    )
    measured = {"task": task, "problems": 200, "samples": samples, "sampling": Sampling(40)}
    stages = [
        PretrainStage(
            name="pretrain", model=f"tiny:{size}", data=text, steps=600, batch=32,
            optimizer=Optimization(lr=3e-3, warmup=20, schedule="cosine"),
        ),
        EvaluateStage(name="base", model="pretrain", **measured),
        RLStage(
            name="rl", model="pretrain", task=task, steps=steps, prompts=32, algorithm=GRPO(group=8, beta=0.0, reduction="token_mean"),
            sampling=Sampling(max_new_tokens=32), curriculum=Curriculum(start=2, review=0.1), watch_kl=True,
            optimizer=Optimization(lr=3e-4, warmup=10, schedule="linear", final=0.1),
        ),
        EvaluateStage(name="trained", model="rl", **measured),
    ]  # fmt: skip
    return Recipe(tuple(stages), "base", "trained", "posttrain run r1_zero steps=800")
