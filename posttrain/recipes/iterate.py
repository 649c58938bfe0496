"""Iterate: rounds of mining problems the model fails, RL on these with the reference moved along, and keeping the best round."""

from __future__ import annotations

from posttrain.algorithms.grpo import GRPO
from posttrain.recipes._toys import SUMS, imitating
from posttrain.recipes.base import Recipe, best_round, repeat
from posttrain.stages.evaluate import EvaluateStage
from posttrain.stages.mine import MineStage
from posttrain.stages.rl import RLStage
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.train.optimizer import Optimization
from posttrain.types import Sampling

PROMPTS = 400  # fresh prompts per round


def iterate(size: str = "nano", rounds: int = 3, steps: int = 100, beta: float = 0.02) -> Recipe:
    """Trains on three-digit sums, on a CPU. A round answers fresh problems and those that the last round failed, scores the
    answers, trains on the problems that fail now, and evaluates on held-out problems; KL is measured from the model at the
    start of the round. The best round is chosen on separate problems, so that the final comparison does not use the problems
    that chose it.
    """
    task, apart = Arithmetic(level=3), Arithmetic(level=3, seed=1)
    greedy = Sampling(40, temperature=0.0)
    stages = [
        imitating(size, *SUMS),
        EvaluateStage(name="before", model="sft", task=task, problems=1000, sampling=greedy),
        *repeat(
            [
                MineStage(
                    name="mine",
                    model="previous train",
                    task=task,
                    prompts=PROMPTS,
                    again="previous mine",
                    sampling=Sampling(32),
                ),
                RLStage(
                    name="train",
                    model="previous train",
                    task=task,
                    problems="mine",
                    steps=steps,
                    prompts=32,
                    algorithm=GRPO(beta=beta, reduction="token_mean"),
                    sampling=Sampling(32),
                    evaluate_every=0,
                    optimizer=Optimization(lr=3e-4, warmup=10, schedule="linear", final=0.1),
                ),
                EvaluateStage(name="check", model="train", task=apart, sampling=greedy),
            ],
            rounds,
            first={"train": "sft", "mine": ""},
            advance={"mine.skip": PROMPTS},
        ),
        best_round("train", "check", rounds, "accuracy"),
        EvaluateStage(name="after", model="best", task=task, problems=1000, sampling=greedy),
    ]
    return Recipe(tuple(stages), "before", "after", "posttrain run iterate rounds=5")
